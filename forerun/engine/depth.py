"""Draft depth policy: draft as deep as it speeds up decoding, down to zero.

`DepthPolicy` keeps what it has measured: the cost of forward passes and of drafting (`costs`) and
how often each request's drafts are accepted (`acceptance`). It chooses the depths with the most
expected tokens per second. Depth never changes the output under `match`; under the ratio rules it
depends on past rounds only (it is non-anticipating), which keeps them exact.

"Passes" as a unit of credit is the time of one forward pass of the current batch without drafts.
"""

from __future__ import annotations

import heapq
import itertools
import math
from array import array
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from forerun.costs import CostModel, ExpertLoad
from forerun.draft.proposer import Proposer
from forerun.engine.acceptance import (
    COMPONENTS,
    Acceptance,
    AcceptanceEstimate,
    ConfidenceBins,
    DraftOption,
    SourceAcceptance,
)
from forerun.engine.request import Request
from forerun.models.families import Experts
from forerun.types import Draft

DEEPEST = 16  # levels of a draft
FLOOR_LEVELS = 4  # levels over which the cost of one more level is averaged
MAX_FLOOR = 0.9  # of the probability below which a chain ends
MIN_ACCEPTANCE = 0.02  # tokens less likely to be accepted are not considered
PRIOR_OFFERED = 0.9  # how often an unknown proposer has something to offer
MIN_PLAIN_PASSES = 2  # plain passes to measure before anything is compared with them
CATCH_UP_HORIZON = 16  # steps within which a catch-up cost must be recovered, at least
TOKENS_A_STEP = 3  # with drafts, about: with fewer, texts ended before long catch-ups had paid
HEAVY_CATCH_UP = 0.1  # share of a pass: longer catch-ups wait until no prompts are being read
RIVAL_IDLE_STEPS = 8  # steps after which an idle rival is tried again
PAUSE_STEPS = 16  # steps without drafting before it is tried again, at least
LONGEST_PAUSE = 64  # most steps of a pause of several requests for which nothing pays
PAUSE_BELOW = 0.7  # of the acceptance of the least likely token drafted: requests below it pause
MIN_GAIN = 1.02  # times the speed of plain decoding that drafting must promise
PROBE_DEPTH = 2
MAX_STOPPING_DEPTH = 8  # levels offered to proposers that end chains by themselves
PROBE_SHARE = 0.01  # share of the time that goes into probes of a proposer,
PROBE_ALLOWANCE = 5.0  # and the number of passes that may be spent at once


class BatchState(NamedTuple):
    """The batch of a step, as far as the choice of depths depends on it.

    Attributes:
        num_tokens: tokens in the forward pass that are certain.
        num_generating: requests that get a token in this step, whether they draft or not.
        num_drafting: how many of them may draft.
        num_prompt_tokens: prompt tokens among `num_tokens`, read whatever is drafted.
        has_plain_rounds: without drafts the requests would run several rounds at once, and share
            the overhead of a step among them.
    """

    num_tokens: int
    num_generating: int
    num_drafting: int
    num_prompt_tokens: int = 0
    has_plain_rounds: bool = False


@dataclass(slots=True)
class _SourceLoad:
    """Depth, number of requests and cost of one proposer in a candidate plan."""

    depth: int = 0
    num_requests: int = 0
    cost: float = 0.0


