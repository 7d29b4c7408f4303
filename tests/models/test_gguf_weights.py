"""GGUF weights are transformers' weights: every family, every type, every mix, to the last digits
of float64.

Protects: names and fusions, the permutation of queries and keys (biases too), Gemma's norms,
GPT-2's transposition, rope scalings in keys and in tensors, windows; the order of bits of every
type; what the native kernels make of each (the same numbers, bit for bit) and how many bytes they
take for it; scales that are not finite."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.config import Config
from forerun.kernels.reference import rotate
from forerun.load import make_runner
from forerun.models.config import load_config
from forerun.models.decoder import load_decoder
from forerun.models.gguf.blocks import FORMS, unpermuted
from forerun.runtime.native import NativeDecoder
from forerun.runtime.packed import PackedMatrix
from tests import gguf_files
from tests.models.checks import CPU, Rounded, compiled, ids, logits, off, read, refused, truth

GROUPED = tuple(
    kind for kind, form in FORMS.items() if form not in ("float32", "float16", "bfloat16")
)


def agrees(name: str, kinds: gguf_files.Kinds) -> None:
    """The decoder on torch in float64 says what transformers says."""
    written = gguf_files.written(name, kinds)
    text = ids(80 if name == "phi3-longrope" else 24)  # its long factors: from 64 tokens on
    found = logits(load_decoder(written.path, torch.float64, CPU, 128), text)
    # frequencies in float32: their divisors are in the file, and transformers computes longrope's
    # anew, here in float64
    slack = 1e-5 if name in ("llama-llama3", "phi3-longrope") else 1e-9
    assert off(found, truth(written.model, text)) < slack


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", gguf_files.NAMES)
def test_every_family_with_all_types_in_one_file(name: str) -> None:
    agrees(name, gguf_files.TYPES)


@pytest.mark.parametrize(
    "name, mix", [("qwen2", "q4_k_m"), ("llama", "q4_k_m"), ("qwen3", "q5_k"), ("gemma3", "gemma")]
)
def test_mixes_as_real_files_have_them(name: str, mix: str) -> None:
    """Queries and values of different types, gate and up too; a quantised embedding that is the
    head as well."""
    agrees(name, mix)


@pytest.mark.parametrize(("width", "turns"), [(6, 6), (6, 4), (7, 4), (5, 2)])
def test_neighbours_that_rotate_become_halves(width: int, turns: int) -> None:
    """As llama.cpp rotates: the first channels of a head in pairs of neighbours, and the rest not
    at all."""
    heads, angles = 3, torch.tensor([0.3, 1.1, 2.5])[: turns // 2]
    stored = torch.randn(
        heads, width, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )
    expected = stored.clone()
    for i, angle in enumerate(angles):
        a, b = stored[:, 2 * i], stored[:, 2 * i + 1]
        expected[:, 2 * i], expected[:, 2 * i + 1] = (
            a * angle.cos() - b * angle.sin(),
            b * angle.cos() + a * angle.sin(),
        )
    order = unpermuted(heads * width, heads, turns)
    ours = rotate(
        stored.flatten()[order].view(1, heads, width),
        angles.cos()[None, None],
        angles.sin()[None, None],
    )
    assert sorted(order.tolist()) == list(range(heads * width))
    assert torch.allclose(ours.flatten(), expected.flatten()[order])


# ---------------------------------------------------------------- what the native kernels hold


@compiled
@pytest.mark.parametrize("kind", FORMS)
def test_native_formats_hold_the_numbers_of_each_type(kind: str) -> None:
    """Also with the rows of each head in another order, and rows of two tensors on top of each
    other."""
    inputs = 512 if kind in gguf_files.SUPER else 416
    rows, more = (
        gguf_files.extreme_rows(kind, 72, inputs),
        gguf_files.random_rows(kind, 40, inputs, 1.0, seed=6),
    )
    values, others = (torch.from_numpy(gguf_files.values_of(kind, r)) for r in (rows, more))
    one, two = (
        gguf_files.blocks_of([(kind, rows)]),
        gguf_files.blocks_of([(kind, rows), (kind, more)]),
    )
    turned = values.view(6, 6, 2, inputs).transpose(1, 2).reshape(72, inputs)
    for blocks, expected in (
        (one, values),
        (one.select_rows(unpermuted(72, 6, 12)), turned),
        (two, torch.cat((values, others))),
    ):
        packed = PackedMatrix(blocks, None, FORMS[kind], gated=False)
        picked = torch.randperm(len(expected), generator=torch.Generator().manual_seed(1))
        assert torch.equal(packed[picked], expected[picked])
        assert torch.equal(blocks.dequantize(), expected)


# ---------------------------------------------------------------- what the native kernels say


@functools.cache
def kept(path: Path) -> NativeDecoder:
    return NativeDecoder(load_config(path), path, "float32", 128, keep=True)


NATIVE = [("llama", kind) for kind in GROUPED]
NATIVE += [(name, GROUPED) for name in ("gemma3_text", "gpt2", "phi3") if name in gguf_files.NAMES]
NATIVE += [
    ("qwen2", "q4_k_m"),
    ("smollm3", "q5_k"),
    ("gemma3", "gemma"),
    ("llama-biased", ("Q4_0", "Q8_0", "Q5_1")),
]


@pytest.mark.one_in(2)
@compiled
@pytest.mark.parametrize("name, kinds", NATIVE, ids=str)
def test_native_kernels_round_activations_and_nothing_else(
    name: str, kinds: gguf_files.Kinds
) -> None:
    """Measured: the root mean square of the difference, relative to the logits'. Where an
    activation lies between two integers, float32 and float64 may choose either: seldom in one
    token, somewhere in a text of twenty."""
    path = gguf_files.written(name, kinds).path
    rounded, found = Rounded(load_config(path), path, torch.float64, CPU, 128), kept(path)
    each = [off(logits(found, [token]), logits(rounded, [token])) for token in ids(9)]
    assert sorted(each)[4] < 1e-6
    text = ids(20)
    expected, plain = (
        logits(rounded, text),
        logits(load_decoder(path, torch.float64, CPU, 128), text),
    )
    assert off(logits(found, text), expected) < off(plain, expected)


# ---------------------------------------------------------------- options, and numbers that are
# none


@compiled
@pytest.mark.parametrize(
    "options",
    [dict(quantization="int8"), dict(quantization="int4"), dict(dtype="float32"), {}],
    ids=str,
)
@pytest.mark.parametrize(
    "name, kinds", [("qwen2", "q4_k_m"), ("gemma3", "gemma"), ("llama", "Q4_0")]
)
def test_every_precision_can_be_asked_for(name: str, kinds: str, options: dict[str, Any]) -> None:
    """The text's logits stay near, and the precision is the one asked for."""
    written, text = gguf_files.written(name, kinds), ids(12)
    runner = make_runner(Config.of(kv_tokens=128, context=64, **options), written.path, CPU)
    forms = runner.decoder.precision.split(",")[0].split(" and ")
    asked = options.get("quantization") or options.get("dtype")
    if asked == "int4":
        assert set(forms) == {"int4", "int8"}
    elif asked:
        assert forms == [asked]
    elif not options:
        assert "bfloat16" not in forms and "int8" not in forms
    assert off(read(runner, text), truth(written.model, text)) < {
        "int4": 1.2,
        "float32": 1e-5,
        "float64": 1e-9,
    }.get(asked, 0.3)


