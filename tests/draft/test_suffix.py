"""Suffix decoding: both automata find the longest match, in this text and in finished ones.

Matches and their positions are compared with a naive search after every token. Also tested: the
shared automaton's cursors, its two generations and its bound; drafts, slots and preemption."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from forerun.draft.automaton import TwinAutomaton
from forerun.draft.compose import InTurn
from forerun.draft.ngram import NGram
from forerun.draft.proposer import Proposer, Reference
from forerun.draft.suffix import Alignment, Cursor, References, Suffix, SuffixAutomaton
from forerun.kernels import native
from forerun.types import MEMORY, Draft
from tests.draft.helpers import make_request


def propose(proposer: Proposer, tokens: Sequence[int], depth: int = 5, slot: int = 0) -> list[int]:
    """Return the root and the tokens drafted behind it."""
    return proposer.propose([make_request(tokens, depth=depth, slot=slot)])[0].tokens


def occurs(part: Sequence[int], text: Sequence[int]) -> bool:
    return any(
        list(text[i : i + len(part)]) == list(part) for i in range(len(text) - len(part) + 1)
    )


def repeated_suffix(text: Sequence[int]) -> int:
    """Return the length of the longest suffix that also occurs earlier; both may overlap."""
    return max((n for n in range(1, len(text)) if occurs(text[-n:], text[:-1])), default=0)


def common_suffix(tokens: Sequence[int], text: Sequence[int]) -> int:
    """Return the length of the longest suffix of `tokens` that occurs in `text`."""
    return max((n for n in range(1, len(tokens) + 1) if occurs(tokens[-n:], text)), default=0)


def texts(letters: int, count: int, length: int) -> list[list[int]]:
    """Make random texts, some of which repeat pieces of themselves."""
    generator, found = random.Random(letters), []
    for i in range(count):
        text = generator.choices(range(letters), k=length)
        if i % 3 == 2:
            piece = generator.choices(range(letters), k=5)
            text = [t for _ in range(length) for t in (*piece, generator.randrange(letters))]
            text = text[:length]
        found.append(text)
    return found


# ---------------------------------------------------------------- the automaton


@pytest.fixture(params=["native", "twin"], autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test with the native automaton and with its twin."""
    if request.param == "twin":
        monkeypatch.setattr(native, "library", lambda: None)


@pytest.mark.parametrize("letters", [1, 2, 3, 40])
def test_the_twin_has_the_same_matches(letters: int) -> None:
    """Tokens come one by one and in portions, and a cursor follows another text."""
    generator = random.Random(letters)
    for _ in range(6):
        automaton, twin = SuffixAutomaton(), TwinAutomaton()
        place, expected = (0, 0), (0, 0)
        for _ in range(60):
            count = generator.choice([0, 1, 1, 7])
            tokens = [generator.randrange(-1, letters) for _ in range(count)]
            automaton.extend(tokens)
            for token in tokens:
                twin.append(token)
            assert automaton.match == twin.match
            other = [generator.randrange(letters + 1) for _ in range(generator.choice([1, 3]))]
            place = automaton.follow(*place, other)
            for token in other:
                expected = twin.follow(*expected, token)
            assert place == expected and automaton.end(place[0]) == twin.end[place[0]]


@pytest.mark.parametrize("letters", [1, 2, 3])
def test_a_cursor_finds_what_a_naive_search_finds(letters: int) -> None:
    for known, text in zip(texts(letters, 6, 40), texts(letters + 10, 6, 40), strict=True):
        text = [t % (letters + 1) for t in text]  # one letter more than the automaton has seen
        automaton = SuffixAutomaton()
        automaton.extend(known)
        cursor = Cursor(automaton)
        for i, token in enumerate(text):
            cursor.follow([token])
            assert cursor.length == common_suffix(text[: i + 1], known)
            end = automaton.end(cursor.state) + 1
            assert known[end - cursor.length : end] == text[i + 1 - cursor.length : i + 1]
            assert cursor.continuation(4) == known[end : end + 4]


@pytest.mark.parametrize("letters", [2, 3])
def test_a_cursor_in_a_growing_automaton_claims_only_true_matches(letters: int) -> None:
    """This happens to a running request while others finish."""
    generator = random.Random(letters)
    for _ in range(40):
        automaton, known, text = SuffixAutomaton(), [], []
        cursor = Cursor(automaton)
        for _ in range(30):
            tokens = generator.choices(range(letters), k=generator.choice([0, 0, 1, 3]))
            automaton.extend(tokens)
            known += tokens
            text.append(generator.randrange(letters))
            cursor.follow(text[-1:])
            end = automaton.end(cursor.state) + 1
            assert cursor.length <= common_suffix(text, known)
            assert known[end - cursor.length : end] == text[len(text) - cursor.length :]


# ---------------------------------------------------------------- the proposer


