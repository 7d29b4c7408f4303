"""The depth policy: drafts when it pays, as deep as pays, not at all when it does not, and tries
again."""

import itertools
import math
import random

import pytest

from forerun.costs import SETTLED
from forerun.engine.acceptance import Acceptance, BetaCounts, DraftOption, kind_of_match
from forerun.engine.depth import (
    LONGEST_PAUSE,
    MIN_PLAIN_PASSES,
    PAUSE_STEPS,
    PROBE_ALLOWANCE,
    PROBE_DEPTH,
    PROBE_SHARE,
    BatchState,
    DepthPolicy,
)
from tests.engine import machine

ONE = BatchState(1, 1, 1)  # a request alone


def learned(rate: float, draft_cost: float, slope: float) -> tuple[DepthPolicy, Acceptance]:
    """A policy that has measured passes of 1 s + `slope` a token, and `draft_cost` a level."""
    policy = DepthPolicy()
    acceptance = Acceptance(BetaCounts(1000 * rate, 1000 * (1 - rate)), BetaCounts(1e6, 0))
    for _ in range(SETTLED):
        for tokens in range(1, 33):
            policy.record_forward(tokens, 1 + slope * (tokens - 1))
        for depth in range(1, 17):
            policy.costs.add_draft("model", depth, draft_cost * depth)
    return policy, acceptance


def test_depth_is_the_optimum_of_the_published_formula() -> None:
    """(1 - a^(K+1)) / (1 - a) / (1 + cK): the best K, for several acceptances a and costs c."""
    for rate in (0.5, 0.7, 0.8, 0.9):
        for cost in (0.02, 0.05, 0.1, 0.2):
            policy, acceptance = learned(rate, cost, 0.0)
            (depth,) = policy.choose([DraftOption("model", 16, acceptance)], ONE)
            a = policy.acceptance_rate("model", acceptance)
            best = max(range(17), key=lambda k: (1 - a ** (k + 1)) / (1 - a) / (1 + cost * k))
            assert depth == best


def test_a_draft_that_costs_more_than_it_brings_is_left_alone() -> None:
    policy, acceptance = learned(rate=0.2, draft_cost=0.5, slope=0.3)
    assert policy.choose([DraftOption("model", 8, acceptance)], ONE) == [0]


def test_what_is_never_accepted_is_left_alone_whatever_plain_passes_seemed_to_cost() -> None:
    """Two cold plain passes, and none since: that a pass with a draft looks cheaper says nothing
    for the draft, even if it is free."""
    policy, acceptance = DepthPolicy(), Acceptance(BetaCounts(0, 1000), BetaCounts(1000, 0))
    for tokens, seconds, passes in ((1, 5.0, MIN_PLAIN_PASSES), (2, 1.0, SETTLED)):
        for _ in range(passes):
            policy.record_forward(tokens, seconds)
            policy.costs.add_draft("model", 1, 1e-9)
    assert policy.choose([DraftOption("model", 8, acceptance)], ONE) == [0]


def test_plain_passes_are_measured_before_anything_is_compared_with_them() -> None:
    policy = DepthPolicy()
    for _ in range(MIN_PLAIN_PASSES):
        assert policy.choose([DraftOption("model", 8, Acceptance())], ONE) == [0]
        policy.record_forward(1, 1.0)
    assert policy.choose([DraftOption("model", 8, Acceptance())], ONE) != [0]


def test_probes_come_soon_and_then_no_more_often_than_they_may_cost() -> None:
    """Drafts of 0.1 passes a level that always fail: a probe takes 0.3 passes and comes after a
    rest, until what may be spent at once has been spent."""
    policy, acceptance = learned(rate=0.05, draft_cost=0.1, slope=0.05)
    chosen = []
    for _ in range(2000):
        (depth,) = policy.choose([DraftOption("model", 8, acceptance)], ONE)
        policy.record_forward(1 + depth, 1.0 + 0.05 * depth)
        policy.steps += 1
        chosen.append(depth)
        if depth:
            policy.record_verdict("model", acceptance, depth, 0)
    probes = [i for i, depth in enumerate(chosen) if depth]
    assert probes[:3] == [PAUSE_STEPS, 2 * PAUSE_STEPS, 3 * PAUSE_STEPS]
    gaps = [b - a for a, b in itertools.pairwise(probes)]
    assert sum(gaps[-10:]) / 10 >= 29 and 0.3 * len(probes) < PROBE_ALLOWANCE + 2000 * PROBE_SHARE


