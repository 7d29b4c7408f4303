"""The speed-up formulas against enumeration of all outcomes, a simulation, and published values."""

import itertools
import math
import random

import pytest

from forerun import ConfigError
from forerun.costs import Speculation, cascaded, cost_by_rows, cost_by_slope


@pytest.mark.parametrize("chances", [[0.8], [0.9, 0.5, 0.7], [1.0, 0.3], [0.0]])
def test_chains_against_every_outcome(chances: list[float]) -> None:
    """Each drafted token is accepted or not; tokens of an outcome end at the first rejection."""
    for depth in range(6):
        by_level = [chances[min(i, len(chances) - 1)] for i in range(depth)]
        mean = 0.0
        for outcome in itertools.product((True, False), repeat=depth):
            weight = math.prod(a if ok else 1 - a for a, ok in zip(by_level, outcome, strict=True))
            mean += weight * (1 + [*outcome, False].index(False))
        assert Speculation(acceptance=chances).at(depth).tokens == pytest.approx(mean, abs=1e-12)


@pytest.mark.parametrize("ranks", [[0.6, 0.2], [0.5, 0.3, 0.1], [0.4, 0.4], [0.9, 0.05, 0.05]])
def test_trees_against_every_outcome(ranks: list[float]) -> None:
    """The target's token is the draft's choice number r, or none; the likeliest paths are kept."""
    width = len(ranks)
    speculation = Speculation(acceptance=ranks[:1], siblings=ranks[1:])
    for depth in range(1, 4):
        tree = set()
        for level in range(1, depth + 1):
            paths = itertools.product(range(width), repeat=level)
            likeliest = sorted(paths, key=lambda path: -math.prod(ranks[r] for r in path))
            tree |= set(likeliest[:width])
        mean = 0.0
        for outcome in itertools.product(range(width + 1), repeat=depth):  # `width`: none of them
            weight = math.prod([*ranks, 1 - sum(ranks)][r] for r in outcome)
            longest = max((n for n in range(1, depth + 1) if outcome[:n] in tree), default=0)
            mean += weight * (1 + longest)
        assert speculation.at(depth).tokens == pytest.approx(mean, abs=1e-12)


@pytest.mark.parametrize(
    ("a", "c", "depth", "speedup"),
    [
        *((0.6, 0.01, 7, 2.30), (0.7, 0.05, 6, 2.35), (0.8, 0.1, 6, 2.47)),
        *((0.9, 0.2, 7, 2.37), (0.9, 0.01, 24, 7.49)),
    ],
)
def test_the_optimum_of_draft_models(a: float, c: float, depth: int, speedup: float) -> None:
    """Theorem 3.8 of Leviathan et al. at its maximum."""
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
    inner = Speculation(acceptance=[0.8], draft_cost=0.2)
    depth, cost = cascaded(0.4, inner)
    assert depth == inner.best().depth > 0
    assert cost == pytest.approx(0.4 / inner.best().speedup)
    assert cascaded(0.4, Speculation(acceptance=[0.1], draft_cost=0.2)) == (0, 0.4)


def test_no_gain_is_no_draft() -> None:
    """There is a speed-up only if acceptance exceeds the cost of a drafted token."""
    assert Speculation(acceptance=[0.3], draft_cost=0.31).best().depth == 0
    assert Speculation(acceptance=[0.3], draft_cost=0.29).best().depth == 1
    plain = Speculation(acceptance=[0.3], fixed_cost=5.0).at(0)
    assert (plain.tokens, plain.cost, plain.speedup) == (1.0, 1.0, 1.0)


def simulate(speculation: Speculation, depth: int, rounds: int = 20_000) -> float:
    """Return the speed-up of asynchronous drafting, simulated step by step.

    While the target verifies, the drafter reads its draft and drafts behind the likely outcomes,
    level by level. If the verdict was anticipated, the next verification starts once the draft is
    complete; otherwise it is drafted anew, after the level that the drafter is working on.
    """
    rng = random.Random(0)
    clock = 0.0
    tokens = 0
    verify = speculation.verify_cost(1 + depth)
    level = speculation.draft_cost
    chances = speculation.level_chances(depth)
    for _ in range(rounds):
        draw = rng.random()
        tokens += 1 + sum(draw < chance for chance in chances)
        ahead = level * (depth + 1)
        if rng.random() < (speculation.foreseen or 0.0):
            clock += max(verify, ahead)
        else:
            busy = min(math.ceil(verify / level) * level, ahead)
            clock += max(verify, busy) + level * depth
    return tokens * speculation.verify_cost(1) / clock


@pytest.mark.parametrize("hits", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize(("cost", "depth"), [(0.02, 6), (0.1, 4), (0.1, 7), (0.3, 3)])
def test_asynchronous_drafting(hits: float, cost: float, depth: int) -> None:
    """Within 5 % of a simulation where drafts are complete in time, and never below it."""
    verify = cost_by_slope(0.02)
    options = {"acceptance": [0.8], "draft_cost": cost, "verify_cost": verify}
    speculation = Speculation(**options, foreseen=hits)
    forecast = speculation.at(depth).speedup
    simulated = simulate(speculation, depth)
    assert simulated <= forecast * 1.01
    if cost * (depth + 1) <= 1:
        assert simulated == pytest.approx(forecast, rel=0.05)
    alone = Speculation(**options).at(depth).speedup
    assert forecast == pytest.approx(alone) if not hits else forecast > alone


def test_many_requests_share_a_pass() -> None:
    cost = cost_by_rows({1: 2.0, 8: 2.2, 16: 3.0})
    assert [cost(n) for n in (1, 8, 16, 24)] == pytest.approx([1.0, 1.1, 1.5, 1.9])
    alone, many = (
        Speculation(acceptance=[0.8], verify_cost=cost, requests=n).at(3) for n in (1, 4)
    )
    assert (alone.rows, many.rows) == (4, 16) and many.speedup < alone.speedup
    assert many.speedup == pytest.approx(many.tokens * cost(4) / cost(16))


def test_invalid_values() -> None:
    nan = float("nan")
    for options in (
        *({"acceptance": []}, {"acceptance": [1.2]}, {"acceptance": [nan]}),
        *({"siblings": [0.4]}, {"draft_cost": -1}, {"draft_cost": nan}, {"requests": 0}),
    ):
        with pytest.raises(ConfigError):
            Speculation(**({"acceptance": [0.7]} | options))
    for points in ({}, {2: 1.0}, {1: 0.0}, {1: 1.0, 4: nan}):
        with pytest.raises(ConfigError):
            cost_by_rows(points)
    with pytest.raises(ConfigError):
        cost_by_slope(-0.1)
