"""A failure in the work on one request ends that request only: others emit the same tokens, and
nothing leaks.

Covers every place where the engine works on one request (admission, grammar, drafting, filters,
rules, traces, text, log-probabilities, observing), on torch and on native kernels. A failure of the
forward pass still fails all requests."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from forerun.engine import engine as engine_module
from forerun.engine.engine import Engine
from forerun.engine.request import Request
from forerun.errors import ForerunError, StateError
from forerun.models.tokenizer import Tokenizer
from forerun.sampling import filters
from forerun.sampling.matcher import Matcher
from forerun.sampling.params import SamplingParams
from forerun.types import Event
from tests import tiny
from tests.engine import build, test_structured

VICTIM = 2  # the request that fails
OPTIONS = {"logprobs": 2, "repetition_penalty": 1.2}
FAULT = RuntimeError("a fault")


class Panic(BaseException):
    """Stands for pyo3's panics, which do not derive from Exception."""


def late(request: Request) -> bool:
    """Return True once the request has emitted tokens, so that everything it needs is in use."""
    return request.produced >= 3


@pytest.fixture(scope="module")
def engine() -> Engine:
    made = build.engine()
    made.tokenizer = Tokenizer(tiny.with_tokenizer())
    return made


def params(i: int, **options: Any) -> SamplingParams:
    usual = {"temperature": 0.8, "seed": 7 + i, "max_tokens": 10, "ignore_eos": True}
    return SamplingParams(**usual | options)


def play(
    engine: Engine, draft: str, arm: Callable[[list[Request]], None], **options: Any
) -> list[list[Event]]:
    """Return the events of six requests, two of them added later; `arm` gets the first four."""
    engine.reset()
    requests: list[Request] = []
    events: dict[int, list[Event]] = {}

    def add(i: int) -> None:
        sampling = params(i, **options)
        request = engine.add(build.prompts()[i], sampling, draft=draft, depth=3, trace=True)
        requests.append(request)
        events[request.id] = []

    def step() -> None:
        for event in engine.step():
            events[event.request_id].append(event)

    for i in range(4):
        add(i)
    arm(requests)
    for i in 4, 5:
        step()
        add(i)
    while engine.busy:
        step()
    build.check_idle(engine)
    return [events[request.id] for request in requests]


def seen(events: Sequence[Event], digits: int = 9) -> list[Any]:
    """Return all that a client sees; in torch the last of 16 digits depend on the batch."""
    tokens = [token for event in events for token in event.token_ids]
    logprobs = []
    for entry in (entry for event in events for entry in event.logprobs or ()):
        top = {t: round(p, digits) for t, p in entry.top.items()}
        logprobs.append((entry.token_id, round(entry.logprob, digits), top))
    text = "".join(event.text for event in events)
    return [tokens, logprobs, text, events[-1].finish_reason, events[-1].error]


def others(played: Sequence[list[Event]], digits: int = 9) -> list[list[Any]]:
    """Return what clients see of all requests but the victim."""
    return [seen(events, digits) for i, events in enumerate(played) if i != VICTIM]


def in_logprobs(victim: Request) -> Callable[..., bool]:
    victim.params = replace(victim.params, logprobs=3)  # tells it apart from the others
    return lambda _, __, top: top == 3 and late(victim)


Place = tuple[Any, str, Callable[..., bool]]  # an object, its method, a filter of calls that fail
# Where the work on request `v` may fail. Drafting fails early, since copying drafters have nothing
# to copy later in this text.
PLACES: dict[str, Callable[[Engine, Request], list[Place]]] = {
    "a filter": lambda _, v: [(filters, "_adjust", lambda *a: a[2] is v.state and late(v))],
    "the rule": lambda _, v: [(engine_module, "_verify_by", lambda *a: v in a[1] and late(v))],
    "its text": lambda _, v: [(type(v.text), "append", lambda *a: a[0] is v.text and late(v))],
    "shown text": lambda _, v: [(type(v.text), "take", lambda own: own is v.text and late(v))],
    "its trace": lambda _, v: [(engine_module, "trace_round", lambda *a: a[0] is v and late(v))],
    "its logprobs": lambda _, v: [(engine_module, "logprobs_of", in_logprobs(v))],
    "drafting": lambda engine, v: [
        (p, "propose", lambda rows: v.produced and any(row.tokens is v.tokens for row in rows))
        for p in engine.proposers.values()
    ],
    "observing": lambda engine, v: [
        (engine.proposers[name], "observe", lambda slot, *_: slot == v.slot and late(v))
        for name in build.HEADS
    ],
    "opening": lambda engine, v: [
        (p, "open", lambda _, tokens, *__: tokens is v.tokens) for p in engine.proposers.values()
    ],
}
COMMON = ("a filter", "the rule", "its text", "shown text", "its trace", "its logprobs")
FAULTS = [
    *[(place, draft) for place in COMMON for draft in ("off", "tree", "eagle")],
    *[("drafting", draft) for draft in ("ngram", "suffix", "model", "tree", "pard", *build.HEADS)],
    *[("opening", draft) for draft in ("suffix", "model", "eagle")],
    *[("observing", draft) for draft in build.HEADS],
]


def break_at(patch: pytest.MonkeyPatch, place: Place, error: BaseException) -> None:
    """Make a function raise when its arguments are the victim's."""
    owner, name, fails = place
    real = getattr(owner, name)

    def fail(*arguments: Any, **options: Any) -> Any:
        if fails(*arguments):
            raise error
        return real(*arguments, **options)

    patch.setattr(owner, name, fail)


@contextmanager
def fault(
    engine: Engine, name: str, error: BaseException = FAULT
) -> Iterator[Callable[[list[Request]], None]]:
    """Yield a function that makes the work on the victim fail in a place, for `play`."""
    with pytest.MonkeyPatch.context() as patch:

        def arm(requests: list[Request]) -> None:
            for place in PLACES[name](engine, requests[VICTIM]):
                break_at(patch, place, error)

        yield arm


