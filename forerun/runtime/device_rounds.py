"""Rounds that a GPU computes one behind the other, while the host is one round late.

A round drafts a chain with a draft model or nothing, runs the target over it, draws, follows the
draft and moves on. All that it needs stays on the device: each request's last two tokens, its
position, the key of its noise. So the host launches the next round before it has looked at the last
one, and learns of each round's tokens while the device works on another. The two parts of a round
are CUDA graphs.

Chains need no moved cache rows: what was accepted stands where it belongs, behind the rows that
were committed. A request that ends in one round is computed in the next one, too; that round is
thrown away.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from forerun import rng
from forerun.cache.kv import KVCache
from forerun.devices import upload
from forerun.kernels.draw import draw_recorded
from forerun.rng import Lane
from forerun.runtime.captured import CapturedPass, CapturedPasses, PassShape, padded_shape
from forerun.sampling.params import Sampling

log = logging.getLogger("forerun.runtime")

FEWEST = 2  # rounds that are worth a call
REREAD = 2  # tokens that a draft model reads first: it may have missed the last but one


@dataclass(frozen=True, slots=True)
class RoundRequest:
    """One request of several rounds.

    Attributes:
        tokens: its text, whose last token is the root of the first draft.
        depth: how many drafted tokens may be accepted; 0 decodes plainly.
    """

    slot: int
    tokens: Sequence[int]
    seed: int
    sampling: Sampling
    depth: int


class LandedRound(NamedTuple):
    """What a round did.

    Attributes:
        drafted: for each request, the chain behind its root; [] without a drafter.
        drawn: for each, the target's own tokens after the root and each drafted token.
        accepted: for each, how many drafted tokens equal the target's.
        is_finite: False if logits of a request are not finite; then the round does not count.
        draft_seconds, verify_seconds: time of the device.
        is_cold: True if the round was recorded, so that its times mean nothing.
    """

    drafted: list[list[int]]
    drawn: list[list[int]]
    accepted: list[int]
    is_finite: bool
    draft_seconds: float
    verify_seconds: float
    is_cold: bool


class DeviceRounds:
    """Several rounds of a group of requests, over the recorded passes of a target.

    Attributes:
        failed: recording failed, and there are no rounds since; the log says why.
    """

    def __init__(self, target: CapturedPasses) -> None:
        self.target = target
        self.failed = False
        self._recorded: dict[tuple[Any, ...], _Rounds] = {}
        self._current: _Rounds | None = None

    def begin(
        self, requests: Sequence[RoundRequest], drafter: CapturedPasses | None, most: int
    ) -> int:
        """Prepare rounds of these requests; return how many, at most `most`, there can be. 0: none.

        The slots have room for all their tokens. The drafter's cache has the committed tokens but
        the last two at least.
        """
        depth = max(request.depth for request in requests) if drafter else 0
        positions = [len(request.tokens) - 1 for request in requests]
        shape = padded_shape(len(requests), depth + 1, max(positions) + depth + 1)
        kinds = {each.sampling[1:] for each in requests if each.sampling.temperature}
        if self.failed or shape is None or len(kinds) > 1:
            return 0
        filters = kinds.pop() if kinds else None
        most = min(most, (shape.keys - max(positions)) // (depth + 1))
        if most < FEWEST:
            return 0
        key = (shape, depth, filters)
        rounds = self._recorded.get(key)
        try:
            if rounds is None or rounds.drafter is not drafter:
                rounds = self._recorded[key] = _Rounds(self.target, drafter, shape, depth, filters)
            rounds.begin(requests)
        except Exception as error:  # of memory: nothing may crash
            self._fail(error)
            return 0
        self._current = rounds
        return most

    def launch(self) -> bool:
        """Let the device begin the next round; False if that is impossible now and later."""
        assert self._current is not None
        try:
            self._current.launch()
        except Exception as error:  # of the driver, of a compiler, of memory
            self._fail(error)
            return False
        return True

    def land(self) -> LandedRound | None:
        """Wait for the oldest round that was launched; None if there is none."""
        assert self._current is not None
        return self._current.land()

    def _fail(self, error: Exception) -> None:
        self.failed = True
        reason = str(error).split("\n")[0]
        log.warning("the host waits for each round, since they cannot be recorded: %s", reason)


class _Mark:
    """A point in the work of a device, and its time."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = None
        self._seconds = 0.0
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def set(self) -> None:
        """Be the end of what was launched so far."""
        if self._event is None:
            self._seconds = time.perf_counter()
        else:
            self._event.record()

    def wait(self) -> None:
        """Wait until the device has come here."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, other: _Mark) -> float:
        """Return the device's time between two marks that it has passed."""
        if self._event is None:
            return self._seconds - other._seconds
        return float(other._event.elapsed_time(self._event)) / 1000


