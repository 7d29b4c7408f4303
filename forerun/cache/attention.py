"""Attention of one forward pass over the paged cache: positions, rows and masks of its segments.

A segment is what one slot adds in a forward pass: a chunk of known tokens, a draft tree, or both.
Its tokens see every committed token of the slot and their own ancestors. A position is logical
(committed length plus depth); a row is physical (page table). Keys are visited in logical order,
whatever page they are in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from forerun.cache.kv import KVCache
from forerun.kernels import reference as kernels
from forerun.models.config import ModelConfig, VisibleKeys

MAX_BATCHED = 16  # tokens of a segment that is padded into a batch; longer ones (prefill) go alone


@dataclass(slots=True)
class Segment:
    """The tokens that one slot adds in a forward pass.

    Attributes:
        slot: the slot.
        tokens: the new tokens.
        parents: of all uncommitted tokens of the slot, -1 for the committed prefix. The first
            `offset` of them were written by earlier forward passes; `tokens` are the others.
        want: indices within `tokens` whose logits are needed.
        offset: see `parents`.
        known: how many of the first tokens are certain to be committed: recurrent layers then keep
            no record of them.
    """

    slot: int
    tokens: list[int]
    parents: list[int]
    want: list[int]
    offset: int = 0
    known: int = 0

    @classmethod
    def chain(cls, slot: int, tokens: list[int], want: Sequence[int] = ()) -> Segment:
        """Return the segment of tokens that follow each other behind the committed prefix."""
        return cls(slot, tokens, list(range(-1, len(tokens) - 1)), list(want))

    @property
    def depths(self) -> list[int]:
        """Depth of each uncommitted token behind the committed prefix, from 0."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return depths


@dataclass(slots=True)
class _Group:
    """Segments attended in one call; R segments, N queries, K keys.

    Attributes:
        queries: a slice of the pass's tokens, or their indices [R, N].
        keys: a slice of the cache's rows, or their indices [R, K].
        masks: by what is visible, bool [R, N, K]; None if everything is seen.
        filled: int64 [F], places among the R * N of queries that are no padding; None if all are
            filled.
    """

    queries: slice | Tensor
    keys: slice | Tensor
    masks: dict[VisibleKeys, Tensor | None]
    filled: Tensor | None


class Attention:
    """The attention of one forward pass; a `decoder.Attend`.

    Attributes:
        positions: int64 [T], the logical position of each token.
        rows: the row of the cache for each token.
    """

    def __init__(self, segments: Sequence[Segment], cache: KVCache, config: ModelConfig) -> None:
        self.segments = segments
        self.cache = cache
        self.config = config
        self.device = cache.data.device
        depths = [np.asarray(segment.depths) for segment in segments]
        positions, rows = [], []
        for segment, depth in zip(segments, depths, strict=True):
            length = cache.length[segment.slot]
            positions.append(length + depth[segment.offset :])
            span = slice(length + segment.offset, length + len(segment.parents))
            rows.append(cache.pages.rows[segment.slot, span])
        self.positions = self._tensor(np.concatenate(positions))
        self.rows = self._compact(np.concatenate(rows))
        starts = np.cumsum([0, *(len(segment.tokens) for segment in segments)])
        short = [i for i, segment in enumerate(segments) if len(segment.tokens) <= MAX_BATCHED]
        batches = [[i] for i in range(len(segments)) if i not in short]
        if short:
            batches.insert(0, short)
        self.groups = [
            self._group([segments[i] for i in batch], [depths[i] for i in batch], starts[batch])
            for batch in batches
        ]

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """Store k, v [T, Hkv, D] of this layer, attend with q [T, Hq, D] -> [T, Hq, D].

        Without k and v the keys and values of an earlier layer are read."""
        source = self.config.kv_layer(layer)
        keys, values = self.cache.keys[source], self.cache.values[source]
        if k is not None and v is not None:
            keys[self.rows] = k
            values[self.rows] = v
        visible = self.config.visible_keys(layer)
        if len(self.groups) == 1 and isinstance(self.groups[0].queries, slice):
            return self._attend(self.groups[0], q, keys, values, visible, sink_logits)[0]
        out = torch.empty_like(q)
        for group in self.groups:
            attended = self._attend(group, q, keys, values, visible, sink_logits)
            if group.filled is None:
                out[group.queries] = attended  # of a single segment: [1, N, Hq, D]
            else:
                assert isinstance(group.queries, Tensor)
                indices = group.queries.flatten()[group.filled]
                out[indices] = attended.flatten(0, 1)[group.filled]
        return out

    def _attend(
        self,
        group: _Group,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        visible: VisibleKeys,
        sink_logits: Tensor | None,
    ) -> Tensor:
        q, keys, values = q[group.queries], keys[group.keys], values[group.keys]
        if isinstance(group.queries, slice):
            q = q[None]
        if isinstance(group.keys, slice):
            keys, values = keys[None], values[None]
        mask = group.masks[visible]
        scale, softcap = self.config.attention_scale, self.config.attention_softcap
        return kernels.attention(q, keys, values, mask, scale, softcap, sink_logits)

    def _group(
        self, segments: list[Segment], depths: list[np.ndarray], starts: np.ndarray
    ) -> _Group:
        counts = [len(segment.tokens) for segment in segments]
        totals = [self.cache.length[s.slot] + len(s.parents) for s in segments]
        num_queries, num_keys = max(counts), max(totals)
        shape = len(segments), num_queries, num_keys
        masks = {
            keys: None if seen.all() else self._tensor(seen)
            for keys, seen in self._masks(segments, depths, shape)
        }
        table = np.stack([self.cache.pages.rows[s.slot, :num_keys] for s in segments])
        if len(segments) == 1:
            start = int(starts[0])
            rows = self._compact(table[0])
            keys = rows if isinstance(rows, slice) else rows[None]
            return _Group(slice(start, start + num_queries), keys, masks, None)
        column = np.asarray(counts)[:, None]
        queries = np.minimum(np.arange(num_queries), column - 1) + np.asarray(starts)[:, None]
        # Behind a slot's own end the table has rows of earlier owners: they are masked but read,
        # so something finite must be read.
        table = np.where(np.arange(num_keys) < np.asarray(totals)[:, None], table, table[:, :1])
        is_filled = np.arange(num_queries) < column
        filled = None if is_filled.all() else self._tensor(np.flatnonzero(is_filled))
        return _Group(self._tensor(queries), self._tensor(table), masks, filled)

    def _masks(
        self, segments: list[Segment], depths: list[np.ndarray], shape: tuple[int, int, int]
    ) -> list[tuple[VisibleKeys, np.ndarray]]:
        """Return which keys each query sees, as `visible_masks`."""
        return visible_masks(segments, depths, self.cache, self.config, shape)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, non_blocking=True)

    def _compact(self, rows: np.ndarray) -> slice | Tensor:
        """Return consecutive rows as a slice, which needs neither an index nor a copy."""
        first, last = int(rows[0]), int(rows[-1])
        if last - first == len(rows) - 1 and (np.diff(rows) == 1).all():
            return slice(first, last + 1)
        return self._tensor(rows)


