"""A draft model with another vocabulary drafts what one with the target's vocabulary would draft.

Also tested: a text that is partly read again gives the drafts of one read afresh; the probabilities
kept for the ratio rules are those that were drawn from; the output equals plain decoding, with
several kinds of vocabularies."""

from __future__ import annotations

import functools
import random
from collections import Counter

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
from forerun.types import Proposal
from forerun.verify import Noise
from tests import other_vocabularies, tiny
from tests.draft.helpers import (
    FILTERED,
    GREEDY,
    SETTINGS,
    WARM,
    assert_same_draft,
    drafts_of,
    make_request,
    needs_native,
)
from tests.engine import build
from tests.other_vocabularies import KINDS, shared, words

PROMPTS = [
    '{"name": "alpha", "sizes": [10',
    "the name of the colour is",
    "été 👍 and 数字",
    "x",
    "null}\n  grey ",
]


@functools.cache
def decoder(kind: str) -> Decoder:
    directory = tiny.repetitive(0.05) if kind == "target" else other_vocabularies.drafter(kind)
    return load_decoder(directory, torch.float64, torch.device("cpu"), 512)


def runner(kind: str, tokens: int = 2048, page: int = 4, slots: int = 8) -> Runner:
    return Runner(decoder(kind), tokens=tokens, page=page, slots=slots)


def proposer(kind: str, **room: int) -> CrossVocabularyModel:
    return CrossVocabularyModel(runner(kind, **room), shared(kind))


def prompt(i: int) -> list[int]:
    return words("target").tokenizer.encode(PROMPTS[i])


# ---------------------------------------------------------------- what is drafted


