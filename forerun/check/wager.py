"""An anytime-valid test of a sampler whose law is known: bets that nobody wins in the long run
while it is right.

Before each token the bettor names events and stakes a fraction of its capital that one will come
true more often, or less, than the law says. While tokens have that law, capital is a martingale of
mean 1, so it ever reaches 1/alpha with a probability of at most alpha, however long one looks and
whenever one stops (Ville 1939; Ramdas et al. 2210.01948). Capital is the mean over all events and
stakes: a mixture needs no correction for how many there are.

Beside it stands what the tokens so far prove: by how much, on average over the tokens, the
probability of an event can differ from the law (the normal mixture boundary of Howard et al.
1810.08240, for variables within [0, 1])."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

ALPHA = 1e-4
SIZES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
STAKES = np.array([sign * size for size in SIZES for sign in (1, -1)])
TUNED_FOR = 1000  # tokens at which the bound is tightest


class Wager:
    """Bets on `events` events a token. Deterministic: the same tokens give the same capital."""

    def __init__(self, events: int) -> None:
        self.tokens = 0
        self._log = np.zeros((events, len(STAKES)))
        self._excess = np.zeros(events)
        self._expected = np.zeros(events)

    def add(self, hits: ArrayLike, chances: ArrayLike) -> None:
        """One token: which events came true, and the chance the law gave each before the token was
        drawn. [E], [E]"""
        expected = np.clip(np.asarray(chances, dtype=float), 0.0, 1.0)
        surprise = np.asarray(hits, dtype=float) - expected
        self._log += np.log1p(surprise[:, None] * STAKES)
        self._excess += surprise
        self._expected += expected
        self.tokens += 1

    @property
    def evidence(self) -> float:
        """Capital: large only if the tokens do not have the law."""
        top = float(self._log.max())
        return math.exp(min(top, 700.0)) * float(np.mean(np.exp(self._log - top)))

    @property
    def refuted(self) -> bool:
        """Whether the law is refuted, wrongly with a probability of at most ALPHA."""
        return self.evidence >= 1 / ALPHA

    @property
    def excess(self) -> list[float]:
        """By how much each event came more often than the law says, a token. [E]"""
        return [float(e) for e in self._excess / max(self.tokens, 1)]

    @property
    def expected(self) -> list[float]:
        """How often the law says each event comes, a token. [E]"""
        return [float(e) for e in self._expected / max(self.tokens, 1)]

    def bound(self) -> float:
        """At confidence 1 - ALPHA, whenever one stops: the most by which |excess| differs from the
        true mean bias."""
        if not self.tokens:
            return 1.0
        variance, prior = self.tokens / 4, TUNED_FOR / 4 / (2 * math.log(1 / ALPHA))
        total = math.sqrt((variance + prior) * math.log((variance + prior) / (prior * ALPHA**2)))
        return min(1.0, total / self.tokens)
