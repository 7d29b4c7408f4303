"""Drafting whole blocks in one forward pass, with DFlash and DSpark.

The context of a committed token is fused from the target's hidden states of that token alone. Its
keys and values are computed once for each layer, stay in the head's own KV cache, and never change.
The block of a round stands after them in scratch rows, which the next round overwrites. So a draft
of any depth costs one pass of a few layers, and the tokens are then taken from it level by level.

The root is the block's anchor: its own hidden states are not known yet, and the context ends before
it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from forerun.cache.attention import Attention, Segment
from forerun.cache.kv import KVCache
from forerun.devices import upload
from forerun.draft.block.formats import BlockConfig
from forerun.draft.block.module import BlockHead, Markov
from forerun.draft.head_modules import (
    DecoderLayer,
    Operations,
    Rotation,
    run_program,
    with_native_products,
)
from forerun.draft.hidden_states import HiddenStateProposer, NativeRounds
from forerun.draft.proposer import DraftRequest, TargetView
from forerun.draft.tree import Tree, grow
from forerun.errors import ConfigError
from forerun.kernels import native
from forerun.kernels.native import COp
from forerun.models.config import VisibleKeys
from forerun.runtime.packed import PackedMatrix
from forerun.runtime.program import LOGITS, QKV, DraftedChain, ForwardBatch, Program, RoundStart, X
from forerun.types import NUM_ALTERNATIVES

# buffers of the native programs; FEATURES is the first of one for each hidden-state layer
CONTEXT, FUSED, MARKOV, FEATURES = range(LOGITS + 1, LOGITS + 5)


class NativeBlock(NativeRounds):
    """The layers of a block drafter as native programs: a forward pass or a whole round."""

    fuses = True

    def __init__(
        self,
        head: BlockHead,
        form: str,
        rotation: Rotation,
        lm_head: PackedMatrix | None,
        softcap: float,
    ) -> None:
        """Pack the head's weights in `form`. `rotation` is cos and sin of all positions, float32
        [context, 1, D / 2]; `softcap` bounds the logits of `lm_head`, 0 for none. Whole rounds need
        an `lm_head`, and a head whose predictions depend on at most the previous token."""
        config, c = head.config, head.config.layer
        self._config = config
        # the kernels count windows from the last slot of a block, not from its anchor
        windows = tuple(window and window + config.block for window in c.windows)
        self._build = build = Operations(replace(c, windows=windows), form, rotation)
        ids = head.tokens()
        self._ids = None if ids is None else ids.numpy()
        self._vocab = head.target.vocab
        rank = config.markov.rank if config.markov else 1
        features = [config.target_hidden] * len(config.aux_hidden_layers)
        num_logits = lm_head.matrix.outputs if lm_head else 1
        widths = build.widths(num_logits, c.hidden, c.hidden, rank, *features)
        self.features = range(FEATURES, len(widths))
        table, scale = head.table()
        context, layers = self._layers(head)
        slots = [build.embedding(table, X, scale), *layers]
        self._context = Program(context, widths)
        self._slots = Program(slots, widths)
        self._fused_context = Program([*self._fusion(head), *context], widths)
        self._predict: Program | None = None
        self._markov: Program | None = None
        if lm_head and config.is_bigram:
            logits = build.product(lm_head, X, LOGITS, head.norm, wanted=1, softcap=softcap)
            self._predict = Program([*slots, logits], widths)
            self.drafts = True
            if config.markov:
                self._markov = Program(self._markov_bias(head.markov_head), widths)

    @staticmethod
    def supports(config: BlockConfig) -> bool:
        """Return True if the kernels have the attention of the layers: a pass is causal or not in
        all layers alike, and windows are counted from the last slot that is seen."""
        return not (any(config.layer.windows) and config.window_causal)

    def write_context(self, segments: Sequence[Segment], context: Tensor, cache: KVCache) -> None:
        """Write keys and values of context [T, Hd] in the segments' rows."""
        run_program(self._context, ForwardBatch(segments, cache), cache, {CONTEXT: context})

    def run_slots(self, segments: Sequence[Segment], cache: KVCache) -> Tensor:
        """Run the slots of some blocks; the layers' outputs before the last norm. -> float32
        [T, Hd]"""
        return run_program(self._slots, ForwardBatch(segments, cache, False), cache, {}).clone()

    def round(
        self,
        starts: Sequence[RoundStart],
        cache: KVCache,
        raw: bool,
        acceptance: array[float] | None,
    ) -> list[DraftedChain]:
        """Read the starts' context and draft after it in one call; see `Program.draft_block`. With
        `raw` the starts hold the target's hidden states before they are fused."""
        assert self._predict is not None
        config = self._config
        return self._predict.draft_block(
            starts,
            lambda start: block_segment(
                config, start.segment.slot, start.chain.token, start.chain.offset
            ),
            cache,
            self._vocab,
            self._ids,
            config.first,
            self._fused_context if raw else self._context,
            self.features if raw else [CONTEXT],
            self._markov,
            acceptance,
        )

    def _layers(self, head: BlockHead) -> tuple[list[COp], list[COp]]:
        """Return the operations that write keys and values of CONTEXT, and those that run the
        layers over the slots in X. Both share weights."""
        build, c = self._build, head.config.layer
        queries = c.heads * c.head_dim
        context, slots = [], []
        for i, layer in enumerate(head.layers):
            assert isinstance(layer, DecoderLayer)
            attention, norm = layer.self_attn, layer.input_layernorm
            weight, bias = attention.products(), attention.biases()
            query_bias, kv_bias = (None, None) if bias is None else (bias[:queries], bias[queries:])
            kv = build.pack(weight[queries:], kv_bias)
            rotate = build.rotate(attention, i)
            context += [build.product(kv, CONTEXT, QKV, column=queries), rotate]
            slots += [
                build.product(weight[:queries], X, QKV, norm, query_bias),
                build.product(kv, X, QKV, norm, column=queries),
                rotate,
                *build.attention_and_mlp(layer, i),
            ]
        return context, slots

    def _fusion(self, head: BlockHead) -> list[COp]:
        """Return the operations from the target's hidden states to CONTEXT."""
        weights = torch.split(head.fc.weight, head.config.target_hidden, 1)
        products = [
            self._build.product(weight, FEATURES + i, FUSED, combine=native.ADD if i else 0)
            for i, weight in enumerate(weights)
        ]
        return [*products, self._build.copy(FUSED, CONTEXT, head.hidden_norm)]

    def _markov_bias(self, markov: Markov) -> list[COp]:
        """Return the operations that add the previous token's bias to LOGITS."""
        return [
            self._build.embedding(markov.markov_w1.weight.detach(), MARKOV),
            self._build.product(markov.markov_w2.weight, MARKOV, LOGITS, combine=native.ADD),
        ]


