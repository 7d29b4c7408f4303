"""Tiny GGUF files of random models, written with the `gguf` package as llama.cpp's converter does.

This does not use the reader of forerun: names come from the table of `gguf`, numbers from its
`dequantize`. Matrices are random blocks of a type; their dequantized values are written into the
transformers model, so that both hold the same numbers."""

from __future__ import annotations

import functools
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize
from torch import Tensor

from forerun.models.gguf.blocks import FORMS, Blocks, Piece
from forerun.models.gguf.container import Entry
from tests import families, tiny

# a type or the name of a mix; several types are given to the matrices in turn
Kinds = str | tuple[str, ...]
Rows = np.ndarray[Any, np.dtype[np.uint8]]

SIMPLE = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "MXFP4")
SUPER = ("Q4_K", "Q5_K", "Q6_K", "Q3_K", "Q2_K", "IQ4_XS", "TQ1_0", "TQ2_0")  # blocks of 256
TYPES = (*SIMPLE, *SUPER)
NATIVE_TYPES = tuple(FORMS)
# offsets of half-precision numbers in a block: the scale, then the minimum; MINIMUM is the ratio of
# the two in random blocks
HALVES: dict[str, tuple[int, ...]] = {
    "Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "TQ1_0": (52,), "TQ2_0": (64,),
}  # fmt: skip
MINIMUM = {"Q4_1": -7.5, "Q5_1": -15.5, "Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}
# tensor types by a part of the name, as in mixes of llama-quantize
MIXES: dict[str, dict[str, str]] = {
    "q4_k_m": {
        "attn_v": "Q6_K", "ffn_down": "Q6_K", "ffn_gate": "Q5_K", "token_embd": "Q6_K", "output.weight": "Q6_K",
        "": "Q4_K",
    },
    "q5_k": {"token_embd": "Q5_K", "ffn_gate": "Q6_K", "": "Q5_K"},
    "q4_1": {"token_embd": "Q8_0", "": "Q4_1"},
    "gemma": {"token_embd": "Q8_0", "attn_v": "Q8_0", "ffn_down": "Q8_0", "ffn_up": "Q5_1", "": "Q5_0"},
    "mxfp4_moe": {"_exps": "MXFP4", "": "Q8_0"},
    "experts": {"ffn_gate_exps": "Q4_0", "ffn_up_exps": "MXFP4", "ffn_down_exps": "Q5_1", "shexp": "Q4_1", "": "Q8_0"},
    "k_experts": {"ffn_gate_exps": "Q4_K", "ffn_up_exps": "Q6_K", "ffn_down_exps": "Q5_K", "": "Q4_K"},
}  # fmt: skip
ARCHITECTURES = {
    "mistral": "llama",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "mixtral": "llama",
    "ministral3": "mistral3",
    "olmo3": "olmo2",
    "cohere": "command-r",
    "phi": "phi2",
    "hunyuan_v1_dense": "hunyuan-dense",
    "hunyuan_v1_moe": "hunyuan-moe",
    "ernie4_5_moe": "ernie4_5-moe",
    "exaone_moe": "exaone-moe",
    "glm4_moe": "glm4moe",
    "gpt_oss": "gpt-oss",
    "minimax_m2": "minimax-m2",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "falcon_h1": "falcon-h1",
    "lfm2_moe": "lfm2moe",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_next": "qwen3next",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe_lite": "deepseek2",
    "gemma3n_text": "gemma3n",
    "llama4_text": "llama4",
}  # names of architectures that differ from the `model_type` of transformers
# architectures whose queries and keys are permuted
ROTATED = (
    "llama", "smollm3", "mistral3", "arcee", "granite", "granitemoe", "granitehybrid",
)  # fmt: skip
# `model_type` of latent attention
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4")
# GGUF files cannot state that norms of Falcon-H1 precede gates, and llama.cpp applies them after;
# llama.cpp does not read MiniMax-Text-01
NOT_READ = ("falcon_h1-norm", "minimax_text")
FURTHER_NAMES = [name for name in families.MODELS if name not in NOT_READ]
RECURRENT = [name for name in FURTHER_NAMES if name.startswith(families.RECURRENT)]
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


_DIRECTORY = tempfile.TemporaryDirectory(prefix="forerun-gguf-")


def new_path(name: str) -> Path:
    """Return a path for a file that is deleted when the test run ends."""
    return Path(tempfile.mkdtemp(dir=_DIRECTORY.name)) / f"{name}.gguf"


# ---------------------------------------------------------------- matrices


def random_rows(kind: str, rows: int, inputs: int, rms: float, seed: int) -> Rows:
    """Return rows of random blocks with a root mean square of about `rms`: all integers, scales of
    both signs and zero."""
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
    """Return random rows, some with all bits set, no bit set, and the largest and smallest
    scales."""
    made = random_rows(kind, rows, inputs, 0.1, seed=5)
    if kind == "MXFP4":  # its largest byte is not a number
        blocks = made.reshape(-1, 17)
        blocks[1:2, 1:], blocks[2:3, 1:] = 0xFF, 0
        for number, exponent in enumerate((0, 1, 2, 127, 180), 3):
            blocks[number : number + 1, 0] = exponent
    if kind in HALVES:
        blocks = made.reshape(-1, gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1])
        blocks[1:2], blocks[2:3] = 0xFF, 0
        for number, scale in enumerate((-3.0, 0.0, 65504.0, -65504.0, 6e-8, -0.0), 1):
            for offset in HALVES[kind]:
                blocks[number : number + 1, offset : offset + 2] = np.array([scale], "<f2").view(
                    np.uint8
                )
    return made