@pytest.mark.parametrize("cost", [0.01, 0.5, 50.0])
def test_what_probes_cost_is_bounded_over_all_requests(cost: float) -> None:
    """A dear proposer is tried seldom, whoever asks, and even the dearest sometimes: its cost may
    have been misread. Requests of 50 tokens, two at a time."""
    policy, _ = learned(rate=0.05, draft_cost=cost, slope=0.0)
    policy.sources["model"].weights[0] = 1000.0
    spent, probed = 0.0, []
    for step in range(20_000):
        if step % 50 == 0:
            options = [DraftOption("model", 8, Acceptance(BetaCounts(0, 1000))) for _ in range(2)]
        depths = policy.choose(options, BatchState(2, 2, 2))
        policy.record_forward(2, 1.0)
        policy.steps += 1
        spent += 2 * cost * sum(map(bool, depths))
        probed += [step] * any(depths)
    assert spent <= 2 * cost + PROBE_ALLOWANCE + 20_000 * PROBE_SHARE
    assert len(probed) >= 2 and probed[-1] > 9_000


def test_what_a_proposer_reads_before_a_probe_is_part_of_its_price() -> None:
    """Catching up takes as long as 4 passes: the second probe waits for them."""
    policy, acceptance = learned(rate=0.05, draft_cost=0.01, slope=0.1)
    policy.costs.add_draft("model", PROBE_DEPTH, 4.0, lag=100)
    chosen = []
    for _ in range(1000):
        chosen += policy.choose([DraftOption("model", 8, acceptance, lag=100)], ONE)
        policy.record_forward(1, 1.0)
        policy.steps += 1
    probes = [i for i, depth in enumerate(chosen) if depth]
    assert probes[0] == PAUSE_STEPS and len(probes) == 3
    assert all(300 < b - a < 450 for a, b in itertools.pairwise(probes))


def test_what_a_proposer_has_to_read_must_pay_in_the_tokens_that_are_left() -> None:
    """Reading takes as long as twenty passes, and drafts are right nine times in ten."""
    cases = ((0, 200, True), (100, 200, True), (100, 4, False), (1000, 200, False))
    for lag, left, drafts in cases:
        policy, acceptance = learned(rate=0.9, draft_cost=0.1, slope=0.05)
        policy.costs.add_draft("model", 1, 20.1, lag=100)
        (depth,) = policy.choose([DraftOption("model", left, acceptance, lag=lag)], ONE)
        assert (depth > 0) is drafts, (lag, left)


def test_who_was_right_goes_on_at_once() -> None:
    """Once catching up is paid for, and only while an accepted draft would pay."""
    for slope, goes_on in ((0.3, True), (1.2, False)):
        policy, acceptance = learned(rate=0.05, draft_cost=0.2, slope=slope)
        policy.costs.add_draft("model", PROBE_DEPTH, 4.0, lag=100)
        for _ in range(1000):
            (depth,) = policy.choose([DraftOption("model", 8, acceptance, lag=100)], ONE)
            policy.record_forward(1, 1.0)
            policy.steps += 1
            if depth:
                break
        policy.record_verdict("model", acceptance, depth, depth)
        assert (policy.choose([DraftOption("model", 8, acceptance)], ONE) != [0]) is goes_on
        policy.record_verdict("model", acceptance, depth, 1)
        assert policy.choose([DraftOption("model", 8, acceptance)], ONE) == [0]


def test_to_ask_whether_a_request_rests_is_a_step_of_its_rest() -> None:
    """Probes come in the same steps as if the depth were chosen every time."""
    probes = []
    for asks in (False, True):
        policy, acceptance = learned(rate=0.05, draft_cost=0.5, slope=0.05)
        chosen = []
        for _ in range(1000):
            option = DraftOption("model", 8, acceptance)
            chosen += [0] if asks and policy.is_paused(acceptance) else policy.choose([option], ONE)
            policy.record_forward(1, 1.0)
            policy.steps += 1
        probes.append([i for i, depth in enumerate(chosen) if depth])
    assert probes[0] == probes[1] and len(probes[0]) >= 3


def test_a_draft_that_becomes_good_is_taken_up_again() -> None:
    policy, acceptance = learned(rate=0.05, draft_cost=0.3, slope=0.0)
    depths = []
    for _ in range(4000):
        (depth,) = policy.choose([DraftOption("model", 8, acceptance)], ONE)
        policy.record_forward(1, 1.0)
        policy.steps += 1
        depths.append(depth)
        if depth:
            policy.record_verdict("model", acceptance, depth, depth)
    assert depths[0] == 0 and min(depths[-20:]) > 2


