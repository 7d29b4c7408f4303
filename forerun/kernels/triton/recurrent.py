"""Recurrent layers with the delta rule, Mamba-2 or lightning attention: two kernels a layer.

`prepare` has a program for each token and head. It convolves the channels of its head, normalises
keys and queries, and leaves the token's record but for its change. `sweep` has a program for each
segment, head of values and block of columns, with the state of these in registers. It applies the
pending records, writes the state back, and goes through the tokens of the segment.

A program depends on its own segment only, and a change is multiplied and added as in torch, without
fusing the two. So a token has the same bits whatever else is in the pass, and when its change comes
from its record.

Twin: `runtime.recorded_recurrence.RecordedRecurrence`, in torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

LANES = 16  # columns of a state that lie side by side
FLOATS_A_THREAD = 32  # of a block of a state


@dataclass(frozen=True, slots=True)
class Runs:
    """The segments of a pass, int64; R segments of N tokens, padding included. The fields are those
    of `runtime.recorded_recurrence.RecurrentInputs`; segments with a count of 0 are skipped."""

    slots: Tensor
    old_halves: Tensor
    new_halves: Tensor
    counts: Tensor
    pending: Tensor
    parents: Tensor
    windows: Tensor
    histories: Tensor


@dataclass(frozen=True, slots=True)
class Memory:
    """Places of the numbers of a layer, in floats; see `cache.recurrent.StateLayout`.

    Attributes:
        data: float32 [slots, floats of a slot].
        state_at: the layer's state in a slot.
        half_at: its part of the first half in a slot.
        half: from one half to the other.
        records_at: its records in its part of a half.
        record: floats of a record.
    """

    data: Tensor
    state_at: int
    half_at: int
    half: int
    records_at: int
    record: int


@dataclass(frozen=True, slots=True)
class Heads:
    """The shape of a layer; see `models.families.RecurrentLayers`."""

    kind: str
    taps: int
    key_heads: int
    key_size: int
    value_heads: int
    value_size: int
    tiled: bool

    @property
    def first_channels(self) -> tuple[int, int, int]:
        """The first channels of queries, keys and values."""
        keys, values = self.key_heads * self.key_size, self.value_heads * self.value_size
        return (values + keys, values, 0) if self.kind == "mamba" else (0, keys, 2 * keys)


@dataclass(frozen=True, slots=True)
class KernelWeights:
    """The weights of a layer in float32; see `models.parameters.RecurrentWeights`."""

    conv_weight: Tensor | None
    conv_bias: Tensor | None
    decay_bias: Tensor | None
    decay_rate: Tensor
    skip: Tensor | None


def recur(
    inputs: Tensor,
    decays: Tensor,
    weights: KernelWeights,
    heads: Heads,
    memory: Memory,
    runs: Runs,
    is_tree: bool,
) -> Tensor:
    """Process the tokens of a pass in one layer, in its memory.

    Args:
        inputs: float32 [T, C], of the convolution; T is R * N.
        decays: float32 [T, n], [T, 2n] or [T, 0], as for a `decoder.Recur`.
        is_tree: a token may follow any earlier one, not only the one before it.

    Returns:
        float32 [T, n * value size], 0 for padding.
    """
    segments, tokens = runs.parents.shape
    blocks = triton.cdiv(heads.value_size, LANES)
    q = inputs.new_empty((len(inputs), heads.key_heads, heads.key_size))
    out = inputs.new_zeros((len(inputs), heads.value_heads * heads.value_size))
    points = out
    if is_tree:
        count = segments * heads.value_heads * blocks * tokens
        points = inputs.new_empty((count, heads.key_size, LANES))
    offsets = memory.half_at, memory.half, memory.records_at, memory.record
    segment_inputs = runs.slots, runs.old_halves, runs.new_halves, runs.counts, runs.pending
    w = weights
    _prepare[(len(inputs), heads.key_heads + heads.value_heads)](
        inputs.contiguous(),
        decays.contiguous(),
        inputs if w.conv_weight is None else w.conv_weight,
        inputs if w.conv_bias is None else w.conv_bias,
        inputs if w.decay_bias is None else w.decay_bias,
        w.decay_rate,
        memory.data,
        *segment_inputs,
        runs.windows,
        runs.histories,
        q,
        memory.data.stride(0),
        *offsets,
        tokens,
        *heads.first_channels,
        heads.key_size**-0.5,
        C=inputs.shape[1],
        WINDOW=heads.taps - 1,
        HAS_BIAS=w.conv_bias is not None,
        HAS_STEP=w.decay_bias is not None,
        BLOCK=triton.next_power_of_2(max(heads.key_size, heads.value_size)),
        num_warps=1,
        **_common_options(heads),
    )
    _sweep[(segments, heads.value_heads, blocks)](
        memory.data,
        *segment_inputs,
        runs.parents,
        q,
        w.decay_rate if w.skip is None else w.skip,
        out,
        points,
        memory.data.stride(0),
        memory.state_at,
        *offsets,
        tokens,
        int(is_tree),
        inputs.shape[1] if heads.taps > 1 else 0,
        KP=triton.next_power_of_2(heads.key_size),
        BLOCKS=blocks,
        LANES=LANES,
        IS_TILED=heads.tiled,
        HAS_SKIP=w.skip is not None,
        num_warps=sweep_warps(heads.key_size),
        **_common_options(heads),
    )
    return out


def _common_options(heads: Heads) -> dict[str, int]:
    """Return the constants and options that both kernels need."""
    return dict(
        KH=heads.key_heads,
        K=heads.key_size,
        VH=heads.value_heads,
        V=heads.value_size,
        IS_DELTA=heads.kind == "delta",
        enable_fp_fusion=False,
    )


def sweep_warps(key_size: int) -> int:
    """Return the warps of a program of `_sweep`."""
    floats: int = triton.next_power_of_2(key_size) * LANES
    return max(floats // (32 * FLOATS_A_THREAD), 1)


@triton.jit  # type: ignore[untyped-decorator]
def _input(  # type: ignore[no-untyped-def]
    inputs, half, code, first, tokens, records_at, record, c, is_channel,
    C: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Load channels c of an input of the convolution: of this pass, of the tokens before the first
    pending one, or from the record of a pending one."""
    is_new = code < tokens
    earlier = code - tokens
    offset = tl.where(earlier < WINDOW, earlier * C, records_at + (earlier - WINDOW) * record)
    new = tl.load(inputs + (first + code) * C + c, mask=is_channel & is_new, other=0.0)
    old = tl.load(half + offset + c, mask=is_channel & (code >= tokens), other=0.0)
    return tl.where(is_new, new, old)


