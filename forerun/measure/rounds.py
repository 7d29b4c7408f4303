"""Interleaved rounds: several ways to decode beside plain decoding, on the same prompts.

A setting is a category of tasks at one temperature and one number of concurrent requests; its
prompts are grouped into batches that run together. A round runs plain decoding and every arm once
over every batch and starts with a different arm each time. The time of an arm on a batch is its
median over the rounds; its speed is all tokens over the sum of these times, so one disturbed run
does not count and every prompt counts with the time it takes. Drafter state of finished requests is
dropped before every run. One uncounted round over the first batch comes first: it warms up, and the
depth policy measures.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.random import default_rng

from forerun.cli.progress import Tell
from forerun.kernels import native
from forerun.llm import LLM
from forerun.measure.energy import Meter, cost_per_million
from forerun.measure.medians import RESAMPLES, first_difference, median, median_if_known
from forerun.measure.run import PLAIN, Arm, Run, Work, tally, timed_run
from forerun.sampling.params import SamplingParams

Batch = list[Work]
SETTLED_WIDTH = 0.06  # width of a 95 % interval, as a share of the ratio, that needs no more rounds


@dataclass(frozen=True, slots=True)
class Setting:
    """The conditions under which arms are compared."""

    category: str
    temperature: float
    requests: int

    def __str__(self) -> str:
        return f"{self.category}, temperature {self.temperature:g}, {self.requests} at once"


@dataclass(frozen=True, slots=True)
class Result:
    """One arm in one setting over all rounds; milliseconds are medians, counts are sums.

    Attributes:
        quantization: of the target; "none" keeps its dtype.
        draft, depth, rule: the arm; "off" is plain decoding.
        category, temperature, requests: the setting.
        tokens_per_second: decoding speed of all requests together.
        times_plain: the speed over that of plain decoding.
        interval: 95 % bootstrap interval of times_plain; None for fewer than two rounds.
        accepted_length: tokens per target forward pass and request.
        drafted: drafted tokens per step and request.
        draft_ms, pass_ms, other_ms: milliseconds per step.
        same: True if every output equals plain decoding's token for token; None where the rule
            preserves only the distribution.
        first_difference: the earliest output position that differs.
        lengths, acceptance, sources, positions: counts, see `tally`.
        joules_per_token: None where the energy counters do not say.
        cost_per_million: price of a million tokens; None if no price was given.
    """

    quantization: str
    draft: str
    depth: int | str
    rule: str
    category: str
    temperature: float
    requests: int
    tokens_per_second: float
    times_plain: float
    interval: tuple[float, float] | None
    accepted_length: float
    drafted: float
    draft_ms: float
    pass_ms: float
    other_ms: float
    same: bool | None
    first_difference: int | None
    lengths: list[int]
    acceptance: list[list[int]]
    sources: dict[str, list[int]]
    positions: list[list[int]]
    joules_per_token: float | None
    cost_per_million: float | None


@dataclass(frozen=True, slots=True)
class Limit:
    """Plain decoding of one target beside the bound set by reading its weights once per pass.

    Attributes:
        quantization, requests: as in `Result`.
        weight_bytes: bytes read by one forward pass.
        bandwidth: read bandwidth of all threads in GB/s, measured between the runs; None off the
            CPU or without native kernels.
        tokens_per_second: bandwidth over weight bytes, times requests.
        share: plain decoding's share of that.
    """

    quantization: str
    requests: int
    weight_bytes: int
    bandwidth: float | None
    tokens_per_second: float | None
    share: float | None


def always(seconds: float, done: int) -> bool:
    """Allow every further round."""
    return True


class Rounds:
    """The runs of every arm in one setting: runs[arm][batch][round]."""

    def __init__(
        self,
        llm: LLM,
        setting: Setting,
        arms: Sequence[Arm],
        params: SamplingParams,
        repeats: int,
        meter: Meter,
    ) -> None:
        self.llm = llm
        self.setting = setting
        self.repeats = repeats
        self.meter = meter
        self.params = replace(params, temperature=setting.temperature)
        self.runs: dict[Arm, list[list[Run]]] = {arm: [] for arm in arms}
        self.joules_per_token: dict[Arm, list[float | None]] = {arm: [] for arm in arms}
        self.bandwidths: list[float] = []

    def play(
        self,
        works: Sequence[Batch],
        tell: Tell,
        settle: float = 0.0,
        fits: Callable[[float, int], bool] = always,
    ) -> None:
        """Run the warm-up and all rounds, then more for up to `settle` seconds while unsettled.

        Before each round `fits(seconds, done)` decides whether there is time for it: the seconds
        that it may take, and the number of rounds that are over.
        """
        measures_bandwidth = self.llm.decoder.device.type == "cpu" and native.library() is not None
        if measures_bandwidth:
            native.start(self.llm.config.threads)  # not started yet where torch kernels are used
        tell(f"{self.setting}: warming up", 0, 1)
        began = time.monotonic()
        for arm in self.runs:
            self.llm.forget()
            timed_run(self.llm.engine, works[0], self.params, arm)
        self.runs = {arm: [[] for _ in works] for arm in self.runs}
        expected = (time.monotonic() - began) * len(works)
        began = time.monotonic()
        while self.done < self.repeats or (
            time.monotonic() < began + settle and not self.settled()
        ):
            if not fits(expected, self.done):
                return
            round_began = time.monotonic()
            self._round(works, tell, began, settle)
            expected = time.monotonic() - round_began
            self.bandwidths += [native.read_bandwidth()] if measures_bandwidth else []

    def _round(self, works: Sequence[Batch], tell: Tell, began: float, settle: float) -> None:
        """Run every arm on every batch, starting with a different arm each time."""
        arms = list(self.runs)
        done = self.done
        total = f" of {self.repeats}" if done < self.repeats else ", until ratios have settled"
        for batch, work in enumerate(works):
            i = done * len(works) + batch
            share = (1 + i) / (1 + self.repeats * len(works))  # the first 1 is the warm-up
            if settle:
                share = min(share, (time.monotonic() - began) / settle)
            what = f"{self.setting}: round {done + 1}{total}, prompts {batch + 1} of {len(works)}"
            tell(what, min(share, 1.0), 1)
            for turn in range(len(arms)):
                arm = arms[(turn + i) % len(arms)]
                self.llm.forget()
                before = self.meter.read()
                run = timed_run(self.llm.engine, work, self.params, arm)
                self.joules_per_token[arm].append(self.meter.since(before).per_token(run.tokens))
                self.runs[arm][batch].append(run)

    @property
    def done(self) -> int:
        """The number of rounds that are over."""
        return len(self.runs[PLAIN][-1])

    def settled(self) -> bool:
        """Return True if every ratio's interval is at most `SETTLED_WIDTH` of the ratio wide."""
        for arm in self.runs:
            if arm != PLAIN:
                ratio, interval = self.ratio(arm, PLAIN)
                if interval and interval[1] - interval[0] > SETTLED_WIDTH * ratio:
                    return False
        return True

    def result(self, quantization: str, arm: Arm, price: float | None) -> Result:
        """Summarize the runs of one arm; `price` is the price of an hour of this machine."""
        runs = list(itertools.chain(*self.runs[arm]))
        stats = [entry for run in runs for entry in run.stats]
        steps = sum(s.steps for s in stats)
        speed = self.speed(arm)
        ratio, interval = self.ratio(arm, PLAIN)
        same, difference = self._compare_outputs(arm)
        return Result(
            quantization=quantization,
            draft=arm.draft,
            depth=arm.depth,
            rule=arm.rule,
            category=self.setting.category,
            temperature=self.setting.temperature,
            requests=self.setting.requests,
            tokens_per_second=speed,
            times_plain=ratio,
            interval=None if arm == PLAIN else interval,
            accepted_length=sum(s.completion_tokens for s in stats) / steps,
            drafted=sum(s.drafted for s in stats) / steps,
            draft_ms=median([run.draft_ms for run in runs]),
            pass_ms=median([run.pass_ms for run in runs]),
            other_ms=median([run.other_ms for run in runs]),
            same=same,
            first_difference=difference,
            **tally(stats),
            joules_per_token=median_if_known(self.joules_per_token[arm]),
            cost_per_million=cost_per_million(price, speed) if price else None,
        )

    def speed(self, arm: Arm) -> float:
        """Return the tokens per second of one arm over all rounds."""
        return float(overall(self._speeds(arm)))

    def ratio(self, arm: Arm, base: Arm) -> tuple[float, tuple[float, float] | None]:
        """Return the speed of `arm` over that of `base`, and its 95 % interval (see `Result`)."""
        speeds = self._speeds(arm)
        base_speeds = self._speeds(base)
        ratio = float(overall(speeds) / overall(base_speeds))
        return ratio, ratio_interval(speeds, base_speeds)

    def _speeds(self, arm: Arm) -> np.ndarray:
        """Tokens per second. [batches, rounds]"""
        return np.array([[run.speed for run in batch] for batch in self.runs[arm]])

    def _compare_outputs(self, arm: Arm) -> tuple[bool | None, int | None]:
        """Compare outputs with plain decoding's; (None, None) where equality is not promised."""
        if arm.rule != "match" and (self.setting.temperature or arm.rule == "typical"):
            return None, None
        runs = itertools.chain(*self.runs[arm])
        plain_runs = itertools.chain(*self.runs[PLAIN])
        differences = [
            first_difference(output, plain)
            for run, plain_run in zip(runs, plain_runs, strict=True)
            for output, plain in zip(run.outputs, plain_run.outputs, strict=True)
        ]
        positions = [at for at in differences if at is not None]
        return not positions, min(positions, default=None)

    def limit(self, quantization: str) -> Limit:
        """Return the bound that the measured bandwidth sets for plain decoding."""
        requests = self.setting.requests
        size = self.llm.decoder.pass_bytes(requests)
        if not self.bandwidths:
            return Limit(quantization, requests, size, None, None, None)
        bandwidth = median(self.bandwidths)
        bound = 1e9 * bandwidth / size * requests
        return Limit(quantization, requests, size, bandwidth, bound, self.speed(PLAIN) / bound)


def overall(speeds: np.ndarray) -> np.ndarray:
    """Combine batches of equal size, each with its median time. [..., batches, rounds] -> [...]"""
    return np.asarray(1 / np.mean(1 / np.median(speeds, axis=-1), axis=-1))


def ratio_interval(speeds: np.ndarray, plain: np.ndarray) -> tuple[float, float] | None:
    """Return the 95 % bootstrap interval of the ratio of two overall speeds, resampling rounds.

    Deterministic. None for fewer than two rounds. Both [batches, rounds].
    """
    batches, repeats = speeds.shape
    if repeats < 2:
        return None
    chosen = default_rng(0).integers(repeats, size=(RESAMPLES, batches, repeats))
    row = np.arange(batches)[:, None]
    ratios = overall(speeds[row, chosen]) / overall(plain[row, chosen])
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(low), float(high)
