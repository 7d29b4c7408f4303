"""A block drafter on the native kernels: one call reads the context that waits, passes a block and draws all tokens."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from forerun.cache.attention import Segment
from forerun.cache.kv import KVCache
from forerun.draft.block_head import BlockHead
from forerun.draft.block_laws import Markov
from forerun.draft.block_shapes import BlockConfig
from forerun.draft.layers import DecoderLayer
from forerun.draft.operations import Operations, run
from forerun.kernels import native
from forerun.kernels.native import COp
from forerun.packed import Packed
from forerun.passes import Pass, Said
from forerun.recorded import LOGITS, QKV, Recorded, Start, X

CONTEXT, FUSED, KNOWN, FEATURES = range(LOGITS + 1, LOGITS + 5)  # buffers; of FEATURES there is one for each boundary


def computes(config: BlockConfig) -> bool:
    """Whether the native kernels have what its layers need; those of others are computed in torch. A pass has one
    answer for all layers to whether slots see later ones, and a window is counted from the last that a slot sees."""
    return not (any(config.layer.windows) and config.window_causal)


class NativeBlock:
    """A head's layers as programs; its weights are packed in `form`."""

    def __init__(
        self, head: BlockHead, form: str, rotation: tuple[Tensor, Tensor], says: Packed | None, softcap: float
    ) -> None:
        """rotation: cos and sin of all positions, float32 [context, 1, D / 2]. says: what makes logits, bounded by
        `softcap` unless that is 0; without it, and with a law that asks for more than the token before, no drafts are
        made here."""
        self._config, c, law = head.config, head.config.layer, head.config.law
        # windows are counted from the last slot of a block here, instead of from its anchor
        wide = replace(c, windows=tuple(window and window + head.config.block for window in c.windows))
        self._made = made = Operations(wide, form, rotation)
        ids, self._vocab = head.tokens(), head.target.vocab
        self._ids = None if ids is None else ids.numpy()
        rank, states = law.rank if law else 1, [head.config.target_hidden]
        others = c.hidden, c.hidden, rank, *states * len(head.config.boundaries)
        widths = made.widths(says.matrix.outputs if says else 1, *others)
        table, scale = head.table()
        reads, layers = self._layers(head)
        slots = [made.embedding(table, X, scale), *layers]
        self._reads, self._slots = Recorded(c, reads, widths), Recorded(c, slots, widths)
        self._fuses = Recorded(c, [*self._fuse(head), *reads], widths)
        self._whole, self._follow = None, None
        if says and head.config.is_bigram:
            ends = made.product(says, X, LOGITS, head.norm, wanted=1, softcap=softcap)
            self._whole = Recorded(c, [*slots, ends], widths)
            if head.law:
                self._follow = Recorded(c, self._adds(head.markov_head), widths)

    @property
    def drafts(self) -> bool:
        """Whether whole rounds can be done here."""
        return self._whole is not None

    def read(self, segments: Sequence[Segment], context: Tensor, cache: KVCache) -> None:
        """Write keys and values of context [T, Hd], which stands at the segments' places."""
        run(self._reads, Pass(segments, cache), cache, {CONTEXT: context})

    def slots(self, segments: Sequence[Segment], cache: KVCache) -> Tensor:
        """What the layers make of the slots of some blocks, before the last norm. -> float32 [T, Hd]"""
        return run(self._slots, Pass(segments, cache, False), cache, {}).clone()

    def round(self, starts: Sequence[Start], cache: KVCache, raw: bool, stands: array[float] | None) -> list[Said]:
        """Read the context that each start brings and draft behind it, in one call; see `Recorded.block`. `raw`: it is
        the target's states, which are yet to be fused."""
        assert self._whole is not None
        begin, given = (self._fuses, range(FEATURES, len(self._whole.widths))) if raw else (self._reads, [CONTEXT])
        first = self._config.first
        return self._whole.block(
            starts, self._block, cache, self._vocab, self._ids, first, begin, given, self._follow, stands
        )

    def _block(self, start: Start) -> Segment:
        """The slots behind what a start brings."""
        return block_of(self._config, start.segment.slot, start.link.token, start.link.offset)

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
            reads += [made.product(both, CONTEXT, QKV, column=queries), turned]
            slots += [
                made.product(weight[:queries], X, QKV, norm, None if bias is None else bias[:queries]),
                made.product(both, X, QKV, norm, column=queries),
                turned,
                *made.rest(layer, i),
            ]
        return reads, slots

    def _fuse(self, head: BlockHead) -> list[COp]:
        """The target's states to CONTEXT, as `BlockHead.fuse` does."""
        made, weights = self._made, torch.split(head.fc.weight, head.config.target_hidden, 1)
        parts = [
            made.product(weight, FEATURES + i, FUSED, combine=native.ADD if i else 0)
            for i, weight in enumerate(weights)
        ]
        return [*parts, made.copy(FUSED, CONTEXT, head.hidden_norm)]

    def _adds(self, law: Markov) -> list[COp]:
        """What follows a token, added to LOGITS."""
        return [
            self._made.embedding(law.markov_w1.weight.detach(), KNOWN),
            self._made.product(law.markov_w2.weight, KNOWN, LOGITS, combine=native.ADD),
        ]


def block_of(config: BlockConfig, slot: int, anchor: int, offset: int = 0) -> Segment:
    """The slots of a block, `offset` tokens behind what is committed."""
    tokens = [anchor, *[config.mask_token] * (config.block - 1)]
    return Segment(slot, tokens, list(range(-1, offset + config.block - 1)), [], offset)
