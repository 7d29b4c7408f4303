"""Directories of drafters come from strangers: whatever their config.json is, it is one line and
takes no time."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from forerun.draft.head_files import read_config, read_layer
from forerun.draft.registry import kind_of
from forerun.errors import LoadError
from forerun.models.files import LARGEST

FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "none": (lambda path: None, "is no head: it has no config.json"),
    "a pipe": (os.mkfifo, "is no file that can be read"),
    "a directory": (Path.mkdir, "is no file that can be read"),
    "nested too deep": (lambda path: path.write_text("[" * 200_000), "nested too deep"),
    "no JSON": (lambda path: path.write_text("{"), "cannot be read"),
    "no text": (lambda path: path.write_bytes(b"\xff\xfe"), "cannot be read"),
    "no object": (lambda path: path.write_text("[]"), "does not hold an object"),
    "endless": (lambda path: path.write_bytes(b" " * (LARGEST + 1)), "which no such file has"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_configuration_is_one_line(fault: str, tmp_path: Path) -> None:
    make, message = FAULTS[fault]
    make(tmp_path / "config.json")
    with pytest.raises(LoadError, match=message) as raised:
        read_config(tmp_path, "head")
    assert str(tmp_path) in str(raised.value) and "\n" not in str(raised.value)
    assert kind_of(tmp_path) == "model", "and who asks what it is goes on to whoever says so"


@pytest.mark.parametrize("bias", ["attention_bias", "mlp_bias"])
def test_layers_with_biases_are_refused(bias: str) -> None:
    """Their tensors would not be read, and drafts be worth little: each alone is enough."""
    raw = {"model_type": "llama", "num_attention_heads": 2, "num_key_value_heads": 2}
    tensors = {
        "layers.0.post_attention_layernorm.weight": torch.ones(8),
        "layers.0.mlp.gate_proj.weight": torch.ones(16, 8),
    }
    assert read_layer(raw, tensors, 32).hidden == 8
    with pytest.raises(LoadError, match="its layer has biases"):
        read_layer(raw | {bias: True}, tensors, 32)
