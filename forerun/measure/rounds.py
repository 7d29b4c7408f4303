"""Rounds: arms beside plain decoding of the same model, in turn, on the same prompts; and what they
come to.

A setting is a category of tasks at one temperature and so many requests at once; its prompts stand
in batches that run together. A round runs plain decoding and every arm once over every batch,
starting with another of them each time. The time of an arm on a batch is its median over the
rounds; its speed is all tokens over the sum of those times, so that one disturbed run counts for
nothing and every prompt for what it takes. What proposers remember of finished requests is dropped
before every run. One round over the first batch comes first and does not count: it warms up, and
lets the depth policy measure.
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
# width of a 95 % interval, as a share of the ratio, below which no further rounds are needed
NARROW = 0.06


@dataclass(frozen=True, slots=True)
class Setting:
    """What arms are compared within."""

    category: str
    temperature: float
    requests: int

    def __str__(self) -> str:
        return f"{self.category}, temperature {self.temperature:g}, {self.requests} at once"


@dataclass(frozen=True, slots=True)
class Result:
    """One arm in one setting over all rounds; milliseconds are medians, counts are sums.

    Attributes:
        quantization: of the target; none keeps its dtype.
        draft, depth, rule: the arm; off is plain decoding.
        category, temperature, requests: the setting.
        tokens_per_second: of decoding, all requests together.
        times_plain: the speed over that of plain decoding.
        interval: 95 % bootstrap interval of times_plain over the rounds; None of fewer than two.
        accepted_length: tokens a target pass and request.
        drafted: nodes drafted a step and request.
        draft_ms, pass_ms, other_ms: milliseconds a step.
        same: whether every output was plain decoding's, token for token; None where only the law is
            promised.
        first_difference: the earliest output position where one was not.
        lengths, acceptance, sources, positions: counts, see `tally`.
        joules_per_token: None where this machine's counters do not say.
        cost_per_million: of tokens, at the price of an hour that was given; None without.
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
    """Plain decoding of one target beside what reading its weights once a pass allows.

    Attributes:
        quantization, requests: as in `Result`.
        weight_bytes: read by one pass.
        bandwidth: GB/s at which all threads read, measured between the runs; None where the model
            is not on the CPU, or there are no native kernels to measure with.
        tokens_per_second: bandwidth over weight bytes, times requests.
        share: plain decoding's share of that, within rounds.
    """

    quantization: str
    requests: int
    weight_bytes: int
    bandwidth: float | None
    tokens_per_second: float | None
    share: float | None


