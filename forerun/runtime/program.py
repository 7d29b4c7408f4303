"""Programs of native operations: forward passes, and a drafter's whole round in one C call.

A `Program` is a list of operations over numbered buffers, recorded once per model. `ForwardBatch`
holds the arrays of one forward pass. Drafting runs a program repeatedly inside the C code, sampling
a token after each run: `ChainStart` and `RoundStart` are the starting points, `DraftedChain` is the
result."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from types import MappingProxyType
from typing import Any, ClassVar
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from forerun.cache.attention import Segment
from forerun.cache.kv import KVCache
from forerun.kernels import native
from forerun.kernels.draw import packed
from forerun.kernels.native import CBatch, CChain, CMatrix, COp, CProgram, address
from forerun.models.families import Experts
from forerun.runtime.packed import PackedMatrix
from forerun.sampling.params import Sampling
from forerun.types import NUM_ALTERNATIVES

# buffers of a decoder: residual stream, stacked queries, keys and values, output of attention,
# inside of the MLP, output of a branch before its norm, logits
X, QKV, ATTENDED, HIDDEN, BRANCH, LOGITS = range(6)
MIN_ROWS = 64  # tokens that buffers have room for at first
KEPT_BYTES = 1 << 20  # of a program's buffers, which an idle engine keeps

# ---------------------------------------------------------------- batches


class ForwardBatch:
    """The arrays of one forward pass over segments, as the C code reads them."""

    def __init__(self, segments: Sequence[Segment], cache: KVCache, causal: bool = True) -> None:
        """Collect the arrays.

        causal: a token sees its ancestors; otherwise every uncommitted token of its slot."""
        table = cache.pages.rows
        ids: list[int] = []
        positions: list[int] = []
        lines: list[int] = []
        direct: list[int] = []
        extra: list[int] = []
        extra_at: list[int] = [0]
        want: list[int] = []
        store: list[int] = []
        for s in segments:
            at = cache.length[s.slot]
            want += [len(ids) + i for i in s.want]
            ids += s.tokens
            lines += [cache.pages.lines[s.slot]] * len(s.tokens)
            store += table[s.slot, at + s.offset : at + len(s.parents)].tolist()
            for straight, path in visible_paths(s.parents)[s.offset :]:
                positions.append(at + straight + len(path) - 1)
                direct.append(at + (straight if causal else len(s.parents)))
                extra += [int(table[s.slot, at + i]) for i in path] if causal else []
                extra_at.append(len(extra))
        self.tokens = len(ids)
        self.wanted = len(want)
        self.ids = array("q", ids)
        self.positions = array("q", positions)
        self.store = array("q", store)  # cache rows of the tokens
        self.lines = array("Q", lines)  # addresses of the slots' row tables
        self.direct = array("i", direct)  # number of rows of its table that a token sees
        self.extra = array("q", extra)  # further rows that tokens see,
        self.extra_at = array("i", extra_at)  # with the offset of those of each token
        self.want = array("q", want)

    def fill(self, buffers: int, scratch: int, cache: KVCache) -> CBatch:
        """Build the C structure, which points into this object and the cache."""
        return CBatch(
            tokens=self.tokens,
            wanted=self.wanted,
            ids=address(self.ids),
            positions=address(self.positions),
            store=address(self.store),
            rows=address(self.lines),
            direct=address(self.direct),
            extra_at=address(self.extra_at),
            extra=address(self.extra),
            want=address(self.want),
            **memory_of(cache, buffers, scratch),
        )


def memory_of(cache: KVCache, buffers: int, scratch: int) -> dict[str, int]:
    """Return the fields of a `CBatch` that do not depend on its tokens: addresses of memory."""
    keys, values, rows, dtype = cache.layout
    return {
        "buffers": buffers,
        "scratch": scratch,
        "keys": keys,
        "values": values,
        "cache_rows": rows,
        "kv_format": native.FORMATS[dtype],
    }


def visible_paths(parents: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Return the path that each uncommitted token sees, including itself.

    A path is the number of consecutive first tokens and the list of further tokens."""
    paths: list[tuple[int, list[int]]] = []
    for i, parent in enumerate(parents):
        straight, path = paths[parent] if parent >= 0 else (0, [])
        if not path and straight == i:
            paths.append((straight + 1, path))
        else:
            paths.append((straight, [*path, i]))
    return paths


# ---------------------------------------------------------------- chains of drafted tokens


