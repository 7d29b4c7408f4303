"""Learning of drafting: from verdicts, and from the time that drafts and passes took, also those of
several rounds at once. `Drafting` builds on it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from torch import Tensor

from forerun.draft.proposer import DraftRequest, Proposer
from forerun.engine.acceptance import MAX_MATCH_BITS, NEVER, DraftOption, kind_of_match
from forerun.engine.depth import DEEPEST, BatchState, DepthPolicy, expected_steps
from forerun.engine.draft_state import DeferredDraft, DraftingState, ProposedDraft
from forerun.engine.error_isolation import isolate_errors
from forerun.engine.guard import Guard, GuardSample
from forerun.engine.observe import take_rows
from forerun.engine.overlap import Overlap
from forerun.engine.request import Request, ScheduledRequest
from forerun.engine.stats import DRAFTED, EDGE, NOTHING, UNPAID
from forerun.runtime.torch_runner import Runner
from forerun.types import Draft, States, Verdict

WARM_UP = 32  # steps before a pause ends in which the drafter state is restored
LEAST_MATCH_STEPS = 32  # for which the shortest match that pays is believed; costs change slowly


class RoundSeconds(NamedTuple):
    """Seconds of one of several rounds: two by the policy's clock, all by wall-clock time."""

    drafting: float
    verifying: float
    wall: float


class RequestRound(NamedTuple):
    """A request's part of one of several rounds: its draft, what was verified, the verdict."""

    request: Request
    draft: Draft
    verified: Draft
    verdict: Verdict


