"""Drawing tokens on the device: temperature, top-k, top-p and min-p, then an argmax with the noise
of `rng`, whose hash is the same integers everywhere.

Nothing is sorted. A filter keeps the tokens whose score is at least some bar, and the bar of top-k
or top-p is found digit by digit: scores are at most 0, so the bits of their magnitude, read as an
integer, ascend from the likeliest token to the least likely. For each of eight digits of four bits,
blocks of the row add up how many tokens, and how much probability, each value of the digit has
(`_measure`), and one program takes the first value with which the bar is reached (`_descend`). Sums
are in fixed blocks and a fixed order, in float64, so that a row does not depend on other rows.
There are no atomic additions, and nothing waits for the host.

Twins: `kernels.draw.sample_tokens`, `shape_scores` and `rng.gumbel_argmax`. The tokens are theirs,
except that

- tokens that are tied at the border of top-p are all kept, as on other devices;
- sums of probabilities are added in another order, so a border that is met to 1e-15 may move;
- logarithms of uniforms may differ in the last bit: draws that are tied to 1e-15 may differ.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from forerun.kernels.draw import DrawParameters

BLOCK = 1024  # tokens of a program
BITS = 4  # of a digit
BINS = 1 << BITS
CHUNK = 128  # tokens that a program sorts into bins at once
FIRST_SHIFT = 28  # of the first digit of a magnitude, which has 31 bits
NO_BAR = 0x7F800000  # the magnitude of -inf: all tokens are kept


def draw_tokens(logits: Tensor, parameters: DrawParameters, *, block: int = BLOCK) -> Tensor:
    """Draw a token from each row of float32 logits [M, V]; ties go to the lowest id. -> int64 [M],
    -1 for rows with NaN or without a finite largest logit.

    block: tokens of a program, a power of two and at least `CHUNK`."""
    rows, vocab = logits.shape
    logits = logits.contiguous()
    blocks = triton.cdiv(vocab, block)
    shape = dict(V=vocab, BLOCKS=blocks, B=block)
    padded = dict(PADDED=triton.next_power_of_2(blocks))
    device = logits.device
    peaks = torch.empty((rows, blocks), dtype=torch.float32, device=device)
    _find_peaks[(rows, blocks)](logits, peaks, **shape)
    bars = torch.full((rows,), NO_BAR, dtype=torch.int32, device=device)
    temperature, least = parameters.temperature.float(), parameters.least.float()
    scaled = logits, peaks, temperature
    for is_mass, is_used in ((False, parameters.kind.has_top_k), (True, parameters.kind.has_top_p)):
        if not is_used:
            continue
        # What this filter may keep is what the one before has left, down to `bars`.
        found = torch.zeros((rows,), dtype=torch.int32, device=device)
        below, total = torch.zeros((2, rows), dtype=torch.float64, device=device)
        counts = torch.empty((rows, blocks, BINS), dtype=torch.float64, device=device)
        masses = torch.empty_like(counts) if is_mass else counts
        for shift in range(FIRST_SHIFT, -1, -BITS):
            digit = dict(IS_MASS=is_mass, SHIFT=shift, FIRST=FIRST_SHIFT, BINS=BINS)
            _measure[(rows, blocks)](
                *scaled, bars, found, counts, masses, CHUNK=CHUNK, **digit, **shape, **padded
            )
            _descend[(rows,)](
                counts,
                masses,
                parameters.top_p if is_mass else parameters.top_k,
                bars,
                found,
                below,
                total,
                blocks,
                **digit,
                **padded,
            )
    best = torch.empty((rows, blocks), dtype=torch.float64, device=device)
    indices = torch.empty((rows, blocks), dtype=torch.int32, device=device)
    tokens = torch.empty((rows,), dtype=torch.int64, device=device)
    _draw[(rows, blocks)](*scaled, least, parameters.keys, bars, best, indices, **shape, **padded)
    _choose[(rows,)](peaks, best, indices, tokens, blocks, **padded)
    return tokens


@triton.jit  # type: ignore[untyped-decorator]
def _find_peaks(logits, peaks, V, BLOCKS, B: tl.constexpr):  # type: ignore[no-untyped-def]
    """Find the largest logit of a block, inf if one is NaN."""
    row, block = tl.program_id(0), tl.program_id(1)
    i = block * B + tl.arange(0, B)
    x = tl.load(logits + row.to(tl.int64) * V + i, mask=i < V, other=float("-inf"))
    x = tl.where(x != x, float("inf"), x)
    tl.store(peaks + row * BLOCKS + block, tl.max(x, 0))


@triton.jit  # type: ignore[untyped-decorator]
def _peak(peaks, row, blocks, PADDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the largest logit of a row."""
    block = tl.arange(0, PADDED)
    own = tl.load(peaks + row * blocks + block, mask=block < blocks, other=float("-inf"))
    return tl.max(own, 0)


