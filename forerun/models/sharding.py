"""Tensor parallelism: a decoder split across processes (Megatron-LM, Shoeybi et al., 1909.08053).

Each rank holds some key-value heads with the query heads that share them, some channels of each
MLP, and some rows of the embedding and of the head. Partial results are all-reduced twice a layer,
so every rank has the whole residual stream; norms are replicated. Sums are added in another order
than in one process, so logits may differ in their last bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from forerun.errors import ConfigError, LostError, one_line
from forerun.kernels import reference as kernels
from forerun.models.config import ModelConfig
from forerun.models.decoder import Attend, Decoder
from forerun.models.parameters import LinearWeights, Source
from forerun.models.weights import load_weights
from forerun.types import Forward


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank of `world_size`; `group` is a process group of torch.distributed."""

    rank: int
    world_size: int
    group: Any

    def share(self, count: int) -> slice:
        """Return this rank's share of `count` items; shares differ by at most one item."""
        each, more = divmod(count, self.world_size)
        first = self.rank * each + min(self.rank, more)
        return slice(first, first + each + (1 if self.rank < more else 0))

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum x over all ranks, in float32 or wider; the result has the dtype of x."""
        total = x.to(torch.promote_types(x.dtype, torch.float32))
        self.group.allreduce([total]).wait()
        return total.to(x.dtype)

    def all_gather(self, x: Tensor, count: int) -> Tensor:
        """Concatenate the columns of all ranks, `count` in all. [M, own] -> [M, count]"""
        if not len(x):
            return x.new_zeros(0, count)
        widest = -(-count // self.world_size)
        own = torch.nn.functional.pad(x, (0, widest - x.shape[1]))
        parts = [torch.empty_like(own) for _ in range(self.world_size)]
        self.group.allgather([parts], [own]).wait()
        shares = [replace(self, rank=rank).share(count) for rank in range(self.world_size)]
        columns = [p[:, : s.stop - s.start] for p, s in zip(parts, shares, strict=True)]
        return torch.cat(columns, dim=1)


def shard_config(config: ModelConfig, shard: Shard) -> ModelConfig:
    """Return the part of a model that one rank computes.

    Raises ConfigError if there are more ranks than key-value heads, or for layers that cannot be
    divided."""
    if (
        config.experts
        or config.recurrent
        or config.head_shapes
        or config.altup
        or config.parallel
        or config.qk_norm == "row"
        or config.attention_sinks
        or config.head_bias
    ):
        raise ConfigError(
            f"tensor_parallel divides dense models with layers like Llama's, and not the family"
            f" {config.family}: leave it out"
        )
    if shard.world_size > config.kv_heads:
        raise ConfigError(
            f"tensor_parallel={shard.world_size}: each process needs a key-value head of its own, "
            f"and this model has {config.kv_heads}; give no more"
        )
    keys, inner = shard.share(config.kv_heads), shard.share(config.intermediate)
    count = keys.stop - keys.start
    heads = count * (config.heads // config.kv_heads)
    return replace(config, kv_heads=count, heads=heads, intermediate=inner.stop - inner.start)


class RowParallelLinear(LinearWeights):
    """A linear layer split along its inputs; its outputs are summed over all ranks."""


class ShardedEmbedding:
    """Some rows of an embedding: `weight` [own, H] starts at row `first`."""

    def __init__(self, weight: Tensor, first: int, shard: Shard) -> None:
        self.weight, self.first, self.shard = weight, first, shard

    def __getitem__(self, ids: Tensor) -> Tensor:
        """Look up ids [T] on all ranks at once. -> [T, H]"""
        rows = ids - self.first
        own = (rows >= 0) & (rows < len(self.weight))
        found = self.weight[rows.clamp(0, len(self.weight) - 1)]
        return self.shard.all_reduce(found.masked_fill(~own[:, None], 0))


class _Slicer:
    """Cuts one rank's rows or columns out of each matrix as it is loaded."""

    def __init__(self, config: ModelConfig, shard: Shard) -> None:
        self.config, self.shard, c = config, shard, config
        keys, inner, self.tokens = map(shard.share, (c.kv_heads, c.intermediate, c.vocab))
        # rows of this rank's queries, keys and values in the stacked qkv matrix
        heads = [
            slice((at + n * keys.start) * c.head_dim, (at + n * keys.stop) * c.head_dim)
            for at, n in ((0, c.heads // c.kv_heads), (c.heads, 1), (c.heads + c.kv_heads, 1))
        ]
        stacked = (0, c.intermediate) if c.gated else (0,)  # where gate and up begin
        channels = [slice(at + inner.start, at + inner.stop) for at in stacked]
        self.rows = {"qkv": heads, "up": channels, "head": [self.tokens]}
        self.columns = {"out": heads[0], "down": inner}
        self.embed: ShardedEmbedding | None = None

    def embedding(self, source: Source) -> ShardedEmbedding:
        weight = source.weight()[self.tokens].clone()
        self.embed = ShardedEmbedding(weight, self.tokens.start, self.shard)
        return self.embed

    def linear(self, name: str, source: Source, bias: Tensor | None) -> LinearWeights:
        if name == "head" and self.config.tied and self.embed is not None:
            return LinearWeights(self.embed.weight)
        weight = source.weight()
        if name in self.columns:
            own = weight[:, self.columns[name]].clone()
            return RowParallelLinear(own, bias if self.shard.rank == 0 else None)
        rows = self.rows[name]
        own_bias = None if bias is None else torch.cat([bias[r] for r in rows])
        return LinearWeights(torch.cat([weight[r] for r in rows]), own_bias)


class ShardedDecoder(Decoder):
    """One rank's part of a decoder. All ranks call `forward` together and get the same result."""

    def __init__(
        self,
        config: ModelConfig,
        path: Path,
        dtype: torch.dtype,
        device: torch.device,
        context: int,
        shard: Shard,
        before_forward: Callable[[Attend], None] = lambda attend: None,
    ) -> None:
        """Load this rank's part; see `Decoder`.

        `before_forward` is called with the attention of each forward pass.

        Raises ConfigError if there are more ranks than key-value heads."""
        self.shard, self.before_forward = shard, before_forward
        self._out_of_step = False  # a forward pass failed, so the ranks no longer agree
        own = shard_config(config, shard)
        super().__init__(config, path, dtype, device, context)
        self.config = own

    def _load(self, path: Path, shortlist: Tensor | None) -> Any:
        slicer = _Slicer(self.config, self.shard)
        return load_weights(
            self.config, path, self.dtype, self.device, slicer.linear, slicer.embedding
        )

    def with_layers(self, layer_ids: Sequence[int], window: int | None) -> NoReturn:
        raise ConfigError(
            "self:.. drafts need the whole model in one process: leave tensor_parallel out"
        )

    @property
    def precision(self) -> str:
        return f"{super().precision}, {self.shard.world_size} processes"

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        attend: Attend,
        *others: Any,
        **options: Any,
    ) -> Forward:
        """Run `Decoder.forward`. Raises LostError once another rank stops answering, and from then
        on at every call."""
        if self._out_of_step:
            raise LostError("the processes of this model are out of step: load it again")
        self._out_of_step = True
        self.before_forward(attend)
        try:
            result = super().forward(ids, positions, attend, *others, **options)
        except RuntimeError as error:
            why = one_line(str(error))
            raise LostError(
                f"a process of this model does not answer: load it again ({why})"
            ) from None
        self._out_of_step = False
        return result

    def _linear(self, x: Tensor, linear: LinearWeights) -> Tensor:
        out = kernels.linear(x, linear.weight, linear.bias)
        if linear is self.weights.head:
            return self.shard.all_gather(out, self.config.vocab)
        return self.shard.all_reduce(out) if isinstance(linear, RowParallelLinear) else out
