"""The calculator against exact enumeration of everything that can happen in a round, and against
published tables."""

import itertools
import math

import pytest

from forerun import ConfigError
from forerun.measure.speedup import (
    Speculation,
    cascaded,
    cost_by_rows,
    cost_by_slope,
    expected_tokens,
    level_chances,
    played,
)


@pytest.mark.parametrize("chances", [[0.8], [0.9, 0.5, 0.7], [1.0, 0.3], [0.0]])
def test_chains_against_every_outcome(chances: list[float]) -> None:
    """Each level's drafted token is accepted or not; the tokens of an outcome are those before the
    first refusal."""
    for depth in range(6):
        by_level = [chances[min(i, len(chances) - 1)] for i in range(depth)]
        mean = 0.0
        for outcome in itertools.product((True, False), repeat=depth):
            weight = math.prod(a if ok else 1 - a for a, ok in zip(by_level, outcome, strict=True))
            mean += weight * (1 + [*outcome, False].index(False))
        assert expected_tokens(Speculation(acceptance=chances), depth) == pytest.approx(
            mean, abs=1e-12
        )


@pytest.mark.parametrize("ranks", [[0.6, 0.2], [0.5, 0.3, 0.1], [0.4, 0.4], [0.9, 0.05, 0.05]])
def test_trees_against_every_outcome(ranks: list[float]) -> None:
    """At each level the target's token is the draft's choice number r, or none. The tree: of all
    paths of a length, the likeliest `width`."""
    width = len(ranks)
    speculation = Speculation(acceptance=ranks[:1], siblings=ranks[1:])
    for depth in range(1, 4):
        tree = set()
        for level in range(1, depth + 1):
            paths = itertools.product(range(width), repeat=level)
            tree |= set(sorted(paths, key=lambda path: -math.prod(ranks[r] for r in path))[:width])
        mean = 0.0
        for outcome in itertools.product(
            range(width + 1), repeat=depth
        ):  # `width` stands for none of them
            weight = math.prod([*ranks, 1 - sum(ranks)][r] for r in outcome)
            longest = max((n for n in range(1, depth + 1) if outcome[:n] in tree), default=0)
            mean += weight * (1 + longest)
        assert expected_tokens(speculation, depth) == pytest.approx(mean, abs=1e-12)


def test_a_tree_of_one_choice_is_a_chain() -> None:
    assert level_chances(Speculation(acceptance=[0.7], siblings=[0.0]), 5) == level_chances(
        Speculation(acceptance=[0.7]), 5
    )


@pytest.mark.parametrize(
    ("a", "c", "depth", "speedup"),
    [
        (0.6, 0.01, 7, 2.30),
        (0.7, 0.05, 6, 2.35),
        (0.8, 0.1, 6, 2.47),
        (0.9, 0.2, 7, 2.37),
        (0.9, 0.01, 24, 7.49),
    ],
)
def test_the_optimum_of_draft_models(a: float, c: float, depth: int, speedup: float) -> None:
    """Leviathan et al.'s theorem 3.8 at its maximum over depths, computed by hand elsewhere."""
    best = Speculation(acceptance=[a], draft_cost=c).best()
    assert (best.depth, round(best.speedup, 2)) == (depth, speedup)
    assert best.speedup == pytest.approx((1 - a ** (depth + 1)) / ((1 - a) * (1 + c * depth)))


@pytest.mark.parametrize(
    ("a", "v", "depth", "speedup"),
    [(0.6, 0.01, 7, 2.10), (0.8, 0.05, 8, 2.89), (0.9, 0.01, 25, 6.93)],
)
def test_the_optimum_of_one_pass_drafters(a: float, v: float, depth: int, speedup: float) -> None:
    best = Speculation(acceptance=[a], fixed_cost=0.1, verify_cost=cost_by_slope(v)).best()
    assert (best.depth, round(best.speedup, 2)) == (depth, speedup)


def test_a_draft_model_that_is_drafted_for() -> None:
    """A level costs less by what the model's own speculation gives it, and as before where that
    gives nothing."""
    inner = Speculation(acceptance=[0.8], draft_cost=0.2)
    depth, cost = cascaded(0.4, inner)
    assert depth == inner.best().depth > 0 and cost == pytest.approx(0.4 / inner.best().speedup)
    assert cascaded(0.4, Speculation(acceptance=[0.1], draft_cost=0.2)) == (0, 0.4)


def test_no_gain_is_no_draft() -> None:
    """A speed-up exists only where acceptance is over the cost of a drafted token."""
    assert Speculation(acceptance=[0.3], draft_cost=0.31).best().depth == 0
    assert Speculation(acceptance=[0.3], draft_cost=0.29).best().depth == 1
    plain = Speculation(acceptance=[0.3], fixed_cost=5.0).at(0)
    assert (plain.tokens, plain.cost, plain.speedup) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("hits", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize(("cost", "depth"), [(0.02, 6), (0.1, 4), (0.1, 7), (0.3, 3)])
def test_drafting_ahead_is_what_the_formula_says(hits: float, cost: float, depth: int) -> None:
    """Within 5 % of a machine played round by round where drafts are done in time: it also reads
    each draft, and ends the level that it is in. Where the drafter is the slower one that counts,
    and the formula promises up to a level too much."""
    speculation = Speculation(
        acceptance=[0.8], draft_cost=cost, verify_cost=cost_by_slope(0.02), foreseen=hits
    )
    forecast, play = speculation.at(depth), played(speculation, depth)
    assert play <= forecast.speedup * 1.01
    if cost * (depth + 1) <= 1:
        assert play == pytest.approx(forecast.speedup, rel=0.05)
    alone = (
        Speculation(acceptance=[0.8], draft_cost=cost, verify_cost=cost_by_slope(0.02))
        .at(depth)
        .speedup
    )
    assert forecast.speedup == pytest.approx(alone) if not hits else forecast.speedup > alone


def test_many_requests_share_a_pass() -> None:
    cost = cost_by_rows({1: 2.0, 8: 2.2, 16: 3.0})
    assert [cost(n) for n in (1, 8, 16)] == pytest.approx([1.0, 1.1, 1.5]) and cost(
        24
    ) == pytest.approx(1.9)
    alone, many = (
        Speculation(acceptance=[0.8], verify_cost=cost, requests=n).at(3) for n in (1, 4)
    )
    assert (alone.rows, many.rows) == (4, 16)
    assert (
        many.speedup == pytest.approx(many.tokens * cost(4) / cost(16))
        and many.speedup < alone.speedup
    )


@pytest.mark.parametrize(
    "options",
    [
        {"acceptance": []}, {"acceptance": [1.2]}, {"acceptance": [float("nan")]},
        {"acceptance": [0.7], "siblings": [0.4]}, {"acceptance": [0.7], "draft_cost": -1},
        {"acceptance": [0.7], "draft_cost": float("nan")}, {"acceptance": [0.7], "requests": 0},
    ],
)  # fmt: skip
def test_what_makes_no_sense(options: dict) -> None:
    with pytest.raises(ConfigError):
        Speculation(**options)


def test_costs_that_make_no_sense() -> None:
    for points in ({}, {2: 1.0}, {1: 0.0}, {1: 1.0, 4: float("nan")}):
        with pytest.raises(ConfigError):
            cost_by_rows(points)
    with pytest.raises(ConfigError):
        cost_by_slope(-0.1)
