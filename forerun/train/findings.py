"""All that is measured of a drafter that was written: accepted length by task, and speed.

What matters most comes first, so that a run whose time is short does without the rest: held-out
texts at the depth that was chosen, the speed, all tasks at that depth, and then the other depths.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from forerun.cli.progress import Tell, nothing
from forerun.train.deadline import Deadline
from forerun.train.evaluate import Case, Judge, Measured
from forerun.train.speed import MOST_PROMPTS, Speed, measure_speed
from forerun.train.tasks import Prompts


@dataclass(frozen=True, slots=True)
class Findings:
    """What was measured.

    Attributes:
        measured: by task, temperature and depth; held-out texts first.
        left_out: {task: prompts that were too long}, of tasks that have any.
        speed: on held-out texts, or on the tasks where there are none; None where it was not
            wanted.
        no_time: what the time did not suffice for, in words.
    """

    measured: Sequence[Measured]
    left_out: dict[str, int]
    speed: Speed | None
    no_time: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"speed": None if self.speed is None else self.speed.as_dict()}


def find(
    judge: Judge,
    module: nn.Module,
    directory: Path,
    deadline: Deadline,
    tell: Tell = nothing,
    expected: float = 0.0,
) -> Findings:
    """Measure what is in `directory`, as much as there is time for; `module` is what should be
    there. `expected` are the seconds that the first figure may take."""
    cases, rounds = judge.cases, judge.settings.speed_rounds
    order = sorted(cases, key=lambda case: case.depth != judge.settings.depth)
    figures = _Paced(judge.measure(module, directory, order, tell, deadline), deadline, expected)
    measured = figures.take(sum(case.prompts is judge.held_out for case in order[:2]))
    speed = (
        _speed(judge, directory, deadline, tell)
        if rounds and deadline.has(figures.expected)
        else None
    )
    measured += figures.take(len(order) - len(measured))
    found = dict(zip(order, measured, strict=False))
    return Findings(
        [found[case] for case in cases if case in found],
        {prompts.task: prompts.left_out for prompts in judge.sets if prompts.left_out},
        speed,
        (*_missing(cases, found), *_missing_rounds(rounds, speed)),
    )


class _Paced:
    """Figures, as long as there is time for one that takes as long as the longest before it, the
    first as expected."""

    def __init__(self, figures: Iterator[Measured], deadline: Deadline, first: float) -> None:
        self.figures, self.deadline, self.first, self.longest = figures, deadline, first, 0.0

    @property
    def expected(self) -> float:
        """Seconds that the next one may take."""
        return self.longest or self.first

    def take(self, count: int) -> list[Measured]:
        """The next so many, or fewer."""
        taken: list[Measured] = []
        while len(taken) < count and self.deadline.has(self.expected):
            began = self.deadline.seconds
            figure = next(self.figures, None)
            if figure is None:  # it took longer than expected, and was not awaited
                break
            taken.append(figure)
            self.longest = max(self.longest, self.deadline.seconds - began)
        return taken


def _speed(judge: Judge, directory: Path, deadline: Deadline, tell: Tell) -> Speed | None:
    """None where the time is too short for a round. Those behind the first leave half of the time
    to the tasks."""
    half = deadline.left / 2
    prompts = judge.held_out or _of_each(judge.sets)

    def fits(seconds: float, done: int) -> bool:
        return deadline.has(seconds + (half if done else 0.0))

    return measure_speed(judge.target, judge.recipe, directory, prompts, judge.settings, tell, fits)


def _of_each(sets: Sequence[Prompts]) -> Prompts:
    """The first prompt of each task, of as many tasks as the speed is measured on."""
    firsts = [prompts.openings[0] for prompts in sets if prompts.openings]
    return Prompts("tasks", tuple(firsts[:MOST_PROMPTS]), 0)


def _missing(cases: Sequence[Case], found: Mapping[Case, Measured]) -> Iterator[str]:
    """In words: the tasks that have no figure, and how many figures the others lack."""
    begun = {case.prompts.task for case in found}
    missing = [case.prompts.task for case in cases if case not in found]
    yield from dict.fromkeys(task for task in missing if task not in begun)
    if further := sum(task in begun for task in missing):
        yield f"{further} accepted lengths of other tasks"


def _missing_rounds(wanted: int, speed: Speed | None) -> Iterator[str]:
    if wanted and speed is None:
        yield "the speed"
    elif speed is not None and speed.rounds < wanted:
        yield f"{wanted - speed.rounds} of {wanted} rounds of speed"
