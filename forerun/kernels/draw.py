"""From rows of logits to tokens: temperature, top-k, top-p and min-p, then an argmax with Gumbel
noise.

`sample_tokens` does all of it in one native call if possible. `shape_scores` and
`rng.gumbel_argmax` are its reference, and serve other devices and dtypes.
"""

from __future__ import annotations

import ctypes
import functools
import math
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from forerun import rng
from forerun.devices import upload
from forerun.errors import StateError
from forerun.kernels import native
from forerun.kernels.native import address
from forerun.sampling.params import GREEDY, Sampling

MAX_SELECTED = 1024  # top_k up to which tokens are selected; the vocabulary is sorted otherwise


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


def takes_masks(logits: Tensor) -> bool:
    """Return True if `sample_tokens` may be given masks for these logits."""
    return _library_for(logits) is not None


def sample_tokens(
    logits: Tensor,
    samplings: Sequence[Sampling],
    keys: Sequence[int],
    *,
    strict: bool = True,
    masks: Sequence[bytes | None] = (),
) -> list[int]:
    """Draw a token from each row of logits, the likeliest at temperature 0; ties go to the lowest
    id. [M, V], M of each -> M tokens

    Equal to `gumbel_argmax(shape_scores(logits, samplings), keys)`, but in one native call if
    possible: right after a forward pass a single torch operation takes as long as this whole
    function.

    masks: for each row the tokens that may be drawn, as `Matcher.masks` gives them, or None if all
        may; empty without any. Only for logits of which `takes_masks` is true.

    Raises:
        StateError: logits are not finite. Without `strict` nothing is raised, and rows from the
            first such row on have arbitrary tokens.
    """
    lib = _library_for(logits)
    if lib is None:
        assert not masks, "only the native draw takes masks"
        with torch.inference_mode():
            finite_rows = torch.isfinite(logits.amax(-1))
            drawn = draw_on_device(logits, samplings, keys)
            # one copy to the host
            known = torch.stack((finite_rows.to(drawn.dtype), drawn)).tolist()
        if strict and not all(known[0]):
            raise _not_finite()
        return list(known[1])
    logits = logits.contiguous()
    rows, vocab = logits.shape
    streams, tokens = array("Q", keys), array("q", [0] * len(keys))
    sets, set_bytes = None, 0
    if masks:
        sets = (ctypes.c_char_p * rows)(*masks)
        set_bytes = min(len(mask) for mask in masks if mask)
    finite = lib.forerun_sample(
        logits.data_ptr(),
        packed(samplings),
        address(streams),
        rows,
        vocab,
        address(tokens),
        sets,
        set_bytes,
    )
    if strict and finite < rows:
        raise _not_finite()
    return [max(token, 0) for token in tokens]


class DrawKind(NamedTuple):
    """The operations that draws of several rows need; a recorded draw has one kind.

    Attributes:
        is_drawn: a row has a temperature.
        has_top_k, has_top_p: a row that is drawn has such a filter.
        selected: how many of the likeliest tokens of each row hold all that the filters keep.
    """

    is_drawn: bool
    has_top_k: bool
    has_top_p: bool
    selected: int

    @classmethod
    def of(cls, samplings: Sequence[Sampling], vocab: int) -> DrawKind:
        """Return the kind of draws with these samplings."""
        drawn = [by for by in samplings if by.temperature]
        limits = [by.top_k for by in drawn if 0 < by.top_k < vocab]
        has_top_p = any(by.top_p < 1 for by in drawn)
        is_open = any(by.top_p < 1 and not 0 < by.top_k < vocab for by in drawn)
        most = vocab if is_open else max(limits, default=0)
        selected = min(1 << (most - 1).bit_length(), vocab) if most else 0
        return cls(bool(drawn), bool(limits), has_top_p, selected)


