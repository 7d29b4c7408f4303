"""Directories of drafter modules: config.json and tensors, read strictly, written whole or not at
all.

Every tensor must be there, have the shape that is asked for, and be asked for. Nothing that is read
is ever run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from forerun.errors import LoadError, shown
from forerun.models.config import Json, ModelConfig, is_integer, make_config
from forerun.models.files import check_pointer, read_object
from forerun.models.hub import PICKLED
from forerun.utils import atomic_file

LARGEST = 1 << 31  # of any size


def read_bool(raw: Json, name: str, default: bool) -> bool:
    """True or false, `default` where it is not said. Raises LoadError."""
    value = raw.get(name, default)
    if not isinstance(value, bool):
        raise LoadError(f"{name} in config.json is {shown(value)}, not true or false")
    return value


def read_whole(
    raw: Json, name: str, low: int = 1, high: int = LARGEST, default: int | None = None
) -> int:
    """A whole number from `low` to `high`, which must be there unless there is a default. Raises
    LoadError."""
    value: Any = raw.get(name, default)
    if not is_integer(value) or not low <= value <= high:
        raise LoadError(
            f"{name} in config.json is {shown(value)}, not a whole number from {low} to {high}"
        )
    return int(value)


def read_ids(raw: Json, name: str) -> tuple[int, ...]:
    """Numbers of hidden states, one at least. Raises LoadError."""
    ids = raw.get(name)
    if not isinstance(ids, list) or not ids or not all(is_integer(i) for i in ids):
        raise LoadError(
            f"{name} in config.json is {shown(ids)}, not a list of hidden states to read"
        )
    return tuple(ids)


Tensors = dict[str, Tensor]
M = TypeVar("M", bound=nn.Module)

LAYER = "layers.0."
MOST_LAYERS = 64
DEFAULTS: dict[str, Json] = {  # what transformers takes for fields that are not there
    "llama": {"num_attention_heads": 32, "max_position_embeddings": 2048},
    "qwen3": {"num_attention_heads": 32, "max_position_embeddings": 32768, "head_dim": 128},
}

SCALE = "_scale"  # behind the name of a weight in int8: float32 [rows, 1]
INT8: Json = {
    "quantization_config": {
        "quant_method": "compressed-tensors", "format": "int-quantized", "ignore": [],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
            "num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False,
        }}},
    }
}  # fmt: skip
SPECULATORS = "0.9.0"  # the version of the speculators format that is written


def read_config(directory: Path, kind: str) -> Json:
    """config.json; `kind` is what messages call the drafter. Raises LoadError."""
    path = directory / "config.json"
    if not os.path.exists(path):
        raise LoadError(
            f"{directory} is no {kind}: it has no config.json; give the drafter's directory"
        )
    return read_object(path)


@contextmanager
def reading(directory: Path, kind: str) -> Iterator[None]:
    """What is wrong meanwhile is said of the directory, which was to hold such a drafter."""
    try:
        yield
    except LoadError as error:
        raise LoadError(f"{directory} holds no {kind} that can be used here: {error}") from None


def read_tensors(directory: Path, kind: str) -> Tensors:
    """All tensors of *.safetensors or, without any, of pickled files; floats become float32. Raises
    LoadError."""
    paths = sorted(directory.glob("*.safetensors")) or _pickled(directory)
    if not paths:
        raise LoadError(
            f"{directory} is no {kind}: it has neither *.safetensors nor {' nor '.join(PICKLED)}"
        )
    held: Tensors = {}
    for path in paths:
        try:
            check_pointer(path)
            read = load_file(path) if path.suffix == ".safetensors" else _unpickle(path)
        except (SafetensorError, OSError, ValueError) as error:
            raise LoadError(
                f"{path} cannot be read: {str(error).splitlines()[0]}; download it again"
            ) from None
        held |= read
    with reading(directory, kind):
        return {
            name: _floats(held, name, tensor)
            for name, tensor in held.items()
            if not _is_scale(held, name)
        }


def tensor_names(directory: Path) -> set[str]:
    """What the tensors in a directory are called, from headers alone; empty where they cannot be
    read."""
    names: set[str] = set()
    with suppress(
        Exception
    ):  # whatever foreign bytes may raise: whoever reads the tensors says what is wrong
        for path in sorted(directory.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                names |= set(file.keys())
        for path in [] if names else _pickled(directory):
            names |= set(torch.load(path, map_location="cpu", weights_only=True, mmap=True))
    return names


def _pickled(directory: Path) -> list[Path]:
    return sorted(path for pattern in PICKLED for path in directory.glob(pattern))


def _is_scale(held: Tensors, name: str) -> bool:
    """Whether this belongs to a weight in int8."""
    return (
        name.endswith(SCALE)
        and held.get(name.removesuffix(SCALE), torch.empty(0)).dtype == torch.int8
    )


def _floats(held: Tensors, name: str, tensor: Tensor) -> Tensor:
    """Floats as float32, and numbers with a scale for each row as what they stand for. Raises
    LoadError."""
    if tensor.dtype != torch.int8:
        return tensor.float() if tensor.is_floating_point() else tensor
    scale = held.get(name + SCALE)
    if (
        scale is None
        or tensor.ndim != 2
        or scale.shape != (len(tensor), 1)
        or not scale.is_floating_point()
    ):
        raise LoadError(
            f"{name} is in int8, but there is no {name}{SCALE} with a number for each of its rows"
        )
    return tensor.float() * scale.float()


def _unpickle(path: Path) -> Tensors:
    """A file of tensors by torch.save; nothing in it is run."""
    try:
        held = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever unpickling foreign bytes may raise
        raise ValueError(str(error) or repr(error)) from None
    if not isinstance(held, dict) or not all(
        isinstance(tensor, Tensor) for tensor in held.values()
    ):
        raise ValueError("it does not hold tensors by name")
    return held


def assemble(make: Callable[[], M], tensors: Tensors, kind: str) -> M:
    """The module that `make` builds, with these tensors in it, for drafting. Raises LoadError."""
    with _unfilled():
        module = make()
    expected = module.state_dict()
    missing, extra = sorted(expected.keys() - tensors), sorted(tensors.keys() - expected)
    if missing:
        raise LoadError(
            f"its checkpoint has no {_few(missing)}: it is incomplete, or of another kind"
        )
    if extra:
        raise LoadError(f"its checkpoint has {_few(extra)}, which no {kind} of this layout has")
    for name, wanted in expected.items():
        held = tensors[name]
        if (held.shape, held.dtype) != (wanted.shape, wanted.dtype):
            raise LoadError(
                f"{name} is {held.dtype} of shape {list(held.shape)}, but config.json asks for {list(wanted.shape)}"
            )
        if held.is_floating_point() and not held.isfinite().all():
            raise LoadError(f"{name} holds numbers that are not finite: download it again")
    module.load_state_dict(tensors, assign=True)
    return module.requires_grad_(False).eval()


@contextmanager
def _unfilled() -> Iterator[None]:
    """Products that are made meanwhile take no memory until they are given their numbers. (So it is
    on torch's meta device, too, but that imports 800 modules first: a second, and 90 MB.)"""
    kinds: tuple[Any, ...] = (nn.Linear, nn.Embedding)
    filling = [kind.reset_parameters for kind in kinds]
    for kind in kinds:
        kind.reset_parameters = lambda self: None
    try:
        yield
    finally:
        for kind, fill in zip(kinds, filling, strict=True):
            kind.reset_parameters = fill


def write(
    module: nn.Module, config: Json, directory: Path, dtype: torch.dtype = torch.float32
) -> None:
    """Write a module's tensors, floats in `dtype`, and its config.json. In int8 matrices have a
    scale for each row, as compressed-tensors stores them, and all else is bfloat16. Raises
    OSError."""
    floats = torch.bfloat16 if dtype == torch.int8 else dtype
    tensors: Tensors = {}
    for name, held in module.state_dict().items():
        tensor = held.detach().cpu().contiguous()
        if dtype == torch.int8 and tensor.is_floating_point() and tensor.ndim == 2:
            scale = (tensor.float().abs().amax(1, keepdim=True) / 127).clamp(min=1e-12)
            tensors[name], tensors[name + SCALE] = (tensor / scale).round().to(torch.int8), scale
        else:
            tensors[name] = tensor.to(floats) if tensor.is_floating_point() else tensor
    described = {**config, "dtype": str(floats).removeprefix("torch.")} | (
        INT8 if dtype == torch.int8 else {}
    )
    text = json.dumps(described, indent=2) + "\n"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with (
            atomic_file(directory / "config.json") as settings,
            atomic_file(directory / "model.safetensors") as weights,
        ):
            save_file(tensors, weights, metadata={"format": "pt"})
            settings.write_text(text, encoding="utf-8")
    except SafetensorError as error:  # its own word for a full disk
        raise OSError(str(error)) from None


def describe_speculator(
    kind: str, architecture: str, c: ModelConfig, tokens: int, target: str | None
) -> Json:
    """What every config.json of the speculators layout says (0.9): of a drafter of a `kind`, with
    the layers `c`, which drafts `tokens` ahead by default; `target` is the name or path of its
    target."""
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_version": SPECULATORS,
        "transformer_layer_config": _described(c),
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target, "architectures": []},
        },
        "tie_word_embeddings": False,
    }


