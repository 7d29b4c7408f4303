"""Overlapped drafting: proposers that draft on while the target verifies, and their cost.

Drafting beside a forward pass takes cores and memory bandwidth from it. The time that the pass
takes longer for it is a cost of drafting, not a measurement of the pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from forerun.draft.proposer import DraftRequest, Proposer
from forerun.engine.depth import DepthPolicy
from forerun.types import Draft


class _Spent(NamedTuple):
    """Time that one proposer's drafts of a step took: arguments of `CostModel.add_draft`."""

    source: str
    depth: int
    seconds: float
    num_requests: int
    lag: int


@dataclass(slots=True)
class Overlap:
    """Overlapped drafting of one step.

    Attributes:
        waiting_is_free: the clock stands still while this thread waits (it counts CPU time).
        draft_requests: those to overlapping proposers, by request id.
        spent: what their drafts took; it is recorded once the forward pass is known.
        busy: proposers that draft beside the forward pass.
    """

    policy: DepthPolicy
    waiting_is_free: bool = True
    draft_requests: dict[Proposer, dict[int, DraftRequest]] = field(default_factory=dict)
    spent: list[_Spent] = field(default_factory=list)
    busy: list[Proposer] = field(default_factory=list)

    def note_requests(
        self, proposer: Proposer, ids: Sequence[int], requests: Sequence[DraftRequest]
    ) -> None:
        """Remember the requests to a proposer, by request id."""
        if proposer.overlaps:
            self.draft_requests.setdefault(proposer, {}).update(zip(ids, requests, strict=True))

    def record_draft(
        self, proposer: Proposer, depth: int, seconds: float, num_requests: int, lag: int = 0
    ) -> None:
        """Record the time that drafting took, `lag` missed tokens included."""
        if proposer.overlaps:
            seconds += proposer.wait_seconds * self.waiting_is_free
            self.spent.append(_Spent(proposer.name, depth, seconds, num_requests, lag))
        else:
            self.policy.costs.add_draft(proposer.name, depth, seconds, num_requests, lag)

    @contextmanager
    def during_forward(self, drafts: Mapping[int, Draft]) -> Iterator[None]:
        """Let proposers draft on while the target verifies `drafts`, by request id."""
        for proposer, by_id in self.draft_requests.items():
            verified = [i for i in by_id if len(drafts[i]) > 1]
            if verified:
                proposer.begin_overlap([by_id[i] for i in verified], [drafts[i] for i in verified])
                self.busy.append(proposer)
        try:
            yield
        finally:
            for proposer in self.busy:
                proposer.end_overlap()

    def record_forward(self, num_tokens: int, seconds: float, decodes: bool) -> None:
        """Record the step's forward pass over `num_tokens` tokens; `decodes`: it read no prompt."""
        extra = 0.0
        if not decodes:
            self.policy.costs.add_prefill(num_tokens, seconds)
        elif self.busy:
            extra = max(seconds - self.policy.forward_seconds(num_tokens), 0.0)
        else:
            self.policy.record_forward(num_tokens, seconds)
        for spent in self.spent:
            self.policy.costs.add_draft(*spent._replace(seconds=spent.seconds + extra))
        self.policy.steps += 1
