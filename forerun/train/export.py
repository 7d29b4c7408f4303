"""Write a trained drafter as a Hugging Face directory, with training.json and a card.

Everything is written, loaded by the engine and measured in a temporary directory beside the
requested one, which is renamed at the end: the result is complete or absent.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn

from forerun import __version__
from forerun.cli.progress import Tell
from forerun.errors import ConfigError, ForerunError
from forerun.models.gguf.export import write_tokenizer
from forerun.models.hub import DEFAULT
from forerun.train.evaluate import (
    Evaluator,
    Measurements,
    TaskResult,
    measure_drafter,
)
from forerun.train.loop import TrainingRecord
from forerun.train.options import Training, depths_up_to
from forerun.train.speed import PLACEHOLDER
from forerun.train.time_limit import TimeLimit
from forerun.utils import atomic_directory

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


@dataclass(frozen=True, slots=True)
class Report:
    """A finished run.

    Attributes:
        target: the model drafted for; None is the default model.
        base_model: a name of the target that finds it from anywhere.
        license: of the target, as the Hub writes it; "" if unknown.
        recipe: its name and options.
        draft: what --draft calls the drafter.
        data: counts of documents, and their hash.
        parameters: number of weights of the drafter.
    """

    target: str | None
    base_model: str
    license: str
    recipe: dict[str, Any]
    draft: str
    settings: Training
    data: dict[str, Any]
    record: TrainingRecord
    parameters: int
    measurements: Measurements

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, as training.json contains them."""
        record = self.record
        return {
            "forerun": __version__,
            "target": self.target or DEFAULT,
            "recipe": self.recipe,
            "training": asdict(self.settings),
            "data": self.data,
            "parameters": self.parameters,
            "steps": record.step,
            "losses": record.losses,
            "evaluations": [asdict(evaluation) for evaluation in record.evaluations],
            "best": None if record.best is None else asdict(record.best),
            **self.measurements.as_dict(),
            "advice": self.advice(PLACEHOLDER),
        }

    def advice(self, directory: str) -> str:
        """Return the advice for the drafter in `directory`: to use it, or a remedy."""
        settings, steps = self.settings, self.record.step
        finished = steps >= settings.steps or self.record.out_of_patience(settings.patience)
        remedy = (
            f"It was trained for {steps} steps: more texts (--data, --write) and more --steps"
            " may help."
        )
        if settings.max_minutes and not finished:
            remedy = (
                f"It was trained for {steps} steps, as many as fit into {settings.max_minutes:g}"
                " minutes: give more --max-minutes, or an idle machine."
            )
        return advice(self.measurements, directory, self.target, remedy)


