"""The guard: whether speculation pays by the clock on the wall, whatever the depth policy believes.

The policy decides by costs and chances that it has measured one by one. This looks at whole steps:
what the tokens that came of drafting would have taken without. Where that is less than what was
spent, a few plain steps show whether it is so at this moment, and then nothing is drafted for a
while, which doubles each time. So a loss is bounded, whatever its
cause: a belief that is wrong, what nobody counts, a drafter that slows everything else down.

What one of many requests loses is less than clocks are off by. It is judged by what was said, which
is certain, and by its part of what the step's drafts and their rows are known to take.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

log = logging.getLogger("forerun.engine")
log.addHandler(logging.NullHandler())  # who wants to read it, configures that

WINDOW = 256  # steps with drafts, about, that a judgement rests on
LEAST = 0.97  # of the speed of plain decoding
LOSS, MOST = (
    12.0,
    96.0,
)  # plain steps that may be lost, what trying drafters costs included, and after that was none
COLD = 8  # steps with drafts, the first of a process, that are not counted
# times the mean of such steps that one may count for: the system puts a process aside now and then
OUTLIER = 3.0
FRESH = 8  # plain steps that settle what one takes now
LONGEST = 4096  # steps without drafts, at most
ONE_LOSS, ONE_PAUSE = 16.0, 128  # tokens that one request may lose, and how long it rests at first
ONE_OUTLIER = (
    3.0  # tokens that it may lose in one step: a drafter may have had a long prompt to read
)


@dataclass(slots=True)
class Judge:
    """Of one request.

    Attributes:
        lost: tokens that it would have said more without drafts lately, discounted; less than none
            is what it won.
        resting: steps without drafts that are left.
        pause: how long it rests next.
    """

    lost: float = 0.0
    paused_steps: int = 0
    pause: int = ONE_PAUSE

    def allows(self) -> bool:
        """Whether anything may be drafted for it in this step."""
        return self.paused_steps == 0

    def record(self, said: int, took: float) -> None:
        """One step: so many tokens, and what it took of plain steps, of which each says one."""
        if self.paused_steps:
            self.paused_steps -= 1
            return
        self.lost = max((1 - 1 / WINDOW) * self.lost + min(took - said, ONE_OUTLIER), -ONE_LOSS)
        if self.lost > ONE_LOSS:
            self.paused_steps, self.pause, self.lost = self.pause, min(2 * self.pause, LONGEST), 0.0
        elif self.lost == -ONE_LOSS:
            self.pause = ONE_PAUSE


class Part(NamedTuple):
    """What a request had of a step: nodes of its draft, and tokens that were said. `asked`: a
    proposer was."""

    judge: Judge
    nodes: int
    said: int
    asked: bool


@dataclass
class Guard:
    """Of one engine.

    Attributes:
        cost: seconds that the depth policy expects of a pass over so many tokens.
        factor: how many times that a plain step takes, all of it.
        earned, spent, count: seconds that what was drafted lately would have taken without, and did
            take, and steps; discounted.
        cold: steps with drafts that are not counted yet.
        allowed: plain steps that may seem to be lost; twice as many each time that this was an
            error.
        resting: steps without drafts that are left; `fresh` of them are there to measure.
        unseen, due: steps with drafts since enough plain ones were seen, and after how many some
            are measured in any
            case: a belief that is wrong may hide a loss.
        pause: how long it rests next.
        rests: how often it stopped speculation.
    """

    cost: Callable[[float], float]
    factor: float = 1.0
    earned: float = 0.0
    spent: float = 0.0
    count: float = 0.0
    cold: int = COLD
    allowed: float = LOSS
    paused_steps: int = 0
    fresh: int = 0
    unseen: int = 0
    due: int = WINDOW
    pause: int = WINDOW
    rests: int = 0

    @property
    def worth(self) -> float:
        """The speed of what was drafted lately, as a share of that of plain decoding; 1 where
        nothing was."""
        return self.factor * self.earned / self.spent if self.spent else 1.0

    def allows(self) -> bool:
        """Whether anything may be drafted in this step."""
        return self.paused_steps == 0

    def record(self, parts: Sequence[Part], seconds: float, drafting: float) -> None:
        """One step of requests, none of which read a prompt; of its seconds so many were spent on
        `drafting`, as the policy counts them."""
        requests, tokens = len(parts), sum(1 + part.nodes for part in parts)
        said, drafted = sum(part.said for part in parts), any(part.asked for part in parts)
        self._divide(parts, self.cost(tokens) + drafting * drafted)
        if drafted and self.cold:
            self.cold -= 1
            return
        if drafted:
            keep, mean = 1 - 1 / WINDOW, self.spent / self.count if self.count else seconds
            self.earned = keep * self.earned + said / requests * self.cost(requests)
            self.spent = keep * self.spent + min(seconds, OUTLIER * mean)
            self.count = keep * self.count + 1
            lost = self.spent - self.factor * self.earned
            self.unseen += 1
            if self.unseen >= self.due or lost > self.allowed * self.factor * self.cost(requests):
                self.paused_steps = self.fresh = (
                    FRESH  # what was known of plain steps may be long past
                )
            elif self.earned > 0.9 * WINDOW * self.cost(requests) and self.worth > 1:
                self.pause = WINDOW
            return
        taken = seconds / self.cost(tokens)
        if not self.paused_steps:
            self.factor *= min(max(taken / self.factor, 0.5), 2.0) ** (1 / FRESH)
            self.unseen = max(self.unseen - WINDOW // FRESH, 0)
            return
        self.paused_steps -= 1
        if self.fresh:
            self._measure(taken)

    def _divide(self, parts: Sequence[Part], took: float) -> None:
        """Let each request know its part of what was spent more than without drafts."""
        plain, shares = self.cost(len(parts)), [part.nodes + part.asked for part in parts]
        more = (took / plain - 1) * len(parts) / max(sum(shares), 1)
        for part, share in zip(parts, shares, strict=True):
            part.judge.record(part.said, 1 + more * share)

    def _measure(self, taken: float) -> None:
        """One plain step more; after the last of them it is known."""
        share = 1 / (FRESH - self.fresh + 1)
        self.factor += share * (taken - self.factor)
        self.fresh -= 1
        if self.fresh:
            return
        if self.unseen < self.due:
            self.allowed = min(2 * self.allowed, MOST)
        self.unseen, self.due = 0, LONGEST
        if self.worth >= LEAST:
            return
        (log.info if self.rests else log.warning)(
            "speculation gave %.2f times the speed of plain decoding: nothing is drafted for %d steps",
            self.worth, self.pause,
        )  # fmt: skip
        self.rests += 1
        self.paused_steps, self.allowed = self.pause, LOSS
        self.pause = min(2 * self.pause, LONGEST)
        self.earned = self.spent = self.count = 0.0
