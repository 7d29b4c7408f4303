"""GGUF weights are transformers' weights: every family, every type, every mix, to the last digits of float64.

Protects: names and fusions, the permutation of queries and keys (biases too), Gemma's norms, GPT-2's transposition,
rope scalings in keys and in tensors, windows; the order of bits of every type; what the native kernels make of each
(the same numbers, bit for bit) and how many bytes they take for it; scales that are no numbers.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from forerun.cache.attention import Segment
from forerun.config import Config
from forerun.errors import LoadError
from forerun.kernels import native
from forerun.load import make_runner
from forerun.models.config import load_config
from forerun.models.decoder import Decoder, load_decoder
from forerun.models.gguf.blocks import FORMS, Blocks, permuted
from forerun.models.weights import Linear
from forerun.native import NativeDecoder
from forerun.packed import Packed
from forerun.runner import Runner
from tests import gguf_files, tiny

CPU = torch.device("cpu")
KERNELS = pytest.mark.skipif(native.library() is None, reason=native.reason() or "compiled")
GROUPED = tuple(kind for kind, form in FORMS.items() if form not in ("float32", "float16", "bfloat16"))


class Double(TorchFunctionMode):
    """transformers computes norms, softmax and rotations in float32 whatever the weights are: here in float64."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wide = {torch.float32: torch.float64}
        function = Tensor.double if function is Tensor.float else function
        swapped = [wide.get(a, a) if isinstance(a, torch.dtype) else a for a in args]
        named = {k: wide.get(v, v) if isinstance(v, torch.dtype) else v for k, v in (kwargs or {}).items()}
        return function(*swapped, **named)


def ids(count: int) -> list[int]:
    return torch.randint(3, tiny.VOCAB, (count,), generator=torch.Generator().manual_seed(1)).tolist()


def truth(model: Any, text: list[int]) -> Tensor:
    """transformers' logits in float64 after each token."""
    with torch.no_grad(), Double():
        return model(torch.tensor([text]), use_cache=False).logits[0]


def logits(decoder: Decoder | NativeDecoder, text: list[int]) -> Tensor:
    runner = Runner(decoder, tokens=128, page=4, slots=1)
    assert runner.cache.pages.grow(0, len(text))
    chain = list(range(-1, len(text) - 1))
    return runner.forward([Segment(0, text, chain, list(range(len(text))))]).logits


def off(found: Tensor, expected: Tensor) -> float:
    """The root mean square of the difference, relative to that of what is expected."""
    return float((found.double() - expected).norm() / expected.norm())


def agrees(name: str, kinds: gguf_files.Kinds) -> None:
    """The decoder on torch in float64 says what transformers says."""
    written, long = gguf_files.written(name, kinds), name == "phi3-longrope"  # its long factors: from 64 tokens on
    text = ids(80 if long else 24)
    found = logits(load_decoder(written.path, torch.float64, CPU, 128), text)
    # frequencies in float32: their divisors are in the file, and transformers computes longrope's anew, here in float64
    assert off(found, truth(written.model, text)) < (1e-5 if name in ("llama-llama3", "phi3-longrope") else 1e-9)


@pytest.mark.parametrize("name", gguf_files.NAMES)
def test_every_family_with_all_types_in_one_file(name: str) -> None:
    agrees(name, gguf_files.TYPES)


@pytest.mark.parametrize("kind", gguf_files.TYPES)
def test_every_type(kind: str) -> None:
    agrees("llama", kind)


@pytest.mark.parametrize("name", ["llama-biased", "smollm3", "gemma2", "gpt2"])
def test_sizes_that_no_block_of_256_fits(name: str) -> None:
    agrees(name, gguf_files.SIMPLE)


@pytest.mark.parametrize("name, mix", [("qwen2", "q4_k_m"), ("llama", "q4_k_m"), ("qwen3", "q5_k"), ("gemma3", "gemma")])
def test_mixes_as_real_files_have_them(name: str, mix: str) -> None:
    """Queries and values of different types, gate and up too; a quantised embedding that is the head as well."""
    agrees(name, mix)


def test_divisors_of_llama3_are_its_scaling() -> None:
    divided = load_decoder(gguf_files.written("llama-llama3", "Q8_0").path, torch.float64, CPU, 256).ropes
    published = gguf_files.written("llama-llama3", "Q8_0").model.model.rotary_emb.inv_freq
    angles = torch.arange(256)[:, None, None] * published
    assert (divided[0][0] - angles.cos()).abs().max() < 1e-4
    assert (divided[0][1] - angles.sin()).abs().max() < 1e-4


# ---------------------------------------------------------------- what the native kernels hold


