"""Which part of a composed proposer drafts in a step; each has its own costs and acceptance."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forerun import LLM, SamplingParams
from forerun.draft.compose import BestOf, InTurn
from forerun.draft.draft_model import DraftModel
from forerun.draft.proposer import DraftRequest, Proposer
from forerun.draft.self_speculation import SelfSpeculation
from forerun.engine.acceptance import BetaCounts, DraftOption, kind_of_match
from forerun.engine.depth import DEEPEST, BatchState
from forerun.engine.engine import Engine
from forerun.engine.request import Request
from forerun.engine.stats import NO_ROOM
from forerun.errors import ForerunError
from forerun.runtime.torch_runner import Runner
from forerun.types import Draft, Proposal, Round
from tests import tiny
from tests.engine import build


class Sometimes(Proposer):
    """Drafts zeros if the text's length is a multiple of `every`; notes lengths and depths."""

    def __init__(self, name: str, every: int) -> None:
        self.name, self.every = name, every
        self.calls: list[tuple[int, int]] = []

    def propose(self, rows: Sequence[DraftRequest]) -> list[Draft]:
        self.calls += [(len(row.tokens), row.depth) for row in rows]
        drafts = []
        for row in rows:
            tokens = [0] * row.depth if len(row.tokens) % self.every == 0 else []
            drafts.append(Draft.chain(row.tokens[-1], tokens, self.name))
        return drafts


def engine_of(*parts: Proposer, rule: str = "match", name: str = "both") -> Engine:
    """Return an engine with one proposer, made of `parts` in turn."""
    runner = Runner(tiny.decoder(tiny.family("llama")), tokens=512, page=4, slots=4)
    return Engine(runner, {name: InTurn(parts) if len(parts) > 1 else parts[0]}, rule=rule)


def add(
    engine: Engine,
    draft: str = "both",
    *,
    temperature: float = 0.8,
    length: int = 30,
    **options: Any,
) -> Request:
    """Add a request with a draft depth of 2, unless `options` has another one."""
    params = build.params(1, temperature, length)
    return engine.add(build.prompts()[1], params, draft=draft, **{"depth": 2} | options)


def rounds_of(engine: Engine) -> list[Round]:
    """Run to the end and return the traces."""
    return [event.round for event in build.finish(engine) if event.round]


def test_the_next_part_drafts_if_the_first_has_no_draft() -> None:
    first, second = Sometimes("first", 3), Sometimes("second", 1)
    engine = engine_of(first, second)
    request = add(engine)
    build.finish(engine)
    assert {length for length, _ in second.calls} == {
        length for length, _ in first.calls if length % 3
    }
    assert set(request.stats.by_source) == {"first", "second"}
    assert {depth for _, depth in first.calls + second.calls} <= {1, 2}


def test_a_part_without_a_draft_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next part is called, and the first one is counted as having had nothing to offer."""
    first, second = Sometimes("first", 3), Sometimes("second", 1)
    monkeypatch.setattr(
        first, "has_draft", lambda slot, tokens: len(tokens) % 3 == 0, raising=False
    )
    engine = engine_of(first, second)
    request = add(engine)
    build.finish(engine)
    assert first.calls and {length % 3 for length, _ in first.calls} == {0}
    assert {length % 3 for length, _ in second.calls} == {1, 2}
    assert engine.policy.sources["first"].offered.no > 0
    assert set(request.stats.by_source) == {"first", "second"}


@pytest.mark.parametrize("method", ["has_draft", "propose"])
def test_a_drafter_that_fails_ends_its_request_and_its_error_is_the_cause(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error in `propose` names the drafter and the line."""
    first = Sometimes("first", 1)

    def fail(*_: Any) -> None:
        raise ValueError("not for clients")

    monkeypatch.setattr(first, method, fail)
    engine = engine_of(first, Sometimes("second", 1))
    add(engine)
    message = "ValueError$"
    if method == "propose":
        message = r"'first' failed in test_drafting.py, line \d+: ValueError$"
    with pytest.raises(ForerunError, match=message) as error:
        build.finish(engine)
    assert isinstance(error.value.__cause__, ValueError)


