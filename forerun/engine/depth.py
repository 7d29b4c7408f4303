"""How deep to draft: as deep as pays, down to zero.

`Auto` keeps two things it has measured: what passes and drafts cost (`costs`), and how often each request's drafts are
accepted. It then takes the depths with the most expected tokens a second. Depth never changes the output under
`match`; under the ratio rules it depends on past rounds only, which keeps them exact (non-anticipating).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from forerun.engine.acceptance import STRENGTH, Acceptance, Wish
from forerun.engine.costs import Costs
from forerun.engine.survival import Survival

DEEPEST = 16
FAR, HIGHEST = 4, 0.9  # levels over which a level's cost is taken; a floor is no higher
HOPELESS = 0.02  # chance of acceptance below which a token is not worth considering
PRIOR = 0.6  # acceptance assumed of a proposer nothing is known of
OFFERED = 0.9  # and how often it has something to offer
KNOWN = 0.06  # observations that each of up to a hundred adds to the prior that were made of other requests
PLAIN = 2  # passes without a draft that are measured before anything is compared with them
IDLE = 8  # steps after which a rival of who drafts is tried again
REST = 16  # steps without drafting before it is tried again, at least
PROBE_DEPTH = 2
PROBE_SHARE = 0.01  # of the time goes into probes of a proposer,
ALLOWANCE = 5.0  # and the time of so many passes at once


class DepthPolicy(Protocol):
    """Chooses depths before a step and learns from it afterwards."""

    def choose(self, wishes: Sequence[Wish], tokens: int) -> list[int]:
        """The depth of each request, 0 to its limit. `tokens` are in the pass in any case."""

    def worth(
        self, kind: str, acceptance: Acceptance, copied: int, others: Sequence[Wish], place: tuple[int, int]
    ) -> int:
        """How many of the tokens that were copied to verify, 0 where none pays or one of the others is expected to do
        better. `kind` is of their match, `acceptance` what became of such copies for this request; `place` is (tokens
        that are in the pass in any case, requests that may draft in it)."""

    def enough(self, chances: Sequence[float], place: tuple[int, int]) -> int:
        """How many of some nodes to verify, of which each stands with such a chance, the likeliest first; `place` as in
        `worth`."""

    def ranked(self, groups: Sequence[Sequence[Wish]], place: tuple[int, int]) -> list[int]:
        """Which groups are expected to do best for a request, best first; `place` as in `worth`."""

    def tried(self, rivals: Sequence[Wish], place: tuple[int, int]) -> int | None:
        """Which of the rivals to let draft only to see what becomes of it; asked once a step. `place` as in `worth`."""

    def floor(self, source: str, acceptance: Acceptance, place: tuple[int, int]) -> float:
        """The chance that a chain still stands below which no token more is worth it; `place` as in `worth`."""

    def survival(self, source: str, greedy: bool) -> Survival:
        """What the drafter's own probabilities are worth."""

    def rests(self, acceptance: Acceptance) -> bool:
        """Whether nothing is to be drafted this step. Asked once a step, and spares it `choose` if so."""

    def rate(self, source: str, acceptance: Acceptance) -> float:
        """The acceptance it expects of the next drafted token."""

    def cost(self, tokens: float) -> float:
        """Seconds that it expects of a pass over so many tokens."""

    def costs(self) -> tuple[dict[int, float], dict[str, dict[int, float]]]:
        """Seconds measured so far: of a pass by its tokens, and of drafting by proposer and depth."""

    def record_draft(self, source: str, depth: int, seconds: float, requests: int = 1) -> None:
        """Drafting to `depth`, for so many requests at once, took so long."""

    def record_lag(self, source: str, seconds: float) -> None:
        """Drafting took so long where a proposer had much to read first: no measure of a round."""

    def record_pass(self, tokens: int, seconds: float) -> None:
        """A target pass over so many tokens, with its verification, took so long."""

    def record_verdict(self, source: str, acceptance: Acceptance, drafted: int, accepted: int) -> None:
        """A draft `drafted` deep was accepted `accepted` deep; 0 deep is a proposer that had nothing to offer."""


