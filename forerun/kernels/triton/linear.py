"""Products of a few rows with a matrix: x [M, K] times W [N, K] transposed, for M up to 64 or so.

A decoding pass over few rows is bound by the bytes of W, so W may be stored as floats, as int8 or
fp8 with a scale per output or per group of inputs, or as int4 with a scale per group; groups may
have zero points or minima (`DeviceMatrix`). Values are converted exactly, a group's sum is
multiplied by its scale in float32, and all sums are float32: the numbers are those that W stands
for, and activations are not rounded. A minimum is multiplied by the sum of x over its group, which
is a product with ones, since the order of other sums depends on the number of rows.

A row of the result has the same bits whatever the other rows are, and however many there are. The
tiles, the number of parts into which K is divided, and the order in which parts are added depend on
(N, K, form) alone, never on M. Parts are written apart and added in order by what reads them
(`join_parts`, or a kernel of `fused`), so there are no atomic additions.

Twin: `kernels.reference.linear(x, weight, bias)`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.kernels.device_matrix import BLOCK_K, BLOCK_N, DeviceMatrix
from forerun.kernels.triton.formats import dot_type

FORMS = {"float": 0, "int8": 1, "int4": 2, "fp8": 3}
FEW_ROWS = 16  # rows of a tile; above, tiles have twice as many, with the same instructions
PROGRAMS = 256  # programs that keep the memory of a large card busy
WARPS = 4
STAGES = 4
JOINED = 1024  # outputs of a program that adds parts


def parts_of(weight: DeviceMatrix, columns: int | None = None) -> int:
    """Return the number of parts into which K is divided, which depends on the shape alone.

    columns: tiles of a part that are computed at once; by default those of all outputs."""
    blocks, columns = weight.padded_inputs // BLOCK_K, columns or len(weight.values) // BLOCK_N
    parts = 1
    while parts < blocks and parts * columns < PROGRAMS:
        parts *= 2
    return parts if parts <= blocks else parts // 2


def warps_of(block_m: int, has_minimum: bool) -> int:
    """Return the warps of a tile of so many rows; sums of x beside 32 rows need registers."""
    return WARPS if block_m == FEW_ROWS or not has_minimum else 2 * WARPS


def linear(
    x: Tensor,
    weight: DeviceMatrix,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    dot: tl.dtype | None = None,
) -> Tensor:
    """Compute x [M, K] times W transposed, plus bias [N]. -> [M, N] in `dtype`, by default x's

    `dot` as in `linear_parts`."""
    return join_parts(linear_parts(x, weight, dot=dot), bias, dtype or x.dtype)


def linear_parts(x: Tensor, weight: DeviceMatrix, *, dot: tl.dtype | None = None) -> Tensor:
    """Compute x [M, K] times W transposed in parts, whose sum in order is the result. -> float32
    [parts, M, N]

    dot: the number format of the products; by default that of x."""
    rows, inputs = x.shape
    assert inputs == weight.inputs, (x.shape, weight.inputs)
    if x.stride(1) != 1:
        x = x.contiguous()
    parts = parts_of(weight)
    found = torch.empty((parts, rows, weight.outputs), dtype=torch.float32, device=x.device)
    block_m = FEW_ROWS if rows <= FEW_ROWS else 2 * FEW_ROWS
    _multiply[(len(weight.values) // BLOCK_N, parts, triton.cdiv(rows, block_m))](
        x,
        *stored_tensors(weight, found),
        found,
        rows,
        weight.outputs,
        x.stride(0),
        weight.inputs,
        DOT=dot or dot_type(x.dtype),
        **constants_of(weight, parts, block_m),
    )
    return found


def stored_tensors(weight: DeviceMatrix, other: Tensor) -> tuple[Tensor, ...]:
    """Return the values, scales, zero points and minima that a kernel reads, and those of blocks;
    `other` in place of those that a matrix does not have, since a kernel takes no None."""
    more = weight.scale, weight.zero, weight.minimum, weight.block_scale, weight.block_minimum
    return weight.values, *(other if each is None else each for each in more)


def constants_of(weight: DeviceMatrix, parts: int, block_m: int) -> dict[str, Any]:
    """Return the constants and options of a kernel whose tiles have `block_m` rows."""
    groups = 1 if weight.scale is None else weight.scale.shape[1]
    is_grouped = weight.minimum is not None or groups > 1
    group = weight.group if is_grouped else 0
    blocks = weight.padded_inputs // BLOCK_K
    return dict(
        FORM=FORMS[weight.form],
        K=weight.padded_inputs,
        GROUP=group,
        GROUPS=groups if group else 1,
        STEP=min(group, BLOCK_K) or BLOCK_K,
        PER_PART=-(-blocks // parts),
        IS_EVEN=blocks % parts == 0,
        IS_WHOLE=weight.inputs == weight.padded_inputs,
        HAS_ZERO=weight.zero is not None,
        HAS_MINIMUM=weight.minimum is not None,
        PER_BLOCK=0 if weight.block_scale is None else groups // weight.block_scale.shape[1],
        BM=block_m,
        BN=BLOCK_N,
        BK=BLOCK_K,
        num_warps=warps_of(block_m, weight.minimum is not None),
        num_stages=STAGES,
    )


def join_parts(parts: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Add parts [S, M, N] in order, and bias [N]. -> [M, N] in `dtype`"""
    count, rows, outputs = parts.shape
    out = torch.empty((rows, outputs), dtype=dtype, device=parts.device)
    _join[(rows, triton.cdiv(outputs, JOINED))](
        parts.contiguous(),
        parts if bias is None else bias,
        out,
        rows,
        outputs,
        PARTS=count,
        HAS_BIAS=bias is not None,
        BN=JOINED,
    )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _multiply(  # type: ignore[no-untyped-def]
    x,
    values,
    scale,
    zero,
    minimum,
    block_scale,
    block_minimum,
    parts,
    rows,
    outputs,
    row_stride,
    inputs,
    FORM: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    STEP: tl.constexpr,
    PER_PART: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_MINIMUM: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    DOT: tl.constexpr,
):
    """Compute one tile of one part: BM rows, BN outputs, PER_PART blocks of BK inputs.

    The constants are those of `multiply_tile`."""
    part = tl.program_id(1)
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    column = tl.program_id(0).to(tl.int64) * BN
    n = tl.arange(0, BN)
    line = x + m[:, None] * row_stride
    is_row = (m < rows)[:, None]
    acc = multiply_tile(
        line,
        is_row,
        values,
        scale,
        zero,
        minimum,
        block_scale,
        block_minimum,
        column,
        n,
        part * PER_PART * BK,
        inputs,
        FORM,
        K,
        GROUP,
        GROUPS,
        STEP,
        PER_PART,
        IS_EVEN,
        IS_WHOLE,
        HAS_ZERO,
        HAS_MINIMUM,
        PER_BLOCK,
        BM,
        BN,
        BK,
        DOT,
    )
    out = parts + (part * rows + m[:, None]).to(tl.int64) * outputs + (column + n)[None, :]
    tl.store(out, acc, mask=is_row & (column + n < outputs)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def multiply_tile(  # type: ignore[no-untyped-def]
    line,
    is_row,
    values,
    scale,
    zero,
    minimum,
    block_scale,
    block_minimum,
    column,
    n,
    begin,
    inputs,
    FORM: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    STEP: tl.constexpr,
    PER_PART: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_MINIMUM: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    DOT: tl.constexpr,
):
    """Multiply inputs [begin, begin + PER_PART * BK) of BM rows, which begin at `line`, with rows
    column + n of the matrix. -> [BM, BN]

    K is the padded number of inputs. GROUP inputs share a scale, of which an output has GROUPS; 0
    is a scale per output. Each PER_BLOCK scales are multiplied by that of a block; 0 without
    blocks. A step has at most the inputs of one scale, so that their sum is complete before it is
    scaled."""
    HALF: tl.constexpr = STEP // 2
    if FORM == 2:
        tile = values + column * (K // 2) + begin // 2 + n[None, :] * (K // 2)
    else:
        tile = values + column * K + begin + n[None, :] * K
    shift = column * GROUPS + n * GROUPS
    acc = tl.zeros((BM, BN), tl.float32)
    if HAS_MINIMUM:
        # Ones that seem to be loaded: only if both factors of x come from loads of the same width
        # do both products read it in one layout, without which its loads are not pipelined.
        each = tl.arange(0, HALF if FORM == 2 else STEP)
        ones = tl.load(tile + each[:, None], mask=(each < 0)[:, None], other=1).to(DOT)
    for block in range(PER_PART):
        for step in tl.static_range(BK // STEP):
            done = block * BK + step * STEP
            first = begin + done
            is_inside = IS_EVEN or first < K  # the last part may have fewer blocks
            group = shift + (first // GROUP if GROUP > 0 else 0)
            if FORM == 2:
                h = tl.arange(0, HALF)
                both = _read(tile + done // 2 + h[:, None], IS_EVEN, is_inside, 0x88)
                low, high = (both & 15).to(tl.int8), (both >> 4).to(tl.int8)
                if HAS_ZERO:
                    point = _read(zero + group, IS_EVEN, is_inside, 0).to(tl.int8)
                    low, high = low - point[None, :], high - point[None, :]
                elif not HAS_MINIMUM:
                    low, high = low - 8, high - 8
                a = _inputs(line, first + h, is_row, inputs, IS_WHOLE and IS_EVEN).to(DOT)
                b = _inputs(line, first + HALF + h, is_row, inputs, IS_WHOLE and IS_EVEN).to(DOT)
                product = tl.dot(a, low.to(DOT), input_precision="ieee")
                product = tl.dot(b, high.to(DOT), product, input_precision="ieee")
                if HAS_MINIMUM:
                    sums = tl.dot(a, ones, input_precision="ieee")
                    sums = tl.dot(b, ones, sums, input_precision="ieee")
            else:
                k = tl.arange(0, STEP)
                w = _read(tile + done + k[:, None], IS_EVEN, is_inside, 0)
                w = (_from_fp8(w) if FORM == 3 else w).to(DOT)
                a = _inputs(line, first + k, is_row, inputs, IS_WHOLE and IS_EVEN).to(DOT)
                if GROUP == 0:
                    acc = tl.dot(a, w, acc, input_precision="ieee")
                else:
                    product = tl.dot(a, w, input_precision="ieee")
                if HAS_MINIMUM:
                    sums = tl.dot(a, ones, input_precision="ieee")
            if GROUP > 0:
                factor = _read(scale + group, IS_EVEN, is_inside, 0).to(tl.float32)
                if PER_BLOCK > 0:
                    of_block = group // PER_BLOCK  # rows have whole blocks
                    own = _read(block_scale + of_block, IS_EVEN, is_inside, 0)
                    factor = factor * own.to(tl.float32)
                acc += product * factor[None, :]
            if HAS_MINIMUM:
                least = _read(minimum + group, IS_EVEN, is_inside, 0).to(tl.float32)
                if PER_BLOCK > 0:
                    own = _read(block_minimum + of_block, IS_EVEN, is_inside, 0)
                    least = least * own.to(tl.float32)
                acc += sums * least[None, :]
    if FORM > 0 and GROUP == 0:
        acc = acc * tl.load(scale + shift).to(tl.float32)[None, :]
    return acc


@triton.jit  # type: ignore[untyped-decorator]
def _read(pointer, always: tl.constexpr, mask, other: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load, without a mask if it is `always` true."""
    if always:
        return tl.load(pointer)
    return tl.load(pointer, mask=mask, other=other)


@triton.jit
def _from_fp8(bits):  # type: ignore[no-untyped-def]
    """Convert e4m3 to float32: with its bits in the places of a float32's, all that is wrong is the
    bias of the exponent, also of numbers below the normal ones."""
    bits = bits.to(tl.int8, bitcast=True).to(tl.int32) << 20  # the sign in all places above
    return (bits & ~0x780FFFFF).to(tl.float32, bitcast=True) * 2.0**120


@triton.jit  # type: ignore[untyped-decorator]
def _inputs(line, k, is_row, inputs, always: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load inputs k of rows of x, zeros where there are none."""
    if always:
        return tl.load(line + k[None, :], mask=is_row, other=0.0)
    return tl.load(line + k[None, :], mask=is_row & (k < inputs)[None, :], other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _join(  # type: ignore[no-untyped-def]
    parts,
    bias,
    out,
    rows,
    outputs,
    PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BN: tl.constexpr,
):
    """Add the parts of one row in order."""
    m = tl.program_id(0)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    is_output = n < outputs
    total = tl.zeros((BN,), tl.float32)
    for part in tl.static_range(PARTS):
        pointer = parts + (part * rows + m).to(tl.int64) * outputs + n
        total += tl.load(pointer, mask=is_output, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + n, mask=is_output, other=0.0).to(tl.float32)
    pointer = out + m.to(tl.int64) * outputs + n
    tl.store(pointer, total.to(out.dtype.element_ty), mask=is_output)
