"""The roofline of a target pass: what it moves and computes by rows, what this machine allows, and
which limit binds.

A pass is bounded by two limits (Williams, Waterman, Patterson 2009, doi 10.1145/1498765.1498785):
its bytes over the bandwidth of the memory, which hardly depends on the number of rows, and its
operations over the peak of the cores, which grows with it. Where the first is the larger one,
verifying a further drafted token costs next to nothing.

Both limits are measured in the same rounds as the passes. A bandwidth that cannot be measured is
None, and then nothing is said to bind. Sampling is not part of a pass.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.random import default_rng

from forerun.bench.machine.demand import Demand, demand_of
from forerun.bench.machine.limits import limits_of
from forerun.cache.attention import Segment
from forerun.cli.progress import Tell, nothing
from forerun.config import Config
from forerun.errors import CapacityError, ConfigError
from forerun.kernels import native
from forerun.llm import LLM
from forerun.measure.medians import median
from forerun.models.config import load_config
from forerun.models.decoder import Decoder, longest_context
from forerun.models.hub import DEFAULT, find_model
from forerun.runtime.native import NativeDecoder
from forerun.runtime.torch_runner import Runner
from forerun.utils import check_integer

MOST_ROWS = 1024
PASSES = 3  # timed in a row, after one that is not
CHUNK = 512  # tokens of the context that are read in one pass
MEMORY, ARITHMETIC = "memory", "arithmetic"
OWN_COST = 0.5  # below this share of its limit, most of a pass is something else
OVER = 1.1  # above this share, a limit was no limit


@dataclass(frozen=True, slots=True)
class PassTime:
    """Passes over so many rows; times are medians.

    Attributes:
        rows: tokens of the pass, a chain below the context.
        bytes: by kind: attention, feed-forward, head, embedding, cache, activations.
        moved: their sum without the activations: what memory has to deliver.
        operations: by format of the numbers that are multiplied.
        memory_ms, arithmetic_ms: what each limit allows at best; None where it is not known.
        pass_ms: what the pass took.
        binds: memory or arithmetic, the larger of the two; None unless both are known.
        share: of the time that the binding limit explains, median over the rounds.
        times_one_row: pass_ms over that of one row in the same round.
    """

    rows: int
    bytes: dict[str, int]
    moved: int
    operations: dict[str, int]
    memory_ms: float | None
    arithmetic_ms: float
    pass_ms: float
    binds: str | None
    share: float | None
    times_one_row: float


@dataclass(frozen=True, slots=True)
class RooflineReport:
    """All passes, the limits in GB/s and in billions of operations a second, and where the one
    takes over.

    `balance` is the first number of rows at which arithmetic takes as long as memory; None if that
    is over MOST_ROWS, or not known. `weight_bytes` is what one pass reads of weights. `absent` says
    which limit is not known and why."""

    model: str
    device: str
    kernels: str
    context: int
    repeats: int
    weight_bytes: int
    bandwidth: float | None
    peaks: dict[str, float]
    balance: int | None
    absent: str
    passes: list[PassTime]


def measure_roofline(
    options: dict[str, Any],
    rows: Sequence[int],
    *,
    context: int = 128,
    repeats: int = 9,
    tell: Tell = nothing,
) -> RooflineReport:
    """Time passes of one model beside the limits of this machine.

    Args:
        options: fields of `Config` that concern the model and where it runs.
        rows: numbers of tokens of a pass; one row is measured always.
        context: committed tokens that they see.
        repeats: rounds; each measures the limits and every number of rows in turn.

    Raises:
        ForerunError: an option, a model, or a number of rows that cannot be.
    """
    _check(rows, context, repeats)
    counts = sorted({1, *rows})
    config = Config.of(**options)
    if config.tensor_parallel > 1:
        raise ConfigError(
            f"tensor_parallel={config.tensor_parallel}: passes are measured in one process, leave it out"
        )
    longest, needed = longest_context(load_config(find_model(config.model))), context + counts[-1]
    if needed > longest:
        raise ConfigError(
            f"a context of {context} and {counts[-1]} rows are over the {longest} tokens this model can serve:"
            " give less of either"
        )
    tell("loading")
    llm = LLM(**options, draft="off", max_rows=1, context=min(max(needed, Config().page), longest))
    runner, decoder = llm.engine.target, llm.decoder
    tell(f"reading {context} tokens")
    _read_context(runner, context, counts[-1])
    demands = {count: demand_of(decoder, count, context) for count in counts}
    limits = limits_of(decoder, llm.config.threads, demands[1].moved)
    bandwidths: list[float] = []
    peaks: dict[str, list[float]] = {form: [] for form in demands[1].operations}
    times: dict[int, list[float]] = {count: [] for count in counts}
    for i in range(repeats):
        tell(f"round {i + 1} of {repeats}", i, repeats)
        speed = limits.bandwidth()
        bandwidths += [] if speed is None else [speed]
        for form, measured in peaks.items():
            measured.append(limits.peak(form))
        for count in counts[
            :: -1 if i % 2 else 1
        ]:  # drifting one way, no case is always the later one
            times[count].append(_seconds(runner, count))
    rounds = _Rounds(bandwidths, peaks, times)
    return RooflineReport(
        model=llm.config.model or DEFAULT,
        device=str(decoder.device),
        kernels=native.instructions() if isinstance(decoder, NativeDecoder) else "torch",
        context=context,
        repeats=repeats,
        weight_bytes=decoder.weight_bytes,
        bandwidth=rounds.bandwidth,
        peaks=rounds.peak,
        balance=_balance(rounds, decoder, context),
        absent=limits.absent,
        passes=[rounds.of(count, demands[count]) for count in counts if count in rows],
    )


def _check(rows: Sequence[int], context: int, repeats: int) -> None:
    if not rows:
        raise ConfigError("there is nothing to measure: give at least one number of rows")
    for count in rows:
        check_integer("rows", count, 1, MOST_ROWS)
    check_integer("context", context, 1, 1 << 24)
    check_integer("repeats", repeats, 1, 10_000)


def _read_context(runner: Runner, context: int, rows: int) -> None:
    """Fill slot 0 with `context` tokens, and room for `rows` more. Which tokens they are takes no
    time."""
    if not runner.cache.pages.grow(0, context + rows):
        raise CapacityError(
            f"there is not enough free memory for {context + rows} tokens of KV cache: ask for fewer"
        )
    for start in range(0, context, CHUNK):
        count = min(CHUNK, context - start)
        runner.forward([_chain(runner, count, [])])
        runner.cache.commit(0, range(count))


def _chain(runner: Runner, count: int, want: Sequence[int]) -> Segment:
    """`count` tokens, one after the other, below what slot 0 holds."""
    tokens = default_rng(count).integers(runner.decoder.config.vocab, size=count).tolist()
    return Segment(0, tokens, list(range(-1, count - 1)), list(want))


def _seconds(runner: Runner, count: int) -> float:
    """The median of a few passes over `count` rows, all of them wanted.

    Nothing is committed: the next pass writes over what this one wrote. One pass goes before, so
        that the caches hold
    what a pass leaves in them.
    """
    segment, times = _chain(runner, count, range(count)), []
    for _ in range(1 + PASSES):
        start = time.perf_counter()
        runner.forward([segment])
        if runner.decoder.device.type == "cuda":
            torch.cuda.synchronize(runner.decoder.device)
        times.append(time.perf_counter() - start)
    return median(times[1:])


def _limits(
    demand: Demand, bandwidth: float | None, peaks: dict[str, float]
) -> tuple[float | None, float]:
    """Seconds that memory and arithmetic need at best."""
    memory = None if bandwidth is None else demand.moved / bandwidth / 1e9
    return memory, sum(count / peaks[form] for form, count in demand.operations.items()) / 1e9


@dataclass(frozen=True, slots=True)
class _Rounds:
    """What was measured, one entry a round: GB/s, billions of operations a second by format,
    seconds by rows."""

    bandwidths: list[float]
    peaks: dict[str, list[float]]
    times: dict[int, list[float]]

    @property
    def bandwidth(self) -> float | None:
        """The median; None where none was measured."""
        return median(self.bandwidths) if self.bandwidths else None

    @property
    def peak(self) -> dict[str, float]:
        """Medians by format."""
        return {form: median(measured) for form, measured in self.peaks.items()}

    def binds(self, demand: Demand) -> str | None:
        """Which limit is the larger one."""
        memory, arithmetic = _limits(demand, self.bandwidth, self.peak)
        if memory is None:
            return None
        return MEMORY if memory > arithmetic else ARITHMETIC

    def of(self, rows: int, demand: Demand) -> PassTime:
        """The passes over so many rows beside their limits."""
        memory, arithmetic = _limits(demand, self.bandwidth, self.peak)
        shares = []
        for i, bandwidth in enumerate(self.bandwidths):
            each = _limits(
                demand, bandwidth, {form: measured[i] for form, measured in self.peaks.items()}
            )
            shares.append(max(each[0] or 0.0, each[1]) / self.times[rows][i])
        return PassTime(
            rows=rows,
            bytes=demand.bytes,
            moved=demand.moved,
            operations=demand.operations,
            memory_ms=None if memory is None else 1e3 * memory,
            arithmetic_ms=1e3 * arithmetic,
            pass_ms=1e3 * median(self.times[rows]),
            binds=self.binds(demand),
            share=median(shares) if shares else None,
            times_one_row=median(
                [t / one for t, one in zip(self.times[rows], self.times[1], strict=True)]
            ),
        )


def _balance(rounds: _Rounds, decoder: Decoder | NativeDecoder, context: int) -> int | None:
    """The first number of rows at which arithmetic binds: every further row adds more operations
    than bytes."""
    numbers = range(1, MOST_ROWS + 1)
    found = bisect_left(
        numbers, True, key=lambda n: rounds.binds(demand_of(decoder, n, context)) == ARITHMETIC
    )
    return numbers[found] if found < len(numbers) else None


def lesson(report: RooflineReport) -> str:
    """What the figures say about speculation, in a few sentences."""
    first, last = report.passes[0], report.passes[-1]
    if report.bandwidth is None:
        said = [f"Which limit binds cannot be told without {report.absent}."]
    elif report.balance is None:
        said = [
            f"Bound by memory up to {MOST_ROWS} rows: further drafted tokens are verified almost for nothing."
        ]
    elif report.balance == 1:
        said = [
            "Arithmetic is the larger limit from the first row on: but for what a pass costs in itself, every drafted"
            " token has its full price."
        ]
    else:
        said = [
            f"Bound by memory up to {report.balance - 1} row{'s' * (report.balance > 2)}, by arithmetic from"
            f" {report.balance} on: up to there a drafted token is verified for little more than nothing, beyond it for"
            " its full price."
        ]
    if last.rows > 1:
        said.append(f"{last.rows} rows took {last.times_one_row:.2f} times one row.")
    if first.share is not None and first.share < OWN_COST:
        said.append(
            f"A pass of {first.rows} row{'s' * (first.rows > 1)} reaches {first.share:.0%} of its limit: the rest is"
            " the cost of a pass itself, such as starting operations and waiting for threads, which speculation spreads"
            " over more tokens as well."
        )
    if any(p.share is not None and p.share > OVER for p in report.passes):
        said.append(
            "A share over 100% means that its limit was read too low, mostly because something else ran then."
        )
    return " ".join(said)