def _described(c: ModelConfig) -> Json:
    """Decoder layers as transformers describes them, nothing left to defaults."""
    rope, windows = c.ropes[0].parameters, [window for window in c.windows if window]
    types = ["sliding_attention" if window else "full_attention" for window in c.windows]
    window = (
        {"layer_types": types, "sliding_window": windows[0], "use_sliding_window": True}
        if windows
        else {}
    )
    return window | {
        "model_type": c.family, "hidden_size": c.hidden, "intermediate_size": c.intermediate,
        "num_hidden_layers": c.layers, "num_attention_heads": c.heads, "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim, "vocab_size": c.vocab, "max_position_embeddings": c.context,
        "rms_norm_eps": c.norm_eps, "rope_theta": rope["rope_theta"], "rope_parameters": rope,
        "hidden_act": c.raw.get("hidden_act", "silu"), "attention_bias": False, "mlp_bias": False,
        "tie_word_embeddings": False,
    }  # fmt: skip


def read_layer(
    raw: Json, tensors: Mapping[str, Tensor], vocab: int, prefix: str = LAYER, layers: int = 1
) -> ModelConfig:
    """The decoder layers that `raw` describes as transformers does; sizes that it leaves out are
    those of the tensors behind `prefix`, and `vocab` that of the target. Raises LoadError."""
    family = raw.get("model_type") or (
        "qwen3" if "Qwen3" in str(raw.get("architectures")) else "llama"
    )
    if not isinstance(family, str) or family not in DEFAULTS:
        raise LoadError(
            f"its layer is of the family {family!r}: only {' and '.join(DEFAULTS)} are supported"
        )
    shapes = {
        "hidden_size": size_of(tensors, f"{prefix}post_attention_layernorm.weight", 0),
        "intermediate_size": size_of(tensors, f"{prefix}mlp.gate_proj.weight", 0),
        "vocab_size": size_of(tensors, "embed_tokens.weight", 0)
        if "embed_tokens.weight" in tensors
        else vocab,
    }
    given = {name: value for name, value in raw.items() if value is not None}
    fields = DEFAULTS[family] | shapes | given | {"model_type": family}
    if fields.get("num_hidden_layers", layers) != layers:
        raise LoadError(
            f"it has {fields['num_hidden_layers']!r} layers: only drafters of {layers} layer are supported"
        )
    fields |= {"num_hidden_layers": layers, "layer_types": None, "use_sliding_window": False}
    config = make_config(fields, Path("config.json"))
    if "num_key_value_heads" not in given:
        fields["num_key_value_heads"] = (
            size_of(tensors, f"{prefix}self_attn.k_proj.weight", 0) // config.head_dim or 1
        )
        config = make_config(fields, Path("config.json"))
    if config.qkv_bias or config.mlp_bias:
        raise LoadError("its layer has biases, which is not supported")
    types, window = raw.get("layer_types"), raw.get("sliding_window")
    if not isinstance(types, list) or len(types) != layers or "sliding_attention" not in types:
        return config
    if window is None or not is_integer(window) or window < 1:
        raise LoadError(
            f"the sliding window in config.json is {window!r}, not a positive whole number"
        )
    return replace(
        config, windows=tuple(window if kind == "sliding_attention" else None for kind in types)
    )


def size_of(tensors: Mapping[str, Tensor], name: str, axis: int) -> int:
    """How long a tensor is. Raises LoadError where it is not there or is empty."""
    if name not in tensors or axis >= tensors[name].ndim or not tensors[name].numel():
        raise LoadError(f"its checkpoint has no {name}: it is incomplete, or of another kind")
    return tensors[name].shape[axis]


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
