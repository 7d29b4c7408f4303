"""Programs of native operations with their buffers: a pass, chains of passes, a drafter's whole round in one call."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from forerun.cache.attention import Segment
from forerun.cache.kv import KVCache
from forerun.kernels import native
from forerun.kernels.native import CBatch, CChain, COp, CProgram, address
from forerun.models.config import ModelConfig
from forerun.passes import Draws, Link, Pass, Said, Steps

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
        draws = Draws(links)
        pointers, scratch = self.buffers.fit(len(links), len(links))
        for buffer, rows in given.items():
            self.buffers.arrays[buffer][: len(links)] = rows[draws.order]
        steps = Steps(draws, cache)
        batch = steps.fill(pointers, scratch, cache)
        native.loaded().forerun_chain(self.program, batch, _chain(draws, vocab, ids))
        return [said.tokens for said in draws.said()]

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
        draws = Draws([start.link for start in starts])
        ordered = [starts[i] for i in draws.order]
        first = Pass([start.segment for start in ordered], cache)
        pointers, scratch = self.buffers.fit(first.tokens, len(starts))
        self._bring(ordered, given, first.tokens)
        keys, last = array("Q", [start.key for start in ordered]), array("i", first.want.tolist())
        steps = Steps(draws, cache)
        reads, batch = first.fill(pointers, scratch, cache), steps.fill(pointers, scratch, cache)
        chain = _chain(draws, vocab, ids, stands)
        chain.state, chain.begin = state, ctypes.pointer(begin.program)
        chain.first, chain.last = ctypes.pointer(reads), address(last)
        left = np.empty((len(starts), int(self.widths[X])), np.float32)
        chain.first_keys, chain.left = address(keys), left.ctypes.data
        native.loaded().forerun_chain(self.program, batch, chain)
        return draws.said(begun=True), left[np.argsort(draws.order)]

    def block(
        self,
        starts: Sequence[Start],
        slots: Callable[[Start], Segment],
        cache: KVCache,
        vocab: int,
        ids: np.ndarray | None,
        first: int,
        begin: Recorded,
        given: Sequence[int],
        follow: Recorded | None,
        stands: array[float] | None,
    ) -> list[Said]:
        """Read what each start brings, and say all tokens behind it from one pass over the `slots` of its block, which
        see one another, in one call: slot `first` says the first of them. What
        `follow` adds to logits for the token before comes before each draw. Otherwise as in `round`."""
        draws = Draws([start.link for start in starts])
        ordered = [starts[i] for i in draws.order]
        blocks = Pass([slots(start) for start in ordered], cache, False)
        size = blocks.tokens // draws.rows
        saying = ((level, row) for level in range(draws.levels) for row in range(draws.active[level]))
        blocks.want = array("q", [row * size + first + level for level, row in saying])
        blocks.wanted = len(blocks.want)
        bringing = [start for start in ordered if start.segment.tokens]
        reads = Pass([start.segment for start in bringing], cache)
        pointers, scratch = self.buffers.fit(max(reads.tokens, blocks.tokens), blocks.wanted)
        self._bring(bringing, given, reads.tokens)
        chain, context = _chain(draws, vocab, ids, stands), reads.fill(pointers, scratch, cache)
        if bringing:
            chain.begin, chain.first = ctypes.pointer(begin.program), ctypes.pointer(context)
        batch = blocks.fill(pointers, scratch, cache)
        programs = _programs([follow] * draws.levels) if follow else None
        native.loaded().forerun_block(self.program, batch, programs, chain)
        return draws.said()

    def levels(
        self,
        links: Sequence[Link],
        follow: Sequence[Recorded],
        given: Mapping[int, np.ndarray],
        vocab: int,
        ids: np.ndarray | None,
        stands: array[float] | None,
    ) -> list[Said]:
        """Say token after token behind each link, in one call: this program, then for each level its own of `follow`,
        which makes logits with the token of the level before. Buffers begin with `given`, rows [links, at most the
        buffer's width]; there is no cache. Otherwise as in `round`."""
        draws = Draws(links)
        pointers, scratch = self.buffers.fit(draws.rows, draws.levels * draws.rows)
        for buffer, rows in given.items():
            self.buffers.arrays[buffer][: draws.rows, : rows.shape[1]] = rows[draws.order]
        batch = CBatch(tokens=draws.rows, buffers=pointers, scratch=scratch)
        chain = _chain(draws, vocab, ids, stands)
        native.loaded().forerun_block(self.program, batch, _programs(follow), chain)
        return draws.said()

    def _bring(self, starts: Sequence[Start], given: Sequence[int], count: int) -> None:
        """Fill the buffers `given` with `count` rows of what these bring."""
        if starts:
            for buffer, parts in zip(given, zip(*(start.states for start in starts), strict=True), strict=True):
                np.concatenate(parts, out=self.buffers.arrays[buffer][:count])


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


def _chain(draws: Draws, vocab: int, ids: np.ndarray | None, stands: array[float] | None = None) -> CChain:
    """The C structure; it points into these objects."""
    chain = CChain(
        levels=draws.levels, rows=draws.rows, logits=LOGITS, vocab=vocab, active=address(draws.active),
        temperature=address(draws.temperature), keys=address(draws.keys), tokens=address(draws.tokens),
        ids=None if ids is None else ids.ctypes.data, said=0 if ids is None else len(ids),
    )  # fmt: skip
    if stands is not None:
        draws.weigh()
        chain.stands, chain.floors = address(stands), address(draws.floors)
        chain.sure, chain.counts = address(draws.sure), address(draws.counts)
        chain.beside, chain.beside_sure = address(draws.beside), address(draws.beside_sure)
    return chain


def _programs(recorded: Sequence[Recorded]) -> ctypes.Array[ctypes._Pointer[CProgram]]:
    """Pointers to their programs, one behind the other."""
    return (ctypes.POINTER(CProgram) * len(recorded))(*(ctypes.pointer(each.program) for each in recorded))


class _Buffers:
    """A program's buffers, grown when a pass needs more rows. All but LOGITS have a row for each token."""

    def __init__(self, widths: np.ndarray, scratch: int) -> None:
        self.widths, self.scratch_row, self.rows, self.wanted = widths, scratch, 0, 0

    def fit(self, rows: int, wanted: int) -> tuple[int, int]:
        """(pointers to the buffers, pointer to scratch) with room for so many rows, and wanted rows of logits."""
        if rows > self.rows or wanted > self.wanted:
            self.rows, self.wanted = max(rows, self.rows, ROOM), max(wanted, self.wanted, ROOM)
            counts = [self.wanted if i == LOGITS else self.rows for i in range(len(self.widths))]
            self._logits: dict[int, Tensor] = {}
            self.arrays = [np.zeros((n, w), np.float32) for n, w in zip(counts, self.widths, strict=True)]
            self.pointers = array("Q", [a.ctypes.data for a in self.arrays])
            self.scratch = np.zeros(self.rows * self.scratch_row + 64, dtype=np.uint8)
            self.at = address(self.pointers), -(-self.scratch.ctypes.data // 64) * 64
        return self.at

    def logits(self, wanted: int) -> Tensor:
        """Its first rows of logits, as they are until the next pass: to make a tensor of them takes longer behind a
        pass than much else, so those that were made are kept."""
        if wanted not in self._logits:
            self._logits[wanted] = torch.from_numpy(self.arrays[LOGITS][:wanted])
        return self._logits[wanted]
