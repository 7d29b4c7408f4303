"""Prompt lookup proposes what a plain search through the text would: the latest occurrence of the
longest suffix.

Protects: the index against a quadratic search, however many tokens arrive between two rounds;
copies that run past the end of the text; that proposing changes nothing; that a slot starts clean.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from forerun.draft.ngram import NGram, copy_from
from forerun.draft.proposer import DraftRequest
from forerun.sampling.params import SamplingParams
from forerun.types import Proposal
from forerun.verify import Noise


def row(tokens: Sequence[int], depth: int = 5, slot: int = 0) -> DraftRequest:
    return DraftRequest(slot, tokens, SamplingParams(), Noise(0, len(tokens) - 1), depth)


def naive(tokens: Sequence[int], depth: int, longest: int, shortest: int) -> list[int]:
    """Look for the longest suffix first, from the end; then copy one token after the other."""
    for size in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if list(tokens[end - size : end]) == list(tokens[-size:]):
                whole = list(tokens)
                for i in range(depth):
                    whole.append(whole[end + i])
                return whole[len(tokens) :]
    return []


@pytest.mark.parametrize("letters", [1, 2, 3, 6])
@pytest.mark.parametrize("longest, shortest", [(4, 2), (3, 3), (5, 1), (1, 1)])
def test_against_a_naive_search(letters: int, longest: int, shortest: int) -> None:
    chance = random.Random(letters)
    for _ in range(12):
        proposer, tokens = (
            NGram(longest, shortest),
            chance.choices(range(letters), k=chance.randint(1, 9)),
        )
        proposer.open(0, tokens)
        while len(tokens) < 50:
            depth = chance.randint(1, 8)
            (draft,) = proposer.propose([row(tokens, depth)])
            assert draft.tokens == [tokens[-1], *naive(tokens, depth, longest, shortest)]
            tokens += chance.choices(range(letters), k=chance.randint(1, 6))


def test_draft_is_a_given_chain() -> None:
    proposer = NGram()
    proposer.open(0, [])
    (draft,) = proposer.propose([row([1, 2, 3, 9, 1, 2])])
    assert draft.tokens == [2, 3, 9, 1, 2, 3]
    assert draft.parents == [-1, 0, 1, 2, 3, 4]
    assert draft.sources == ["", *["ngram"] * 5]
    assert set(draft.proposals) == {Proposal.DETERMINISTIC}
    assert draft.probs is None


def test_slots_are_apart_and_start_clean() -> None:
    proposer, a, b = NGram(), [1, 2, 3, 1, 2], [1, 2, 4, 1, 2]
    proposer.open(0, a)
    proposer.open(1, b)
    drafts = proposer.propose([row(b, 1, slot=1), row(a, 1, slot=0)])
    assert [draft.tokens for draft in drafts] == [[2, 4], [2, 3]]
    proposer.close(0, a)
    proposer.open(0, [1, 2])
    assert proposer.propose([row([1, 2])])[0].tokens == [2]
    assert proposer.propose([row(b, 1, slot=1)])[0].tokens == [2, 4]


@pytest.mark.parametrize(
    "start, count, copied",
    [(0, 2, [1, 2]), (2, 3, [3, 3, 3]), (1, 5, [2, 3, 2, 3, 2]), (0, 7, [1, 2, 3, 1, 2, 3, 1])],
)
def test_copy_goes_on_as_a_loop(start: int, count: int, copied: list[int]) -> None:
    assert copy_from([1, 2, 3], start, count) == copied
