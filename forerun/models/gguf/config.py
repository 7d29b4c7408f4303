"""Translate GGUF metadata into the keys of config.json, from which the families are read.

Many values are not stored in a file but follow from its architecture or its tensors. To add an
architecture, add a function to `ARCHITECTURES` that returns the keys of its config.json.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from forerun.errors import LoadError, one_line, shown, suggest
from forerun.models.config import MAX_CONTEXT, ModelConfig, make_config
from forerun.models.families import Json
from forerun.models.files import parts_of
from forerun.models.gguf.container import GgufFile, HeaderReader, StringArray, mapped, open_gguf
from forerun.models.gguf.tokenizer import (
    NO_TOKENIZER,
    PREFIX,
    end_tokens,
    find_pretokenizer,
    model_of,
)

OTHER_KINDS = {
    "adapter": "an adapter (LoRA)",
    "mmproj": "an image projector",
    "imatrix": "an importance matrix",
    "clip": "an image projector",
}
# metadata of features that the decoder does not have
UNSUPPORTED = {
    "expert_count": "a mixture of experts",
    "attention.temperature_scale": "scaled attention temperatures",
    "attention.q_lora_rank": "latent attention",
    "ssm.state_size": "a recurrent state",
    "logit_scale": "scaled logits",
    "residual_scale": "scaled residuals",
    "embedding_scale": "scaled embeddings",
    "shortconv.l_cache": "short convolutions",
    "router_logit_softcapping": "a mixture of experts",
}
PERMUTED = ("llama", "mistral3", "smollm3")  # llama.cpp permutes their queries and keys
TOKENS = f"{PREFIX}tokens"
# tokens that only fill up the rows of an embedding, and differ between sizes of one family
PADDING = re.compile(r"\[PAD[0-9]+\]")

# ---------------------------------------------------------------- reading a header quickly


class _SkimReader(HeaderReader):
    """Skips arrays of strings, except that the tokens become one string, their digest."""

    def array(self, key: str) -> Any:
        found = super().array(key)
        if not isinstance(found, StringArray):
            return found
        if key != TOKENS:
            return []
        count = len(found)
        while count and PADDING.fullmatch(found[count - 1]):
            count -= 1
        return [hashlib.sha256(found.head(count)).hexdigest()]


def skim(path: Path) -> GgufFile:
    """Read the headers of a file and its shards without strings in arrays.

    Raises LoadError, also for a missing shard."""
    files = [_skim_one(path.with_name(name)) for name in parts_of(path.name)]
    tensors = {name: entry for file in files for name, entry in file.tensors.items()}
    return replace(files[0], tensors=tensors, parts=tuple(file.path for file in files))


def _skim_one(path: Path) -> GgufFile:
    try:
        with mapped(path) as data:
            return _SkimReader(path, data).read()
    except FileNotFoundError:
        raise LoadError(f"{path} is missing: download it again") from None
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror or error}") from None


def token_digest(metadata: Mapping[str, Any]) -> str:
    """Return a digest of the vocabulary of a skimmed file, "" if it has none."""
    tokens = metadata.get(TOKENS)
    kind = metadata.get(f"{PREFIX}model", "")
    return f"{kind} {tokens[0]}" if isinstance(tokens, list) and tokens else ""


def unsupported_features(gguf: GgufFile) -> list[tuple[str, str]]:
    """Return (key, description) of the model's features that the decoder does not have."""
    keys = {f"{gguf.architecture}.{key}": what for key, what in UNSUPPORTED.items()}
    return [
        (key, what)
        for key, what in keys.items()
        if not np.isin(gguf.metadata.get(key, 0), (0, 1)).all()
    ]


def unsupported_reason(gguf: GgufFile) -> str:
    """Return a short reason why a file cannot be run, "" if its header shows none."""
    metadata, architecture = gguf.metadata, gguf.architecture
    other = _other_kind(gguf)
    if other:
        return f"is {other}, not a model"
    if architecture not in ARCHITECTURES:
        return f"family {architecture or 'without a name'} is not supported"
    if not gguf.tensors:
        return "holds a vocabulary but no weights"
    for key, what in unsupported_features(gguf):
        return f"has {what} ({key}), which is not supported"
    try:
        has_tokenizer = metadata.get(f"{PREFIX}model") not in (None, *NO_TOKENIZER)
        if has_tokenizer and model_of(metadata) == "gpt2":
            find_pretokenizer(metadata.get(f"{PREFIX}pre"))
    except LoadError as error:
        return str(error).partition(";")[0]
    return ""


