"""A draft model of another vocabulary proposes what it would say of the same text, and says truly
how it drew.

Protects: that a drafter whose tokens are the target's by other names drafts what a drafter of the
target's vocabulary does; that going back over what was read is reading it afresh; that the law kept
under the ratio rules is the one drawn from; and the promise, with drafters of several kinds of
vocabularies."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from forerun.draft.cross_vocabulary import (
    CrossVocabularyModel,
    ModelVocabulary,
    RetokenizedText,
    SharedVocabulary,
    context_bytes,
    make_draft_model,
    tokens_behind,
)
from forerun.draft.draft_model import DraftModel
from forerun.draft.proposer import DraftRequest
from forerun.engine.engine import Engine
from forerun.engine.request import Request
from forerun.kernels import native
from forerun.models import config
from forerun.models.config import load_config
from forerun.models.decoder import Decoder, load_decoder
from forerun.runtime.native import NativeDecoder
from forerun.runtime.torch_runner import Runner
from forerun.sampling.params import SamplingParams
from forerun.types import Draft, Proposal
from forerun.verify import Noise
from tests import other_words, tiny
from tests.draft.asking import FILTERED, GREEDY, SETTINGS, WARM, compiled, row, same
from tests.engine import build
from tests.other_words import KINDS, shared, words

PROMPTS = [
    '{"name": "alpha", "sizes": [10',
    "the name of the colour is",
    "été 👍 and 数字",
    "x",
    "null}\n  grey ",
]


@functools.cache
def decoder(kind: str) -> Decoder:
    directory = tiny.spoken(0.05) if kind == "target" else other_words.drafter(kind)
    return load_decoder(directory, torch.float64, torch.device("cpu"), 512)


def runner(kind: str, tokens: int = 2048, page: int = 4, slots: int = 8) -> Runner:
    return Runner(decoder(kind), tokens=tokens, page=page, slots=slots)


def proposer(kind: str, **room: int) -> CrossVocabularyModel:
    return CrossVocabularyModel(runner(kind, **room), shared(kind))


def prompt(i: int) -> list[int]:
    return words("target").tokenizer.encode(PROMPTS[i])


def drafts_of(drafter: DraftModel, rows: Sequence[DraftRequest]) -> list[Draft]:
    for r in rows:
        drafter.open(r.slot, r.tokens)
    return drafter.propose(rows)


# ---------------------------------------------------------------- what is drafted


@SETTINGS
@pytest.mark.parametrize("coupled", [True, False])
def test_the_target_s_tokens_by_other_names_draft_alike(
    params: SamplingParams, coupled: bool
) -> None:
    """Whatever is drawn is drawn with the same noise, from the same laws. Text is spelled as
    usual."""
    texts = [prompt(i % len(PROMPTS)) + prompt(i // len(PROMPTS))[:i] for i in range(8)]
    rows = [
        row(text, params, 3 + i % 3, i, coupled=coupled, branching=False)
        for i, text in enumerate(texts)
    ]
    theirs, alike = drafts_of(proposer("shuffled"), rows), 0
    for r, one, other in zip(
        rows, theirs, drafts_of(DraftModel(runner("target"), tiny.WORDED), rows), strict=True
    ):
        assert len(one) > 1
        before = context_bytes(words("target"), r.tokens)
        text = before + b"".join(words("target").spellings[token] for token in other.tokens[1:])
        if not coupled or tokens_behind(words("target"), before, text) == other.tokens[1:]:
            same(one, other)
            alike += 1
    assert alike > 4


@pytest.mark.one_in(2)
@SETTINGS
@pytest.mark.parametrize("coupled", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_going_back_is_reading_afresh(kind: str, coupled: bool, params: SamplingParams) -> None:
    """Texts that grow by drafted tokens and by others, in batches, against one that begins with
    each of them."""
    chance, drafter = random.Random(5), proposer(kind)
    texts = [prompt(i) for i in range(len(PROMPTS))]
    for slot, text in enumerate(texts):
        drafter.open(slot, text)
    for _ in range(5):
        asked = [i for i in range(len(texts)) if i == 0 or chance.random() < 0.7]
        rows = [row(list(texts[i]), params, 4, i, coupled=coupled) for i in asked]
        for r, draft in zip(rows, drafter.propose(rows), strict=True):
            same(draft, drafts_of(proposer(kind, slots=8), [r])[0])
            keep = chance.randrange(len(draft) + 1)
            texts[r.slot] += draft.tokens[1:keep] + chance.choices(
                range(tiny.WORDED), k=chance.randrange(3)
            )
    for slot in range(len(texts)):
        drafter.close(slot, texts[slot])
    pages = drafter.runner.cache.pages
    pages.check()
    assert pages.available == pages.count


@pytest.mark.parametrize("kind", KINDS)
def test_shared_prefixes_are_what_will_not_change(kind: str) -> None:
    """Two requests begin alike; where one goes on within a word, the other still reads what it
    had."""
    drafter, start = proposer(kind), prompt(1) * 4
    on = words("target").tokenizer.encode("thing else")
    other = words("target").tokenizer.encode(" green")
    drafts_of(drafter, [row(start)])
    drafter.open(1, start)
    assert 0 < drafter.runner.cache.length[1] <= drafter.texts[1].settled
    for tail in (on, other):
        rows = [row([*start, *on], slot=0), row([*start, *tail], slot=1)]
        drafter.close(1)
        drafter.open(1, rows[1].tokens)
        for r, draft in zip(rows, drafter.propose(rows), strict=True):
            same(draft, drafts_of(proposer(kind), [r])[0])


@pytest.mark.parametrize("kind", KINDS)
def test_unfinished_characters(kind: str) -> None:
    """Under the ratio rules no law is kept of a text that the drafter has not read to its end."""
    text = prompt(2)
    for end in range(1, len(text) + 1):
        for coupled in (True, False):
            (draft,) = drafts_of(proposer(kind), [row(text[:end], coupled=coupled)])
            read = RetokenizedText(shared(kind))
            read.read(text[:end])
            if not coupled and read.pending:
                assert draft.tokens == text[end - 1 : end]


def test_what_cannot_be_said_in_the_target_s_tokens_ends_a_draft(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A special token that the target has not got; one that both have is proposed, and is the
    last."""
    own, ours = words("bytes").tokenizer.vocabulary(), words("target").tokenizer.vocabulary()
    for special, proposed in (("<end>", []), ("</s>", [ours["</s>"]])):
        drafter, said = proposer("bytes"), [own[special]] * 3
        monkeypatch.setattr(
            drafter, "forward", lambda segments, said=said: torch.eye(340)[said[: len(segments)]]
        )
        assert drafts_of(drafter, [row(prompt(0))])[0].tokens[1:] == proposed


