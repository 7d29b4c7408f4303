"""What fails for one request ends that one: the others say the same, token for token, and nothing
leaks.

Protects: every place where the engine works on one request (admission, grammar, drafting, filters,
rules, traces, text, log-probabilities, observing), on torch and on native kernels; that a failure
of the pass is still everybody's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from forerun.draft.proposer import DraftRequest, Proposer
from forerun.engine import engine as engine_module
from forerun.engine import engine as verdicts
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
FEATURED = (
    "medusa",
    "mlp",
    "eagle",
    "eagle1",
    "parallel",
    "mtp",
    "block",
)  # who are shown what the target thought


class Panic(BaseException):
    """What pyo3 makes of a panic: no Exception."""


Fault = Callable[[pytest.MonkeyPatch, Engine, list[Request], BaseException], None]


def late(request: Request) -> bool:
    """It has said something: all that could be broken is in use."""
    return request.produced >= 3


@pytest.fixture(scope="module")
def engine() -> Engine:
    made = build.engine()
    made.tokenizer = Tokenizer(tiny.worded())
    return made


def params(i: int, **options: Any) -> SamplingParams:
    return SamplingParams(
        **({"temperature": 0.8, "seed": 7 + i, "max_tokens": 10, "ignore_eos": True} | options)
    )


def play(
    engine: Engine, draft: str, arm: Callable[[list[Request]], None], **options: Any
) -> list[list[Event]]:
    """The events of six requests; `arm` is shown them when they are in, the last two after a few
    steps."""
    engine.reset()
    requests: list[Request] = []
    events: dict[int, list[Event]] = {}

    def add(i: int) -> None:
        request = engine.add(
            build.prompts()[i], params(i, **options), draft=draft, depth=3, trace=True
        )
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
    """Everything a client could see of a request. Products of torch depend on the batch in the last
    of 16 digits, those of the native kernels do not."""
    tokens = [token for event in events for token in event.token_ids]
    said = [
        (
            entry.token_id,
            round(entry.logprob, digits),
            {t: round(p, digits) for t, p in entry.top.items()},
        )
        for event in events
        for entry in event.logprobs or ()
    ]
    return [
        tokens,
        said,
        "".join(event.text for event in events),
        events[-1].finish_reason,
        events[-1].error,
    ]


@contextmanager
def patched() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def raising(
    owner: Any,
    name: str,
    mine: Callable[..., bool],
    error: BaseException,
    patch: pytest.MonkeyPatch,
) -> None:
    """Let `owner.name` raise where its arguments are the victim's."""
    real = getattr(owner, name)

    def fail(*arguments: Any, **options: Any) -> Any:
        if mine(*arguments):
            raise error
        return real(*arguments, **options)

    patch.setattr(owner, name, fail)


def in_a_filter(
    patch: pytest.MonkeyPatch, engine: Engine, requests: list[Request], error: BaseException
) -> None:
    victim = requests[VICTIM]
    raising(
        filters,
        "_adjust",
        lambda _, __, state: state is victim.state and late(victim),
        error,
        patch,
    )


def in_the_rule(
    patch: pytest.MonkeyPatch, engine: Engine, requests: list[Request], error: BaseException
) -> None:
    victim = requests[VICTIM]
    raising(
        verdicts,
        "_verify_by",
        lambda _, chosen, *__: victim in chosen and late(victim),
        error,
        patch,
    )


def in_its_text(
    patch: pytest.MonkeyPatch, engine: Engine, requests: list[Request], error: BaseException
) -> None:
    victim = requests[VICTIM]
    raising(
        type(victim.text),
        "append",
        lambda text, _: text is victim.text and late(victim),
        error,
        patch,
    )


def in_what_is_shown(
    patch: pytest.MonkeyPatch, engine: Engine, requests: list[Request], error: BaseException
) -> None:
    victim = requests[VICTIM]
    raising(
        type(victim.text),
        "take",
        lambda text, **_: text is victim.text and late(victim),
        error,
        patch,
    )


def in_its_trace(
    patch: pytest.MonkeyPatch, engine: Engine, requests: list[Request], error: BaseException
) -> None:
    victim = requests[VICTIM]
    raising(
        engine_module,
        "trace_round",
        lambda request, *_: request is victim and late(victim),
        error,
        patch,
    )


