"""The speed on the card is that of what was written, beside plain decoding on the same texts; how
the card says it."""

import time
from dataclasses import replace

import pytest

from forerun import __version__
from forerun.measure import rounds
from forerun.measure.run import PLAIN, Arm
from forerun.train import speed as speed_module
from forerun.train.capture import Target
from forerun.train.data import Corpus, Source
from forerun.train.evaluate import Evaluation, Measured
from forerun.train.findings import Findings
from forerun.train.loop import Record
from forerun.train.options import SmallLMOptions
from forerun.train.recipes import SmallLM
from forerun.train.report import Facts, Report, advice, by_task, card, command, speed_table
from forerun.train.settings import Training
from forerun.train.speed import Comparison, Pace, Speed, measure_speed
from forerun.train.tasks import Opening, Prompts, held_out_prompts
from tests import tiny
from tests.train.conftest import SMALL

SETTINGS = Training(**(SMALL | {"depth": 2, "speed_rounds": 2}))
FACTS = Facts(
    "a target",
    ("my data", "b.txt"),
    {"name": "small-lm"},
    SETTINGS,
    [Source("b.txt", 3, 1, 0)],
    (9, 3),
    "ab",
)
SPEED = Speed(
    (
        Pace(0, 10.0, 1.0, None, 1.0, True), Pace("auto", 15.0, 1.5, (1.4, 1.6), 2.0, True),
        Pace(1, 12.0, 1.2, None, 1.5, True), Pace(2, 14.0, 1.4, (1.3, 1.5), 2.2, False),
    ),
    3, 40, 2, {"processor": "quick", "threads": 1},
)  # fmt: skip


