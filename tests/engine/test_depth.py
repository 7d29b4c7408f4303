"""The depth policy: drafts as deep as pays, pauses drafts that do not pay, and probes them later."""

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

ONE = BatchState(1, 1, 1)  # a single request


def learned(rate: float, draft_cost: float, slope: float) -> tuple[DepthPolicy, Acceptance]:
    """Return a policy that has measured passes of 1 s + `slope` for each further token and drafts
    of `draft_cost` a level, and a record with this acceptance rate."""
    policy = DepthPolicy()
    acceptance = Acceptance(BetaCounts(1000 * rate, 1000 * (1 - rate)), BetaCounts(1e6, 0))
    for _ in range(SETTLED):
        for tokens in range(1, 33):
            policy.record_forward(tokens, 1 + slope * (tokens - 1))
        for depth in range(1, 17):
            policy.costs.add_draft("model", depth, draft_cost * depth)
    return policy, acceptance


def test_depth_maximises_the_published_formula() -> None:
    """(1 - a^(K+1)) / (1 - a) / (1 + cK) over K, for several acceptance rates a and costs c."""
    for rate in (0.5, 0.7, 0.8, 0.9):
        for cost in (0.02, 0.05, 0.1, 0.2):
            policy, acceptance = learned(rate, cost, 0.0)
            (depth,) = policy.choose([DraftOption("model", 16, acceptance)], ONE)
            a = policy.acceptance_rate("model", acceptance)
            best = max(range(17), key=lambda k: (1 - a ** (k + 1)) / (1 - a) / (1 + cost * k))
            assert depth == best


def test_drafting_must_gain_the_overhead_of_a_step_that_plain_rounds_save() -> None:
    policy, acceptance = learned(rate=0.6, draft_cost=0.05, slope=0.1)
    options = [DraftOption("model", 8, acceptance) for _ in range(2)]
    plain, rounds = BatchState(2, 2, 2), BatchState(2, 2, 2, has_plain_rounds=True)
    assert min(policy.choose(options, rounds)) > 0  # nothing is known of an overhead
    policy.costs.add_step_overhead(4.0, 2)
    assert min(policy.choose(options, plain)) > 0
    assert policy.choose(options, rounds) == [0, 0]


def test_a_draft_that_does_not_pay_is_not_made() -> None:
    policy, acceptance = learned(rate=0.2, draft_cost=0.5, slope=0.3)
    assert policy.choose([DraftOption("model", 8, acceptance)], ONE) == [0]


def test_rejected_drafts_are_not_made_though_plain_passes_were_measured_too_slow() -> None:
    """After two slow cold plain passes, a pass with a draft looks cheaper; this must not count in
    favour of a draft that is never accepted, even if it is free."""
    policy, acceptance = DepthPolicy(), Acceptance(BetaCounts(0, 1000), BetaCounts(1000, 0))
    for tokens, seconds, passes in ((1, 5.0, MIN_PLAIN_PASSES), (2, 1.0, SETTLED)):
        for _ in range(passes):
            policy.record_forward(tokens, seconds)
            policy.costs.add_draft("model", 1, 1e-9)
    assert policy.choose([DraftOption("model", 8, acceptance)], ONE) == [0]


def test_plain_passes_are_measured_before_the_first_draft() -> None:
    policy = DepthPolicy()
    for _ in range(MIN_PLAIN_PASSES):
        assert policy.choose([DraftOption("model", 8, Acceptance())], ONE) == [0]
        policy.record_forward(1, 1.0)
    assert policy.choose([DraftOption("model", 8, Acceptance())], ONE) != [0]


def test_probes_follow_each_pause_until_the_allowance_is_spent() -> None:
    """Drafts of 0.1 passes a level always fail. A probe costs 0.3 passes; once the allowance is
    spent, probes are as rare as their share of the time demands."""
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
def test_the_cost_of_probes_is_bounded_over_all_requests(cost: float) -> None:
    """An expensive proposer is probed seldom, over all requests together, but never given up: its
    cost may have been mismeasured. Requests have 50 tokens, and two run at a time."""
    policy, _ = learned(rate=0.05, draft_cost=cost, slope=0.0)
    policy.sources["model"].weights[0] = 1000.0
    spent, probes = 0.0, []
    for step in range(20_000):
        if step % 50 == 0:
            options = [DraftOption("model", 8, Acceptance(BetaCounts(0, 1000))) for _ in range(2)]
        depths = policy.choose(options, BatchState(2, 2, 2))
        policy.record_forward(2, 1.0)
        policy.steps += 1
        spent += 2 * cost * sum(map(bool, depths))
        if any(depths):
            probes.append(step)
    assert spent <= 2 * cost + PROBE_ALLOWANCE + 20_000 * PROBE_SHARE
    assert len(probes) >= 2 and probes[-1] > 9_000


