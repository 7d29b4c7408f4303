"""Drafts from texts that came with the request: a prediction of the output (an edited file, say)
and documents it may quote.

The output is aligned with each text. While they agree, the next tokens of the text are the draft.
At a difference the alignment guesses that one token was replaced, and otherwise finds the place
again by the longest suffix of the output that occurs in the text (a suffix automaton): the nearest
occurrence after the last place, or else the first one.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from forerun.draft.automaton import Cursor
from forerun.draft.proposer import DraftRequest, PerSlotProposer, Reference
from forerun.types import Draft

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
        self.at: int | None = 0 if reference.whole else None
        self.run = 0
        self._last = 0  # the place before the alignment was lost
        self._output = array("i")
        self._cursor = Cursor(reference.index)
        context = 0 if reference.whole else NUM_PROMPT_TOKENS
        self._num_read = max(0, reference.start - context)

    def read(self, tokens: Sequence[int]) -> None:
        """Follow the new ones of a request's tokens, prompt and output."""
        for token in tokens[self._num_read :]:
            self.follow(token)
        self._num_read = len(tokens)

    def follow(self, token: int) -> None:
        """Append a token to the output."""
        self._cursor.follow(token)
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
            is_replaced = is_first_difference and self.reference.whole
            self.at = self._last + 1 if is_replaced else None

    def continuation(self, count: int) -> list[int]:
        """Return the expected continuation; of a document no more tokens than have agreed, since
        there is no other evidence for it."""
        if self.at is None:
            return []
        if not self.reference.whole:
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

    def open(
        self,
        slot: int,
        tokens: Sequence[int],
        references: Sequence[Reference] = (),
        tenant: str = "",
    ) -> None:
        self.slots[slot] = [Alignment(reference) for reference in references]

    def draft(self, request: DraftRequest, state: list[Alignment]) -> Draft:
        for alignment in state:
            alignment.read(request.tokens)
        for alignment in sorted(state, key=lambda a: -a.run):
            tokens = alignment.continuation(request.depth)
            if tokens:
                return Draft.chain(request.tokens[-1], tokens, alignment.reference.name)
        return Draft.root(request.tokens[-1])
