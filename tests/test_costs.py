"""The cost model, which learns from noisy measurements, and the speed-up formulas."""

from __future__ import annotations

import itertools
import json
import math
import random

import pytest

from forerun import ConfigError
from forerun.costs import (
    FIRST_SHARE,
    LEVEL_SHARE,
    NEIGHBOUR_STRENGTH,
    SETTLED,
    CostModel,
    Curve,
    Speculation,
    cascaded,
    cost_by_rows,
    cost_by_slope,
)


def settled_curve(slope: float, seconds: dict[int, float]) -> Curve:
    curve = Curve(slope)
    for _ in range(SETTLED):
        for size, cost in seconds.items():
            curve.add(size, cost)
    return curve


def test_a_curve_interpolates_and_extrapolates_with_its_slope() -> None:
    assert Curve(slope=0.1).at(3) is None
    curve = settled_curve(0.1, {2: 1.0, 6: 3.0})
    assert [curve.at(size) for size in (1, 2, 4, 6)] == pytest.approx([1.0, 1.0, 2.0, 3.0])
    assert curve.at(8) == pytest.approx(3.0 * 1.2)


def test_n_rows_cost_at_most_n_single_forward_passes() -> None:
    assert settled_curve(0.02, {1: 0.01, 5: 0.5}).at(5) == pytest.approx(0.05)


def test_cold_measurements_are_replaced_by_the_first_warm_one() -> None:
    """On a GPU the first forward passes of a size also load kernels."""
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


def test_prefill_costs_predict_the_cost_of_unmeasured_rows() -> None:
    """The prediction is a roofline: constant, then proportional. Prompts bound by memory and
    hardware with other prefill kernels do not count, and a single cold prompt counts in part."""

    def model(*prefills: tuple[int, float], predicts: bool = True) -> CostModel:
        costs = CostModel()
        costs.prompts_predict = predicts
        for _ in range(SETTLED):
            costs.add_forward(4, 1.0)
        for tokens, seconds in prefills:
            costs.add_prefill(tokens, seconds)
        return costs

    measured = model((64, 8.0), (64, 8.0), (512, 76.8), (512, 76.8))
    assert [measured.forward(rows) for rows in (4, 8, 12, 16)] == pytest.approx([1, 1, 1.5, 2])
    restored = CostModel()
    restored.prompts_predict = True
    measured.add_prefill(512, 76.8)
    restored.load_state(measured.state())
    assert restored.forward(16) == pytest.approx(2)
    unmeasured = model()
    assert model((64, 16.0)).forward(16) == pytest.approx(16 * FIRST_SHARE * 16.0 / 64)
    for other in (
        model((9, 1.9), (9, 1.9)),
        model((64, 8.0), (64, 8.0), predicts=False),
    ):
        assert other.forward(16) == unmeasured.forward(16) < 1.3
    for _ in range(2):
        measured.add_prefill(1024, 102.4)
    assert measured.forward(16) == pytest.approx(1.6), "longer prompts have full weight immediately"
    measured.set_trend(lambda rows: 1 + rows)
    assert measured.forward(9) == pytest.approx(2), "a known trend of experts has priority"


def test_the_first_measurement_has_partial_weight_and_bounds_the_second() -> None:
    curve = Curve(slope=0.02)
    curve.add(1, 1.0)
    assert curve.at(1) == pytest.approx(FIRST_SHARE)
    curve.add(1, 0.5)
    assert curve.at(1) == pytest.approx(0.5)
    curve.add(1, 50.0)  # an outlier is bounded, and then one of three
    assert curve.at(1) == pytest.approx(0.5 * 1.5 ** (1 / 3))


def test_an_unsettled_size_is_averaged_with_smaller_sizes() -> None:
    curve = settled_curve(0.1, {1: 1.0})
    curve.add(3, 2.0)
    curve.add(3, 2.0)
    assert curve.at(3) == pytest.approx(
        (2 * 2.0 + NEIGHBOUR_STRENGTH * 1.2) / (2 + NEIGHBOUR_STRENGTH)
    )
    for _ in range(SETTLED - 2):
        curve.add(3, 2.0)
    assert curve.at(3) == pytest.approx(2.0)


def test_a_larger_unsettled_size_does_not_cost_less() -> None:
    """Otherwise one measurement with partial weight would suggest drafts without acceptance."""
    curve = settled_curve(0.02, {1: 1.0})
    curve.add(2, 1.0)
    assert curve.at(2) == 1.0


def test_a_smaller_unsettled_size_does_not_cost_more_than_a_settled_one() -> None:
    """Otherwise plain decoding, if first measured too slow, would never be measured again."""
    curve = settled_curve(0.02, {2: 1.0})
    for _ in range(2):
        curve.add(1, 5.0)
    assert curve.at(1) == curve.at(2) == 1.0