def test_a_probe_that_costs_more_than_may_be_spent_at_once_waits() -> None:
    """A draft model does not read the prompt of a first short text to find out whether it pays: the
    passes beyond the allowance are saved before. Cheap probes do not take them, nor do they wait.
    """
    policy, acceptance = learned(rate=0.05, draft_cost=0.01, slope=0.1)
    beyond = 3.0
    policy.costs.add_draft("model", PROBE_DEPTH, PROBE_ALLOWANCE + beyond, lag=100)

    def probes(lag: int, steps: int) -> list[int]:
        found = []
        for step in range(steps):
            (depth,) = policy.choose([DraftOption("model", 8, acceptance, lag=lag)], ONE)
            policy.record_forward(1, 1.0)
            policy.steps += 1
            if depth:
                found.append(step)
                policy.record_verdict("model", acceptance, depth, 0)
        return found

    first, *others = probes(100, 2000)
    assert beyond / PROBE_SHARE < first < 1.3 * beyond / PROBE_SHARE
    assert all(later > first + beyond / PROBE_SHARE for later in others) and len(others) >= 1
    saved = policy.saved["model"]
    assert len(probes(0, 200)) > 3 and policy.saved["model"] >= saved > 0


def test_the_price_of_a_probe_includes_the_proposers_lag() -> None:
    """Catching up costs 4 passes, which the second probe has to wait for."""
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


def test_a_lag_must_pay_within_the_tokens_that_remain() -> None:
    """Reading a lag of 100 tokens costs twenty passes; the acceptance rate is 0.9."""
    cases = ((0, 200, True), (100, 200, True), (100, 4, False), (1000, 200, False))
    for lag, remaining, drafts in cases:
        policy, acceptance = learned(rate=0.9, draft_cost=0.1, slope=0.05)
        policy.costs.add_draft("model", 1, 20.1, lag=100)
        (depth,) = policy.choose([DraftOption("model", remaining, acceptance, lag=lag)], ONE)
        assert (depth > 0) is drafts, (lag, remaining)


def test_a_long_lag_pays_once_a_text_has_lasted_long() -> None:
    """Reading 1000 tokens costs 200 passes, and a drafting step gains more than one."""
    for horizon, drafts in ((0, False), (100, False), (400, True)):
        policy, acceptance = learned(rate=0.9, draft_cost=0.1, slope=0.05)
        policy.costs.add_draft("model", 1, 20.1, lag=100)
        option = DraftOption("model", 8, acceptance, lag=1000, horizon=horizon)
        (depth,) = policy.choose([option], ONE)
        assert (depth > 0) is drafts, horizon


def test_an_accepted_probe_is_continued_in_the_next_step() -> None:
    """The catch-up is paid by then. A draft is continued only if it would pay when accepted."""
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


def test_checking_for_a_pause_does_not_move_the_probes() -> None:
    """With `is_paused`, probes come in the same steps as if the depth were chosen every time."""
    probes = []
    for checks in (False, True):
        policy, acceptance = learned(rate=0.05, draft_cost=0.5, slope=0.05)
        chosen = []
        for _ in range(1000):
            option = DraftOption("model", 8, acceptance)
            paused = checks and policy.is_paused(acceptance)
            chosen += [0] if paused else policy.choose([option], ONE)
            policy.record_forward(1, 1.0)
            policy.steps += 1
        probes.append([i for i, depth in enumerate(chosen) if depth])
    assert probes[0] == probes[1] and len(probes[0]) >= 3


def test_drafting_resumes_when_drafts_become_good() -> None:
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


def test_better_drafts_of_a_batch_are_deeper_and_limits_hold() -> None:
    policy, good = learned(rate=0.9, draft_cost=0.01, slope=0.1)
    poor = Acceptance(BetaCounts(100, 900))
    cases = ((16, good), (16, poor), (1, good))
    options = [DraftOption("model", limit, acceptance) for limit, acceptance in cases]
    depths = policy.choose(options, BatchState(3, 3, 3))
    assert depths[0] > depths[1] and depths[2] <= 1


