"""Attention over a paged cache in which each token walks its own keys in the order of positions.

A token of a draft tree sees the committed text and its own path. Here it reads exactly these rows,
in fixed groups and with sums in a fixed order, whatever else is in the pass: so it computes the
bits that plain decoding computes at its position. There are no masks. Keys are divided into splits
of SPAN positions, whose partial results are joined in order (as in flash-decoding, Dao et al. 2023,
but with a fixed size of splits instead of a fixed number).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.kernels.triton.formats import dot_type

KEYS = 64  # positions that are read at once
GROUPS = 2  # of these in a split
SPAN = KEYS * GROUPS
LEAST_QUERIES = 16  # rows that a product on tensor cores takes; fewer are padded


@dataclass(frozen=True, slots=True)
class Walk:
    """The rows of the cache that each token of a pass sees.

    Attributes:
        position: int32 [T], the token's own position; -1 is padding, which gets no result.
        direct: int32 [T], how many of its first positions are in the table.
        table: int64 [R, K], the rows of each segment's positions; T / R tokens each.
        extra: int64 [E], rows of the positions behind `direct`, of all tokens.
        extra_at: int32 [T], where those of each token begin.
    """

    position: Tensor
    direct: Tensor
    table: Tensor
    extra: Tensor
    extra_at: Tensor


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    walk: Walk,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    *,
    sinks: int = 0,
    chunk: int | None = None,
    sink_logits: Tensor | None = None,
    dot: tl.dtype | None = None,
) -> Tensor:
    """Attend with q [T, Hq, D] to the cache's keys and values [rows, Hkv, D]. -> [T, Hq, D]

    Args:
        scale: factor on the scores.
        softcap: c in c * tanh(score / c), before the softmax.
        window: a token sees itself and the window - 1 positions before it; None is all.
        sinks: besides a window it sees so many of the first positions.
        chunk: it sees none before the last position that is a multiple of this.
        sink_logits: [Hq] scores that take part in the softmax and have no value.
        dot: the number format of the products; by default that of q. Sums are in float32.
    """
    tokens, heads, size = q.shape
    kv_heads, splits = keys.shape[1], -(-walk.table.shape[1] // SPAN)
    group = heads // kv_heads
    padded = max(triton.next_power_of_2(group), LEAST_QUERIES)
    wide = max(triton.next_power_of_2(size), 16)
    shape = (tokens, kv_heads, splits, padded)
    most, total = (torch.empty(shape, dtype=torch.float32, device=q.device) for _ in range(2))
    sums = torch.empty((*shape, wide), dtype=torch.float32, device=q.device)
    out = torch.zeros_like(q)
    sizes = dict(G=group, GP=padded, D=size, DP=wide, SPLITS=splits, SPAN=SPAN)
    _attend_split[(tokens, kv_heads, splits)](
        q.contiguous(),
        keys,
        values,
        walk.table,
        walk.extra,
        walk.direct,
        walk.extra_at,
        walk.position,
        most,
        total,
        sums,
        walk.table.shape[1],
        tokens // walk.table.shape[0],
        heads,
        kv_heads,
        scale,
        softcap or 0.0,
        window or 0,
        sinks,
        chunk or 0,
        KEYS=KEYS,
        DOT=dot or dot_type(q.dtype),
        **sizes,
    )
    _attend_join[(tokens, kv_heads)](
        most,
        total,
        sums,
        walk.position,
        out if sink_logits is None else sink_logits.float(),
        out,
        heads,
        kv_heads,
        window or 0,
        sinks,
        chunk or 0,
        HAS_SINK_LOGITS=sink_logits is not None,
        **sizes,
    )
    return out


@triton.jit
def _first_seen(last, window, chunk):  # type: ignore[no-untyped-def]
    """Return the first position that a token at `last` sees, sinks aside."""
    begin = tl.where(window > 0, tl.maximum(last - window + 1, 0), 0)
    return tl.maximum(begin, tl.where(chunk > 0, last - last % tl.maximum(chunk, 1), 0))


@triton.jit  # type: ignore[untyped-decorator]
def _attend_split(  # type: ignore[no-untyped-def]
    q, keys, values, table, extra, direct, extra_at, position, most_out, total_out, sums_out,
    columns, tokens_each, heads, kv_heads, scale, softcap, window, sinks, chunk,
    G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SPLITS: tl.constexpr,
    SPAN: tl.constexpr, KEYS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Reduce one split of the keys of one token and one head of keys."""
    t, h, s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    last, first = tl.load(position + t), s * SPAN
    begin = _first_seen(last, window, chunk)
    if (last >= first) & ((first + SPAN > begin) | (first < sinks)):
        g, d = tl.arange(0, GP), tl.arange(0, DP)
        in_table = tl.load(direct + t)
        line = table + (t // tokens_each).to(tl.int64) * columns
        further = extra + tl.load(extra_at + t)
        own = (t * heads + h * G + g[:, None]) * D + d[None, :]
        is_query = (g < G)[:, None] & (d < D)[None, :]
        query = tl.load(q + own, mask=is_query, other=0.0)
        most = tl.full((GP,), float("-inf"), tl.float32)
        total = tl.zeros((GP,), tl.float32)
        sums = tl.zeros((GP, DP), tl.float32)
        at = first
        while at < first + SPAN:
            i = at + tl.arange(0, KEYS)
            seen = (i <= last) & ((i >= begin) | (i < sinks))
            near = tl.load(line + i, mask=seen & (i < in_table), other=0)
            far = tl.load(further + (i - in_table), mask=seen & (i >= in_table), other=0)
            row = tl.where(i < in_table, near, far)
            offset = (row[:, None] * kv_heads + h) * D + d[None, :]
            is_key = seen[:, None] & (d < D)[None, :]
            key = tl.load(keys + offset, mask=is_key, other=0.0)
            score = tl.dot(query.to(DOT), key.to(DOT).T, input_precision="ieee") * scale
            if softcap > 0:
                # tanh by exponentials: the interpreter has no other
                bent = 1.0 - 2.0 / (tl.exp(2.0 * score / softcap) + 1.0)
                score = bent * softcap
            score = tl.where(seen[None, :], score, float("-inf"))
            new = tl.maximum(most, tl.max(score, 1))
            shift = tl.where(new == float("-inf"), 0.0, new)
            weight, kept = tl.exp(score - shift[:, None]), tl.exp(most - shift)
            value = tl.load(values + offset, mask=is_key, other=0.0)
            sums = sums * kept[:, None] + tl.dot(
                weight.to(DOT), value.to(DOT), input_precision="ieee"
            )
            total = total * kept + tl.sum(weight, 1)
            most = new
            at += KEYS
        base = ((t * kv_heads + h) * SPLITS + s) * GP
        tl.store(most_out + base + g, most)
        tl.store(total_out + base + g, total)
        tl.store(sums_out + (base + g[:, None]) * DP + d[None, :], sums)


@triton.jit  # type: ignore[untyped-decorator]
def _attend_join(  # type: ignore[no-untyped-def]
    most_in, total_in, sums_in, position, sink_logits, out, heads, kv_heads, window, sinks, chunk,
    G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SPLITS: tl.constexpr,
    SPAN: tl.constexpr, HAS_SINK_LOGITS: tl.constexpr,
):  # fmt: skip
    """Join the splits of one token and one head of keys, in order."""
    t, h = tl.program_id(0), tl.program_id(1)
    last = tl.load(position + t)
    if last >= 0:
        g, d = tl.arange(0, GP), tl.arange(0, DP)
        begin = _first_seen(last, window, chunk)
        most = tl.full((GP,), float("-inf"), tl.float32)
        total = tl.zeros((GP,), tl.float32)
        sums = tl.zeros((GP, DP), tl.float32)
        s = tl.where(sinks > 0, 0, begin // SPAN)
        while s <= last // SPAN:
            base = ((t * kv_heads + h) * SPLITS + s) * GP
            own = tl.load(most_in + base + g)
            new = tl.maximum(most, own)
            shift = tl.where(new == float("-inf"), 0.0, new)
            kept, weight = tl.exp(most - shift), tl.exp(own - shift)
            part = tl.load(sums_in + (base + g[:, None]) * DP + d[None, :])
            sums = sums * kept[:, None] + part * weight[:, None]
            total = total * kept + tl.load(total_in + base + g) * weight
            most = new
            s += 1
            # behind the sinks, the next split that was computed
            s = tl.where(s * SPAN < sinks, s, tl.maximum(s, begin // SPAN))
        if HAS_SINK_LOGITS:
            sink = tl.load(sink_logits + h * G + g, mask=g < G, other=float("-inf"))
            new = tl.maximum(most, sink)
            kept = tl.exp(most - new)
            sums = sums * kept[:, None]
            total = total * kept + tl.exp(sink - new)
        offset = (t * heads + h * G + g[:, None]) * D + d[None, :]
        result = (sums / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + offset, result, mask=(g < G)[:, None] & (d < D)[None, :])
