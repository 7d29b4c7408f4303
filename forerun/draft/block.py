"""Drafting whole blocks in one pass, DFlash and DSpark: the context is what the target thought of the text.

The context of a committed token depends on the target's states of that token alone: its keys and values are computed
once for each layer, kept in the head's own cache, and never change. The block of a round stands behind them: its keys
and values are scratch rows, which the next round overwrites. So a draft of any depth costs one pass of a few layers,
and the tokens are then taken from it level by level.

The root is the anchor, at position start: its own states are not known yet, and the context are those before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from forerun.cache.attention import Attention, Segment
from forerun.cache.kv import KVCache
from forerun.draft.base import Row
from forerun.draft.block_head import BlockHead
from forerun.draft.features import FeatureProposer
from forerun.draft.layers import with_native_products
from forerun.draft.tree import Tree, grow
from forerun.draft.view import TargetView
from forerun.errors import ConfigError
from forerun.models.rope import rope_tables
from forerun.types import Draft


@dataclass(slots=True)
class _Growing:
    """A tree under construction, what its block said, and how likely the path to each node is to stand.

    made [K, Hd], said [K, Vd]: of the slots that say something, K as deep as any draft of the round.
    """

    tree: Tree
    made: Tensor
    said: Tensor
    stands: dict[int, float] = field(default_factory=lambda: {-1: 1.0})


class Block(FeatureProposer):
    """Chains, or trees of `width` nodes a level, as deep as the head has slots.

    Attributes:
        threshold: a path whose product of confidences falls below it is not followed further; 0 follows all. It
            decides from what is drafted already, never from what is about to be, so it changes no text.
    """

    name = "block"

    def __init__(
        self, head: BlockHead, target: TargetView, *, tokens: int, page: int, slots: int, width: int = 1,
        threshold: float = 0.0,
    ) -> None:  # fmt: skip
        """Room for the context of `tokens` tokens in pages of `page`, for `slots` requests at a time. It computes in
        the head's own dtype, or in the target's native form. Raises LoadError if the head is not made for this
        target, ConfigError for a threshold where it has no confidence head."""
        if threshold and not head.config.confidence:
            raise ConfigError(
                f"draft_threshold={threshold:g} needs a block drafter with a confidence head, which this one has not:"
                " leave it out, or train one with confidence"
            )
        head.attach(target)
        head = head.to(target.device)
        self.target, self.width, self.threshold = target, width, threshold
        self.boundaries = head.config.boundaries
        self.config, self.dtype = head.config, next(head.parameters()).dtype
        self.head = head if target.form is None else with_native_products(head, target.form)
        # the block at the very end of a text reaches past it
        self._reach = target.context + self.config.block
        self._shape = {"tokens": tokens, "page": page, "slots": slots}
        tables = rope_tables(self.config.layer, self.config.layer.ropes[0], self._reach, self.dtype)
        self.rotation = tuple(table.to(target.device) for table in tables)
        self.reset()

    def new_cache(self) -> KVCache:
        return KVCache(
            self.config.layer, **self._shape, context=self._reach, dtype=self.dtype, device=self.target.device,
            native=False,
        )  # fmt: skip

    def fuse(self, shown: Tensor) -> Tensor:
        return self.head.fuse(shown)

    @torch.inference_mode()
    def propose(self, rows: Sequence[Row]) -> list[Draft]:
        trees = [Tree(row) for row in rows]
        active = [tree for tree in trees if self._can_draft(tree.row)]
        if active:
            self._remember([tree.row for tree in active])
            growing = self._say(active)
            for level in range(self.config.depth):
                growing = [g for g in growing if g.tree.row.depth > level and g.tree.frontier]
                growing = self._grow(growing, level)
        return [tree.finish(self.target.vocab) for tree in trees]

    def _can_draft(self, row: Row) -> bool:
        """Without the states up to the root, or without room, the request goes on without a draft."""
        upto = self.cache.length[row.slot] + self.config.block
        return self.is_up_to_date(row) and self.cache.pages.grow(row.slot, upto + len(self.waiting[row.slot]))

    def _remember(self, rows: Sequence[Row]) -> None:
        """Write the keys and values of all context that waits; none depends on another."""
        parts, positions, places, counts = [], [], [], []
        for row in rows:
            at, taken = self.cache.length[row.slot], self.take(row.slot)
            count = sum(map(len, taken))
            parts += taken
            positions.append(np.arange(at, at + count))
            places.append(self.cache.pages.rows[row.slot, at : at + count])
            counts.append(count)
        if not parts:
            return
        context, index = torch.cat(parts), torch.from_numpy(np.concatenate(places)).to(self.target.device)
        rotation = self._rotation(torch.from_numpy(np.concatenate(positions)).to(self.target.device))
        for layer in range(self.config.layer.layers):
            keys, values = self.head.remember(layer, context, rotation)
            self.cache.keys[layer, index], self.cache.values[layer, index] = keys, values
        for row, count in zip(rows, counts, strict=True):
            self.commit(row, count)

    def _say(self, trees: Sequence[Tree]) -> list[_Growing]:
        """One pass over the block of each root. A block is whole however deep the draft is to be: what a slot says
        depends on how many there are."""
        c = self.config
        masks, parents = [c.mask_token] * (c.block - 1), list(range(-1, c.block - 1))
        segments = [Segment(tree.row.slot, [tree.row.tokens[-1], *masks], parents, []) for tree in trees]
        attention = Attention(segments, self.cache, c.layer, causal=False)
        ids = torch.tensor([token for s in segments for token in s.tokens], device=self.target.device)
        made = self.head(self.head.embed(ids).to(self.dtype), self._rotation(attention.positions), attention)
        deepest = min(max(tree.row.depth for tree in trees), c.depth)
        made = made.view(len(trees), c.block, -1)[:, c.first : c.first + deepest]
        said = self.head.say(made.flatten(0, 1)).view(len(trees), deepest, -1)
        return [_Growing(*each) for each in zip(trees, made, said, strict=True)]

    def _grow(self, growing: Sequence[_Growing], level: int) -> list[_Growing]:
        """Add one level to each tree; those that go on."""
        if self.threshold > 0:
            growing = [g for g in growing if self._is_trusted(g, level)]
        if growing:
            logits = torch.cat([self._follow(g, level) for g in growing])
            grow([g.tree for g in growing], logits, self.width, self.name)
        return list(growing)

    def _follow(self, g: _Growing, level: int) -> Tensor:
        """What is said behind each node of the frontier. [F, V]"""
        previous = self._frontier(g)
        return self.head.follow(g.said[level].expand(len(previous), -1), previous)

    def _is_trusted(self, g: _Growing, level: int) -> bool:
        """Take the paths that are not likely enough to stand out of the frontier; whether any is left."""
        tree, previous = g.tree, self._frontier(g)
        trust = self.head.trust(g.made[level].expand(len(previous), -1), previous).sigmoid()
        for node, chance in zip(tree.frontier, trust.tolist(), strict=True):
            g.stands[node] = g.stands[tree.draft.parents[node]] * chance
        kept = [i for i, node in enumerate(tree.frontier) if g.stands[node] >= self.threshold]
        tree.frontier, tree.values = [tree.frontier[i] for i in kept], [tree.values[i] for i in kept]
        return bool(kept)

    def _frontier(self, g: _Growing) -> Tensor:
        """The tokens of the frontier. [F]"""
        return torch.tensor([g.tree.draft.tokens[node] for node in g.tree.frontier], device=self.target.device)

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        cosine, sine = (table[positions] for table in self.rotation)
        return cosine, sine
