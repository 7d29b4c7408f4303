"""Texts that came with the request: a prediction of the output (an edited file, say) and documents
it may quote.

The output is aligned with each text. While they agree the next tokens of the text are the draft; at
a difference the alignment guesses that one token was replaced, and otherwise finds the place again
by the longest suffix of the output that occurs in the text (a suffix automaton), the nearest
occurrence after the last place first."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from forerun.draft.automaton import Cursor
from forerun.draft.proposer import DraftRequest, PerSlotProposer, Reference
from forerun.types import Draft

SHORTEST = 2  # tokens that must agree before a place counts as found again
CONTEXT = 16  # tokens of the prompt a document is first looked up with
PATTERN = 32  # most tokens of the output that an occurrence is searched with


class Alignment:
    """Where an output stands in one reference. `at` is the index of the token that should come
    next, or None."""

    def __init__(self, reference: Reference) -> None:
        self.reference = reference
        self.at: int | None = 0 if reference.whole else None
        self.run = 0  # tokens that have agreed in a row
        self._last = 0  # the place before the alignment was lost
        self._text = reference.packed
        self._seen = array("i")
        self._cursor = Cursor(reference.index)
        self._read = max(
            0, reference.start - (0 if reference.whole else CONTEXT)
        )  # tokens of the text

    def read(self, text: Sequence[int]) -> None:
        """Follow what the text, prompt and output, has got since."""
        for token in text[self._read :]:
            self.follow(token)
        self._read = len(text)

    def follow(self, token: int) -> None:
        """One more token of the output."""
        self._cursor.follow(token)
        self._seen.append(token)
        if (
            self.at is not None
            and self.at < len(self.reference.tokens)
            and self.reference.tokens[self.at] == token
        ):
            self.at, self.run = self.at + 1, self.run + 1
            return
        first = self.at is not None and self.run > 0
        if self.at is not None:
            self._last = self.at
        self.run = 0
        if self._cursor.length >= SHORTEST:
            self.run = min(self._cursor.length, PATTERN)
            self.at = self._nearest(self.run)
        else:
            self.at = self._last + 1 if first and self.reference.whole else None

    def continuation(self, count: int) -> list[int]:
        """What should come next; of a document no more than has agreed, since that is all that
        speaks for it."""
        if self.at is None:
            return []
        count = count if self.reference.whole else min(count, self.run)
        return list(self.reference.tokens[self.at : self.at + count])

    def _nearest(self, length: int) -> int:
        """The place after an occurrence of the last `length` tokens, which is known to exist."""
        pattern = self._seen[-length:].tobytes()
        after = self._find(pattern, max(0, self._last - length))
        return (after if after >= 0 else self._find(pattern, 0)) + length

    def _find(self, pattern: bytes, start: int) -> int:
        size = self._seen.itemsize
        found = self._text.find(pattern, start * size)
        while found % size and found >= 0:  # bytes that agree by accident, across two tokens
            found = self._text.find(pattern, found + 1)
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

    def draft(self, row: DraftRequest, kept: list[Alignment]) -> Draft:
        for alignment in kept:
            alignment.read(row.tokens)
        for alignment in sorted(kept, key=lambda a: -a.run):
            tokens = alignment.continuation(row.depth)
            if tokens:
                return Draft.chain(row.tokens[-1], tokens, alignment.reference.name)
        return Draft.root(row.tokens[-1])
