"""Drafting with heads on pairs, EAGLE-3 (Li et al. 2503.01840) and multi-token modules: one decoder layer, one cache.

With g_t the target's hidden states of token t at some boundaries, side by side, the pair of the embedding of token
t + 1 and g_t says token t + 2. Of committed tokens both halves are final: their pairs are read once, and kept in the
head's own cache. Below the root there are no states of the target: a drafted token is paired with what the head itself
made of its parent, and none of that outlives the round. So what is committed in the cache was never drafted.

Positions are counted from the first pair a slot has: the states of a cached prefix are not shown, and rotary
embeddings only see distances.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.cache.attention import Attention, Segment
from forerun.cache.kv import KVCache
from forerun.draft.base import Proposer, Reference, Row
from forerun.draft.layers import with_native_products
from forerun.draft.native_layer import NativeLayer
from forerun.draft.pair_head import PairHead
from forerun.draft.tree import Tree, grow
from forerun.draft.view import TargetView
from forerun.models.rope import rope_tables
from forerun.types import Draft

CHUNK = 512  # so many states that wait are fused, and later read in one pass


@dataclass(slots=True)
class _Slot:
    """Where a request is. Positions are those of g.

    `read` is the next pair the cache lacks, `seen` the next position to be shown. What lies between waits: `states`
    are fused [n, Hd], `features` behind them, `waiting` rows, are not yet. `last` is what the head made of the last
    pair it read, [Hd].
    """

    read: int = -1
    seen: int = -1
    states: list[Tensor] = field(default_factory=list)
    features: list[Tensor] = field(default_factory=list)
    waiting: int = 0
    last: Tensor | None = None


@dataclass(slots=True)
class _Growing:
    """A tree under construction, and what the head made of its frontier. {node: [Hd]}"""

    tree: Tree
    made: dict[int, Tensor]


class Pairs(Proposer):
    """Chains, or trees of `width` nodes a level, from a head on pairs."""

    def __init__(
        self, name: str, head: PairHead, target: TargetView, *, tokens: int, page: int, slots: int, width: int = 1
    ) -> None:
        """`name` is what statistics call it. Room for the pairs of `tokens` tokens in pages of `page`, for `slots`
        requests at a time. It computes in the head's own dtype, or in the target's native form. Raises LoadError if
        the head is not made for this target."""
        head.attach(target)
        head = head.to(target.device)
        self.name, self.target, self.width, self.boundaries = name, target, width, head.boundaries
        self.dtype = next(head.parameters()).dtype if target.form is None else torch.float32
        self.ids = head.tokens()
        self.head = head if target.form is None else with_native_products(head, target.form, head.inner)
        self._shape = {"tokens": tokens, "page": page, "slots": slots}
        layer = head.layer
        tables = rope_tables(layer, layer.ropes[0], target.context, self.dtype)
        self.rotation = tuple(table.to(target.device) for table in tables)
        self.native = None if target.form is None else NativeLayer(head, target.form, tables)
        self.reset()

    def reset(self) -> None:
        self._slots: dict[int, _Slot] = {}
        self.cache = KVCache(
            self.head.layer,
            **self._shape,
            context=self.target.context,
            dtype=self.dtype,
            device=self.target.device,
        )

    def open(self, slot: int, tokens: Sequence[int], references: Sequence[Reference] = ()) -> None:
        self._slots[slot] = _Slot()

    def close(self, slot: int, finished: Sequence[int] | None = None) -> None:
        self._slots.pop(slot, None)
        self.cache.close(slot)

    @torch.inference_mode()
    def observe(self, slot: int, start: int, features: Mapping[int, Tensor]) -> None:
        state = self._slots[slot]
        shown = [features[boundary] for boundary in self.boundaries]
        if state.seen < 0:
            state.read = start
        count = len(shown[0])
        state.seen, state.waiting = start + count, state.waiting + count
        state.features.append(torch.cat(shown, dim=-1) if len(shown) > 1 else shown[0])
        if state.waiting >= CHUNK:
            self._fuse(state)  # a long prompt waits as what is made of it, which is narrower

    def _fuse(self, state: _Slot) -> None:
        if state.features:
            state.states.append(self.head.fuse(torch.cat(state.features).to(self.dtype)).to(self.dtype))
            state.features.clear()
            state.waiting = 0

    @torch.inference_mode()
    def propose(self, rows: Sequence[Row]) -> list[Draft]:
        trees = [Tree(row) for row in rows]
        active = [tree for tree in trees if self._can_draft(tree.row)]
        made = self._read([tree.row for tree in active])
        growing = [_Growing(tree, {0: root}) for tree, root in zip(active, made, strict=True)]
        level = 1
        while growing:
            frontier = torch.stack([g.made[node] for g in growing for node in g.tree.frontier])
            grow([g.tree for g in growing], self._logits(frontier), self.width, self.name)
            growing = [g for g in growing if g.tree.row.depth > level and g.tree.frontier]
            self._feed(growing)
            level += 1
        return [tree.finish(self.target.vocab) for tree in trees]

    def _can_draft(self, row: Row) -> bool:
        """Without the state before the root, without room, or after a token that the head's own embedding lacks, the
        request goes on without a draft."""
        state = self._slots.get(row.slot)
        if state is None or state.seen != len(row.tokens) - 1:
            return False
        waiting = row.tokens[state.read + 1 :]
        if not all(map(self.head.can_read, waiting)):
            return False
        upto = self.cache.length[row.slot] + len(waiting) + row.depth * self.width
        return self.cache.pages.grow(row.slot, upto)

    def _read(self, rows: Sequence[Row]) -> list[Tensor]:
        """Read the pairs each slot has missed, all of them final; what the head made of the last ones, [Hd] each."""
        states = [self._slots[row.slot] for row in rows]
        for state in states:
            self._fuse(state)
        while lagging := [(row, state) for row, state in zip(rows, states, strict=True) if state.states]:
            parts = [state.states.pop(0) for _, state in lagging]
            segments = []
            for (row, state), part in zip(lagging, parts, strict=True):
                tokens = list(row.tokens[state.read + 1 : state.read + 1 + len(part)])
                segments.append(Segment(row.slot, tokens, list(range(-1, len(tokens) - 1)), []))
            for (row, state), made in zip(lagging, self._pass(segments, torch.cat(parts)), strict=True):
                self.cache.commit(row.slot, range(len(made)))
                state.read += len(made)
                state.last = made[-1].clone()  # a view would keep the whole pass
        return [state.last for state in states if state.last is not None]

    def _feed(self, growing: Sequence[_Growing]) -> None:
        """Run the nodes added last, each with the state its parent left; nothing of it is committed."""
        if not growing:
            return
        segments, states = [], []
        for g in growing:
            draft, first = g.tree.draft, g.tree.fed
            # the root is committed: below it the uncommitted region begins, one row a node
            parents = [parent - 1 for parent in draft.parents[1:]]
            segments.append(Segment(g.tree.row.slot, draft.tokens[first:], parents, [], offset=first - 1))
            states += [g.made[parent] for parent in draft.parents[first:]]
        passed = self._pass(segments, self.head.state(torch.stack(states)))
        for g, made in zip(growing, passed, strict=True):
            g.made = {node: made[node - g.tree.fed] for node in g.tree.frontier}
            g.tree.fed = len(g.tree.draft)

    def _pass(self, segments: Sequence[Segment], states: Tensor) -> Sequence[Tensor]:
        """The segments' tokens, paired with states [T, Hd]; what the head makes of each segment's. [N, Hd]"""
        ids = torch.tensor([token for s in segments for token in s.tokens], device=self.target.device)
        embedded = self.head.embed(ids).to(self.dtype)
        if self.native is not None:
            made = self.head.leave(self.native(embedded, self.head.enter(states), segments, self.cache))
        else:
            attention = Attention(segments, self.cache, self.head.layer)
            cosine, sine = (table[attention.positions] for table in self.rotation)
            made = self.head(embedded, states, (cosine, sine), attention)
        return torch.split(made, [len(s.tokens) for s in segments])

    def _logits(self, made: Tensor) -> Tensor:
        """Over the target's vocabulary; what the head cannot say is -inf. [F, Hd] -> [F, V]"""
        logits = self.head.logits(made)
        if self.ids is None:
            return F.pad(logits, (0, self.target.vocab - logits.shape[1]), value=-torch.inf)
        full = logits.new_full((len(logits), self.target.vocab), -torch.inf)
        full[:, self.ids] = logits
        return full
