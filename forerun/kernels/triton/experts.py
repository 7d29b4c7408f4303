"""The experts that a router chose for each token, by products of few rows as in `linear`.

`assign_tiles` sorts the pairs of token and slot by expert, on the device: a tile is up to 16 or 32
pairs of one expert, and there are as many tiles as the pairs may need. A program of `products`
finds its expert and its rows in the plan, and ends at once if its tile is empty; so the matrices of
the chosen experts are read, and no others.

A pair has the same bits whatever the other pairs are: they depend on the shapes of the model alone.

Twin: `kernels.experts.by_expert`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.kernels.device_matrix import BLOCK_K, BLOCK_N, DeviceMatrix
from forerun.kernels.experts import ExpertMlps, input_pairs
from forerun.kernels.triton import fused
from forerun.kernels.triton.formats import dot_type
from forerun.kernels.triton.linear import (
    FEW_ROWS,
    constants_of,
    join_parts,
    multiply_tile,
    parts_of,
    stored_tensors,
)

SORTED = 1024  # pairs that a program of `assign_tiles` looks at together
SUMMED = 1024  # outputs of a program of `combine`
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Pairs of token and slot, sorted by expert.

    Attributes:
        pairs: int32 [tiles, rows of a tile], token * k + slot; -1 where there is none.
        experts: int32 [tiles], the expert of each; -1 of an empty one.
        count: the number T * k of pairs.
        used: experts of a token, k.
    """

    pairs: Tensor
    experts: Tensor
    count: int
    used: int


def fits(mlps: ExpertMlps) -> bool:
    """Return True if the kernels read these matrices as they are stored."""
    return all(
        isinstance(matrix, DeviceMatrix)
        or (
            matrix.dtype in DTYPES
            and matrix.shape[0] % BLOCK_N == 0
            and matrix.shape[1] % BLOCK_K == 0
        )
        for matrix in (mlps.up, mlps.down)
    )


def compute_experts(x: Tensor, choice: Tensor, factors: Tensor | None, mlps: ExpertMlps) -> Tensor:
    """Compute the chosen experts; a `ComputeExperts` for matrices that fit."""
    tiles = assign_tiles(choice, mlps.count)
    if factors is not None:
        x = input_pairs(x, choice, factors)
    up = products(x, packed(mlps.up), mlps.count, tiles, halves=mlps.halves)
    experts = choice.flatten()
    if mlps.kind in fused.ACTIVATIONS and mlps.up_bias is None:
        inner = fused.gate(up, mlps.kind, x.dtype)
    else:
        parts = join_parts(up, None, torch.float32).view(tiles.count, mlps.halves, -1)
        if mlps.up_bias is not None:
            parts = parts + mlps.up_bias[:, experts].transpose(0, 1)
        inner = mlps.activate(*parts.to(x.dtype).unbind(1))
    down = products(inner, packed(mlps.down), mlps.count, tiles)
    found = join_parts(down, None, torch.float32)
    if mlps.down_bias is not None:
        found = found + mlps.down_bias[experts]
    return found.to(x.dtype).view(*choice.shape, -1)


def packed(matrix: Tensor | DeviceMatrix) -> DeviceMatrix:
    """Return a matrix as the kernels read it."""
    return matrix if isinstance(matrix, DeviceMatrix) else DeviceMatrix.from_floats(matrix)


