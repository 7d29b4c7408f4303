"""The arithmetic of speculation: expected tokens a pass, speed-up, and the depth where it is
greatest.

Costs are in passes of the target over one row (one token of one request). Acceptance is
conditional: the chance that a level is accepted given that the levels before it were. The formulas,
with tau for tokens a pass:

    chain, one chance a at every level   tau(K) = (1 - a^(K+1)) / (1 - a)             Leviathan
    2211.17192, eq. 1 chain, a chance a_i for level i      tau(K) = 1 + sum over i of a_1 a_2 .. a_i
    the same, levels not alike tree                                 tau = 1 + sum over nodes of
    P(accepted)      Sequoia 2402.12374 speed-up at depth K                  S(K) = tau(K) v(B) /
    (v(B + B w K) + c K + f) drafting ahead, on cores of its own  S(K) = tau(K) v(B) / (h max(v, d)
    + (1 - h) (v + d))     SSD 2603.03251

for B requests at once, v(n) the cost of a pass over n rows, w nodes a level, c the cost of drafting
a level (a draft model), f of a draft whatever its depth (one-pass drafters), d = c K + f, h the
chance that what a verdict leaves was drafted for. With B = w = 1, v constant and f = 0 the former
is Leviathan's theorem 3.8."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from forerun.errors import ConfigError
from forerun.utils import check_integer

DEEPEST = 64
Cost = Callable[[int], float]


def flat(rows: int) -> float:
    """The cost of a pass where rows are free."""
    return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """A way to speculate, as the formulas see it.

    Attributes:
        acceptance: the chance that the draft's first choice is the target's token, by level; the
            last one goes on.
        siblings: the chance that it is the draft's second choice, third choice, ...: trees with one
            more node a level than there are siblings, the likeliest paths of each level. Empty:
            chains.
        draft_cost: of drafting one level.
        fixed_cost: of drafting at all.
        verify_cost: rows of a pass to its cost.
        foreseen: the chance that what a verdict leaves was drafted for while the target worked, on
            cores of the drafter's own; None where one waits for the other.
        requests: decoding at once; `draft_cost` and `fixed_cost` are for all of them together.
    """

    acceptance: Sequence[float]
    siblings: Sequence[float] = ()
    draft_cost: float = 0.0
    fixed_cost: float = 0.0
    verify_cost: Cost = field(default=flat)
    foreseen: float | None = None
    requests: int = 1

    def __post_init__(self) -> None:
        if not self.acceptance:
            raise ConfigError("there is no acceptance: give at least one chance, such as 0.8")
        for chance in (*self.acceptance, *self.siblings, self.foreseen or 0.0):
            if not 0 <= chance <= 1:
                raise ConfigError(f"acceptance {chance} is out of range: give chances from 0 to 1")
        if max(self.acceptance) + sum(self.siblings) > 1 + 1e-9:
            raise ConfigError(
                "the chances of a level's first choice and its siblings add up to more than 1"
            )
        if not all(0 <= cost < float("inf") for cost in (self.draft_cost, self.fixed_cost)):
            raise ConfigError(
                "a draft cannot cost less than nothing, nor for ever: give costs from 0 up"
            )
        check_integer("requests", self.requests, 1)

    @property
    def width(self) -> int:
        """Nodes a level."""
        return 1 + len(self.siblings)

    def at(self, depth: int) -> Forecast:
        """What drafting `depth` levels gives; depth 0 is plain decoding."""
        rows = self.requests * (1 + self.width * depth)
        verify, drafting = (
            self.verify_cost(rows),
            self.draft_cost * depth + self.fixed_cost if depth else 0.0,
        )
        hits = self.foreseen or 0.0
        cost = hits * max(verify, drafting) + (1 - hits) * (verify + drafting)
        tokens = expected_tokens(self, depth)
        return Forecast(depth, rows, tokens, cost, tokens * self.verify_cost(self.requests) / cost)

    def best(self, deepest: int = DEEPEST) -> Forecast:
        """The depth from 0 to `deepest` with the greatest speed-up, the smallest of equals."""
        return max(
            (self.at(depth) for depth in range(deepest + 1)), key=lambda forecast: forecast.speedup
        )


def played(speculation: Speculation, depth: int, rounds: int = 20_000, seed: int = 0) -> float:
    """The speed-up of drafting ahead, played round by round on a machine where the drafter has
    cores of its own.

    While the target verifies, the drafter reads the draft, and then drafts behind what may come of
    it, a level at a time. If that is foreseen, the next verification begins once the draft is
    there; otherwise it is drafted anew, once the drafter is through with the level that it is in.
    """
    chance, clock, said = random.Random(seed), 0.0, 0
    one, rows = speculation.requests, speculation.requests * (1 + speculation.width * depth)
    verify, level, reached = (
        speculation.verify_cost(rows),
        speculation.draft_cost,
        level_chances(speculation, depth),
    )
    for _ in range(rounds):
        draw = chance.random()
        said += 1 + sum(draw < stands for stands in reached)
        ahead = level * (depth + 1) + speculation.fixed_cost
        if chance.random() < (speculation.foreseen or 0.0):
            clock += max(verify, ahead)
        else:
            busy = min(math.ceil(verify / level) * level, ahead) if level else 0.0
            clock += max(verify, busy) + level * depth + speculation.fixed_cost
    return said * speculation.verify_cost(one) / clock


@dataclass(frozen=True, slots=True)
class Forecast:
    """One depth: rows of a pass, tokens a pass and request, cost of a round in one-row passes,
    times plain decoding."""

    depth: int
    rows: int
    tokens: float
    cost: float
    speedup: float


def expected_tokens(speculation: Speculation, depth: int) -> float:
    """Tokens a pass gives, the target's own included: 1 + the chances that level 1, 2, .. `depth`
    is reached."""
    return 1.0 + sum(level_chances(speculation, depth))


def level_chances(speculation: Speculation, depth: int) -> list[float]:
    """For each level, the chance that the target's path is in the draft down to there.

    Of each level the `width` likeliest paths are kept, as a beam does. A path's chance is the
    product of its choices' chances, so the best paths of a level continue the best of the one
    before: nothing is lost by cutting."""
    paths, chances = [1.0], []
    for level in range(depth):
        first = speculation.acceptance[min(level, len(speculation.acceptance) - 1)]
        choices = (first, *speculation.siblings)
        paths = heapq.nlargest(
            speculation.width, (path * choice for path in paths for choice in choices)
        )
        chances.append(sum(paths))
    return chances


def cascaded(draft_cost: float, inner: Speculation) -> tuple[int, float]:
    """What drafting a level costs where the draft model, whose pass over one row costs
    `draft_cost`, is itself drafted for (`inner`: costs in passes of it): (how deep at best, cost of
    a level). Depth 0 is the model alone. A draft of many levels takes several such rounds."""
    best = inner.best()
    return best.depth, draft_cost / best.speedup


def cost_by_rows(costs: dict[int, float]) -> Cost:
    """A cost function through measured points {rows: cost}: linear between them, and beyond on the
    last two's line.

    Scaled so that one row costs 1. Raises ConfigError for points that make no sense.
    """
    if not costs or min(costs) != 1:
        raise ConfigError("verify costs need the cost of one row: give 1:COST too")
    if any(not 0 < cost < float("inf") for cost in costs.values()):
        raise ConfigError("a pass costs something: give verify costs over 0")
    rows = sorted(costs)
    values = [costs[r] / costs[1] for r in rows]
    slope = (values[-1] - values[-2]) / (rows[-1] - rows[-2]) if len(rows) > 1 else 0.0

    def cost(count: int) -> float:
        beyond = max(count - rows[-1], 0) * max(slope, 0.0)
        return float(np.interp(count, rows, values)) + beyond

    return cost


def cost_by_slope(slope: float) -> Cost:
    """A cost function that grows by `slope` with every row after the first. Raises ConfigError if
    it would shrink."""
    if not 0 <= slope < float("inf"):
        raise ConfigError(
            f"verify cost {slope} is out of range: give what a further row costs, from 0 up"
        )
    return lambda rows: 1.0 + slope * (rows - 1)
