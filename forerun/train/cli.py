"""The verb `forerun train`."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli.flags import Group, with_flags
from forerun.cli.progress import progress
from forerun.errors import ConfigError, Interrupted
from forerun.measure.tables import print_json, print_table
from forerun.train.options import (
    OPTIONS,
    AheadOptions,
    BlockOptions,
    EagleOptions,
    MedusaOptions,
    SmallLMOptions,
    options_of,
    recipes_with,
)  # fmt: skip
from forerun.train.settings import Training

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forerun.train.evaluate import Measured
    from forerun.train.findings import Findings
    from forerun.train.speed import Speed

TRAINING = Group("training", Training, "Training", {"learning_rate": float, "write": int})
LOSSES = Group("losses", AheadOptions, "Losses")
COMMON = tuple(f.name for f in fields(AheadOptions))
RECIPES = (
    Group(
        "small_lm",
        SmallLMOptions,
        "Recipe small-lm",
        {"init": str, "layers": int},
        (*COMMON, "draft_vocab"),
    ),
    Group("medusa", MedusaOptions, "Recipe medusa", leave_out=COMMON),
    Group(
        "pairs",
        EagleOptions,
        "Recipes eagle3 and mtp",
        {"draft_vocab": int, "intermediate": int},
        (*COMMON, "init"),
    ),
    Group("block", BlockOptions, "Recipe block", {"mask_token": int}, (*COMMON, "draft_vocab")),
)
TABLE, SHORTLIST = "table", "shortlist"  # which are no recipes of drafters
OF_LISTS = (
    "tokens",
    "prompt_tokens",
    "write",
    "temperature",
    "seed",
    "max_minutes",
    "device",
    "threads",
)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@with_flags(*RECIPES, LOSSES, TRAINING)
def train(
    target: Annotated[
        str | None,
        typer.Option(
            "--target", "--model", "-m", help="The model to draft for; without it, the default one."
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help=f"What to train: {' or '.join(OPTIONS)}, or {TABLE} for recycle, or {SHORTLIST} for a draft model"
            " (--draft-vocab tokens); else the first that has the options given."
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="A text file, .jsonl (prompt, text or messages on each line), a directory of source, or library: the"
            " running Python's own. May be repeated. Without it the target writes texts itself; with --write, as well."
        ),
    ] = None,
    save_data: Annotated[
        str | None,
        typer.Option(help="A .jsonl file for what the target wrote, which --data reads."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The directory to make; of a shortlist, the file.")
    ] = None,
    go_on: Annotated[
        bool, typer.Option("--resume", help="Go on from the checkpoint of --out.")
    ] = False,
    drafter: Annotated[
        str | None,
        typer.Option(
            "--eval", help="Train nothing: measure this drafter by task, and on held-out --data."
        ),
    ] = None,
    as_json: Json = False,
    *,
    training: dict[str, Any],
    **options: dict[str, Any],
) -> None:
    """Train a drafter for a model, on text that the model itself has written, and measure it.

    Without --data the model writes the questions too.

    Ctrl-C writes a checkpoint beside --out; --resume goes on from it, or from the last one of a run
    that was killed, to the same weights as a run without a break. With --max-minutes the clock
    decides how many steps there are and when the learning rate falls, so that no two runs have the
    same weights, nor has one that goes on."""
    chosen = {name: value for group in options.values() for name, value in group.items()}
    said = {"target": target, "recipe": recipe, "data": data, "save_data": save_data}
    given = {
        name: value
        for name, value in (said | {"options": chosen, "training": training}).items()
        if value
    }
    if drafter is not None:
        _evaluate(drafter, given, as_json, out is not None or go_on)
        return
    if out is None:
        raise ConfigError("there is no --out: give the directory to make")
    if recipe in (TABLE, SHORTLIST):
        size = chosen.pop("draft_vocab", None) if recipe == SHORTLIST else None
        if chosen or save_data or go_on:
            own = "no options of its own" if recipe == TABLE else "draft_vocab alone"
            raise ConfigError(
                f"recipe {recipe} has {own}, and nothing to resume or to save: leave out all else"
            )
        if unused := [f"--{name.replace('_', '-')}" for name in training if name not in OF_LISTS]:
            raise ConfigError(
                f"recipe {recipe} is written down, not trained: leave out {' and '.join(unused)}"
            )
        if recipe == TABLE:
            _make_table(target, data or (), Training(**training), out, as_json)
        else:
            _make_shortlist(target, data or (), size, Training(**training), out, as_json)
        return
    Training(**training)  # what is wrong is cheaper to find before torch is imported
    if recipe or not go_on:  # a run that goes on has its own
        options_of(recipe or recipes_with(chosen)[0], chosen)
    from forerun.train import run
    from forerun.train.checkpoint import checkpoint_path
    from forerun.train.report import advice
    from forerun.train.speed import PLACE

    try:
        with progress(as_json, measuring=True) as tell:
            report = run.resume(given, out, tell) if go_on else run.train(given, out, tell)
    except KeyboardInterrupt as interruption:
        path = checkpoint_path(out)
        if not path.exists():
            raise
        what = f"{interruption}, and " if str(interruption) else ""
        raise Interrupted(
            f"{what}kept in {path}; go on with: forerun train --resume --out {out}"
        ) from None
    if as_json:
        print_json({"directory": str(out), **report.as_dict()})
        return
    _print(report.findings)
    first, best = report.record.evaluations[0], report.record.best or report.record.evaluations[0]
    print(
        f"{out}: {report.parameters / 1e6:.1f}M parameters after {best.step} of {report.record.step} steps; accepted"
        f" length {best.accepted_length:.2f}, {first.accepted_length:.2f} before"
    )
    print(advice(report.findings, str(out), report))
    comparison = report.findings.speed and report.findings.speed.comparison
    if comparison and comparison.better:
        draft, named = comparison.draft.replace(PLACE, str(out)), report.facts.target
        print(f"next: forerun generate ... {f'--model {named} ' if named else ''}--draft {draft}")


def _make_table(
    target: str | None, data: Sequence[str], training: Training, out: Path, as_json: bool
) -> None:
    """What the target thinks while it writes, for `recycle`."""
    from forerun.train.table import make_table

    with progress(as_json) as tell:
        made = make_table(target, data, training, out, tell)
    if as_json:
        print_json({"directory": str(out), **asdict(made)})
        return
    print(
        f"{out}: {made.laws:,} laws, from {made.learnt:,} of {made.texts} texts in {made.seconds:.0f} s\n"
        f"next: forerun generate ... {f'--model {target} ' if target else ''}--draft suffix+recycle:{out}"
    )


def _make_shortlist(
    target: str | None,
    data: Sequence[str],
    size: int | None,
    training: Training,
    out: Path,
    as_json: bool,
) -> None:
    """The tokens that a draft model scores."""
    EagleOptions(draft_vocab=size)  # what is wrong is cheaper to find before torch is imported
    from forerun.train.shortlist import make_shortlist

    with progress(as_json) as tell:
        made = make_shortlist(target, data, size, training, out, tell)
    if as_json:
        print_json({"file": str(out), **asdict(made)})
        return
    print(
        f"{out}: {made.tokens:,} of {made.vocab:,} tokens, {100 * made.covered:.2f} % of the {made.counted:,} that were"
        f" counted, in {made.seconds:.0f} s\n"
        f"next: forerun generate ... --draft model:DRAFT_MODEL --draft-shortlist {out}"
    )


def _evaluate(drafter: str, given: dict[str, Any], as_json: bool, trains: bool) -> None:
    """Measure a drafter that is there."""
    if trains or given.keys() & {"options", "recipe", "save_data"}:
        raise ConfigError(
            "--eval trains nothing: leave out --out, --resume, --save-data, --recipe and the recipe's options"
        )
    training = Training(**given.get("training", {}))
    from forerun.train.run import measure

    with progress(as_json, measuring=True) as tell:
        findings = measure(
            given.get("target"), drafter, tuple(given.get("data", ())), training, tell
        )
    from forerun.train.report import advice

    said = advice(findings, drafter)
    if as_json:
        print_json({"drafter": drafter, **findings.as_dict(), "advice": said})
        return
    _print(findings)
    print(said)


def _print(findings: Findings) -> None:
    """The tables, and what they leave out."""
    _print_lengths(findings.measured)
    if findings.left_out:
        counts = ", ".join(f"{task} {count}" for task, count in findings.left_out.items())
        print(f"left out, since they are too long: {counts}")
    if findings.no_time:
        print(f"not measured, for want of time: {', '.join(findings.no_time)}")
    if findings.speed is not None:
        _print_speed(findings.speed)


def _print_lengths(measured: Sequence[Measured]) -> None:
    """Accepted lengths, measured and analytic, and by where in the output a draft began."""
    spans = sorted({at for entry in measured for at in entry.by_position})
    print_table(
        ("task", "temperature", "depth", "accepted length", "analytic", "passes", *(f"from {at}" for at in spans)),
        [
            (
                entry.task, f"{entry.temperature:g}", str(entry.depth), f"{entry.accepted_length:.3f}",
                f"{entry.analytic:.3f}", str(entry.passes),
                *(f"{entry.by_position[at]:.2f}" if at in entry.by_position else "" for at in spans),
            )
            for entry in measured
        ],
    )  # fmt: skip


def _print_speed(speed: Speed) -> None:
    """Each way to decode beside plain decoding."""
    print_table(
        ("", "tokens/s", "times plain (95 %)", "accepted length", "text"),
        [
            (
                pace.label, f"{pace.tokens_per_second:.1f}", pace.ratio, f"{pace.accepted_length:.2f}",
                "same" if pace.same else "DIFFERENT",
            )
            for pace in speed.paces
        ],
    )  # fmt: skip
    print(
        f"{speed.task} texts, {speed.tokens} tokens behind each of {speed.prompts} prompts, temperature 0; medians of"
        f" {speed.rounds} round{'s' * (speed.rounds > 1)}; the best fixed depth is {speed.best_depth}"
    )
