"""Drafting with heads on pairs, EAGLE-3 (Li et al. 2503.01840) and multi-token modules: one decoder layer, one cache.

With g_t the target's hidden states of token t at some boundaries, side by side, the pair of the embedding of token
t + 1 and g_t says token t + 2. Of committed tokens both halves are final: their pairs are read once, and kept in the
head's own cache. Below the root there are no states of the target: a drafted token is paired with what the head itself
made of its parent, and none of that outlives the round. So what is committed in the cache was never drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forerun.cache.attention import Attention, Segment
from forerun.cache.kv import KVCache
from forerun.draft.base import Row
from forerun.draft.features import FeatureProposer
from forerun.draft.layers import Native, with_native_products
from forerun.draft.native_layer import NativeLayer
from forerun.draft.pair_head import PairHead
from forerun.draft.tree import Tree, grow
from forerun.draft.view import TargetView
from forerun.models.rope import rope_tables
from forerun.models.shortlist import spread
from forerun.recorded import Start
from forerun.types import BESIDE, Draft


@dataclass(slots=True)
class _Growing:
    """A tree under construction, and what the head made of its frontier. {node: [Hd]}"""

    tree: Tree
    made: dict[int, Tensor]


class Pairs(FeatureProposer):
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
        self._shape = {"tokens": tokens, "page": page, "slots": slots}
        layer = head.layer
        tables = rope_tables(layer, layer.ropes[0], target.context, self.dtype)
        self.rotation = tuple(table.to(target.device) for table in tables)
        self.head, self.native = (head, None) if target.form is None else self._natively(head, target.form, tables)
        self.stops = self.weighs = self.native is not None and self.native.drafts and width == 1
        self.beside = BESIDE if self.stops else 0
        self.reset()

    def reset(self) -> None:
        super().reset()
        self._last: dict[int, Tensor] = {}  # by slot: what the head made of the last pair it read, [Hd]

    def close(self, slot: int, finished: Sequence[int] | None = None) -> None:
        super().close(slot, finished)
        self._last.pop(slot, None)

    def new_cache(self) -> KVCache:
        return KVCache(
            self.head.layer, **self._shape, context=self.target.context, dtype=self.dtype, device=self.target.device,
            ahead=1, native=self.native is not None,
        )  # fmt: skip

    def fuse(self, shown: Tensor) -> Tensor:
        return self.head.fuse(shown).to(self.dtype)

    @torch.inference_mode()
    def propose(self, rows: Sequence[Row]) -> list[Draft]:
        trees = [Tree(row) for row in rows]
        active = [tree for tree in trees if self._can_draft(tree.row)]
        if self._round(active):
            return [tree.finish(self.target.vocab) for tree in trees]
        made = self._read([tree.row for tree in active])
        growing = [_Growing(tree, {0: root}) for tree, root in zip(active, made, strict=True)]
        level = 1
        while growing:
            frontier = torch.stack([g.made[node] for g in growing for node in g.tree.frontier])
            grow([g.tree for g in growing], self._logits(frontier), self.width, self.name)
            growing = [g for g in growing if g.tree.row.depth > level and g.tree.frontier]
            if self._chain(growing):
                break
            self._feed(growing)
            level += 1
        return [tree.finish(self.target.vocab) for tree in trees]

    def _round(self, trees: Sequence[Tree]) -> bool:
        """Read what the slots have missed and draft chains behind it, all in one native call. False, and nothing done,
        where that takes more: branches, laws to keep, filters, a long prompt, nothing new to read."""
        native = self.native
        if not trees or native is None or not native.drafts or self.width > 1:
            return False
        if not all(tree.is_plain and self.waiting[tree.row.slot].parts == 1 for tree in trees):
            return False
        raw = native.fuses and not any(self.waiting[tree.row.slot].fused for tree in trees)
        starts = [self._start(tree, raw) for tree in trees]
        ids = None if self.ids is None else self.ids.numpy()
        stands = trees[0].row.stands  # a guess, which differs between temperatures alone; rows without have no floor
        said, left = native.round(starts, self.cache, self.target.vocab, ids, raw, stands)
        made = self.head.leave(torch.from_numpy(left))
        for tree, start, own, last in zip(trees, starts, said, made, strict=True):
            self.commit(tree.row, len(start.segment.tokens))
            self._last[tree.row.slot] = last
            tree.weigh(own, self.name, self.beside)
        return True

    def _start(self, tree: Tree, raw: bool) -> Start:
        """What a native round has to know of one request; `raw`, it fuses what it is given."""
        row = tree.row
        parts = self.take_raw(row.slot) if raw else [self.head.enter(part).numpy() for part in self.take(row.slot)]
        assert parts is not None and self.native is not None
        if raw and len(parts) > len(self.native.features):
            parts = [np.concatenate(parts, -1)]
        first, count = self.next_position(row.slot) + 1, len(parts[0])
        tokens, parents = list(row.tokens[first : first + count]), list(range(-1, count - 1))
        segment = Segment(row.slot, tokens, parents, [count - 1])
        return Start(segment, parts, row.noise.target(0), tree.link(count))

    def _can_draft(self, row: Row) -> bool:
        """Without the state before the root, without room, or after a token that the head's own embedding lacks, the
        request goes on without a draft."""
        if not self.is_up_to_date(row):
            return False
        unread = row.tokens[self.next_position(row.slot) + 1 :]
        if not all(map(self.head.can_read, unread)):
            return False
        upto = self.cache.length[row.slot] + len(unread) + row.depth * self.width
        return self.cache.pages.grow(row.slot, upto)

    def _read(self, rows: Sequence[Row]) -> list[Tensor]:
        """Read the pairs each slot has missed, all of them final; what the head made of the last ones, [Hd] each."""
        self._read_parts(rows, [self.take(row.slot) for row in rows])
        return [self._last[row.slot] for row in rows]

    def _read_parts(self, rows: Sequence[Row], parts: Sequence[list[Tensor]]) -> None:
        """Read the pairs of these states, [n, Hd] each, and remember what the head made of each slot's last one."""
        for number in range(max(map(len, parts), default=0)):
            lagging = [(row, taken[number]) for row, taken in zip(rows, parts, strict=True) if number < len(taken)]
            segments = []
            for row, part in lagging:
                first = self.next_position(row.slot) + 1
                tokens = list(row.tokens[first : first + len(part)])
                segments.append(Segment(row.slot, tokens, list(range(-1, len(tokens) - 1)), []))
            passed = self._pass(segments, torch.cat([part for _, part in lagging]))
            for (row, _), made in zip(lagging, passed, strict=True):
                self.commit(row, len(made))
                self._last[row.slot] = made[-1].clone()  # a view would keep the whole pass

    def _chain(self, growing: Sequence[_Growing]) -> bool:
        """Finish drafts that are chains in one native call. False, and nothing done, where a level needs more."""
        if not growing or self.native is None or self.width > 1 or not all(g.tree.is_plain for g in growing):
            return False
        made = torch.stack([g.made[g.tree.draft.parents[-1]] for g in growing])
        links = [g.tree.link(g.tree.fed - 1) for g in growing]
        ids = None if self.ids is None else self.ids.numpy()
        said = self.native.chain(links, self.head.enter(self.head.state(made)), self.cache, self.target.vocab, ids)
        for g, tokens in zip(growing, said, strict=True) if said else ():
            g.tree.extend(tokens, self.name)
        return said is not None

    def _natively(
        self, head: PairHead, form: str, tables: tuple[Tensor, Tensor]
    ) -> tuple[PairHead, NativeLayer | None]:
        """The head with products on the native kernels, and its layer as a program, where that can be. `tables`: cos
        and sin of all positions."""
        fast = with_native_products(head, form, head.inner)
        own, softcap = fast.parts().says, 0.0
        says = own.packed if isinstance(own, Native) else None
        if own is None:
            says, softcap = self.target.packed, self.target.softcap
        return fast, NativeLayer(head, form, tables, says, softcap)

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
        return spread(self.head.logits(made), self.ids, self.target.vocab)
