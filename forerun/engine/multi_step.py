"""Multi-step decoding: several rounds of one request in one native call (see `runtime.rounds`).

`MultiStep` decides when that is possible: the request has the engine to itself, runs on the native
kernels with the `match` rule, and needs nothing between two rounds that only Python can do. What
the depth policy chose for the step holds for all its rounds. Afterwards everything learns from each
of them as from a step of its own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from forerun.draft.proposer import KnownText, Proposer
from forerun.engine.draft_learning import RoundSeconds
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
    """Runs the rounds of a request that is alone in the engine.

    Attributes:
        seconds: how long the rounds of a call may take; 0 runs none.
    """

    def __init__(self, target: Runner, drafting: Drafting, seconds: float = 0.0) -> None:
        self.target, self.drafting, self.seconds = target, drafting, seconds
        self._rounds = 0  # most of this step
        self._replay_seconds = 0.0  # that learning from a round took, in the last call
        # by length; they go with the texts
        self._grams_of: WeakKeyDictionary[KnownText, dict[int, Grams]] = WeakKeyDictionary()

    def room(self, batch: Sequence[ScheduledRequest]) -> int:
        """Return how many tokens the rounds of this step may append, and reserve their rows of the
        cache; 0 where the step is an ordinary one. `batch` is that of the only request, empty while
        it waits."""
        if not self.seconds or len(batch) != 1 or not self._is_possible(batch[0]):
            return 0
        pass_seconds = self.drafting.policy.forward_seconds(1)
        self._rounds = min(int(self.seconds / pass_seconds) + 1, MAX_ROUNDS)
        if self._rounds < 2:
            return 0
        request = batch[0].request
        room = min(self._rounds * TOKENS_A_ROUND, request.remaining + 1)
        rows = len(request.tokens) + room + MAX_NODES
        return room if self.target.cache.pages.grow(request.slot, rows) else 0

    def _is_possible(self, scheduled: ScheduledRequest) -> bool:
        request, decoder, cache = scheduled.request, self.target.decoder, self.target.cache
        params, state = request.params, request.state
        proposer = self._proposer(request)
        return (
            isinstance(decoder, NativeDecoder)
            and decoder.config.experts is None
            and decoder.shortlist is None
            and cache.recurrent is None
            and cache.moves is None
            and self.drafting.clock is time.thread_time
            and scheduled.generates
            and scheduled.count == 1
            and request.produced > 0
            and request.remaining > 1
            and request.rule.name == "match"
            and not request.has_fixed_depth
            and not request.trace
            and not state.special
            and params.logprobs is None
            and (proposer is None or _is_simple(proposer, request.slot))
        )

    def run(self, scheduled: ScheduledRequest) -> Event | None:
        """Run rounds of a request after `Drafting.draft`; None, with nothing done, if there are
        none. `room` has reserved what they need."""
        deferred, drafting = self.drafting.deferred, self.drafting
        request, draft = scheduled.request, scheduled.draft
        if draft is None or len(draft) > 1:  # a copy
            return None
        began = time.thread_time()
        rounds = self._rounds if deferred else min(drafting.plain_rounds(request), self._rounds)
        if rounds < 2 and not deferred:
            return None
        head = None
        if deferred:
            head, asked = deferred.head, deferred.request
            assert asked.confidence_rates is not None
            siblings = deferred.proposer.extra_nodes if asked.branching else 0
            costs = drafting.policy.pass_costs(asked.depth + siblings, deferred.batch)
            head.set_policy(asked.depth, siblings, asked.confidence_rates, asked.min_prob, costs)
        before = time.thread_time() - began + drafting.seconds
        before -= deferred.seconds if deferred else 0.0  # a part of drafting
        result = self._run(request, rounds, head)
        if not result.rounds:
            return None
        after = time.thread_time()
        event = self._replay(request, result, before)
        self._replay_seconds = (time.thread_time() - after) / len(result.rounds)
        return event

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

    def _proposer(self, request: Request) -> Proposer | None:
        """Return the proposer that keeps something of a request, if there is one."""
        drafting = self.drafting
        return drafting.proposers[request.draft] if drafting.has_state(request) else None

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
        for number, each in enumerate(result.rounds):
            draft = _draft_of(each, request.tokens[-1], source)
            verified = draft.first(each.verified)
            path = [0, *each.path[: each.accepted]]
            verdict = Verdict(each.drawn[: each.accepted + 1], path)
            drafting.begin_round(request, is_first=number == 0)
            if deferred:
                drafted = each.draft_seconds + deferred.seconds / count
                drafting.record_native_draft(request, deferred, draft, verified, drafted)
            passed = each.verify_seconds + in_python
            seconds = RoundSeconds(each.draft_seconds, passed, each.wall_seconds + in_python)
            request.stats.count(verified, verdict, each.draft_seconds, passed)
            drafting.record_verdict(request, verified, verdict)
            with isolate_errors(request):
                for token, node in zip(verdict.tokens, [*path[1:], 0], strict=True):
                    if request.finish_reason:
                        break
                    event.pieces.append(request.append(token))
                    event.token_ids.append(token)
                    event.sources.append(verified.sources[node])
            drafting.record_round(request, verified, each.appended, seconds)
            if request.error or request.finish_reason:
                break
        event.finish_reason = request.finish_reason
        self._show_states(request, result, start)
        return event

    def _show_states(self, request: Request, result: RoundsResult, start: int) -> None:
        """Give the hidden states of the committed tokens to the request's proposer."""
        deferred = self.drafting.deferred
        layers = self.drafting.hidden_layers(request)
        if request.finish_reason or request.error:
            return  # its slot is about to be closed
        if deferred:
            read = len(result.states[0]) - result.unread
            states = [rows[read:].copy() for rows in result.states]
            deferred.proposer.end_rounds(request.slot, request.tokens, read, states)
        elif layers:
            seen = dict(zip(layers, result.states, strict=True))
            with isolate_errors(request):
                self.drafting.proposers[request.draft].observe(request.slot, start, seen)


def _is_simple(proposer: Proposer, slot: int) -> bool:
    """Return True if a proposer needs nothing between two rounds but the text and hidden states."""
    parts = proposer.parts
    return not (
        proposer.merges_drafts
        or proposer.rivals
        or proposer.wants_logits
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
