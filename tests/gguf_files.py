"""Tiny GGUF files of random models, written with the `gguf` package as llama.cpp's converter writes
them.

Nothing here is the reader's: names come from `gguf`'s own table, numbers from its `dequantize`.
Matrices are random blocks of a type; what those stand for is put into the transformers model, so
that both hold the same numbers."""

from __future__ import annotations

import functools
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize
from torch import Tensor

from forerun.models.gguf.blocks import Blocks, Piece
from forerun.models.gguf.container import Entry
from tests import tiny

Kinds = (
    str | tuple[str, ...]
)  # a type or the name of a mix; several are dealt out over the matrices in turn
Rows = np.ndarray[Any, np.dtype[np.uint8]]

SIMPLE = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "MXFP4")
SUPER = ("Q4_K", "Q5_K", "Q6_K", "Q3_K", "Q2_K", "IQ4_XS", "TQ1_0", "TQ2_0")  # blocks of 256
TYPES = (*SIMPLE, *SUPER)
# where half-precision numbers stand in a block: the scale, then the minimum with what it is of the
# scale on average
HALVES: dict[str, tuple[int, ...]] = {
    "Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "TQ1_0": (52,), "TQ2_0": (64,),
}  # fmt: skip
MINIMUM = {"Q4_1": -7.5, "Q5_1": -15.5, "Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}
# types of tensors by a part of their name, as mixes of llama-quantize have them
MIXES: dict[str, dict[str, str]] = {
    "q4_k_m": {
        "attn_v": "Q6_K", "ffn_down": "Q6_K", "ffn_gate": "Q5_K", "token_embd": "Q6_K", "output.weight": "Q6_K",
        "": "Q4_K",
    },
    "q5_k": {"token_embd": "Q5_K", "ffn_gate": "Q6_K", "": "Q5_K"},
    "q4_1": {"token_embd": "Q8_0", "": "Q4_1"},
    "gemma": {"token_embd": "Q8_0", "attn_v": "Q8_0", "ffn_down": "Q8_0", "ffn_up": "Q5_1", "": "Q5_0"},
}  # fmt: skip
ARCHITECTURES = {
    "mistral": "llama",
    "gemma3_text": "gemma3",
}  # where they are not called as transformers calls them
ROTATED = ("llama", "smollm3")  # queries and keys are permuted
NAMES = [
    *tiny.FAMILIES,
    "llama-linear",
    "llama-yarn",
    "llama-llama3",
    "llama-biased",
    "phi3-longrope",
    "gemma3-scaled",
]


@dataclass
class Written:
    """A file, and the transformers model in float64 that holds the same numbers."""

    path: Path
    model: Any


_KEPT = tempfile.TemporaryDirectory(prefix="forerun-gguf-")


def new_path(name: str) -> Path:
    """A path for a file, which goes when the run ends."""
    return Path(tempfile.mkdtemp(dir=_KEPT.name)) / f"{name}.gguf"


# ---------------------------------------------------------------- matrices


def random_rows(kind: str, rows: int, inputs: int, rms: float, seed: int) -> Rows:
    """Rows of random blocks whose values are about `rms`: any integers, scales of both signs, some
    of them zero."""
    rng = np.random.default_rng(seed)
    if kind in ("F32", "F16", "BF16"):
        values = rng.standard_normal((rows, inputs), dtype=np.float32) * np.float32(rms)
        if kind == "BF16":
            return np.ascontiguousarray(values.view(np.uint16)[:, 1::2]).view(np.uint8)
        return values.astype(np.float16 if kind == "F16" else np.float32).view(np.uint8)
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (rows * inputs // values, size), dtype=np.uint8)
    if kind == "MXFP4":
        blocks[:, 0] = np.clip(
            round(128 + math.log2(rms / 6)) + rng.integers(-1, 2, len(blocks)), 0, 254
        )
        return blocks.reshape(rows, -1)
    scale = (
        rng.uniform(0.5, 1.5, len(blocks))
        * rng.choice([1, 1, 1, -1], len(blocks))
        * (rng.random(len(blocks)) > 0.03)
    )
    for factor in (1.0, rms / _rms(kind, _with_scales(kind, blocks, scale))):
        made = _with_scales(kind, blocks, scale * factor)
    return made.reshape(rows, -1)


def extreme_rows(kind: str, rows: int, inputs: int) -> Rows:
    """Random rows among which all bits are set, none is, and scales are the largest and the
    smallest there are."""
    made = random_rows(kind, rows, inputs, 0.1, seed=5)
    if kind in HALVES:
        blocks = made.reshape(-1, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1])
        blocks[1:2], blocks[2:3] = 0xFF, 0
        for number, scale in enumerate((-3.0, 0.0, 65504.0, -65504.0, 6e-8, -0.0), 1):
            for place in HALVES[kind]:
                blocks[number : number + 1, place : place + 2] = np.array([scale], "<f2").view(
                    np.uint8
                )
    return made


def _with_scales(kind: str, blocks: Rows, scale: np.ndarray) -> Rows:
    blocks = blocks.copy()
    for place, factor in zip(HALVES[kind], (1.0, MINIMUM.get(kind, 0.0)), strict=False):
        blocks[:, place : place + 2] = (scale * factor).astype("<f2")[:, None].view(np.uint8)
    return blocks


def _rms(kind: str, rows: Rows) -> float:
    return float(np.sqrt(np.square(values_of(kind, rows), dtype=np.float64).mean()))


def values_of(kind: str, rows: Rows) -> np.ndarray:
    """What rows stand for, float32 [rows, inputs], by the `gguf` package."""
    return np.ascontiguousarray(
        dequantize(np.ascontiguousarray(rows), gguf.GGMLQuantizationType[kind]), np.float32
    )


def blocks_of(parts: list[tuple[str, Rows]]) -> Blocks:
    """Matrices on top of each other, (type, rows) each, in files of their own without a header."""
    pieces = []
    for number, (kind, rows) in enumerate(parts):
        path = new_path("matrix")
        path.write_bytes(rows.tobytes())
        inputs = values_of(kind, rows[:1]).shape[1]
        pieces.append(
            Piece(Entry(f"matrix.{number}", kind, (len(rows), inputs), path, 0, rows.nbytes))
        )
    return Blocks(tuple(pieces))


# ---------------------------------------------------------------- models


def sizes(name: str, kinds: Kinds) -> dict[str, Any]:
    """Changes to a tiny model's configuration: sizes that these types can have, and nothing that
    files do not say."""
    used = kinds if isinstance(kinds, tuple) else tuple(MIXES.get(kinds, {"": kinds}).values())
    wide = any(kind in SUPER for kind in used)
    hidden = 256 if wide else 96
    if name == "gpt2":
        return dict(n_embd=hidden)
    changed: dict[str, Any] = dict(hidden_size=hidden, intermediate_size=256 if wide else 160)
    if name.startswith("gemma") or name == "qwen3":
        changed["head_dim"] = 64 if wide else 8
    if name.startswith("gemma"):
        changed["query_pre_attn_scalar"] = changed["head_dim"]
    if name == "mistral":
        changed["sliding_window"] = None
    if name == "qwen2":
        changed["use_sliding_window"] = False
    if name == "phi3-longrope":  # a factor for each pair of half the head's channels
        pairs = hidden // 16
        factors = {
            k: np.linspace(1, top, pairs, dtype=np.float32).tolist()
            for k, top in (("short", 1.1), ("long", 3))
        }
        own = float(np.float32(math.sqrt(1 + math.log(4) / math.log(64))))
        rope = tiny.VARIANTS[name][2]["rope_parameters"] | {
            f"{k}_factor": v for k, v in factors.items()
        }
        changed["rope_parameters"] = rope | {"attention_factor": own}
    return changed


@functools.cache
def written(name: str, kinds: Kinds, gain: float = 1.0, tokenizer: str = "none") -> Written:
    """The file of a family or variant with matrices of `kinds`; made once a test run."""
    model = tiny.hf_model(name, **sizes(name, kinds))
    path = new_path(name)
    write(path, model, kinds, gain, tokenizer=tokenizer)
    for part in model.modules():
        if hasattr(part, "embed_scale"):  # which transformers rounds to float32
            part.embed_scale = torch.tensor(model.config.hidden_size**0.5, dtype=torch.float64)
    return Written(path, model)


def write(
    path: Path,
    model: Any,
    kinds: Kinds,
    gain: float = 1.0,
    tokenizer: str = "none",
    changes: Mapping[str, Any] = {},
) -> None:
    """Write a model's file with random matrices, which are put into the model, in float64.
    `changes` are made to the metadata; `...` leaves a key out."""
    config = model.double().config
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, architecture)
    said = {f"{architecture}.{key}": value for key, value in metadata(config).items()} | tokens(
        tokenizer
    )
    for key, value in (said | dict(changes)).items():
        set_key(writer, key, value)
    for name, tensor, kind in tensors(model, architecture, kinds, gain):
        writer.add_tensor(name, tensor, raw_dtype=gguf.GGMLQuantizationType[kind])
    finish(writer)


