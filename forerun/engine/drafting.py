"""What is drafted in a step: for whom, how deep, by which proposer, and whether there is room for
it."""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from forerun.draft.compose import Asked, Offer, Ranking, ask
from forerun.draft.proposer import DraftRequest, Proposer, drafts_of
from forerun.engine.acceptance import DraftOption, kind_of_match
from forerun.engine.depth import DEEPEST, PROBE_DEPTH, BatchState, DepthPolicy
from forerun.engine.error_isolation import isolate_errors, together
from forerun.engine.guard import Guard
from forerun.engine.overlap import Overlap
from forerun.engine.request import OFF, Offered, Request
from forerun.engine.scheduler import Work, drop, take_up
from forerun.engine.stats import DRAFTED, EDGE, NO_ROOM, NOTHING, RESTED, UNPAID
from forerun.runtime.torch_runner import Runner
from forerun.sampling.matcher import SOURCE, Matcher, NotReadyError
from forerun.types import Draft
from forerun.verify import Noise


class Plan:
    """One request while it is drafted for: `wanted` is asked next, for a draft `depth` deep, and
    `draft` is there once nobody is; `why` is what kept it from being longer than a root, if it is
    not. `left` are those who were not asked yet, `speed` what the best copy lets expect."""

    def __init__(self, work: Work, whole: Proposer, ranking: Ranking) -> None:
        self.work, self.whole = work, whole
        self.draft: Draft | None = None
        self.depth, self.why, self.left, self.speed = 0, NOTHING, list(whole.parts), 0.0
        self._asking = ask(whole, Asked(work.request.rule.branching, ranking))
        self.wanted: Proposer | None = self._next(next(self._asking))

    @property
    def asked(self) -> Proposer:
        """The one that is asked."""
        assert self.wanted is not None
        return self.wanted

    def give(self, offer: Offer | None, why: str = NOTHING) -> None:
        """What the one that is asked has; None is nothing, and `why`."""
        root = Draft.root(self.work.request.tokens[-1])
        self.speed = max(self.speed, offer.speed if offer else 0.0)
        if offer or why != NOTHING:
            self.why = UNPAID if offer else why
        try:
            self.wanted = self._next(self._asking.send(offer or Offer(root, root)))
        except StopIteration as end:
            self.wanted, self.draft = None, end.value

    def _next(self, part: Proposer) -> Proposer:
        self.left = [other for other in self.left if other is not part]
        return part


LONG, WARM = (
    64,
    32,
)  # steps to rest for which nothing is kept of a request; before it is asked, it is taken up again
STOPPED = 8  # levels that are drafted by who stops by itself, at most


