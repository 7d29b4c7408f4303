"""The ModelConfig of a GGUF file, and what its header alone says about it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from forerun.errors import LoadError, one_line, shown, suggest
from forerun.models.config import ModelConfig, make_config
from forerun.models.families import Json
from forerun.models.files import parts_of
from forerun.models.gguf.architectures import ARCHITECTURES, hugging_face
from forerun.models.gguf.container import GgufFile, HeaderReader, StringArray, mapped, open_gguf
from forerun.models.gguf.metadata import Metadata
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
    "eagle3": "an EAGLE-3 head, which --draft takes",
    "dflash": "a block drafter, which --draft takes",
}
# metadata of features that the decoder does not have, or only for some architectures
UNSUPPORTED = {
    "expert_count": "a mixture of experts",
    "attention.temperature_scale": "scaled attention temperatures",
    "attention.q_lora_rank": "latent attention",
    "attention.kv_lora_rank": "latent attention",
    "attention.clamp_kqv": "clipped queries, keys and values",
    "ssm.state_size": "a recurrent state",
    "logit_scale": "scaled logits",
    "residual_scale": "scaled residuals",
    "embedding_scale": "scaled embeddings",
    "shortconv.l_cache": "short convolutions",
    "router_logit_softcapping": "capped router logits",
}
RECURRENT = ("ssm.state_size", "shortconv.l_cache")  # those of architectures that may be recurrent
# names of the flag of biases in config.json, where it is not attention_bias
BIAS_FLAGS = {"starcoder2": "use_bias", "ernie4_5": "use_bias", "stablelm": "use_qkv_bias"}
TOKENS = f"{PREFIX}tokens"
# key of the block of a module from `forerun train`, one of those behind the model's layers
TRAINED_BLOCK = "forerun.nextn_block"
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
    """Return (key or tensor, description) of the model's features that the decoder does not
    have."""
    architecture = ARCHITECTURES[gguf.architecture]
    own = architecture.features + (RECURRENT if architecture.recurrent else ())
    keys = {
        f"{gguf.architecture}.{key}": what for key, what in UNSUPPORTED.items() if key not in own
    }
    found = [
        (key, what)
        for key, what in keys.items()
        if not np.isin(gguf.metadata.get(key, 0), (0, 1)).all()
    ]
    if architecture.recurrent:
        return found
    # a Granite without recurrent layers has their metadata all the same
    states = [name for name in gguf.tensors if ".ssm_" in name]
    return found + [(name, "a recurrent state") for name in states[:1]]


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
        raw = hugging_face(Metadata(gguf))
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise LoadError(f"{path}: its metadata lacks or misstates {one_line(str(error))}") from None
    own = f"blk.{gguf.metadata.get(TRAINED_BLOCK)}."  # a module says nothing of the model's types
    kinds = {
        entry.kind
        for name, entry in gguf.tensors.items()
        if len(entry.shape) > 1 and not name.startswith(own)
    } - {"F32"}
    if kinds:
        raw["quantization_config"] = {"quant_method": "gguf"}  # keeps the file's own numbers
    raw["dtype"] = "float16" if kinds == {"F16"} else "bfloat16" if kinds else "float32"
    try:
        config = make_config(raw, path, lambda: end_tokens(gguf.metadata))
    except LoadError as error:
        raise LoadError(f"{path}: {one_line(str(error).removeprefix(f'{path}: '))}") from None
    has = gguf.tensors.__contains__
    recurrent = config.recurrent
    if recurrent is not None:
        recurrent = replace(recurrent, tiled=ARCHITECTURES[gguf.architecture].tiled)
    return replace(
        config,
        recurrent=recurrent,
        norm=config.norm.removesuffix("_plus_one"),  # files hold 1 + w
        layout="gguf",
        qkv_bias=has("blk.0.attn_q.bias") or has("blk.0.attn_qkv.bias"),
        out_bias=has("blk.0.attn_output.bias"),
        mlp_bias=has("blk.0.ffn_down.bias"),
        tied=not has("output.weight"),
    )


def hugging_face_config(config: ModelConfig) -> Json:
    """Return the config.json of a model read from a GGUF file, in keys that transformers knows."""
    own = ("quantization_config", "xielu")
    raw = {name: value for name, value in config.raw.items() if name not in own}
    raw["eos_token_id"] = list(config.end_ids) or raw.get("eos_token_id")
    raw["pad_token_id"] = None
    raw["tie_word_embeddings"] = config.tied
    if config.family != "gpt2":
        name = BIAS_FLAGS.get(config.family, "attention_bias")
        raw[name] = config.qkv_bias or config.out_bias
        raw["mlp_bias"] = config.mlp_bias
    if config.family == "seed_oss":
        raw["attention_out_bias"] = config.out_bias
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
