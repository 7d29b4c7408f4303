"""Begin a decoder from a smaller one that has learnt, so that it need not learn the same again.

What is new computes something from the first step on but is read with zero weights: new residual channels are written
by random weights and read by none, new heads and new units of the MLP read the old channels through random weights and
are not read, and new layers add nothing. So the grown decoder says what the small one said, but for a norm that sees
new channels beside the old ones, and no two units are alike, as they would be in copies (Net2Net, 1511.05641, and
bert2BERT, 2110.07143, copy units; with zeros the gradients tell them apart at once).
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from forerun.errors import ConfigError
from scripts.bundled.export import floats_of
from scripts.bundled.model import INITIAL, Decoder


@torch.no_grad()
def grow(model: Decoder, directory: Path) -> None:
    """Put the weights of the model in `directory` into `model`, a new one. Raises LoadError, and ConfigError where it
    is not smaller in everything, or its tokens or heads are others."""
    held = floats_of(directory)
    _check(model, json.loads((directory / "config.json").read_text()))
    share = held["norm.weight"].shape[0] / model.size.hidden  # of the channels, which a norm averages over
    for name, weight in model.named_parameters():
        if name not in held:
            continue  # of a layer that is new, and adds nothing as it was made
        old = held[name]
        if weight.ndim == 1:
            weight.fill_(old.mean().item() * share**0.5)
            weight[: old.shape[0]] = old * share**0.5
        else:
            weight.copy_(_widened(old, weight.shape, name))


def _widened(old: Tensor, shape: torch.Size, name: str) -> Tensor:
    """A matrix of this shape with `old` in its first rows and columns."""
    rows, columns = old.shape
    wide = torch.zeros(shape)
    if "embed" not in name:  # whose rows are tokens, and whose columns are channels both written and read
        new = slice(rows, None)
        wide[new, :columns] = INITIAL * torch.randn(shape[0] - rows, columns)
    wide[:rows, :columns] = old
    return wide


def _check(model: Decoder, config: dict[str, int]) -> None:
    size = model.size
    mine = (size.hidden, size.intermediate, size.layers, size.heads, size.kv_heads)
    named = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    theirs = tuple(config[name] for name in named)
    same = (size.vocab, size.head_dim, size.heads // size.kv_heads) == (
        config["vocab_size"],
        config["head_dim"],
        config["num_attention_heads"] // config["num_key_value_heads"],
    )
    if not same or any(new < old for new, old in zip(mine, theirs, strict=True)):
        raise ConfigError(f"a model of {theirs} cannot grow to {mine} ({', '.join(named)}): grow from a smaller one")
