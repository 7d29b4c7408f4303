"""Products of a few rows with a matrix: x [M, K] times W [N, K] transposed, for M up to 64 or so.

A decoding pass over few rows is bound by the bytes of W, so W may be stored as floats, as int8 with
a scale per output or per group of inputs (GGUF's Q8_0 among them), or as int4 with a scale per 32
inputs (GGUF's Q4_0, and the package's own). Integers are converted exactly, a group's sum is
multiplied by its scale in float32, and all sums are float32: the numbers are those that W stands
for, and activations are not rounded.

A row of the result has the same bits whatever the other rows are, and however many there are. The
tiles, the number of parts into which K is divided, and the order in which parts are added depend on
(N, K, form) alone, never on M. Parts are written apart and added in order by what reads them
(`join_parts`, or a kernel of `fused`), so there are no atomic additions.

Twin: `kernels.reference.linear(x, weight.dequantize(), bias)`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from forerun.errors import StateError
from forerun.kernels.triton.formats import dot_type

FORMS = {"float": 0, "int8": 1, "int4": 2}
BLOCK_N = 64  # outputs of a program
BLOCK_K = 128  # inputs that are read at once
FEW_ROWS = 16  # rows of a tile; above, tiles have twice as many, with the same instructions
PROGRAMS = 256  # programs that keep the memory of a large card busy
WARPS = 4
STAGES = 4
GROUP4 = 32  # inputs that share a scale in int4
JOINED = 1024  # outputs of a program that adds parts


@dataclass(frozen=True, slots=True)
class DeviceMatrix:
    """A matrix W [N, K] as the product reads it, padded with zeros to multiples of the tile.

    Attributes:
        form: a key of `FORMS`.
        values: [NP, KP] floats or int8; uint8 [NP, KP / 2] for int4, where byte j of a group of 32
            inputs holds input j in its low half and input j + 16 in its high half, 8 added to both.
        scale: [NP, groups] floats, one column for a scale per output; None for floats.
        outputs, inputs: N and K.
        group: inputs that share a scale: `inputs` for a scale per output.
    """

    form: str
    values: Tensor
    scale: Tensor | None
    outputs: int
    inputs: int
    group: int

    @classmethod
    def from_floats(cls, weight: Tensor) -> DeviceMatrix:
        """Take weight [N, K] as it is, without a copy if its shape fits the tiles."""
        outputs, inputs = weight.shape
        return cls("float", _padded(weight), None, outputs, inputs, inputs)

    @classmethod
    def from_integers(cls, form: str, values: Tensor, scale: Tensor) -> DeviceMatrix:
        """Pack values [N, K] int8 and their scales: [N] or [N, groups], each group being K / groups
        inputs, and for int4, whose values are from -8 to 7, 32 inputs.

        Raises StateError if the groups do not fit."""
        outputs, inputs = values.shape
        scale = scale.view(outputs, -1)
        group = inputs // scale.shape[1]
        per_output = scale.shape[1] == 1 and form == "int8"
        is_allowed = (
            group == GROUP4 if form == "int4" else group in (32, 64) or group % BLOCK_K == 0
        )
        if group * scale.shape[1] != inputs or not (per_output or is_allowed):
            raise StateError(f"{form} has no scales of {list(scale.shape)} for {inputs} inputs")
        padded = _padded(values)
        if form == "int4":
            halves = (padded + 8).view(torch.uint8).view(len(padded), -1, 2, GROUP4 // 2)
            padded = (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1).contiguous()
        more = 0 if per_output else -(-_rounded_up(inputs, BLOCK_K) // group) - scale.shape[1]
        scale = F.pad(scale, (0, more, 0, len(padded) - outputs))
        return cls(form, padded, scale.contiguous(), outputs, inputs, group)

    @classmethod
    def from_blocks(cls, kind: str, blocks: Tensor) -> DeviceMatrix:
        """Take the bytes of a GGUF tensor of type Q8_0 or Q4_0, uint8 [N, K / 32, 34 or 18]: a
        float16 scale, then 32 int8, or 16 bytes of two values each."""
        outputs, groups = blocks.shape[:2]
        scale = blocks[..., :2].contiguous().view(torch.float16)[..., 0]
        stored = blocks[..., 2:].contiguous()
        if kind == "Q8_0":
            return cls.from_integers("int8", stored.view(torch.int8).flatten(1), scale)
        inputs = groups * GROUP4
        values = _padded(stored.flatten(1), BLOCK_K // 2)
        scale = F.pad(scale, (0, 2 * values.shape[1] // GROUP4 - groups, 0, len(values) - outputs))
        return cls("int4", values, scale.contiguous(), outputs, inputs, GROUP4)

    @property
    def padded_inputs(self) -> int:
        """K as it is stored, a multiple of the tile."""
        return self.values.shape[1] * (2 if self.form == "int4" else 1)

    @property
    def parts(self) -> int:
        """The number of parts into which K is divided, which depends on the shape alone."""
        blocks, columns = self.padded_inputs // BLOCK_K, len(self.values) // BLOCK_N
        parts = 1
        while parts < blocks and parts * columns < PROGRAMS:
            parts *= 2
        return parts if parts <= blocks else parts // 2

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads."""
        return self.values.nbytes + (0 if self.scale is None else self.scale.nbytes)

    def dequantize(self) -> Tensor:
        """Return W [N, K] in float32; floats in their own dtype."""
        if self.scale is None:
            return self.values[: self.outputs, : self.inputs]
        values = self.values
        if self.form == "int4":
            pairs = values.view(len(values), -1, 1, GROUP4 // 2)
            values = torch.cat((pairs & 15, pairs >> 4), dim=2).flatten(1).to(torch.int8) - 8
        group = torch.arange(self.inputs, device=values.device) // self.group
        scale = self.scale.float()[: self.outputs, group]
        return values[: self.outputs, : self.inputs].float() * scale


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
    outputs, parts = len(weight.values), weight.parts
    found = torch.empty((parts, rows, weight.outputs), dtype=torch.float32, device=x.device)
    scale = found if weight.scale is None else weight.scale  # a kernel takes no None
    group = weight.group if weight.scale is not None and scale.shape[1] > 1 else 0
    block_m = FEW_ROWS if rows <= FEW_ROWS else 2 * FEW_ROWS
    blocks = weight.padded_inputs // BLOCK_K
    _multiply[(outputs // BLOCK_N, parts, triton.cdiv(rows, block_m))](
        x,
        weight.values,
        scale,
        found,
        rows,
        weight.outputs,
        x.stride(0),
        weight.inputs,
        FORM=FORMS[weight.form],
        K=weight.padded_inputs,
        GROUP=group,
        GROUPS=scale.shape[1] if group else 1,
        STEP=min(group, BLOCK_K) or BLOCK_K,
        PER_PART=-(-blocks // parts),
        IS_EVEN=blocks % parts == 0,
        IS_WHOLE=weight.inputs == weight.padded_inputs,
        BM=block_m,
        BN=BLOCK_N,
        BK=BLOCK_K,
        DOT=dot or dot_type(x.dtype),
        num_warps=WARPS,
        num_stages=STAGES,
    )
    return found


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


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _padded(values: Tensor, columns: int = BLOCK_K) -> Tensor:
    """Pad [N, K] with zeros to multiples of the tile, without a copy if nothing changes."""
    rows, inputs = values.shape
    more = (0, -inputs % columns, 0, -rows % BLOCK_N)
    return F.pad(values, more) if any(more) else values.contiguous()


@triton.jit  # type: ignore[untyped-decorator]
def _multiply(  # type: ignore[no-untyped-def]
    x,
    values,
    scale,
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
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    DOT: tl.constexpr,
):
    """Compute one tile of one part: BM rows, BN outputs, PER_PART blocks of BK inputs.

    K is the padded number of inputs. GROUP inputs share a scale, of which an output has GROUPS; 0
    is a scale per output. A step has at most the inputs of one scale, so that their sum is complete
    before it is scaled."""
    HALF: tl.constexpr = STEP // 2
    part = tl.program_id(1)
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    column = tl.program_id(0).to(tl.int64) * BN
    n = tl.arange(0, BN)
    line = x + m[:, None] * row_stride
    is_row = (m < rows)[:, None]
    begin = part * PER_PART * BK
    if FORM == 2:
        tile = values + column * (K // 2) + begin // 2 + n[None, :] * (K // 2)
    else:
        tile = values + column * K + begin + n[None, :] * K
    factors = scale + column * GROUPS + n * GROUPS
    acc = tl.zeros((BM, BN), tl.float32)
    for block in range(PER_PART):
        for step in tl.static_range(BK // STEP):
            done = block * BK + step * STEP
            first = begin + done
            is_inside = IS_EVEN or first < K  # the last part may have fewer blocks
            if FORM == 2:
                h = tl.arange(0, HALF)
                both = _read(tile + done // 2 + h[:, None], IS_EVEN, is_inside, 0x88)
                low = ((both & 15).to(tl.int8) - 8).to(DOT)
                high = ((both >> 4).to(tl.int8) - 8).to(DOT)
                k = first + h
                a, b = line + k[None, :], line + (k + HALF)[None, :]
                if IS_WHOLE and IS_EVEN:
                    a, b = tl.load(a, mask=is_row, other=0.0), tl.load(b, mask=is_row, other=0.0)
                else:
                    a = tl.load(a, mask=is_row & (k < inputs)[None, :], other=0.0)
                    b = tl.load(b, mask=is_row & (k + HALF < inputs)[None, :], other=0.0)
                product = tl.dot(a.to(DOT), low, input_precision="ieee")
                product = tl.dot(b.to(DOT), high, product, input_precision="ieee")
            else:
                k = tl.arange(0, STEP)
                w = _read(tile + done + k[:, None], IS_EVEN, is_inside, 0).to(DOT)
                if IS_WHOLE and IS_EVEN:
                    a = tl.load(line + (first + k)[None, :], mask=is_row, other=0.0)
                else:
                    is_input = is_row & (first + k < inputs)[None, :]
                    a = tl.load(line + (first + k)[None, :], mask=is_input, other=0.0)
                if GROUP == 0:
                    acc = tl.dot(a.to(DOT), w, acc, input_precision="ieee")
                else:
                    product = tl.dot(a.to(DOT), w, input_precision="ieee")
            if GROUP > 0:
                factor = _read(factors + first // GROUP, IS_EVEN, is_inside, 0)
                acc += product * factor.to(tl.float32)[None, :]
    if FORM > 0 and GROUP == 0:
        acc = acc * tl.load(factors).to(tl.float32)[None, :]
    out = parts + (part * rows + m[:, None]).to(tl.int64) * outputs + (column + n)[None, :]
    tl.store(out, acc, mask=is_row & (column + n < outputs)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _read(place, always: tl.constexpr, mask, other: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load, without a mask if it is `always` true."""
    if always:
        return tl.load(place)
    return tl.load(place, mask=mask, other=other)


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
        place = parts + (part * rows + m).to(tl.int64) * outputs + n
        total += tl.load(place, mask=is_output, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + n, mask=is_output, other=0.0).to(tl.float32)
    place = out + m.to(tl.int64) * outputs + n
    tl.store(place, total.to(out.dtype.element_ty), mask=is_output)