def visible_masks(
    segments: Sequence[Segment],
    depths: Sequence[np.ndarray],
    cache: KVCache,
    config: ModelConfig,
    shape: tuple[int, int, int],
) -> list[tuple[VisibleKeys, np.ndarray]]:
    """Return which keys each query sees, bool [R, N, K], for each kind of layer of the model.

    Args:
        depths: `Segment.depths` of each segment.
        shape: R of at least the number of segments, N and K of at least the tokens of each, with
            its committed ones. Padding queries see the first key alone: without any they would be
            NaN.
    """
    seen = np.zeros(shape, dtype=bool)
    seen[:, :, 0] = True
    for r, segment in enumerate(segments):
        length, count = cache.length[segment.slot], len(segment.tokens)
        new = slice(length, length + len(segment.parents))
        seen[r, :count, :length] = True
        seen[r, :count, new] = _ancestors(segment.parents)[segment.offset :]
    masks = []
    for keys in sorted(set(map(config.visible_keys, range(config.layers))), key=str):
        mask = seen
        if keys.window is not None or keys.chunk is not None:
            distances = _distances(segments, depths, cache, shape)
        if keys.window is not None:
            mask = seen & ((distances < keys.window) | (np.arange(shape[2]) < keys.sinks))
        if keys.chunk is not None:
            mask = mask & (distances <= _chunk_offsets(segments, depths, cache, shape, keys.chunk))
        masks.append((keys, mask))
    return masks


def _distances(
    segments: Sequence[Segment],
    depths: Sequence[np.ndarray],
    cache: KVCache,
    shape: tuple[int, int, int],
) -> np.ndarray:
    """Return how many positions each key is before each query, 0 for padding: [R, N, K]."""
    distance = np.zeros(shape, dtype=np.int32)
    for r, (segment, depth) in enumerate(zip(segments, depths, strict=True)):
        length, count = cache.length[segment.slot], len(segment.tokens)
        keys = np.concatenate([np.arange(length), length + depth]).astype(np.int32)
        queries = (length + depth[segment.offset :])[:, None]
        distance[r, :count, : len(keys)] = queries - keys
    return distance


def _chunk_offsets(
    segments: Sequence[Segment],
    depths: Sequence[np.ndarray],
    cache: KVCache,
    shape: tuple[int, int, int],
    chunk: int,
) -> np.ndarray:
    """Return the offset of each query in its chunk of the text, 0 for padding: [R, N, 1]."""
    offsets = np.zeros((*shape[:2], 1), dtype=np.int32)
    for r, (segment, depth) in enumerate(zip(segments, depths, strict=True)):
        positions = cache.length[segment.slot] + depth[segment.offset :]
        offsets[r, : len(segment.tokens), 0] = positions % chunk
    return offsets


def _ancestors(parents: Sequence[int]) -> np.ndarray:
    """Return which uncommitted tokens each one sees: itself and its ancestors. bool [U, U]"""
    chain = next((i for i, parent in enumerate(parents) if parent != i - 1), len(parents))
    seen = np.tri(len(parents), dtype=bool)
    for i in range(chain, len(parents)):
        seen[i] = seen[parents[i]] if parents[i] >= 0 else False
        seen[i, i] = True
    return seen
