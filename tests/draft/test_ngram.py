"""Prompt lookup proposes what a plain search through the text would: the latest occurrence of the
longest suffix.

Also tested: any number of tokens between two rounds, copies that run past the end of the text, that
proposing changes nothing, and that a slot starts empty."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from forerun import LLM, ConfigError, SamplingParams
from forerun.draft import ngram as ngram_module
from forerun.draft.ngram import Lookahead, NGram, NGramPool
from forerun.draft.proposer import DraftRequest
from forerun.draft_spec import drafts_in, lookahead_options
from forerun.kernels.draw import sample_tokens
from forerun.sampling.params import Sampling, SamplingParams
from forerun.types import Draft, Proposal
from forerun.verify import Noise
from tests import tiny
from tests.draft.helpers import make_request, pure_params


def naive(tokens: Sequence[int], depth: int, longest: int, shortest: int) -> list[int]:
    """Find the longest suffix first, from the end; then copy one token after the other."""
    for size in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if list(tokens[end - size : end]) == list(tokens[-size:]):
                text = list(tokens)
                for i in range(depth):
                    text.append(text[end + i])
                return text[len(tokens) :]
    return []


@pytest.mark.parametrize("letters", [1, 2, 3, 6])
@pytest.mark.parametrize("longest, shortest", [(4, 2), (3, 3), (5, 1), (1, 1)])
def test_drafts_are_those_of_a_naive_search(letters: int, longest: int, shortest: int) -> None:
    generator = random.Random(letters)
    for _ in range(12):
        proposer = NGram(longest, shortest)
        tokens = generator.choices(range(letters), k=generator.randint(1, 9))
        proposer.open(0, tokens)
        while len(tokens) < 50:
            depth = generator.randint(1, 8)
            (draft,) = proposer.propose([make_request(tokens, depth=depth)])
            assert draft.tokens == [tokens[-1], *naive(tokens, depth, longest, shortest)]
            tokens += generator.choices(range(letters), k=generator.randint(1, 6))


def test_a_draft_is_a_deterministic_chain() -> None:
    proposer = NGram()
    proposer.open(0, [])
    (draft,) = proposer.propose([make_request([1, 2, 3, 9, 1, 2], depth=5)])
    assert draft.tokens == [2, 3, 9, 1, 2, 3]
    assert draft.parents == [-1, 0, 1, 2, 3, 4]
    assert draft.sources == ["", *["ngram"] * 5]
    assert set(draft.proposals) == {Proposal.DETERMINISTIC}
    assert draft.probs is None


def test_slots_are_separate_and_start_empty() -> None:
    proposer, a, b = NGram(), [1, 2, 3, 1, 2], [1, 2, 4, 1, 2]
    proposer.open(0, a)
    proposer.open(1, b)
    drafts = proposer.propose([make_request(b, depth=1, slot=1), make_request(a, depth=1)])
    assert [draft.tokens for draft in drafts] == [[2, 4], [2, 3]]
    proposer.close(0, a)
    proposer.open(0, [1, 2])
    assert proposer.propose([make_request([1, 2])])[0].tokens == [2]
    assert proposer.propose([make_request(b, depth=1, slot=1)])[0].tokens == [2, 4]


# Lookahead: guesses are what the target predicted behind earlier guesses, and the n-grams of
# successive guesses are drafted again where their first token occurs.

VOCAB = 64


def request(tokens: Sequence[int], depth: int = 6, **fields: object) -> DraftRequest:
    fields = {"params": SamplingParams.pure(temperature=0.0)} | fields
    noise = Noise(7, len(tokens) - 1)
    return DraftRequest(slot=0, tokens=tokens, noise=noise, depth=depth, **fields)  # type: ignore[arg-type]


def one_hot_logits(predictions: Sequence[int]) -> torch.Tensor:
    """Return logits [N, VOCAB] of a target that predicts these tokens."""
    return 50 * torch.nn.functional.one_hot(torch.tensor(predictions), VOCAB).float()


def paths(draft: Draft) -> set[tuple[int, ...]]:
    """Return the tokens behind the root on the way to each node."""
    return {
        tuple(draft.tokens[i] for i in draft.path_to(node)[1:]) for node in range(1, len(draft))
    }


def open_lookahead(tokens: Sequence[int], **options: int) -> Lookahead:
    proposer = Lookahead(**options)
    proposer.open(0, tokens)
    return proposer


def test_the_pool_keeps_the_most_recent_ngrams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram_module, "MAX_KEYS", 3)
    pool = NGramPool(3, 2)
    for ngram in ([1, 2, 3], [1, 4, 5], [1, 2, 3], [1, 6, 7]):
        pool.add(ngram)
    assert pool.rests(1) == [(6, 7), (2, 3)]
    for first in (2, 3, 1, 4):
        pool.add([first, 8, 9])
    assert not pool.rests(2) and pool.rests(1)[0] == (8, 9), "the oldest first token is dropped"
    for first in range(500):
        pool.add([first % 50, first, first])
    assert len(pool) <= 3 * 2


def test_paths_continue_with_the_ngram_that_agrees_longest() -> None:
    pool = NGramPool(4, 3)
    for ngram in ([1, 2, 3, 4], [9, 3, 7, 7], [3, 8, 8, 8]):
        pool.add(ngram)
    for path, length, expected in (
        ([1, 2, 3], 4, [1, 2, 3, 4]),
        ([5, 2, 3], 6, [5, 2, 3, 8, 8, 8]),
        ([5, 3], 4, [5, 3, 8, 8]),
        ([6], 9, [6]),
    ):
        pool.extend(path, length)
        assert path == expected


def test_a_repeating_text_is_drafted_as_it_goes_on() -> None:
    text = [3, 4, 5, 6, 7, 8] * 3
    proposer = open_lookahead(text[:4])
    assert len(proposer.propose([request(text[:4])])[0]) > 1, "there are guesses from the start"
    (draft,) = proposer.propose([request(text[:-2], depth=7)])  # it has missed twelve tokens
    assert (7, 8, 3, 4, 5, 6, 7) in paths(draft)
    (chain,) = proposer.propose([request(text[:-2], depth=7, branching=False)])
    assert chain.tokens == [6, 7, 8, 3, 4, 5, 6, 7] and chain.parents == list(range(-1, 7))
    assert set(chain.sources[1:]) == {"lookahead"}


def test_predictions_behind_guesses_are_the_next_guesses() -> None:
    text = [1, 2]
    proposer = open_lookahead(text, window=4, ngram=3)
    (draft,) = proposer.propose([request(text)])
    window = draft.path_to(draft.depths().index(4))
    assert len(window) == 5
    predictions = [60] * len(draft)
    for node, token in zip(window, (30, 31, 32, 33, 34), strict=True):
        predictions[node] = token
    proposer.learn(0, text, draft, one_hot_logits(predictions))
    text = [1, 2, 30]  # all guesses were wrong; 31 to 34 are predictions of what follows
    (draft,) = proposer.propose([request(text)])
    assert (31, 32, 33, 34) in paths(draft)
    text = [1, 2, 30, 40]
    (draft,) = proposer.propose([request(text)])
    assert any(path[:3] == (32, 33, 34) for path in paths(draft)), "they keep their positions"
    (draft,) = proposer.propose([request([*text, *range(10, 20)])])
    assert not {31, 32, 33, 34} & set(draft.tokens), "passed positions need no guesses"


def test_successive_guesses_become_ngrams() -> None:
    """Predictions behind a guess, and one pass later behind those, are drafted elsewhere."""
    text = [1, 2]
    proposer = open_lookahead(text, window=3, ngram=3)
    for predictions in ([20, 21, 22, 23], [24, 25, 26, 27]):
        draft = Draft.chain(text[-1], [50, 51, 52] if text == [1, 2] else [21, 22, 23], "other")
        proposer.propose([request(text)])
        proposer.learn(0, text, draft, one_hot_logits(predictions))
        text = [*text, predictions[0]]
    pool = proposer.slots[0].pool
    assert pool.rests(50) == [(21, 25)] and pool.rests(51) == [(22, 26)]
    (draft,) = proposer.propose([request([*text, 50])])
    assert (21, 25) in paths(draft)


def test_guesses_are_drawn_with_the_targets_noise() -> None:
    """This holds under coupled rules, where equal scores at a position mean equal tokens."""
    text = [1, 2]
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(3))
    draft, noise = Draft.chain(2, [50, 51, 52], "other"), Noise(7, 1)
    drawn = sample_tokens(logits, [Sampling(0.9)] * 4, [noise.target(depth) for depth in range(4)])
    params = SamplingParams.pure(temperature=0.9)
    for coupled, guesses in ((True, drawn), (False, logits.argmax(-1).tolist())):
        proposer = open_lookahead(text, window=3)
        proposer.propose([request(text, params=params, coupled=coupled)])
        proposer.learn(0, text, draft, logits)
        later = request([*text, guesses[0]], params=params, coupled=coupled, branching=False)
        assert proposer.propose([later])[0].tokens[1:] == guesses[1:]
    assert drawn != guesses


@pytest.mark.parametrize("options", [{}, {"window": 1, "ngram": 2, "pool": 1}, {"pool": 20}])
def test_drafts_and_state_are_bounded(
    options: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ngram_module, "MAX_KEYS", 8)
    proposer = open_lookahead([1], **options)
    generator = torch.Generator().manual_seed(1)
    text = [1]
    for step in range(120):
        depth = 1 + step % 12
        (draft,) = proposer.propose([request(text, depth)])
        assert max(draft.depths()) <= min(depth, proposer.window)
        assert len(draft) - 1 <= proposer.most(depth)
        assert len(paths(draft)) == len(draft) - 1, "siblings differ"
        proposer.learn(0, text, draft, torch.randn(len(draft), VOCAB, generator=generator))
        text += torch.randint(0, 12, (1 + step % 3,), generator=generator).tolist()
    state = proposer.slots[0]
    assert len(state.pool) <= 8 * proposer.pool and len(state.trails) <= proposer.window + 1


def test_logits_that_are_not_finite_and_missing_guesses_are_ignored() -> None:
    proposer = open_lookahead([1, 2])
    draft = Draft.chain(2, [5, 6], "other")
    proposer.learn(0, [1, 2], draft, one_hot_logits([3, 4, 5]))  # before the first draft: ignored
    assert not proposer.slots[0].trails
    proposer.propose([request([1, 2])])
    proposer.learn(0, [1, 2], draft, torch.full((3, VOCAB), torch.nan))
    (draft,) = proposer.propose([request([1, 2, 9])])
    assert all(0 <= token < VOCAB for token in draft.tokens)


def test_slots_of_lookahead_are_separate_and_start_empty() -> None:
    text = [3, 4, 5, 6] * 3
    proposer = open_lookahead(text)
    before = proposer.propose([request(text)])[0].tokens
    proposer.open(1, [9], tenant="other")
    fresh = make_request([9, 3], depth=6, slot=1)
    assert 4 not in proposer.propose([fresh])[0].tokens
    assert proposer.propose([request(text)])[0].tokens == before
    proposer.close(0, text)
    proposer.open(0, [9, 3])
    assert 4 not in proposer.propose([request([9, 3])])[0].tokens, "nothing outlives a request"
    proposer.close(0)
    proposer.close(1)
    assert not proposer.slots
    proposer.open(0, text)
    proposer.reset()
    assert not proposer.slots


def test_lookahead_options_are_parsed() -> None:
    assert lookahead_options("") == {}
    assert lookahead_options("pool=3,window=12") == {"pool": 3, "window": 12}
    for wrong in ("window", "window=0", "ngram=1", "pool=999", "pool=3,pool=4", "depth=3", "pool="):
        with pytest.raises(ConfigError, match="as in lookahead:window=8,ngram=4,pool=6"):
            lookahead_options(wrong)
    assert drafts_in("suffix,lookahead:window=4,ngram=3,pool=2,lookahead|ngram,ngram") == [
        *("suffix", "lookahead:window=4,ngram=3,pool=2", "lookahead|ngram", "ngram")
    ]


def test_lookahead_drafts_are_accepted_and_change_no_text() -> None:
    llm = LLM(tiny.repetitive(), draft="suffix|lookahead:window=5,ngram=3", kv_tokens=2048, depth=4)
    assert llm.engine.proposers["lookahead"].window == 5  # type: ignore[attr-defined]
    for temperature in (0.0, 0.8):
        params = pure_params(60, temperature, seed=3)
        plain = llm.generate("The name", params, draft="off")[0].token_ids
        for draft in (None, "lookahead", "suffix&lookahead"):
            out = llm.generate("The name", params, draft=draft)[0]
            assert out.token_ids == plain
            assert out.stats.by_source["lookahead"].accepted > 0
