"""Drafting with heads on pairs, EAGLE-3 (Li et al. 2503.01840) and multi-token modules: one decoder
layer, one cache.

With g_t the target's hidden states of token t at some boundaries, side by side, the pair of the
embedding of token t + 1 and g_t says token t + 2. Of committed tokens both halves are final: their
pairs are read once, and kept in the head's own cache. Below the root there are no states of the
target: a drafted token is paired with what the head itself made of its parent, and none of that
outlives the round. So what is committed in the cache was never drafted."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from forerun.cache.attention import Attention, Segment
from forerun.cache.kv import KVCache
from forerun.draft.eagle.module import EagleModule
from forerun.draft.head_modules import with_native_products
from forerun.draft.head_program import Operations, run
from forerun.draft.hidden_states import LayerProposer
from forerun.draft.proposer import DraftRequest, TargetView
from forerun.draft.tree import Tree, grow, grow_all
from forerun.kernels import native
from forerun.kernels.native import COp
from forerun.models.shortlist import spread
from forerun.runtime.program import LOGITS, QKV, Link, Packed, Pass, Recorded, Said, Start, X
from forerun.types import BESIDE

EMBEDDED, STATE, FUSED, FEATURES = range(
    LOGITS + 1, LOGITS + 5
)  # buffers; of FEATURES there may be several


class NativeLayer:
    """A head's layer as a program; the head's weights are packed in `form`."""

    def __init__(
        self,
        head: EagleModule,
        form: str,
        rotation: tuple[Tensor, Tensor],
        says: Packed | None,
        softcap: float,
    ) -> None:
        """rotation: cos and sin of all positions, float32 [context, 1, D / 2]. says: what makes
        logits, bounded by `softcap` unless that is 0; without it no chains are drafted here."""
        self._made = made = Operations(head.layer, form, rotation)
        ids, self._vocab = head.tokens(), head.target.vocab
        self._ids = None if ids is None else ids.numpy()
        c, parts = head.layer, head.parts()
        own = parts.layer.self_attn
        qkv, added = own.products(), own.biases()
        if parts.join is None:
            ops = [
                made.product(qkv[:, : c.hidden], EMBEDDED, QKV, parts.embed_norm, added),
                made.product(qkv[:, c.hidden :], STATE, QKV, parts.state_norm, combine=native.ADD),
                made.copy(STATE, X),
            ]
        else:
            ops = [
                made.product(
                    parts.join.weight[:, : c.hidden], EMBEDDED, X, parts.embed_norm, parts.join.bias
                ),
                made.product(
                    parts.join.weight[:, c.hidden :], STATE, X, parts.state_norm, combine=native.ADD
                ),
                made.product(qkv, X, QKV, parts.attention_norm, added),
            ]
        ops += [made.rotate(own, 0), *made.rest(parts.layer, 0)]
        fusing = head.fusing() if says else []
        others = [c.hidden, c.hidden, c.hidden, *(weight.shape[1] for _, weight in fusing)]
        sizes = made.widths(says.matrix.outputs if says else 1, *others)
        self.features = range(FEATURES, len(sizes))  # the buffers that a round may begin with
        self._recorded = Recorded(c, ops, sizes)
        self._whole, self._begin = None, None
        if says:
            whole = self._ends(head, ops, says, softcap)
            self._whole = Recorded(c, whole, sizes)
            self._begin = (
                Recorded(c, [*self._fuse(head, fusing), *whole], sizes) if fusing else None
            )

    def __call__(
        self, embedded: Tensor, states: Tensor, segments: Sequence[Segment], cache: KVCache
    ) -> Tensor:
        """Pairs [T, Hd] of the segments' tokens; keys and values go into the cache. -> float32 [T,
        Hd]"""
        return run(
            self._recorded, Pass(segments, cache), cache, {EMBEDDED: embedded, STATE: states}
        ).clone()

    @property
    def drafts(self) -> bool:
        """Whether whole rounds can be done here."""
        return self._whole is not None

    @property
    def fuses(self) -> bool:
        """Whether rounds can begin with the target's states as they are."""
        return self._begin is not None

    def chain(
        self, links: Sequence[Link], states: Tensor, cache: KVCache
    ) -> list[list[int]] | None:
        """Draft behind each link, whose first token is paired with a state of `states` [links, Hd];
        see `Recorded.chain`. None if that cannot be done here."""
        if self._whole is None:
            return None
        return self._whole.chain(links, cache, self._vocab, self._ids, {STATE: states.numpy()})

    def round(
        self, starts: Sequence[Start], cache: KVCache, raw: bool, stands: array[float] | None
    ) -> tuple[list[Said], np.ndarray]:
        """Read pairs and draft behind them, in one call; see `Recorded.round`. `raw`: the starts
        bring the target's states, which are yet to be fused."""
        begin, given = (self._begin, self.features) if raw else (self._whole, [STATE])
        assert self._whole is not None and begin is not None
        return self._whole.round(starts, cache, self._vocab, self._ids, STATE, begin, given, stands)

    def _ends(self, head: EagleModule, ops: list[COp], says: Packed, softcap: float) -> list[COp]:
        """The layer with what comes before it, the embedding, and after it: logits, and the state
        for the next."""
        made, parts = self._made, head.parts()
        table, scale = head.table()
        return [
            made.embedding(table, EMBEDDED, scale),
            *ops,
            made.product(says, X, LOGITS, parts.last_norm, wanted=1, softcap=softcap),
            made.copy(X, STATE, *parts.carried),
        ]

    def _fuse(
        self, head: EagleModule, fusing: Sequence[tuple[nn.Module | None, Tensor]]
    ) -> list[COp]:
        """The target's states to what goes into the layer, as `EagleModule.fuse` and `enter` do."""
        made = self._made
        ops = [
            made.product(weight, FEATURES + i, FUSED, norm, combine=native.ADD if i else 0)
            for i, (norm, weight) in enumerate(fusing)
        ]
        return [*ops, made.copy(FUSED, STATE, head.entered)]


