"""What is learned of costs from measurements that cannot be trusted one by one."""

from __future__ import annotations

import itertools
import json
import math
import random

import pytest

from forerun import ConfigError
from forerun.costs import (
    FIRST_SHARE,
    NEIGHBOUR_STRENGTH,
    SETTLED,
    CostModel,
    Curve,
    Speculation,
    cascaded,
    cost_by_rows,
    cost_by_slope,
)


def settled(slope: float, seconds: dict[int, float]) -> Curve:
    curve = Curve(slope)
    for _ in range(SETTLED):
        for size, cost in seconds.items():
            curve.add(size, cost)
    return curve


def test_curve_interpolates_and_hopes() -> None:
    assert Curve(slope=0.1).at(3) is None
    curve = settled(0.1, {2: 1.0, 6: 3.0})
    assert [curve.at(size) for size in (1, 2, 4, 6)] == pytest.approx([1.0, 1.0, 2.0, 3.0])
    assert curve.at(8) == pytest.approx(3.0 * 1.2)


def test_a_pass_costs_at_most_what_as_many_passes_cost() -> None:
    assert settled(0.02, {1: 0.01, 5: 0.5}).at(5) == pytest.approx(0.05)


def test_several_cold_measurements_are_forgotten_at_the_first_warm_one() -> None:
    """On a GPU the first passes of a size load their kernels; its cost is found in spite of that."""
    model = CostModel()
    for _ in range(10):
        model.add_forward(1, 0.010)
    for seconds in (0.5, 0.3, 0.3):
        assert model.is_cold(3) == (model._forwards.count.get(3, 0) <= 2)
        model.add_forward(3, seconds)
    assert not model.is_cold(3) and model.forward(3) > 0.02
    model.add_forward(3, 0.011)
    model.add_forward(3, 0.011)
    assert model.forward(3) / model.forward(1) < 1.3


def test_rows_that_were_never_measured_cost_what_the_tokens_of_prompts_cost() -> None:
    """A roofline: at least the smallest pass, and from then on in proportion. Prompts whose passes
    are bound by memory, a single cold one, and a machine that runs them otherwise say nothing."""

    def model(*prefills: tuple[int, float], predicts: bool = True) -> CostModel:
        costs = CostModel()
        costs.prompts_predict = predicts
        for _ in range(SETTLED):
            costs.add_forward(4, 1.0)
        for tokens, seconds in prefills:
            costs.add_prefill(tokens, seconds)
        return costs

    known = model((64, 8.0), (64, 8.0), (512, 76.8), (512, 76.8))
    assert [known.forward(rows) for rows in (4, 8, 12, 16)] == pytest.approx([1, 1, 1.5, 2])
    loaded = CostModel()
    loaded.prompts_predict = True
    known.add_prefill(512, 76.8)
    loaded.load_state(known.state())
    assert loaded.forward(16) == pytest.approx(2)
    unknown = model()
    for other in (
        model((64, 8.0)),
        model((9, 1.9), (9, 1.9)),
        model((64, 8.0), (64, 8.0), predicts=False),
    ):
        assert other.forward(16) == unknown.forward(16) < 1.3
    for _ in range(2):
        known.add_prefill(1024, 102.4)
    assert known.forward(16) == pytest.approx(1.6), "what longer prompts show is believed at once"
    known.set_trend(lambda rows: 1 + rows)
    assert known.forward(9) == pytest.approx(2), "what is known of experts goes first"


def test_a_first_measurement_is_believed_in_part_and_bounds_the_second() -> None:
    curve = Curve(slope=0.02)
    curve.add(1, 1.0)
    assert curve.at(1) == pytest.approx(FIRST_SHARE)
    curve.add(1, 0.5)
    assert curve.at(1) == pytest.approx(0.5)
    curve.add(1, 50.0)  # a spike is bounded, and then one of three
    assert curve.at(1) == pytest.approx(0.5 * 1.5 ** (1 / 3))


def test_a_size_leans_on_those_below_until_it_has_settled() -> None:
    curve = settled(0.1, {1: 1.0})
    curve.add(3, 2.0)
    curve.add(3, 2.0)
    assert curve.at(3) == pytest.approx(
        (2 * 2.0 + NEIGHBOUR_STRENGTH * 1.2) / (2 + NEIGHBOUR_STRENGTH)
    )
    for _ in range(SETTLED - 2):
        curve.add(3, 2.0)
    assert curve.at(3) == pytest.approx(2.0)


def test_more_is_not_believed_to_cost_less_before_it_has_settled() -> None:
    """Else a single measurement, believed in part, would pay without any acceptance."""
    curve = settled(0.02, {1: 1.0})
    curve.add(2, 1.0)
    assert curve.at(2) == 1.0


def test_less_is_not_believed_to_cost_more_than_what_has_settled() -> None:
    """Else a plain pass first measured in a bad moment would never be measured again."""
    curve = settled(0.02, {2: 1.0})
    for _ in range(2):
        curve.add(1, 5.0)
    assert curve.at(1) == curve.at(2) == 1.0


