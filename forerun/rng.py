"""Counter-based random numbers: noise is a pure function of (seed, lane, counters, token).

The same arguments give the same noise for any batch and device, so plain and speculative decoding
draw the same tokens. The mixing function is the finaliser of SplitMix64 (Steele, Lea, Flood 2014):
element i of stream `key` is mix(key + (i + 1) * GOLDEN).
"""

import math
from enum import IntEnum

import torch
from torch import Tensor

from forerun.devices import upload

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
_M1, _M2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class Lane(IntEnum):
    """The purpose of a stream of noise. Streams of different lanes are independent."""

    TARGET = 0  # the target's draw at an absolute position, shared with coupled drafters
    DRAFT = 1  # a drafter's own draws
    ACCEPT = 2  # accept-or-reject coins
    RESIDUAL = 3  # the token drawn from a residual, or as a bonus


def mix(x: int) -> int:
    """Apply SplitMix64's finaliser to one unsigned 64-bit integer."""
    x &= MASK
    x = ((x ^ (x >> 30)) * _M1) & MASK
    x = ((x ^ (x >> 27)) * _M2) & MASK
    return x ^ (x >> 31)


def stream(seed: int, lane: Lane, *counters: int) -> int:
    """Return the 64-bit key of one stream of noise."""
    key = mix(seed + GOLDEN * (1 + lane))
    for counter in counters:
        key = mix(key + GOLDEN * (counter + 1))
    return key


def uniform(key: int, index: int = 0) -> float:
    """Return element `index` of a stream, uniform in the open interval (0, 1), with 52 bits."""
    return ((mix(key + GOLDEN * (index + 1)) >> 12) + 0.5) * 2.0**-52


def signed(x: int) -> int:
    """Return an unsigned 64-bit integer as the int64 of the same bits."""
    return x - (1 << 64) if x >> 63 else x


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift int64 right logically; torch's own shift is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def substreams(keys: Tensor, counters: Tensor) -> Tensor:
    """Return the keys that `stream` gives with one more counter each.

    int64 [K], int64 [K] -> int64 [K], or shapes that broadcast; keys are unsigned, in the same
    bits.
    """
    return mix_tensor(keys + (counters + 1) * signed(GOLDEN))


def mix_tensor(x: Tensor) -> Tensor:
    """Apply `mix` to int64 numbers, whose bits are those of unsigned ones."""
    x = (x ^ _shift(x, 30)) * signed(_M1)
    x = (x ^ _shift(x, 27)) * signed(_M2)
    return x ^ _shift(x, 31)


def gumbel(keys: Tensor, tokens: Tensor) -> Tensor:
    """Return standard Gumbel noise of the given tokens in the given streams.

    int64 [K], int64 [K] -> float64 [K], or shapes that broadcast.
    """
    u = (_shift(substreams(keys, tokens), 12).double() + 0.5) * 2.0**-52
    return -torch.log(-torch.log(u))


def gumbel_scalar(key: int, token: int) -> float:
    """Return `gumbel` of one token in one stream, computed in plain Python."""
    return -math.log(-math.log(uniform(key, token)))


def perturb(scores: Tensor, keys: list[int]) -> Tensor:
    """Add Gumbel noise to scores; -inf stays -inf. [M, V], M stream keys -> float64 [M, V]

    On the CPU noise is generated only for finite scores, so rows filtered by top-k are cheap.
    """
    key = upload([signed(k) for k in keys], torch.int64, scores.device)
    if not scores.is_cpu:  # the host need not know which scores are finite
        token = torch.arange(scores.shape[1], device=scores.device)
        return scores.double() + gumbel(key[:, None], token)
    row, token = torch.nonzero(scores > -math.inf, as_tuple=True)
    noisy = torch.full(scores.shape, -math.inf, dtype=torch.float64, device=scores.device)
    noisy[row, token] = scores[row, token].double() + gumbel(key[row], token)
    return noisy


def gumbel_argmax(scores: Tensor, keys: list[int]) -> Tensor:
    """Draw from softmax(scores) for each row by Gumbel-max. [M, V] -> int64 [M]

    Ties are resolved in favour of the lowest token id. Every row needs a finite score.
    """
    if not scores.is_cpu:
        return perturb(scores, keys).argmax(-1)
    row, token = torch.nonzero(scores > -math.inf, as_tuple=True)
    if len(row) == len(scores):  # one candidate per row: nothing to draw
        return token
    return perturb(scores, keys).argmax(-1)
