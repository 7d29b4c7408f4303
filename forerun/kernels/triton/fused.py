"""Operations of a decoder layer between its products: one kernel behind each of them.

`linear.linear_parts` leaves its result [M, N] in parts [S, M, N], in float32. These kernels add the
parts in order, then the bias, and go on: `add_norm` adds the branch to the residual stream and
normalises it, `rotate_and_store` normalises and rotates queries and keys and writes keys and values
to their rows of the paged cache, and `gate` activates the inside of an MLP. A result is rounded to
the dtype of the model where the torch decoder rounds it, except within a rotation. Each program
has one row (and head) of its own, so no row depends on another.

Twins: `add_norm_reference`, `rotate_and_store_reference` and `gate_reference`, in torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.kernels import reference

MAX_WIDTH = 1 << 14  # of a row that a program normalises
GATED = 1024  # outputs of a program of `gate`
ACTIVATIONS = ("silu", "gelu_tanh")


def add_norm(
    x: Tensor,
    parts: Tensor | None,
    weight: Tensor | None,
    eps: float,
    *,
    bias: Tensor | None = None,
    branch_norm: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Add a branch to the residual stream x [T, H], and normalise the sum (RMS).

    Args:
        parts: float32 [S, T, H], the output of a product; None adds nothing.
        weight: float32 [H], of the norm; None normalises nothing.
        eps: epsilon of both norms.
        bias: [H], of the product.
        branch_norm: float32 [H], of a norm that the branch goes through first (Gemma 2).
        scale: factor on the branch.

    Returns:
        the new residual stream [T, H], and it normalised; each is x if it is not asked for.
    """
    rows, width = x.shape
    x = x.contiguous()
    stream = x if parts is None else torch.empty_like(x)
    normed = x if weight is None else torch.empty_like(x)
    _add_norm[(rows,)](
        x,
        x if parts is None else parts.contiguous(),
        x if bias is None else bias,
        x if branch_norm is None else branch_norm,
        x if weight is None else weight,
        stream,
        normed,
        rows,
        width,
        eps,
        scale,
        PARTS=0 if parts is None else parts.shape[0],
        HAS_BIAS=bias is not None,
        NORMS_BRANCH=branch_norm is not None,
        NORMS=weight is not None,
        BN=triton.next_power_of_2(width),
        num_warps=8 if width > 2048 else 4,
    )
    return stream, normed