def set_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Integers as u32, floats as f32, lists as arrays; `...` is nothing."""
    add: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
        list: writer.add_array,
    }  # fmt: skip
    if value is not ...:
        add[type(value)](key, value)


def finish(writer: gguf.GGUFWriter) -> None:
    """Write everything to the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def metadata(c: Any) -> dict[str, Any]:
    """The keys of a model without the architecture's name, as its converter writes them."""
    if c.model_type == "gpt2":
        return {
            "block_count": c.n_layer, "context_length": c.n_positions, "embedding_length": c.n_embd,
            "feed_forward_length": 4 * c.n_embd, "attention.head_count": c.n_head,
            "attention.layer_norm_epsilon": c.layer_norm_epsilon,
        }  # fmt: skip
    rope = c.rope_parameters
    rope = rope.get("full_attention", rope)
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    found = {
        "block_count": c.num_hidden_layers, "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size, "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_attention_heads, "attention.head_count_kv": c.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": c.rms_norm_eps, "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
    }  # fmt: skip
    if c.model_type in ("qwen3", "gemma2", "gemma3_text"):
        found |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    return found | _scaling(rope) | _windows(c)


def _scaling(rope: dict[str, Any]) -> dict[str, Any]:
    kind = rope.get("rope_type", "default")
    if kind == "longrope":
        return {
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.attn_factor": rope["attention_factor"],
        }  # fmt: skip
    found = {"rope.scaling.type": kind, "rope.scaling.factor": float(rope.get("factor", 1.0))}
    if kind == "yarn":
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return found if kind in ("linear", "yarn") else {}


