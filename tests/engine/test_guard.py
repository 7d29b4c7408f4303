"""The guard pauses speculation that is slower than plain decoding, whatever the policy expects."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence

import pytest

from forerun import LLM, SamplingParams
from forerun.costs import COLD_PASSES
from forerun.draft.proposer import DraftRequest, Proposer
from forerun.engine.engine import Engine
from forerun.engine.guard import FRESH_STEPS, Guard, GuardSample, RequestGuard
from forerun.engine.stats import PAUSED
from forerun.types import Draft
from tests import tiny
from tests.engine import build


def play(
    guard: Guard,
    steps: int,
    gain: Callable[[int], float],
    slow: Callable[[int], float],
    seed: int = 1,
) -> float:
    """Simulate steps and return the speed as a multiple of plain decoding.

    A step with a draft emits two tokens at `gain` times the speed of plain decoding; all times are
    multiplied by `slow`. A plain step takes 1.2 times what the policy expects, with noise."""
    dice, spent, plain = random.Random(seed), 0.0, 0.0
    for step in range(steps):
        plain_step, drafts = 1.2 * slow(step) * dice.uniform(0.8, 1.3), guard.allows()
        nodes, emitted, seconds = 0, 1, plain_step
        if drafts:
            nodes, emitted, seconds = 2, 2, 2 * plain_step / gain(step)
        sample = GuardSample(RequestGuard(), nodes, emitted, drafts)
        guard.record([sample], seconds, drafting=0.0)
        spent += seconds
        plain += emitted * plain_step
    return plain / spent


def test_speculation_that_pays_is_never_paused() -> None:
    guard = Guard(cost=lambda tokens: 1.0)
    assert play(guard, 3000, lambda _: 1.1, lambda _: 1.0) > 1.09
    assert guard.pauses == 0 and guard.speedup == pytest.approx(1.1, abs=0.25)


@pytest.mark.parametrize("gain", [0.9, 0.6, 0.2])
def test_speculation_that_loses_is_paused(gain: float, caplog: pytest.LogCaptureFixture) -> None:
    """Little time is lost, and one warning is logged."""
    guard = Guard(cost=lambda tokens: 1.0)
    with caplog.at_level(logging.WARNING):
        assert play(guard, 6000, lambda _: gain, lambda _: 1.0) > 0.975
    assert guard.pauses >= 4 and len(caplog.records) == 1
    assert "times the speed of plain decoding" in caplog.text


def test_speculation_resumes_when_it_begins_to_pay() -> None:
    guard = Guard(cost=lambda tokens: 1.0)
    assert play(guard, 8000, lambda step: 0.8 if step < 1000 else 1.5, lambda _: 1.0) > 1.3
    assert guard.speedup == pytest.approx(1.5, abs=0.3)


def test_a_machine_that_slows_down_does_not_pause_speculation() -> None:
    """Plain steps are measured again before anything is paused."""
    guard = Guard(cost=lambda tokens: 1.0)
    assert play(guard, 6000, lambda _: 1.2, lambda step: 1.0 if step // 700 % 2 else 2.5) > 1.15
    assert guard.pauses <= 1


def test_a_wrong_cost_estimate_does_not_mislead_the_guard() -> None:
    """The policy expects plain passes to be three times as fast, or as slow, as they are."""
    for estimate in (0.33, 3.0):
        guard = Guard(cost=lambda tokens, estimate=estimate: estimate)  # type: ignore[misc]
        assert play(guard, 6000, lambda _: 1.3, lambda _: 1.0) > 1.25 and guard.pauses == 0
        guard = Guard(cost=lambda tokens, estimate=estimate: estimate)  # type: ignore[misc]
        fast = play(guard, 6000, lambda _: 0.8, lambda _: 1.0)
        assert fast > 0.96, "plain steps are measured before the first decision"


def test_outliers_and_cold_steps_do_not_pause_speculation() -> None:
    """One step in a hundred is much slower, as in a suspended process, and so are the first."""
    guard = Guard(cost=lambda tokens: 1.0)
    gain = lambda step: 0.1 if step < 8 or step % 100 == 50 else 1.3  # noqa: E731
    play(guard, 6000, gain, lambda _: 1.0)
    assert guard.pauses == 0


def play_request(guard: RequestGuard, steps: int, gain: float, seed: int = 1) -> float:
    """Simulate steps of one request and return its speed as a multiple of plain decoding.

    A draft of two tokens costs one plain step and gains `gain` tokens on average."""
    dice, emitted, cost = random.Random(seed), 0, 0.0
    for _ in range(steps):
        drafts = guard.allows()
        tokens = 3 if drafts and dice.random() < gain / 2 else 1
        step_cost = 2.0 if drafts else 1.0
        guard.record(tokens, step_cost)
        emitted += tokens
        cost += step_cost
    return emitted / cost


def test_a_request_that_loses_is_paused_and_one_that_gains_is_not() -> None:
    for seed in range(10):
        assert play_request(RequestGuard(), 3000, gain=0.5, seed=seed) > 0.95
        # it would be 1.2 without a guard
        assert play_request(RequestGuard(), 3000, gain=1.4, seed=seed) > 1.18
    guard = RequestGuard()
    guard.record(1, 80.0)  # a draft model read the prompt
    assert guard.allows()
    play_request(guard, 200, gain=0.0)
    assert guard.paused_steps and guard.next_pause > 128
    play_request(guard, 3000, gain=1.5)
    assert guard.next_pause == 128, "a gain resets the length of pauses"


def test_a_request_is_charged_its_share_of_the_extra_cost_of_a_step() -> None:
    """Each further row costs a tenth of the pass; one of four requests drafts, four tokens."""
    drafting, *others = guards = [RequestGuard() for _ in range(4)]
    guard = Guard(cost=lambda tokens: 1.0 + 0.1 * (tokens - 4))
    samples = [GuardSample(drafting, 4, 1, True), *(GuardSample(g, 0, 1, False) for g in others)]
    for _ in range(5):
        guard.record(samples, seconds=1.5, drafting=0.1)
    assert drafting.lost == pytest.approx(5 * 4 * 0.5, rel=0.05)
    assert [other.lost for other in others] == [0, 0, 0]
    for _ in range(4):
        guard.record(samples, seconds=1.5, drafting=0.1)
    assert [own.allows() for own in guards] == [False, True, True, True]


class EagerWithExpensiveRows(build.Eager):
    """Always drafts, though its cost model says that further rows are expensive."""

    def forward_seconds(self, tokens: float) -> float:
        return 0.6 + 0.4 * tokens


class KnownTexts(Proposer):
    """Drafts the right tokens of known texts, but wrong ones for the first text."""

    name = "known"

    def __init__(self, texts: Sequence[list[int]]) -> None:
        self.texts = texts

    def propose(self, rows: Sequence[DraftRequest]) -> list[Draft]:
        drafts = []
        for row in rows:
            length = len(row.tokens)
            (i,) = [i for i, text in enumerate(self.texts) if text[:length] == list(row.tokens)]
            right = self.texts[i][length:][: row.depth]
            tokens = right if i else [(token + 1) % 50 for token in right]
            drafts.append(Draft.chain(row.tokens[-1], tokens, "known"))
        return drafts


def test_a_request_whose_drafts_fail_is_paused_and_another_one_goes_on() -> None:
    llm = LLM(tiny.repetitive(), draft="off", dtype="float64", kv_tokens=2048)
    prompts = ["The name of the name", "import os"]
    params = SamplingParams.pure(max_tokens=150, ignore_eos=True)
    plain = llm.generate(prompts, params)
    texts = [llm.tokenizer.encode(p) + c.token_ids for p, c in zip(prompts, plain, strict=True)]
    engine = Engine(
        llm.engine.target, {"known": KnownTexts(texts)}, policy=EagerWithExpensiveRows()
    )
    requests = [engine.add(llm.tokenizer.encode(p), params, draft="known") for p in prompts]
    build.finish(engine)
    for request, completion in zip(requests, plain, strict=True):
        assert list(request.output) == completion.token_ids
    bad, good = (request.stats for request in requests)
    assert bad.reasons[PAUSED] > 100 and good.reasons[PAUSED] == 0 and good.accepted > 100


def test_a_paused_guard_stops_all_drafts_except_those_of_a_fixed_depth() -> None:
    llm = LLM(tiny.repetitive(), draft="suffix", dtype="float64", kv_tokens=1024)
    params = SamplingParams.pure(max_tokens=40, temperature=0.8, seed=2, ignore_eos=True)
    plain = llm.generate("The name of the name", params, draft="off")[0]
    guard = llm.engine.guard
    guard.paused_steps = guard.fresh = 1000
    (completion,) = llm.generate("The name of the name", params)
    assert completion.token_ids == plain.token_ids
    assert completion.stats.drafted == 0
    assert guard.paused_steps < 1000 - 30
    before = guard.paused_steps
    (completion,) = llm.generate("The name of the name", params, depth=3)
    assert completion.token_ids == plain.token_ids
    assert completion.stats.drafted > 0
    assert guard.paused_steps == before
    assert guard.fresh > FRESH_STEPS


def test_the_first_passes_of_each_size_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the first passes of a size load their kernels."""
    engine = build.engine("llama", ["suffix"])
    sizes = list[int]()
    record = engine.drafting.guard.record

    def note(samples: Sequence[GuardSample], seconds: float, drafting: float) -> None:
        sizes.append(sum(1 + sample.nodes for sample in samples))
        record(samples, seconds, drafting)

    monkeypatch.setattr(engine.drafting.guard, "record", note)
    engine.add([5, 6, 7] * 4, build.params(0, 0.0), draft="suffix", depth="auto")
    build.finish(engine)
    run = engine.drafting.policy.costs._forwards.count
    assert sizes and all(sizes.count(size) == max(n - COLD_PASSES, 0) for size, n in run.items())
