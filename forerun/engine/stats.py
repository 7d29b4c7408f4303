"""What is counted about one request."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from forerun.types import Draft, Verdict

# What became of a step: why it drafted, or did not. EDGE is the pass that ends a prompt, or has one
# token left to say.
DRAFTED, NOTHING, UNPAID, RESTED, NO_ROOM, EDGE = (
    "drafted", "nothing_to_draft", "would_not_pay", "rested", "no_room", "first_or_last",
)  # fmt: skip
WORDS = {
    NOTHING: "nothing to draft in {}", UNPAID: "would not have paid in {}", RESTED: "rested in {}, since it was slower",
    NO_ROOM: "no room in {}", EDGE: "first or last token in {}",
}  # fmt: skip


@dataclass(slots=True)
class SourceStats:
    """Tokens one proposer drafted, and how many of them were accepted."""

    drafted: int = 0
    accepted: int = 0


@dataclass(slots=True)
class RequestStats:
    """Counters of one request.

    steps: target passes that produced tokens. drafted, accepted: draft nodes verified, and those
        kept.
    draft_seconds, verify_seconds: time of the steps it took part in, spent proposing and in the
        target pass with
    its rule; a step shared by several requests counts in full for each. seconds: from its arrival
    to its end."""

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
    rounds: list[tuple[int, int]] = field(
        default_factory=list
    )  # of each step: tokens drafted, accepted
    depths: list[int] = field(default_factory=list)  # of each step: how deep its draft reached
    by_source: defaultdict[str, SourceStats] = field(
        default_factory=lambda: defaultdict(SourceStats)
    )
    reasons: Counter[str] = field(
        default_factory=Counter
    )  # of steps that might have drafted: what became of them

    def count(self, draft: Draft, verdict: Verdict, drafting: float, verifying: float) -> None:
        """One verdict, and the seconds that it took to draft and to verify it."""
        kept = set(verdict.path)
        for node in range(1, len(draft)):
            for name in draft.sources[node].split("&"):
                source = self.by_source[name]
                source.drafted += 1
                source.accepted += node in kept
        self.rounds.append((len(draft) - 1, len(verdict.path) - 1))
        self.depths.append(max(draft.depths()))
        self.drafted += len(draft) - 1
        self.accepted += len(verdict.path) - 1
        self.steps += 1
        self.draft_seconds += drafting
        self.verify_seconds += verifying

    @property
    def why(self) -> str:
        """How often it drafted and why not more often, in a sentence; "" where nothing might have
        been drafted."""
        if not self.reasons:
            return ""
        rest = [
            WORDS[reason].format(count)
            for reason, count in self.reasons.most_common()
            if reason in WORDS
        ]
        return "; ".join(
            [f"drafted in {self.reasons[DRAFTED]} of {self.reasons.total()} steps", *rest]
        )

    @property
    def accepted_length(self) -> float:
        """Tokens emitted per target pass, the target's own one included."""
        return self.completion_tokens / self.steps if self.steps else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        names = [n for n in self.__slots__ if n not in ("by_source", "rounds", "depths", "reasons")]
        values: dict[str, Any] = {name: getattr(self, name) for name in names}
        values = {k: round(v, 6) if isinstance(v, float) else v for k, v in values.items()}
        sources = {
            name: {"drafted": s.drafted, "accepted": s.accepted}
            for name, s in self.by_source.items()
        }
        length = round(self.accepted_length, 4)
        return values | {
            "accepted_length": length, "by_source": sources, "reasons": dict(self.reasons), "why": self.why,
        }  # fmt: skip
