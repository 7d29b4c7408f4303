"""Who sees whom in one pass: segments of tokens to positions, rows of the cache and masks.

A segment is what one slot adds in a pass: a chunk of known tokens, a draft tree, or the one after
the other. Its tokens see every committed token of the slot and their own ancestors. A position is
logical (committed length plus depth); a row is physical (page table). Keys are visited in logical
order, whatever page they lie in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forerun.cache.kv import KVCache
from forerun.kernels import reference as kernels
from forerun.models.config import ModelConfig

Sight = tuple[
    int | None, int
]  # (last keys, first keys) that a layer sees, see `ModelConfig.visible_keys`
TOGETHER = 16  # segments up to this long are padded to one batch; longer ones (prefill) go alone


@dataclass(slots=True)
class Segment:
    """What one slot adds in a pass.

    `parents` covers the slot's whole uncommitted region, one entry a token, -1 for the committed
    prefix: the first `offset` tokens of it were written by earlier passes, `tokens` are the rest.
        `want` lists the indices within
    `tokens` whose logits are needed.
    """

    slot: int
    tokens: list[int]
    parents: list[int]
    want: list[int]
    offset: int = 0

    @property
    def depths(self) -> list[int]:
        """Depth of each uncommitted token below the committed prefix, which ends at depth -1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return depths


@dataclass(slots=True)
class _Group:
    """Segments attended in one call. `queries` indexes T; keys are rows of the cache; R segments, N
    queries, K keys."""

    queries: slice | Tensor  # T slice, or [R, N]
    keys: slice | Tensor  # row slice, or [R, K]
    masks: dict[Sight, Tensor | None]  # [R, N, K], None when all is seen
    filled: Tensor | None  # [R, N] bool: which of `queries` is not padding; None when all are