@compiled
@pytest.mark.parametrize("kind", KINDS)
def test_native_chains_are_drafts_level_by_level(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    native.start(2)
    shape = load_config(other_words.drafter(kind))
    model, found = NativeDecoder(shape, other_words.drafter(kind), "float32", 256), []
    for at_once in (True, False):
        drafter = CrossVocabularyModel(Runner(model, tokens=1024, page=4, slots=8), shared(kind))
        if not at_once:
            monkeypatch.setattr(drafter.runner, "draft_chains", lambda links, vocab: None)
        found.append(
            drafts_of(drafter, [row(prompt(i), GREEDY, 2 + i, i) for i in range(len(PROMPTS))])
        )
    for one, other in zip(*found, strict=True):
        same(one, other)


# ---------------------------------------------------------------- laws


def test_nothing_shared_is_no_draft_under_ratio_rules_and_is_told_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config.note.cache_clear()
    target = ModelVocabulary(words("target").tokenizer, tiny.WORDED)
    monkeypatch.setattr(target, "by_spelling", dict)
    none = SharedVocabulary(target, words("bytes"))
    drafter = CrossVocabularyModel(runner("bytes"), none)
    for _ in range(2):
        (draft,) = drafts_of(drafter, [row(prompt(1), WARM, coupled=False)])
        assert len(draft) == 1
        drafter.close(0)
    assert capsys.readouterr().err.count("shares no token") == 1
    assert len(drafts_of(drafter, [row(prompt(1), WARM)])[0]) > 1


# ---------------------------------------------------------------- the promise


def engine(kind: str, rule: str = "match", tokens: int = 2048, chunk: int = 64) -> Engine:
    target = load_decoder(tiny.spoken(), torch.float64, torch.device("cpu"), 512)
    target_runner = Runner(target, tokens=tokens, page=4, slots=8)
    return Engine(target_runner, {"model": proposer(kind, tokens=tokens)}, rule=rule, chunk=chunk)


def run(engine: Engine, draft: str, temperature: float | None) -> list[Request]:
    requests = []
    for i in range(len(PROMPTS)):
        requests.append(
            engine.add(prompt(i), build.params(i, temperature, 22), draft=draft, depth=4)
        )
        engine.step_or_raise()
    build.finish(engine)
    accepted = sum(r.stats.accepted for r in requests)
    assert accepted > 12 or draft == "off", "drafts that are never accepted prove nothing"
    return requests


@functools.cache
def plain(temperature: float | None) -> list[list[int]]:
    return [list(r.output) for r in run(engine("bytes"), "off", temperature)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_tokens_with_preemption(kind: str) -> None:
    """Greedily and drawn, side by side."""
    requests = run(engine(kind, tokens=80, chunk=3), "model", None)
    assert [list(r.output) for r in requests] == plain(None)
    assert sum(r.stats.preemptions for r in requests) > 0


@pytest.mark.one_in(2)
@pytest.mark.parametrize("rule", ["token", "block", "tree"])
@pytest.mark.parametrize("kind", ["pieces", "bytes"])
def test_ratio_rules_are_greedy_at_temperature_zero(kind: str, rule: str) -> None:
    requests = run(engine(kind, rule), "model", 0.0)
    assert [list(r.output) for r in requests] == plain(0.0)


# ---------------------------------------------------------------- which of the two


def test_a_model_of_the_target_s_vocabulary_needs_nothing_of_this(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config.note.cache_clear()
    target, other = other_words.tokenizer("target"), other_words.tokenizer("bytes")
    for tokenizer in (None, target):
        made = make_draft_model(runner("target"), "m", target, tokenizer, tiny.WORDED, 2)
        assert type(made) is DraftModel and made.width == 2
    assert not capsys.readouterr().err
    assert isinstance(
        make_draft_model(runner("bytes"), "m", target, other, tiny.WORDED), CrossVocabularyModel
    )
    assert "another vocabulary: 275 of its 340 tokens (81 %)" in capsys.readouterr().err


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("params", [WARM, FILTERED], ids=["warm", "filtered"])
def test_draws_follow_the_law_of_shared_tokens(kind: str, params: SamplingParams) -> None:
    """Over many seeds, how often each token is drawn is what `probs` says; others than shared ones
    have no chance."""
    drafter, text, drawn = proposer(kind), prompt(1), Counter[int]()
    drafter.open(0, text)
    for seed in range(120):
        (draft,) = drafter.propose(
            [DraftRequest(0, text, params, Noise(seed, 9), 1, coupled=False)]
        )
        assert draft.proposals == [Proposal.DETERMINISTIC, Proposal.SAMPLED]
        assert draft.probs is not None
        drawn[draft.tokens[1]] += 1
    law = draft.probs[0]
    assert law.shape == (tiny.WORDED,) and abs(law.sum() - 1) < 1e-9
    assert not law[[own for own, other in enumerate(shared(kind).to_draft) if other < 0]].any()
    expected = law * 120
    assert all(
        abs(drawn[t] - expected[t]) < 5 * np.sqrt(expected[t] + 1) for t in range(tiny.WORDED)
    )
