"""What a drafter is measured on: which prompts, as the target reads them, how far their texts go,
what is left out."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from forerun import ConfigError, RequestError
from forerun.measure.workloads import Task, builtin
from forerun.train import evaluate
from forerun.train.capture import Target
from forerun.train.data import Corpus
from forerun.train.evaluate import Judge
from forerun.train.lengths import Stretch
from forerun.train.options import SmallLMOptions
from forerun.train.recipes import SmallLM
from forerun.train.settings import Training
from forerun.train.tasks import chosen_tasks, held_out_prompts, reach_of, task_prompts
from tests import tiny
from tests.train.conftest import SMALL, documents

SETTINGS = Training(**(SMALL | {"depth": 2}))
OUTPUT = SETTINGS.tokens - SETTINGS.prompt_tokens


def tasks(*prompts: str, category: str = "edit") -> list[Task]:
    return [Task(str(i), category, prompt) for i, prompt in enumerate(prompts)]


def test_kinds_of_tasks() -> None:
    assert chosen_tasks("all") == builtin() and chosen_tasks("none") == []
    assert {task.category for task in chosen_tasks("edit, free")} == {"edit", "free"}
    for names, says in (
        ("", "names none"),
        ("edit,none", "no category 'none'"),
        ("edits", "did you mean 'edit'"),
    ):
        with pytest.raises(ConfigError, match=says):
            chosen_tasks(names)


def test_prompts_that_leave_no_room_are_counted(target: Target) -> None:
    """Outputs are as long as those of the data, shorter where the text would be too long, or there
    is none."""
    long, short = "x" * 300, "true false null"
    (found,) = task_prompts(tasks(short, long, "[1]"), target, 256, SETTINGS)
    assert (found.task, len(found.openings), found.left_out) == ("edit", 2, 1)
    assert list(found.openings[0].tokens) == target.tokenizer.encode(short)
    assert [opening.limit - len(opening.tokens) for opening in found.openings] == [OUTPUT, OUTPUT]
    reach = len(found.openings[0].tokens) + 20
    (found,) = task_prompts(tasks(short), target, reach, SETTINGS)
    assert found.openings[0].limit == reach
    (found,) = task_prompts(tasks(short), target, reach - 5, SETTINGS)
    assert (found.openings, found.left_out) == ((), 1)
    many = task_prompts(
        [*tasks(*[short] * 9), *tasks("[1]", category="chat")], target, 256, SETTINGS
    )
    assert [(p.task, len(p.openings)) for p in many] == [
        ("edit", SETTINGS.evaluate_rows),
        ("chat", 1),
    ]


def test_messages_are_read_by_the_template_or_without_one(target: Target, tmp_path: Path) -> None:
    """As `forerun bench` does; a text is a text to either."""
    asked = [
        Task("0", "chat", [{"role": "user", "content": "null"}]),
        *tasks("null", category="chat"),
    ]
    (plain,) = task_prompts(asked, target, 256, SETTINGS)
    assert list(plain.openings[0].tokens) == target.tokenizer.encode("user: null\nassistant:")
    directory = tmp_path / "templated"
    shutil.copytree(tiny.worded(), directory)
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    template = "{% for message in messages %}[{{ message.content }}]{% endfor %}true"
    (directory / "tokenizer_config.json").write_text(
        json.dumps(settings | {"chat_template": template})
    )
    (templated,) = task_prompts(asked, Target(str(directory), SETTINGS), 256, SETTINGS)
    assert list(templated.openings[0].tokens) == target.tokenizer.encode("[null]true")
    assert templated.openings[1] == plain.openings[1]


def test_a_drafter_may_read_less_than_the_target(target: Target) -> None:
    """There is room for longer prompts than those of the data; but no text is longer than the
    drafter reads."""
    assert target.context == min(256, SETTINGS.tokens + 384) and target.tokens == SETTINGS.tokens
    module = nn.Linear(1, 1)
    assert reach_of(module, target) == target.context
    module.config = SimpleNamespace(max_position_embeddings=64)  # type: ignore[assignment]
    assert reach_of(module, target) == 64


def test_held_out_prompts(target: Target) -> None:
    """So many as are wanted; those that are too long are counted as well."""
    lines = documents(["null " * 30] * 4)
    corpus = Corpus(lines, target.tokenizer, SMALL["tokens"], SMALL["prompt_tokens"])
    corpus.too_long = 5
    found = held_out_prompts(corpus, SETTINGS)
    assert (found.task, len(found.openings), found.left_out) == (
        "held-out",
        SETTINGS.evaluate_rows,
        5,
    )
    assert {opening.limit for opening in found.openings} == {SETTINGS.tokens}


class TestMeasuring:
    """One way for every task, whatever the lengths of its prompts."""

    PROMPTS = (
        '{"name":"alpha',
        "[1,2,3] true false null alphabet grey",
        '{"sizes":[10,12],"next":',
        "x",
    )

    def judge(self, target: Target) -> tuple[Judge, nn.Module, Path]:
        directory = tiny.worded(0.03)
        recipe = SmallLM(SmallLMOptions(init=str(directory)))
        settings = Training(**(SMALL | {"depth": 2, "evaluate_rows": 4}))
        asked = [
            *tasks(*self.PROMPTS),
            *tasks("y" * 400, category="free"),
            *tasks("null", category="chat"),
        ]
        prompts = task_prompts(asked, target, target.context, settings)
        return (
            Judge(target, recipe, None, settings, prompts),
            recipe.load(directory, target),
            directory,
        )

    def test_a_row_for_each_task_that_has_prompts(
        self, target: Target, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Greedy, arithmetic is right to the last pass, where the engine's drafter is not rounded
        to int8."""
        monkeypatch.setattr(
            target.llm, "config", replace(target.llm.config, draft_quantization="none")
        )
        judge, module, directory = self.judge(target)
        measured = list(judge.measure(module, directory, judge.cases))
        assert [(m.task, m.temperature, m.depth) for m in measured] == [
            (task, t, d) for task in ("edit", "chat") for t in (0.0, 0.8) for d in (1, 2)
        ]
        for entry in measured:
            assert entry.passes > 10
            assert entry.temperature or entry.accepted_length == pytest.approx(
                entry.analytic, rel=1e-6
            )

    def test_a_wrong_limit_shows(self, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
        """The fault: as if no text were longer than those of the data."""
        judge, module, directory = self.judge(target)
        right = {
            (m.task, m.temperature, m.depth): m
            for m in judge.measure(module, directory, judge.cases)
        }
        monkeypatch.setattr(
            evaluate, "Stretch", lambda first, end, limit: Stretch(first, end, SETTINGS.tokens - 1)
        )
        wrong = list(judge.measure(module, directory, judge.cases))
        assert all(
            m.accepted_length == right[m.task, m.temperature, m.depth].accepted_length
            for m in wrong
        )
        assert any(
            m.analytic < right[m.task, m.temperature, m.depth].analytic - 0.02 for m in wrong
        )

    def test_a_prompt_may_be_drafted_behind_at_once(self) -> None:
        """One of a single token, or with all others in the cache: what its first pass gave is left
        out whole."""
        stats = SimpleNamespace(rounds=[(2, 2), (1, 0), (2, 1), (2, 2)])
        request: Any = SimpleNamespace(
            stats=stats, produced=8
        )  # the end of the text lies within the last draft
        assert evaluate._opened(request) == 3 and evaluate._rounds([request]) == {0: [1, 2, 2]}
        usual: Any = SimpleNamespace(stats=SimpleNamespace(rounds=[(0, 0), (2, 1)]), produced=3)
        assert evaluate._opened(usual) == 1 and evaluate._rounds([usual]) == {0: [2]}
        assert evaluate._opened(SimpleNamespace(stats=stats, produced=2)) == 2  # type: ignore[arg-type]

    def test_nothing_is_left(self, target: Target) -> None:
        judge, _, _ = self.judge(target)
        judge.sets = [prompts for prompts in judge.sets if not prompts.openings]
        with pytest.raises(RequestError, match="no prompt is left"):
            _ = judge.cases

    def test_texts_are_said_once_and_in_the_precision_of_the_target(
        self, target: Target, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Training may compute in bfloat16 meanwhile."""
        judge = Judge(target, SmallLM(SmallLMOptions()), corpus, SETTINGS)
        seen: list[bool] = []
        monkeypatch.setattr(
            target.llm, "forget", lambda: seen.append(torch.is_autocast_enabled("cpu"))
        )
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert judge.texts is judge.texts
        assert seen == [False]