def test_a_slow_period_does_not_distort_the_cost_of_one_size() -> None:
    """Everything becomes twice as slow, and only one size is measured from then on."""
    costs = CostModel()
    for _ in range(20):
        costs.add_forward(1, 1.0)
        costs.add_forward(5, 1.5)
        costs.add_draft("model", 4, 0.2)
    for _ in range(60):
        costs.add_forward(5, 3.0)
    assert 1.5 < costs.forward(5) / costs.forward(1) < 2.0  # 3 without the speed factor
    passes, drafts = costs.seconds()
    assert passes[5] == pytest.approx(3.0, rel=0.05)
    assert 1.5 < passes[1] < 2.0
    assert 0.3 < drafts["model"][4] < 0.4


def test_cost_ratios_are_stable_while_the_speed_drifts() -> None:
    rng = random.Random(0)
    costs = CostModel()
    for step in range(4000):
        speed = math.exp(0.5 * math.sin(step / 200) + rng.gauss(0, 0.1))
        size = 1 if step % 10 else 5  # plain decoding is measured nine times as often
        costs.add_forward(size, speed * (1 + 0.2 * (size - 1)))
    assert costs.forward(5) / costs.forward(1) == pytest.approx(1.8, rel=0.1)


def test_thousands_of_sizes_measured_once_each() -> None:
    costs = CostModel()
    for size in random.Random(0).sample(range(1, 3000), 2999):
        costs.add_forward(size, 1 + 0.01 * size)
    assert 0.9 * 21 < costs.forward(2000) < 1.1 * 21
    assert len(costs.seconds()[0]) < 100
    assert costs.forward(1) == pytest.approx(FIRST_SHARE * 1.01, rel=0.05)


def test_draft_costs_depend_on_the_number_of_requests() -> None:
    costs = CostModel()
    for _ in range(SETTLED):
        costs.add_draft("model", 2, 1.0)
        costs.add_draft("model", 2, 6.0, num_requests=20)
    assert costs.draft("model", 2) == pytest.approx(1.0)
    assert costs.draft("model", 2, 15) == pytest.approx(1.0)  # the largest measured number below
    assert costs.draft("model", 2, 30) == pytest.approx(6.0)
    assert costs.seconds()[1] == {"model": {2: pytest.approx(1.0)}}


def test_measured_times_of_zero_are_valid() -> None:
    costs = CostModel()
    for _ in range(5):
        costs.add_forward(1, 0.0)
        costs.add_draft("model", 1, 0.0)
    assert costs.forward(1) > 0 and costs.draft("model", 1) > 0 and costs.speed_factor > 0


def test_defaults_without_measurements() -> None:
    costs = CostModel()
    assert not costs.known(4, 1)
    assert costs.forward(3) == 1.0
    assert costs.draft("model", 2) == pytest.approx(0.2)
    costs.add_forward(5, 1.0)
    assert not costs.known(4, 1) and costs.known(5, 1) and not costs.known(9, 2)
    costs.add_forward(8, 1.0)  # no size was measured twice
    assert costs.known(9, 2) and not costs.known(7, 2)
    assert costs.catch_up("model", 100) == 0.0 and costs.seconds()[1] == {}


def test_catching_up_is_not_part_of_the_draft_cost() -> None:
    """Long prompts show the cost of processing a token, which is subtracted from drafts."""
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


def test_catching_up_is_expected_to_cost_a_share_of_the_targets_reading_until_measured() -> None:
    costs = CostModel()
    costs.reading_shares = {"model": 0.25}
    assert costs.catch_up("model", 1000) == 0.0, "nothing was read yet"
    for _ in range(3):
        costs.add_prefill(512, 512.0)
    assert costs.catch_up("model", 1000) == pytest.approx(250.0)
    assert costs.catch_up("model", 0) == costs.catch_up("suffix", 1000) == 0.0
    costs.add_draft("model", 2, 100.0, lag=1000)  # a first time is all reading, whatever expected
    assert costs.catch_up("model", 1000) == pytest.approx(100.0, rel=0.01)


def test_a_level_is_expected_to_cost_what_its_weights_tell_until_measured() -> None:
    costs = CostModel()
    costs.reading_shares = {"model": 0.4}
    assert costs.draft("model", 3) == pytest.approx(1.2)
    assert costs.draft("other", 3) == pytest.approx(3 * LEVEL_SHARE)
    costs.add_draft("model", 3, 0.6)
    costs.add_draft("model", 3, 0.6)
    assert costs.draft("model", 3) == pytest.approx(0.6)


