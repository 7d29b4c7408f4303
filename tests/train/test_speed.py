"""The speed of a drafter is measured beside plain decoding and --draft auto on the same texts."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forerun.measure import rounds
from forerun.measure.run import PLAIN, Arm
from forerun.train import speed as speed_module
from forerun.train.data import Corpus
from forerun.train.evaluate import Measurements, held_out_prompts
from forerun.train.options import SmallLMOptions, Training
from forerun.train.recipes import SmallLM
from forerun.train.speed import measure_speed
from forerun.train.target import Target
from tests import tiny
from tests.train.conftest import SMALL

SETTINGS = Training(**(SMALL | {"speed_rounds": 2}))
RECIPE = SmallLM(SmallLMOptions())


@pytest.fixture(scope="module")
def directory() -> Path:
    return tiny.with_tokenizer(0.03)


def measured(
    target: Target, directory: Path, corpus: Corpus, settings: Training = SETTINGS, **how: Any
) -> Any:
    found = held_out_prompts(corpus, settings).prompts
    prompts = [(prompt.tokens, prompt.limit) for prompt in found]
    return measure_speed(target, RECIPE, directory, "held-out", prompts, settings, **how)


def at_depth(arm: Arm) -> Arm:
    """Fix the depth, since at `auto` a tiny model hardly drafts."""
    return arm if arm == PLAIN else replace(arm, depth=2)


def test_speed_is_measured_in_turn_on_the_same_texts(
    target: Target, corpus: Corpus, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, int]] = []
    timed_run, engine = rounds.timed_run, target.llm.engine

    def spy(engine: Any, works: Any, params: Any, arm: Arm) -> Any:
        ran.append((arm.name, params.max_tokens))
        return timed_run(engine, works, params, at_depth(arm))

    monkeypatch.setattr(rounds, "timed_run", spy)
    speed = measured(target, directory, corpus)
    names = ["off", "suffix", "suffix+model#2", "model#2"]
    assert ran[:4] == [(name, 40) for name in names], "warm-up"
    assert ran[4:8] == ran[:4] and ran[8:12] == [*ran[1:4], ran[0]] and len(ran) == 4 + 2 * 3 * 4
    drafts = ["off", "auto", "suffix+model:DIRECTORY", "model:DIRECTORY"]
    assert [r.draft for r in speed.results] == drafts
    assert all(r.same_text for r in speed.results)
    plain, *_, alone = speed.results
    assert 1.0 == plain.times_plain == plain.accepted_length < alone.accepted_length
    assert (speed.prompts, speed.tokens, speed.rounds, speed.task) == (3, 40, 2, "held-out")
    assert target.llm.engine is engine and "model" not in engine.proposers


def test_a_different_output_and_a_lack_of_time_are_reported(
    target: Target, corpus: Corpus, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed_run, checks, began = rounds.timed_run, list[tuple[float, int]](), time.monotonic()

    def shorter(engine: Any, works: Any, params: Any, arm: Arm) -> Any:
        tokens = params.max_tokens - (arm != PLAIN)
        return timed_run(engine, works, replace(params, max_tokens=tokens), arm)

    def fits(seconds: float, done: int) -> bool:
        checks.append((seconds, done))
        return done < 1

    monkeypatch.setattr(rounds, "timed_run", shorter)
    speed = measured(target, directory, corpus, fits=fits)
    assert [r.same_text for r in speed.results] == [True] + [False] * 3 and speed.rounds == 1
    assert [done for _, done in checks] == [0, 1]
    assert all(0 < seconds < 3 * (time.monotonic() - began) for seconds, _ in checks)
    assert measured(target, directory, corpus, fits=lambda *_: False) is None


@pytest.mark.parametrize("better", ["automatic", "new"])
def test_two_drafters_of_one_kind_are_compared(
    better: str, target: Target, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has its own name, and no directory of this machine appears in the result."""
    settings, close, random = SETTINGS, tiny.with_tokenizer(0.001), tiny.with_tokenizer(3.0)
    default, new = (close, random) if better == "automatic" else (random, close)
    monkeypatch.setattr(speed_module, "automatic", lambda *_: f"model:{default}")
    timed_run = rounds.timed_run
    monkeypatch.setattr(rounds, "timed_run", lambda *args: timed_run(*args[:3], at_depth(args[3])))
    speed = measured(target, new, corpus, settings)
    auto, _, alone = speed.results[1:]
    assert (alone.accepted_length > auto.accepted_length) == (better == "new")
    assert speed.comparison.default == "model" and speed.comparison.interval
    assert speed.comparison.draft in ("suffix+model:DIRECTORY", "model:DIRECTORY")
    text = json.dumps(Measurements([], {}, speed).as_dict())
    assert str(new) not in text and str(default) not in text and '"better"' in text
    monkeypatch.setattr(speed_module, "automatic", lambda *_: f"suffix+model:{new}")
    speed = measured(target, new, corpus, settings)
    assert speed.comparison is None
    assert [r.draft for r in speed.results] == ["off", "auto", "model:DIRECTORY"]


def test_the_shortest_prompts_with_the_longest_outputs_are_timed(
    target: Target, directory: Path
) -> None:
    """Prompts of tasks may be longer than training texts."""
    settings = replace(SETTINGS, speed_rounds=1)
    for prompts, expected in (
        ([(range(5, 5 + n), 30) for n in (20, 3, 9, 8, 7, 25)], (4, 21, "tasks")),
        ([(range(5, 165), 200), (range(7, 177), 210)], (2, 40, "tasks")),
    ):
        speed = measure_speed(target, RECIPE, directory, "tasks", prompts, settings)
        assert speed is not None and (speed.prompts, speed.tokens, speed.task) == expected
        assert all(result.same_text for result in speed.results)