@triton.jit
def _magnitude(score):  # type: ignore[no-untyped-def]
    """Return the bits of a score without its sign: they ascend as scores fall from 0."""
    return score.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit  # type: ignore[untyped-decorator]
def _measure(  # type: ignore[no-untyped-def]
    logits,
    peaks,
    temperature,
    bars,
    found,
    counts,
    masses,
    V,
    BLOCKS,
    IS_MASS: tl.constexpr,
    SHIFT: tl.constexpr,
    FIRST: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    B: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Count the tokens of a block by a digit of their magnitude, and add up their probabilities, of
    tokens down to the bar whose earlier digits are those that were found."""
    row, block = tl.program_id(0), tl.program_id(1)
    most = _peak(peaks, row, BLOCKS, PADDED)
    row_temperature = tl.load(temperature + row)
    row_temperature = tl.where(row_temperature > 0, row_temperature, 1.0)
    bar, prefix = tl.load(bars + row), tl.load(found + row)
    bins = tl.arange(0, BINS)
    count = tl.zeros((CHUNK, BINS), tl.int32)
    mass = tl.zeros((CHUNK, BINS), tl.float64)
    for chunk in range(B // CHUNK):
        i = block * B + chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logits + row.to(tl.int64) * V + i, mask=i < V, other=float("-inf"))
        score = tl.div_rn(x - most, row_temperature)
        magnitude = _magnitude(score)
        is_open = (i < V) & (magnitude <= bar)
        if SHIFT < FIRST:
            is_open = is_open & (magnitude // BINS >> SHIFT == prefix // BINS >> SHIFT)
        digit = tl.where(is_open, (magnitude >> SHIFT) & (BINS - 1), -1)
        is_in = digit[:, None] == bins[None, :]
        count += is_in.to(tl.int32)
        if IS_MASS:
            mass += tl.where(is_in, tl.exp(score.to(tl.float64))[:, None], 0.0)
    offset = (row * BLOCKS + block).to(tl.int64) * BINS + bins
    tl.store(counts + offset, tl.sum(count, 0).to(tl.float64))
    if IS_MASS:
        tl.store(masses + offset, tl.sum(mass, 0))


@triton.jit  # type: ignore[untyped-decorator]
def _descend(  # type: ignore[no-untyped-def]
    counts,
    masses,
    limits,
    bars,
    found,
    below,
    total,
    blocks,
    IS_MASS: tl.constexpr,
    SHIFT: tl.constexpr,
    FIRST: tl.constexpr,
    BINS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Take the first value of a digit with which the limit is reached, else the last that occurs.

    Args:
        limits: how many tokens, or what share of the total, a filter keeps.
        below: what lies before the digits found so far: a number of tokens, or a sum.
        total: the sum of all, which the first digit gives.
    """
    row = tl.program_id(0)
    block, bins = tl.arange(0, PADDED), tl.arange(0, BINS)
    offset = (row * blocks + block).to(tl.int64)[:, None] * BINS + bins[None, :]
    is_block = (block < blocks)[:, None]
    count = tl.sum(tl.load(counts + offset, mask=is_block, other=0.0), 0)
    limit, before = tl.load(limits + row), tl.load(below + row)
    size = count
    if IS_MASS:
        size = tl.sum(tl.load(masses + offset, mask=is_block, other=0.0), 0)
        if SHIFT == FIRST:
            all_mass = tl.sum(size, 0)
            tl.store(total + row, all_mass)
        else:
            all_mass = tl.load(total + row)
        # a rounded sum must not cut anything from rows without this filter
        limit = tl.where(limit < 1, limit * all_mass, float("inf"))
    is_reached = (before + tl.cumsum(size, 0) >= limit) & (count > 0)
    first = tl.min(tl.where(is_reached, bins, BINS), 0)
    last = tl.max(tl.where(count > 0, bins, 0), 0)
    digit = tl.where(first < BINS, first, last)
    tl.store(below + row, before + tl.sum(tl.where(bins < digit, size, 0.0), 0))
    digits = tl.load(found + row) | (digit << SHIFT)
    tl.store(found + row, digits)
    if SHIFT == 0:
        tl.store(bars + row, tl.minimum(tl.load(bars + row), digits))


@triton.jit
def mix(x):  # type: ignore[no-untyped-def]
    """Return `rng.mix` of uint64 numbers."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def element(key, index):  # type: ignore[no-untyped-def]
    """Return element `index` of a stream of noise, or the key of a stream with one more counter."""
    return mix(key + (index + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)


@triton.jit
def gumbel(key, token):  # type: ignore[no-untyped-def]
    """Return `rng.gumbel` of tokens in a stream."""
    uniform = ((element(key, token) >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16
    return -tl.log(-tl.log(uniform))


@triton.jit  # type: ignore[untyped-decorator]
def _draw(  # type: ignore[no-untyped-def]
    logits,
    peaks,
    temperature,
    least,
    keys,
    bars,
    best,
    indices,
    V,
    BLOCKS,
    B: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Find the best token of a block, its score with noise, or its logit at temperature 0."""
    row, block = tl.program_id(0), tl.program_id(1)
    i = block * B + tl.arange(0, B)
    x = tl.load(logits + row.to(tl.int64) * V + i, mask=i < V, other=float("-inf"))
    row_temperature = tl.load(temperature + row)
    value = x.to(tl.float64)
    if row_temperature > 0:
        score = tl.div_rn(x - _peak(peaks, row, BLOCKS, PADDED), row_temperature)
        is_kept = (_magnitude(score) <= tl.load(bars + row)) & (score >= tl.load(least + row))
        score = tl.where(is_kept, score, float("-inf"))
        value = score.to(tl.float64)
        # Noise lies between -3.7 and 36.8, so lower scores cannot win against the likeliest's.
        if tl.max(score, 0) > -41.0:
            value += gumbel(tl.load(keys + row).to(tl.uint64, bitcast=True), i)
    top, index = tl.max(value, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best + row * BLOCKS + block, top)
    tl.store(indices + row * BLOCKS + block, block * B + index)


@triton.jit  # type: ignore[untyped-decorator]
def _choose(  # type: ignore[no-untyped-def]
    peaks, best, indices, tokens, blocks, PADDED: tl.constexpr
):
    """Find the best token of a row, -1 if its logits are not finite."""
    row = tl.program_id(0)
    block = tl.arange(0, PADDED)
    own = tl.load(best + row * blocks + block, mask=block < blocks, other=float("-inf"))
    _, at = tl.max(own, 0, return_indices=True, return_indices_tie_break_left=True)
    most = _peak(peaks, row, blocks, PADDED)
    is_finite = (most < float("inf")) & (most > float("-inf"))
    tl.store(tokens + row, tl.where(is_finite, tl.load(indices + row * blocks + at), -1))
