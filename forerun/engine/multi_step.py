"""Multi-step decoding: several rounds of requests at once, with little or no Python between them.

`MultiStep` decides when that is possible: the requests need nothing between two rounds that only
Python can do. What the depth policy chose for the step holds for all its rounds. Afterwards
everything learns from each of them as from a step of its own. `NativeSteps` runs the rounds of one
request in one native call, `DeviceSteps` those of several on a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from forerun.draft.hidden_states import HiddenStateProposer
from forerun.draft.proposer import KnownText, Proposer
from forerun.engine.draft_learning import RequestRound, RoundSeconds
from forerun.engine.drafting import Drafting
from forerun.engine.error_isolation import isolate_errors
from forerun.engine.request import Request, ScheduledRequest
from forerun.kernels.native import CRound
from forerun.runtime.native import NativeDecoder
from forerun.runtime.rounds import (
    MAX_NODES,
    Grams,
    GrowingText,
    HeadRounds,
    RoundsResult,
    run_rounds,
)
from forerun.runtime.torch_runner import Runner
from forerun.types import Draft, Event, Proposal, Verdict

SECONDS = 0.03  # that the rounds of a call take, about: others wait so long, and tokens come so
MAX_ROUNDS = 32  # of a call
TOKENS_A_ROUND = 9  # for which room is reserved: a chain of the policy's deepest, and one more


class MultiStep:
    """Runs several rounds of the requests in the engine; this class itself runs none.

    Attributes:
        seconds: how long the rounds of a call may take; 0 runs none.
    """

    def __init__(self, target: Runner, drafting: Drafting, seconds: float = 0.0) -> None:
        self.target, self.drafting, self.seconds = target, drafting, seconds
        self._rounds = 0  # most of this step

    def room(self, batch: Sequence[ScheduledRequest]) -> int:
        """Return how many tokens of each request the rounds of this step may append, and reserve
        their rows of the cache; 0 where the step is an ordinary one. `batch` has all requests that
        run, and is empty while they wait."""
        if not self.seconds or not batch or not all(map(self._is_possible, batch)):
            return 0
        pass_seconds = self.drafting.policy.forward_seconds(len(batch))
        self._rounds = min(int(self.seconds / pass_seconds) + 1, MAX_ROUNDS)
        return self._reserve(batch) if self._rounds > 1 else 0

    def run(self, batch: Sequence[ScheduledRequest]) -> list[Event]:
        """Run rounds after `Drafting.draft`, and return one event for each request; [], with
        nothing done, if there are none. `room` has reserved what they need."""
        return []

    def _reserve(self, batch: Sequence[ScheduledRequest]) -> int:
        """Reserve rows of the cache for `_rounds`; return `room`."""
        return 0

    def _is_possible(self, scheduled: ScheduledRequest) -> bool:
        request = scheduled.request
        return (
            scheduled.generates
            and scheduled.count == 1
            and request.produced > 0
            and request.remaining > 1
            and request.rule.name == "match"
            and not request.trace
            and not request.state.special
            and request.params.logprobs is None
        )

    def _proposer(self, request: Request) -> Proposer | None:
        """Return the proposer that keeps something of a request, if there is one."""
        drafting = self.drafting
        return drafting.proposers[request.draft] if drafting.has_state(request) else None

    def _append(self, rounds: Sequence[RequestRound], events: Sequence[Event]) -> list[int]:
        """Learn the verdicts of a round, and append the tokens to the requests and to their
        events; return how many each."""
        counts = []
        for each, event in zip(rounds, events, strict=True):
            request, verified, verdict = each.request, each.verified, each.verdict
            self.drafting.record_verdict(request, verified, verdict)
            before = len(event.token_ids)
            with isolate_errors(request):
                for token, node in zip(verdict.tokens, [*verdict.path[1:], 0], strict=True):
                    if request.finish_reason:
                        break
                    event.pieces.append(request.append(token))
                    event.token_ids.append(token)
                    event.sources.append(verified.sources[node])
            event.finish_reason = request.finish_reason
            counts.append(len(event.token_ids) - before)
        return counts


class NativeSteps(MultiStep):
    """Runs the rounds of a request that is alone in the engine in one native call."""

    def __init__(self, target: Runner, drafting: Drafting, seconds: float = 0.0) -> None:
        super().__init__(target, drafting, seconds)
        self._replay_seconds = 0.0  # that learning from a round took, in the last call
        # by length; they go with the texts
        self._grams_of: WeakKeyDictionary[KnownText, dict[int, Grams]] = WeakKeyDictionary()

    def _reserve(self, batch: Sequence[ScheduledRequest]) -> int:
        if len(batch) > 1:
            return 0
        request = batch[0].request
        room = min(self._rounds * TOKENS_A_ROUND, request.remaining + 1)
        rows = len(request.tokens) + room + MAX_NODES
        return room if self.target.cache.pages.grow(request.slot, rows) else 0

    def _is_possible(self, scheduled: ScheduledRequest) -> bool:
        request, decoder, cache = scheduled.request, self.target.decoder, self.target.cache
        if not super()._is_possible(scheduled):
            return False
        proposer = self._proposer(request)
        return (
            isinstance(decoder, NativeDecoder)
            and decoder.config.experts is None
            and decoder.shortlist is None
            and cache.recurrent is None
            and cache.moves is None
            and self.drafting.clock is time.thread_time
            and not request.has_fixed_depth
            and (
                proposer is None
                or (not proposer.wants_logits and is_simple(proposer, request.slot))
            )
        )

    def run(self, batch: Sequence[ScheduledRequest]) -> list[Event]:
        deferred, drafting = self.drafting.deferred, self.drafting
        request, draft = batch[0].request, batch[0].draft
        if draft is None or len(draft) > 1:  # a copy
            return []
        began = time.thread_time()
        rounds = self._rounds if deferred else min(drafting.plain_rounds(request), self._rounds)
        if rounds < 2 and not deferred:
            return []
        head = None
        if deferred:
            (asked,) = deferred.requests.values()
            assert isinstance(deferred.rounds, HeadRounds) and asked.confidence_rates is not None
            head = deferred.rounds
            siblings = deferred.proposer.extra_nodes if asked.branching else 0
            costs = drafting.policy.pass_costs(asked.depth + siblings, deferred.batch)
            head.set_policy(asked.depth, siblings, asked.confidence_rates, asked.min_prob, costs)
        before = time.thread_time() - began + drafting.seconds
        before -= deferred.seconds if deferred else 0.0  # a part of drafting
        result = self._run(request, rounds, head)
        if not result.rounds:
            return []
        after = time.thread_time()
        event = self._replay(request, result, before)
        self._replay_seconds = (time.thread_time() - after) / len(result.rounds)
        return [event]

    def _watched(self, request: Request, text: GrowingText, room: int) -> list[Grams]:
        """Return the sequences behind which a copy would pay, those of the request's own text
        first; [] if nothing is copied."""
        proposer = self._proposer(request)
        if proposer is None or self.drafting.is_paused(request):
            return []
        length = 0
        texts: list[KnownText] = []
        for part in proposer.parts:
            sources = part.copy_sources(request.slot)
            if sources and sources.min_match and not self.drafting.is_resting(request, part):
                least = self.drafting.least_match(request, part, sources.min_match)
                length = min(length or least, least)
                texts += sources.texts
        if not length:
            return []
        return [text.grams(length, room), *(self._grams(other, length) for other in texts)]

    def _grams(self, known: KnownText, length: int) -> Grams:
        """Return the sequences in a text that other requests add to."""
        sets = self._grams_of.setdefault(known, {})
        if length not in sets:
            sets[length] = Grams(length)
        grams = sets[length]
        grams.update(known.text, len(known.text))
        return grams

    def _run(self, request: Request, rounds: int, head: HeadRounds | None) -> RoundsResult:
        decoder, cache = self.target.decoder, self.target.cache
        assert isinstance(decoder, NativeDecoder)
        text = self.drafting.state(request).text
        most_nodes = MAX_NODES if head else 0
        room = rounds * (most_nodes + 1)
        text.update(request.tokens, room)
        return run_rounds(
            decoder,
            cache,
            request.slot,
            text,
            grams=self._watched(request, text, room),
            head=head,
            aux_hidden_layers=self.drafting.hidden_layers(request),
            seed=request.seed,
            sampling=request.state.sampling,
            end_ids=sorted(request.end_ids),
            limit=request.prompt_length + request.limit,
            most=rounds,
            most_nodes=most_nodes,
            seconds=self.seconds,
        )

    def _replay(self, request: Request, result: RoundsResult, before: float) -> Event:
        """Append tokens, and let everything learn from each round; `before` is the time that the
        step took before the call."""
        drafting, deferred = self.drafting, self.drafting.deferred
        source = deferred.proposer.name if deferred else ""
        event = Event(request.id, [], [], [])
        start, count = len(request.tokens) - 1, len(result.rounds)
        in_python = before / count + self._replay_seconds
        for number, found in enumerate(result.rounds):
            draft = _draft_of(found, request.tokens[-1], source)
            path = [0, *found.path[: found.accepted]]
            verdict = Verdict(found.drawn[: found.accepted + 1], path)
            rounds = [RequestRound(request, draft, draft.first(found.verified), verdict)]
            drafting.begin_round([request], is_first=number == 0)
            drafted = deferred.seconds / count if deferred else 0.0
            drafting.record_deferred_drafts(rounds, found.draft_seconds + drafted)
            passed = found.verify_seconds + in_python
            request.stats.count(rounds[0].verified, verdict, found.draft_seconds, passed)
            self._append(rounds, [event])
            seconds = RoundSeconds(found.draft_seconds, passed, found.wall_seconds + in_python)
            drafting.record_round(rounds, [found.appended], seconds)
            if request.error or request.finish_reason:
                break
        self._show_states(request, result, start)
        return event

    def _show_states(self, request: Request, result: RoundsResult, start: int) -> None:
        """Give the hidden states of the committed tokens to the request's proposer."""
        deferred = self.drafting.deferred
        layers = self.drafting.hidden_layers(request)
        if request.finish_reason or request.error:
            return  # its slot is about to be closed
        if deferred:
            assert isinstance(deferred.proposer, HiddenStateProposer)
            read = len(result.states[0]) - result.unread
            states = [rows[read:].copy() for rows in result.states]
            deferred.proposer.end_rounds(request.slot, request.tokens, read, states)
        elif layers:
            seen = dict(zip(layers, result.states, strict=True))
            with isolate_errors(request):
                self.drafting.proposers[request.draft].observe(request.slot, start, seen)


def is_simple(proposer: Proposer, slot: int) -> bool:
    """Return True if a proposer needs nothing between two rounds but the text, and what the target
    computed."""
    parts = proposer.parts
    return not (
        proposer.merges_drafts
        or proposer.rivals
        or any(part.overlaps or part.copy_sources(slot) is None for part in parts)
        or sum(bool(part.aux_hidden_layers) for part in parts) > 1
    )


def _draft_of(found: CRound, root: int, source: str) -> Draft:
    """Return what a round drafted."""
    count = found.nodes
    return Draft(
        [root, *found.tokens[:count]],
        [-1, *found.parents[:count]],
        ["", *[source] * count],
        [Proposal.DETERMINISTIC] * (count + 1),
        confidence_bins=found.bins[:count],
        path_probs=found.path_probs[:count],
    )
