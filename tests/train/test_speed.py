"""The speed on the card is that of what was written, beside plain decoding on the same texts; how the card says it."""

import time
from dataclasses import replace

import pytest

from forerun import __version__
from forerun.measure import rounds
from forerun.measure.run import PLAIN, Arm
from forerun.train.capture import Target
from forerun.train.data import Corpus, Source
from forerun.train.evaluate import Evaluation, Measured
from forerun.train.findings import Findings
from forerun.train.loop import Record
from forerun.train.options import SmallLMOptions
from forerun.train.recipes import SmallLM
from forerun.train.report import Facts, Report, by_task, card, command, speed_table
from forerun.train.settings import Training
from forerun.train.speed import Pace, Speed, measure_speed
from forerun.train.tasks import Opening, Prompts, held_out_prompts
from tests import tiny
from tests.train.conftest import SMALL

SETTINGS = Training(**(SMALL | {"depth": 2, "speed_rounds": 2}))
FACTS = Facts(
    "a target", ("my data", "b.txt"), {"name": "small-lm"}, SETTINGS, [Source("b.txt", 3, 1, 0)], (9, 3), "ab"
)
SPEED = Speed(
    (
        Pace(0, 10.0, 1.0, None, 1.0, True), Pace("auto", 15.0, 1.5, (1.4, 1.6), 2.0, True),
        Pace(1, 12.0, 1.2, None, 1.5, True), Pace(2, 14.0, 1.4, (1.3, 1.5), 2.2, False),
    ),
    3, 40, 2, {"processor": "quick", "threads": 1},
)  # fmt: skip


