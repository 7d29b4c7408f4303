"""What goes on while the target verifies: who drafts ahead, and what that costs.

Drafting ahead takes cores and memory from the pass beside it. What that takes longer than it would
alone is a cost of drafting, and no measure of passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from forerun.draft.proposer import DraftRequest, Proposer
from forerun.engine.depth import DepthPolicy
from forerun.engine.request import Request
from forerun.types import Draft


@dataclass(slots=True)
class Overlap:
    """Of one step.

    Attributes:
        stands: the clock stands still while this thread waits.
        rows: those that who drafts ahead was asked for, by request.
        spent: what their drafts took: proposer, depth, seconds, requests, tokens missed.
        busy: who drafts ahead.
    """

    policy: DepthPolicy
    stands: bool = True
    rows: dict[Proposer, dict[int, DraftRequest]] = field(default_factory=dict)
    spent: list[tuple[str, int, float, int, int]] = field(default_factory=list)
    busy: list[Proposer] = field(default_factory=list)

    def ask(
        self, proposer: Proposer, requests: Sequence[Request], rows: Sequence[DraftRequest]
    ) -> None:
        """A proposer is asked for these rows of requests."""
        if proposer.overlaps:
            asked = {request.id: row for request, row in zip(requests, rows, strict=True)}
            self.rows.setdefault(proposer, {}).update(asked)

    def spend(
        self, proposer: Proposer, depth: int, seconds: float, requests: int, lag: int = 0
    ) -> None:
        """Drafting to `depth` for so many requests took so long, and to read what was missed of
        them."""
        if proposer.overlaps:
            self.spent.append(
                (
                    proposer.name,
                    depth,
                    seconds + proposer.wait_seconds * self.confidence_rates,
                    requests,
                    lag,
                )
            )
        else:
            self.policy.record_draft(proposer.name, depth, seconds, requests, lag)

    @contextmanager
    def during(self, drafts: Mapping[int, Draft]) -> Iterator[None]:
        """While the target verifies these drafts of requests."""
        for proposer, rows in self.rows.items():
            verified = [request for request in rows if len(drafts[request]) > 1]
            if verified:
                proposer.begin_overlap(
                    [rows[request] for request in verified],
                    [drafts[request] for request in verified],
                )
                self.busy.append(proposer)
        try:
            yield
        finally:
            for proposer in self.busy:
                proposer.end_overlap()

    def record(self, tokens: int, seconds: float, measures: bool) -> None:
        """The pass of the step, over so many tokens and with all that came of it, took so long;
        whether that `measures`
        what one takes: one that reads prompts does not."""
        longer = 0.0
        if not measures:
            self.policy.record_read(tokens, seconds)
        elif self.busy:
            longer = max(seconds - self.policy.cost(tokens), 0.0)
        else:
            self.policy.record_pass(tokens, seconds)
        for name, depth, drafting, requests, lag in self.spent:
            self.policy.record_draft(name, depth, drafting + longer, requests, lag)
        self.policy.end_step()
