"""Memory layout of packed int8 and int4 matrices: `pack` of kernels.cpp without its rounding.

Only `layout_int8` and `layout_int4` know the layout in Python; change them together with `pack`.
`tests/models/test_quantized.py` compares them byte by byte.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from forerun.kernels.native import BLOCK

GROUP4 = 32  # inputs that share a scale in int4


def layout_int8(values: Tensor) -> Tensor:
    """Lay out int8 [N, K] (N a multiple of 32, K of 64) in the INT8 format. -> uint8 [N * K]

    Each block of 32 outputs holds four inputs of output 0, the same four of output 1, and so on;
    128 is added to every value."""
    blocks, inputs = len(values) // BLOCK, values.shape[1]
    fours = (values.view(torch.uint8) ^ 128).view(torch.int32).view(blocks, BLOCK, inputs // 4)
    return fours.transpose(1, 2).contiguous().view(torch.uint8).flatten()


def layout_int4(values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Lay out int8 [N, K] from -8 to 7 and scales [N, K / 32] in the INT4 format (N a multiple of
    32, K of 64). -> uint8 [N * K / 2], scales [N * K / 32]

    A byte holds input i in its low half and input i + 4 in its high half, 8 added to both; each
    block of 32 outputs holds four such bytes of output 0, of output 1, and so on. Scales are
    ordered by block, group and output."""
    blocks, inputs = len(values) // BLOCK, values.shape[1]
    halves = (values + 8).view(torch.int32).view(blocks, BLOCK, inputs // 8, 2)
    fours = halves[..., 0] | halves[..., 1] << 4
    groups = scales.view(blocks, BLOCK, inputs // GROUP4)
    data = fours.transpose(1, 2).contiguous().view(torch.uint8).flatten()
    return data, groups.transpose(1, 2).flatten()


def lay_out(
    form: str, rows: int, padded: int, values: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Pad integers [out, in] and their scales to `rows` x `padded`, and lay them out.

    Scales are [out] float32 for int8, [out, groups of 32] float16 for int4."""
    more = rows - len(values)
    values = _padded(values, 0, padded - values.shape[1], 0, more)
    if form == "int8":
        return layout_int8(values), _padded(scale, 0, more)
    return layout_int4(values, _padded(scale, 0, padded // GROUP4 - scale.shape[1], 0, more))


def interleave(stacked: Tensor) -> Tensor:
    """Reorder rows [gate; up] into blocks of 16 gates and their 16 ups, padded with zeros."""
    gate, up = stacked.chunk(2)
    short = [0, 0] * (gate.ndim - 1) + [0, -len(gate) % 16]
    gate, up = (_padded(t, *short).view(-1, 16, *t.shape[1:]) for t in (gate, up))
    return torch.stack((gate, up), dim=1).flatten(0, 2)


def _padded(t: Tensor, *widths: int) -> Tensor:
    """Pad with zeros and make contiguous, without a copy if nothing changes."""
    return pad(t, widths) if any(widths) else t.contiguous()
