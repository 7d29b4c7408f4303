"""Which tasks a measurement takes where the user has not said, or has said only in part."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.errors import ConfigError, RequestError
from forerun.measure.lists import listed

if TYPE_CHECKING:
    from forerun.measure.workloads import Task

PASSAGE = 128  # tokens of a passage of Python's library
PASSAGES = 5  # different ones for each request at once
AS_THEY_ARE = (
    "completion",
    "file",
)  # categories of texts that are no message to a model that chats


def choose_tasks(
    model: str | None, path: Path | None, categories: str | None, requests: int, rounds: int
) -> list[Task]:
    """The tasks of a file, of our own set, those that lie beside the model, or passages of Python's
    library.

    Args:
        model: as in `Config`; its tokenizer cuts passages.
        categories: names by commas, "all", or None.
        requests, rounds: how many run at once, and how often; a few passages for each place are
            enough.
    """
    from forerun.load import load_tokenizer
    from forerun.measure.corpus import excerpts
    from forerun.measure.workloads import Task, builtin, of_categories, read_tasks
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


def token_ids(model: str | None, tasks: Sequence[Task]) -> list[list[int]]:
    """The prompts of tasks as the model reads them, without loading the model.

    A text of a category is put to a model that chats as its user's message, unless the task is to
    go on with it; token ids, and texts that nothing is known of, stay as they are.
    """
    from forerun.load import load_tokenizer
    from forerun.models.hub import find_model

    def is_given(task: Task) -> bool:
        return isinstance(task.prompt, list) and isinstance(task.prompt[0], int)

    tokenizer = None if all(map(is_given, tasks)) else load_tokenizer(find_model(model))

    def ids(task: Task) -> list[int]:
        if is_given(task):
            return list(task.prompt)  # type: ignore[arg-type]
        if tokenizer is None:
            raise RequestError("this model has no tokenizer: give prompts as token ids")
        if isinstance(task.prompt, str):
            is_message = tokenizer.has_chat_template and task.category not in AS_THEY_ARE
            return (
                tokenizer.chat(conversation(task.prompt))
                if is_message
                else tokenizer.encode(task.prompt)
            )
        return tokenizer.chat(task.prompt)  # type: ignore[arg-type]

    return [ids(task) for task in tasks]


def conversation(text: str) -> list[dict[str, Any]]:
    """A text as messages: those of a conversation that is written out and waits for its assistant,
    or one."""
    parts = re.split(r"^(User|Assistant):", text, flags=re.MULTILINE)
    before, names, said = parts[0], parts[1::2], [part.strip() for part in parts[2::2]]
    if (
        before.strip()
        or names[-1:] != ["Assistant"]
        or said[-1]
        or not all(said[:-1])
        or names[0] != "User"
    ):
        return [{"role": "user", "content": text}]
    return [
        {"role": name.lower(), "content": words}
        for name, words in zip(names[:-1], said[:-1], strict=True)
    ]
