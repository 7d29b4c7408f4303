"""Drafting with EAGLE-style heads: EAGLE-1/2/3, P-EAGLE and multi-token modules.

The pair of the embedding of token t + 1 and the fused hidden states of token t predicts token
t + 2. Both halves of a pair of committed tokens are final: such pairs are read once and stay in the
head's own KV cache. Below the root there are no hidden states of the target: a drafted token is
paired with what the head computed from its parent, and nothing of that outlives the round.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from forerun.cache.attention import Attention, Segment
from forerun.cache.kv import KVCache
from forerun.devices import as_tensor, upload
from forerun.draft.device_chains import HeadDrafter
from forerun.draft.eagle.module import EagleModule
from forerun.draft.eagle.own_module import OwnModule
from forerun.draft.head_modules import (
    Operations,
    Rotation,
    release_weights,
    run_program,
    with_native_products,
)
from forerun.draft.hidden_states import HiddenStateProposer, NativeRounds
from forerun.draft.proposer import DraftRequest, TargetView
from forerun.draft.tree import Tree, grow, grow_all
from forerun.kernels import native
from forerun.kernels.native import COp
from forerun.models.shortlist import spread
from forerun.runtime.device_rounds import DeviceDrafter
from forerun.runtime.packed import PackedMatrix
from forerun.runtime.program import (
    LOGITS,
    QKV,
    DraftedChain,
    ForwardBatch,
    Program,
    RoundStart,
    X,
    mix_op,
)
from forerun.runtime.recorder import DecoderRecorder
from forerun.runtime.rounds import HeadRounds
from forerun.types import NUM_ALTERNATIVES, States

# buffers of the native programs; FEATURES is the first of several
EMBEDDED, STATE, FUSED, FEATURES = range(LOGITS + 1, LOGITS + 5)
PAIR = FUSED  # in programs that fuse nothing: an embedding and a state, side by side


class NativeEagle(NativeRounds):
    """The layer of a head as native programs: a forward pass or a whole round."""

    _pass: Program
    _step: Program | None = None
    _fused_step: Program | None = None

    def __init__(
        self,
        head: EagleModule,
        form: str,
        rotation: Rotation,
        lm_head: PackedMatrix | None,
        softcap: float,
    ) -> None:
        """Pack the head's weights in `form`. `rotation` is cos and sin of all positions, float32
        [context, 1, D / 2]; `softcap` bounds the logits of `lm_head`, 0 for none."""
        c = head.layer
        self._build = Operations(c, form, rotation)
        ids = head.tokens()
        self._ids = None if ids is None else ids.numpy()
        self._vocab = head.target.vocab
        fusion = head.fusion_products() if lm_head else []
        self.features = range(FEATURES, FEATURES + len(fusion))
        layer = self._layer(head)
        num_logits = lm_head.matrix.outputs if lm_head else 1
        others = [c.hidden, c.hidden, c.hidden, *(weight.shape[1] for _, weight in fusion)]
        widths = self._build.widths(num_logits, *others)
        self._pass = Program(layer, widths)
        if lm_head:
            step = self._drafting(head, layer, lm_head, softcap)
            self._step = Program(step, widths)
            self.drafts, self.fuses = True, bool(fusion)
            if fusion:
                self._fused_step = Program([*self._fusion(head, fusion), *step], widths)

    def __call__(
        self, embedded: Tensor, states: Tensor, segments: Sequence[Segment], cache: KVCache
    ) -> Tensor:
        """Run pairs [T, Hd] of the segments' tokens, and write their cache rows. -> float32
        [T, Hd]"""
        inputs = {EMBEDDED: embedded, STATE: states}
        return run_program(self._pass, ForwardBatch(segments, cache), cache, inputs).clone()

    def round(
        self,
        starts: Sequence[RoundStart],
        cache: KVCache,
        raw: bool,
        acceptance: array[float] | None,
    ) -> tuple[list[DraftedChain], np.ndarray]:
        """Process pairs and draft after them in one call; see `Program.draft_round`. With `raw` the
        starts hold the target's hidden states before they are fused."""
        begin, inputs = (self._fused_step, self.features) if raw else (self._step, [STATE])
        assert self._step is not None and begin is not None
        return self._step.draft_round(
            starts, cache, self._vocab, self._ids, STATE, begin, inputs, acceptance
        )

    def rounds(
        self, cache: KVCache, slot: int, states: Sequence[np.ndarray], depth: int
    ) -> HeadRounds:
        """Prepare whole rounds of drafts of at most `depth` levels, the first of which reads the
        target's hidden states [n, H] of each layer; the slot has room."""
        assert self._step is not None and self._fused_step is not None
        programs = self._step, self._fused_step
        return HeadRounds.of(
            *programs, cache, slot, states, self._vocab, self._ids, STATE, self.features, depth + 1
        )

    def _layer(self, head: EagleModule) -> list[COp]:
        """Return the operations from EMBEDDED and STATE to the layer's output in X."""
        build, parts, hidden = self._build, head.parts(), head.layer.hidden
        attention = parts.layer.self_attn
        qkv, bias = attention.products(), attention.biases()
        if parts.join is None:
            ops = [
                build.product(qkv[:, :hidden], EMBEDDED, QKV, parts.embed_norm, bias),
                build.product(qkv[:, hidden:], STATE, QKV, parts.state_norm, combine=native.ADD),
                build.copy(STATE, X),
            ]
        else:
            join = parts.join.weight
            ops = [
                build.product(join[:, :hidden], EMBEDDED, X, parts.embed_norm, parts.join.bias),
                build.product(join[:, hidden:], STATE, X, parts.state_norm, combine=native.ADD),
                build.product(qkv, X, QKV, parts.attention_norm, bias),
            ]
        run = build.attention_and_mlp(parts.layer, 0)
        return [*ops, build.rotate(attention, 0), *run]

    def _drafting(
        self, head: EagleModule, layer: list[COp], lm_head: PackedMatrix, softcap: float
    ) -> list[COp]:
        """Return the operations from a token and STATE to LOGITS and the next token's STATE."""
        build, parts = self._build, head.parts()
        table, scale = head.table()
        return [
            build.embedding(table, EMBEDDED, scale),
            *layer,
            build.product(lm_head, X, LOGITS, parts.last_norm, wanted=1, softcap=softcap),
            build.copy(X, STATE, *parts.carried),
        ]

    def _fusion(
        self, head: EagleModule, products: Sequence[tuple[nn.Module | None, Tensor]]
    ) -> list[COp]:
        """Return the operations from the target's hidden states to STATE."""
        build = self._build
        ops = [
            build.product(weight, FEATURES + i, FUSED, norm, combine=native.ADD if i else 0)
            for i, (norm, weight) in enumerate(products)
        ]
        return [*ops, build.copy(FUSED, STATE, head.parts().fused_norm)]