class DepthPolicy:
    """Chooses the depths with the most expected tokens per second, and probes unknown costs.

    Attributes:
        costs: measured costs of forward passes and drafting.
        sources: acceptance rates by proposer.
        confidence: calibration of drafters' own probabilities, by (proposer, greedy).
        steps: steps so far.
        credit: passes left for probes, by proposer; a probe takes credit and time gives it back
            (an idea of conservative bandits, Wu et al. 2016).
        saved: passes that time gave while the credit was full, by proposer; a probe that costs more
            than the credit, as of a draft model that has a prompt to read, takes all of them.
        pauses: steps of the next pause of several requests, by proposer.
        experts: what tokens use of the target's experts; None if it has none.
    """

    def __init__(self, objective: str = "throughput", slo: float = 0.0) -> None:
        """`objective` and `slo` (in seconds) as in `Config`."""
        self.objective, self.slo = objective, slo
        self.costs = CostModel()
        self.sources: dict[str, SourceAcceptance] = defaultdict(SourceAcceptance)
        self.confidence: dict[tuple[str, bool], ConfidenceBins] = defaultdict(ConfidenceBins)
        self.steps = 0
        self.credit: dict[str, float] = defaultdict(lambda: PROBE_ALLOWANCE)
        self.saved: dict[str, float] = defaultdict(float)
        self.pauses: dict[str, int] = defaultdict(lambda: PAUSE_STEPS)
        self.experts: ExpertLoad | None = None
        self._trend: Callable[[float], float] | None = None

    # Persistence

    def state(self) -> dict[str, Any]:
        """Serialize the learned costs and acceptance rates so that another process can load them.

        The result is plain data for JSON: seconds and counts, no text.
        """
        return {
            "costs": self.costs.state(),
            "sources": {name: source.state() for name, source in self.sources.items()},
            "confidence": {
                f"{int(greedy)} {name}": bins.state()
                for (name, greedy), bins in self.confidence.items()
            },
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Start with the costs that another process learned.

        Raises any exception for data that did not come from `state`; nothing is changed then.
        """
        loaded = DepthPolicy()
        loaded.costs.prompts_predict = self.costs.prompts_predict
        loaded.costs.reading_shares = self.costs.reading_shares
        loaded.costs.load_state(state["costs"])
        for name, found in state["sources"].items():
            loaded.sources[name].load_state(found)
        for name, found in state["confidence"].items():
            greedy, _, source = name.partition(" ")
            loaded.confidence[source, greedy == "1"].load_state(found)
        self.costs, self.sources, self.confidence = (
            loaded.costs,
            loaded.sources,
            loaded.confidence,
        )
        self.costs.set_trend(self._trend)

    # Choosing depths

    def choose(self, options: Sequence[DraftOption], batch: BatchState) -> list[int]:
        """Return the depth of each option, 0 to its limit, probes included.

        Options for which nothing pays are paused before they are considered again.
        """
        if not self.costs.known(batch.num_tokens, MIN_PLAIN_PASSES):
            return [0] * len(options)
        active = [i for i, option in enumerate(options) if option.limit]
        depths = self._best(options, active, batch)
        return self._with_probes(options, depths, batch)

    def _best(
        self, options: Sequence[DraftOption], active: Sequence[int], batch: BatchState
    ) -> list[int]:
        """Return the depths with the most tokens per second.

        A level costs much however few requests reach it, so the last levels are taken away as long
        as that is better.
        """
        best, speed = self._up_to(DEEPEST, options, active, batch)
        while len(active) > 1 and max(best) > 1:
            shallower, slower = self._up_to(max(best) - 1, options, active, batch)
            if slower <= speed:
                break
            best, speed = shallower, slower
        return best

    def _up_to(
        self, deepest: int, options: Sequence[DraftOption], active: Sequence[int], batch: BatchState
    ) -> tuple[list[int], float]:
        """Return the best depths up to `deepest`, and their tokens per second.

        Drafted tokens are added in the order of their probability of acceptance, and the best point
        on the way is kept. Proposers work one after the other; each drafts for all its requests at
        once, as long as its deepest draft takes.
        """
        costs = self.costs
        latency = self.objective == "latency"
        slo = self.slo / costs.speed_factor or math.inf
        if batch.num_prompt_tokens:
            slo -= costs.prefill(batch.num_tokens) - self._forward(batch.num_tokens, batch)
        estimates = {i: self._estimate(options[i].source, options[i].acceptance) for i in active}
        offered = {i: self._offer_rate(options[i]) for i in active}
        heap = [
            (-offered[i] * estimate.chain_prob(1), i)
            for i, estimate in estimates.items()
            if estimate.chain_prob(1) > MIN_ACCEPTANCE
        ]
        heapq.heapify(heap)
        depths = [0] * len(options)
        num_tokens, drafting, catching_up = float(batch.num_tokens), 0.0, 0.0
        expected = inverse = float(batch.num_generating)  # sum of tokens, and of 1 / tokens
        tokens_of = [1.0] * len(options)
        plain = batch.num_generating / self._forward(num_tokens, batch)
        best, best_speed = list(depths), MIN_GAIN * plain
        loads: dict[str, _SourceLoad] = defaultdict(_SourceLoad)
        reach = costs.reach(batch.num_tokens)
        without_gain = 0
        while heap and without_gain < 3 * len(options):
            chance, i = heap[0]
            option = options[i]
            num_tokens += option.width * offered[i]
            if num_tokens > reach:
                break
            depths[i] += 1
            if depths[i] == 1 and option.lag:
                catching_up += self._catch_up(option)
            load = loads[option.source]
            if depths[i] == 1 or depths[i] > load.depth:
                load.depth = max(load.depth, depths[i])
                load.num_requests += depths[i] == 1
                drafting -= load.cost
                load.cost = costs.draft(option.source, load.depth, load.num_requests)
                drafting += load.cost
            expected -= chance  # chances are negated in the heap
            if latency:
                inverse += 1 / (tokens_of[i] - chance) - 1 / tokens_of[i]
                tokens_of[i] -= chance
            value = batch.num_generating * batch.num_generating / inverse if latency else expected
            cost = self._forward(num_tokens, batch) + drafting + catching_up
            without_gain += 1
            if value > best_speed * cost and cost <= slo:
                best, best_speed, without_gain = list(depths), value / cost, 0
            next_chance = offered[i] * estimates[i].chain_prob(depths[i] + 1)
            if depths[i] < min(option.limit, deepest) and next_chance > MIN_ACCEPTANCE:
                heapq.heapreplace(heap, (-next_chance, i))
            else:
                heapq.heappop(heap)
        return best, best_speed

    def _with_probes(
        self, options: Sequence[DraftOption], depths: list[int], batch: BatchState
    ) -> list[int]:
        """Draft now and then where it does not seem to pay, or nothing would be learned again.

        A probe follows a pause and needs credit. A request whose last draft was accepted to its end
        goes on at once. Where nothing pays for any request all options pause: finding that out anew
        in every step costs more than it can gain. Several requests try again ever less often, since
        that takes their steps out of native rounds.
        """
        least = min(
            (self._chance(options[i]) for i, depth in enumerate(depths) if depth), default=math.inf
        )
        lengths = self._pause_lengths(options, depths)
        for i, option in enumerate(options):
            acceptance = option.acceptance
            if depths[i] or self._continues(option, batch) or self._may_probe(option, batch):
                acceptance.paused_until = None
                depths[i] = depths[i] or min(PROBE_DEPTH, option.limit)
            elif self._chance(option) < PAUSE_BELOW * least:
                # All pauses end together, since a draft may pay only for many requests at once.
                length = lengths.get(option.source, PAUSE_STEPS)
                acceptance.paused_until = self.steps + length - self.steps % length
        return depths

    def _pause_lengths(
        self, options: Sequence[DraftOption], depths: Sequence[int]
    ) -> dict[str, int]:
        """Return the steps that several requests pause where nothing pays, by proposer, and double
        them for the next time. Copies may begin to pay with any token, so they are left out."""
        if any(depths):
            for option in options:
                self.pauses.pop(option.source, None)
            return {}
        sources = {option.source for option in options if not option.copies}
        lengths = {source: self.pauses[source] for source in sources if len(options) > 1}
        for source, length in lengths.items():
            self.pauses[source] = min(2 * length, LONGEST_PAUSE)
        return lengths

    def _continues(self, option: DraftOption, batch: BatchState) -> bool:
        """Return True if the last draft was right and another pays if it is right once more.

        What is likely to be lost by it is taken from the credit, down to a bounded debt.
        """
        price = self._probe_price(option, batch)
        if (
            not option.acceptance.last_accepted
            or price * batch.num_generating >= PROBE_DEPTH
            or self.credit[option.source] < -PROBE_ALLOWANCE
        ):
            return False
        estimate = self._estimate(option.source, option.acceptance)
        gain = sum(estimate.chain_prob(depth) for depth in range(1, PROBE_DEPTH + 1))
        self.credit[option.source] -= max(price - gain / batch.num_generating, 0.0)
        return True

    def _may_probe(self, option: DraftOption, batch: BatchState) -> bool:
        """Return True if the pause is over and there is credit, which is taken."""
        if option.acceptance.paused_until is None or self.is_paused(option.acceptance):
            return False
        return self._spend(option.source, self._probe_price(option, batch))

    def _spend(self, source: str, price: float) -> bool:
        """Take a price in passes from a proposer's credit; return False if there is not enough."""
        at_once = min(price, PROBE_ALLOWANCE)
        if self.credit[source] < at_once or self.saved[source] < price - at_once:
            return False
        self.credit[source] -= at_once
        if price > at_once:
            self.saved[source] = 0.0
        return True

    def _probe_price(self, option: DraftOption, batch: BatchState) -> float:
        """Return the cost of a probe beyond a step without it, in passes."""
        drafting = self.costs.draft(option.source, PROBE_DEPTH)
        drafting += self.costs.catch_up(option.source, option.lag)
        verifying = self._forward(batch.num_tokens + PROBE_DEPTH * option.width, batch)
        return (drafting + verifying) / self._forward(batch.num_tokens, batch) - 1

    def is_paused(self, acceptance: Acceptance) -> bool:
        """Return True if nothing should be drafted in this step, so the proposer need not run."""
        return acceptance.paused_until is not None and self.steps < acceptance.paused_until

    def should_wait(self, option: DraftOption, batch: BatchState) -> bool:
        """Return True if a proposer's catch-up should wait until no prompts are being read.

        While prompts are read the batch grows with each step, and what pays for a few requests may
        not pay for all.
        """
        catch_up = self.costs.catch_up(option.source, option.lag)
        return catch_up > HEAVY_CATCH_UP * self.costs.forward(batch.num_generating)

    # Judging drafts that exist

    def cut_copy(
        self,
        kind: str,
        acceptance: Acceptance,
        copied: int,
        batch: BatchState,
        draft: Draft | None = None,
    ) -> tuple[int, float]:
        """Return (how many of `copied` tokens to verify, the tokens per second expected of them).

        `kind` is their kind of match, `acceptance` what became of such copies for this request.
        Computed as if all requests that may draft were alike. draft: as in `num_worth_verifying`.
        """
        option = DraftOption("", copied, Acceptance())
        return self._best_alone(
            option, self._estimate(kind, acceptance), batch, self._growth(draft)
        )

    def num_worth_verifying(
        self, path_probs: Sequence[float], batch: BatchState, draft: Draft | None = None
    ) -> int:
        """Return how many nodes to verify, given each node's probability, the likeliest first.

        Computed as if all requests that may draft were alike. draft: whose nodes these are, on
        which the cost depends if the target has experts.
        """
        growth = self._growth(draft)
        expected = itertools.accumulate(
            (batch.num_drafting * prob for prob in path_probs), initial=float(batch.num_generating)
        )
        speeds = [
            tokens / self._forward_with(count, batch.num_drafting * count, batch, growth)
            for count, tokens in enumerate(expected)
        ]
        return speeds.index(max(speeds))

    def pass_costs(self, most: int, batch: BatchState) -> array[float]:
        """Return the costs of passes with 0, 1, .. `most` nodes of each draft, as
        `num_worth_verifying` compares them; float64."""
        drafting = batch.num_drafting
        costs = (self._forward(batch.num_tokens + drafting * n, batch) for n in range(most + 1))
        return array("d", costs)

    def min_chain_prob(self, source: str, acceptance: Acceptance, batch: BatchState) -> float:
        """Return the probability below which another token of a chain is not worth its cost.

        One more level costs its drafting and a row of the forward pass; it gains a token with the
        probability that all tokens up to it are accepted. At the current speed a token is worth the
        time that it takes.
        """
        estimate = self._estimate(source, acceptance)
        drafting = batch.num_drafting
        _, speed = self._best_alone(DraftOption(source, FLOOR_LEVELS, acceptance), estimate, batch)
        level = self.costs.draft(source, FLOOR_LEVELS, drafting)
        level -= self.costs.draft(source, 1, drafting)
        row = self._forward(batch.num_tokens + FLOOR_LEVELS * drafting, batch)
        row -= self._forward(batch.num_tokens + drafting, batch)
        gain = drafting * estimate.chain_prob(1)
        return min((level + row) / (FLOOR_LEVELS - 1) * speed / gain, MAX_FLOOR)

    # Choosing between proposers

    def rank(self, groups: Sequence[Sequence[DraftOption]], batch: BatchState) -> list[int]:
        """Return the indices of `groups` by their best option's expected speed, best first."""
        speeds = [max(self.expected_speed(option, batch) for option in group) for group in groups]
        return sorted(range(len(groups)), key=lambda i: -speeds[i])

    def expected_speed(self, option: DraftOption, batch: BatchState) -> float:
        """Return the tokens per second expected if all drafting requests were like this one."""
        estimate = self._estimate(option.source, option.acceptance)
        return self._best_alone(option, estimate, batch)[1]

    def pick_rival_probe(
        self, rivals: Sequence[DraftOption], speed: float, batch: BatchState
    ) -> int | None:
        """Return the rival that should draft only to be compared with the target, or None.

        The rival that has been idle longest is chosen, if its proposer has credit for the time of
        drafting; the more is known of it, the less often. None if it could not beat `speed` (tokens
        per second of the current choice) even if nearly all its tokens were accepted. Call it once
        per step.
        """
        for option in rivals:
            option.acceptance.idle_steps += 1
        i = max(range(len(rivals)), key=lambda i: rivals[i].acceptance.idle_steps)
        source, acceptance = rivals[i].source, rivals[i].acceptance
        patience = RIVAL_IDLE_STEPS * max(acceptance.kept.seen / PROBE_DEPTH, 1)
        if acceptance.idle_steps <= patience:
            return None
        if not self.costs.known(batch.num_tokens, MIN_PLAIN_PASSES):
            return None
        optimistic = AcceptanceEstimate([(1.0, *COMPONENTS[-1])], 0)
        if self._best_alone(rivals[i], optimistic, batch)[1] <= speed:
            acceptance.idle_steps = 0
            return None
        seconds = self.costs.draft(source, PROBE_DEPTH)
        seconds += self.costs.catch_up(source, rivals[i].lag)
        return i if self._spend(source, seconds / self._forward(batch.num_tokens, batch)) else None

    # Expectations

    def acceptance_rate(self, source: str, acceptance: Acceptance) -> float:
        """Return the expected probability that a drafted token is accepted."""
        return self._estimate(source, acceptance).chain_prob(1)

    def bins(self, source: str, greedy: bool) -> ConfidenceBins:
        """Return the calibration of a drafter's own probabilities."""
        return self.confidence[source, greedy]

    def _estimate(self, source: str, acceptance: Acceptance) -> AcceptanceEstimate:
        return self.sources[source].estimate(acceptance)

    def _offer_rate(self, option: DraftOption) -> float:
        """Return how often the option's proposer has something to draft."""
        prior = self.sources[option.source].offered.rate(PRIOR_OFFERED)
        return option.acceptance.offered.rate(prior)

    def _chance(self, option: DraftOption) -> float:
        """Return the probability that a token is offered and accepted."""
        return self._offer_rate(option) * self.acceptance_rate(option.source, option.acceptance)

    def _best_alone(
        self,
        option: DraftOption,
        estimate: AcceptanceEstimate,
        batch: BatchState,
        growth: Sequence[float] | None = None,
    ) -> tuple[int, float]:
        """Return (best depth, its tokens per second) if all drafting requests were like this one.

        Drafts without a source exist already and cost nothing to make.
        """
        drafting = batch.num_drafting
        best, expected = 0, float(batch.num_generating)
        speed = expected / self._forward(batch.num_tokens, batch)
        catch_up = self._catch_up(option)
        reach = self.costs.reach(batch.num_tokens)
        for depth in range(1, min(option.limit, DEEPEST) + 1):
            chance = estimate.chain_prob(depth)
            num_tokens = batch.num_tokens + drafting * depth * option.width
            if num_tokens > reach:
                break
            expected += drafting * chance
            cost = self._forward_with(depth, num_tokens - batch.num_tokens, batch, growth)
            if option.source:
                cost += self.costs.draft(option.source, depth, drafting) + drafting * catch_up
            if expected / cost > speed:
                best, speed = depth, expected / cost
            elif chance < MIN_ACCEPTANCE:
                break
        return best, speed

    def _catch_up(self, option: DraftOption) -> float:
        """Return the cost of catching up per step within which it must be recovered."""
        steps = max(min(option.limit, CATCH_UP_HORIZON), option.horizon, 1)
        return self.costs.catch_up(option.source, option.lag) / steps

    def _forward(self, num_tokens: float, batch: BatchState) -> float:
        """Return the cost of a forward pass without the part due to its prompts.

        Prompts are read in any case, and drafts beside them must pay as in a pass without them. A
        further row of such a pass costs computation, where others wait for weights. With drafts
        requests have the overhead of a step that plain rounds share among them.
        """
        if not batch.num_prompt_tokens:
            cost = self.costs.forward(self._rows(num_tokens))
            if batch.has_plain_rounds and num_tokens > batch.num_tokens:
                cost += self.costs.step_overhead * batch.num_generating
            return cost
        certain = batch.num_tokens
        row = (self.costs.prefill(2 * certain) - self.costs.prefill(certain)) / certain
        alone = self.costs.forward(certain - batch.num_prompt_tokens)
        return alone + (num_tokens - certain) * row

    def _forward_with(
        self, count: int, num_drafted: float, batch: BatchState, growth: Sequence[float] | None
    ) -> float:
        """Return the cost of a pass with `num_drafted` drafted tokens, the first `count` nodes of
        each draft; growth: effective rows that the first 0, 1, .. nodes add."""
        if growth is None or batch.num_prompt_tokens:
            return self._forward(batch.num_tokens + num_drafted, batch)
        added = batch.num_drafting * growth[min(count, len(growth) - 1)]
        return self.costs.forward(self._rows(batch.num_tokens) + added)

    def _rows(self, num_tokens: float) -> float:
        """Return the effective rows of a pass over so many tokens; see `ExpertLoad`."""
        return num_tokens if self.experts is None else self.experts.expected_rows(num_tokens)

    def _growth(self, draft: Draft | None) -> list[float] | None:
        """Return the effective rows that the first 0, 1, .. nodes of a draft add to its root, by
        the experts that their tokens use; None if the target has none."""
        if self.experts is None or draft is None:
            return None
        return self.experts.growth(draft.tokens[:1], draft.tokens[1:])

    # Interface of the engine

    def set_experts(
        self, experts: Experts | None, pass_bytes: Callable[[float], float] | None = None
    ) -> None:
        """Note the target's mixture of experts, on which the costs of its passes depend.

        pass_bytes: bytes that a pass over effective rows reads. Until passes were measured they are
        expected to cost by these: exploring what is sure to cost too much would cost too much.
        """
        self.experts = self._trend = None
        if experts is not None:
            self.experts = ExpertLoad(experts.count, experts.used, sum(experts.layers))
            if pass_bytes is not None:
                others = pass_bytes(0)
                mixture = (pass_bytes(1) - others) / experts.share(1)
                self._trend = lambda rows: others + mixture * experts.share(rows)
        self.costs.set_trend(self._trend)

    def effective_size(self, tokens: Sequence[int], choices: np.ndarray, decodes: bool) -> int:
        """Return the size by which a pass is recorded: its effective rows if it decodes.

        choices: the experts of its tokens, int16 [T, layers, used]."""
        if self.experts is None:
            return len(tokens)
        if decodes:
            return max(round(self.experts.observe(tokens, choices)), 1)
        self.experts.remember(tokens, choices)
        return len(tokens)

    def room(self, num_decoding: int, stretch: float) -> int:
        """Return the most tokens of a pass that reads prompts beside decoding requests.

        Such a pass keeps the latency objective and takes at most `stretch` times as long as the
        decoding requests alone.
        """
        bound = stretch * self.forward_seconds(num_decoding)
        return self.costs.within(min(self.slo or math.inf, bound))

    def forward_seconds(self, num_tokens: float) -> float:
        """Return the expected seconds of a forward pass at the machine's current speed."""
        return self.costs.speed_factor * self.costs.forward(self._rows(num_tokens))

    def cost_table(self) -> tuple[dict[int, float], dict[str, dict[int, float]]]:
        """Return measured seconds: of passes by tokens, and of drafts by proposer and depth."""
        return ({}, {}) if self.objective == "energy" else self.costs.seconds()

    def record_forward(self, num_tokens: int, seconds: float) -> None:
        """Record a forward pass that decodes; time gives credit for probes back.

        num_tokens: of a model with experts its effective rows, rounded."""
        self.costs.add_forward(num_tokens, seconds)
        for source, credit in self.credit.items():
            if credit < PROBE_ALLOWANCE:
                self.credit[source] = credit + PROBE_SHARE
            else:
                self.saved[source] += PROBE_SHARE

    def record_verdict(
        self, source: str, acceptance: Acceptance, drafted: int, accepted: int
    ) -> None:
        """Record the verdict on a draft; `drafted` is 0 if the proposer had nothing to offer."""
        acceptance.add(drafted, accepted)
        self.sources[source].add(acceptance, drafted)


def max_reach(request: Request, proposer: Proposer) -> int:
    """Return how deep a proposer may draft if it is asked at all.

    Copies are cut to what pays afterwards, and proposers that end chains do so by themselves.
    """
    if proposer.copies_text and request.depth == "auto":
        return DEEPEST
    return MAX_STOPPING_DEPTH if may_stop(request, proposer) else 0


def may_stop(request: Request, proposer: Proposer) -> bool:
    """Return True if a draft may end where the drafter becomes uncertain.

    Not under a ratio rule, where the length would depend on what was drawn.
    """
    free = request.depth == "auto" and request.rule.coupled
    return free and (proposer.ends_chains or proposer.reports_confidence)


def expected_steps(produced: int, remaining: int) -> int:
    """Return the steps with drafts that a request is expected to take yet.

    A text is expected to go on for as long as it has lasted, as in the ski-rental problem (Karlin
    et al., 1988): a draft model does not read a long prompt for a short answer.
    """
    return min(produced, remaining) // TOKENS_A_STEP
