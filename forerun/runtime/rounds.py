"""Several rounds in one native call: draft, forward pass, verification and commit.

Between two forward passes of a small model the Python interpreter is slow, since the weights have
pushed its code and data out of the caches. So requests run a few rounds at a time in C++
(`rounds.h`): one that has the engine to itself with a draft head, several without drafts.
`GrowingText` is the text that they append to, `HeadRounds` what they need of a head, and `CRound`
what each of them did.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from forerun import rng
from forerun.cache.kv import KVCache
from forerun.kernels import native
from forerun.kernels.draw import packed
from forerun.kernels.native import CBatch, CGrams, CHead, CRound, CRounds, CSampling, address
from forerun.rng import Lane
from forerun.runtime.native import NativeDecoder
from forerun.runtime.program import LOGITS, Program, memory_of
from forerun.sampling.params import Sampling

MIN_TOKENS = 1024  # room of a text at first
MAX_NODES = native.MOST_NODES


class Grams:
    """The sequences of `length` tokens that occur in a text, as a hash set.

    A sequence may be found that does not occur, by accident, but never the other way round."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.noted = 0  # tokens of the text that were added
        self._resize(MIN_TOKENS)

    def _resize(self, capacity: int) -> None:
        self.capacity = capacity
        self._slots = np.zeros(1 << (2 * capacity).bit_length(), np.uint64)
        self.structure = CGrams(slots=self._slots.ctypes.data, size=len(self._slots), n=self.length)

    def update(self, text: Sequence[int] | np.ndarray, last: int, room: int = 0) -> None:
        """Add the sequences that end with the tokens up to `last` of a text that has only grown
        since the last call; make room for `room` more."""
        if last + room > self.capacity:
            self.noted = 0
            self._resize(2 * (last + room))
        if last > self.noted:
            begin = max(self.noted - self.length + 1, 0)
            tokens = np.ascontiguousarray(text[begin:last], np.int64)
            set_, first = ctypes.byref(self.structure), self.noted + 1 - begin
            native.loaded().forerun_add_grams(set_, tokens.ctypes.data, first, len(tokens))
            self.noted = last


class GrowingText:
    """A request's tokens in memory that native rounds append to.

    Attributes:
        tokens: int64, of which `count` are set.
    """

    def __init__(self) -> None:
        self.tokens = np.zeros(MIN_TOKENS, np.int64)
        self.count = 0
        self._grams: dict[int, Grams] = {}

    def update(self, tokens: Sequence[int], room: int) -> None:
        """Take over tokens that were appended elsewhere, and make room for more."""
        count, needed = len(tokens), len(tokens) + room
        if needed > len(self.tokens):
            grown = np.zeros(2 * needed, np.int64)
            grown[: self.count] = self.tokens[: self.count]
            self.tokens = grown
        self.tokens[self.count : count] = tokens[self.count :]
        self.count = count

    def grams(self, length: int, room: int) -> Grams:
        """Return the sequences of `length` tokens in this text without its last token; native
        rounds add up to `room` more."""
        if length not in self._grams:
            self._grams[length] = Grams(length)
        known = self._grams[length]
        known.update(self.tokens, self.count - 1, room)
        return known


@dataclass
class HeadRounds:
    """A draft head for rounds in one native call.

    Attributes:
        structure: the C structure, without what depends on the policy.
        states: by layer, the target's hidden states [n, H] that the head has not read yet.
        kept: objects that the structure points to.
    """

    structure: CHead
    states: Sequence[np.ndarray]
    kept: list[Any] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        step: Program,
        first: Program,
        cache: KVCache,
        slot: int,
        states: Sequence[np.ndarray],
        vocab: int,
        token_ids: np.ndarray | None,
        state: int,
        inputs: Sequence[int],
        most: int,
    ) -> HeadRounds:
        """Prepare the programs of `Program.draft_round`; the slot has room for what they read and
        draft. `most`: the most tokens that the first pass reads."""
        buffers, scratch = step.buffers.fit(max(most, len(states[0])), 1)
        batch = CBatch(**memory_of(cache, buffers, scratch))
        structure = CHead(
            begin=ctypes.pointer(first.program),
            step=ctypes.pointer(step.program),
            batch=ctypes.pointer(batch),
            line=cache.pages.lines[slot],
            ids=None if token_ids is None else token_ids.ctypes.data,
            length=cache.length[slot],
            num_ids=0 if token_ids is None else len(token_ids),
            vocab=vocab,
            state=state,
            input=inputs[0],
            inputs=len(inputs),
        )
        return cls(structure, states, [batch, token_ids, step, first])

    def set_policy(
        self, depth: int, siblings: int, rates: array[float], floor: float, costs: array[float]
    ) -> None:
        """Set what the engine's policy chooses.

        Args:
            depth: the most levels of a draft.
            siblings: the most nodes beside the chain.
            rates: float32, acceptance by confidence bins (`DraftRequest.confidence_rates`).
            floor: the chance of a whole chain below which it ends.
            costs: seconds of the target's pass over the root and 0, 1, .. all nodes of a draft.
        """
        assert depth > 0 and len(costs) == depth + siblings + 1 <= MAX_NODES + 1
        self.structure.levels, self.structure.siblings = depth - 1, siblings
        self.structure.acceptance, self.structure.costs = address(rates), address(costs)
        self.structure.floor = floor
        self.kept += [rates, costs]


