"""Suffix decoding: the continuation of the longest suffix of the text that occurred before.

Two sources: a suffix automaton over the request itself, and one over the requests that have finished, shared. Both
find the longest match in constant amortised time a token (SAM decoding, 2411.10666; SuffixDecoding, 2411.04975). The
shared one is bounded: it holds at most two generations of `memory` tokens, and the older goes when the newer is full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from forerun.draft.base import Proposer, Reference, Row
from forerun.draft.ngram import copy_from
from forerun.types import Draft

BREAK = -1  # stands between two texts in the shared automaton; no token has this id
REFRESH = 16  # how far up the suffix links the latest occurrence is noted


class SuffixAutomaton:
    """The smallest automaton of all substrings of a text that grows by one token at a time (Blumer et al. 1985).

    A state is a set of substrings that end at the same places. `end[s]` is the index of the last token of an
    occurrence, `length[s]` its longest substring, `link[s]` the state of its longest suffix that is in another state.
    """

    def __init__(self) -> None:
        self.text: list[int] = []
        self.next: list[dict[int, int]] = [{}]
        self.link, self.length, self.end = [-1], [0], [-1]
        self.last = 0
        self.match = (0, -1)  # longest earlier occurrence of a suffix: its length, and the index of its last token

    def append(self, token: int) -> None:
        """Add one token; amortised constant time."""
        self.text.append(token)
        new = self._state(dict(), self.length[self.last] + 1, len(self.text) - 1)
        at = self.last
        while at >= 0 and token not in self.next[at]:
            self.next[at][token] = new
            at = self.link[at]
        if at < 0:
            self.link[new] = 0
        else:
            self.link[new] = self._suffix(at, token)
        self.last = new
        self.match = (self.length[self.link[new]], self.end[self.link[new]])
        self._refresh(self.link[new])

    def _state(self, following: dict[int, int], length: int, end: int) -> int:
        self.next.append(following)
        self.link.append(0)
        self.length.append(length)
        self.end.append(end)
        return len(self.next) - 1

    def _suffix(self, at: int, token: int) -> int:
        """The state of (longest string of `at`) + token, split off from a longer one if need be."""
        old = self.next[at][token]
        if self.length[old] == self.length[at] + 1:
            return old
        clone = self._state(dict(self.next[old]), self.length[at] + 1, self.end[old])
        self.link[clone], self.link[old] = self.link[old], clone
        while at >= 0 and self.next[at].get(token) == old:
            self.next[at][token] = clone
            at = self.link[at]
        return clone

    def _refresh(self, state: int) -> None:
        """Recent text predicts best: let the suffixes of the text end here."""
        for _ in range(REFRESH):
            if state <= 0:
                break
            self.end[state] = len(self.text) - 1
            state = self.link[state]


@dataclass(slots=True)
class Cursor:
    """Where a text stands in an automaton it is not part of: the longest suffix that occurs there."""

    automaton: SuffixAutomaton
    state: int = 0
    length: int = 0

    def follow(self, token: int) -> None:
        sam = self.automaton
        while self.state > 0 and token not in sam.next[self.state]:
            self.state = sam.link[self.state]
            self.length = min(self.length, sam.length[self.state])
        if token in sam.next[self.state]:
            self.state = sam.next[self.state][token]
            self.length += 1

    def continuation(self, count: int) -> list[int]:
        start = self.automaton.end[self.state] + 1
        tokens = self.automaton.text[start : start + count]
        return tokens[: tokens.index(BREAK)] if BREAK in tokens else tokens


@dataclass(slots=True)
class _Slot:
    own: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    cursors: list[Cursor] = field(default_factory=list)
    read: int = 0


class Suffix(Proposer):
    """Proposes after the longest match of at least `shortest` tokens, as many tokens as have matched at most."""

    name = "suffix"

    def __init__(self, shortest: int = 2, memory: int = 50_000) -> None:
        self.shortest, self.memory = shortest, memory
        self.shared = [SuffixAutomaton()]  # newest first
        self.slots: dict[int, _Slot] = {}

    def open(self, slot: int, tokens: Sequence[int], references: Sequence[Reference] = ()) -> None:
        self.slots[slot] = _Slot()

    def close(self, slot: int, finished: Sequence[int] | None = None) -> None:
        del self.slots[slot]
        if finished is not None:
            self._remember(finished[-self.memory :])

    def forget(self) -> None:
        self.shared = [SuffixAutomaton()]

    def reset(self) -> None:
        self.slots.clear()
        self.forget()

    def propose(self, rows: Sequence[Row]) -> list[Draft]:
        return [self._propose(row) for row in rows]

    def _propose(self, row: Row) -> Draft:
        state, root = self.slots[row.slot], row.tokens[-1]
        self._read(state, row.tokens)
        length, end = state.own.match
        tokens = copy_from(row.tokens, end + 1, min(row.depth, length)) if length >= self.shortest else []
        for cursor in state.cursors:
            if cursor.length > length and cursor.length >= self.shortest:
                found = cursor.continuation(min(row.depth, cursor.length))
                if found:
                    length, tokens = cursor.length, found
        return Draft.chain(root, tokens, self.name)

    def _read(self, state: _Slot, tokens: Sequence[int]) -> None:
        if [c.automaton for c in state.cursors] != self.shared:  # a generation came or went: start over there
            state.cursors = [Cursor(automaton) for automaton in self.shared]
            for token in tokens[max(0, state.read - 32) : state.read]:
                for cursor in state.cursors:
                    cursor.follow(token)
        for token in tokens[state.read :]:
            state.own.append(token)
            for cursor in state.cursors:
                cursor.follow(token)
        state.read = len(tokens)

    def _remember(self, tokens: Sequence[int]) -> None:
        if len(self.shared[0].text) + len(tokens) > self.memory and self.shared[0].text:
            self.shared = [SuffixAutomaton(), self.shared[0]]
        for token in (*tokens, BREAK):
            self.shared[0].append(token)
