"""Heads, one a level, with a decoder layer before them that reads the target's last states of the whole text.

What the layer keeps of a committed token depends on the states up to it, never on a draft: they are read once, and kept
in a cache of its own. What it made of the last one is what the heads begin with.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.cache.attention import Attention, Segment
from forerun.cache.kv import KVCache
from forerun.draft.base import Row
from forerun.draft.features import FeatureProposer
from forerun.draft.level_heads import LevelHeads
from forerun.draft.levels import Grower
from forerun.draft.tree import Tree
from forerun.draft.view import TargetView
from forerun.models.rope import rope_tables
from forerun.types import BESIDE, Draft


class Prefixed(FeatureProposer):
    """Chains, or trees of `width` nodes a level, from heads that have a prefix."""

    def __init__(
        self, name: str, heads: LevelHeads, target: TargetView, *, tokens: int, page: int, slots: int, width: int = 1
    ) -> None:
        """`name` is what statistics call it. Room for what the layer keeps of `tokens` tokens in pages of `page`, for
        `slots` requests at a time. It computes in the heads' own dtype, or in the target's native form. Raises
        LoadError if the heads are not made for this target."""
        self.dtype = next(heads.parameters()).dtype
        self.grower = Grower(name, heads, target, width)
        self.name, self.target, self.width, self.boundaries = name, target, width, (target.layers,)
        self.stops = self.weighs = self.grower.native is not None
        self.beside = BESIDE if self.stops else 0
        self._shape = {"tokens": tokens, "page": page, "slots": slots}
        assert self.grower.heads.prefix is not None
        self._prefix = self.grower.heads.prefix
        config = self._prefix.config
        tables = rope_tables(config, config.ropes[0], target.context, self.dtype)
        self.rotation = tuple(table.to(target.device) for table in tables)
        self.reset()

    def reset(self) -> None:
        super().reset()
        self._last: dict[int, Tensor] = {}  # by slot: what the layer made of the last state it read, [H]

    def close(self, slot: int, finished: Sequence[int] | None = None) -> None:
        super().close(slot, finished)
        self._last.pop(slot, None)

    def new_cache(self) -> KVCache:
        return KVCache(
            self._prefix.config, **self._shape, context=self.target.context, dtype=self.dtype,
            device=self.target.device, ahead=1, native=False,  # ahead: there is always a last state to be read
        )  # fmt: skip

    def fuse(self, shown: Tensor) -> Tensor:
        return self.target.normalise(shown).to(self.dtype)

    @torch.inference_mode()
    def propose(self, rows: Sequence[Row]) -> list[Draft]:
        trees = [Tree(row, fed=0) for row in rows]
        active = [tree for tree in trees if self._can_draft(tree.row)]
        if active:
            states = self._read([tree.row for tree in active])
            self.grower.grow(active, states)
        return [tree.finish(self.target.vocab) for tree in trees]

    def _can_draft(self, row: Row) -> bool:
        """Without the state before the root, or without room, the request goes on without a draft."""
        upto = self.cache.length[row.slot] + len(self.waiting[row.slot])
        return self.is_up_to_date(row) and self.cache.pages.grow(row.slot, upto)

    def _read(self, rows: Sequence[Row]) -> Tensor:
        """Read the states each slot has missed; what the layer made of the last ones. [rows, H]"""
        parts = [self.take(row.slot) for row in rows]
        for number in range(max(map(len, parts))):
            lagging = [(row, taken[number]) for row, taken in zip(rows, parts, strict=True) if number < len(taken)]
            counts = [len(part) for _, part in lagging]
            chains = [(row.slot, [0] * n, list(range(-1, n - 1))) for (row, _), n in zip(lagging, counts, strict=True)]
            attention = Attention([Segment(*chain, []) for chain in chains], self.cache, self._prefix.config)
            cosine, sine = (table[attention.positions] for table in self.rotation)
            made = self._prefix(torch.cat([part for _, part in lagging]), (cosine, sine), attention)
            for (row, _), own in zip(lagging, torch.split(made, counts), strict=True):
                self.commit(row, len(own))
                self._last[row.slot] = own[-1].clone()  # a view would keep the whole pass
        return torch.stack([self._last[row.slot] for row in rows])