def _windows(c: Any) -> dict[str, Any]:
    if c.model_type == "phi3":
        return {"attention.sliding_window": c.sliding_window or 0}
    if c.model_type == "gemma2":
        return {
            "attention.sliding_window": c.sliding_window, "attn_logit_softcapping": c.attn_logit_softcapping,
            "final_logit_softcapping": c.final_logit_softcapping,
        }  # fmt: skip
    if c.model_type == "gemma3_text":
        local = float(c.rope_parameters["sliding_attention"]["rope_theta"])
        return {
            "attention.sliding_window": c.sliding_window, "rope.freq_base_swa": local,
            "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in c.layer_types],
        }  # fmt: skip
    return {}


def tensors(
    model: Any, architecture: str, kinds: Kinds, gain: float
) -> Iterator[tuple[str, np.ndarray, str]]:
    """(name, data, type) of every tensor; matrices are made here and put into the model."""
    config, number = model.config, 0
    names = gguf.get_tensor_name_map(
        gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers
    )
    tied = config.tie_word_embeddings
    for key, value in model.state_dict().items():
        if tied and key == "lm_head.weight":
            continue
        name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert name is not None, key
        turned = architecture == "gpt2" and key.endswith(
            ("c_attn.weight", "c_proj.weight", "c_fc.weight")
        )
        stored = value.T if turned else value
        order = _order(model.config, architecture, key, len(stored))
        if value.ndim == 1 or name == "position_embd.weight":
            plus = 1.0 if architecture.startswith("gemma") and key.endswith("norm.weight") else 0.0
            single = (value[order] + plus).float()
            value[order] = single.double() - plus
            yield name, single.numpy(), "F32"
            continue
        rms = (
            0.6
            * gain
            * math.sqrt(32 / stored.shape[1])
            * (1.2 if "embed" in key or "wte" in key else 1.0)
        )
        kind = _kind(kinds, name, number)
        rows = random_rows(kind, *stored.shape, rms, seed=number)
        stored[order] = torch.from_numpy(values_of(kind, rows)).double()
        number += 1
        yield name, rows, kind
    yield from _rope_tensors(config)


