"""The time limit of a whole run, from loading to the measured drafter."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

MAX_MEASURING = 1800.0  # seconds that are kept for the measurement after training


class TimeLimitReached(Exception):
    """The current work would end after the time limit."""


class TimeLimit:
    """Seconds of a run, those before its checkpoint included, up to `limit` (which may be
    infinite)."""

    def __init__(self, minutes: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        """The run begins now; 0 minutes set no limit."""
        self.limit = 60 * minutes or math.inf
        self._clock = clock
        self._zero = clock()

    def resume(self, seconds: float) -> None:
        """Count the time that the run took before it was interrupted."""
        self._zero -= seconds

    @property
    def seconds(self) -> float:
        """Elapsed seconds."""
        return self._clock() - self._zero

    @property
    def left(self) -> float:
        """Remaining seconds; negative after the limit."""
        return self.limit - self.seconds

    def has(self, seconds: float) -> bool:
        """Return True if that many seconds remain."""
        return seconds <= self.left

    def check(self) -> None:
        """Raise TimeLimitReached after the limit."""
        if self.left < 0:
            raise TimeLimitReached

    def training_end(self, began: float, share: float) -> float:
        """Return the second at which training ends that began at second `began`.

        The measurement gets `share` of the limit, at most `MAX_MEASURING` seconds, and never more
        than training gets.
        """
        reserved = min(share * self.limit, MAX_MEASURING)
        return self.limit - min(reserved, (self.limit - began) / 2)
