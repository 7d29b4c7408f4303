"""A trained drafter as an ordinary Hugging Face directory, with a card that says where it comes
from.

Whole or not at all: everything is written, loaded by the engine and measured in a directory beside
the one asked for, which is renamed at the end.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from safetensors import SafetensorError
from torch import nn

from forerun.cli.progress import Tell
from forerun.errors import ConfigError, ForerunError
from forerun.models.gguf.export import write_tokenizer
from forerun.train.deadline import Deadline
from forerun.train.evaluate import FIGURE, Judge
from forerun.train.findings import find
from forerun.train.loop import Record
from forerun.train.report import Facts, Report, card
from forerun.utils import atomic_directory

TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja",
)  # fmt: skip


def check_out(out: Path) -> None:
    """Raise ConfigError now for a directory that could not be made after an hour of training."""
    if out.is_symlink():
        raise ConfigError(
            f"{out} is a link, which cannot be replaced by a directory: give the place itself"
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
    judge: Judge,
    facts: Facts,
    record: Record,
    deadline: Deadline,
    tell: Tell,
) -> Report:
    """Write the drafter, measure what was written as far as there is time, give it its name. Raises
    ForerunError if it cannot be written."""
    try:
        with atomic_directory(out) as work:
            judge.recipe.export(module, judge.target, work)
            _add_tokenizer(judge.target.path, work)
            findings = find(judge, module, work, deadline, tell, FIGURE * record.slowest)
            report = Report(
                facts,
                record,
                sum(p.numel() for p in module.parameters()),
                findings,
                judge.recipe.draft,
            )
            (work / "training.json").write_text(json.dumps(report.as_dict(), indent=1))
            (work / "README.md").write_text(card(report), encoding="utf-8")
            for path in work.glob("*.safetensors"):
                shutil.copymode(work / "README.md", path)  # they come readable by their owner only
    except (OSError, SafetensorError) as error:
        raise ForerunError(
            f"the drafter cannot be written to {out} ({getattr(error, 'strerror', None) or error}): the checkpoint is"
            " kept, make room and go on with --resume"
        ) from None
    return report


def _add_tokenizer(target: Path, work: Path) -> None:
    """The target's own, so that what is written is read by itself, and known to be of the same
    vocabulary."""
    if target.is_file():
        write_tokenizer(target, work)
        return
    for name in TOKENIZER:
        if (target / name).is_file():
            shutil.copyfile(target / name, work / name)