@SETTINGS
@pytest.mark.parametrize("coupled", [True, False])
def test_the_target_s_tokens_under_other_ids_draft_alike(
    params: SamplingParams, coupled: bool
) -> None:
    """Both models draw with the same noise. Drafts that spell their text unusually are skipped."""
    texts = [prompt(i % len(PROMPTS)) + prompt(i // len(PROMPTS))[:i] for i in range(8)]
    requests = [
        make_request(text, params, 3 + i % 3, i, coupled=coupled, branching=False)
        for i, text in enumerate(texts)
    ]
    found = drafts_of(proposer("shuffled"), requests)
    expected = drafts_of(DraftModel(runner("target"), tiny.PADDED_VOCAB), requests)
    alike = 0
    for request, one, other in zip(requests, found, expected, strict=True):
        assert len(one) > 1
        before = context_bytes(words("target"), request.tokens)
        text = before + b"".join(words("target").spellings[token] for token in other.tokens[1:])
        if not coupled or tokens_behind(words("target"), before, text) == other.tokens[1:]:
            assert_same_draft(one, other)
            alike += 1
    assert alike > 4


@pytest.mark.one_in(2)
@SETTINGS
@pytest.mark.parametrize("coupled", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_texts_that_are_partly_read_again_draft_as_if_read_afresh(
    kind: str, coupled: bool, params: SamplingParams
) -> None:
    """Texts grow by drafted and by other tokens, in batches; a new drafter reads each at once."""
    generator, drafter = random.Random(5), proposer(kind)
    texts = [prompt(i) for i in range(len(PROMPTS))]
    for slot, text in enumerate(texts):
        drafter.open(slot, text)
    for _ in range(5):
        asked = [i for i in range(len(texts)) if i == 0 or generator.random() < 0.7]
        requests = [make_request(list(texts[i]), params, 4, i, coupled=coupled) for i in asked]
        for request, draft in zip(requests, drafter.propose(requests), strict=True):
            assert_same_draft(draft, drafts_of(proposer(kind, slots=8), [request])[0])
            keep = generator.randrange(len(draft) + 1)
            texts[request.slot] += draft.tokens[1:keep] + generator.choices(
                range(tiny.PADDED_VOCAB), k=generator.randrange(3)
            )
    for slot in range(len(texts)):
        drafter.close(slot, texts[slot])
    pages = drafter.runner.cache.pages
    pages.check()
    assert pages.available == pages.count


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_settled_part_of_a_prefix_is_shared(kind: str) -> None:
    """Of two requests with one prefix, the second goes on within a word or behind it."""
    drafter, start = proposer(kind), prompt(1) * 4
    on = words("target").tokenizer.encode("thing else")
    other = words("target").tokenizer.encode(" green")
    drafts_of(drafter, [make_request(start)])
    drafter.open(1, start)
    assert 0 < drafter.runner.cache.length[1] <= drafter.texts[1].settled
    for tail in (on, other):
        requests = [make_request([*start, *on], slot=0), make_request([*start, *tail], slot=1)]
        drafter.close(1)
        drafter.open(1, requests[1].tokens)
        for request, draft in zip(requests, drafter.propose(requests), strict=True):
            assert_same_draft(draft, drafts_of(proposer(kind), [request])[0])


@pytest.mark.parametrize("kind", KINDS)
def test_ratio_rules_get_no_draft_behind_an_unfinished_character(kind: str) -> None:
    """The drafter has not read such a text to its end, so it has no distribution behind it."""
    text = prompt(2)
    for end in range(1, len(text) + 1):
        for coupled in (True, False):
            (draft,) = drafts_of(proposer(kind), [make_request(text[:end], coupled=coupled)])
            read = RetokenizedText(shared(kind))
            read.read(text[:end])
            if not coupled and read.pending:
                assert draft.tokens == text[end - 1 : end]


def test_a_token_that_the_target_lacks_ends_a_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Special tokens end a draft too; one that both models have is proposed as the last token."""
    own, ours = words("bytes").tokenizer.vocabulary(), words("target").tokenizer.vocabulary()
    for special, proposed in (("<end>", []), ("</s>", [ours["</s>"]])):
        drafter, logits = proposer("bytes"), torch.eye(340)[[own[special]] * 3]
        monkeypatch.setattr(
            drafter, "forward", lambda segments, logits=logits: logits[: len(segments)]
        )
        assert drafts_of(drafter, [make_request(prompt(0))])[0].tokens[1:] == proposed


@needs_native
@pytest.mark.parametrize("kind", KINDS)
def test_native_chains_equal_drafts_made_level_by_level(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    native.start(2)
    shape = load_config(other_vocabularies.drafter(kind))
    model, found = NativeDecoder(shape, other_vocabularies.drafter(kind), "float32", 256), []
    for at_once in (True, False):
        drafter = CrossVocabularyModel(Runner(model, tokens=1024, page=4, slots=8), shared(kind))
        if not at_once:
            monkeypatch.setattr(drafter.runner, "draft_chains", lambda links, vocab: None)
        found.append(
            drafts_of(
                drafter, [make_request(prompt(i), GREEDY, 2 + i, i) for i in range(len(PROMPTS))]
            )
        )
    for one, other in zip(*found, strict=True):
        assert_same_draft(one, other)


# ---------------------------------------------------------------- no shared tokens


def test_without_shared_tokens_ratio_rules_get_no_draft_and_one_warning(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config.note.cache_clear()
    target = ModelVocabulary(words("target").tokenizer, tiny.PADDED_VOCAB)
    monkeypatch.setattr(target, "by_spelling", dict)
    none = SharedVocabulary(target, words("bytes"))
    drafter = CrossVocabularyModel(runner("bytes"), none)
    for _ in range(2):
        (draft,) = drafts_of(drafter, [make_request(prompt(1), WARM, coupled=False)])
        assert len(draft) == 1
        drafter.close(0)
    assert capsys.readouterr().err.count("shares no token") == 1
    assert len(drafts_of(drafter, [make_request(prompt(1), WARM)])[0]) > 1


# ---------------------------------------------------------------- equality with plain decoding


def engine(kind: str, rule: str = "match", tokens: int = 2048, chunk: int = 64) -> Engine:
    target = load_decoder(tiny.repetitive(), torch.float64, torch.device("cpu"), 512)
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
    accepted = sum(request.stats.accepted for request in requests)
    assert accepted > 12 or draft == "off", "drafts that are never accepted prove nothing"
    return requests


@functools.cache
def plain(temperature: float | None) -> list[list[int]]:
    return [list(request.output) for request in run(engine("bytes"), "off", temperature)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_tokens_with_preemption(kind: str) -> None:
    """Greedy and sampled requests run in one batch."""
    requests = run(engine(kind, tokens=80, chunk=3), "model", None)
    assert [list(request.output) for request in requests] == plain(None)
    assert sum(request.stats.preemptions for request in requests) > 0


@pytest.mark.one_in(2)
@pytest.mark.parametrize("rule", ["token", "block", "tree"])
@pytest.mark.parametrize("kind", ["pieces", "bytes"])
def test_ratio_rules_are_greedy_at_temperature_zero(kind: str, rule: str) -> None:
    requests = run(engine(kind, rule), "model", 0.0)
    assert [list(request.output) for request in requests] == plain(0.0)


# ---------------------------------------------------------------- choice of the proposer


def test_a_model_with_the_target_s_vocabulary_is_an_ordinary_draft_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config.note.cache_clear()
    target, other = other_vocabularies.tokenizer("target"), other_vocabularies.tokenizer("bytes")
    for tokenizer in (None, target):
        made = make_draft_model(runner("target"), "m", target, tokenizer, tiny.PADDED_VOCAB, 2)
        assert type(made) is DraftModel and made.width == 2
    assert not capsys.readouterr().err
    assert isinstance(
        make_draft_model(runner("bytes"), "m", target, other, tiny.PADDED_VOCAB),
        CrossVocabularyModel,
    )
    assert "another vocabulary: 275 of its 340 tokens (81 %)" in capsys.readouterr().err


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("params", [WARM, FILTERED], ids=["warm", "filtered"])
def test_draws_follow_the_distribution_over_shared_tokens(
    kind: str, params: SamplingParams
) -> None:
    """Over many seeds, tokens are drawn as often as `probs` says; only shared tokens are drawn."""
    drafter, text, drawn = proposer(kind), prompt(1), Counter[int]()
    drafter.open(0, text)
    for seed in range(120):
        (draft,) = drafter.propose(
            [DraftRequest(0, text, params, Noise(seed, 9), 1, coupled=False)]
        )
        assert draft.proposals == [Proposal.DETERMINISTIC, Proposal.SAMPLED]
        assert draft.probs is not None
        drawn[draft.tokens[1]] += 1
    probs = draft.probs[0]
    assert probs.shape == (tiny.PADDED_VOCAB,) and abs(probs.sum() - 1) < 1e-9
    assert not probs[[own for own, other in enumerate(shared(kind).to_draft) if other < 0]].any()
    expected = probs * 120
    assert all(
        abs(drawn[t] - expected[t]) < 5 * np.sqrt(expected[t] + 1) for t in range(tiny.PADDED_VOCAB)
    )
