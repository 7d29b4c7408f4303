"""The draw: one token a row, argmax of scores plus Gumbel noise, natively where that is
possible."""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from forerun import rng
from forerun.errors import StateError
from forerun.kernels import native
from forerun.kernels.native import address


def gumbel_argmax(scores: Tensor, keys: Sequence[int]) -> Tensor:
    """One draw from softmax(scores) for each row. [M, V], M stream keys -> int64 [M]

    Every row needs a finite score; ties go to the lowest id. float32 on the CPU is drawn by the
    native kernel, anything else by its twin `rng.gumbel_argmax`.
    """
    lib = _library_for(scores)
    if lib is None:
        return rng.gumbel_argmax(scores, list(keys))
    scores, streams = scores.contiguous(), array("Q", keys)
    drawn = torch.empty(len(scores), dtype=torch.int64)
    lib.forerun_draw(
        scores.data_ptr(), address(streams), len(scores), scores.shape[1], drawn.data_ptr()
    )
    return drawn


def say(
    logits: Tensor, temperatures: Sequence[float], keys: Sequence[int], *, strict: bool = True
) -> list[int]:
    """One token for each row: the likeliest at temperature 0 (the lowest id among equals), else one
    of softmax(logits / temperature). [M, V], M temperatures, M stream keys -> M tokens

    What `gumbel_argmax(temper(logits, temperatures), keys)` says, in one native call where that is
    possible: behind a pass over the weights no code is in the caches, and each of torch's
        operations costs as much as this.

    Raises:
        StateError: logits are not finite; not without `strict`, where rows from the first such one
            on say anything.
    """
    lib = _library_for(logits)
    if lib is None:
        if strict:
            check_finite(logits)
        drawn: list[int] = rng.gumbel_argmax(temper(logits, temperatures), list(keys)).tolist()
        return drawn
    (rows, vocab), logits, said = logits.shape, logits.contiguous(), array("q", [0] * len(keys))
    heat, streams = array("f", temperatures), array("Q", keys)
    finite = lib.forerun_say(
        logits.data_ptr(), address(heat), address(streams), rows, vocab, address(said)
    )
    if strict and finite < rows:
        raise _not_finite()
    return [max(token, 0) for token in said]


def check_finite(logits: Tensor) -> None:
    """StateError where a row [M, V] has NaN, or nothing that is finite."""
    if not torch.isfinite(logits.amax(-1)).all():
        raise _not_finite()


def temper(logits: Tensor, temperatures: Sequence[float]) -> Tensor:
    """Scores of which the draw is what the temperature asks for: at most 0, and at temperature 0
    -inf everywhere but at the likeliest token. [M, V], M temperatures -> [M, V]"""
    if not any(temperatures):
        return _greedy(logits)
    heat = torch.tensor([t or 1.0 for t in temperatures], dtype=logits.dtype, device=logits.device)[
        :, None
    ]
    scores = (
        logits - logits.amax(-1, keepdim=True)
    ) / heat  # at most 0: it cannot overflow upwards
    if not all(temperatures):
        cold = torch.tensor([t == 0 for t in temperatures], device=logits.device)[:, None]
        scores = torch.where(cold, _greedy(logits), scores)
    return scores


def _greedy(logits: Tensor) -> Tensor:
    return torch.full_like(logits, -math.inf).scatter_(-1, logits.argmax(-1, keepdim=True), 0.0)


def _library_for(scores: Tensor) -> ctypes.CDLL | None:
    is_drawn = scores.is_cpu and scores.dtype is torch.float32
    return native.library() if is_drawn else None


def _not_finite() -> StateError:  # and neither may be what the pass has left in the cache
    return StateError(
        "the model produced logits that are not finite: check its weights, or use another dtype"
    )
