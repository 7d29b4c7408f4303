"""Tasks to measure with, by category: the kind of text decides how much of it can be drafted.

`builtin` is a small set that ships with the package; `read_tasks` reads files of prompts, including
those of Spec-Bench and SPEED-Bench; `excerpts` cuts prompts from Python's standard library.
Imports no torch.
"""

from __future__ import annotations

import itertools
import json
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.errors import ConfigError, RequestError, suggest
from forerun.measure.tables import listed
from forerun.utils import UnreadableError, text_of

TASKS = Path(__file__).with_name("tasks.jsonl")
FIELDS = ("id", "category", "prompt", "text", "prediction", "documents")  # of our own format
FOREIGN = ("turns", "messages")  # mark an object of another collection, with further fields
PROMPT_FIELDS = ("prompt", "text", *FOREIGN)
NO_CATEGORY = "file"
NOT_CHAT = ("completion", NO_CATEGORY)  # categories whose texts are continued, not answered
# Spec-Bench's tables count the eight categories of MT-Bench as one.
MT_BENCH = frozenset(
    {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
)
GROUPS = {"mt_bench": MT_BENCH}
PLACEHOLDER = "SHOULD BE FETCHED FROM THE SOURCE"  # SPEED-Bench's published data lacks most prompts
FILE_FORMATS = (
    "a prompts file is text (one prompt), JSON lines (a string, token ids, or an object with"
    " prompt, text or turns on each), or JSON with a list of prompts"
)
PASSAGE_TOKENS = 128
PASSAGES = 5  # different passages for each concurrent request
SKIPPED_TOKENS = 500  # at the start of a file: licences and imports are alike everywhere
FIRST_FILE, STRIDE = 3, 7  # order of files, so that neighbouring prompts differ in topic

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt with its metadata.

    Attributes:
        id: name in reports.
        category: the kind of work; "file" where it is unknown.
        prompt: a text, token ids, or the messages of a conversation.
        prediction: the likely answer, such as the file before an edit.
        documents: texts that the answer may quote.
    """

    id: str
    category: str
    prompt: str | list[int] | list[Message]
    prediction: str | None = None
    documents: tuple[str, ...] = ()


def builtin() -> list[Task]:
    """Return the built-in tasks: eight categories of four, prompts of up to 1,000 characters."""
    return read_tasks(TASKS)


def read_tasks(path: Path) -> list[Task]:
    """Read the tasks of a file, at least one, in order and with distinct ids.

    Text is one prompt; `.jsonl` has one task per line; `.json` a list of them, or an object with
    the list under "prompts" (as `forerun bench pair` writes it). A task is a string, token ids, or
    an object with one of

    - `prompt` or `text`: a text, token ids or messages;
    - `turns`: texts, of which the first is the prompt (Spec-Bench's question.jsonl);
    - `messages`: a conversation, read up to its first user message (SPEED-Bench, once prepared),

    and optionally `id` (or `question_id`), `category`, `prediction` and `documents`. Further fields
    are ignored in objects with `turns` or `messages`, and rejected otherwise.

    Raises:
        RequestError: the file or a task is invalid; the message names the file and the line.
    """
    tasks: dict[str, Task] = {}
    for where, value in _values(path, _file_text(path)):
        try:
            task = _task(value, where)
            if task.id in tasks:
                raise RequestError(
                    f"the id {_shown(task.id)} is used twice: give each task its own"
                )
        except RequestError as error:
            raise RequestError(f"{path}, {where}: {error}") from None
        tasks[task.id] = task
    if not tasks:
        raise RequestError(f"there are no prompts in {path}: {FILE_FORMATS}")
    return list(tasks.values())


def of_categories(tasks: Sequence[Task], names: Sequence[str]) -> list[Task]:
    """Return the tasks of these categories in order; all of them if `names` is empty.

    "mt_bench" stands for the categories of MT-Bench. Raises ConfigError for an unknown category.
    """
    present = {task.category for task in tasks}
    known = sorted(present | {name for name, members in GROUPS.items() if members & present})
    wanted: set[str] = set()
    for name in names:
        if name not in known:
            raise ConfigError(f"there is no category {name!r}: {suggest(name, known)}")
        wanted |= {name, *GROUPS.get(name, ())}
    return [task for task in tasks if task.category in wanted or not names]


def choose_tasks(
    model: str | None, path: Path | None, categories: str | None, requests: int, rounds: int
) -> list[Task]:
    """Return the tasks that a command measures with.

    These are the tasks of the file, else the built-in ones if categories are named, else those of
    `prompts.json` beside the model, else passages of Python's standard library.

    Args:
        model: as in `Config`; its tokenizer cuts passages.
        categories: comma-separated names, "all", or None.
        requests, rounds: concurrent requests, and how often they run; bounds the passages.
    """
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
    count = requests * min(max(rounds, 1), PASSAGES)
    passages = excerpts(tokenizer.encode, count, PASSAGE_TOKENS)
    return [Task(f"passage {i + 1}", "code", passage) for i, passage in enumerate(passages)]


def token_ids(model: str | None, tasks: Sequence[Task]) -> list[list[int]]:
    """Return the prompts as the model reads them, without loading its weights.

    A text with a category is wrapped in the chat template if the model has one, unless the task is
    to continue it. Token ids stay as they are.
    """
    from forerun.load import load_tokenizer
    from forerun.models.hub import find_model

    def is_ids(task: Task) -> bool:
        return isinstance(task.prompt, list) and isinstance(task.prompt[0], int)

    tokenizer = None if all(map(is_ids, tasks)) else load_tokenizer(find_model(model))

    def ids(task: Task) -> list[int]:
        prompt: Any = task.prompt
        if is_ids(task):
            return list(prompt)
        if tokenizer is None:
            raise RequestError("this model has no tokenizer: give prompts as token ids")
        if not isinstance(prompt, str):
            return tokenizer.chat(prompt)
        if tokenizer.has_chat_template and task.category not in NOT_CHAT:
            return tokenizer.chat(conversation(prompt))
        return tokenizer.encode(prompt)

    return [ids(task) for task in tasks]


def conversation(text: str) -> list[Message]:
    """Return a text as messages: a written-out "User: .. Assistant:" dialogue, or one message."""
    before, *parts = re.split(r"^(User|Assistant):", text, flags=re.MULTILINE)
    names = parts[0::2]
    contents = [part.strip() for part in parts[1::2]]
    awaits_answer = names[-1:] == ["Assistant"] and not contents[-1] and all(contents[:-1])
    if before.strip() or not awaits_answer or names[0] != "User":
        return [{"role": "user", "content": text}]
    pairs = zip(names[:-1], contents[:-1], strict=True)
    return [{"role": name.lower(), "content": content} for name, content in pairs]


def library_texts(characters: int = 6_000_000) -> list[str]:
    """Return top-level modules of the standard library by name, at least `characters` in all."""
    texts: list[str] = []
    total = 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        texts.append(path.read_text(encoding="utf-8", errors="ignore"))
        total += len(texts[-1])
        if total > characters:
            break
    return texts


def excerpts(encode: Callable[[str], list[int]], count: int, tokens: int) -> list[list[int]]:
    """Cut `count` prompts of `tokens` tokens from the standard library, from different files first.

    Raises RequestError if there are not enough.
    """
    texts = library_texts()
    starts = ((FIRST_FILE + offset) % STRIDE for offset in range(STRIDE))
    order = [i for start in starts for i in range(start, len(texts), STRIDE)]
    found: list[list[int]] = []
    for at in itertools.count(SKIPPED_TOKENS, max(SKIPPED_TOKENS, tokens)):
        before = len(found)
        for i in order:
            if len(found) == count:
                return found
            # tokens are a few characters each: a file need not be encoded to its end
            ids = encode(texts[i][: 16 * (at + tokens)])[at : at + tokens]
            found += [ids] if len(ids) == tokens else []
        if len(found) == before:
            break
    raise RequestError(
        f"the standard library has no {count} passages of {tokens} tokens: ask for fewer or shorter"
    )


def _file_text(path: Path) -> str:
    """Read a text file. Raises RequestError for a directory, no file, or one that is not text."""
    try:
        text = text_of(path, largest=None)
    except UnreadableError as error:
        raise RequestError(
            f"the prompts in {path} cannot be read: {error}; {FILE_FORMATS}"
        ) from None
    if "\0" in text:
        raise RequestError(
            f"the prompts in {path} cannot be read: it is not UTF-8 text; {FILE_FORMATS}"
        )
    return text


def _values(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """Yield (place in the file, value); the place is also the id of a task without one."""
    kind = path.suffix.lower()
    if kind == ".jsonl":
        # not splitlines: a JSON string may contain U+2028
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                hint = "each line of a .jsonl file is one value"
                yield f"line {number}", _parsed(line, path, number, hint)
    elif kind == ".json":
        hint = "a .json file is one list; a file with a value on each line is a .jsonl file"
        data = _parsed(text, path, 1, hint)
        found = data.get("prompts") if isinstance(data, dict) else data
        if not isinstance(found, list):
            raise RequestError(f"there is no list of prompts in {path}: {FILE_FORMATS}")
        yield from ((f"prompt {number}", value) for number, value in enumerate(found, 1))
    else:
        yield "prompt 1", text


def _parsed(text: str, path: Path, line: int, hint: str) -> Any:
    """Parse the JSON value that starts at a line of a file. Raises RequestError with the hint."""
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
    """Convert one value of a file. Raises RequestError without the place."""
    if not isinstance(value, dict):
        return Task(where, NO_CATEGORY, _prompt(value))
    unknown = [key for key in value if key not in FIELDS]
    if unknown and not any(key in value for key in FOREIGN):
        hint = suggest(unknown[0], (*FIELDS, *FOREIGN))
        raise RequestError(f"there is no field {unknown[0][:40]!r}: {hint}")
    given = {key: field for key, field in value.items() if field is not None}
    prompts = [key for key in PROMPT_FIELDS if key in given]
    if len(prompts) != 1:
        has = " and ".join(prompts) or "no prompt"
        raise RequestError(f"it has {has}: give one of {', '.join(PROMPT_FIELDS)}")
    prompt = given[prompts[0]]
    documents = given.get("documents", [])
    name = given.get("id", given.get("question_id", where))
    if not isinstance(documents, list):
        raise RequestError(f"documents must be a list of texts, not {_shown(documents)}")
    return Task(
        id=str(name) if type(name) is int else _text(name, "the id"),
        category=_text(given.get("category", NO_CATEGORY), "the category"),
        prompt=_prompt(_opening(prompt) if prompts[0] in FOREIGN else prompt),
        prediction=_text(given["prediction"], "the prediction") if "prediction" in given else None,
        documents=tuple(_text(document, "a document") for document in documents),
    )


def _prompt(value: Any) -> str | list[int] | list[Message]:
    """Check a prompt in any of its three forms."""
    if isinstance(value, str):
        return _text(value, "the prompt")
    if isinstance(value, list) and value:
        if all(type(item) is int and item >= 0 for item in value):  # True is not a token id
            return value
        if all(isinstance(item, dict) for item in value):
            for message in value:
                _text(message.get("role"), "the role of a message")
                _text(message.get("content"), "the content of a message")
            return value
    raise RequestError(f"{_shown(value)} is no prompt: give a text, token ids or messages")


def _opening(turns: Any) -> Any:
    """Return the first of several texts, or the messages up to the first user message."""
    if not isinstance(turns, list) or not turns:
        raise RequestError(f"turns and messages must be lists, not {_shown(turns)}")
    if isinstance(turns[0], str):
        return turns[0]
    for i, message in enumerate(turns):
        if isinstance(message, dict) and message.get("role") == "user":
            return turns[: i + 1]
    raise RequestError("there is no user message: give texts, or a message with role user")


def _text(value: Any, what: str) -> str:
    """Check a text that must not be empty."""
    if not isinstance(value, str):
        raise RequestError(f"{what} must be a text, not {_shown(value)}")
    if not value.strip():
        raise RequestError(f"{what} is empty: write something or leave it out")
    if PLACEHOLDER in value:
        raise RequestError(
            f"{what} is a placeholder of SPEED-Bench: run its preparation script first"
        )
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON can spell half of a surrogate pair
        raise RequestError(f"{what} is not valid Unicode text: give whole characters") from None
    return value


def _shown(value: Any) -> str:
    """Return the beginning of a value, for an error message."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:40]}..."