def always(seconds: float, done: int) -> bool:
    """There is time for any round."""
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
        self.llm, self.setting, self.repeats, self.meter = llm, setting, repeats, meter
        self.params = replace(params, temperature=setting.temperature)
        self.runs: dict[Arm, list[list[Run]]] = {arm: [] for arm in arms}
        self.energies: dict[Arm, list[float | None]] = {
            arm: [] for arm in arms
        }  # joules a token of each run
        self.bandwidths: list[float] = []

    def play(
        self,
        works: Sequence[Batch],
        tell: Tell,
        settle: float = 0.0,
        fits: Callable[[float, int], bool] = always,
    ) -> None:
        """The warm-up and all rounds, then further ones for up to `settle` seconds, until every
        ratio has settled.

        Before each, `fits` is asked whether there is time for it: the seconds it may take, by the
        warm-up or the one before, and how many rounds are over.
        """
        llm, arms = self.llm, list(self.runs)
        has_limit = llm.decoder.device.type == "cpu" and native.library() is not None
        if has_limit:
            native.start(llm.config.threads)  # torch kernels have not
        tell(f"{self.setting}: warming up", 0, 1)
        began = time.monotonic()
        for arm in arms:
            llm.forget()
            timed_run(llm.engine, works[0], self.params, arm)
        self.runs = {arm: [[] for _ in works] for arm in arms}
        began, expected = time.monotonic(), (time.monotonic() - began) * len(works)
        while self.done < self.repeats or (
            time.monotonic() < began + settle and not self.settled()
        ):
            if not fits(expected, self.done):
                return
            begun = time.monotonic()
            self._round(works, tell, began, settle)
            expected = time.monotonic() - begun
            self.bandwidths += [native.read_bandwidth()] if has_limit else []

    def _round(self, works: Sequence[Batch], tell: Tell, began: float, settle: float) -> None:
        """Every arm on every batch, the arms in turns."""
        llm, arms, done = self.llm, list(self.runs), self.done
        of = f" of {self.repeats}" if done < self.repeats else ", until ratios have settled"
        for batch in range(len(works)):
            i = done * len(works) + batch
            share = (1 + i) / (1 + self.repeats * len(works))  # 1 for the warm-up
            if settle:
                share = min(share, (time.monotonic() - began) / settle)
            tell(
                f"{self.setting}: round {done + 1}{of}, prompts {batch + 1} of {len(works)}",
                min(share, 1.0),
                1,
            )
            for turn in range(len(arms)):
                arm = arms[(turn + i) % len(arms)]
                llm.forget()
                with self.meter.window() as window:
                    run = timed_run(llm.engine, works[batch], self.params, arm)
                self.runs[arm][batch].append(run)
                self.energies[arm].append(
                    window.energy.per_token(run.tokens) if window.energy else None
                )

    @property
    def done(self) -> int:
        """Rounds that are over."""
        return len(self.runs[PLAIN][-1])

    def settled(self) -> bool:
        """Whether the interval of every arm's ratio to plain decoding is at most `NARROW` of it
        wide."""
        plain = self._speeds(PLAIN)
        for arm in self.runs:
            speeds = self._speeds(arm)
            interval = None if arm == PLAIN else ratio_interval(speeds, plain)
            if interval and interval[1] - interval[0] > NARROW * overall(speeds) / overall(plain):
                return False
        return True

    def result(self, quantization: str, arm: Arm, price: float | None) -> Result:
        """What the runs of one arm come to; `price` is that of an hour of this machine."""
        runs, setting = list(itertools.chain(*self.runs[arm])), self.setting
        stats = [each for run in runs for each in run.stats]
        same, apart = self._compared(arm)
        speeds, plain = self._speeds(arm), self._speeds(PLAIN)
        steps = sum(s.steps for s in stats)
        return Result(
            quantization, arm.draft, arm.depth, arm.rule, setting.category, setting.temperature, setting.requests,
            tokens_per_second=overall(speeds),
            times_plain=overall(speeds) / overall(plain),
            interval=None if arm == PLAIN else ratio_interval(speeds, plain),
            accepted_length=sum(s.completion_tokens for s in stats) / steps,
            drafted=sum(s.drafted for s in stats) / steps,
            draft_ms=median([run.draft_ms for run in runs]),
            pass_ms=median([run.pass_ms for run in runs]),
            other_ms=median([run.other_ms for run in runs]),
            same=same,
            first_difference=apart,
            **tally(stats),
            joules_per_token=median_if_known(self.energies[arm]),
            cost_per_million=cost_per_million(price, overall(speeds)) if price else None,
        )  # fmt: skip

    def speed(self, arm: Arm) -> float:
        """Tokens a second of one arm over all rounds."""
        return overall(self._speeds(arm))

    def ratio(self, arm: Arm, base: Arm) -> tuple[float, tuple[float, float] | None]:
        """The speed of one arm over that of another, with its 95 % interval; None of fewer than two
        rounds."""
        speeds, others = self._speeds(arm), self._speeds(base)
        return overall(speeds) / overall(others), ratio_interval(speeds, others)

    def _speeds(self, arm: Arm) -> np.ndarray:
        """Tokens a second by batch and round. [batches, repeats]"""
        return np.array([[run.speed for run in batch] for batch in self.runs[arm]])

    def _compared(self, arm: Arm) -> tuple[bool | None, int | None]:
        """Whether the texts are plain decoding's and, if not, from where on; None where that is not
        promised."""
        if arm.rule != "match" and (self.setting.temperature or arm.rule == "typical"):
            return None, None
        pairs = zip(
            itertools.chain(*self.runs[arm]), itertools.chain(*self.runs[PLAIN]), strict=True
        )
        apart = [
            first_difference(mine, theirs)
            for run, base in pairs
            for mine, theirs in zip(run.outputs, base.outputs, strict=True)
        ]
        differing = [at for at in apart if at is not None]
        return not differing, min(differing, default=None)

    def limit(self, quantization: str) -> Limit:
        """What the bandwidth between the runs allows plain decoding."""
        size, requests = self.llm.decoder.weight_bytes, self.setting.requests
        if not self.bandwidths:
            return Limit(quantization, requests, size, None, None, None)
        most = 1e9 * median(self.bandwidths) / size * requests
        share = overall(self._speeds(PLAIN)) / most
        return Limit(quantization, requests, size, median(self.bandwidths), most, share)


def overall(speeds: np.ndarray) -> float:
    """One speed of equal batches: each takes the median time of its rounds. [batches, repeats]
    tokens/s -> tokens/s"""
    return float(1 / np.mean(1 / np.median(speeds, axis=-1), axis=-1))


def ratio_interval(speeds: np.ndarray, plain: np.ndarray) -> tuple[float, float] | None:
    """The 95 % percentile bootstrap interval of the ratio of two overall speeds, rounds drawn for
    each batch; None of fewer than two rounds. The same values give the same interval. [batches,
    repeats] each"""
    batches, repeats = speeds.shape
    if repeats < 2:
        return None
    dice = default_rng(0)
    chosen = dice.integers(repeats, size=(RESAMPLES, batches, repeats))
    row = np.arange(batches)[:, None]

    def drawn(values: np.ndarray) -> np.ndarray:
        medians = np.median(values[row, chosen], axis=-1)
        speeds: np.ndarray = 1 / np.mean(1 / medians, axis=-1)
        return speeds

    low, high = np.quantile(drawn(speeds) / drawn(plain), [0.025, 0.975])
    return float(low), float(high)
