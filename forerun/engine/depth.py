"""How deep to draft: as deep as pays, down to zero.

`DepthPolicy` keeps two things it has measured: what passes and drafts cost (`costs`), and how often
each request's drafts are accepted. It then takes the depths with the most expected tokens a second.
Depth never changes the output under `match`; under the ratio rules it depends on past rounds only,
which keeps them exact (non-anticipating)."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from forerun.costs import Costs
from forerun.engine.acceptance import LAWS, Acceptance, Belief, ConfidenceBins, DraftOption, Source


class BatchState(NamedTuple):
    """Where in a step drafts are thought of.

    Attributes:
        tokens: that are in the pass in any case.
        said: requests that say something in it, whether they draft or not.
        asked: those of them that may draft.
        prompts: tokens of prompts among those in the pass, which are read whatever is drafted.
    """

    tokens: int
    said: int
    asked: int
    prompts: int = 0


DEEPEST = 16
FAR, HIGHEST = 4, 0.9  # levels over which a level's cost is taken; a floor is no higher
HOPELESS = 0.02  # chance of acceptance below which a token is not worth considering
OFFERED = 0.9  # how often a proposer nothing is known of has something to offer
PLAIN = 2  # passes without a draft that are measured before anything is compared with them
AHEAD = 16  # tokens, at most, over which what it takes to begin drafting is to pay
HEAVY = 0.1  # of a pass: to read what takes longer waits until no prompts are read
IDLE = 8  # steps after which a rival of who drafts is tried again
REST = 16  # steps without drafting before it is tried again, at least
NEAR = 0.7  # of the chance of the least likely token that is drafted: who is below that rests
PROBE_DEPTH = 2
PROBE_SHARE = 0.01  # of the time goes into probes of a proposer,
ALLOWANCE = 5.0  # and the time of so many passes at once


class DepthPolicy:
    """The depths with the most expected tokens a second, by measured cost and acceptance, with
    probes."""

    def __init__(self, objective: str = "throughput", slo: float = 0.0) -> None:
        """`objective` and `slo` (in seconds) as in `Config`."""
        self.objective, self.slo = objective, slo
        self.learned = Costs()
        self.sources: dict[str, Source] = defaultdict(Source)
        self.survivals: dict[tuple[str, bool], ConfidenceBins] = defaultdict(ConfidenceBins)
        self.steps = 0
        self.credit: dict[str, float] = defaultdict(
            lambda: ALLOWANCE
        )  # passes left for probes, by proposer

    def state(self) -> dict[str, Any]:
        """What was learned, as plain data for `recall` of another process: seconds and counts, no
        text."""
        return {
            "costs": self.learned.state(),
            "sources": {name: source.state() for name, source in self.sources.items()},
            "survivals": {
                f"{int(greedy)} {name}": s.state() for (name, greedy), s in self.survivals.items()
            },
        }

    def recall(self, state: Mapping[str, Any]) -> None:
        """Begin with what another process learned. Raises whatever it may, and nothing is known
        then, for what `state` never gave."""
        learned = DepthPolicy()
        learned.learned.recall(state["costs"])
        for name, found in state["sources"].items():
            learned.sources[name].recall(found)
        for name, found in state["survivals"].items():
            greedy, _, source = name.partition(" ")
            learned.survivals[source, greedy == "1"].recall(found)
        self.learned, self.sources, self.survivals = (
            learned.learned,
            learned.sources,
            learned.survivals,
        )

    def choose(self, wishes: Sequence[DraftOption], place: BatchState) -> list[int]:
        """The best depths, with probes; those for whom nothing pays rest before they are thought of
        again."""
        if not self.learned.known(place.tokens, PLAIN):
            return [0] * len(wishes)
        active = [i for i, wish in enumerate(wishes) if wish.limit]
        depths = self._best(wishes, active, place)
        return self._with_probes(wishes, depths, place)

    def _best(
        self, wishes: Sequence[DraftOption], active: Sequence[int], place: BatchState
    ) -> list[int]:
        """The depths with most tokens a second. A level costs much however few go on to it: the
        last ones are taken away as long as that is better."""
        best, speed = self._up_to(DEEPEST, wishes, active, place)
        while len(active) > 1 and max(best) > 1:
            fewer, slower = self._up_to(max(best) - 1, wishes, active, place)
            if slower <= speed:
                break
            best, speed = fewer, slower
        return best

    def _up_to(
        self, most: int, wishes: Sequence[DraftOption], active: Sequence[int], place: BatchState
    ) -> tuple[list[int], float]:
        """Add drafted tokens in order of their chance to be accepted; keep the best point on the
        way.

        Proposers work one after the other, each on all its requests at once, as long as its deepest
        takes."""
        learned, latency, slo = (
            self.learned,
            self.objective == "latency",
            self.slo / self.learned.pace or math.inf,
        )
        if place.prompts:
            slo -= learned.of_read(place.tokens) - self._pass(place.tokens, place)
        beliefs = {i: self._belief(wishes[i].source, wishes[i].acceptance) for i in active}
        offers = {i: self._offer(wishes[i]) for i in active}
        heap = [
            (-offers[i] * belief.stands(1), i)
            for i, belief in beliefs.items()
            if belief.stands(1) > HOPELESS
        ]
        heapq.heapify(heap)
        depths, tokens, drafting, lags = [0] * len(wishes), float(place.tokens), 0.0, 0.0
        total, slow, each = (
            float(place.said),
            float(place.said),
            [1.0] * len(wishes),
        )  # said by all, 1 / said, by each
        best, best_speed = list(depths), place.said / self._pass(tokens, place)
        groups: dict[str, list[float]] = defaultdict(
            lambda: [0, 0, 0.0]
        )  # how deep, for how many, and what that takes
        reach, in_vain = learned.reach(place.tokens), 0
        while heap and in_vain < 3 * len(wishes):
            (chance, i), wish = heap[0], wishes[heap[0][1]]
            tokens += wish.width * offers[i]
            if tokens > reach:
                break
            group = groups[wish.source]
            depths[i] += 1
            if depths[i] == 1 and wish.lag:
                lags += self._begin(wish)
            if depths[i] == 1 or depths[i] > group[0]:
                group[0], group[1] = max(group[0], depths[i]), group[1] + (depths[i] == 1)
                drafting -= group[2]
                group[2] = learned.of_draft(wish.source, int(group[0]), int(group[1]))
                drafting += group[2]
            total -= chance
            if latency:
                slow += 1 / (each[i] - chance) - 1 / each[i]
                each[i] -= chance
            said = place.said * place.said / slow if latency else total
            cost = self._pass(tokens, place) + drafting + lags
            in_vain += 1
            if said > best_speed * cost and cost <= slo:
                best, best_speed, in_vain = list(depths), said / cost, 0
            chance = offers[i] * beliefs[i].stands(depths[i] + 1)
            if depths[i] < min(wish.limit, most) and chance > HOPELESS:
                heapq.heapreplace(heap, (-chance, i))
            else:
                heapq.heappop(heap)
        return best, best_speed

    def rate(self, source: str, acceptance: Acceptance) -> float:
        return self._belief(source, acceptance).stands(1)

    def _belief(self, source: str, acceptance: Acceptance) -> Belief:
        return self.sources[source].belief(acceptance)

    def _offer(self, wish: DraftOption) -> float:
        """How often its proposer has something to draft."""
        return wish.acceptance.offered.rate(self.sources[wish.source].offered.rate(OFFERED))

    def worth(
        self, kind: str, acceptance: Acceptance, copied: int, place: BatchState
    ) -> tuple[int, float]:
        """As if all requests that may draft were alike."""
        return self._alone(
            DraftOption("", copied, Acceptance()), self._belief(kind, acceptance), place
        )

    def enough(self, chances: Sequence[float], place: BatchState) -> int:
        """As many as give most tokens a second, as if all requests that may draft were alike."""
        said = itertools.accumulate(
            (place.asked * chance for chance in chances), initial=float(place.said)
        )
        speeds = [
            tokens / self._pass(place.tokens + place.asked * count, place)
            for count, tokens in enumerate(said)
        ]
        return speeds.index(max(speeds))

    def ranked(self, groups: Sequence[Sequence[DraftOption]], place: BatchState) -> list[int]:
        speeds = [max(self.hoped(wish, place) for wish in group) for group in groups]
        return sorted(range(len(groups)), key=lambda i: -speeds[i])

    def tried(self, rivals: Sequence[DraftOption], speed: float, place: BatchState) -> int | None:
        """The one that has been idle longest, if its proposer has credit for the time that drafting
        takes: what it says is not verified, only compared with what the target says anyway. The
            more is known of it, the less often; and
        not where it would not do better if nearly all of it stood."""
        for wish in rivals:
            wish.acceptance.idle += 1
        i = max(range(len(rivals)), key=lambda i: rivals[i].acceptance.idle)
        source, state = rivals[i].source, rivals[i].acceptance
        if state.idle <= IDLE * max(state.kept.seen / PROBE_DEPTH, 1) or not self.learned.known(
            place.tokens, PLAIN
        ):
            return None
        if self._alone(rivals[i], Belief([(1.0, *LAWS[-1])], 0), place)[1] <= speed:
            state.idle = 0
            return None
        seconds = self.learned.of_draft(source, PROBE_DEPTH) + self.learned.of_lag(
            source, rivals[i].lag
        )
        price = seconds / self._pass(place.tokens, place)
        if self.credit[source] < min(price, ALLOWANCE):
            return None
        self.credit[source] -= price
        return i

    def hoped(self, wish: DraftOption, place: BatchState) -> float:
        return self._alone(wish, self._belief(wish.source, wish.acceptance), place)[1]

    def floor(self, source: str, acceptance: Acceptance, place: BatchState) -> float:
        """A level more costs what it takes to draft, and a row of the pass; it brings a token with
        the chance that all before it stand, and that it does. At today's speed a token is worth the
        time that it takes."""
        learned, (tokens, _, asked, _), belief = (
            self.learned,
            place,
            self._belief(source, acceptance),
        )
        _, speed = self._alone(DraftOption(source, FAR, acceptance), belief, place)
        level = learned.of_draft(source, FAR, asked) - learned.of_draft(source, 1, asked)
        row = self._pass(tokens + FAR * asked, place) - self._pass(tokens + asked, place)
        return min((level + row) / (FAR - 1) * speed / (asked * belief.stands(1)), HIGHEST)

    def survival(self, source: str, greedy: bool) -> ConfidenceBins:
        return self.survivals[source, greedy]

    def _alone(self, wish: DraftOption, belief: Belief, place: BatchState) -> tuple[int, float]:
        """(the depth up to its limit with most tokens a second, how many, if all that may draft
        were like it); what has no source is there already and costs nothing to draft."""
        tokens, said, asked, _ = place
        best, speed, expected, begin = (
            0,
            said / self._pass(tokens, place),
            float(said),
            self._begin(wish),
        )
        reach = self.learned.reach(tokens)
        for depth in range(1, min(wish.limit, DEEPEST) + 1):
            chance, rows = belief.stands(depth), asked * depth * wish.width
            if tokens + rows > reach:
                break
            expected += asked * chance
            cost = self._pass(tokens + rows, place)
            cost += (
                self.learned.of_draft(wish.source, depth, asked) + asked * begin
                if wish.source
                else 0.0
            )
            if expected / cost > speed:
                best, speed = depth, expected / cost
            elif chance < HOPELESS:
                break
        return best, speed

    def _begin(self, wish: DraftOption) -> float:
        """What it takes its proposer to read what it has missed, for each of the tokens over which
        that must pay."""
        return self.learned.of_lag(wish.source, wish.lag) / max(min(wish.limit, AHEAD), 1)

    def _pass(self, tokens: float, place: BatchState) -> float:
        """What a pass over so many tokens takes, but for the prompts in it: they are read in any
        case, and what is said meanwhile pays if it would pay without."""
        learned, read = self.learned, place.tokens
        if not place.prompts:
            return learned.of_pass(tokens)
        row = (
            learned.of_read(2 * read) - learned.of_read(read)
        ) / read  # it computes, where others wait for weights
        return learned.of_pass(read - place.prompts) + (tokens - read) * row

    def room(self, decoding: int, stretch: float) -> int:
        bound = stretch * self.learned.of_pass(decoding) * self.learned.pace
        return self.learned.within(min(self.slo or math.inf, bound))

    def cost(self, tokens: float) -> float:
        return self.learned.pace * self.learned.of_pass(tokens)

    def costs(self) -> tuple[dict[int, float], dict[str, dict[int, float]]]:
        return ({}, {}) if self.objective == "energy" else self.learned.seconds()

    def rests(self, acceptance: Acceptance) -> bool:
        return acceptance.rest is not None and self.steps < acceptance.rest

    def waits(self, wish: DraftOption, place: BatchState) -> bool:
        """While prompts are read there are more requests with each step: what pays now may not pay
        any more when those that wait for their first token have it."""
        return self.learned.of_lag(wish.source, wish.lag) > HEAVY * self.learned.of_pass(place.said)

    def _with_probes(
        self, wishes: Sequence[DraftOption], depths: list[int], place: BatchState
    ) -> list[int]:
        """Now and then draft where it does not seem to pay, or nothing would ever be learned again:
        after a rest, and when its proposer has credit, which a probe takes and time gives back. Who
        was right goes on at once. Where
        nothing pays for anybody, all rest: to find that out anew in each step costs more than to
            miss some."""
        least = min(
            (self._chance(wishes[i]) for i, depth in enumerate(depths) if depth), default=math.inf
        )
        for i, wish in enumerate(wishes):
            state = wish.acceptance
            if depths[i] or self._goes_on(wish, place) or self._may_probe(wish, place):
                state.rest, depths[i] = None, depths[i] or min(PROBE_DEPTH, wish.limit)
            elif self._chance(wish) < NEAR * least:
                state.rest = (
                    self.steps + REST - self.steps % REST
                )  # all at once: what drafting takes is shared
        return depths

    def _chance(self, wish: DraftOption) -> float:
        """That there is a token and it stands."""
        return self._offer(wish) * self.rate(wish.source, wish.acceptance)

    def _goes_on(self, wish: DraftOption, place: BatchState) -> bool:
        """Whether its last draft was right, and another one pays if it is right once more. What is
        likely to be lost by it is taken from the credit, as far as that goes."""
        state, price = wish.acceptance, self._price(wish, place)
        if (
            not state.right
            or price * place.said >= PROBE_DEPTH
            or self.credit[wish.source] < -ALLOWANCE
        ):
            return False
        belief = self._belief(wish.source, state)
        hoped = sum(belief.stands(depth) for depth in range(1, PROBE_DEPTH + 1)) / place.said
        self.credit[wish.source] -= max(price - hoped, 0.0)
        return True

    def _may_probe(self, wish: DraftOption, place: BatchState) -> bool:
        """Whether its rest is over and there is credit, which is taken."""
        if wish.acceptance.rest is None or self.rests(wish.acceptance):
            return False
        price = self._price(wish, place)
        if self.credit[wish.source] < min(price, ALLOWANCE):
            return False
        self.credit[wish.source] -= price
        return True

    def _price(self, wish: DraftOption, place: BatchState) -> float:
        """What a probe takes more than a step without, in passes."""
        drafting = self.learned.of_draft(wish.source, PROBE_DEPTH) + self.learned.of_lag(
            wish.source, wish.lag
        )
        passes = drafting + self._pass(place.tokens + PROBE_DEPTH * wish.width, place)
        return passes / self._pass(place.tokens, place) - 1

    def record_draft(
        self, source: str, depth: int, seconds: float, requests: int = 1, lag: int = 0
    ) -> None:
        self.learned.add_draft(source, depth, seconds, requests, lag)

    def record_pass(self, tokens: int, seconds: float) -> None:
        self.learned.add_pass(tokens, seconds)
        for source, credit in self.credit.items():
            self.credit[source] = min(credit + PROBE_SHARE, ALLOWANCE)

    def record_read(self, tokens: int, seconds: float) -> None:
        self.learned.add_read(tokens, seconds)

    def end_step(self) -> None:
        self.steps += 1

    def record_verdict(
        self, source: str, acceptance: Acceptance, drafted: int, accepted: int
    ) -> None:
        acceptance.add(drafted, accepted)
        self.sources[source].add(acceptance, drafted)
