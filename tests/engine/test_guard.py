"""Speculation that is slower than plain decoding is stopped, whatever is believed of it; what pays
goes on."""

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
    """Steps of a machine where two tokens come of each draft, so many times as fast as without
    (`gain`), and where everything takes so many times as long as at the start (`slow`); every step
    takes a fifth more than what the policy expects of its pass, and is noisy. The speed of it all,
    over that of plain decoding."""
    chance, spent, plain = random.Random(seed), 0.0, 0.0
    for step in range(steps):
        one, drafts = 1.2 * slow(step) * chance.uniform(0.8, 1.3), guard.allows()
        said, seconds = (2, 2 * one / gain(step)) if drafts else (1, one)
        guard.record([GuardSample(RequestGuard(), 2 * drafts, said, drafts)], seconds, drafting=0.0)
        spent += seconds
        plain += said * one
    return plain / spent


def test_what_pays_goes_on() -> None:
    guard = Guard(cost=lambda tokens: 1.0)
    assert play(guard, 3000, lambda _: 1.1, lambda _: 1.0) > 1.09
    assert guard.pauses == 0 and guard.speedup == pytest.approx(1.1, abs=0.25)


@pytest.mark.parametrize("gain", [0.9, 0.6, 0.2])
def test_what_does_not_is_stopped(gain: float, caplog: pytest.LogCaptureFixture) -> None:
    """Little is lost, and it is said once."""
    guard = Guard(cost=lambda tokens: 1.0)
    with caplog.at_level(logging.WARNING):
        assert play(guard, 6000, lambda _: gain, lambda _: 1.0) > 0.975
    assert guard.pauses >= 4 and len(caplog.records) == 1
    assert "times the speed of plain decoding" in caplog.text


def test_what_comes_to_pay_is_found_again() -> None:
    guard = Guard(cost=lambda tokens: 1.0)
    assert play(guard, 8000, lambda step: 0.8 if step < 1000 else 1.5, lambda _: 1.0) > 1.3
    assert guard.speedup == pytest.approx(1.5, abs=0.3)


