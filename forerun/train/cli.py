"""The verb `forerun train`."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli.flags import Group, Json, with_flags
from forerun.cli.progress import progress
from forerun.errors import ConfigError, Interrupted
from forerun.measure.tables import print_json, print_table
from forerun.train.options import (
    OPTIONS,
    BlockOptions,
    EagleOptions,
    MedusaOptions,
    MultiTokenOptions,
    SmallLMOptions,
    Training,
    options_of,
    recipes_with,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forerun.train.evaluate import Measurements

LOSSES = tuple(f.name for f in fields(MultiTokenOptions))
GROUPS = (
    Group(
        "small_lm",
        SmallLMOptions,
        "Recipe small-lm",
        {"init": str, "layers": int},
        leave_out=(*LOSSES, "draft_vocab"),
    ),
    Group("medusa", MedusaOptions, "Recipe medusa", leave_out=LOSSES),
    Group(
        "eagle",
        EagleOptions,
        "Recipes eagle3 and mtp",
        {"draft_vocab": int, "intermediate": int},
        leave_out=(*LOSSES, "init"),
    ),
    Group(
        "block",
        BlockOptions,
        "Recipe block",
        {"mask_token": int},
        leave_out=(*LOSSES, "draft_vocab"),
    ),
    Group("losses", MultiTokenOptions, "Losses"),
    Group("training", Training, "Training", {"learning_rate": float, "write": int}),
)
TABLE, SHORTLIST = "table", "shortlist"  # made without training
UNTRAINED_SETTINGS = (
    "tokens",
    "prompt_tokens",
    "write",
    "temperature",
    "seed",
    "max_minutes",
    "device",
    "threads",
)


@with_flags(*GROUPS)
def train(
    target: Annotated[
        str | None,
        typer.Option(
            "--target", "--model", "-m", help="The model to draft for. Default: the default model."
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help=f"What to train: {' or '.join(OPTIONS)}; {TABLE} for recycle, or {SHORTLIST} for a"
            " draft model (--draft-vocab tokens). Default: the first that has the given options."
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="A text file, .jsonl (prompt, text or messages on each line), a directory of"
            " source, or library for the running Python's own. Can be repeated. Without it the"
            " target writes texts itself; with --write, in addition."
        ),
    ] = None,
    save_data: Annotated[
        str | None, typer.Option(help="A .jsonl file for the texts that the target writes.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The directory to write; for a shortlist, the file.")
    ] = None,
    resumed: Annotated[
        bool, typer.Option("--resume", help="Continue from the checkpoint of --out.")
    ] = False,
    drafter: Annotated[
        str | None,
        typer.Option(
            "--eval", help="Measure this drafter by task and on held-out --data; train nothing."
        ),
    ] = None,
    as_json: Json = False,
    *,
    training: dict[str, Any],
    **options: dict[str, Any],
) -> None:
    """Train a drafter for a model on texts that the model itself has written, and measure it.

    Without --data the model writes the questions, too.

    Ctrl-C writes a checkpoint beside --out, and --resume continues from it, or from the last
    checkpoint of a killed run, to the same weights as an uninterrupted run. With --max-minutes the
    number of steps depends on the clock, so that no two runs have the same weights."""
    chosen = {name: value for group in options.values() for name, value in group.items()}
    named = {"target": target, "recipe": recipe, "data": data, "save_data": save_data}
    values = named | {"options": chosen, "training": training}
    given = {name: value for name, value in values.items() if value}
    if drafter is not None:
        _evaluate(drafter, given, as_json, out is not None or resumed)
        return
    if out is None:
        raise ConfigError("there is no --out: give the directory to write")
    if recipe in (TABLE, SHORTLIST):
        size = chosen.pop("draft_vocab", None) if recipe == SHORTLIST else None
        if chosen or save_data or resumed:
            own = "no options of its own" if recipe == TABLE else "draft_vocab alone"
            raise ConfigError(
                f"recipe {recipe} has {own}, and nothing to resume or to save: leave out all else"
            )
        unused = [f"--{n.replace('_', '-')}" for n in training if n not in UNTRAINED_SETTINGS]
        if unused:
            raise ConfigError(
                f"recipe {recipe} is made without training: leave out {' and '.join(unused)}"
            )
        settings = Training(**training)
        if recipe == TABLE:
            _make_table(target, data or (), settings, out, as_json)
        else:
            _make_shortlist(target, data or (), size, settings, out, as_json)
        return
    Training(**training)  # errors are cheaper to find before torch is imported
    if recipe or not resumed:
        options_of(recipe or recipes_with(chosen)[0], chosen)
    _train(given, out, resumed, as_json)


def _train(given: dict[str, Any], out: Path, resumed: bool, as_json: bool) -> None:
    from forerun.train import run
    from forerun.train.loop import checkpoint_path
    from forerun.train.speed import PLACEHOLDER

    try:
        with progress(as_json, measuring=True) as tell:
            report = run.resume(given, out, tell) if resumed else run.train(given, out, tell)
    except KeyboardInterrupt as interruption:
        path = checkpoint_path(out)
        if not path.exists():
            raise
        what = f"{interruption}, and " if str(interruption) else ""
        raise Interrupted(
            f"{what}kept in {path}; continue with: forerun train --resume --out {out}"
        ) from None
    if as_json:
        print_json({"directory": str(out), **report.as_dict()})
        return
    measurements = report.measurements
    _print(measurements)
    first = report.record.evaluations[0]
    best = report.record.best or first
    print(
        f"{out}: {report.parameters / 1e6:.1f}M parameters after {best.step} of"
        f" {report.record.step} steps; accepted length {best.accepted_length:.2f},"
        f" {first.accepted_length:.2f} before"
    )
    print(report.advice(str(out)))
    comparison = measurements.speed and measurements.speed.comparison
    if comparison and comparison.is_better:
        draft = comparison.draft.replace(PLACEHOLDER, str(out))
        print(f"next: forerun generate ...{_model_flag(report.target)} --draft {draft}")


def _model_flag(target: str | None) -> str:
    return f" --model {target}" if target else ""


def _make_table(
    target: str | None, data: Sequence[str], training: Training, out: Path, as_json: bool
) -> None:
    from forerun.train.run import make_table

    with progress(as_json) as tell:
        summary = make_table(target, data, training, out, tell)
    if as_json:
        print_json({"directory": str(out), **asdict(summary)})
        return
    print(
        f"{out}: {summary.entries:,} entries from {summary.positions:,} positions of"
        f" {summary.texts} texts in {summary.seconds:.0f} s\n"
        f"next: forerun generate ...{_model_flag(target)} --draft suffix+recycle:{out}"
    )


def _make_shortlist(
    target: str | None,
    data: Sequence[str],
    size: int | None,
    training: Training,
    out: Path,
    as_json: bool,
) -> None:
    EagleOptions(draft_vocab=size)  # errors are cheaper to find before torch is imported
    from forerun.train.run import make_shortlist

    with progress(as_json) as tell:
        summary = make_shortlist(target, data, size, training, out, tell)
    if as_json:
        print_json({"file": str(out), **asdict(summary)})
        return
    print(
        f"{out}: {summary.tokens:,} of {summary.vocab:,} tokens, {100 * summary.covered:.2f} % of"
        f" the {summary.counted:,} counted ones, in {summary.seconds:.0f} s\n"
        f"next: forerun generate ... --draft model:DRAFT_MODEL --draft-shortlist {out}"
    )


def _evaluate(drafter: str, given: dict[str, Any], as_json: bool, trains: bool) -> None:
    """Measure an existing drafter."""
    if trains or given.keys() & {"options", "recipe", "save_data"}:
        raise ConfigError(
            "--eval trains nothing: leave out --out, --resume, --save-data, --recipe and the"
            " recipe's options"
        )
    training = Training(**given.get("training", {}))
    from forerun.train.export import advice
    from forerun.train.run import measure

    data = tuple(given.get("data", ()))
    with progress(as_json, measuring=True) as tell:
        measurements = measure(given.get("target"), drafter, data, training, tell)
    remedy = "More training may help: more minutes, more texts."
    text = advice(measurements, drafter, given.get("target"), remedy)
    if as_json:
        print_json({"drafter": drafter, **measurements.as_dict(), "advice": text})
        return
    _print(measurements)
    print(text)


def _print(measurements: Measurements) -> None:
    """Print accepted lengths and speeds, and notes about omitted prompts and measurements."""
    from forerun.train.export import omissions

    print_table(
        ("task", "temperature", "depth", "accepted length", "expected", "passes"),
        [
            (
                result.task,
                f"{result.temperature:g}",
                str(result.depth),
                f"{result.accepted_length:.3f}",
                f"{result.expected:.3f}",
                str(result.passes),
            )
            for result in measurements.measured
        ],
    )
    for line in omissions(measurements):
        print(line)
    speed = measurements.speed
    if speed is None:
        return
    print_table(
        ("draft", "tokens/s", "times plain", "accepted length", "text"),
        [
            (
                result.draft,
                f"{result.tokens_per_second:.1f}",
                f"{result.times_plain:.2f}",
                f"{result.accepted_length:.2f}",
                "same" if result.same_text else "DIFFERENT",
            )
            for result in speed.results
        ],
    )
    print(
        f"{speed.task} texts: {speed.tokens} tokens after each of {speed.prompts} prompts,"
        f" temperature 0; medians, number of rounds: {speed.rounds}"
    )
