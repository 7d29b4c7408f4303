"""What a drafter is measured on: held-out prompts, and those of the project's own tasks, kind by
kind.

A text ends where its limit says, the prompt included. Prompts that leave no room are left out and
counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from forerun.errors import ConfigError, RequestError
from forerun.measure.lists import listed
from forerun.measure.workloads import Task, builtin, of_categories
from forerun.train.capture import Target
from forerun.train.data import Corpus
from forerun.train.settings import FEWEST_TOKENS, Training

HELD_OUT = "held-out"


@dataclass(frozen=True, slots=True)
class Opening:
    """A prompt as token ids, and the most tokens of its text, the prompt included."""

    tokens: tuple[int, ...]
    limit: int


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of one task; `left_out` are those that were too long."""

    task: str
    openings: tuple[Opening, ...]
    left_out: int


def held_out_prompts(held_out: Corpus, settings: Training) -> Prompts:
    """Of documents that nothing is trained on. Raises RequestError where there is none."""
    if not held_out.prompts:
        raise RequestError(
            f"no held-out text is longer than prompt_tokens={settings.prompt_tokens}, so that it could be"
            " continued: lower it, give longer texts, or hold out more of them"
        )
    prompts = held_out.prompts[: settings.evaluate_rows]
    return Prompts(
        HELD_OUT, tuple(Opening(prompt, settings.tokens) for prompt in prompts), held_out.too_long
    )


def chosen_tasks(names: str) -> list[Task]:
    """Our own tasks of these kinds, by commas; `all`, or `none`. Raises ConfigError for kinds that
    are not there."""
    kinds = listed(names)
    if not kinds:
        raise ConfigError(f"tasks={names!r} names none: give kinds by commas, all, or none")
    return [] if kinds == ["none"] else of_categories(builtin(), [] if kinds == ["all"] else kinds)


def reach_of(module: nn.Module, target: Target) -> int:
    """Most tokens of a text that both can read: a language model says how many itself, heads read
    with the target."""
    own = getattr(getattr(module, "config", None), "max_position_embeddings", None)
    return min(target.context, own) if isinstance(own, int) else target.context


def task_prompts(
    tasks: Sequence[Task], target: Target, reach: int, settings: Training
) -> list[Prompts]:
    """The prompts of each kind of task as `forerun bench` gives them to the target: as they are
    where they are texts, by its chat template, or a plain layout without one, where they are
    messages.

    Outputs are as long as those behind a prompt of the data, as far as a text of `reach` tokens has
    room."""
    sets = []
    for task in dict.fromkeys(task.category for task in tasks):
        prompts = [tuple(target.llm.tokens(one.prompt)) for one in tasks if one.category == task]
        short = [prompt for prompt in prompts if len(prompt) + FEWEST_TOKENS <= reach]
        output = settings.tokens - settings.prompt_tokens
        openings = [
            Opening(prompt, min(len(prompt) + output, reach))
            for prompt in short[: settings.evaluate_rows]
        ]
        sets.append(Prompts(task, tuple(openings), len(prompts) - len(short)))
    return sets