def extremes(kind: str, rows: int, inputs: int) -> np.ndarray:
    """Random rows among which all bits are set, none is, and the scales are the largest and smallest there are."""
    made = gguf_files.random_rows(kind, rows, inputs, 0.1, seed=5)
    if kind not in gguf_files.HALVES:
        return made
    size = gguf_files.gguf.GGML_QUANT_SIZES[gguf_files.gguf.GGMLQuantizationType[kind]][1]
    blocks = made.reshape(-1, size)
    blocks[1], blocks[2] = 0xFF, 0
    for number, scale in enumerate((-3.0, 0.0, 65504.0, -65504.0, 6e-8, -0.0), 1):
        for place in gguf_files.HALVES[kind]:
            blocks[number, place : place + 2] = np.array([scale], "<f2").view(np.uint8)
    return made


@KERNELS
@pytest.mark.parametrize("kind", FORMS)
def test_native_formats_hold_the_numbers_of_each_type(kind: str) -> None:
    """Also with the rows of each head in another order, and rows of two tensors on top of each other."""
    inputs = 512 if kind in gguf_files.SUPER else 416
    rows, more = extremes(kind, 72, inputs), gguf_files.random_rows(kind, 40, inputs, 1.0, seed=6)
    values, others = (torch.from_numpy(gguf_files.values_of(kind, r)) for r in (rows, more))
    one, two = gguf_files.blocks_of([(kind, rows)]), gguf_files.blocks_of([(kind, rows), (kind, more)])
    turned = values.view(6, 6, 2, inputs).transpose(1, 2).reshape(72, inputs)
    for blocks, expected in ((one, values), (permuted(one, 6), turned), (two, torch.cat((values, others)))):
        packed = Packed(blocks, None, FORMS[kind], gated=False)
        picked = torch.randperm(len(expected), generator=torch.Generator().manual_seed(1))
        assert torch.equal(packed[picked], expected[picked])
        assert torch.equal(blocks.dequantise(), expected)


BYTES = {"IQ4_NL": 8.5 / 4.5, "Q3_K": 6.5625 / 3.4375}  # in the format of a larger type


@KERNELS
@pytest.mark.parametrize("kind", FORMS)
def test_native_formats_take_the_bytes_of_the_file(kind: str) -> None:
    rows = np.tile(gguf_files.random_rows(kind, 8, 1024, 1.0, seed=7), (128, 1))
    packed = Packed(gguf_files.blocks_of([(kind, rows)]), None, FORMS[kind], gated=False)
    ratio = packed.bytes / rows.nbytes / BYTES.get(kind, 1.0)
    assert ratio < (1.1 if kind in ("Q4_0", "Q4_1", "Q4_K", "Q8_0") else 1.25)


@KERNELS
def test_weight_bytes_are_those_of_the_matrices() -> None:
    native.start(2)
    path = gguf_files.written("qwen2", "q4_k_m").path
    decoder = NativeDecoder(load_config(path), path, "bfloat16", 64, keep=True)
    assert decoder.precision.startswith("q4_k and q6_k, native")
    assert 1.0 <= decoder.weight_bytes / path.stat().st_size < 1.1


# ---------------------------------------------------------------- what the native kernels say


class Rounded(Decoder):
    """The decoder on torch whose linear layers read activations as native products do: int8, by groups of 64."""

    def _linear(self, x: Tensor, linear: Linear) -> Tensor:
        pad = -x.shape[-1] % 64
        groups = torch.nn.functional.pad(x, (0, pad)).unflatten(-1, (-1, 64))
        scale = (groups.abs().amax(-1, keepdim=True) / 127).clamp(min=1e-30)
        rounded = ((groups / scale).round() * scale).flatten(-2)[..., : x.shape[-1]]
        return super()._linear(rounded, linear)


@functools.cache
def kept(path: Path) -> NativeDecoder:
    native.start(2)
    return NativeDecoder(load_config(path), path, "float32", 128, keep=True)


NATIVE = [("llama", kind) for kind in GROUPED] + [(name, GROUPED) for name in gguf_files.NAMES]
NATIVE += [("qwen2", "q4_k_m"), ("smollm3", "q5_k"), ("gemma3", "gemma"), ("llama-biased", ("Q4_0", "Q8_0", "Q5_1"))]


@KERNELS
@pytest.mark.parametrize("name, kinds", NATIVE, ids=str)
def test_native_kernels_round_activations_and_nothing_else(name: str, kinds: gguf_files.Kinds) -> None:
    """Measured: the root mean square of the difference, relative to the logits'. Where an activation lies between two
    integers, float32 and float64 may choose either, which shows here as about a hundredth of that rounding itself."""
    path, text = gguf_files.written(name, kinds).path, ids(20)
    rounded = logits(Rounded(load_config(path), path, torch.float64, CPU, 128), text)
    found = logits(kept(path), text)
    plain = logits(load_decoder(path, torch.float64, CPU, 128), text)
    print("ROUND", name, off(found, rounded), off(plain, rounded))
    assert off(found, rounded) < 0.3 * off(plain, rounded)
