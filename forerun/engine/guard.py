"""The guard: stops speculation while whole steps are slower than plain decoding.

The depth policy decides by costs and acceptance rates that it measured one by one. The guard trusts
none of that: it compares the wall-clock time of whole steps with what plain decoding of the same
tokens would have taken. Where that seems to lose, a few plain steps show whether it is so at this
moment, and then nothing is drafted for a while, twice as long each time. So a loss is bounded,
whatever its cause: a wrong estimate, an unknown cost, a drafter that slows everything else down.

One request's loss among many is smaller than the noise of a clock. It is judged by the tokens it
got, which are certain, and by its part of what drafting and verifying cost by the cost model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

log = logging.getLogger("forerun.engine")
log.addHandler(logging.NullHandler())  # applications that want to read it configure that

WINDOW = 256  # steps with drafts, about, that a judgement rests on
MIN_SPEED = 0.97  # of plain decoding's speed
# Plain steps that may be lost, with the cost of trying drafters; at most, after false alarms.
LOSS, MAX_LOSS = 12.0, 96.0
COLD_STEPS = 8  # the first steps with drafts of a process, which are not counted
# Times the mean that one step may count for: the system suspends processes now and then.
OUTLIER = 3.0
FRESH_STEPS = 8  # plain steps that measure what one takes now
MAX_PAUSE = 4096  # steps without drafts
# Tokens that one request may lose, and its first pause in steps.
REQUEST_LOSS, REQUEST_PAUSE = 16.0, 128
REQUEST_OUTLIER = 3.0  # tokens that one step may cost a request: reading a long prompt, for example


@dataclass(slots=True)
class RequestGuard:
    """Per-request guard that disables drafting while the request would be faster without it.

    Attributes:
        lost: discounted number of tokens that the request would have had more without drafts;
            negative if it gained.
        paused_steps: steps without drafts that are left.
        next_pause: the length of the next pause, in steps.
    """

    lost: float = 0.0
    paused_steps: int = 0
    next_pause: int = REQUEST_PAUSE

    def allows(self) -> bool:
        """Return True if the request may draft in this step."""
        return self.paused_steps == 0

    def record(self, emitted: int, cost: float) -> None:
        """Count a step: `emitted` tokens at a cost in plain steps, which emit one token each."""
        if self.paused_steps:
            self.paused_steps -= 1
            return
        lost = (1 - 1 / WINDOW) * self.lost + min(cost - emitted, REQUEST_OUTLIER)
        self.lost = max(lost, -REQUEST_LOSS)
        if self.lost > REQUEST_LOSS:
            self.paused_steps = self.next_pause
            self.next_pause = min(2 * self.next_pause, MAX_PAUSE)
            self.lost = 0.0
        elif self.lost == -REQUEST_LOSS:
            self.next_pause = REQUEST_PAUSE


class GuardSample(NamedTuple):
    """A request's part of a step: nodes of its draft, tokens emitted, whether a proposer ran."""

    guard: RequestGuard
    nodes: int
    emitted: int
    has_proposed: bool