def finish(proposer: Suffix, text: Sequence[int], tenant: str = "") -> None:
    proposer.open(7, text, tenant=tenant)
    proposer.close(7, text)


def copied(tokens: Sequence[int], end: int, count: int) -> list[int]:
    """Copy the `count` tokens behind index `end`, of the text with the copy appended."""
    text = list(tokens)
    for i in range(count):
        text.append(text[end + 1 + i])
    return text[len(tokens) :]


@pytest.mark.parametrize("letters", [1, 2, 4])
@pytest.mark.parametrize("shortest", [1, 2, 4])
def test_drafts_from_the_own_text_are_those_of_a_naive_search(letters: int, shortest: int) -> None:
    """A draft has at most as many tokens as have matched; any number may arrive between rounds."""
    generator = random.Random(letters)
    for text in texts(letters, 6, 50):
        proposer, end = Suffix(shortest), 0
        proposer.open(0, text)
        while end < len(text):
            end = min(end + generator.randint(1, 5), len(text))
            tokens, depth = text[:end], generator.randint(1, 8)
            drafted = propose(proposer, tokens, depth)
            length = repeated_suffix(tokens)
            count = min(depth, length) if length >= shortest else 0
            ends = [
                i
                for i in range(length - 1, end - 1)
                if tokens[i - length + 1 : i + 1] == tokens[end - length :]
            ]
            assert len(drafted) == count + 1
            assert drafted[0] == tokens[-1]
            assert not count or any(drafted[1:] == copied(tokens, i, count) for i in ends)


def test_a_preempted_request_is_not_remembered() -> None:
    proposer = Suffix()
    proposer.open(0, [10, 11, 12, 13])
    propose(proposer, [10, 11, 12, 13])
    proposer.close(0)
    proposer.open(1, [10, 11])
    assert propose(proposer, [10, 11], slot=1) == [11]


def test_the_longer_match_wins_and_the_own_text_wins_ties() -> None:
    proposer = Suffix()
    finish(proposer, [5, 1, 2, 7])
    finish(proposer, [3, 4, 8])
    proposer.open(0, [])
    assert propose(proposer, [1, 2, 6, 5, 1, 2], 1) == [2, 7]
    proposer.open(0, [])
    assert propose(proposer, [3, 4, 6, 3, 4], 1) == [4, 6]


def test_a_match_never_spans_two_texts() -> None:
    proposer = Suffix()
    finish(proposer, [1, 2])
    finish(proposer, [3, 4])
    proposer.open(0, [])
    for end in range(1, 5):
        assert propose(proposer, [1, 2, 3, 4][:end]) == [end]


def test_memory_is_bounded_by_two_generations() -> None:
    memory, proposer, generator = 50, Suffix(memory=50), random.Random(6)
    for _ in range(60):
        finish(proposer, generator.choices(range(9), k=generator.randint(0, 120)))
        assert len(proposer.memories[""]) <= 2
        for automaton in proposer.memories[""]:
            assert len(automaton.text) <= memory + 1


def test_the_end_of_a_text_longer_than_the_memory_is_kept() -> None:
    proposer = Suffix(memory=10)
    finish(proposer, range(100))
    proposer.open(0, [])
    assert propose(proposer, [91, 92]) == [92, 93, 94]
    assert propose(proposer, [91, 92, 50, 51]) == [51]


def test_a_new_generation_in_the_middle_of_a_match() -> None:
    """A running request finds its position again in both generations."""
    proposer = Suffix(memory=8)
    finish(proposer, [1, 2, 3, 4, 5, 6])
    proposer.open(0, [])
    assert propose(proposer, [1, 2, 3]) == [3, 4, 5, 6]
    finish(proposer, [2, 3, 8, 8, 8, 8, 8])
    assert len(proposer.memories[""]) == 2
    assert propose(proposer, [1, 2, 3]) == [3, 4, 5, 6]
    assert propose(proposer, [1, 2, 3, 4]) == [4, 5, 6]
    finish(proposer, [9] * 8)
    assert propose(proposer, [1, 2, 3, 4]) == [4]


def test_forget_drops_finished_texts() -> None:
    proposer = Suffix(shortest=1)
    finish(proposer, [5, 6, 7, 8])
    proposer.forget()
    proposer.open(0, [])
    assert propose(proposer, [5, 6]) == [6]


# ---------------------------------------------------------------- tenants


def test_a_tenant_drafts_from_its_own_memory_alone_and_names_it() -> None:
    proposer = Suffix()
    finish(proposer, [1, 2, 3, 4, 5], "one")
    for slot, tenant in enumerate(("one", "two", "")):
        proposer.open(slot, [], tenant=tenant)
    drafts = proposer.propose([make_request([1, 2], slot=slot) for slot in range(3)])
    assert [draft.tokens for draft in drafts] == [[2, 3, 4], [2], [2]]
    assert drafts[0].sources == ["", MEMORY, MEMORY], "the source is not the request's own text"


