"""Predicted accepted lengths agree with those that the engine measures; tasks, speed, and the order
of measurements under a time limit."""

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from forerun import ConfigError, ForerunError, RequestError
from forerun.measure.workloads import Task, builtin
from forerun.train import evaluate
from forerun.train.data import Corpus
from forerun.train.evaluate import (
    Case,
    EvaluationPrompt,
    Evaluator,
    PromptSet,
    TaskResult,
    held_out_prompts,
    max_length,
    measure_drafter,
    select_tasks,
    task_prompts,
)
from forerun.train.losses import DraftSpan
from forerun.train.options import SmallLMOptions, Training, depths_up_to
from forerun.train.recipes import SmallLM
from forerun.train.speed import Speed
from forerun.train.target import Batch, Target
from forerun.train.time_limit import TimeLimit, TimeLimitReached
from tests import tiny
from tests.train.conftest import SMALL, Clock, documents, with_template

TEXTS = [f'{{"name":"beta {i}","sizes":[{i},{i * 3}]}} true false null' for i in range(40)]
SETTINGS = Training(**(SMALL | {"evaluate_rows": 40, "depth": 2, "temperature": 1.0}))
FEW = Training(**(SMALL | {"depth": 2, "speed_rounds": 2}))
RECIPE = SmallLM(SmallLMOptions())


@dataclasses.dataclass(frozen=True, slots=True)
class Misaligned(SmallLM):
    """A faulty recipe that shifts all distributions by one token."""

    def _logits(self, module: nn.Module, batch: Batch) -> torch.Tensor:
        return SmallLM._logits(self, module, batch).roll(1, dims=1)


@pytest.fixture(scope="module")
def held_out(target: Target) -> Corpus:
    return Corpus(documents(TEXTS), target.tokenizer, SETTINGS.tokens, SETTINGS.prompt_tokens)


@pytest.fixture(scope="module")
def directory() -> Path:
    return tiny.with_tokenizer(0.03)


@pytest.fixture(scope="module")
def module(target: Target, directory: Path) -> nn.Module:
    return RECIPE.load(directory, target)


def test_measured_and_expected_lengths_agree(
    target: Target, held_out: Corpus, module: nn.Module, directory: Path
) -> None:
    """Greedy ones agree closely, sampled ones within the noise of some hundred passes."""
    evaluator = Evaluator(target, RECIPE, held_out, SETTINGS)
    found = measure_drafter(evaluator, module, directory, TimeLimit()).measured
    assert [(r.temperature, r.depth) for r in found] == [(t, d) for t in (0.0, 1.0) for d in (1, 2)]
    for result in found:
        assert result.accepted_length > 1.2 and result.passes > 300
        close = 0.05 if result.temperature else 0.01
        assert result.accepted_length == pytest.approx(result.expected, rel=close)
    misaligned = Misaligned(SmallLMOptions())
    evaluator = Evaluator(target, misaligned, held_out, replace(SETTINGS, depth=1))
    found = measure_drafter(evaluator, module, directory, TimeLimit()).measured
    assert max(abs(r.accepted_length / r.expected - 1) for r in found) > 0.05


def test_measuring_stops_at_the_time_limit(
    target: Target, held_out: Corpus, module: nn.Module, directory: Path
) -> None:
    evaluator = Evaluator(target, RECIPE, held_out, SETTINGS)
    engine, case = evaluator.engine(directory), evaluator.cases[0]
    clock = itertools.count().__next__  # each call adds a second
    with pytest.raises(TimeLimitReached):
        evaluator.measure(engine, module, case, TimeLimit(0.05, clock))
    late = TimeLimit(3, clock)
    found = measure_drafter(evaluator, module, directory, late)
    assert 0 < len(found.measured) < len(evaluator.cases) and found.not_measured


def test_values_of_an_evaluation(target: Target, held_out: Corpus, module: nn.Module) -> None:
    evaluator = Evaluator(target, RECIPE, held_out, SETTINGS)
    found = evaluator.evaluate(module, 7)
    assert found.step == 7 and 0 < found.overlap < 1 and found.perplexity > 1
    assert found.accepted_length > 1
    assert depths_up_to(1) == [1] and depths_up_to(5) == [1, 2, 4, 5]
    short = Corpus(documents(["[1]"]), target.tokenizer, 48, 8)
    with pytest.raises(ForerunError, match="no held-out text"):
        Evaluator(target, RECIPE, short, SETTINGS)