def test_the_better_draft_of_a_batch_goes_deeper_and_limits_hold() -> None:
    policy, good = learned(rate=0.9, draft_cost=0.01, slope=0.1)
    poor = Acceptance(BetaCounts(100, 900))
    cases = ((16, good), (16, poor), (1, good))
    options = [DraftOption("model", limit, acceptance) for limit, acceptance in cases]
    depths = policy.choose(options, BatchState(3, 3, 3))
    assert depths[0] > depths[1] and depths[2] <= 1


def played(
    policy: DepthPolicy,
    rates: tuple[float, float],
    draft_cost: float,
    slope: float,
    found: list[int],
    seed: int,
) -> float:
    """Times plain decoding, for a request of 200 tokens, on a machine whose measurements are noisy,
    cold at first, now and then three times too long, and whose speed drifts. `rates`: acceptance in
    the first 40 tokens, and after them. `found`: tokens that the proposer has to offer, at
    random."""
    dice = random.Random(seed)
    acceptance = Acceptance()
    cold = set()
    clock = 0.0
    drift = 0.0
    done = 0

    def measured(true: float, what: object) -> float:
        nonlocal drift
        drift = 0.99 * drift + dice.gauss(0, 0.03)
        first = what not in cold
        cold.add(what)
        factor = 1.5 if first else 1.0
        factor *= math.exp(drift + dice.gauss(0, 0.1))
        return true * factor * (3 if dice.random() < 0.02 else 1)

    while done < 200:
        depth = 0
        if not policy.is_paused(acceptance):
            (depth,) = policy.choose([DraftOption("model", 200 - done, acceptance)], ONE)
        drafted = min(depth, dice.choice(found))
        accepted = next((i for i in range(drafted) if dice.random() > rates[done >= 40]), drafted)
        draft, verify = draft_cost * depth, 1 + slope * drafted
        if depth:
            policy.costs.add_draft("model", depth, measured(draft, ("draft", depth)))
        policy.record_forward(1 + drafted, measured(verify, drafted))
        policy.steps += 1
        if depth:
            policy.record_verdict("model", acceptance, drafted, accepted)
        clock += draft + verify
        done += 1 + accepted
    return done / clock


COPIES = [0, 0, 2, 5, 11, 16]


@pytest.mark.parametrize(
    ("rates", "draft_cost", "slope", "found", "least"),
    [
        ((0.95, 0.95), 0.003, 0.2, COPIES, 1.9),
        ((0.0, 0.95), 0.003, 0.2, COPIES, 1.5),
        ((0.0, 0.95), 0.1, 0.02, [16], 1.9),
        ((0.7, 0.7), 0.1, 0.02, [16], 1.6),
        ((0.3, 0.3), 0.3, 0.2, [16], 0.95),
        ((0.0, 0.0), 0.05, 0.2, [16], 0.95),
    ],
)
def test_neither_noise_nor_a_bad_beginning_decides(
    rates: tuple[float, float], draft_cost: float, slope: float, found: list[int], least: float
) -> None:
    """Of 30 fresh starts the median gains most, and the third worst hardly loses."""
    arguments = rates, draft_cost, slope, found
    speeds = sorted(played(DepthPolicy(), *arguments, seed) for seed in range(30))
    assert speeds[15] >= least and speeds[2] >= min(0.93, least)


def test_a_proposer_that_seldom_has_anything_to_offer_is_asked_only_where_that_pays() -> None:
    """Accepted drafts pay if it drafts often, and not if hardly ever."""
    for often, asked in ((0.5, True), (0.02, False)):
        policy, acceptance = learned(rate=0.99, draft_cost=0.1, slope=0.1)
        acceptance.offered = BetaCounts(1000 * often, 1000 * (1 - often))
        assert (policy.choose([DraftOption("model", 1, acceptance)], ONE) != [0]) is asked
    # what is shown of a draft that is there
    assert policy.acceptance_rate("model", acceptance) > 0.9


def test_copies_are_cut_to_what_pays_and_left_to_a_proposer_that_does_better() -> None:
    """Short matches are the turn of a drafter that is right seven times in ten."""
    policy, drafter = learned(rate=0.7, draft_cost=0.02, slope=0.05)
    for rate, alone in ((0.02, 0), (0.3, 1), (0.95, 8)):
        copied = Acceptance(BetaCounts(1000 * rate, 1000 * (1 - rate)))
        count, speed = policy.cut_copy("suffix, 2 bits", copied, 8, ONE)
        assert count == alone or (alone == 1 and 1 <= count < 4)
        assert (speed > policy.expected_speed(DraftOption("model", 8, drafter), ONE)) is (
            rate == 0.95
        )
    hopeless = Acceptance(BetaCounts(0, 1000))
    _, speed = policy.cut_copy("suffix, 2 bits", Acceptance(BetaCounts(300, 700)), 8, ONE)
    assert speed > policy.expected_speed(DraftOption("model", 8, hopeless), ONE)


