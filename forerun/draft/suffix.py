"""Suffix decoding: the continuation of the longest suffix of the text that occurred before, or that
occurs in a text that came with the request.

`Suffix` has two sources: a suffix automaton over the request itself, and a memory of its tenant's
finished requests. Both find the longest match in constant amortised time per token (SAM decoding,
2411.10666; SuffixDecoding, 2411.04975).

`References` drafts from texts of the request: a prediction of the output (an edited file, say) and
documents it may quote. The output is aligned with each text. While they agree, the next tokens of
the text are the draft. At a difference the alignment guesses that one token was replaced, and
otherwise finds the place again by the longest suffix of the output that occurs in the text: the
nearest occurrence after the last place, or else the first one.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from forerun.draft.automaton import BREAK, Cursor, SuffixAutomaton
from forerun.draft.ngram import copy_from
from forerun.draft.proposer import (
    CopySources,
    DraftRequest,
    PerSlotProposer,
    Reference,
    Texts,
    Tokens,
)
from forerun.types import MEMORY, Draft

NUM_RECENT = 32  # tokens that are matched again in a memory that has changed


@dataclass(slots=True)
class _SuffixState:
    """One request's automaton, and its matches in the memory's generations."""

    tenant: str
    own: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    cursors: list[Cursor] = field(default_factory=list)
    num_read: int = 0


class Suffix(PerSlotProposer[_SuffixState]):
    """Proposes the continuation of the longest match, no more tokens than have matched.

    A tenant's memory holds two generations of at most `memory` tokens; the older one is dropped
    when the newer is full. All memories together hold no more than one could: the least recently
    used are dropped first. Matches have at least `shortest` tokens.
    """

    name = "suffix"
    copies_text = True

    def __init__(self, shortest: int = 2, memory: int = 50_000) -> None:
        super().__init__()
        self.shortest = shortest
        self.memory = memory
        # By tenant, the least recently used first: generations, the newest first.
        self.memories: OrderedDict[str, list[SuffixAutomaton]] = OrderedDict()

    def open(self, slot: int, tokens: Tokens, references: Texts = (), tenant: str = "") -> None:
        self.slots[slot] = _SuffixState(tenant)
        if tenant in self.memories:
            self.memories.move_to_end(tenant)

    def close(self, slot: int, finished: Sequence[int] | None = None) -> None:
        state = self.slots.pop(slot, None)
        if state is not None and finished is not None:
            self.remember(state.tenant, finished)

    def remember(self, tenant: str, tokens: Sequence[int]) -> None:
        tokens = tokens[-self.memory :]
        generations = self.memories.setdefault(tenant, [SuffixAutomaton()])
        self.memories.move_to_end(tenant)
        if generations[0].text and len(generations[0].text) + len(tokens) > self.memory:
            generations[:] = [SuffixAutomaton(), generations[0]]
        generations[0].extend([*tokens, BREAK])
        while len(self.memories) > 1 and self._num_remembered() > 2 * self.memory:
            self.memories.popitem(last=False)

    def forget(self) -> None:
        self.memories.clear()

    def reset(self) -> None:
        super().reset()
        self.forget()

    def has_draft(self, slot: int, tokens: Sequence[int]) -> bool:
        state = self.slots[slot]
        self._read(state, tokens)
        longest = max((cursor.length for cursor in state.cursors), default=0)
        return max(state.own.match[0], longest) >= self.shortest

    def copy_sources(self, slot: int) -> CopySources:
        return CopySources(self.shortest, self.memories.get(self.slots[slot].tenant, ()))

    def draft(self, request: DraftRequest, state: _SuffixState) -> Draft:
        self._read(state, request.tokens)
        length, end = state.own.match
        source = self.name
        tokens: list[int] = []
        if length >= self.shortest:
            tokens = copy_from(request.tokens, end + 1, min(request.depth, length))
        for cursor in state.cursors:
            if cursor.length > length and cursor.length >= self.shortest:
                found = cursor.continuation(min(request.depth, cursor.length))
                if found:
                    length, tokens, source = cursor.length, found, MEMORY
        return Draft.chain(request.tokens[-1], tokens, source, length)

    def _read(self, state: _SuffixState, tokens: Sequence[int]) -> None:
        memory = self.memories.get(state.tenant, [])
        if [cursor.automaton for cursor in state.cursors] != memory:
            # A generation came or went: find the place of the latest tokens again.
            state.cursors = [Cursor(automaton) for automaton in memory]
            recent = tokens[max(0, state.num_read - NUM_RECENT) : state.num_read]
            for cursor in state.cursors:
                cursor.follow(recent)
        new = tokens[state.num_read :]
        if new:
            state.own.extend(new)
            for cursor in state.cursors:
                cursor.follow(new)
        state.num_read = len(tokens)

    def _num_remembered(self) -> int:
        return sum(len(automaton.text) for memory in self.memories.values() for automaton in memory)


MIN_MATCH = 2  # tokens that must agree before a place counts as found
NUM_PROMPT_TOKENS = 16  # tokens of the prompt that a document is first looked up with
MAX_PATTERN = 32  # tokens of the output that an occurrence is searched with


class Alignment:
    """The place of an output in one reference.

    Attributes:
        at: index of the token that should come next, or None if the place is unknown.
        run: number of tokens in a row that have agreed.
    """

    def __init__(self, reference: Reference) -> None:
        self.reference = reference
        self.at: int | None = 0 if reference.is_prediction else None
        self.run = 0
        self._last = 0  # the place before the alignment was lost
        self._output = array("i")
        self._cursor = Cursor(reference.index)
        context = 0 if reference.is_prediction else NUM_PROMPT_TOKENS
        self._num_read = max(0, reference.start - context)

    def read(self, tokens: Sequence[int]) -> None:
        """Follow the new ones of a request's tokens, prompt and output."""
        for token in tokens[self._num_read :]:
            self.follow(token)
        self._num_read = len(tokens)

    def follow(self, token: int) -> None:
        self._cursor.follow([token])
        self._output.append(token)
        text = self.reference.tokens
        if self.at is not None and self.at < len(text) and text[self.at] == token:
            self.at += 1
            self.run += 1
            return
        is_first_difference = self.at is not None and self.run > 0
        if self.at is not None:
            self._last = self.at
        if self._cursor.length >= MIN_MATCH:
            self.run = min(self._cursor.length, MAX_PATTERN)
            self.at = self._nearest(self.run)
        else:
            self.run = 0
            is_replaced = is_first_difference and self.reference.is_prediction
            self.at = self._last + 1 if is_replaced else None

    def continuation(self, count: int) -> list[int]:
        """Return the expected continuation; of a document no more tokens than have agreed, since
        there is no other evidence for it."""
        if self.at is None:
            return []
        if not self.reference.is_prediction:
            count = min(count, self.run)
        return list(self.reference.tokens[self.at : self.at + count])

    def _nearest(self, length: int) -> int:
        """Return the place behind an occurrence of the last `length` tokens, which must exist."""
        pattern = self._output[-length:].tobytes()
        found = self._find(pattern, max(0, self._last - length))
        if found < 0:
            found = self._find(pattern, 0)
        return found + length

    def _find(self, pattern: bytes, start: int) -> int:
        size = self._output.itemsize
        text = self.reference.packed
        found = text.find(pattern, start * size)
        while found % size and found >= 0:  # bytes that agree by accident, across two tokens
            found = text.find(pattern, found + 1)
        return found // size


class References(PerSlotProposer[list[Alignment]]):
    """Proposes from the request's own references, the one that has agreed longest first."""

    name = "reference"

    def open(self, slot: int, tokens: Tokens, references: Texts = (), tenant: str = "") -> None:
        self.slots[slot] = [Alignment(reference) for reference in references]

    def draft(self, request: DraftRequest, state: list[Alignment]) -> Draft:
        for alignment in state:
            alignment.read(request.tokens)
        for alignment in sorted(state, key=lambda a: -a.run):
            tokens = alignment.continuation(request.depth)
            if tokens:
                return Draft.chain(request.tokens[-1], tokens, alignment.reference.name)
        return Draft.root(request.tokens[-1])
