"""Drafting: chooses proposers and depths for each request, and records the outcomes.

`Drafting` owns everything that speculation keeps per request (`DraftingState`), the depth policy
and the guard. The engine tells it what happens to requests and asks it for one draft per generating
request; the draft of a request that does not speculate is a root without children.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

import numpy as np
from torch import Tensor

from forerun.draft.compose import AskContext, Offer, Ranking, ask
from forerun.draft.proposer import DraftRequest, Proposer, drafts_of
from forerun.engine.acceptance import Acceptance, DraftOption, kind_of_match
from forerun.engine.depth import (
    DEEPEST,
    PROBE_DEPTH,
    BatchState,
    DepthPolicy,
    max_reach,
    may_stop,
)
from forerun.engine.error_isolation import isolate_errors, run_isolated
from forerun.engine.guard import Guard, GuardSample, RequestGuard
from forerun.engine.observe import take_rows
from forerun.engine.overlap import Overlap
from forerun.engine.request import Request, ScheduledRequest
from forerun.engine.stats import DRAFTED, EDGE, NO_ROOM, NOTHING, PAUSED, UNPAID
from forerun.runtime.torch_runner import Runner
from forerun.sampling.matcher import SOURCE, Matcher, NotReadyError
from forerun.types import Draft, States, Verdict
from forerun.verify import Noise

LONG_PAUSE = 64  # steps: the drafter state of requests that pause longer is released,
WARM_UP = 32  # and restored so many steps before they draft again


@dataclass(frozen=True, slots=True)
class ProposedDraft:
    """Draft of one proposer in a step, verified or not.

    `kind` is the kind of match of a copy (`kind_of_match`), or "".
    """

    source: str
    kind: str
    draft: Draft


@dataclass(slots=True)
class DraftingState:
    """Drafting state of one request.

    Attributes:
        acceptance: acceptance record of its drafts, by proposer and kind of match.
        last_asked: (committed tokens, step) when each proposer last drafted for it.
        guard: disables drafting while the request would be faster without.
        released: True if its drafter state was released because of a long pause.
        allowed_depth: the depth that its draft may have in this step.
        proposed: all drafts for it in this step.
    """

    acceptance: defaultdict[str, Acceptance] = field(
        default_factory=lambda: defaultdict(Acceptance)
    )
    last_asked: dict[str, tuple[int, int]] = field(default_factory=dict)
    guard: RequestGuard = field(default_factory=RequestGuard)
    released: bool = False
    allowed_depth: int = 0
    proposed: list[ProposedDraft] = field(default_factory=list)

    @property
    def was_asked(self) -> bool:
        """True if a proposer drafted for the request in this step."""
        return self.allowed_depth > 0 or bool(self.proposed)


class _Plan:
    """One request while its draft is made.

    Attributes:
        wanted: the proposer that is asked next, None once the draft is there.
        draft: the draft, once nobody is asked any more.
        depth: the depth that `wanted` is asked for.
        reason: what kept the draft from being longer than a root, if it is not.
        left: proposers that were not asked yet.
        speed: tokens per second expected of the best copy so far.
    """

    def __init__(
        self,
        scheduled: ScheduledRequest,
        state: DraftingState,
        proposer: Proposer,
        ranking: Ranking,
    ) -> None:
        self.scheduled, self.state, self.proposer = scheduled, state, proposer
        self.request = scheduled.request
        self.draft: Draft | None = None
        self.depth = 0
        self.reason = NOTHING
        self.left = list(proposer.parts)
        self.speed = 0.0
        self._asking = ask(proposer, AskContext(self.request.rule.branching, ranking))
        self.wanted: Proposer | None = self._next(next(self._asking))

    @property
    def asked(self) -> Proposer:
        """The proposer that is asked."""
        assert self.wanted is not None
        return self.wanted

    @property
    def limit(self) -> int:
        """The most tokens of a draft that the request can use; the step that ends a prompt drafts
        nothing, so that the first token comes soonest."""
        return self.request.remaining if self.scheduled.count == 1 else 0

    def give(self, offer: Offer | None, reason: str = NOTHING) -> None:
        """Accept the asked proposer's draft; None and a `reason` if it offers nothing."""
        root = Draft.root(self.request.tokens[-1])
        if offer:
            self.speed = max(self.speed, offer.speed)
            self.reason = UNPAID
        elif reason != NOTHING:
            self.reason = reason
        try:
            self.wanted = self._next(self._asking.send(offer or Offer(root, root)))
        except StopIteration as end:
            self.wanted, self.draft = None, end.value

    def _next(self, proposer: Proposer) -> Proposer:
        self.left = [other for other in self.left if other is not proposer]
        return proposer


