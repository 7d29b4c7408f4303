"""Expected speed-up of speculative decoding from acceptance rates and costs.

Costs are in target forward passes over one row (one token of one request). Acceptance is
conditional: the probability that a level is accepted given that the levels before it were. With tau
for the tokens per forward pass:

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

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from forerun.errors import ConfigError
from forerun.utils import check_integer

MAX_DEPTH = 64
Cost = Callable[[int], float]  # rows of a forward pass -> its cost


def constant_cost(rows: int) -> float:
    """Return the cost of a pass where further rows are free."""
    return 1.0


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
        verify_cost: maps the rows of a pass to its cost.
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
    verify_cost: Cost = field(default=constant_cost)
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

    def best(self, max_depth: int = MAX_DEPTH) -> SpeedupForecast:
        """Return the depth up to `max_depth` with the greatest speed-up, the smallest of equals."""
        forecasts = (self.at(depth) for depth in range(max_depth + 1))
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