def rotate_and_store(
    parts: Tensor,
    rotation: tuple[Tensor, Tensor] | None,
    positions: Tensor,
    rows: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    bias: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Normalise and rotate queries and keys, and write keys and values to the cache.

    Args:
        parts: float32 [S, T, (Hq + 2 Hkv) * D], the output of the product for queries, keys and
            values.
        rotation: cos and sin [context, 1, R] of all positions, R up to D / 2; None rotates nothing.
        positions: int64 [T].
        rows: int64 [T], the cache row of each token; of a token with a negative one, which is
            padding, nothing is computed, and its queries are arbitrary.
        keys, values: [rows, Hkv, D], the layer's cache; the dtype of the result is theirs.
        bias: [(Hq + 2 Hkv) * D], of the product.
        q_norm, k_norm: float32 [D], of RMS norms by head.
        eps: their epsilon.

    Returns:
        the queries [T, Hq, D].
    """
    count, tokens, width = parts.shape
    kv_heads, size = keys.shape[1:]
    heads = width // size - 2 * kv_heads
    q = torch.empty((tokens, heads, size), dtype=keys.dtype, device=parts.device)
    cos, sin = rotation or (parts, parts)
    _rotate_and_store[(tokens, heads + 2 * kv_heads)](
        parts.contiguous(),
        parts if bias is None else bias,
        cos,
        sin,
        positions,
        rows,
        parts if q_norm is None else q_norm,
        parts if k_norm is None else k_norm,
        q,
        keys,
        values,
        tokens,
        heads,
        kv_heads,
        eps,
        PARTS=count,
        HAS_BIAS=bias is not None,
        NORMS_Q=q_norm is not None,
        NORMS_K=k_norm is not None,
        R=0 if rotation is None else cos.shape[-1],
        D=size,
        DP=triton.next_power_of_2(size),
        num_warps=1,
    )
    return q


def gate(parts: Tensor, kind: str, dtype: torch.dtype, *, bias: Tensor | None = None) -> Tensor:
    """Activate gates and multiply them by ups.

    Args:
        parts: float32 [S, T, 2 I], the output of a product: gates, then ups.
        kind: one of `ACTIVATIONS`.
        dtype: that of the result.
        bias: [2 I], of the product.

    Returns:
        [T, I]
    """
    count, tokens, width = parts.shape
    inner = width // 2
    out = torch.empty((tokens, inner), dtype=dtype, device=parts.device)
    _gate[(tokens, triton.cdiv(inner, GATED))](
        parts.contiguous(),
        parts if bias is None else bias,
        out,
        tokens,
        inner,
        PARTS=count,
        HAS_BIAS=bias is not None,
        KIND=ACTIVATIONS.index(kind),
        BN=GATED,
    )
    return out


# ---------------------------------------------------------------- twins


def add_norm_reference(
    x: Tensor,
    parts: Tensor | None,
    weight: Tensor | None,
    eps: float,
    *,
    bias: Tensor | None = None,
    branch_norm: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Compute `add_norm` in torch."""
    if parts is not None:
        branch = _joined(parts, bias, x.dtype)
        if branch_norm is not None:
            branch = reference.norm(branch, branch_norm, None, eps)
        x = x + branch * scale
    return x, x if weight is None else reference.norm(x, weight, None, eps)


def rotate_and_store_reference(
    parts: Tensor,
    rotation: tuple[Tensor, Tensor] | None,
    positions: Tensor,
    rows: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    bias: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Compute `rotate_and_store` in torch."""
    kv_heads, size = keys.shape[1:]
    qkv = _joined(parts, bias, keys.dtype).view(parts.shape[1], -1, size)
    q, k, v = torch.split(qkv, [qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    if q_norm is not None:
        q = reference.norm(q, q_norm, None, eps)
    if k_norm is not None:
        k = reference.norm(k, k_norm, None, eps)
    if rotation is not None:
        cos, sin = (table[positions] for table in rotation)
        q, k = reference.rotate(q, cos, sin), reference.rotate(k, cos, sin)
    is_kept = rows >= 0
    keys[rows[is_kept]], values[rows[is_kept]] = k[is_kept], v[is_kept]
    return q


def gate_reference(
    parts: Tensor, kind: str, dtype: torch.dtype, *, bias: Tensor | None = None
) -> Tensor:
    """Compute `gate` in torch."""
    gates, ups = _joined(parts, bias, dtype).chunk(2, dim=-1)
    return reference.gate(gates, ups, kind)


def _joined(parts: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Add parts [S, T, N] and the bias, and round."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return (total if bias is None else total + bias.float()).to(dtype)


# ---------------------------------------------------------------- kernels


@triton.jit  # type: ignore[untyped-decorator]
def _total(  # type: ignore[no-untyped-def]
    parts, bias, row, rows, width, n, mask, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """Add the parts of some columns of a row in order, and the bias."""
    total = tl.load(parts + row.to(tl.int64) * width + n, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        pointer = parts + (part * rows + row).to(tl.int64) * width + n
        total += tl.load(pointer, mask=mask, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + n, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit
def _inverse_rms(x, width, eps):  # type: ignore[no-untyped-def]
    """Return 1 over the root of the mean square; what lies behind the row is 0."""
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(x * x, 0), width * 1.0) + eps))


@triton.jit  # type: ignore[untyped-decorator]
def _add_norm(  # type: ignore[no-untyped-def]
    x,
    parts,
    bias,
    branch_weight,
    weight,
    stream_out,
    normed_out,
    rows,
    width,
    eps,
    scale,
    PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NORMS_BRANCH: tl.constexpr,
    NORMS: tl.constexpr,
    BN: tl.constexpr,
):
    """Add a branch to one row of the residual stream, and normalise it."""
    DTYPE: tl.constexpr = normed_out.dtype.element_ty
    row = tl.program_id(0)
    n = tl.arange(0, BN)
    is_inside = n < width
    offset = row.to(tl.int64) * width + n
    stream = tl.load(x + offset, mask=is_inside, other=0.0).to(tl.float32)
    if PARTS > 0:
        branch = _total(parts, bias, row, rows, width, n, is_inside, PARTS, HAS_BIAS)
        branch = branch.to(DTYPE).to(tl.float32)
        if NORMS_BRANCH:
            factor = tl.load(branch_weight + n, mask=is_inside, other=0.0)
            branch = branch * _inverse_rms(branch, width, eps) * factor
            branch = branch.to(DTYPE).to(tl.float32)
        branch = (branch * scale).to(DTYPE).to(tl.float32)
        stream = (stream + branch).to(DTYPE).to(tl.float32)
        tl.store(stream_out + offset, stream.to(DTYPE), mask=is_inside)
    if NORMS:
        factor = tl.load(weight + n, mask=is_inside, other=0.0)
        normed = stream * _inverse_rms(stream, width, eps) * factor
        tl.store(normed_out + offset, normed.to(DTYPE), mask=is_inside)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate_and_store(  # type: ignore[no-untyped-def]
    parts,
    bias,
    cos,
    sin,
    positions,
    rows,
    q_weight,
    k_weight,
    q_out,
    keys,
    values,
    tokens,
    heads,
    kv_heads,
    eps,
    PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NORMS_Q: tl.constexpr,
    NORMS_K: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
):
    """Compute one head of one token: a query, a key or a value."""
    DTYPE: tl.constexpr = q_out.dtype.element_ty
    t, h = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + t)
    if row < 0:
        return
    width = (heads + 2 * kv_heads) * D
    d = tl.arange(0, DP)
    is_inside = d < D
    # the channel that a rotation turns d with: the other half's
    other = tl.where(d < R, d + R, tl.where(d < 2 * R, d - R, d))
    n = h * D + d
    x = _total(parts, bias, t, tokens, width, n, is_inside, PARTS, HAS_BIAS)
    x = x.to(DTYPE).to(tl.float32)
    if h < heads + kv_heads:
        y = _total(parts, bias, t, tokens, width, h * D + other, is_inside, PARTS, HAS_BIAS)
        y = y.to(DTYPE).to(tl.float32)
        if NORMS_Q and h < heads:
            x, y = _norm_both(x, y, q_weight, d, other, is_inside, D, eps, DTYPE)
        if NORMS_K and h >= heads:
            x, y = _norm_both(x, y, k_weight, d, other, is_inside, D, eps, DTYPE)
        if R > 0:
            turns = d < 2 * R
            angle = tl.load(positions + t) * R + tl.where(d < R, d, d - R)
            c = tl.load(cos + angle, mask=turns, other=1.0).to(tl.float32)
            s = tl.load(sin + angle, mask=turns, other=0.0).to(tl.float32)
            x = tl.where(turns, x * c + tl.where(d < R, -y, y) * s, x)
    if h < heads:
        offset = (t * heads + h).to(tl.int64) * D + d
        tl.store(q_out + offset, x.to(DTYPE), mask=is_inside)
    elif h < heads + kv_heads:
        offset = (row * kv_heads + h - heads) * D + d
        tl.store(keys + offset, x.to(DTYPE), mask=is_inside)
    else:
        offset = (row * kv_heads + h - heads - kv_heads) * D + d
        tl.store(values + offset, x.to(DTYPE), mask=is_inside)


@triton.jit  # type: ignore[untyped-decorator]
def _norm_both(  # type: ignore[no-untyped-def]
    x, y, weight, d, other, is_inside, D: tl.constexpr, eps, DTYPE: tl.constexpr
):
    """Normalise a head x [D], and y, its channels at the indices `other`."""
    inverse = _inverse_rms(x, D, eps)
    x = x * inverse * tl.load(weight + d, mask=is_inside, other=0.0)
    y = y * inverse * tl.load(weight + other, mask=is_inside, other=0.0)
    return x.to(DTYPE).to(tl.float32), y.to(DTYPE).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _gate(  # type: ignore[no-untyped-def]
    parts,
    bias,
    out,
    rows,
    inner,
    PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KIND: tl.constexpr,
    BN: tl.constexpr,
):
    """Compute some outputs of one row."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    row = tl.program_id(0)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    is_inside = n < inner
    x = _total(parts, bias, row, rows, 2 * inner, n, is_inside, PARTS, HAS_BIAS)
    up = _total(parts, bias, row, rows, 2 * inner, n + inner, is_inside, PARTS, HAS_BIAS)
    x, up = x.to(DTYPE).to(tl.float32), up.to(DTYPE).to(tl.float32)
    if KIND == 0:
        x = tl.div_rn(x, 1.0 + tl.exp(-x))
    else:
        inside = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        x = x * (1.0 - tl.div_rn(1.0, tl.exp(2.0 * inside) + 1.0))
    x = x.to(DTYPE).to(tl.float32)
    pointer = out + row.to(tl.int64) * inner + n
    tl.store(pointer, (x * up).to(DTYPE), mask=is_inside)
