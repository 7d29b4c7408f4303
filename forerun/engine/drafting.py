"""What is drafted in a step: for whom, how deep, by which proposer, and whether there is room for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from forerun.draft.base import Proposer, Row
from forerun.engine.depth import DEEPEST, DepthPolicy, Wish
from forerun.engine.request import Request
from forerun.engine.scheduler import Work
from forerun.runner import Runner
from forerun.sampling.matcher import SOURCE
from forerun.types import Draft
from forerun.verify import Noise

OFF = "off"
SHORT_LAG = 64  # tokens a proposer reads in about the time of one


class Drafting:
    """Asks proposers for drafts as deep as the policy says and the target's cache has room for."""

    def __init__(
        self, target: Runner, proposers: Mapping[str, Proposer], policy: DepthPolicy, clock: Callable[[], float]
    ) -> None:
        """`clock` gives the seconds by which costs are learned."""
        self.target, self.proposers, self.policy, self.clock = target, proposers, policy, clock

    def propose(self, works: Sequence[Work], drawing: Sequence[Work]) -> dict[int, Draft]:
        """One draft for each request that draws, roots where it does not pay or there is no room."""
        drafts = {w.request.id: self._forced(w) for w in drawing}
        free = [work for work in drawing if len(drafts[work.request.id]) == 1]
        depths = self._depths(free, sum(w.count for w in works) + sum(len(d) - 1 for d in drafts.values()))
        groups: dict[str, list[Request]] = defaultdict(list)
        for work in free:
            work.request.allowed = depths[work.request.id]
            # room for the largest draft there could be: what is verified must not depend on what was drawn
            if depths[work.request.id] and self._reserve(work.request, depths[work.request.id]):
                groups[work.request.draft].append(work.request)
        for name, requests in groups.items():
            start = self.clock()
            rows = [self._row(request, depths[request.id]) for request in requests]
            proposed = self.proposers[name].propose(rows)
            lag = max(len(r.tokens) - r.proposed for r in requests)
            if lag <= SHORT_LAG:  # reading a long one is no measure of a round
                self.policy.record_draft(name, max(row.depth for row in rows), self.clock() - start)
            for request, draft in zip(requests, proposed, strict=True):
                request.proposed, request.reach = len(request.tokens), max(draft.depths())
                grammar = request.state.grammar
                drafts[request.id] = grammar.prune(draft) if grammar else draft
        return drafts

    def _forced(self, work: Work) -> Draft:
        """What the request's grammar leaves no choice about, a root where it does or there is no room.

        It costs nothing to draft and is always accepted: neither the proposer nor the depth policy is asked.
        """
        request = work.request
        request.reach = request.allowed = 0
        deepest = DEEPEST if request.depth == "auto" else int(request.depth)
        grammar, limit = request.state.grammar, min(deepest, self._limit(work))
        tokens = grammar.forced(limit) if grammar and limit else []
        if tokens and not self.target.cache.pages.grow(request.slot, len(request.tokens) + len(tokens)):
            tokens = []
        return Draft.chain(request.tokens[-1], tokens, SOURCE)

    def _reserve(self, request: Request, depth: int) -> bool:
        """Rows for a draft so deep; without them the request goes on without a draft."""
        nodes = depth * self.proposers[request.draft].width
        return self.target.cache.pages.grow(request.slot, len(request.tokens) + nodes)

    def _limit(self, work: Work) -> int:
        """The most a request can use of a draft. The pass that ends a prompt drafts nothing, so that the first token
        comes soonest."""
        request = work.request
        return request.limit - request.produced - 1 if request.draft != OFF and work.count == 1 else 0

    def _depths(self, drawing: Sequence[Work], tokens: int) -> dict[int, int]:
        """Depth of each drawing request: what it asked for, or what the policy says. `tokens` are in the pass in any
        case."""
        limits, wishes, free = {}, [], []
        for work in drawing:
            request = work.request
            limits[request.id] = self._limit(work)
            if request.depth == "auto" and limits[request.id]:
                width = self.proposers[request.draft].width
                wishes.append(Wish(request.draft, limits[request.id], request.acceptance, width))
                free.append(request.id)
        chosen = self.policy.choose(wishes, tokens)
        asked = {w.request.id: w.request.depth for w in drawing}
        depths = {i: min(depth, limits[i]) for i, depth in asked.items() if isinstance(depth, int)}
        return dict.fromkeys(limits, 0) | depths | dict(zip(free, chosen, strict=True))

    def _row(self, request: Request, depth: int) -> Row:
        return Row(
            slot=request.slot,
            tokens=request.tokens,
            params=request.params,
            noise=Noise(request.seed, len(request.tokens) - 1),
            depth=depth,
            coupled=request.rule.coupled,
            branching=request.rule.branching,
        )
