"""Multi-step decoding: several rounds of requests at once, with little or no Python between them.

`MultiStep` decides when that is possible: the requests need nothing between two rounds that only
Python can do. What the depth policy chose for the step holds for all its rounds. Afterwards
everything learns from each of them as from a step of its own. `NativeSteps` runs rounds in one
native call, `DeviceSteps` on a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from forerun.draft.automaton import SuffixAutomaton
from forerun.draft.hidden_states import HiddenStateProposer
from forerun.draft.proposer import Proposer
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
    TextRounds,
    run_rounds,
)
from forerun.runtime.torch_runner import Runner
from forerun.types import Draft, Event, Proposal, Verdict

SECONDS = 0.03  # approximate duration of a call: other requests wait, and tokens arrive at once
MAX_ROUNDS = 32  # per call
TOKENS_A_ROUND = 9  # room reserved per round: the policy's deepest chain, and one more token


class MultiStep:
    """Runs several rounds of the requests in the engine; this class itself runs none.

    Attributes:
        seconds: how long the rounds of a call may take; 0 runs none.
    """

    def __init__(self, target: Runner, drafting: Drafting, seconds: float = 0.0) -> None:
        self.target, self.drafting, self.seconds = target, drafting, seconds
        self._rounds = 0  # maximum number in this step

    def room(self, batch: Sequence[ScheduledRequest]) -> int:
        """Return how many tokens of each request the rounds of this step may append, and reserve
        their rows of the cache; 0 where the step is an ordinary one. `batch` has all requests that
        run, and is empty while they wait."""
        self._rounds = 0
        if not self.seconds or not batch or not all(map(self._is_possible, batch)):
            return 0
        pass_seconds = self.drafting.policy.forward_seconds(len(batch))
        self._rounds = min(int(self.seconds / pass_seconds) + 1, MAX_ROUNDS)
        room = self._reserve(batch) if self._rounds > 1 else 0
        self._rounds = self._rounds if room else 0
        return room

    @property
    def may_run(self) -> bool:
        """True if this step may run several rounds; `room` was called before."""
        return self._rounds > 1

    def run(self, batch: Sequence[ScheduledRequest]) -> list[Event]:
        """Run rounds after `Drafting.draft`, and return one event for each request; [], with
        nothing done, if there are none. `room` was called before, for all requests that run."""
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
        """Return the proposer that holds state of a request, if there is one."""
        drafting = self.drafting
        return drafting.proposers[request.draft] if drafting.has_state(request) else None

    def _append(self, rounds: Sequence[RequestRound], events: Sequence[Event]) -> list[int]:
        """Learn the verdicts of a round, and append the tokens to the requests and to their
        events; return how many each."""
        counts = []
        for item, event in zip(rounds, events, strict=True):
            request, verified, verdict = item.request, item.verified, item.verdict
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
    """Runs rounds in one native call: those of a request that is alone in the engine, with a draft
    head or without, and those of several requests that draft nothing."""

    def __init__(self, target: Runner, drafting: Drafting, seconds: float = 0.0) -> None:
        super().__init__(target, drafting, seconds)
        self._replay_seconds = 0.0  # time to learn from a round, in the last call
        # by length; dropped together with the texts
        self._grams_of: WeakKeyDictionary[SuffixAutomaton, dict[int, Grams]] = WeakKeyDictionary()

    def room(self, batch: Sequence[ScheduledRequest]) -> int:
        room = super().room(batch)
        return room if len(batch) == 1 else 0  # several requests draft one round a step

    def _reserve(self, batch: Sequence[ScheduledRequest]) -> int:
        if len(batch) > 1:
            grow = self.target.cache.pages.grow
            ends = [(s.request.slot, len(s.request.tokens) + self._rounds) for s in batch]
            return self._rounds if all(grow(slot, rows) for slot, rows in ends) else 0
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
        deferred, drafting, rounds = self.drafting.deferred, self.drafting, self._rounds
        if not rounds or any(s.draft is None or len(s.draft) > 1 for s in batch):  # a copy
            return []
        began = time.thread_time()
        requests = [scheduled.request for scheduled in batch]
        if not deferred:
            rounds = min(rounds, *map(drafting.plain_rounds, requests))
            if rounds < 2:
                return []
        head = None
        if deferred:
            (wanted,) = deferred.requests.values()
            assert isinstance(deferred.rounds, HeadRounds) and wanted.confidence_rates is not None
            head, rates = deferred.rounds, wanted.confidence_rates
            siblings = deferred.proposer.extra_nodes if wanted.branching else 0
            costs = drafting.policy.pass_costs(wanted.depth + siblings, deferred.batch)
            head.set_policy(wanted.depth, siblings, rates, wanted.min_prob, costs)
        before = time.thread_time() - began + drafting.seconds
        before -= deferred.seconds if deferred else 0.0  # a part of drafting
        results = self._run(requests, rounds, head)
        count = len(results[0].rounds)
        if not count:
            return []
        after = time.thread_time()
        events = self._replay(requests, results, before)
        self._replay_seconds = (time.thread_time() - after) / count
        return events

    def _watched(
        self, request: Request, text: GrowingText, room: int, num_requests: int
    ) -> list[Grams]:
        """Return the sequences behind which a copy would pay in a pass of so many requests, those
        of the request's own text first; [] if nothing is copied."""
        proposer = self._proposer(request)
        if proposer is None or self.drafting.is_paused(request):
            return []
        length = 0
        texts: list[SuffixAutomaton] = []
        for part in proposer.parts:
            sources = part.copy_sources(request.slot)
            if sources and sources.min_match and not self.drafting.is_resting(request, part):
                shortest = sources.min_match
                least = self.drafting.least_match(request, part, shortest, num_requests)
                length = min(length or least, least)
                texts += sources.texts
        if not length:
            return []
        return [text.grams(length, room), *(self._grams(other, length) for other in texts)]

    def _grams(self, known: SuffixAutomaton, length: int) -> Grams:
        """Return the sequences in a text that other requests add to."""
        sets = self._grams_of.setdefault(known, {})
        if length not in sets:
            sets[length] = Grams(length)
        grams = sets[length]
        grams.update(known.text, len(known.text))
        return grams

    def _run(
        self, requests: Sequence[Request], rounds: int, head: HeadRounds | None
    ) -> list[RoundsResult]:
        decoder, cache = self.target.decoder, self.target.cache
        assert isinstance(decoder, NativeDecoder)
        most_nodes = MAX_NODES if head else 0
        room = rounds * (most_nodes + 1)
        texts = []
        for request in requests:
            text = self.drafting.state(request).text
            text.update(request.tokens, room)
            texts.append(
                TextRounds(
                    slot=request.slot,
                    text=text,
                    grams=self._watched(request, text, room, len(requests)),
                    has_states=bool(self.drafting.hidden_layers(request)),
                    seed=request.seed,
                    sampling=request.state.sampling,
                    end_ids=sorted(request.end_ids),
                    limit=request.prompt_length + request.limit,
                )
            )
        return run_rounds(
            decoder,
            cache,
            texts,
            head=head,
            aux_hidden_layers=self._layers(requests),
            most=rounds,
            most_nodes=most_nodes,
            seconds=self.seconds,
        )

    def _layers(self, requests: Sequence[Request]) -> tuple[int, ...]:
        """Return the layers whose hidden states the proposers of requests want."""
        wanted = {self.drafting.hidden_layers(request) for request in requests} - {()}
        return (
            wanted.pop() if len(wanted) == 1 else tuple(sorted({i for own in wanted for i in own}))
        )

    def _replay(
        self, requests: Sequence[Request], results: Sequence[RoundsResult], before: float
    ) -> list[Event]:
        """Append tokens, and let everything learn from each round; `before` is the time that the
        step took before the call."""
        drafting, deferred = self.drafting, self.drafting.deferred
        source = deferred.proposer.name if deferred else ""
        events = [Event(request.id, [], [], []) for request in requests]
        starts = [len(request.tokens) - 1 for request in requests]
        layers, count = self._layers(requests), len(results[0].rounds)
        in_python = before / count + self._replay_seconds
        drafted = deferred.seconds / count if deferred else 0.0
        for number in range(count):
            rounds, own_events, appended = [], [], []
            for request, result, event in zip(requests, results, events, strict=True):
                if request.error or request.finish_reason:
                    continue  # ended by a check that only Python makes, such as a stop string
                found = result.rounds[number]
                draft = _draft_of(found, request.tokens[-1], source)
                path = [0, *found.path[: found.accepted]]
                verdict = Verdict(found.drawn[: found.accepted + 1], path)
                rounds.append(RequestRound(request, draft, draft.first(found.verified), verdict))
                own_events.append(event)
                appended.append(found.appended)
            if not rounds:
                break
            drafting.begin_round([item.request for item in rounds], is_first=number == 0)
            drafting.record_deferred_drafts(rounds, found.draft_seconds + drafted)
            passed = found.verify_seconds + in_python
            for item in rounds:
                item.request.stats.count(item.verified, item.verdict, found.draft_seconds, passed)
            self._append(rounds, own_events)
            seconds = RoundSeconds(found.draft_seconds, passed, found.wall_seconds + in_python)
            drafting.record_round(rounds, appended, seconds)
        for request, result, start in zip(requests, results, starts, strict=True):
            self._show_states(request, layers, result, start)
        return events

    def _show_states(
        self, request: Request, layers: Sequence[int], result: RoundsResult, start: int
    ) -> None:
        """Give the hidden states of the committed tokens to the request's proposer."""
        deferred = self.drafting.deferred
        if request.finish_reason or request.error:
            return  # its slot is about to be closed
        if deferred:
            assert isinstance(deferred.proposer, HiddenStateProposer)
            read = len(result.states[0]) - result.unread
            states = [rows[read:].copy() for rows in result.states]
            deferred.proposer.end_rounds(request.slot, request.tokens, read, states)
        elif result.states:
            seen = dict(zip(layers, result.states, strict=True))
            with isolate_errors(request):
                self.drafting.proposers[request.draft].observe(request.slot, start, seen)


def is_simple(proposer: Proposer, slot: int) -> bool:
    """Return True if a proposer needs only the text and what the target computed."""
    parts = proposer.parts
    return not (
        proposer.merges_drafts
        or proposer.rivals
        or any(part.overlaps or part.copy_sources(slot) is None for part in parts)
        or sum(bool(part.aux_hidden_layers) for part in parts) > 1
    )


def _draft_of(found: CRound, root: int, source: str) -> Draft:
    """Return what a round drafted."""
    n = found.nodes
    draft = tree_of(root, found.tokens[:n], found.parents[:n], found.bins[:n], source)
    draft.path_probs = found.path_probs[:n]
    return draft


def tree_of(
    root: int, tokens: list[int], parents: list[int], bins: list[int], source: str
) -> Draft:
    """Return the tree of deterministic nodes behind a root; `bins` of their probabilities."""
    return Draft(
        [root, *tokens],
        [-1, *parents],
        ["", *[source] * len(tokens)],
        [Proposal.DETERMINISTIC] * (len(tokens) + 1),
        confidence_bins=bins,
    )
