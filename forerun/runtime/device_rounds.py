"""Rounds that a GPU computes one behind the other, while the host is one round late.

A round drafts with a draft model, an EAGLE head, tables of successors or nothing, runs the target
over the draft, draws, follows the draft and moves on. All that it needs stays on the device: each
request's last two tokens, its position, the key of its noise. So the host launches the next round
before it has looked at the last one, and learns of each round's tokens while the device works on
another. The two parts of a round are CUDA graphs.

Chains need no moved cache rows: what was accepted stands where it belongs, behind the rows that
were committed. Of trees the rows of the accepted path are moved there. A request that ends in one
round is computed in the next one, too; that round is thrown away.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from forerun import rng
from forerun.cache.kv import KVCache
from forerun.devices import upload
from forerun.errors import first_line
from forerun.kernels.draw import DrawKind, DrawParameters, draw_rows, sampling_numbers
from forerun.rng import Lane
from forerun.runtime.captured import CapturedPasses
from forerun.runtime.padded_pass import PassShape, TreeShape, padded_shape
from forerun.sampling.params import Sampling
from forerun.types import States

log = logging.getLogger("forerun.runtime")

MIN_ROUNDS = 2  # rounds that are worth a call
MOST_RECORDED = 64  # shapes, depths and kinds of draws; the least recently used go

# Draws the tokens [M] behind positions [R, M / R] from logits [M, V].
Draw: TypeAlias = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class RoundRequest:
    """One request of several rounds.

    Attributes:
        tokens: its text, whose last token is the root of the first draft.
        depth: how many drafted tokens may be accepted; 0 decodes plainly.
        remaining: how many drafted tokens could be used until its end.
    """

    slot: int
    tokens: Sequence[int]
    seed: int
    sampling: Sampling
    depth: int
    remaining: int


class RoundState(NamedTuple):
    """State of the requests between rounds on the device, int64 [R] each.

    Attributes:
        last: its last token, the root of the next draft.
        before: the token before that.
        position: the position of the last token.
        noise: the key of the target's noise.
        depth: how many drafted tokens may be accepted.
        active: 1 for requests, 0 for padding.
        end: the position behind which no drafted token can be used.
    """

    last: Tensor
    before: Tensor
    position: Tensor
    noise: Tensor
    depth: Tensor
    active: Tensor
    end: Tensor


class Nodes(NamedTuple):
    """Drafts behind the roots, int64 [R, n] each.

    Attributes:
        tokens: the token of each node.
        parents: the number of each node's parent, the root being 0 and the first node 1; -1 where
            there is no node. Chains are not asked: each node follows the one before.
        bins: bins of the drafter's probabilities, of trees.
    """

    tokens: Tensor
    parents: Tensor
    bins: Tensor


class Verified(NamedTuple):
    """The results of the target for the drafts of a round, n nodes each and their roots.

    Attributes:
        features: its hidden states [T, H] by layer, padding included.
        logits: [R * (n + 1), V].
        tokens: int64 [R, n + 1], of the roots and nodes.
        drawn: int64 [R, n + 1], its own tokens behind them.
        accepted: int64 [R], the number of accepted nodes.
    """

    features: Mapping[int, States]
    logits: Tensor
    tokens: Tensor
    drawn: Tensor
    accepted: Tensor


class Drafts(Protocol):
    """Makes the drafts of one recorded shape."""

    def begin(self, requests: Sequence[RoundRequest]) -> None:
        """Prepare rounds of these requests, whose rows are reserved."""

    def draft(self, state: RoundState, nodes: Nodes, draw: Draw) -> None:
        """Write drafts to `nodes`, by operations of the device alone."""

    def keep(self, state: RoundState, nodes: Nodes, verified: Verified) -> None:
        """Keep, by such operations, what later drafts need of a round."""

    def end(self, number: int, slot: int, tokens: Sequence[int], root: int, accepted: int) -> None:
        """Commit what was read of request `number` of the group. `root` is the position of the root
        of its last round, in which `accepted` tokens were accepted; `tokens` is its text now."""


class DeviceDrafter(Protocol):
    """A proposer that drafts on the device of the target."""

    @property
    def aux_hidden_layers(self) -> Sequence[int]:
        """The target's hidden states that it reads."""

    @property
    def width(self) -> int:
        """Nodes of a draft per level on average; 0 for chains that are always as long as asked."""

    def drafts(self, target: CapturedPasses, shape: PassShape, depth: int) -> Drafts:
        """Return drafts of `depth` levels for passes of the target of this shape."""