def simulated_speed(
    policy: DepthPolicy,
    rates: tuple[float, float],
    draft_cost: float,
    slope: float,
    offered: list[int],
    seed: int,
) -> float:
    """Return the speed of a request of 200 tokens as a multiple of plain decoding.

    Measurements are noisy, too long for cold sizes, three times too long now and then, and the
    machine's speed drifts. `rates`: acceptance in the first 40 tokens, and after them. `offered`:
    numbers of tokens that the proposer can offer, chosen at random."""
    dice = random.Random(seed)
    acceptance = Acceptance()
    warm = set()
    clock = 0.0
    drift = 0.0
    done = 0

    def measured(seconds: float, operation: object) -> float:
        nonlocal drift
        drift = 0.99 * drift + dice.gauss(0, 0.03)
        factor = 1.0 if operation in warm else 1.5
        warm.add(operation)
        factor *= math.exp(drift + dice.gauss(0, 0.1))
        return seconds * factor * (3 if dice.random() < 0.02 else 1)

    while done < 200:
        depth = 0
        if not policy.is_paused(acceptance):
            (depth,) = policy.choose([DraftOption("model", 200 - done, acceptance)], ONE)
        drafted = min(depth, dice.choice(offered))
        rate = rates[1] if done >= 40 else rates[0]
        accepted = next((i for i in range(drafted) if dice.random() > rate), drafted)
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
    ("rates", "draft_cost", "slope", "offered", "minimum"),
    [
        ((0.95, 0.95), 0.003, 0.2, COPIES, 1.9),
        ((0.0, 0.95), 0.003, 0.2, COPIES, 1.5),
        ((0.0, 0.95), 0.1, 0.02, [16], 1.9),
        ((0.7, 0.7), 0.1, 0.02, [16], 1.6),
        ((0.3, 0.3), 0.3, 0.2, [16], 0.95),
        ((0.0, 0.0), 0.05, 0.2, [16], 0.95),
    ],
)
def test_speed_is_robust_to_noise_and_to_a_bad_start(
    rates: tuple[float, float], draft_cost: float, slope: float, offered: list[int], minimum: float
) -> None:
    """Over 30 seeds, the median reaches the minimum and the third worst hardly loses."""
    arguments = rates, draft_cost, slope, offered
    speeds = sorted(simulated_speed(DepthPolicy(), *arguments, seed) for seed in range(30))
    assert speeds[15] >= minimum and speeds[2] >= min(0.93, minimum)


def test_a_proposer_that_seldom_offers_a_draft_is_called_only_if_that_pays() -> None:
    """Accepted drafts pay if the proposer offers one often, and not if it hardly ever does."""
    for offer_rate, called in ((0.5, True), (0.02, False)):
        policy, acceptance = learned(rate=0.99, draft_cost=0.1, slope=0.1)
        acceptance.offered = BetaCounts(1000 * offer_rate, 1000 * (1 - offer_rate))
        assert (policy.choose([DraftOption("model", 1, acceptance)], ONE) != [0]) is called
    # the rate is that of the drafts that were offered
    assert policy.acceptance_rate("model", acceptance) > 0.9


def test_copies_are_cut_to_the_length_that_pays_and_compared_with_other_drafters() -> None:
    """A drafter with an acceptance rate of 0.7 is faster than copies behind short matches."""
    policy, drafter = learned(rate=0.7, draft_cost=0.02, slope=0.05)
    for rate, expected in ((0.02, 0), (0.3, 1), (0.95, 8)):
        copied = Acceptance(BetaCounts(1000 * rate, 1000 * (1 - rate)))
        count, speed = policy.cut_copy("suffix, 2 bits", copied, 8, ONE)
        assert count == expected or (expected == 1 and 1 <= count < 4)
        assert (speed > policy.expected_speed(DraftOption("model", 8, drafter), ONE)) is (
            rate == 0.95
        )
    hopeless = Acceptance(BetaCounts(0, 1000))
    _, speed = policy.cut_copy("suffix, 2 bits", Acceptance(BetaCounts(300, 700)), 8, ONE)
    assert speed > policy.expected_speed(DraftOption("model", 8, hopeless), ONE)


def test_match_lengths_are_grouped_by_powers_of_two() -> None:
    kinds = [kind_of_match("suffix", match) for match in (2, 3, 4, 7, 8, 31, 32, 10_000)]
    assert kinds[0] == kinds[1] != kinds[2] == kinds[3] != kinds[4]
    assert kinds[6] == kinds[7] != kinds[5]
    assert kind_of_match("ngram", 2) != kinds[0]


@pytest.mark.one_in(7)
@pytest.mark.parametrize("curve", machine.CURVES)
@pytest.mark.parametrize(
    ("mix", "requests"), [("good", 1), ("half", 4), ("mixed", 16), ("bad", 16), ("good", 48)]
)
def test_speed_is_close_to_that_of_the_best_depths(curve: str, mix: str, requests: int) -> None:
    """The policy reaches 0.89 of the speed of a policy that knows all rates and costs, and is never
    much slower than plain decoding. Longer runs differ less (`python -m tests.engine.machine`)."""
    best, plain = machine.shares(curve, mix, requests, 200 * max(requests, 20))
    assert best > 0.89 and plain > 0.95, (best, plain)


