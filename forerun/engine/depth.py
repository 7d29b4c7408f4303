"""How deep to draft: as deep as pays, down to zero.

`Auto` keeps two things it has measured: what a pass costs by its number of tokens and what drafting costs by depth
(seconds, per proposer), and how often each request's drafts are accepted. It then takes the depths with the most
expected tokens a second. Depth never changes the output under `match`; under the ratio rules it depends on past
rounds only, which keeps them exact (non-anticipating).
"""

from __future__ import annotations

import bisect
import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

DEEPEST = 16
HOPELESS = 0.02  # chance of acceptance below which a token is not worth considering
PRIOR = 0.6  # acceptance assumed of a proposer nothing is known of
STRENGTH = 4.0  # how many observations the prior is worth
PROBE_FIRST, PROBE_LAST = 32, 512  # steps without drafting before one is tried again; doubles while it fails
PROBE_DEPTH = 2
PROBE_SHARE = 0.01  # of the time goes into probes of a proposer, or one probe in PROBE_LAST steps


@dataclass(slots=True)
class Acceptance:
    """Discounted counts of accepted and rejected drafted tokens, and the state of probing."""

    accepted: float = 0.0
    rejected: float = 0.0
    skipped: int = 0
    patience: int = PROBE_FIRST

    def rate(self, prior: float) -> float:
        """Probability that the next drafted token is accepted, given that those before it were."""
        return (self.accepted + STRENGTH * prior) / (self.accepted + self.rejected + STRENGTH)

    def add(self, drafted: int, accepted: int, keep: float) -> None:
        """One round: a draft accepted to its end tells nothing of what would have come after (censored)."""
        self.accepted = keep * self.accepted + accepted
        self.rejected = keep * self.rejected + (accepted < drafted)


@dataclass(slots=True)
class Curve:
    """Seconds by size, learned: a running value at each size seen, interpolated, hopeful beyond the largest.

    The value follows a faster measurement quickly and a slower one slowly: what slows a step down (another program, a
    first call) says little of what the next will take, and a cost that is believed too high is never measured again.
    """

    slope: float  # growth per unit assumed beyond what was seen, as a share of the last value
    sizes: list[int] = field(default_factory=list)
    seen: dict[int, float] = field(default_factory=dict)

    def add(self, size: int, seconds: float) -> None:
        """One measurement."""
        old = self.seen.get(size)
        if old is None:
            bisect.insort(self.sizes, size)
            self.seen[size] = seconds
        else:
            self.seen[size] = old + (0.5 * (seconds - old) if seconds < old else 0.1 * (min(seconds, 2 * old) - old))

    def at(self, size: int) -> float | None:
        """Expected seconds, or None where nothing was measured yet.

        Never more than so many times the smallest size: what was measured beyond that was something else.
        """
        if not self.sizes:
            return None
        smallest = self.sizes[0]
        return min(self._interpolate(size), self.seen[smallest] * max(size / smallest, 1))

    def _interpolate(self, size: int) -> float:
        if size in self.seen:
            return self.seen[size]
        i = bisect.bisect(self.sizes, size)
        if i == 0:
            return self.seen[self.sizes[0]]
        below = self.sizes[i - 1]
        if i == len(self.sizes):
            return self.seen[below] * (1 + self.slope * (size - below))
        above = self.sizes[i]
        share = (size - below) / (above - below)
        return self.seen[below] + share * (self.seen[above] - self.seen[below])


@dataclass(slots=True)
class Wish:
    """One request that could draft: its proposer, the most it may draft, its acceptance and what a level costs."""

    source: str
    limit: int
    acceptance: Acceptance
    width: int = 1


class DepthPolicy(Protocol):
    """Chooses depths before a step and learns from it afterwards."""

    def choose(self, wishes: Sequence[Wish], tokens: int) -> list[int]:
        """The depth of each request, 0 to its limit. `tokens` are in the pass in any case."""

    def rate(self, source: str, acceptance: Acceptance) -> float:
        """The acceptance it expects of the next drafted token."""

    def costs(self) -> tuple[dict[int, float], dict[str, dict[int, float]]]:
        """Seconds measured so far: of a pass by its tokens, and of drafting by proposer and depth."""

    def record_draft(self, source: str, depth: int, seconds: float) -> None:
        """Drafting to `depth` took so long."""

    def record_lag(self, source: str, seconds: float) -> None:
        """Drafting took so long where a proposer had much to read first: no measure of a round."""

    def record_pass(self, tokens: int, seconds: float) -> None:
        """A target pass over so many tokens, with its verification, took so long."""

    def record_verdict(self, source: str, acceptance: Acceptance, drafted: int, accepted: int) -> None:
        """A draft `drafted` deep was accepted `accepted` deep."""