def in_its_logprobs(
    patch: pytest.MonkeyPatch, engine: Engine, requests: list[Request], error: BaseException
) -> None:
    victim = requests[VICTIM]
    victim.params = replace(victim.params, logprobs=3)  # which the others have not
    raising(
        engine_module, "logprobs_of", lambda _, __, top: top == 3 and late(victim), error, patch
    )


def in_drafting(
    patch: pytest.MonkeyPatch, engine: Engine, requests: list[Request], error: BaseException
) -> None:
    victim = requests[VICTIM]
    for proposer in engine.proposers.values():
        real = proposer.propose

        def propose(rows: Sequence[DraftRequest], real: Callable[..., Any] = real) -> Any:
            # early: drafters that copy have nothing for this text later on
            if any(row.tokens is victim.tokens for row in rows) and victim.produced:
                raise error
            return real(rows)

        patch.setattr(proposer, "propose", propose)


def in_observing(
    patch: pytest.MonkeyPatch, engine: Engine, requests: list[Request], error: BaseException
) -> None:
    victim = requests[VICTIM]
    for name in FEATURED:
        raising(
            engine.proposers[name],
            "observe",
            lambda slot, *_: slot == victim.slot and late(victim),
            error,
            patch,
        )


def in_opening(
    patch: pytest.MonkeyPatch, engine: Engine, requests: list[Request], error: BaseException
) -> None:
    victim = requests[VICTIM]
    for proposer in engine.proposers.values():
        raising(proposer, "open", lambda _, tokens, *__: tokens is victim.tokens, error, patch)


FAULTS = [
    *[(fault, draft) for fault in (in_a_filter, in_the_rule, in_its_text, in_what_is_shown, in_its_trace,
                                in_its_logprobs)
      for draft in ("off", "tree", "eagle")],
    *[(in_drafting, draft) for draft in ("ngram", "suffix", "model", "tree", "pard", *FEATURED)],
    *[(in_opening, draft) for draft in ("suffix", "model", "eagle")],
    *[(in_observing, draft) for draft in FEATURED],
]  # fmt: skip


@functools.cache
def undisturbed(engine: Engine, draft: str) -> list[list[Any]]:
    """What is seen of six requests of which none fails."""
    return [
        seen(events)
        for events in play(engine, draft, lambda _: None, logprobs=2, repetition_penalty=1.2)
    ]


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("fault", "draft"), FAULTS)
def test_one_fails_alone(engine: Engine, fault: Fault, draft: str) -> None:
    options, expected = {"logprobs": 2, "repetition_penalty": 1.2}, undisturbed(engine, draft)
    for error in (RuntimeError("a fault"), Panic("a panic")):
        with patched() as patch:
            arm = functools.partial(fault, patch, engine, error=error)
            got = play(engine, draft, arm, **options)
        for i in range(6):
            if i != VICTIM:
                assert seen(got[i]) == expected[i], i
        last = got[VICTIM][-1]
        assert (
            isinstance(last.error, ForerunError)
            and last.finish_reason == "abort"
            and not last.token_ids
        )
        assert str(last.error).endswith(type(error).__name__) and last.error.__cause__ is error
        said = [token for event in got[VICTIM] for token in event.token_ids]
        assert said == expected[VICTIM][0][: len(said)]
    again = play(engine, draft, lambda _: None, **options)  # the engine is as it was
    assert [seen(events) for events in again] == expected and again[VICTIM][-1].error is None


@pytest.mark.parametrize("rule", ["token", "block", "tree"])
@pytest.mark.parametrize("draft", ["model", "eagle"])
def test_ratio_rules_go_on_the_same_too(rule: str, draft: str) -> None:
    """Their noise belongs to a request, as that of `match` does."""
    engine = build.engine(rule=rule)
    expected = play(engine, draft, lambda _: None, repetition_penalty=1.2)
    with patched() as patch:
        error = RuntimeError("a fault")
        got = play(
            engine, draft, lambda r: in_a_filter(patch, engine, r, error), repetition_penalty=1.2
        )
    assert [seen(g)[0] for i, g in enumerate(got) if i != VICTIM] == [
        seen(e)[0] for i, e in enumerate(expected) if i != VICTIM
    ]
    assert got[VICTIM][-1].error


