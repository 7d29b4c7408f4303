"""Acceptance rates of drafted tokens: counts per request and proposer, and estimates from them.

`Acceptance` counts the verdicts on one proposer's drafts for one request. `SourceAcceptance` learns
from all requests which acceptance rates occur at all (a mixture of beta distributions with fixed
means, whose weights are learned online: empirical Bayes), so that a new request starts with a
sensible `AcceptanceEstimate`. `ConfidenceBins` calibrates the probabilities that a drafter itself
reports for its tokens.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from forerun.types import NUM_CONFIDENCE_BINS, Draft

OWN_PROB_STRENGTH = 8.0  # observations that the drafter's own probability counts for
BIN_DISCOUNT = 0.998  # applied to a bin's counts with each new token in it

PRIOR_STRENGTH = 4.0  # observations that a prior counts for
# Discounts of counts with each round: of one request, of offers by all, of component weights.
REQUEST_DISCOUNT, OFFER_DISCOUNT, COMPONENT_DISCOUNT = 0.95, 0.99, 0.999
# Means of the beta distributions, close enough to each other to tell requests apart.
MEANS = (0.03, 0.12, 0.25, 0.4, 0.55, 0.7, 0.8, 0.9, 0.96)
COMPONENT_STRENGTH = 30  # observations that each component stands for
COMPONENTS = tuple(
    (COMPONENT_STRENGTH * mean, COMPONENT_STRENGTH * (1 - mean)) for mean in MEANS
)  # as pseudo-counts (accepted, rejected)
LOG_NORMALISERS = tuple(math.lgamma(yes) + math.lgamma(no) for yes, no in COMPONENTS)
NEGLIGIBLE = 0.003  # components with a smaller posterior are left out
UNIFORM_SHARE = 0.1  # share of the weights that stays uniform: every request may be an exception
REFRESH_ROUNDS = 16  # rounds of all requests after which a request's estimate is computed anew
NEVER = 1 << 20  # steps
MAX_COUNT = 1e6  # of any discounted count read from a file
MAX_MATCH_BITS = 6  # longer matches are counted together


@dataclass(slots=True)
class ConfidenceBins:
    """Acceptance of drafted tokens by the probability that their drafter gave them.

    The range [0, 1] is divided into NUM_CONFIDENCE_BINS bins; a second set of bins holds siblings
    of a drafter's first choice.

    Attributes:
        accepted, seen: discounted counts, [2 * NUM_CONFIDENCE_BINS].
        rates: float32 [2 * NUM_CONFIDENCE_BINS], the estimated acceptance rate of each bin; native
            kernels read it in place.
    """

    accepted: list[float] = field(default_factory=lambda: [0.0] * 2 * NUM_CONFIDENCE_BINS)
    seen: list[float] = field(default_factory=lambda: [0.0] * 2 * NUM_CONFIDENCE_BINS)
    rates: array[float] = field(
        default_factory=lambda: array("f", map(_bin_middle, range(2 * NUM_CONFIDENCE_BINS)))
    )

    def state(self) -> list[list[float]]:
        """Return the counts, for `load_state` in another process."""
        return [self.accepted, self.seen]

    def load_state(self, state: Sequence[Sequence[float]]) -> None:
        """Start from these counts.

        Raises:
            ValueError, TypeError: `state` did not come from `state()`.
        """
        self.accepted, self.seen = (parse_counts(found) for found in state)
        if not len(self.accepted) == len(self.seen) == 2 * NUM_CONFIDENCE_BINS:
            raise ValueError("wrong number of confidence bins")
        if any(yes > seen for yes, seen in zip(self.accepted, self.seen, strict=True)):
            raise ValueError("more tokens were accepted than seen")
        for index in range(2 * NUM_CONFIDENCE_BINS):
            self._update_rate(index)

    def add(self, draft: Draft, path: Sequence[int], is_open: bool = False) -> None:
        """Count the tokens of a draft after the target accepted `path` of it.

        `is_open`: the text after the last node of `path` is not known yet, so its children say
        nothing. Children of rejected nodes never do.
        """
        kept = set(path)
        decided_parents = kept - {path[-1]} if is_open else kept
        for node, index in zip(range(1, len(draft)), draft.confidence_bins, strict=False):
            if draft.parents[node] not in decided_parents:
                continue
            self.accepted[index] = BIN_DISCOUNT * self.accepted[index] + (node in kept)
            self.seen[index] = BIN_DISCOUNT * self.seen[index] + 1
            self._update_rate(index)

    def _update_rate(self, index: int) -> None:
        accepted = self.accepted[index] + OWN_PROB_STRENGTH * _bin_middle(index)
        self.rates[index] = accepted / (self.seen[index] + OWN_PROB_STRENGTH)


def _bin_middle(index: int) -> float:
    """Return the middle of the probabilities in a bin."""
    return (index % NUM_CONFIDENCE_BINS + 0.5) / NUM_CONFIDENCE_BINS


@dataclass(slots=True)
class BetaCounts:
    """Discounted counts of successes and failures."""

    yes: float = 0.0
    no: float = 0.0

    @property
    def seen(self) -> float:
        """The discounted number of observations."""
        return self.yes + self.no

    def rate(self, prior: float, strength: float = PRIOR_STRENGTH) -> float:
        """Return the success probability; the prior counts for `strength` observations."""
        return (self.yes + strength * prior) / (self.seen + strength)

    def add(self, yes: float, no: float, discount: float) -> None:
        """Discount the counts and add new ones."""
        self.yes = discount * self.yes + yes
        self.no = discount * self.no + no


@dataclass(slots=True)
class Acceptance:
    """Acceptance record of one proposer's drafts for one request.

    Attributes:
        kept: drafted tokens accepted or rejected, given that those before them were accepted. A
            draft that was accepted to its end is a censored observation: the verdict on further
            tokens is not known.
        offered: how often the proposer had anything to draft when it was asked.
        paused_until: the step in which the proposer is asked again; None while drafting seems to
            pay.
        last_accepted: True if the last draft was accepted to its end.
        idle_steps: steps since the proposer last drafted; `NEVER` if it has not.
        estimate: cached estimate from `kept`.
    """

    kept: BetaCounts = field(default_factory=BetaCounts)
    offered: BetaCounts = field(default_factory=BetaCounts)
    paused_until: int | None = None
    last_accepted: bool = False
    idle_steps: int = NEVER
    estimate: AcceptanceEstimate | None = None

    def add(self, drafted: int, accepted: int) -> None:
        """Count one round; `drafted` is 0 if the proposer had nothing to offer."""
        self.idle_steps = 0
        self.estimate = None
        self.last_accepted = 0 < drafted == accepted
        self.offered.add(drafted > 0, drafted == 0, REQUEST_DISCOUNT)
        if drafted:
            self.kept.add(accepted, accepted < drafted, REQUEST_DISCOUNT)


class AcceptanceEstimate:
    """Posterior over one request's acceptance rate: a mixture of beta distributions."""

    def __init__(self, parts: Sequence[tuple[float, float, float]], version: int) -> None:
        """`parts`: (posterior weight, pseudo-count accepted, pseudo-count rejected) per component;
        `version` of the `SourceAcceptance` that it was computed from."""
        self.version = version
        self._parts = [[share, yes, yes + no] for share, yes, no in parts]
        self._chain_probs = [1.0]

    def chain_prob(self, depth: int) -> float:
        """Return the probability that `depth` drafted tokens in a row are accepted."""
        while len(self._chain_probs) <= depth:
            for part in self._parts:
                part[0] *= part[1] / part[2]
                part[1] += 1
                part[2] += 1
            self._chain_probs.append(sum(part[0] for part in self._parts))
        return self._chain_probs[depth]