def test_a_slow_spell_of_the_machine_does_not_make_the_size_it_met_dear() -> None:
    """Everything takes twice as long from now on, and only one size is measured then."""
    costs = CostModel()
    for _ in range(20):
        costs.add_forward(1, 1.0)
        costs.add_forward(5, 1.5)
        costs.add_draft("model", 4, 0.2)
    for _ in range(60):
        costs.add_forward(5, 3.0)
    assert 1.5 < costs.forward(5) / costs.forward(1) < 2.0  # 3 if the pace were not known
    passes, drafts = costs.seconds()
    assert passes[5] == pytest.approx(3.0, rel=0.05)
    assert 1.5 < passes[1] < 2.0
    assert 0.3 < drafts["model"][4] < 0.4


def test_ratios_hold_while_the_speed_drifts() -> None:
    dice, costs = random.Random(0), CostModel()
    for step in range(4000):
        speed = math.exp(0.5 * math.sin(step / 200) + dice.gauss(0, 0.1))
        size = 1 if step % 10 else 5  # plain passes are measured nine times as often
        costs.add_forward(size, speed * (1 + 0.2 * (size - 1)))
    assert costs.forward(5) / costs.forward(1) == pytest.approx(1.8, rel=0.1)


def test_a_busy_server_sees_thousands_of_sizes_once_each() -> None:
    costs = CostModel()
    for size in random.Random(0).sample(range(1, 3000), 2999):
        costs.add_forward(size, 1 + 0.01 * size)
    assert 0.9 * 21 < costs.forward(2000) < 1.1 * 21
    assert len(costs.seconds()[0]) < 100
    assert costs.forward(1) == pytest.approx(FIRST_SHARE * 1.01, rel=0.05)


def test_drafting_for_many_at_once_is_another_matter_than_for_one() -> None:
    costs = CostModel()
    for _ in range(SETTLED):
        costs.add_draft("model", 2, 1.0)
        costs.add_draft("model", 2, 6.0, num_requests=20)
    assert costs.draft("model", 2) == pytest.approx(1.0)
    assert costs.draft("model", 2, 15) == pytest.approx(1.0)  # the most below that was measured
    assert costs.draft("model", 2, 30) == pytest.approx(6.0)
    assert costs.seconds()[1] == {"model": {2: pytest.approx(1.0)}}


def test_a_clock_that_stands_still_is_no_error() -> None:
    costs = CostModel()
    for _ in range(5):
        costs.add_forward(1, 0.0)
        costs.add_draft("model", 1, 0.0)
    assert costs.forward(1) > 0 and costs.draft("model", 1) > 0 and costs.speed_factor > 0


def test_nothing_measured_is_no_error() -> None:
    costs = CostModel()
    assert not costs.known(4, 1)
    assert costs.forward(3) == 1.0
    assert costs.draft("model", 2) == pytest.approx(0.2)
    costs.add_forward(5, 1.0)
    assert not costs.known(4, 1) and costs.known(5, 1) and not costs.known(9, 2)
    costs.add_forward(8, 1.0)  # no size was seen twice
    assert costs.known(9, 2) and not costs.known(7, 2)
    assert costs.catch_up("model", 100) == 0.0 and costs.seconds()[1] == {}


def test_what_is_read_before_a_draft_is_no_cost_of_drafting() -> None:
    """Long prompts show what reading a token takes, which is taken out of drafts."""
    costs = CostModel()
    costs.add_forward(1, 1.0)
    for _ in range(10):
        costs.add_draft("model", 2, 0.2)
        costs.add_draft("model", 2, 10.2, lag=1000)
    assert costs.catch_up("model", 50) == pytest.approx(0.5, rel=0.01)
    for _ in range(10):
        costs.add_draft("model", 2, 0.25, lag=5)
    assert costs.draft("model", 2) == pytest.approx(0.2, rel=0.01)
    assert costs.catch_up("suffix", 50) == 0.0
    other = CostModel()
    other.load_state(json.loads(json.dumps(costs.state())))
    assert other.catch_up("model", 50) == pytest.approx(
        costs.catch_up("model", 50) * costs.speed_factor
    )


@pytest.mark.parametrize(
    "lag", [(0.0, 5), (1.0, 0), (1e9, 5), (1.0, 1e12), (float("nan"), 5), ("a", 5), (1.0,), 3]
)
def test_what_was_never_written_of_lags_is_refused(lag: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        CostModel().load_state(CostModel().state() | {"catch_ups": {"model": lag}})


def test_as_many_tokens_are_read_as_there_is_time_for() -> None:
    """Any number while nothing is known, then in proportion, and never as many as took longer."""
    costs = CostModel()
    assert costs.within(0.1) > 60_000
    for _ in range(SETTLED):
        costs.add_prefill(512, 0.512)
    assert costs.within(0.1) == 0 and 900 <= costs.within(1.0) <= 1024
    for _ in range(SETTLED):
        costs.add_prefill(16, 0.02)
    assert 70 <= costs.within(0.1) <= 100 and costs.within(0.51) < 512 <= costs.within(0.52)
    other = CostModel()
    other.load_state(costs.state())
    assert other.within(0.1) == costs.within(0.1)


# The speed-up formulas against enumeration of all outcomes, a simulation, and published values.


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
