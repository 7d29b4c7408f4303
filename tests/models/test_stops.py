"""Stop strings by an automaton: the same as a search through the whole text, in time linear in text
and stops."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from forerun.models.tokenizer import StopAutomaton, StopMatcher, stop_automaton

LETTERS = st.text("abc", max_size=6)


def feed(stops: list[str], pieces: list[str]) -> tuple[list[int | None], list[int]]:
    """After each piece: where the first stop begins in the whole text, and how much of one is held."""
    matcher, before = StopMatcher(StopAutomaton(stops)), 0
    found: list[int | None] = []
    begun: list[int] = []
    for piece in pieces:
        at = matcher.feed(piece)
        found.append(None if at is None else before + at)
        begun.append(matcher.partial_length)
        before += len(piece)
    return found, begun


@given(st.lists(LETTERS.filter(bool), min_size=1, max_size=4), st.lists(LETTERS, max_size=8))
def test_as_a_search_through_the_whole_text(stops: list[str], pieces: list[str]) -> None:
    found, begun = feed(stops, pieces)
    text = ""
    for i, piece in enumerate(pieces):
        ends = range(len(text) + 1, len(text) + len(piece) + 1)
        text += piece
        starts = [end - len(stop) for end in ends for stop in stops if text[:end].endswith(stop)]
        assert found[i] == min(starts, default=None)
        overlaps = [n for stop in stops for n in range(1, len(stop) + 1) if text.endswith(stop[:n])]
        assert begun[i] == max(overlaps, default=0)


def test_the_worst_stops_take_linear_time() -> None:
    """Beginnings of each other, of a text that almost goes on: the old search looked at each of
    them for each token."""
    stops, text = ["a" * length + "b" for length in range(1, 40_000, 4000)], "a" * 100_000
    start = time.perf_counter()
    found, begun = feed([*stops, "a" * 90_000 + "c"], list(text))
    took = time.perf_counter() - start
    assert not any(found) and begun[-1] == 90_000
    assert took < 10  # half a second on a quiet machine; minutes before


def test_completions_of_one_request_share_an_automaton() -> None:
    assert stop_automaton(("ab", "c")) is stop_automaton(("ab", "c"))
