"""Further families from GGUF files (see test_gguf_weights.py for others) equal their directories.

Protects: metadata of each architecture and its defaults; names of tensors; rows that rotate in
adjacent pairs; experts of one or several types, their biases, shared experts; broken fields."""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor

from forerun.errors import LoadError
from forerun.models.config import ModelConfig, load_config, make_config
from forerun.models.decoder import Decoder, load_decoder
from forerun.models.gguf.architectures import ARCHITECTURES
from forerun.models.gguf.config import skim, unsupported_reason
from forerun.models.gguf.dense_architectures import XIELU
from forerun.models.mixed_families import FAMILIES
from forerun.models.rope import rope_tables
from forerun.runtime.native import NativeDecoder
from tests import families, gguf_files, tiny
from tests.models.checks import (
    CPU,
    Float64Mode,
    RoundingDecoder,
    compiled,
    ids,
    logits,
    reference_logits,
    refused,
    relative_error,
)
from tests.models.test_parity import assert_near

GAIN = 0.5
SMALL_GAIN = 0.3  # for recurrent layers, whose norms amplify rounding
# Families get these types or mixes in turn. Append new families to families.MODELS, so that others
# keep theirs: Gemma 3n has no norm before its first products, and with embeddings in MXFP4 many of
# its activations are halfway between two integers.
KINDS = ("Q8_0", "Q4_0", "MXFP4", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL")
MIXED = ("experts", "mxfp4_moe")
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
HAS_EXPERTS = {
    name for name, (_, fields) in families.MODELS.items() if any(map(fields.get, COUNTS))
}
QUANTIZED = [
    (name, MIXED[i % 2] if name in HAS_EXPERTS else KINDS[i % len(KINDS)])
    for i, name in enumerate(gguf_files.FURTHER_NAMES)
]
names = pytest.mark.parametrize("name", gguf_files.FURTHER_NAMES)


def written(name: str, kinds: gguf_files.Kinds) -> gguf_files.Written:
    return gguf_files.written(name, kinds, SMALL_GAIN if name in gguf_files.RECURRENT else GAIN)


def expected_logits(model: Any, text: list[int]) -> Tensor:
    """Return `reference_logits`, but of recurrent models token by token, since their code for
    several tokens rounds differently."""
    config = make_config(model.config.to_dict(), Path("config.json"))
    if config.recurrent is None:
        return reference_logits(model, text)
    cache, rows = hf.DynamicCache(config=model.config), []
    with torch.no_grad(), Float64Mode():
        for token in text:
            ids = torch.tensor([[token]])
            rows.append(model(ids, cache=cache, use_cache=True).logits[0])
    return torch.cat(rows)


def native_decoder(path: Path) -> NativeDecoder:
    return NativeDecoder(load_config(path), path, "float32", 128, keep=True)


# ---------------------------------------------------------------- configurations


# fields that differ between a directory and a file
DIFFERENT_FIELDS = (
    "family",
    "raw",
    "layout",
    "norm",
    "ropes",
    "rope_of",
    "rotates_pairs",
    "context",
    "end_ids",
)


@names
def test_a_file_gives_the_configuration_of_the_directory(name: str) -> None:
    """All fields are compared, and ropes by their angles."""
    file = written(name, "F16")
    ours = load_config(file.path)
    theirs = make_config(file.model.config.to_dict(), Path("config.json"))
    if theirs.family == "falcon_h1":
        theirs = without_factors(theirs)
    if theirs.mlp_sizes and not any(theirs.mlp_sizes):  # their size is not used
        theirs = dataclasses.replace(theirs, intermediate=ours.intermediate)
    if theirs.recurrent is not None:
        is_tiled = theirs.family.startswith("qwen3_5")
        theirs = dataclasses.replace(
            theirs, recurrent=dataclasses.replace(theirs.recurrent, tiled=is_tiled)
        )
    for field in dataclasses.fields(ModelConfig):
        if field.name not in DIFFERENT_FIELDS:
            assert is_equal(getattr(ours, field.name), getattr(theirs, field.name)), field.name
    assert ours.norm == theirs.norm.removesuffix("_plus_one")
    for layer in range(ours.layers):
        for found, expected in zip(angles(ours, layer), angles(theirs, layer), strict=True):
            assert torch.allclose(found, expected, atol=1e-5)


def without_factors(c: ModelConfig) -> ModelConfig:
    """Return the configuration of Falcon-H1 after its factors were multiplied into the weights."""
    assert c.recurrent is not None
    one = dict.fromkeys(("gate_scale", "decay_scale", "out_scale"), 1.0)
    recurrent = dataclasses.replace(c.recurrent, channel_scales=(1.0, 1.0, 1.0), **one)
    return dataclasses.replace(
        c,
        attention_scale=c.head_dim**-0.5,
        attention_out_scale=1.0,
        embed_scale=1.0,
        logit_scale=1.0,
        mlp_gate_scale=1.0,
        mlp_out_scale=1.0,
        recurrent=recurrent,
    )


def is_equal(found: object, expected: object) -> bool:
    """Return True if two values are equal up to the rounding of floats to 32 bits."""
    if isinstance(found, float) and isinstance(expected, float):
        return abs(found - expected) <= 1e-6 * abs(expected)
    if dataclasses.is_dataclass(found) and dataclasses.is_dataclass(expected):
        values = dataclasses.astuple(found), dataclasses.astuple(expected)  # type: ignore[arg-type]
        return all(map(is_equal, *values))
    return found == expected


def angles(config: ModelConfig, layer: int) -> tuple[Tensor, ...]:
    rope = config.rope_of[layer]
    return () if rope is None else rope_tables(config, config.ropes[rope], 64, torch.float32)


def test_every_architecture_is_covered() -> None:
    made = {skim(written(name, "F16").path).architecture for name in gguf_files.FURTHER_NAMES}
    older = {gguf_files.ARCHITECTURES.get(name, name) for name in tiny.FAMILIES}
    assert made | older == set(ARCHITECTURES)


def test_the_documentation_lists_all_families() -> None:
    page = Path(__file__).parents[2] / "docs" / "models.md"
    rows = [line.split("|")[1:-1] for line in page.read_text().splitlines() if line[:1] == "|"]
    cells = [[set(re.findall("`([^`]+)`", cell)) for cell in row] for row in rows[2:]]
    assert set().union(*(row[1] for row in cells)) == FAMILIES.keys()
    assert set().union(*(row[2] for row in cells)) == ARCHITECTURES.keys()


# ---------------------------------------------------------------- logits


@pytest.mark.one_in(5)
@pytest.mark.parametrize("kernels", ["torch", pytest.param("native", marks=compiled)])
@pytest.mark.parametrize("kinds", ["F32", "F16"])
@names
def test_float_files_have_parity(name: str, kinds: str, kernels: str) -> None:
    file = written(name, kinds)
    text = ids(24)
    load = native_decoder if kernels == "native" else load_float32
    assert_near(logits(load(file.path), text), expected_logits(file.model, text))


def load_float32(path: Path) -> Decoder:
    return load_decoder(path, torch.float32, CPU, 128)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("name", "kinds"), QUANTIZED)
