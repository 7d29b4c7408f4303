"""Packed matrices on torch devices: their values, their sizes, and the rounding of floats, which is
that of the native kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.errors import StateError
from forerun.kernels import device_matrix, native, reference
from forerun.kernels.device_matrix import DeviceMatrix, round_to_integers
from forerun.runtime.packed import PackedMatrix, lay_out

compiled = pytest.mark.skipif(native.library() is None, reason=native.reason() or "compiled")


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def integers(seed: int, low: int, high: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high + 1, shape, generator=generator).to(torch.int8)


def every_fp8(rows: int, inputs: int) -> Tensor:
    """Return a matrix with the bits of all finite e4m3 values in turn."""
    bits = torch.arange(256, dtype=torch.uint8)
    bits = bits[bits & 0x7F != 0x7F]  # leaves out nan
    return bits.repeat(-(-rows * inputs // len(bits)))[: rows * inputs].view(rows, inputs)


@pytest.mark.parametrize("shape", [(5, 96), (64, 128), (70, 512)])
@pytest.mark.parametrize("group", [0, 16, 32, 64, 128, 256])
@pytest.mark.parametrize(
    "form",
    ["int8", "int8 with minima", "int4", "int4 with minima", "int4 with zero points", "fp8"],
)
def test_stored_values_are_exact(form: str, group: int, shape: tuple[int, int]) -> None:
    """Every element is value times scale plus minimum, read by row, by index and in products."""
    outputs, inputs = shape
    if inputs % (group or inputs) or (group < 32 and form not in ("int8", "fp8")):
        return
    groups = inputs // group if group else 1
    scale = random(1, outputs, groups).half()
    zero = minimum = None
    if form == "int4 with zero points":
        zero = integers(2, 0, 15, outputs, groups)
        values = integers(3, 0, 15, outputs, inputs) - zero.repeat_interleave(group, 1)
        zero = zero.view(torch.uint8)
    elif form == "fp8":
        values = every_fp8(outputs, inputs)
    else:
        low, high = {"int8": (-128, 127), "int4": (-8, 7)}.get(form, (0, 15))
        values = integers(3, low, high, outputs, inputs)
    matrix_form = form.split()[0]
    numbers = values.view(torch.float8_e4m3fn) if form == "fp8" else values
    expected = numbers.float() * scale.float().repeat_interleave(inputs // groups, 1)
    if form.endswith("minima"):
        minimum = random(6, outputs, groups)
        expected += minimum.repeat_interleave(group, 1)
    matrix = DeviceMatrix.from_values(matrix_form, values, scale, zero, minimum)
    assert matrix.shape == shape
    assert torch.equal(matrix.dequantize(), expected)
    assert torch.equal(matrix.dequantize(2, 3), expected[2:5])
    ids = torch.tensor([[4, 0], [1, 1]])
    assert torch.equal(matrix[ids], expected[ids])
    x, bias = random(4, 3, inputs), random(5, outputs)
    assert torch.equal(
        reference.linear(x, matrix, bias), reference.linear(x, matrix.dequantize(), bias)
    )


def test_products_dequantize_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, x = DeviceMatrix.from_rounded("int4", random(1, 70, 96)), random(2, 4, 96)
    at_once = matrix.multiply(x, None)
    monkeypatch.setattr(device_matrix, "CHUNK", 128 * 9)
    for bias in (None, random(3, 70)):
        found = matrix.multiply(x, bias)
        expected = at_once if bias is None else at_once + bias
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_the_size_in_bytes_is_that_of_integers_and_scales() -> None:
    weight = random(1, 128, 256)
    assert DeviceMatrix.from_floats(weight).nbytes == 128 * 256 * 4
    assert DeviceMatrix.from_rounded("int8", weight).nbytes == 128 * 256 + 128 * 4
    assert DeviceMatrix.from_rounded("int4", weight).nbytes == 128 * 256 // 2 + 128 * 8 * 2
    blocks = DeviceMatrix.from_values("fp8", every_fp8(128, 256), torch.ones(128, 2))
    assert blocks.nbytes == 128 * 256 + 128 * 2 * 4
    values, scale = integers(1, 0, 15, 128, 256), random(2, 128, 8).half()
    matrix = DeviceMatrix.from_values("int4", values, scale, minimum=scale)
    assert matrix.nbytes == 128 * 256 // 2 + 128 * 8 * 4


def test_values_and_products_have_the_dtype_of_the_model() -> None:
    weight = random(1, 70, 96)
    exact = DeviceMatrix.from_rounded("int8", weight).dequantize()
    matrix = DeviceMatrix.from_rounded("int8", weight, torch.bfloat16)
    assert torch.equal(matrix.dequantize(), exact.bfloat16())
    assert matrix.multiply(random(2, 3, 96).bfloat16()).dtype == torch.bfloat16


def test_groups_that_fit_no_tile_are_refused() -> None:
    values = integers(1, -8, 7, 4, 96)
    for form, groups in (("int4", 1), ("int4", 6), ("int8", 5), ("int8", 2)):
        with pytest.raises(StateError):
            DeviceMatrix.from_values(form, values, torch.ones(4, groups))


def hard_to_round(kind: str) -> Tensor:
    """Return a matrix with ties, zeros or values of all magnitudes."""
    weight = random(3, 96, 130)
    if kind == "ties":
        weight = (weight * 3).round() / 4
    if kind == "signs":
        weight = weight.sign()
    if kind == "sizes":
        weight *= torch.exp2(12 * random(4, 96, 130))
    if kind == "tiny":
        weight *= 1e-6
    if kind == "zeros":
        weight[::3], weight[:, :40] = 0, 0
    return weight


@compiled
@pytest.mark.parametrize("kind", ["normal", "ties", "signs", "sizes", "tiny", "zeros"])
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_rounding_is_that_of_the_native_kernels(form: str, kind: str) -> None:
    """The bits agree; another test compares the layout with that of the compiled code."""
    native.start(1)
    weight = hard_to_round(kind)
    packed = PackedMatrix(weight, None, form, gated=False)
    data, scale = lay_out(form, packed.rows, packed.matrix.padded, *round_to_integers(form, weight))
    assert (packed.data == data.numpy()).all()
    assert (packed.scale == scale.numpy().view(packed.scale.dtype)).all()
    matrix: Any = DeviceMatrix.from_rounded(form, weight)
    assert torch.equal(matrix.dequantize(), packed[torch.arange(96)])
