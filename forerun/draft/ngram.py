"""Prompt lookup: what followed the last few tokens the last time they occurred in this request.

State per slot: for every n-gram of the text, where it last ended. Costs a few dictionary writes a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from forerun.draft.base import Proposer, Reference, Row
from forerun.types import Draft


@dataclass(slots=True)
class _Index:
    """`after[gram]` is the index of the token that followed it last; `read` tokens are indexed."""

    after: dict[tuple[int, ...], int] = field(default_factory=dict)
    read: int = 0


class NGram(Proposer):
    """Proposes the continuation of the most recent occurrence of the longest suffix of `longest`..`shortest` tokens."""

    name = "ngram"
    copies = True

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        self.sizes = range(longest, shortest - 1, -1)
        self.slots: dict[int, _Index] = {}

    def open(self, slot: int, tokens: Sequence[int], references: Sequence[Reference] = (), tenant: str = "") -> None:
        self.slots[slot] = _Index()

    def close(self, slot: int, finished: Sequence[int] | None = None) -> None:
        del self.slots[slot]

    def reset(self) -> None:
        self.slots.clear()

    def propose(self, rows: Sequence[Row]) -> list[Draft]:
        return [self._propose(row) for row in rows]

    def _propose(self, row: Row) -> Draft:
        tokens, index = row.tokens, self.slots[row.slot]
        for end in range(max(index.read, 1), len(tokens)):  # a gram counts once the token after it is known
            for size in self.sizes:
                if size <= end:
                    index.after[tuple(tokens[end - size : end])] = end
        index.read = len(tokens)
        for size in self.sizes:
            at = index.after.get(tuple(tokens[-size:])) if size <= len(tokens) else None
            if at is not None:
                return Draft.chain(tokens[-1], copy_from(tokens, at, row.depth), self.name, size)
        return Draft.root(tokens[-1])


def copy_from(tokens: Sequence[int], start: int, count: int) -> list[int]:
    """`count` tokens from `start`; past the end the copy goes on with what it has copied, as a loop would."""
    copied = list(tokens[start : start + count])
    while len(copied) < count:
        copied.append(copied[len(copied) - (len(tokens) - start)])
    return copied