def test_quantized_files_have_parity_with_their_dequantized_weights(name: str, kinds: str) -> None:
    file = written(name, kinds)
    text = ids(24)
    assert_near(logits(load_float32(file.path), text), expected_logits(file.model, text))


@functools.cache
def cached_decoder(name: str, kinds: gguf_files.Kinds) -> NativeDecoder:
    return native_decoder(written(name, kinds).path)


@pytest.mark.one_in(2)
@compiled
@pytest.mark.parametrize(("name", "kinds"), QUANTIZED)
def test_native_kernels_round_only_activations(name: str, kinds: str) -> None:
    """The median is compared, since an activation between two integers may round either way."""
    path = written(name, kinds).path
    expected = RoundingDecoder(load_config(path), path, torch.float64, CPU, 128)
    each = [
        relative_error(logits(cached_decoder(name, kinds), [t]), logits(expected, [t]))
        for t in ids(9)
    ]
    assert sorted(each)[4] < 1e-6


# ---------------------------------------------------------------- types of experts


TENSOR_TYPES = [kind for kind in gguf_files.TYPES if kind not in ("F32", "F16")]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("kernels", ["torch", pytest.param("native", marks=compiled)])
@pytest.mark.parametrize("kind", TENSOR_TYPES)
def test_experts_of_every_type(kind: str, kernels: str, tmp_path: Path) -> None:
    """Gates and ups have two types; types without a native format are rounded to bfloat16."""
    path = tmp_path / "model.gguf"
    sizes = dict(
        hidden_size=256, intermediate_size=256, moe_intermediate_size=256, mlp_only_layers=[],
        num_hidden_layers=1, num_experts=4,
    )  # fmt: skip
    model = tiny.hf_model("qwen3_moe", **sizes)
    with mock.patch.dict(
        gguf_files.MIXES, {"two": {"ffn_gate_exps": "Q4_K", "_exps": kind, "": "F32"}}
    ):
        gguf_files.write(path, model, "two", GAIN)
    text = ids(12)
    if kernels == "torch":
        assert_near(logits(load_float32(path), text), eager_logits(model, text))
        return
    expected = RoundingDecoder(load_config(path), path, torch.float64, CPU, 128)
    expected._linear = lambda x, linear: torch.nn.functional.linear(  # type: ignore[method-assign]
        x, linear.weight, linear.bias
    )
    rounds = kind == "BF16" or kind not in gguf_files.NATIVE_TYPES
    found = [relative_error(logits(native_decoder(path), [t]), logits(expected, [t])) for t in text]
    assert sorted(found)[6] < (0.03 if rounds else 1e-6)