class DeviceRound(NamedTuple):
    """The results of a round.

    Attributes:
        tokens: for each request, the tokens behind its root; [] without a drafter.
        parents, bins: of trees, as in `Nodes`; [] for chains.
        path: for each, the accepted nodes, the root first.
        drawn: for each, the target's own tokens after those.
        is_finite: False if logits of a request are not finite; then the round does not count.
        draft_seconds, verify_seconds: time of the device.
        is_cold: True if the round was recorded, so that its times mean nothing.
    """

    tokens: list[list[int]]
    parents: list[list[int]]
    bins: list[list[int]]
    path: list[list[int]]
    drawn: list[list[int]]
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
        self._recorded: OrderedDict[tuple[Any, ...], _Rounds] = OrderedDict()
        self._current: _Rounds | None = None

    def begin(
        self, requests: Sequence[RoundRequest], drafter: DeviceDrafter | None, most: int
    ) -> int:
        """Prepare rounds of these requests; return how many, at most `most`, there can be. 0: none.

        The slots have room for all their tokens.
        """
        depth = max(request.depth for request in requests) if drafter else 0
        nodes = depth * max(drafter.width, 1) if drafter else 0
        longest = max(len(request.tokens) for request in requests)
        shape = padded_shape(len(requests), nodes + 1, longest + nodes)
        if self.failed or shape is None or not self.target.takes(shape):
            return 0
        most = min(most, (shape.keys - longest - nodes) // (depth + 1) + 1)
        if most < MIN_ROUNDS:
            return 0
        try:
            vocab = self.target.decoder.config.vocab
            draw = DrawKind.of([request.sampling for request in requests], vocab)
            key = (shape, depth, draw, drafter)
            rounds = self._recorded.get(key)
            if rounds is None:
                rounds = self._recorded[key] = _Rounds(self.target, drafter, shape, depth, draw)
                if len(self._recorded) > MOST_RECORDED:
                    self._recorded.popitem(last=False)
            self._recorded.move_to_end(key)
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

    def collect(self) -> DeviceRound | None:
        """Wait for the oldest round that was launched; None if there is none."""
        assert self._current is not None
        return self._current.collect()

    def end(self, number: int, slot: int, tokens: Sequence[int], root: int, accepted: int) -> None:
        """Let the drafter commit what it read, as in `Chains.end`; all rounds are collected."""
        if self._current is not None and self._current.drafts:
            self._current.drafts.end(number, slot, tokens, root, accepted)

    def _fail(self, error: Exception) -> None:
        self.failed = True
        reason = first_line(error)
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


class _PendingRound:
    """A round on its way: where its results will be, and its times."""

    def __init__(self, results: Tensor) -> None:
        pinned = results.is_cuda
        self.results = torch.empty(results.shape, dtype=results.dtype, pin_memory=pinned)
        self.began, self.drafted, self.done = (_Mark(results.device) for _ in range(3))
        self.is_cold = False


class _Rounds:
    """Recorded rounds of one shape: R requests, drafts of `depth` levels and `num_nodes` nodes.

    Attributes:
        is_tree: drafts may have branches, and fewer nodes than there is room for.
        state: int64 [7, R] on the device: the rows of a `RoundState`, whose depths are those of the
            first round.
        sampling: float64 [4, R]: temperature, top_k (infinite for none), top_p and log of min_p.
    """

    def __init__(
        self,
        target: CapturedPasses,
        drafter: DeviceDrafter | None,
        shape: PassShape,
        depth: int,
        draw: DrawKind,
    ) -> None:
        self.depth, self.draw = depth, draw
        self.graphs, self.shape, self.vocab = target.graphs, shape, target.decoder.config.vocab
        self.own_kernels = target.own_layers
        layers = tuple(sorted(drafter.aux_hidden_layers)) if drafter else ()
        self.target_pass = target.new_pass(shape, layers)
        self.drafts = drafter.drafts(target, shape, depth) if drafter else None
        self.is_tree = drafter is not None and drafter.width > 0
        self.num_nodes = depth * max(drafter.width, 1) if drafter else 0
        count, device = shape.segments, self.target_pass.device
        self.state = torch.zeros((7, count), dtype=torch.int64, device=device)
        self.sampling = torch.zeros((4, count), dtype=torch.float64, device=device)
        tokens, parents, bins = torch.zeros(
            (3, count, self.num_nodes), dtype=torch.int64, device=device
        )
        self.nodes = Nodes(tokens, parents, bins)
        self._next = torch.zeros_like(self.state)
        self._widths = [2, self.num_nodes, depth + 1, depth + 1]
        if self.is_tree:
            self._widths += [self.num_nodes, self.num_nodes]
        columns = sum(self._widths)
        self._results = torch.zeros((count, columns), dtype=torch.int64, device=device)
        self._replay_draft: Callable[[], None] | None = None
        self._replay_verify: Callable[[], None] | None = None
        self._free: list[_PendingRound] = []
        self._pending: deque[_PendingRound] = deque()
        self._count = 0

    @torch.inference_mode()
    def begin(self, requests: Sequence[RoundRequest]) -> None:
        """Begin with other requests, whose rows are reserved."""
        while self.collect():
            pass  # what an interrupted call left
        self._count, device = len(requests), self.state.device
        state = np.zeros(self.state.shape, np.int64)
        state[2] = 1  # padding has a token before its last one, too
        sampling = np.zeros(self.sampling.shape)
        for r, request in enumerate(requests):
            noise = rng.signed(rng.stream(request.seed, Lane.TARGET))
            last, before = request.tokens[-1], request.tokens[-2]
            position = len(request.tokens) - 1
            end = position + request.remaining
            state[:, r] = last, before, position, noise, request.depth, 1, end
            sampling[:, r] = sampling_numbers(request.sampling, self.vocab)
        self.state.copy_(torch.from_numpy(state), non_blocking=True)
        self.sampling.copy_(torch.from_numpy(sampling), non_blocking=True)
        part, slots = self.target_pass, [request.slot for request in requests]
        starts = range(0, part.shape.rows, part.shape.tokens)
        wanted = [start + i for start in starts for i in range(self.num_nodes + 1)]
        table = cache_table(part.cache, slots, part.shape, device)
        part.begin_chains(table, upload(wanted, torch.int64, device))
        if self.drafts:
            self.drafts.begin(requests)

    @torch.inference_mode()
    def launch(self) -> None:
        """Begin a round."""
        pending = self._free.pop() if self._free else _PendingRound(self._results)
        pending.is_cold = self._replay_verify is None
        pending.began.set()
        if self.drafts and self.num_nodes:
            if self._replay_draft is None:
                _, self._replay_draft = self.graphs.record(self._draft)
            else:
                self._replay_draft()
        pending.drafted.set()
        if self._replay_verify is None:
            _, self._replay_verify = self.graphs.record(self._verify)
        else:
            self._replay_verify()
        # Not recorded: a recording runs more than once.
        self.state.copy_(self._next)
        pending.results.copy_(self._results, non_blocking=True)
        pending.done.set()
        self._pending.append(pending)

    def collect(self) -> DeviceRound | None:
        """Return the oldest round that was launched, None without any."""
        if not self._pending:
            return None
        pending = self._pending.popleft()
        pending.done.wait()
        rows = pending.results[: self._count].tolist()
        self._free.append(pending)
        ends = list(itertools.accumulate(self._widths))
        counts, tokens, path, drawn, *trees = (
            [row[end - width : end] for row in rows]
            for width, end in zip(self._widths, ends, strict=True)
        )
        parents, bins = trees or ([], [])
        return DeviceRound(
            tokens=tokens,
            parents=parents,
            bins=bins,
            path=[own[:count] for own, (count, _) in zip(path, counts, strict=True)],
            drawn=[own[:count] for own, (count, _) in zip(drawn, counts, strict=True)],
            is_finite=all(is_finite for _, is_finite in counts),
            draft_seconds=pending.drafted.seconds_since(pending.began),
            verify_seconds=pending.done.seconds_since(pending.drafted),
            is_cold=pending.is_cold,
        )

    @torch.inference_mode()
    def _draft(self) -> None:
        """Draft behind each last token."""
        assert self.drafts

        def draw(logits: Tensor, positions: Tensor) -> Tensor:
            return self._draw(logits, positions).clamp(min=0)  # any token, of no number

        self.drafts.draft(self._state(), self.nodes, draw)

    def _state(self) -> RoundState:
        """Return the state of this round."""
        state = RoundState(*self.state)
        room = (state.end - state.position).clamp(min=0)
        return state._replace(depth=torch.minimum(state.depth, room))

    @torch.inference_mode()
    def _verify(self) -> None:
        """Run the target over the roots and the drafts, draw, and follow the drafts."""
        state, count, num_rows = self._state(), self.shape.segments, self.num_nodes + 1
        tokens = torch.cat((state.last[:, None], self.nodes.tokens), 1)
        tree = TreeShape.of(self.nodes.parents, self.depth) if self.is_tree else None
        self.target_pass.place(tokens, state.position, tree)
        forward = self.target_pass.compute()
        logits = forward.logits[: count * num_rows]
        steps = torch.arange(num_rows, device=tokens.device) if tree is None else tree.depths
        drawn = self._draw(logits, state.position[:, None] + steps).view(count, num_rows)
        if not self.own_kernels:
            is_finite = torch.isfinite(logits.amax(-1)).view(count, num_rows).all(1)
        else:
            is_finite = (drawn >= 0).all(1)
        path, accepted = self._follow(tokens, drawn, state.depth)
        drawn = drawn.clamp(min=0)
        if tree is not None:
            self._compact(state.position, path, accepted)
        emitted = drawn.gather(1, path)
        ends = torch.cat((state.last[:, None], emitted), 1)  # by number of tokens appended
        self._next.copy_(self.state)
        self._next[0] = ends.gather(1, accepted[:, None] + 1)[:, 0]
        self._next[1] = ends.gather(1, accepted[:, None])[:, 0]
        self._next[2] = state.position + (accepted + 1) * state.active
        found = [accepted[:, None] + 1, is_finite.long()[:, None], self.nodes.tokens, path, emitted]
        if tree is not None:
            found += [self.nodes.parents, self.nodes.bins]
        self._results.copy_(torch.cat(found, 1))
        if self.drafts:
            verified = Verified(forward.features, logits, tokens, drawn, accepted)
            self.drafts.keep(state, self.nodes, verified)

    def _draw(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Draw as `Draw`; the kernel gives -1 for rows that are not finite."""
        count = positions.shape[1]
        keys = rng.substreams(self.state[3][:, None], positions + 1).view(-1)
        # `repeat_interleave` may wait for the device
        rows = self.sampling[:, :, None].expand(-1, -1, count).reshape(4, -1)
        temperature, top_k, top_p, least = rows
        by = DrawParameters(temperature, least, top_k, top_p, keys, self.draw)
        if not self.own_kernels:
            return draw_rows(logits, by)
        from forerun.kernels.triton.draw import draw_tokens

        return draw_tokens(logits.float(), by)

    def _follow(self, tokens: Tensor, drawn: Tensor, depth: Tensor) -> tuple[Tensor, Tensor]:
        """Return the accepted nodes of each draft, int64 [R, depth + 1], the root first and any
        numbers behind the last, and how many there are without the root, int64 [R].

        tokens, drawn: int64 [R, n], of the roots and nodes, and the target's behind each.
        depth: int64 [R], the most that may be accepted.
        """
        count, device = len(tokens), tokens.device
        chain = torch.arange(self.depth + 1, device=device).expand(count, -1)
        if not self.own_kernels and self.is_tree:
            return self._follow_tree(tokens, drawn)
        if not self.own_kernels:
            follows = (drawn[:, :-1] == tokens[:, 1:]) & (chain[:, :-1] < depth[:, None])
            return chain, follows.long().cumprod(1).sum(1)
        from forerun.kernels.triton.walk import walk

        num_rows = tokens.shape[1]
        parents = torch.arange(-1, num_rows - 1, dtype=torch.int32, device=device).repeat(count)
        if self.is_tree:
            roots = torch.full_like(self.state[0], -1)
            parents = torch.cat((roots[:, None], self.nodes.parents), 1).view(-1).to(torch.int32)
        first = torch.arange(0, count * num_rows, num_rows, dtype=torch.int32, device=device)
        rows = torch.full_like(depth, num_rows) if self.is_tree else depth + 1
        flat = tokens.reshape(-1), parents, drawn.reshape(-1)
        walked = walk(*flat, first, rows.to(torch.int32), num_rows)
        path = walked.path[:, : self.depth + 1].long().clamp(min=0)
        return path, (walked.accepted.long() - 1).clamp(min=0)

    def _follow_tree(self, tokens: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
        """Follow trees, which are no deeper than they may be."""
        most, parents = tokens.shape[1], self.nodes.parents
        numbers = torch.arange(1, most, device=tokens.device)
        at = torch.zeros_like(tokens[:, :1])
        goes_on = torch.ones_like(at, dtype=torch.bool)
        path, accepted = [at], torch.zeros_like(at)
        for _ in range(self.depth):
            is_next = (parents == at) & (tokens[:, 1:] == drawn.gather(1, at)) & goes_on
            child = torch.where(is_next, numbers, most).amin(1, keepdim=True)
            goes_on = child < most
            at = torch.where(goes_on, child, at)
            accepted = accepted + goes_on.long()
            path.append(at)
        return torch.cat(path, 1), accepted[:, 0]

    def _compact(self, first: Tensor, path: Tensor, accepted: Tensor) -> None:
        """Move the cache rows of accepted paths behind the committed ones, which end before
        positions `first` [R]."""
        cache, table = self.target_pass.cache, self.target_pass.inputs.table
        indices = torch.arange(self.num_nodes + 1, device=first.device)
        rows = table.gather(1, first[:, None] + indices)
        if self.own_kernels:
            from forerun.kernels.triton.compact import compact

            for stored in cache.tensors:
                compact(stored, rows, path, accepted + 1)
            return
        # All are read before any is written; what was not accepted stays where it is.
        levels = indices[: self.depth + 1]
        nodes = torch.where(levels <= accepted[:, None], path, levels)
        sources, targets = rows.gather(1, nodes).view(-1), rows[:, : self.depth + 1].reshape(-1)
        for stored in cache.tensors:
            stored.index_copy_(1, targets, stored.index_select(1, sources))


def cache_table(
    cache: KVCache, slots: Sequence[int], shape: PassShape, device: torch.device
) -> Tensor:
    """Return the cache rows [R, K] of the positions of slots, a spare row where there is none."""
    table = np.full((shape.segments, shape.keys), cache.spare_row, np.int64)
    for r, slot in enumerate(slots):
        held = len(cache.pages.held[slot]) * cache.pages.size  # what follows belongs to others
        own = cache.pages.rows[slot, : min(held, shape.keys)]
        table[r, : len(own)] = own
    return torch.from_numpy(table).to(device, non_blocking=True)
