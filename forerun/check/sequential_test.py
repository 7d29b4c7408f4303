"""An anytime-valid sequential test (an e-process) of a sampler whose distribution is known.

For each token the test bets fractions of its capital that an event occurs more often, or less
often, than the claimed distribution says. While tokens have that distribution, capital is a
martingale of mean 1, so it reaches 1 / alpha with probability at most alpha, however long the test
runs and whenever it stops (Ville 1939; Ramdas et al. 2210.01948). Capital is averaged over all
events and stakes; such a mixture needs no correction for multiple testing.

The test also bounds the bias: by how much, on average over the tokens, the probability of an event
can differ from the claimed one (the normal mixture boundary of Howard et al. 1810.08240, for
variables within [0, 1]).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

ALPHA = 1e-4
THRESHOLD = 1 / ALPHA  # evidence that rejects the claimed distribution
STAKES = np.array([sign * size for size in (0.02, 0.05, 0.1, 0.2, 0.4, 0.8) for sign in (1, -1)])
TUNED_FOR = 1000  # number of tokens at which the bound is tightest


class SequentialTest:
    """Test of `num_events` events per token. Deterministic: equal tokens give equal evidence."""

    def __init__(self, num_events: int) -> None:
        self.num_tokens = 0
        self._log_capital = np.zeros((num_events, len(STAKES)))
        self._excess = np.zeros(num_events)
        self._expected = np.zeros(num_events)

    def add(self, occurred: ArrayLike, probs: ArrayLike) -> None:
        """Add one token.

        Args:
            occurred: which events occurred. [E]
            probs: their probabilities under the claimed distribution, fixed before the draw. [E]
        """
        expected = np.clip(np.asarray(probs, dtype=float), 0.0, 1.0)
        excess = np.asarray(occurred, dtype=float) - expected
        self._log_capital += np.log1p(excess[:, None] * STAKES)
        self._excess += excess
        self._expected += expected
        self.num_tokens += 1

    @property
    def evidence(self) -> float:
        """Capital; large only if the tokens do not have the claimed distribution."""
        top = float(self._log_capital.max())
        return math.exp(min(top, 700.0)) * float(np.mean(np.exp(self._log_capital - top)))

    @property
    def rejected(self) -> bool:
        """Return True if the claimed distribution is rejected, falsely with probability ALPHA."""
        return self.evidence >= THRESHOLD

    @property
    def bias(self) -> list[float]:
        """Observed minus expected frequency of each event. [E]"""
        return [float(e) for e in self._excess / max(self.num_tokens, 1)]

    @property
    def expected(self) -> list[float]:
        """Expected frequency of each event under the claimed distribution. [E]"""
        return [float(e) for e in self._expected / max(self.num_tokens, 1)]

    def bound(self) -> float:
        """Return the largest distance between `bias` and the true mean bias.

        Holds at confidence 1 - ALPHA at every stopping time.
        """
        if not self.num_tokens:
            return 1.0
        variance = self.num_tokens / 4
        prior = TUNED_FOR / 4 / (2 * math.log(1 / ALPHA))
        total = variance + prior
        radius = math.sqrt(total * math.log(total / (prior * ALPHA**2)))
        return min(1.0, radius / self.num_tokens)

    def describe(self) -> str:
        """Return the evidence beside the threshold that rejects."""
        return f"evidence of a bias {self.evidence:.3g} (rejected at {THRESHOLD:,.0f})"

    def describe_worst(self) -> tuple[int, str]:
        """Return the index of the most biased event, and how far its frequency is off."""
        bias = self.bias
        worst = int(np.argmax(np.abs(bias)))
        direction = "too often" if bias[worst] > 0 else "too seldom"
        return worst, (
            f"occurs {100 * abs(bias[worst]):.2g} percentage points {direction}"
            f" (expected {100 * self.expected[worst]:.4g}%)"
        )