def _with_scales(kind: str, blocks: Rows, scale: np.ndarray) -> Rows:
    blocks = blocks.copy()
    for offset, factor in zip(HALVES[kind], (1.0, MINIMUM.get(kind, 0.0)), strict=False):
        blocks[:, offset : offset + 2] = (scale * factor).astype("<f2")[:, None].view(np.uint8)
    return blocks


def _rms(kind: str, rows: Rows) -> float:
    return float(np.sqrt(np.square(values_of(kind, rows), dtype=np.float64).mean()))


def values_of(kind: str, rows: Rows) -> np.ndarray:
    """Return the dequantized rows, float32 [rows, inputs], computed by the `gguf` package."""
    return np.ascontiguousarray(
        dequantize(np.ascontiguousarray(rows), gguf.GGMLQuantizationType[kind]), np.float32
    )


def blocks_of(parts: list[tuple[str, Rows]]) -> Blocks:
    """Return stacked matrices, given as (type, rows); each is in a file without a header."""
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
    """Return changes to a tiny model's configuration: sizes that these types allow, and only
    features that GGUF files can state."""
    used = kinds if isinstance(kinds, tuple) else tuple(MIXES.get(kinds, {"": kinds}).values())
    wide = any(kind in SUPER for kind in used)
    hidden = 256 if wide else 96
    if name == "gpt2":
        return dict(n_embd=hidden)
    if name in families.MODELS:
        return _family_sizes(name, wide)
    changed: dict[str, Any] = dict(hidden_size=hidden, intermediate_size=256 if wide else 160)
    if name.startswith("gemma") or name == "qwen3":
        changed["head_dim"] = 64 if wide else 8
    if name.startswith("gemma"):
        changed["query_pre_attn_scalar"] = changed["head_dim"]
    if name == "mistral":
        changed["sliding_window"] = None
    if name == "qwen2":
        changed["use_sliding_window"] = False
    if name == "phi3-longrope":  # a factor for each pair of channels that rotate
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


def _family_sizes(name: str, wide: bool) -> dict[str, Any]:
    hidden, inner, expert = (256, 256, 256) if wide else (32, 64, 32)
    fields = families.MODELS[name][1]
    sizes = dict(
        head_dim=64 if wide else fields.get("head_dim"), intermediate_size_mlp=inner if wide else 96, laurel_rank=expert,
        moe_intermediate_size=expert, shared_intermediate_size=expert, shared_expert_intermediate_size=2 * expert,
        moe_shared_expert_intermediate_size=2 * expert,
    )  # fmt: skip
    changed: dict[str, Any] = dict(hidden_size=hidden, intermediate_size=inner)
    changed |= {key: size for key, size in sizes.items() if key in fields}
    if name.startswith("gemma3n"):  # the converter pads the rows of tokens without embeddings
        inners = [1, 1, 1, 1] if wide else [2, 1, 2, 3]
        changed |= dict(
            intermediate_size=[n * expert for n in inners], hidden_size_per_layer_input=expert,
            vocab_size_per_layer_input=families.VOCAB, altup_correct_scale=True,
        )  # fmt: skip
    if name in LATENT:  # rows must be whole blocks
        changed |= dict(qk_nope_head_dim=64) | (
            {} if name == "glm4_moe_lite" else dict(q_lora_rank=64)
        )
    own: dict[str, dict[str, Any]] = {
        "phi": dict(intermediate_size=4 * hidden),  # the converter assumes this
        "starcoder2": dict(sliding_window=4096),  # likewise
        "qwen2_moe": dict(decoder_sparse_step=1),
        "qwen3_moe": dict(mlp_only_layers=[]),
        "exaone_moe": dict(routed_scaling_factor=1.5),
        "glm4_moe": dict(routed_scaling_factor=1.5),
        "llama4-two": dict(num_local_experts=128),  # means that queries are not normalised
        "gemma4-small": dict(hidden_size_per_layer_input=32),
        "ernie4_5_moe": dict(moe_num_shared_experts=2, moe_layer_start_index=2),
        "nemotron_h": dict(n_group=1),
        "nemotron_h-latent": dict(n_group=1),
    }
    return changed | own.get(name, {})


@functools.cache
def written(name: str, kinds: Kinds, gain: float = 1.0, tokenizer: str = "none") -> Written:
    """Write the file of a family or variant with matrices of `kinds`, once per test run."""
    model = tiny.hf_model(name, **sizes(name, kinds))
    path = new_path(name)
    write(path, model, kinds, gain, tokenizer=tokenizer)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # others cannot multiply in float64
    for part in model.modules():
        if hasattr(part, "embed_scale"):  # transformers rounds it to float32
            square = round(float(part.embed_scale) ** 2)
            part.embed_scale = torch.tensor(square**0.5, dtype=torch.float64)
    return Written(path, model)


@dataclass
class WrittenModule(Written):
    """A file with a multi-token module after the layers of the model.

    Attributes:
        module: transformers' MtpLayer in float64 with the numbers of the file.
    """

    module: Any


