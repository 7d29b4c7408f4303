"""Joules as a clock: what depths cost, where the objective is energy."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from forerun.errors import ConfigError
from forerun.measure.energy import Meter

LATELY = 0.1  # seconds over which the power is a mean


class JoulesClock:
    """Joules that this machine has taken since the clock was made, whoever used them.

    Counters tick about once a millisecond (RAPL) or more seldom (NVML), which is longer than a draft takes. Between two
    ticks the clock goes on at the power of late, and a tick puts it right: it never goes back, and what it says of a
    long time is what the counters said.
    """

    def __init__(self, meter: Meter | None = None, seconds: Callable[[], float] = time.perf_counter) -> None:
        """Raises ConfigError where no counter can be read, with the reason and what would help."""
        self._meter, self._seconds = meter or Meter(), seconds
        if not self._meter.sources:
            raise ConfigError(f"objective=energy needs a counter of energy. {self._meter.method}")
        self._ranges = {device: size for source in self._meter.sources for device, size in source.ranges.items()}
        self._counters, self._ticked = self._meter.read().counters, self._seconds()
        self._counted = self._said = self._watts = 0.0

    def __call__(self) -> float:
        now, spent = self._seconds(), self._spent()
        if spent > 0:
            passed = max(now - self._ticked, 1e-9)
            gain = 1 - math.exp(-passed / LATELY) if self._watts else 1.0
            self._watts += gain * (spent / passed - self._watts)
            self._counted, self._ticked = self._counted + spent, now
        self._said = max(self._said, self._counted + self._watts * (now - self._ticked))
        return self._said

    def _spent(self) -> float:
        """Joules that were counted since it was last asked. A counter that has gone back has gone round its range, or,
        where it has none, begun anew; one that does not answer has counted nothing."""
        before, self._counters = self._counters, self._counters | self._meter.read().counters
        steps = {device: now - before.get(device, now) for device, now in self._counters.items()}
        return sum(step if step >= 0 else max(step + self._ranges.get(device, 0), 0) for device, step in steps.items())