def _other_kind(gguf: GgufFile) -> str | None:
    """Describe a file that is not a model; None for a model."""
    kind = str(gguf.metadata.get("general.type"))
    return OTHER_KINDS.get(kind) or OTHER_KINDS.get(gguf.architecture)


# ---------------------------------------------------------------- ModelConfig and config.json


def load_gguf_config(path: Path) -> ModelConfig:
    """Read the ModelConfig of a file. Raises LoadError for unsupported models and other files."""
    gguf = open_gguf(path)
    other = _other_kind(gguf)
    if other:
        raise LoadError(f"{path} is {other}, not a model; give the model's own file")
    if gguf.architecture not in ARCHITECTURES:
        hint, name = suggest(gguf.architecture[:64], ARCHITECTURES), shown(gguf.architecture)
        raise LoadError(f"{path}: models of the architecture {name} are not supported; {hint}")
    if not gguf.tensors:
        raise LoadError(f"{path} holds a vocabulary but no weights; give the model's own file")
    for key, what in unsupported_features(gguf):
        raise LoadError(f"{path}: the model has {what} ({key}), which is not supported")
    try:
        raw = _Metadata(gguf).hugging_face()
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise LoadError(f"{path}: its metadata lacks or misstates {one_line(str(error))}") from None
    kinds = {entry.kind for entry in gguf.tensors.values() if len(entry.shape) > 1} - {"F32"}
    if kinds:
        raw["quantization_config"] = {"quant_method": "gguf"}  # keeps the file's own numbers
    raw["dtype"] = "float16" if kinds == {"F16"} else "bfloat16" if kinds else "float32"
    try:
        config = make_config(raw, path, lambda: end_tokens(gguf.metadata))
    except LoadError as error:
        raise LoadError(f"{path}: {one_line(str(error).removeprefix(f'{path}: '))}") from None
    has = gguf.tensors.__contains__
    return replace(
        config,
        norm="rms" if config.norm == "rms_plus_one" else config.norm,  # files hold 1 + w
        layout="gguf",
        qkv_bias=has("blk.0.attn_q.bias") or has("blk.0.attn_qkv.bias"),
        out_bias=has("blk.0.attn_output.bias"),
        mlp_bias=has("blk.0.ffn_down.bias"),
        tied=not has("output.weight"),
    )


def hugging_face_config(config: ModelConfig) -> Json:
    """Return the config.json of a model read from a GGUF file, in keys that transformers knows."""
    raw = {name: value for name, value in config.raw.items() if name != "quantization_config"}
    raw["eos_token_id"] = list(config.end_ids) or raw.get("eos_token_id")
    raw["pad_token_id"] = None
    raw["tie_word_embeddings"] = config.tied
    if config.family != "gpt2":
        raw["attention_bias"] = config.qkv_bias or config.out_bias
        raw["mlp_bias"] = config.mlp_bias
    rope = raw.get("rope_parameters") or {}
    if rope.get("rope_type") == "divided":  # the same as longrope with both of its lists equal
        raw["rope_parameters"] = {name: rope[name] for name in rope if name != "divisors"} | {
            "rope_type": "longrope",
            "long_factor": rope["divisors"],
            "short_factor": rope["divisors"],
            "original_max_position_embeddings": config.context,
            "attention_factor": 1.0,
        }
    return raw