def test_matches_are_kept_apart_by_powers_of_two() -> None:
    kinds = [kind_of_match("suffix", match) for match in (2, 3, 4, 7, 8, 31, 32, 10_000)]
    assert kinds[0] == kinds[1] != kinds[2] == kinds[3] != kinds[4]
    assert kinds[6] == kinds[7] != kinds[5]
    assert kind_of_match("ngram", 2) != kinds[0]


@pytest.mark.one_in(7)
@pytest.mark.parametrize("curve", machine.CURVES)
@pytest.mark.parametrize(
    ("mix", "requests"), [("good", 1), ("half", 4), ("mixed", 16), ("bad", 16), ("good", 48)]
)
def test_near_the_best_there_is_whatever_passes_cost(curve: str, mix: str, requests: int) -> None:
    """Beside who knows every chance and cost: of that 0.89 in short runs (`python -m
    tests.engine.machine` has longer ones, which differ less), and nowhere much slower than plain
    decoding."""
    best, plain = machine.shares(curve, mix, requests, 200 * max(requests, 20))
    assert best > 0.89 and plain > 0.95, (best, plain)


@pytest.mark.parametrize("prompt", [128, 1000])
@pytest.mark.parametrize("curve", ["mild", "roof"])
def test_what_is_read_to_draft_for_many_is_not_lost(curve: str, prompt: int) -> None:
    """Sixteen requests, half of which are right, whose prompts a drafter reads first."""
    _, plain = machine.shares(curve, "half", 16, 3200, prompt=prompt)
    assert plain > 0.94, plain


def depths_of(objective: str, slo: float) -> list[int]:
    """Depths of one request that is right nine times in ten and seven that seldom are."""
    policy = DepthPolicy(objective, slo)
    for _ in range(SETTLED):
        for tokens in range(1, 33):
            policy.record_forward(tokens, 1 + 0.02 * (tokens - 1))
        for depth in range(1, 17):
            for requests in (1, 2, 4, 8):
                policy.costs.add_draft("model", depth, 0.01 * depth, requests)
    good = Acceptance(BetaCounts(18, 2), BetaCounts(20, 0))
    poor = Acceptance(BetaCounts(1, 19), BetaCounts(20, 0))
    return policy.choose(
        [DraftOption("model", 16, good), *(DraftOption("model", 16, poor) for _ in range(7))],
        BatchState(8, 8, 8),
    )


def test_latency_lets_nobody_wait_long_for_what_one_gains() -> None:
    """Tokens of all come first, or the time that each waits for one."""
    most, soonest = depths_of("throughput", 0.0), depths_of("latency", 0.0)
    assert most[0] > soonest[0] > 0 and not any(most[1:])


def test_no_step_is_drafted_for_beyond_its_time() -> None:
    """A plain step takes 1.14 s here: one of 1.2 has room for two tokens, one of 1.0 for none."""
    assert depths_of("throughput", 1.2)[0] == 2 and not any(depths_of("throughput", 1.0))


def test_what_one_gains_all_pay_for() -> None:
    """A draft of a tenth of a pass a level, right nine times in ten: worth it for who is alone, and
    not for one of 64 that are answered in the same pass, though the others rest."""
    for batch, drafts in ((ONE, True), (BatchState(64, 64, 1), False)):
        policy, acceptance = learned(rate=0.9, draft_cost=0.1, slope=0.0)
        assert (policy.choose([DraftOption("model", 8, acceptance)], batch) != [0]) is drafts


def test_no_pass_is_much_larger_than_what_was_measured() -> None:
    """However cheap it seems to be: sizes are found out step by step."""
    policy = DepthPolicy()
    options = [
        DraftOption("model", 16, Acceptance(BetaCounts(1000, 0), BetaCounts(1000, 0)))
        for _ in range(16)
    ]
    largest = 16
    for _ in range(SETTLED):
        policy.record_forward(largest, 1.0)
        policy.costs.add_draft("model", 1, 1e-6, 16)
    for _ in range(4):
        size = 16 + sum(policy.choose(options, BatchState(16, 16, 16)))
        assert largest < size <= max(1.25 * largest, largest + 8)
        for _ in range(SETTLED):
            policy.record_forward(size, 1.0)
        largest = size


