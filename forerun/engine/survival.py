"""How often drafted tokens stand, by how sure their drafter was of them: what its own probabilities are worth here.

A drafter's probability is a guess at the chance that its token stands, and a biased one. So tokens are counted by the
sixteenth that their probability falls into, and what became of them is the chance of the next ones. A draft may then
end as soon as the product of these chances is no longer worth a level more (SpecDec++, arXiv 2405.19715, has the stop;
the counts stand in for its trained head).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from forerun.engine.acceptance import counts
from forerun.types import SIXTEENTHS, Draft

STRENGTH = 8.0  # tokens that the drafter's own word counts for
KEEP = 0.998  # of what was counted, at each token of the same sixteenth


@dataclass(slots=True)
class Survival:
    """Of one drafter, at one kind of temperature. `stands` [32] float32 is read by native rounds: of first choices,
    then of what stands beside them."""

    yes: list[float] = field(default_factory=lambda: [0.0] * 2 * SIXTEENTHS)
    seen: list[float] = field(default_factory=lambda: [0.0] * 2 * SIXTEENTHS)
    stands: array[float] = field(default_factory=lambda: array("f", map(_own_word, range(2 * SIXTEENTHS))))

    def state(self) -> list[list[float]]:
        """Its counts, for `recall` of another process."""
        return [self.yes, self.seen]

    def recall(self, state: Sequence[Sequence[float]]) -> None:
        """Begin with these counts. Raises ValueError or TypeError for what `state` never gave."""
        self.yes, self.seen = (counts(found) for found in state)
        if not len(self.yes) == len(self.seen) == 2 * SIXTEENTHS:
            raise ValueError("there are other parts of a probability")
        if any(yes > seen for yes, seen in zip(self.yes, self.seen, strict=True)):
            raise ValueError("more came true than was seen")
        for sixteenth in range(2 * SIXTEENTHS):
            self._say(sixteenth)

    def add(self, draft: Draft, path: Sequence[int], is_open: bool = False) -> None:
        """What became of a draft's tokens, of which the target said those of `path`, and no more yet if that `is_open`.
        Those behind one that does not stand say nothing."""
        kept = set(path)
        told = kept - {path[-1]} if is_open else kept
        for node, sixteenth in zip(range(1, len(draft)), draft.sure, strict=False):
            if draft.parents[node] not in told:
                continue
            self.yes[sixteenth] = KEEP * self.yes[sixteenth] + (node in kept)
            self.seen[sixteenth] = KEEP * self.seen[sixteenth] + 1
            self._say(sixteenth)

    def _say(self, sixteenth: int) -> None:
        right = self.yes[sixteenth] + STRENGTH * _own_word(sixteenth)
        self.stands[sixteenth] = right / (self.seen[sixteenth] + STRENGTH)


def _own_word(sixteenth: int) -> float:
    """The middle of the probabilities that fall into a sixteenth."""
    return (sixteenth % SIXTEENTHS + 0.5) / SIXTEENTHS
