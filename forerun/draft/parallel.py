"""Drafting in parallel with a head on pairs, P-EAGLE: all tokens of a draft from one pass.

Behind the committed pairs stand slots whose token and states are not known yet: each is the pair of a mask token's
embedding and a vector that was trained in place of the target's states. The last committed pair says the first token,
slot j the token after the next j. What a slot says does not depend on what is drafted before it, and nothing of it is
kept: the next round writes the pairs of what was committed in its place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.cache.attention import Segment
from forerun.draft.base import Row
from forerun.draft.layers import with_native_products
from forerun.draft.native_layer import NativeLayer
from forerun.draft.pair_head import PairHead
from forerun.draft.pairs import Pairs
from forerun.draft.tree import Tree, grow_all
from forerun.types import Draft


class ParallelPairs(Pairs):
    """Chains, or trees of `width` nodes a level, from a head that has a mask token."""

    @torch.inference_mode()
    def propose(self, rows: Sequence[Row]) -> list[Draft]:
        trees = [Tree(row) for row in rows]
        active = [tree for tree in trees if self._can_draft(tree.row)]
        if active:
            grow_all(active, self._say([tree.row for tree in active]), self.width, self.name)
        return [tree.finish(self.target.vocab) for tree in trees]

    def _say(self, rows: Sequence[Row]) -> Sequence[Tensor]:
        """Read what the slots have missed, with the masks behind it; logits of each row's levels, [depth, V]."""
        parts = [self.take(row.slot) for row in rows]
        self._read_parts(rows, [taken[:-1] for taken in parts])  # a long prompt goes in pieces
        made = []
        for row, passed in zip(rows, self._pass_masks(rows, [taken[-1:] for taken in parts]), strict=True):
            read = len(passed) - row.depth + 1
            if read:
                self.commit(row, read)
                self._last[row.slot] = passed[read - 1].clone()
            made += [self._last[row.slot][None], passed[read:]]
        return torch.split(self._logits(torch.cat(made)), [row.depth for row in rows])

    def _pass_masks(self, rows: Sequence[Row], parts: Sequence[list[Tensor]]) -> list[Tensor]:
        """One pass over each row's last part, if it has one, and as many masks as it drafts tokens but one; what the
        head makes of them. [n, Hd] each"""
        mask, token = self.fuse(self.head.mask_hidden.view(1, -1).to(self.dtype)), self.head.mask_token
        assert token is not None
        segments, states = [], []
        for row, part in zip(rows, parts, strict=True):
            first, count = self.next_position(row.slot) + 1, sum(map(len, part))
            tokens = [*row.tokens[first : first + count], *[token] * (row.depth - 1)]
            segments.append(Segment(row.slot, tokens, list(range(-1, len(tokens) - 1)), []))
            states += [*part, mask.expand(row.depth - 1, -1)]
        some = [s for s in segments if s.tokens]
        passed = iter(self._pass(some, torch.cat(states)) if some else [])
        return [next(passed) if s.tokens else mask[:0] for s in segments]

    def _natively(
        self, head: PairHead, form: str, tables: tuple[Tensor, Tensor]
    ) -> tuple[PairHead, NativeLayer | None]:
        return with_native_products(head, form), None  # it may have several layers, and is one pass anyway