class NativeOwnModule(NativeEagle):
    """The module of a target's own checkpoint as native programs, recorded like the target's
    layers."""

    def __init__(
        self, module: OwnModule, rotation: Rotation, lm_head: PackedMatrix | None, softcap: float
    ) -> None:
        """`rotation` is cos and sin of all positions, as in `NativeEagle`; `lm_head` is the
        target's, whose logits `softcap` bounds."""
        self._ids, self._vocab = None, module.target.vocab
        self.features = range(FEATURES, FEATURES)
        recorder = _ModuleRecorder(module, rotation)
        self._owned = recorder.owned  # what the operations point to
        layer = recorder.module_layer()
        self._pass = recorder.make_program(layer)
        if lm_head:
            self._step = recorder.make_program(recorder.drafting(layer, lm_head, softcap))
            self.drafts = True


class _ModuleRecorder(DecoderRecorder):
    """Records the module of a target's own checkpoint; EMBEDDED, STATE and PAIR are buffers behind
    those of a decoder."""

    def __init__(self, module: OwnModule, rotation: Rotation) -> None:
        super().__init__(module.layer, module.weights, [rotation], len(rotation[0]), None, ())
        self._table, self._scale = module.table()

    def _widths(self) -> list[int]:
        hidden = self.config.hidden
        return [*super()._widths(), hidden, hidden, 2 * hidden]

    def module_layer(self) -> list[COp]:
        """Return the operations from EMBEDDED and STATE to the layer's output in X."""
        w, hidden = self.weights, self.config.hidden
        embedded, state = (hidden, 0) if w.state_first else (0, hidden)
        return [
            mix_op(EMBEDDED, PAIR, hidden, column=embedded, after=self._norm(w.embed_norm)),
            mix_op(STATE, PAIR, hidden, column=state, after=self._norm(w.state_norm)),
            *self._linear(w.join, PAIR, X, None),
            *self._layer(0),
        ]

    def drafting(self, layer: list[COp], lm_head: PackedMatrix, softcap: float) -> list[COp]:
        """Return the operations from a token and STATE to LOGITS and the next token's STATE."""
        last = self.weights.last_norm
        carried = None if self.weights.shares_norm else last
        self.owned.append(lm_head)
        return [
            self._embed(self._table, EMBEDDED, self._scale),
            *layer,
            *self._linear(lm_head, X, LOGITS, last, wanted=1, softcap=softcap),
            mix_op(X, STATE, self.config.hidden, after=self._norm(carried)),
        ]


