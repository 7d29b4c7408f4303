"""Hydra (Ankner et al. 2402.05109): Medusa's heads, which also read the tokens that were drafted before theirs.

With g_t the target's last state of token t, head i (from 0) reads g_t and the embeddings of tokens t + 1 to t + 1 + i
side by side, and says token t + 2 + i: a residual layer that makes one state of them, more of the same size, and a
product. Heads that are not grounded read g_t alone. The `prefix-mlp` variant (Hydra++) has a decoder layer before its
heads, over the target's states of the whole text: what it makes of g_t and those before takes the place of g_t.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forerun.draft.level_heads import STATE, LevelHeads, Prefix
from forerun.draft.operations import Operations
from forerun.draft.view import TargetView
from forerun.errors import LoadError
from forerun.kernels.native import ACTIVATIONS, ADD, COp
from forerun.models.config import ModelConfig
from forerun.recorded import LOGITS, X

SILU = ACTIVATIONS["silu"]


class _Block(nn.Module):
    """A residual layer, which may read more than it makes."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, hidden)
        self.res_connection = nn.Linear(inputs, hidden) if inputs != hidden else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.res_connection(x) + F.silu(self.linear(x))
        return out


class HydraHeads(LevelHeads):
    """`heads` of them, each over `layers` residual layers, of which those of one size are one layer, several times."""

    title = "Hydra heads"

    def __init__(
        self, heads: int, layers: int, hidden: int, vocab: int, *, grounded: bool = True,
        prefix: ModelConfig | None = None,
    ) -> None:  # fmt: skip
        """`prefix`: the shape of the decoder layer before them, if there is one."""
        super().__init__(heads, hidden, vocab)
        self.again = layers - grounded
        firsts = range(heads) if grounded else ()
        self.first = nn.ModuleList(_Block((i + 2) * hidden, hidden) for i in firsts)
        self.rest = nn.ModuleList(_Block(hidden, hidden) for _ in range(heads if self.again else 0))
        self.lm_heads = nn.ModuleList(nn.Linear(hidden, vocab) for _ in range(heads))
        self.prefix = None if prefix is None else Prefix(prefix)

    def attach(self, target: TargetView) -> None:
        super().attach(target)
        self.target = target

    def step(self, level: int, carried: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        if self.first:
            carried = torch.cat((carried, self.target.embed(tokens).to(carried.dtype)), -1)
        x = self.first[level](carried) if self.first else carried
        for _ in range(self.again):
            x = self.rest[level](x)
        logits: Tensor = self.lm_heads[level](x)
        return logits, carried

    def widths(self) -> tuple[int, int]:
        return self.hidden, self.hidden * (1 + len(self.first))

    def record(self, level: int, made: Operations) -> list[COp]:
        if self.first:
            block, at = self.first[level], (level + 1) * self.hidden
            ops = [
                made.embedding(self.target.table, STATE, self.target.scale, column=at),
                made.product(block.get_submodule("res_connection"), STATE, X),
                made.product(block.get_submodule("linear"), STATE, X, activation=SILU, combine=ADD),
            ]
        else:
            ops = [made.copy(STATE, X)]
        for _ in range(self.again):
            ops.append(made.product(self.rest[level].get_submodule("linear"), X, X, activation=SILU, combine=ADD))
        return [*ops, made.product(self.lm_heads[level], X, LOGITS)]


def prefix_like(target: TargetView) -> ModelConfig:
    """One layer of the target's own shape, which is what these heads have before them. Raises LoadError."""
    c = target.config
    if c.family != "llama" or c.out_bias or c.mlp_bias:
        raise LoadError(f"its heads stand over a layer of Llama's without biases, and the target is of {c.family}")
    return replace(c, layers=1, rope_of=c.rope_of[:1], windows=c.windows[:1], sinks=c.sinks[:1])
