"""Counters of one request."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from forerun.types import Draft, Verdict

# Why a step drafted for a request, or did not.
DRAFTED = "drafted"
NOTHING = "nothing_to_draft"
UNPAID = "would_not_pay"
PAUSED = "rested"
NO_ROOM = "no_room"
EDGE = "first_or_last"  # the step that ends the prompt, or has one token left
REASONS = {
    NOTHING: "nothing to draft in {}",
    UNPAID: "would not have paid in {}",
    PAUSED: "paused in {} because it was slower",
    NO_ROOM: "no room in {}",
    EDGE: "first or last token in {}",
}


@dataclass(slots=True)
class SourceStats:
    """Tokens that one proposer drafted, and how many of them were accepted."""

    drafted: int = 0
    accepted: int = 0


class StatsBySource(dict[str, SourceStats]):
    """Statistics by proposer; of one that drafted nothing they are zero."""

    def __missing__(self, name: str) -> SourceStats:
        return SourceStats()


@dataclass(slots=True)
class RequestStats:
    """Counters of one request.

    Attributes:
        prompt_tokens: tokens of the prompt.
        cached_tokens: those of them that the prefix cache had.
        completion_tokens: tokens of the output.
        steps: target passes that produced tokens.
        drafted: draft nodes verified.
        accepted: those of them that were accepted.
        preemptions: how often the request gave its cache to an older one.
        draft_seconds: time of drafting in its steps; a step shared by several requests counts in
            full for each.
        verify_seconds: time of the rest of its steps.
        seconds: from arrival to end.
        first_token_seconds: from arrival to the first token.
        rounds: (tokens drafted, accepted) of each step.
        depths: the depth of each step's draft.
        by_source: the same by proposer.
        reasons: why steps drafted or did not.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    seconds: float = 0.0
    first_token_seconds: float = 0.0
    rounds: list[tuple[int, int]] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    by_source: StatsBySource = field(default_factory=StatsBySource)
    reasons: Counter[str] = field(default_factory=Counter)

    def count(
        self, draft: Draft, verdict: Verdict, draft_seconds: float, verify_seconds: float
    ) -> None:
        """Count one verdict."""
        kept = set(verdict.path)
        for node in range(1, len(draft)):
            for name in draft.sources[node].split("&"):
                if name not in self.by_source:
                    self.by_source[name] = SourceStats()
                source = self.by_source[name]
                source.drafted += 1
                source.accepted += node in kept
        self.rounds.append((len(draft) - 1, len(verdict.path) - 1))
        self.depths.append(max(draft.depths()))
        self.drafted += len(draft) - 1
        self.accepted += len(verdict.path) - 1
        self.steps += 1
        self.draft_seconds += draft_seconds
        self.verify_seconds += verify_seconds

    @property
    def why(self) -> str:
        """A sentence on how often the request drafted and why not more often; "" if it never
        could."""
        if not self.reasons:
            return ""
        drafted = f"drafted in {self.reasons[DRAFTED]} of {self.reasons.total()} steps"
        reasons = [
            REASONS[reason].format(count)
            for reason, count in self.reasons.most_common()
            if reason in REASONS
        ]
        return "; ".join([drafted, *reasons])

    @property
    def accepted_length(self) -> float:
        """Tokens emitted per target pass, the target's own one included."""
        return self.completion_tokens / self.steps if self.steps else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        nested = ("by_source", "rounds", "depths", "reasons")
        values: dict[str, Any] = {
            name: getattr(self, name) for name in self.__slots__ if name not in nested
        }
        values = {k: round(v, 6) if isinstance(v, float) else v for k, v in values.items()}
        return values | {
            "accepted_length": round(self.accepted_length, 4),
            "by_source": {
                name: {"drafted": source.drafted, "accepted": source.accepted}
                for name, source in self.by_source.items()
            },
            "reasons": dict(self.reasons),
            "why": self.why,
        }