@dataclass(slots=True)
class _Growing:
    """A tree under construction, and what the head made of its frontier. {node: [Hd]}"""

    tree: Tree
    made: dict[int, Tensor]


class EagleProposer(LayerProposer):
    """Chains, or trees of `width` nodes a level, from a head on pairs."""

    native: NativeLayer | None
    fed = 1

    def __init__(
        self, name: str, head: EagleModule, target: TargetView, *, width: int = 1, **room: int
    ) -> None:
        """`name` is what statistics call it. Room for pairs: as in `HiddenStateProposer`. It
        computes in the head's own dtype, or in the target's native form. Raises LoadError if the
        head is not made for this target."""
        head.attach(target)
        head = head.to(target.device)
        dtype = next(head.parameters()).dtype if target.form is None else torch.float32
        super().__init__(target, head.layer, dtype, target.context, **room)
        self.name, self.width, self.aux_hidden_layers, self.ids = (
            name,
            width,
            head.aux_hidden_layers,
            head.tokens(),
        )
        self.head, self.native = (
            (head, None) if target.form is None else self._natively(head, target.form)
        )
        self.ends_chains = self.reports_confidence = (
            self.native is not None and self.native.drafts and width == 1
        )
        self.extra_nodes = BESIDE if self.ends_chains else 0
        self.reset()

    def fuse(self, shown: Tensor) -> Tensor:
        return self.head.fuse(shown).to(self.dtype)

    def can_draft(self, row: DraftRequest) -> bool:
        """Nor is there a draft behind a token that the head's own embedding lacks."""
        if self.head.embed_tokens is not None and row.slot in self.waiting:
            unread = row.tokens[self.next_position(row.slot) + 1 :]
            if max(unread, default=0) >= self.layer.vocab:
                return False
        return super().can_draft(row)

    def scratch(self, row: DraftRequest) -> int:
        return row.depth * self.width

    def draft(self, trees: Sequence[Tree]) -> None:
        if not self._round(trees):
            self._by_levels(trees)

    def _by_levels(self, trees: Sequence[Tree]) -> None:
        self.catch_up([tree.request for tree in trees])
        growing, level = [_Growing(tree, {0: self._last[tree.request.slot]}) for tree in trees], 1
        while growing:
            frontier = torch.stack([g.made[node] for g in growing for node in g.tree.frontier])
            grow([g.tree for g in growing], self._logits(frontier), self.width, self.name)
            growing = [g for g in growing if g.tree.request.depth > level and g.tree.frontier]
            if self._chain(growing):
                break
            self._feed(growing)
            level += 1

    def _round(self, trees: Sequence[Tree]) -> bool:
        """Read what the slots have missed and draft chains behind it, all in one native call.
        False, and nothing done,
        where that takes more: branches, laws to keep, filters, a long prompt, nothing new to
            read."""
        native = self.native
        if native is None or not native.drafts or self.width > 1:
            return False
        if not all(tree.is_plain and self.waiting[tree.request.slot].parts == 1 for tree in trees):
            return False
        raw = native.fuses and not any(self.waiting[tree.request.slot].fused for tree in trees)
        starts = [self._start(tree, raw) for tree in trees]
        stands = (
            trees[0].request.confidence_rates
        )  # a guess, which differs between temperatures alone; rows without have no floor
        said, left = native.round(starts, self.cache, raw, stands)
        made = self.head.leave(torch.from_numpy(left))
        for tree, start, own, last in zip(trees, starts, said, made, strict=True):
            self.commit(tree.request, len(start.segment.tokens))
            self._last[tree.request.slot] = last
            tree.weigh(own, self.name, self.extra_nodes)
        return True

    def _start(self, tree: Tree, raw: bool) -> Start:
        """What a native round has to know of one request; `raw`, it fuses what it is given."""
        row = tree.request
        parts = (
            self.take_raw(row.slot)
            if raw
            else [self.head.enter(part).numpy() for part in self.take(row.slot)]
        )
        assert self.native is not None
        if raw and len(parts) > len(self.native.features):
            parts = [np.concatenate(parts, -1)]
        count = len(parts[0])
        segment = self.behind(row, count)
        segment.want = [count - 1]
        return Start(segment, parts, row.noise.target(0), tree.link(count))

    def _chain(self, growing: Sequence[_Growing]) -> bool:
        """Finish drafts that are chains in one native call. False, and nothing done, where a level
        needs more."""
        if (
            not growing
            or self.native is None
            or self.width > 1
            or not all(g.tree.is_plain for g in growing)
        ):
            return False
        made = torch.stack([g.made[g.tree.draft.parents[-1]] for g in growing])
        links = [g.tree.link(g.tree.fed - 1) for g in growing]
        said = self.native.chain(links, self.head.enter(self.head.state(made)), self.cache)
        for g, tokens in zip(growing, said, strict=True) if said else ():
            g.tree.extend(tokens, self.name)
        return said is not None

    def _natively(self, head: EagleModule, form: str) -> tuple[EagleModule, NativeLayer | None]:
        """The head with products on the native kernels, and its layer as a program, where that can
        be."""
        fast = with_native_products(head, form, head.inner)
        return fast, NativeLayer(head, form, self.rotation, *fast.packed())

    def _feed(self, growing: Sequence[_Growing]) -> None:
        """Run the nodes added last, each with the state its parent left; nothing of it is
        committed."""
        if not growing:
            return
        segments, states = [], []
        for g in growing:
            draft, first = g.tree.draft, g.tree.fed
            # the root is committed: below it the uncommitted region begins, one row a node
            parents = [parent - 1 for parent in draft.parents[1:]]
            segments.append(
                Segment(g.tree.request.slot, draft.tokens[first:], parents, [], offset=first - 1)
            )
            states += [g.made[parent] for parent in draft.parents[first:]]
        passed = self.run(segments, self.head.state(torch.stack(states)))
        for g, made in zip(growing, passed, strict=True):
            g.made = {node: made[node - g.tree.fed] for node in g.tree.frontier}
            g.tree.fed = len(g.tree.draft)

    def run(self, segments: Sequence[Segment], states: Tensor) -> Sequence[Tensor]:
        ids = torch.tensor(
            [token for s in segments for token in s.tokens], device=self.target.device
        )
        embedded = self.head.embed(ids).to(self.dtype)
        if self.native is not None:
            made = self.head.leave(
                self.native(embedded, self.head.enter(states), segments, self.cache)
            )
        else:
            attention = Attention(segments, self.cache, self.layer)
            made = self.head(embedded, states, self.rotate(attention.positions), attention)
        return torch.split(made, [len(s.tokens) for s in segments])

    def _logits(self, made: Tensor) -> Tensor:
        """Over the target's vocabulary; what the head cannot say is -inf. [F, Hd] -> [F, V]"""
        return spread(self.head.logits(made), self.ids, self.target.vocab)


