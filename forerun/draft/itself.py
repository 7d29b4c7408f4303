"""A model that drafts for itself with part of its work left undone: some of its layers (early exit and skipped layers,
LayerSkip, Elhoushi et al., 2404.16710; SWIFT, Xia et al., 2410.06916), or all of them over the last keys alone.

It shares the target's weights and its cache: what it drafts is written where the target will write when it verifies,
and nothing has to be read a second time. What is committed is the whole model's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from forerun.draft.base import Reference, Row
from forerun.draft.model import DraftModel
from forerun.errors import ConfigError
from forerun.runner import Runner

RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")


class Abridged(DraftModel):
    """Proposes what part of `target` would say: layers `kept`, and at most `window` keys and the first ones."""

    def __init__(self, target: Runner, kept: Sequence[int], window: int | None = None, width: int = 1) -> None:
        super().__init__(target.abridged(kept, window), target.decoder.config.vocab, width, "self")

    def open(self, slot: int, tokens: Sequence[int], references: Sequence[Reference] = (), tenant: str = "") -> None:
        """Nothing is kept of a slot."""

    def close(self, slot: int, finished: Sequence[int] | None = None) -> None:
        """Nothing is kept of a slot."""

    def _has_room(self, row: Row) -> bool:
        """Only where the target has read all before the root: nothing is read in its place."""
        return self.runner.cache.length[row.slot] == len(row.tokens) - 1 and super()._has_room(row)

    def _settled(self, slot: int) -> int:
        return 0  # pages are the target's to share


def kept_layers(said: str, layers: int) -> tuple[int, ...]:
    """Which layers of so many "12" (the first twelve) or "0-9,20,25-29" keep. Raises ConfigError."""
    ranges = [(int(found[1]), int(found[2] or found[1])) for found in map(RANGE.fullmatch, said.split(",")) if found]
    if said.isdigit():
        ranges = [(0, int(said) - 1)]
    fits = all(first <= last < layers for first, last in ranges)
    kept = [i for first, last in ranges for i in range(first, last + 1)] if fits else []
    if not kept or sorted(set(kept)) != kept:
        raise ConfigError(
            f"layers={said} is no part of this model's {layers} layers: write how many of the first, such as"
            f" layers={max(layers // 2, 1)}, or which, such as layers=0-3,{layers - 1}, from 0 to {layers - 1}"
        )
    return tuple(kept)
