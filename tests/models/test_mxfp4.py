"""gpt-oss with experts in the published MXFP4 format: two values in a byte, interleaved rows of
gates and ups."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun.config import Config
from forerun.load import make_runner
from forerun.models.config import load_config
from forerun.models.decoder import load_decoder
from forerun.runtime.native import NativeDecoder
from tests import tiny
from tests.models.checks import CPU, RoundingDecoder, compiled, ids, logits, refused, relative_error
from tests.models.test_parity import assert_near

E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6)
SETTINGS = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


def packed(experts: int, rows: int, inputs: int, seed: int) -> tuple[np.ndarray, ...]:
    """Return random blocks [experts, rows, groups, 16], scales [experts, rows, groups] and their
    values, float32 [experts, rows, inputs]."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (experts, rows, inputs // 32, 16), dtype=np.uint8)
    scales = rng.integers(122, 126, (experts, rows, inputs // 32), dtype=np.uint8)
    values = np.empty((experts, rows, inputs), np.float32)
    for at in np.ndindex(blocks.shape):
        *row, group, i = at
        byte = int(blocks[at])
        size = 2.0 ** (int(scales[at[:3]]) - 127)
        first = group * 32 + 2 * i  # values 2i and 2i + 1 of the group share a byte
        values[tuple(row)][first : first + 2] = E2M1[byte & 15] * size, E2M1[byte >> 4] * size
    return blocks, scales, values


@functools.cache
def checkpoint() -> tuple[Path, Any]:
    """Write a directory; return it and the transformers model with the same weights."""
    model = tiny.hf_model("gpt_oss", gain=0.6, num_hidden_layers=2, intermediate_size=64)
    config, tensors = model.config, {}
    for i, layer in enumerate(model.model.layers):
        experts, sizes = layer.mlp.experts, {"gate_up_proj": 128, "down_proj": 32}
        for number, (name, rows) in enumerate(sizes.items()):
            inputs = config.hidden_size if number == 0 else config.intermediate_size
            blocks, scales, values = packed(config.num_local_experts, rows, inputs, 10 * i + number)
            stem = f"model.layers.{i}.mlp.experts.{name}"
            tensors |= {f"{stem}_blocks": torch.from_numpy(blocks)}
            tensors |= {f"{stem}_scales": torch.from_numpy(scales)}
            with torch.no_grad():
                getattr(experts, name).copy_(torch.from_numpy(values).mT)
    path = tiny.new_directory("mxfp4")
    model.save_pretrained(path)
    others = load_file(path / "model.safetensors")
    others = {
        n: t for n, t in others.items() if not n.endswith(("experts.gate_up_proj", "down_proj"))
    }
    save_file(others | tensors, path / "model.safetensors")
    raw = json.loads((path / "config.json").read_text()) | {"quantization_config": SETTINGS}
    (path / "config.json").write_text(json.dumps(raw))
    return path, model


def test_logits_are_those_of_transformers() -> None:
    path, model = checkpoint()
    text = ids(20)
    with torch.no_grad():
        expected = model(torch.tensor([text]), use_cache=False).logits[0]
    assert_near(logits(load_decoder(path, torch.float32, CPU, 64), text), expected)


@compiled
def test_native_kernels_keep_mxfp4() -> None:
    """Experts stay in MXFP4 and others in bfloat16, unless a precision is requested."""
    path, _ = checkpoint()
    config = load_config(path)
    text = ids(9)
    found = NativeDecoder(config, path, "float32", 64, keep=True)
    assert found.precision.startswith("float32 and mxfp4,")
    expected = RoundingDecoder(config, path, torch.float64, CPU, 64)
    expected._linear = lambda x, linear: torch.nn.functional.linear(  # type: ignore[method-assign]
        x, linear.weight, linear.bias
    )
    each = [relative_error(logits(found, [t]), logits(expected, [t])) for t in text]
    assert sorted(each)[4] < 1e-6
    runner = make_runner(Config.of(kv_tokens=128, context=64), path, CPU)
    assert runner.decoder.precision.startswith("bfloat16 and float32 and mxfp4,")
    rounded = make_runner(Config.of(kv_tokens=128, context=64, quantization="int8"), path, CPU)
    assert rounded.decoder.precision.startswith("int8 and float32,")


@pytest.mark.parametrize(
    ("suffix", "change", "words"),
    [
        ("down_proj_scales", lambda t: t[:, :-1].contiguous(), "are not 8 experts of 32 by 64"),
        ("down_proj_blocks", lambda t: t[..., :-1].contiguous(), "are not 8 experts of 32 by 64"),
        ("gate_up_proj_scales", lambda t: t.to(torch.int32), "are not 8 experts of 128 by 32"),
        ("gate_up_proj_scales", lambda t: None, "lacks tensor"),
        ("down_proj_scales", lambda t: torch.full_like(t, 255), "not finite"),
    ],
)
def test_broken_blocks_are_refused_in_one_line(
    suffix: str, change: Any, words: str, tmp_path: Path
) -> None:
    source, _ = checkpoint()
    tensors = load_file(source / "model.safetensors")
    name = f"model.layers.1.mlp.experts.{suffix}"
    changed = change(tensors.pop(name))
    tensors |= {} if changed is None else {name: changed}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    load = lambda: load_decoder(tmp_path, torch.float32, CPU, 64)  # noqa: E731
    refused(load, tmp_path, str(tmp_path), words)
