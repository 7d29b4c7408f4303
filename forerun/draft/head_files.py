"""Directories of draft heads: config.json and tensors, read strictly and written atomically. GGUF
files of heads are read as such directories (`gguf_heads`).

Every expected tensor must be there with its shape and dtype, and no other tensor may be there.
Pickled checkpoints are read with `weights_only`, so that nothing in a file is executed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from forerun.draft.gguf_heads import head_tensors, read_head
from forerun.draft.head_config import reading
from forerun.errors import LoadError, first_line
from forerun.models.config import ModelConfig, make_config
from forerun.models.families import Json, is_integer
from forerun.models.files import check_pointer, joined
from forerun.models.hub import PICKLED
from forerun.utils import atomic_file

Tensors = dict[str, Tensor]
M = TypeVar("M", bound=nn.Module)

FIRST_LAYER = "layers.0."
# defaults of transformers for missing fields
LAYER_DEFAULTS: dict[str, Json] = {
    "llama": {"num_attention_heads": 32, "max_position_embeddings": 2048},
    "qwen3": {"num_attention_heads": 32, "max_position_embeddings": 32768, "head_dim": 128},
}
SPECULATORS_VERSION = "0.9.0"
SCALE_SUFFIX = "_scale"  # of the float32 [rows, 1] scales of an int8 weight
INT8_CONFIG: Json = {
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": [],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 8,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "channel",
                    "dynamic": False,
                },
            }
        },
    }
}


# ---------------------------------------------------------------- config.json


def read_layer(
    raw: Json, tensors: Mapping[str, Tensor], vocab: int, prefix: str = FIRST_LAYER, layers: int = 1
) -> ModelConfig:
    """Read the config of a head's decoder layers, described as transformers does.

    Sizes that `raw` leaves out come from the tensors under `prefix`, and the vocabulary from the
    embedding or the target's `vocab`. Raises LoadError, also for layers with biases.
    """
    family = raw.get("model_type") or (
        "qwen3" if "Qwen3" in str(raw.get("architectures")) else "llama"
    )
    if not isinstance(family, str) or family not in LAYER_DEFAULTS:
        supported = " and ".join(LAYER_DEFAULTS)
        raise LoadError(f"its layer is of the family {family!r}: only {supported} are supported")
    embedding = "embed_tokens.weight"
    given = {name: value for name, value in raw.items() if value is not None}
    fields = LAYER_DEFAULTS[family] | {
        "hidden_size": size_of(tensors, f"{prefix}post_attention_layernorm.weight", 0),
        "intermediate_size": size_of(tensors, f"{prefix}mlp.gate_proj.weight", 0),
        "vocab_size": size_of(tensors, embedding, 0) if embedding in tensors else vocab,
    }
    fields |= given | {"model_type": family}
    if fields.get("num_hidden_layers", layers) != layers:
        raise LoadError(
            f"it has {fields['num_hidden_layers']!r} layers: only drafters of {layers} layer are"
            " supported"
        )
    fields |= {"num_hidden_layers": layers, "layer_types": None, "use_sliding_window": False}
    config = make_config(fields, Path("config.json"))
    if "num_key_value_heads" not in given:
        keys = size_of(tensors, f"{prefix}self_attn.k_proj.weight", 0)
        fields["num_key_value_heads"] = keys // config.head_dim or 1
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
    windows = tuple(window if kind == "sliding_attention" else None for kind in types)
    return replace(config, windows=windows)


# ---------------------------------------------------------------- reading tensors


def read_tensors(directory: Path, title: str) -> Tensors:
    """Read all tensors of *.safetensors or, if there are none, of pickled files; or those of a GGUF
    file, under forerun's names.

    Floats become float32, and int8 weights with row scales are dequantised. Raises LoadError.
    """
    if directory.is_file():
        gguf, raw = read_head(directory, title)
        with reading(directory, title):
            return head_tensors(gguf, raw)
    paths = sorted(directory.glob("*.safetensors")) or _pickled_files(directory)
    if not paths:
        formats = f"neither *.safetensors nor {' nor '.join(PICKLED)}"
        raise LoadError(f"{directory} is no {title}: it has {formats}")
    stored: Tensors = {}
    for path in paths:
        try:
            check_pointer(path)
            stored |= load_file(path) if path.suffix == ".safetensors" else _unpickle(path)
        except (SafetensorError, OSError, ValueError) as error:
            reason = first_line(error)
            raise LoadError(f"{path} cannot be read: {reason}; download it again") from None
    int8 = {name for name, tensor in stored.items() if tensor.dtype == torch.int8}
    scales = {name + SCALE_SUFFIX for name in int8}
    with reading(directory, title):
        return {name: _to_float(stored, name) for name in stored if name not in scales}


def tensor_names(directory: Path) -> set[str]:
    """Return the names of the tensors in a directory, from headers alone; empty if they cannot be
    read."""
    names: set[str] = set()
    # foreign bytes may raise anything; the loader reports what is wrong with them
    with suppress(Exception):
        for path in sorted(directory.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                names |= set(file.keys())
        for path in [] if names else _pickled_files(directory):
            names |= set(torch.load(path, map_location="cpu", weights_only=True, mmap=True))
    return names


def size_of(tensors: Mapping[str, Tensor], name: str, axis: int) -> int:
    """Return the size of an axis. Raises LoadError if the tensor is missing or empty."""
    if name not in tensors or axis >= tensors[name].ndim or not tensors[name].numel():
        raise LoadError(f"its checkpoint has no {name}: it is incomplete, or of another kind")
    return tensors[name].shape[axis]


def _pickled_files(directory: Path) -> list[Path]:
    return sorted(path for pattern in PICKLED for path in directory.glob(pattern))


def _unpickle(path: Path) -> Tensors:
    """Read a file of tensors written by torch.save. Raises ValueError."""
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling foreign bytes may raise anything
        raise ValueError(str(error) or repr(error)) from None
    if not isinstance(stored, dict) or not all(isinstance(t, Tensor) for t in stored.values()):
        raise ValueError("it does not hold tensors by name")
    return stored


def _to_float(stored: Tensors, name: str) -> Tensor:
    """Return a tensor with floats as float32 and int8 dequantised. Raises LoadError."""
    tensor = stored[name]
    if tensor.dtype != torch.int8:
        return tensor.float() if tensor.is_floating_point() else tensor
    scale = stored.get(name + SCALE_SUFFIX, torch.empty(0))
    if tensor.ndim != 2 or scale.shape != (len(tensor), 1) or not scale.is_floating_point():
        raise LoadError(
            f"{name} is in int8, but there is no {name}{SCALE_SUFFIX} with a number for each of"
            " its rows"
        )
    return tensor.float() * scale.float()


# ---------------------------------------------------------------- loading modules


class _SkipInitialisation(TorchFunctionMode):
    """Leaves parameters as allocated: a checkpoint replaces them.

    Building the module on torch's meta device would do the same, but imports 800 modules first.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (nn.init.kaiming_uniform_, nn.init.uniform_, nn.init.normal_):
            return (kwargs or {}).get("tensor", args[0] if args else None)
        if func in (Tensor.uniform_, Tensor.normal_):
            return args[0]
        return func(*args, **(kwargs or {}))


