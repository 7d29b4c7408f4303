"""Drafting: chooses proposers and depths for each request, and records the outcomes.

`Drafting` owns everything that speculation keeps per request (`DraftingState`), the depth policy
and the guard. The engine tells it what happens to requests and asks it for one draft per generating
request; the draft of a request that does not speculate is a root without children.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

from forerun.draft.compose import Offer
from forerun.draft.device_recycle import DeviceRecycle
from forerun.draft.draft_model import DraftModel
from forerun.draft.hidden_states import HiddenStateProposer
from forerun.draft.proposer import DraftRequest, Proposer, drafts_of
from forerun.engine.acceptance import kind_of_match
from forerun.engine.depth import (
    DEEPEST,
    PROBE_DEPTH,
    BatchState,
    max_reach,
    may_stop,
)
from forerun.engine.draft_learning import WARM_UP, DraftLearning
from forerun.engine.draft_state import DeferredDraft, DraftPlan, ProposedDraft
from forerun.engine.error_isolation import isolate_errors, run_isolated
from forerun.engine.overlap import Overlap
from forerun.engine.request import Request, ScheduledRequest
from forerun.engine.stats import DRAFTED, EDGE, NO_ROOM, NOTHING, PAUSED, UNPAID
from forerun.sampling.matcher import SOURCE, Matcher, NotReadyError
from forerun.types import Draft
from forerun.verify import Noise

CAN_DEFER = (HiddenStateProposer, DraftModel, DeviceRecycle)
LONG_PAUSE = 64  # steps: the drafter state of requests that pause longer is released
NEVER_ASKED = -2  # the step of a proposer that has not drafted for a request


class Drafting(DraftLearning):
    """Asks proposers for drafts as deep as the policy says and the target's cache has room for."""

    # Requests that get or lose a slot

    def admit(self, request: Request) -> None:
        """Open the request's proposer: it was given a slot, at first or after a preemption."""
        if request.draft in self.proposers:
            with isolate_errors(request):
                self._open(request)

    def release(self, request: Request, finished: bool) -> None:
        """Close the request's proposer before it loses its slot.

        `finished`: the request has ended and its text may be remembered; whatever fails here, the
        slot can be given back.
        """
        if request.draft not in self.proposers:
            return
        state = self.state(request)
        with isolate_errors(request):
            if state.released and finished:
                self._open(request)  # a proposer may remember the text for later requests
        if not state.released:
            with isolate_errors(request):
                tokens = request.tokens if finished else None
                self.proposers[request.draft].close(request.slot, tokens)

    def _open(self, request: Request) -> None:
        """Let the request's proposer start with its tokens so far."""
        proposer, state = self.proposers[request.draft], self.state(request)
        proposer.open(request.slot, request.tokens, request.references, request.tenant)
        state.released = False
        state.last_asked = {}
        for part in proposer.parts:
            cache = part.kv()
            if part.aux_hidden_layers and request.produced:
                state.last_asked[part.name] = len(request.tokens), -1
            elif cache is not None and not part.aux_hidden_layers:
                # A prefix that an earlier request shares need not be read again.
                state.last_asked[part.name] = cache.length[request.slot], NEVER_ASKED

    def _release_or_restore(self, request: Request) -> None:
        """Release the drafter state of a request that pauses for long; restore it before the end.

        Keeping it costs time and memory.
        """
        state, proposer = self.state(request), self.proposers[request.draft]
        paused = max(self.guard.paused_steps, state.guard.paused_steps)
        if paused > LONG_PAUSE and not state.released:
            if not any(part.always_observes for part in proposer.parts):
                proposer.close(request.slot)
                state.released = True
        elif paused <= WARM_UP and state.released:
            self._open(request)

    # Drafting

    def draft(
        self,
        batch: Sequence[ScheduledRequest],
        room: int = 0,
        has_plain_rounds: bool = False,
    ) -> None:
        """Set the draft of each generating request.

        A draft is a root where drafting does not pay, there is no room, or a proposer failed (which
        is the request's error). It stays None for requests that must wait for their grammar. With
        `room` for so many tokens of each request, a drafter that can draft in several rounds at
        once prepares those (`deferred`) instead. `has_plain_rounds` as in `BatchState`.
        """
        self._step_began, began = self.wall_clock(), self.clock()
        self._record_step_overhead(batch, began)
        self.deferred, self._room = None, room
        generating = [scheduled for scheduled in batch if scheduled.generates]
        num_tokens = sum(scheduled.count for scheduled in batch)
        prompts = sum(s.count - s.generates for s in batch if s.count > 1)
        certain = BatchState(
            num_tokens, len(generating), len(generating), prompts, has_plain_rounds
        )
        allowed = self.guard.allows()
        self.overlap = Overlap(self.policy, waiting_is_free=self.clock is time.thread_time)
        for scheduled in generating:
            scheduled.draft = Draft.root(scheduled.request.tokens[-1])
            self._draft_by_grammar(scheduled)
        reasons = {s.request.id: self._reason_not_to_ask(s, allowed) for s in generating}
        plans = [self._plan(s, certain) for s in generating if not reasons[s.request.id]]
        num_tokens += sum(len(s.draft) - 1 for s in generating if s.draft)
        full_batch = _with_drafts(certain, num_tokens, len(plans))
        self._ask_all(plans, certain, num_tokens)
        self._probe_rivals(plans, certain)
        for plan in plans:
            if plan.draft and not plan.request.error:
                with isolate_errors(plan.request), self._skip_if_not_ready(plan.scheduled):
                    plan.scheduled.draft = self._cut(plan, plan.draft, full_batch)
        self._count_reasons(generating, reasons | {p.request.id: p.reason for p in plans})
        self.steps += 1
        self._drafted_at = self.clock()
        self.seconds = self._drafted_at - began

    def _draft_by_grammar(self, scheduled: ScheduledRequest) -> None:
        """Start a request's step: draft what its grammar dictates, tend its drafter state."""
        request, state = scheduled.request, self.state(scheduled.request)
        state.allowed_depth = 0
        state.proposed = []
        if request.state.grammar:
            with isolate_errors(request), self._skip_if_not_ready(scheduled):
                scheduled.draft = self._forced(scheduled, request.state.grammar)
        if request.speculates and not request.has_fixed_depth:
            with isolate_errors(request):
                self._release_or_restore(request)

    def _forced(self, scheduled: ScheduledRequest, grammar: Matcher) -> Draft:
        """Return the tokens that the grammar leaves no choice about, a root if there are none.

        They cost nothing to draft and are always accepted, so neither the proposer nor the depth
        policy is asked.
        """
        request = scheduled.request
        deepest = DEEPEST if request.depth == "auto" else int(request.depth)
        usable = request.remaining if request.speculates and scheduled.count == 1 else 0
        limit = min(deepest, usable)
        tokens = grammar.forced(limit) if limit else []
        if tokens and not self._grow(request, len(tokens)):
            tokens = []
        # Pruning also prepares the masks of the nodes.
        return grammar.prune(Draft.chain(request.tokens[-1], tokens, SOURCE))

    @contextmanager
    def _skip_if_not_ready(self, scheduled: ScheduledRequest) -> Iterator[None]:
        """Leave a request out of the step if its grammar needs longer than others should wait."""
        try:
            yield
        except NotReadyError:
            scheduled.draft = None

    def _reason_not_to_ask(self, scheduled: ScheduledRequest, allowed: bool) -> str:
        """Return why no proposer is asked for this request, "" if one is; `allowed` is the engine
        guard's decision.

        Where every proposer that might draft is paused, or has nothing to copy, this is known
        without asking one after the other, which would cost time with many requests.
        """
        request = scheduled.request
        if request.error or scheduled.draft is None or len(scheduled.draft) > 1:
            return NOTHING
        if not request.speculates or request.has_fixed_depth:
            return "" if request.has_fixed_depth else NOTHING
        state, proposer = self.state(request), self.proposers[request.draft]
        if not (allowed and state.guard.allows()):
            return PAUSED
        if proposer.rivals:
            return ""
        parts = [p for p in proposer.parts if not self.policy.is_paused(state.acceptance[p.name])]
        if not parts:
            return UNPAID
        can_use = scheduled.count == 1 and request.remaining > 0
        if not can_use or not all(part.copies_text for part in parts):
            return ""
        return "" if self._may_have_draft(request, parts) else NOTHING

    def _may_have_draft(self, request: Request, proposers: Sequence[Proposer]) -> bool:
        """Return False, and note it, if all of the proposers know that they have no draft."""
        with isolate_errors(request):
            if any(part.has_draft(request.slot, request.tokens) for part in proposers):
                return True
            for part in proposers:
                self._record_nothing(request, part.name)
        return False

    def _plan(self, scheduled: ScheduledRequest, batch: BatchState) -> DraftPlan:
        request = scheduled.request
        ranking = functools.partial(self._ranked, request, batch)
        return DraftPlan(scheduled, self.state(request), self.proposers[request.draft], ranking)

    def _ask_all(self, plans: Sequence[DraftPlan], certain: BatchState, num_tokens: int) -> None:
        """Ask proposers, round by round, until every plan has its draft."""
        asking = plans
        while asking := [plan for plan in asking if self._continues(plan, certain)]:
            drafted = sum(len(plan.draft) - 1 for plan in plans if plan.draft)
            batch = _with_drafts(certain, num_tokens + drafted, len(asking))
            self._ask(asking, batch)

    def _continues(self, plan: DraftPlan, batch: BatchState) -> bool:
        """Return True if a proposer is to be asked: it may have a draft, and need not wait."""
        while plan.next_part and not plan.request.error:
            paused = self.policy.is_paused(plan.state.acceptance[plan.next_part.name]) or (
                batch.num_prompt_tokens
                and self.policy.should_wait(self._option(plan.request, plan.next_part), batch)
            )
            if plan.request.depth == "auto" and paused:
                plan.take_offer(None, UNPAID)
            elif not plan.limit or self._may_have_draft(plan.request, [plan.part]):
                return True
            else:
                plan.take_offer(None)
        return False

    def _ask(self, plans: Sequence[DraftPlan], batch: BatchState) -> None:
        """Let each proposer draft for all requests that want it."""
        began = self.clock()  # choosing depths is a part of the cost of drafting
        groups: dict[Proposer, list[DraftPlan]] = defaultdict(list)
        for plan, depth in zip(plans, self._depths(plans, batch), strict=True):
            plan.depth = self._depth_with_room(plan, depth)
            if plan.depth:
                plan.state.allowed_depth = max(plan.depth, plan.state.allowed_depth)
                groups[plan.part].append(plan)
            else:
                plan.take_offer(None, NO_ROOM if depth else UNPAID if plan.limit else EDGE)
        for proposer, asking in groups.items():
            requests = [plan.request for plan in asking]
            draft_requests = [
                self._draft_request(p.request, proposer, p.depth, batch) for p in asking
            ]
            if self._defers(proposer, draft_requests, batch, began):
                for plan in asking:
                    plan.take_offer(None)
                continue
            self.overlap.note_requests(proposer, [r.id for r in requests], draft_requests)
            proposed = self._propose(proposer, draft_requests, requests)
            now = self.clock()
            self._record_draft(proposer, draft_requests, proposed, requests, now - began)
            began = now
            for plan, draft in zip(asking, proposed, strict=True):
                with isolate_errors(plan.request):
                    self._take_draft(plan, draft, batch)

    def _defers(
        self,
        proposer: Proposer,
        draft_requests: Sequence[DraftRequest],
        batch: BatchState,
        began: float,
    ) -> bool:
        """Let a proposer prepare several rounds at once, if there is room and it can; one does."""
        if not self._room or self.deferred or not isinstance(proposer, CAN_DEFER):
            return False
        rounds = proposer.begin_rounds(draft_requests, self._room)
        if rounds is None:
            return False
        by_slot = {request.slot: request for request in draft_requests}
        self.deferred = DeferredDraft(proposer, by_slot, rounds, batch, self.clock() - began)
        return True

    def _take_draft(self, plan: DraftPlan, draft: Draft | None, batch: BatchState) -> None:
        """Accept the draft of a plan's proposer; None if the proposer failed."""
        name = plan.part.name
        if draft is not None and len(draft) > 1:
            plan.take_offer(self._offer(plan, draft, batch))
            return
        if draft is not None:
            self.policy.record_verdict(name, plan.state.acceptance[name], 0, 0)
        plan.take_offer(None)

    def _depths(self, plans: Sequence[DraftPlan], batch: BatchState) -> list[int]:
        """Return the depth of each plan: the requested one, or the policy's choice."""
        depths, options, free = [], [], []
        for i, plan in enumerate(plans):
            fixed = 0 if plan.request.depth == "auto" else min(int(plan.request.depth), plan.limit)
            depths.append(fixed)
            if plan.request.depth == "auto" and plan.limit:
                options.append(self._option(plan.request, plan.part, plan.limit))
                free.append(i)
        for i, depth in zip(free, self.policy.choose(options, batch), strict=True):
            depths[i] = depth
        return depths

    def _depth_with_room(self, plan: DraftPlan, depth: int) -> int:
        """Return how deep to draft at a chosen depth, given the room in the cache; 0 if none.

        Room is for the largest draft that there could be, since what is verified must not depend on
        what was drawn.
        """
        if not depth:
            return 0
        reach = max(depth, min(plan.limit, max_reach(plan.request, plan.part)))
        for possible in (reach, depth):
            if self._grow(plan.request, plan.proposer.most(possible)):
                return possible
        return 0

    def _grow(self, request: Request, num_nodes: int) -> bool:
        """Reserve rows of the cache for the request's tokens and `num_nodes` drafted ones."""
        return self.target.cache.pages.grow(request.slot, len(request.tokens) + num_nodes)

    def _propose(
        self, proposer: Proposer, asked: Sequence[DraftRequest], requests: Sequence[Request]
    ) -> Sequence[Draft | None]:
        """Return a proposer's drafts; None for requests for which that fails."""
        vocab = self.target.decoder.config.vocab

        def draft(chosen: Sequence[int]) -> Sequence[Draft]:
            return drafts_of(proposer, [asked[i] for i in chosen], vocab)

        return run_isolated(draft, range(len(asked)), requests)

    def _draft_request(
        self, request: Request, proposer: Proposer, depth: int, batch: BatchState
    ) -> DraftRequest:
        """Build the request for a proposer."""
        confidence, min_prob = None, 0.0
        if may_stop(request, proposer):
            confidence = self.policy.bins(proposer.name, request.params.greedy).rates
            if proposer.ends_chains:
                acceptance = self.state(request).acceptance[proposer.name]
                min_prob = self.policy.min_chain_prob(proposer.name, acceptance, batch)
        source = self.proposers[request.draft].parts.index(proposer)
        return DraftRequest(
            slot=request.slot,
            tokens=request.tokens,
            params=request.params,
            noise=Noise(request.seed, len(request.tokens) - 1, source),
            depth=depth,
            coupled=request.rule.coupled,
            branching=request.rule.branching,
            confidence_rates=confidence,
            min_prob=min_prob,
        )

    # Choosing among drafts

    def _offer(self, plan: DraftPlan, draft: Draft, batch: BatchState) -> Offer:
        """Return a draft together with as much of it as pays if no other request drafts.

        Nodes with probabilities and copies are cut to what pays. What becomes of copies depends on
        the text alone, so cutting them is exact under every rule.
        """
        request, proposer, taken = plan.request, plan.part, draft
        kind = kind_of_match(proposer.name, draft.match_length) if draft.match_length else ""
        plan.state.proposed.append(ProposedDraft(proposer.name, kind, draft))
        is_copy = bool(kind) and request.depth == "auto"
        speed = 0.0
        if draft.path_probs:
            taken = draft.first(self.policy.num_worth_verifying(draft.path_probs, batch, draft))
        elif kind:
            acceptance = plan.state.acceptance[kind]
            count, speed = self.policy.cut_copy(kind, acceptance, len(draft) - 1, batch, draft)
            if is_copy:
                taken = draft.first(0 if self._is_beaten(plan, speed, batch) else count)
        if plan.proposer.merges_drafts and request.rule.coupled and not draft.path_probs:
            draft.path_probs = self._path_probs(plan, draft, kind or proposer.name)
            taken.path_probs = draft.path_probs[: len(taken) - 1]
        return Offer(draft, taken, is_copy and len(taken) > 1, speed)

    def _is_beaten(self, plan: DraftPlan, speed: float, batch: BatchState) -> bool:
        """Return True if a proposer that is asked later is expected to beat a copy's speed.

        The copy is then only compared with the target's tokens. Other copies need not be guessed:
        looking at them is cheap.
        """
        others = [part for part in plan.remaining_parts if not part.copies_text]
        return self._is_slower(plan.request, speed, others, batch)

    def _path_probs(self, plan: DraftPlan, draft: Draft, known_as: str) -> list[float]:
        """Return each node's acceptance probability, estimated from earlier similar nodes."""
        rate = self.policy.acceptance_rate(known_as, plan.state.acceptance[known_as])
        rates = self.policy.bins(plan.part.name, plan.request.params.greedy).rates
        probs = [1.0]
        for node in range(1, len(draft)):
            own = rates[draft.confidence_bins[node - 1]] if draft.confidence_bins else rate
            probs.append(probs[draft.parents[node]] * min(own, 1.0))
        return probs[1:]

    def _cut(self, plan: DraftPlan, draft: Draft, batch: BatchState) -> Draft:
        """Return the part of a draft that is verified."""
        if plan.proposer.merges_drafts and draft.path_probs and plan.request.depth == "auto":
            draft = draft.first(self.policy.num_worth_verifying(draft.path_probs, batch, draft))
        grammar = plan.request.state.grammar
        return grammar.prune(draft) if grammar and len(draft) > 1 else draft

    def _ranked(
        self, request: Request, batch: BatchState, parts: Sequence[Proposer]
    ) -> Sequence[Proposer]:
        """Return proposers by their expected speed, best first."""
        groups = [[self._option(request, own) for own in part.parts] for part in parts]
        return [parts[i] for i in self.policy.rank(groups, batch)]

    def _probe_rivals(self, plans: Sequence[DraftPlan], batch: BatchState) -> None:
        """Let rivals of chosen proposers draft now and then, to compare them with the target."""
        for plan in plans:
            request = plan.request
            rivals = [rival for rival in plan.proposer.rivals if rival in plan.remaining_parts]
            can_probe = request.depth == "auto" and plan.limit >= PROBE_DEPTH and not request.error
            if not rivals or not can_probe:
                continue
            options = [self._option(request, rival) for rival in rivals]
            i = self.policy.pick_rival_probe(options, plan.speed, batch)
            if i is None or not self._grow(request, rivals[i].most(PROBE_DEPTH)):
                continue
            began, rival = self.clock(), rivals[i]
            draft_request = self._draft_request(request, rival, PROBE_DEPTH, batch)
            draft_request = replace(draft_request, confidence_rates=None)
            (draft,) = self._propose(rival, [draft_request], [request])
            self._record_draft(rival, [draft_request], [draft], [request], self.clock() - began)
            if draft is not None:
                # The proposer whose draft is verified stays the last of the list.
                plan.state.proposed.insert(0, ProposedDraft(rival.name, "", draft))

    def _count_reasons(
        self, generating: Sequence[ScheduledRequest], reasons: Mapping[int, str]
    ) -> None:
        """Count for each request why it drafted or did not; `reasons` by id hold for those that did
        not."""
        for scheduled in generating:
            request = scheduled.request
            if not request.speculates or scheduled.draft is None:
                continue
            if self.deferred and self.deferred.of(request):
                continue  # `record_deferred_drafts` counts
            reason = DRAFTED if len(scheduled.draft) > 1 else reasons[request.id]
            request.stats.reasons[reason] += 1
            self.state(request).reason = reason

    # Verification by the target

    def during_forward(self, batch: Sequence[ScheduledRequest]) -> AbstractContextManager[None]:
        """Let proposers that can draft on while the target verifies `batch`."""
        drafts = {s.request.id: s.draft for s in batch if s.draft is not None}
        return self.overlap.during_forward(drafts)


def _with_drafts(batch: BatchState, num_tokens: int, num_drafting: int) -> BatchState:
    """Return the state of a batch of which some requests may have drafts already: then the step is
    one of its own, and further drafts add no overhead."""
    return batch._replace(
        num_tokens=num_tokens,
        num_drafting=num_drafting,
        has_plain_rounds=batch.has_plain_rounds and num_tokens == batch.num_tokens,
    )