class Auto:
    """The depths with the most expected tokens a second, by measured cost and acceptance, with probes."""

    def __init__(self) -> None:
        self.learned = Costs()
        self.sources: dict[str, Acceptance] = defaultdict(Acceptance)
        self.survivals: dict[tuple[str, bool], Survival] = defaultdict(Survival)
        self.credit: dict[str, float] = defaultdict(lambda: ALLOWANCE)  # passes left for probes, by proposer

    def state(self) -> dict[str, Any]:
        """What was learned, as plain data for `recall` of another process: seconds and counts, no text."""
        return {
            "costs": self.learned.state(),
            "sources": {name: acceptance.state() for name, acceptance in self.sources.items()},
            "survivals": {f"{int(greedy)} {name}": s.state() for (name, greedy), s in self.survivals.items()},
        }

    def recall(self, state: Mapping[str, Any]) -> None:
        """Begin with what another process learned. Raises ValueError, TypeError, KeyError or AttributeError, and
        nothing is known then, for what `state` never gave."""
        learned = Auto()
        learned.learned.recall(state["costs"])
        for name, found in state["sources"].items():
            learned.sources[name].recall(found)
        for name, found in state["survivals"].items():
            greedy, _, source = name.partition(" ")
            learned.survivals[source, greedy == "1"].recall(found)
        self.learned, self.sources, self.survivals = learned.learned, learned.sources, learned.survivals

    def choose(self, wishes: Sequence[Wish], tokens: int) -> list[int]:
        """The best depths; those whose drafts did not pay rest until their probe, for nothing new is known of them."""
        if not self.learned.known(tokens, PLAIN):
            return [0] * len(wishes)
        active = [i for i, wish in enumerate(wishes) if wish.limit and wish.acceptance.rest is None]
        depths = self._best(wishes, active, tokens) if active else [0] * len(wishes)
        return self._with_probes(wishes, depths, tokens)

    def _best(self, wishes: Sequence[Wish], active: Sequence[int], tokens: int) -> list[int]:
        """Add drafted tokens in order of their chance to be accepted; keep the best point on the way.

        Proposers work one after the other, each on all its requests at once, as long as its deepest takes.
        """
        rates = {i: self.rate(wishes[i].source, wishes[i].acceptance) for i in active}
        offers = {i: self._offer(wishes[i]) for i in active}
        depths, expected, added, in_vain = [0] * len(wishes), float(len(wishes)), 0.0, 0
        best, best_speed = list(depths), expected / self.learned.of_pass(tokens)
        deepest: dict[str, int] = defaultdict(int)
        requests: dict[str, int] = defaultdict(int)
        heap = [(-offers[i] * rate, i) for i, rate in rates.items() if rate > HOPELESS]
        heapq.heapify(heap)
        while heap and in_vain < 3 * len(wishes):
            chance, i = heapq.heappop(heap)
            source = wishes[i].source
            requests[source] += depths[i] == 0
            depths[i] += 1
            deepest[source] = max(deepest[source], depths[i])
            expected -= chance
            added += wishes[i].width * offers[i]
            cost = self.learned.of_pass(tokens + added)
            cost += sum(self.learned.of_draft(name, depth, requests[name]) for name, depth in deepest.items())
            in_vain += 1
            if expected / cost > best_speed:
                best, best_speed, in_vain = list(depths), expected / cost, 0
            if depths[i] < min(wishes[i].limit, DEEPEST) and -chance * rates[i] > HOPELESS:
                heapq.heappush(heap, (chance * rates[i], i))
        return best

    def rate(self, source: str, acceptance: Acceptance) -> float:
        """What is known of all requests counts for more the better it is known: two bad rounds are no evidence against
        a hundred."""
        known = self.sources[source].kept
        return acceptance.kept.rate(known.rate(PRIOR), STRENGTH + KNOWN * min(known.seen, 100))

    def _offer(self, wish: Wish) -> float:
        """How often its proposer has something to draft."""
        return wish.acceptance.offered.rate(self.sources[wish.source].offered.rate(OFFERED))

    def worth(
        self, kind: str, acceptance: Acceptance, copied: int, others: Sequence[Wish], place: tuple[int, int]
    ) -> int:
        """As if all requests that may draft were alike."""
        best, speed = self._alone(Wish("", copied, Acceptance()), self.rate(kind, acceptance), place)
        for wish in others:
            if self._alone(wish, self.rate(wish.source, wish.acceptance), place)[1] > speed:
                return 0
        return best

    def enough(self, chances: Sequence[float], place: tuple[int, int]) -> int:
        """As many as give most tokens a second, as if all requests that may draft were alike."""
        tokens, requests = place
        expected = itertools.accumulate(chances, initial=1.0)
        speeds = [gain / self.learned.of_pass(tokens + requests * count) for count, gain in enumerate(expected)]
        return speeds.index(max(speeds))

    def ranked(self, groups: Sequence[Sequence[Wish]], place: tuple[int, int]) -> list[int]:
        speeds = [max(self._hoped(wish, place) for wish in group) for group in groups]
        return sorted(range(len(groups)), key=lambda i: -speeds[i])

    def tried(self, rivals: Sequence[Wish], place: tuple[int, int]) -> int | None:
        """The one that has been idle longest, if its proposer has credit for the time that drafting takes: what it says
        is not verified, only compared with what the target says anyway."""
        for wish in rivals:
            wish.acceptance.idle += 1
        i = max(range(len(rivals)), key=lambda i: rivals[i].acceptance.idle)
        source, state = rivals[i].source, rivals[i].acceptance
        if state.idle <= IDLE or not self.learned.known(place[0], PLAIN):
            return None
        seconds = max(self.learned.of_draft(source, PROBE_DEPTH), self.learned.lag(source))
        price = seconds / self.learned.of_pass(place[0])
        if self.credit[source] < min(price, ALLOWANCE):
            return None
        self.credit[source] -= price
        return i

    def _hoped(self, wish: Wish, place: tuple[int, int]) -> float:
        """Tokens a second that are expected of a proposer, which may have nothing to draft. Who does best differs from
        text to text, so other requests count for less here than where only depth is at stake."""
        plain, known = 1 / self.learned.of_pass(place[0]), self.sources[wish.source].kept.rate(PRIOR)
        alone = self._alone(wish, wish.acceptance.kept.rate(known), place)[1]
        return plain + self._offer(wish) * (alone - plain)

    def floor(self, source: str, acceptance: Acceptance, place: tuple[int, int]) -> float:
        """A level more costs what it takes to draft, and a row of the pass; it brings a token with the chance that all
        before it stand, and that it does. At today's speed a token is worth the time that it takes."""
        learned, (tokens, requests), rate = self.learned, place, self.rate(source, acceptance)
        _, speed = self._alone(Wish(source, FAR, acceptance), rate, place)
        level = learned.of_draft(source, FAR, requests) - learned.of_draft(source, 1, requests)
        row = learned.of_pass(tokens + FAR * requests) - learned.of_pass(tokens + requests)
        return min((level + row) / (FAR - 1) * speed / rate, HIGHEST)

    def survival(self, source: str, greedy: bool) -> Survival:
        return self.survivals[source, greedy]

    def _alone(self, wish: Wish, rate: float, place: tuple[int, int]) -> tuple[int, float]:
        """(the depth up to its limit with most tokens a second for a request, how many); what has no source is there
        already and costs nothing to draft."""
        tokens, requests = place
        best, speed, chance, expected = 0, 1 / self.learned.of_pass(tokens), 1.0, 1.0
        for depth in range(1, min(wish.limit, DEEPEST) + 1):
            chance *= rate
            expected += chance
            cost = self.learned.of_pass(tokens + requests * depth * wish.width)
            cost += self.learned.of_draft(wish.source, depth, requests) if wish.source else 0.0
            if expected / cost > speed:
                best, speed = depth, expected / cost
            elif chance < HOPELESS:
                break
        return best, speed

    def cost(self, tokens: float) -> float:
        return self.learned.pace * self.learned.of_pass(tokens)

    def costs(self) -> tuple[dict[int, float], dict[str, dict[int, float]]]:
        return self.learned.seconds()

    def rests(self, acceptance: Acceptance) -> bool:
        if acceptance.rest is None or acceptance.rest <= 1:
            return False
        acceptance.rest -= 1
        return True

    def _with_probes(self, wishes: Sequence[Wish], depths: list[int], tokens: int) -> list[int]:
        """Now and then draft where it does not seem to pay, or nothing would ever be learned again: after a rest, and
        when its proposer has credit, which a probe takes and time gives back. Who was right goes on at once."""
        for i, wish in enumerate(wishes):
            state = wish.acceptance
            if depths[i]:
                state.rest = None
                continue
            again = state.right and self._price(wish, tokens) < PROBE_DEPTH  # pays if it is right once more
            if not again and not self._may_probe(wish, tokens):
                continue
            state.rest, depths[i] = None, min(PROBE_DEPTH, wish.limit)
        return depths

    def _may_probe(self, wish: Wish, tokens: int) -> bool:
        """Whether its rest is over and there is credit, which is taken."""
        state, credit = wish.acceptance, self.credit
        state.rest = (REST if state.rest is None else state.rest) - 1
        if state.rest > 0:
            return False
        price = self._price(wish, tokens, self.learned.lag(wish.source))
        short = min(price, ALLOWANCE) - credit[wish.source]
        if short > 0:
            state.rest = math.ceil(short / PROBE_SHARE)
            return False
        credit[wish.source] -= price
        return True

    def _price(self, wish: Wish, tokens: int, least: float = 0.0) -> float:
        """What a probe takes more than a step without, in passes; drafting takes `least` seconds at least."""
        drafting = max(self.learned.of_draft(wish.source, PROBE_DEPTH), least)
        passes = drafting + self.learned.of_pass(tokens + PROBE_DEPTH * wish.width)
        return passes / self.learned.of_pass(tokens) - 1

    def record_draft(self, source: str, depth: int, seconds: float, requests: int = 1) -> None:
        self.learned.add_draft(source, depth, seconds, requests)

    def record_lag(self, source: str, seconds: float) -> None:
        self.learned.add_lag(source, seconds)

    def record_pass(self, tokens: int, seconds: float) -> None:
        self.learned.add_pass(tokens, seconds)
        for source, credit in self.credit.items():
            self.credit[source] = min(credit + PROBE_SHARE, ALLOWANCE)

    def record_verdict(self, source: str, acceptance: Acceptance, drafted: int, accepted: int) -> None:
        acceptance.add(drafted, accepted, keep=0.9)
        self.sources[source].add(drafted, accepted, keep=0.99)