def assemble(make: Callable[[], M], tensors: Tensors, title: str) -> M:
    """Build the module with `make` and give it these tensors, in evaluation mode and without
    gradients. Raises LoadError unless names, shapes and dtypes agree and all numbers are finite."""
    with _SkipInitialisation():
        module = make()
    expected = module.state_dict()
    missing = sorted(expected.keys() - tensors)
    if missing:
        raise LoadError(
            f"its checkpoint has no {joined(missing, 3)}: it is incomplete, or of another kind"
        )
    extra = sorted(tensors.keys() - expected)
    if extra:
        raise LoadError(
            f"its checkpoint has {joined(extra, 3)}, which no {title} of this layout has"
        )
    for name, wanted in expected.items():
        stored = tensors[name]
        if (stored.shape, stored.dtype) != (wanted.shape, wanted.dtype):
            raise LoadError(
                f"{name} is {stored.dtype} of shape {list(stored.shape)}, but its configuration"
                f" asks for {list(wanted.shape)}"
            )
        if stored.is_floating_point() and not stored.isfinite().all():
            raise LoadError(f"{name} holds numbers that are not finite: download it again")
    module.load_state_dict(tensors, assign=True)
    return module.requires_grad_(False).eval()


# ---------------------------------------------------------------- writing


def write(
    module: nn.Module, config: Json, directory: Path, dtype: torch.dtype = torch.float32
) -> None:
    """Write a module's tensors, floats in `dtype`, and its config.json.

    With int8, matrices get a scale for each row, as compressed-tensors stores them, and all other
    floats are bfloat16. Raises OSError.
    """
    int8 = dtype == torch.int8
    float_dtype = torch.bfloat16 if int8 else dtype
    tensors: Tensors = {}
    for name, value in module.state_dict().items():
        tensor = value.detach().cpu().contiguous()
        if not tensor.is_floating_point():
            tensors[name] = tensor
        elif int8 and tensor.ndim == 2:
            scale = (tensor.float().abs().amax(1, keepdim=True) / 127).clamp(min=1e-12)
            tensors[name] = (tensor / scale).round().to(torch.int8)
            tensors[name + SCALE_SUFFIX] = scale
        else:
            tensors[name] = tensor.to(float_dtype)
    described = config | {"dtype": str(float_dtype).removeprefix("torch.")}
    text = json.dumps(described | (INT8_CONFIG if int8 else {}), indent=2) + "\n"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with (
            atomic_file(directory / "config.json") as settings,
            atomic_file(directory / "model.safetensors") as weights,
        ):
            save_file(tensors, weights, metadata={"format": "pt"})
            settings.write_text(text, encoding="utf-8")
    except SafetensorError as error:  # safetensors reports a full disk so
        raise OSError(str(error)) from None


def describe_speculator(
    kind: str, architecture: str, layer: ModelConfig, num_tokens: int, target: str | None
) -> Json:
    """Return the fields that every config.json of the speculators layout (0.9) has.

    `num_tokens` is the default draft length, `target` the name or path of the target model.
    """
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_version": SPECULATORS_VERSION,
        "transformer_layer_config": _describe_layer(layer),
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_tokens}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target, "architectures": []},
        },
        "tie_word_embeddings": False,
    }


def _describe_layer(c: ModelConfig) -> Json:
    """Describe decoder layers as transformers does, leaving nothing to defaults."""
    rope = c.ropes[0].parameters
    fields = {
        "model_type": c.family,
        "hidden_size": c.hidden,
        "intermediate_size": c.intermediate,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "vocab_size": c.vocab,
        "max_position_embeddings": c.context,
        "rms_norm_eps": c.norm_eps,
        "rope_theta": rope["rope_theta"],
        "rope_parameters": rope,
        "hidden_act": c.raw.get("hidden_act", "silu"),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }
    windows = [window for window in c.windows if window]
    if windows:
        fields["layer_types"] = [
            "sliding_attention" if window else "full_attention" for window in c.windows
        ]
        fields |= {"sliding_window": windows[0], "use_sliding_window": True}
    return fields
