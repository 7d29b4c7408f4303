"""Which tasks a measurement takes where the user has not said, or has said only in part."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from forerun.bench.lists import listed
from forerun.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from forerun.bench.workloads import Task

PASSAGE = 128  # tokens of a passage of Python's library
PASSAGES = 5  # different ones for each request at once


def choose_tasks(
    model: str | None, path: Path | None, categories: str | None, requests: int, rounds: int
) -> list[Task]:
    """The tasks of a file, of our own set, those that belong to a pair of models, or passages of Python's library.

    Args:
        model: as in `Config`; its tokenizer cuts passages.
        path: a file of tasks, or None.
        categories: names by commas, "all", or None.
        requests, rounds: how many run at once, and how often; a few passages for each place are enough.
    """
    from forerun.bench.corpus import excerpts
    from forerun.bench.workloads import Task, builtin, of_categories, read_tasks
    from forerun.load import load_tokenizer
    from forerun.models.hub import find_model

    names = [] if categories in (None, "all") else listed(str(categories))
    if path is not None:
        return of_categories(read_tasks(path), names)
    if categories is not None:
        return of_categories(builtin(), names)
    directory = find_model(model)
    beside = directory.parent / "prompts.json"
    if beside.is_file():
        return read_tasks(beside)
    tokenizer = load_tokenizer(directory)
    if tokenizer is None:
        raise ConfigError("this model has no tokenizer: give --prompts with token ids")
    passages = excerpts(tokenizer.encode, requests * min(max(rounds, 1), PASSAGES), PASSAGE)
    return [Task(f"passage {i + 1}", "code", passage) for i, passage in enumerate(passages)]


def token_ids(model: str | None, task: Task) -> list[int]:
    """The prompt of a task as the model reads it, without loading the model."""
    from forerun.load import load_tokenizer
    from forerun.models.hub import find_model

    if isinstance(task.prompt, list) and isinstance(task.prompt[0], int):
        return list(task.prompt)
    tokenizer = load_tokenizer(find_model(model))
    if tokenizer is None:
        raise RequestError("this model has no tokenizer: give prompts as token ids")
    return tokenizer.encode(task.prompt) if isinstance(task.prompt, str) else tokenizer.chat(task.prompt)