def test_each_part_has_its_own_costs_and_acceptance() -> None:
    """A part whose drafts always fail is paused, and the other one still drafts."""
    first, second = Sometimes("first", 1), Sometimes("second", 1)
    engine = engine_of(first, second)
    request = add(engine, length=100, depth="auto")
    rejected = engine.drafting.state(request).acceptance["first"]
    rejected.kept.no = 1000.0
    build.finish(engine)
    assert len(first.calls) < 10 < len(second.calls) + len(first.calls)
    passes, drafts = engine.policy.cost_table()
    assert passes and {"first", "second"} >= drafts.keys() and "second" in drafts
    assert engine.drafting.state(request).acceptance["second"] is not rejected
    assert engine.drafting.state(request).acceptance["second"].kept.no > 0


class WrongShape(Proposer):
    """Returns drafts with these parents, whatever depth was asked for."""

    name = "wrong"

    def __init__(self, parents: Sequence[int], token: int) -> None:
        self.parents, self.token = parents, token

    def propose(self, rows: Sequence[DraftRequest]) -> list[Draft]:
        drafts = [Draft.root(row.tokens[-1]) for row in rows]
        for draft in drafts:
            for parent in self.parents:
                draft.add(self.token, parent, self.name)
        return drafts


@pytest.mark.parametrize(
    ("parents", "token", "message"),
    [
        ([0, 0, 0], 1, "asked for 2 tokens, 2 deep, and gave 3, 1 deep"),
        ([0, 1, 2], 1, "gave 3, 3 deep"),
        ([0], 64, "not in the vocabulary of 64"),
        ([0], -1, "not in the vocabulary of 64"),
    ],
)
def test_drafts_that_are_too_large_or_out_of_the_vocabulary_are_refused(
    parents: list[int], token: int, message: str
) -> None:
    """A larger draft has no reserved rows and would overwrite other requests' cache rows."""
    engine = engine_of(WrongShape(parents, token))
    add(engine)
    with pytest.raises(ForerunError, match=message):
        build.finish(engine)


class Faulty(Proposer):
    """Proposes what a function of its rows returns."""

    name = "faulty"

    def __init__(self, result_of: Callable[[Sequence[DraftRequest]], Any]) -> None:
        self.result_of = result_of

    def propose(self, rows: Sequence[DraftRequest]) -> Any:
        return self.result_of(rows)


def chain(row: DraftRequest) -> Draft:
    return Draft.chain(row.tokens[-1], [3], "faulty")


def changed(**fields: Any) -> Callable[[Sequence[DraftRequest]], Any]:
    """Return a function that makes chains of one token with these fields overwritten."""

    def result_of(rows: Sequence[DraftRequest]) -> list[Draft]:
        drafts = [chain(row) for row in rows]
        for draft, (name, value) in itertools.product(drafts, fields.items()):
            setattr(draft, name, value)
        return drafts

    return result_of


