"""What is drafted in a step: for whom, how deep, by which proposer, and whether there is room for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from forerun.draft.base import Proposer, Row
from forerun.engine.blame import blaming, together
from forerun.engine.depth import DEEPEST, DepthPolicy, Wish, kind_of_match
from forerun.engine.request import Request
from forerun.engine.scheduler import Work
from forerun.errors import ForerunError
from forerun.runner import Runner
from forerun.sampling.matcher import SOURCE
from forerun.types import Draft
from forerun.verify import Noise

OFF = "off"
STOPPED = 8  # levels that are drafted by who stops by itself, at most
SHORT_LAG = DEEPEST + 1  # tokens, at most, that a round leaves to be read


class Drafting:
    """Asks proposers for drafts as deep as the policy says and the target's cache has room for."""

    def __init__(
        self, target: Runner, proposers: Mapping[str, Proposer], policy: DepthPolicy, clock: Callable[[], float]
    ) -> None:
        """`clock` gives the seconds by which costs are learned."""
        self.target, self.proposers, self.policy, self.clock = target, proposers, policy, clock

    def propose(self, works: Sequence[Work], drawing: Sequence[Work]) -> dict[int, Draft]:
        """One draft for each request that draws, roots where it does not pay, there is no room, or what drafts for it
        failed: that is the request's error."""
        drafts = {w.request.id: Draft.root(w.request.tokens[-1]) for w in drawing}
        for work in drawing:
            with blaming(work.request):
                drafts[work.request.id] = self._forced(work)
        known = sum(w.count for w in works)
        turns = max((len(self.proposers[w.request.draft].parts) for w in drawing if w.request.draft != OFF), default=0)
        for turn in range(turns):
            if waiting := self._waiting(drawing, drafts, turn):
                self._ask(waiting, drafts, known + sum(len(d) - 1 for d in drafts.values()))
        return drafts

    def _waiting(self, drawing: Sequence[Work], drafts: Mapping[int, Draft], turn: int) -> list[tuple[Work, Proposer]]:
        """Who has no draft yet, each with the proposer whose turn it is, unless that rests."""
        found = []
        for work in drawing:
            request = work.request
            if len(drafts[request.id]) == 1 and request.draft != OFF and not request.error:
                parts = self.proposers[request.draft].parts
                if turn < len(parts) and not self._rests(request, parts[turn]):
                    found.append((work, parts[turn]))
        return found

    def _rests(self, request: Request, proposer: Proposer) -> bool:
        return request.depth == "auto" and self.policy.rests(request.acceptance[proposer.name])

    def _ask(self, waiting: Sequence[tuple[Work, Proposer]], drafts: dict[int, Draft], tokens: int) -> None:
        """Let each proposer draft for all its requests. `tokens` are in the pass in any case."""
        start = self.clock()  # to choose a depth is a part of what drafting costs
        groups: dict[Proposer, list[Request]] = defaultdict(list)
        for (work, proposer), depth in zip(waiting, self._depths(waiting, tokens), strict=True):
            request = work.request
            if depth and _stops(request, proposer):
                depth = max(depth, min(self._limit(work), STOPPED))
            # room for the largest draft there could be: what is verified must not depend on what was drawn
            if depth and self.target.cache.pages.grow(request.slot, len(request.tokens) + depth * proposer.width):
                request.allowed = depth
                groups[proposer].append(request)
        place = tokens, len(waiting)
        for proposer, requests in groups.items():
            name = proposer.name
            rows = [self._row(request, proposer, place) for request in requests]
            proposed = self._proposed(proposer, rows, requests)
            end, lag = self.clock(), max(len(r.tokens) - r.asked.get(name, 0) for r in requests)
            seconds, start = end - start, end
            if lag <= SHORT_LAG:
                self.policy.record_draft(name, _drafted(proposer, rows, proposed), seconds, len(rows))
            else:
                self.policy.record_lag(name, seconds)
            for request, draft in zip(requests, proposed, strict=True):
                request.asked[name] = len(request.tokens)
                if draft is not None and len(draft) > 1:
                    with blaming(request):
                        worth = self._worth(request, draft, proposer, place)
                        drafts[request.id] = self._taken(request, worth, proposer)
                elif draft is not None:
                    self.policy.record_verdict(name, request.acceptance[name], 0, 0)

    def _proposed(self, proposer: Proposer, rows: Sequence[Row], requests: Sequence[Request]) -> Sequence[Draft | None]:
        return together(lambda chosen: proposer.propose([rows[i] for i in chosen]), range(len(rows)), requests)

    def _worth(self, request: Request, draft: Draft, proposer: Proposer, place: tuple[int, int]) -> Draft:
        """As much of a draft as pays: of nodes that were weighed, and of what was copied. If that is nothing of a copy,
        or another proposer is expected to do better, it is set aside and scored with what the target says. What becomes
        of copies depends on the text alone, so it is exact under every rule."""
        if draft.chances:
            return draft.first(self.policy.enough(draft.chances, place))
        if not draft.match or request.depth != "auto":
            return draft
        kind, parts = kind_of_match(proposer.name, draft.match), self.proposers[request.draft].parts
        others = [
            Wish(part.name, request.limit - request.produced - 1, request.acceptance[part.name], part.width)
            for part in parts[parts.index(proposer) + 1 :]
            if request.acceptance[part.name].rest is None
        ]
        count = self.policy.worth(kind, request.acceptance[kind], len(draft) - 1, others, place)
        if not count:
            request.aside = (kind, draft.tokens[1:])
            return Draft.root(draft.tokens[0])
        request.kind = kind
        return draft.first(count)

    def _taken(self, request: Request, draft: Draft, proposer: Proposer) -> Draft:
        """What of a proposer's draft is verified."""
        if len(draft) == 1:
            return draft
        request.drafter, request.reach = proposer.name, self._reach(draft, request.allowed, proposer)
        grammar = request.state.grammar
        return grammar.prune(draft) if grammar else draft

    def _reach(self, draft: Draft, depth: int, proposer: Proposer) -> int:
        """How deep it is. Raises ForerunError for a draft that was not asked for: there is no room for it, and what it
        overwrote might belong to others."""
        reach, most, vocab = max(draft.depths()), depth * proposer.width, self.target.decoder.config.vocab
        if reach > depth or len(draft) - 1 > most:
            raise ForerunError(
                f"the drafter {proposer.name!r} was asked for {most} tokens, {depth} deep, and gave {len(draft) - 1},"
                f" {reach} deep: keep to row.depth, and set its width to the most nodes of a level"
            )
        if not 0 <= min(draft.tokens) <= max(draft.tokens) < vocab:
            raise ForerunError(f"the drafter {proposer.name!r} gave a token that is not in the vocabulary of {vocab}")
        return reach

    def _forced(self, work: Work) -> Draft:
        """What the request's grammar leaves no choice about, a root where it does or there is no room.

        It costs nothing to draft and is always accepted: neither the proposer nor the depth policy is asked.
        """
        request = work.request
        request.drafter, request.reach, request.allowed, request.kind, request.aside = "", 0, 0, "", None
        deepest = DEEPEST if request.depth == "auto" else int(request.depth)
        grammar, limit = request.state.grammar, min(deepest, self._limit(work))
        tokens = grammar.forced(limit) if grammar and limit else []
        if tokens and not self.target.cache.pages.grow(request.slot, len(request.tokens) + len(tokens)):
            tokens = []
        return Draft.chain(request.tokens[-1], tokens, SOURCE)

    def _limit(self, work: Work) -> int:
        """The most a request can use of a draft. The pass that ends a prompt drafts nothing, so that the first token
        comes soonest."""
        request = work.request
        return request.limit - request.produced - 1 if request.draft != OFF and work.count == 1 else 0

    def _depths(self, waiting: Sequence[tuple[Work, Proposer]], tokens: int) -> list[int]:
        """The depth of each: what it asked for, or what the policy says."""
        depths, wishes, free = [], [], []
        for i, (work, proposer) in enumerate(waiting):
            request, limit = work.request, self._limit(work)
            depths.append(0 if request.depth == "auto" else min(int(request.depth), limit))
            if request.depth == "auto" and limit:
                wishes.append(Wish(proposer.name, limit, request.acceptance[proposer.name], proposer.width))
                free.append(i)
        for i, depth in zip(free, self.policy.choose(wishes, tokens), strict=True):
            depths[i] = depth
        return depths

    def _row(self, request: Request, proposer: Proposer, place: tuple[int, int]) -> Row:
        stands, floor = None, 0.0
        if _stops(request, proposer):
            stands = self.policy.survival(proposer.name, request.params.greedy).stands
            if proposer.stops:
                floor = self.policy.floor(proposer.name, request.acceptance[proposer.name], place)
        return Row(
            stands=stands,
            floor=floor,
            slot=request.slot,
            tokens=request.tokens,
            params=request.params,
            noise=Noise(request.seed, len(request.tokens) - 1),
            depth=request.allowed,
            coupled=request.rule.coupled,
            branching=request.rule.branching,
        )


def _stops(request: Request, proposer: Proposer) -> bool:
    """Whether its drafts end where the drafter is not sure any more. Not under a ratio rule: that depends on what was
    drawn. Nor with filters, behind which the drafter draws level by level."""
    free = request.depth == "auto" and request.rule.coupled and request.params.unfiltered
    return free and (proposer.stops or proposer.weighs)


def _drafted(proposer: Proposer, rows: Sequence[Row], proposed: Sequence[Draft | None]) -> int:
    """How deep they drafted: as deep as they were asked to, but for who stops by itself."""
    if not proposer.stops:
        return max(row.depth for row in rows)
    return max(1, *(len(draft) - 1 for draft in proposed if draft is not None))