@dataclass(frozen=True, slots=True)
class ChainStart:
    """Starting point of a chain of drafted tokens in one slot.

    Attributes:
        token: the token to read first.
        offset: its distance from the committed rows; the tokens between have been read.
        sampling: how each token is drawn.
        keys: noise streams, one for each token to draft.
        floor: stop drafting once the estimated chance that the whole chain is accepted falls below
            this; 0 never stops.
    """

    slot: int
    token: int
    offset: int
    sampling: Sampling
    keys: Sequence[int]
    floor: float = 0.0


@dataclass(frozen=True, slots=True)
class RoundStart:
    """Starting point of a drafting round in one slot, before its first token is known.

    Attributes:
        segment: unread tokens; the logits of the last one give the chain's first token.
        states: the inputs that accompany them, float32 [tokens, width] each.
        key: the noise stream of the first token.
        chain: the start of the chain that follows; its `token` is not known yet.
    """

    segment: Segment
    states: Sequence[np.ndarray]
    key: int
    chain: ChainStart


@dataclass(frozen=True, slots=True)
class DraftedChain:
    """The tokens drafted behind one start.

    Attributes:
        tokens: in order.
        bins: confidence bin of the drafter's probability of each token; empty if not asked for.
        alternatives: for each, the likeliest other tokens as (token, confidence bin).
    """

    tokens: list[int]
    bins: list[int] = field(default_factory=list)
    alternatives: list[list[tuple[int, int]]] = field(default_factory=list)


class _ChainBatch:
    """Inputs and outputs of drafting chains level by level. Longer chains come first.

    Attributes:
        order: the index of each row among the starts given.
        active [levels]: number of rows that draft a token in each level.
        tokens [levels + 1, rows]: level 0 is the starts' own tokens.
    """

    def __init__(self, starts: Sequence[ChainStart], with_confidence: bool) -> None:
        lengths = [len(start.keys) for start in starts]
        self.order = sorted(range(len(starts)), key=lambda i: -lengths[i])
        self.starts = [starts[i] for i in self.order]
        self.lengths = [lengths[i] for i in self.order]
        self.levels, self.rows = max(lengths), len(starts)
        active = [sum(n > level for n in lengths) for level in range(self.levels)]
        self.active = array("i", active)
        self.sampling = array("B", packed([start.sampling for start in self.starts]))
        self.keys = array("Q", _by_level([start.keys for start in self.starts]))
        later = [0] * (self.levels * self.rows)
        self.tokens = array("q", [*(start.token for start in self.starts), *later])
        self.floors = array("f", [start.floor for start in self.starts])
        self.counts = array("i", self.lengths)  # tokens drafted before the floor was reached
        size = len(self.tokens) if with_confidence else 0
        self.bins = array("b", bytes(size))
        self.alternatives = array("q", bytes(8 * NUM_ALTERNATIVES * size))
        self.alternative_bins = array("b", bytes(NUM_ALTERNATIVES * size))

    def structure(
        self, vocab: int, token_ids: np.ndarray | None, acceptance: array[float] | None = None
    ) -> CChain:
        """Build the C structure, which points into these objects."""
        found = CChain(
            levels=self.levels,
            rows=self.rows,
            logits=LOGITS,
            vocab=vocab,
            active=address(self.active),
            sampling=address(self.sampling),
            keys=address(self.keys),
            tokens=address(self.tokens),
            ids=None if token_ids is None else token_ids.ctypes.data,
            num_ids=0 if token_ids is None else len(token_ids),
        )
        if acceptance is not None:
            found.acceptance, found.floors = address(acceptance), address(self.floors)
            found.bins, found.counts = address(self.bins), address(self.counts)
            found.alternatives = address(self.alternatives)
            found.alternative_bins = address(self.alternative_bins)
        return found

    def result(self, with_first: bool = False) -> list[DraftedChain]:
        """Return the chain behind each start in the order given; `with_first` includes the starts'
        own tokens, which were drafted too."""
        found = [DraftedChain([])] * self.rows
        for row, i in enumerate(self.order):
            first, last = 0 if with_first else 1, min(self.lengths[row], self.counts[row])
            indices = range(row, len(self.tokens), self.rows)[first : last + 1]
            tokens = [self.tokens[at] for at in indices]
            bins = [self.bins[at] for at in indices] if self.bins else []
            alternatives = [self._alternatives(at) for at in indices] if self.bins else []
            found[i] = DraftedChain(tokens, bins, alternatives)
        return found

    def _alternatives(self, at: int) -> list[tuple[int, int]]:
        own = slice(NUM_ALTERNATIVES * at, NUM_ALTERNATIVES * (at + 1))
        pairs = zip(self.alternatives[own], self.alternative_bins[own], strict=True)
        return [pair for pair in pairs if pair[0] >= 0]


