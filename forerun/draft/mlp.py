"""MLP speculators (Wertheimer et al. 2404.19124), Arctic's among them: a small recurrent network on the last state.

Level i (from 0) adds to a projection of the state before it an embedding of the token before it, weighed so that after
n levels half of the state is still the target's: with w = 0.5^(1 / 2n) and e = sqrt((1 - w^2) D / 2), D the inner size,

    s_i+1 = gelu(norm_i(P_i s_i + e / w * E_i[token])), and the logits are H_i s_i+1

with s_0 the target's last state, normed once more where `scaled`. Arctic's `sum_lstm` has gates and a cell in the place
of the norm. Weights may be tied: all levels have one embedding, norm and head, and all but the first one projection.

On disk there are IBM's accelerators, and Arctic's (Snowflake), whose config.json names other classes. Names are IBM's:
`emb.{i}`, `proj.{i}`, `ln.{i}` and `head.{i}`, in some files behind `speculator.`. Arctic's `sum_rnn` has them a list
deeper (`emb.0.0`); its `sum_lstm` has a projection and an embedding for each gate, `forget_proj.{0,1}` and so on, and
writes one that all gates share four times. What is tied is written once or for each level.
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
from forerun.draft.stored import Tensors, assemble, read_config, read_tensors, reading, size_of
from forerun.kernels.native import ADD, COp
from forerun.recorded import LOGITS, X

KIND = "MLP speculator"
EPS = 1e-6
GATES = ("forget", "input", "output", "cell")  # in the order in which they are computed
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
        inner, gates = shape.inner, 4 if shape.lstm else 1
        own, steps = (1, min(2, shape.levels)) if shape.tied else (shape.levels, shape.levels)
        self.emb = nn.ModuleList(nn.Embedding(shape.vocab, inner) for _ in range(own * shape.gate_embeddings))
        self.proj = nn.ModuleList(
            nn.Linear(inner if i else shape.hidden, gates * inner, bias=False) for i in range(steps)
        )
        self.ln = nn.ModuleList(_Norm(inner) for _ in range(2 if shape.lstm else own))
        self.head = nn.ModuleList(nn.Linear(inner, shape.vocab, bias=False) for _ in range(own))
        weight = 0.5 ** (0.5 / shape.levels)
        self.share = math.sqrt((1 - weight**2) * inner / 2) / weight  # of an embedding beside a projected state

    def enter(self, states: Tensor) -> Tensor:
        return _scaled(states) / math.sqrt(2) if self.shape.scaled else states

    def step(self, level: int, carried: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        own = 0 if self.shape.tied else level
        if self.shape.lstm:
            carried, state = self._remember(level, carried, tokens)
        else:
            added = self.share * self.emb[own](tokens)
            carried = state = F.gelu(self.ln[own](self._projection(level)(carried) + added))
        logits: Tensor = self.head[own](state)
        return logits, carried

    def widths(self) -> tuple[int, int]:
        return self.shape.inner, max(self.hidden, self.shape.inner)

    def record(self, level: int, made: Operations) -> list[COp]:
        if self.shape.lstm:  # its gates are no operations of the kernels'
            return []
        own = 0 if self.shape.tied else level
        return [
            made.embedding(self.emb[own].get_parameter("weight").detach(), X, self.share),
            made.product(self._projection(level), STATE, X, combine=ADD),
            made.copy(X, STATE, self.ln[own], activation="gelu"),
            made.product(self.head[own], STATE, LOGITS),
        ]

    def _remember(self, level: int, carried: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """One step with a cell, which begins empty: state and cell side by side to be carried over, and the state."""
        state, cell = carried.chunk(2, -1) if level else (carried, 0.0)
        embedded = torch.cat([table(tokens) for table in self.emb], -1)
        mixed = self._projection(level)(state) + self.share * embedded.repeat(1, 4 // self.shape.gate_embeddings)
        forget, enter, leave, new = mixed.chunk(4, -1)
        cell = forget.sigmoid() * cell + enter.sigmoid() * F.gelu(self.ln[0](new))
        state = leave.sigmoid() * F.gelu(self.ln[1](cell))
        return torch.cat((state, cell), -1), state

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
        named = _of_gates(named, shape) if shape.lstm else {DEEPER.sub(r"\1.\2.\3", k): t for k, t in named.items()}
        if shape.tied:
            named = {name: tensor for name, tensor in named.items() if not _is_copy(name, shape)}
        return assemble(lambda: MlpSpeculator(shape), named, KIND)


def _is_copy(name: str, shape: MlpShape) -> bool:
    """Whether this is what another level has, too."""
    part, _, rest = name.partition(".")
    level = rest.partition(".")[0]
    if not level.isdigit() or (shape.lstm and part != "head"):
        return False
    return part in ("emb", "proj", "ln", "head") and int(level) > (1 if part == "proj" else 0)


def _of_gates(tensors: Tensors, shape: MlpShape) -> Tensors:
    """Of each step one projection for all gates, and embeddings and norms in lists."""
    named = dict(tensors)
    tables = [f"{gate}_emb" for gate in GATES]
    for table in tables[shape.gate_embeddings :]:
        named.pop(f"{table}.0.weight", None)  # a copy of the first
    for part, members in (("ln", ["cell_ln", "state_ln"]), ("emb", tables[: shape.gate_embeddings])):
        for i, member in enumerate(members):
            for kind in ("weight", "bias"):
                if f"{member}.0.{kind}" in named:
                    named[f"{part}.{i}.{kind}"] = named.pop(f"{member}.0.{kind}")
    for step in range(2):
        parts = [f"{gate}_proj.{step}.weight" for gate in GATES]
        if f"projs.{step}.weight" in named:  # joined already
            named[f"proj.{step}.weight"] = named.pop(f"projs.{step}.weight")
        elif len({size_of(named, part, 1) for part in parts}) == 1:
            named[f"proj.{step}.weight"] = torch.cat([named.pop(part) for part in parts])
    return named