@triton.jit  # type: ignore[untyped-decorator]
def _channels(  # type: ignore[no-untyped-def]
    inputs, weight, bias, old_half, new_half, windows, histories, t, first, node, pending, tokens,
    records_at, record, c, is_channel,
    C: tl.constexpr, WINDOW: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Convolve channels c of a token, and keep what a convolution needs of them: the input in the
    token's record, and, by the first token, those that the next pass begins with."""
    x = tl.load(inputs + t * C + c, mask=is_channel, other=0.0)
    if WINDOW > 0:
        tl.store(new_half + records_at + node * record + c, x, mask=is_channel)
        taps = weight + c * (WINDOW + 1)
        total = tl.zeros_like(x)
        for w in tl.static_range(WINDOW):
            code = tl.load(windows + t * WINDOW + w)
            row = _input(
                inputs, old_half, code, first, tokens, records_at, record, c, is_channel, C, WINDOW
            )
            total += row * tl.load(taps + w, mask=is_channel, other=0.0)
            code = tl.load(histories + (t // tokens) * WINDOW + w)
            begins = is_channel & (node == 0) & (pending > 0)
            row = _input(
                inputs, old_half, code, first, tokens, records_at, record, c, begins, C, WINDOW
            )
            tl.store(new_half + w * C + c, row, mask=begins)
        x = total + x * tl.load(taps + WINDOW, mask=is_channel, other=0.0)
        if HAS_BIAS:
            x += tl.load(bias + c, mask=is_channel, other=0.0)
    return x / (1.0 + tl.exp(-x))


# one variant for all shapes of passes: others might add in another order
@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator]
def _prepare(  # type: ignore[no-untyped-def]
    inputs, decays, weight, bias, decay_bias, decay_rate, data, slots, old_halves, new_halves,
    counts, pending, windows, histories, q_out, slot, half_at, half, records_at, record, tokens,
    query_at, key_at, value_at, scale,
    C: tl.constexpr, WINDOW: tl.constexpr, KH: tl.constexpr, K: tl.constexpr, VH: tl.constexpr,
    V: tl.constexpr, IS_DELTA: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_STEP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Prepare the query and key, or the value, of one head of one token."""
    t, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    r = t // tokens
    node = t - r * tokens
    if node < tl.load(counts + r):
        first = r * tokens
        waiting = tl.load(pending + r)
        own = data + tl.load(slots + r) * slot + half_at
        old_half, new_half = (
            own + tl.load(old_halves + r) * half,
            own + tl.load(new_halves + r) * half,
        )
        i = tl.arange(0, BLOCK)
        kept = C if WINDOW > 0 else 0
        row = new_half + records_at + node * record + kept
        if part < KH:
            is_key = i < K
            q = _channels(
                inputs, weight, bias, old_half, new_half, windows, histories, t, first, node,
                waiting, tokens, records_at, record, query_at + part * K + i, is_key, C, WINDOW,
                HAS_BIAS,
            )  # fmt: skip
            k = _channels(
                inputs, weight, bias, old_half, new_half, windows, histories, t, first, node,
                waiting, tokens, records_at, record, key_at + part * K + i, is_key, C, WINDOW,
                HAS_BIAS,
            )  # fmt: skip
            if IS_DELTA:
                q = q / tl.sqrt(tl.sum(tl.where(is_key, q * q, 0.0), 0) + 1e-6) * scale
                k = k / tl.sqrt(tl.sum(tl.where(is_key, k * k, 0.0), 0) + 1e-6)
            tl.store(q_out + (t * KH + part) * K + i, q, mask=is_key)
            tl.store(row + part * K + i, k, mask=is_key)
        else:
            h = part - KH
            v = _channels(
                inputs, weight, bias, old_half, new_half, windows, histories, t, first, node,
                waiting, tokens, records_at, record, value_at + h * V + i, i < V, C, WINDOW,
                HAS_BIAS,
            )  # fmt: skip
            row += KH * K
            tl.store(row + h * V + i, v, mask=i < V)  # `_sweep` makes the change of it
            step = 1.0
            if HAS_STEP:
                width = 2 * VH if IS_DELTA else VH
                x = tl.load(decays + t * width + h) + tl.load(decay_bias + h)
                grown = tl.exp(tl.minimum(x, 20.0))
                above = 1.0 + grown
                # log(1 + y) for small y, where 1 + y is rounded
                exact = tl.log(above) * (grown / tl.where(above == 1.0, 1.0, above - 1.0))
                step = tl.where(x > 20.0, x, tl.where(above == 1.0, grown, exact))
            factor = step
            if IS_DELTA:
                factor = 1.0 / (1.0 + tl.exp(-tl.load(decays + t * 2 * VH + VH + h)))
            row += VH * V
            tl.store(row + h, tl.exp(tl.load(decay_rate + h) * step))
            tl.store(row + VH + h, factor)


@triton.jit  # type: ignore[untyped-decorator]
def _key(  # type: ignore[no-untyped-def]
    row, head, key_head, i, lane, is_lane,
    KH: tl.constexpr, K: tl.constexpr, VH: tl.constexpr, V: tl.constexpr, IS_DELTA: tl.constexpr,
):  # fmt: skip
    """Load a head's part of a record: key [KP], change [LANES], decay and factor."""
    key = tl.load(row + key_head * K + i, mask=i < K, other=0.0)
    change = tl.load(row + KH * K + head * V + lane, mask=is_lane, other=0.0)
    decay = tl.load(row + KH * K + VH * V + head)
    factor = tl.load(row + KH * K + VH * V + VH + head)
    if not IS_DELTA:
        key = key * factor
    return key, change, decay, factor


@triton.jit(do_not_specialize=["tokens", "is_tree"])  # type: ignore[untyped-decorator]
def _sweep(  # type: ignore[no-untyped-def]
    data, slots, old_halves, new_halves, counts, pending, parents, q, skip, out, points, slot,
    state_at, half_at, half, records_at, record, tokens, is_tree, kept,
    KH: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, VH: tl.constexpr, V: tl.constexpr,
    BLOCKS: tl.constexpr, LANES: tl.constexpr, IS_DELTA: tl.constexpr, IS_TILED: tl.constexpr,
    HAS_SKIP: tl.constexpr,
):  # fmt: skip
    """Go through the tokens of one segment with one block of columns of one head's state."""
    r, head, block = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    count = tl.load(counts + r)
    if count > 0:
        waiting = tl.load(pending + r)
        own = data + tl.load(slots + r) * slot
        key_head = head % KH if IS_TILED else head // (VH // KH)
        i = tl.arange(0, KP)
        lane = block * LANES + tl.arange(0, LANES)
        is_lane = lane < V
        tile = i[:, None] * LANES + tl.arange(0, LANES)[None, :]
        is_row = (i < K)[:, None] & (tl.arange(0, LANES) >= 0)[None, :]
        pointer = own + state_at + (head * BLOCKS + block) * K * LANES
        state = tl.load(pointer + tile, mask=is_row, other=0.0)
        row = own + half_at + tl.load(old_halves + r) * half + records_at + kept
        n = 0
        while n < waiting:
            key, change, decay, factor = _key(
                row, head, key_head, i, lane, is_lane, KH, K, VH, V, IS_DELTA
            )
            state = state * decay + key[:, None] * change[None, :]
            row += record
            n += 1
        tl.store(pointer + tile, state, mask=is_row & (waiting > 0))
        tl.debug_barrier()  # other threads may read what these have written, also below
        row = own + half_at + tl.load(new_halves + r) * half + records_at + kept
        base = points + ((r * VH + head) * BLOCKS + block) * tokens * K * LANES
        share = 0.0
        if HAS_SKIP:
            share = tl.load(skip + head)
        n = 0
        while n < count:
            t = r * tokens + n
            key, value, decay, factor = _key(
                row, head, key_head, i, lane, is_lane, KH, K, VH, V, IS_DELTA
            )
            parent = tl.load(parents + t)
            if parent != n:  # not the token before, whose state is in registers
                point = base + (parent - 1) * K * LANES
                point = tl.where(parent > 0, point, pointer)
                state = tl.load(point + tile, mask=is_row, other=0.0)
            decayed = state * decay
            change = value
            if IS_DELTA:
                change = factor * (value - tl.sum(decayed * key[:, None], 0))
                tl.store(row + KH * K + head * V + lane, change, mask=is_lane)
            state = decayed + key[:, None] * change[None, :]
            query = tl.load(q + (t * KH + key_head) * K + i, mask=i < K, other=0.0)
            result = tl.sum(state * query[:, None], 0)
            if HAS_SKIP:
                result += share * value
            tl.store(out + t * VH * V + head * V + lane, result, mask=is_lane)
            if is_tree > 0:
                tl.store(base + n * K * LANES + tile, state, mask=is_row)
                tl.debug_barrier()
            row += record
            n += 1
