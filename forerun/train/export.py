"""A trained drafter as an ordinary Hugging Face directory, with a card that says where it comes from.

Whole or not at all: everything is written, loaded by the engine and measured in a directory beside the one asked for,
which is renamed at the end.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from forerun import __version__
from forerun.bench.whole import whole_directory
from forerun.errors import ConfigError, ForerunError
from forerun.train.capture import Target
from forerun.train.data import Source
from forerun.train.evaluate import Evaluation, Judge, Measured
from forerun.train.loop import Record
from forerun.train.recipes import Recipe
from forerun.train.settings import Training
from forerun.train.watch import Watch

TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Facts:
    """What a card says of a run besides its results.

    Attributes:
        target: the model drafted for.
        recipe: its name and options.
        settings: of the run.
        sources: the paths of the data.
        documents: trained on, and held out.
        digest: a hash of all documents.
    """

    target: str
    recipe: dict[str, Any]
    settings: Training
    sources: Sequence[Source]
    documents: tuple[int, int]
    digest: str


@dataclass(frozen=True, slots=True)
class Report:
    """A run that has ended: what it was, what came of it."""

    facts: Facts
    record: Record
    parameters: int
    measured: Sequence[Measured]
    draft: str

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as in training.json."""
        best = self.record.best
        return {
            "forerun": __version__,
            "target": self.facts.target,
            "recipe": self.facts.recipe,
            "training": asdict(self.facts.settings),
            "data": {
                "sources": [asdict(source) for source in self.facts.sources],
                "documents": self.facts.documents[0],
                "held_out": self.facts.documents[1],
                "sha256": self.facts.digest,
            },
            "parameters": self.parameters,
            "steps": self.record.step,
            "losses": self.record.losses,
            "evaluations": [asdict(evaluation) for evaluation in self.record.evaluations],
            "best": None if best is None else asdict(best),
            "measured": [entry.as_dict() for entry in self.measured],
        }


def check_out(out: Path) -> None:
    """Raise ConfigError now for a directory that could not be made after an hour of training."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already, and not empty: give another directory, or remove it")
    parent = out.absolute().parent
    if not parent.is_dir():
        raise ConfigError(f"{out} cannot be made: there is no directory {parent}")


def export(
    out: Path, recipe: Recipe, module: nn.Module, target: Target, judge: Judge, facts: Facts, record: Record,
    watch: Watch,
) -> Report:  # fmt: skip
    """Write the drafter, measure what was written, give it its name. Raises ForerunError if it cannot be written."""
    try:
        with whole_directory(out) as work:
            recipe.export(module, target, work)
            for name in TOKENIZER:
                if (target.directory / name).is_file():
                    shutil.copyfile(target.directory / name, work / name)
            measured = judge.measure(module, work, watch.tell)
            report = Report(facts, record, sum(p.numel() for p in module.parameters()), measured, recipe.draft)
            (work / "training.json").write_text(json.dumps(report.as_dict(), indent=1))
            (work / "README.md").write_text(card(report), encoding="utf-8")
            for path in work.glob("*.safetensors"):
                shutil.copymode(work / "README.md", path)  # they come readable by their owner only
    except OSError as error:
        raise ForerunError(
            f"the drafter cannot be written to {out} ({error.strerror or error}): the checkpoint is kept, make room and"
            " go on with --resume"
        ) from None
    return report


def card(report: Report) -> str:
    """The README.md of a drafter."""
    facts, best, first = report.facts, report.record.best, report.record.evaluations[0]
    settings = facts.settings
    lines = [
        f"# Drafter for {facts.target}",
        "",
        f"{report.parameters:,} parameters, made by `forerun train --recipe {facts.recipe['name']}` (forerun"
        f" {__version__}). Use it with `forerun generate --draft {report.draft}:DIRECTORY`: it changes how soon the"
        " target's tokens come, never which.",
        "",
        "## Accepted length",
        "",
        "Tokens a target pass, the target's own included, on held-out prompts continued by the target, verified by"
        " rule token. *Measured* is what the engine counted; *analytic* is what is expected along the same texts when"
        " token x is accepted with the chance min(1, q(x) / p(x)) and rounds begin where the one before has ended.",
        "",
        "| temperature | depth | measured | analytic | passes |",
        "|---|---|---|---|---|",
        *(
            f"| {m.temperature:g} | {m.depth} | {m.accepted_length:.3f} | {m.analytic:.3f} | {m.passes} |"
            for m in report.measured
        ),
        "",
        f"By steps, at depth {settings.depth} and temperature {settings.temperature:g} (*from any*: the mean over all"
        " tokens of 1 + sum over k of prod over j <= k of (1 - TV), as if a draft began at each):",
        "",
        "| steps | accepted length | from any | overlap (1 - TV) | perplexity |",
        "|---|---|---|---|---|",
        *(_row(evaluation) for evaluation in dict.fromkeys((first, best)) if evaluation is not None),
        "",
        "## How it was made",
        "",
        f"- Recipe: {json.dumps(facts.recipe)}",
        f"- Training: {json.dumps(asdict(settings))}; {report.record.step} steps were done.",
        f"- Data: {facts.documents[0]} documents to train on, {facts.documents[1]} held out by the hash of their text,"
        f" SHA-256 {facts.digest}",
        *(
            f"  - {source.name}: {source.documents} documents, {source.repeated} repeated, {source.unreadable} left out"
            for source in facts.sources
        ),
        f"- Of the texts, a share of {settings.on_policy:g} was continued by the target itself, at temperature"
        f" {settings.temperature:g}.",
    ]
    return "\n".join(lines) + "\n"


def _row(e: Evaluation) -> str:
    return f"| {e.step} | {e.accepted_length:.3f} | {e.from_any:.3f} | {e.overlap:.3f} | {e.perplexity:.2f} |"