@functools.cache
def written_with_module(name: str, kinds: Kinds) -> WrittenModule:
    """Write a file whose last block is a multi-token module, as llama.cpp's converter does: the
    last layer of a model with one more layer, and further tensors."""
    from transformers.modeling_layers import MtpLayer

    changed, layers = sizes(name, kinds), 4
    if "layer_types" in families.MODELS[name][1]:  # the module has attention
        changed["layer_types"] = [*families.MODELS[name][1]["layer_types"], "full_attention"]
    if name == "exaone_moe":  # the whole module, without experts
        types = [["sliding_attention"] * 3, ["full_attention"] * 2]
        kinds_of_mlps = [["dense"], ["sparse"] * 3, ["dense"]]
        changed |= {"layer_types": [*chain(*types)], "mlp_layer_types": [*chain(*kinds_of_mlps)]}
    model = tiny.hf_model(name, **changed, num_hidden_layers=layers + 1)
    own, path = model.config, new_path(f"{name}-module")
    block, norm_of = model.model.layers[layers], type(model.model.norm)
    module = MtpLayer(own, type(block), norm_of, layers).double().eval()
    module.mtp_block = block
    less, at = 1.0 if name.startswith("qwen") else 0.0, f"blk.{layers}.nextn."
    parts = {"enorm": module.enorm, "hnorm": module.hnorm, "shared_head_norm": module.post_norm}
    torch.manual_seed(7)
    more: list[tuple[str, np.ndarray, str]] = []
    with torch.no_grad():
        for part, norm in parts.items():
            weight = 1 + 0.1 * torch.randn(own.hidden_size)
            more.append((f"{at}{part}.weight", weight.numpy(), "F32"))
            norm.weight.copy_(weight.double() - less)
        kind = _kind(kinds, "nextn.eh_proj", 0)
        rows = random_rows(kind, own.hidden_size, 2 * own.hidden_size, 0.3, seed=3)
        more.append((f"{at}eh_proj.weight", rows, kind))
        module.eh_proj.weight.copy_(torch.from_numpy(values_of(kind, rows)).double())
    architecture = architecture_of(own)
    keys: dict[str, Any] = {f"{architecture}.nextn_predict_layers": 1}
    if name == "exaone_moe":
        keys[f"{architecture}.leading_dense_block_count"] = 1
        keys[f"{architecture}.attention.sliding_window_pattern"] = [True, True, True, False]
    write(path, model, kinds, changes=keys, more=more)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # others cannot multiply in float64
    model.model.layers, own.num_hidden_layers = model.model.layers[:layers], layers
    return WrittenModule(path, model, module)


def write(
    path: Path,
    model: Any,
    kinds: Kinds,
    gain: float = 1.0,
    tokenizer: str = "none",
    changes: Mapping[str, Any] = {},
    architecture: str | None = None,
    merged: bool = False,
    more: Iterable[tuple[str, np.ndarray, str]] = (),
) -> None:
    """Write a file with random matrices, and their values into the model, in float64.

    `changes` replace metadata (`...` removes a key), `merged` writes gates and ups of experts as
    one tensor, and `more` are further tensors in the format of `tensors`."""
    config = model.double().config
    architecture = architecture or architecture_of(config)
    writer = gguf.GGUFWriter(path, architecture)
    keys = {f"{architecture}.{key}": value for key, value in metadata(config).items()}
    keys |= tokens(tokenizer) | xielu(model)
    for key, value in (keys | dict(changes)).items():
        set_key(writer, key, value)
    for name, tensor, kind in chain(tensors(model, architecture, kinds, gain, merged), more):
        writer.add_tensor(name, tensor, raw_dtype=gguf.GGMLQuantizationType[kind])
    finish(writer)


def xielu(model: Any) -> dict[str, list[float]]:
    """Return the parameters of the activations of Apertus, by layer."""
    found: dict[str, list[float]] = {}
    for key, value in model.state_dict().items():
        if ".act_fn." in key:
            found.setdefault(f"xielu.{key.rpartition('.')[2]}", []).append(float(value))
    return found


def architecture_of(c: Any) -> str:
    """Return the converter's name of the architecture of a model."""
    if c.model_type == "granitemoehybrid":
        if "linear_attention" in c.layer_types:
            return "granitehybrid"
        return "granitemoe" if c.num_local_experts else "granite"
    if c.model_type == "nemotron_h":
        return "nemotron_h_moe" if "moe" in c.layer_types else "nemotron_h"
    return ARCHITECTURES.get(c.model_type, c.model_type)


def set_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add integers as u32, floats as f32 and lists as arrays; `...` adds nothing."""
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
    """Return the metadata that the converter writes, keys without the architecture's name."""
    c = _flat_config(c)
    if c.model_type == "gpt2":
        return {
            "block_count": c.n_layer, "context_length": c.n_positions, "embedding_length": c.n_embd,
            "feed_forward_length": 4 * c.n_embd, "attention.head_count": c.n_head,
            "attention.layer_norm_epsilon": c.layer_norm_epsilon,
        }  # fmt: skip
    rope = getattr(c, "rope_parameters", None) or {"rope_theta": 10000.0}
    rope = rope.get("full_attention", rope)
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    if c.model_type == "gemma4_text":
        head_dim = c.global_head_dim
        rope = rope | {"partial_rotary_factor": 1.0}  # a tensor states which channels rotate
    found = {
        "block_count": c.num_hidden_layers, "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size, "feed_forward_length": c.intermediate_size,
        "attention.head_count": c.num_attention_heads, "attention.head_count_kv": c.num_key_value_heads,
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
    }  # fmt: skip
    for key in ("rms_norm_eps", "norm_eps"):
        if hasattr(c, key):
            found["attention.layer_norm_rms_epsilon"] = getattr(c, key)
    for key in ("layer_norm_eps", "norm_epsilon", "norm_eps", "layer_norm_epsilon"):
        if hasattr(c, key):
            found["attention.layer_norm_epsilon"] = getattr(c, key)
    own_heads = ("qwen3", "gemma2", "gemma3_text")
    is_granite = c.model_type.startswith("granite")
    if c.model_type in own_heads or (c.model_type in FURTHER and not is_granite):
        found |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    found |= _scaling(rope)
    if c.model_type == "mistral4":  # the converter does not write it
        del found["attention.temperature_scale"]
    has_experts = c.model_type == "nemotron_h" and "moe" in c.layer_types
    for key, field in KEYS.get(f"{c.model_type}_moe" if has_experts else c.model_type, {}).items():
        value = field(c) if callable(field) else getattr(c, field)
        if value is not None:
            found[key] = value
    return found | (_granite(c) if is_granite else {})