def test_beside_a_prompt_that_is_read_drafts_pay_as_they_would_without() -> None:
    """Sixteen requests whose rows cost what they bring: a pass that takes five times as long anyway
    makes no draft cheaper. Where rows of such a pass cost little, they pay there as elsewhere; its
    time is within the bound or not."""
    for row, slo, drafts in ((0.06, 0.0, False), (0.002, 0.0, True), (0.002, 1.2, False)):
        policy = DepthPolicy(slo=slo)
        for _ in range(SETTLED):
            for tokens in range(1, 65):
                policy.record_forward(tokens, max(1.0, 0.1 + row * tokens))
            for tokens in (128, 160, 256, 512):
                policy.costs.add_prefill(tokens, max(1.3, row * tokens))
            for depth in (1, 2, 3, 4):
                policy.costs.add_draft("model", depth, 0.1 * depth, 16)
        options = [
            DraftOption("model", 16, Acceptance(BetaCounts(90, 10), BetaCounts(100, 0)))
            for _ in range(16)
        ]
        for batch in (BatchState(16, 16, 16), BatchState(16 + 128, 16, 16, num_prompt_tokens=128)):
            assert any(policy.choose(options, batch)) is (
                drafts or (slo > 0 and not batch.num_prompt_tokens)
            ), batch


def test_where_nothing_pays_nobody_is_thought_of_in_each_step() -> None:
    """However good its drafts are: what choosing takes is felt where many are answered at once."""
    policy, acceptance = learned(rate=0.9, draft_cost=0.1, slope=0.0)
    options = [DraftOption("model", 8, acceptance)]
    assert policy.choose(options, BatchState(64, 64, 1)) == [0] and policy.is_paused(acceptance)
    policy.steps += 2 * PAUSE_STEPS
    assert not policy.is_paused(acceptance) and policy.choose(options, ONE) != [0]


@pytest.mark.parametrize(
    ("count", "copies", "expected"),
    [
        (2, False, [PAUSE_STEPS, 2 * PAUSE_STEPS, LONGEST_PAUSE, 2 * LONGEST_PAUSE]),
        (2, True, [PAUSE_STEPS * n for n in (1, 2, 3, 4)]),
        (1, False, [PAUSE_STEPS * n for n in (1, 2, 3, 4)]),
    ],
)
def test_several_requests_pause_longer_and_longer(
    count: int, copies: bool, expected: list[int]
) -> None:
    """Until drafting pays for one of them; copies may begin to pay with any token. All pauses of a
    length end together, at multiples of it."""
    policy, good = learned(rate=0.9, draft_cost=0.1, slope=0.3)
    failing = [Acceptance(BetaCounts(0, 1000), BetaCounts(1000, 0)) for _ in range(count)]
    options = [DraftOption("model", 8, own, copies=copies) for own in failing]
    batch, ends = BatchState(count, count, count), []
    policy.credit["model"] = 0.0  # for probes
    for _ in range(4):
        assert policy.choose(options, batch) == [0] * count
        (until,) = {own.paused_until for own in failing}
        assert until is not None
        ends.append(until)
        policy.steps = until
    assert ends == expected
    assert policy.choose([DraftOption("model", 8, good)], ONE) != [0]
    policy.choose(options, batch)
    assert failing[0].paused_until == policy.steps + PAUSE_STEPS


def test_much_is_not_read_beside_prompts() -> None:
    """A tenth of a pass is read: a few missed tokens, or a prompt to copy from."""
    policy = DepthPolicy()
    for _ in range(20):
        policy.record_forward(1, 1.0)
        policy.costs.add_draft("model", 1, 0.1)
        policy.costs.add_draft("model", 1, 0.1 + 1.0, 1, 500)
    batch = BatchState(200, 1, 1, 199)
    assert policy.should_wait(DraftOption("model", 9, Acceptance(), 1, 100), batch)
    assert not policy.should_wait(DraftOption("model", 9, Acceptance(), 1, 20), batch)
    assert not policy.should_wait(DraftOption("suffix", 9, Acceptance(), 1, 100), batch)


def test_prompts_are_read_beside_requests_as_far_as_a_pass_is_stretched() -> None:
    policy = DepthPolicy(slo=0.0)
    assert policy.room(4, 2.0) > 1000, "nothing is known yet"
    for _ in range(SETTLED):
        policy.record_forward(4, 1.0)
        for tokens in (8, 64, 512):
            policy.costs.add_prefill(tokens, 0.5 + tokens / 64)
    assert policy.room(4, 2.0) == pytest.approx(96, abs=16)
    assert policy.room(4, 4.0) == pytest.approx(224, abs=32)
    assert policy.room(4, math.inf) > 1000
    policy.slo = 1.6
    assert policy.room(4, 4.0) == policy.room(4, math.inf) == pytest.approx(70, abs=8)
