"""Cost model: what forward passes and drafts cost on this machine, learned while it runs.

Single measurements are unreliable: the first of a size runs with cold caches, other programs slow
some down, and the speed of the whole machine changes. A size whose cost is overestimated is never
measured again, so noise would decide the depth. Therefore costs are relative to a current speed
factor, one measurement changes a cost by a bounded factor, and the cost of a size with few
measurements is smoothed with those of its neighbours.

Costs are in seconds, or in whatever unit the engine's clock counts (joules).

`Speculation` is the expected speed-up from acceptance rates and costs in target forward passes over
one row (one token of one request). Acceptance is conditional: the probability that a level is
accepted given that the levels before it were. With tau for the tokens per forward pass:

    chain, one rate a for all levels     tau(K) = (1 - a^(K+1)) / (1 - a)              [1], eq. 1
    chain, a rate a_i for level i        tau(K) = 1 + sum over i of a_1 a_2 .. a_i
    tree                                 tau = 1 + sum over nodes of P(accepted)       [2]
    speed-up at depth K                  S(K) = tau(K) v(B) / (v(B + B w K) + c K + f)
    asynchronous drafting                S(K) = tau(K) v(B) / (h max(v, d) + (1 - h) (v + d))  [3]

[1] Leviathan et al., arXiv 2211.17192; [2] Sequoia, arXiv 2402.12374; [3] SSD, arXiv 2603.03251;
for B concurrent requests, v(n) the cost of a pass over n rows, w nodes per level, c the cost of
drafting a level (a draft model), f the cost of a draft whatever its depth (one-pass drafters), d =
c K + f, and h the probability that the verdict was anticipated. With B = w = 1, v constant and f =
0 the speed-up is Leviathan's theorem 3.8.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from forerun.errors import ConfigError
from forerun.utils import check_integer

FIRST_SHARE = 0.7  # factor applied to a first measurement, which includes cold caches
COLD_FACTOR = 2.0  # a measurement this many times lower shows that the ones before were cold
COLD_PASSES = 2  # of each size, on a GPU above all: kernels are loaded and chosen by size
SETTLED = 8  # number of measurements from which a size is used without smoothing
NEIGHBOUR_STRENGTH = 2  # weight of the neighbours' trend until then, in measurements
MAX_NEIGHBOURS = 8  # maximum number of smaller sizes used for smoothing
EXACT_SIZES = 32  # sizes up to this have buckets of their own
LEAST_GAIN = 0.05  # minimum weight of a new measurement
MAX_SURPRISE = 1.5  # maximum factor by which one measurement changes a cost
REFRESH = 8  # measurements between evaluations of a curve, which are slow Python code
# The buckets of pass sizes.
SIZES = [
    *range(1, EXACT_SIZES + 1),
    *(part << octave for octave in range(2, 14) for part in range(8, 16)),
]
MIN_SECONDS = 1e-9  # lower bound of a measurement
LEAST, LONGEST = 1e-12, 1e4  # valid range of seconds in a file
REACH_FACTOR, REACH_TOKENS = 1.25, 8  # limits for passes larger than those measured
LEVEL_SHARE = 0.1  # of a forward pass: cost of a level of a draft while nothing is known
CATCH_UP_SHARE = 0.5  # maximum share of a draft's time that is subtracted as catch-up
CATCH_UP_DISCOUNT = 0.9  # discount factor of earlier catch-up measurements
MOST_TOKENS = 1e9  # maximum number of tokens in a file
SPEED_GAIN = 0.1  # weight of one measurement in the machine's speed
OVERHEADS = 16  # number of measurements from which a step's overhead is a moving average
BOUND_BY_ROWS = 2.0  # smallest passes: what prompts take from which on computation binds them
ROW_CHANGE = 0.05  # of what a row costs, from which on expected costs are computed anew
ROUTE_BYTES = 64 << 20  # of what is remembered of the experts of tokens
ROUTE_GAIN = 0.05  # weight of a pass in the mean ratio of effective rows to tokens


@dataclass(slots=True)
class Curve:
    """Cost by size at a constant speed: a mean at each measured size, interpolated between them.

    Attributes:
        slope: maximum growth per unit beyond the largest measured size, relative to its cost.
        share: maximum growth as a share of proportional growth.
        trend: expected cost by size in any unit, where growth is known otherwise than by these two;
            0 where it is not.
        sizes: measured sizes, ascending.
        seen: mean seconds of each size.
        count: number of measurements of each size.
    """

    slope: float
    share: float = 1.0
    trend: Callable[[float], float] | None = None
    sizes: list[int] = field(default_factory=list)
    seen: dict[int, float] = field(default_factory=dict)
    count: dict[int, int] = field(default_factory=dict)
    _cached: dict[float, float] = field(default_factory=dict)
    _num_added: int = 0

    def add(self, size: int, seconds: float) -> None:
        """Add a measurement to the mean of logarithms; the first only bounds the second, and others
        go as well if they turn out to be cold."""
        count = self.count[size] = self.count.get(size, 0) + 1
        if count == 1:
            bisect.insort(self.sizes, size)
            self.seen[size] = seconds
        elif count == 2 or (count <= SETTLED and seconds * COLD_FACTOR < self.seen[size]):
            self.seen[size] = min(self.seen[size], seconds)
        else:
            gain = max(1 / count, LEAST_GAIN)
            self.seen[size] *= bounded_ratio(self.seen[size], seconds) ** gain
        self._num_added += 1
        if count <= SETTLED or self._num_added % REFRESH == 0:
            self._cached.clear()

    def forget_expected(self) -> None:
        """Compute expected costs anew: the trend has changed."""
        self._cached.clear()

    def at(self, size: float) -> float | None:
        """Return the expected cost, or None while nothing was measured.

        The cost is bounded by proportional growth from the smallest size and by the cost of every
        larger settled size. Higher measurements are noise, and a plain pass that seems to cost more
        than one with a draft would never be measured again.
        """
        found = self._cached.get(size)
        if found is None and self.sizes:
            most = self._believed(0) * max(size / self.sizes[0], 1)
            found = min(self._interpolate(size), most, *self._settled_beyond(size))
            self._cached[size] = found
        return found

    def least_share(self, least: float = 0.0) -> float:
        """Return the least cost of a measured size divided by the size, of those that cost at
        `least` so much; 0 if there is none."""
        costs = [(self._own(i), size) for i, size in enumerate(self.sizes)]
        return min((cost / size for cost, size in costs if cost >= least), default=0.0)

    def state(self, speed_factor: float) -> list[tuple[int, float, int]]:
        """Return (size, seconds now, measurements) of each size measured more than once."""
        return [
            (size, self.seen[size] * speed_factor, n) for size, n in self.count.items() if n > 1
        ]

    def load_state(self, state: Sequence[Sequence[float]]) -> None:
        """Load `state`, with counts limited to SETTLED so that new measurements have an effect.

        Raises:
            ValueError: the data are not valid costs.
        """
        for size, seconds, count in state:
            if not (0 < int(size) <= MOST_TOKENS and LEAST <= seconds < LONGEST and count > 1):
                raise ValueError(f"{seconds} s for {size}")
            self.count[int(size)] = min(int(count), SETTLED)
            self.seen[int(size)] = float(seconds)
        self.sizes[:] = sorted(self.count)
        self._cached.clear()

    def _settled_beyond(self, size: float) -> list[float]:
        """Return the costs of larger settled sizes."""
        beyond = self.sizes[bisect.bisect_right(self.sizes, size) :]
        return [self.seen[other] for other in beyond if self.count[other] >= SETTLED]

    def _believed(self, i: int) -> float:
        """Return the cost of the i-th measured size, smoothed with smaller ones until settled."""
        first = i
        while first > 0 and i - first < MAX_NEIGHBOURS and self.count[self.sizes[first]] < SETTLED:
            first -= 1
        cost = self._own(first)
        for j in range(first + 1, i + 1):
            trend = cost * self._growth(self.sizes[j - 1], self.sizes[j])
            count = self.count[self.sizes[j]]
            mean = count * self._own(j) + NEIGHBOUR_STRENGTH * trend
            cost = max(mean / (count + NEIGHBOUR_STRENGTH), cost)
        return cost

    def _growth(self, below: int, size: float) -> float:
        """Return the assumed ratio of a larger size's cost to that of `below`."""
        if self.trend is not None and (low := self.trend(below)):
            return self.trend(size) / low
        return 1 + min(self.slope, self.share / below) * (size - below)

    def _own(self, i: int) -> float:
        size = self.sizes[i]
        return self.seen[size] * (FIRST_SHARE if self.count[size] == 1 else 1)

    def _interpolate(self, size: float) -> float:
        i = bisect.bisect_left(self.sizes, size)
        if i == 0 or (i < len(self.sizes) and self.sizes[i] == size):
            return self._believed(i)
        below, low = self.sizes[i - 1], self._believed(i - 1)
        if i == len(self.sizes):
            return low * self._growth(below, size)
        share = (size - below) / (self.sizes[i] - below)
        return low + share * (self._believed(i) - low)


