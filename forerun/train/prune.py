"""A small model out of a large one's layers, by the checkpoint's own tensors and transformers' own classes.

Works for every family whose layers stand in one list: the tensors of the kept layers are renumbered, all others stay.
"""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from forerun.errors import ConfigError, LoadError
from forerun.models.config import load_config
from forerun.models.quantized import is_quantised
from forerun.models.weights import Checkpoint

BY_LAYER = ("layer_types", "no_rope_layers")  # lists in config.json with an entry for each layer
COUNTS = ("num_hidden_layers", "n_layer")
LAYER = re.compile(r"^((?:model\.|transformer\.)?(?:layers|h)\.)(\d+)(\..*)$")


def kept_layers(layers: int, count: int) -> list[int]:
    """`count` of `layers`, evenly spaced, the first and (of two or more) the last among them."""
    if count == 1:
        return [0]
    return [round(i * (layers - 1) / (count - 1)) for i in range(count)]


def prune(directory: Path, count: int) -> nn.Module:
    """The model in `directory` with `count` of its layers, in float32. Raises ConfigError or LoadError."""
    config = load_config(directory)
    if count >= config.layers:
        raise ConfigError(f"layers={count} is not under the target's {config.layers}: a drafter has to be smaller")
    if is_quantised(config.raw):
        raise ConfigError(f"the target in {directory} is quantised, which cannot be trained on: give --init a model")
    kept = kept_layers(config.layers, count)
    checkpoint = Checkpoint(directory)
    tensors = {}
    for name in checkpoint.where:
        renamed = _renamed(name, kept)
        if renamed:
            tensors[renamed] = checkpoint.read(name).contiguous()
    with tempfile.TemporaryDirectory(prefix="forerun-") as folder:
        work = Path(folder)
        (work / "config.json").write_text(json.dumps(_config_of(directory, kept)))
        save_file(tensors, work / "model.safetensors", metadata={"format": "pt"})
        return load_module(work)


def load_module(directory: Path) -> nn.Module:
    """A language model directory as a transformers module in float32. Raises LoadError."""
    import transformers

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        module: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise LoadError(f"the model in {directory} cannot be read: {str(error).strip().splitlines()[0]}") from None
    return module


def _renamed(name: str, kept: list[int]) -> str | None:
    """The name of a tensor among the kept layers; None for one of another layer."""
    found = LAYER.match(name)
    if not found:
        return name
    before, layer, after = found.groups()
    return f"{before}{kept.index(int(layer))}{after}" if int(layer) in kept else None


def _config_of(directory: Path, kept: list[int]) -> dict[str, Any]:
    """config.json with fewer layers. transformers fills in what older files leave out, such as layer_types."""
    from transformers import AutoConfig

    config: dict[str, Any] = AutoConfig.from_pretrained(directory).to_dict()
    for name in COUNTS:
        if name in config:
            config[name] = len(kept)
    for name in BY_LAYER:
        if config.get(name) is not None:
            config[name] = [config[name][layer] for layer in kept]
    return config
