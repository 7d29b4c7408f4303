"""Joules a token: plain decoding and every draft in turn, over windows long enough for the
machine's counters.

Time saved is not energy saved: verified tokens that are thrown away cost joules too. A window runs
the same prompts again and again until it is long enough, prompts included; what the machine takes
when nothing runs is measured first and given beside. Where no counter can be read there are no
figures, and the reason is said."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from forerun.bench.decode.sweep import Plan, batches
from forerun.cli.progress import Tell, nothing
from forerun.errors import ForerunError
from forerun.llm import LLM
from forerun.measure.energy import MINIMUM_SECONDS, Energy, Meter, cost_per_million
from forerun.measure.medians import median, median_if_known
from forerun.measure.run import PLAIN, Arm, timed_run
from forerun.measure.where import machine
from forerun.measure.workloads import Task
from forerun.models.hub import DEFAULT
from forerun.utils import check_number


@dataclass(frozen=True, slots=True)
class Consumption:
    """One arm; figures are medians over windows.

    joules, above_idle: a token; None where that is not known. tokens_per_watt_hour: from joules.
        times_plain: joules a
    token over those of plain decoding in the same round. tokens_per_second: of the whole window,
    prompts included."""

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
    """What was measured, how, and by which counters."""

    kind: str
    model: str
    seconds: float
    repeats: int
    machine: dict[str, Any]
    method: str
    idle_watts: dict[str, float | None]
    results: list[Consumption]


def measure_energy(
    options: dict[str, Any], plan: Plan, tasks: Sequence[Task], seconds: float, tell: Tell = nothing,
    meter: Meter | None = None,
) -> EnergyReport:  # fmt: skip
    """One window of at least `seconds` for each arm and round.

    Raises:
        ForerunError: if no counter of this machine can be read; it says why, and what could be
            done.
        ConfigError: windows too short for counters.
    """
    check_number("seconds", seconds, MINIMUM_SECONDS, 3600)
    meter = meter or Meter()
    if not meter.sources:
        raise ForerunError(f"energy cannot be measured here. {meter.method}")
    engines = plan.engines()
    whole, done = 1 + plan.repeats * sum(1 + len(arms) for _, _, arms in engines), itertools.count()
    tell("idle", next(done), whole)  # counted, so that no spinner turns
    meter.idle(seconds)
    results: list[Consumption] = []
    for quantization, draft, arms in engines:
        llm = LLM(**options, draft=draft, quantization=quantization)
        works = batches(llm, tasks, plan.requests[0], plan.params.max_tokens)
        params = replace(plan.params, temperature=plan.temperatures[0])
        windows: dict[Arm, list[tuple[Energy, int]]] = {arm: [] for arm in (PLAIN, *arms)}
        for i in range(plan.repeats):
            for arm in windows:
                tell(f"{arm.draft}, round {i + 1} of {plan.repeats}", next(done), whole)
                started, tokens, at = time.monotonic(), 0, i
                with meter.window() as window:
                    while time.monotonic() - started < seconds:
                        llm.forget()
                        tokens += timed_run(llm.engine, works[at % len(works)], params, arm).tokens
                        at += 1
                if window.energy:
                    windows[arm].append((window.energy, tokens))
        results += [_consumption(arm, windows, plan.price) for arm in windows]
        del llm
    return EnergyReport(
        "energy", options.get("model") or DEFAULT, seconds, plan.repeats, machine(options.get("threads", 0)),
        meter.method, meter.idle_watts, results,
    )  # fmt: skip


def _consumption(
    arm: Arm, windows: dict[Arm, list[tuple[Energy, int]]], price: float | None
) -> Consumption:
    mine = windows[arm]
    joules = [energy.per_token(tokens) for energy, tokens in mine]
    plain = [energy.per_token(tokens) for energy, tokens in windows[PLAIN]]
    above = [
        None if e.total_above_idle is None or not n else e.total_above_idle / n for e, n in mine
    ]
    speed = median([tokens / energy.seconds for energy, tokens in mine])
    each = median_if_known(joules)
    return Consumption(
        arm.draft, arm.depth, each, median_if_known(above),
        tokens_per_watt_hour=3600 / each if each else None,
        times_plain=median_if_known([a / b if a and b else None for a, b in zip(joules, plain, strict=True)]),
        watts=median_if_known([None if e.total is None else e.total / e.seconds for e, _ in mine]),
        tokens_per_second=speed,
        cost_per_million=cost_per_million(price, speed) if price else None,
    )  # fmt: skip