def assign_tiles(choice: Tensor, count: int) -> Tiles:
    """Sort the pairs of token and slot by expert.

    choice: int64 [T, k], of `count` experts.
    """
    pairs, device = choice.numel(), choice.device
    rows = FEW_ROWS if pairs <= FEW_ROWS * count else 2 * FEW_ROWS
    tiles = min(pairs, count + pairs // rows)
    tile_pairs = torch.empty((tiles, rows), dtype=torch.int32, device=device)
    experts = torch.empty(tiles, dtype=torch.int32, device=device)
    _assign_tiles[(count,)](
        choice.contiguous(),
        tile_pairs,
        experts,
        pairs,
        tiles,
        count,
        CHUNKS=triton.cdiv(pairs, SORTED),
        BM=rows,
        BP=min(SORTED, triton.next_power_of_2(pairs)),
        EP=triton.next_power_of_2(count + 1),
        TP=triton.next_power_of_2(tiles),
    )
    return Tiles(tile_pairs, experts, pairs, choice.shape[1])


def products(
    x: Tensor,
    weight: DeviceMatrix,
    count: int,
    tiles: Tiles,
    *,
    halves: int = 1,
    dot: tl.dtype | None = None,
) -> Tensor:
    """Multiply each pair's inputs with the matrices of its expert, in parts, whose sum in order is
    the result.

    Args:
        x: [T, K], the inputs of tokens, or [T * k, K], those of pairs.
        weight: [halves * count * N, K], of `count` experts.
        halves: 2 if there are two matrices of an expert, gates and ups.
        dot: the number format of the products; by default that of x.

    Returns:
        float32 [parts, T * k, halves * N]
    """
    assert x.shape[1] == weight.inputs, (x.shape, weight.inputs)
    if x.stride(1) != 1:
        x = x.contiguous()
    rows, used = weight.outputs // (halves * count), tiles.used
    columns = halves * triton.cdiv(rows, BLOCK_N)
    parts = parts_of(weight, columns * used)
    found = torch.empty((parts, tiles.count, halves * rows), dtype=torch.float32, device=x.device)
    num_tiles, block_m = tiles.pairs.shape
    _multiply_experts[(columns, parts, num_tiles)](
        x,
        *stored_tensors(weight, found),
        found,
        tiles.pairs,
        tiles.experts,
        tiles.count,
        rows,
        count,
        halves * rows,
        x.stride(0),
        weight.inputs,
        1 if len(x) == tiles.count else used,
        IS_ALIGNED=rows % BLOCK_N == 0,
        DOT=dot or dot_type(x.dtype),
        **constants_of(weight, parts, block_m),
    )
    return found


def combine(parts: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Add the outputs of each token's experts, weighed. A pair's output, its product with the
    weight and the sum are rounded to `dtype`, as on torch.

    Args:
        parts: float32 [S, T * k, N].
        weights: float32 [T, k].

    Returns:
        [T, N]
    """
    count, pairs, outputs = parts.shape
    tokens, used = weights.shape
    out = torch.empty((tokens, outputs), dtype=dtype, device=parts.device)
    _combine[(tokens, triton.cdiv(outputs, SUMMED))](
        parts,
        weights.to(dtype).contiguous(),
        out,
        pairs,
        outputs,
        PARTS=count,
        USED=used,
        BN=min(SUMMED, triton.next_power_of_2(outputs)),
    )
    return out


def combine_reference(parts: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute `combine` in torch."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    each = total.to(dtype).view(*weights.shape, -1)
    return (each * weights.to(dtype)[..., None]).sum(1)


# ---------------------------------------------------------------- kernels


@triton.jit  # type: ignore[untyped-decorator]
def _assign_tiles(  # type: ignore[no-untyped-def]
    choice,
    tile_pairs,
    experts,
    pairs,
    tiles,
    count,
    CHUNKS: tl.constexpr,
    BM: tl.constexpr,
    BP: tl.constexpr,
    EP: tl.constexpr,
    TP: tl.constexpr,
):
    """Write the tiles of one expert, which follow those of the experts before it."""
    expert = tl.program_id(0)
    lane, index = tl.arange(0, BP), tl.arange(0, EP)
    counts = tl.zeros((EP,), tl.int32)
    for chunk in range(CHUNKS):
        at = chunk * BP + lane
        chosen = tl.load(choice + at, mask=at < pairs, other=count).to(tl.int32)
        counts += tl.histogram(chosen, EP)
    used = (counts + (BM - 1)) // BM
    first = tl.sum(tl.where(index < expert, used, 0), 0)
    own = tl.sum(tl.where(index == expert, counts, 0), 0)
    end = first + (own + (BM - 1)) // BM
    start = first * BM
    for chunk in range(CHUNKS):
        at = chunk * BP + lane
        chosen = tl.load(choice + at, mask=at < pairs, other=count).to(tl.int32)
        is_own = (chosen == expert).to(tl.int32)
        before = tl.cumsum(is_own, 0) - is_own
        tl.store(tile_pairs + start + before, at, mask=is_own > 0)
        start += tl.sum(is_own, 0)
    free = start + tl.arange(0, BM)
    tl.store(tile_pairs + free, -1, mask=free < end * BM)
    tile = tl.arange(0, TP)
    tl.store(experts + tile, expert, mask=(tile >= first) & (tile < end))
    if expert == count - 1:
        tl.store(experts + tile, -1, mask=(tile >= end) & (tile < tiles))


@triton.jit  # type: ignore[untyped-decorator]
def _multiply_experts(  # type: ignore[no-untyped-def]
    x,
    values,
    scale,
    zero,
    minimum,
    block_scale,
    block_minimum,
    parts,
    tile_pairs,
    experts,
    pairs,
    rows,
    count,
    outputs,
    row_stride,
    inputs,
    pairs_of_row,
    IS_ALIGNED: tl.constexpr,
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
    """Compute one tile of one part: up to BM pairs of an expert, and BN of the `rows` outputs of
    one of its matrices; the constants are those of `multiply_tile`."""
    tile = tl.program_id(2)
    expert = tl.load(experts + tile)
    if expert < 0:
        return
    part = tl.program_id(1)
    pair = tl.load(tile_pairs + tile * BM + tl.arange(0, BM))
    is_row = (pair >= 0)[:, None]
    blocks = tl.cdiv(rows, BN)
    half, at = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BN
    n = tl.arange(0, BN)
    if not IS_ALIGNED:
        # behind the expert's rows are those of another, or none: the last one is computed again
        n = tl.minimum(n, rows - 1 - at)
    acc = multiply_tile(
        x + (pair // pairs_of_row)[:, None] * row_stride,
        is_row,
        values,
        scale,
        zero,
        minimum,
        block_scale,
        block_minimum,
        (half * count + expert).to(tl.int64) * rows + at,
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
    out = parts + (part * pairs + pair[:, None]).to(tl.int64) * outputs + (half * rows + at + n)
    tl.store(out, acc, mask=is_row)


@triton.jit  # type: ignore[untyped-decorator]
def _combine(  # type: ignore[no-untyped-def]
    parts,
    weights,
    out,
    pairs,
    outputs,
    PARTS: tl.constexpr,
    USED: tl.constexpr,
    BN: tl.constexpr,
):
    """Add some outputs of one token's experts, in the order of the slots."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    token = tl.program_id(0)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    is_output = n < outputs
    total = tl.zeros((BN,), tl.float32)
    for slot in range(USED):
        pair = token * USED + slot
        found = tl.zeros((BN,), tl.float32)
        for part in tl.static_range(PARTS):
            pointer = parts + (part * pairs + pair).to(tl.int64) * outputs + n
            found += tl.load(pointer, mask=is_output, other=0.0)
        weight = tl.load(weights + pair).to(tl.float32)
        total += (found.to(DTYPE).to(tl.float32) * weight).to(DTYPE).to(tl.float32)
    tl.store(out + token.to(tl.int64) * outputs + n, total.to(DTYPE), mask=is_output)
