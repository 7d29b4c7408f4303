"""Drafting ahead: the drafts of the model itself, whatever was foreseen, whenever the verdict
comes.

Protects: that what is drafted behind an outcome is what would be drafted later, under every kind of
rule; that nothing of it outlives its round; that requests which end, are preempted or come anew in
between lose nothing."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from forerun import LLM, ConfigError, SamplingParams
from forerun.draft.compose import OverlapProposer
from forerun.draft.proposer import DraftRequest
from forerun.kernels import native
from forerun.runtime.torch_runner import Runner
from forerun.types import Draft
from tests import tiny
from tests.draft.asking import FILTERED, GREEDY, KERNELS, SETTINGS, WARM, refused, row, same
from tests.draft.test_draft_model import models, proposer, text_of

ROUNDS = int(os.environ.get("FORERUN_ROUNDS", "600"))


class Driven(OverlapProposer):
    """Goes so many passes ahead (None: as many as there are), at once."""

    passes: int | None = None

    def begin_overlap(self, rows: Sequence[DraftRequest], drafts: Sequence[Draft]) -> None:
        run = self._pool.submit
        self._pool.submit = lambda work, lookaheads: run(self._some, lookaheads)
        super().begin_overlap(rows, drafts)
        self.finish()
        self.end_overlap()

    def _some(self, lookaheads: Sequence[object]) -> None:
        for count, _ in enumerate(self.steps(lookaheads), 1):
            if count == self.passes:
                break


def verdict(draft: Draft, ahead: OverlapProposer, slot: int, chance: random.Random) -> list[int]:
    """What a target says of a draft: what was foreseen, or anything."""
    lookahead = ahead._lookaheads.get(slot)
    if lookahead and lookahead.branches and chance.random() < 0.7:
        return list(chance.choice(lookahead.branches).outcome)
    path = draft.path_to(chance.randrange(len(draft)))
    return [*(draft.tokens[node] for node in path[1:]), chance.randrange(tiny.VOCAB)]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("how", ["coupled", "chains", "trees"])
@SETTINGS
@pytest.mark.parametrize("kernels", KERNELS)
def test_drafts_are_those_of_the_model_alone(
    kernels: str, params: SamplingParams, how: str
) -> None:
    """Behind any verdict, and however far it has got, laws included; under rules that match tokens,
    and those that keep laws, with chains and with trees."""
    width = 2 if how == "trees" else 1
    alone, model = models(kernels, 2, width)
    ahead = Driven(model)
    chance = random.Random(3)
    texts = {s: text_of(4 + 3 * s, s) for s in range(4)}
    options = {"coupled": how == "coupled", "branching": how != "chains"}
    for slot, text in texts.items():
        alone.open(slot, text)
        ahead.open(slot, text)
    for count in range(24):
        rows = [
            row(text, params, depth=2 + (count + s) % 3, slot=s, **options)
            for s, text in texts.items()
        ]
        expected, found = alone.propose(rows), ahead.propose(rows)
        for one, other in zip(found, expected, strict=True):
            same(one, other)
        ahead.passes = [1, 2, 3, None][count % 4]
        ahead.begin_overlap(rows, found)
        for slot, text in texts.items():
            text += verdict(found[slot], ahead, slot, chance)
    assert ahead.hits > 10 and ahead.hits < ahead.verdicts
    for slot in texts:
        ahead.close(slot)
    model.runner.cache.pages.check()
    assert model.runner.cache.pages.available == model.runner.cache.pages.count


def test_what_was_foreseen_takes_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it, or as many levels as were left."""
    (model,) = models("torch", 1)
    passes, forward = list[int](), Runner.forward
    monkeypatch.setattr(
        Runner, "forward", lambda self, segments: (passes.append(1), forward(self, segments))[1]
    )
    for done, left in ((None, 0), (4, 1), (3, 2), (2, 3)):
        ahead, text = Driven(model), text_of(9)
        ahead.passes = done
        ahead.open(0, text)
        (draft,) = ahead.propose([row(text, depth=4)])
        ahead.begin_overlap([row(text, depth=4)], [draft])
        text += ahead._lookaheads[0].branches[0].outcome
        passes.clear()
        (draft,) = ahead.propose([row(text, depth=4)])
        assert len(draft) == 5 and len(passes) == left and ahead.hits == 1
        assert draft.sources[1:] == ["ahead&model"] * (4 - left) + ["model"] * left
        ahead.close(0)