def _flat_config(c: Any) -> Any:
    """Return a configuration of Gemma 4 with the fields of config.json, which transformers stores
    by layer."""
    if c.model_type != "gemma4_text":
        return c
    fields = c.to_dict()
    own = next(iter(fields["per_layer_config"].values()))
    fields["global_head_dim"] = own["head_dim"]
    fields["num_global_key_value_heads"] = own.get("num_key_value_heads")
    return SimpleNamespace(**fields)


FURTHER = {kind for kind, _ in families.MODELS.values()}


def _granite(c: Any) -> dict[str, Any]:
    """Return the keys of Granite 3 and 4, with keys of recurrent layers even if it has none."""
    found = {
        "attention.scale": c.attention_multiplier, "embedding_scale": c.embedding_multiplier,
        "residual_scale": c.residual_multiplier, "logit_scale": c.logits_scaling,
    }  # fmt: skip
    if c.model_type == "granite":
        return found
    found |= {"expert_count": c.num_local_experts, "expert_used_count": c.num_experts_per_tok}
    if c.model_type == "granitemoe":
        return found
    found |= {"rope.scaling.finetuned": True, "ssm.state_size": 8, "ssm.conv_kernel": 4}
    found["attention.head_count_kv"] = [c.num_key_value_heads] * c.num_hidden_layers
    if "linear_attention" in c.layer_types:
        found |= {key: getattr(c, field) for key, field in _MAMBA.items() if isinstance(field, str)}
        found["ssm.inner_size"] = c.mamba_n_heads * c.mamba_d_head
        found |= {"rope.scaling.finetuned": False, "attention.head_count_kv": _kv_heads_by_layer(c)}
    if not c.num_local_experts:
        return found | {"expert_used_count": 0, "feed_forward_length": c.shared_intermediate_size}
    return found | {"expert_shared_feed_forward_length": c.shared_intermediate_size}


def _kv_heads_by_layer(c: Any) -> list[int]:
    """Return the number of key-value heads of each layer, 0 for recurrent layers."""
    return [c.num_key_value_heads if kind == "full_attention" else 0 for kind in c.layer_types]


def _is_local_layer(c: Any) -> list[bool]:
    return [kind == "sliding_attention" for kind in c.layer_types]


def _mlp_sizes_of_gemma4(c: Any) -> list[int] | int:
    """Return the MLP sizes, which are double in layers that share the keys of others."""
    if not c.use_double_wide_mlp:
        return c.intermediate_size
    first = c.num_hidden_layers - c.num_kv_shared_layers
    return [c.intermediate_size * (1 + (i >= first)) for i in range(c.num_hidden_layers)]


def _kv_heads_of_gemma4(c: Any) -> list[int] | int:
    if c.num_global_key_value_heads is None:
        return c.num_key_value_heads
    kv_heads = (c.num_global_key_value_heads, c.num_key_value_heads)
    return [kv_heads[is_local] for is_local in _is_local_layer(c)]


def _mlp_sizes_of_nemotron(c: Any) -> list[int]:
    has_experts = "moe" in c.layer_types
    inner = c.moe_intermediate_size if has_experts else c.intermediate_size
    return [inner if kind == ("moe" if has_experts else "mlp") else 0 for kind in c.layer_types]


def _dense_layers(c: Any) -> int:
    kinds = getattr(c, "mlp_layer_types", None) or []
    return kinds.count("dense") or c.first_k_dense_replace


def _sparsity_cutoffs(c: Any) -> list[float]:
    shares = torch.tensor(c.activation_sparsity_pattern, dtype=torch.float32)
    return torch.distributions.Normal(0, 1).icdf(shares).tolist()


