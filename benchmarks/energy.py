"""Measure joules per token of plain decoding and drafts with the machine's energy counters.

    python -m benchmarks.energy --drafts suffix --categories chat --price 0.4

Saved time is not saved energy: drafted tokens that are rejected cost joules too. A window repeats
the same prompts until it is long enough for the counters, prefill included. The idle power is
measured first. Without counters (NVML or RAPL, see `forerun doctor`) nothing is estimated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.command import add_engine_options, chosen_tasks, engine_options, parser, run
from forerun.bench.decode import DecodePlan, batches
from forerun.errors import ForerunError
from forerun.llm import LLM
from forerun.measure.energy import MIN_WINDOW_SECONDS, Energy, Meter, cost_per_million
from forerun.measure.medians import median, median_if_known
from forerun.measure.run import PLAIN, Arm, machine, timed_run
from forerun.measure.tables import listed, print_columns, print_json
from forerun.measure.workloads import Task
from forerun.models.hub import DEFAULT
from forerun.sampling.params import SamplingParams
from forerun.utils import check_number

Windows = list[tuple[Energy, int]]  # energy and tokens of each window


@dataclass(frozen=True, slots=True)
class Consumption:
    """One arm; medians over windows, None where unknown.

    Attributes:
        joules: per token.
        above_idle: joules per token without the machine's idle power.
        times_plain: joules per token over those of plain decoding in the same round.
        tokens_per_second: of the whole window, prefill included.
    """

    draft: str
    depth: int | str
    joules: float | None
    above_idle: float | None
    tokens_per_watt_hour: float | None
    times_plain: float | None
    watts: float | None
    tokens_per_second: float
    cost_per_million: float | None


@dataclass(frozen=True, slots=True)
class EnergyReport:
    """What was measured, how, and with which counters."""

    model: str
    seconds: float
    repeats: int
    machine: dict[str, Any]
    method: str
    idle_watts: float | None
    results: list[Consumption]


def measure_energy(
    options: dict[str, Any],
    plan: DecodePlan,
    tasks: Sequence[Task],
    seconds: float,
    meter: Meter | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> EnergyReport:
    """Measure one window of at least `seconds` for each arm and round.

    Raises:
        ForerunError: no counter can be read; the message says why.
        ConfigError: windows are too short for counters.
    """
    check_number("seconds", seconds, MIN_WINDOW_SECONDS, 3600)
    meter = meter or Meter()
    if not meter.sources:
        raise ForerunError(f"energy cannot be measured here. {meter.method}")
    before = meter.read()
    sleep(seconds)
    idle_watts = meter.since(before).watts
    results: list[Consumption] = []
    for quantization, draft, arms in plan.engines():
        llm = LLM(**options, draft=draft, quantization=quantization)
        works = batches(llm, tasks, plan.requests[0], plan.params.length_limit)
        windows: dict[Arm, Windows] = {arm: [] for arm in (PLAIN, *arms)}
        for i in range(plan.repeats):
            for arm in windows:
                begun = time.monotonic()
                tokens = 0
                at = i
                before = meter.read()
                while time.monotonic() - begun < seconds:
                    llm.forget()
                    work = works[at % len(works)]
                    tokens += timed_run(llm.engine, work, plan.params, arm).tokens
                    at += 1
                windows[arm].append((meter.since(before), tokens))
        results += [summarize(arm, windows, idle_watts, plan.price) for arm in windows]
        del llm
    return EnergyReport(
        model=options.get("model") or DEFAULT,
        seconds=seconds,
        repeats=plan.repeats,
        machine=machine(options.get("threads", 0)),
        method=meter.method,
        idle_watts=idle_watts,
        results=results,
    )


def summarize(
    arm: Arm, windows: dict[Arm, Windows], idle_watts: float | None, price: float | None
) -> Consumption:
    """Return the medians of one arm; ratios are formed within rounds."""
    own = windows[arm]
    joules = [energy.per_token(tokens) for energy, tokens in own]
    plain = [energy.per_token(tokens) for energy, tokens in windows[PLAIN]]
    above = [
        None
        if energy.total is None or idle_watts is None
        else (energy.total - idle_watts * energy.seconds) / tokens
        for energy, tokens in own
    ]
    ratios = [a / b if a and b else None for a, b in zip(joules, plain, strict=True)]
    per_token = median_if_known(joules)
    speed = median([tokens / energy.seconds for energy, tokens in own])
    return Consumption(
        draft=arm.draft,
        depth=arm.depth,
        joules=per_token,
        above_idle=median_if_known(above),
        tokens_per_watt_hour=3600 / per_token if per_token else None,
        times_plain=median_if_known(ratios),
        watts=median_if_known([energy.watts for energy, _ in own]),
        tokens_per_second=speed,
        cost_per_million=cost_per_million(price, speed) if price else None,
    )


def show(report: EnergyReport) -> None:
    """Print the table and how it was measured."""

    def known(value: float | None) -> str:
        return "unknown" if value is None else f"{value:.3g}"

    print_columns(
        [
            {
                "draft": r.draft,
                "depth": "" if r.draft == "off" else str(r.depth),
                "J/token": known(r.joules),
                "J/token above idle": known(r.above_idle),
                "tokens/Wh": known(r.tokens_per_watt_hour),
                "times plain": known(r.times_plain),
                "W": known(r.watts),
                "tokens/s": f"{r.tokens_per_second:.1f}",
                "a million": known(r.cost_per_million),
            }
            for r in report.results
        ],
        optional=("a million",),
    )
    print(
        f"by {report.method}; idle: {known(report.idle_watts)} W; windows of {report.seconds:g} s,"
        f" medians of {report.repeats}; prefill is included"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    options = parser(__doc__)
    add_engine_options(options)
    options.add_argument("--drafts", default="suffix", help="drafts, separated by commas")
    options.add_argument("--depths", default="auto", help="depths, separated by commas")
    options.add_argument("--categories", default="chat", help="of built-in tasks")
    options.add_argument("--prompts", help="a file of tasks instead")
    options.add_argument("--tokens", type=int, default=128, help="tokens to generate")
    options.add_argument("--requests", type=int, default=1, help="concurrent requests")
    options.add_argument("--repeats", type=int, default=3, help="windows of each arm")
    options.add_argument("--seconds", type=float, default=10.0, help="length of a window")
    options.add_argument("--price", type=float, help="price of an hour of this machine")
    given = options.parse_args(arguments)
    fields = engine_options(given)
    plan = DecodePlan(
        SamplingParams.pure(temperature=0.0, seed=0, max_tokens=given.tokens, ignore_eos=True),
        listed(given.drafts),
        depths=listed(given.depths),
        quantizations=[fields.pop("quantization", "none")],
        requests=[given.requests],
        repeats=given.repeats,
        price=given.price,
    )
    tasks = chosen_tasks(given.prompts, given.categories)
    report = measure_energy(fields, plan, tasks, given.seconds)
    if given.json:
        print_json(asdict(report))
    else:
        show(report)


if __name__ == "__main__":
    run(main)
