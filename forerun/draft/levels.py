"""Drafting with heads on the target's last state, one a level: Medusa, MLP speculators.

Chains are grown in one native call where they are drawn as the target draws, with no filter; what takes more (branches,
laws to keep) is grown level by level.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from forerun.draft.base import Proposer, Reference, Row
from forerun.draft.features import as_tensor
from forerun.draft.layers import with_native_products
from forerun.draft.level_heads import STATE, LevelHeads
from forerun.draft.operations import Operations
from forerun.draft.tree import Tree, grow
from forerun.draft.view import TargetView
from forerun.models.config import ModelConfig
from forerun.models.shortlist import spread
from forerun.passes import Link, Said
from forerun.recorded import LOGITS, Recorded
from forerun.types import BESIDE, Draft, States


class NativeLevels:
    """Heads on the native kernels, a program for each level: all levels and the draws between them in one call."""

    def __init__(self, heads: LevelHeads, config: ModelConfig, form: str) -> None:
        """Their products are native, in `form`; config: of their target."""
        made, ids = Operations(config, form, None), heads.tokens()
        self._ids, self._vocab = None if ids is None else ids.numpy(), heads.vocab
        inner, carried = heads.widths()
        widths = np.ones(STATE + 1, np.int32)
        widths[0], widths[LOGITS], widths[STATE] = inner, heads.vocab if ids is None else len(ids), carried
        programs = [heads.record(level, made) for level in range(heads.levels)]
        self._made, self._begin = made, Recorded(config, [], widths)
        self._levels = [Recorded(config, ops, widths) for ops in programs]

    def round(self, links: Sequence[Link], entered: Tensor, stands: array[float] | None) -> list[Said]:
        """Draft behind each link from what enters level 0, [links, C], at most as many tokens as there are levels; see
        `Recorded.levels`."""
        links = [replace(link, keys=link.keys[: len(self._levels)]) for link in links]
        given = {STATE: entered.float().numpy()}
        return self._begin.levels(links, self._levels, given, self._vocab, self._ids, stands)


class Grower:
    """Heads that draft for a target, and the drafts they grow.

    Attributes:
        heads: with products in the target's native form.
        native: their levels as programs, where whole rounds can be done by them.
    """

    def __init__(self, name: str, heads: LevelHeads, target: TargetView, width: int) -> None:
        """Raises LoadError if they are not made for this target."""
        heads.attach(target)
        self.name, self.target, self.width = name, target, width
        self.heads, self.native = heads.to(target.device), None
        if target.form is not None:
            self.heads = with_native_products(self.heads, target.form)
            if width == 1:
                self.native = NativeLevels(self.heads, target.config, target.form)

    def grow(self, trees: Sequence[Tree], states: Tensor) -> None:
        """Grow each tree as deep as its row allows and there are levels; states [trees, H] stand before the roots."""
        entered = self.heads.enter(states)
        if not self._round(trees, entered):
            self._by_levels(trees, entered)

    def _round(self, trees: Sequence[Tree], entered: Tensor) -> bool:
        """All of it in one native call. False, and nothing done, where that takes more."""
        if self.native is None or not all(tree.is_plain for tree in trees):
            return False
        stands = trees[0].row.stands  # a guess, which differs between temperatures alone; rows without have no floor
        said = self.native.round([tree.link(0) for tree in trees], entered, stands)
        for tree, own in zip(trees, said, strict=True):
            tree.weigh(own, self.name, BESIDE)
        return True

    def _by_levels(self, trees: Sequence[Tree], carried: Tensor) -> None:
        growing = list(trees)  # rows of frontiers, the trees one after the other
        for level in range(self.heads.levels):
            nodes = [(tree, node) for tree in growing for node in tree.frontier]
            tokens = torch.tensor([tree.draft.tokens[node] for tree, node in nodes], device=carried.device)
            logits, carried = self.heads.step(level, carried, tokens)
            grow(growing, spread(logits, self.heads.tokens(), self.target.vocab), self.width, self.name)
            growing = [tree for tree in growing if tree.row.depth > level + 1 and tree.frontier]
            if not growing:
                return
            place = {(id(tree), node): i for i, (tree, node) in enumerate(nodes)}
            carried = carried[[place[id(tree), tree.draft.parents[node]] for tree in growing for node in tree.frontier]]


class Levels(Proposer):
    """Chains, or trees of `width` nodes a level, from heads on the state of the token before the root."""

    def __init__(self, name: str, heads: LevelHeads, target: TargetView, width: int = 1) -> None:
        """`name` is what statistics call it. It computes in the heads' own dtype, or in the target's native form.
        Raises LoadError if the heads are not made for this target."""
        self.dtype = next(heads.parameters()).dtype
        self.grower = Grower(name, heads, target, width)
        self.name, self.target, self.width, self.boundaries = name, target, width, (target.layers,)
        self.stops = self.weighs = self.grower.native is not None
        self.beside = BESIDE if self.stops else 0
        self._states: dict[int, tuple[int, States]] = {}  # by slot: position and state of its last token

    def open(self, slot: int, tokens: Sequence[int], references: Sequence[Reference] = (), tenant: str = "") -> None:
        self._states.pop(slot, None)

    def close(self, slot: int, finished: Sequence[int] | None = None) -> None:
        self._states.pop(slot, None)

    def reset(self) -> None:
        self._states.clear()

    def observe(self, slot: int, start: int, features: Mapping[int, States]) -> None:
        states = features[self.target.layers]
        self._states[slot] = start + len(states) - 1, states[-1]

    @torch.inference_mode()
    def propose(self, rows: Sequence[Row]) -> list[Draft]:
        trees = [Tree(row, fed=0) for row in rows]
        # the state must be that of the token before the root
        active = [tree for tree in trees if self._states.get(tree.row.slot, (None,))[0] == len(tree.row.tokens) - 2]
        if active:
            states = self.target.normalise(torch.stack([as_tensor(self._states[tree.row.slot][1]) for tree in active]))
            self.grower.grow(active, states.to(self.dtype))
        return [tree.finish(self.target.vocab) for tree in trees]
