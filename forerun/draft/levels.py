"""Heads on the target's last state, one a level: what they are, and drafts grown with them.

With g_t the state in which the target left token t, after its last norm, the target's own head says token t + 1. The
head of level i (from 0) says token t + 2 + i, from what level i - 1 carries over and the token that was drafted there:
Medusa's carry the state and look at no token, a multi-layer perceptron a state of its own, Hydra's all embeddings so
far. Nothing of it outlives a round, so there is no cache, and a request needs no more than its last state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from forerun.draft.base import Proposer, Reference, Row
from forerun.draft.layers import DecoderLayer, with_native_products
from forerun.draft.tree import Tree, grow
from forerun.draft.view import TargetView
from forerun.errors import LoadError
from forerun.models.config import ModelConfig
from forerun.models.decoder import Attend
from forerun.models.shortlist import spread
from forerun.types import Draft


class Prefix(nn.Module):
    """The decoder layer over the target's states, and the norm behind it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config, self.layer = config, DecoderLayer(config)
        self.norm = nn.RMSNorm(config.hidden, config.norm_eps)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """[T, H] -> [T, H]"""
        out: Tensor = self.norm(self.layer(x, rotation, attend))
        return out


class LevelHeads(nn.Module):
    """Base of all modules with a head a level.

    Attributes:
        title: what messages call them, in the plural.
        levels: how many tokens ahead they say.
        hidden, vocab: of the target they are for.
        prefix: what makes the states they begin with of the target's, where these are not the target's own.
    """

    title: str
    prefix: Prefix | None

    def __init__(self, levels: int, hidden: int, vocab: int) -> None:
        super().__init__()
        self.levels, self.hidden, self.vocab = levels, hidden, vocab
        self.prefix = None

    def attach(self, target: TargetView) -> None:
        """Let them borrow from this target. Raises LoadError if they are not made for it."""
        if (self.hidden, self.vocab) != (target.hidden, target.vocab):
            raise LoadError(
                f"these {self.title} are for a target with states of {self.hidden} and {self.vocab} tokens, this one"
                f" has {target.hidden} and {target.vocab}: use some that were trained for it"
            )

    def tokens(self) -> Tensor | None:
        """The target's token ids they say, in the order of their logits, [Vd] int64; None: all of them."""
        return None

    def enter(self, states: Tensor) -> Tensor:
        """What level 0 begins with, of the target's normalised states. [R, H] -> [R, C]"""
        return states

    def step(self, level: int, carried: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """What a level says behind each of `tokens`, [F] int64, and what it carries over to the next.

        [F, C], where C may differ from level to level -> logits [F, Vd], [F, C']
        """
        raise NotImplementedError


def for_drafting(heads: LevelHeads, target: TargetView) -> LevelHeads:
    """Heads that draft for this target, with products in its native form. Raises LoadError if they do not fit."""
    heads.attach(target)
    heads = heads.to(target.device)
    return heads if target.form is None else with_native_products(heads, target.form)


def grow_levels(
    heads: LevelHeads, trees: Sequence[Tree], states: Tensor, target: TargetView, width: int, source: str
) -> None:
    """Grow each tree as deep as its row allows and there are levels; states [trees, H] are those before the roots."""
    growing, carried = list(trees), heads.enter(states)  # rows of frontiers, the trees one after the other
    for level in range(heads.levels):
        nodes = [(tree, node) for tree in growing for node in tree.frontier]
        tokens = torch.tensor([tree.draft.tokens[node] for tree, node in nodes], device=carried.device)
        logits, carried = heads.step(level, carried, tokens)
        grow(growing, spread(logits, heads.tokens(), target.vocab), width, source)
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
        self.heads = for_drafting(heads, target)
        self.name, self.target, self.width, self.boundaries = name, target, width, (target.layers,)
        self._states: dict[int, tuple[int, Tensor]] = {}  # by slot: position and state of its last token

    def open(self, slot: int, tokens: Sequence[int], references: Sequence[Reference] = (), tenant: str = "") -> None:
        self._states.pop(slot, None)

    def close(self, slot: int, finished: Sequence[int] | None = None) -> None:
        self._states.pop(slot, None)

    def reset(self) -> None:
        self._states.clear()

    def observe(self, slot: int, start: int, features: Mapping[int, Tensor]) -> None:
        states = features[self.target.layers]
        self._states[slot] = start + len(states) - 1, states[-1]

    @torch.inference_mode()
    def propose(self, rows: Sequence[Row]) -> list[Draft]:
        trees = [Tree(row) for row in rows]
        # the state must be that of the token before the root
        active = [tree for tree in trees if self._states.get(tree.row.slot, (None,))[0] == len(tree.row.tokens) - 2]
        if active:
            states = self.target.normalise(torch.stack([self._states[tree.row.slot][1] for tree in active]))
            grow_levels(self.heads, active, states.to(self.dtype), self.target, self.width, self.name)
        return [tree.finish(self.target.vocab) for tree in trees]
