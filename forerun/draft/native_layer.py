"""The layer of a head on pairs on the native kernels: one call reads pairs, and one drafts a whole chain."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from torch import Tensor, nn

from forerun.cache.attention import Segment
from forerun.cache.kv import KVCache
from forerun.draft.operations import Operations, run
from forerun.draft.pair_head import PairHead
from forerun.kernels import native
from forerun.kernels.native import COp
from forerun.packed import Packed
from forerun.passes import Link, Pass, Said
from forerun.recorded import LOGITS, QKV, Recorded, Start, X

EMBEDDED, STATE, FUSED, FEATURES = range(LOGITS + 1, LOGITS + 5)  # buffers; of FEATURES there may be several


class NativeLayer:
    """A head's layer as a program; the head's weights are packed in `form`."""

    def __init__(
        self, head: PairHead, form: str, rotation: tuple[Tensor, Tensor], says: Packed | None, softcap: float
    ) -> None:
        """rotation: cos and sin of all positions, float32 [context, 1, D / 2]. says: what makes logits, bounded by
        `softcap` unless that is 0; without it no chains are drafted here."""
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
                made.product(parts.join.weight[:, : c.hidden], EMBEDDED, X, parts.embed_norm, parts.join.bias),
                made.product(parts.join.weight[:, c.hidden :], STATE, X, parts.state_norm, combine=native.ADD),
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
            self._begin = Recorded(c, [*self._fuse(head, fusing), *whole], sizes) if fusing else None

    def __call__(self, embedded: Tensor, states: Tensor, segments: Sequence[Segment], cache: KVCache) -> Tensor:
        """Pairs [T, Hd] of the segments' tokens; keys and values go into the cache. -> float32 [T, Hd]"""
        return run(self._recorded, Pass(segments, cache), cache, {EMBEDDED: embedded, STATE: states}).clone()

    @property
    def drafts(self) -> bool:
        """Whether whole rounds can be done here."""
        return self._whole is not None

    @property
    def fuses(self) -> bool:
        """Whether rounds can begin with the target's states as they are."""
        return self._begin is not None

    def chain(self, links: Sequence[Link], states: Tensor, cache: KVCache) -> list[list[int]] | None:
        """Draft behind each link, whose first token is paired with a state of `states` [links, Hd]; see
        `Recorded.chain`. None if that cannot be done here."""
        if self._whole is None:
            return None
        return self._whole.chain(links, cache, self._vocab, self._ids, {STATE: states.numpy()})

    def round(
        self, starts: Sequence[Start], cache: KVCache, raw: bool, stands: array[float] | None
    ) -> tuple[list[Said], np.ndarray]:
        """Read pairs and draft behind them, in one call; see `Recorded.round`. `raw`: the starts bring the target's
        states, which are yet to be fused."""
        begin, given = (self._begin, self.features) if raw else (self._whole, [STATE])
        assert self._whole is not None and begin is not None
        return self._whole.round(starts, cache, self._vocab, self._ids, STATE, begin, given, stands)

    def _ends(self, head: PairHead, ops: list[COp], says: Packed, softcap: float) -> list[COp]:
        """The layer with what comes before it, the embedding, and after it: logits, and the state for the next."""
        made, parts = self._made, head.parts()
        table, scale = head.table()
        return [
            made.embedding(table, EMBEDDED, scale),
            *ops,
            made.product(says, X, LOGITS, parts.last_norm, wanted=1, softcap=softcap),
            made.copy(X, STATE, *parts.carried),
        ]

    def _fuse(self, head: PairHead, fusing: Sequence[tuple[nn.Module | None, Tensor]]) -> list[COp]:
        """The target's states to what goes into the layer, as `PairHead.fuse` and `enter` do."""
        made = self._made
        ops = [
            made.product(weight, FEATURES + i, FUSED, norm, combine=native.ADD if i else 0)
            for i, (norm, weight) in enumerate(fusing)
        ]
        return [*ops, made.copy(FUSED, STATE, head.entered)]
