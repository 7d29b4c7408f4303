"""A small model out of a large one's layers, by the checkpoint's own tensors and transformers' own
classes.

Works for every family whose layers stand in one list: the tensors of the kept layers are
renumbered, all others stay. Of a quantised checkpoint, and of a GGUF file, it takes the numbers
that the stored ones stand for."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from forerun.errors import ConfigError, ForerunError, LoadError
from forerun.models.config import ModelConfig, load_config
from forerun.models.gguf.config import hugging_face_config
from forerun.models.gguf.export import readers, to_directory
from forerun.models.quantized import CONFIG_KEYS, Scheme, read_scheme
from forerun.models.weights import Checkpoint

BY_LAYER = ("layer_types", "no_rope_layers")  # lists in config.json with an entry for each layer
COUNTS = ("num_hidden_layers", "n_layer")
LAYER = re.compile(r"^((?:model\.|transformer\.)?(?:layers|h)\.)(\d+)(\..*)$")


def kept_layers(layers: int, count: int) -> list[int]:
    """`count` of `layers`, evenly spaced, the first and (of two or more) the last among them."""
    if count == 1:
        return [0]
    return [round(i * (layers - 1) / (count - 1)) for i in range(count)]


def prune(path: Path, count: int) -> nn.Module:
    """The model in a directory or a file with `count` of its layers, in float32. Raises ConfigError
    or LoadError."""
    config = load_config(path)
    if count >= config.layers:
        raise ConfigError(
            f"layers={count} is not under the target's {config.layers}: a drafter has to be smaller"
        )
    kept = kept_layers(config.layers, count)
    read_from = readers(path, config) if path.is_file() else _readers(path, config)
    tensors = {}
    for name, read in read_from.items():
        renamed = _renamed(name, kept)
        if renamed:
            tensors[renamed] = read().contiguous()

    def write(work: Path) -> None:
        (work / "config.json").write_text(json.dumps(_config_of(path, config, kept)))
        save_file(tensors, work / "model.safetensors", metadata={"format": "pt"})

    return _by_way_of_files(write)


def load_module(path: Path) -> nn.Module:
    """A language model, a directory or a file, as a transformers module in float32. Raises
    LoadError."""
    return _by_way_of_files(partial(to_directory, path)) if path.is_file() else _load(path)


def _by_way_of_files(write: Callable[[Path], None]) -> nn.Module:
    """The module of a directory that goes again."""
    with tempfile.TemporaryDirectory(prefix="forerun-") as folder:
        try:
            write(Path(folder))
        except (OSError, SafetensorError) as error:
            raise ForerunError(
                f"the model cannot be written to {folder} for now: {error}"
            ) from None
        return _load(Path(folder))


def _load(directory: Path) -> nn.Module:
    import transformers

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        module: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise LoadError(
            f"the model in {directory} cannot be read: {str(error).strip().splitlines()[0]}"
        ) from None
    return module


def _readers(directory: Path, config: ModelConfig) -> dict[str, Callable[[], Tensor]]:
    """All tensors by the names that they have where nothing is quantised. Raises LoadError."""
    checkpoint, where = Checkpoint(directory), str(directory / "config.json")
    scheme = read_scheme(config.raw, where)
    if scheme is None:
        return {name: partial(checkpoint.read, name) for name in checkpoint.where}
    shapes, readers, turned = (
        _shapes(directory),
        dict[str, Callable[[], Tensor]](),
        config.layout == "gpt2",
    )
    for name in checkpoint.where:
        stem = name.rpartition(".")[0]
        layout, weight = scheme.layout(checkpoint.has, stem), f"{stem}.weight"
        if layout is None or weight not in shapes:
            readers[name] = partial(checkpoint.read, name)
        else:
            readers[weight] = partial(
                _floats, checkpoint, scheme, layout, stem, shapes[weight], turned
            )
            if checkpoint.has(f"{stem}.bias"):
                readers[f"{stem}.bias"] = partial(checkpoint.read, f"{stem}.bias")
    return readers


def _floats(
    checkpoint: Checkpoint,
    scheme: Scheme,
    layout: str,
    stem: str,
    shape: tuple[int, int],
    turned: bool,
) -> Tensor:
    """The weight of a quantised linear layer. float32 of this shape: [out, in], [in, out] if it is
    `turned`"""
    weight = checkpoint.quantized(
        scheme, layout, stem, shape[::-1] if turned else shape
    ).dequantize()
    return weight.T if turned else weight


def _shapes(directory: Path) -> dict[str, Any]:
    """The shapes of a model's tensors, by their names in a checkpoint that is not quantised."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(directory)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return {name: tuple(weight.shape) for name, weight in module.named_parameters()}


def _renamed(name: str, kept: list[int]) -> str | None:
    """The name of a tensor among the kept layers; None for one of another layer."""
    found = LAYER.match(name)
    if not found:
        return name
    before, layer, after = found.groups()
    return f"{before}{kept.index(int(layer))}{after}" if int(layer) in kept else None


def _config_of(path: Path, whole: ModelConfig, kept: list[int]) -> dict[str, Any]:
    """config.json with fewer layers. transformers fills in what older files leave out, such as
    layer_types."""
    from transformers import AutoConfig

    made = (
        AutoConfig.for_model(**hugging_face_config(whole))
        if path.is_file()
        else AutoConfig.from_pretrained(path)
    )
    config: dict[str, Any] = made.to_dict()
    for name in COUNTS:
        if name in config:
            config[name] = len(kept)
    for name in BY_LAYER:
        if config.get(name) is not None:
            config[name] = [config[name][layer] for layer in kept]
    for name in CONFIG_KEYS:
        config.pop(name, None)
    return config
