"""References: an output is aligned with texts that came with the request, and finds its place
again."""

import random

from forerun.draft.compose import InTurn
from forerun.draft.ngram import NGram
from forerun.draft.proposer import DraftRequest, Reference
from forerun.draft.suffix import Alignment, References
from forerun.sampling.params import SamplingParams
from forerun.types import Draft
from forerun.verify import Noise


def aligned(text: list[int], output: list[int], whole: bool = True) -> Alignment:
    alignment = Alignment(Reference("prediction", tuple(text), 0, whole))
    for token in output:
        alignment.follow(token)
    return alignment


def row(tokens: list[int], depth: int = 4) -> DraftRequest:
    return DraftRequest(0, tokens, SamplingParams(), Noise(0, len(tokens) - 1), depth)


def test_a_prediction_is_drafted_from_its_beginning() -> None:
    assert aligned([5, 6, 7, 8], []).continuation(3) == [5, 6, 7]
    assert aligned([5, 6, 7, 8], [5, 6]).continuation(9) == [7, 8]
    assert aligned([5, 6], [5, 6]).continuation(9) == []


def test_one_replaced_token_is_taken_in_stride() -> None:
    assert aligned([1, 2, 3, 4, 5], [1, 2, 9]).continuation(9) == [4, 5]


def test_insertions_and_deletions_are_found_again() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8]
    assert aligned(text, [1, 2, 90, 91, 92, 3, 4]).continuation(2) == [5, 6]
    assert aligned(text, [1, 2, 6, 7]).continuation(2) == [8]
    assert aligned(text, [1, 2, 90, 91, 92]).continuation(2) == []


def test_the_nearest_occurrence_behind_the_last_place_is_taken() -> None:
    text = [1, 2, 10, 1, 2, 20, 1, 2, 30]
    assert aligned(text, [1, 2, 10, 99, 98, 1, 2]).continuation(1) == [20]
    assert aligned(text, [1, 2, 10, 1, 2, 20, 1, 2, 30, 97, 1, 2]).continuation(1) == [
        10
    ]  # none behind: the first


def test_a_document_needs_agreement_and_gives_no_more_than_agreed() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8]
    assert aligned(text, [], whole=False).continuation(4) == []
    assert aligned(text, [9, 2], whole=False).continuation(4) == []
    assert aligned(text, [9, 2, 3], whole=False).continuation(4) == [4, 5]
    assert aligned(text, [9, 2, 3, 4], whole=False).continuation(4) == [5, 6, 7]


def test_token_ids_whose_bytes_overlap_are_no_occurrence() -> None:
    text = [0x01000000, 0x00000000, 0x00000001, 7, 8, 0, 0, 1, 5]
    assert aligned(text, [8, 0, 0]).continuation(1) == [1]


def test_a_place_is_always_behind_an_occurrence() -> None:
    """Random edits of small vocabularies: wherever it stands, what was said last stands before
    it."""
    random.seed(1)
    for _ in range(300):
        text = [random.randrange(4) for _ in range(30)]
        output = [t for t in text if random.random() > 0.2 or not random.randrange(3)]
        alignment = Alignment(Reference("prediction", tuple(text), 0, True))
        for n, token in enumerate(output, start=1):
            alignment.follow(token)
            if alignment.run:
                assert alignment.at is not None
                assert (
                    text[alignment.at - alignment.run : alignment.at]
                    == output[n - alignment.run : n]
                )


def test_the_proposer_reads_its_lag_and_a_cascade_falls_through() -> None:
    references = (Reference("prediction", (7, 8, 9), 3, True),)
    cascade = InTurn((References(), NGram()))

    def propose(tokens: list[int]) -> Draft:
        """The draft of the first part that has one."""
        drafts = (part.propose([row(tokens)])[0] for part in cascade.parts)
        return next(draft for draft in drafts if len(draft) > 1)

    cascade.open(0, [1, 2, 1], references)
    draft = propose([1, 2, 1])
    assert (draft.tokens, draft.sources[1:]) == ([1, 7, 8, 9], ["prediction"] * 3)
    draft = propose([1, 2, 1, 2, 1])
    assert draft.sources[1] == "ngram" and draft.tokens[1] == 2
    cascade.close(0)
    cascade.open(0, [1, 2, 1, 7], references)  # after a preemption: prompt and output again
    assert propose([1, 2, 1, 7]).tokens == [7, 8, 9]
    assert cascade.name == "reference+ngram"