@pytest.mark.parametrize("method", ["masks", "advance", "prune", "forced"])
def test_a_grammar_that_fails(method: str) -> None:
    pytest.importorskip("llguidance")
    engine, grammar = test_structured.engine(), test_structured.GRAMMARS["regex"]
    expected = play(engine, "tree", lambda _: None, grammar=grammar)
    with patched() as patch:

        def arm(requests: list[Request]) -> None:
            mine = requests[VICTIM].state.grammar
            raising(Matcher, method, lambda matcher, *_: matcher is mine, Panic("a panic"), patch)

        got = play(engine, "tree", arm, grammar=grammar)
    for i in range(6):
        if i != VICTIM:
            assert seen(got[i]) == seen(expected[i]), i
    assert isinstance(got[VICTIM][-1].error, ForerunError)


def test_one_fails_alone_on_native_kernels() -> None:
    from forerun.kernels import native

    if native.library() is None:
        pytest.skip(native.reason() or "compiled")
    native.start(1)
    engine = build.engine("llama/q4_1")
    options = {"repetition_penalty": 1.2, "logprobs": 2}
    expected = play(engine, "suffix", lambda _: None, **options)
    with patched() as patch:
        got = play(
            engine,
            "suffix",
            lambda r: in_a_filter(patch, engine, r, RuntimeError("a fault")),
            **options,
        )
    assert [seen(g, digits=99) for i, g in enumerate(got) if i != VICTIM] == [
        seen(e, digits=99) for i, e in enumerate(expected) if i != VICTIM
    ]
    assert got[VICTIM][-1].error


def test_what_fails_is_not_remembered(engine: Engine) -> None:
    """A request that failed ends as if it had been preempted: the shared memory does not learn
    it."""
    with patched() as patch:
        closed: list[Any] = []
        suffix: Proposer = engine.proposers["suffix"]
        real = suffix.close
        patch.setattr(
            suffix,
            "close",
            lambda slot, finished=None: (closed.append(finished), real(slot, finished)),
        )
        got = play(
            engine, "suffix", lambda r: in_its_text(patch, engine, r, RuntimeError("a fault"))
        )
    assert got[VICTIM][-1].error and len(closed) == 6 and closed.count(None) == 1


def test_what_cannot_be_remembered_is_said_all_the_same(engine: Engine) -> None:
    """A request that has rested long is taken up again when it ends, for what may be remembered of
    it."""
    with patched() as patch:
        engine.reset()
        request = engine.add(build.prompts()[0], params(0), draft="suffix")
        engine.drafting.state(request).guard.paused_steps = 100_000
        while not engine.drafting.state(request).released:
            engine.step_or_raise()
        raising(
            engine.proposers["suffix"],
            "open",
            lambda *_, **__: True,
            RuntimeError("a fault"),
            patch,
        )
        while engine.busy:
            engine.step_or_raise()
    assert request.finish_reason in ("stop", "length") and engine.drafting.state(request).released
    build.check_idle(engine)


def test_aborting_what_cannot_end_its_text(engine: Engine) -> None:
    with patched() as patch:
        engine.reset()
        request = engine.add(build.prompts()[0], params(0))
        engine.step_or_raise()
        raising(
            type(request.text),
            "take",
            lambda text, **_: text is request.text,
            RuntimeError("a fault"),
            patch,
        )
        engine.abort(request)
        (event,) = engine.step()
    assert event.finish_reason == "abort" and event.error
    build.check_idle(engine)


@pytest.mark.parametrize("error", [RuntimeError("a test"), StateError("not finite")])
def test_a_failed_pass_is_everybodys(engine: Engine, error: Exception) -> None:
    engine.reset()
    engine.add(build.prompts()[0], params(0))
    with patched() as patch:
        raising(engine.target, "forward", lambda *_: True, error, patch)
        with pytest.raises(type(error)):
            engine.step()
    engine.reset()
    assert not engine.busy


def test_logits_that_are_not_finite_are_everybodys(engine: Engine) -> None:
    """What the pass has left in the cache may not be either."""
    engine.reset()
    for i in range(2):
        engine.add(build.prompts()[i], params(i))
    real = engine.target.forward
    with patched() as patch:

        def spoil(*arguments: Any, **options: Any) -> Any:
            forward = real(*arguments, **options)
            forward.logits = forward.logits.clone()
            forward.logits[0] = torch.nan
            return forward

        patch.setattr(engine.target, "forward", spoil)
        with pytest.raises(StateError):
            engine.step()
    engine.reset()
