"""What GGUF metadata says of a model, and what is refused by name.

Protects: keys that are scalars in one file and arrays in another, or missing; floats as they were
before float32; blocks behind the model's layers; families and parts that forerun does not have;
tensors that fit nothing."""

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
    """A tiny model's file with changed metadata."""
    model = tiny.hf_model(name, **(gguf_files.sizes(name, "Q8_0") | overrides))
    gguf_files.write(path, model, "Q8_0", changes=changes)
    return path


def refused(path: Path, *words: str) -> None:
    """Loading raises LoadError, in one line that names the file and holds all of `words`."""
    checks.refused(lambda: load_decoder(path, torch.float32, CPU, 32), path, str(path), *words)


def config_of(
    path: Path, changes: dict[str, Any], name: str = "llama", **overrides: Any
) -> ModelConfig:
    return load_config(make(path, changes, name, **overrides))


@pytest.mark.parametrize("value, expected", [(2, 2), ([2, 2, 2], 2), (..., 4)], ids=str)
def test_key_value_heads_are_a_number_or_one_a_layer_or_the_heads(
    value: Any, expected: int, path: Path
) -> None:
    assert config_of(path, {"llama.attention.head_count_kv": value}).kv_heads == expected


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 3e-7, 0.125])
def test_floats_are_what_they_were_before_they_were_rounded(eps: float, path: Path) -> None:
    config = config_of(
        path, {"llama.attention.layer_norm_rms_epsilon": eps, "llama.rope.freq_base": 1e6}
    )
    assert config.norm_eps == eps
    assert config.ropes[0].parameters["rope_theta"] == 1e6


def test_a_head_of_its_own_or_the_embedding(path: Path) -> None:
    assert not config_of(path, {}).tied
    assert config_of(path, {}, "qwen2").tied
    assert not load_config(make(path, {}, "qwen2", tie_word_embeddings=False)).tied


def test_layers_without_rotation_and_windows_that_no_key_names(path: Path) -> None:
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


def test_blocks_behind_the_layers_are_left_alone(path: Path) -> None:
    """They predict further tokens: the last of block_count, with tensors of their own."""
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
def test_what_a_model_has_that_forerun_has_not_is_named(
    key: str, value: Any, words: str, path: Path
) -> None:
    refused(make(path, {f"llama.{key}": value}), words)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_divisors_of_frequencies_are_positive(
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
def test_tensors_that_fit_nothing_are_named(
    extra: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_extra(monkeypatch, extra)
    refused(make(path, {}), extra, "fit no part")


def with_extra(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Have files written with one more tensor."""
    real = gguf_files.tensors

    def more(*args: Any) -> Any:
        yield from real(*args)
        yield name, np.zeros(32, np.float32), "F32"

    monkeypatch.setattr(gguf_files, "tensors", more)
