"""MLP speculators on disk: IBM's accelerators, and Arctic's (Snowflake), whose config.json names other classes.

Names are IBM's: `emb.{i}`, `proj.{i}`, `ln.{i}` and `head.{i}`, in some files behind `speculator.`. Arctic's `sum_rnn`
has them a list deeper (`emb.0.0`); its `sum_lstm` has a projection and an embedding for each gate, `forget_proj.{0,1}`
and so on, and writes one that all gates share four times. What is tied is written once or for each level.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from forerun.draft.fields import read_bool, read_whole
from forerun.draft.levels import MOST_LEVELS
from forerun.draft.mlp import MlpShape, MlpSpeculator
from forerun.draft.stored import Json, Tensors, assemble, read_config, read_tensors, size_of
from forerun.errors import LoadError, shown

KIND = "MLP speculator"
PLAIN = ("MLPSpeculatorPreTrainedModel", "ArcticMLPSpeculatorPreTrainedModel")
VARIANTS = ("ArcticLSTMSpeculatorPreTrainedModel", "MLPVariantSpeculatorPreTrainedModel")
METHODS = ("sum_rnn", "sum_lstm")
GATES = ("forget", "input", "output", "cell")  # in the order in which they are computed
DEEPER = re.compile(r"(emb|proj|ln)\.(\d+)\.0\.(\w+)")


def load_mlp(directory: Path) -> MlpSpeculator:
    """Read a speculator, in float32. Raises LoadError."""
    raw, tensors = read_config(directory, KIND), read_tensors(directory, KIND)
    try:
        shape = read_shape(raw)
        named = {name.removeprefix("speculator."): tensor for name, tensor in tensors.items()}
        named = _of_gates(named, shape) if shape.lstm else {DEEPER.sub(r"\1.\2.\3", k): t for k, t in named.items()}
        if shape.tied:
            named = {name: tensor for name, tensor in named.items() if not _is_copy(name, shape)}
        return assemble(lambda: MlpSpeculator(shape), named, KIND)
    except LoadError as error:
        raise LoadError(f"{directory} holds no {KIND} that can be used here: {error}") from None


def read_shape(raw: Json) -> MlpShape:
    """What config.json says. Raises LoadError."""
    named = raw.get("architectures") or [PLAIN[0]]
    own = named[0] if isinstance(named, list) else named
    if own not in PLAIN + VARIANTS:
        known = ", ".join((*PLAIN[:1], *VARIANTS[:1]))
        raise LoadError(f"its architecture is {shown(own)}: only those such as {known} are supported")
    levels, vocab = read_whole(raw, "n_predict", 1, MOST_LEVELS), read_whole(raw, "vocab_size")
    tied, scaled = read_bool(raw, "tie_weights", False), read_bool(raw, "scale_input", False)
    if own in PLAIN:
        hidden = read_whole(raw, "emb_dim")
        inner = read_whole(raw, "inner_dim", 0, default=0) or hidden
        return MlpShape(levels, hidden, inner, vocab, tied, scaled)
    sizes = {_size(raw, name) for name in ("inner_dim", "emb_dim", "proj_dim")}
    if len(sizes) > 1:
        raise LoadError(f"inner_dim, emb_dim and proj_dim are {sorted(sizes)}: only equal ones are supported")
    method = raw.get("method", METHODS[0])
    if method not in METHODS:
        raise LoadError(f"its method is {shown(method)}: only {' and '.join(METHODS)} are supported")
    lstm, hidden = method == METHODS[1], read_whole(raw, "input_hidden_dim")
    if lstm and not tied:
        raise LoadError("it has a cell, but tie_weights is false, which is not supported")
    gates = 4 if lstm and not read_bool(raw, "tie_lstm_embs", False) else 1
    return MlpShape(levels, hidden, sizes.pop(), vocab, tied, scaled, lstm, gates)


def _size(raw: Json, name: str) -> int:
    """A size that is written as a text, of one number here: several are several layers."""
    value = raw.get(name)
    number = int(value) if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 9 else value
    if isinstance(number, str):
        raise LoadError(f"{name} in config.json is {shown(value)}: only one size is supported")
    return read_whole({name: number}, name)


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