def test_outcomes_are_ranked_by_what_the_target_will_draw_with() -> None:
    """A target that agrees with the model draws what the model draws, at any temperature, if the
    noise is known."""
    for params in (WARM, replace(WARM, temperature=1.5), FILTERED):
        (model,) = models("torch", 1)
        ahead, text = Driven(model, outcomes=4), text_of(9)
        ahead.open(0, text)
        (deep,) = ahead.propose([row(text, params, depth=4)])
        ahead.begin_overlap([row(text, params, depth=3)], [deep.first(3)])
        said = [b.outcome for b in ahead._lookaheads[0].branches]
        assert tuple(deep.tokens[1:]) in said, (
            "the path goes on to the end, and then as the model would have said"
        )
        assert len(set(said)) == 4
        children = {tuple(deep.tokens[1 : n + 1]) for n in range(1, 4)}
        assert not children & set(said), "an outcome that was drafted is no end of a path"


def test_where_there_is_no_room_it_is_the_model_alone() -> None:
    """In the pool, in the context, after a token that the model has not got."""
    small, text = proposer(tokens=32, page=4, slots=2), text_of(20)
    for model, token in ((small, 5), (proposer(vocab=10**6), tiny.VOCAB + 3)):
        ahead = Driven(model)
        ahead.open(0, text)
        (draft,) = ahead.propose([row(text)])
        assert len(draft) == 5
        ahead.begin_overlap(
            [row(text)], [Draft.chain(text[-1], [*draft.tokens[1:], token], "other")]
        )
        assert not ahead._lookaheads
        (again,) = ahead.propose([row([*text, draft.tokens[1]])])
        assert again.tokens == draft.tokens[1:2] + again.tokens[1:] and len(again) > 1
        ahead.close(0)
        model.runner.cache.pages.check()


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "warm"])
def test_verdicts_come_at_any_moment(params: SamplingParams) -> None:
    """The other thread is stopped wherever it happens to be: after no pass, in one, when it is
    through. Requests end and come anew in between."""
    if native.library() is None:
        pytest.skip(native.reason())
    alone, model = models("native", 2)
    ahead, chance = OverlapProposer(model), random.Random(5)
    texts = {slot: text_of(4 + slot, slot) for slot in range(3)}

    def begin(slot: int, text: list[int]) -> None:
        texts[slot] = text
        for each in (alone, ahead):
            each.open(slot, text)

    for slot, text in texts.items():
        begin(slot, text)
    for count in range(ROUNDS):
        asked = [slot for slot in texts if chance.random() < 0.8]
        rows = [row(texts[slot], params, depth=chance.randint(1, 5), slot=slot) for slot in asked]
        expected, found = alone.propose(rows), ahead.propose(rows)
        assert [draft.tokens for draft in found] == [draft.tokens for draft in expected]
        ahead.begin_overlap(rows, found)
        for _ in range(chance.choice((0, 0, 200, 2000, 20_000))):
            pass  # what a target may take
        ahead.end_overlap()
        for slot, draft in zip(asked, found, strict=True):
            texts[slot] += verdict(draft, ahead, slot, chance)
        for slot in [
            slot for slot, text in texts.items() if len(text) > 150 or chance.random() < 0.02
        ]:
            for each in (alone, ahead):  # aborted, preempted, ended
                each.close(slot)
            begin(slot, text_of(4 + count % 7, count))
    ahead.reset()
    model.runner.cache.pages.check()


@pytest.mark.parametrize(
    "spec",
    ["ahead(suffix)", "ahead(model:{0}|suffix)", "ahead(ahead(model:{0}))", "ahead(self:window=9)"],
)
def test_what_cannot_draft_ahead(spec: str) -> None:
    with refused(ConfigError, "it takes a draft model"):
        LLM(tiny.spoken(), draft=spec.format(tiny.spoken(0.1)), kv_tokens=192)


def test_what_fails_ahead_is_told_and_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """To who asks for a draft next, once; closing a slot is none of that."""
    (model,) = models("torch", 1)
    ahead, text, rows = OverlapProposer(model), text_of(9), [row(text_of(9))]
    ahead.open(0, text)
    ahead.open(1, text)
    (draft,) = ahead.propose(rows)
    with monkeypatch.context() as broken:
        broken.setattr(ahead, "steps", lambda lookaheads: 1 / 0)
        for _ in range(2):
            ahead.begin_overlap(rows, [draft])
            ahead.finish()
            ahead.close(1)
            ahead.open(1, text)
        ahead.begin_overlap(rows, [draft])
        with pytest.raises(ZeroDivisionError):
            ahead.propose(rows)
    assert ahead.propose(rows)[0].tokens == draft.tokens
