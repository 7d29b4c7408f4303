"""Moving the accepted rows of keys and values on the device, so that the path of a tree becomes
contiguous.

Of node i of a draft the cache has a row; the path's nodes take the rows of the first nodes. A path
ascends, so its i-th node is i or later, and moving in ascending order never overwrites a row that
is still to be read. A program moves a piece of one plane (keys or values of a layer) for all nodes
of a request, in order; pieces and requests do not share memory.

Twin: `KVCache.move`.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

PIECE = 1024  # numbers of a row that a program moves
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def compact(stored: Tensor, rows: Tensor, path: Tensor, accepted: Tensor) -> None:
    """Move row `rows[r, path[r, i]]` to `rows[r, i]` for i below `accepted[r]`, in ascending order.

    Args:
        stored: [planes, rows, ..] keys or values of any dtype, changed in place; everything behind
            the first axis is contiguous.
        rows: int64 [R, N], the cache rows of each request's uncommitted nodes. No row belongs to
            two requests.
        path, accepted: integers [R, N'] and [R], as in `walk.Walked`.
    """
    planes, width = stored.shape[0], math.prod(stored.shape[2:])
    assert stored[0].is_contiguous()
    bits = stored.view(INTEGERS[stored.element_size()])  # moved as integers: NaN keeps its bits
    _compact[(len(rows), planes, triton.cdiv(width, PIECE))](
        bits,
        rows,
        path,
        accepted,
        width,
        bits.stride(0),
        rows.stride(0),
        path.stride(0),
        B=min(PIECE, triton.next_power_of_2(width)),
    )


@triton.jit  # type: ignore[untyped-decorator]
def _compact(  # type: ignore[no-untyped-def]
    stored,
    rows,
    path,
    accepted,
    width,
    plane_stride,
    rows_stride,
    path_stride,
    B: tl.constexpr,
):
    """Move a piece of the rows of one request in one plane."""
    request = tl.program_id(0)
    base = stored + tl.program_id(1).to(tl.int64) * plane_stride
    n = tl.program_id(2) * B + tl.arange(0, B)
    line = rows + request * rows_stride
    count = tl.load(accepted + request)
    i = 1  # the root stays where it is
    while i < count:
        node = tl.load(path + request * path_stride + i)
        if node != i:
            source, target = tl.load(line + node), tl.load(line + i)
            moved = tl.load(base + source * width + n, mask=n < width)
            tl.store(base + target * width + n, moved, mask=n < width)
        i += 1
