"""Products of a few rows equal their reference, and a row has the bits of that row alone."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from forerun.kernels import reference
from forerun.kernels.device_matrix import DeviceMatrix
from forerun.kernels.triton import linear as kernels
from forerun.kernels.triton.linear import linear, linear_parts, parts_of
from forerun.models.gguf import blocks
from forerun.models.quantized import matrix_of
from tests.gguf_files import random_rows
from tests.kernels.test_device_matrix import every_fp8
from tests.kernels.triton.compiled import check_machine_code
from tests.kernels.triton.inputs import DEVICE, FLOATS, random


def integers(seed: int, low: int, high: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high + 1, shape, generator=generator).to(DEVICE, torch.int8)


def matrices(outputs: int, inputs: int) -> dict[str, DeviceMatrix]:
    """Return a matrix in each form, with scales and minima for groups of different sizes."""
    found = {"float": DeviceMatrix.from_floats(random(1, outputs, inputs))}
    values, scale = integers(2, -128, 127, outputs, inputs), random(3, outputs) / 100
    found["int8"] = DeviceMatrix.from_values("int8", values, scale)
    bits = every_fp8(outputs, inputs).to(DEVICE)
    found["fp8"] = DeviceMatrix.from_values("fp8", bits, random(3, outputs) / 100)
    if inputs % 128 == 0:
        scale = random(3, outputs, inputs // 128) / 100
        found["fp8 by 128"] = DeviceMatrix.from_values("fp8", bits, scale)
    for group in (16, 32, 64, 128, 256):
        if inputs % group == 0:
            scale = random(4, outputs, inputs // group) / 100
            found[f"int8 by {group}"] = DeviceMatrix.from_values("int8", values, scale)
            minimum = random(8, *scale.shape) / 10
            found[f"int8 by {group} with minima"] = DeviceMatrix.from_values(
                "int8", values, scale, minimum=minimum
            )
    for group in (32, 64, 128, 256):
        if inputs % group == 0:
            scale = (random(5, outputs, inputs // group) / 4).half()
            values = integers(6, -8, 7, outputs, inputs)
            found[f"int4 by {group}"] = DeviceMatrix.from_values("int4", values, scale)
            zero = integers(7, 0, 15, outputs, inputs // group)
            values = values + 8 - zero.repeat_interleave(group, dim=1)
            found[f"int4 by {group} with zero points"] = DeviceMatrix.from_values(
                "int4", values, scale, zero.view(torch.uint8)
            )
            values, minimum = integers(6, 0, 15, outputs, inputs), random(8, *scale.shape).half()
            found[f"int4 by {group} with minima"] = DeviceMatrix.from_values(
                "int4", values, scale, minimum=minimum
            )
    return found


# rows, outputs, inputs: odd sizes, one part and several, a last part smaller than the others
SHAPES = [(1, 1, 1), (3, 65, 96), (16, 64, 1000), (17, 130, 32), (40, 7, 512)]


def case_equals_reference() -> None:
    for rows, outputs, inputs in SHAPES:
        x, bias = random(7, rows, inputs), random(8, outputs)
        for form, matrix in matrices(outputs, inputs).items():
            weight = matrix.dequantize()
            assert weight.shape == (outputs, inputs), form
            found = linear(x, matrix, bias)
            expected = reference.linear(x, weight, bias)
            assert torch.equal(reference.linear(x, matrix, bias), expected), form
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4 * inputs**0.5)
            if rows == 3:
                assert torch.equal(linear(x, matrix), linear(x, matrix, torch.zeros_like(bias)))


def case_bits_of_a_row() -> None:
    """The bits are the same alone, anywhere among up to 64 rows, and beside rows that are not
    finite."""
    for inputs in (600, 256):
        x, by_form = random(9, 64, inputs).to(FLOATS), matrices(5, inputs)
        by_form["float"] = DeviceMatrix.from_floats(random(1, 5, inputs).to(FLOATS))
        forms = {"float", "int8", "int8 by 32", "int4 by 32", "int4 by 128 with zero points"}
        forms |= {
            "fp8",
            "fp8 by 128",
            "int8 by 16",
            "int4 by 32 with minima",
            "int8 by 32 with minima",
        }
        for form in forms & by_form.keys():
            matrix = by_form[form]
            together = linear(x, matrix)
            for row in (7, 40):
                assert torch.equal(linear(x[row : row + 1], matrix)[0], together[row]), form
            assert torch.equal(linear(x[5:22], matrix), together[5:22]), form
            assert torch.equal(linear(x.flip(0)[:33], matrix), together.flip(0)[:33]), form
            broken = x[:12].clone()
            broken[3], broken[5, 2], broken[6] = torch.nan, torch.inf, 1e38
            kept = [0, 1, 2, 4, 7, 11]
            assert torch.equal(linear(broken, matrix)[kept], together[kept]), form


def case_parts() -> None:
    """The number of parts depends on the matrix's shape only, and zero padding changes no bit."""
    shapes = {(6144, 4096): 4, (4096, 14336): 4, (28672, 4096): 1, (3072, 2048): 8, (64, 128): 1}
    for (outputs, inputs), parts in shapes.items():
        weight = torch.empty(outputs, inputs, dtype=torch.int8, device="meta")
        matrix = DeviceMatrix("int8", weight, None, outputs, inputs, inputs)
        assert parts_of(matrix) == parts
    x, weight = random(1, 5, 1000), random(2, 70, 1000)
    narrow, wide = DeviceMatrix.from_floats(weight), random(2, 128, 1024) * 0
    wide[:70, :1000] = weight
    padded = linear_parts(torch.nn.functional.pad(x, (0, 24)), DeviceMatrix.from_floats(wide))
    assert torch.equal(padded[..., :70], linear_parts(x, narrow))