@dataclass(slots=True)
class _Growing:
    """A tree under construction, and the head's outputs [Hd] of its frontier by node."""

    tree: Tree
    outputs: dict[int, Tensor]


class EagleProposer(HiddenStateProposer):
    """Drafts chains, or trees of `width` nodes a level, with an EAGLE-style head."""

    native: NativeEagle | None
    drafts_by_itself = True  # one token after the other, from nothing but its states
    num_fed = 1
    lead = 1  # a state is read with the token after it

    def __init__(
        self, name: str, head: EagleModule, target: TargetView, *, width: int = 1, **room: int
    ) -> None:
        """`name` is the source in statistics, `room` as in `HiddenStateProposer`. Computes in the
        head's dtype, or in the target's native form. Raises LoadError if the head is not made for
        this target."""
        head.attach(target)
        head = head.to(target.device)
        dtype = head.dtype if target.form is None else torch.float32
        super().__init__(target, head.layer, dtype, target.context, **room)
        self.name, self.width, self.ids = name, width, head.tokens()
        self.aux_hidden_layers = head.aux_hidden_layers
        self.head, self.native = head, None
        if target.form is not None:
            self.head, self.native = self._make_native(head, target.form)
        self.ends_chains = self.reports_confidence = (
            self.native is not None and self.native.drafts and width == 1
        )
        self.extra_nodes = NUM_ALTERNATIVES if self.ends_chains else 0
        self._device_drafter: HeadDrafter | None = None
        self.reset()

    def _make_native(self, head: EagleModule, form: str) -> tuple[EagleModule, NativeEagle | None]:
        """Return the head with native products, and its layer as native programs."""
        if isinstance(head, OwnModule):
            return head, NativeOwnModule(head, self.rotation, *head.packed_lm_head())
        packed = with_native_products(head, form, head.program_prefix)
        program = NativeEagle(head, form, self.rotation, *packed.packed_lm_head())
        release_weights(packed, head.program_prefix)
        return packed, program

    def reset(self) -> None:
        super().reset()
        self._last: dict[int, States] = {}  # by slot: the head's output of the last token read

    def close(self, slot: int, finished: Sequence[int] | None = None) -> None:
        super().close(slot, finished)
        self._last.pop(slot, None)

    def can_draft(self, row: DraftRequest) -> bool:
        """Return False also after a token that the head's own embedding lacks."""
        if self.head.embed_tokens is not None and row.slot in self.pending:
            unread = row.tokens[self.next_position(row.slot) + 1 :]
            if max(unread, default=0) >= self.layer.vocab:
                return False
        return super().can_draft(row)

    def scratch_rows(self, row: DraftRequest) -> int:
        return row.depth * self.width

    def fuse(self, states: Tensor) -> Tensor:
        return self.head.fuse(states).to(self.dtype)

    def write_cache(self, segments: Sequence[Segment], fused: Tensor) -> None:
        for segment, outputs in zip(segments, self._run(segments, fused), strict=True):
            self._last[segment.slot] = outputs[-1].clone()  # a view would keep the whole pass

    def _run(self, segments: Sequence[Segment], states: Tensor) -> Sequence[Tensor]:
        """Run the segments' tokens paired with states [T, Hd]; the outputs of each, [n, Hd]."""
        tokens = [token for segment in segments for token in segment.tokens]
        ids = upload(tokens, torch.int64, self.target.device)
        embedded = self.head.embed(ids).to(self.dtype)
        if self.native is not None:
            outputs = self.native(embedded, states, segments, self.cache)
        else:
            attention = Attention(segments, self.cache, self.layer)
            rotation = self.rotation_at(attention.positions)
            outputs = self.head(embedded, states, rotation, attention)
        return torch.split(outputs, [len(segment.tokens) for segment in segments])

    def logits(self, outputs: Tensor) -> Tensor:
        """Return logits over the target's vocabulary, -inf for tokens that the head lacks. [F, Hd]
        -> [F, V]"""
        return spread(self.head.logits(outputs), self.ids, self.target.vocab)

    def draft_natively(self, trees: Sequence[Tree]) -> bool:
        # a native round begins with pairs that are not read yet
        pending = all(len(self.pending[tree.request.slot]) for tree in trees)
        return pending and super().draft_natively(trees)

    def run_round(
        self, starts: Sequence[RoundStart], raw: bool, acceptance: array[float] | None
    ) -> list[DraftedChain]:
        assert self.native is not None
        found, outputs = self.native.round(starts, self.cache, raw, acceptance)
        for start, output in zip(starts, outputs, strict=True):
            self._last[start.segment.slot] = output
        return found

    def begin_rounds(
        self, requests: Sequence[DraftRequest], num_tokens: int
    ) -> HeadRounds | DeviceDrafter | None:
        native, row = self.native, requests[0]
        if native is None:
            return self._begin_device_rounds(requests, num_tokens)
        if not native.fuses or not self.reports_confidence or len(requests) > 1:
            return None
        pending = self.pending.get(row.slot)
        if pending is None or pending.fused or not pending.raw or not self.can_draft(row):
            return None
        rows = self.cache.length[row.slot] + len(pending) + num_tokens + row.depth
        if self.head.embed_tokens is not None or not self.cache.pages.grow(row.slot, rows):
            return None
        return native.rounds(self.cache, row.slot, self.look_raw(row.slot), row.depth)

    @torch.inference_mode()
    def _begin_device_rounds(
        self, requests: Sequence[DraftRequest], num_tokens: int
    ) -> HeadDrafter | None:
        """Read all states but the last of each request, and reserve the room."""
        lacks_tokens = self.head.embed_tokens is not None and self.layer.vocab < self.target.vocab
        decides = self.layer.experts is not None or self.layer.recurrent is not None
        if self.width > 1 or lacks_tokens or decides or not self.drafts_by_itself:
            return None
        for row in requests:
            pending = self.pending.get(row.slot)
            if pending is None or not len(pending) or not row.coupled or not self.can_draft(row):
                return None
            rows = self.cache.length[row.slot] + len(pending) + num_tokens + row.depth
            if not self.cache.pages.grow(row.slot, rows):
                return None
        states = [torch.cat(self.take(row.slot)) for row in requests]
        self.read(requests, [[own[:-1]] if len(own) > 1 else [] for own in states])
        for row, own in zip(requests, states, strict=True):
            self.pending[row.slot].fused = [own[-1:]]
        if self._device_drafter is None or self._device_drafter.cache is not self.cache:
            self._device_drafter = HeadDrafter(self)
        return self._device_drafter

    # ------------------------------------------------------------ level by level

    def grow_trees(self, trees: Sequence[Tree]) -> None:
        self.catch_up([tree.request for tree in trees])
        growing = [_Growing(tree, {0: as_tensor(self._last[tree.request.slot])}) for tree in trees]
        level = 1
        while growing:
            frontier = [g.outputs[node] for g in growing for node in g.tree.frontier]
            logits = self.logits(torch.stack(frontier))
            grow([g.tree for g in growing], logits, self.width, self.name)
            growing = [g for g in growing if g.tree.request.depth > level and g.tree.frontier]
            if growing:
                self._feed(growing)
            level += 1

    def _feed(self, growing: Sequence[_Growing]) -> None:
        """Run the nodes added last, each paired with its parent's state; nothing is committed."""
        segments, states = [], []
        for g in growing:
            draft, first = g.tree.draft, g.tree.fed
            # the root is committed: the uncommitted rows begin below it, one for each node
            parents = [parent - 1 for parent in draft.parents[1:]]
            tokens = draft.tokens[first:]
            segments.append(Segment(g.tree.request.slot, tokens, parents, [], offset=first - 1))
            states += [g.outputs[parent] for parent in draft.parents[first:]]
        passed = self._run(segments, self.head.next_state(torch.stack(states)))
        for g, outputs in zip(growing, passed, strict=True):
            g.outputs = {node: outputs[node - g.tree.fed] for node in g.tree.frontier}
            g.tree.fed = len(g.tree.draft)


