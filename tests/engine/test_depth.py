"""The depth policy: drafts when it pays, as deep as pays, not at all when it does not, and tries again."""

import itertools

import pytest

from forerun.engine.depth import PROBE_FIRST, PROBE_LAST, Acceptance, Auto, Curve, Wish


def learned(rate: float, draft_cost: float, slope: float) -> tuple[Auto, Acceptance]:
    """A policy that has measured a pass of 1 s, `slope` s more a token, and drafts of `draft_cost` s a token."""
    policy, acceptance = Auto(), Acceptance(accepted=1000 * rate, rejected=1000 * (1 - rate))
    for tokens in range(1, 33):
        policy.record_pass(tokens, 1 + slope * (tokens - 1))
    for depth in range(1, 17):
        policy.record_draft("model", depth, draft_cost * depth)
    return policy, acceptance


def test_depth_is_the_optimum_of_the_published_formula() -> None:
    """(1 - a^(K+1)) / (1 - a) / (1 + cK): the best K, for several acceptances a and costs c."""
    for rate in (0.5, 0.7, 0.8, 0.9):
        for cost in (0.02, 0.05, 0.1, 0.2):
            policy, acceptance = learned(rate, cost, 0.0)
            (depth,) = policy.choose([Wish("model", 16, acceptance)], 1)
            a = acceptance.rate(policy.sources["model"].rate(0.6))
            best = max(range(17), key=lambda k: (1 - a ** (k + 1)) / (1 - a) / (1 + cost * k))
            assert depth == best


def test_a_draft_that_costs_more_than_it_brings_is_left_alone() -> None:
    policy, acceptance = learned(rate=0.2, draft_cost=0.5, slope=0.3)
    assert policy.choose([Wish("model", 8, acceptance)], 1) == [0]


def test_probes_are_rare_and_rarer_while_they_fail() -> None:
    policy, acceptance = learned(rate=0.05, draft_cost=0.1, slope=0.05)
    chosen = []
    for _ in range(400):
        (depth,) = policy.choose([Wish("model", 8, acceptance)], 1)
        chosen.append(depth)
        if depth:
            policy.record_verdict("model", acceptance, depth, 0)
    probes = [i for i, depth in enumerate(chosen) if depth]
    assert probes[0] == PROBE_FIRST - 1
    gaps = [b - a for a, b in itertools.pairwise(probes)]
    assert gaps == sorted(gaps) and gaps[-1] >= 4 * PROBE_FIRST


@pytest.mark.parametrize(("cost", "gap"), [(0.01, PROBE_FIRST), (0.5, 100), (50.0, PROBE_LAST)])
def test_what_probes_cost_is_bounded_over_all_requests(cost: float, gap: int) -> None:
    """A dear proposer is tried seldom, whoever asks, and even the dearest sometimes: its cost may have been misread.
    Requests of 50 tokens, two at a time; those whose time has come are tried together."""
    policy, _ = learned(rate=0.05, draft_cost=cost, slope=0.0)
    policy.sources["model"] = Acceptance(accepted=0, rejected=1000)
    probed = []
    for step in range(2000):
        if step % 50 == 0:
            wishes = [Wish("model", 8, Acceptance(rejected=1000)) for _ in range(2)]
        depths = policy.choose(wishes, 2)
        if any(depths):
            probed.append(step)
            assert depths[0] == depths[1]
    gaps = [b - a for a, b in itertools.pairwise([-1, *probed])]
    assert min(gaps) >= gap and max(gaps) <= gap + 50


def test_what_a_proposer_reads_before_a_probe_is_part_of_its_price() -> None:
    """A draft that is cheap once it has caught up, which takes as long as 4 passes."""
    policy, acceptance = learned(rate=0.05, draft_cost=0.01, slope=0.1)
    policy.record_lag("model", 4.0)
    chosen = []
    for _ in range(900):
        chosen += policy.choose([Wish("model", 8, acceptance)], 1)
    probes = [i for i, depth in enumerate(chosen) if depth]
    assert 415 < probes[0] < 425 and len(probes) == 2


def test_a_draft_that_becomes_good_is_taken_up_again() -> None:
    policy, acceptance = learned(rate=0.05, draft_cost=0.3, slope=0.0)
    depths = []
    for _ in range(4000):
        (depth,) = policy.choose([Wish("model", 8, acceptance)], 1)
        depths.append(depth)
        if depth:
            policy.record_verdict("model", acceptance, depth, depth)
    assert depths[0] == 0 and min(depths[-20:]) > 2


def test_the_better_draft_of_a_batch_goes_deeper_and_limits_hold() -> None:
    policy, good = learned(rate=0.9, draft_cost=0.01, slope=0.1)
    poor = Acceptance(accepted=100, rejected=900)
    depths = policy.choose([Wish("model", 16, good), Wish("model", 16, poor), Wish("model", 1, good)], 3)
    assert depths[0] > depths[1] and depths[2] <= 1


def test_a_cold_first_measurement_is_not_believed_for_ever() -> None:
    """A pass over 5 tokens costs at most what five passes cost, whatever was once measured."""
    curve = Curve(slope=0.02)
    curve.add(5, 0.5)
    curve.add(1, 0.01)
    assert curve.at(5) == pytest.approx(0.05)
    assert curve.at(2) == pytest.approx(0.02)


def test_curve_interpolates_and_hopes() -> None:
    curve = Curve(slope=0.1)
    assert curve.at(3) is None
    curve.add(2, 1.0)
    curve.add(6, 3.0)
    assert (curve.at(1), curve.at(4), curve.at(6)) == (1.0, 2.0, 3.0)
    assert curve.at(8) == pytest.approx(3.0 * 1.2)
    curve.add(2, 100.0)  # a spike moves it a little
    assert curve.at(2) == 1.0 + 0.1 * 1.0
    curve.add(2, 0.1)  # a fast one more
    assert curve.at(2) == pytest.approx(0.6)