@dataclass
class Guard:
    """Per-engine guard that disables speculation while it is slower than plain decoding.

    Attributes:
        cost: seconds that the cost model expects of a pass over a number of tokens.
        factor: measured time of a whole plain step as a multiple of that.
        baseline_seconds, actual_seconds: estimated plain-decoding time (without `factor`) and
            measured time of recent steps with drafts, discounted; `count` of these steps.
        cold: steps with drafts that are not counted yet.
        allowed_loss: plain steps that may seem lost; doubled each time that it was a false alarm.
        paused_steps: steps without drafts that are left; the first `fresh` of them are measured.
        unmeasured: steps with drafts since enough plain ones were measured, and
        due: after how many of them some are measured in any case, since a wrong estimate may hide a
            loss.
        next_pause: the length of the next pause.
        pauses: how often speculation was paused.
    """

    cost: Callable[[float], float]
    factor: float = 1.0
    baseline_seconds: float = 0.0
    actual_seconds: float = 0.0
    count: float = 0.0
    cold: int = COLD_STEPS
    allowed_loss: float = LOSS
    paused_steps: int = 0
    fresh: int = 0
    unmeasured: int = 0
    due: int = WINDOW
    next_pause: int = WINDOW
    pauses: int = 0

    @property
    def speedup(self) -> float:
        """Recent speed as a multiple of plain decoding; 1 if nothing was drafted."""
        if not self.actual_seconds:
            return 1.0
        return self.factor * self.baseline_seconds / self.actual_seconds

    def allows(self) -> bool:
        """Return True if anything may be drafted in this step."""
        return self.paused_steps == 0

    def record(self, samples: Sequence[GuardSample], seconds: float, drafting: float) -> None:
        """Count a step of decoding requests, none of which read a prompt.

        `seconds` of wall-clock time, of which `drafting` by the policy's clock.
        """
        num_requests = len(samples)
        num_tokens = sum(1 + sample.nodes for sample in samples)
        drafted = any(sample.has_proposed for sample in samples)
        self._charge_requests(samples, self.cost(num_tokens) + drafting * drafted)
        if not drafted:
            self._record_plain(seconds / self.cost(num_tokens))
        elif self.cold:
            self.cold -= 1
        else:
            emitted = sum(sample.emitted for sample in samples)
            self._record_drafted(num_requests, emitted, seconds)

    def _record_drafted(self, num_requests: int, emitted: int, seconds: float) -> None:
        discount = 1 - 1 / WINDOW
        plain = self.cost(num_requests)
        mean = self.actual_seconds / self.count if self.count else seconds
        self.baseline_seconds = discount * self.baseline_seconds + emitted / num_requests * plain
        self.actual_seconds = discount * self.actual_seconds + min(seconds, OUTLIER * mean)
        self.count = discount * self.count + 1
        lost = self.actual_seconds - self.factor * self.baseline_seconds
        self.unmeasured += 1
        if self.unmeasured >= self.due or lost > self.allowed_loss * self.factor * plain:
            # The measured time of plain steps may be out of date: measure some now.
            self.paused_steps = self.fresh = FRESH_STEPS
        elif self.baseline_seconds > 0.9 * WINDOW * plain and self.speedup > 1:
            self.next_pause = WINDOW

    def _record_plain(self, ratio: float) -> None:
        """Count a plain step that took `ratio` times what the cost model expects of its pass."""
        if not self.paused_steps:
            self.factor *= min(max(ratio / self.factor, 0.5), 2.0) ** (1 / FRESH_STEPS)
            self.unmeasured = max(self.unmeasured - WINDOW // FRESH_STEPS, 0)
            return
        self.paused_steps -= 1
        if self.fresh:
            self._measure(ratio)

    def _charge_requests(self, samples: Sequence[GuardSample], cost: float) -> None:
        """Charge each request's guard its share of the drafting cost beyond a plain step."""
        plain = self.cost(len(samples))
        shares = [sample.nodes + sample.has_proposed for sample in samples]
        extra = (cost / plain - 1) * len(samples) / max(sum(shares), 1)
        for sample, share in zip(samples, shares, strict=True):
            sample.guard.record(sample.emitted, 1 + extra * share)

    def _measure(self, ratio: float) -> None:
        """Add one of the plain steps that are measured afresh; decide after the last."""
        share = 1 / (FRESH_STEPS - self.fresh + 1)
        self.factor += share * (ratio - self.factor)
        self.fresh -= 1
        if self.fresh:
            return
        if self.unmeasured < self.due:
            self.allowed_loss = min(2 * self.allowed_loss, MAX_LOSS)
        self.unmeasured, self.due = 0, MAX_PAUSE
        if self.speedup >= MIN_SPEED:
            return
        report = log.info if self.pauses else log.warning
        report(
            "speculation ran at %.2f times the speed of plain decoding: paused for %d steps",
            self.speedup,
            self.next_pause,
        )
        self.pauses += 1
        self.paused_steps, self.allowed_loss = self.next_pause, LOSS
        self.next_pause = min(2 * self.next_pause, MAX_PAUSE)
        self.baseline_seconds = self.actual_seconds = self.count = 0.0