class _Metadata:
    """Metadata of one file, by keys without the architecture's prefix."""

    def __init__(self, gguf: GgufFile) -> None:
        self.gguf, self.prefix = gguf, f"{gguf.architecture}."

    def get(self, key: str, default: Any = None) -> Any:
        return self.gguf.metadata.get(self.prefix + key, default)

    def number(self, key: str, default: float) -> float:
        """Read a float and undo its rounding to 32 bits: 9.999999747378752e-06 was 1e-05."""
        with np.errstate(over="ignore"):
            return float(str(np.float32(self.get(key, default))))

    def integer(self, *keys: str) -> int:
        """Read an integer, or an array that holds the same for each layer, by the first key that
        exists."""
        value = next((self.get(key) for key in keys if self.get(key) is not None), None)
        if value is None:
            raise LookupError(self.prefix + keys[0])
        if isinstance(value, np.ndarray):
            if not len(value) or (value != value[0]).any():
                raise ValueError(f"{self.prefix}{keys[0]}, which differs between layers")
            value = value[0].item()
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{self.prefix}{keys[0]} ({shown(value)})")
        return value

    def vector(self, name: str) -> list[float]:
        """Read a tensor of one dimension, which holds positive numbers."""
        # torch takes seconds to import, and listing models needs headers only
        from forerun.models.gguf.blocks import FLOATS, floats

        entry = self.gguf.tensors[name]
        if entry.kind not in FLOATS or len(entry.shape) != 1:
            raise ValueError(f"the tensor {name}")
        values = floats(entry.kind, entry.read())[0]
        if not ((values > 0) & values.isfinite()).all():
            raise ValueError(f"the tensor {name}, whose numbers are not all positive")
        return [float(v) for v in values]

    def hugging_face(self) -> Json:
        """Return the equivalent config.json. Raises LookupError, TypeError, ValueError."""
        layers = self.integer("block_count") - int(self.get("nextn_predict_layers", 0))
        if not 0 < layers <= len(self.gguf.tensors):
            raise ValueError(
                f"{self.prefix}block_count ({layers} layers of {len(self.gguf.tensors)} tensors)"
            )
        hidden = self.integer("embedding_length")
        heads = self.integer("attention.head_count")
        context = self.integer("context_length")
        if context > MAX_CONTEXT:
            raise ValueError(f"{self.prefix}context_length ({context})")
        head_dim = hidden // heads
        if self.get("attention.key_length"):
            head_dim = self.integer("attention.key_length")
        if self.get("attention.value_length", head_dim) != head_dim:
            raise ValueError(f"{self.prefix}attention.value_length, which differs from the keys'")
        embedding = self.gguf.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise LookupError("the tensor token_embd.weight")
        common = dict(
            vocab_size=embedding.shape[0],
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=self.integer("attention.head_count_kv", "attention.head_count"),
            head_dim=head_dim,
            intermediate_size=self.integer("feed_forward_length"),
            max_position_embeddings=context,
            bos_token_id=self.gguf.metadata.get("tokenizer.ggml.bos_token_id"),
            eos_token_id=self.gguf.metadata.get("tokenizer.ggml.eos_token_id"),
        )
        return common | ARCHITECTURES[self.gguf.architecture](self, common)

    def rope(self, head_dim: int) -> Json:
        """Return rope_parameters; scalings are in keys, in a tensor of divisors (Llama 3), or in
        two tensors (longrope)."""
        rope: Json = {"rope_type": "default", "rope_theta": self.number("rope.freq_base", 10000.0)}
        rotary = int(self.get("rope.dimension_count") or head_dim)
        if rotary != head_dim:  # the next float up, so that the product is not below `rotary`
            rope["partial_rotary_factor"] = math.nextafter(rotary / head_dim, 2)
        kind = self.get("rope.scaling.type", "linear")
        factor = float(self.get("rope.scaling.factor", self.get("rope.scale_linear", 1.0)))
        attention = self.get("rope.scaling.attn_factor")
        original = {
            "original_max_position_embeddings": self.get("rope.scaling.original_context_length")
        }
        if "rope_freqs.weight" in self.gguf.tensors:
            return rope | {"rope_type": "divided", "divisors": self.vector("rope_freqs.weight")}
        if "rope_factors_long.weight" in self.gguf.tensors:
            for length in ("long", "short"):
                rope[f"{length}_factor"] = self.vector(f"rope_factors_{length}.weight")
            if attention is not None:
                rope["attention_factor"] = float(attention)
            return rope | original | {"rope_type": "longrope"}
        if kind == "yarn":
            scale = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
            return (
                rope
                | original
                | {
                    "rope_type": "yarn",
                    "factor": factor,
                    "attention_factor": scale * float(1.0 if attention is None else attention),
                    "beta_fast": float(self.get("rope.scaling.yarn_beta_fast", 32.0)),
                    "beta_slow": float(self.get("rope.scaling.yarn_beta_slow", 1.0)),
                }
            )
        if kind not in ("none", "linear"):
            raise ValueError(f"{self.prefix}rope.scaling.type ({shown(kind)})")
        if kind == "linear" and factor != 1.0:
            return rope | {"rope_type": "linear", "factor": factor}
        return rope

    def layer_types(self, layers: int, period: int) -> list[str]:
        """Return layer_types: the file's pattern, or full attention in the last of each period."""
        pattern = self.get("attention.sliding_window_pattern", period)
        if isinstance(pattern, np.ndarray):
            is_sliding = [bool(p) for p in pattern[:layers]]
        else:
            is_sliding = [i % pattern < pattern - 1 for i in range(layers)]
        return ["sliding_attention" if w else "full_attention" for w in is_sliding]


