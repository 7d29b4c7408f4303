"""Decoders on torch with packed matrices: weights are those of the file, or rounded like those of
the native kernels, and forward passes equal those with the same weights as floats."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from forerun.draft.proposer import view_of
from forerun.draft.suffix import Suffix
from forerun.engine.engine import Engine
from forerun.kernels import native
from forerun.kernels.device_matrix import DeviceMatrix
from forerun.models import decoder as decoder_module
from forerun.models.config import load_config
from forerun.models.decoder import Decoder, load_decoder
from forerun.models.gguf import blocks
from forerun.models.quantized import QuantizedMatrix, keep_packed, matrix_of
from forerun.runtime.native import NativeDecoder
from forerun.runtime.torch_runner import Runner
from tests import families, gguf_files, tiny
from tests.engine import build
from tests.gguf_files import extreme_rows, random_rows
from tests.models.checks import CPU, compiled
from tests.quantise import checkpoint, save
from tests.quantise import linears as linears_of
from tests.runtime.test_captured import RecordedOperations, both, chain, compare_passes, pair


def load(path: Path, packing: str, dtype: torch.dtype = torch.float32) -> Decoder:
    return load_decoder(path, dtype, CPU, 256, packing=packing)


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the notes about matrices that are not packed."""
    found: list[str] = []
    monkeypatch.setattr(decoder_module, "note", found.append)
    return found


def linears(decoder: Any) -> list[Any]:
    """Return all linear layers, in the same order for the same family."""
    return [each for layer in decoder.weights.layers for each in layer.matrices] + [
        decoder.weights.head
    ]


def dequantized(weight: Any) -> Tensor:
    return weight.dequantize() if isinstance(weight, DeviceMatrix) else weight


def check_weights(packed: Decoder, exact: Decoder) -> None:
    """Assert that all linear layers have the weights of a decoder with floats."""
    for found, reference in zip(linears(packed), linears(exact), strict=True):
        assert torch.equal(dequantized(found.weight), reference.weight)


def forms(decoder: Decoder) -> list[str]:
    """Return the forms of the first layer's matrices and of the head."""
    layer = decoder.weights.layers[0]
    weights = [each.weight for each in (*layer.matrices, decoder.weights.head)]
    return [weight.form if isinstance(weight, DeviceMatrix) else "float" for weight in weights]


def with_float_weights(decoder: Decoder) -> Decoder:
    """Return the same decoder with dequantized matrices."""
    found = copy.copy(decoder)
    found.weights = copy.deepcopy(decoder.weights)
    for linear in linears(found):
        linear.weight = dequantized(linear.weight).contiguous()
    if isinstance(found.weights.embed, DeviceMatrix):
        found.weights.embed = dequantized(found.weights.embed)
    return found


# ---------------------------------------------------------------- weights


@pytest.mark.parametrize(
    "layout, bits, size, symmetric, expected",
    [
        ("gptq", 4, 32, True, "int4"),
        ("gptq", 4, 64, False, "int4"),
        ("gptq", 4, 128, False, "int4"),
        ("gptq_v2", 4, 0, False, "int4"),
        ("gptq_v2", 8, 32, True, "int8"),
        ("awq", 4, 32, False, "int4"),
        ("awq", 4, 128, True, "int4"),
        ("packed", 4, 0, True, "int4"),
        ("packed", 8, 64, True, "int8"),
        ("plain", 8, 0, True, "int8"),
        ("gptq", 4, 16, False, "int8"),
        ("gptq", 4, 8, True, "float"),
        ("gptq", 8, 32, False, "float"),
    ],
)
def test_stored_integers_stay_packed(
    layout: str, bits: int, size: int, symmetric: bool, expected: str, tmp_path: Path, notes: Any
) -> None:
    """A packed form holds them exactly; others are dequantized, with a note."""
    wide = dict(hidden_size=128, intermediate_size=256)
    checkpoint(tmp_path, layout, bits, size, symmetric, **wide)
    decoder, exact = load(tmp_path, "stored"), load(tmp_path, "")
    assert forms(decoder) == [expected] * 4 + ["float"]
    check_weights(decoder, exact)
    reason = "12 integers whose groups or zero points do not fit"
    note = f"matrices that run in float32, since they cannot be packed on this device: {reason}"
    assert notes == ([note] if expected == "float" else [])


def test_groups_of_scattered_inputs_are_dequantized(tmp_path: Path) -> None:
    checkpoint(tmp_path, "gptq", shuffled=True)
    assert forms(load(tmp_path, "stored")) == ["float"] * 5


