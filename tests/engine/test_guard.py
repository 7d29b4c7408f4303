"""Speculation that is slower than plain decoding is stopped, whatever is believed of it; what pays goes on."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable

import pytest

from forerun import LLM, SamplingParams
from forerun.engine.guard import FRESH, Guard
from tests import tiny


def play(guard: Guard, steps: int, gain: Callable[[int], float], slow: Callable[[int], float], seed: int = 1) -> float:
    """Steps of a machine where two tokens come of each draft, so many times as fast as without (`gain`), and where
    everything takes so many times as long as at the start (`slow`); every step takes a fifth more than what the policy
    expects of its pass, and is noisy. The speed of it all, over that of plain decoding."""
    chance, spent, plain = random.Random(seed), 0.0, 0.0
    for step in range(steps):
        one, drafts = 1.2 * slow(step) * chance.uniform(0.8, 1.3), guard.lets()
        said, seconds = (2, 2 * one / gain(step)) if drafts else (1, one)
        guard.record(1, 3 if drafts else 1, said, seconds, drafts)
        spent += seconds
        plain += said * one
    return plain / spent


def test_what_pays_goes_on() -> None:
    guard = Guard(cost=lambda tokens: 1.0)
    assert play(guard, 3000, lambda _: 1.1, lambda _: 1.0) > 1.09
    assert guard.rests == 0 and guard.worth == pytest.approx(1.1, abs=0.25)


@pytest.mark.parametrize("gain", [0.9, 0.6, 0.2])
def test_what_does_not_is_stopped(gain: float, caplog: pytest.LogCaptureFixture) -> None:
    """Little is lost, and it is said once."""
    guard = Guard(cost=lambda tokens: 1.0)
    with caplog.at_level(logging.WARNING):
        assert play(guard, 6000, lambda _: gain, lambda _: 1.0) > 0.975
    assert guard.rests >= 4 and len(caplog.records) == 1
    assert "times the speed of plain decoding" in caplog.text


def test_what_comes_to_pay_is_found_again() -> None:
    guard = Guard(cost=lambda tokens: 1.0)
    assert play(guard, 8000, lambda step: 0.8 if step < 1000 else 1.5, lambda _: 1.0) > 1.3
    assert guard.worth == pytest.approx(1.5, abs=0.3)


def test_a_machine_that_slows_down_is_no_reason() -> None:
    """Other programs begin and end: what a plain step takes now is measured before anything is stopped."""
    guard = Guard(cost=lambda tokens: 1.0)
    assert play(guard, 6000, lambda _: 1.2, lambda step: 1.0 if step // 700 % 2 else 2.5) > 1.15
    assert guard.rests <= 1


def test_a_wrong_belief_is_no_reason() -> None:
    """The policy takes plain passes for three times as fast, or as slow, as they are."""
    for belief in (0.33, 3.0):
        guard = Guard(cost=lambda tokens, belief=belief: belief)  # type: ignore[misc]
        assert play(guard, 6000, lambda _: 1.3, lambda _: 1.0) > 1.25 and guard.rests == 0
        guard = Guard(cost=lambda tokens, belief=belief: belief)  # type: ignore[misc]
        fast = play(guard, 6000, lambda _: 0.8, lambda _: 1.0)
        assert fast > 0.96, "plain steps come before a judgement"


def test_a_process_that_was_put_aside_is_no_reason() -> None:
    """One step of a hundred takes twenty times as long, and the first ones of a process do."""
    guard = Guard(cost=lambda tokens: 1.0)
    gain = lambda step: 0.1 if step < 8 or step % 100 == 50 else 1.3  # noqa: E731
    play(guard, 6000, gain, lambda _: 1.0)
    assert guard.rests == 0


def test_nothing_is_drafted_while_it_rests_but_what_was_insisted_on() -> None:
    llm = LLM(tiny.spoken(), draft="suffix", dtype="float64", kv_tokens=1024)
    params = SamplingParams(max_tokens=40, temperature=0.8, seed=2, ignore_eos=True)
    plain = llm.generate("The name of the name", params, draft="off")[0]
    guard = llm.engine.guard
    guard.resting = guard.fresh = 1000
    (said,) = llm.generate("The name of the name", params)
    assert said.token_ids == plain.token_ids and said.stats.drafted == 0 and guard.resting < 1000 - 30
    before = guard.resting
    (said,) = llm.generate("The name of the name", params, depth=3)
    assert said.token_ids == plain.token_ids and said.stats.drafted > 0 and guard.resting == before
    assert guard.fresh > FRESH