# ---------------------------------------------------------------- architectures


def _rms_eps(m: _Metadata) -> float:
    return m.number("attention.layer_norm_rms_epsilon", 1e-6)


def _llama(m: _Metadata, c: Json, family: str = "llama") -> Json:
    return dict(model_type=family, rms_norm_eps=_rms_eps(m), rope_parameters=m.rope(c["head_dim"]))


def _smollm3(m: _Metadata, c: Json) -> Json:
    return _llama(m, c, "smollm3") | dict(no_rope_layer_interval=4)


def _phi3(m: _Metadata, c: Json) -> Json:
    fields = _llama(m, c, "phi3")
    rope = fields["rope_parameters"]
    fields |= dict(
        sliding_window=m.get("attention.sliding_window") or None,
        pad_token_id=None,
        partial_rotary_factor=rope.get("partial_rotary_factor", 1.0),
    )
    key = "original_max_position_embeddings"
    return fields | ({key: rope[key]} if rope.get(key) else {})


def _gemma(m: _Metadata, c: Json, layers_of_27b: int) -> Json:
    """Keys that Gemma 2 and 3 share; the 27B model scales attention differently."""
    is_27b = c["num_hidden_layers"] == layers_of_27b
    wide = c["hidden_size"] / c["num_attention_heads"]
    return dict(
        rms_norm_eps=_rms_eps(m),
        query_pre_attn_scalar=wide if is_27b else c["head_dim"],
        sliding_window=m.get("attention.sliding_window", 4096),
    )


def _gemma2(m: _Metadata, c: Json) -> Json:
    return _gemma(m, c, layers_of_27b=46) | dict(
        model_type="gemma2",
        rope_parameters=m.rope(c["head_dim"]),
        attn_logit_softcapping=m.number("attn_logit_softcapping", 50.0),
        final_logit_softcapping=m.number("final_logit_softcapping", 30.0),
        layer_types=m.layer_types(c["num_hidden_layers"], 2),
    )


def _gemma3(m: _Metadata, c: Json) -> Json:
    full = m.rope(c["head_dim"])
    full["rope_theta"] = m.number("rope.global.freq_base", m.number("rope.freq_base", 1e6))
    local = m.number("rope.local.freq_base", m.number("rope.freq_base_swa", 10000.0))
    return _gemma(m, c, layers_of_27b=62) | dict(
        model_type="gemma3_text",
        layer_types=m.layer_types(c["num_hidden_layers"], 6),
        rope_parameters={
            "full_attention": full,
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
    )


def _gpt2(m: _Metadata, c: Json) -> Json:
    return dict(
        model_type="gpt2",
        n_embd=c["hidden_size"],
        n_head=c["num_attention_heads"],
        n_layer=c["num_hidden_layers"],
        n_positions=c["max_position_embeddings"],
        n_inner=c["intermediate_size"],
        layer_norm_epsilon=m.number("attention.layer_norm_epsilon", 1e-5),
    )


ARCHITECTURES: Mapping[str, Callable[[_Metadata, Json], Json]] = {
    "llama": _llama,
    "mistral3": _llama,
    "qwen2": partial(_llama, family="qwen2"),
    "qwen3": partial(_llama, family="qwen3"),
    "smollm3": _smollm3,
    "phi3": _phi3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gpt2": _gpt2,
}
