"""Which draft, and how deep, on this machine and these texts: a short look at all of them, a long
one at the best."""

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

CLOSE = 0.9  # of the best of the short look: worth a long one
FINALISTS = 4
SHORT = 2  # rounds of the short look


@dataclass(frozen=True, slots=True)
class Choice:
    """What to decode with, and why.

    Attributes:
        draft, depth: what to give to --draft and --depth; off where nothing is surely faster than
            plain decoding.
        times_plain, interval: how much faster that was, 95 %.
        why: one sentence.
    """

    draft: str
    depth: int | str
    times_plain: float
    interval: tuple[float, float]
    why: str


@dataclass(frozen=True, slots=True)
class Tuned:
    """What was measured, the best first; `short` is the short look at everything."""

    model: str
    machine: dict[str, Any]
    tokens: int
    choice: Choice
    results: list[Result]
    short: list[Result]


def tune(
    options: dict[str, Any], plan: DecodePlan, tasks: Sequence[Task], tell: Tell = nothing
) -> Tuned:
    """Measure every draft of the plan at every depth, those that come close to the best again, and
    choose.

    All tasks count as one, each with the time it takes. Takes and raises what `measure_decoding`
    does, and ConfigError for a plan of nothing but plain decoding.
    """
    if set(plan.drafts) <= {OFF}:
        raise ConfigError(
            "there is nothing to choose between: plain decoding is measured anyway, so give --drafts others"
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
        plan.params.max_tokens,
        choose(best),
        best,
        short,
    )


def look_for_layers(options: dict[str, Any], tasks: Sequence[Task], tell: Tell = nothing) -> None:
    """Find the layers of `self:layers=auto` on these prompts, and remember them. Raises as `LLM`
    does."""
    model = options.get("model")
    target = LLM(**options | {"draft": OFF}).engine.target
    find_layers(target, find_model(model), token_ids(model, tasks), tell=tell)


def ranked(results: Sequence[Result]) -> list[Result]:
    """What drafts, fastest first."""
    return sorted((r for r in results if r.draft != OFF), key=lambda r: -r.times_plain)


def choose(results: Sequence[Result]) -> Choice:
    """From results with the fastest first: of those that may be as fast as it, one without weights
    before one with, and automatic depth, which adapts to other texts, before a fixed one."""
    fastest = results[0]
    low, _ = interval(fastest)
    if low <= 1:
        why = f"nothing is surely faster than plain decoding; {named(fastest)} comes closest"
        return Choice(OFF, "auto", 1.0, (1.0, 1.0), why)
    as_fast = [r for r in results if interval(r)[1] >= low and interval(r)[0] > 1]
    best = min(as_fast, key=lambda r: (":" in r.draft, r.depth != "auto"))  # the fastest of those
    why = "it was the fastest"
    if best is not fastest:
        gain = (
            "needs no weights"
            if ":" in fastest.draft and ":" not in best.draft
            else "adapts to other texts"
        )
        why = f"{named(fastest)} was {fastest.times_plain:.2f} times plain, not surely more, and this one {gain}"
    return Choice(best.draft, best.depth, best.times_plain, interval(best), why)


def interval(result: Result) -> tuple[float, float]:
    """Of its ratio to plain decoding; the ratio itself where one round says no more."""
    return result.interval or (result.times_plain, result.times_plain)


def named(result: Result) -> str:
    """How its flags are written."""
    return f"--draft {result.draft} --depth {result.depth}"


def write_choice(
    path: Path, options: dict[str, Any], quantization: str | None, tuned: Tuned
) -> None:
    """A file for `forerun serve --config`: the choice, and the options of the engine that it was
    measured with. Raises ForerunError if it cannot be written."""
    chosen = options | {"draft": tuned.choice.draft, "depth": tuned.choice.depth}
    if quantization:
        chosen["quantization"] = quantization
    low, high = tuned.choice.interval
    lines = [
        f"# forerun tune: {tuned.choice.times_plain:.2f} times plain decoding ({low:.2f} to {high:.2f})"
    ]
    lines += [
        f"{name} = {json.dumps(value)}" for name, value in chosen.items() if value is not None
    ]
    write_atomic(path, "\n".join(lines) + "\n")
