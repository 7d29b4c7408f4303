"""Sample one token per row by argmax of logits plus Gumbel noise, natively if possible."""

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
    """Sample from softmax(scores) for each row. [M, V], M stream keys -> int64 [M]

    Every row needs a finite score; ties go to the lowest id. float32 on the CPU uses the native
    kernel, anything else its reference `rng.gumbel_argmax`.
    """
    lib = _library_for(scores)
    if lib is None:
        return rng.gumbel_argmax(scores, list(keys))
    scores, streams = scores.contiguous(), array("Q", keys)
    rows, vocab = scores.shape
    drawn = torch.empty(rows, dtype=torch.int64)
    lib.forerun_draw(scores.data_ptr(), address(streams), rows, vocab, drawn.data_ptr())
    return drawn


def sample_tokens(
    logits: Tensor, temperatures: Sequence[float], keys: Sequence[int], *, strict: bool = True
) -> list[int]:
    """Sample a token for each row: greedily at temperature 0 (ties go to the lowest id), else from
    softmax(logits / temperature). [M, V], M temperatures, M stream keys -> M tokens

    Equal to `gumbel_argmax(scale_by_temperature(logits, temperatures), keys)`, but in one native
    call if possible: right after a forward pass a single torch operation takes as long as this
    whole function.

    Raises:
        StateError: logits are not finite. Without `strict` nothing is raised, and rows from the
            first such row on have arbitrary tokens.
    """
    lib = _library_for(logits)
    if lib is None:
        if strict:
            check_finite(logits)
        scores = scale_by_temperature(logits, temperatures)
        drawn: list[int] = rng.gumbel_argmax(scores, list(keys)).tolist()
        return drawn
    logits = logits.contiguous()
    rows, vocab = logits.shape
    scales, streams = array("f", temperatures), array("Q", keys)
    tokens = array("q", [0] * len(keys))
    finite = lib.forerun_say(
        logits.data_ptr(), address(scales), address(streams), rows, vocab, address(tokens)
    )
    if strict and finite < rows:
        raise _not_finite()
    return [max(token, 0) for token in tokens]


def check_finite(logits: Tensor) -> None:
    """Raise StateError if a row [M, V] has NaN, or no finite number."""
    if not torch.isfinite(logits.amax(-1)).all():
        raise _not_finite()


def scale_by_temperature(logits: Tensor, temperatures: Sequence[float]) -> Tensor:
    """Divide logits by the temperature of their row. [M, V], M temperatures -> [M, V]

    Scores are at most 0; at temperature 0 they are -inf except for the most likely token."""
    if not any(temperatures):
        return _greedy(logits)
    scales = [t or 1.0 for t in temperatures]
    scale = torch.tensor(scales, dtype=logits.dtype, device=logits.device)[:, None]
    scores = (logits - logits.amax(-1, keepdim=True)) / scale  # subtracting first avoids overflow
    if not all(temperatures):
        is_greedy = torch.tensor([t == 0 for t in temperatures], device=logits.device)[:, None]
        scores = torch.where(is_greedy, _greedy(logits), scores)
    return scores


def _greedy(logits: Tensor) -> Tensor:
    return torch.full_like(logits, -math.inf).scatter_(-1, logits.argmax(-1, keepdim=True), 0.0)


def _library_for(scores: Tensor) -> ctypes.CDLL | None:
    return native.library() if scores.is_cpu and scores.dtype is torch.float32 else None


def _not_finite() -> StateError:  # the cache rows of this forward pass may not be finite either
    return StateError(
        "the model produced logits that are not finite: check its weights, or use another dtype"
    )