@dataclass(frozen=True, slots=True)
class DrawParameters:
    """Parameters of the draws of M rows, on the device.

    Attributes:
        temperature: float64 [M]; 0 takes the likeliest token, whatever the filters are.
        least: float64 [M], the logarithm of min_p; -inf keeps all.
        top_k: float64 [M]; infinite keeps all.
        top_p: float64 [M]; 1 keeps all.
        keys: int64 [M], the bits of the streams' keys.
        kind: that of their samplings.
    """

    temperature: Tensor
    least: Tensor
    top_k: Tensor
    top_p: Tensor
    keys: Tensor
    kind: DrawKind

    @classmethod
    def upload(
        cls, samplings: Sequence[Sampling], keys: Sequence[int], vocab: int, device: torch.device
    ) -> DrawParameters:
        """Upload samplings and stream keys, M of each, in two copies."""
        columns = [sampling_numbers(by, vocab) for by in samplings]
        temperature, top_k, top_p, least = upload(
            [number for row in zip(*columns, strict=True) for number in row], torch.float64, device
        ).view(4, -1)
        return cls(
            temperature,
            least,
            top_k,
            top_p,
            upload([rng.signed(key) for key in keys], torch.int64, device),
            DrawKind.of(samplings, vocab),
        )


def sampling_numbers(by: Sampling, vocab: int) -> tuple[float, float, float, float]:
    """Return temperature, top_k (infinite for none), top_p and the logarithm of min_p."""
    top_k = by.top_k if 0 < by.top_k < vocab else math.inf
    return by.temperature, top_k, by.top_p, math.log(by.min_p) if by.min_p else -math.inf


def draw_on_device(logits: Tensor, samplings: Sequence[Sampling], keys: Sequence[int]) -> Tensor:
    """Draw as `sample_tokens` without `strict`, and leave the tokens where the logits are: int64
    [M]."""
    if not any(by.temperature for by in samplings):
        return logits.argmax(-1)
    by = DrawParameters.upload(samplings, keys, logits.shape[1], logits.device)
    return draw_rows(logits, by)


def draw_rows(logits: Tensor, by: DrawParameters) -> Tensor:
    """Draw from rows [M, V] by operations of the device alone, which can be recorded: int64 [M]."""
    likeliest = logits.argmax(-1)
    if not by.kind.is_drawn:
        return likeliest
    is_drawn = by.temperature > 0
    scale = torch.where(is_drawn, by.temperature, 1.0).to(logits.dtype)[:, None]
    scores = (logits - logits.amax(-1, keepdim=True)) / scale
    scores = _filter_rows(scores, by.top_k, by.top_p, by.least, by.kind)
    tokens = torch.arange(scores.shape[1], device=scores.device)
    noisy = scores.double() + rng.gumbel(by.keys[:, None], tokens)
    return torch.where(is_drawn, noisy.argmax(-1), likeliest)


def packed(samplings: Sequence[Sampling]) -> bytes:
    """Return the C structures of samplings, one behind the other."""
    return b"".join(map(_packed, samplings))


@functools.lru_cache(maxsize=1024)
def _packed(by: Sampling) -> bytes:
    least = math.log(by.min_p) if by.min_p else -math.inf
    return struct.pack("=fidfi", by.temperature, min(by.top_k, (1 << 31) - 1), by.top_p, least, 0)


def check_finite(logits: Tensor) -> None:
    """Raise StateError if a row [M, V] has NaN, or no finite number."""
    if not torch.isfinite(logits.amax(-1)).all():
        raise _not_finite()


