"""What became of drafts: counts by proposer and request, which the depth policy reads and adds to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

STRENGTH = 4.0  # how many observations a prior is worth
NEVER = 1 << 20  # steps
MOST = 1e6  # of any discounted count
LONGEST = 6  # bits of the length of a match, from which on all are alike


@dataclass(slots=True)
class Chance:
    """Discounted counts of what came true and what did not."""

    yes: float = 0.0
    no: float = 0.0

    @property
    def seen(self) -> float:
        """How much was counted."""
        return self.yes + self.no

    def rate(self, prior: float, strength: float = STRENGTH) -> float:
        """Probability that it comes true; the prior is worth so many observations."""
        return (self.yes + strength * prior) / (self.seen + strength)

    def add(self, yes: float, no: float, keep: float) -> None:
        self.yes, self.no = keep * self.yes + yes, keep * self.no + no


@dataclass(slots=True)
class Acceptance:
    """What became of one proposer's drafts, for one request or for all.

    Attributes:
        kept: of drafted tokens: those accepted, given that those before them were. A draft accepted to its end tells
            nothing of what would have come after (censored).
        offered: of the times it was asked: those it had something to draft.
        rest: steps before it is asked again; None while it seems to pay.
        right: its last draft was accepted to the end.
        idle: steps since it drafted last, `NEVER` where it has not.
    """

    kept: Chance = field(default_factory=Chance)
    offered: Chance = field(default_factory=Chance)
    rest: int | None = None
    right: bool = False
    idle: int = NEVER

    def state(self) -> list[float]:
        """Its counts, for `recall` of another process."""
        return [self.kept.yes, self.kept.no, self.offered.yes, self.offered.no]

    def recall(self, state: Sequence[float]) -> None:
        """Begin with these counts. Raises ValueError or TypeError for what `state` never gave."""
        kept_yes, kept_no, offered_yes, offered_no = counts(state)
        self.kept, self.offered = Chance(kept_yes, kept_no), Chance(offered_yes, offered_no)

    def add(self, drafted: int, accepted: int, keep: float) -> None:
        """One round; 0 drafted is nothing to offer."""
        self.idle = 0
        self.offered.add(drafted > 0, drafted == 0, keep)
        self.right = 0 < drafted == accepted
        if drafted:
            self.kept.add(accepted, accepted < drafted, keep)


def counts(found: Sequence[float]) -> list[float]:
    """Numbers from a file that may be anybody's, as counts. Raises ValueError or TypeError for what are none."""
    numbers = [float(number) for number in found]
    if not all(0 <= number < MOST for number in numbers):
        raise ValueError(f"these are no counts: {numbers}")
    return numbers


@dataclass(slots=True)
class Wish:
    """One request that could draft: its proposer, the most it may draft, its acceptance and what a level costs."""

    source: str
    limit: int
    acceptance: Acceptance
    width: int = 1


def kind_of_match(source: str, match: int) -> str:
    """Copies behind long matches are right more often: the policy keeps their acceptance apart, by powers of two."""
    return f"{source}, {min(match.bit_length(), LONGEST)} bits"
