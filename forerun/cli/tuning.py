"""Search for the fastest draft and depth: measure all briefly, then the best for longer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forerun.bench.decode import DecodePlan, measure_decoding
from forerun.cli.progress import Part, Tell, nothing
from forerun.draft.self_speculation import find_layers
from forerun.engine.request import OFF
from forerun.errors import ConfigError
from forerun.llm import LLM
from forerun.measure.rounds import Result
from forerun.measure.run import machine
from forerun.measure.workloads import Task, token_ids
from forerun.models.hub import find_model
from forerun.utils import write_atomic

CLOSE = 0.9  # share of the best short result from which a long measurement is made
FINALISTS = 4
SHORT = 2  # rounds of the short measurement


@dataclass(frozen=True, slots=True)
class Choice:
    """The recommended draft and depth.

    Attributes:
        draft, depth: values for --draft and --depth; the draft is off if none is significantly
            faster than plain decoding.
        times_plain, interval: speed relative to plain decoding, with its 95 % interval.
        why: the reason, in one sentence.
    """

    draft: str
    depth: int | str
    times_plain: float
    interval: tuple[float, float]
    why: str


@dataclass(frozen=True, slots=True)
class Tuned:
    """The measurements, the fastest first; `short` are the short ones of all combinations."""

    model: str
    machine: dict[str, Any]
    tokens: int
    choice: Choice
    results: list[Result]
    short: list[Result]


def tune(
    options: dict[str, Any], plan: DecodePlan, tasks: Sequence[Task], tell: Tell = nothing
) -> Tuned:
    """Measure every draft of the plan at every depth, repeat the best ones for longer, and choose.

    All tasks are one category, weighted by the time they take. Arguments and errors are those of
    `measure_decoding`.

    Raises:
        ConfigError: the plan contains only plain decoding.
    """
    if set(plan.drafts) <= {OFF}:
        raise ConfigError(
            "there is nothing to choose between: plain decoding is measured anyway,"
            " so give --drafts others"
        )
    tasks = [replace(task, category="all") for task in tasks]
    look = measure_decoding(
        options,
        replace(plan, repeats=SHORT, settle=0.0),
        tasks,
        Part(tell, 0, 2, "short look, "),
        "tune",
    )
    short = ranked(look.results)
    close = [r for r in short if r.times_plain >= CLOSE * short[0].times_plain][:FINALISTS]
    results: list[Result] = []
    drafts = list(dict.fromkeys(r.draft for r in close))
    for i, draft in enumerate(drafts):
        again = replace(plan, drafts=[draft], depths=[r.depth for r in close if r.draft == draft])
        part = Part(Part(tell, 1, 2, "long look, "), i, len(drafts))
        results += measure_decoding(options, again, tasks, part, "tune").results
    best = ranked(results)
    return Tuned(
        look.model,
        machine(options.get("threads", 0)),
        plan.params.length_limit,
        choose(best),
        best,
        short,
    )


def look_for_layers(options: dict[str, Any], tasks: Sequence[Task], tell: Tell = nothing) -> None:
    """Find the layers of `self:layers=auto` for these prompts, and store them.

    Raises the errors of `LLM`.
    """
    model = options.get("model")
    target = LLM(**options | {"draft": OFF}).engine.target
    find_layers(target, find_model(model), token_ids(model, tasks), tell=tell)


def ranked(results: Sequence[Result]) -> list[Result]:
    """Return the results of speculative decoding, fastest first."""
    return sorted((r for r in results if r.draft != OFF), key=lambda r: -r.times_plain)


def choose(results: Sequence[Result]) -> Choice:
    """Choose from results that are sorted by speed.

    Among those that are not significantly slower than the fastest, prefer drafts without weights,
    then automatic depth, which adapts to other texts.
    """
    fastest = results[0]
    low, _ = interval(fastest)
    if low <= 1:
        why = f"nothing is surely faster than plain decoding; {named(fastest)} comes closest"
        return Choice(OFF, "auto", 1.0, (1.0, 1.0), why)
    as_fast = [r for r in results if interval(r)[1] >= low and interval(r)[0] > 1]
    best = min(
        as_fast, key=lambda r: (":" in r.draft, r.depth != "auto")
    )  # `min` keeps the fastest of equals
    why = "it was the fastest"
    if best is not fastest:
        gain = (
            "needs no weights"
            if ":" in fastest.draft and ":" not in best.draft
            else "adapts to other texts"
        )
        why = (
            f"{named(fastest)} was {fastest.times_plain:.2f} times plain, not surely more,"
            f" and this one {gain}"
        )
    return Choice(best.draft, best.depth, best.times_plain, interval(best), why)


def interval(result: Result) -> tuple[float, float]:
    """Return the 95 % interval of the speed ratio; both ends are the ratio if there is none."""
    return result.interval or (result.times_plain, result.times_plain)


def named(result: Result) -> str:
    """Return the flags of a result."""
    return f"--draft {result.draft} --depth {result.depth}"


def write_choice(
    path: Path, options: dict[str, Any], quantization: str | None, tuned: Tuned
) -> None:
    """Write the choice and the options it was measured with to a file for `forerun serve --config`.

    Raises:
        ForerunError: the file cannot be written.
    """
    chosen = options | {"draft": tuned.choice.draft, "depth": tuned.choice.depth}
    if quantization:
        chosen["quantization"] = quantization
    low, high = tuned.choice.interval
    lines = [
        f"# forerun tune: {tuned.choice.times_plain:.2f} times plain decoding"
        f" ({low:.2f} to {high:.2f})"
    ]
    lines += [
        f"{name} = {json.dumps(value)}" for name, value in chosen.items() if value is not None
    ]
    write_atomic(path, "\n".join(lines) + "\n")