def eager_logits(model: Any, text: list[int]) -> Tensor:
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return reference_logits(model, text)


@pytest.mark.parametrize("kinds", ["F32", "Q4_0"])
@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe"])
def test_merged_gate_and_up_tensors_of_experts(name: str, kinds: str, tmp_path: Path) -> None:
    path, text = tmp_path / "model.gguf", ids(16)
    model = tiny.hf_model(name, **gguf_files.sizes(name, kinds))
    gguf_files.write(path, model, kinds, GAIN, merged=True)
    assert_near(logits(load_float32(path), text), eager_logits(model, text))


@pytest.mark.parametrize("name", ["granite4", "granite4-dense"])
def test_a_granite_without_recurrent_layers_may_be_called_hybrid(name: str, tmp_path: Path) -> None:
    path, text = tmp_path / "model.gguf", ids(16)
    model = tiny.hf_model(name, **gguf_files.sizes(name, "F32"))
    gguf_files.write(path, model, "F32", GAIN, architecture="granitehybrid")
    assert_near(logits(load_float32(path), text), eager_logits(model, text))


def test_a_granite_without_rope(tmp_path: Path) -> None:
    path, text = tmp_path / "model.gguf", ids(16)
    changes = gguf_files.sizes("granite4", "F32") | {"position_embedding_type": None}
    model = tiny.hf_model("granite4", **changes)
    switch = {"granitemoe.rope.scaling.finetuned": False}
    gguf_files.write(path, model, "F32", GAIN, changes=switch)
    assert load_config(path).ropes == ()
    assert_near(logits(load_float32(path), text), eager_logits(model, text))


# ---------------------------------------------------------------- refusals


def make(path: Path, name: str, changes: dict[str, Any]) -> Path:
    gguf_files.write(path, cached_model(name), "F16", changes=changes)
    return path


@functools.cache
def cached_model(name: str) -> Any:
    return tiny.hf_model(name, **gguf_files.sizes(name, "F16"))