@pytest.mark.parametrize(
    "lag", [(0.0, 5), (1.0, 0), (1e9, 5), (1.0, 1e12), (float("nan"), 5), ("a", 5), (1.0,), 3]
)
def test_invalid_stored_catch_up_costs_are_refused(lag: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        CostModel().load_state(CostModel().state() | {"catch_ups": {"model": lag}})


def test_step_overhead_is_a_mean_per_request_and_is_stored() -> None:
    costs = CostModel()
    assert costs.step_overhead == 0
    for seconds in (4.0, 8.0):
        costs.add_step_overhead(seconds, 4)
    assert costs.step_overhead == pytest.approx(1.5)
    other = CostModel()
    other.load_state(json.loads(json.dumps(costs.state())))
    assert other.step_overhead == pytest.approx(1.5)
    for _ in range(200):
        other.add_step_overhead(2.0, 4)
    assert other.step_overhead == pytest.approx(0.5, rel=0.01)
    for invalid in (-1.0, float("nan"), 1e9, "a", None):
        with pytest.raises((ValueError, TypeError)):
            CostModel().load_state(costs.state() | {"step_overhead": invalid})


def test_within_gives_the_prefill_tokens_that_fit_a_time() -> None:
    """It is unbounded without measurements, then proportional, and below sizes that took longer."""
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


# Speed-up formulas, compared with all outcomes, a simulation and published values.


@pytest.mark.parametrize("acceptance", [[0.8], [0.9, 0.5, 0.7], [1.0, 0.3], [0.0]])
def test_tokens_of_chains_equal_an_enumeration_of_outcomes(acceptance: list[float]) -> None:
    """Each drafted token is accepted or not; an outcome ends at the first rejection."""
    for depth in range(6):
        by_level = [acceptance[min(i, len(acceptance) - 1)] for i in range(depth)]
        mean = 0.0
        for outcome in itertools.product((True, False), repeat=depth):
            weight = math.prod(a if ok else 1 - a for a, ok in zip(by_level, outcome, strict=True))
            mean += weight * (1 + [*outcome, False].index(False))
        assert Speculation(acceptance=acceptance).at(depth).tokens == pytest.approx(mean, abs=1e-12)


@pytest.mark.parametrize("ranks", [[0.6, 0.2], [0.5, 0.3, 0.1], [0.4, 0.4], [0.9, 0.05, 0.05]])
def test_tokens_of_trees_equal_an_enumeration_of_outcomes(ranks: list[float]) -> None:
    """The target's token is the draft's r-th choice or none; the likeliest paths are drafted."""
    width = len(ranks)
    speculation = Speculation(acceptance=ranks[:1], siblings=ranks[1:])
    for depth in range(1, 4):
        tree = set()
        for level in range(1, depth + 1):
            paths = itertools.product(range(width), repeat=level)
            likeliest = sorted(paths, key=lambda path: -math.prod(ranks[r] for r in path))
            tree |= set(likeliest[:width])
        mean = 0.0
        for outcome in itertools.product(range(width + 1), repeat=depth):  # `width` means none
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


def test_a_cascade_lowers_the_cost_of_its_draft_model() -> None:
    inner = Speculation(acceptance=[0.8], draft_cost=0.2)
    depth, cost = cascaded(0.4, inner)
    assert depth == inner.best().depth > 0
    assert cost == pytest.approx(0.4 / inner.best().speedup)
    assert cascaded(0.4, Speculation(acceptance=[0.1], draft_cost=0.2)) == (0, 0.4)


def test_the_best_depth_without_a_gain_is_zero() -> None:
    """There is a speed-up only if the acceptance exceeds the cost of a drafted token."""
    assert Speculation(acceptance=[0.3], draft_cost=0.31).best().depth == 0
    assert Speculation(acceptance=[0.3], draft_cost=0.29).best().depth == 1
    plain = Speculation(acceptance=[0.3], fixed_cost=5.0).at(0)
    assert (plain.tokens, plain.cost, plain.speedup) == (1.0, 1.0, 1.0)


def simulate(speculation: Speculation, depth: int, rounds: int = 20_000) -> float:
    """Return the speed-up of asynchronous drafting, simulated step by step.

    While the target verifies, the drafter continues its draft after the likely outcomes, level by
    level. If the verdict was anticipated, the next verification starts when the draft is complete;
    otherwise drafting starts again after the current level.
    """
    rng = random.Random(0)
    clock = 0.0
    tokens = 0
    verify = speculation.verify_cost(1 + depth)
    level = speculation.draft_cost
    acceptance = speculation.level_chances(depth)
    for _ in range(rounds):
        draw = rng.random()
        tokens += 1 + sum(draw < chance for chance in acceptance)
        continuation = level * (depth + 1)
        if rng.random() < (speculation.foreseen or 0.0):
            clock += max(verify, continuation)
        else:
            busy = min(math.ceil(verify / level) * level, continuation)
            clock += max(verify, busy) + level * depth
    return tokens * speculation.verify_cost(1) / clock


@pytest.mark.parametrize("hits", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize(("cost", "depth"), [(0.02, 6), (0.1, 4), (0.1, 7), (0.3, 3)])
def test_asynchronous_drafting_in_a_simulation(hits: float, cost: float, depth: int) -> None:
    """The estimate is within 5 % if drafts are complete in time, and never below the simulation."""
    verify = cost_by_slope(0.02)
    options = {"acceptance": [0.8], "draft_cost": cost, "verify_cost": verify}
    speculation = Speculation(**options, foreseen=hits)
    estimate = speculation.at(depth).speedup
    simulated = simulate(speculation, depth)
    assert simulated <= estimate * 1.01
    if cost * (depth + 1) <= 1:
        assert simulated == pytest.approx(estimate, rel=0.05)
    alone = Speculation(**options).at(depth).speedup
    assert estimate == pytest.approx(alone) if not hits else estimate > alone


def test_requests_share_a_forward_pass() -> None:
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