def test_every_way_runs_on_the_same_texts(
    target: Target, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In turn, as many rounds as asked, with what is in the directory; the target's own engine is
    left alone."""
    ran: list[tuple[Arm, int]] = []
    right, engine = rounds.timed_run, target.llm.engine

    def timed_run(engine, works, params, arm):  # type: ignore[no-untyped-def]
        ran.append((arm, params.max_tokens))
        return right(engine, works, params, arm)

    monkeypatch.setattr(rounds, "timed_run", timed_run)
    directory, prompts = tiny.worded(0.03), held_out_prompts(corpus, SETTINGS)
    speed = measure_speed(target, SmallLM(SmallLMOptions()), directory, prompts, SETTINGS)
    spec = f"model:{directory}"
    ways = [
        ("off", 0),
        ("suffix", "auto"),
        (f"suffix+{spec}", "auto"),
        (spec, "auto"),
        (spec, 1),
        (spec, 2),
    ]
    assert [(arm.draft, arm.depth, tokens) for arm, tokens in ran[:6]] == [
        (*way, 40) for way in ways
    ]  # warms up
    assert ran[6:12] == ran[:6] and ran[12:18] == [*ran[1:6], ran[0]] and len(ran) == 6 + 2 * 3 * 6
    assert [pace.depth for pace in speed.paces] == [0, *["auto"] * 3, 1, 2] and all(
        pace.same for pace in speed.paces
    )
    assert [pace.draft for pace in speed.paces] == [
        "",
        "auto",
        "suffix+model:DIRECTORY",
        "",
        "",
        "",
    ]
    plain, *_, shallow, deep = speed.paces
    assert (
        1.0
        == plain.times_plain
        == plain.accepted_length
        < shallow.accepted_length
        < deep.accepted_length
    )
    assert (speed.prompts, speed.tokens, speed.rounds) == (3, 40, 2) and speed.machine[
        "threads"
    ] == 1
    assert target.llm.engine is engine and "model" not in engine.proposers


@pytest.mark.parametrize("rounds_that_fit", [0, 1])
def test_no_round_is_begun_that_there_is_no_time_for(
    target: Target, corpus: Corpus, rounds_that_fit: int
) -> None:
    """The card says how many there were. How long one takes is known from the warm-up, which is one
    of three texts."""
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


def test_another_text_shows(
    target: Target, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault: speculative runs say one token more than was asked."""
    right = rounds.timed_run

    def timed_run(engine, works, params, arm):  # type: ignore[no-untyped-def]
        params = params if arm == PLAIN else replace(params, max_tokens=params.max_tokens - 1)
        return right(engine, works, params, arm)

    monkeypatch.setattr(rounds, "timed_run", timed_run)
    settings = replace(SETTINGS, speed_rounds=1)
    prompts = held_out_prompts(corpus, settings)
    speed = measure_speed(target, SmallLM(SmallLMOptions()), tiny.worded(0.03), prompts, settings)
    assert [pace.same for pace in speed.paces] == [True] + [False] * 5
    assert sum("DIFFERENT" in line for line in speed_table(speed)) == 5


@pytest.mark.parametrize("good", ["auto's", "the new one"])
def test_a_drafter_is_measured_beside_what_auto_takes(
    good: str, target: Target, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two draft models of one kind in one engine, one as good as the target and one that knows
    nothing of it: each is measured by its own name. The card names no directory of this machine."""
    settings, twin, stranger = replace(SETTINGS, depth=1), tiny.worded(0.001), tiny.worded(3.0)
    default, new = (twin, stranger) if good == "auto's" else (stranger, twin)
    monkeypatch.setattr(speed_module, "automatic", lambda *_: f"model:{default}")
    speed = measure_speed(
        target, SmallLM(SmallLMOptions()), new, held_out_prompts(corpus, settings), settings
    )
    auto, _, _, fixed = speed.paces[1:]
    assert (fixed.accepted_length > 1.5) == (good == "the new one") and fixed.same and auto.same
    assert speed.comparison.default == "model" and speed.comparison.interval
    assert speed.comparison.draft in ("suffix+model:DIRECTORY", "model:DIRECTORY")
    assert str(new) not in str(speed.as_dict()) and str(default) not in "".join(speed_table(speed))
    assert speed.as_dict()["comparison"]["better"] in (True, False)


def test_what_auto_takes_already_is_not_compared_with_itself(
    target: Target, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, directory = replace(SETTINGS, depth=1, speed_rounds=1), tiny.worded(0.03)
    monkeypatch.setattr(speed_module, "automatic", lambda *_: f"suffix+model:{directory}")
    speed = measure_speed(
        target, SmallLM(SmallLMOptions()), directory, held_out_prompts(corpus, settings), settings
    )
    assert speed.comparison is None and [pace.draft for pace in speed.paces] == ["", "auto", "", ""]
    assert advice(Findings([], {}, speed), "here") == "It is what --draft auto takes already."


def compared(times: float, interval: tuple[float, float] | None, plain: float = 2.0) -> Findings:
    found = Comparison("suffix+eagle3:DIRECTORY", "suffix+eagle3", times, interval, plain)
    return Findings([], {}, replace(SPEED, comparison=found))


@pytest.mark.parametrize(
    ("findings", "begins"),
    [
        (
            compared(1.2, (1.1, 1.3)),
            "Use it: --draft suffix+eagle3:out has 1.20 (1.10 to 1.30) times the speed of",
        ),
        (compared(1.2, None), "Use it: "),
        (compared(0.4, (0.35, 0.45), 0.93), "Do not use it as it is: "),
        (compared(0.4, None, 0.93), "Do not use it as it is: "),
        (
            compared(1.2, (1.1, 1.3), 0.97),
            "Do not use it as it is: ",
        ),  # auto was slower than plain, and it is too
        (compared(1.05, (0.9, 1.2)), "Whether to use it is open: "),
        (compared(0.95, (0.8, 1.1)), "Whether to use it is open: "),
        (Findings([], {}, None), "It was not compared with what --draft auto takes already"),
    ],
)
def test_a_drafter_is_recommended_only_where_it_is_better_than_what_is_there(
    findings: Findings, begins: str
) -> None:
    """Five minutes that made four steps gave 0.93 times plain, where auto gave 2.33: and it was to
    be used."""
    settings = replace(SETTINGS, max_minutes=5, steps=1000)
    report = Report(replace(FACTS, settings=settings), Record(step=4), 12, findings, "eagle3")
    said = advice(findings, "out", report)
    assert said.startswith(begins)
    assert "DIRECTORY" not in said and ("Use it:" in said) == (begins.startswith("Use it"))
    if begins.startswith("Do not"):
        assert (
            "learnt for 4 steps, as many as 5 minutes had time for" in said
            and "--max-minutes" in said
        )
        whole = Report(
            replace(FACTS, settings=replace(settings, steps=4)),
            Record(step=4),
            12,
            findings,
            "eagle3",
        )
        assert "more texts may help" in advice(findings, "out", whole)
    if findings.speed is None or begins.startswith("Whether"):
        assert "forerun train --eval out" in said and "--speed-rounds=0" not in said
    first = Evaluation(0, 9.0, 0.5, 1.5, 1.25)
    whole = replace(report, record=Record(step=4, evaluations=[first]))
    assert begins.replace("out ", "DIRECTORY ") in card(whole)
    assert whole.as_dict()["advice"].startswith(begins.replace("out ", "DIRECTORY "))


def test_the_shortest_prompts_leave_the_longest_outputs(target: Target) -> None:
    openings = tuple(Opening(tuple(range(5, 5 + n)), 30) for n in (20, 3, 9, 8, 7, 25))
    settings = replace(SETTINGS, speed_rounds=1, depth=1)
    recipe = SmallLM(SmallLMOptions())
    speed = measure_speed(
        target, recipe, tiny.worded(0.03), Prompts("held-out", openings, 0), settings
    )
    assert (speed.prompts, speed.tokens) == (4, 21)


def test_prompts_of_tasks_may_be_longer_than_texts_that_are_learnt_from(target: Target) -> None:
    """There is room for them in the caches of the target and of its drafters."""
    settings, recipe = replace(SETTINGS, speed_rounds=1, depth=1), SmallLM(SmallLMOptions())
    openings = (Opening(tuple(range(5, 165)), 200), Opening(tuple(range(7, 177)), 210))
    speed = measure_speed(
        target, recipe, tiny.worded(0.03), Prompts("tasks", openings, 0), settings
    )
    assert (
        speed
        and (speed.prompts, speed.tokens, speed.task) == (2, 40, "tasks")
        and all(p.same for p in speed.paces)
    )


def test_the_best_fixed_depth_and_how_it_is_said() -> None:
    assert SPEED.best_depth == 2 and SPEED.as_dict()["best_depth"] == 2  # auto is no fixed one
    lines = speed_table(SPEED)
    assert "| plain decoding | 10.0 | 1.00 | 1.00 | same |" in lines
    assert "| depth auto | 15.0 | 1.50 (1.40 to 1.60) | 2.00 | same |" in lines
    assert "| depth 2 | 14.0 | 1.40 (1.30 to 1.50) | 2.20 | DIFFERENT |" in lines
    assert any(
        "processor quick, threads 1" in line and "medians of 2 rounds" in line for line in lines
    )


def test_the_command_of_the_card() -> None:
    """All that was not left as it is, and nothing that does not change what is measured."""
    assert command(FACTS) == (
        "forerun train --eval DIRECTORY --target 'a target' --data 'my data' --data b.txt --tokens=48 --prompt-tokens=8"
        " --held-out=0.3 --evaluate-rows=3 --tasks=none --speed-rounds=2 --depth=2 --device=cpu --threads=1"
    )
    default = replace(FACTS, target=None, data=("library",), settings=Training(steps=3, seed=4))
    assert command(default) == "forerun train --eval DIRECTORY --data library"
    bare = replace(default, data=(), settings=replace(default.settings, tasks="none"))
    assert command(bare, "out") == "forerun train --eval out", (
        "without data and tasks there is nothing to measure on"
    )


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
    assert (
        "Not measured, for want of time: chat, the speed."
        in card(replace(report, findings=findings)).splitlines()
    )
    assert (
        "edit: 2 prompts were too long" in text and "## Speed" not in text and __version__ in text
    )
    assert "## Speed" in card(replace(report, findings=replace(report.findings, speed=SPEED)))
    assert report.as_dict()["left_out"] == {"edit": 2} and report.as_dict()["speed"] is None
