"""MLP speculators on disk: IBM's accelerators, and Arctic's (Snowflake), whose config.json names other classes.

Names are IBM's: `emb.{i}`, `proj.{i}`, `ln.{i}` and `head.{i}`, in some files behind `speculator.`. Arctic's `sum_rnn`
has them a list deeper (`emb.0.0`); its `sum_lstm` has a projection and an embedding for each gate, `forget_proj.{0,1}`
and so on, and writes one that all gates share four times. What is tied is written once or for each level.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from forerun.draft.level_dialects import MlpShape, read_mlp
from forerun.draft.mlp import MlpSpeculator
from forerun.draft.stored import Tensors, assemble, read_config, read_tensors, size_of
from forerun.errors import LoadError

KIND = "MLP speculator"
GATES = ("forget", "input", "output", "cell")  # in the order in which they are computed
DEEPER = re.compile(r"(emb|proj|ln)\.(\d+)\.0\.(\w+)")


def load_mlp(directory: Path) -> MlpSpeculator:
    """Read a speculator, in float32. Raises LoadError."""
    raw, tensors = read_config(directory, KIND), read_tensors(directory, KIND)
    try:
        shape = read_mlp(raw)
        named = {name.removeprefix("speculator."): tensor for name, tensor in tensors.items()}
        named = _of_gates(named, shape) if shape.lstm else {DEEPER.sub(r"\1.\2.\3", k): t for k, t in named.items()}
        if shape.tied:
            named = {name: tensor for name, tensor in named.items() if not _is_copy(name, shape)}
        return assemble(lambda: MlpSpeculator(shape), named, KIND)
    except LoadError as error:
        raise LoadError(f"{directory} holds no {KIND} that can be used here: {error}") from None


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