class SourceAcceptance:
    """Distribution of acceptance rates over all requests of one proposer.

    Acceptance rates are a mixture of beta distributions with fixed means; their weights are learned
    online (empirical Bayes). Where requests have been alike, two rejected rounds change little;
    where some are hopeless and others are not, two rounds tell which kind this one is.
    """

    def __init__(self) -> None:
        self.weights = [1.0] * len(COMPONENTS)
        self.offered = BetaCounts()
        self.version = 0
        self._log_priors: tuple[int, list[float]] = (-1, [])

    def state(self) -> list[float]:
        """Return the counts, for `load_state` in another process."""
        return [*self.weights, self.offered.yes, self.offered.no]

    def load_state(self, state: Sequence[float]) -> None:
        """Start from these counts.

        Raises:
            ValueError, TypeError: `state` did not come from `state()`.
        """
        *weights, yes, no = parse_counts(state)
        # Each round adds 1 and keeps most of what was there, so a sum below 1 cannot come from us.
        if len(weights) != len(COMPONENTS) or sum(weights) < 1:
            raise ValueError(f"these are no weights of {len(COMPONENTS)} components: {weights}")
        self.weights = weights
        self.offered = BetaCounts(yes, no)
        self._log_priors = (-1, [])

    def estimate(self, acceptance: Acceptance) -> AcceptanceEstimate:
        """Return the current estimate for a request."""
        known = acceptance.estimate
        if known is None or known.version != self.version // REFRESH_ROUNDS:
            known = self._estimate(acceptance.kept, self._posterior(acceptance.kept))
            acceptance.estimate = known
        return known

    def add(self, acceptance: Acceptance, drafted: int) -> None:
        """Learn from one round that was already added to the request's own counts."""
        self.offered.add(drafted > 0, drafted == 0, OFFER_DISCOUNT)
        if not drafted:
            return
        posterior = self._posterior(acceptance.kept)
        self.weights = [
            COMPONENT_DISCOUNT * weight + share
            for weight, share in zip(self.weights, posterior, strict=True)
        ]
        self.version += 1
        acceptance.estimate = self._estimate(acceptance.kept, posterior)

    def _estimate(self, kept: BetaCounts, posterior: Sequence[float]) -> AcceptanceEstimate:
        likely = [
            (share, component)
            for share, component in zip(posterior, COMPONENTS, strict=True)
            if share > NEGLIGIBLE
        ]
        total = sum(share for share, _ in likely)
        parts = [(share / total, yes + kept.yes, no + kept.no) for share, (yes, no) in likely]
        return AcceptanceEstimate(parts, self.version // REFRESH_ROUNDS)

    def _posterior(self, kept: BetaCounts) -> list[float]:
        """Return the probability of each component for a request with these counts."""
        lgamma, yes, no = math.lgamma, kept.yes, kept.no
        odds = [
            prior + lgamma(a + yes) + lgamma(b + no)
            for prior, (a, b) in zip(self._log_prior(), COMPONENTS, strict=True)
        ]
        largest = max(odds)
        shares = [math.exp(odd - largest) for odd in odds]
        total = sum(shares)
        return [share / total for share in shares]

    def _log_prior(self) -> list[float]:
        """Return the part of each component's log-odds that does not depend on a request."""
        if self._log_priors[0] != self.version:
            least = UNIFORM_SHARE * sum(self.weights) / len(COMPONENTS)
            odds = [
                math.log(weight + least) - normaliser
                for weight, normaliser in zip(self.weights, LOG_NORMALISERS, strict=True)
            ]
            self._log_priors = self.version, odds
        return self._log_priors[1]


def parse_counts(found: Sequence[float]) -> list[float]:
    """Read discounted counts from a file of unknown origin.

    Raises:
        ValueError, TypeError: these are no counts.
    """
    numbers = [float(number) for number in found]
    if not all(0 <= number < MAX_COUNT for number in numbers):
        raise ValueError(f"these are no counts: {numbers}")
    return numbers


@dataclass(slots=True)
class DraftOption:
    """A request that could draft with a proposer in this step.

    Attributes:
        source: the proposer's name; "" if the draft exists already and costs nothing.
        limit: the maximum depth.
        acceptance: the request's acceptance with this proposer.
        width: nodes per level.
        lag: committed tokens that the proposer has not read yet.
        copies: the proposer copies text, which may begin to pay with any token.
        horizon: steps with drafts that the request is expected to take yet (`expected_steps`).
    """

    source: str
    limit: int
    acceptance: Acceptance
    width: int = 1
    lag: int = 0
    copies: bool = False
    horizon: int = 0


def kind_of_match(source: str, match: int) -> str:
    """Return the name under which copies behind a match of `match` tokens are counted.

    Copies behind long matches are accepted more often, so their acceptance is kept apart by powers
    of two.
    """
    return f"{source}, {min(match.bit_length(), MAX_MATCH_BITS)} bits"
