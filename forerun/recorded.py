"""Programs of native operations with their buffers: a pass, chains of passes, a drafter's whole round in one call."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from forerun.cache.attention import Segment
from forerun.cache.kv import KVCache
from forerun.kernels import native
from forerun.kernels.native import CChain, COp, CProgram, address
from forerun.models.config import ModelConfig
from forerun.passes import Link, Pass, Said, Steps

X, QKV, ATTENDED, HIDDEN, BRANCH, LOGITS = range(6)  # buffers
ROOM = 64  # tokens that buffers have room for at first; they grow


class Recorded:
    """A program and its buffers."""

    def __init__(self, c: ModelConfig, ops: list[COp], widths: np.ndarray) -> None:
        self.ops, self.widths = (COp * len(ops))(*ops), widths  # kept: the program points to both
        self.program = CProgram(
            ops=self.ops, count=len(ops), buffers=len(widths), heads=c.heads, kv_heads=c.kv_heads,
            head_dim=c.head_dim, layers=c.layers, widths=widths.ctypes.data,
        )  # fmt: skip
        row_bytes = native.loaded().forerun_scratch_row_bytes
        self.buffers = _Buffers(widths, max(int(row_bytes(int(w))) for i, w in enumerate(widths) if i != LOGITS))

    def chain(
        self,
        links: Sequence[Link],
        cache: KVCache,
        vocab: int,
        ids: np.ndarray | None = None,
        given: Mapping[int, np.ndarray] = MappingProxyType({}),
    ) -> list[list[int]]:
        """Say token after token behind each link, below `vocab`: the program has a pass over one token a link and its
        logits. `ids` [Vd] int64 are the tokens that these are of, if not the first. `given`: what buffers begin with,
        a row for each link."""
        steps = Steps(links, cache)
        pointers, scratch = self.buffers.fit(len(links), len(links))
        for buffer, rows in given.items():
            self.buffers.arrays[buffer][: len(links)] = rows[steps.order]
        chain = _chain(steps, vocab, ids)
        native.loaded().forerun_chain(self.program, steps.fill(pointers, scratch, cache), chain)
        return steps.said()

    def round(
        self,
        starts: Sequence[Start],
        cache: KVCache,
        vocab: int,
        ids: np.ndarray | None,
        state: int,
        begin: Recorded,
        given: Sequence[int],
        stands: array[float] | None,
    ) -> tuple[list[Said], np.ndarray]:
        """Read what each start brings, and say token after token behind it: the same in one call. What was read is not
        committed. `state` is the buffer of what each token is paired with. `begin` is the program of the first pass,
        with the same buffers, of which `given` take what the starts bring. With `stands` chains end as their links'
        floors say, and what is said is weighed. Also what the layers left of each start's last token, [starts, H]."""
        steps = Steps([start.link for start in starts], cache)
        ordered = [starts[i] for i in steps.order]
        first = Pass([start.segment for start in ordered], cache)
        pointers, scratch = self.buffers.fit(first.tokens, len(starts))
        for buffer, parts in zip(given, zip(*(start.states for start in ordered), strict=True), strict=True):
            np.concatenate(parts, out=self.buffers.arrays[buffer][: first.tokens])
        keys = array("Q", [start.key for start in ordered])
        last, batch = array("i", first.want.tolist()), first.fill(pointers, scratch, cache)
        chain = _chain(steps, vocab, ids)
        chain.state, chain.begin = state, ctypes.pointer(begin.program)
        chain.first, chain.last = ctypes.pointer(batch), address(last)
        left = np.empty((len(starts), int(self.widths[X])), np.float32)
        chain.first_keys, chain.left = address(keys), left.ctypes.data
        if stands is not None:
            chain.stands, chain.floors = address(stands), address(steps.floors)
            steps.weigh()
            chain.sure, chain.counts = address(steps.sure), address(steps.counts)
            chain.beside, chain.beside_sure = address(steps.beside), address(steps.beside_sure)
        native.loaded().forerun_chain(self.program, steps.fill(pointers, scratch, cache), chain)
        said = [Said([begun, *rest]) for begun, rest in zip(steps.begun(), steps.said(), strict=True)]
        if stands is not None:
            said = [Said(s.tokens, *weights) for s, weights in zip(said, steps.weights(), strict=True)]
        return said, left[np.argsort(steps.order)]


@dataclass(frozen=True, slots=True)
class Start:
    """Where a round begins in one slot: what is read first, whose last token says the one that `link` goes on from.

    Attributes:
        segment: tokens that nobody has read yet; it wants the last one's logits.
        states: float32 [tokens, width] each, what they are paired with is made of.
        key: the stream of noise that the first token is said with.
        link: the token in it is not known yet.
    """

    segment: Segment
    states: Sequence[np.ndarray]
    key: int
    link: Link


def _chain(steps: Steps, vocab: int, ids: np.ndarray | None) -> CChain:
    return CChain(
        levels=steps.levels, rows=steps.tokens, logits=LOGITS, vocab=vocab, active=address(steps.active),
        temperature=address(steps.temperature), keys=address(steps.keys), tokens=address(steps.drafted),
        ids=None if ids is None else ids.ctypes.data, said=0 if ids is None else len(ids),
    )  # fmt: skip


class _Buffers:
    """A program's buffers, grown when a pass needs more rows. All but LOGITS have a row for each token."""

    def __init__(self, widths: np.ndarray, scratch: int) -> None:
        self.widths, self.scratch_row, self.rows, self.wanted = widths, scratch, 0, 0

    def fit(self, rows: int, wanted: int) -> tuple[int, int]:
        """(pointers to the buffers, pointer to scratch) with room for so many rows, and wanted rows of logits."""
        if rows > self.rows or wanted > self.wanted:
            self.rows, self.wanted = max(rows, self.rows, ROOM), max(wanted, self.wanted, ROOM)
            counts = [self.wanted if i == LOGITS else self.rows for i in range(len(self.widths))]
            self.arrays = [np.zeros((n, w), np.float32) for n, w in zip(counts, self.widths, strict=True)]
            self.pointers = array("Q", [a.ctypes.data for a in self.arrays])
            self.scratch = np.zeros(self.rows * self.scratch_row + 64, dtype=np.uint8)
            self.at = address(self.pointers), -(-self.scratch.ctypes.data // 64) * 64
        return self.at
