"""A decoder divided between processes: tensor parallelism (Megatron-LM, Shoeybi et al.,
1909.08053).

Each process holds some of the key-value heads, with the query heads that share them, some channels
of each MLP, and some rows of the embedding and of the head. What they compute of a branch is added
up over all of them, twice a layer, so each has the whole residual stream; norms are everybody's.
Sums come in another order than in one process: scores may differ in their last bits.
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
from forerun.models.weights import Linear, Source, load_weights
from forerun.types import Forward


@dataclass(frozen=True, slots=True)
class Part:
    """The `rank`-th of `of` processes, whose `group` is a process group of torch.distributed."""

    rank: int
    of: int
    group: Any

    def share(self, count: int) -> slice:
        """Which of so many things are its own: as many as another's, or one more."""
        each, more = divmod(count, self.of)
        first = self.rank * each + min(self.rank, more)
        return slice(first, first + each + (self.rank < more))

    def summed(self, x: Tensor) -> Tensor:
        """The sum over all processes, in the dtype of x, added in float32 at least."""
        total = x.to(torch.promote_types(x.dtype, torch.float32))
        self.group.allreduce([total]).wait()
        return total.to(x.dtype)

    def gathered(self, x: Tensor, count: int) -> Tensor:
        """Everybody's columns side by side, `count` in all. [M, own] -> [M, count]"""
        if not len(x):
            return x.new_zeros(0, count)
        most = -(-count // self.of)  # some have one fewer
        own = torch.nn.functional.pad(x, (0, most - x.shape[1]))
        parts = [torch.empty_like(own) for _ in range(self.of)]
        self.group.allgather([parts], [own]).wait()
        widths = [replace(self, rank=rank).share(count) for rank in range(self.of)]
        return torch.cat(
            [p[:, : w.stop - w.start] for p, w in zip(parts, widths, strict=True)], dim=1
        )


def divided(config: ModelConfig, part: Part) -> ModelConfig:
    """What one process computes of a model. Raises ConfigError where there are more processes than
    heads."""
    if part.of > config.kv_heads:
        raise ConfigError(
            f"tensor_parallel={part.of}: each process needs a key-value head of its own, and this model has"
            f" {config.kv_heads}; give no more"
        )
    keys, inner = part.share(config.kv_heads), part.share(config.intermediate)
    count = keys.stop - keys.start
    heads = count * (config.heads // config.kv_heads)
    return replace(config, kv_heads=count, heads=heads, intermediate=inner.stop - inner.start)


class Summed(Linear):
    """A linear layer of some of the inputs: what all processes have of it is added up."""


class Rows:
    """Some rows of an embedding; `weight` [own, H], from row `first` on."""

    def __init__(self, weight: Tensor, first: int, part: Part) -> None:
        self.weight, self.first, self.part = weight, first, part

    def __getitem__(self, ids: Tensor) -> Tensor:
        """ids [T] -> [T, H], which all processes ask for at once."""
        at = ids - self.first
        mine = (at >= 0) & (at < len(self.weight))
        rows = self.weight[at.clamp(0, len(self.weight) - 1)]
        return self.part.summed(rows.masked_fill(~mine[:, None], 0))


class _Cut:
    """Takes a process's part out of each matrix as it is read: some of its rows, or of its
    columns."""

    def __init__(self, config: ModelConfig, part: Part) -> None:
        self.config, self.part, c = config, part, config
        keys, inner, self.said = map(part.share, (c.kv_heads, c.intermediate, c.vocab))
        # rows of the queries, keys and values of its key-value heads, as a layer stacks them
        heads = [
            slice((at + n * keys.start) * c.head_dim, (at + n * keys.stop) * c.head_dim)
            for at, n in ((0, c.heads // c.kv_heads), (c.heads, 1), (c.heads + c.kv_heads, 1))
        ]
        # of the gate, where there is one, and of what it lets through
        channels = [
            slice(at + inner.start, at + inner.stop)
            for at in ((0, c.intermediate) if c.gated else (0,))
        ]
        self.rows = {"qkv": heads, "up": channels, "head": [self.said]}
        self.columns = {"out": heads[0], "down": inner}
        self.embedding: Rows | None = None

    def table(self, source: Source) -> Rows:
        self.embedding = Rows(source.weight()[self.said].clone(), self.said.start, self.part)
        return self.embedding

    def linear(self, name: str, source: Source, bias: Tensor | None) -> Linear:
        if name == "head" and self.config.tied and self.embedding is not None:
            return Linear(self.embedding.weight)
        whole = source.weight()
        if name in self.columns:
            return Summed(
                whole[:, self.columns[name]].clone(), bias if self.part.rank == 0 else None
            )
        own = [
            t if t is None else torch.cat([t[rows] for rows in self.rows[name]])
            for t in (whole, bias)
        ]
        return Linear(*own)  # type: ignore[arg-type]


class PartDecoder(Decoder):
    """What one process has of a decoder. `forward` is called in all of them at once, and gives all
    the same."""

    def __init__(
        self, config: ModelConfig, directory: Path, dtype: torch.dtype, device: torch.device, context: int, part: Part,
        tell: Callable[[Attend], None] = lambda attend: None,
    ) -> None:  # fmt: skip
        """As `Decoder`; `tell` is called before each pass with what attends in it. Raises
        ConfigError where there are more processes than key-value heads."""
        self.part, self.tell, self._cut_off = part, tell, False
        own = divided(config, part)
        super().__init__(config, directory, dtype, device, context)
        self.config = own

    def _load(self, directory: Path, said: Tensor | None) -> Any:
        cut = _Cut(self.config, self.part)
        return load_weights(self.config, directory, self.dtype, self.device, cut.linear, cut.table)

    def abridged(self, kept: Sequence[int], window: int | None) -> NoReturn:
        raise ConfigError(
            "self:.. drafts need the whole model in one process: leave tensor_parallel out"
        )

    @property
    def precision(self) -> str:
        return f"{super().precision}, {self.part.of} processes"

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        attend: Attend,
        want: Tensor,
        aux_hidden_layers: Sequence[int] = (),
    ) -> Forward:
        """As `Decoder.forward`. Raises LostError where another process does not answer, and ever
        after."""
        if self._cut_off:
            raise LostError("the processes of this model are not in step any more: load it again")
        self._cut_off = True
        self.tell(attend)
        try:
            forward = super().forward(ids, positions, attend, want, aux_hidden_layers)
        except RuntimeError as error:
            why = one_line(str(error))
            raise LostError(
                f"a process of this model does not answer: load it again ({why})"
            ) from None
        self._cut_off = False
        return forward

    def _linear(self, x: Tensor, linear: Linear) -> Tensor:
        out = kernels.linear(x, linear.weight, linear.bias)
        if linear is self.weights.head:
            return self.part.gathered(out, self.config.vocab)
        return self.part.summed(out) if isinstance(linear, Summed) else out
