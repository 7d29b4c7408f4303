"""The time of a whole run: from its beginning, set-up included, to the drafter written and
measured."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

KEPT = 0.2  # of the limit, for what comes behind training


class TimeIsOver(Exception):
    """What is under way would end behind the deadline."""


class Deadline:
    """Counts the seconds of a run, those before its checkpoint included, up to `limit`, which may
    be infinite."""

    def __init__(self, minutes: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        """The run begins now and has so many minutes; 0 sets no limit."""
        self.limit = 60 * minutes or math.inf
        self._clock = clock
        self._zero = clock()

    def resume(self, seconds: float) -> None:
        """Count what the run had taken before it was interrupted."""
        self._zero -= seconds

    @property
    def seconds(self) -> float:
        """That the run has taken."""
        return self._clock() - self._zero

    @property
    def left(self) -> float:
        """Seconds that are left; under 0 when the time is over."""
        return self.limit - self.seconds

    def has(self, seconds: float) -> bool:
        """Whether so many are left."""
        return seconds <= self.left

    def check(self) -> None:
        """Raise TimeIsOver when it is."""
        if self.left < 0:
            raise TimeIsOver

    def of_training(self, began: float, least: float, needed: float) -> float:
        """The second at which training that began at a second ends: what comes behind it gets all
        that it needs or, if that is more than its share, the share or the least that it needs, but
        never more than training has."""
        return self.limit - min(
            max(least, min(needed, KEPT * self.limit)), (self.limit - began) / 2
        )