class DraftLearning:
    """The drafting state of requests, the depth policy and the guard, and what they learn from."""

    def __init__(
        self,
        target: Runner,
        proposers: Mapping[str, Proposer],
        policy: DepthPolicy,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        """`clock` gives the seconds (or other unit) by which costs are learned, `wall_clock` those
        by which the guard judges whole steps."""
        self.target, self.proposers = target, proposers
        self.clock, self.wall_clock = clock, wall_clock
        self.states: WeakKeyDictionary[Request, DraftingState] = WeakKeyDictionary()
        self.steps = 0
        self.seconds = 0.0  # time of drafting in this step
        self.deferred: DeferredDraft | None = None  # in this step
        self._room = 0
        self._step_began = self._drafted_at = 0.0
        # In this step; 0 unless it has a pass and drafts of its own.
        self._measured = self._drafting_seconds = 0.0
        self._last_step: tuple[float, list[int]] = 0.0, []  # its beginning and its requests
        self.set_policy(policy)

    def set_policy(self, policy: DepthPolicy) -> None:
        """Let `policy` choose depths from now on, with a new guard."""
        self.policy = policy
        decoder = self.target.decoder
        experts = decoder.config.experts
        policy.set_experts(experts, decoder.pass_bytes if experts else None)
        policy.costs.prompts_predict = experts is None and self.clock is time.thread_time
        parts = [part for proposer in self.proposers.values() for part in proposer.parts]
        policy.costs.reading_shares = {
            part.name: part.reading_bytes / decoder.weight_bytes
            for part in parts
            if part.reading_bytes
        }
        self.guard = Guard(policy.forward_seconds)
        self._least_matches: dict[tuple[str, int], tuple[int, int]] = {}  # of new requests
        self.overlap = Overlap(policy, waiting_is_free=self.clock is time.thread_time)

    def state(self, request: Request) -> DraftingState:
        """Return the drafting state of a request; it is kept as long as the request exists."""
        state = self.states.get(request)
        if state is None:
            state = self.states[request] = DraftingState()
        return state

    def has_state(self, request: Request) -> bool:
        """Return True if a proposer holds state of the request."""
        return request.speculates and not self.state(request).released

    def is_paused(self, request: Request) -> bool:
        """Return True if a guard keeps the request from drafting."""
        return not (self.guard.allows() and self.state(request).guard.allows())

    def acceptance_of(self, request: Request, draft: Draft) -> float:
        """Return the acceptance rate expected of the proposer whose draft was verified."""
        state = self.state(request)
        names = [proposed.source for proposed in state.proposed] or [request.draft]
        source = draft.sources[min(1, len(draft) - 1)]
        name = source if source in names else names[-1]
        return self.policy.acceptance_rate(name, state.acceptance[name])

    def _option(
        self, request: Request, proposer: Proposer, limit: int | None = None
    ) -> DraftOption:
        """Return the draft option of a request with a proposer."""
        return DraftOption(
            source=proposer.name,
            limit=request.remaining if limit is None else limit,
            acceptance=self.state(request).acceptance[proposer.name],
            width=proposer.width,
            lag=self._lag(request, proposer.name),
            copies=proposer.copies_text,
            horizon=expected_steps(request.produced, request.remaining),
        )

    def _lag(self, request: Request, name: str) -> int:
        """Return how many committed tokens a proposer has missed.

        The tokens of the last step are not counted: reading them is a part of drafting.
        """
        last_asked = self.state(request).last_asked
        if name not in last_asked:
            return len(request.tokens)
        num_tokens, step = last_asked[name]
        return 0 if step >= self.steps - 1 else len(request.tokens) - num_tokens

    def _is_slower(
        self, request: Request, speed: float, others: Sequence[Proposer], batch: BatchState
    ) -> bool:
        """Return True if one of other proposers that are not paused is expected to beat a speed."""
        acceptance = self.state(request).acceptance
        return any(
            self.policy.expected_speed(self._option(request, part), batch) > speed
            for part in others
            if acceptance[part.name].paused_until is None
        )

    # Verification by the target

    def hidden_layers(self, request: Request) -> tuple[int, ...]:
        """Return the hidden-state layers that the request's proposer wants."""
        return self.proposers[request.draft].aux_hidden_layers if self.has_state(request) else ()

    def observe(
        self,
        scheduled: ScheduledRequest,
        start: int,
        states: Mapping[int, States],
        path: Sequence[int],
    ) -> None:
        """Show the hidden states of just committed tokens to the request's proposer.

        states: {layer: [T, H]} of the forward pass; `start` is the position of the first committed
        token, `path` the rows of its segment that were committed.
        """
        request = scheduled.request
        wanted = self.hidden_layers(request)
        if not wanted:
            return
        seen = {layer: take_rows(states[layer], scheduled.first_row, path) for layer in wanted}
        with isolate_errors(request):
            self.proposers[request.draft].observe(request.slot, start, seen)

    def observe_logits(self, request: Request, draft: Draft, logits: Callable[[], Tensor]) -> None:
        """Show the target's logits [N, V] of a draft's nodes to a proposer that wants them.

        `logits` is called only then, since taking rows is an operation of torch.
        """
        if not self.has_state(request) or not self.proposers[request.draft].wants_logits:
            return
        self.proposers[request.draft].learn(request.slot, request.tokens, draft, logits())

    def record_verdict(self, request: Request, verified: Draft, verdict: Verdict) -> None:
        """Learn acceptance rates from everything that was drafted, verified or not.

        Copies count for their kind of match as far as the target has confirmed or refuted them, and
        for their proposer as far as they were verified.
        """
        state = self.state(request)
        for proposed in state.proposed:
            draft = proposed.draft
            path = draft.match_tokens(verdict.tokens)
            accepted = len(path) - 1
            is_open = len(path) > len(verdict.tokens)
            reach = accepted if is_open else max(draft.depths())
            reached = {proposed.kind or proposed.source: reach}
            if proposed.kind:
                state.has_copied = True
                state.least_matches.clear()
                verified_depth = len(verified.match_tokens(draft.tokens[1:])) - 1
                reached[proposed.source] = min(verified_depth, reach)
            for source, depth in reached.items():
                self.policy.record_verdict(
                    source, state.acceptance[source], depth, min(accepted, depth)
                )
            if draft.confidence_bins:
                bins = self.policy.bins(proposed.source, request.params.greedy)
                bins.add(draft, path, is_open)

    def record_step(
        self,
        batch: Sequence[ScheduledRequest],
        emitted: Mapping[int, int],
        experts: np.ndarray | None = None,
    ) -> None:
        """Learn costs from a step; `emitted` tokens by request id, `experts` as in `Forward`."""
        num_tokens = sum(len(s.segment.tokens) for s in batch if s.segment)
        decodes = all(s.generates and s.count == 1 for s in batch)
        if experts is not None:
            read = [token for s in batch if s.segment for token in s.segment.tokens]
            num_tokens = self.policy.effective_size(read, experts, decodes)
        seconds = self.clock() - self._drafted_at
        self.overlap.record_forward(num_tokens, seconds, decodes)
        self._measured += seconds
        is_cold = self.policy.costs.is_cold(num_tokens)
        if not decodes or is_cold or any(s.request.has_fixed_depth for s in batch):
            return
        samples = []
        for scheduled in batch:
            state, nodes = self.state(scheduled.request), len(scheduled.draft or ()) - 1
            tokens = emitted.get(scheduled.request.id, 0)
            samples.append(GuardSample(state.guard, nodes, tokens, state.has_proposed))
        self.guard.record(samples, self.wall_clock() - self._step_began, self.seconds)

    def _record_draft(
        self,
        proposer: Proposer,
        draft_requests: Sequence[DraftRequest],
        proposed: Sequence[Draft | None],
        requests: Sequence[Request],
        seconds: float,
    ) -> None:
        """Record the time that drafting took."""
        depth = max(draft_request.depth for draft_request in draft_requests)
        if proposer.ends_chains:
            depth = max(1, *(max(draft.depths()) for draft in proposed if draft is not None))
        lag = sum(self._lag(request, proposer.name) for request in requests)
        self.overlap.record_draft(proposer, depth, seconds, len(draft_requests), lag)
        self._drafting_seconds += seconds
        for request in requests:
            self.state(request).last_asked[proposer.name] = len(request.tokens), self.steps

    def _record_step_overhead(self, batch: Sequence[ScheduledRequest], now: float) -> None:
        """Record what the last step took beside its pass and drafting; call it when one begins."""
        began, requests = self._last_step
        decodes = all(s.generates and s.count == 1 for s in batch)
        self._last_step = now, [s.request.id for s in batch] if decodes else []
        if self._measured and requests and self._last_step[1] == requests:
            overhead = now - began - self._measured - self._drafting_seconds
            self.policy.costs.add_step_overhead(overhead, len(requests))
        self._measured = self._drafting_seconds = 0.0

    def _record_nothing(self, request: Request, name: str) -> None:
        """Record that a proposer has nothing to draft."""
        state = self.state(request)
        self.policy.record_verdict(name, state.acceptance[name], 0, 0)
        state.last_asked[name] = len(request.tokens), self.steps

    # Several rounds at once

    def is_resting(self, request: Request, part: Proposer) -> bool:
        """Return True if the policy does not ask a part of the request's proposer in this step."""
        return self.policy.is_paused(self.state(request).acceptance[part.name])

    def plain_rounds(self, request: Request) -> int:
        """Return for how many steps, this one included, a request certainly drafts nothing unless
        there is something to copy."""
        if not request.speculates:
            return NEVER
        state = self.state(request)
        if request.has_fixed_depth:
            only_copies = all(part.copies_text for part in self.proposers[request.draft].parts)
            return NEVER if only_copies else 1
        paused = max(self.guard.paused_steps, state.guard.paused_steps)
        if paused:
            return paused - WARM_UP if paused > WARM_UP else paused
        rounds = NEVER
        for part in self.proposers[request.draft].parts:
            if part.copies_text:
                continue
            acceptance = state.acceptance[part.name]
            if not self.policy.is_paused(acceptance):
                return 1
            assert acceptance.paused_until is not None
            rounds = min(rounds, acceptance.paused_until - self.policy.steps)
        return rounds

    def least_match(
        self, request: Request, proposer: Proposer, shortest: int, num_requests: int
    ) -> int:
        """Return the fewest tokens of a match, at least `shortest`, behind which a copy is expected
        to pay if only this one of so many requests drafts.

        It is computed anew after a copy of the request, and now and then; once for all requests of
        which nothing is known yet.
        """
        state, key = self.state(request), (proposer.name, num_requests)
        known = state.least_matches
        if not state.has_copied and self._only_copies(request):
            known = self._least_matches
        found, until = known.get(key, (0, 0))
        if self.steps >= until:
            found = self._least_match(request, proposer, shortest, num_requests)
            known[key] = found, self.steps + LEAST_MATCH_STEPS
        return found

    def _only_copies(self, request: Request) -> bool:
        """Return True if all parts of the request's proposer but those that copy pause."""
        acceptance = self.state(request).acceptance
        return all(
            part.copies_text or acceptance[part.name].paused_until is not None
            for part in self.proposers[request.draft].parts
        )

    def _least_match(
        self, request: Request, proposer: Proposer, shortest: int, num_requests: int
    ) -> int:
        """Compute `least_match`."""
        state = self.state(request)
        batch = BatchState(num_requests, num_requests, 1, has_plain_rounds=num_requests > 1)
        parts = self.proposers[request.draft].parts
        others = [part for part in parts if not part.copies_text]
        for bits in range(shortest.bit_length(), MAX_MATCH_BITS + 1):
            kind = kind_of_match(proposer.name, 1 << bits - 1)
            longest = min((1 << bits) - 1, DEEPEST)
            count, speed = self.policy.cut_copy(kind, state.acceptance[kind], longest, batch)
            if count and not self._is_slower(request, speed, others, batch):
                return max(1 << bits - 1, shortest)
        return 1 << MAX_MATCH_BITS

    def begin_round(self, requests: Sequence[Request], is_first: bool) -> None:
        """Start to learn from one of several rounds at once; `draft` began the first."""
        if is_first:
            return
        self.steps += 1
        for request in requests:
            state = self.state(request)
            state.proposed = []
            state.allowed_depth = 0
            if not request.speculates:
                continue
            if self.deferred is None or self.deferred.of(request) is None:
                request.stats.reasons[state.reason] += 1
            if self.is_paused(request):
                continue
            for part in self.proposers[request.draft].parts:
                if part.copies_text and not self.policy.is_paused(state.acceptance[part.name]):
                    self._record_nothing(request, part.name)

    def record_deferred_drafts(self, rounds: Sequence[RequestRound], seconds: float | None) -> None:
        """Record the drafts that one of several rounds at once made in `seconds` (None: in a time
        that means nothing), and count them; a root where no token of a draft could have been
        used."""
        deferred = self.deferred
        if deferred is None:
            return
        drafted: list[tuple[RequestRound, DraftRequest]] = []
        for item in rounds:
            draft_request = deferred.of(item.request)
            if draft_request is None:
                continue
            reasons, state = item.request.stats.reasons, self.state(item.request)
            if not item.request.remaining:
                reasons[EDGE] += 1
                continue
            state.allowed_depth = draft_request.depth
            drafted.append((item, draft_request))
            if len(item.draft) == 1:
                reasons[NOTHING] += 1
                self._record_nothing(item.request, deferred.proposer.name)
                continue
            state.proposed.append(ProposedDraft(deferred.proposer.name, "", item.draft))
            reasons[DRAFTED if len(item.verified) > 1 else UNPAID] += 1
        if drafted and seconds is not None:
            requests = [item.request for item, _ in drafted]
            drafts = [item.draft for item, _ in drafted]
            draft_requests = [draft_request for _, draft_request in drafted]
            self._record_draft(deferred.proposer, draft_requests, drafts, requests, seconds)

    def record_round(
        self, rounds: Sequence[RequestRound], emitted: Sequence[int], seconds: RoundSeconds
    ) -> None:
        """Learn costs from one of several rounds, which gave each request `emitted` tokens."""
        num_tokens = sum(len(item.verified) for item in rounds)
        self.overlap.record_forward(num_tokens, seconds.verifying, decodes=True)
        is_cold = self.policy.costs.is_cold(num_tokens)
        if is_cold or any(item.request.has_fixed_depth for item in rounds):
            return
        samples = []
        for item, tokens in zip(rounds, emitted, strict=True):
            state, nodes = self.state(item.request), len(item.verified) - 1
            samples.append(GuardSample(state.guard, nodes, tokens, state.has_proposed))
        self.guard.record(samples, seconds.wall, seconds.drafting)