@dataclass(frozen=True, slots=True)
class TextRounds:
    """A request of native rounds, whose slot has room for all their rows.

    Attributes:
        text: its tokens; the last one is the root of the first draft.
        grams: those of the text, and of others that drafts are copied from; or nothing.
        has_states: the hidden states of its committed tokens are returned.
        limit: the most tokens of the text.
    """

    slot: int
    text: GrowingText
    grams: Sequence[Grams]
    has_states: bool
    seed: int
    sampling: Sampling
    end_ids: Sequence[int]
    limit: int


@dataclass(slots=True)
class RoundsResult:
    """The result of several rounds in one call, for one request.

    Attributes:
        rounds: one each, in order.
        states: by layer, float32 [unread + rows, H]: the hidden states that the head had not read,
            and behind them those of all rows that were committed.
        unread: how many of them, the last ones, the head has not read.
    """

    rounds: list[CRound]
    states: list[np.ndarray]
    unread: int


def run_rounds(
    decoder: NativeDecoder,
    cache: KVCache,
    requests: Sequence[TextRounds],
    *,
    head: HeadRounds | None,
    aux_hidden_layers: Sequence[int],
    most: int,
    most_nodes: int,
    seconds: float,
) -> list[RoundsResult]:
    """Run up to `most` rounds, the last of which begins within `seconds`, and none behind one in
    which a request ends.

    The rows that were accepted are committed, tokens are appended to the texts. No further round
    begins where the last tokens of a text occur in its `grams`, and none whose logits are not
    finite is kept.

    Args:
        head: drafts for the only request; None for plain decoding.
        aux_hidden_layers: layers whose states are returned; those of the head.
        most_nodes: of a draft, without its root.
    """
    program = decoder.program(tuple(aux_hidden_layers))
    runs = [_Run(r, program, head, len(aux_hidden_layers), most, most_nodes) for r in requests]
    layouts = array("i", cache.head_layouts)
    rows = len(requests) + most_nodes
    with decoder.lock:
        buffers, scratch = program.buffers.fit(rows, rows)
        batch = CBatch(**memory_of(cache, buffers, scratch))
        structures = (CRounds * len(requests))()
        for structure, run in zip(structures, runs, strict=True):
            structure.target = ctypes.pointer(program.program)
            structure.batch = ctypes.pointer(batch)
            structure.layouts = address(layouts)
            structure.head = ctypes.pointer(head.structure) if head else None
            structure.most, structure.logits, structure.seconds = most, LOGITS, seconds
            run.fill(structure, cache)
        library = native.loaded()
        if len(requests) == 1:
            count = library.forerun_rounds(structures)
        else:
            count = library.forerun_plain_rounds(structures, len(requests))
    return [run.result(count, cache) for run in runs]


class _Run:
    """Memory of one request's rounds."""

    def __init__(
        self,
        request: TextRounds,
        program: Program,
        head: HeadRounds | None,
        layers: int,
        most: int,
        most_nodes: int,
    ) -> None:
        self.request = request
        self.unread = len(head.states[0]) if head else 0
        self.states: list[np.ndarray] = []
        for i in range(layers if request.has_states else 0):
            width = int(program.widths[LOGITS + 1 + i])
            rows = np.empty((self.unread + most * (most_nodes + 1), width), np.float32)
            if head:
                rows[: self.unread] = head.states[i]
            self.states.append(rows)
        self._pointers = array("Q", [rows.ctypes.data for rows in self.states] or [0])
        self._ends = array("q", request.end_ids or [-1])
        grams = [ctypes.pointer(text.structure) for text in request.grams]
        self._grams = (ctypes.POINTER(CGrams) * len(grams))(*grams)
        self._rounds = (CRound * most)()

    def fill(self, structure: CRounds, cache: KVCache) -> None:
        """Set what the C code reads of this request."""
        request = self.request
        structure.line = cache.pages.lines[request.slot]
        structure.text = request.text.tokens.ctypes.data
        structure.ends = address(self._ends)
        structure.states = address(self._pointers)
        structure.grams = ctypes.addressof(self._grams)
        structure.rounds = self._rounds
        structure.noise = rng.stream(request.seed, Lane.TARGET)
        structure.sampling = CSampling.from_buffer_copy(packed([request.sampling]))
        structure.count, structure.limit = request.text.count, request.limit
        structure.num_ends, structure.layers = len(request.end_ids), len(self.states)
        structure.unread, structure.num_grams = self.unread, len(request.grams)

    def result(self, count: int, cache: KVCache) -> RoundsResult:
        """Note what `count` rounds committed and appended, and return it."""
        request, done = self.request, self._rounds[:count]
        kept = sum(r.accepted + 1 for r in done)
        last = [i for i, r in enumerate(done) if r.nodes][-1:]  # the last round that read states
        behind = sum(r.accepted + 1 for r in done[last[0] :]) if last else self.unread + kept
        cache.length[request.slot] += kept
        request.text.count += sum(r.appended for r in done)
        if request.grams:
            request.grams[0].noted = request.text.count - 1
        return RoundsResult(done, [rows[: self.unread + kept] for rows in self.states], behind)
