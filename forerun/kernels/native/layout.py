"""Where the integers of a matrix lie in the native kernels' memory: `pack` of kernels.cpp, without
its rounding.

Whoever changes `pack` changes `layout_int8` and `layout_int4`, which are all in Python that knows
the layout; `tests/models/test_quantized.py` compares them byte by byte.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from forerun.kernels.native import BLOCK

GROUP4 = 32  # 4-bit weights that share a scale


def layout_int8(values: Tensor) -> Tensor:
    """int8 [N, K] (N a multiple of 32, K of 64) to the bytes of the INT8 format, uint8 [N * K].

    In each block of 32 outputs, four inputs of output 0, the same four of output 1, and so on; 128
    is added."""
    blocks, inputs = len(values) // BLOCK, values.shape[1]
    fours = (values.view(torch.uint8) ^ 128).view(torch.int32).view(blocks, BLOCK, inputs // 4)
    return fours.transpose(1, 2).contiguous().view(torch.uint8).flatten()


def layout_int4(values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [N, K] from -8 to 7 and scales [N, K / 32] (N a multiple of 32, K of 64) to those of the
    INT4 format.

    A byte holds input i in its low half and input i + 4 in its high half, 8 added to both; in each
    block of 32 outputs, four such bytes of output 0, of output 1, and so on. Scales lie by block,
    group and output.

    Returns:
        uint8 [N * K / 2] and scales [N * K / 32].
    """
    blocks, inputs = len(values) // BLOCK, values.shape[1]
    halves = (values + 8).view(torch.int32).view(blocks, BLOCK, inputs // 8, 2)
    fours = halves[..., 0] | halves[..., 1] << 4
    groups = scales.view(blocks, BLOCK, inputs // GROUP4)
    return fours.transpose(1, 2).contiguous().view(torch.uint8).flatten(), groups.transpose(
        1, 2
    ).flatten()


def lay_out(
    form: str, rows: int, padded: int, values: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Integers [out, in] and scales ([out] float32 for int8, [out, groups of 32] float16 for int4)
    to bytes and scales of a packed matrix of `rows` outputs and `padded` inputs; what is padded is
    zero."""
    more = rows - len(values)
    values = _padded(values, 0, padded - values.shape[1], 0, more)
    if form == "int8":
        return layout_int8(values), _padded(scale, 0, more)
    return layout_int4(values, _padded(scale, 0, padded // GROUP4 - scale.shape[1], 0, more))


def interleave(stacked: Tensor) -> Tensor:
    """[gate; up] to blocks of 16 gates and their 16 ups; the last block is padded with zeros."""
    gate, up = stacked.chunk(2)
    short = [0, 0] * (gate.ndim - 1) + [0, -len(gate) % 16]
    gate, up = (_padded(t, *short).view(-1, 16, *t.shape[1:]) for t in (gate, up))
    return torch.stack((gate, up), dim=1).flatten(0, 2)


def _padded(t: Tensor, *widths: int) -> Tensor:
    """Padded with zeros; contiguous, and not copied where it is that already."""
    return pad(t, widths) if any(widths) else t.contiguous()