def check_out(out: Path) -> None:
    """Raise ConfigError now for a directory that could not be made after an hour of training."""
    if out.is_symlink():
        raise ConfigError(
            f"{out} is a link, which cannot be replaced by a directory: give its target instead"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(
            f"{out} is there already, and not empty: give another directory, or remove it"
        )
    parent = out.absolute().parent
    if not parent.is_dir():
        raise ConfigError(f"{out} cannot be made: there is no directory {parent}")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{out} cannot be made: {parent} cannot be written to")


def export(
    out: Path,
    module: nn.Module,
    evaluator: Evaluator,
    report_of: Callable[[Measurements], Report],
    limit: TimeLimit,
    tell: Tell,
) -> Report:
    """Write the drafter, measure what was written as far as the time limit allows, and add the
    report that `report_of` makes of it. Raises ForerunError if it cannot be written."""
    recipe, target = evaluator.recipe, evaluator.target
    try:
        with atomic_directory(out) as work:
            recipe.export(module, target, work)
            _copy_tokenizer(target.path, work)
            report = report_of(measure_drafter(evaluator, module, work, limit, tell))
            (work / "training.json").write_text(json.dumps(report.as_dict(), indent=1))
            (work / "README.md").write_text(card(report), encoding="utf-8")
            for path in work.glob("*.safetensors"):  # written readable by their owner only
                shutil.copymode(work / "README.md", path)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise ForerunError(
            f"the drafter cannot be written to {out} ({why}): the checkpoint is kept, make room and"
            " continue with --resume"
        ) from None
    return report


def _copy_tokenizer(target: Path, work: Path) -> None:
    """Add the target's tokenizer, so that the drafter can be read alone and its vocabulary can be
    checked."""
    if target.is_file():
        write_tokenizer(target, work)
        return
    for name in TOKENIZER_FILES:
        if (target / name).is_file():
            shutil.copyfile(target / name, work / name)


def card(report: Report) -> str:
    """Return the text of the drafter's README.md, whose metadata the Hub and `forerun drafters`
    read."""
    import yaml

    best, data = report.record.best, report.data
    metadata: dict[str, Any] = {"base_model": report.base_model, "library_name": "forerun"}
    if report.license:
        metadata["license"] = report.license
    metadata["tags"] = ["speculative-decoding", "draft-model", "forerun", report.draft]
    lines = [
        f"---\n{yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)}---",
        "",
        f"# Drafter for {report.target or DEFAULT}",
        "",
        f"A drafter of {report.parameters:,} parameters for"
        f" `forerun generate --draft {report.draft}:{PLACEHOLDER}`, made by `forerun train --recipe"
        f" {report.recipe['name']}` (forerun {__version__}) in {report.record.step} steps"
        + (f", with the weights of step {best.step}" if best else "")
        + f" on {data['documents']} documents; {data['held_out']} were held out. It changes how"
        " fast the target's tokens come, never which. All settings and results are in"
        " training.json.",
        "",
        report.advice(PLACEHOLDER),
        "",
        "Accepted length, the tokens per target pass, as the engine measured it under rule token,"
        " and in brackets as the drafter's module predicts it along the same texts. To measure it"
        f" again, add your --data: `{command(report.target)}`",
        "",
        *table(report.measurements.measured, depths_up_to(report.settings.depth)),
        *(f"\n{line}." for line in omissions(report.measurements)),
    ]
    return "\n".join(lines) + "\n"


def omissions(measurements: Measurements) -> Iterator[str]:
    """List the omitted prompts and the measurements that the time limit prevented."""
    for task, count in measurements.left_out.items():
        yield f"{task}: {count} prompts were too long and are left out"
    if measurements.not_measured:
        yield f"Not measured for lack of time: {', '.join(measurements.not_measured)}"


def table(measured: Sequence[TaskResult], depths: Sequence[int]) -> list[str]:
    """Return a Markdown table with a row for each task and temperature and a column for each
    depth."""
    rows: dict[tuple[str, float], dict[int, str]] = {}
    for result in measured:
        text = f"{result.accepted_length:.3f} ({result.expected:.3f})"
        rows.setdefault((result.task, result.temperature), {})[result.depth] = text
    return [
        f"| task | temperature |{''.join(f' depth {depth} |' for depth in depths)}",
        "|---|---|" + "---|" * len(depths),
        *(
            f"| {task} | {temperature:g} |"
            + "".join(f" {cells.get(depth, '')} |" for depth in depths)
            for (task, temperature), cells in rows.items()
        ),
    ]


def advice(measurements: Measurements, directory: str, target: str | None, remedy: str) -> str:
    """Return the advice for the drafter in `directory`: to use it, or `remedy`."""
    again = command(target, directory)
    if measurements.speed is None:
        return (
            "It was not compared with what --draft auto selects, so nothing says that it is worth"
            f" using. To compare them: {again}"
        )
    comparison = measurements.speed.comparison
    if comparison is None:
        return "It is what --draft auto selects already."
    draft = comparison.draft.replace(PLACEHOLDER, directory)
    if comparison.is_better:
        return f"Use it: --draft {draft} has {comparison}."
    if not comparison.is_worse:
        return (
            f"Whether to use it is open: --draft {draft} has {comparison}. Leave --draft as it is"
            f" until more rounds tell: {again} --speed-rounds 20"
        )
    return f"Do not use it as it is: --draft {draft} has {comparison}. {remedy}"


def command(target: str | None, directory: str = PLACEHOLDER) -> str:
    """Return the command that measures a drafter again."""
    words = ["forerun", "train", "--eval", directory]
    if target:
        words += ["--target", target]
    return shlex.join(words)
