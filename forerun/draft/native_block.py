"""A block drafter on the native kernels: one call reads the context that waits, passes a block and draws all tokens."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from forerun.cache.attention import Segment
from forerun.cache.kv import KVCache
from forerun.draft.block_head import BlockConfig, BlockHead
from forerun.draft.block_shapes import MarkovShape
from forerun.draft.layers import DecoderLayer
from forerun.draft.operations import Operations
from forerun.kernels import native
from forerun.kernels.native import COp
from forerun.models.config import ModelConfig
from forerun.packed import Packed
from forerun.passes import Pass, Said
from forerun.recorded import LOGITS, QKV, Recorded, Start, X

CONTEXT, FUSED, KNOWN, FEATURES = range(LOGITS + 1, LOGITS + 5)  # buffers; of FEATURES there is one for each boundary


def computes(config: BlockConfig) -> bool:
    """Whether the native kernels have what its layers need; those of others are computed in torch. A pass has one
    answer for all layers to whether slots see later ones, and a window is counted from the last that a slot sees."""
    by_window = any(config.layer.windows) and (config.causal or config.window_causal)
    return not by_window and config.conv is None


def widened(config: BlockConfig) -> ModelConfig:
    """Its layers, windows counted from the last slot of a block instead of from its anchor."""
    c = config.layer
    return replace(c, windows=tuple(window and window + config.block for window in c.windows))


class NativeBlock:
    """A head's layers as programs."""

    def __init__(self, head: BlockHead, made: Operations, says: Packed | None, softcap: float) -> None:
        """`made` packs its products. says: what makes logits, bounded by `softcap` unless that is 0; without it, and
        with a law that asks for more than the token before, no drafts are made here."""
        self._made, self._config, c = made, head.config, head.config.layer
        states, law = [head.config.target_hidden] * len(head.config.boundaries), head.config.law
        sizes = made.widths(
            says.matrix.outputs if says else 1,
            c.hidden,
            c.hidden,
            law.rank if isinstance(law, MarkovShape) else 1,
            *states,
        )
        widths = np.array(sizes, np.int32)
        own = head.config.own_embedding
        table, scale = (head.embed_tokens.weight.detach(), 1.0) if own else (head.target.table, head.target.scale)
        reads, layers = self._layers(head)
        slots = [made.embedding(table, X, scale), *layers]
        self._reads, self._slots = Recorded(c, reads, widths), Recorded(c, slots, widths)
        self._fuses = Recorded(c, [*self._fuse(head), *reads], widths)
        self._whole, self._follow = None, None
        if says and head.config.is_bigram:
            ends = made.product(says, X, LOGITS, head.norm, wanted=1, softcap=softcap)
            self._whole = Recorded(c, [*slots, ends], widths)
        if self._whole and head.law:
            self._follow = Recorded(c, self._adds(head.law), widths)

    @property
    def drafts(self) -> bool:
        """Whether whole rounds can be done here."""
        return self._whole is not None

    def read(self, segments: Sequence[Segment], context: Tensor, cache: KVCache) -> None:
        """Write keys and values of context [T, Hd], which stands at the segments' places."""
        batch, buffers = Pass(segments, cache), self._reads.buffers
        pointers, scratch = buffers.fit(batch.tokens, 0)
        buffers.arrays[CONTEXT][: batch.tokens] = context.numpy()
        native.loaded().forerun_run(self._reads.program, batch.fill(pointers, scratch, cache))

    def slots(self, segments: Sequence[Segment], cache: KVCache) -> Tensor:
        """What the layers make of the slots of some blocks, before the last norm. -> float32 [T, Hd]"""
        batch, buffers = Pass(segments, cache, self._config.causal), self._slots.buffers
        pointers, scratch = buffers.fit(batch.tokens, 0)
        native.loaded().forerun_run(self._slots.program, batch.fill(pointers, scratch, cache))
        return torch.from_numpy(buffers.arrays[X][: batch.tokens].copy())

    def round(
        self,
        starts: Sequence[Start],
        cache: KVCache,
        vocab: int,
        ids: np.ndarray | None,
        raw: bool,
        stands: array[float] | None,
    ) -> list[Said]:
        """Read the context that each start brings and draft behind it, in one call; see `Recorded.block`. `raw`: it is
        the target's states, which are yet to be fused."""
        assert self._whole is not None
        begin, given = (self._fuses, range(FEATURES, len(self._whole.widths))) if raw else (self._reads, [CONTEXT])
        first, causal = self._config.first, self._config.causal
        return self._whole.block(
            starts, self._block, cache, vocab, ids, first, begin, given, self._follow, stands, causal
        )

    def _block(self, start: Start) -> Segment:
        """The slots behind what a start brings."""
        return block_of(
            start.segment.slot, start.link.token, self._config.block, self._config.mask_token, start.link.offset
        )

    def _layers(self, head: BlockHead) -> tuple[list[COp], list[COp]]:
        """What makes keys and values of CONTEXT, and the layers over the slots in X. Both share their weights."""
        made, c = self._made, head.config.layer
        queries, reads, slots = c.heads * c.head_dim, [], []
        for i, layer in enumerate(head.layers):
            assert isinstance(layer, DecoderLayer)
            own, norm = layer.self_attn, layer.input_layernorm
            weight, bias = own.products(), own.biases()
            both = made.pack(weight[queries:], None if bias is None else bias[queries:])
            turned = made.rotate(own, i)
            reads += [made.product(both, CONTEXT, QKV, None, column=queries), turned]
            slots += [
                made.product(weight[:queries], X, QKV, norm, None if bias is None else bias[:queries]),
                made.product(both, X, QKV, norm, column=queries),
                turned,
                *made.rest(own, layer.mlp, layer.post_attention_layernorm, i),
            ]
        return reads, slots

    def _fuse(self, head: BlockHead) -> list[COp]:
        """The target's states to CONTEXT, as `BlockHead.fuse` does."""
        made, width = self._made, head.config.target_hidden
        weights = [head.fc.weight[:, width * i : width * (i + 1)] for i in range(len(head.config.boundaries))]
        parts = [
            made.product(weight, FEATURES + i, FUSED, None, combine=native.ADD if i else 0)
            for i, weight in enumerate(weights)
        ]
        return [*parts, made.copy(FUSED, CONTEXT, head.hidden_norm)]

    def _adds(self, markov: nn.Module) -> list[COp]:
        """What follows a token, added to LOGITS."""
        first, second = markov.get_submodule("markov_w1"), markov.get_submodule("markov_w2")
        return [
            self._made.embedding(first.get_parameter("weight").detach(), KNOWN),
            self._made.product(second.get_parameter("weight"), KNOWN, LOGITS, None, combine=native.ADD),
        ]


def block_of(slot: int, anchor: int, size: int, mask: int, offset: int = 0) -> Segment:
    """The slots of a block, `offset` tokens behind what is committed."""
    return Segment(slot, [anchor, *[mask] * (size - 1)], list(range(-1, offset + size - 1)), [], offset)
