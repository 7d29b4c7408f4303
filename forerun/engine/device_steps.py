"""Multi-step decoding on a GPU: the device is one round ahead of the host (see
`runtime.device_rounds`)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from forerun.draft.device_recycle import DeviceRecycle, RecycleDrafter
from forerun.draft.draft_model import DraftModel
from forerun.draft.eagle.proposer import EagleProposer
from forerun.draft.proposer import Proposer
from forerun.engine.draft_learning import RequestRound, RoundSeconds
from forerun.engine.drafting import Drafting
from forerun.engine.multi_step import TOKENS_A_ROUND, MultiStep, NativeSteps, is_simple, tree_of
from forerun.engine.request import Request, ScheduledRequest
from forerun.runtime.captured import CapturedPasses
from forerun.runtime.device_rounds import MIN_ROUNDS, DeviceRound, DeviceRounds, RoundRequest
from forerun.runtime.native import NativeDecoder
from forerun.runtime.padded_pass import padded_shape
from forerun.runtime.rounds import HeadRounds
from forerun.runtime.torch_runner import Runner
from forerun.types import Draft, Event, Verdict


def new_multi_step(target: Runner, drafting: Drafting, seconds: float) -> MultiStep:
    """Return what runs several rounds at once on the target's kernels."""
    is_native = isinstance(target.decoder, NativeDecoder)
    return (NativeSteps if is_native else DeviceSteps)(target, drafting, seconds)