def test_all_memories_together_are_bounded_and_the_least_used_goes_first() -> None:
    proposer = Suffix(memory=10)
    for tenant in "abc":
        finish(proposer, range(5), tenant)  # a text and what ends it: six
    assert list(proposer.memories) == ["a", "b", "c"]
    finish(proposer, [7], "a")
    assert list(proposer.memories) == ["b", "c", "a"]
    finish(proposer, range(5), "d")
    assert list(proposer.memories) == ["c", "a", "d"]
    for i in range(100):
        finish(proposer, range(10), f"tenant {i}")
        assert sum(len(a.text) for memory in proposer.memories.values() for a in memory) <= 22


@pytest.mark.parametrize("shortest", [1, 2, 4])
def test_has_draft_is_true_wherever_there_is_a_draft(shortest: int) -> None:
    """Asking changes no draft, be it of this text or of finished ones."""
    found = set()
    asked, plain = Suffix(shortest), Suffix(shortest)
    for text in texts(3, 4, 40):
        for suffix in (asked, plain):
            suffix.open(0, text[:3])
        for end in range(3, len(text) + 1):
            has_draft = asked.has_draft(0, text[:end])
            drafts = [suffix.propose([make_request(text[:end])])[0] for suffix in (asked, plain)]
            assert drafts[0] == drafts[1] and (has_draft or len(drafts[0]) == 1)
            found.add(has_draft)
        for suffix in (asked, plain):
            suffix.close(0, text)
    assert found == {True, False}


# References: an output is aligned with texts that came with the request, and realigned after edits.


def align(text: list[int], output: list[int], is_full: bool = True) -> Alignment:
    alignment = Alignment(Reference("prediction", tuple(text), 0, is_full))
    for token in output:
        alignment.follow(token)
    return alignment


COUNT = list(range(1, 9))
REPEATS = [1, 2, 10, 1, 2, 20, 1, 2, 30]
# token ids whose bytes overlap are no occurrence
OVERLAPPING = [0x01000000, 0x00000000, 0x00000001, 7, 8, 0, 0, 1, 5]


@pytest.mark.parametrize(
    ("text", "output", "count", "follows"),
    [
        ([5, 6, 7, 8], [], 3, [5, 6, 7]),
        ([5, 6, 7, 8], [5, 6], 9, [7, 8]),
        ([5, 6], [5, 6], 9, []),
        ([1, 2, 3, 4, 5], [1, 2, 9], 9, [4, 5]),  # one replaced token is tolerated
        (COUNT, [1, 2, 90, 91, 92, 3, 4], 2, [5, 6]),  # insertions and deletions are aligned again
        (COUNT, [1, 2, 6, 7], 2, [8]),
        (COUNT, [1, 2, 90, 91, 92], 2, []),
        (REPEATS, [1, 2, 10, 99, 98, 1, 2], 1, [20]),  # the nearest behind the last place
        (REPEATS, [1, 2, 10, 1, 2, 20, 1, 2, 30, 97, 1, 2], 1, [10]),  # none behind: the first
        (OVERLAPPING, [8, 0, 0], 1, [1]),
    ],
)
def test_a_prediction_is_followed_and_realigned(
    text: list[int], output: list[int], count: int, follows: list[int]
) -> None:
    assert align(text, output).continuation(count) == follows


@pytest.mark.parametrize(
    ("output", "follows"), [([], []), ([9, 2], []), ([9, 2, 3], [4, 5]), ([9, 2, 3, 4], [5, 6, 7])]
)
def test_a_document_drafts_no_more_tokens_than_have_matched(
    output: list[int], follows: list[int]
) -> None:
    assert align(COUNT, output, is_full=False).continuation(4) == follows


def test_a_position_is_always_behind_an_occurrence_of_the_last_tokens() -> None:
    """Texts of a small vocabulary are edited at random."""
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


def test_references_read_their_lag_and_the_next_proposer_takes_over() -> None:
    references = (Reference("prediction", (7, 8, 9), 3, True),)
    in_turn = InTurn((References(), NGram()))

    def draft_of(tokens: list[int]) -> Draft:
        """The draft of the first part that has one."""
        drafts = (part.propose([make_request(tokens)])[0] for part in in_turn.parts)
        return next(draft for draft in drafts if len(draft) > 1)

    in_turn.open(0, [1, 2, 1], references)
    draft = draft_of([1, 2, 1])
    assert (draft.tokens, draft.sources[1:]) == ([1, 7, 8, 9], ["prediction"] * 3)
    draft = draft_of([1, 2, 1, 2, 1])
    assert draft.sources[1] == "ngram" and draft.tokens[1] == 2
    in_turn.close(0)
    in_turn.open(0, [1, 2, 1, 7], references)  # after a preemption: prompt and output again
    assert draft_of([1, 2, 1, 7]).tokens == [7, 8, 9]
    assert in_turn.name == "reference+ngram"
