"""`ModelConfig` of a family that only transformers has: sizes from transformers' own configuration.

Such a model runs on transformers' module (`runtime.transformers_backend`), so the fields that
describe how a layer computes have no meaning here; `layout` is `TRANSFORMERS`. Code beside a
checkpoint is never run: only classes that transformers itself has are used, and fields of
config.json that name code are dropped. A family is refused where its layers keep more than keys
and values, since a draft tree needs a cache whose rows are independent of each other.

This module imports transformers, which takes seconds: import it only for such a family.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers import logging as transformers_logging
from transformers.cache_utils import LinearAttentionCacheLayerMixin
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from forerun.errors import LoadError, one_line, shown, suggest
from forerun.models.config import MAX_LAYERS, TRANSFORMERS, ModelConfig, checked, end_ids_of
from forerun.models.families import Json, is_integer
from forerun.models.files import read_object
from forerun.models.mixed_families import FAMILIES

# fields of config.json that name code or implementations to load
CODE = re.compile(r"auto_map|.*implementation|.*kernel_config|use_kernels|transformers_weights")
RECURRENT = "its layers keep a recurrent state, which cannot follow the branches of a draft"
GENERATIVE = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")  # ends of class names
# numbers that lists of modules are made of, and the most that they may be
COUNTS = {
    re.compile(r"n_layers?|num_(.*_)?layers"): MAX_LAYERS,
    re.compile(r"n_.*experts|num_(.*_)?experts|moe_num_(.*_)?experts"): 1 << 15,
}
# layers of transformers' caches that hold one row of keys and values for each token, or nothing
PLAIN_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer")


def has_family(model_type: object) -> bool:
    """Return True if transformers has a causal language model of this `model_type`, and no encoder
    that it can be made from."""
    if not isinstance(model_type, str):
        return False
    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return model_type in causal and model_type not in MODEL_FOR_MASKED_LM_MAPPING_NAMES


def transformers_config(directory: Path) -> ModelConfig:
    """Read the ModelConfig of a model directory that runs on transformers' module.

    Raises:
        LoadError: transformers has no such family, or the model cannot run with draft trees.
    """
    file = directory / "config.json"
    raw = read_object(file)
    complete, _ = own_model(raw, file)
    text = complete.get_text_config(decoder=True)
    dtype = str(getattr(text, "dtype", None) or "float32").removeprefix("torch.")
    described = {"dtype": dtype} | raw
    if raw.get("eos_token_id") is None:
        described["eos_token_id"] = getattr(text, "eos_token_id", None)
    try:
        fields = _fields(text)
        config = ModelConfig(
            family=raw["model_type"],
            raw=described,
            layout=TRANSFORMERS,
            end_ids=end_ids_of(directory, described),
            **fields,
        )
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        why = one_line(str(error))
        raise LoadError(
            f"{file}: the {raw['model_type']} configuration lacks or misstates {why}"
        ) from None
    return checked(config, file)


def own_model(raw: Json, file: Path) -> tuple[PretrainedConfig, type[PreTrainedModel]]:
    """Return transformers' configuration of a parsed config.json and the class of its module.

    Fields that name code are dropped. Raises LoadError, which names `file`, if transformers has no
    such family, or if it cannot run with draft trees as far as its class tells."""
    family = raw.get("model_type")
    if not isinstance(family, str) or not has_family(family):
        name = family[:64] if isinstance(family, str) else ""
        hint = suggest(name, {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *FAMILIES})
        hint = hint if hint.startswith("did") else suggest(name, FAMILIES)
        raise LoadError(f"{file}: model_type {shown(family)} is not supported; {hint}")
    try:
        _check_counts(raw, file)
        with quiet():
            config: Any = CONFIG_MAPPING[family].from_dict(_without_code(raw))
            model = _model_class(config)
            reason = _class_reason(config, model) or _cache_reason(config)
    except LoadError:
        raise
    except Exception as error:  # transformers' classes raise errors of many kinds
        why = one_line(str(error) or type(error).__name__)
        raise LoadError(f"{file}: transformers cannot read this configuration: {why}") from None
    if reason:
        raise LoadError(f"{file}: the family {family} is not supported: {reason}")
    return config, model


@contextmanager
def quiet() -> Iterator[None]:
    """Silence what transformers logs besides its errors, and its progress bars."""
    log: Any = transformers_logging
    verbosity = log.get_verbosity()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)


def _model_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """Return the class of the language model, or of the multimodal model that contains it."""
    mapping: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in mapping:
        mapping = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    found: type[PreTrainedModel] = mapping[type(config)]
    return found


def _class_reason(config: PretrainedConfig, model: type[PreTrainedModel]) -> str:
    """Return why a class cannot run with draft trees; "" if nothing in it forbids that."""
    kinds = getattr(config, "architectures", None) or [model.__name__]
    if getattr(config, "is_encoder_decoder", False):
        return "it has an encoder"
    if not any(str(kind).endswith(GENERATIVE) for kind in kinds):
        return f"its architectures {shown(kinds)} are no language model"
    if not model._can_set_attn_implementation():
        return "its attention in transformers cannot be replaced"
    return RECURRENT if getattr(model, "_is_stateful", False) else ""


def _cache_reason(config: PretrainedConfig) -> str:
    """Return why a cache of one row for each token does not suffice; "" if it does."""
    layers = DynamicCache(config=config.get_text_config(decoder=True)).layers
    if any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers):
        return RECURRENT
    kinds = [type(layer).__name__ for layer in layers]
    other = next((kind for kind in kinds if kind not in PLAIN_LAYERS), "")
    return f"its cache holds more than keys and values ({other})" if other else ""


def _fields(text: PretrainedConfig) -> Json:
    """Return the fields of `ModelConfig`; sizes of what is cached are estimates until it is loaded.

    With latent attention a token has one latent vector and one rotated key in each layer."""
    layers, heads = text.num_hidden_layers, text.num_attention_heads
    latent = getattr(text, "kv_lora_rank", None)
    if is_integer(latent):
        kv_heads, head_dim = 1, -(-(latent + text.qk_rope_head_dim) // 2)
    else:
        kv_heads = _largest(text, "num_key_value_heads", heads)
        head_dim = _largest(text, "head_dim", text.hidden_size // heads)
    return dict(
        vocab=text.vocab_size,
        hidden=text.hidden_size,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=_largest(text, "intermediate_size", text.hidden_size),
        context=_context(text),
        norm_eps=1e-6,
        attention_scale=1.0,
        ropes=(),
        rope_of=(None,) * layers,
        windows=(None,) * layers,
        logit_softcap=getattr(text, "final_logit_softcapping", None),
        tied=bool(text.tie_word_embeddings),
    )


def _largest(text: PretrainedConfig, name: str, default: int) -> int:
    """Return the largest value that a size has in any layer."""
    layers = getattr(text, "per_layer_config", None) or [text]
    sizes = [getattr(layer, name, None) for layer in layers]
    return max((size for size in sizes if is_integer(size) and size), default=default)


def _context(text: PretrainedConfig) -> int:
    """Return how many tokens a request may have.

    Where the rotary embedding depends on the longest text of a forward pass, requests of one pass
    would change each other's outputs: longrope is served with its short factors only, and dynamic
    scaling never starts."""
    longest: int = text.max_position_embeddings
    ropes: Any = getattr(text, "rope_parameters", None) or {}
    nested = [value for value in ropes.values() if isinstance(value, dict)]
    for rope in nested or [ropes]:
        if rope.get("rope_type") == "longrope":
            original = getattr(text, "original_max_position_embeddings", None)
            original = original or rope.get("original_max_position_embeddings") or longest
            longest = min(longest, original)
    return longest


def _check_counts(raw: Json, file: Path) -> None:
    """Raise LoadError for a number of layers or experts that no model has, before lists are made of
    it."""
    for name, value in raw.items():
        if isinstance(value, dict):
            _check_counts(value, file)
        for pattern, most in COUNTS.items():
            if pattern.fullmatch(name) and is_integer(value) and not 0 <= value <= most:
                raise LoadError(
                    f"{file}: {name} is {shown(value)}, not a whole number from 0 to {most}"
                )


def _without_code(value: Any) -> Any:
    """Return a value of a configuration without the fields that name code, in nested values too.

    transformers writes infinite numbers as {"__float__": "Infinity"}."""
    if isinstance(value, list):
        return [_without_code(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__float__"}:
        return float(value["__float__"])
    return {name: _without_code(inner) for name, inner in value.items() if not CODE.fullmatch(name)}
