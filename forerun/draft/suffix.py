"""Suffix decoding: the continuation of the longest suffix of the text that occurred before.

Two sources: a suffix automaton over the request itself, and a memory of its tenant's requests that
have finished. Both find the longest match in constant amortised time a token (SAM decoding,
2411.10666; SuffixDecoding, 2411.04975)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from forerun.draft.automaton import BREAK, Cursor, SuffixAutomaton
from forerun.draft.ngram import copy_from
from forerun.draft.proposer import DraftRequest, PerSlotProposer, Reference
from forerun.types import MEMORY, Draft

RECENT = 32  # tokens by which a text finds its place in a memory that has changed


@dataclass(slots=True)
class _Slot:
    tenant: str
    own: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    cursors: list[Cursor] = field(default_factory=list)
    read: int = 0


class Suffix(PerSlotProposer[_Slot]):
    """Proposes after the longest match of at least `shortest` tokens, as many tokens as have
    matched at most.

    A tenant's memory holds two generations of at most `memory` tokens; the older goes when the
    newer is full. All memories together hold no more than one could: those go first that were used
    longest ago."""

    name = "suffix"
    copies_text = True

    def __init__(self, shortest: int = 2, memory: int = 50_000) -> None:
        super().__init__()
        self.shortest, self.memory = shortest, memory
        # by tenant, that of the latest request last: its generations, newest first
        self.memories: OrderedDict[str, list[SuffixAutomaton]] = OrderedDict()

    def open(
        self,
        slot: int,
        tokens: Sequence[int],
        references: Sequence[Reference] = (),
        tenant: str = "",
    ) -> None:
        self.slots[slot] = _Slot(tenant)
        if tenant in self.memories:
            self.memories.move_to_end(tenant)

    def close(self, slot: int, finished: Sequence[int] | None = None) -> None:
        state = self.slots.pop(slot, None)
        if state is not None and finished is not None:
            self.remember(state.tenant, finished)

    def remember(self, tenant: str, tokens: Sequence[int]) -> None:
        tokens = tokens[-self.memory :]
        memory = self.memories.setdefault(tenant, [SuffixAutomaton()])
        self.memories.move_to_end(tenant)
        if len(memory[0].text) + len(tokens) > self.memory and memory[0].text:
            memory[:] = [SuffixAutomaton(), memory[0]]
        for token in (*tokens, BREAK):
            memory[0].append(token)
        while len(self.memories) > 1 and self._remembered > 2 * self.memory:
            self.memories.popitem(last=False)

    def forget(self) -> None:
        self.memories.clear()

    def reset(self) -> None:
        super().reset()
        self.forget()

    def draft(self, row: DraftRequest, kept: _Slot) -> Draft:
        self._read(kept, row.tokens)
        (length, end), source = kept.own.match, self.name
        tokens = (
            copy_from(row.tokens, end + 1, min(row.depth, length))
            if length >= self.shortest
            else []
        )
        for cursor in kept.cursors:
            if cursor.length > length and cursor.length >= self.shortest:
                found = cursor.continuation(min(row.depth, cursor.length))
                if found:
                    length, tokens, source = cursor.length, found, MEMORY
        return Draft.chain(row.tokens[-1], tokens, source, length)

    def _read(self, state: _Slot, tokens: Sequence[int]) -> None:
        memory = self.memories.get(state.tenant, [])
        if [
            c.automaton for c in state.cursors
        ] != memory:  # a generation came or went: start over there
            state.cursors = [Cursor(automaton) for automaton in memory]
            for token in tokens[max(0, state.read - RECENT) : state.read]:
                for cursor in state.cursors:
                    cursor.follow(token)
        for token in tokens[state.read :]:
            state.own.append(token)
            for cursor in state.cursors:
                cursor.follow(token)
        state.read = len(tokens)

    @property
    def _remembered(self) -> int:
        """Tokens in all memories."""
        return sum(len(automaton.text) for memory in self.memories.values() for automaton in memory)
