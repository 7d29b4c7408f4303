"""MLP speculators (Wertheimer et al. 2404.19124), Arctic's among them: a small recurrent network on the last state.

Level i (from 0) adds to a projection of the state before it an embedding of the token before it, weighed so that after
n levels half of the state is still the target's: with w = 0.5^(1 / 2n) and e = sqrt((1 - w^2) D / 2), D the inner size,

    s_i+1 = gelu(norm_i(P_i s_i + e / w * E_i[token])), and the logits are H_i s_i+1

with s_0 the target's last state, normed once more where `scaled`. Weights may be tied: all levels
have one embedding, norm and head, and all but the first one projection.

On disk there are IBM's accelerators, and Arctic's (Snowflake), whose config.json names other classes. Names are IBM's:
`emb.{i}`, `proj.{i}`, `ln.{i}` and `head.{i}`, in some files behind `speculator.`. Arctic's `sum_rnn` has them a list
deeper (`emb.0.0`). What is tied is written once or for each level.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forerun.draft.level_dialects import MlpShape, read_mlp
from forerun.draft.level_heads import STATE, LevelHeads
from forerun.draft.operations import Operations
from forerun.draft.stored import assemble, read_config, read_tensors, reading
from forerun.kernels.native import ADD, COp
from forerun.recorded import LOGITS, X

KIND = "MLP speculator"
EPS = 1e-6
DEEPER = re.compile(r"(emb|proj|ln)\.(\d+)\.0\.(\w+)")


class _Norm(nn.Module):
    """By the root mean square, then scaled and shifted."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size)), EPS

    def forward(self, x: Tensor) -> Tensor:
        return _scaled(x) * self.weight + self.bias


class MlpSpeculator(LevelHeads):
    """The speculator under the names of its authors; of what is tied there is one."""

    title = "levels of an MLP speculator"

    def __init__(self, shape: MlpShape) -> None:
        super().__init__(shape.levels, shape.hidden, shape.vocab)
        self.shape = shape
        inner = shape.inner
        own, steps = (1, min(2, shape.levels)) if shape.tied else (shape.levels, shape.levels)
        self.emb = nn.ModuleList(nn.Embedding(shape.vocab, inner) for _ in range(own))
        self.proj = nn.ModuleList(nn.Linear(inner if i else shape.hidden, inner, bias=False) for i in range(steps))
        self.ln = nn.ModuleList(_Norm(inner) for _ in range(own))
        self.head = nn.ModuleList(nn.Linear(inner, shape.vocab, bias=False) for _ in range(own))
        weight = 0.5 ** (0.5 / shape.levels)
        self.share = math.sqrt((1 - weight**2) * inner / 2) / weight  # of an embedding beside a projected state

    def enter(self, states: Tensor) -> Tensor:
        return _scaled(states) / math.sqrt(2) if self.shape.scaled else states

    def step(self, level: int, carried: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        own = 0 if self.shape.tied else level
        added = self.share * self.emb[own](tokens)
        state = F.gelu(self.ln[own](self._projection(level)(carried) + added))
        logits: Tensor = self.head[own](state)
        return logits, state

    def widths(self) -> tuple[int, int]:
        return self.shape.inner, max(self.hidden, self.shape.inner)

    def record(self, level: int, made: Operations) -> list[COp]:
        own = 0 if self.shape.tied else level
        return [
            made.embedding(self.emb[own].get_parameter("weight").detach(), X, self.share),
            made.product(self._projection(level), STATE, X, combine=ADD),
            made.copy(X, STATE, self.ln[own], activation="gelu"),
            made.product(self.head[own], STATE, LOGITS),
        ]

    def _projection(self, level: int) -> nn.Module:
        return self.proj[min(level, len(self.proj) - 1)]


def _scaled(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


def load_mlp(directory: Path) -> MlpSpeculator:
    """Read a speculator, in float32. Raises LoadError."""
    raw, tensors = read_config(directory, KIND), read_tensors(directory, KIND)
    with reading(directory, KIND):
        shape = read_mlp(raw)
        named = {name.removeprefix("speculator."): tensor for name, tensor in tensors.items()}
        named = {DEEPER.sub(r"\1.\2.\3", name): tensor for name, tensor in named.items()}
        if shape.tied:
            named = {name: tensor for name, tensor in named.items() if not _is_copy(name)}
        return assemble(lambda: MlpSpeculator(shape), named, KIND)


def _is_copy(name: str) -> bool:
    """Whether this is what another level has, too."""
    part, _, rest = name.partition(".")
    level = rest.partition(".")[0]
    return part in ("emb", "proj", "ln", "head") and level.isdigit() and int(level) > (1 if part == "proj" else 0)
