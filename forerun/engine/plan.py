"""How one request is drafted for in a step: who is asked, in which order, until there is a draft."""

from __future__ import annotations

from forerun.draft.base import Proposer
from forerun.draft.compose import Asked, Offer, Ranking, ask
from forerun.engine.scheduler import Work
from forerun.engine.stats import NOTHING, UNPAID
from forerun.types import Draft


class Plan:
    """One request while it is drafted for: `wanted` is asked next, for a draft `depth` deep, and `draft` is there once
    nobody is; `why` is what kept it from being longer than a root, if it is not. `left` are those who were not asked
    yet, `speed` what the best copy lets expect."""

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