class _Flight:
    """A round on its way: where its results will be, and its times."""

    def __init__(self, results: Tensor) -> None:
        pinned = results.is_cuda
        self.results = torch.empty(results.shape, dtype=results.dtype, pin_memory=pinned)
        self.began, self.drafted, self.done = (_Mark(results.device) for _ in range(3))
        self.is_cold = False


class _Rounds:
    """Recorded rounds of one shape: R requests, chains of `depth` tokens.

    Attributes:
        state: int64 [6, R] on the device: the last token, the one before it, the position of the
            last token, the key of the noise, the depth, and 1 for requests or 0 for padding.
    """

    def __init__(
        self,
        target: CapturedPasses,
        drafter: CapturedPasses | None,
        shape: PassShape,
        depth: int,
        filters: tuple[int, float, float] | None,
    ) -> None:
        self.drafter, self.depth, self.filters = drafter, depth, filters
        self.graphs, self.shape = target.graphs, shape
        self.cache, decoder = target.cache, target.decoder
        self.vocab, device = decoder.config.vocab, decoder.device
        count = shape.segments
        self.target_pass = target.new_pass(shape)
        self.state = torch.zeros((6, count), dtype=torch.int64, device=device)
        self.temperatures = torch.zeros(count, dtype=decoder.dtype, device=device)
        self.drafted = torch.zeros((count, depth), dtype=torch.int64, device=device)
        self._next = torch.zeros_like(self.state)
        self._results = torch.zeros((count, 3 + 2 * depth), dtype=torch.int64, device=device)
        self._draft_passes: list[CapturedPass] = []
        if drafter is not None and depth:
            for tokens in (REREAD, 1):
                part = padded_shape(count, tokens, shape.keys)
                assert part is not None
                self._draft_passes.append(drafter.new_pass(part))
        self._replay_draft: Callable[[], None] | None = None
        self._replay_verify: Callable[[], None] | None = None
        self._free: list[_Flight] = []
        self._flying: deque[_Flight] = deque()
        self._count = 0

    def begin(self, requests: Sequence[RoundRequest]) -> None:
        """Begin with other requests, whose rows are reserved."""
        self._count, device = len(requests), self.state.device
        state = np.zeros(self.state.shape, np.int64)
        temperatures = [0.0] * self.shape.segments
        for r, request in enumerate(requests):
            noise = rng.signed(rng.stream(request.seed, Lane.TARGET))
            last, before = request.tokens[-1], request.tokens[-2]
            state[:, r] = last, before, len(request.tokens) - 1, noise, request.depth, 1
            temperatures[r] = request.sampling.temperature
        state[2, self._count :] = 1  # padding has a token before its last one, too
        self.state.copy_(torch.from_numpy(state), non_blocking=True)
        self.temperatures.copy_(upload(temperatures, self.temperatures.dtype, device))
        slots = [request.slot for request in requests]
        shape = self.shape
        rows = [r * shape.tokens + i for r in range(shape.segments) for i in range(self.depth + 1)]
        wanted = upload(rows, torch.int64, device)
        self.target_pass.begin_chains(_table(self.cache, slots, shape, device), wanted)
        for number, part in enumerate(self._draft_passes):
            assert self.drafter is not None
            last_read = REREAD - 1 if number == 0 else 0
            firsts = range(0, part.shape.rows, part.shape.tokens)
            wanted = upload([first + last_read for first in firsts], torch.int64, device)
            part.begin_chains(_table(self.drafter.cache, slots, part.shape, device), wanted)

    @torch.inference_mode()
    def launch(self) -> None:
        """Begin a round."""
        flight = self._free.pop() if self._free else _Flight(self._results)
        flight.is_cold = self._replay_verify is None
        flight.began.set()
        if self._draft_passes:
            if self._replay_draft is None:
                _, self._replay_draft = self.graphs.record(self._draft)
            else:
                self._replay_draft()
        flight.drafted.set()
        if self._replay_verify is None:
            _, self._replay_verify = self.graphs.record(self._verify)
        else:
            self._replay_verify()
        # Not recorded: a recording runs more than once.
        self.state.copy_(self._next)
        flight.results.copy_(self._results, non_blocking=True)
        flight.done.set()
        self._flying.append(flight)

    def land(self) -> LandedRound | None:
        """Return the oldest round that was launched, None without any."""
        if not self._flying:
            return None
        flight = self._flying.popleft()
        flight.done.wait()
        found = flight.results[: self._count].tolist()
        self._free.append(flight)
        middle = 2 + self.depth
        return LandedRound(
            drafted=[row[2:middle] for row in found],
            drawn=[row[middle:] for row in found],
            accepted=[row[0] for row in found],
            is_finite=all(row[1] for row in found),
            draft_seconds=flight.drafted.seconds_since(flight.began),
            verify_seconds=flight.done.seconds_since(flight.drafted),
            is_cold=flight.is_cold,
        )

    @torch.inference_mode()
    def _draft(self) -> None:
        """Let the draft model draft a chain behind each last token."""
        last, before, positions = self.state[:3]
        first, following = self._draft_passes
        for level in range(self.depth):
            if level == 0:
                first.place_chains(torch.stack((before, last), 1), positions - 1)
                logits = first.compute().logits
            else:
                following.place_chains(self.drafted[:, level - 1 : level], positions + level)
                logits = following.compute().logits
            logits = logits[: self.shape.segments, : self.vocab]
            self.drafted[:, level] = self._draw(logits, positions[:, None] + level)

    @torch.inference_mode()
    def _verify(self) -> None:
        """Run the target over the roots and the drafts, draw, and follow the drafts."""
        last, _, positions, _, depths, active = self.state
        count, nodes = self.shape.segments, self.depth + 1
        tokens = torch.cat((last[:, None], self.drafted), 1)
        self.target_pass.place_chains(tokens, positions)
        logits = self.target_pass.compute().logits[: count * nodes]
        is_finite = torch.isfinite(logits.amax(-1)).view(count, nodes).all(1)
        steps = torch.arange(nodes, device=last.device)
        drawn = self._draw(logits, positions[:, None] + steps).view(count, nodes)
        follows = (drawn[:, :-1] == self.drafted) & (steps[:-1] < depths[:, None])
        accepted = follows.long().cumprod(1).sum(1)
        ends = torch.cat((last[:, None], drawn), 1)  # behind each number of accepted tokens
        before = ends.gather(1, accepted[:, None])[:, 0]
        after = ends.gather(1, accepted[:, None] + 1)[:, 0]
        self._next.copy_(self.state)
        self._next[0] = after
        self._next[1] = before
        self._next[2] = positions + (accepted + 1) * active
        found = [accepted[:, None], is_finite.long()[:, None], self.drafted, drawn]
        self._results.copy_(torch.cat(found, 1))

    def _draw(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Draw the token behind each position; logits [M, V], positions [R, M / R] -> [M]."""
        each = positions.shape[1]
        keys = rng.substreams(self.state[3][:, None], positions + 1).view(-1)
        temperatures = self.temperatures.repeat_interleave(each)
        return draw_recorded(logits, temperatures.to(logits.dtype), self.filters, keys)


def _table(cache: KVCache, slots: Sequence[int], shape: PassShape, device: torch.device) -> Tensor:
    """Return the cache rows [R, K] of the positions of slots, a spare row where there is none."""
    table = np.full((shape.segments, shape.keys), cache.spare_row, np.int64)
    for r, slot in enumerate(slots):
        held = len(cache.pages.held[slot]) * cache.pages.size  # what follows belongs to others
        own = cache.pages.rows[slot, : min(held, shape.keys)]
        table[r, : len(own)] = own
    return torch.from_numpy(table).to(device, non_blocking=True)