@functools.cache
def undisturbed(engine: Engine, draft: str) -> list[list[Any]]:
    """Return what clients see of six requests without failures."""
    return [seen(events) for events in play(engine, draft, lambda _: None, **OPTIONS)]


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("place", "draft"), FAULTS)
def test_a_failure_ends_only_its_own_request(engine: Engine, place: str, draft: str) -> None:
    expected = undisturbed(engine, draft)
    for error in (RuntimeError("a fault"), Panic("a panic")):
        with fault(engine, place, error) as arm:
            got = play(engine, draft, arm, **OPTIONS)
        assert others(got) == [each for i, each in enumerate(expected) if i != VICTIM]
        last = got[VICTIM][-1]
        assert isinstance(last.error, ForerunError)
        assert last.finish_reason == "abort" and not last.token_ids
        assert str(last.error).endswith(type(error).__name__) and last.error.__cause__ is error
        tokens = [token for event in got[VICTIM] for token in event.token_ids]
        assert tokens == expected[VICTIM][0][: len(tokens)]
    again = play(engine, draft, lambda _: None, **OPTIONS)  # the engine still works
    assert [seen(events) for events in again] == expected and again[VICTIM][-1].error is None


@pytest.mark.parametrize("rule", ["token", "block", "tree"])
@pytest.mark.parametrize("draft", ["model", "eagle"])
def test_a_failure_does_not_change_other_requests_under_ratio_rules(rule: str, draft: str) -> None:
    """Each request has its own noise, as under `match`."""
    engine = build.engine(rule=rule)
    expected = play(engine, draft, lambda _: None, repetition_penalty=1.2)
    with fault(engine, "a filter") as arm:
        got = play(engine, draft, arm, repetition_penalty=1.2)
    assert [each[0] for each in others(got)] == [each[0] for each in others(expected)]
    assert got[VICTIM][-1].error


@pytest.mark.parametrize("method", ["masks", "advance", "prune", "forced"])
def test_a_failing_grammar_ends_only_its_request(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance")
    engine, grammar = test_structured.engine(), test_structured.GRAMMARS["regex"]
    expected = play(engine, "tree", lambda _: None, grammar=grammar)

    def arm(requests: list[Request]) -> None:
        mine = requests[VICTIM].state.grammar
        break_at(monkeypatch, (Matcher, method, lambda own, *_: own is mine), Panic("a panic"))

    got = play(engine, "tree", arm, grammar=grammar)
    assert others(got) == others(expected)
    assert isinstance(got[VICTIM][-1].error, ForerunError)


def test_a_failure_ends_only_its_own_request_on_native_kernels() -> None:
    from forerun.kernels import native

    if native.library() is None:
        pytest.skip(native.reason() or "compiled")
    native.start(1)
    engine = build.engine("llama/q4_1")
    expected = play(engine, "suffix", lambda _: None, **OPTIONS)
    with fault(engine, "a filter") as arm:
        got = play(engine, "suffix", arm, **OPTIONS)
    assert others(got, digits=99) == others(expected, digits=99)
    assert got[VICTIM][-1].error


def test_drafters_do_not_learn_the_text_of_a_failed_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slot is closed as in a preemption, without its text."""
    closed: list[Any] = []
    suffix = engine.proposers["suffix"]
    real = suffix.close

    def close(slot: int, finished: Sequence[int] | None = None) -> None:
        closed.append(finished)
        real(slot, finished)

    monkeypatch.setattr(suffix, "close", close)
    with fault(engine, "its text") as arm:
        got = play(engine, "suffix", arm)
    assert got[VICTIM][-1].error and len(closed) == 6 and closed.count(None) == 1


def test_a_request_ends_normally_if_its_text_cannot_be_learned(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter state of a request that was paused for long is opened again at its end."""
    engine.reset()
    request = engine.add(build.prompts()[0], params(0), draft="suffix")
    engine.drafting.state(request).guard.paused_steps = 100_000
    while not engine.drafting.state(request).released:
        engine.step_or_raise()
    break_at(monkeypatch, (engine.proposers["suffix"], "open", lambda *_: True), FAULT)
    build.finish(engine)
    assert request.finish_reason in ("stop", "length") and engine.drafting.state(request).released


def test_an_abort_works_if_the_text_fails(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.reset()
    request = engine.add(build.prompts()[0], params(0))
    engine.step_or_raise()
    break_at(monkeypatch, (type(request.text), "take", lambda own: own is request.text), FAULT)
    engine.abort(request)
    (event,) = engine.step()
    assert event.finish_reason == "abort" and event.error
    build.check_idle(engine)


@pytest.mark.parametrize("error", [RuntimeError("a test"), StateError("not finite")])
def test_a_failed_forward_pass_fails_the_step(
    engine: Engine, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.reset()
    engine.add(build.prompts()[0], params(0))
    break_at(monkeypatch, (engine.target, "forward", lambda *_: True), error)
    with pytest.raises(type(error)):
        engine.step()
    engine.reset()
    assert not engine.busy


def test_logits_that_are_not_finite_fail_the_step(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache rows that the pass wrote may not be finite either."""
    engine.reset()
    for i in range(2):
        engine.add(build.prompts()[i], params(i))
    real = engine.target.forward

    def spoil(*arguments: Any, **options: Any) -> Any:
        forward = real(*arguments, **options)
        forward.logits = forward.logits.clone()
        forward.logits[0] = torch.nan
        return forward

    monkeypatch.setattr(engine.target, "forward", spoil)
    with pytest.raises(StateError):
        engine.step()
    engine.reset()