def shape_scores(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Apply temperature, top-k, top-p and min-p, each row with its own.

    [M, V], M samplings -> scores [M, V]: log-probabilities up to a constant per row, at most 0, and
    -inf for what cannot be drawn.
    """
    scores = _scale_by_temperature(logits, [by.temperature for by in samplings])
    # A greedy row has one token left: there is nothing to filter.
    filters = [(GREEDY if by.temperature == 0 else by)[1:] for by in samplings]
    kinds = set(filters)
    if len(kinds) == 1:
        return _filter(scores, *filters[0])
    result = torch.empty_like(scores)
    for kind in kinds:  # rows do not depend on each other, so equal filters can be batched
        rows = [i for i, own in enumerate(filters) if own == kind]
        index = upload(rows, torch.int64, scores.device)
        result[index] = _filter(scores[index], *kind)
    return result


def _scale_by_temperature(logits: Tensor, temperatures: Sequence[float]) -> Tensor:
    if not any(temperatures):
        return _greedy(logits)
    scales = [t or 1.0 for t in temperatures]
    scale = upload(scales, logits.dtype, logits.device)[:, None]
    scores = (logits - logits.amax(-1, keepdim=True)) / scale  # subtracting first avoids overflow
    if not all(temperatures):
        is_greedy = upload([t == 0 for t in temperatures], torch.bool, logits.device)[:, None]
        scores = torch.where(is_greedy, _greedy(logits), scores)
    return scores


def _greedy(logits: Tensor) -> Tensor:
    return torch.full_like(logits, -math.inf).scatter_(-1, logits.argmax(-1, keepdim=True), 0.0)


def _filter(scores: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Keep the top_k likeliest tokens with ties at the border, of these the nucleus, and of that
    what min_p leaves. [M, V]"""
    vocab = scores.shape[-1]
    if not scores.is_cpu:
        by = Sampling(1.0, top_k, top_p, min_p)
        own = DrawParameters.upload([by] * len(scores), [0] * len(scores), vocab, scores.device)
        return _filter_rows(scores, own.top_k, own.top_p, own.least, own.kind)
    if not 0 < top_k <= MAX_SELECTED or top_k >= vocab:
        return _filter_sorted(scores, top_k, top_p, min_p)
    # Sorting the whole vocabulary takes as long as a small model's forward pass.
    values, index = scores.topk(top_k + 1, dim=-1)
    is_tied = (values[:, -1] == values[:, -2]) & ~torch.isneginf(values[:, -1])
    # Equal scores are in the order of their tokens, as in a stable sort.
    index, order = index[:, :-1].sort(dim=-1)
    values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    values = _apply_min_p(_apply_top_p(values, top_p), min_p)
    result = torch.full_like(scores, -math.inf).scatter_(-1, index.gather(-1, order), values)
    if is_tied.any():
        result[is_tied] = _filter_sorted(scores[is_tied], top_k, top_p, min_p)
    return result


def _filter_rows(
    scores: Tensor, top_k: Tensor, top_p: Tensor, least: Tensor, kind: DrawKind
) -> Tensor:
    """Apply the filters of `_filter`, each row with its own, without asking the device for
    anything; what equals the least score that is kept stays. Parameters as in `DrawParameters`."""
    bars = scores.amax(-1, keepdim=True) + least[:, None].to(scores.dtype)
    if kind.selected:
        ordered = scores.topk(kind.selected, dim=-1).values
        ranks = torch.arange(kind.selected, device=scores.device)
        ordered = ordered.masked_fill(ranks >= top_k[:, None], -math.inf)
        kept = _apply_top_p(ordered, top_p[:, None]) if kind.has_top_p else ordered
        lowest = kept.masked_fill(torch.isneginf(kept), math.inf).amin(-1, keepdim=True)
        # a row without top_k and top_p has more tokens than were selected
        is_filtered = (top_k < math.inf) | (top_p < 1)
        bars = torch.where(is_filtered[:, None], torch.maximum(bars, lowest), bars)
    return scores.masked_fill(scores < bars, -math.inf)


def _filter_sorted(scores: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Apply the filters of `_filter` for any top_k."""
    has_top_k = 0 < top_k < scores.shape[-1]
    if has_top_k or top_p < 1:
        ordered, index = scores.sort(dim=-1, descending=True, stable=True)
        if has_top_k:
            ordered = ordered.masked_fill(ordered < ordered[:, top_k - 1 : top_k], -math.inf)
        scores = torch.empty_like(scores).scatter_(-1, index, _apply_top_p(ordered, top_p))
    return _apply_min_p(scores, min_p)


def _apply_min_p(scores: Tensor, min_p: float) -> Tensor:
    if not min_p:
        return scores
    return scores.masked_fill(scores < scores.amax(-1, keepdim=True) + math.log(min_p), -math.inf)


def _apply_top_p(ordered: Tensor, top_p: float | Tensor) -> Tensor:
    """Keep the first of descending scores [M, V] whose probability reaches top_p, a number or
    float64 [M, 1]."""
    if not isinstance(top_p, Tensor) and top_p >= 1:  # a rounded sum must not cut anything
        return ordered
    weights = ordered.double().exp()
    sums = weights.cumsum(-1)
    before = torch.zeros_like(sums)
    before[:, 1:] = sums[:, :-1]
    cut = before >= top_p * sums[:, -1:]
    if isinstance(top_p, Tensor):
        cut &= top_p < 1
    cut[:, 0] = False  # the likeliest token stays, however small top_p is
    return ordered.masked_fill(cut, -math.inf)


def _library_for(scores: Tensor) -> ctypes.CDLL | None:
    return native.library() if scores.is_cpu and scores.dtype is torch.float32 else None


def _not_finite() -> StateError:  # the cache rows of this forward pass may not be finite either
    return StateError(
        "the model produced logits that are not finite: check its weights, or use another dtype"
    )