@pytest.mark.parametrize(
    ("name", "key", "value", "words"),
    [
        ("qwen3_moe", "expert_count", ..., "qwen3moe.expert_count"),
        ("qwen3_moe", "expert_count", 4, "blk.0.ffn_gate_inp.weight"),
        ("qwen3_moe", "expert_count", 10**9, "number of experts"),
        ("qwen3_moe", "expert_count", [8, 8, 4, 8], "differs between layers"),
        ("qwen3_moe", "expert_count", "8", "expert_count"),
        ("qwen3_moe", "expert_used_count", 9, "number of experts of a token"),
        ("qwen3_moe", "expert_used_count", 0, "number of experts of a token"),
        ("qwen3_moe", "expert_feed_forward_length", 64, "ffn_gate_exps.weight"),
        ("qwen3_moe", "expert_gating_func", 2, "expert_gating_func"),
        ("qwen3_moe", "expert_group_count", 4, "expert_group_count"),
        ("qwen3_moe", "expert_weights_scale", 2.5, "expert_weights_scale"),
        ("qwen3_moe", "expert_weights_norm", 7, "expert_weights_norm"),
        ("mixtral", "expert_weights_norm", False, "expert_weights_norm"),
        ("mixtral", "expert_count", 0, "blk.0.ffn_up.weight"),
        ("gpt_oss", "expert_gating_func", 1, "expert_gating_func"),
        ("gpt_oss", "attention.sliding_window", "8", "window"),
        ("glm4_moe", "expert_group_count", 3, "3 groups"),
        ("glm4_moe", "expert_group_used_count", 4, "groups of a token"),
        ("glm4_moe", "expert_weights_scale", float("nan"), "the factor on experts"),
        ("glm4_moe", "expert_shared_count", 5, "shexp"),
        ("glm4_moe", "leading_dense_block_count", 0, "blk.0.ffn_gate_shexp.weight"),
        ("glm4_moe", "leading_dense_block_count", 99, "blk.1.ffn_gate.weight"),
        ("ernie4_5_moe", "interleave_moe_layer_step", 0, "ernie4_5_moe"),
        ("olmo3", "attention.sliding_window_pattern", [True, False], "layer_types"),
        ("olmo3", "attention.sliding_window_pattern", 0, "modulo by zero"),
        ("granite", "logit_scale", 0.0, "zero"),
        ("granite", "residual_scale", float("inf"), "residual_scale"),
        ("granite", "attention.scale", -1.0, "attention_scale"),
        ("olmo2", "attention.clamp_kqv", 8.0, "clipped queries, keys and values"),
        ("olmo2", "expert_count", 8, "a mixture of experts (olmo2.expert_count)"),
        ("cohere", "residual_scale", 0.5, "scaled residuals"),
        ("ministral3", "rope.scaling.original_context_length", "1", "rope"),
        ("qwen2_moe", "feed_forward_length", [64, 64], "feed_forward_length"),
        ("qwen3_5", "ssm.time_step_rank", 0, "zero"),
        ("qwen3_5", "ssm.time_step_rank", 3, "3 value heads cannot share 2 keys"),
        ("qwen3_5", "ssm.state_size", ..., "qwen35.ssm.state_size"),
        ("qwen3_5", "ssm.conv_kernel", 99, "taps"),
        ("qwen3_5_moe", "expert_gating_func", 2, "expert_gating_func"),
        ("falcon_h1", "ssm.group_count", 4, "blk.0.ssm_conv1d.weight"),
        ("falcon_h1", "ssm.inner_size", "64", "ssm.inner_size"),
        ("lfm2", "shortconv.l_cache", ..., "lfm2.shortconv.l_cache"),
        ("lfm2", "attention.head_count_kv", [0, 2, 0, 1], "head_count_kv, which differs"),
        ("lfm2", "attention.head_count_kv", [0, 0, 0, 0], "head_count_kv"),
        ("lfm2", "feed_forward_length", [64, 64, 32, 0], "feed_forward_length"),
        ("gemma4", "attention.head_count_kv", [2, 1, 2], "of 3 layers"),
        ("gemma4", "attention.head_count_kv", [2, 1, 1, 1], "of no two kinds"),
        ("gemma4", "attention.head_count_kv", [2, 0, 2, 0], "blk.1.attn_k.weight"),
        ("gemma4", "attention.key_length_swa", ..., "gemma4.attention.key_length_swa"),
        ("gemma4-small", "attention.head_count_kv", [2, 1, 2, 1], "differs between layers"),
        ("gemma4-small", "feed_forward_length", [64, 64, 64, 128], "differs between layers"),
        ("gemma4-small", "attention.shared_kv_layers", 4, "feed_forward_length"),
        ("gemma4-small", "embedding_length_per_layer_input", 16, "inp_gate.weight"),
        ("deepseek_v2", "attention.kv_lora_rank", ..., "deepseek2.attention.kv_lora_rank"),
        ("deepseek_v2", "attention.kv_lora_rank", 10**9, "rank of the latent attention"),
        ("deepseek_v2", "attention.kv_lora_rank", 64, "blk.0.attn_kv_a_mqa.weight"),
        ("deepseek_v2", "attention.head_count", 2**30, "blk.0.attn_output.weight"),
        ("deepseek_v2", "attention.q_lora_rank", ..., "blk.0.attn_q.weight"),
        ("deepseek_v2", "attention.q_lora_rank", "64", "q_lora_rank"),
        ("deepseek_v2", "attention.key_length_mla", 32, "rope.dimension_count (32 of 32 channels)"),
        ("deepseek_v2", "attention.key_length_mla", ..., "blk.0.attn_q_b.weight"),
        ("deepseek_v2", "attention.value_length_mla", 0, "value of the latent attention"),
        ("deepseek_v2", "attention.value_length_mla", [32, 16], "differs between layers"),
        ("deepseek_v2", "rope.dimension_count", ..., "deepseek2.rope.dimension_count"),
        ("deepseek_v2", "rope.dimension_count", 0, "rotary of the latent attention"),
        ("deepseek_v2", "expert_weights_norm", True, "expert_weights_norm"),
        ("deepseek_v3", "expert_gating_func", 3, "expert_gating_func"),
        ("deepseek_v3", "expert_gating_func", 1, "expert_weights_norm"),
        ("deepseek_v3", "expert_group_count", 3, "3 groups"),
        ("deepseek_v3", "leading_dense_block_count", [1, 2], "leading_dense_block_count, which"),
        ("deepseek_v3", "rope.scaling.yarn_log_multiplier", float("nan"), "attention_scale"),
        ("deepseek_v3", "rope.scaling.factor", 0.0, "the factor of its rope"),
        ("deepseek_v3", "attention.temperature_scale", 0.1, "scaled attention temperatures"),
        ("mistral4", "attention.temperature_scale", -0.1, "llama_4_scaling_beta"),
        ("mistral4", "attention.temperature_length", 8192, "which is not 16"),
        ("mistral4", "expert_gating_func", 2, "expert_gating_func"),
        ("exaone_moe", "attention.sliding_window", ..., "exaone-moe.attention.sliding_window"),
        ("exaone_moe", "attention.sliding_window", 0, "attention.sliding_window (0)"),
        ("exaone_moe", "expert_gating_func", 1, "expert_gating_func"),
        ("gemma3n", "activation_sparsity_scale", ..., "gemma3n.activation_sparsity_scale"),
        ("gemma3n", "activation_sparsity_scale", [1.0, 2.0], "of 2 layers"),
        ("gemma3n", "activation_sparsity_scale", [float("nan")] * 4, "activation_sparsity_scale"),
        ("gemma3n", "activation_sparsity_scale", [float("inf")] * 4, "activation_sparsity_pattern"),
        ("gemma3n", "activation_sparsity_scale", [1, 2, 3, 4], "activation_sparsity_scale"),
        ("gemma3n", "altup.num_inputs", 1, "altup_num_inputs"),
        ("gemma3n", "altup.num_inputs", 8, "blk.0.altup_correct_coef.weight"),
        ("gemma3n", "altup.active_idx", 1, "altup_active_idx"),
        ("gemma3n", "attention.shared_kv_layers", 4, "num_kv_shared_layers 4"),
        ("gemma3n", "feed_forward_length", [64, 64], "of 2 layers"),
        ("gemma3n", "feed_forward_length", [64, 64, 64, 64], "blk.1.ffn_gate.weight"),
        ("gemma3n", "embedding_length_per_layer_input", 16, "inp_gate.weight"),
        ("gemma3n", "embedding_length_per_layer_input", 0, "hidden_size_per_layer_input"),
        ("gemma3n", "attention.head_count_kv", 3, "cannot share"),
        ("llama4", "attention.head_count", 2**30, "blk.0.attn_q.weight"),
        ("llama4", "interleave_moe_layer_step", ..., "llama4.interleave_moe_layer_step"),
        ("llama4", "interleave_moe_layer_step", 0, "interleave_moe_layer_step (0)"),
        ("llama4", "interleave_moe_layer_step", 1, "blk.0.ffn_gate_shexp.weight"),
        ("llama4", "expert_count", 0, "number of experts"),
        ("llama4", "expert_gating_func", 1, "expert_gating_func"),
        ("llama4", "attention.sliding_window", 0, "attention.sliding_window (0)"),
        ("llama4", "attention.chunk_size", 0, "the chunk is 0"),
        ("llama4", "attention.chunk_size", "8", "attention.chunk_size"),
        ("llama4", "attention.temperature_length", 0, "floor_scale is 0"),
        ("llama4", "attention.temperature_scale", -0.1, "attn_scale"),
        ("apertus", "xielu.beta", ..., "xielu.beta"),
        ("apertus", "xielu.alpha_n", [1.0, 2.0], "xielu.alpha_n, of 2 layers"),
        ("apertus", "xielu.alpha_p", float("nan"), "xielu.alpha_p"),
    ],
)
def test_broken_fields_are_refused_in_one_line(
    name: str, key: str, value: Any, words: str, tmp_path: Path
) -> None:
    (model_type, _) = families.MODELS[name]
    architecture = gguf_files.ARCHITECTURES.get(model_type, model_type)
    key = key if key.startswith("xielu.") else f"{architecture}.{key}"
    path = make(tmp_path / "model.gguf", name, {key: value})
    refused(lambda: load_float32(path), path, str(path), words, longest=300)


