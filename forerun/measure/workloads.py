"""Tasks to measure with, by category: what a text is about decides how much of it can be drafted.

`builtin` is a set of our own, small enough for every machine; `read_tasks` takes files of prompts,
Spec-Bench's and SPEED-Bench's among them. What comes from here is in order, has a prompt that is
not empty, and no two tasks of one file have the same id.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.errors import ConfigError, RequestError, suggest
from forerun.models.tokenizer import Message
from forerun.utils import UnreadableError, text_of

TASKS = Path(__file__).with_name("tasks.jsonl")
FIELDS = (
    "id",
    "category",
    "prompt",
    "text",
    "prediction",
    "documents",
)  # of our own format: anything else is a slip
FOREIGN = (
    "turns",
    "messages",
)  # mark an object of another collection, which has more fields than we know
PROMPTS = ("prompt", "text", *FOREIGN)
WITHOUT_CATEGORY = "file"
# What Spec-Bench counts as one: the eight categories of MT-Bench.
MT_BENCH = frozenset(
    {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
)
GROUPS = {"mt_bench": MT_BENCH}
# SPEED-Bench's prompts as published: most are not in the data set
PLACEHOLDER = "SHOULD BE FETCHED FROM THE SOURCE"
WHAT_IS_IN_A_FILE = (
    "a prompts file is text (one prompt), JSON lines (a string, token ids, or an object with prompt, text or turns"
    " on each), or JSON with a list of prompts"
)


@dataclass(frozen=True, slots=True)
class Task:
    """Something for a model to do.

    Attributes:
        id: what reports call it.
        category: the kind of work; "file" where nothing says.
        prompt: a text, token ids, or the messages of a conversation.
        prediction: what the answer will probably be, such as the file before an edit.
        documents: texts that the answer may quote.
    """

    id: str
    category: str
    prompt: str | list[int] | list[Message]
    prediction: str | None = None
    documents: tuple[str, ...] = ()


def builtin() -> list[Task]:
    """Our own set: eight categories of four tasks, prompts of up to 1,000 characters."""
    return read_tasks(TASKS)


def read_tasks(path: Path) -> list[Task]:
    """The tasks of a file, one or more. Raises RequestError, which names the file and the line.

    Text is one prompt; `.jsonl` has one task a line; `.json` a list of them, or an object with the
    list under "prompts" (what `forerun bench pair` writes). A task is a string, token ids, or an
    object with one of

    - `prompt` or `text`: a text, token ids or messages;
    - `turns`: texts, of which the first is the prompt (Spec-Bench's question.jsonl);
    - `messages`: a conversation, read up to the first message of its user (SPEED-Bench, once it is
      prepared),

    and with `id` (or `question_id`), `category`, `prediction` and `documents` if it likes. Objects
    with `turns` or `messages` come from elsewhere: their other fields are ignored.
    """
    tasks: dict[str, Task] = {}
    for where, value in _values(path, _text_of(path)):
        try:
            task = _task(value, where)
            if task.id in tasks:
                raise RequestError(
                    f"there is a task with id {_shown(task.id)} before it: give each its own"
                )
        except RequestError as error:
            raise RequestError(f"{path}, {where}: {error}") from None
        tasks[task.id] = task
    if not tasks:
        raise RequestError(f"there are no prompts in {path}: {WHAT_IS_IN_A_FILE}")
    return list(tasks.values())


def of_categories(tasks: Sequence[Task], names: Sequence[str]) -> list[Task]:
    """The tasks of these categories, in their order; all of them for no names. Raises ConfigError
    for others.

    "mt_bench" stands for the categories of MT-Bench, as in Spec-Bench's own tables.
    """
    there = {task.category for task in tasks}
    known = sorted(there | {name for name, members in GROUPS.items() if members & there})
    wanted: set[str] = set()
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            meant = f" (did you mean {close[0]!r}?)" if close else ""
            raise ConfigError(
                f"there is no category {name!r}{meant}: these tasks have {', '.join(known)}"
            )
        wanted |= {name, *GROUPS.get(name, ())}
    return [task for task in tasks if task.category in wanted or not names]


def _text_of(path: Path) -> str:
    """What a file says. Raises RequestError for a directory, no file, or one that is not text."""
    try:
        text = text_of(path, largest=None)
    except UnreadableError as error:
        raise RequestError(
            f"the prompts in {path} cannot be read: {error}; {WHAT_IS_IN_A_FILE}"
        ) from None
    if "\0" in text:
        raise RequestError(
            f"the prompts in {path} cannot be read: it is not UTF-8 text; {WHAT_IS_IN_A_FILE}"
        )
    return text


def _values(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """Each value of a file, and where in the file it is: also the id of a task that has none."""
    kind = path.suffix.lower()
    if kind == ".jsonl":
        for number, line in enumerate(
            text.split("\n"), 1
        ):  # not splitlines: a JSON string may hold a U+2028
            if line.strip():
                yield (
                    f"line {number}",
                    _parsed(line, path, number, "each line of a .jsonl file is one value"),
                )
    elif kind == ".json":
        data = _parsed(
            text,
            path,
            1,
            "a .json file is one list; a file with a value on each line is a .jsonl file",
        )
        found = data.get("prompts") if isinstance(data, dict) else data
        if not isinstance(found, list):
            raise RequestError(f"there is no list of prompts in {path}: {WHAT_IS_IN_A_FILE}")
        yield from ((f"prompt {number}", value) for number, value in enumerate(found, 1))
    else:
        yield "prompt 1", text


def _parsed(text: str, path: Path, line: int, hint: str) -> Any:
    """The JSON value in a text that begins at a line of a file. Raises RequestError that ends with
    the hint."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        at = f"line {line + error.lineno - 1}, column {error.colno}"
        raise RequestError(f"{path}, {at}: this is not JSON ({error.msg}): {hint}") from None
    except (
        ValueError,
        RecursionError,
    ):  # a number of thousands of digits, brackets a thousand deep
        raise RequestError(
            f"{path}, line {line}: this is larger or deeper than a prompt can be: {hint}"
        ) from None


def _task(value: Any, where: str) -> Task:
    """One value of a file as a task. Raises RequestError without the place."""
    if not isinstance(value, dict):
        return Task(where, WITHOUT_CATEGORY, _prompt(value))
    unknown = [key for key in value if key not in FIELDS]
    if unknown and not any(key in value for key in FOREIGN):
        raise RequestError(
            f"there is no field {unknown[0][:40]!r}: {suggest(unknown[0], (*FIELDS, *FOREIGN))}"
        )
    given = {key: field for key, field in value.items() if field is not None}
    prompts = [key for key in PROMPTS if key in given]
    if len(prompts) != 1:
        raise RequestError(
            f"it has {' and '.join(prompts) or 'no prompt'}: give one of {', '.join(PROMPTS)}"
        )
    prompt, documents = given[prompts[0]], given.get("documents", [])
    name = given.get("id", given.get("question_id", where))
    if not isinstance(documents, list):
        raise RequestError(f"documents must be a list of texts, not {_shown(documents)}")
    return Task(
        str(name) if type(name) is int else _written(name, "the id"),  # some collections count
        _written(given.get("category", WITHOUT_CATEGORY), "the category"),
        _prompt(_opening(prompt) if prompts[0] in FOREIGN else prompt),
        _written(given["prediction"], "the prediction") if "prediction" in given else None,
        tuple(_written(document, "a document") for document in documents),
    )


def _prompt(value: Any) -> str | list[int] | list[Message]:
    """A prompt in any of its three forms."""
    if isinstance(value, str):
        return _written(value, "the prompt")
    if (
        isinstance(value, list) and value and all(type(item) is int and item >= 0 for item in value)
    ):  # True is no token
        return value
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        for message in value:
            _written(message.get("role"), "the role of a message")
            _written(message.get("content"), "the content of a message")
        return value
    raise RequestError(f"{_shown(value)} is no prompt: give a text, token ids or messages")


def _opening(turns: Any) -> Any:
    """What stands before the first answer: the first of several texts, or messages up to the first
    of the user's."""
    if not isinstance(turns, list) or not turns:
        raise RequestError(f"turns and messages must be lists, not {_shown(turns)}")
    if isinstance(turns[0], str):
        return turns[0]
    users = [
        i
        for i, message in enumerate(turns)
        if isinstance(message, dict) and message.get("role") == "user"
    ]
    if not users:
        raise RequestError(
            "no turn or message is the user's: give texts, or a message with role user"
        )
    return turns[: users[0] + 1]


def _written(value: Any, what: str) -> str:
    """A text that says something."""
    if not isinstance(value, str):
        raise RequestError(f"{what} must be a text, not {_shown(value)}")
    if not value.strip():
        raise RequestError(f"{what} is empty: write something or leave it out")
    if PLACEHOLDER in value:
        raise RequestError(
            f"{what} is a placeholder of SPEED-Bench: make the file with its preparation script first"
        )
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON can spell half of a surrogate pair
        raise RequestError(f"{what} is not valid Unicode text: give whole characters") from None
    return value


def _shown(value: Any) -> str:
    """The beginning of a value, for an error message."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:40]}..."
