"""State of drafting for one request: its record of acceptance, and its draft while it is made."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from forerun.draft.compose import AskContext, Offer, Ranking, ask
from forerun.draft.device_recycle import DeviceRecycle
from forerun.draft.draft_model import DraftModel
from forerun.draft.hidden_states import HiddenStateProposer
from forerun.draft.proposer import DraftRequest, Proposer
from forerun.engine.acceptance import Acceptance
from forerun.engine.depth import BatchState
from forerun.engine.guard import RequestGuard
from forerun.engine.request import Request, ScheduledRequest
from forerun.engine.stats import NOTHING, UNPAID
from forerun.runtime.device_rounds import DeviceDrafter
from forerun.runtime.rounds import GrowingText, HeadRounds
from forerun.types import Draft


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
        reason: why it drafted in the last step, or did not.
        text: its tokens for native rounds.
        has_copied: True if a copy was drafted for it.
        least_matches: by proposer and number of requests the shortest match behind which a copy
            pays, and the step until which that is believed.
    """

    acceptance: defaultdict[str, Acceptance] = field(
        default_factory=lambda: defaultdict(Acceptance)
    )
    last_asked: dict[str, tuple[int, int]] = field(default_factory=dict)
    guard: RequestGuard = field(default_factory=RequestGuard)
    released: bool = False
    allowed_depth: int = 0
    proposed: list[ProposedDraft] = field(default_factory=list)
    reason: str = NOTHING
    text: GrowingText = field(default_factory=GrowingText)
    has_copied: bool = False
    least_matches: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)

    @property
    def has_proposed(self) -> bool:
        """True if a proposer drafted for the request in this step."""
        return self.allowed_depth > 0 or bool(self.proposed)


@dataclass(frozen=True, slots=True)
class DeferredDraft:
    """Drafts that several rounds at once will make (see `multi_step`).

    `requests` are by slot the draft requests to `proposer`, `rounds` is what it prepared
    instead of drafts, and `seconds` the time that took.
    """

    proposer: HiddenStateProposer | DraftModel | DeviceRecycle
    requests: Mapping[int, DraftRequest]
    rounds: HeadRounds | DeviceDrafter
    batch: BatchState
    seconds: float

    def of(self, request: Request) -> DraftRequest | None:
        """Return the deferred draft request of a request, None if it has none."""
        return self.requests.get(request.slot)


class DraftPlan:
    """One request while its draft is made.

    Attributes:
        next_part: the proposer that is asked next, None once the draft is complete.
        draft: the draft, once no further proposer is asked.
        depth: the depth that `next_part` is asked for.
        reason: why the draft is only a root, if it is.
        remaining_parts: proposers that were not asked yet.
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
        self.remaining_parts = list(proposer.parts)
        self.speed = 0.0
        self._asking = ask(proposer, AskContext(self.request.rule.branching, ranking))
        self.next_part: Proposer | None = self._begin_part(next(self._asking))

    @property
    def part(self) -> Proposer:
        """The proposer that is asked next; only while there is one."""
        assert self.next_part is not None
        return self.next_part

    @property
    def limit(self) -> int:
        """The most tokens of a draft that the request can use; the step that ends a prompt drafts
        nothing, so that the first token comes soonest."""
        return self.request.remaining if self.scheduled.count == 1 else 0

    def take_offer(self, offer: Offer | None, reason: str = NOTHING) -> None:
        """Accept the draft of `part`; None and a `reason` if it offers nothing."""
        root = Draft.root(self.request.tokens[-1])
        if offer:
            self.speed = max(self.speed, offer.speed)
            self.reason = UNPAID
        elif reason != NOTHING:
            self.reason = reason
        try:
            self.next_part = self._begin_part(self._asking.send(offer or Offer(root, root)))
        except StopIteration as end:
            self.next_part, self.draft = None, end.value

    def _begin_part(self, proposer: Proposer) -> Proposer:
        self.remaining_parts = [other for other in self.remaining_parts if other is not proposer]
        return proposer