def case_dtypes() -> None:
    """bfloat16 in and out; the interpreter truncates where a GPU rounds."""
    x, matrix = (
        random(1, 9, 256).bfloat16(),
        DeviceMatrix.from_floats(random(2, 64, 256).bfloat16()),
    )
    found = linear(x, matrix)
    assert found.dtype == torch.bfloat16
    expected = reference.linear(x.float(), matrix.dequantize().float())
    torch.testing.assert_close(found.float(), expected, rtol=2**-7, atol=1e-3)
    assert torch.equal(linear(x, matrix, dtype=torch.float32), linear_parts(x, matrix).sum(0))


def case_gguf_blocks() -> None:
    """Values of blocks are those that the gguf package reads."""
    for kind in ("Q8_0", "Q4_0", "Q4_1", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "Q3_K"):
        rows = random_rows(kind, 70, 512, 1.0, 4)
        held = blocks.integers(kind, torch.from_numpy(rows).to(DEVICE))
        matrix = matrix_of(held)
        assert torch.equal(matrix.dequantize(), blocks.floats(kind, rows).to(DEVICE)), kind
        x = random(1, 6, 512)
        expected = reference.linear(x, matrix.dequantize())
        torch.testing.assert_close(linear(x, matrix), expected, rtol=1e-5, atol=2e-3)


def compile_products() -> None:
    for form, stored, group, extra in (
        ("float", "*bf16", 0, ""),
        ("int8", "*i8", 0, ""),
        ("int8", "*i8", 128, ""),
        ("int8", "*i8", 32, ""),
        ("int8", "*i8", 32, "minima in blocks"),
        ("int8", "*i8", 16, "in blocks"),
        ("fp8", "*u8", 0, ""),
        ("fp8", "*u8", 128, ""),
        ("int4", "*u8", 32, ""),
        ("int4", "*u8", 32, "minima"),
        ("int4", "*u8", 32, "minima in blocks"),
        ("int4", "*u8", 128, "zero points"),
    ):
        kinds = dict(x="*bf16", values=stored, parts="*fp32", zero="*u8")
        is_half = (group == 32 or form == "int4") and not extra
        has_minimum, has_blocks = "minima" in extra, "blocks" in extra
        kinds["scale"] = "*i8" if has_blocks else "*fp16" if is_half else "*fp32"
        kinds |= dict(minimum=kinds["scale"], block_scale="*fp16", block_minimum="*fp16")
        for rows in (16, 32) if form in ("float", "int4") else (32,):  # these need most
            constants = dict(
                FORM=kernels.FORMS[form],
                K=4096,
                GROUP=group,
                GROUPS=4096 // group if group else 1,
                STEP=min(group, 128) or 128,
                PER_PART=8,
                IS_EVEN=True,
                IS_WHOLE=True,
                HAS_ZERO=extra == "zero points",
                HAS_MINIMUM=has_minimum,
                PER_BLOCK=256 // group if has_blocks else 0,
                BM=rows,
                BN=kernels.BLOCK_N,
                BK=kernels.BLOCK_K,
                DOT=tl.bfloat16,
            )
            check_machine_code(
                kernels._multiply,
                kinds,
                constants,
                registers=136 if has_blocks else 112,
                shared=100,
                warps=kernels.warps_of(rows, has_minimum),
                stages=kernels.STAGES,
                contains="HMMA",
                aligned=("outputs", "row_stride", "inputs"),
            )
    kinds = dict(parts="*fp32", bias="*bf16", out="*bf16")
    check_machine_code(
        kernels._join, kinds, dict(PARTS=8, HAS_BIAS=True, BN=kernels.JOINED), registers=96
    )