class Auto:
    """The depths with the most expected tokens a second, by measured cost and acceptance, with probes."""

    def __init__(self) -> None:
        self.passes = Curve(slope=0.02)
        self.drafts: dict[str, Curve] = defaultdict(lambda: Curve(slope=0.5))
        self.sources: dict[str, Acceptance] = defaultdict(Acceptance)
        self.lags: dict[str, float] = {}  # seconds of the last draft behind much to read, by proposer
        self.unprobed: dict[str, int] = defaultdict(int)  # steps since a request probed, by proposer

    def choose(self, wishes: Sequence[Wish], tokens: int) -> list[int]:
        """The best depths; those whose drafts did not pay rest until their probe, for nothing new is known of them."""
        active = [i for i, wish in enumerate(wishes) if wish.limit and not wish.acceptance.skipped]
        depths = self._best(wishes, active, tokens) if active else [0] * len(wishes)
        return self._with_probes(wishes, depths, tokens)

    def _best(self, wishes: Sequence[Wish], active: Sequence[int], tokens: int) -> list[int]:
        """Add drafted tokens in order of their chance to be accepted; keep the best point on the way."""
        rates = {i: self.rate(wishes[i].source, wishes[i].acceptance) for i in active}
        depths, expected, added, in_vain = [0] * len(wishes), float(len(wishes)), 0, 0
        best, best_speed = list(depths), expected / self._pass(tokens)
        heap = [(-rate, i) for i, rate in rates.items()]
        heapq.heapify(heap)
        while heap and in_vain < 3 * len(wishes):
            chance, i = heapq.heappop(heap)
            depths[i] += 1
            expected -= chance
            added += wishes[i].width
            cost = self._pass(tokens + added) + self._draft(wishes, depths)
            in_vain += 1
            if expected / cost > best_speed:
                best, best_speed, in_vain = list(depths), expected / cost, 0
            if depths[i] < min(wishes[i].limit, DEEPEST) and -chance * rates[i] > HOPELESS:
                heapq.heappush(heap, (chance * rates[i], i))
        return best

    def rate(self, source: str, acceptance: Acceptance) -> float:
        return acceptance.rate(self.sources[source].rate(PRIOR))

    def costs(self) -> tuple[dict[int, float], dict[str, dict[int, float]]]:
        return dict(self.passes.seen), {name: dict(curve.seen) for name, curve in self.drafts.items() if curve.seen}

    def _with_probes(self, wishes: Sequence[Wish], depths: list[int], tokens: int) -> list[int]:
        """Now and then draft where it does not seem to pay, or nothing would ever be learned again: each request when
        it has waited long enough, and of a dear proposer no more often than its price allows."""
        resting = [i for i, wish in enumerate(wishes) if wish.limit and not depths[i]]
        for wish, depth in zip(wishes, depths, strict=True):
            state = wish.acceptance
            state.skipped, state.patience = (0, PROBE_FIRST) if depth else (state.skipped + 1, state.patience)
        for source in {wishes[i].source for i in resting}:
            self.unprobed[source] += 1
        ready = [i for i in resting if wishes[i].acceptance.skipped >= wishes[i].acceptance.patience]
        for i in [i for i in ready if self._is_due(wishes[i], tokens)]:
            state, source = wishes[i].acceptance, wishes[i].source
            state.skipped, state.patience = 0, min(2 * state.patience, PROBE_LAST)
            depths[i], self.unprobed[source] = min(PROBE_DEPTH, wishes[i].limit), 0
        return depths

    def _is_due(self, wish: Wish, tokens: int) -> bool:
        """Whether its proposer has not been probed for as long as the price of a probe demands."""
        drafting = max(self.drafts[wish.source].at(PROBE_DEPTH) or 0.0, self.lags.get(wish.source, 0.0))
        price = (drafting + self._pass(tokens + PROBE_DEPTH * wish.width)) / self._pass(tokens) - 1  # in passes
        return self.unprobed[wish.source] >= min(price / PROBE_SHARE, PROBE_LAST)

    def _pass(self, tokens: int) -> float:
        seconds = self.passes.at(tokens)
        return 1.0 if seconds is None else seconds

    def _draft(self, wishes: Sequence[Wish], depths: Sequence[int]) -> float:
        """Proposers work one after the other, each on all its requests at once, as long as its deepest takes."""
        deepest: dict[str, int] = {}
        for wish, depth in zip(wishes, depths, strict=True):
            deepest[wish.source] = max(deepest.get(wish.source, 0), depth)
        total = 0.0
        for source, depth in deepest.items():
            if depth:
                seconds = self.drafts[source].at(depth)
                total += 0.1 * depth * self._pass(1) if seconds is None else seconds
        return total

    def record_draft(self, source: str, depth: int, seconds: float) -> None:
        self.drafts[source].add(depth, seconds)

    def record_lag(self, source: str, seconds: float) -> None:
        self.lags[source] = seconds

    def record_pass(self, tokens: int, seconds: float) -> None:
        self.passes.add(tokens, seconds)

    def record_verdict(self, source: str, acceptance: Acceptance, drafted: int, accepted: int) -> None:
        acceptance.add(drafted, accepted, keep=0.9)
        self.sources[source].add(drafted, accepted, keep=0.99)
        if accepted == drafted:  # a probe that came through: be quicker to try again
            acceptance.patience = max(acceptance.patience // 2, PROBE_FIRST)