def block_segment(config: BlockConfig, slot: int, anchor: int, offset: int = 0) -> Segment:
    """Return the slots of a block, `offset` tokens after the committed ones."""
    tokens = [anchor, *[config.mask_token] * (config.block - 1)]
    return Segment(slot, tokens, list(range(-1, offset + config.block - 1)), [], offset)


@dataclass(slots=True)
class _Growing:
    """A tree under construction with its block.

    Attributes:
        slots: outputs of all slots, [S, Hd].
        outputs, logits: of the slots that predict a token, [K, Hd] and [K, Vd]; K is the depth of
            the round's deepest draft.
        confidence: the product of confidences down to each node.
        markov_states: the Markov head's state of each node.
    """

    tree: Tree
    slots: Tensor
    outputs: Tensor
    logits: Tensor
    confidence: dict[int, float] = field(default_factory=lambda: {-1: 1.0})
    markov_states: dict[int, Tensor] = field(default_factory=dict)

    def frontier_tokens(self) -> Tensor:
        tokens = [self.tree.draft.tokens[node] for node in self.tree.frontier]
        return upload(tokens, torch.int64, self.slots.device)


class BlockProposer(HiddenStateProposer):
    """Drafts chains, or trees of `width` nodes a level, as deep as the head has slots.

    Attributes:
        threshold: a path whose product of confidences falls below it is not followed further; 0
            follows all. It depends on what is drafted already, never on the next tokens, so it
            changes no text.
    """

    name = "block"
    native: NativeBlock | None

    def __init__(
        self,
        head: BlockHead,
        target: TargetView,
        *,
        width: int = 1,
        threshold: float = 0.0,
        **room: int,
    ) -> None:
        """`room` as in `HiddenStateProposer`. Computes in the head's dtype, or in the target's
        native form. Raises LoadError if the head is not made for this target, ConfigError for a
        threshold without a confidence head."""
        config = head.config
        if threshold and not config.confidence:
            raise ConfigError(
                f"draft_threshold={threshold:g} needs a block drafter with a confidence head, which"
                " this one has not: leave it out, or train one with confidence"
            )
        head.attach(target)
        head = head.to(target.device)
        dtype = next(head.parameters()).dtype if target.form is None else torch.float32
        # the last block of a text reaches past the target's context
        super().__init__(target, config.layer, dtype, target.context + config.block, **room)
        self.config, self.aux_hidden_layers = config, config.aux_hidden_layers
        self.width, self.threshold, self.max_depth = width, threshold, config.depth
        self.head, self.native = head, None
        if target.form is not None:
            programs = NativeBlock.supports(config)
            packed = with_native_products(head, target.form, "layers" if programs else None)
            self.head = packed
            if programs:
                lm_head = packed.packed_lm_head()
                self.native = NativeBlock(head, target.form, self.rotation, *lm_head)
        whole_rounds = self.native is not None and self.native.drafts
        self.ends_chains = self.reports_confidence = whole_rounds and width == 1 and not threshold
        self.extra_nodes = NUM_ALTERNATIVES if self.reports_confidence else 0
        self.reset()

    def scratch_rows(self, row: DraftRequest) -> int:
        return self.config.block

    def fuse(self, states: Tensor) -> Tensor:
        return self.head.fuse(states)

    def write_cache(self, segments: Sequence[Segment], fused: Tensor) -> None:
        if self.native is not None:
            self.native.write_context(segments, fused, self.cache)
            return
        lengths = self.cache.length
        spans = [
            (s.slot, slice(lengths[s.slot], lengths[s.slot] + len(s.tokens))) for s in segments
        ]
        positions = np.concatenate([np.arange(span.start, span.stop) for _, span in spans])
        rows = np.concatenate([self.cache.pages.rows[slot, span] for slot, span in spans])
        rotation = self.rotation_at(torch.from_numpy(positions).to(self.target.device))
        index = torch.from_numpy(rows).to(self.target.device)
        for layer in range(self.layer.layers):
            keys, values = self.head.context_kv(layer, fused, rotation)
            self.cache.keys[layer][index], self.cache.values[layer][index] = keys, values

    def draft_natively(self, trees: Sequence[Tree]) -> bool:
        return not self.threshold and super().draft_natively(trees)

    def grow_trees(self, trees: Sequence[Tree]) -> None:
        self.catch_up([tree.request for tree in trees])
        growing = self._run_blocks(trees)
        for level in range(self.config.depth):
            growing = [g for g in growing if g.tree.request.depth > level and g.tree.frontier]
            if self.threshold > 0:
                growing = [g for g in growing if self._prune(g, level)]
            if not growing:
                return
            logits = torch.cat([self._logits(g, level) for g in growing])
            grow([g.tree for g in growing], logits, self.width, self.name)

    def run_round(
        self, starts: Sequence[RoundStart], raw: bool, acceptance: array[float] | None
    ) -> list[DraftedChain]:
        assert self.native is not None
        return self.native.round(starts, self.cache, raw, acceptance)

    # ------------------------------------------------------------ level by level

    def _run_blocks(self, trees: Sequence[Tree]) -> list[_Growing]:
        """Run the block after each root, always with all slots: every prediction depends on the
        number of slots."""
        c = self.config
        segments = [block_segment(c, tree.request.slot, tree.request.tokens[-1]) for tree in trees]
        if self.native is not None:
            slots = self.head.norm(self.native.run_slots(segments, self.cache))
        else:
            attention = _BlockAttention(segments, self.cache, c)
            tokens = [token for segment in segments for token in segment.tokens]
            embedded = self.head.embed(upload(tokens, torch.int64, self.target.device))
            rotation = self.rotation_at(attention.positions)
            slots = self.head(embedded.to(self.dtype), rotation, attention)
        deepest = min(max(tree.request.depth for tree in trees), c.depth)
        slots = slots.view(len(trees), c.block, -1)
        outputs = slots[:, c.first : c.first + deepest]
        logits = self.head.compute_logits(outputs.flatten(0, 1)).view(len(trees), deepest, -1)
        return [_Growing(*each) for each in zip(trees, slots, outputs, logits, strict=True)]

    def _logits(self, g: _Growing, level: int) -> Tensor:
        """Return the logits after each node of the frontier, [F, V]."""
        previous = g.frontier_tokens()
        logits = g.logits[level].expand(len(previous), -1)
        if self.config.markov is not None:
            markov, draft = self.head.markov_head, g.tree.draft
            if level == 0:
                anchor = upload(g.tree.request.tokens[-1:], torch.int64, self.target.device)
                g.markov_states[-1] = markov.initial_state(g.slots, anchor)
            parents = [g.markov_states[draft.parents[node]] for node in g.tree.frontier]
            logits, states = markov(g.outputs[level], logits, previous, torch.stack(parents))
            g.markov_states |= zip(g.tree.frontier, states, strict=True)
        return self.head.over_target_vocab(logits)

    def _prune(self, g: _Growing, level: int) -> bool:
        """Drop paths below the threshold from the frontier; True if any is left."""
        tree, previous = g.tree, g.frontier_tokens()
        slots = g.outputs[level].expand(len(previous), -1)
        confidence = self.head.confidence_logit(slots, previous).sigmoid()
        for node, own in zip(tree.frontier, confidence.tolist(), strict=True):
            g.confidence[node] = g.confidence[tree.draft.parents[node]] * own
        kept = [
            (node, value)
            for node, value in zip(tree.frontier, tree.values, strict=True)
            if g.confidence[node] >= self.threshold
        ]
        tree.frontier, tree.values = [node for node, _ in kept], [value for _, value in kept]
        return bool(kept)


class _BlockAttention(Attention):
    """Attention of whole blocks, whose anchors stand after all committed tokens.

    All slots of a block see the same context: in a layer with a window, the last `window` tokens
    before the anchor. Which slots see one another is `BlockConfig.is_causal` of the layer.
    """

    def __init__(self, segments: Sequence[Segment], cache: KVCache, config: BlockConfig) -> None:
        self._block = config
        super().__init__(segments, cache, config.layer)

    def _masks(
        self, segments: list[Segment], depths: list[np.ndarray], shape: tuple[int, int, int]
    ) -> list[tuple[VisibleKeys, np.ndarray]]:
        masks: dict[VisibleKeys, np.ndarray] = {}
        for layer, window in enumerate(self.config.windows):
            mask = np.zeros(shape, dtype=bool)
            for r, segment in enumerate(segments):
                at, count = self.cache.length[segment.slot], len(segment.tokens)
                mask[r, :count, max(0, at - window) if window else 0 : at] = True
                causal = np.tri(count, dtype=bool)
                mask[r, :count, at : at + count] = causal if self._block.is_causal(layer) else True
                mask[r, count:, 0] = True  # a padding query must see something, or it is NaN
            masks[self.config.visible_keys(layer)] = mask
        return list(masks.items())
