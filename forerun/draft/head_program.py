"""Modules of a head as operations of a program for the native kernels.

In torch a layer this small takes longer to call than to compute. What it computes is what the
modules' own `forward` does up to the precision of its products, so a draft may differ, and the text
cannot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from forerun.cache.kv import KVCache
from forerun.draft.head_modules import Layer, Native, SelfAttention
from forerun.kernels import native
from forerun.kernels.native import CNorm, COp
from forerun.models.config import ModelConfig
from forerun.runtime.packed import PackedMatrix
from forerun.runtime.program import ATTENDED, HIDDEN, QKV, ForwardBatch, Program, X, embed_op


class Operations:
    """Makes them for layers of one shape; what they point to is kept as long as this is."""

    def __init__(
        self, config: ModelConfig, form: str, rotation: tuple[Tensor, Tensor] | None
    ) -> None:
        """Products are packed in `form`. rotation: cos and sin of all positions, float32 [context,
        1, D / 2], for what attends."""
        self.config, self.form, self.rotation = config, form, rotation
        self._kept: list[Any] = []

    def pack(self, weight: Tensor, bias: Tensor | None = None, gated: bool = False) -> PackedMatrix:
        """A weight [out, in] in the kernels' layout."""
        added = None if bias is None else bias.detach()
        return PackedMatrix(weight.detach().contiguous(), added, self.form, gated=gated)

    def product(
        self, weight: Tensor | PackedMatrix | nn.Module, source: int, to: int, norm: nn.Module | None = None,
        bias: Tensor | None = None, **options: Any,
    ) -> COp:  # fmt: skip
        """A product with what is in buffer `source`, normed before if there is a norm, by a weight
        or a module whose product is native. `options`: fields of `COp`."""
        if isinstance(weight, nn.Module):
            assert isinstance(weight, Native)
            weight = weight.packed
        packed = (
            weight
            if isinstance(weight, PackedMatrix)
            else self.pack(weight, bias, gated=bool(options.get("gated")))
        )
        self._kept.append(packed)
        return COp(
            kind=native.LINEAR,
            input=source,
            output=to,
            norm=self._norm(norm),
            matrix=packed.matrix,
            **options,
        )

    def embedding(self, table: Tensor | PackedMatrix, to: int, scale: float = 1.0) -> COp:
        """Rows [.., width] of a table of tokens, into a buffer."""
        if isinstance(table, Tensor):
            table = (
                table if table.dtype in (torch.float32, torch.bfloat16) else table.float()
            ).contiguous()
        self._kept.append(table)
        return embed_op(table, to, scale)

    def copy(
        self,
        source: int,
        to: int,
        first: nn.Module | None = None,
        second: nn.Module | None = None,
        *,
        activation: str = "",
    ) -> COp:
        """A buffer as it is, behind two norms and an activation if there are any."""
        return COp(
            kind=native.SAVE, input=source, output=to, norm=self._norm(first), after=self._norm(second),
            activation=native.ACTIVATIONS[activation] if activation else 0,
        )  # fmt: skip

    def rotate(self, attention: SelfAttention, layer: int) -> COp:
        """Norm and turn queries and keys in QKV; keys and values go into the cache's `layer`."""
        assert self.rotation is not None
        cosine, sine = self.rotation
        return COp(
            kind=native.ROTATE, input=QKV, layer=layer, norm=self._norm(attention.q_norm),
            key_norm=self._norm(attention.k_norm), cosine=cosine.data_ptr(), sine=sine.data_ptr(),
            rotary=2 * cosine.shape[-1],
        )  # fmt: skip

    def rest(self, layer: Layer, number: int) -> list[COp]:
        """A layer from its attention on, added to X; `number` is that of the cache."""
        c, mlp = self.config, layer.mlp
        return [
            COp(
                kind=native.ATTEND, input=QKV, output=ATTENDED, layer=number, scale=c.attention_scale,
                window=c.windows[number] or 0,
            ),
            self.product(layer.self_attn.o_proj.weight, ATTENDED, X, combine=native.ADD),
            self.product(
                torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)), X, HIDDEN, layer.post_attention_layernorm,
                gated=1, activation=native.ACTIVATIONS[c.activation],
            ),
            self.product(mlp.down_proj.weight, HIDDEN, X, combine=native.ADD),
        ]  # fmt: skip

    def widths(self, said: int, *others: int) -> np.ndarray:
        """Numbers in a row of each buffer, int32: of a decoder's, with `said` logits, and of
        `others` behind them."""
        c = self.config
        heads, inner = (c.heads + 2 * c.kv_heads) * c.head_dim, -(-c.intermediate // 16) * 16
        return np.array(
            [c.hidden, heads, c.heads * c.head_dim, inner, c.hidden, said, *others], np.int32
        )

    def _norm(self, norm: nn.Module | None) -> CNorm:
        if norm is None or isinstance(norm, nn.Identity):
            return CNorm()
        tensors = dict(norm.named_parameters())
        weight, bias = (
            tensors[name].detach().float().contiguous() if name in tensors else None
            for name in ("weight", "bias")
        )
        self._kept += [weight, bias]
        eps = getattr(norm, "eps", None) or self.config.norm_eps
        begins = (None if tensor is None else tensor.data_ptr() for tensor in (weight, bias))
        return CNorm(*begins, eps, native.NORMS["rms"])


def run(
    recorded: Program, batch: ForwardBatch, cache: KVCache, given: Mapping[int, Tensor]
) -> Tensor:
    """One pass; buffers begin with `given`, float32 [T, width] each. What is in X then, [T, H],
    until the next pass."""
    buffers, count = recorded.buffers, batch.tokens
    pointers, scratch = buffers.fit(count, 0)
    for buffer, rows in given.items():
        buffers.arrays[buffer][:count] = rows.numpy()
    native.loaded().forerun_run(recorded.program, batch.fill(pointers, scratch, cache))
    return torch.from_numpy(buffers.arrays[X][:count])
