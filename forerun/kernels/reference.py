"""The operations of a decoder in plain torch, the reference for every faster kernel.

Shapes: T tokens, H hidden size, R requests, N queries and K keys per request, D head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.kernels.device_matrix import DeviceMatrix

MIN_SQUARE = 1e-5  # least mean square by which `with_magnitude` divides


def linear(x: Tensor, weight: Tensor | DeviceMatrix, bias: Tensor | None = None) -> Tensor:
    """Compute x [T, in] times weight [out, in] transposed, plus bias [out]."""
    if isinstance(weight, DeviceMatrix):
        return weight.multiply(x, bias)
    return F.linear(x, weight, bias)


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Layer norm over the last axis, or RMS norm if there is no bias; in the dtype of `weight`."""
    wide = x.to(weight.dtype)
    if bias is None:
        return F.rms_norm(wide, weight.shape, weight, eps).to(x.dtype)
    return F.layer_norm(wide, weight.shape, weight, bias, eps).to(x.dtype)


def group_norm(x: Tensor, weight: Tensor, size: int, eps: float) -> Tensor:
    """RMS norm of each `size` channels of x [T, C]; weight [C], or [size] for all groups alike."""
    groups = x.view(len(x), -1, size)
    return (F.rms_norm(groups, (size,), None, eps) * weight.view(-1, size)).flatten(-2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply a rotary embedding to the first 2 * R channels of each head.

    x [T, heads, D], cos and sin [T, 1, R] -> [T, heads, D]"""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def activate(x: Tensor, kind: str) -> Tensor:
    """Apply the activation function `kind`: silu, sigmoid, gelu, gelu_tanh or relu2."""
    if kind == "silu":
        return F.silu(x)
    if kind == "sigmoid":
        return torch.sigmoid(x)
    if kind == "relu2":
        return F.relu(x).square()
    return F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


def xielu(x: Tensor, above: Tensor, below: Tensor, slope: Tensor, bound: Tensor) -> Tensor:
    """Apply xIELU (Huang and Schlag, 2411.13010): a parabola above 0, an exponential below it.

    above, below: factors of the two curves; slope: the slope of both at 0; bound: the largest
    argument of the exponential."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    exponential = (torch.expm1(torch.minimum(wide, bound)) - wide) * below
    return (torch.where(wide > 0, above * wide.square(), exponential) + slope * wide).to(x.dtype)


def gate(gates: Tensor, ups: Tensor, kind: str) -> Tensor:
    """Multiply activated gates by ups; "clamped_swiglu" is gpt-oss's form, which bounds both."""
    if kind != "clamped_swiglu":
        return activate(gates, kind) * ups
    gates, ups = gates.clamp(max=7.0), ups.clamp(-7.0, 7.0)
    return (ups + 1) * gates * torch.sigmoid(1.702 * gates)


def above_cutoff(gates: Tensor, deviations: float) -> Tensor:
    """Return by how much gates [T, I] exceed their mean plus `deviations` standard deviations, 0
    where they do not (Gemma 3n)."""
    cutoff = gates.mean(-1, keepdim=True) + gates.std(-1, keepdim=True, correction=0) * deviations
    return F.relu(gates - cutoff)


def with_magnitude(x: Tensor, other: Tensor) -> Tensor:
    """Scale rows x [T, H] to the root of the mean square of those of `other` [T, H]."""
    own = x.square().mean(-1, keepdim=True).clamp(min=MIN_SQUARE).sqrt()
    return x * other.square().mean(-1, keepdim=True).sqrt() / own


def convolve(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve the last inputs of each channel, rows [.., taps, C] with the oldest first, with
    weight [C, taps]. -> [.., C]

    Taps are added in order, so that the bits of a token do not depend on the others."""
    out = rows[..., 0, :] * weight[:, 0]
    for tap in range(1, weight.shape[1]):
        out = out + rows[..., tap, :] * weight[:, tap]
    return out if bias is None else out + bias


def unit(x: Tensor) -> Tensor:
    """Divide x [.., heads, D] by the norm of each head."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def decay_state(state: Tensor, decay: Tensor) -> Tensor:
    """Multiply recurrent states [.., n, K, V] by decay [.., n]."""
    return state * decay[..., None, None]


def change_state(decayed: Tensor, key: Tensor, change: Tensor) -> Tensor:
    """Add the outer product of key [.., n, K] and change [.., n, V] to decayed states
    [.., n, K, V]."""
    return decayed + key[..., :, None] * change[..., None, :]


def read_state(state: Tensor, query: Tensor) -> Tensor:
    """Read states [.., n, K, V] with a query [.., n, K]. -> [.., n, V]"""
    return (state * query[..., None]).sum(-2)


def delta_change(decayed: Tensor, key: Tensor, value: Tensor, beta: Tensor) -> Tensor:
    """Return the change that moves what decayed states give for a key [.., n, K] towards value
    [.., n, V], by the share beta [.., n] (gated delta rule, 2412.06464)."""
    return beta[..., None] * (value - read_state(decayed, key))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Grouped-query attention.

    Args:
        q: [R, N, Hq, D] queries.
        k, v: [R, K, Hkv, D] keys and values.
        mask: [R, N, K] bool, True where a query sees a key; None when every query sees every key.
        scale: factor on the scores.
        softcap: c in c * tanh(score / c), applied before the mask (Gemma 2).
        sink_logits: [Hq] scores that take part in the softmax and have no value (gpt-oss).

    Returns:
        [R, N, Hq, D]
    """
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    mask = mask[:, None] if mask is not None else None
    if softcap is None and sink_logits is None:
        out = F.scaled_dot_product_attention(
            q, k, v, mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    else:
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = q @ k.transpose(-1, -2) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if sink_logits is not None:
            sinks = sink_logits.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, sinks), dim=-1)
        probabilities = scores.softmax(-1)[..., : v.shape[-2]]
        out = probabilities.to(v.dtype) @ v
    return out.transpose(1, 2)
