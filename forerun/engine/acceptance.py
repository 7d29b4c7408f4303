"""What became of drafts: counts by proposer and request, which the depth policy reads and adds
to."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from forerun.types import NUM_CONFIDENCE_BINS, Draft

OWN_WORD_STRENGTH = 8.0  # tokens that the drafter's own word counts for
BIN_DISCOUNT = 0.998  # of what was counted, at each token of the same sixteenth


@dataclass(slots=True)
class ConfidenceBins:
    """Of one drafter, at one kind of temperature. `stands` [32] float32 is read by native rounds:
    of first choices, then of what stands beside them."""

    yes: list[float] = field(default_factory=lambda: [0.0] * 2 * NUM_CONFIDENCE_BINS)
    seen: list[float] = field(default_factory=lambda: [0.0] * 2 * NUM_CONFIDENCE_BINS)
    stands: array[float] = field(
        default_factory=lambda: array("f", map(_own_word, range(2 * NUM_CONFIDENCE_BINS)))
    )

    def state(self) -> list[list[float]]:
        """Its counts, for `recall` of another process."""
        return [self.yes, self.seen]

    def recall(self, state: Sequence[Sequence[float]]) -> None:
        """Begin with these counts. Raises ValueError or TypeError for what `state` never gave."""
        self.yes, self.seen = (counts(found) for found in state)
        if not len(self.yes) == len(self.seen) == 2 * NUM_CONFIDENCE_BINS:
            raise ValueError("there are other parts of a probability")
        if any(yes > seen for yes, seen in zip(self.yes, self.seen, strict=True)):
            raise ValueError("more came true than was seen")
        for sixteenth in range(2 * NUM_CONFIDENCE_BINS):
            self._say(sixteenth)

    def add(self, draft: Draft, path: Sequence[int], is_open: bool = False) -> None:
        """What became of a draft's tokens, of which the target said those of `path`, and no more
        yet if that `is_open`. Those behind one that does not stand say nothing."""
        kept = set(path)
        told = kept - {path[-1]} if is_open else kept
        for node, sixteenth in zip(range(1, len(draft)), draft.confidence_bins, strict=False):
            if draft.parents[node] not in told:
                continue
            self.yes[sixteenth] = BIN_DISCOUNT * self.yes[sixteenth] + (node in kept)
            self.seen[sixteenth] = BIN_DISCOUNT * self.seen[sixteenth] + 1
            self._say(sixteenth)

    def _say(self, sixteenth: int) -> None:
        right = self.yes[sixteenth] + OWN_WORD_STRENGTH * _own_word(sixteenth)
        self.stands[sixteenth] = right / (self.seen[sixteenth] + OWN_WORD_STRENGTH)


def _own_word(sixteenth: int) -> float:
    """The middle of the probabilities that fall into a sixteenth."""
    return (sixteenth % NUM_CONFIDENCE_BINS + 0.5) / NUM_CONFIDENCE_BINS


STRENGTH = 4.0  # how many observations a prior is worth
KEEP, KEEP_OFFERED, KEEP_LAWS = (
    0.95,
    0.99,
    0.999,
)  # of what was counted, at each round: of a request, and of all
MEANS = (
    0.03,
    0.12,
    0.25,
    0.4,
    0.55,
    0.7,
    0.8,
    0.9,
    0.96,
)  # of laws of acceptance, near enough to tell requests apart
ALIKE = 30  # observations that a law is worth
LAWS = tuple((ALIKE * mean, ALIKE * (1 - mean)) for mean in MEANS)  # as counts
TAKEN = tuple(math.lgamma(yes) + math.lgamma(no) for yes, no in LAWS)
UNLIKELY = 0.003  # that a request has a law: it is left out
ANY = 0.1  # of the weights of laws, spread over all: no request is beyond being unlike the others
FRESH = 16  # rounds of all requests after which what is believed of one is worked out anew
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
    """What became of one proposer's drafts for one request.

    Attributes:
        kept: of drafted tokens: those accepted, given that those before them were. A draft accepted
            to its end tells nothing of what would have come after (censored).
        offered: of the times it was asked: those it had something to draft.
        rest: the step in which it is asked again; None while it seems to pay.
        right: its last draft was accepted to the end.
        idle: steps since it drafted last, `NEVER` where it has not.
        belief: what follows of `kept`, as long as that stays what it is.
    """

    kept: Chance = field(default_factory=Chance)
    offered: Chance = field(default_factory=Chance)
    rest: int | None = None
    right: bool = False
    idle: int = NEVER
    belief: Belief | None = None

    def add(self, drafted: int, accepted: int) -> None:
        """One round; 0 drafted is nothing to offer."""
        self.idle, self.belief, self.right = 0, None, 0 < drafted == accepted
        self.offered.add(drafted > 0, drafted == 0, KEEP)
        if drafted:
            self.kept.add(accepted, accepted < drafted, KEEP)


class Belief:
    """How likely the tokens of a draft are to stand: a mixture of beta laws of one request's
    acceptance."""

    def __init__(self, parts: Sequence[tuple[float, float, float]], version: int) -> None:
        """`parts`: (how likely it is this one, its pseudo-counts of yes and of no); `version` of
        what it rests on."""
        self.version, self._parts = version, [[share, yes, yes + no] for share, yes, no in parts]
        self._stands = [1.0]

    def stands(self, depth: int) -> float:
        """The chance that so many tokens stand, one behind the other."""
        while len(self._stands) <= depth:
            for part in self._parts:
                part[0] *= part[1] / part[2]
                part[1] += 1
                part[2] += 1
            self._stands.append(sum(part[0] for part in self._parts))
        return self._stands[depth]


class Source:
    """What became of one proposer's drafts for all requests: which acceptances they had, so that a
    new one begins with what is likely, and how soon it is believed to be unlike the others follows
    from how unlike they were.

    Acceptance is a mixture of beta laws with fixed means, whose weights are learned (empirical
    Bayes, online)."""

    def __init__(self) -> None:
        self.weights = [1.0] * len(LAWS)
        self.offered = Chance()
        self.version = 0
        self._read: tuple[int, list[float]] = (-1, [])

    def state(self) -> list[float]:
        """Its counts, for `recall` of another process."""
        return [*self.weights, self.offered.yes, self.offered.no]

    def recall(self, state: Sequence[float]) -> None:
        """Begin with these counts. Raises ValueError or TypeError for what `state` never gave."""
        *weights, yes, no = counts(state)
        if (
            len(weights) != len(LAWS) or sum(weights) < 1
        ):  # each round adds 1, and keeps most of what was there
            raise ValueError(f"these are no weights of {len(LAWS)} laws: {weights}")
        self.weights, self.offered, self._read = weights, Chance(yes, no), (-1, [])

    def belief(self, acceptance: Acceptance) -> Belief:
        """Of a request."""
        if acceptance.belief is None or acceptance.belief.version != self.version // FRESH:
            acceptance.belief = self._belief(acceptance.kept, self._shares(acceptance.kept))
        return acceptance.belief

    def add(self, acceptance: Acceptance, drafted: int) -> None:
        """One round of a request, which has been added there."""
        self.offered.add(drafted > 0, drafted == 0, KEEP_OFFERED)
        if drafted:
            shares = self._shares(acceptance.kept)
            self.weights = [
                KEEP_LAWS * weight + share
                for weight, share in zip(self.weights, shares, strict=True)
            ]
            self.version += 1
            acceptance.belief = self._belief(acceptance.kept, shares)

    def _belief(self, kept: Chance, shares: Sequence[float]) -> Belief:
        likely = [(share, law) for share, law in zip(shares, LAWS, strict=True) if share > UNLIKELY]
        total = sum(share for share, _ in likely)
        parts = [(share / total, yes + kept.yes, no + kept.no) for share, (yes, no) in likely]
        return Belief(parts, self.version // FRESH)

    def _shares(self, kept: Chance) -> list[float]:
        """How likely a request with such counts is to have each law."""
        lgamma, yes, no = math.lgamma, kept.yes, kept.no
        odds = [
            known + lgamma(a + yes) + lgamma(b + no)
            for known, (a, b) in zip(self._known(), LAWS, strict=True)
        ]
        most = max(odds)
        shares = [math.exp(odd - most) for odd in odds]
        total = sum(shares)
        return [share / total for share in shares]

    def _known(self) -> list[float]:
        """What of the odds of each law has nothing to do with a request: its weight, and what its
        own counts take."""
        if self._read[0] != self.version:
            least = ANY * sum(self.weights) / len(LAWS)
            odds = [
                math.log(weight + least) - taken
                for weight, taken in zip(self.weights, TAKEN, strict=True)
            ]
            self._read = self.version, odds
        return self._read[1]


def counts(found: Sequence[float]) -> list[float]:
    """Numbers from a file that may be anybody's, as counts. Raises ValueError or TypeError for what
    are none."""
    numbers = [float(number) for number in found]
    if not all(0 <= number < MOST for number in numbers):
        raise ValueError(f"these are no counts: {numbers}")
    return numbers


@dataclass(slots=True)
class DraftOption:
    """One request that could draft: its proposer, the most it may draft, its acceptance, how many
    nodes a level may have, and how many tokens the proposer has missed while others drafted or
    nobody did, the prompt at first."""

    source: str
    limit: int
    acceptance: Acceptance
    width: int = 1
    lag: int = 0


def kind_of_match(source: str, match: int) -> str:
    """Copies behind long matches are right more often: the policy keeps their acceptance apart, by
    powers of two."""
    return f"{source}, {min(match.bit_length(), LONGEST)} bits"
