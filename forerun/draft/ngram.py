"""Prompt lookup: copies the continuation of the last few tokens' previous occurrence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice

from forerun.draft.proposer import DraftRequest, PerSlotProposer, Reference
from forerun.types import Draft


@dataclass(slots=True)
class _NGramIndex:
    """`next_index[ngram]` is the index of the token that followed its last occurrence."""

    next_index: dict[tuple[int, ...], int] = field(default_factory=dict)
    num_indexed: int = 0


class NGram(PerSlotProposer[_NGramIndex]):
    """Proposes the continuation of the most recent occurrence of the longest suffix of
    `longest`..`shortest` tokens. Indexing costs a few dictionary writes per token."""

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
        self.slots[slot] = _NGramIndex()

    def draft(self, request: DraftRequest, state: _NGramIndex) -> Draft:
        tokens = request.tokens
        # An n-gram is indexed once the token after it is known.
        for end in range(max(state.num_indexed, 1), len(tokens)):
            for size in self.sizes:
                if size <= end:
                    state.next_index[tuple(tokens[end - size : end])] = end
        state.num_indexed = len(tokens)
        for size in self.sizes:
            start = state.next_index.get(tuple(tokens[-size:])) if size <= len(tokens) else None
            if start is not None:
                copied = copy_from(tokens, start, request.depth)
                return Draft.chain(tokens[-1], copied, self.name, size)
        return Draft.root(tokens[-1])


def copy_from(tokens: Sequence[int], start: int, count: int) -> list[int]:
    """Return `count` tokens from `start`; past the end the copy continues with itself, as a loop
    would."""
    return list(islice(cycle(tokens[start : start + count]), count))