# key -> the field of the configuration, or a function of the configuration; None values are not
# written
Fields = Mapping[str, str | Callable[[Any], Any]]
_WINDOW: Fields = {"attention.sliding_window": "sliding_window"}
_PATTERN: Fields = {**_WINDOW, "attention.sliding_window_pattern": _is_local_layer}
_TWO_ROPES: Fields = {
    **_PATTERN, "rope.freq_base_swa": lambda c: float(c.rope_parameters["sliding_attention"]["rope_theta"]),
}  # fmt: skip
_CAP: Fields = {"final_logit_softcapping": "final_logit_softcapping"}
_COHERE: Fields = {"logit_scale": "logit_scale", "rope.scaling.type": lambda c: "none"}
_SIGMOID: Fields = {"expert_gating_func": lambda c: 2}
_LOCAL: Fields = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
_PLAIN_LOCAL: Fields = {**_LOCAL, "expert_feed_forward_length": "intermediate_size"}
_COUNTED: Fields = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_QWEN: Fields = {**_COUNTED, "expert_feed_forward_length": "moe_intermediate_size"}
_QWEN_SHARED: Fields = {
    **_QWEN,
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_NORMED: Fields = {
    "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor",
}
_GROUPS: Fields = {"expert_group_count": "n_group", "expert_group_used_count": "topk_group"}
_ROUTED: Fields = {
    "expert_count": "n_routed_experts", "expert_used_count": "num_experts_per_tok", "expert_shared_count": "n_shared_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
}  # fmt: skip
_LATENT: Fields = {
    **_ROUTED, **_NORMED, **_GROUPS, "leading_dense_block_count": _dense_layers,
    "expert_weights_norm": lambda c: c.norm_topk_prob or None,
    "attention.head_count_kv": lambda c: 1,  # llama.cpp computes with one
    "attention.kv_lora_rank": "kv_lora_rank", "attention.q_lora_rank": lambda c: c.q_lora_rank or None,
    "attention.key_length": lambda c: c.kv_lora_rank + c.qk_rope_head_dim, "attention.value_length": "kv_lora_rank",
    "attention.key_length_mla": lambda c: c.qk_nope_head_dim + c.qk_rope_head_dim,
    "attention.value_length_mla": "v_head_dim", "rope.dimension_count": "qk_rope_head_dim",
    "rope.scaling.yarn_log_multiplier": lambda c: 0.1 * c.rope_parameters.get("mscale_all_dim", 0) or None,
}  # fmt: skip
_DELTA: Fields = {
    "ssm.conv_kernel": "linear_conv_kernel_dim", "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads", "ssm.time_step_rank": "linear_num_value_heads",
    "ssm.inner_size": lambda c: c.linear_num_value_heads * c.linear_value_head_dim,
    "full_attention_interval": lambda c: 2, "rope.dimension_sections": lambda c: [1, 1, 0, 0],
}  # fmt: skip
_MAMBA: Fields = {
    "ssm.conv_kernel": "mamba_d_conv", "ssm.state_size": "mamba_d_state", "ssm.group_count": "mamba_n_groups",
    "ssm.time_step_rank": "mamba_n_heads", "ssm.inner_size": lambda c: c.mamba_n_heads * c.mamba_d_head,
}  # fmt: skip
_NEMOTRON: Fields = {
    "ssm.conv_kernel": "conv_kernel", "ssm.state_size": "ssm_state_size", "ssm.group_count": "n_groups",
    "ssm.time_step_rank": "mamba_num_heads", "ssm.inner_size": lambda c: c.mamba_num_heads * c.mamba_head_dim,
    "attention.head_count_kv": _kv_heads_by_layer, "feed_forward_length": _mlp_sizes_of_nemotron,
}  # fmt: skip
_CONV: Fields = {"shortconv.l_cache": "conv_L_cache", "attention.head_count_kv": _kv_heads_by_layer}
KEYS: dict[str, Fields] = {
    "phi3": {"attention.sliding_window": lambda c: c.sliding_window or 0},
    "gemma2": {**_WINDOW, **_CAP, "attn_logit_softcapping": "attn_logit_softcapping"},
    "gemma3_text": _TWO_ROPES,
    "gemma3n_text": {
        **_TWO_ROPES, **_CAP, "attention.shared_kv_layers": "num_kv_shared_layers", "altup.num_inputs": "altup_num_inputs",
        "altup.active_idx": "altup_active_idx", "embedding_length_per_layer_input": "hidden_size_per_layer_input",
        "activation_sparsity_scale": _sparsity_cutoffs,
    },
    "gemma4_text": {
        **_TWO_ROPES, **_CAP, "attention.shared_kv_layers": "num_kv_shared_layers",
        "embedding_length_per_layer_input": lambda c: c.hidden_size_per_layer_input or 0,
        "attention.key_length_swa": "head_dim", "attention.value_length_swa": "head_dim",
        "rope.dimension_count_swa": "head_dim", "attention.head_count_kv": _kv_heads_of_gemma4,
        "feed_forward_length": _mlp_sizes_of_gemma4, "expert_count": lambda c: c.num_experts if c.enable_moe_block else None,
        "expert_used_count": lambda c: c.top_k_experts if c.enable_moe_block else None,
        "expert_feed_forward_length": lambda c: c.moe_intermediate_size if c.enable_moe_block else None,
    },
    "cohere": _COHERE,
    "cohere2": {**_COHERE, **_WINDOW},
    "exaone4": _PATTERN,
    "olmo3": _PATTERN,
    "mixtral": _LOCAL,
    "olmoe": _COUNTED,
    "gpt_oss": {**_WINDOW, **_PLAIN_LOCAL},
    "minimax_m2": {**_PLAIN_LOCAL, **_SIGMOID},
    "qwen2_moe": _QWEN_SHARED,
    "qwen3_moe": _QWEN,
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {**_DELTA, **_QWEN_SHARED},
    "qwen3_next": {**_DELTA, **_QWEN_SHARED},
    "lfm2": _CONV,
    "lfm2_moe": {**_CONV, **_QWEN, **_SIGMOID, "leading_dense_block_count": "num_dense_layers"},
    "falcon_h1": _MAMBA,
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": {
        **_NEMOTRON, **_ROUTED, **_NORMED, "expert_group_count": "n_group", "moe_latent_size": "moe_latent_size",
        "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
    },
    "glm4_moe": {
        **_ROUTED, **_NORMED, **_GROUPS, **_SIGMOID, "leading_dense_block_count": "first_k_dense_replace",
    },
    "exaone_moe": {
        **_PATTERN, **_QWEN, **_NORMED, **_GROUPS, **_SIGMOID, "expert_shared_count": "num_shared_experts",
        "expert_shared_feed_forward_length": lambda c: c.num_shared_experts * c.moe_intermediate_size,
        "leading_dense_block_count": lambda c: c.mlp_layer_types.count("dense"),
        "rope.scaling.type": lambda c: "none", "nextn_predict_layers": lambda c: 0,
    },
    "deepseek_v2": _LATENT,
    "deepseek_v3": {**_LATENT, **_SIGMOID},  # others do not write the scoring function of experts
    "glm4_moe_lite": _LATENT,
    "mistral4": _LATENT,
    "llama4_text": {
        **_PLAIN_LOCAL, "feed_forward_length": "intermediate_size_mlp",
        "interleave_moe_layer_step": "interleave_moe_layer_step", "attention.chunk_size": "attention_chunk_size",
        "attention.temperature_scale": lambda c: c.attn_scale if c.attn_temperature_tuning else 0.0,
        "attention.temperature_length": "floor_scale",
    },
    "ernie4_5_moe": {
        "expert_count": "moe_num_experts", "expert_used_count": "moe_k", "expert_shared_count": "moe_num_shared_experts",
        "interleave_moe_layer_step": "moe_layer_interval", "leading_dense_block_count": "moe_layer_start_index",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": lambda c: c.intermediate_size // c.num_key_value_heads,
    },
    "hunyuan_v1_moe": {
        "expert_count": "num_experts", "expert_used_count": "moe_topk", "expert_shared_count": lambda c: 1,
        "expert_feed_forward_length": "intermediate_size", "expert_shared_feed_forward_length": "intermediate_size",
    },
}  # fmt: skip


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
        for key in ("beta_fast", "beta_slow"):
            if key in rope:
                found[f"rope.scaling.yarn_{key}"] = rope[key]
    if "llama_4_scaling_beta" in rope:
        found["rope.scaling.yarn_log_multiplier"] = rope["mscale_all_dim"]
        found["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
    return found if kind in ("linear", "yarn") else {}


def tensors(
    model: Any, architecture: str, kinds: Kinds, gain: float, merged: bool = False
) -> Iterator[tuple[str, np.ndarray, str]]:
    """Yield (name, data, type) of every tensor; random matrices are also written into the model."""
    config, number = model.config, 0
    found = [key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture]
    assert found, (
        f"llama.cpp has no {architecture!r}: put this model into NOT_READ or ARCHITECTURES"
    )
    (known,) = found
    names = gguf.get_tensor_name_map(known, config.num_hidden_layers)
    for key, value in published(model, merged):
        is_named = key.startswith(("blk.", "altup_"))
        name = key if is_named else names.get_name(key, try_suffixes=(".weight", ".bias"))
        assert name is not None, key
        change = _change(model.config, architecture, key, value)
        is_vector = value.ndim == 1 or name == "position_embd.weight" or ".bias" in name
        if is_vector or ".conv1d." in key or ".conv.conv." in key:
            single = change.made_of(value).float()
            change.put(single.double(), value)
            yield name, single.numpy(), "F32"
            continue
        rms = (
            0.6
            * gain
            * math.sqrt(32 / value.shape[-1])
            * (1.2 if "embed" in key or "wte" in key else 1.0)
        )
        is_float = "ffn_gate_inp" in name or "_coef" in name
        kind = "F32" if is_float else _kind(kinds, name, number)
        *outer, inputs = (len(change.rows), *value.shape[1:])
        rows = random_rows(kind, math.prod(outer), inputs, rms, seed=number)
        change.put(torch.from_numpy(values_of(kind, rows)).double(), value)
        number += 1
        yield name, rows if value.ndim == 2 else rows.reshape(*outer, -1), kind
    yield from _rope_tensors(config)
    yield from _unused_keys(config)


def _unused_keys(c: Any) -> Iterator[tuple[str, np.ndarray, str]]:
    """Yield the unused key and value tensors that published checkpoints of Gemma 3n have in layers
    that share those of others."""
    if c.model_type != "gemma3n_text":
        return
    shape = (c.num_key_value_heads * c.head_dim, c.hidden_size)
    for i in range(c.num_hidden_layers - c.num_kv_shared_layers, c.num_hidden_layers):
        for part in ("k", "v"):
            yield f"blk.{i}.attn_{part}.weight", np.ones(shape, np.float32), "F32"
        yield f"blk.{i}.attn_k_norm.weight", np.ones(c.head_dim, np.float32), "F32"


@dataclass(frozen=True)
class Change:
    """How the converter changes a tensor.

    `rows` and `columns` are the indices in transformers' tensor of those in the file. Then numbers
    become rates of decay if `decays`, are multiplied by `factor`, and `plus` is added."""

    rows: Tensor
    columns: Tensor | None = None
    decays: bool = False
    factor: Tensor | float = 1.0
    plus: float = 0.0
    shape: tuple[int, ...] = (-1,)  # of tensors that are not matrices

    def made_of(self, value: Tensor) -> Tensor:
        """Return the numbers of the file from those of the model."""
        found = value[self.rows]
        found = -found.exp() if self.decays else found
        return (found * self.factor + self.plus).reshape(self.shape)

    def put(self, stored: Tensor, value: Tensor) -> None:
        """Write the model's numbers that correspond to those of the file."""
        shape = (len(self.rows), *value.shape[1:])
        found = (stored.reshape(shape) - self.plus) / self.factor
        found = (-found).log() if self.decays else found
        if self.columns is not None:
            found[:, self.columns] = found.clone()
        value[self.rows] = found


def published(model: Any, merged: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield views of the model's tensors as [out, in], under names that `gguf` translates or GGUF
    names; writing to a view changes the model."""
    config = model.config
    if config.model_type == "gemma3n_text":
        yield from _altup_matrices(model.model)
    for key, value in model.state_dict().items():
        if ".act_fn." in key or key.startswith(
            "model.altup_"
        ):  # they are in the metadata or in `_altup_matrices`
            continue
        if config.tie_word_embeddings and key == "lm_head.weight":
            continue
        if ".experts." in key:
            yield from _published_experts(key, value, config, merged)
        else:
            yield from _published_others(key, value, config)


def _altup_matrices(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the matrices of further residual streams, which become views of one tensor."""
    parts = {
        "altup_proj": model.altup_projections,
        "altup_unembd_proj": model.altup_unembed_projections,
    }
    for name, matrices in parts.items():
        stacked = torch.stack([matrix.weight.data for matrix in matrices])
        for n, matrix in enumerate(matrices):
            matrix.weight.data = stacked[n]
        yield f"{name}.weight", stacked


def _published_experts(
    key: str, value: Tensor, config: Any, merged: bool
) -> Iterator[tuple[str, Tensor]]:
    layer, is_gpt_oss = f"blk.{key.split('.')[2]}", config.model_type == "gpt_oss"
    is_turned = config.model_type in ("gpt_oss", "llama4_text")
    value = value.mT if is_turned and value.ndim == 3 else value
    suffix = "bias" if key.endswith("_bias") else "weight"
    rows = value.shape[1] // 2
    if ".down_proj" in key:
        yield f"{layer}.ffn_down_exps.{suffix}", value
    elif ".up_proj" in key:
        yield f"{layer}.ffn_up_exps.{suffix}", value
    elif is_gpt_oss:
        yield f"{layer}.ffn_gate_exps.{suffix}", value[:, 0::2]
        yield f"{layer}.ffn_up_exps.{suffix}", value[:, 1::2]
    elif merged or config.model_type in ("gemma4_text", "mistral4"):
        yield f"{layer}.ffn_gate_up_exps.{suffix}", value
    else:
        yield f"{layer}.ffn_gate_exps.{suffix}", value[:, :rows]
        yield f"{layer}.ffn_up_exps.{suffix}", value[:, rows:]


def _published_others(key: str, value: Tensor, config: Any) -> Iterator[tuple[str, Tensor]]:
    layer = f"blk.{key.split('.')[2]}" if ".layers." in key else ""
    if ".shared_mlp." in key and config.model_type == "granitemoehybrid":
        shared = "_shexp" if config.num_local_experts else ""
        rows = len(value) // 2
        if "output_linear" in key:
            yield f"{layer}.ffn_down{shared}.weight", value
        else:
            yield f"{layer}.ffn_gate{shared}.weight", value[:rows]
            yield f"{layer}.ffn_up{shared}.weight", value[rows:]
    elif key.endswith("router.scale"):
        yield f"{layer}.ffn_gate_inp.scale", value
    elif key.endswith("per_expert_scale"):
        yield f"{layer}.ffn_down_exps.scale", value
    elif "e_score_correction_bias" in key:
        yield f"{layer}.exp_probs_b.bias", value.flatten()
    elif key.endswith("kv_b_proj.weight"):
        heads = value.view(config.num_attention_heads, -1, config.kv_lora_rank)
        yield f"{layer}.attn_k_b.weight", heads[:, : config.qk_nope_head_dim].mT
        yield f"{layer}.attn_v_b.weight", heads[:, config.qk_nope_head_dim :]
    elif "shared_expert_gate" in key:
        yield key, value[0]
    elif key.endswith("in_proj_qkvz.weight"):
        # q, k, v and z of each key head; the order of their rows is that of `_change`
        yield f"{layer}.attn_qkv.weight", value
        yield f"{layer}.attn_gate.weight", value
    else:
        key = key.replace("moe.router", "moe.router.layer").replace(".dt_bias", ".dt_proj.bias")
        if config.model_type == "nemotron_h":
            key = key.replace("model.", "backbone.", 1)
        key = f"{key}.bias" if key.endswith(".expert_bias") else key
        is_bare = key.endswith((".sinks", ".layer_scalar", ".correct_output_scale"))
        key = f"{key}.weight" if is_bare else key
        is_turned = config.model_type == "gpt2" and key.endswith(
            ("c_attn.weight", "c_proj.weight", "c_fc.weight")
        )
        yield key, value.T if is_turned else value


def _kind(kinds: Kinds, name: str, number: int) -> str:
    if isinstance(kinds, tuple):
        return kinds[number % len(kinds)]
    return next(kind for part, kind in MIXES.get(kinds, {"": kinds}).items() if part in name)


def _change(c: Any, architecture: str, key: str, value: Tensor) -> Change:
    """Return the converter's change of a tensor: LlamaModel.permute, norms, decays, convolutions,
    value heads and multipliers."""
    rows, factor = torch.arange(len(value)), 1.0
    if architecture in ROTATED and (".q_proj." in key or ".k_proj." in key):
        heads = c.num_attention_heads if ".q_proj." in key else c.num_key_value_heads
        rows = rows.reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)
    is_qwen = architecture.startswith(("qwen35", "qwen3next"))
    plus = is_qwen or architecture in ("gemma2", "gemma3", "nemotron")
    one = 1.0 if plus and key.endswith("norm.weight") and ".linear_attn." not in key else 0.0
    if is_qwen:
        return _delta_change(c, architecture, key, value, rows, one)
    if architecture == "falcon-h1":
        factor = _falcon_factor(c, key, len(value))
    shape: tuple[int, ...] = tuple(value.shape)
    if key.endswith((".A_log", ".D")):
        shape = (-1, 1)
    elif ".conv" in key and value.ndim == 3:
        shape = (len(value), -1)
    elif key.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
        shape = (getattr(c, "mamba_n_groups", None) or c.n_groups, -1)
    return Change(rows, None, key.endswith(".A_log"), factor, one, shape)


def _delta_change(
    c: Any, architecture: str, key: str, value: Tensor, rows: Tensor, plus: float
) -> Change:
    """Return the change of tensors of Qwen3-Next and Qwen3.5. Value heads of Qwen3.5 are reordered:
    the first of each key head, then the second of each."""
    keys, key_size = c.linear_num_key_heads, c.linear_key_head_dim
    share, size = c.linear_num_value_heads // keys, c.linear_value_head_dim
    columns = None
    if architecture == "qwen3next" and key.endswith(("attn_qkv.weight", "attn_gate.weight")):
        each = [key_size, key_size, share * size, share * size]
        q, k, v, z = (part.flatten() for part in rows.view(keys, -1).split(each, dim=1))
        rows = torch.cat((q, k, v)) if "qkv" in key else z
    elif architecture != "qwen3next" and ".linear_attn." in key:

        def tiled(order: Tensor) -> Tensor:
            return order.view(keys, share, -1).transpose(0, 1).flatten()

        if "in_proj_qkv." in key or "conv1d" in key:
            first = 2 * keys * key_size
            rows = torch.cat((rows[:first], tiled(rows[first:])))
        elif "out_proj" in key:
            columns = tiled(torch.arange(value.shape[1]))
        elif "norm" not in key:
            rows = tiled(rows)
    shape = (len(rows), -1) if "conv1d" in key else tuple(value.shape)
    return Change(rows, columns, key.endswith(".A_log"), 1.0, plus, shape)


def _falcon_factor(c: Any, key: str, rows: int) -> Tensor | float:
    """Return the multiplier that FalconH1Model of the converter applies."""
    if "mamba.in_proj" in key:
        inner, keys = c.mamba_d_ssm, c.mamba_n_groups * c.mamba_d_state
        sizes = [inner, inner, keys, keys, c.mamba_n_heads]
        parts = [torch.full((n, 1), m) for n, m in zip(sizes, c.ssm_multipliers, strict=True)]
        return torch.cat(parts).double() * c.ssm_in_multiplier
    known = {
        "down_proj": c.mlp_multipliers[1], "gate_proj": c.mlp_multipliers[0], "q_proj": c.attention_in_multiplier,
        "k_proj": c.key_multiplier * c.attention_in_multiplier, "v_proj": c.attention_in_multiplier,
        "o_proj": c.attention_out_multiplier, "out_proj": c.ssm_out_multiplier, "lm_head": c.lm_head_multiplier,
        "embed_tokens": c.embedding_multiplier,
    }  # fmt: skip
    return next((m for part, m in known.items() if part in key.split(".")), 1.0)


def _rope_tensors(config: Any) -> Iterator[tuple[str, np.ndarray, str]]:
    """Yield tensors of frequencies: divisors of Llama 3 (LlamaModel.generate_extra_tensors) and
    factors of longrope."""
    rope = getattr(config, "rope_parameters", None) or {}
    if config.model_type == "gemma4_text":
        pairs = _flat_config(config).global_head_dim // 2
        turning = int(pairs * rope["full_attention"]["partial_rotary_factor"])
        divisors = [1.0] * turning + [1e30] * (pairs - turning)
        yield "rope_freqs.weight", np.array(divisors, np.float32), "F32"
    if rope.get("rope_type") == "longrope":
        for kind in ("long", "short"):
            yield f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], np.float32), "F32"
    if rope.get("rope_type") == "llama3":
        dim = config.hidden_size // config.num_attention_heads
        yield "rope_freqs.weight", llama3_divisors(rope, dim), "F32"


def llama3_divisors(rope: Mapping[str, Any], dim: int) -> np.ndarray:
    """Return the divisors of frequencies of Llama 3's scaling, float32 [dim / 2]."""
    factor = rope["factor"]
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
    return np.array(found, np.float32)


def tensors_of(path: Path) -> dict[str, tuple[int, int, int]]:
    """Return each tensor's offset, size and block size in bytes, as the `gguf` package reads
    them."""
    return {
        t.name: (int(t.data_offset), int(t.n_bytes), gguf.GGML_QUANT_SIZES[t.tensor_type][1])
        for t in gguf.GGUFReader(path).tensors
    }  # fmt: skip


# ---------------------------------------------------------------- tokenizers

_SPECIAL = ["<unk>", "<s>", "</s>"]
_WORDS = ["th", "the", "an", "and", "in", "ing", "er", "on"]


def tokens(kind: str) -> dict[str, Any]:
    """Return the metadata of a tokenizer with VOCAB tokens: "none", "gpt2" or "llama"."""
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