@pytest.mark.parametrize("scale", ["tensor", "channel", "block"])
@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_8_bit_floats_stay_packed(
    stored: torch.dtype, scale: str, tmp_path: Path, notes: list[str]
) -> None:
    """Packed are e4m3 values with a scale per matrix, output or block of 128 x 128, not e5m2."""
    sizes = dict(hidden_size=128, intermediate_size=256)
    tiny.hf_model("llama", gain=0.5, **sizes).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for stem in linears_of(tensors):
        weight = tensors[f"{stem}.weight"]
        rows, columns = weight.shape
        shape = dict(tensor=(1, 1), channel=(rows, 1), block=(-(-rows // 128), columns // 128))
        tensors[f"{stem}.weight_scale_inv"] = torch.rand(shape[scale]) * 0.1 + 0.01
        tensors[f"{stem}.weight"] = (weight * 4).to(stored)
    block = [128, 128] if scale == "block" else None
    save(tmp_path, tensors, quantization_config=dict(quant_method="fp8", weight_block_size=block))
    decoder, exact = load(tmp_path, "stored"), load(tmp_path, "")
    expected = "fp8" if stored == torch.float8_e4m3fn else "float"
    assert forms(decoder) == [expected] * 4 + ["float"]
    check_weights(decoder, exact)
    assert ["12 8-bit floats" in note for note in notes] == ([True] if expected == "float" else [])


def test_8_bit_floats_with_nan_are_dequantized() -> None:
    values = torch.ones(64, 128).to(torch.float8_e4m3fn)
    matrix = QuantizedMatrix(values, torch.ones(64, 1), torch.zeros(128, dtype=torch.int64))
    assert keep_packed(matrix, CPU) is not None
    values[3, 5] = torch.nan
    assert keep_packed(matrix, CPU) is None


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize(
    "kind, form",
    [("Q8_0", "int8"), ("Q4_0", "int4"), ("Q4_1", "int4"), ("Q5_0", "int8"), ("IQ4_NL", "float")],
)
def test_blocks_of_gguf_files_stay_packed(kind: str, form: str, name: str, notes: Any) -> None:
    """This includes reordered rows, and a tied head, which shares the memory of the embedding."""
    path = gguf_files.written(name, kind).path
    decoder, exact = load(path, "stored"), load(path, "")
    assert forms(decoder) == [form] * 5
    check_weights(decoder, exact)
    ids = torch.tensor([5, 0, 7])
    assert torch.equal(decoder.weights.embed[ids], exact.weights.embed[ids])
    if decoder.config.tied and form != "float":
        assert decoder.weights.head.weight is decoder.weights.embed
    assert len(notes) == (form == "float") and all("IQ4_NL" in note for note in notes)


# bits per weight: values, scales and minima of groups, and for K types also of blocks
BITS = dict(Q8_0=8.5, Q4_0=4.5, Q4_1=5, Q5_0=8.5, Q5_1=9)
BITS |= dict(Q3_K=8.5625, Q4_K=4.625, Q5_K=8.625, Q6_K=8.5625)


@pytest.mark.parametrize("kind", blocks.INTEGERS)
def test_integers_of_blocks_are_exact(kind: str) -> None:
    """Blocks are random, or have all bits, no bits, or the largest and smallest scales."""
    for rows in (random_rows(kind, 64, 512, 1.0, seed=3), extreme_rows(kind, 64, 512)):
        integers = blocks.integers(kind, torch.from_numpy(rows))
        matrix = matrix_of(integers)
        assert torch.equal(matrix.dequantize(), blocks.floats(kind, rows))
        assert matrix.nbytes == 64 * 512 * BITS[kind] / 8


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_experts_of_gguf_files_stay_packed(name: str) -> None:
    path = gguf_files.written(name, "Q8_0").path
    decoder, exact = load(path, "stored"), load(path, "")
    check_weights(decoder, exact)
    for layer in decoder.weights.layers:
        if layer.experts is not None:
            assert layer.experts.up.weight.form == layer.experts.down.weight.form == "int8"


def test_linear_layers_of_one_type_stay_packed() -> None:
    """A linear layer of several types is dequantized."""
    path = gguf_files.written("llama", ("Q4_0", "Q8_0", "Q4_0")).path
    decoder, exact = load(path, "stored"), load(path, "")
    assert {"int4", "int8", "float"} >= set(forms(decoder)) != {"float"}
    check_weights(decoder, exact)


@compiled
@pytest.mark.parametrize("packing", ["int8", "int4"])
@pytest.mark.parametrize("source", ["floats", "tied", "gptq", "awq", "plain", "Q4_0", "Q5_1"])
def test_rounded_weights_are_those_of_the_native_kernels(
    source: str, packing: str, tmp_path: Path
) -> None:
    """Sources are floats, quantised checkpoints and GGUF files; with int4 the head is int8."""
    native.start(1)
    path = tmp_path
    if source in ("floats", "tied"):
        path = tiny.family("llama" if source == "floats" else "gemma3")
    elif source.startswith("Q"):
        path = gguf_files.written("llama", source).path
    else:
        bits, size = (8, 0) if source == "plain" else (4, 32)
        checkpoint(path, source, bits, size, symmetric=source != "awq")
    theirs = NativeDecoder(load_config(path), path, packing, 64)
    decoder = load(path, packing, torch.bfloat16)
    assert forms(decoder) == [packing] * 4 + ["int8"]
    assert decoder.precision.startswith("int8, torch" if packing == "int8" else "int4 and int8, ")
    for i, layer in enumerate(decoder.weights.layers):
        for part in ("qkv", "out", "down"):  # their rows are in order
            weight = getattr(layer, part).weight
            packed = getattr(theirs.weights.layers[i], part)
            weight = replace(weight, dtype=torch.float32)
            assert torch.equal(weight.dequantize(), packed[torch.arange(weight.outputs)])
    head = replace(decoder.weights.head.weight, dtype=torch.float32)
    assert torch.equal(head.dequantize(), theirs.weights.head[torch.arange(head.outputs)])


# ---------------------------------------------------------------- forward passes


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("packing", ["int8", "int4"])
def test_forward_passes_equal_those_with_float_weights(packing: str, dtype: torch.dtype) -> None:
    """This holds with and without recorded graphs, for other tokens, lengths and pages."""
    decoder = load(tiny.family("llama"), packing, dtype)
    wide = with_float_weights(decoder)
    sizes = dict(tokens=64, page=4, slots=1)
    logits = []
    for each in (decoder, wide):
        runner = Runner(each, **sizes)
        assert runner.cache.pages.grow(0, 9)
        logits.append(runner.forward([chain(0, list(range(5, 14)))]).logits)
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.1}[dtype]
    torch.testing.assert_close(*logits, rtol=0, atol=tolerance * float(logits[1].abs().max()))
    if dtype == torch.float64:
        recorded, _, graphs = pair(decoder)
        plain = pair(wide)[1]
        compare_passes((recorded, plain))
        assert graphs.count and recorded.captured is not None and not recorded.captured.failed


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", [*tiny.FAMILIES, *families.MODELS])
def test_packed_layers_of_every_family(name: str, notes: Any) -> None:
    """Experts are packed; routers and recurrent layers stay floats."""
    decoder = load(tiny.family(name), "int8", torch.float64)
    for layer in decoder.weights.layers:
        experts = [] if layer.experts is None else [layer.experts.up, layer.experts.down]
        for each in [layer.out, layer.down, *experts, decoder.weights.head]:
            assert each is None or isinstance(each.weight, DeviceMatrix)
    runners = [pair(each)[1] for each in (decoder, with_float_weights(decoder))]
    both(runners, [chain(0, list(range(5, 14)))])
    assert any(" router" in note for note in notes) == (decoder.config.experts is not None)


@pytest.mark.parametrize("packing", ["int8", "int4", "stored"])
def test_speculation_is_lossless(packing: str) -> None:
    """This holds with recorded graphs, greedy and sampled requests, and small chunks."""
    path = gguf_files.written("llama", "Q4_0").path
    decoder = load(path, packing, torch.float64)
    texts = []
    for draft in ("off", "suffix"):
        for graphs in (None, RecordedOperations()):
            runner = Runner(decoder, tokens=1024, page=4, slots=8, graphs=graphs)
            engine = Engine(runner, {"suffix": Suffix(shortest=1)}, chunk=16)
            requests = build.run(engine, draft, None, count=4)
            texts.append([request.tokens for request in requests])
            if draft == "suffix":
                assert any(request.stats.accepted for request in requests)
    assert texts[0] == texts[1] == texts[2] == texts[3]


@pytest.mark.parametrize("packing", ["int8", "stored"])
def test_drafters_share_the_packed_embedding_and_head(packing: str) -> None:
    path = gguf_files.written("llama", "Q8_0").path
    decoder = load(path, packing, torch.bfloat16)
    view = view_of(decoder)
    exact = view_of(with_float_weights(decoder))
    ids = torch.tensor([[3, 5], [0, 9]])
    x = torch.randn(4, decoder.config.hidden)
    assert torch.equal(view.table[ids], exact.table[ids])
    torch.testing.assert_close(view.head(x), exact.head(x), rtol=0.01, atol=0.01)


# ---------------------------------------------------------------- memory


def test_only_the_packed_bytes_are_kept() -> None:
    """Sizes are multiples of the tiles, 64 by 128, to which other matrices are padded."""
    path = tiny.new_directory("llama")
    sizes = dict(hidden_size=128, intermediate_size=256, num_attention_heads=4)
    tiny.hf_model("llama", num_key_value_heads=4, vocab_size=256, **sizes).save_pretrained(path)
    weights = (3 * 128 * 128 + 128 * 128 + 2 * 128 * 256 + 128 * 256) * 3
    outputs = (3 * 128 + 128 + 2 * 256 + 128) * 3
    head, head_scales = 256 * 128, 256 * 4
    decoder = load(path, "int8", torch.bfloat16)
    assert decoder.weight_bytes == weights + 4 * outputs + head + head_scales
    decoder = load(path, "int4", torch.bfloat16)
    assert decoder.weight_bytes == weights // 2 + weights // 32 * 2 + head + head_scales
    stored = [each.weight for each in linears(decoder)]
    tensors = [t for m in stored for t in (m.values, m.scale, m.zero) if t is not None]
    assert sum(t.untyped_storage().nbytes() for t in tensors) == decoder.weight_bytes
