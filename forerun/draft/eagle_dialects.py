"""What the config.json of an EAGLE-3 head says, in the dialects it is published in.

Dialects differ in names and, without a trace, in which hidden states their numbers mean. Here a number is always a
boundary: i enters layer i of the target's N, and N is what left the last.

- speculators (`speculators_model_type`): the layer's fields apart, in `transformer_layer_config`; ids are boundaries.
- DeepSpec (`target_layer_ids`): ids are layers, whose outputs are read; -1 is the embedding.
- SafeAILab, SpecForge, NVIDIA: ids in `eagle_config` are layers if the first of them is 1, boundaries otherwise (so
  SGLang tells them apart); ids at the top are boundaries (as vLLM has it); without any they are 2, N // 2 and N - 3.

The layer's rotary embedding is its own, never the target's. What a config leaves out is what transformers takes for it,
sizes apart, which are in the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from forerun.draft.view import TargetView
from forerun.errors import LoadError
from forerun.models.config import ModelConfig, make_config

Json = dict[str, Any]

LAYER = "layers.0."
PARALLEL = ("pard_token", "ptd_token_id", "mask_token_id", "parallel_drafting")  # P-EAGLE: another way to draft
DEFAULTS: dict[str, Json] = {  # what transformers takes for fields that are not there
    "llama": {"num_attention_heads": 32, "max_position_embeddings": 2048},
    "qwen3": {"num_attention_heads": 32, "max_position_embeddings": 32768, "head_dim": 128},
}


@dataclass(frozen=True, slots=True)
class Said:
    """What a config.json says.

    Attributes:
        layer: the fields of the decoder layer, as transformers calls them.
        boundaries: the target's hidden states that are fused.
        norm_before_residual, norm_output: see `EagleConfig`.
    """

    layer: Json
    boundaries: tuple[int, ...]
    norm_before_residual: bool
    norm_output: bool


def read_dialect(raw: Json, target: TargetView) -> Said:
    """What the config.json of a head for this target says. Raises LoadError."""
    return _speculators(raw, target) if "speculators_model_type" in raw else _plain(raw, target)


def _speculators(raw: Json, target: TargetView) -> Said:
    kind, layer = raw["speculators_model_type"], raw.get("transformer_layer_config")
    if kind != "eagle3":
        raise LoadError(f"it is a {kind!r} speculator: give one of eagle3")
    if not isinstance(layer, dict):
        raise LoadError("config.json has no transformer_layer_config")
    ids = raw.get("eagle_aux_hidden_state_layer_ids")
    boundaries = _default_boundaries(target) if ids is None else _ids(ids)
    # vLLM takes true where it is not said, and the heads published so were measured with that
    return Said(layer, boundaries, read_flag(raw, "norm_before_residual", True), read_flag(raw, "norm_output", False))


def _plain(raw: Json, target: TargetView) -> Said:
    """DeepSpec, SafeAILab, SpecForge, NVIDIA: the layer's fields are at the top."""
    parallel = [name for name in PARALLEL if name in raw]
    if parallel:
        raise LoadError(f"{parallel[0]} in config.json says that it drafts in parallel, which is another kind of head")
    own = raw.get("eagle_config") or {}
    if not isinstance(own, dict):
        raise LoadError("eagle_config in config.json is not an object")
    if not read_flag(raw, "norm_output", True):  # here it says whether there is a last norm, not what is fed back
        raise LoadError("norm_output false means no norm before its lm_head in this layout, which is not supported")
    layers, ids = raw.get("target_layer_ids"), own.get("eagle_aux_hidden_state_layer_ids")
    if layers is not None:
        boundaries = tuple(i + 1 for i in _ids(layers))
    elif ids is not None:
        boundaries = tuple(i + 1 for i in _ids(ids)) if _ids(ids)[0] == 1 else _ids(ids)
    elif "eagle_aux_hidden_state_layer_ids" in raw:
        boundaries = _ids(raw["eagle_aux_hidden_state_layer_ids"])
    else:
        boundaries = _default_boundaries(target)
    return Said(raw, boundaries, read_flag(raw, "norm_before_residual", False), False)


def _default_boundaries(target: TargetView) -> tuple[int, ...]:
    return 2, target.layers // 2, target.layers - 3


def _ids(ids: object) -> tuple[int, ...]:
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise LoadError(f"the hidden states to read are {ids!r} in config.json, not a list of layer numbers")
    return tuple(ids)


def read_flag(raw: Json, name: str, default: bool) -> bool:
    """A flag at the top of config.json or in `eagle_config`. Raises LoadError."""
    own = raw.get("eagle_config")
    value = raw.get(name, own.get(name, default) if isinstance(own, dict) else default)
    if not isinstance(value, bool):
        raise LoadError(f"{name} in config.json is {value!r}, not true or false")
    return value


def read_layer(raw: Json, tensors: Mapping[str, Tensor], vocab: int) -> ModelConfig:
    """The decoder layer, from what `Said.layer` says; sizes that it leaves out are those of the tensors, and `vocab`
    that of the target. Raises LoadError."""
    family = raw.get("model_type") or ("qwen3" if "Qwen3" in str(raw.get("architectures")) else "llama")
    if not isinstance(family, str) or family not in DEFAULTS:
        raise LoadError(f"its layer is of the family {family!r}: only {' and '.join(DEFAULTS)} are supported")
    shapes = {
        "hidden_size": size_of(tensors, "norm.weight", 0),
        "intermediate_size": size_of(tensors, f"{LAYER}mlp.gate_proj.weight", 0),
        "vocab_size": size_of(tensors, "embed_tokens.weight", 0) if "embed_tokens.weight" in tensors else vocab,
    }
    given = {name: value for name, value in raw.items() if value is not None}
    fields = DEFAULTS[family] | shapes | given | {"model_type": family}
    if fields.get("num_hidden_layers", 1) != 1:
        raise LoadError(f"it has {fields['num_hidden_layers']!r} layers: only heads of one layer are supported")
    fields |= {"num_hidden_layers": 1, "layer_types": None, "use_sliding_window": False}
    config = make_config(fields, Path("config.json"))
    if "num_key_value_heads" not in given:
        fields["num_key_value_heads"] = size_of(tensors, f"{LAYER}self_attn.k_proj.weight", 0) // config.head_dim or 1
        config = make_config(fields, Path("config.json"))
    if config.qkv_bias or config.mlp_bias:
        raise LoadError("its layer has biases, which is not supported")
    types, window = raw.get("layer_types"), raw.get("sliding_window")
    if types != ["sliding_attention"]:
        return config
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise LoadError(f"the sliding window in config.json is {window!r}, not a positive whole number")
    return replace(config, windows=(window,))


def size_of(tensors: Mapping[str, Tensor], name: str, axis: int) -> int:
    """How long a tensor is. Raises LoadError where it is not there or is empty."""
    if name not in tensors or axis >= tensors[name].ndim or not tensors[name].numel():
        raise LoadError(f"its checkpoint has no {name}: it is incomplete, or of another kind")
    return tensors[name].shape[axis]
