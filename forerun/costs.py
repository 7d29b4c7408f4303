"""What passes and drafts cost here: seconds by size, learned from measurements that cannot be
trusted one by one.

The first at a size finds cold caches, another program slows a few down, and the whole machine
changes its speed. A cost that is believed too high is never measured again, and depths would be
chosen by accidents. So what a curve holds is relative to the machine's pace of the moment, one
measurement moves it by a bounded factor, and one seen seldom leans on its neighbours.
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
# measurements until a curve is read anew: after a pass the caches are cold, and Python is slow
FRESH = 8
SIZES = [
    *range(1, EXACT + 1),
    *(part << octave for octave in range(2, 14) for part in range(8, 16)),
]  # of passes
TICK = 1e-9  # seconds that anything takes, whatever the clock says
LEAST, LONGEST = 1e-12, 1e4  # seconds that anything takes, at any pace
FURTHER, STRIDE = (
    1.25,
    8,
)  # times the largest size that was measured, or so many tokens more, that are tried next
MOSTLY, KEEP = (
    0.5,
    0.9,
)  # share of a draft's time that reading is taken out of; of what was measured of reading
MOST_TOKENS = 1e9  # that anything has read
PACE_GAIN = 0.1  # of one measurement in the machine's pace


@dataclass(slots=True)
class Curve:
    """Seconds by size, at a constant pace: a mean at each size seen, interpolated, hopeful beyond
    the largest."""

    slope: (
        float  # growth per unit assumed beyond what was seen, as a share of the last value, at most
    )
    share: float = 1.0  # and as a share of growth in proportion
    sizes: list[int] = field(default_factory=list)
    seen: dict[int, float] = field(default_factory=dict)
    count: dict[int, int] = field(default_factory=dict)
    _read: dict[float, float] = field(default_factory=dict)
    _added: int = 0

    def add(self, size: int, seconds: float) -> None:
        """One measurement: the mean of their logarithms, but for the first, which only bounds the
        second."""
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
        """Expected seconds, or None where nothing was measured yet. A size between two is what one
        may expect of both.

        Never more than so many times the smallest size, nor than a larger one that has settled:
        what was measured over that was something else, and a plain pass believed dearer than one
        with a draft would not be measured again."""
        found = self._read.get(size)
        if found is None and self.sizes:
            most = self._believed(0) * max(size / self.sizes[0], 1)
            found = min(self._interpolate(size), most, *self._larger(size))
            self._read[size] = found
        return found

    def state(self, pace: float) -> list[tuple[int, float, int]]:
        """(size, seconds at this pace, how many were measured) of each size that was seen more than
        once."""
        return [(size, self.seen[size] * pace, n) for size, n in self.count.items() if n > 1]

    def recall(self, state: Sequence[Sequence[float]]) -> None:
        """Begin with these; no more of them than settle a size, so that new ones soon count for
        more."""
        for size, seconds, count in state:
            if not (0 < int(size) <= MOST_TOKENS and LEAST <= seconds < LONGEST and count > 1):
                raise ValueError(f"{seconds} s for {size}")
            self.count[int(size)], self.seen[int(size)] = min(int(count), SETTLED), float(seconds)
        self.sizes[:] = sorted(self.count)
        self._read.clear()

    def _larger(self, size: float) -> list[float]:
        """What sizes beyond it cost that have settled."""
        beyond = self.sizes[bisect.bisect_right(self.sizes, size) :]
        return [self.seen[other] for other in beyond if self.count[other] >= SETTLED]

    def _believed(self, i: int) -> float:
        """The cost of the i-th size seen: its own, and until that has settled what those below let
        expect."""
        first = i
        while first > 0 and i - first < REACH and self.count[self.sizes[first]] < SETTLED:
            first -= 1
        cost = self._own(first)
        for j in range(first + 1, i + 1):
            trend = cost * self._growth(self.sizes[j - 1], self.sizes[j])
            count = self.count[self.sizes[j]]
            cost = max((count * self._own(j) + NEIGHBOUR * trend) / (count + NEIGHBOUR), cost)
        return cost

    def _growth(self, below: int, size: float) -> float:
        """How many times the cost of one size a larger one is hoped to have."""
        return 1 + min(self.slope, self.share / below) * (size - below)

    def _own(self, i: int) -> float:
        size = self.sizes[i]
        return self.seen[size] * (WARM if self.count[size] == 1 else 1)

    def _interpolate(self, size: float) -> float:
        i = bisect.bisect_left(self.sizes, size)
        if i == 0 or (i < len(self.sizes) and self.sizes[i] == size):
            return self._believed(i)
        below, low = self.sizes[i - 1], self._believed(i - 1)
        if i == len(self.sizes):
            return low * self._growth(below, size)
        share = (size - below) / (self.sizes[i] - below)
        return low + share * (self._believed(i) - low)


class Costs:
    """Of passes by their tokens and of drafting by proposer and depth, in seconds at the pace of
    the start.

    Attributes:
        pace: how many times the start's seconds the machine takes now.
    """

    def __init__(self) -> None:
        self.pace = 1.0
        self._passes = Curve(slope=0.02, share=0.25)
        self._drafts: dict[tuple[str, int], Curve] = defaultdict(
            lambda: Curve(slope=0.5)
        )  # by octave of requests too
        self._lags: dict[
            str, tuple[float, float]
        ] = {}  # seconds, and tokens that were read in them; discounted
        self._reads = Curve(slope=1.0)  # arithmetic: as long as there are tokens

    def known(self, tokens: int, enough: int) -> bool:
        """Whether `enough` passes over so many tokens or fewer were measured."""
        for size in self._passes.sizes:
            if size > tokens or enough <= 0:
                break
            enough -= self._passes.count[size]
        return enough <= 0

    def reach(self, tokens: int) -> float:
        """Up to how many tokens a pass over at least so many may have: not far beyond what was
        measured, so that to find out what a size costs never costs much."""
        largest = next(
            (size for size in reversed(self._passes.sizes) if self._passes.count[size] > 1), 0
        )
        return max(FURTHER * max(largest, tokens), largest + STRIDE)

    def of_pass(self, tokens: float) -> float:
        """Of a pass over so many tokens; 1 while none was measured, for then only ratios matter."""
        seconds = self._passes.at(round(4 * tokens) / 4)
        return 1.0 if seconds is None else seconds

    def of_read(self, tokens: int) -> float:
        """Of a pass over so many tokens that reads prompts; nothing while none was measured."""
        return self._reads.at(tokens) or 0.0

    def of_draft(self, source: str, depth: int, requests: int = 1) -> float:
        """Of drafting so deep for so many requests at once, or for the most below them that was
        measured; a tenth of a pass a level while none was."""
        for octave in range(requests.bit_length(), 0, -1):
            if (source, octave) in self._drafts:
                return self._drafts[source, octave].at(depth) or 0.0
        return 0.1 * depth * self.of_pass(1)

    def within(self, seconds: float) -> int:
        """Up to how many tokens a pass that reads prompts may have to take no longer, as far as is
        known: any number where none was measured."""
        i = bisect.bisect_right(SIZES, seconds, key=lambda size: self.of_read(size) * self.pace)
        return SIZES[i - 1] if i else 0

    def of_lag(self, source: str, tokens: int) -> float:
        """Of reading what a proposer has missed before it can draft; nothing where that was never
        measured."""
        seconds, count = self._lags.get(source, (0.0, 0.0))
        return seconds / count * tokens if count else 0.0

    def add_pass(self, tokens: int, seconds: float) -> None:
        self._add(self._passes, tokens, seconds)

    def add_read(self, tokens: int, seconds: float) -> None:
        """A pass that reads prompts, beside which others may go on: another regime than
        verifying."""
        self._reads.add(*self._at_pace(tokens, seconds))

    def add_draft(
        self, source: str, depth: int, seconds: float, requests: int = 1, lag: int = 0
    ) -> None:
        """A draft, behind `lag` tokens of all requests that the proposer had missed: of which,
        where they are most of it, this is a measure."""
        reading = self.of_lag(source, lag) * self.pace
        if lag and not 0 < reading < MOSTLY * seconds:
            drafting = self.of_draft(source, depth, requests)
            before, count = self._lags.get(source, (0.0, 0.0))
            self._lags[source] = (
                KEEP * before + max(seconds / self.pace - drafting, TICK),
                KEEP * count + lag,
            )
        else:
            self._add(self._drafts[source, requests.bit_length()], depth, seconds - reading)

    def _add(self, curve: Curve, size: int, seconds: float) -> None:
        bucket, seconds = self._at_pace(size, seconds)
        if (
            curve.count.get(bucket, 0) >= SETTLED
        ):  # else what is wrong may well be what is believed of the size
            self.pace *= surprise(curve.seen[bucket], seconds) ** PACE_GAIN
        curve.add(bucket, seconds)

    def _at_pace(self, size: int, seconds: float) -> tuple[int, float]:
        """A size as curves know it, and what it takes at the pace of the start: large passes grow
        with their tokens."""
        bucket = _bucket(size)
        return bucket, max(seconds, TICK) / self.pace * (bucket / size)

    @property
    def passes(self) -> int:
        """How many passes were measured."""
        return sum(self._passes.count.values())

    def state(self) -> dict[str, Any]:
        """What is believed, for `recall` of another process: plain data, seconds at the pace of
        now."""
        drafts = {
            f"{octave} {source}": curve.state(self.pace)
            for (source, octave), curve in self._drafts.items()
        }
        passes, reads = self._passes.state(self.pace), self._reads.state(self.pace)
        lags = {
            source: (seconds * self.pace, count) for source, (seconds, count) in self._lags.items()
        }
        return {"passes": passes, "reads": reads, "drafts": drafts, "lags": lags}

    def recall(self, state: Mapping[str, Any]) -> None:
        """Begin with what another process believed. Raises whatever it may for what `state` never
        gave."""
        self._passes.recall(state["passes"])
        self._reads.recall(state["reads"])
        for name, sizes in state["drafts"].items():
            octave, _, source = name.partition(" ")
            self._drafts[source, int(octave)].recall(sizes)
        for source, (seconds, count) in state["lags"].items():
            if not (LEAST <= seconds < LONGEST and 0 < count < MOST_TOKENS):
                raise ValueError(f"{seconds} s for {count}")
            self._lags[source] = float(seconds), float(count)

    def seconds(self) -> tuple[dict[int, float], dict[str, dict[int, float]]]:
        """What is believed of the sizes that were measured, at the pace of now: of passes, and of
        drafts by proposer for as few requests at once as there were."""
        fewest = dict(sorted(self._drafts, reverse=True))
        drafts = {name: self._table(self._drafts[name, octave]) for name, octave in fewest.items()}
        return self._table(self._passes), drafts

    def _table(self, curve: Curve) -> dict[int, float]:
        return {size: (curve.at(size) or 0.0) * self.pace for size in curve.sizes}


def _bucket(size: int) -> int:
    """Small sizes as they are, larger ones eight to an octave: batches have hundreds of sizes, each
    of them seldom."""
    step = 1 << max(size.bit_length() - 4, 0)
    return size if size <= EXACT else round(size / step) * step


def surprise(expected: float, seconds: float) -> float:
    """How many times what was expected, within bounds."""
    return min(max(seconds / expected, 1 / MOST_SURPRISE), MOST_SURPRISE)