@pytest.mark.parametrize("prompt", [128, 1000])
@pytest.mark.parametrize("curve", ["mild", "roof"])
def test_reading_prompts_to_draft_for_a_batch_costs_little(curve: str, prompt: int) -> None:
    """A drafter first reads the prompts of sixteen requests; half of them accept its drafts."""
    _, plain = machine.shares(curve, "half", 16, 3200, prompt=prompt)
    assert plain > 0.94, plain


@pytest.mark.parametrize(("prompt", "minimum"), [(8000, 1.3), (30_000, 0.97)])
def test_long_prompts_are_read_only_for_texts_that_last(prompt: int, minimum: float) -> None:
    """Texts of 200 tokens recover what reading 8,000 tokens costs (24 passes), not 30,000."""
    _, plain = machine.shares("mild", "good", 1, 6000, prompt=prompt)
    assert plain > minimum, plain


def depths_of(objective: str, slo: float) -> list[int]:
    """Return the depths of one request with an acceptance rate of 0.9 and seven of 0.05."""
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


def test_the_latency_objective_drafts_less_deep_for_one_request_of_many() -> None:
    """The throughput objective counts the tokens of all requests; latency, how long each waits."""
    throughput, latency = depths_of("throughput", 0.0), depths_of("latency", 0.0)
    assert throughput[0] > latency[0] > 0 and not any(throughput[1:])


def test_drafts_keep_a_step_within_the_slo() -> None:
    """A plain step takes 1.14 s: an SLO of 1.2 s allows two drafted tokens, one of 1.0 s none."""
    assert depths_of("throughput", 1.2)[0] == 2 and not any(depths_of("throughput", 1.0))


def test_a_draft_for_one_request_is_charged_to_the_whole_batch() -> None:
    """A draft of 0.1 passes a level with an acceptance rate of 0.9 pays for a single request, but
    not for one of 64 in the same pass, though the others do not draft."""
    for batch, drafts in ((ONE, True), (BatchState(64, 64, 1), False)):
        policy, acceptance = learned(rate=0.9, draft_cost=0.1, slope=0.0)
        assert (policy.choose([DraftOption("model", 8, acceptance)], batch) != [0]) is drafts


def test_no_pass_is_much_larger_than_the_largest_measured_one() -> None:
    """Sizes grow step by step, however cheap larger ones seem to be."""
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


def test_drafts_beside_a_prefill_must_pay_as_they_do_without_it() -> None:
    """For sixteen requests whose rows cost as much as they gain, a longer pass makes no draft
    cheaper. Cheap rows pay beside a prefill, too, unless the pass would exceed the SLO."""
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


def test_requests_whose_drafts_do_not_pay_are_paused() -> None:
    """This holds for good drafts, too: choosing depths takes noticeable time in large batches."""
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
    """Pauses grow until drafting pays for one of the requests. Those for copies do not grow, since
    a match may appear with any token. All pauses of a length end together, at multiples of it."""
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


def test_a_long_catch_up_waits_while_prompts_are_read() -> None:
    """A catch-up of a tenth of a pass does not wait: a few missed tokens, or a text to copy."""
    policy = DepthPolicy()
    for _ in range(20):
        policy.record_forward(1, 1.0)
        policy.costs.add_draft("model", 1, 0.1)
        policy.costs.add_draft("model", 1, 0.1 + 1.0, 1, 500)
    batch = BatchState(200, 1, 1, 199)
    assert policy.should_wait(DraftOption("model", 9, Acceptance(), 1, 100), batch)
    assert not policy.should_wait(DraftOption("model", 9, Acceptance(), 1, 20), batch)
    assert not policy.should_wait(DraftOption("suffix", 9, Acceptance(), 1, 100), batch)


def test_prefill_room_follows_the_allowed_stretch_of_a_pass_and_the_slo() -> None:
    policy = DepthPolicy(slo=0.0)
    assert policy.room(4, 2.0) > 1000, "nothing was measured yet"
    for _ in range(SETTLED):
        policy.record_forward(4, 1.0)
        for tokens in (8, 64, 512):
            policy.costs.add_prefill(tokens, 0.5 + tokens / 64)
    assert policy.room(4, 2.0) == pytest.approx(96, abs=16)
    assert policy.room(4, 4.0) == pytest.approx(224, abs=32)
    assert policy.room(4, math.inf) > 1000
    policy.slo = 1.6
    assert policy.room(4, 4.0) == policy.room(4, math.inf) == pytest.approx(70, abs=8)