def broken_scales(kind: str, bits: int, path: Path) -> Path:
    """A file of a tiny Llama with one half-precision number of one matrix replaced."""
    source = gguf_files.written("llama", kind).path
    data, place = bytearray(source.read_bytes()), gguf_files.HALVES[kind][-1]
    start, _, block = gguf_files.tensors_of(source)["blk.1.ffn_down.weight"]
    at = start + 7 * block + place
    data[at : at + 2] = bits.to_bytes(2, "little")
    path.write_bytes(data)
    return path


@pytest.mark.one_in(3)
@compiled
@pytest.mark.parametrize("bits", [0x7C00, 0xFFFF], ids=hex)
@pytest.mark.parametrize("kind", gguf_files.HALVES)
def test_scales_that_are_no_numbers_are_refused(kind: str, bits: int, tmp_path: Path) -> None:
    path = broken_scales(kind, bits, tmp_path / "broken.gguf")
    for load in (lambda: NativeDecoder(load_config(path), path, "bfloat16", 64, keep=True),
                 lambda: load_decoder(path, torch.float32, CPU, 64),
                 lambda: load_decoder(path, torch.float32, CPU, 64, packing="stored")):  # fmt: skip
        refused(load, path, "tensor blk.1.ffn_down.weight has scales that are not finite")