class _ChainForwards(ForwardBatch):
    """The arrays of consecutive forward passes, of one token for each chain that goes on."""

    def __init__(self, chains: _ChainBatch, cache: KVCache) -> None:
        starts = chains.starts
        first = [cache.length[start.slot] + start.offset for start in starts]
        positions = [at + level for level in range(chains.levels) for at in first]
        rows = [
            cache.pages.rows[start.slot, at : at + chains.levels].tolist()
            for start, at in zip(starts, first, strict=True)
        ]
        self.tokens = chains.rows
        self.wanted = chains.rows
        self.ids = array("q", [start.token for start in starts])
        self.positions = array("q", positions)
        self.store = array("q", _by_level(rows))
        self.lines = array("Q", [cache.pages.lines[start.slot] for start in starts])
        self.direct = array("i", [at + 1 for at in positions])
        self.extra = array("q")
        self.extra_at = array("i", [0] * (len(starts) + 1))
        self.want = array("q", range(len(starts)))


def _by_level(rows: Sequence[Sequence[int]]) -> list[int]:
    """Transpose: list the first number of every row, then the second; short rows get zeros."""
    return list(chain.from_iterable(zip_longest(*rows, fillvalue=0)))


# ---------------------------------------------------------------- programs


class Program:
    """A list of operations and its buffers.

    Attributes:
        choices: the buffer of the experts that were chosen, if there are any.

    The `draft_*` methods sample tokens below `vocab`. Their common arguments:
        token_ids: int64 [Vd] tokens that the logits score; None if they score all in order.
        acceptance: estimated acceptance by confidence bin. If given, chains end at their
            `floor`, and bins and alternatives are returned.
    """

    def __init__(
        self,
        ops: list[COp],
        widths: np.ndarray,
        parts: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """Store the operations.

        Args:
            widths: int32, number of float32 in a row of each buffer.
            parts: by buffer, how many inputs of products stand side by side in a row; 1 if absent.
        """
        self.choices = 0
        self.ops, self.widths = (COp * len(ops))(*ops), widths  # the C structure points to both
        self.program = CProgram(
            ops=self.ops,
            count=len(ops),
            buffers=len(widths),
            widths=widths.ctypes.data,
        )
        row_bytes = native.loaded().forerun_scratch_row_bytes
        scratch = max(
            parts.get(i, 1) * int(row_bytes(-(-int(width) // parts.get(i, 1))))
            for i, width in enumerate(widths)
            if i != LOGITS
        )
        self.buffers = _Buffers(widths, scratch)

    def draft_chains(
        self,
        starts: Sequence[ChainStart],
        cache: KVCache,
        vocab: int,
        token_ids: np.ndarray | None = None,
    ) -> list[list[int]]:
        """Draft a chain behind each start; this program is a forward pass of one token each."""
        chains = _ChainBatch(starts, with_confidence=False)
        buffers, scratch = self.buffers.fit(len(starts), len(starts))
        forwards = _ChainForwards(chains, cache)
        batch = forwards.fill(buffers, scratch, cache)
        structure = chains.structure(vocab, token_ids)
        native.loaded().forerun_chain(self.program, batch, structure)
        return [found.tokens for found in chains.result()]

    def draft_round(
        self,
        starts: Sequence[RoundStart],
        cache: KVCache,
        vocab: int,
        token_ids: np.ndarray | None,
        state: int,
        first: Program,
        inputs: Sequence[int],
        acceptance: array[float] | None,
    ) -> tuple[list[DraftedChain], np.ndarray]:
        """Read the tokens of each start with `first`, then draft behind them with this program.

        The tokens that were read are not committed.

        Args:
            state: the buffer that accompanies each drafted token (its hidden state).
            first: the program of the first forward pass, over the same buffers.
            inputs: the buffers of `first` that take the starts' `states`.

        Returns:
            the chains, and the hidden state of each start's last token, float32 [starts, H].
        """
        chains = _ChainBatch([start.chain for start in starts], acceptance is not None)
        ordered = [starts[i] for i in chains.order]
        reading = ForwardBatch([start.segment for start in ordered], cache)
        buffers, scratch = self.buffers.fit(reading.tokens, len(starts))
        self._copy_states(ordered, inputs, reading.tokens)
        keys = array("Q", [start.key for start in ordered])
        last = array("i", reading.want.tolist())
        forwards = _ChainForwards(chains, cache)
        read_batch = reading.fill(buffers, scratch, cache)
        batch = forwards.fill(buffers, scratch, cache)
        hidden = np.empty((len(starts), int(self.widths[X])), np.float32)
        structure = chains.structure(vocab, token_ids, acceptance)
        structure.state, structure.begin = state, ctypes.pointer(first.program)
        structure.first, structure.last = ctypes.pointer(read_batch), address(last)
        structure.first_keys, structure.hidden = address(keys), hidden.ctypes.data
        native.loaded().forerun_chain(self.program, batch, structure)
        if len(starts) > 1:
            hidden = hidden[np.argsort(chains.order)]
        return chains.result(with_first=True), hidden

    def draft_block(
        self,
        starts: Sequence[RoundStart],
        block_of: Callable[[RoundStart], Segment],
        cache: KVCache,
        vocab: int,
        token_ids: np.ndarray | None,
        position: int,
        first: Program,
        inputs: Sequence[int],
        adjust: Program | None,
        acceptance: array[float] | None,
    ) -> list[DraftedChain]:
        """Read the tokens of each start with `first`, then draft all tokens from one forward pass
        over a block of placeholders that see one another.

        Args:
            block_of: returns the placeholders of a start.
            position: the first placeholder that gives a token.
            adjust: a program that adds a correction for the previous token to the logits.
        """
        chains = _ChainBatch([start.chain for start in starts], acceptance is not None)
        ordered = [starts[i] for i in chains.order]
        blocks = ForwardBatch([block_of(start) for start in ordered], cache, causal=False)
        size = blocks.tokens // chains.rows
        blocks.want = array("q")
        for level in range(chains.levels):
            rows = range(chains.active[level])
            blocks.want.extend(row * size + position + level for row in rows)
        blocks.wanted = len(blocks.want)
        unread = [start for start in ordered if start.segment.tokens]
        reading = ForwardBatch([start.segment for start in unread], cache)
        tokens = max(reading.tokens, blocks.tokens)
        buffers, scratch = self.buffers.fit(tokens, blocks.wanted)
        self._copy_states(unread, inputs, reading.tokens)
        structure = chains.structure(vocab, token_ids, acceptance)
        read_batch = reading.fill(buffers, scratch, cache)
        if unread:
            structure.begin, structure.first = (
                ctypes.pointer(first.program),
                ctypes.pointer(read_batch),
            )
        batch = blocks.fill(buffers, scratch, cache)
        adjusting = _pointers([adjust] * chains.levels) if adjust else None
        native.loaded().forerun_block(self.program, batch, adjusting, structure)
        return chains.result()

    def draft_levels(
        self,
        starts: Sequence[ChainStart],
        levels: Sequence[Program],
        inputs: Mapping[int, np.ndarray],
        vocab: int,
        token_ids: np.ndarray | None,
        acceptance: array[float] | None,
    ) -> list[DraftedChain]:
        """Draft a chain behind each start without a cache: run this program, then for each level a
        program of its own that makes logits with the token of the level before.

        inputs: initial rows of buffers [starts, at most the buffer's width]."""
        chains = _ChainBatch(starts, acceptance is not None)
        buffers, scratch = self.buffers.fit(chains.rows, chains.levels * chains.rows)
        for buffer, rows in inputs.items():
            self.buffers.arrays[buffer][: chains.rows, : rows.shape[1]] = rows[chains.order]
        batch = CBatch(tokens=chains.rows, buffers=buffers, scratch=scratch)
        structure = chains.structure(vocab, token_ids, acceptance)
        native.loaded().forerun_block(self.program, batch, _pointers(levels), structure)
        return chains.result()

    def _copy_states(
        self, starts: Sequence[RoundStart], buffers: Sequence[int], count: int
    ) -> None:
        """Copy the states of some starts, `count` rows in all, into buffers."""
        if starts:
            states = zip(*(start.states for start in starts), strict=True)
            for buffer, parts in zip(buffers, states, strict=True):
                np.concatenate(parts, out=self.buffers.arrays[buffer][:count])


def _pointers(programs: Sequence[Program]) -> ctypes.Array[ctypes._Pointer[CProgram]]:
    """Return an array of pointers to programs."""
    pointers = (ctypes.pointer(program.program) for program in programs)
    return (ctypes.POINTER(CProgram) * len(programs))(*pointers)


def release_buffers() -> None:
    """Give up the buffers of all programs, except small ones.

    They have grown to the longest pass so far, such as one with the logits of a whole prompt. Call
    it only while no pass runs, such as when the engine is idle."""
    for buffers in list(_Buffers.all):
        if sum(array_.nbytes for array_ in buffers.arrays) > KEPT_BYTES:
            buffers.release()


class _Buffers:
    """A program's buffers, float32, which grow as needed. `LOGITS` has a row for each wanted token,
    the others one for each token."""

    all: ClassVar[WeakSet[_Buffers]] = WeakSet()

    def __init__(self, widths: np.ndarray, scratch: int) -> None:
        """Start with empty buffers and `scratch` bytes of scratch memory for each token."""
        self.widths = widths
        self.scratch_row = scratch
        self.release()
        self.all.add(self)

    def release(self) -> None:
        """Give up the memory; the next pass makes room for what it needs."""
        self.rows = 0
        self.wanted = 0
        self._logits: dict[int, Tensor] = {}
        self.arrays: list[np.ndarray] = []
        self.scratch = np.zeros(0, np.uint8)

    def fit(self, rows: int, wanted: int) -> tuple[int, int]:
        """Make room for `rows` tokens and `wanted` logits; return the addresses of the buffers and
        of scratch memory."""
        if rows > self.rows or wanted > self.wanted:
            self.rows = max(rows, self.rows, MIN_ROWS)
            self.wanted = max(wanted, self.wanted, MIN_ROWS)
            self._logits = {}
            self.arrays = []
            for i, width in enumerate(self.widths):
                count = self.wanted if i == LOGITS else self.rows
                self.arrays.append(np.zeros((count, width), np.float32))
            self.pointers = array("Q", [a.ctypes.data for a in self.arrays])
            self.scratch = np.zeros(self.rows * self.scratch_row + 64, dtype=np.uint8)
            self.at = address(self.pointers), -(-self.scratch.ctypes.data // 64) * 64
        return self.at

    def logits(self, wanted: int) -> Tensor:
        """Return the first rows of logits, valid until the next forward pass.

        The tensors are cached, since making one right after a forward pass is slow."""
        if wanted not in self._logits:
            self._logits[wanted] = torch.from_numpy(self.arrays[LOGITS][:wanted])
        return self._logits[wanted]


def embed_op(
    table: Tensor | PackedMatrix, output: int, scale: float, positions: int | None = None
) -> COp:
    """Return the operation that writes rows of an embedding to a buffer.

    table: a packed matrix, or [V, H] in float32 or bfloat16; positions: address of float32
    position embeddings."""
    if isinstance(table, PackedMatrix):
        matrix, dense = table.matrix, None
    else:
        form = "float32" if table.dtype == torch.float32 else "bfloat16"
        matrix = CMatrix(inputs=table.shape[1], format=native.FORMATS[form])
        dense = table.data_ptr()
    return COp(
        kind=native.EMBED,
        output=output,
        scale=scale,
        positions=positions,
        matrix=matrix,
        table=dense,
    )


def route_op(experts: Experts, scores: int, choice: int, column: int = 0, **options: Any) -> COp:
    """Return the operation that chooses the experts of each row.

    scores: buffer of the router's outputs; choice, column: where the chosen ones go."""
    return COp(
        kind=native.ROUTE,
        input=scores,
        experts=experts.count,
        slots=experts.used,
        choice=choice,
        choice_column=column,
        scores=native.SCORES[experts.scores],
        normalised=int(experts.normalised),
        groups=experts.groups,
        used_groups=experts.used_groups,
        best=experts.best,
        epsilon=experts.epsilon,
        route_scale=experts.scale,
        **options,
    )


def mix_op(source: int, to: int, count: int, scale: float = 1.0, **options: Any) -> COp:
    """Return the operation that writes `count` columns of a buffer, or the weighted sum of the
    experts' outputs that stand there, to another."""
    fields: dict[str, Any] = dict(slots=1, choice=-1, gate=-1) | options
    return COp(kind=native.MIX, input=source, output=to, count=count, scale=scale, **fields)
