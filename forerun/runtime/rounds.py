"""Several rounds of one request in one native call: draft, forward pass, verification and commit.

Between two forward passes of a small model the Python interpreter is slow, since the weights have
pushed its code and data out of the caches. So a request that has the engine to itself runs a few
rounds at a time in C++ (`rounds.h`). `GrowingText` is the text that they append to, `HeadRounds`
what they need of a draft head, and `CRound` what each of them did.
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


@dataclass(slots=True)
class RoundsResult:
    """The result of several rounds in one call.

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
    slot: int,
    text: GrowingText,
    *,
    grams: Sequence[Grams],
    head: HeadRounds | None,
    aux_hidden_layers: Sequence[int],
    seed: int,
    sampling: Sampling,
    end_ids: Sequence[int],
    limit: int,
    most: int,
    most_nodes: int,
    seconds: float,
) -> RoundsResult:
    """Run up to `most` rounds, the last of which begins within `seconds`.

    The slot has room for all their rows. The rows that were accepted are committed, tokens are
    appended to `text`. No further round begins where the text's last tokens occur in `grams`, and
    none whose logits are not finite is kept.

    Args:
        grams: those of the text, and of others that drafts are copied from; or nothing.
        head: drafts; None for plain decoding.
        aux_hidden_layers: layers whose states are returned; those of the head.
        limit: the most tokens of the text.
        most_nodes: of a draft, without its root.
    """
    program = decoder.program(tuple(aux_hidden_layers))
    unread = len(head.states[0]) if head else 0
    states = []
    for i in range(len(aux_hidden_layers)):
        width = int(program.widths[LOGITS + 1 + i])
        states.append(np.empty((unread + most * (most_nodes + 1), width), np.float32))
        if head:
            states[i][:unread] = head.states[i]
    pointers = array("Q", [rows.ctypes.data for rows in states] or [0])
    rounds = (CRound * most)()
    ends = array("q", end_ids or [-1])
    layouts = array("i", cache.head_layouts)
    sets = (ctypes.POINTER(CGrams) * len(grams))(*(ctypes.pointer(g.structure) for g in grams))
    with decoder.lock:
        buffers, scratch = program.buffers.fit(most_nodes + 1, most_nodes + 1)
        batch = CBatch(**memory_of(cache, buffers, scratch))
        structure = CRounds(
            target=ctypes.pointer(program.program),
            batch=ctypes.pointer(batch),
            line=cache.pages.lines[slot],
            text=text.tokens.ctypes.data,
            ends=address(ends),
            layouts=address(layouts),
            states=address(pointers),
            grams=ctypes.addressof(sets),
            head=ctypes.pointer(head.structure) if head else None,
            rounds=rounds,
            noise=rng.stream(seed, Lane.TARGET),
            sampling=CSampling.from_buffer_copy(packed([sampling])),
            count=text.count,
            limit=limit,
            num_ends=len(end_ids),
            layers=len(states),
            unread=unread,
            most=most,
            logits=LOGITS,
            num_grams=len(grams),
            seconds=seconds,
        )
        count = native.loaded().forerun_rounds(ctypes.byref(structure))
    done = rounds[:count]
    kept = sum(each.accepted + 1 for each in done)
    last = [i for i, each in enumerate(done) if each.nodes][-1:]  # the last that read
    behind = sum(each.accepted + 1 for each in done[last[0] :]) if last else unread + kept
    cache.length[slot] += kept
    text.count += sum(each.appended for each in done)
    if grams:
        grams[0].noted = text.count - 1
    return RoundsResult(done, [rows[: unread + kept] for rows in states], behind)
