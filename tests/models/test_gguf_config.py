"""Configurations from GGUF metadata, and refusals that name the key or tensor.

Protects: keys that are scalars in some files, arrays in others, or absent; floats rounded to
float32; blocks after the layers; unsupported families and features; unknown tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forerun.models.config import ModelConfig, load_config
from forerun.models.decoder import load_decoder
from tests import gguf_files, tiny
from tests.models import checks
from tests.models.checks import CPU


def make(path: Path, changes: dict[str, Any], name: str = "llama", **overrides: Any) -> Path:
    """Write the file of a tiny model with changed metadata."""
    model = tiny.hf_model(name, **(gguf_files.sizes(name, "Q8_0") | overrides))
    gguf_files.write(path, model, "Q8_0", changes=changes)
    return path


def refused(path: Path, *words: str) -> None:
    """Assert that loading raises LoadError in one line with the file's name and all of `words`."""
    checks.refused(lambda: load_decoder(path, torch.float32, CPU, 32), path, str(path), *words)


def config_of(
    path: Path, changes: dict[str, Any], name: str = "llama", **overrides: Any
) -> ModelConfig:
    return load_config(make(path, changes, name, **overrides))


@pytest.mark.parametrize("value, expected", [(2, 2), ([2, 2, 2], 2), (..., 4)], ids=str)
def test_kv_heads_may_be_a_number_an_array_or_absent(value: Any, expected: int, path: Path) -> None:
    assert config_of(path, {"llama.attention.head_count_kv": value}).kv_heads == expected


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 3e-7, 0.125])
def test_float32_values_are_read_as_the_decimals_they_round(eps: float, path: Path) -> None:
    config = config_of(
        path, {"llama.attention.layer_norm_rms_epsilon": eps, "llama.rope.freq_base": 1e6}
    )
    assert config.norm_eps == eps
    assert config.ropes[0].parameters["rope_theta"] == 1e6


def test_tied_and_separate_output_heads(path: Path) -> None:
    assert not config_of(path, {}).tied
    assert config_of(path, {}, "qwen2").tied
    assert not load_config(make(path, {}, "qwen2", tie_word_embeddings=False)).tied


def test_rotation_windows_and_softcaps_without_keys(path: Path) -> None:
    assert config_of(path, {}, "smollm3").rope_of == (0, 0, 0, None)
    gemma = {f"gemma3.attention.{key}": ... for key in ("sliding_window", "sliding_window_pattern")}
    windows = config_of(path, gemma, "gemma3", num_hidden_layers=7, layer_types=None).windows
    assert windows == (4096,) * 5 + (None, 4096)
    gemma = {f"gemma2.{key}": ... for key in ("attn_logit_softcapping", "final_logit_softcapping")}
    config = config_of(path, gemma | {"gemma2.attention.sliding_window": ...}, "gemma2")
    assert (config.attention_softcap, config.logit_softcap, config.windows) == (
        50.0,
        30.0,
        (4096, None) * 2,
    )


def test_multi_token_blocks_are_not_layers(path: Path) -> None:
    """The last blocks of block_count predict further tokens and have tensors of their own."""
    changes = {"llama.block_count": 3, "llama.nextn_predict_layers": 1}
    config = config_of(path, changes)
    assert config.layers == 2
    assert len(load_decoder(path, torch.float32, CPU, 32).weights.layers) == 2


@pytest.mark.parametrize(
    "key, value, words",
    [
        ("attention.q_lora_rank", 16, "latent attention (llama.attention.q_lora_rank)"),
        ("router_logit_softcapping", 30.0, "capped router logits"),
        ("expert_count", 8, "llama.expert_used_count"),
        ("attention.temperature_scale", 0.1, "scaled attention temperatures"),
        ("logit_scale", 2.0, "scaled logits"),
        ("ssm.state_size", 16, "a recurrent state"),
        ("rope.scaling.type", "spiral", "'spiral'"),
        ("attention.head_count", ..., "llama.attention.head_count"),
        ("block_count", ..., "llama.block_count"),
        ("block_count", 2, "blk.2.attn_k.weight"),
        ("block_count", 4, "blk.3"),
        ("embedding_length", 128, "token_embd.weight"),
        ("feed_forward_length", 96, "ffn_gate.weight"),
        ("context_length", 0, "context"),
        ("context_length", 2**32 - 1, "context_length (4294967295)"),
        ("block_count", 2**32 - 1, "block_count (4294967295 layers"),
        ("attention.layer_norm_rms_epsilon", -1.0, "norm_eps"),
    ],
)  # fmt: skip
def test_unsupported_and_invalid_metadata_is_named(
    key: str, value: Any, words: str, path: Path
) -> None:
    refused(make(path, {f"llama.{key}": value}), words)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_rope_divisors_must_be_positive(
    value: float, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        gguf_files, "_rope_tensors", lambda _: iter([rope_freqs([1.0] * 11 + [value])])
    )
    refused(make(path, {}), "rope_freqs.weight", "positive")


def rope_freqs(values: list[float]) -> tuple[str, np.ndarray, str]:
    return "rope_freqs.weight", np.array(values, np.float32), "F32"


@pytest.mark.parametrize(
    "name, words", [("lama", "'llama'"), ("qwen4exp", "'qwen4exp'"), ("mamba", "known")]
)
def test_unknown_architectures_are_named(name: str, words: str, path: Path) -> None:
    refused(make(path, {"general.architecture": name}), words, "not supported")


@pytest.mark.parametrize("extra", ["vision.weight", "blk.0.attn_sinks.weight", "blk.1.attn_q.bias"])
def test_unknown_tensors_are_named(extra: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_tensor(monkeypatch, extra)
    refused(make(path, {}), extra, "fit no part")


def add_tensor(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Make `gguf_files` write one more tensor."""
    original = gguf_files.tensors

    def all_tensors(*args: Any) -> Any:
        yield from original(*args)
        yield name, np.zeros(32, np.float32), "F32"

    monkeypatch.setattr(gguf_files, "tensors", all_tensors)