class CostModel:
    """Costs of forward passes by tokens, and of drafting by proposer and depth.

    All methods but `seconds` and `state` give costs at the speed of the start.

    Attributes:
        speed_factor: current seconds per second at the start; it follows the machine's speed.
        prompts_predict: passes that read prompts run on the same kernels as others, so that the
            time of their tokens says what rows cost that were never measured.
        reading_shares: by proposer, what a token costs it as a share of what it costs the target,
            as far as their weights tell; none for proposers that read no text.
        step_overhead: what a request adds to a step beside its forward pass and drafting; 0 until
            it was measured.
    """

    def __init__(self) -> None:
        self.speed_factor = 1.0
        self.step_overhead = 0.0
        self._num_overheads = 0
        self.prompts_predict = False
        self.reading_shares: dict[str, float] = {}
        self._given_trend: Callable[[float], float] | None = None
        self._row: float | None = None  # `_row_of_prompts`; None: not computed yet
        self._forwards = Curve(slope=0.02, share=0.25, trend=self._trend)
        # By proposer and octave of the number of requests.
        self._drafts: dict[tuple[str, int], Curve] = defaultdict(lambda: Curve(slope=0.5))
        # By proposer: discounted (seconds, tokens read in them).
        self._catch_ups: dict[str, tuple[float, float]] = {}
        self._prefills = Curve(slope=1.0)  # computation grows with the tokens

    def set_trend(self, trend: Callable[[float], float] | None) -> None:
        """Expect passes to cost by their size what `trend` says, in any unit."""
        self._given_trend = trend
        self._forwards.forget_expected()

    def _trend(self, rows: float) -> float:
        """Return what a pass over so many rows is expected to cost, in any unit; 0: not known.

        Passes of prompts that are bound by computation say what a row costs, and the smallest pass
        what it costs to read the weights (a roofline).
        """
        if self._given_trend is not None:
            return self._given_trend(rows)
        if not self.prompts_predict or not self._forwards.sizes:
            return 0.0
        if self._row is None:
            self._row = self._row_of_prompts()
        return max(self._least_pass(), self._row * rows) if self._row else 0.0

    def _row_of_prompts(self) -> float:
        """Return a token's least cost in passes of prompts bound by computation; 0 without any."""
        return self._prefills.least_share(BOUND_BY_ROWS * self._least_pass())

    def _least_pass(self) -> float:
        """Return the cost of the smallest pass that was measured."""
        return self._forwards.seen[self._forwards.sizes[0]]

    def known(self, num_tokens: int, enough: int) -> bool:
        """Return True if `enough` passes over at most `num_tokens` tokens were measured."""
        for size in self._forwards.sizes:
            if size > num_tokens or enough <= 0:
                break
            enough -= self._forwards.count[size]
        return enough <= 0

    def is_cold(self, num_tokens: int) -> bool:
        """Return True if a pass of this size has hardly run, so that its time says little."""
        return self._forwards.count.get(_bucket(num_tokens), 0) <= COLD_PASSES

    def reach(self, num_tokens: int) -> float:
        """Return the most tokens that a pass over at least `num_tokens` may have.

        The limit is close to the measured sizes, so that exploring a new size is cheap.
        """
        repeated = (
            size for size in reversed(self._forwards.sizes) if self._forwards.count[size] > 1
        )
        largest = next(repeated, 0)
        return max(REACH_FACTOR * max(largest, num_tokens), largest + REACH_TOKENS)

    def forward(self, num_tokens: float) -> float:
        """Return the cost of a forward pass.

        It is 1 while none was measured, since only ratios matter then.
        """
        seconds = self._forwards.at(round(4 * num_tokens) / 4)
        return 1.0 if seconds is None else seconds

    def prefill(self, num_tokens: int) -> float:
        """Return the cost of a pass that reads prompts; 0 while none was measured."""
        return self._prefills.at(num_tokens) or 0.0

    def draft(self, source: str, depth: int, num_requests: int = 1) -> float:
        """Return the cost of drafting `depth` levels for `num_requests` requests at once.

        It is taken from the next smaller measured number of requests. If there is none, a level
        costs what its weights tell, or a tenth of a forward pass.
        """
        for octave in range(num_requests.bit_length(), 0, -1):
            if (source, octave) in self._drafts:
                return self._drafts[source, octave].at(depth) or 0.0
        return self.reading_shares.get(source, LEVEL_SHARE) * depth * self.forward(1)

    def catch_up(self, source: str, num_tokens: int) -> float:
        """Return the cost for a proposer to read missed tokens.

        If that was never measured, it is a share of what the target's own reading cost, or 0.
        """
        if source in self._catch_ups:
            return self._measured_catch_up(source, num_tokens)
        share = self.reading_shares.get(source, 0.0)
        return share * self._prefills.least_share() * num_tokens if share else 0.0

    def _measured_catch_up(self, source: str, num_tokens: int) -> float:
        """Return the measured cost to read missed tokens; 0 if there is none."""
        seconds, count = self._catch_ups.get(source, (0.0, 0.0))
        return seconds / count * num_tokens if count else 0.0

    def within(self, seconds: float) -> int:
        """Return the most tokens of a prompt-reading pass that takes at most `seconds` now.

        It is the largest size if none was measured.
        """
        i = bisect.bisect_right(
            SIZES, seconds, key=lambda size: self.prefill(size) * self.speed_factor
        )
        return SIZES[i - 1] if i else 0

    def add_forward(self, num_tokens: int, seconds: float) -> None:
        """Add a measurement of a decoding pass."""
        self._add(self._forwards, num_tokens, seconds)

    def add_prefill(self, num_tokens: int, seconds: float) -> None:
        """Add a measurement of a pass that reads prompts, possibly beside decoding requests."""
        self._prefills.add(*self._normalised(num_tokens, seconds))
        if self._row is not None:
            row = self._row_of_prompts()
            if abs(row - self._row) > ROW_CHANGE * self._row:  # small changes are not worth it
                self._row = row
                self._forwards.forget_expected()

    def add_step_overhead(self, seconds: float, num_requests: int) -> None:
        """Add a measurement of what a step took beside its forward pass and drafting."""
        self._num_overheads = min(self._num_overheads + 1, OVERHEADS)
        new = max(seconds, 0.0) / num_requests / self.speed_factor
        self.step_overhead += (new - self.step_overhead) / self._num_overheads

    def add_draft(
        self, source: str, depth: int, seconds: float, num_requests: int = 1, lag: int = 0
    ) -> None:
        """Add a measurement of drafting after reading `lag` missed tokens of all requests.

        If catching up takes most of the time, the catch-up cost is updated instead.
        """
        reading = self._measured_catch_up(source, lag) * self.speed_factor
        if not lag or 0 < reading < CATCH_UP_SHARE * seconds:
            curve = self._drafts[source, num_requests.bit_length()]
            self._add(curve, depth, seconds - reading)
            return
        spent, count = self._catch_ups.get(source, (0.0, 0.0))
        new = seconds / self.speed_factor - self.draft(source, depth, num_requests)
        self._catch_ups[source] = (
            CATCH_UP_DISCOUNT * spent + max(new, MIN_SECONDS),
            CATCH_UP_DISCOUNT * count + lag,
        )

    def _add(self, curve: Curve, size: int, seconds: float) -> None:
        bucket, seconds = self._normalised(size, seconds)
        # Before a size has settled, a deviation may come from its own inaccurate cost.
        if curve.count.get(bucket, 0) >= SETTLED:
            self.speed_factor *= bounded_ratio(curve.seen[bucket], seconds) ** SPEED_GAIN
        curve.add(bucket, seconds)

    def _normalised(self, size: int, seconds: float) -> tuple[int, float]:
        """Return the size's bucket and its cost at the start's speed.

        The cost is scaled to the size of the bucket.
        """
        bucket = _bucket(size)
        return bucket, max(seconds, MIN_SECONDS) / self.speed_factor * (bucket / size)

    @property
    def num_passes(self) -> int:
        """The number of decoding passes measured."""
        return sum(self._forwards.count.values())

    def state(self) -> dict[str, Any]:
        """Serialize the costs, in seconds at the current speed, as plain data for `load_state`."""
        factor = self.speed_factor
        return {
            "forwards": self._forwards.state(factor),
            "prefills": self._prefills.state(factor),
            "step_overhead": self.step_overhead * factor,
            "drafts": {
                f"{octave} {source}": curve.state(factor)
                for (source, octave), curve in self._drafts.items()
            },
            "catch_ups": {
                source: (seconds * factor, count)
                for source, (seconds, count) in self._catch_ups.items()
            },
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Load costs that another process measured; invalid data raise any exception."""
        self._forwards.load_state(state["forwards"])
        self._prefills.load_state(state["prefills"])
        overhead = float(state["step_overhead"])
        if not 0 <= overhead < LONGEST:
            raise ValueError(f"{overhead} s beside a pass")
        self.step_overhead, self._num_overheads = overhead, 1 if overhead else 0
        for name, sizes in state["drafts"].items():
            octave, _, source = name.partition(" ")
            self._drafts[source, int(octave)].load_state(sizes)
        for source, (seconds, count) in state["catch_ups"].items():
            if not (LEAST <= seconds < LONGEST and 0 < count < MOST_TOKENS):
                raise ValueError(f"{seconds} s for {count}")
            self._catch_ups[source] = float(seconds), float(count)

    def seconds(self) -> tuple[dict[int, float], dict[str, dict[int, float]]]:
        """Return current seconds of measured sizes: passes by tokens, drafts by proposer and depth.

        Drafts are those for the fewest requests at once that were measured.
        """
        fewest = dict(sorted(self._drafts, reverse=True))
        drafts = {name: self._table(self._drafts[name, octave]) for name, octave in fewest.items()}
        return self._table(self._forwards), drafts

    def _table(self, curve: Curve) -> dict[int, float]:
        return {size: (curve.at(size) or 0.0) * self.speed_factor for size in curve.sizes}


class ExpertLoad:
    """Distinct experts of forward passes, in units of rows, for models with mixtures of experts.

    A pass over a few tokens costs about what it takes to read the experts that they use, and tokens
    that share experts cost less than strangers. Passes are therefore measured and predicted by
    effective rows: the number of tokens with independent routes that would use as many distinct
    experts, E (1 - (1 - k / E)^rows) a layer. What a drafted token will use is estimated from the
    last time the target read it; tokens that were never read count as strangers.

    Attributes:
        ratio: mean effective rows that a further token adds.
        error: mean relative error of recent estimates, in distinct experts.
    """

    def __init__(self, count: int, used: int, layers: int) -> None:
        """A token uses `used` of `count` experts in each of `layers` layers."""
        self.count, self.used, self.layers = count, used, layers
        self.ratio = 1.0
        self.error = 0.0
        # token -> its experts, int16 [layers, used]
        self._last: OrderedDict[int, np.ndarray] = OrderedDict()
        self._most = max(ROUTE_BYTES // (2 * self.layers * self.used), 1)
        self._all_layers = np.arange(self.layers)[:, None]

    def rows(self, distinct: float) -> float:
        """Return the effective rows of a pass that uses `distinct` experts, all layers together."""
        if self.used >= self.count:
            return 1.0
        free = max(1 - distinct / self.layers / self.count, 0.5 / self.count)
        return math.log(free) / math.log(1 - self.used / self.count)

    def observe(self, tokens: Sequence[int], choices: np.ndarray) -> float:
        """Remember the experts of the tokens of a pass, int16 [T, layers, used].

        Returns the effective rows of the pass."""
        expected = self.distinct(tokens)[-1]
        found = np.zeros((self.layers, self.count), bool)
        found[self._all_layers, choices.transpose(1, 0, 2).reshape(self.layers, -1)] = True
        distinct = int(found.sum())
        self.error += ROUTE_GAIN * (abs(expected - distinct) / distinct - self.error)
        self.remember(tokens, choices)
        rows = self.rows(distinct)
        if len(tokens) > 1:
            self.ratio += ROUTE_GAIN * ((rows - 1) / (len(tokens) - 1) - self.ratio)
        return rows

    def remember(self, tokens: Sequence[int], choices: np.ndarray) -> None:
        """Remember the experts of tokens, int16 [T, layers, used]."""
        for token, own in zip(tokens, choices, strict=True):
            self._last[token] = own.copy()
            self._last.move_to_end(token)
        while len(self._last) > self._most:
            self._last.popitem(last=False)

    def distinct(self, tokens: Sequence[int]) -> list[float]:
        """Return the number of distinct experts expected of the first 1, 2, .. tokens."""
        used = np.zeros((self.layers, self.count), bool)
        known, strange, found = 0, 0, []
        for token in tokens:
            own = self._last.get(token)
            if own is None:
                strange += 1
            else:
                used[self._all_layers, own] = True
                known = int(used.sum())
            free = self.layers * self.count - known
            found.append(known + free * (1 - (1 - self.used / self.count) ** strange))
        return found

    def growth(self, certain: Sequence[int], drafted: Sequence[int]) -> list[float]:
        """Return the effective rows that the first 0, 1, .. drafted tokens add to certain ones."""
        rows = [self.rows(distinct) for distinct in self.distinct([*certain, *drafted])]
        first = rows[len(certain) - 1]
        return [total - first for total in rows[len(certain) - 1 :]]

    def expected_rows(self, num_tokens: float) -> float:
        """Return the effective rows expected of a pass over so many tokens."""
        return 1 + max(num_tokens - 1, 0) * self.ratio


def _bucket(size: int) -> int:
    """Return the bucket of a size: above EXACT_SIZES there are eight buckets per octave."""
    step = 1 << max(size.bit_length() - 4, 0)
    return size if size <= EXACT_SIZES else round(size / step) * step


def bounded_ratio(expected: float, seconds: float) -> float:
    """Return the ratio of a measurement to its expectation, within bounds."""
    return min(max(seconds / expected, 1 / MAX_SURPRISE), MAX_SURPRISE)


MAX_DEPTH = 64
Cost = Callable[[int], float]  # rows of a forward pass -> its cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """The parameters of the formulas.

    Attributes:
        acceptance: probability that the draft's first choice is accepted, by level; the last value
            applies to all deeper levels.
        siblings: probability of the draft's second, third, .. choice. The tree keeps one more node
            per level than there are siblings: the likeliest paths. Empty for chains.
        draft_cost: of drafting one level, for all requests together.
        fixed_cost: of drafting at any depth, for all requests together.
        verify_cost: maps the rows of a pass to its cost; by default further rows are free.
        foreseen: probability that an asynchronous drafter anticipated the verdict; None for a
            drafter that waits for it.
        requests: number of concurrent requests.

    Raises:
        ConfigError: a value is out of range.
    """

    acceptance: Sequence[float]
    siblings: Sequence[float] = ()
    draft_cost: float = 0.0
    fixed_cost: float = 0.0
    verify_cost: Cost = field(default_factory=lambda: cost_by_slope(0.0))
    foreseen: float | None = None
    requests: int = 1

    def __post_init__(self) -> None:
        if not self.acceptance:
            raise ConfigError("acceptance is empty: give at least one probability, such as 0.8")
        for chance in (*self.acceptance, *self.siblings, self.foreseen or 0.0):
            if not 0 <= chance <= 1:
                raise ConfigError(
                    f"acceptance {chance} is out of range: give probabilities, 0 to 1"
                )
        if max(self.acceptance) + sum(self.siblings) > 1 + 1e-9:
            raise ConfigError("acceptance and siblings of a level add up to more than 1")
        if not all(0 <= cost < float("inf") for cost in (self.draft_cost, self.fixed_cost)):
            raise ConfigError("a draft cost is negative or infinite: give costs from 0 up")
        check_integer("requests", self.requests, 1)

    @property
    def width(self) -> int:
        """Nodes per level."""
        return 1 + len(self.siblings)

    def at(self, depth: int) -> SpeedupForecast:
        """Predict one depth; depth 0 is plain decoding."""
        rows = self.requests * (1 + self.width * depth)
        verify = self.verify_cost(rows)
        drafting = self.draft_cost * depth + self.fixed_cost if depth else 0.0
        hits = self.foreseen or 0.0
        cost = hits * max(verify, drafting) + (1 - hits) * (verify + drafting)
        tokens = 1.0 + sum(self.level_chances(depth))
        return SpeedupForecast(
            depth, rows, tokens, cost, tokens * self.verify_cost(self.requests) / cost
        )

    def best(self) -> SpeedupForecast:
        """Return the depth up to MAX_DEPTH with the greatest speed-up, the smallest of equals."""
        forecasts = (self.at(depth) for depth in range(MAX_DEPTH + 1))
        return max(forecasts, key=lambda forecast: forecast.speedup)

    def level_chances(self, depth: int) -> list[float]:
        """Return, for each level, the probability that the target's path is in the draft so far.

        The `width` likeliest paths of each level are kept. A path's probability is the product of
        its choices', so the best paths of a level extend the best of the level before.
        """
        paths = [1.0]
        chances = []
        for level in range(depth):
            first = self.acceptance[min(level, len(self.acceptance) - 1)]
            choices = (first, *self.siblings)
            extended = (path * choice for path in paths for choice in choices)
            paths = heapq.nlargest(self.width, extended)
            chances.append(sum(paths))
        return chances


@dataclass(frozen=True, slots=True)
class SpeedupForecast:
    """Rows of a pass, tokens per pass and request, cost of a step, and speed-up of one depth."""

    depth: int
    rows: int
    tokens: float
    cost: float
    speedup: float


def cascaded(draft_cost: float, inner: Speculation) -> tuple[int, float]:
    """Return (best depth, cost per level) of a draft model that is itself drafted for.

    `draft_cost` is the cost of the draft model's forward pass over one row, and the costs of
    `inner` are in such passes. Depth 0 means that the draft model is faster alone.
    """
    best = inner.best()
    return best.depth, draft_cost / best.speedup


def cost_by_rows(costs: dict[int, float]) -> Cost:
    """Return a cost function through measured points {rows: cost}, scaled so that one row costs 1.

    It is linear between the points and continues the last segment. Raises ConfigError for costs
    that are not positive, or without one row.
    """
    if not costs or min(costs) != 1:
        raise ConfigError("verify costs need the cost of one row: give 1:COST too")
    if any(not 0 < cost < float("inf") for cost in costs.values()):
        raise ConfigError("a verify cost is not positive: give costs over 0")
    rows = sorted(costs)
    values = [costs[r] / costs[1] for r in rows]
    slope = (values[-1] - values[-2]) / (rows[-1] - rows[-2]) if len(rows) > 1 else 0.0

    def cost(count: int) -> float:
        beyond = max(count - rows[-1], 0) * max(slope, 0.0)
        return float(np.interp(count, rows, values)) + beyond

    return cost


def cost_by_slope(slope: float) -> Cost:
    """Return a cost function that grows by `slope` with every row after the first.

    Raises ConfigError for a negative or infinite slope.
    """
    if not 0 <= slope < float("inf"):
        raise ConfigError(f"verify cost {slope} is out of range: give the cost of a row, from 0 up")
    return lambda rows: 1.0 + slope * (rows - 1)
