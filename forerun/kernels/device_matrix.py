"""A matrix that stays packed on a torch device: floats, int8, int4 or fp8 with scales.

int8 and fp8 (e4m3) have a scale per output or per group of inputs, int4 a scale per group. Groups
of int4 may have an integer zero point (GPTQ, AWQ), groups of both kinds of integers a minimum in
floats (Q4_1, Q4_K and Q5_K of GGUF). The layout is the one that `triton.linear` reads; on plain
torch a product dequantizes some rows at a time (`reference.linear`), so that the matrix never
exists in floats as a whole.

`round_to_integers` rounds floats exactly as the native kernels do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.errors import StateError

BLOCK_N = 64  # outputs of a tile
BLOCK_K = 128  # inputs of a tile
GROUP4 = 32  # inputs that share a scale in int4 where floats are rounded
ZERO4 = 8  # added to int4 without zero points, so that they are not negative
MAX_HALF = 65504.0  # the largest float16
CHUNK = 1 << 24  # weights that a product on torch dequantizes at a time
CANDIDATES = [float(c) for c in range(-6, 7)]  # of the scale of a group of int4


@dataclass(frozen=True, slots=True)
class DeviceMatrix:
    """A matrix W [N, K], padded with zeros to multiples of the tile.

    Its elements are floats, or (value - zero point) * scale + minimum.

    Attributes:
        form: "float", "int8", "int4" or "fp8".
        values: [NP, KP] floats, int8 or, for the bits of fp8, uint8; uint8 [NP, KP / 2] for int4.
            Inputs of int4 are stored in runs of a group, of at most `BLOCK_K`: byte j of a run of n
            holds input j in its low half and input j + n / 2 in its high half, the zero point added
            to both.
        scale: [NP, groups] floats, one column for a scale per output; None for floats.
        outputs, inputs: N and K.
        group: inputs that share a scale: `inputs` for a scale per output.
        zero: uint8 [NP, groups], zero points of int4; None if all are 8, or 0 beside minima.
        minimum: [NP, groups] floats, added to what is scaled; None if all are 0.
        block_scale, block_minimum: float16 [NP, blocks], by which the scales and minima of a
            block's groups, int8 then, are multiplied in float32 (K types of GGUF); None without
            blocks.
        dtype: of the numbers that it stands for on plain torch.
    """

    form: str
    values: Tensor
    scale: Tensor | None
    outputs: int
    inputs: int
    group: int
    zero: Tensor | None = None
    dtype: torch.dtype = torch.float32
    minimum: Tensor | None = None
    block_scale: Tensor | None = None
    block_minimum: Tensor | None = None

    @classmethod
    def from_floats(cls, weight: Tensor) -> DeviceMatrix:
        """Take weight [N, K] as it is, without a copy if its shape fits the tiles."""
        outputs, inputs = weight.shape
        return cls("float", _padded(weight), None, outputs, inputs, inputs, None, weight.dtype)

    @classmethod
    def from_values(
        cls,
        form: str,
        values: Tensor,
        scale: Tensor,
        zero: Tensor | None = None,
        minimum: Tensor | None = None,
        *,
        block_scale: Tensor | None = None,
        block_minimum: Tensor | None = None,
        inputs: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> DeviceMatrix:
        """Pack values [N, K] and their scales, [N] or [N, groups], each group being K / groups
        inputs.

        Args:
            values: uint8 for fp8, without NaN; otherwise int8, for int4 from -8 to 7, with `zero`
                from -zero to 15 - zero, or with `minimum` from 0 to 15.
            zero: uint8 [N, groups], zero points of int4.
            minimum: [N, groups] floats, added to what is scaled.
            block_scale, block_minimum: float16 [N, blocks], blocks being whole tiles of inputs.
            inputs: the number of inputs if zeros were added to the last group.

        Raises:
            StateError: the groups do not fit the tiles.
        """
        outputs, stored = values.shape
        scale = scale.view(outputs, -1)
        group = stored // scale.shape[1]
        per_output = scale.shape[1] == 1 and form != "int4" and minimum is None
        if group * scale.shape[1] != stored or not (
            per_output or group == largest_group(form, group)
        ):
            raise StateError(f"{form} has no scales of {list(scale.shape)} for {stored} inputs")
        if form == "int4":
            points: int | Tensor = ZERO4 if minimum is None else 0
            if zero is not None:
                points = zero.to(torch.int8).repeat_interleave(group, dim=1)
            half = min(group, BLOCK_K) // 2
            halves = (values + points).view(torch.uint8).view(outputs, -1, 2, half)
            packed = (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)
            padded = _padded(packed, BLOCK_K // 2, ZERO4 * 17)
        else:
            padded = _padded(values)
        more = 0 if per_output else -(-_rounded_up(stored, BLOCK_K) // group) - scale.shape[1]
        widths = (0, more, 0, len(padded) - outputs)
        scale = F.pad(scale, widths).contiguous()
        zero, minimum = (
            None if each is None else F.pad(each, widths).contiguous() for each in (zero, minimum)
        )
        blocks = (
            None if each is None else F.pad(each, (0, 0, 0, len(padded) - outputs)).contiguous()
            for each in (block_scale, block_minimum)
        )
        inputs = stored if inputs is None else inputs
        group = inputs if per_output else group
        return cls(form, padded, scale, outputs, inputs, group, zero, dtype, minimum, *blocks)

    @classmethod
    def from_rounded(
        cls, form: str, weight: Tensor, dtype: torch.dtype = torch.float32
    ) -> DeviceMatrix:
        """Round weight [N, K] to int8 with a scale per output, or to int4 in groups of 32, as the
        native kernels do."""
        outputs, inputs = weight.shape
        step = max(CHUNK // max(inputs, 1), 1)
        parts = [
            round_to_integers(form, weight[at : at + step].float())
            for at in range(0, outputs, step)
        ]
        values, scale = (torch.cat(t) for t in zip(*parts, strict=True))
        return cls.from_values(form, values, scale, inputs=inputs, dtype=dtype)

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return self.outputs, self.inputs

    @property
    def padded_inputs(self) -> int:
        """K as it is stored, a multiple of the tile."""
        return self.values.shape[1] * (2 if self.form == "int4" else 1)

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads."""
        of_groups, of_blocks = (self.scale, self.minimum), (self.block_scale, self.block_minimum)
        stored = (self.values, self.zero, *of_groups, *of_blocks)
        return sum(tensor.nbytes for tensor in stored if tensor is not None)

    def dequantize(self, first: int = 0, count: int | None = None) -> Tensor:
        """Return `count` rows of W from `first` on, by default all: [count, K] in `dtype`."""
        last = self.outputs if count is None else min(first + count, self.outputs)
        return self._floats(slice(first, last))

    def __getitem__(self, ids: Tensor) -> Tensor:
        """Return rows of W: int64 [..] -> [.., K] in `dtype`."""
        return self._floats(ids.flatten()).view(*ids.shape, self.inputs)

    def _floats(self, rows: slice | Tensor) -> Tensor:
        values = self.values[rows]
        if self.scale is None:
            return values[:, : self.inputs]
        if self.form == "int4":
            pairs = values.view(len(values), -1, 1, min(self.group, BLOCK_K) // 2)
            values = torch.cat((pairs & 15, pairs >> 4), dim=2).flatten(1)
        elif self.form == "fp8":
            values = values.view(torch.float8_e4m3fn)
        scale = _in_floats(self.scale, self.block_scale, rows)
        floats = values.view(*scale.shape[:2], -1).float()
        if self.zero is not None:
            floats = floats - self.zero[rows, :, None]
        elif self.form == "int4" and self.minimum is None:
            floats = floats - ZERO4
        floats = floats * scale
        if self.minimum is not None:
            floats = floats + _in_floats(self.minimum, self.block_minimum, rows)
        return floats.flatten(1)[:, : self.inputs].to(self.dtype)

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute x [T, K] times W transposed, plus bias [N], on plain torch. -> [T, N]"""
        step = max(CHUNK // self.padded_inputs, 1)
        starts = range(0, self.outputs, step)
        parts = [
            F.linear(x, self.dequantize(at, step), None if bias is None else bias[at : at + step])
            for at in starts
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _in_floats(stored: Tensor, blocks: Tensor | None, rows: slice | Tensor) -> Tensor:
    """Return some rows of scales or minima, float32 [rows, groups, 1]."""
    floats = stored[rows].float()
    if blocks is not None:
        own = blocks[rows].float()
        floats = floats * own.repeat_interleave(floats.shape[1] // own.shape[1], 1)
    return floats[..., None]


def largest_group(form: str, size: int) -> int:
    """Return the largest group with a scale of its own that divides one of `size`; 0 if none."""
    known = (size // BLOCK_K * BLOCK_K, 64, 32, *((16,) if form != "int4" else ()))
    return next((group for group in known if group and size % group == 0), 0)


def round_to_integers(form: str, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round float32 [N, K] to values int8 and scales, bit for bit as `pack` of kernels.cpp does.

    Returns:
        for int8 values [N, K] and scales float32 [N]; for int4 values [N, KP] from -8 to 7, K being
        padded with zeros to whole groups of 32, and scales float16 [N, KP / 32].
    """
    if form == "int8":
        scale = weight.abs().amax(1) / 127.0
        values = torch.where(scale[:, None] > 0, weight / scale[:, None], 0).round()
        return values.to(torch.int8), scale
    outputs, inputs = weight.shape
    padded = F.pad(weight, (0, -inputs % GROUP4))
    groups = padded.view(-1, GROUP4).T.contiguous()  # [32, groups]
    largest = groups.gather(0, groups.abs().argmax(0, keepdim=True))[0]
    best, least = torch.zeros_like(largest), torch.full_like(largest, torch.inf)
    # the scale with the least squared error
    for divisor in torch.tensor(CANDIDATES, device=weight.device) * 0.1 - 8.0:
        scale = (largest / divisor).clamp(-MAX_HALF, MAX_HALF).half().float()
        rest = groups - (groups / scale).round().clamp(-8, 7) * scale
        error = torch.zeros_like(largest)
        for squares in rest * rest:  # one after the other: the order decides between near ties
            error = error + squares
        is_better = (scale != 0) & (error < least)
        best, least = torch.where(is_better, scale, best), torch.where(is_better, error, least)
    values = torch.where(best != 0, groups / best, 0).round().clamp(-8, 7).to(torch.int8)
    return values.T.reshape(outputs, -1), best.half().view(outputs, -1)


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _padded(values: Tensor, columns: int = BLOCK_K, fill: int = 0) -> Tensor:
    """Pad [N, columns of a tile] to multiples of the tile, without a copy if nothing changes."""
    rows, width = values.shape
    more = (0, -width % columns, 0, -rows % BLOCK_N)
    return F.pad(values, more, value=fill) if any(more) else values.contiguous()
