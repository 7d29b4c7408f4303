"""Overlapped drafting: drafts equal those of the model alone, whichever outcomes were foreseen and
whenever the verdict comes.

Also tested: all kinds of rules, that nothing outlives its round, and requests that end, are
preempted or start again in between."""

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
from tests.draft.helpers import (
    FILTERED,
    GREEDY,
    KERNELS,
    SETTINGS,
    WARM,
    assert_same_draft,
    drafts_of,
    make_request,
    refused,
)
from tests.draft.test_draft_model import models, proposer, text_of

ROUNDS = int(os.environ.get("FORERUN_ROUNDS", "600"))


class Driven(OverlapProposer):
    """Makes so many forward passes ahead (None: all of them) before it returns."""

    passes: int | None = None

    def begin_overlap(self, requests: Sequence[DraftRequest], drafts: Sequence[Draft]) -> None:
        run = self._pool.submit
        self._pool.submit = lambda work, lookaheads: run(self._some, lookaheads)
        super().begin_overlap(requests, drafts)
        self.finish()
        self.end_overlap()

    def _some(self, lookaheads: Sequence[object]) -> None:
        for count, _ in enumerate(self.steps(lookaheads), 1):
            if count == self.passes:
                break


def verdict(draft: Draft, ahead: OverlapProposer, slot: int, generator: random.Random) -> list[int]:
    """Return the tokens of a verdict: a foreseen outcome or another one."""
    lookahead = ahead._lookaheads.get(slot)
    if lookahead and lookahead.branches and generator.random() < 0.7:
        return list(generator.choice(lookahead.branches).outcome)
    path = draft.path_to(generator.randrange(len(draft)))
    return [*(draft.tokens[node] for node in path[1:]), generator.randrange(tiny.VOCAB)]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("shape", ["coupled", "chains", "trees"])
@SETTINGS
@pytest.mark.parametrize("kernels", KERNELS)
def test_drafts_equal_those_of_the_model_alone(
    kernels: str, params: SamplingParams, shape: str
) -> None:
    """This holds behind any verdict and after any number of passes, probs included."""
    width = 2 if shape == "trees" else 1
    alone, model = models(kernels, 2, width)
    ahead = Driven(model)
    generator = random.Random(3)
    texts = {s: text_of(4 + 3 * s, s) for s in range(4)}
    options = {"coupled": shape == "coupled", "branching": shape != "chains"}
    for slot, text in texts.items():
        alone.open(slot, text)
        ahead.open(slot, text)
    for count in range(24):
        requests = [
            make_request(text, params, depth=2 + (count + s) % 3, slot=s, **options)
            for s, text in texts.items()
        ]
        expected, found = alone.propose(requests), ahead.propose(requests)
        for one, other in zip(found, expected, strict=True):
            assert_same_draft(one, other)
        ahead.passes = [1, 2, 3, None][count % 4]
        ahead.begin_overlap(requests, found)
        for slot, text in texts.items():
            text += verdict(found[slot], ahead, slot, generator)
    assert ahead.hits > 10 and ahead.hits < ahead.verdicts
    for slot in texts:
        ahead.close(slot)
    model.runner.cache.pages.check()
    assert model.runner.cache.pages.available == model.runner.cache.pages.count


