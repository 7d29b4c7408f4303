"""All that is measured of a drafter that was written: accepted length by task, and speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from forerun.bench.report import Tell, nothing
from forerun.train.evaluate import Judge, Measured
from forerun.train.speed import Speed, measure_speed


@dataclass(frozen=True, slots=True)
class Findings:
    """What was measured.

    Attributes:
        measured: by task, temperature and depth; held-out texts first.
        left_out: {task: prompts that were too long}, of tasks that have any.
        speed: None where there are no held-out texts, or where it was not wanted.
    """

    measured: Sequence[Measured]
    left_out: dict[str, int]
    speed: Speed | None

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "measured": [entry.as_dict() for entry in self.measured],
            "left_out": self.left_out,
            "speed": None if self.speed is None else self.speed.as_dict(),
        }


def find(judge: Judge, module: nn.Module, directory: Path, tell: Tell = nothing) -> Findings:
    """Measure what is in `directory`; `module` is what should be there."""
    speed = None
    measured = judge.measure(module, directory, tell)
    if judge.held_out is not None and judge.settings.speed_rounds:
        speed = measure_speed(judge.target, judge.recipe, directory, judge.held_out, judge.settings, tell)
    return Findings(measured, {prompts.task: prompts.left_out for prompts in judge.sets if prompts.left_out}, speed)