FAULTS: dict[str, tuple[Callable[[Sequence[DraftRequest]], Any], str]] = {
    "none": (lambda rows: None, "gave None"),
    "too few": (lambda rows: [], "asked for a list of 1 drafts and gave 0 drafts"),
    "too many": (lambda rows: [chain(row) for row in rows] * 2, "gave 2 drafts"),
    "a generator": (lambda rows: (chain(row) for row in rows), "gave <generator"),
    "one draft": (lambda rows: chain(rows[0]), "gave Draft"),
    "list of None": (lambda rows: [None] * len(rows), "gave None, which is no Draft"),
    "lists of tokens": (lambda rows: [[1, 2]] * len(rows), "which is no Draft"),
    "no root": (changed(tokens=[], parents=[], sources=[], proposals=[]), "needs a root"),
    "another root": (changed(tokens=[63, 3]), "its root is request.tokens"),
    "lists of several lengths": (
        changed(sources=[]),
        "2 tokens, 2 parents, 0 sources, 2 proposals",
    ),
    "text as tokens": (changed(tokens="no"), "begins with token n"),
    "text as a token": (
        lambda rows: [Draft.chain(row.tokens[-1], ["x"], "") for row in rows],
        "no Draft",
    ),
    "no list of parents": (changed(parents=None), "no Draft"),
    "a parent behind its child": (changed(parents=[-1, 1]), "parents come before"),
    "a negative parent": (changed(parents=[-1, -1]), "parents come before"),
    "sampled tokens": (
        changed(proposals=[Proposal.DETERMINISTIC, Proposal.SAMPLED]),
        "request.coupled",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("rule", ["match", "token"])
def test_an_invalid_draft_ends_its_request_with_a_one_line_error(rule: str, name: str) -> None:
    """Other requests in the same steps go on."""
    result_of, message = FAULTS[name]
    if rule == "token" and name == "sampled tokens":
        message = "without the distributions"
    engine = engine_of(Faulty(result_of), rule=rule, name="faulty")
    bad = add(engine, "faulty")
    good = engine.add(build.prompts()[2], build.params(2, 0.8, 8))
    build.finish_all(engine)
    assert isinstance(bad.error, ForerunError)
    assert good.error is None
    assert good.finish_reason == "length"
    assert message in str(bad.error) and "'faulty'" in str(bad.error) and "\n" not in str(bad.error)


def test_a_tree_under_a_rule_of_chains_is_refused() -> None:
    wide = WrongShape([0, 0], 1)
    wide.width = 2
    engine = engine_of(wide, rule="block", name="wrong")
    add(engine, "wrong")
    with pytest.raises(ForerunError, match=r"look at request\.branching"):
        build.finish(engine)


def test_a_drafter_that_fails_to_close_a_slot_leaves_other_requests_unharmed() -> None:
    """The slot is freed, though `open` failed and `close` finds nothing to delete."""

    class Forgetful(Proposer):
        name = "forgetful"

        def __init__(self) -> None:
            self.slots: dict[int, int] = {}

        def open(self, slot: int, tokens: Sequence[int], references: Sequence[Any] = ()) -> None:  # type: ignore[override]
            self.slots[slot] = 0

        def close(self, slot: int, finished: Sequence[int] | None = None) -> None:
            del self.slots[slot]

    engine = engine_of(Forgetful(), name="forgetful")
    bad = add(engine, "forgetful")
    good = engine.add(build.prompts()[2], build.params(2, 0.8, 8))
    build.finish_all(engine)
    assert isinstance(bad.error.__cause__, TypeError)
    assert good.error is None
    assert good.finish_reason == "length"
    assert len(engine.scheduler.slots) == 4
    build.check_idle(engine)


def test_a_cascade_of_cascades_is_flat() -> None:
    parts = [Sometimes(name, 1) for name in "abc"]
    cascade = InTurn((parts[0], InTurn(parts[1:])))
    assert list(cascade.parts) == parts and cascade.name == "a+b+c"


class Copies(Proposer):
    """Drafts from a known text, as if it were copied behind a match of `match` tokens."""

    copies_text = True

    def __init__(self, text: Sequence[int], match: int, name: str = "copies") -> None:
        self.name, self.text, self.match, self.deepest = name, text, match, 0

    def propose(self, rows: Sequence[DraftRequest]) -> list[Draft]:
        self.deepest = max([self.deepest, *(row.depth for row in rows)])
        drafts = []
        for row in rows:
            copied = list(self.text[len(row.tokens) :][: row.depth])
            drafts.append(Draft.chain(row.tokens[-1], copied, self.name, self.match))
        return drafts


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("rule", ["match", "token"])
def test_copies_that_are_not_verified_are_compared_with_the_emitted_tokens(
    right: bool, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy prefers another proposer's drafts here, but still learns whether the copies were
    right. The output does not change."""
    prompt, params = build.prompts()[1], build.params(1, 0.0, 40)
    engine = engine_of(Sometimes("second", 1))
    plain = engine.add(prompt, params, draft="off")
    build.finish(engine)
    text = plain.tokens if right else [token ^ 1 for token in plain.tokens]
    engine = engine_of(Copies(text, 5), Sometimes("second", 1), rule=rule)
    kind = kind_of_match("copies", 5)
    compared: list[str] = []

    def cut_copy(kind: str, *_: object) -> tuple[int, float]:
        compared.append(kind)
        return 0, 0.0

    def expected_speed(option: DraftOption, batch: BatchState) -> float:
        compared.append(option.source)
        return 1.0

    monkeypatch.setattr(engine.policy, "cut_copy", cut_copy)
    monkeypatch.setattr(engine.policy, "expected_speed", expected_speed)
    request = engine.add(prompt, params, draft="both", depth="auto")
    build.finish(engine)
    assert request.tokens == plain.tokens
    assert set(compared) == {kind, "second"}
    assert set(request.stats.by_source) == {"second"}
    learned = engine.drafting.state(request).acceptance[kind].kept
    assert (learned.yes > 0) == right and (learned.no > 0) == (not right)


def cheap(proposer: Proposer) -> Engine:
    """Return an engine whose cost model has fixed costs: further rows of a pass are cheap."""
    engine = engine_of(proposer, name=proposer.name)
    costs = engine.policy.costs
    costs.known = lambda *_: True
    costs.reach = lambda tokens: tokens + 64
    costs.forward = lambda tokens: 1 + 0.02 * tokens
    return engine


def finished(engine: Engine, draft: str) -> Request:
    request = add(engine, draft, temperature=0.0, length=40, depth="auto")
    build.finish(engine)
    return request


def test_the_best_of_several_copies_is_verified_and_the_others_are_scored() -> None:
    """The longer match is right here, in either order of the proposers."""
    text = finished(engine_of(Sometimes("second", 1)), "off").tokens
    short, long = Copies([token ^ 1 for token in text], 2, "short"), Copies(text, 40, "long")
    for parts in ((short, long), (long, short)):
        best = BestOf(parts)
        engine = cheap(best)
        finished(engine, best.name)
        request = finished(engine, best.name)
        assert request.tokens == text and not best.rivals
        assert set(request.stats.by_source) == {"long"} and request.stats.steps < 12
        wrong, right = (
            engine.drafting.state(request).acceptance[kind_of_match(name, match)].kept
            for name, match in (("short", 2), ("long", 40))
        )
        assert wrong.no > 1 and not wrong.yes and not right.no


def test_a_trace_has_the_acceptance_rate_of_the_drafter_whose_draft_was_verified() -> None:
    """With several copies it is the rate of the verified one, in either order."""
    text = finished(engine_of(Sometimes("second", 1)), "off").tokens
    short, long = Copies([token ^ 1 for token in text], 2, "short"), Copies(text, 40, "long")
    rates = {"short": 0.25, "long": 0.75}
    for parts in ((short, long), (long, short)):
        best = BestOf(parts)
        engine = cheap(best)
        finished(engine, best.name)
        engine.policy.acceptance_rate = lambda name, _: rates.get(name, 0.5)  # type: ignore[method-assign]
        add(engine, best.name, temperature=0.0, length=40, depth="auto", trace=True)
        drafted = [round for round in rounds_of(engine) if len(round.draft) > 1]
        assert drafted and all(round.rate == rates[round.draft.sources[1]] for round in drafted)


def test_a_trace_has_the_drafters_probability_of_each_drafted_token() -> None:
    """The server keeps these numbers instead of distributions of megabytes."""
    drawn = Sometimes("drawn", 1)
    engine = engine_of(drawn)
    propose = drawn.propose

    def with_probs(rows: Sequence[DraftRequest]) -> Sequence[Draft]:
        drafts = propose(rows)
        for draft in drafts:
            draft.proposals = [Proposal.DETERMINISTIC, *[Proposal.SAMPLED] * (len(draft) - 1)]
            draft.probs = np.full((len(draft), engine.target.decoder.config.vocab), 0.25)
        return drafts

    drawn.propose = with_probs  # type: ignore[method-assign]
    add(engine, length=40, depth=1, rule="token", trace=True)
    assert {q for round in rounds_of(engine) for q in round.drafted} == {0.25}


def test_a_trace_never_has_the_acceptance_rate_of_a_rival(monkeypatch: pytest.MonkeyPatch) -> None:
    """The source of a cascade's token names all drafters that took part in it."""
    first, rival = Sometimes("first", 1), Sometimes("rival", 1)
    monkeypatch.setattr(
        first, "propose", lambda rows: [Draft.chain(row.tokens[-1], [0], "x&first") for row in rows]
    )
    best = BestOf((first, rival))
    engine = cheap(best)
    engine.set_policy(build.Eager())
    monkeypatch.setattr(engine.policy, "rank", lambda groups, batch: list(range(len(groups))))
    monkeypatch.setattr(engine.policy, "pick_rival_probe", lambda *_: 0)
    monkeypatch.setattr(
        engine.policy,
        "acceptance_rate",
        lambda name, _: {"first": 0.25, "rival": 0.75}.get(name, 0.5),
    )
    add(engine, best.name, temperature=0.0, length=40, depth="auto", trace=True)
    rates = [round.rate for round in rounds_of(engine) if len(round.draft) > 1]
    assert len(rates) > 5 and set(rates) == {0.25} and len(rival.calls) > 5


def test_a_copy_is_requested_at_full_depth_and_counted_as_far_as_it_was_verified() -> None:
    """By the proposer's acceptance rate of one half only a few tokens would be requested. A copy
    that is not worth verifying counts as nothing offered."""
    text = finished(engine_of(Sometimes("second", 1)), "off").tokens
    copies = Copies([token ^ 1 for token in text], 2)
    engine = cheap(copies)
    request = add(engine, "copies", temperature=0.0, length=40, depth="auto")
    engine.drafting.state(request).acceptance["copies"].kept = BetaCounts(50, 50)
    engine.drafting.state(request).acceptance[kind_of_match("copies", 2)].kept = BetaCounts(0, 1000)
    build.finish(engine)
    assert request.tokens == text and copies.deepest == DEEPEST
    assert engine.drafting.state(request).acceptance[kind_of_match("copies", 2)].kept.no > 1
    assert engine.drafting.state(request).acceptance["copies"].offered.no > 1
    assert not engine.drafting.state(request).acceptance["copies"].offered.yes


def test_a_shorter_copy_is_requested_if_there_is_no_room_for_a_full_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pages are scarce under load, and more tokens are requested than are verified."""
    text = finished(engine_of(Sometimes("second", 1)), "off").tokens
    copies = Copies(text, 2)
    monkeypatch.setattr(copies, "most", lambda depth: depth if depth < DEEPEST else 1 << 20)
    engine = engine_of(copies, name="copies")
    engine.set_policy(build.Eager())
    request = add(engine, "copies", temperature=0.0, length=40, depth="auto")
    build.finish(engine)
    assert request.tokens == text
    assert request.stats.by_source["copies"].accepted > 5 and not request.stats.reasons[NO_ROOM]


def test_a_drafter_with_a_long_lag_waits_during_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second request has a long prompt that is read in many steps; nothing is drafted in them."""
    drafter = Sometimes("second", 1)
    engine = engine_of(drafter)
    engine.scheduler.chunk = 3
    engine.set_policy(build.Eager())
    waiting: list[int] = []
    monkeypatch.setattr(
        engine.policy,
        "should_wait",
        lambda option, batch: waiting.append(batch.num_prompt_tokens) or True,
    )
    first = engine.add(build.prompts()[0], build.params(1, 0.0, 40), draft="both", depth="auto")
    while first.produced < 4:
        engine.step_or_raise()
    num_calls = len(drafter.calls)
    assert num_calls and not waiting
    second = engine.add(build.prompts()[6], build.params(1, 0.0, 4), draft="off")
    while second.produced == 0:
        engine.step_or_raise()
    assert len(waiting) > 10 and min(waiting) > 0
    assert len(drafter.calls) <= num_calls + 1  # the step of the last chunk reads no more prompt
    build.finish(engine)
    assert len(drafter.calls) > num_calls


def test_step_overhead_is_measured_between_steps_of_the_same_requests() -> None:
    """It is what the clock counts beside drafting and the pass; a step that reads a prompt, or with
    other requests than the next one, says nothing about it."""
    engine = engine_of(Sometimes("first", 1), name="first")
    ticks = itertools.count()
    engine.drafting.clock = lambda: float(next(ticks))
    samples: list[tuple[float, int]] = []
    engine.policy.costs.add_step_overhead = lambda *sample: samples.append(sample)  # type: ignore[method-assign]
    requests = [add(engine, "first", length=6), add(engine, "first", length=30)]
    while any(not request.produced for request in requests):
        engine.step()
        assert not samples
    while engine.busy:
        before, count = len(samples), len(engine.requests)
        engine.step()
        assert len(samples) <= before + 1
        assert all(num_requests == count for _, num_requests in samples[before:])
    assert {num_requests for _, num_requests in samples} == {1, 2}
    assert all(seconds > 0 for seconds, _ in samples)


def test_step_overhead_is_what_neither_the_pass_nor_drafting_took() -> None:
    drafting = engine_of(Sometimes("first", 1), name="first").drafting
    samples: list[tuple[float, int]] = []
    drafting.policy.costs.add_step_overhead = lambda *sample: samples.append(sample)  # type: ignore[method-assign]

    def scheduled(number: int, count: int = 1) -> Any:
        return SimpleNamespace(request=SimpleNamespace(id=number), generates=True, count=count)

    def step(batch: Sequence[Any], now: float, measured: float = 5.0) -> None:
        drafting._record_step_overhead(batch, now)
        drafting._measured, drafting._drafting_seconds = measured, 2.0

    both, reading = [scheduled(1), scheduled(2)], [scheduled(1), scheduled(2), scheduled(3, 40)]
    step(both, 10.0)
    assert samples == []
    step(both, 20.0)
    assert samples == [(3.0, 2)]
    step(both, 29.0, measured=0.0)
    assert samples == [(3.0, 2), (2.0, 2)]
    step(both, 39.0)  # behind rounds in one call, which have no pass of their own
    step(reading, 49.0)
    step(reading, 59.0)
    step(both, 69.0)
    assert len(samples) == 2


def test_a_cached_prefix_is_not_part_of_a_draft_models_lag() -> None:
    llm = LLM(tiny.repetitive(), draft=f"model:{tiny.repetitive(0.05)}", kv_tokens=2048)
    engine, params = llm.engine, SamplingParams(max_tokens=8, ignore_eos=True)
    lags = []
    for _ in range(2):
        request = engine.add(list(range(3, 103)), params, draft="model", depth=2)
        while request.slot < 0:
            engine.step()
        (proposer,) = engine.drafting.proposers["model"].parts
        lags.append(engine.drafting._lag(request, proposer.name))
        build.finish(engine)
    assert lags[0] >= 100 and 0 < lags[1] < 32


def test_reading_with_a_draft_model_is_expected_to_cost_by_its_weights() -> None:
    target = Runner(tiny.decoder(tiny.family("llama")), tokens=128, page=4, slots=1)
    small = target.with_layers((0,), None)
    vocab = target.decoder.config.vocab
    drafters = {
        "both": InTurn([Sometimes("suffix", 2), DraftModel(small, vocab)]),
        "self": SelfSpeculation(target, (0,)),
    }
    shares = Engine(target, drafters).drafting.policy.costs.reading_shares
    assert shares == {"model": small.decoder.weight_bytes / target.decoder.weight_bytes}
    assert 0 < shares["model"] < 1