def test_levels_drafted_ahead_take_no_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the levels that are left take one."""
    (model,) = models("torch", 1)
    passes, forward = list[int](), Runner.forward
    monkeypatch.setattr(
        Runner, "forward", lambda self, segments: (passes.append(1), forward(self, segments))[1]
    )
    for done, left in ((None, 0), (4, 1), (3, 2), (2, 3)):
        ahead, text = Driven(model), text_of(9)
        ahead.passes = done
        (draft,) = drafts_of(ahead, [make_request(text, depth=4)])
        ahead.begin_overlap([make_request(text, depth=4)], [draft])
        text += ahead._lookaheads[0].branches[0].outcome
        passes.clear()
        (draft,) = ahead.propose([make_request(text, depth=4)])
        assert len(draft) == 5 and len(passes) == left and ahead.hits == 1
        assert draft.sources[1:] == ["ahead&model"] * (4 - left) + ["model"] * left
        ahead.close(0)


def test_outcomes_are_ranked_with_the_noise_of_the_target() -> None:
    """A target that agrees with the model draws the same tokens, since the noise is known."""
    for params in (WARM, replace(WARM, temperature=1.5), FILTERED):
        (model,) = models("torch", 1)
        ahead, text = Driven(model, outcomes=4), text_of(9)
        (deep,) = drafts_of(ahead, [make_request(text, params, depth=4)])
        ahead.begin_overlap([make_request(text, params, depth=3)], [deep.first(3)])
        outcomes = [b.outcome for b in ahead._lookaheads[0].branches]
        assert tuple(deep.tokens[1:]) in outcomes, (
            "the whole path and the token that the model would draw behind it are not foreseen"
        )
        assert len(set(outcomes)) == 4
        children = {tuple(deep.tokens[1 : n + 1]) for n in range(1, 4)}
        assert not children & set(outcomes), "a drafted child cannot end a path"


def test_where_there_is_no_room_the_model_drafts_alone() -> None:
    """There is none in a full pool, and behind a token that the model lacks."""
    small, text = proposer(tokens=32, page=4, slots=2), text_of(20)
    for model, token in ((small, 5), (proposer(vocab=10**6), tiny.VOCAB + 3)):
        ahead = Driven(model)
        (draft,) = drafts_of(ahead, [make_request(text)])
        assert len(draft) == 5
        ahead.begin_overlap(
            [make_request(text)], [Draft.chain(text[-1], [*draft.tokens[1:], token], "other")]
        )
        assert not ahead._lookaheads
        (again,) = ahead.propose([make_request([*text, draft.tokens[1]])])
        assert again.tokens == draft.tokens[1:2] + again.tokens[1:] and len(again) > 1
        ahead.close(0)
        model.runner.cache.pages.check()


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "warm"])
def test_verdicts_may_come_at_any_moment(params: SamplingParams) -> None:
    """The drafting thread is stopped before, in or after its passes; requests end and restart."""
    if native.library() is None:
        pytest.skip(native.reason())
    alone, model = models("native", 2)
    ahead, generator = OverlapProposer(model), random.Random(5)
    texts = {slot: text_of(4 + slot, slot) for slot in range(3)}

    def begin(slot: int, text: list[int]) -> None:
        texts[slot] = text
        for each in (alone, ahead):
            each.open(slot, text)

    for slot, text in texts.items():
        begin(slot, text)
    for count in range(ROUNDS):
        asked = [slot for slot in texts if generator.random() < 0.8]
        requests = [
            make_request(texts[slot], params, depth=generator.randint(1, 5), slot=slot)
            for slot in asked
        ]
        expected, found = alone.propose(requests), ahead.propose(requests)
        assert [draft.tokens for draft in found] == [draft.tokens for draft in expected]
        ahead.begin_overlap(requests, found)
        for _ in range(generator.choice((0, 0, 200, 2000, 20_000))):
            pass  # time that a target may take
        ahead.end_overlap()
        for slot, draft in zip(asked, found, strict=True):
            texts[slot] += verdict(draft, ahead, slot, generator)
        for slot in [
            slot for slot, text in texts.items() if len(text) > 150 or generator.random() < 0.02
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
def test_only_draft_models_can_draft_ahead(spec: str) -> None:
    with refused(ConfigError, "it takes a draft model"):
        LLM(tiny.repetitive(), draft=spec.format(tiny.repetitive(0.1)), kv_tokens=192)


def test_an_error_of_drafting_ahead_is_raised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next proposal raises it; closing a slot does not."""
    (model,) = models("torch", 1)
    ahead, text, requests = OverlapProposer(model), text_of(9), [make_request(text_of(9))]
    ahead.open(0, text)
    ahead.open(1, text)
    (draft,) = ahead.propose(requests)
    with monkeypatch.context() as broken:
        broken.setattr(ahead, "steps", lambda lookaheads: 1 / 0)
        for _ in range(2):
            ahead.begin_overlap(requests, [draft])
            ahead.finish()
            ahead.close(1)
            ahead.open(1, text)
        ahead.begin_overlap(requests, [draft])
        with pytest.raises(ZeroDivisionError):
            ahead.propose(requests)
    assert ahead.propose(requests)[0].tokens == draft.tokens