class Drafting:
    """Asks proposers for drafts as deep as the policy says and the target's cache has room for."""

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
        self.seconds = 0.0  # that drafting took in this step
        self._step_began = self._drafted_at = 0.0
        self.set_policy(policy)

    def set_policy(self, policy: DepthPolicy) -> None:
        """Let `policy` choose depths from now on, with a new guard."""
        self.policy = policy
        decoder = self.target.decoder
        experts = decoder.config.experts
        policy.set_experts(experts, decoder.pass_bytes if experts else None)
        self.guard = Guard(policy.forward_seconds)
        self.overlap = Overlap(policy, waiting_is_free=self.clock is time.thread_time)

    def state(self, request: Request) -> DraftingState:
        """Return the drafting state of a request; it is kept as long as the request exists."""
        state = self.states.get(request)
        if state is None:
            state = self.states[request] = DraftingState()
        return state

    # The life of a request

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
        state.last_asked = {
            part.name: (len(request.tokens), -1)
            for part in proposer.parts
            if part.aux_hidden_layers and request.produced
        }

    def _tend(self, request: Request) -> None:
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

    def draft(self, batch: Sequence[ScheduledRequest]) -> None:
        """Set the draft of each generating request.

        A draft is a root where drafting does not pay, there is no room, or a proposer failed (which
        is the request's error). It stays None for requests that must wait for their grammar.
        """
        self._step_began, began = self.wall_clock(), self.clock()
        generating = [scheduled for scheduled in batch if scheduled.generates]
        num_tokens = sum(scheduled.count for scheduled in batch)
        prompts = sum(s.count - s.generates for s in batch if s.count > 1)
        certain = BatchState(num_tokens, len(generating), len(generating), prompts)
        allowed = self.guard.allows()
        self.overlap = Overlap(self.policy, waiting_is_free=self.clock is time.thread_time)
        for scheduled in generating:
            scheduled.draft = Draft.root(scheduled.request.tokens[-1])
            self._draft_by_grammar(scheduled)
        plans = [self._plan(s, certain) for s in generating if self._should_ask(s, allowed)]
        num_tokens += sum(len(s.draft) - 1 for s in generating if s.draft)
        whole = certain._replace(num_tokens=num_tokens, num_drafting=len(plans))
        self._ask_all(plans, certain, num_tokens)
        self._probe_rivals(plans, certain)
        for plan in plans:
            if plan.draft and not plan.request.error:
                with isolate_errors(plan.request), self._unless_not_ready(plan.scheduled):
                    plan.scheduled.draft = self._cut(plan, plan.draft, whole)
        self._count_reasons(generating, plans, allowed)
        self.steps += 1
        self._drafted_at = self.clock()
        self.seconds = self._drafted_at - began

    def _draft_by_grammar(self, scheduled: ScheduledRequest) -> None:
        """Start a request's step: draft what its grammar dictates, tend its drafter state."""
        request, state = scheduled.request, self.state(scheduled.request)
        state.allowed_depth = 0
        state.proposed = []
        if request.state.grammar:
            with isolate_errors(request), self._unless_not_ready(scheduled):
                scheduled.draft = self._forced(scheduled, request.state.grammar)
        if request.speculates and not request.has_fixed_depth:
            with isolate_errors(request):
                self._tend(request)

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
    def _unless_not_ready(self, scheduled: ScheduledRequest) -> Iterator[None]:
        """Leave a request out of the step if its grammar needs longer than others should wait."""
        try:
            yield
        except NotReadyError:
            scheduled.draft = None

    def _should_ask(self, scheduled: ScheduledRequest, allowed: bool) -> bool:
        """Return True if a proposer should draft for this request; `allowed` is the engine guard's
        decision.

        Where every proposer that might draft is paused this is known without asking one after the
        other, which would cost time with many requests.
        """
        request = scheduled.request
        if request.error or scheduled.draft is None or len(scheduled.draft) > 1:
            return False
        if not request.speculates or request.has_fixed_depth:
            return request.has_fixed_depth
        state, proposer = self.state(request), self.proposers[request.draft]
        paused = all(self.policy.is_paused(state.acceptance[p.name]) for p in proposer.parts)
        return allowed and state.guard.allows() and (bool(proposer.rivals) or not paused)

    def _plan(self, scheduled: ScheduledRequest, batch: BatchState) -> _Plan:
        request = scheduled.request
        ranking = functools.partial(self._ranked, request, batch)
        return _Plan(scheduled, self.state(request), self.proposers[request.draft], ranking)

    def _ask_all(self, plans: Sequence[_Plan], certain: BatchState, num_tokens: int) -> None:
        """Ask proposers, round by round, until every plan has its draft."""
        asking = plans
        while asking := [plan for plan in asking if self._continues(plan, certain)]:
            drafted = sum(len(plan.draft) - 1 for plan in plans if plan.draft)
            batch = certain._replace(num_tokens=num_tokens + drafted, num_drafting=len(asking))
            self._ask(asking, batch)

    def _continues(self, plan: _Plan, batch: BatchState) -> bool:
        """Return True if a proposer is to be asked: it may have a draft, and need not wait."""
        while plan.wanted and not plan.request.error:
            paused = self.policy.is_paused(plan.state.acceptance[plan.wanted.name]) or (
                batch.num_prompt_tokens
                and self.policy.should_wait(self._option(plan.request, plan.wanted), batch)
            )
            if plan.request.depth == "auto" and paused:
                plan.give(None, UNPAID)
            elif not plan.limit or self._may_have_draft(plan):
                return True
            else:
                plan.give(None)
        return False

    def _may_have_draft(self, plan: _Plan) -> bool:
        """Return False, and note it, if the proposer to ask knows that it has no draft."""
        request, name = plan.request, plan.asked.name
        with isolate_errors(request):
            if plan.asked.has_draft(request.slot, request.tokens):
                return True
            self.policy.record_verdict(name, plan.state.acceptance[name], 0, 0)
            plan.state.last_asked[name] = len(request.tokens), self.steps
        return False

    def _ask(self, plans: Sequence[_Plan], batch: BatchState) -> None:
        """Let each proposer draft for all requests that want it."""
        began = self.clock()  # choosing depths is a part of the cost of drafting
        groups: dict[Proposer, list[_Plan]] = defaultdict(list)
        for plan, depth in zip(plans, self._depths(plans, batch), strict=True):
            plan.depth = self._depth_with_room(plan, depth)
            if plan.depth:
                plan.state.allowed_depth = max(plan.depth, plan.state.allowed_depth)
                groups[plan.asked].append(plan)
            else:
                plan.give(None, NO_ROOM if depth else UNPAID if plan.limit else EDGE)
        for proposer, asking in groups.items():
            asked = [self._draft_request(p.request, proposer, p.depth, batch) for p in asking]
            self.overlap.note_asked(proposer, [plan.request.id for plan in asking], asked)
            proposed = self._propose(proposer, asked, [plan.request for plan in asking])
            now = self.clock()
            self._record_draft(
                proposer, asked, proposed, [plan.request for plan in asking], now - began
            )
            began = now
            for plan, draft in zip(asking, proposed, strict=True):
                with isolate_errors(plan.request):
                    self._give(plan, draft, batch)

    def _give(self, plan: _Plan, draft: Draft | None, batch: BatchState) -> None:
        """Give a plan the draft of its proposer; None if the proposer failed."""
        name = plan.asked.name
        if draft is not None and len(draft) > 1:
            plan.give(self._offer(plan, draft, batch))
            return
        if draft is not None:
            self.policy.record_verdict(name, plan.state.acceptance[name], 0, 0)
        plan.give(None)

    def _depths(self, plans: Sequence[_Plan], batch: BatchState) -> list[int]:
        """Return the depth of each plan: the requested one, or the policy's choice."""
        depths, options, free = [], [], []
        for i, plan in enumerate(plans):
            fixed = 0 if plan.request.depth == "auto" else min(int(plan.request.depth), plan.limit)
            depths.append(fixed)
            if plan.request.depth == "auto" and plan.limit:
                options.append(self._option(plan.request, plan.asked, plan.limit))
                free.append(i)
        for i, depth in zip(free, self.policy.choose(options, batch), strict=True):
            depths[i] = depth
        return depths

    def _depth_with_room(self, plan: _Plan, depth: int) -> int:
        """Return how deep to draft at a chosen depth, given the room in the cache; 0 if none.

        Room is for the largest draft that there could be, since what is verified must not depend on
        what was drawn.
        """
        if not depth:
            return 0
        reach = max(depth, min(plan.limit, max_reach(plan.request, plan.asked)))
        for each in (reach, depth):
            if self._grow(plan.request, plan.proposer.most(each)):
                return each
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

    def _record_draft(
        self,
        proposer: Proposer,
        asked: Sequence[DraftRequest],
        proposed: Sequence[Draft | None],
        requests: Sequence[Request],
        seconds: float,
    ) -> None:
        """Record the time that drafting took."""
        depth = max(each.depth for each in asked)
        if proposer.ends_chains:
            depth = max(1, *(max(draft.depths()) for draft in proposed if draft is not None))
        lag = sum(self._lag(request, proposer.name) for request in requests)
        self.overlap.record_draft(proposer, depth, seconds, len(asked), lag)
        for request in requests:
            self.state(request).last_asked[proposer.name] = len(request.tokens), self.steps

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

    # Choosing among drafts

    def _offer(self, plan: _Plan, draft: Draft, batch: BatchState) -> Offer:
        """Return a draft together with as much of it as pays if no other request drafts.

        Nodes with probabilities and copies are cut to what pays. What becomes of copies depends on
        the text alone, so cutting them is exact under every rule.
        """
        request, proposer, taken = plan.request, plan.asked, draft
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

    def _is_beaten(self, plan: _Plan, speed: float, batch: BatchState) -> bool:
        """Return True if a proposer that is asked later is expected to beat a copy's speed.

        The copy is then only compared with the target's tokens. Other copies need not be guessed:
        looking at them is cheap.
        """
        others = [
            part
            for part in plan.left
            if not part.copies_text and plan.state.acceptance[part.name].paused_until is None
        ]
        return any(
            self.policy.expected_speed(self._option(plan.request, part), batch) > speed
            for part in others
        )

    def _path_probs(self, plan: _Plan, draft: Draft, known_as: str) -> list[float]:
        """Return each node's acceptance probability, estimated from earlier similar nodes."""
        rate = self.policy.acceptance_rate(known_as, plan.state.acceptance[known_as])
        rates = self.policy.bins(plan.asked.name, plan.request.params.greedy).rates
        probs = [1.0]
        for node in range(1, len(draft)):
            own = rates[draft.confidence_bins[node - 1]] if draft.confidence_bins else rate
            probs.append(probs[draft.parents[node]] * min(own, 1.0))
        return probs[1:]

    def _cut(self, plan: _Plan, draft: Draft, batch: BatchState) -> Draft:
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

    def _probe_rivals(self, plans: Sequence[_Plan], batch: BatchState) -> None:
        """Let a rival of the chosen proposer draft now and then, only to compare it with the
        target's tokens."""
        for plan in plans:
            request = plan.request
            rivals = [rival for rival in plan.proposer.rivals if rival in plan.left]
            can_probe = request.depth == "auto" and plan.limit >= PROBE_DEPTH and not request.error
            if not rivals or not can_probe:
                continue
            options = [self._option(request, rival) for rival in rivals]
            i = self.policy.pick_rival_probe(options, plan.speed, batch)
            if i is None or not self._grow(request, rivals[i].most(PROBE_DEPTH)):
                continue
            began, rival = self.clock(), rivals[i]
            asked = self._draft_request(request, rival, PROBE_DEPTH, batch)
            asked = replace(asked, confidence_rates=None)
            (draft,) = self._propose(rival, [asked], [request])
            self._record_draft(rival, [asked], [draft], [request], self.clock() - began)
            if draft is not None:
                # The proposer whose draft is verified stays the last of the list.
                plan.state.proposed.insert(0, ProposedDraft(rival.name, "", draft))

    def _count_reasons(
        self, generating: Sequence[ScheduledRequest], plans: Sequence[_Plan], allowed: bool
    ) -> None:
        """Count for each request why it drafted or did not."""
        reasons = {plan.request.id: plan.reason for plan in plans}
        for scheduled in generating:
            request = scheduled.request
            if not request.speculates or scheduled.draft is None:
                continue
            if len(scheduled.draft) > 1:
                reason = DRAFTED
            else:
                guarded = allowed and self.state(request).guard.allows()
                reason = reasons.get(request.id, UNPAID if guarded else PAUSED)
            request.stats.reasons[reason] += 1

    # Verification by the target

    def during_forward(self, batch: Sequence[ScheduledRequest]) -> AbstractContextManager[None]:
        """Let proposers that can draft on while the target verifies `batch`."""
        drafts = {s.request.id: s.draft for s in batch if s.draft is not None}
        return self.overlap.during_forward(drafts)

    def hidden_layers(self, request: Request) -> tuple[int, ...]:
        """Return the hidden-state layers that the request's proposer wants."""
        return self.proposers[request.draft].aux_hidden_layers if self._has_state(request) else ()

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
        if not self._has_state(request) or not self.proposers[request.draft].wants_logits:
            return
        self.proposers[request.draft].learn(request.slot, request.tokens, draft, logits())

    def _has_state(self, request: Request) -> bool:
        """Return True if a proposer keeps something of the request."""
        return request.speculates and not self.state(request).released

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
        self.overlap.record_forward(num_tokens, self.clock() - self._drafted_at, decodes)
        is_cold = self.policy.costs.is_cold(num_tokens)
        if not decodes or is_cold or any(s.request.has_fixed_depth for s in batch):
            return
        samples = []
        for scheduled in batch:
            state, nodes = self.state(scheduled.request), len(scheduled.draft or ()) - 1
            tokens = emitted.get(scheduled.request.id, 0)
            samples.append(GuardSample(state.guard, nodes, tokens, state.was_asked))
        self.guard.record(samples, self.wall_clock() - self._step_began, self.seconds)

    def room(self, num_decoding: int, stretch: float) -> int:
        """Return the most tokens of a pass that reads prompts beside decoding requests."""
        return self.policy.room(num_decoding, stretch)

    def acceptance_of(self, request: Request, draft: Draft) -> float:
        """Return the acceptance rate expected of the proposer whose draft was verified."""
        state = self.state(request)
        names = [proposed.source for proposed in state.proposed] or [request.draft]
        source = draft.sources[min(1, len(draft) - 1)]
        name = source if source in names else names[-1]
        return self.policy.acceptance_rate(name, state.acceptance[name])
