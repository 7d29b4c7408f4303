"""The arrays of native passes: which tokens, where they are stored, what each of them sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forerun.cache.attention import Segment
from forerun.cache.kv import KVCache
from forerun.kernels import native
from forerun.kernels.native import CBatch


class Pass:
    """One pass over segments."""

    def __init__(self, segments: Sequence[Segment], cache: KVCache) -> None:
        table = cache.pages.rows
        ids: list[int] = []
        positions: list[int] = []
        lines: list[int] = []
        direct: list[int] = []
        extra: list[int] = []
        extra_at: list[int] = [0]
        want: list[int] = []
        store: list[np.ndarray] = []
        for s in segments:
            at = cache.length[s.slot]
            want += [len(ids) + i for i in s.want]
            ids += s.tokens
            lines += [int(table[s.slot].ctypes.data)] * len(s.tokens)
            store.append(table[s.slot, at + s.offset : at + len(s.parents)])
            for straight, path in _sights(s.parents)[s.offset :]:
                positions.append(at + straight + len(path) - 1)
                direct.append(at + straight)
                extra += [int(table[s.slot, at + i]) for i in path]
                extra_at.append(len(extra))
        self.ids, self.positions, self.want, self.extra = (
            np.array(values, dtype=np.int64) for values in (ids, positions, want, extra)
        )
        self.lines = np.array(lines, dtype=np.uint64)
        self.direct, self.extra_at = np.array(direct, dtype=np.int32), np.array(extra_at, dtype=np.int32)
        self.store = np.concatenate(store)

    def fill(self, pointers: np.ndarray, scratch: int, cache: KVCache) -> CBatch:
        """The C structure; it points into this object and the cache."""
        keys, values, stride, dtype = cache.layout
        return CBatch(
            tokens=len(self.ids), wanted=len(self.want), ids=self.ids.ctypes.data,
            positions=self.positions.ctypes.data, store=self.store.ctypes.data, rows=self.lines.ctypes.data,
            direct=self.direct.ctypes.data, extra_at=self.extra_at.ctypes.data, extra=self.extra.ctypes.data,
            want=self.want.ctypes.data, buffers=pointers.ctypes.data, scratch=scratch, keys=keys, values=values,
            layer_stride=stride, kv_format=native.FORMATS[dtype],
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Link:
    """Where a chain of drafted tokens begins in one slot.

    Attributes:
        token: the one to read first, `offset` rows behind what is committed; those between have been read.
        temperature: 0 says the likeliest token.
        keys: streams of noise, one for each token that is to be said.
    """

    slot: int
    token: int
    offset: int
    temperature: float
    keys: Sequence[int]


class Steps(Pass):
    """Passes one behind the other, of one token for each link that has not ended; the longest links come first."""

    def __init__(self, links: Sequence[Link], cache: KVCache) -> None:
        counts = [len(link.keys) for link in links]
        self.order = sorted(range(len(links)), key=lambda i: -counts[i])
        self._counts, links = counts, [links[i] for i in self.order]
        levels, slots, table = max(counts), [link.slot for link in links], cache.pages.rows
        starts = [cache.length[link.slot] + link.offset for link in links]
        self.positions = np.add.outer(np.arange(levels, dtype=np.int64), starts)
        self.direct = (self.positions + 1).astype(np.int32)
        self.store = table[slots, np.minimum(self.positions, table.shape[1] - 1)]  # past its end no link goes on
        self.lines = np.array([table[slot].ctypes.data for slot in slots], dtype=np.uint64)
        self.want, self.extra = np.arange(len(links)), np.zeros(0, dtype=np.int64)
        self.extra_at = np.zeros(len(links) + 1, dtype=np.int32)
        self.active = np.array([sum(n > level for n in counts) for level in range(levels)], dtype=np.int32)
        self.temperature = np.array([link.temperature for link in links], dtype=np.float32)
        self.keys = np.zeros((levels, len(links)), dtype=np.uint64)
        for i, link in enumerate(links):
            self.keys[: len(link.keys), i] = np.array(link.keys, dtype=np.uint64)
        self.tokens = np.zeros((levels + 1, len(links)), dtype=np.int64)
        self.tokens[0] = self.ids = np.array([link.token for link in links], dtype=np.int64)

    def said(self) -> list[list[int]]:
        """What was said behind each link, in the order in which they were given."""
        found: list[list[int]] = [[]] * len(self.order)
        for column, i in enumerate(self.order):
            found[i] = self.tokens[1 : self._counts[i] + 1, column].tolist()
        return found


def _sights(parents: Sequence[int]) -> list[tuple[int, list[int]]]:
    """For each uncommitted token, the path it sees, itself last: how many of the first tokens in a row, and which
    further ones."""
    sights: list[tuple[int, list[int]]] = []
    for i, parent in enumerate(parents):
        straight, path = sights[parent] if parent >= 0 else (0, [])
        sights.append((straight + 1, path) if not path and straight == i else (straight, [*path, i]))
    return sights
