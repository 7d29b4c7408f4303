"""Suffix decoding: the continuation of the longest suffix of the text that occurred before.

Two sources: a suffix automaton over the request itself, and one over the requests that have finished, shared. Both
find the longest match in constant amortised time a token (SAM decoding, 2411.10666; SuffixDecoding, 2411.04975). The
shared one is bounded: it holds at most two generations of `memory` tokens, and the older goes when the newer is full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from forerun.draft.automaton import BREAK, Cursor, SuffixAutomaton
from forerun.draft.base import Proposer, Reference, Row
from forerun.draft.ngram import copy_from
from forerun.types import Draft


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