def test_a_machine_that_slows_down_is_no_reason() -> None:
    """What a plain step takes now is measured before anything is stopped."""
    guard = Guard(cost=lambda tokens: 1.0)
    assert play(guard, 6000, lambda _: 1.2, lambda step: 1.0 if step // 700 % 2 else 2.5) > 1.15
    assert guard.pauses <= 1


def test_a_wrong_belief_is_no_reason() -> None:
    """The policy takes plain passes for three times as fast, or as slow, as they are."""
    for estimate in (0.33, 3.0):
        guard = Guard(cost=lambda tokens, estimate=estimate: estimate)  # type: ignore[misc]
        assert play(guard, 6000, lambda _: 1.3, lambda _: 1.0) > 1.25 and guard.pauses == 0
        guard = Guard(cost=lambda tokens, estimate=estimate: estimate)  # type: ignore[misc]
        fast = play(guard, 6000, lambda _: 0.8, lambda _: 1.0)
        assert fast > 0.96, "plain steps come before a judgement"


def test_a_process_that_was_put_aside_is_no_reason() -> None:
    """One step of a hundred takes twenty times as long, and the first ones of a process do."""
    guard = Guard(cost=lambda tokens: 1.0)
    gain = lambda step: 0.1 if step < 8 or step % 100 == 50 else 1.3  # noqa: E731
    play(guard, 6000, gain, lambda _: 1.0)
    assert guard.pauses == 0


def judged(judge: RequestGuard, steps: int, gain: float, seed: int = 1) -> float:
    """Steps of one request whose drafts of two tokens cost a plain step, and of which so many
    tokens more come in the mean; the speed, over that of plain decoding."""
    chance, said, took = random.Random(seed), 0, 0.0
    for _ in range(steps):
        drafts = judge.allows()
        tokens = 1 + (drafts and chance.random() < gain / 2) * 2
        judge.record(tokens, 1.0 + drafts)
        said, took = said + tokens, took + 1.0 + drafts
    return said / took


def test_one_request_that_loses_is_stopped_and_who_gains_is_not() -> None:
    for seed in range(10):
        assert judged(RequestGuard(), 3000, gain=0.5, seed=seed) > 0.95
        # 1.2 without anybody judging
        assert judged(RequestGuard(), 3000, gain=1.4, seed=seed) > 1.18
    judge = RequestGuard()
    judge.record(1, 80.0)  # a draft model read the prompt
    assert judge.allows()
    judged(judge, 200, gain=0.0)
    assert judge.paused_steps and judge.next_pause > 128
    judged(judge, 3000, gain=1.5)
    assert judge.next_pause == 128, "who has paid again begins with a short rest"


def test_what_a_request_takes_is_its_part_of_what_a_step_takes_more() -> None:
    """Four requests, a row more costs a tenth of the pass: one drafts four, one nothing."""
    drafting, *others = judges = [RequestGuard() for _ in range(4)]
    guard = Guard(cost=lambda tokens: 1.0 + 0.1 * (tokens - 4))
    samples = [GuardSample(drafting, 4, 1, True), *(GuardSample(j, 0, 1, False) for j in others)]
    for _ in range(5):
        guard.record(samples, seconds=1.5, drafting=0.1)
    assert drafting.lost == pytest.approx(5 * 4 * 0.5, rel=0.05)
    assert [judge.lost for judge in others] == [0, 0, 0]
    for _ in range(4):
        guard.record(samples, seconds=1.5, drafting=0.1)
    assert [judge.allows() for judge in judges] == [False, True, True, True]


class Wrong(build.Eager):
    """Whatever becomes of it, too, where rows are dear."""

    def forward_seconds(self, tokens: float) -> float:
        return 0.6 + 0.4 * tokens


class Liar(Proposer):
    """Drafts of a known text what is right, or for the first request what is wrong."""

    name = "liar"

    def __init__(self, texts: Sequence[list[int]]) -> None:
        self.texts = texts

    def propose(self, rows: Sequence[DraftRequest]) -> list[Draft]:
        drafts = []
        for row in rows:
            length = len(row.tokens)
            (i,) = [i for i, text in enumerate(self.texts) if text[:length] == list(row.tokens)]
            right = self.texts[i][length:][: row.depth]
            tokens = right if i else [(token + 1) % 50 for token in right]
            drafts.append(Draft.chain(row.tokens[-1], tokens, "liar"))
        return drafts


def test_a_request_whose_drafts_fail_rests_and_its_neighbour_goes_on() -> None:
    llm = LLM(tiny.spoken(), draft="off", dtype="float64", kv_tokens=2048)
    prompts = ["The name of the name", "import os"]
    params = SamplingParams.pure(max_tokens=150, ignore_eos=True)
    plain = llm.generate(prompts, params)
    texts = [
        llm.tokenizer.encode(p) + said.token_ids for p, said in zip(prompts, plain, strict=True)
    ]
    engine = Engine(llm.engine.target, {"liar": Liar(texts)}, policy=Wrong())
    requests = [engine.add(llm.tokenizer.encode(p), params, draft="liar") for p in prompts]
    build.finish(engine)
    for request, said in zip(requests, plain, strict=True):
        assert list(request.output) == said.token_ids
    bad, good = (request.stats for request in requests)
    assert bad.reasons[PAUSED] > 100 and good.reasons[PAUSED] == 0 and good.accepted > 100


def test_nothing_is_drafted_while_it_rests_but_what_was_insisted_on() -> None:
    llm = LLM(tiny.spoken(), draft="suffix", dtype="float64", kv_tokens=1024)
    params = SamplingParams.pure(max_tokens=40, temperature=0.8, seed=2, ignore_eos=True)
    plain = llm.generate("The name of the name", params, draft="off")[0]
    guard = llm.engine.guard
    guard.paused_steps = guard.fresh = 1000
    (said,) = llm.generate("The name of the name", params)
    assert said.token_ids == plain.token_ids
    assert said.stats.drafted == 0
    assert guard.paused_steps < 1000 - 30
    before = guard.paused_steps
    (said,) = llm.generate("The name of the name", params, depth=3)
    assert said.token_ids == plain.token_ids
    assert said.stats.drafted > 0
    assert guard.paused_steps == before
    assert guard.fresh > FRESH_STEPS


def test_passes_of_a_size_that_has_hardly_run_are_not_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU the first ones of a size load their kernels."""
    engine = build.engine("llama", ["suffix"])
    judged = list[int]()
    record = engine.drafting.guard.record

    def note(samples: Sequence[GuardSample], seconds: float, drafting: float) -> None:
        judged.append(sum(1 + sample.nodes for sample in samples))
        record(samples, seconds, drafting)

    monkeypatch.setattr(engine.drafting.guard, "record", note)
    engine.add([5, 6, 7] * 4, build.params(0, 0.0), draft="suffix", depth="auto")
    build.finish(engine)
    run = engine.drafting.policy.costs._forwards.count
    assert judged and all(judged.count(size) == max(n - COLD_PASSES, 0) for size, n in run.items())
