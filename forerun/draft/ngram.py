"""Prompt lookup: what followed the last few tokens the last time they occurred in this request.

State per slot: for every n-gram of the text, where it last ended. Costs a few dictionary writes a
token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice

from forerun.draft.proposer import DraftRequest, PerSlotProposer, Reference
from forerun.types import Draft


@dataclass(slots=True)
class _Index:
    """`after[gram]` is the index of the token that followed it last; `read` tokens are indexed."""

    after: dict[tuple[int, ...], int] = field(default_factory=dict)
    read: int = 0


class NGram(PerSlotProposer[_Index]):
    """Proposes the continuation of the most recent occurrence of the longest suffix of
    `longest`..`shortest` tokens."""

    name = "ngram"
    copies_text = True

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        super().__init__()
        self.sizes = range(longest, shortest - 1, -1)

    def open(
        self,
        slot: int,
        tokens: Sequence[int],
        references: Sequence[Reference] = (),
        tenant: str = "",
    ) -> None:
        self.slots[slot] = _Index()

    def draft(self, row: DraftRequest, kept: _Index) -> Draft:
        tokens = row.tokens
        for end in range(
            max(kept.read, 1), len(tokens)
        ):  # a gram counts once the token after it is known
            for size in self.sizes:
                if size <= end:
                    kept.after[tuple(tokens[end - size : end])] = end
        kept.read = len(tokens)
        for size in self.sizes:
            at = kept.after.get(tuple(tokens[-size:])) if size <= len(tokens) else None
            if at is not None:
                return Draft.chain(tokens[-1], copy_from(tokens, at, row.depth), self.name, size)
        return Draft.root(tokens[-1])


def copy_from(tokens: Sequence[int], start: int, count: int) -> list[int]:
    """`count` tokens from `start`; past the end the copy goes on with what it has copied, as a loop
    would."""
    return list(islice(cycle(tokens[start : start + count]), count))
