"""What a GGUF file says of a model, in the words of Hugging Face's config.json, which the families
are read from.

Much is not written in files: it follows from the architecture or from which tensors there are.
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
from forerun.models.config import MOST_CONTEXT, Json, ModelConfig, make_config
from forerun.models.gguf.blocks import FLOATS, floats
from forerun.models.gguf.container import Gguf, Reader, Strings, mapped, open_gguf
from forerun.models.gguf.tokenizer import LACKING, PREFIX, end_tokens, find_pretokenizer, model_of
from forerun.models.names import parts_of

READ = (
    "llama",
    "mistral3",
    "qwen2",
    "qwen3",
    "smollm3",
    "phi3",
    "gemma2",
    "gemma3",
    "gpt2",
)  # architectures
OTHER_KINDS = {
    "adapter": "an adapter (LoRA)", "mmproj": "a projector of images", "imatrix": "an importance matrix",
    "clip": "a projector of images",
}  # fmt: skip
# what a file may hold that the models read here do not have
REFUSED = {
    "expert_count": "a mixture of experts", "attention.temperature_scale": "scaled attention temperatures",
    "attention.q_lora_rank": "latent attention", "ssm.state_size": "a recurrent state",
    "logit_scale": "scaled logits", "residual_scale": "scaled residuals", "embedding_scale": "scaled embeddings",
    "shortconv.l_cache": "short convolutions", "router_logit_softcapping": "a mixture of experts",
}  # fmt: skip
TOKENS = f"{PREFIX}tokens"
# tokens that only fill up the rows of an embedding, which differ between sizes of one family
PADDING = re.compile(r"\[PAD[0-9]+\]")


class _Skimmer(Reader):
    """A reader whose arrays of strings are empty, but for the tokens: those are one string, their
    digest."""

    def array(self, key: str) -> Any:
        found = super().array(key)
        if not isinstance(found, Strings):
            return found
        if key != TOKENS:
            return []
        count = len(found)
        while count and PADDING.fullmatch(found[count - 1]):
            count -= 1
        return [hashlib.sha256(found.head(count)).hexdigest()]


def skim(path: Path) -> Gguf:
    """What a file and its further parts hold, without strings in arrays. Raises LoadError, also for
    a missing part."""
    files = [_read(path.with_name(name)) for name in parts_of(path.name)]
    tensors = {name: entry for file in files for name, entry in file.tensors.items()}
    return replace(files[0], tensors=tensors, parts=tuple(file.path for file in files))


def _read(path: Path) -> Gguf:
    try:
        with mapped(path) as data:
            return _Skimmer(path, data).file()
    except FileNotFoundError:
        raise LoadError(f"{path} is not here: download it again") from None
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror or error}") from None


def token_digest(metadata: Mapping[str, Any]) -> str:
    """A name for the vocabulary of a skimmed file: the same for equal tokens of an equal kind;
    empty without one."""
    tokens = metadata.get(TOKENS)
    kind = metadata.get(f"{PREFIX}model", "")
    return f"{kind} {tokens[0]}" if isinstance(tokens, list) and tokens else ""


def refused(gguf: Gguf) -> list[tuple[str, str]]:
    """(key, what it means) of all that a file says its model has and forerun does not."""
    keys = {f"{gguf.architecture}.{key}": what for key, what in REFUSED.items()}
    return [
        (key, what)
        for key, what in keys.items()
        if not np.isin(gguf.metadata.get(key, 0), (0, 1)).all()
    ]


def why_not(gguf: Gguf) -> str:
    """Why a file is no model that runs, in a few words; empty if nothing in its header speaks
    against it."""
    metadata, architecture = gguf.metadata, gguf.architecture
    other = OTHER_KINDS.get(str(metadata.get("general.type"))) or OTHER_KINDS.get(architecture)
    if other:
        return f"is {other}, not a model"
    if architecture not in READ:
        return f"family {architecture or 'without a name'} is not supported"
    if not gguf.tensors:
        return "holds a vocabulary but no weights"
    for key, what in refused(gguf):
        return f"has {what} ({key}), which is not supported"
    try:
        if metadata.get(f"{PREFIX}model") not in (None, *LACKING) and model_of(metadata) == "gpt2":
            find_pretokenizer(metadata.get(f"{PREFIX}pre"))
    except LoadError as error:
        return str(error).partition(";")[0]
    return ""


ROTATED = (
    "llama",
    "mistral3",
    "smollm3",
)  # architectures whose queries and keys rotate neighbouring channels


def load_gguf_config(path: Path) -> ModelConfig:
    """The ModelConfig of a file. Raises LoadError for what is no model, or one that is not
    supported."""
    gguf = open_gguf(path)
    other = OTHER_KINDS.get(str(gguf.metadata.get("general.type"))) or OTHER_KINDS.get(
        gguf.architecture
    )
    if other:
        raise LoadError(f"{path} is {other}, not a model; give the model's own file")
    if gguf.architecture not in ARCHITECTURES:
        hint, name = suggest(gguf.architecture[:64], ARCHITECTURES), shown(gguf.architecture)
        raise LoadError(f"{path}: models of the architecture {name} are not supported; {hint}")
    if not gguf.tensors:
        raise LoadError(f"{path} holds a vocabulary but no weights; give the model's own file")
    for key, what in refused(gguf):
        raise LoadError(f"{path}: the model has {what} ({key}), which is not supported")
    try:
        raw = _Metadata(gguf).hugging_face()
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise LoadError(f"{path}: its metadata lacks or misstates {one_line(str(error))}") from None
    kinds = {entry.kind for entry in gguf.tensors.values() if len(entry.shape) > 1} - {"F32"}
    if kinds:
        raw["quantization_config"] = {"quant_method": "gguf"}  # its own numbers are to be kept
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
    """The config.json of a model that was read from a file, in words that transformers knows
    too."""
    raw = {name: value for name, value in config.raw.items() if name != "quantization_config"}
    ends = {"eos_token_id": list(config.end_ids) or raw.get("eos_token_id"), "pad_token_id": None}
    biased = {"attention_bias": config.qkv_bias or config.out_bias, "mlp_bias": config.mlp_bias}
    rope = raw.get("rope_parameters") or {}
    if (
        rope.get("rope_type") == "divided"
    ):  # longrope with both of its lists the same, wherever it changes them
        divisors = {f"{length}_factor": rope["divisors"] for length in ("long", "short")}
        common = {name: value for name, value in rope.items() if name != "divisors"} | {
            "rope_type": "longrope"
        }
        context = {"original_max_position_embeddings": config.context, "attention_factor": 1.0}
        raw["rope_parameters"] = common | divisors | context
    return (
        raw
        | ends
        | ({} if config.family == "gpt2" else biased)
        | {"tie_word_embeddings": config.tied}
    )


class _Metadata:
    """The keys of one file, without the name of its architecture."""

    def __init__(self, gguf: Gguf) -> None:
        self.gguf, self.prefix = gguf, f"{gguf.architecture}."

    def get(self, key: str, default: Any = None) -> Any:
        return self.gguf.metadata.get(self.prefix + key, default)

    def number(self, key: str, default: float) -> float:
        """A float as it was before it was rounded to 32 bits: 9.999999747378752e-06 was 1e-05."""
        with np.errstate(over="ignore"):
            return float(str(np.float32(self.get(key, default))))

    def same(self, *keys: str) -> int:
        """A whole number, or an array that says the same of each layer, by the first of these keys
        that is there."""
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
        """A tensor of one dimension."""
        entry = self.gguf.tensors[name]
        if entry.kind not in FLOATS or len(entry.shape) != 1:
            raise ValueError(f"the tensor {name}")
        values = floats(entry.kind, entry.read())[0]
        if not ((values > 0) & values.isfinite()).all():
            raise ValueError(f"the tensor {name}, which is to hold positive numbers")
        return [float(v) for v in values]

    def hugging_face(self) -> Json:
        layers = self.same("block_count") - int(self.get("nextn_predict_layers", 0))
        if not 0 < layers <= len(self.gguf.tensors):
            raise ValueError(
                f"{self.prefix}block_count ({layers} layers of {len(self.gguf.tensors)} tensors)"
            )
        hidden, heads, context = map(
            self.same, ("embedding_length", "attention.head_count", "context_length")
        )
        if context > MOST_CONTEXT:
            raise ValueError(f"{self.prefix}context_length ({context})")
        head_dim = (
            self.same("attention.key_length")
            if self.get("attention.key_length")
            else hidden // heads
        )
        if self.get("attention.value_length", head_dim) != head_dim:
            raise ValueError(f"{self.prefix}attention.value_length, which differs from the keys'")
        embedding = self.gguf.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise LookupError("the tensor token_embd.weight")
        common = dict(
            vocab_size=embedding.shape[0], hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
            num_key_value_heads=self.same("attention.head_count_kv", "attention.head_count"), head_dim=head_dim,
            intermediate_size=self.same("feed_forward_length"), max_position_embeddings=context,
            bos_token_id=self.gguf.metadata.get("tokenizer.ggml.bos_token_id"),
            eos_token_id=self.gguf.metadata.get("tokenizer.ggml.eos_token_id"),
        )  # fmt: skip
        return common | ARCHITECTURES[self.gguf.architecture](self, common)

    def rope(self, head_dim: int) -> Json:
        """rope_parameters: scalings are in keys, in a tensor of divisors (Llama 3), or in two
        tensors (longrope)."""
        rope: Json = {"rope_type": "default", "rope_theta": self.number("rope.freq_base", 10000.0)}
        turns = int(self.get("rope.dimension_count") or head_dim)
        if turns != head_dim:
            rope["partial_rotary_factor"] = math.nextafter(
                turns / head_dim, 2
            )  # times head_dim it is not below turns
        kind = self.get("rope.scaling.type", "linear")
        factor = float(self.get("rope.scaling.factor", self.get("rope.scale_linear", 1.0)))
        original = self.get("rope.scaling.original_context_length")
        tensors = self.gguf.tensors
        if "rope_freqs.weight" in tensors:
            return rope | {"rope_type": "divided", "divisors": self.vector("rope_freqs.weight")}
        if "rope_factors_long.weight" in tensors:
            factors = {
                f"{n}_factor": self.vector(f"rope_factors_{n}.weight") for n in ("long", "short")
            }
            own = self.get("rope.scaling.attn_factor")
            attention = {} if own is None else {"attention_factor": float(own)}
            return (
                rope
                | factors
                | attention
                | {"rope_type": "longrope", "original_max_position_embeddings": original}
            )
        if kind == "yarn":
            scaled = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
            return rope | {
                "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original,
                "attention_factor": scaled * float(self.get("rope.scaling.attn_factor", 1.0)),
                "beta_fast": float(self.get("rope.scaling.yarn_beta_fast", 32.0)),
                "beta_slow": float(self.get("rope.scaling.yarn_beta_slow", 1.0)),
            }  # fmt: skip
        if kind not in ("none", "linear"):
            raise ValueError(f"{self.prefix}rope.scaling.type ({shown(kind)})")
        return rope | (
            {"rope_type": "linear", "factor": factor} if kind == "linear" and factor != 1.0 else {}
        )

    def windowed(self, layers: int, period: int) -> list[str]:
        """layer_types: the last of each `period` sees all, or what the file says of each layer."""
        pattern = self.get("attention.sliding_window_pattern", period)
        if isinstance(pattern, np.ndarray):
            seen = [bool(p) for p in pattern[:layers]]
        else:
            seen = [i % pattern < pattern - 1 for i in range(layers)]
        return ["sliding_attention" if w else "full_attention" for w in seen]


def _rms(m: _Metadata) -> float:
    return m.number("attention.layer_norm_rms_epsilon", 1e-6)


def _llama(m: _Metadata, c: Json, family: str = "llama") -> Json:
    return dict(model_type=family, rms_norm_eps=_rms(m), rope_parameters=m.rope(c["head_dim"]))


def _smollm3(m: _Metadata, c: Json) -> Json:
    return _llama(m, c, "smollm3") | dict(no_rope_layer_interval=4)


def _phi3(m: _Metadata, c: Json) -> Json:
    rope = m.rope(c["head_dim"])
    window = m.get("attention.sliding_window") or None
    original = rope.get("original_max_position_embeddings")
    return dict(
        model_type="phi3", rms_norm_eps=_rms(m), rope_parameters=rope, sliding_window=window, pad_token_id=None,
        partial_rotary_factor=rope.get("partial_rotary_factor", 1.0),
        **({"original_max_position_embeddings": original} if original else {}),
    )  # fmt: skip


def _gemma2(m: _Metadata, c: Json) -> Json:
    wide = c["num_hidden_layers"] == 46  # 27B
    return dict(
        model_type="gemma2", rms_norm_eps=_rms(m), rope_parameters=m.rope(c["head_dim"]),
        query_pre_attn_scalar=c["hidden_size"] / c["num_attention_heads"] if wide else c["head_dim"],
        attn_logit_softcapping=m.number("attn_logit_softcapping", 50.0),
        final_logit_softcapping=m.number("final_logit_softcapping", 30.0),
        sliding_window=m.get("attention.sliding_window", 4096), layer_types=m.windowed(c["num_hidden_layers"], 2),
    )  # fmt: skip


def _gemma3(m: _Metadata, c: Json) -> Json:
    wide = c["num_hidden_layers"] == 62  # 27B
    full = m.rope(c["head_dim"])
    full["rope_theta"] = m.number("rope.global.freq_base", m.number("rope.freq_base", 1e6))
    local = m.number("rope.local.freq_base", m.number("rope.freq_base_swa", 10000.0))
    return dict(
        model_type="gemma3_text", rms_norm_eps=_rms(m),
        query_pre_attn_scalar=c["hidden_size"] / c["num_attention_heads"] if wide else c["head_dim"],
        sliding_window=m.get("attention.sliding_window", 4096), layer_types=m.windowed(c["num_hidden_layers"], 6),
        rope_parameters={
            "full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
    )  # fmt: skip


def _gpt2(m: _Metadata, c: Json) -> Json:
    return dict(
        model_type="gpt2", n_embd=c["hidden_size"], n_head=c["num_attention_heads"], n_layer=c["num_hidden_layers"],
        n_positions=c["max_position_embeddings"], n_inner=c["intermediate_size"],
        layer_norm_epsilon=m.number("attention.layer_norm_epsilon", 1e-5),
    )  # fmt: skip


ARCHITECTURES: Mapping[str, Callable[[_Metadata, Json], Json]] = {
    "llama": _llama, "mistral3": _llama, "qwen2": partial(_llama, family="qwen2"),
    "qwen3": partial(_llama, family="qwen3"), "smollm3": _smollm3, "phi3": _phi3, "gemma2": _gemma2,
    "gemma3": _gemma3, "gpt2": _gpt2,
}  # fmt: skip