class Drafting:
    """Asks proposers for drafts as deep as the policy says and the target's cache has room for."""

    def __init__(
        self,
        target: Runner,
        proposers: Mapping[str, Proposer],
        policy: DepthPolicy,
        guard: Guard,
        clock: Callable[[], float],
    ) -> None:
        """`clock` gives the seconds by which costs are learned, or whatever else they are."""
        self.target, self.proposers, self.policy, self.guard, self.clock = (
            target,
            proposers,
            policy,
            guard,
            clock,
        )
        self.overlap = self._meanwhile()
        self.seconds, self.steps = 0.0, 0  # that this step's drafts took; so far

    def propose(self, works: Sequence[Work], drawing: Sequence[Work]) -> dict[int, Draft]:
        """One draft for each request that draws, roots where it does not pay, there is no room, or
        what drafts for it
        failed: that is the request's error. None for those that have to wait for their grammar."""
        drafts = {w.request.id: Draft.root(w.request.tokens[-1]) for w in drawing}
        prompts = sum(w.count - w.draws for w in works if w.count > 1)
        plans, place = (
            [],
            BatchState(sum(w.count for w in works), len(drawing), len(drawing), prompts),
        )
        begun, allows, self.overlap = self.clock(), self.guard.allows(), self._meanwhile()
        for work in drawing:
            request = work.request
            request.allowed, request.offered = 0, []
            if request.state.grammar:
                with isolate_errors(request), self._left_out(drafts, request):
                    drafts[request.id] = self._forced(work, request.state.grammar)
            if request.draft != OFF and not request.insists:
                with isolate_errors(request):
                    self._tend(request)
            if (
                len(drafts.get(request.id, ())) == 1
                and not request.error
                and self._is_open(request, allows)
            ):
                plans.append(
                    Plan(
                        work,
                        self.proposers[request.draft],
                        functools.partial(self._ranked, request, place),
                    )
                )
        known, asking = place.tokens + sum(len(d) - 1 for d in drafts.values()), plans
        while asking := [plan for plan in asking if self._goes_on(plan, place)]:
            tokens = known + sum(len(plan.draft) - 1 for plan in plans if plan.draft)
            self._ask(asking, place._replace(tokens=tokens, asked=len(asking)))
        self._try(plans, place)
        for plan in plans:
            if plan.draft and not plan.work.request.error:
                with isolate_errors(plan.work.request), self._left_out(drafts, plan.work.request):
                    whole = place._replace(tokens=known, asked=len(plans))
                    drafts[plan.work.request.id] = self._taken(plan, plan.draft, whole)
        why = {plan.work.request.id: plan.why for plan in plans}
        for request in (
            work.request
            for work in drawing
            if work.request.draft != OFF and work.request.id in drafts
        ):
            drafted, otherwise = (
                len(drafts[request.id]) > 1,
                UNPAID if allows and request.judge.allows() else RESTED,
            )
            request.stats.reasons[DRAFTED if drafted else why.get(request.id, otherwise)] += 1
        self.seconds, self.steps = self.clock() - begun, self.steps + 1
        return drafts

    @contextmanager
    def _left_out(self, drafts: dict[int, Draft], request: Request) -> Iterator[None]:
        """Leave a request out of the step whose grammar needs longer than the others should
        wait."""
        try:
            yield
        except NotReadyError:
            del drafts[request.id]

    def _meanwhile(self) -> Overlap:
        return Overlap(self.policy, stands=self.clock is time.thread_time)

    def _tend(self, request: Request) -> None:
        """Who drafts nothing for long keeps nothing, which would take time and memory."""
        left, proposer = (
            max(self.guard.paused_steps, request.judge.paused_steps),
            self.proposers[request.draft],
        )
        if (
            left > LONG
            and not request.dropped
            and not any(part.sees_all for part in proposer.parts)
        ):
            drop(request, proposer)
        elif left <= WARM and request.dropped:
            take_up(request, proposer)

    def _is_open(self, request: Request, allows: bool) -> bool:
        """Whether anybody is to be asked for it; `allows` is what the guard says. Where all who
        might draft rest, that is known without asking one after the other, which many requests
        would feel."""
        if request.draft == OFF or request.insists:
            return request.insists
        whole = self.proposers[request.draft]
        allows = allows and request.judge.allows()
        rest = all(self.policy.rests(request.acceptance[part.name]) for part in whole.parts)
        return allows and (bool(whole.rivals) or not rest)

    def _ranked(
        self, request: Request, place: BatchState, parts: Sequence[Proposer]
    ) -> Sequence[Proposer]:
        """Proposers, those first that are expected to do best."""
        groups = [[self._wish(request, own) for own in part.parts] for part in parts]
        return [parts[i] for i in self.policy.ranked(groups, place)]

    def _try(self, plans: Sequence[Plan], place: BatchState) -> None:
        """Let rivals of who drafts say what they would have drafted, which is compared with what
        the target says."""
        for plan in plans:
            request, rivals = (
                plan.work.request,
                [rival for rival in plan.whole.rivals if rival in plan.left],
            )
            if (
                not rivals
                or request.error
                or request.depth != "auto"
                or self._limit(plan.work) < PROBE_DEPTH
            ):
                continue
            i = self.policy.tried(
                [self._wish(request, rival) for rival in rivals], plan.speed, place
            )
            room = len(request.tokens) + (0 if i is None else rivals[i].most(PROBE_DEPTH))
            if i is None or not self.target.cache.pages.grow(request.slot, room):
                continue
            start, rival = self.clock(), rivals[i]
            row = replace(self._row(request, rival, PROBE_DEPTH, place), stands=None)
            (draft,) = self._proposed(rival, [row], [request])
            self._time(rival, [row], [draft], [request], self.clock() - start)
            if draft is not None:
                request.offered.insert(
                    0, Offered(rival.name, "", draft)
                )  # who was asked to draft stands last

    def _goes_on(self, plan: Plan, place: BatchState) -> bool:
        """Whether there is somebody to ask, who does not rest or wait."""
        request, policy = plan.work.request, self.policy
        while plan.wanted and not request.error:
            rests = policy.rests(request.acceptance[plan.wanted.name])
            pauses = rests or (
                place.prompts and policy.waits(self._wish(request, plan.wanted), place)
            )
            if request.depth != "auto" or not pauses:
                return True
            plan.give(None, UNPAID)
        return False

    def _ask(self, plans: Sequence[Plan], place: BatchState) -> None:
        """Let each proposer draft for all its requests."""
        start = self.clock()  # to choose a depth is a part of what drafting costs
        groups: dict[Proposer, list[Plan]] = defaultdict(list)
        for plan, depth in zip(plans, self._depths(plans, place), strict=True):
            request, proposer, limit = plan.work.request, plan.asked, self._limit(plan.work)
            wanted = (max(depth, min(limit, _reach(request, proposer))), depth) if depth else ()
            plan.depth = next((each for each in wanted if self._has_room(plan, each)), 0)
            if plan.depth:
                request.allowed = max(plan.depth, request.allowed)
                groups[proposer].append(plan)
            else:
                plan.give(None, NO_ROOM if depth else UNPAID if limit else EDGE)
        for proposer, asking in groups.items():
            name, requests = proposer.name, [plan.work.request for plan in asking]
            rows = [self._row(plan.work.request, proposer, plan.depth, place) for plan in asking]
            self.overlap.ask(proposer, requests, rows)
            proposed = self._proposed(proposer, rows, requests)
            end = self.clock()
            self._time(proposer, rows, proposed, requests, end - start)
            start = end
            for plan, draft in zip(asking, proposed, strict=True):
                request = plan.work.request
                with isolate_errors(request):
                    offer = (
                        self._offer(plan, draft, place)
                        if draft is not None and len(draft) > 1
                        else None
                    )
                    if draft is not None and offer is None:
                        self.policy.record_verdict(name, request.acceptance[name], 0, 0)
                    plan.give(offer)

    def _has_room(self, plan: Plan, depth: int) -> bool:
        """Whether the largest draft that there could be fits: what is verified must not depend on
        what was drawn."""
        request = plan.work.request
        return self.target.cache.pages.grow(
            request.slot, len(request.tokens) + plan.whole.most(depth)
        )

    def _proposed(
        self, proposer: Proposer, rows: Sequence[DraftRequest], requests: Sequence[Request]
    ) -> Sequence[Draft | None]:
        """What a proposer drafts; None for a request for which that fails, which is the request's
        error."""
        vocab = self.target.decoder.config.vocab

        def ask(chosen: Sequence[int]) -> Sequence[Draft]:
            return drafts_of(proposer, [rows[i] for i in chosen], vocab)

        return together(ask, range(len(rows)), requests)

    def _time(
        self,
        proposer: Proposer,
        rows: Sequence[DraftRequest],
        proposed: Sequence[Draft | None],
        requests: Sequence[Request],
        seconds: float,
    ) -> None:
        """Remember what drafting took."""
        name, lag = proposer.name, sum(self._lag(request, proposer.name) for request in requests)
        self.overlap.spend(proposer, _drafted(proposer, rows, proposed), seconds, len(rows), lag)
        for request in requests:
            request.asked[name] = len(request.tokens), self.steps

    def _offer(self, plan: Plan, draft: Draft, place: BatchState) -> Offer:
        """A draft, and as much of it as pays alone: of nodes that were weighed, and of what was
        copied. What becomes of copies depends on the text alone, so it is exact under every
        rule."""
        request, proposer, taken = plan.work.request, plan.asked, draft
        kind = kind_of_match(proposer.name, draft.match_length) if draft.match_length else ""
        request.offered.append(Offered(proposer.name, kind, draft))
        copied, speed = bool(kind) and request.depth == "auto", 0.0
        if draft.path_probs:
            taken = draft.first(self.policy.enough(draft.path_probs, place))
        elif kind:
            count, speed = self.policy.worth(kind, request.acceptance[kind], len(draft) - 1, place)
            if copied:
                taken = draft.first(0 if self._is_beaten(plan, speed, place) else count)
        if plan.whole.merges and request.rule.coupled and not draft.path_probs:
            draft.path_probs = self._chances(request, draft, kind or proposer.name, proposer.name)
            taken.path_probs = draft.path_probs[: len(taken) - 1]
        return Offer(draft, taken, copied and len(taken) > 1, speed)

    def _is_beaten(self, plan: Plan, speed: float, place: BatchState) -> bool:
        """Whether one who is asked later is expected to do better than a copy, which is only scored
        then, with what the target says. What others who copy have need not be guessed."""
        request = plan.work.request
        others = [
            part
            for part in plan.left
            if not part.copies and request.acceptance[part.name].rest is None
        ]
        return any(self.policy.hoped(self._wish(request, part), place) > speed for part in others)

    def _chances(self, request: Request, draft: Draft, known: str, name: str) -> list[float]:
        """How likely each node is to stand with all before it, by what became of such ones."""
        chances, rate = [1.0], self.policy.rate(known, request.acceptance[known])
        stands = self.policy.survival(name, request.params.greedy).stands
        for node in range(1, len(draft)):
            own = stands[draft.confidence_bins[node - 1]] if draft.confidence_bins else rate
            chances.append(chances[draft.parents[node]] * min(own, 1.0))
        return chances[1:]

    def _taken(self, plan: Plan, draft: Draft, place: BatchState) -> Draft:
        """What of a draft is verified."""
        request = plan.work.request
        if plan.whole.merges and draft.path_probs and request.depth == "auto":
            draft = draft.first(self.policy.enough(draft.path_probs, place))
        grammar = request.state.grammar
        return grammar.prune(draft) if grammar and len(draft) > 1 else draft

    def _forced(self, work: Work, grammar: Matcher) -> Draft:
        """What the request's grammar leaves no choice about, a root where it does or there is no
        room.

        It costs nothing to draft and is always accepted: neither the proposer nor the depth policy
        is asked."""
        request = work.request
        deepest = DEEPEST if request.depth == "auto" else int(request.depth)
        limit = min(deepest, self._limit(work))
        tokens = grammar.forced(limit) if limit else []
        if tokens and not self.target.cache.pages.grow(
            request.slot, len(request.tokens) + len(tokens)
        ):
            tokens = []
        return grammar.prune(
            Draft.chain(request.tokens[-1], tokens, SOURCE)
        )  # which asks for all that `masks` needs

    def _limit(self, work: Work) -> int:
        """The most a request can use of a draft. The pass that ends a prompt drafts nothing, so
        that the first token comes soonest."""
        request = work.request
        return (
            request.limit - request.produced - 1 if request.draft != OFF and work.count == 1 else 0
        )

    def _depths(self, plans: Sequence[Plan], place: BatchState) -> list[int]:
        """The depth of each: what it asked for, or what the policy says."""
        depths, wishes, free = [], [], []
        for i, plan in enumerate(plans):
            request, proposer, limit = plan.work.request, plan.asked, self._limit(plan.work)
            depths.append(0 if request.depth == "auto" else min(int(request.depth), limit))
            if request.depth == "auto" and limit:
                wishes.append(self._wish(request, proposer, limit))
                free.append(i)
        for i, depth in zip(free, self.policy.choose(wishes, place), strict=True):
            depths[i] = depth
        return depths

    def _wish(self, request: Request, proposer: Proposer, limit: int | None = None) -> DraftOption:
        """What a request could draft with a proposer."""
        most, name = request.limit - request.produced - 1 if limit is None else limit, proposer.name
        return DraftOption(
            name, most, request.acceptance[name], proposer.width, self._lag(request, name)
        )

    def _lag(self, request: Request, name: str) -> int:
        """Tokens that a proposer has missed: it reads what a round says in the next, which is a
        part of drafting."""
        if name not in request.asked:
            return len(request.tokens)
        tokens, step = request.asked[name]
        return 0 if step >= self.steps - 1 else len(request.tokens) - tokens

    def _row(
        self, request: Request, proposer: Proposer, depth: int, place: BatchState
    ) -> DraftRequest:
        stands, floor = None, 0.0
        source = self.proposers[request.draft].parts.index(proposer)
        if _stops(request, proposer):
            stands = self.policy.survival(proposer.name, request.params.greedy).stands
            if proposer.stops:
                floor = self.policy.floor(proposer.name, request.acceptance[proposer.name], place)
        return DraftRequest(
            stands=stands,
            floor=floor,
            slot=request.slot,
            tokens=request.tokens,
            params=request.params,
            noise=Noise(request.seed, len(request.tokens) - 1, source),
            depth=depth,
            coupled=request.rule.coupled,
            branching=request.rule.branching,
        )


def _reach(request: Request, proposer: Proposer) -> int:
    """How deep it may draft if it is asked at all: copies are cut to what pays, and who stops by
    itself does."""
    if proposer.copies and request.depth == "auto":
        return DEEPEST
    return STOPPED if _stops(request, proposer) else 0


def _stops(request: Request, proposer: Proposer) -> bool:
    """Whether its drafts end where the drafter is not sure any more. Not under a ratio rule: that
    depends on what was drawn. Nor with filters, behind which the drafter draws level by level."""
    free = request.depth == "auto" and request.rule.coupled and request.params.unfiltered
    return free and (proposer.stops or proposer.weighs)


def _drafted(
    proposer: Proposer, rows: Sequence[DraftRequest], proposed: Sequence[Draft | None]
) -> int:
    """How deep they drafted: as deep as they were asked to, but for who stops by itself."""
    if not proposer.stops:
        return max(row.depth for row in rows)
    return max(1, *(max(draft.depths()) for draft in proposed if draft is not None))
