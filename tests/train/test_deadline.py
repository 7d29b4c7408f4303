"""A run has ended when its time has: what matters most is measured first, and what is not is
said."""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from forerun.cli.progress import nothing
from forerun.train import findings
from forerun.train.deadline import Deadline
from forerun.train.evaluate import Case, Judge, Measured
from forerun.train.findings import Findings, find
from forerun.train.settings import Training
from forerun.train.speed import Pace, Speed
from forerun.train.tasks import Opening, Prompts
from tests.train.conftest import SMALL, Clock

FIGURE, WARM_UP, ROUND = 10, 20, 80  # seconds that each takes here
SETTINGS = Training(**(SMALL | {"depth": 2, "speed_rounds": 3}))
PACES = (Pace(0, 1.0, 1.0, None, 1.0, True),) * 3
SETS = [Prompts(task, (Opening((1, 2), 9),), 0) for task in ("held-out", "edit", "chat")]
IMPORTANT = [(task, t, 2) for task in ("held-out", "edit", "chat") for t in (0.0, 0.8)]
ALL = [(task, t, d) for task in ("held-out", "edit", "chat") for t in (0.0, 0.8) for d in (1, 2)]


class Timed(Judge):
    """A judge of three tasks for whom each figure takes as long."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.settings, self.sets, self.held_out = clock, SETTINGS, SETS, SETS[0]
        self.target = self.recipe = None  # type: ignore[assignment]

    def measure(
        self,
        module: nn.Module,
        directory: Path,
        cases: Sequence[Case],
        tell: Any = nothing,
        deadline: Any = None,
    ) -> Iterator[Measured]:
        for case in cases:
            self.clock.now += FIGURE
            yield Measured(case.prompts.task, case.temperature, case.depth, 2.0, 2.0, 9, {})


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], tuple[Findings, float]]:
    """What is found within so many seconds (0: any), and the seconds that took."""

    def measure(seconds: float) -> tuple[Findings, float]:
        clock = Clock()
        deadline, judge = Deadline(seconds / 60, clock), Timed(clock)

        def measure_speed(*args: Any) -> Speed | None:
            fits, done, expected = args[-1], 0, 4 * WARM_UP
            clock.now += WARM_UP
            while done < SETTINGS.speed_rounds and fits(expected, done):
                clock.now += ROUND
                done, expected = done + 1, ROUND
            return Speed(PACES, 1, 1, done, {}) if done else None

        monkeypatch.setattr(findings, "measure_speed", measure_speed)
        return find(judge, nn.Identity(), Path(), deadline, expected=2 * FIGURE), clock.now

    return measure


def figures(found: Findings) -> list[tuple[str, float, int]]:
    return [(m.task, m.temperature, m.depth) for m in found.measured]


@pytest.mark.parametrize(
    ("seconds", "measured", "rounds", "missing"),
    [
        (19, 0, 0, ("held-out", "edit", "chat", "the speed")),
        (25, 2, 0, ("edit", "chat", "2 accepted lengths of other tasks", "the speed")),
        (
            129,
            2,
            1,
            ("edit", "chat", "2 accepted lengths of other tasks", "2 of 3 rounds of speed"),
        ),
        (165, 6, 1, ("6 accepted lengths of other tasks", "2 of 3 rounds of speed")),
        (400, 12, 2, ("1 of 3 rounds of speed",)),
    ],
)
def test_a_short_time_goes_to_what_matters_most(
    measure: Any, seconds: float, measured: int, rounds: int, missing: tuple[str, ...]
) -> None:
    """And is not exceeded."""
    found, took = measure(seconds)
    order = [*IMPORTANT, *(case for case in ALL if case not in IMPORTANT)]
    assert figures(found) == [case for case in ALL if case in order[:measured]], (
        "in the order of reports"
    )
    assert (found.speed.rounds if found.speed else 0) == rounds
    assert found.no_time == missing == tuple(found.as_dict()["no_time"])
    assert took <= seconds


def test_without_a_limit_all_is_measured(measure: Any) -> None:
    found, _ = measure(0)
    assert figures(found) == ALL and found.speed.rounds == 3 and not found.no_time


def test_the_seconds_of_a_run() -> None:
    clock = Clock(500.0)
    deadline = Deadline(10, clock)
    clock.now += 100
    assert (
        (deadline.seconds, deadline.left) == (100, 500)
        and deadline.has(500)
        and not deadline.has(501)
    )
    deadline.resume(200)
    assert (deadline.seconds, deadline.left) == (300, 300)
    assert [deadline.of_training(0, 20, needed) for needed in (20, 60, 1e9)] == [580, 540, 480]
    assert deadline.of_training(0, 200, 1e9) == 400, "the least may be more than its share"
    assert [deadline.of_training(began, 500, 1e9) for began in (0, 400)] == [300, 500], (
        "but not more than training has"
    )
    assert deadline.of_training(700, 20, 1e9) < 700, "set-up may have taken all"
    assert Deadline().left == Deadline().of_training(20, 20, 1e9) == math.inf