def test_texts_are_generated_once_in_the_precision_of_the_target(
    target: Target, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluator, seen = Evaluator(target, RECIPE, corpus, FEW), list[bool]()
    forget = lambda: seen.append(torch.is_autocast_enabled("cpu"))  # noqa: E731
    monkeypatch.setattr(target.llm, "forget", forget)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert evaluator.texts is evaluator.texts
    assert seen == [False]


def tasks(*prompts: str, category: str = "edit") -> list[Task]:
    return [Task(str(i), category, prompt) for i, prompt in enumerate(prompts)]


def test_tasks_are_selected_by_category() -> None:
    """`test_cli` has the names that the verb refuses."""
    assert select_tasks("all") == builtin() and select_tasks("none") == []
    assert {task.category for task in select_tasks("edit, free")} == {"edit", "free"}
    with pytest.raises(ConfigError, match="no category 'none'"):
        select_tasks("edit,none")


def test_prompts_of_tasks_are_limited_in_length(target: Target, tmp_path: Path) -> None:
    """Outputs are at most as long as those of the data; prompts that are too long are counted."""
    output, short = FEW.tokens - FEW.prompt_tokens, "true false null"
    (found,) = task_prompts(tasks(short, "x" * 300, "[1]"), target, 256, FEW)
    assert (found.task, len(found.prompts), found.too_long) == ("edit", 2, 1)
    assert list(found.prompts[0].tokens) == target.tokenizer.encode(short)
    assert [prompt.limit - len(prompt.tokens) for prompt in found.prompts] == [output, output]
    longest = len(found.prompts[0].tokens) + 20
    (found,) = task_prompts(tasks(short), target, longest, FEW)
    assert found.prompts[0].limit == longest
    (found,) = task_prompts(tasks(short), target, longest - 5, FEW)
    assert (found.prompts, found.too_long) == ((), 1)
    selected = [Task("0", "chat", [{"role": "user", "content": "null"}]), *tasks(*[short] * 9)]
    chat, edit = task_prompts(selected, target, 256, FEW)
    assert len(edit.prompts) == FEW.evaluate_rows
    assert list(chat.prompts[0].tokens) == target.tokenizer.encode("user: null\nassistant:")
    template = "{% for message in messages %}[{{ message.content }}]{% endfor %}true"
    templated = Target(with_template(tmp_path / "templated", template), FEW)
    (chat,) = task_prompts(selected[:1], templated, 256, FEW)
    assert list(chat.prompts[0].tokens) == target.tokenizer.encode("[null]true")


def test_lengths_and_held_out_prompts(target: Target) -> None:
    assert target.context == 256 and target.tokens == FEW.tokens
    module = nn.Linear(1, 1)
    assert max_length(module, target) == target.context
    module.config = SimpleNamespace(max_position_embeddings=64)  # type: ignore[assignment]
    assert max_length(module, target) == 64
    corpus = Corpus(documents(["null " * 30] * 4), target.tokenizer, 48, 8)
    corpus.too_long = 5
    found = held_out_prompts(corpus, FEW)
    assert (found.task, len(found.prompts), found.too_long) == ("held-out", FEW.evaluate_rows, 5)


def test_tasks_are_measured_with_their_own_limits(
    target: Target, module: nn.Module, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy predictions are exact with an unrounded drafter, and not with a wrong limit."""
    config = replace(target.llm.config, draft_quantization="none")
    monkeypatch.setattr(target.llm, "config", config)
    texts = ('{"name":"alpha', "[1,2,3] true false null alphabet grey", '{"next":', "x")
    selected = [*tasks(*texts), *tasks("y" * 400, category="free"), *tasks("1", category="chat")]
    settings = replace(FEW, evaluate_rows=4, speed_rounds=0)
    prompts = task_prompts(selected, target, target.context, settings)
    evaluator = Evaluator(target, RECIPE, None, settings, prompts)
    found = measure_drafter(evaluator, module, directory, TimeLimit())
    assert [(r.task, r.temperature, r.depth) for r in found.measured] == [
        (task, t, d) for task in ("edit", "chat") for t in (0.0, 0.8) for d in (1, 2)
    ]
    assert found.left_out == {"free": 1}
    for result in found.measured:
        exact = pytest.approx(result.expected, rel=1e-6)
        assert result.passes > 10 and (result.temperature or result.accepted_length == exact)

    def short_span(first: int, end: int, limit: int) -> DraftSpan:
        return DraftSpan(first, end, settings.tokens - 1)

    monkeypatch.setattr(evaluate, "DraftSpan", short_span)
    wrong = measure_drafter(evaluator, module, directory, TimeLimit()).measured
    pairs = list(zip(found.measured, wrong, strict=True))
    assert all(a.accepted_length == b.accepted_length for a, b in pairs)
    assert any(b.expected < a.expected - 0.02 for a, b in pairs)
    evaluator.sets = [each for each in evaluator.sets if not each.prompts]
    with pytest.raises(RequestError, match="no prompt is left"):
        _ = evaluator.cases


RESULT, WARM_UP, ROUND = 10, 20, 80  # simulated seconds
SETS = [PromptSet(task, (EvaluationPrompt((1, 2), 9),)) for task in ("held-out", "edit", "chat")]


class Timed(Evaluator):
    """An evaluator of three tasks; each result takes RESULT seconds."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.sets, self.held_out = clock, SETS, SETS[0]
        self.settings = Training(**(SMALL | {"depth": 2, "speed_rounds": 3}))
        self.target = self.recipe = None  # type: ignore[assignment]

    def engine(self, directory: Path) -> Any:
        return None

    def measure(self, engine: Any, module: nn.Module, case: Case, limit: TimeLimit) -> TaskResult:
        self.clock.now += RESULT
        limit.check()
        return TaskResult(case.prompts.task, case.temperature, case.depth, 2.0, 2.0, 9)


@pytest.mark.parametrize(
    ("seconds", "measured", "rounds", "missing"),
    [
        (9, 0, 0, ("12 of 12 accepted lengths", "3 of 3 rounds of speed")),
        (19, 1, 0, ("11 of 12 accepted lengths", "3 of 3 rounds of speed")),
        (25, 2, 0, ("10 of 12 accepted lengths", "3 of 3 rounds of speed")),
        (129, 2, 1, ("10 of 12 accepted lengths", "2 of 3 rounds of speed")),
        (165, 6, 1, ("6 of 12 accepted lengths", "2 of 3 rounds of speed")),
        (400, 12, 2, ("1 of 3 rounds of speed",)),
        (0, 12, 3, ()),  # no limit
    ],
)
def test_the_most_important_cases_are_measured_first(
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
    measured: int,
    rounds: int,
    missing: tuple[str, ...],
) -> None:
    """The order is held-out texts at the chosen depth, speed, tasks at that depth, other depths."""
    clock = Clock()

    def measure_speed(*args: Any) -> Speed | None:
        fits: Callable[[float, int], bool] = args[-1]
        done, expected = 0, 4 * WARM_UP
        clock.now += WARM_UP
        while done < 3 and fits(expected, done):
            clock.now += ROUND
            done, expected = done + 1, ROUND
        return Speed((), None, 1, 1, done, "tasks", {}) if done else None

    monkeypatch.setattr(evaluate, "measure_speed", measure_speed)
    limit = TimeLimit(seconds / 60, clock)
    found = measure_drafter(Timed(clock), nn.Identity(), Path(), limit)
    grid = [(s.task, t, d) for s in SETS for t in (0.0, 0.8) for d in (1, 2)]
    order = sorted(grid, key=lambda case: case[2] != 2)[:measured]
    results = [(r.task, r.temperature, r.depth) for r in found.measured]
    assert results == [case for case in grid if case in order]
    assert (found.speed.rounds if found.speed else 0) == rounds
    assert found.not_measured == missing
    assert not seconds or clock.now <= seconds + WARM_UP, "overruns by a warm-up at most"
