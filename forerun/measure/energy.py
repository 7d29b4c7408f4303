"""Energy of a window: joules by device between two readings of the machine's counters. Never an
estimate.

What is not known is None, never 0, and `why` says the reason: there is no counter, it may not be
read, the window is too short for it (counters are coarse) or so long that it may have gone round
unseen. A counter is for the whole device, so the power that it takes when nothing runs can be
measured first; energy is then given with it and without."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from forerun.errors import ConfigError
from forerun.measure.counters import Nvml, Rapl, Source, Unavailable, Zeus

MINIMUM_SECONDS = 2.0
POWERCAP = Path("/sys/class/powercap")
# that a package could take: bounds how long a counter can run without going round unseen
MOST_WATTS = 1000.0
LATELY = 0.1  # seconds over which the power of a clock of joules is a mean
ByDevice = dict[str, float | None]


@dataclass(frozen=True, slots=True)
class Reading:
    """The counters at one moment: seconds of the meter's clock, joules by device, and what failed
    to answer and why."""

    seconds: float
    counters: dict[str, float]
    failed: str = ""


@dataclass(frozen=True, slots=True)
class Energy:
    """What a window took.

    Attributes:
        seconds: its length.
        method: how it was measured: nvml-counter, rapl, zeus or several of them, or "unavailable:
            why".
        joules: by device, such as cuda:0, package-0 or dram-0; None where that is not known.
        above_idle: joules less what the device takes in that time when nothing runs; None until
            that was measured.
        why: the reason where something is None, else empty.
    """

    seconds: float
    method: str
    joules: ByDevice
    above_idle: ByDevice
    why: str = ""

    @property
    def total(self) -> float | None:
        """Joules of all devices; None unless each of them is known."""
        return _sum(self.joules)

    @property
    def total_above_idle(self) -> float | None:
        """The same, less what they take when idle."""
        return _sum(self.above_idle)

    def per_token(self, tokens: int) -> float | None:
        """Joules for each of so many tokens, idle power included; None where that is not known or
        there were none."""
        return self.total / tokens if self.total is not None and tokens > 0 else None


@dataclass(slots=True)
class Window:
    """What `Meter.window` gives: `energy` is there when the window has closed."""

    energy: Energy | None = None


class Meter:
    """The counters of this machine.

    Usage:
        meter = Meter()
        meter.idle(5)
        with meter.window() as window: ...
        window.energy.joules
    or `first = meter.read()`, and later `meter.between(first, meter.read())`.

    Attributes:
        sources: what could be opened.
        absent: why the others could not, one line each.
        ranges: joules after which a device's counter starts again at 0; of those that do.
        devices: what the sources count, by name.
        idle_watts: by device, from the last `idle`; None where it is not known.
    """

    def __init__(
        self,
        root: Path = POWERCAP,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`root` holds the powercap counters; `clock` gives seconds that never go back, `sleep`
        lets some pass."""
        self._clock, self._sleep = clock, sleep
        self.sources: list[Source] = []
        self.absent: list[str] = []
        self.idle_watts: ByDevice = {}
        own: dict[str, Callable[[], Source]] = {"GPU": Nvml, "CPU": partial(Rapl, root)}
        for kind, open_own in own.items():
            reasons = []
            for open_source in (open_own, partial(Zeus, kind)):
                try:
                    source = open_source()
                    source.read()
                except Unavailable as error:
                    reasons.append(str(error))
                    continue
                self.sources.append(source)
                break
            else:
                self.absent.append(f"{kind}: {reasons[0]}")
        self.ranges = {
            device: size for source in self.sources for device, size in source.ranges.items()
        }
        self.devices = sorted(self.read().counters)

    @property
    def method(self) -> str:
        """How energy is measured here, for reports."""
        if not self.sources:
            return f"unavailable: {'; '.join(self.absent)}"
        return ", ".join(dict.fromkeys(source.method for source in self.sources))

    def read(self) -> Reading:
        """The counters now. One that has ceased to answer is left out, and the windows that it
        spoils say so."""
        counters: dict[str, float] = {}
        failed = []
        for source in self.sources:
            try:
                counters |= source.read()
            except Unavailable as error:
                failed.append(f"{source.method}: {error}")
        return Reading(self._clock(), counters, "; ".join(failed))

    def between(self, first: Reading, last: Reading) -> Energy:
        """The energy of the window between two readings of this meter."""
        seconds = last.seconds - first.seconds
        joules: ByDevice = dict.fromkeys(self.devices)
        if not self.sources:
            return Energy(seconds, self.method, joules, dict(joules), "; ".join(self.absent))
        if seconds < MINIMUM_SECONDS:
            why = f"a window of {seconds:.2g} s is too short for coarse counters: measure {MINIMUM_SECONDS:g} s or more"
            return Energy(seconds, self.method, joules, dict(joules), why)
        reasons = [reading.failed for reading in (first, last) if reading.failed]
        for device in self.devices:
            before, after = first.counters.get(device), last.counters.get(device)
            if before is None or after is None:
                continue  # its source failed, and said so
            joules[device], reason = _difference(before, after, seconds, self.ranges.get(device))
            reasons += [f"{device}: {reason}"] if reason else []
        above: ByDevice = {
            device: None if spent is None or idle is None else spent - idle * seconds
            for device, spent in joules.items()
            for idle in [self.idle_watts.get(device)]
        }
        return Energy(seconds, self.method, joules, above, "; ".join(dict.fromkeys(reasons)))

    @contextmanager
    def window(self) -> Iterator[Window]:
        """Measure what runs within. A GPU's work counts where it ends within: synchronise first."""
        window, first = Window(), self.read()
        try:
            yield window
        finally:
            window.energy = self.between(first, self.read())

    def idle(self, seconds: float = 5.0) -> Energy:
        """Let so many seconds pass and take their power for idle: nothing else should run then.

        Raises ConfigError for a time that is too short to say anything.
        """
        if not MINIMUM_SECONDS <= seconds <= 3600:
            raise ConfigError(
                f"{seconds:g} s of idling is out of range: give {MINIMUM_SECONDS:g} to 3600"
            )
        first = self.read()
        if self.sources:
            self._sleep(seconds)
        energy = self.between(first, self.read())
        self.idle_watts = {
            device: None if spent is None else spent / energy.seconds
            for device, spent in energy.joules.items()
        }
        return energy


