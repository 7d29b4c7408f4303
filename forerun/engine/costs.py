"""What passes and drafts cost here: seconds by size, learned from measurements that cannot be trusted one by one.

The first at a size finds cold caches, another program slows a few down, and the whole machine changes its speed. A cost
that is believed too high is never measured again, and depths would be chosen by accidents. So what a curve holds is
relative to the machine's pace of the moment, one measurement moves it by a bounded factor, and one seen seldom leans on
its neighbours.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

WARM = 0.7  # share of a first measurement that is believed
SETTLED = 8  # measurements from which a size stands for itself
NEIGHBOUR = 2  # measurements that the trend of its neighbours is worth until then
REACH = 8  # neighbours below, at most
EXACT = 32  # sizes that are kept apart
LEAST_GAIN = 0.05  # of one measurement, however many there were
MOST_SURPRISE = 1.5  # factor that one measurement may be off, at most
FRESH = 8  # measurements until a curve is read anew: after a pass the caches are cold, and Python is slow
TICK = 1e-9  # seconds that anything takes, whatever the clock says
LONGEST = 1e4  # seconds that anything takes
PACE_GAIN = 0.1  # of one measurement in the machine's pace


@dataclass(slots=True)
class Curve:
    """Seconds by size, at a constant pace: a mean at each size seen, interpolated, hopeful beyond the largest."""

    slope: float  # growth per unit assumed beyond what was seen, as a share of the last value
    sizes: list[int] = field(default_factory=list)
    seen: dict[int, float] = field(default_factory=dict)
    count: dict[int, int] = field(default_factory=dict)
    _read: dict[float, float] = field(default_factory=dict)
    _added: int = 0

    def add(self, size: int, seconds: float) -> None:
        """One measurement: the mean of their logarithms, but for the first, which only bounds the second."""
        count = self.count[size] = self.count.get(size, 0) + 1
        if count == 1:
            bisect.insort(self.sizes, size)
            self.seen[size] = seconds
        elif count == 2:
            self.seen[size] = min(self.seen[size], seconds)
        else:
            self.seen[size] *= surprise(self.seen[size], seconds) ** max(1 / count, LEAST_GAIN)
        self._added += 1
        if count <= SETTLED or self._added % FRESH == 0:
            self._read.clear()

    def at(self, size: float) -> float | None:
        """Expected seconds, or None where nothing was measured yet. A size between two is what one may expect of both.

        Never more than so many times the smallest size, nor than a larger one that has settled: what was measured over
        that was something else, and a plain pass believed dearer than one with a draft would not be measured again.
        """
        found = self._read.get(size)
        if found is None and self.sizes:
            most = self._believed(0) * max(size / self.sizes[0], 1)
            found = min(self._interpolate(size), most, *self._larger(size))
            self._read[size] = found
        return found

    def state(self, pace: float) -> list[tuple[int, float, int]]:
        """(size, seconds at this pace, how many were measured) of each size that was seen more than once."""
        return [(size, self.seen[size] * pace, n) for size, n in self.count.items() if n > 1]

    def recall(self, state: Sequence[Sequence[float]]) -> None:
        """Begin with these; no more of them than settle a size, so that new ones soon count for more."""
        for size, seconds, count in state:
            if not (int(size) > 0 and 0 < seconds < LONGEST and count > 1):
                raise ValueError(f"{seconds} s for {size}")
            self.count[int(size)], self.seen[int(size)] = min(int(count), SETTLED), float(seconds)
        self.sizes[:] = sorted(self.count)
        self._read.clear()

    def _larger(self, size: float) -> list[float]:
        """What sizes beyond it cost that have settled."""
        beyond = self.sizes[bisect.bisect_right(self.sizes, size) :]
        return [self.seen[other] for other in beyond if self.count[other] >= SETTLED]

    def _believed(self, i: int) -> float:
        """The cost of the i-th size seen: its own, and until that has settled what those below let expect."""
        first = i
        while first > 0 and i - first < REACH and self.count[self.sizes[first]] < SETTLED:
            first -= 1
        cost = self._own(first)
        for j in range(first + 1, i + 1):
            trend = cost * (1 + self.slope * (self.sizes[j] - self.sizes[j - 1]))
            count = self.count[self.sizes[j]]
            cost = max((count * self._own(j) + NEIGHBOUR * trend) / (count + NEIGHBOUR), cost)
        return cost

    def _own(self, i: int) -> float:
        size = self.sizes[i]
        return self.seen[size] * (WARM if self.count[size] == 1 else 1)

    def _interpolate(self, size: float) -> float:
        i = bisect.bisect_left(self.sizes, size)
        if i == 0 or (i < len(self.sizes) and self.sizes[i] == size):
            return self._believed(i)
        below, low = self.sizes[i - 1], self._believed(i - 1)
        if i == len(self.sizes):
            return low * (1 + self.slope * (size - below))
        share = (size - below) / (self.sizes[i] - below)
        return low + share * (self._believed(i) - low)


class Costs:
    """Of passes by their tokens and of drafting by proposer and depth, in seconds at the pace of the start.

    Attributes:
        pace: how many times the start's seconds the machine takes now.
    """

    def __init__(self) -> None:
        self.pace = 1.0
        self._passes = Curve(slope=0.02)
        self._drafts: dict[tuple[str, int], Curve] = defaultdict(lambda: Curve(slope=0.5))  # by octave of requests too
        self._lags: dict[str, float] = {}

    def known(self, tokens: int, enough: int) -> bool:
        """Whether `enough` passes over so many tokens or fewer were measured."""
        for size in self._passes.sizes:
            if size > tokens or enough <= 0:
                break
            enough -= self._passes.count[size]
        return enough <= 0

    def of_pass(self, tokens: float) -> float:
        """Of a pass over so many tokens; 1 while none was measured, for then only ratios matter."""
        seconds = self._passes.at(round(4 * tokens) / 4)
        return 1.0 if seconds is None else seconds

    def of_draft(self, source: str, depth: int, requests: int = 1) -> float:
        """Of drafting so deep for so many requests at once, or for the most below them that was measured; a tenth of a
        pass a level while none was."""
        for octave in range(requests.bit_length(), 0, -1):
            if (source, octave) in self._drafts:
                return self._drafts[source, octave].at(depth) or 0.0
        return 0.1 * depth * self.of_pass(1)

    def lag(self, source: str) -> float:
        """Of its last draft behind much to read."""
        return self._lags.get(source, 0.0)

    def add_pass(self, tokens: int, seconds: float) -> None:
        self._add(self._passes, tokens, seconds)

    def add_draft(self, source: str, depth: int, seconds: float, requests: int = 1) -> None:
        self._add(self._drafts[source, requests.bit_length()], depth, seconds)

    def add_lag(self, source: str, seconds: float) -> None:
        """A draft behind much to read: no measure of a round."""
        self._lags[source] = seconds / self.pace

    def _add(self, curve: Curve, size: int, seconds: float) -> None:
        bucket = _bucket(size)
        seconds = max(seconds, TICK) / self.pace * (bucket / size)  # large passes grow with their tokens
        if curve.count.get(bucket, 0) >= SETTLED:  # else what is wrong may well be what is believed of the size
            self.pace *= surprise(curve.seen[bucket], seconds) ** PACE_GAIN
        curve.add(bucket, seconds)

    @property
    def passes(self) -> int:
        """How many passes were measured."""
        return sum(self._passes.count.values())

    def state(self) -> dict[str, Any]:
        """What is believed, for `recall` of another process: plain data, seconds at the pace of now."""
        drafts = {f"{octave} {source}": curve.state(self.pace) for (source, octave), curve in self._drafts.items()}
        return {"passes": self._passes.state(self.pace), "drafts": drafts}

    def recall(self, state: Mapping[str, Any]) -> None:
        """Begin with what another process believed. Raises ValueError, TypeError, KeyError or AttributeError for what
        `state` never gave."""
        self._passes.recall(state["passes"])
        for name, sizes in state["drafts"].items():
            octave, _, source = name.partition(" ")
            self._drafts[source, int(octave)].recall(sizes)

    def seconds(self) -> tuple[dict[int, float], dict[str, dict[int, float]]]:
        """What is believed of the sizes that were measured, at the pace of now: of passes, and of drafts by proposer
        for as few requests at once as there were."""
        fewest = dict(sorted(self._drafts, reverse=True))
        drafts = {name: self._table(self._drafts[name, octave]) for name, octave in fewest.items()}
        return self._table(self._passes), drafts

    def _table(self, curve: Curve) -> dict[int, float]:
        return {size: (curve.at(size) or 0.0) * self.pace for size in curve.sizes}


def _bucket(size: int) -> int:
    """Small sizes as they are, larger ones eight to an octave: batches have hundreds of sizes, each of them seldom."""
    step = 1 << max(size.bit_length() - 4, 0)
    return size if size <= EXACT else round(size / step) * step


def surprise(expected: float, seconds: float) -> float:
    """How many times what was expected, within bounds."""
    return min(max(seconds / expected, 1 / MOST_SURPRISE), MOST_SURPRISE)