class ParallelEagleProposer(EagleProposer):
    """P-EAGLE: drafts chains, or trees of `width` nodes a level, in one forward pass.

    Behind the committed pairs stand pairs of a mask token's embedding and a trained vector in place
    of the target's states. The last committed pair predicts the first token, mask j the token after
    the next j. Predictions do not depend on what is drafted before them, and the next round
    overwrites the cache rows of the masks.
    """

    drafts_by_itself = False

    def _make_native(self, head: EagleModule, form: str) -> tuple[EagleModule, NativeEagle | None]:
        # one pass a round leaves nothing to gain from a program, and it may have several layers
        return with_native_products(head, form), None

    def grow_trees(self, trees: Sequence[Tree]) -> None:
        logits = self._level_logits([tree.request for tree in trees])
        grow_all(trees, logits, self.width, self.name)

    def _level_logits(self, rows: Sequence[DraftRequest]) -> Sequence[Tensor]:
        """Read pending pairs with the masks after them; the logits of each request's levels,
        [depth, V]."""
        parts = [self.take(row.slot) for row in rows]
        self.read(rows, [own[:-1] for own in parts])  # a long prompt takes several passes
        passed = self._run_masks(rows, [own[-1:] for own in parts])
        outputs = []
        for row, own in zip(rows, passed, strict=True):
            num_read = len(own) - row.depth + 1
            if num_read:
                self.commit(row.slot, row.tokens, num_read)
                self._last[row.slot] = own[num_read - 1].clone()
            outputs += [as_tensor(self._last[row.slot])[None], own[num_read:]]
        return torch.split(self.logits(torch.cat(outputs)), [row.depth for row in rows])

    def _run_masks(
        self, rows: Sequence[DraftRequest], parts: Sequence[list[Tensor]]
    ) -> list[Tensor]:
        """Run each request's last part, if any, with depth - 1 masks after it; the outputs
        [n, Hd]."""
        mask_state = self.fuse(self.head.mask_hidden.view(1, -1).to(self.dtype))
        mask_token = self.head.mask_token
        assert mask_token is not None
        segments, states = [], []
        for row, own in zip(rows, parts, strict=True):
            read = self.segment(row, sum(map(len, own))).tokens
            tokens = [*read, *[mask_token] * (row.depth - 1)]
            segments.append(Segment.chain(row.slot, tokens))
            states += [*own, mask_state.expand(row.depth - 1, -1)]
        running = [segment for segment in segments if segment.tokens]
        passed = iter(self._run(running, torch.cat(states)) if running else [])
        return [next(passed) if segment.tokens else mask_state[:0] for segment in segments]
