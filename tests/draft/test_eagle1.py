"""EAGLE-1 and EAGLE-2 heads: both layouts are read as they are, others refused in a line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun import LoadError
from forerun.draft.eagle.module import Eagle1Head, load_eagle1_head
from forerun.draft.registry import kind_of
from tests import tiny
from tests.draft.heads import FIELDS, save_first
from tests.draft.published import change, damage
from tests.draft.twins import target


def wrapped(directory: Path, head: Eagle1Head, **fields: Any) -> Path:
    """The same with the fields of the layer apart, as vLLM has it."""
    save_first(head, directory)
    raw = {"model_type": "eagle", "architectures": ["EAGLEModel"], "model": FIELDS | fields}
    (directory / "config.json").write_text(json.dumps(raw))
    tensors = load_file(directory / "model.safetensors")
    renamed = {
        n if n.startswith("fc") else f"model.{n}": t for n, t in tensors.items() if "embed" not in n
    }
    save_file(renamed, directory / "model.safetensors")
    return directory


def pickled(directory: Path, head: Eagle1Head) -> Path:
    tensors = load_file(save_first(head, directory) / "model.safetensors")
    (directory / "model.safetensors").unlink()
    torch.save(tensors, directory / "pytorch_model.bin")
    return directory


LAYOUTS: dict[str, tuple[dict[str, bool], Callable[[Path, Eagle1Head], Path]]] = {
    "their authors'": ({}, lambda d, h: save_first(h, d)),
    "pickled": ({}, pickled),
    "without a bias": ({"bias": False}, lambda d, h: save_first(h, d, bias=False)),
    "for Qwen2": (
        {"qkv_bias": True},
        lambda d, h: save_first(h, d, qkv_bias=True, model_type="qwen2"),
    ),
    "an embedding of its own": ({"own": True}, lambda d, h: save_first(h, d)),
    "vLLM's": ({}, wrapped),
    "vLLM's, with a head of its own": ({"own_head": True}, wrapped),
    "a head of its own": ({"own_head": True}, lambda d, h: save_first(h, d)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_published_head_is_read_as_it_is(layout: str, tmp_path: Path) -> None:
    """And told from a model by its files alone."""
    options, publish = LAYOUTS[layout]
    head = tiny.eagle1("llama", **options)
    directory = publish(tmp_path / "head", head)
    assert kind_of(directory) == "eagle"
    loaded = load_eagle1_head(directory, target())
    assert {n: t.tolist() for n, t in loaded.state_dict().items()} == {
        n: t.tolist() for n, t in head.state_dict().items()
    }
    assert (loaded.layer.ropes, loaded.layer.norm_eps) == (head.layer.ropes, 1e-6)


def test_a_head_that_is_the_target_s_is_borrowed(tmp_path: Path) -> None:
    head, theirs = tiny.eagle1("llama"), tiny.decoder(tiny.family("llama")).weights.head.weight
    directory = save_first(head, tmp_path / "head")
    for stored in (theirs.float(), theirs.bfloat16()):
        damage(directory, "lm_head.weight", stored.clone())
        assert (
            load_eagle1_head(directory, target()).lm_head is None and kind_of(directory) == "eagle"
        )
    damage(directory, "lm_head.weight", theirs.float() * 1.02)
    assert load_eagle1_head(directory, target()).lm_head is not None


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a tensor less": (lambda d: damage(d, "layers.0.mlp.up_proj.weight"), "up_proj"),
    "nothing that joins": (lambda d: damage(d, "fc.weight"), "fc.weight"),
    "another shape": (
        lambda d: damage(d, "layers.0.self_attn.o_proj.weight", torch.zeros(3, 3)),
        r"\[3, 3\]",
    ),
    "a norm too many": (
        lambda d: damage(d, "layers.0.input_layernorm.weight", torch.ones(32)),
        "input_layernorm",
    ),
    "a bias too many": (lambda d: change(d, bias=False), "fc.bias"),
    "a bias too few": (lambda d: change(d, qkv_bias=True), "k_proj.bias"),
    "no flag": (lambda d: change(d, bias="yes"), "true or false"),
    "wider states": (lambda d: damage(d, "fc.weight", torch.zeros(32, 96)), "reads 96 numbers"),
    "another vocabulary": (
        lambda d: (change(d, vocab_size=65), damage(d, "embed_tokens.weight")),
        "trained for it",
    ),
    "an embedding of another size": (
        lambda d: damage(d, "embed_tokens.weight", torch.zeros(65, 32)),
        r"\[65, 32\]",
    ),
    "two layers": (lambda d: change(d, num_hidden_layers=2), "2 layers"),
    "a norm before a head": (lambda d: damage(d, "norm.weight", torch.ones(32)), "eagle3:"),
    "a head of another size": (
        lambda d: damage(d, "lm_head.weight", torch.zeros(65, 32)),
        r"\[65, 32\]",
    ),
    "some tokens": (lambda d: change(d, truncated_vocab_size=40), "40 tokens alone"),
    "no fields": (lambda d: change(d, model=[1]), "not an object"),
    "no file": (lambda d: (d / "model.safetensors").unlink(), "neither"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_directories_are_refused_in_one_line(case: str, tmp_path: Path) -> None:
    directory = save_first(tiny.eagle1("llama"), tmp_path / "head")
    breaking, says = BROKEN[case]
    breaking(directory)
    with pytest.raises(LoadError, match=says) as error:
        load_eagle1_head(directory, target())
    assert "\n" not in str(error.value)
    assert kind_of(directory) in ("eagle", "eagle3", "model")
