"""The layer of a head on pairs on the native kernels: one call reads pairs, and one drafts a whole chain.

In torch a layer this small takes longer to call than to compute. What it computes is what the head's own `forward` does
up to the precision of its products, so a draft may differ, and the text cannot.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from forerun.cache.attention import Segment
from forerun.cache.kv import KVCache
from forerun.draft.pair_head import PairHead
from forerun.kernels import native
from forerun.kernels.native import CNorm, COp
from forerun.packed import Packed, embed_op
from forerun.passes import Link, Pass, Said
from forerun.recorded import ATTENDED, HIDDEN, LOGITS, QKV, Recorded, Start, X

EMBEDDED, STATE, FUSED, FEATURES = range(LOGITS + 1, LOGITS + 5)  # buffers; of FEATURES there may be several


class NativeLayer:
    """A head's layer as a program; the head's weights are packed in `form`."""

    def __init__(
        self, head: PairHead, form: str, rotation: tuple[Tensor, Tensor], says: Packed | None, softcap: float
    ) -> None:
        """rotation: cos and sin of all positions, float32 [context, 1, D / 2]. says: what makes logits, bounded by
        `softcap` unless that is 0; without it no chains are drafted here."""
        self._form, self._eps, self._kept = form, head.layer.norm_eps, list(rotation)
        c, parts = head.layer, head.parts()
        qkv, q, k = parts.attention.products(), parts.attention.q_norm, parts.attention.k_norm
        added = parts.attention.biases()
        if parts.join is None:
            ops = [
                self._product(qkv[:, : c.hidden], EMBEDDED, QKV, parts.embed_norm, added),
                self._product(qkv[:, c.hidden :], STATE, QKV, parts.state_norm, combine=native.ADD),
                COp(kind=native.SAVE, input=STATE, output=X),
            ]
        else:
            ops = [
                self._product(parts.join.weight[:, : c.hidden], EMBEDDED, X, parts.embed_norm, parts.join.bias),
                self._product(parts.join.weight[:, c.hidden :], STATE, X, parts.state_norm, combine=native.ADD),
                self._product(qkv, X, QKV, parts.attention_norm, added),
            ]
        cosine, sine = rotation
        ops += [
            COp(
                kind=native.ROTATE, input=QKV, layer=0, norm=self._norm(q), key_norm=self._norm(k),
                cosine=cosine.data_ptr(), sine=sine.data_ptr(), rotary=2 * cosine.shape[-1],
            ),
            COp(
                kind=native.ATTEND, input=QKV, output=ATTENDED, layer=0, scale=c.attention_scale,
                window=c.windows[0] or 0,
            ),
            self._product(parts.attention.o_proj.weight, ATTENDED, X, None, combine=native.ADD),
            self._product(
                torch.cat((parts.mlp.gate_proj.weight, parts.mlp.up_proj.weight)), X, HIDDEN, parts.mlp_norm,
                gated=1, activation=native.ACTIVATIONS[c.activation],
            ),
            self._product(parts.mlp.down_proj.weight, HIDDEN, X, None, combine=native.ADD),
        ]  # fmt: skip
        heads, inner = (c.heads + 2 * c.kv_heads) * c.head_dim, -(-c.intermediate // 16) * 16
        said = says.matrix.outputs if says else 1
        fusing = (head.fusing() if says else None) or []
        widths = [c.hidden, heads, c.heads * c.head_dim, inner, c.hidden, said, c.hidden, c.hidden, c.hidden]
        sizes = np.array([*widths, *(weight.shape[1] for _, weight in fusing)], np.int32)
        self.features = range(FEATURES, len(sizes))  # the buffers that a round may begin with
        self._recorded = Recorded(c, ops, sizes)
        self._whole, self._begin = None, None
        if says:
            whole = self._ends(head, ops, says, softcap)
            self._whole = Recorded(c, whole, sizes)
            self._begin = Recorded(c, [*self._fuse(head, fusing), *whole], sizes) if fusing else None

    def __call__(self, embedded: Tensor, states: Tensor, segments: Sequence[Segment], cache: KVCache) -> Tensor:
        """Pairs [T, Hd] of the segments' tokens; keys and values go into the cache. -> float32 [T, Hd]"""
        batch, buffers, count = Pass(segments, cache), self._recorded.buffers, len(embedded)
        pointers, scratch = buffers.fit(count, 0)
        buffers.arrays[EMBEDDED][:count] = embedded.numpy()
        buffers.arrays[STATE][:count] = states.numpy()
        native.loaded().forerun_run(self._recorded.program, batch.fill(pointers, scratch, cache))
        return torch.from_numpy(buffers.arrays[X][:count].copy())

    def chain(
        self, links: Sequence[Link], states: Tensor, cache: KVCache, vocab: int, ids: np.ndarray | None
    ) -> list[list[int]] | None:
        """Draft behind each link, whose first token is paired with a state of `states` [links, Hd]; see
        `Recorded.chain`. None if that cannot be done here."""
        if self._whole is None:
            return None
        return self._whole.chain(links, cache, vocab, ids, {STATE: states.numpy()})

    @property
    def drafts(self) -> bool:
        """Whether whole rounds can be done here."""
        return self._whole is not None

    @property
    def fuses(self) -> bool:
        """Whether rounds can begin with the target's states as they are."""
        return self._begin is not None

    def round(
        self,
        starts: Sequence[Start],
        cache: KVCache,
        vocab: int,
        ids: np.ndarray | None,
        raw: bool,
        stands: array[float] | None,
    ) -> tuple[list[Said], np.ndarray]:
        """Read pairs and draft behind them, in one call; see `Recorded.round`. `raw`: the starts bring the target's
        states, which are yet to be fused."""
        begin = self._begin if raw else self._whole
        assert self._whole is not None and begin is not None
        return self._whole.round(starts, cache, vocab, ids, STATE, begin, self.features if raw else [STATE], stands)

    def _ends(self, head: PairHead, ops: list[COp], says: Packed, softcap: float) -> list[COp]:
        """The layer with what comes before it, the embedding, and after it: logits, and the state for the next."""
        parts, (table, scale) = head.parts(), head.table()
        if isinstance(table, Tensor):
            table = (table if table.dtype in (torch.float32, torch.bfloat16) else table.float()).contiguous()
        self._kept += [table, says]  # type: ignore[list-item]
        first, second = [*parts.carried, None, None][:2]
        return [
            embed_op(table, EMBEDDED, scale),
            *ops,
            COp(
                kind=native.LINEAR, input=X, output=LOGITS, norm=self._norm(parts.last_norm), matrix=says.matrix,
                wanted=1, softcap=softcap,
            ),
            COp(kind=native.SAVE, input=X, output=STATE, norm=self._norm(first), after=self._norm(second)),
        ]  # fmt: skip

    def _fuse(self, head: PairHead, fusing: Sequence[tuple[nn.Module | None, Tensor]]) -> list[COp]:
        """The target's states to what goes into the layer, as `PairHead.fuse` and `enter` do."""
        ops = [
            self._product(weight, FEATURES + i, FUSED, norm, combine=native.ADD if i else 0)
            for i, (norm, weight) in enumerate(fusing)
        ]
        return [*ops, COp(kind=native.SAVE, input=FUSED, output=STATE, norm=self._norm(head.entered))]

    def _product(
        self, weight: Tensor, source: int, to: int, norm: nn.Module | None, bias: Tensor | None = None,
        combine: int = 0, gated: int = 0, activation: int = 0,
    ) -> COp:  # fmt: skip
        added = None if bias is None else bias.detach()
        packed = Packed(weight.detach().contiguous(), added, self._form, gated=bool(gated))
        self._kept.append(packed)  # type: ignore[arg-type]
        return COp(
            kind=native.LINEAR, input=source, output=to, norm=self._norm(norm), matrix=packed.matrix,
            combine=combine, gated=gated, activation=activation,
        )  # fmt: skip

    def _norm(self, norm: nn.Module | None) -> CNorm:
        if norm is None or isinstance(norm, nn.Identity):
            return CNorm()
        weight = norm.get_parameter("weight").detach().float().contiguous()
        self._kept.append(weight)
        return CNorm(weight.data_ptr(), None, self._eps, native.NORMS["rms"])