def _kind(kinds: Kinds, name: str, number: int) -> str:
    if isinstance(kinds, tuple):
        return kinds[number % len(kinds)]
    return next(kind for part, kind in MIXES.get(kinds, {"": kinds}).items() if part in name)


def _order(config: Any, architecture: str, key: str, rows: int) -> Tensor:
    """Which row of transformers' tensor each row of the file is: LlamaModel.permute of
    convert_hf_to_gguf."""
    order = torch.arange(rows)
    if architecture not in ROTATED or not (".q_proj." in key or ".k_proj." in key):
        return order
    heads = config.num_attention_heads if ".q_proj." in key else config.num_key_value_heads
    return order.reshape(heads, 2, rows // heads // 2).swapaxes(1, 2).reshape(rows)


def _rope_tensors(config: Any) -> Iterator[tuple[str, np.ndarray, str]]:
    """Frequencies: the divisors of Llama 3 (LlamaModel.generate_extra_tensors), the factors of
    longrope."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        for kind in ("long", "short"):
            yield f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], np.float32), "F32"
    if rope.get("rope_type") != "llama3":
        return
    dim, factor = config.hidden_size // config.num_attention_heads, rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    old, found = rope["original_max_position_embeddings"], []
    for i in range(0, dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / dim)
        if wavelength < old / high:
            found.append(1.0)
        elif wavelength > old / low:
            found.append(factor)
        else:
            smooth = (old / wavelength - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    yield "rope_freqs.weight", np.array(found, np.float32), "F32"


def tensors_of(path: Path) -> dict[str, tuple[int, int, int]]:
    """Where each tensor of a file begins, its bytes, and those of a block of it, as the `gguf`
    package reads it."""
    return {
        t.name: (int(t.data_offset), int(t.n_bytes), gguf.GGML_QUANT_SIZES[t.tensor_type][1])
        for t in gguf.GGUFReader(path).tensors
    }  # fmt: skip


# ---------------------------------------------------------------- tokenizers

_SPECIAL = ["<unk>", "<s>", "</s>"]
_WORDS = ["th", "the", "an", "and", "in", "ing", "er", "on"]


def tokens(kind: str) -> dict[str, Any]:
    """The keys of a tokenizer with as many tokens as tiny models have: "none", "gpt2" or
    "llama"."""
    key = "tokenizer.ggml."
    if kind == "none":
        return {f"{key}model": "none"}
    space = "\u0120" if kind == "gpt2" else "\u2581"
    letters = [*"abcdefghijklmnopqrstuvwxyz", space, *".,!?-0123456789"]
    texts = [*_SPECIAL, *letters, *_WORDS]
    texts += [f"<extra_{i}>" for i in range(tiny.VOCAB - len(texts))]
    control = [
        3 if i < 3 else 4 if text.startswith("<extra") else 1 for i, text in enumerate(texts)
    ]
    common = {
        f"{key}model": kind, f"{key}tokens": texts, f"{key}token_type": [2, *control[1:]],
        f"{key}bos_token_id": 1, f"{key}eos_token_id": 2, f"{key}unknown_token_id": 0, f"{key}add_bos_token": True,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }  # fmt: skip
    if kind == "gpt2":
        merges = ["t h", "th e", "a n", "an d", "i n", "in g", "e r", "o n"]
        return common | {f"{key}pre": "gpt-2", f"{key}merges": merges}
    return common | {f"{key}scores": [-float(i) for i in range(len(texts))]}