class ParallelEagleProposer(EagleProposer):
    """P-EAGLE: chains, or trees of `width` nodes a level, from one pass of a head that has a mask
    token.

    Behind the committed pairs stand slots whose token and states are not known yet: each is the
    pair of a mask token's embedding and a vector that was trained in place of the target's states.
    The last committed pair says the first token, slot j the token after the next j. What a slot
    says does not depend on what is drafted before it, and nothing
    of it is kept: the next round writes the pairs of what was committed in its place.
    """

    def draft(self, trees: Sequence[Tree]) -> None:
        grow_all(trees, self._say([tree.request for tree in trees]), self.width, self.name)

    def _say(self, rows: Sequence[DraftRequest]) -> Sequence[Tensor]:
        """Read what the slots have missed, with the masks behind it; logits of each row's levels,
        [depth, V]."""
        parts = [self.take(row.slot) for row in rows]
        self.read(rows, [taken[:-1] for taken in parts])  # a long prompt goes in pieces
        made = []
        for row, passed in zip(
            rows, self._pass_masks(rows, [taken[-1:] for taken in parts]), strict=True
        ):
            read = len(passed) - row.depth + 1
            if read:
                self.commit(row, read)
                self._last[row.slot] = passed[read - 1].clone()
            made += [self._last[row.slot][None], passed[read:]]
        return torch.split(self._logits(torch.cat(made)), [row.depth for row in rows])

    def _pass_masks(
        self, rows: Sequence[DraftRequest], parts: Sequence[list[Tensor]]
    ) -> list[Tensor]:
        """One pass over each row's last part, if it has one, and as many masks as it drafts tokens
        but one; what the head makes of them. [n, Hd] each"""
        mask, token = (
            self.fuse(self.head.mask_hidden.view(1, -1).to(self.dtype)),
            self.head.mask_token,
        )
        assert token is not None
        segments, states = [], []
        for row, part in zip(rows, parts, strict=True):
            tokens = [*self.behind(row, sum(map(len, part))).tokens, *[token] * (row.depth - 1)]
            segments.append(Segment(row.slot, tokens, list(range(-1, len(tokens) - 1)), []))
            states += [*part, mask.expand(row.depth - 1, -1)]
        some = [s for s in segments if s.tokens]
        passed = iter(self.run(some, torch.cat(states)) if some else [])
        return [next(passed) if s.tokens else mask[:0] for s in segments]

    def _natively(self, head: EagleModule, form: str) -> tuple[EagleModule, NativeLayer | None]:
        return with_native_products(
            head, form
        ), None  # it may have several layers, and is one pass anyway