class Attention:
    """The plan of one pass. Calling it stores keys and values, and attends: `decoder.Attend`."""

    def __init__(self, segments: Sequence[Segment], cache: KVCache, config: ModelConfig) -> None:
        self.segments, self.cache, self.config, self.device = (
            segments,
            cache,
            config,
            cache.data.device,
        )
        depths = [np.asarray(s.depths) for s in segments]
        starts = np.cumsum([0, *(len(s.tokens) for s in segments)])
        lengths = [cache.length[s.slot] for s in segments]
        new = [d[s.offset :] for s, d in zip(segments, depths, strict=True)]
        self.positions = self._tensor(
            np.concatenate([n + at for n, at in zip(new, lengths, strict=True)])
        )
        spans = [
            slice(at + s.offset, at + len(s.parents))
            for s, at in zip(segments, lengths, strict=True)
        ]
        rows = [cache.pages.rows[s.slot, span] for s, span in zip(segments, spans, strict=True)]
        self.rows = self._compact(np.concatenate(rows))
        short = [i for i, s in enumerate(segments) if len(s.tokens) <= TOGETHER]
        batches = ([short] if short else []) + [
            [i] for i, s in enumerate(segments) if len(s.tokens) > TOGETHER
        ]
        self.groups = [
            self._group([segments[i] for i in b], [depths[i] for i in b], starts[b])
            for b in batches
        ]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k, v [T, Hkv, D] of this layer, attend with q [T, Hq, D] -> [T, Hq, D]."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self.rows], values[self.rows] = k, v
        sight = self.config.visible_keys(layer)
        if len(self.groups) == 1 and isinstance(self.groups[0].queries, slice):
            return self._attend(self.groups[0], q, keys, values, sight)[0]
        out = torch.empty_like(q)
        for group in self.groups:
            attended = self._attend(group, q, keys, values, sight)
            if group.filled is None:
                out[group.queries] = attended  # of one segment alone [1, N, Hq, D]
            else:
                assert isinstance(group.queries, Tensor)
                out[group.queries[group.filled]] = attended[group.filled]
        return out

    def _attend(
        self, group: _Group, q: Tensor, keys: Tensor, values: Tensor, sight: Sight
    ) -> Tensor:
        c = self.config
        q, keys, values = q[group.queries], keys[group.keys], values[group.keys]
        if isinstance(group.queries, slice):
            q = q[None]
        if isinstance(group.keys, slice):
            keys, values = keys[None], values[None]
        return kernels.attention(
            q, keys, values, group.masks[sight], c.attention_scale, c.attention_softcap
        )

    def _group(
        self, segments: list[Segment], depths: list[np.ndarray], starts: np.ndarray
    ) -> _Group:
        lengths = [self.cache.length[s.slot] for s in segments]
        counts = [len(s.tokens) for s in segments]
        totals = [at + len(s.parents) for s, at in zip(segments, lengths, strict=True)]
        queries, width = max(counts), max(totals)
        masks = self._masks(segments, depths, queries, width)
        if len(segments) == 1:
            at = int(starts[0])
            rows = self._compact(self.cache.pages.rows[segments[0].slot, :width])
            return _Group(
                slice(at, at + queries),
                rows if isinstance(rows, slice) else rows[None],
                masks,
                None,
            )
        index = (
            np.minimum(np.arange(queries), np.asarray(counts)[:, None] - 1)
            + np.asarray(starts)[:, None]
        )
        table = np.stack([self.cache.pages.rows[s.slot, :width] for s in segments])
        # past a slot's own end stand rows of whoever had them before: masked, but read, so read
        # something finite
        table = np.where(np.arange(width) < np.asarray(totals)[:, None], table, table[:, :1])
        filled = np.arange(queries) < np.asarray(counts)[:, None]
        return _Group(
            self._tensor(index),
            self._tensor(table),
            masks,
            None if filled.all() else self._tensor(filled),
        )

    def _masks(
        self, segments: list[Segment], depths: list[np.ndarray], queries: int, width: int
    ) -> dict[Sight, Tensor | None]:
        """What each query sees, for each of the model's windows."""
        seen = np.zeros((len(segments), queries, width), dtype=bool)
        for r, segment in enumerate(segments):
            at, count = self.cache.length[segment.slot], len(segment.tokens)
            seen[r, :count, :at] = True
            seen[r, :count, at : at + len(segment.parents)] = _ancestors(segment.parents)[
                segment.offset :
            ]
            seen[r, count:, 0] = True  # a padding query must see something, or it is NaN
        masks: dict[Sight, Tensor | None] = {}
        for window, sinks in set(map(self.config.visible_keys, range(self.config.layers))):
            mask = seen
            if window is not None:
                mask = seen & (
                    (self._distances(segments, depths, seen.shape) < window)
                    | (np.arange(width) < sinks)
                )
            masks[window, sinks] = None if mask.all() else self._tensor(mask)
        return masks

    def _distances(
        self, segments: list[Segment], depths: list[np.ndarray], shape: tuple[int, ...]
    ) -> np.ndarray:
        """How many positions each key lies before each query; 0 for padding. int32 [R, N, K]"""
        distance = np.zeros(shape, dtype=np.int32)
        for r, (segment, depth) in enumerate(zip(segments, depths, strict=True)):
            at, count = self.cache.length[segment.slot], len(segment.tokens)
            keys = np.concatenate([np.arange(at), at + depth]).astype(np.int32)
            distance[r, :count, : len(keys)] = (at + depth[segment.offset :])[:, None] - keys
        return distance

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def _compact(self, rows: np.ndarray) -> slice | Tensor:
        """Consecutive rows as a slice, which reads and writes the cache without an index or a
        copy."""
        first, last = int(rows[0]), int(rows[-1])
        if last - first == len(rows) - 1 and (np.diff(rows) == 1).all():
            return slice(first, last + 1)
        return self._tensor(rows)


def _ancestors(parents: Sequence[int]) -> np.ndarray:
    """[U, U] bool: does token i see uncommitted token j, itself or an ancestor?"""
    chain = next((i for i, parent in enumerate(parents) if parent != i - 1), len(parents))
    seen = np.tri(len(parents), dtype=bool)
    for i in range(chain, len(parents)):
        seen[i] = seen[parents[i]] if parents[i] >= 0 else False
        seen[i, i] = True
    return seen