class DeviceSteps(MultiStep):
    """Runs rounds of all requests on a device that records passes.

    The host launches a round before it has looked at the previous one. So it finds the end of a
    request, and text that could be copied, one round late, and the last round of a request that has
    ended is thrown away. Each call begins and ends with all rounds collected: between steps nothing
    is different from steps of one round.
    """

    def __init__(self, target: Runner, drafting: Drafting, seconds: float = 0.0) -> None:
        super().__init__(target, drafting, seconds)
        self._device: DeviceRounds | None = None
        # by slot: the position of the last round's root, and how many tokens were accepted
        self._last_roots: dict[int, tuple[int, int]] = {}

    def _rounds_of(self, captured: CapturedPasses) -> DeviceRounds:
        """Return the rounds over the passes of the target, which a reset replaces."""
        if self._device is None or self._device.target is not captured:
            self._device = DeviceRounds(captured)
        return self._device

    def _reserve(self, batch: Sequence[ScheduledRequest]) -> int:
        captured = self.target.captured
        if captured is None or captured.failed or self.target.cache.recurrent is not None:
            return 0
        device = self._rounds_of(captured)
        requests = [scheduled.request for scheduled in batch]
        longest = max(len(request.tokens) for request in requests)
        shape = padded_shape(len(batch), TOKENS_A_ROUND, longest)
        if device.failed or shape is None:
            return 0
        self._rounds = min(self._rounds, (shape.keys - longest) // TOKENS_A_ROUND)
        if self._rounds < MIN_ROUNDS or any(map(self._may_copy, requests)):
            return 0
        recycle, others = self._recycles(requests)
        if recycle and (others or recycle.drafter(self._slots(recycle, requests)) is None):
            return 0  # rounds have one drafter, with the table of one tenant
        # a round may be pending when a request ends, and has rows for all nodes of its tree
        siblings = (TOKENS_A_ROUND - 1) * (recycle.width - 1) if recycle else 0
        rooms = [request.remaining + 2 * TOKENS_A_ROUND for request in requests]
        rooms = [min(room, self._rounds * TOKENS_A_ROUND) + siblings for room in rooms]
        for request, room in zip(requests, rooms, strict=True):
            if not self.target.cache.pages.grow(request.slot, len(request.tokens) + room):
                return 0
        return max(rooms)

    def _is_possible(self, scheduled: ScheduledRequest) -> bool:
        request = scheduled.request
        if not super()._is_possible(scheduled):
            return False
        if request.has_fixed_depth and int(request.depth) >= TOKENS_A_ROUND:
            return False
        proposer = self._proposer(request)
        return proposer is None or (
            is_simple(proposer, request.slot) and all(map(self._can_draft, proposer.parts))
        )

    def _can_draft(self, part: Proposer) -> bool:
        """Return True if a part of a proposer copies, or drafts on the target's device."""
        device = self.target.decoder.device
        if isinstance(part, DraftModel):
            return part.runner.decoder.device == device
        return part.copies_text or isinstance(part, EagleProposer | DeviceRecycle)

    def _recycles(self, requests: Sequence[Request]) -> tuple[DeviceRecycle | None, bool]:
        """Return the drafter of these requests that learns from logits in each round, if there is
        one, and whether other drafters draft for some."""
        drafters = {
            part
            for proposer in map(self._proposer, requests)
            for part in (proposer.parts if proposer else ())
            if not part.copies_text
        }
        learning = [part for part in drafters if isinstance(part, DeviceRecycle)]
        return (learning[0] if learning else None), len(drafters) > 1

    def _slots(self, recycle: DeviceRecycle, requests: Sequence[Request]) -> list[int]:
        """Return the slots of those requests for which it holds state."""
        return [request.slot for request in requests if request.slot in recycle.slots]

    def _may_copy(self, request: Request) -> bool:
        """Return True if there is something to copy behind a request's text."""
        proposer = self._proposer(request)
        if proposer is None or (self.drafting.is_paused(request) and not request.has_fixed_depth):
            return False
        return any(
            part.copies_text
            and not self.drafting.is_resting(request, part)
            and part.has_draft(request.slot, request.tokens)
            for part in proposer.parts
        )

    def run(self, batch: Sequence[ScheduledRequest]) -> list[Event]:
        deferred, device = self.drafting.deferred, self._device
        if (
            not self._rounds
            or device is None
            or any(s.draft is None or len(s.draft) > 1 for s in batch)
        ):
            return []
        requests = [scheduled.request for scheduled in batch]
        draft_requests = [deferred.of(request) if deferred else None for request in requests]
        for request, own in zip(requests, draft_requests, strict=True):
            if own is None and self.drafting.hidden_layers(request):
                return []  # its head has to read the hidden states of each round
        plain = [r for r, own in zip(requests, draft_requests, strict=True) if own is None]
        most = min([self._rounds, *map(self.drafting.plain_rounds, plain)])
        drafter = deferred.rounds if deferred else self._learner(requests)
        assert not isinstance(drafter, HeadRounds)
        rounds = [
            RoundRequest(
                slot=r.slot,
                tokens=r.tokens,
                seed=r.seed,
                sampling=r.state.sampling,
                depth=0 if own is None else own.depth,
                remaining=r.remaining,
            )
            for r, own in zip(requests, draft_requests, strict=True)
        ]
        most = device.begin(rounds, drafter, most)
        depths = [own.depth for own in rounds]
        events = [Event(request.id, [], [], []) for request in requests]
        last_time, num_rounds = time.perf_counter(), 0
        for found in self._pipeline(device, requests, most):
            if not found.is_finite:
                break  # a step of one round will say so
            now = time.perf_counter()
            self._append_round(found, requests, depths, events, now - last_time, num_rounds == 0)
            last_time, num_rounds = now, num_rounds + 1
        if deferred and num_rounds:
            for number, request in enumerate(requests):
                if deferred.of(request) and not _has_ended(request):
                    root, accepted = self._last_roots[request.slot]
                    device.end(number, request.slot, request.tokens, root, accepted)
        return events if num_rounds else []

    def _learner(self, requests: Sequence[Request]) -> RecycleDrafter | None:
        """Return what learns in rounds that draft nothing."""
        recycle, _ = self._recycles(requests)
        return recycle.drafter(self._slots(recycle, requests)) if recycle else None

    def _pipeline(
        self, device: DeviceRounds, requests: Sequence[Request], most: int
    ) -> Iterator[DeviceRound]:
        """Launch up to `most` rounds, each before the one before it is looked at, for as long as no
        request ends and nothing is found to copy; all of them are collected in the end."""
        if not most or not device.launch():
            return
        began, launched, goes_on = time.perf_counter(), 1, True
        try:
            while True:
                in_time = launched < MIN_ROUNDS or time.perf_counter() - began < self.seconds
                goes_on = goes_on and launched < most and in_time and device.launch()
                launched += goes_on
                found = device.collect()
                if found is None or all(map(_has_ended, requests)):
                    return
                yield found
                has_ended = any(map(_has_ended, requests))
                goes_on = goes_on and not has_ended and not any(map(self._may_copy, requests))
        finally:
            while device.collect():
                pass

    def _append_round(
        self,
        found: DeviceRound,
        requests: Sequence[Request],
        depths: Sequence[int],
        events: Sequence[Event],
        wall: float,
        is_first: bool,
    ) -> None:
        """Append the tokens of a round, and learn from it; `wall` is the time since the last."""
        drafting, deferred = self.drafting, self.drafting.deferred
        source = deferred.proposer.name if deferred else ""
        rounds, own_events = [], []
        for i, request in enumerate(requests):
            if _has_ended(request):
                continue  # its round is thrown away
            depth, path = min(depths[i], request.remaining), found.path[i]
            draft = _draft_of_request(found, i, request.tokens[-1], depth, source)
            verdict = Verdict(found.drawn[i], path)
            rounds.append(RequestRound(request, draft, draft, verdict))
            own_events.append(events[i])
            # the rows of a path are behind the committed ones already
            self.target.cache.commit(request.slot, range(len(path)))
        drafting.begin_round([item.request for item in rounds], is_first)
        passed = max(found.verify_seconds, wall - found.draft_seconds)
        drafting.record_deferred_drafts(rounds, None if found.is_cold else found.draft_seconds)
        for item in rounds:
            item.request.stats.count(item.verified, item.verdict, found.draft_seconds, passed)
            root, accepted = len(item.request.tokens) - 1, len(item.verdict.path) - 1
            self._last_roots[item.request.slot] = root, accepted
        emitted = self._append(rounds, own_events)
        if not found.is_cold:
            seconds = RoundSeconds(found.draft_seconds, passed, max(wall, passed))
            drafting.record_round(rounds, emitted, seconds)


def _draft_of_request(found: DeviceRound, number: int, root: int, depth: int, source: str) -> Draft:
    """Return what a round drafted for one of its requests; of a chain `depth` tokens."""
    tokens = found.tokens[number]
    if not found.parents:
        return Draft.chain(root, tokens[:depth], source)
    parents = found.parents[number]
    count = parents.index(-1) if -1 in parents else len(parents)
    return tree_of(root, tokens[:count], parents[:count], found.bins[number][:count], source)


def _has_ended(request: Request) -> bool:
    return bool(request.finish_reason or request.error)