def cost_per_million(price_per_hour: float, tokens_per_second: float) -> float | None:
    """The price of a million tokens, in the unit of `price_per_hour`; None where nothing was
    produced.

    Raises ConfigError for a price that is none.
    """
    if not 0 <= price_per_hour < math.inf:
        raise ConfigError(f"price_per_hour={price_per_hour} is no price: give a number from 0 up")
    return price_per_hour / 3600 / tokens_per_second * 1e6 if tokens_per_second > 0 else None


def _sum(joules: ByDevice) -> float | None:
    known = [spent for spent in joules.values() if spent is not None]
    return sum(known) if known and len(known) == len(joules) else None


def _difference(
    before: float, after: float, seconds: float, size: float | None
) -> tuple[float | None, str]:
    """(Joules between two values of a counter, or None and why). `size` is where it starts again at
    0, if it does."""
    longest = math.inf if size is None else size / MOST_WATTS
    if seconds > longest:
        return (
            None,
            f"its counter may go round more than once in {seconds:.0f} s: read it every {longest:.0f} s",
        )
    if after >= before:
        return after - before, ""
    if size is None:
        return None, "its counter went back, as when a driver is loaded again"
    return after - before + size, ""


class JoulesClock:
    """Joules that this machine has taken since the clock was made, whoever used them: what depths
    cost, where the objective is energy.

    Counters tick about once a millisecond (RAPL) or more seldom (NVML), which is longer than a
    draft takes. Between two ticks the clock goes on at the power of late, and a tick puts it right:
    it never goes back, and what it says of a long time is what the counters said.
    """

    def __init__(
        self, meter: Meter | None = None, seconds: Callable[[], float] = time.perf_counter
    ) -> None:
        """Raises ConfigError where no counter can be read, with the reason and what would help."""
        self._meter, self._seconds = meter or Meter(), seconds
        if not self._meter.sources:
            raise ConfigError(f"objective=energy needs a counter of energy. {self._meter.method}")
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
        """Joules that were counted since it was last asked. A counter that has gone back has gone
        round its range, or, where it has none, begun anew; one that does not answer has counted
        nothing."""
        before, ranges = self._counters, self._meter.ranges
        self._counters = before | self._meter.read().counters
        steps = {device: now - before.get(device, now) for device, now in self._counters.items()}
        return sum(
            step if step >= 0 else max(step + ranges.get(device, 0), 0)
            for device, step in steps.items()
        )