def test_a_single_activation_parameter_applies_to_all_layers(tmp_path: Path) -> None:
    each = {f"xielu.{name}": [0.5] * 4 for name in XIELU}
    alike = dict.fromkeys(each, 0.5)
    paths = [make(tmp_path / f"{i}.gguf", "apertus", c) for i, c in enumerate((each, alike))]
    one, other = (load_float32(path).weights.layers[3].xielu for path in paths)
    assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("name", "tensor", "extra"),
    [
        ("granite", "blk.1.ssm_in.weight", "a recurrent state (blk.1.ssm_in.weight)"),
        ("cohere", "blk.0.attn_q_norm.weight", "use_qk_norm"),
        ("stablelm", "blk.0.attn_q_norm.weight", "qk_layernorm"),
        ("qwen3_moe", "blk.0.exp_probs_b.bias", "fit no part"),
    ],
)
def test_tensors_of_unsupported_features_are_named(
    name: str, tensor: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = gguf_files.tensors

    def all_tensors(*args: Any) -> Any:
        yield from original(*args)
        yield tensor, np.ones(32, np.float32), "F32"

    monkeypatch.setattr(gguf_files, "tensors", all_tensors)
    path = make(tmp_path / "model.gguf", name, {})
    refused(lambda: load_float32(path), path, str(path), extra)
    if ".ssm_" in tensor:
        assert extra in unsupported_reason(skim(path))


def write_older(
    path: Path, model: Any, kinds: str, gain: float, part: str, older: str, **changes: Any
) -> None:
    """Write a file in which a part of each layer is one tensor with an older name."""

    def renamed(key: str, value: Tensor, config: Any) -> Any:
        if key.endswith(f"{part}.weight"):
            yield f"blk.{key.split('.')[2]}.{older}.weight", value
        else:
            yield from others(key, value, config)

    others = gguf_files._published_others
    with mock.patch.object(gguf_files, "_published_others", renamed):
        gguf_files.write(path, model, kinds, gain, **changes)
    assert f"blk.0.{older}.weight" in skim(path).tensors


def test_older_files_of_qwen3_next_have_one_input_tensor(tmp_path: Path) -> None:
    """The tensor holds the query, key, values and gates of each key head in turn."""
    path, text = tmp_path / "model.gguf", ids(12)
    model = tiny.hf_model("qwen3_next", **gguf_files.sizes("qwen3_next", "Q8_0"))
    write_older(path, model, "Q8_0", SMALL_GAIN, "linear_attn.in_proj_qkvz", "ssm_in")
    model.set_experts_implementation("eager")
    assert_near(logits(load_float32(path), text), expected_logits(model, text))


@pytest.mark.parametrize("kinds", ["F32", "Q8_0"])
def test_older_files_of_latent_attention_have_one_head_tensor(kinds: str, tmp_path: Path) -> None:
    """These files also lack the keys for sizes of heads that differ from those of the cache."""
    path, text = tmp_path / "model.gguf", ids(12)
    model = tiny.hf_model("deepseek_v2", **gguf_files.sizes("deepseek_v2", kinds))
    sizes = {"key_length_mla": ..., "value_length_mla": ..., "key_length": 96, "value_length": 32}
    changes = {f"deepseek2.attention.{key}": value for key, value in sizes.items()}
    changes["deepseek2.attention.head_count_kv"] = 4
    write_older(path, model, kinds, GAIN, "kv_b_proj", "attn_kv_b", changes=changes)
    assert_near(logits(load_float32(path), text), eager_logits(model, text))


@pytest.mark.parametrize("beta", [0.0, 0.7])
def test_query_scaling_of_mistral_4_may_be_stated(beta: float, tmp_path: Path) -> None:
    """Files of other converters have the key; without it the published value is used."""
    path, text = tmp_path / "model.gguf", ids(40)
    model = tiny.hf_model("mistral4", **gguf_files.sizes("mistral4", "F32"))
    model.config.rope_parameters["llama_4_scaling_beta"] = beta
    scale, length = (f"mistral4.attention.temperature_{key}" for key in ("scale", "length"))
    gguf_files.write(path, model, "F32", GAIN, changes={scale: beta, length: 16})
    assert_near(logits(load_float32(path), text), eager_logits(model, text))


REQUIRED = {
    "deepseek_v3": [
        f"blk.2.{part}.weight" for part in ("attn_k_b", "attn_v_b", "attn_kv_a_norm", "attn_q_a")
    ],
    "gemma3n": [
        *("altup_proj.weight", "altup_unembd_proj.weight", "per_layer_token_embd.weight"),
        *("blk.0.laurel_l.weight", "blk.2.laurel_r.weight", "blk.2.post_norm.weight"),
        *("blk.2.altup_correct_scale.weight", "blk.2.altup_predict_coef.weight"),
    ],
    "qwen3_5": [
        *("blk.2.ssm_a", "blk.2.ssm_dt.bias", "blk.2.ssm_conv1d.weight", "blk.2.ssm_norm.weight")
    ],
}


@pytest.mark.parametrize(
    ("family", "tensor"), [(family, part) for family, parts in REQUIRED.items() for part in parts]
)
def test_a_missing_tensor_is_named(
    family: str, tensor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They belong to latent attention, parallel residual streams and recurrent layers."""
    original = gguf_files.tensors
    monkeypatch.setattr(
        gguf_files, "tensors", lambda *args: (t for t in original(*args) if t[0] != tensor)
    )
    path = make(tmp_path / "model.gguf", family, {})
    with pytest.raises(LoadError, match=tensor):
        load_float32(path)


@names
def test_supported_files_have_no_unsupported_reason(name: str) -> None:
    assert unsupported_reason(skim(written(name, "F16").path)) == ""


@pytest.mark.parametrize(
    ("gates", "sizes"), [("Q8_0", dict(hidden_size=48)), ("Q4_0", dict(moe_intermediate_size=16))]
)
@compiled
def test_native_kernels_refuse_experts_that_are_not_whole_blocks(
    gates: str, sizes: dict[str, int], tmp_path: Path
) -> None:
    """An expert must start at a block of 32 outputs, or of 16 of its gate and 16 of its up."""
    path = tmp_path / "model.gguf"
    model = tiny.hf_model("qwen3_moe", **(gguf_files.sizes("qwen3_moe", "F16") | sizes))
    mix = {"ffn_gate_exps": "F32" if "hidden_size" in sizes else gates, "": "F32"}
    with mock.patch.dict(gguf_files.MIXES, {"two": mix}):
        gguf_files.write(path, model, "two", GAIN)
    with pytest.raises(LoadError, match="use kernels=torch"):
        native_decoder(path)
    assert_near(logits(load_float32(path), ids(9)), eager_logits(model, ids(9)))