def test_every_way_runs_on_the_same_texts(target: Target, corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """In turn, as many rounds as asked, with what is in the directory; the target's own engine is left alone."""
    ran: list[tuple[Arm, int]] = []
    right, engine = rounds.timed_run, target.llm.engine

    def timed_run(engine, works, params, arm):  # type: ignore[no-untyped-def]
        ran.append((arm, params.max_tokens))
        return right(engine, works, params, arm)

    monkeypatch.setattr(rounds, "timed_run", timed_run)
    directory, prompts = tiny.worded(0.03), held_out_prompts(corpus, SETTINGS)
    speed = measure_speed(target, SmallLM(SmallLMOptions()), directory, prompts, SETTINGS)
    arms = [PLAIN, *(Arm(f"model:{directory}", depth) for depth in ("auto", 1, 2))]
    assert ran[:4] == [(arm, 40) for arm in arms]  # warms up
    assert ran[4:8] == ran[:4] and ran[8:12] == [*ran[1:4], ran[0]] and len(ran) == 4 + 2 * 3 * 4
    assert [pace.depth for pace in speed.paces] == [0, "auto", 1, 2] and all(pace.same for pace in speed.paces)
    plain, _, shallow, deep = speed.paces
    assert 1.0 == plain.times_plain == plain.accepted_length < shallow.accepted_length < deep.accepted_length
    assert (speed.prompts, speed.tokens, speed.rounds) == (3, 40, 2) and speed.machine["threads"] == 1
    assert target.llm.engine is engine and "model" not in engine.proposers


@pytest.mark.parametrize("rounds_that_fit", [0, 1])
def test_no_round_is_begun_that_there_is_no_time_for(target: Target, corpus: Corpus, rounds_that_fit: int) -> None:
    """The card says how many there were. How long one takes is known from the warm-up, which is one of three texts."""
    asked: list[tuple[float, int]] = []

    def fits(seconds: float, done: int) -> bool:
        asked.append((seconds, done))
        return done < rounds_that_fit

    prompts = held_out_prompts(corpus, SETTINGS)
    began = time.monotonic()
    args = (target, SmallLM(SmallLMOptions()), tiny.worded(0.03), prompts, SETTINGS)
    speed = measure_speed(*args, fits=fits)
    assert [done for _, done in asked] == list(range(rounds_that_fit + 1))
    assert all(0 < seconds < 3 * (time.monotonic() - began) for seconds, _ in asked)
    assert (speed.rounds if speed else 0) == rounds_that_fit


def test_another_text_shows(target: Target, corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: speculative runs say one token more than was asked."""
    right = rounds.timed_run

    def timed_run(engine, works, params, arm):  # type: ignore[no-untyped-def]
        params = params if arm == PLAIN else replace(params, max_tokens=params.max_tokens - 1)
        return right(engine, works, params, arm)

    monkeypatch.setattr(rounds, "timed_run", timed_run)
    settings = replace(SETTINGS, speed_rounds=1)
    prompts = held_out_prompts(corpus, settings)
    speed = measure_speed(target, SmallLM(SmallLMOptions()), tiny.worded(0.03), prompts, settings)
    assert [pace.same for pace in speed.paces] == [True, False, False, False]
    assert sum("DIFFERENT" in line for line in speed_table(speed)) == 3


def test_the_shortest_prompts_leave_the_longest_outputs(target: Target) -> None:
    openings = tuple(Opening(tuple(range(5, 5 + n)), 30) for n in (20, 3, 9, 8, 7, 25))
    settings = replace(SETTINGS, speed_rounds=1, depth=1)
    recipe = SmallLM(SmallLMOptions())
    speed = measure_speed(target, recipe, tiny.worded(0.03), Prompts("held-out", openings, 0), settings)
    assert (speed.prompts, speed.tokens) == (4, 21)


def test_the_best_fixed_depth_and_how_it_is_said() -> None:
    assert SPEED.best_depth == 2 and SPEED.as_dict()["best_depth"] == 2  # auto is no fixed one
    lines = speed_table(SPEED)
    assert "| plain decoding | 10.0 | 1.00 | 1.00 | same |" in lines
    assert "| depth auto | 15.0 | 1.50 (1.40 to 1.60) | 2.00 | same |" in lines
    assert "| depth 2 | 14.0 | 1.40 (1.30 to 1.50) | 2.20 | DIFFERENT |" in lines
    assert any("processor quick, threads 1" in line and "medians of 2 rounds" in line for line in lines)


def test_the_command_of_the_card() -> None:
    """All that was not left as it is, and nothing that does not change what is measured."""
    assert command(FACTS) == (
        "forerun train --eval DIRECTORY --target 'a target' --data 'my data' --data b.txt --tokens=48 --prompt-tokens=8"
        " --held-out=0.3 --evaluate-rows=3 --tasks=none --speed-rounds=2 --depth=2 --device=cpu --threads=1"
    )
    default = replace(FACTS, target=None, data=("library",), settings=Training(steps=3, seed=4))
    assert command(default) == "forerun train --eval DIRECTORY --data library"


def test_a_card_has_a_row_for_each_task_and_a_column_for_each_depth() -> None:
    measured = [
        Measured(task, t, d, 1.5 + d, 1.25 + d, 90 // d, {0: 2.0})
        for task in ("held-out", "edit") for t in (0.0, 0.8) for d in (1, 2)
    ]  # fmt: skip
    assert by_task(measured, [1, 2]) == [
        "| task | temperature | depth 1 | depth 2 | passes |", "|---|---|---|---|---|",
        *(f"| {m.task} | {m.temperature:g} | 2.500 (2.250) | 3.500 (3.250) | 45 |" for m in measured[1::2]),
    ]  # fmt: skip
    lacking = by_task([m for m in measured if m.task != "edit" or m.depth == 2], [1, 2])
    assert lacking[4:] == [f"| edit | {t:g} |  | 3.500 (3.250) | 45 |" for t in (0.0, 0.8)]
    record = Record(evaluations=[Evaluation(0, 9.0, 0.5, 1.5, 1.25)])
    report = Report(FACTS, record, 12, Findings(measured, {"edit": 2}, None), "model")
    text = card(report)
    assert "want of time" not in text
    findings = replace(report.findings, no_time=("chat", "the speed"))
    assert "Not measured, for want of time: chat, the speed." in card(replace(report, findings=findings)).splitlines()
    assert "edit: 2 prompts were too long" in text and "## Speed" not in text and __version__ in text
    assert "## Speed" in card(replace(report, findings=replace(report.findings, speed=SPEED)))
    assert report.as_dict()["left_out"] == {"edit": 2} and report.as_dict()["speed"] is None
