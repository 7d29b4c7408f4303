"""Tasks to measure with: our own set as promised, files in every form they come in, and one line
for all others."""

import json
import tomllib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from forerun import ConfigError, RequestError
from forerun.measure.workloads import MT_BENCH, TASKS, Task, builtin, of_categories, read_tasks

CATEGORIES = [
    "completion",
    "edit",
    "grounded",
    "summary",
    "translation",
    "chat",
    "mathematics",
    "free",
]
LONGEST = 1000  # characters, some 350 tokens: small contexts hold an answer as well
SPEED_BENCH = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"

Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def make(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return make


def encode(text: str) -> list[int]:
    return [ord(c) for c in text]


def broken_promises(tasks: Sequence[Task]) -> list[str]:
    """What of our own set is not as `builtin` and the measurements promise."""
    found = [] if list(dict.fromkeys(t.category for t in tasks)) == CATEGORIES else ["order"]
    found += [
        f"{name}: {count} tasks"
        for name, count in Counter(t.category for t in tasks).items()
        if count != 4
    ]
    for t in tasks:
        if not isinstance(t.prompt, str) or len(t.prompt) > LONGEST:
            found.append(f"{t.id}: prompt")
            continue
        if (t.prediction is not None) != (t.category == "edit") or (
            t.prediction or ""
        ) not in t.prompt:
            found.append(f"{t.id}: prediction")
        if bool(t.documents) != (t.category == "grounded") or not all(
            d in t.prompt for d in t.documents
        ):
            found.append(f"{t.id}: documents")
        if t.category == "chat" and not (
            t.prompt.startswith("User:") and t.prompt.endswith("\nAssistant:")
        ):
            found.append(f"{t.id}: transcript")
    return found


def test_our_own_set() -> None:
    """Reports by category compare like with like: eight categories of four; what is quoted is
    really in the prompt."""
    assert broken_promises(builtin()) == []
    assert len({t.prompt for t in builtin()}) == 32


@pytest.mark.parametrize(
    ("index", "changes", "found"),
    [
        (0, {"category": "edit"}, "completion: 3 tasks"), (0, {"prompt": "word " * 1000}, "prompt"),
        (4, {"prediction": "another file"}, "prediction"), (4, {"prediction": None}, "prediction"),
        (8, {"documents": ("said nowhere",)}, "documents"), (12, {"documents": ("the",)}, "documents"),
        (20, {"prompt": "Hello."}, "transcript"),
    ],
)  # fmt: skip
def test_a_fault_in_the_set_would_be_seen(index: int, changes: dict, found: str) -> None:
    tasks = builtin()
    tasks[index] = replace(tasks[index], **changes)
    assert found in " ".join(broken_promises(tasks))


def test_the_set_is_installed() -> None:
    """The file is package data: without it an installed forerun would have no set."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["forerun"]
    assert any(TASKS in TASKS.parents[1].glob(pattern) for pattern in patterns)


TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("name", "text", "prompts"),
    [
        ("a.txt", "two\nlines", ["two\nlines"]), ("a.py", "print()", ["print()"]), ("a.md", "\ufeffmark", ["mark"]),
        ("a.jsonl", '"ab"\n\n[1, 2]\n{"prompt": "c"}\n{"text": [3]}\n', ["ab", [1, 2], "c", [3]]),
        ("A.JSONL", '"ab"\n"c"', ["ab", "c"]), ("a.jsonl", '"a\u2028b"\n"c\x85d"', ["a\u2028b", "c\x85d"]),
        ("a.jsonl", '{"question_id": 1, "category": "qa", "turns": ["d", "e"], "reference": ["f"]}', ["d"]),
        ("a.json", '["ab", [1, 2], {"text": "c"}]', ["ab", [1, 2], "c"]),
        ("a.json", '{"prompts": [[4, 5]], "recipe": {}}', [[4, 5]]),
        ("a.json", json.dumps([{"prompt": TALK}]), [TALK]),
        ("a.jsonl", json.dumps({"src_id": "x", "messages": [*TALK, {"role": "user", "content": "2"}]}), [TALK]),
    ],
)  # fmt: skip
def test_forms_of_files(write: Write, name: str, text: str, prompts: list) -> None:
    """Text is one prompt; a line of JSON lines ends at a newline only, since Spec-Bench's texts
    hold other breaks."""
    assert [t.prompt for t in read_tasks(write(name, text))] == prompts


def test_fields(write: Write) -> None:
    lines = [
        {"id": "a", "category": "edit", "prompt": "x", "prediction": "y", "documents": ["u", "v"]},
        {
            "question_id": 81,
            "category": "writing",
            "turns": ["x", "y"],
            "documents": None,
            "sub_category": None,
        },
        {"prompt": "x", "id": None, "documents": []},
    ]
    assert read_tasks(write("a.jsonl", "\n".join(map(json.dumps, lines)))) == [
        Task("a", "edit", "x", "y", ("u", "v")), Task("81", "writing", "x"), Task("line 3", "file", "x"),
    ]  # fmt: skip
    assert [t.id for t in read_tasks(write("a.json", '["x", "y"]'))] == ["prompt 1", "prompt 2"]


def line(**fields: object) -> tuple[str, str]:
    """A file whose second line is an object with these fields."""
    return "a.jsonl", '"x"\n' + json.dumps(fields)


BAD = {
    "nothing": (("a.txt", ""), "the prompt is empty"),
    "white space": (("a.txt", " \n\t"), "the prompt is empty"),
    "no lines": (("a.jsonl", "\n\n"), "no prompts"),
    "an empty list": (("a.json", "[]"), "no prompts"),
    "an object without prompts": (("a.json", '{"promts": ["x"]}'), "no list of prompts"),
    "a number": (("a.json", "3"), "no list of prompts"),
    "bad JSON": (("a.json", '[\n"a",\n}'), "line 3, column 1: this is not JSON"),
    "JSON lines of another name": (("a.json", '"a"\n"b"'), "is a .jsonl file"),
    "a bad line": (("a.jsonl", '"a"\n\n{"prompt": '), "line 3, column 12: this is not JSON"),
    "a list over two lines": (("a.jsonl", '["a",\n"b"]'), "line 1, column"),
    "brackets without end": (("a.jsonl", "[" * 100_000), "line 1: this is larger or deeper"),
    "a number without end": (("a.json", f"[{'1' * 5000}]"), "line 1: this is larger or deeper"),
    "null": (("a.jsonl", "null"), "line 1: null is no prompt"),
    "halves": (("a.jsonl", "[1.5]"), "[1.5] is no prompt"),
    "truths": (("a.jsonl", "[true]"), "[true] is no prompt"),
    "a token below 0": (("a.jsonl", "[1, -1]"), "[1, -1] is no prompt"),
    "no tokens": (("a.jsonl", "[]"), "[] is no prompt"),
    "several texts": (("a.jsonl", '["x", "y"]'), "is no prompt"),
    "no such field": (line(promt="x"), "line 2: there is no field 'promt': did you mean 'prompt'?"),
    "another field": (line(prompt="x", zebra=1), "there is no field 'zebra': known: category"),
    "a field like Spec-Bench's": (line(turn=["x"]), "did you mean 'turns'?"),
    "no prompt": (line(category="edit"), "line 2: it has no prompt: give one of prompt"),
    "two prompts": (line(prompt="x", text="y"), "it has prompt and text: give one"),
    "an empty prompt": (line(prompt=""), "line 2: the prompt is empty"),
    "half a character": (("a.jsonl", '{"prompt": "\\ud83d"}'), "line 1: the prompt is not valid Unicode"),
    "a prediction that is no text": (line(prompt="x", prediction=["y"]), 'prediction must be a text, not ["y"]'),
    "an empty prediction": (line(prompt="x", prediction=""), "the prediction is empty"),
    "one document": (line(prompt="x", documents="y"), 'documents must be a list of texts, not "y"'),
    "documents that are no texts": (line(prompt="x", documents=["y", 3]), "a document must be a text, not 3"),
    "a category that is no text": (line(prompt="x", category=3), "the category must be a text, not 3"),
    "an id that is no text": (line(prompt="x", id=True), "the id must be a text, not true"),
    "the same id": (("a.json", '[{"id": 7, "text": "x"}, {"id": "7", "text": "y"}]'), "prompt 2: there is a task"),
    "no turns": (line(turns=[]), "turns and messages must be lists, not []"),
    "a turn that is none": (line(turns="x"), 'turns and messages must be lists, not "x"'),
    "an empty turn": (line(turns=["", "x"]), "the prompt is empty"),
    "turns of numbers": (line(turns=[1]), "no turn or message is the user's"),
    "messages without a user": (line(messages=TALK[:1]), "no turn or message is the user's"),
    "messages that are none": (line(messages=[3, TALK[1]]), "is no prompt: give a text, token ids or messages"),
    "a message without content": (line(prompt=[{"role": "user"}]), "the content of a message must be a text, not null"),
    "a turn to be filled in": (line(turns=[f"{SPEED_BENCH}\n\n{{question}}"]), "line 2: the prompt is a placeholder"),
    "a message to be filled in": (line(messages=[{"role": "user", "content": SPEED_BENCH}]), "is a placeholder"),
    "a long value": (line(prompt={"x": "y" * 500}), '{"x": "yyyy'),
}  # fmt: skip


@pytest.mark.parametrize(("file", "says"), BAD.values(), ids=BAD.keys())
def test_bad_files(write: Write, file: tuple[str, str], says: str) -> None:
    """Each is one short line that names the file and says what is wrong."""
    with pytest.raises(RequestError) as caught:
        read_tasks(write(*file))
    message = str(caught.value)
    assert says in message and file[0] in message
    assert "\n" not in message and len(message.replace(str(write(*file)), "")) < 300


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary.jsonl").write_bytes(bytes(range(256)))
    (tmp_path / "zeros.txt").write_bytes(bytes(64))
    for name, says in [
        ("missing", "No such file"), (".", "Is a directory"), ("binary.jsonl", "not UTF-8"), ("zeros.txt", "not UTF-8"),
    ]:  # fmt: skip
        with pytest.raises(RequestError, match=f"cannot be read: .*{says}") as caught:
            read_tasks(tmp_path / name)
        assert "\n" not in str(caught.value)


def test_categories() -> None:
    tasks = builtin()
    assert of_categories(tasks, []) == tasks
    assert of_categories(tasks, ["free", "edit", "edit"]) == [
        t for t in tasks if t.category in ("edit", "free")
    ]
    with pytest.raises(
        ConfigError, match=r"'edits' \(did you mean 'edit'\?\): these tasks have chat, comp"
    ):
        of_categories(tasks, ["free", "edits"])
    with pytest.raises(ConfigError, match="no category 'zebra': these tasks have chat"):
        of_categories(tasks, ["zebra"])
    with pytest.raises(ConfigError, match="'mt_bench'"):
        of_categories(tasks, ["mt_bench"])


def test_spec_bench(write: Write) -> None:
    """Its thirteen categories are kept, and eight of them go by one name, as in its tables."""
    others = ["translation", "summarization", "qa", "math_reasoning", "rag"]
    rows = [
        {"question_id": 81 + i, "category": name, "turns": [f"{name}?", "and then?"]}
        for i, name in enumerate([*sorted(MT_BENCH), *others])
    ]
    tasks = read_tasks(write("question.jsonl", "\n".join(map(json.dumps, rows))))
    assert [t.category for t in tasks] == [row["category"] for row in rows] and len(tasks) == 13
    assert [t.category for t in of_categories(tasks, ["mt_bench"])] == sorted(MT_BENCH)
    assert [t.category for t in of_categories(tasks, ["qa", "mt_bench"])] == [
        *sorted(MT_BENCH),
        "qa",
    ]
    assert [t.category for t in of_categories(tasks, ["math"])] == ["math"]
    with pytest.raises(
        ConfigError, match=r"mean 'mt_bench'.*rag.*mt_bench|mean 'mt_bench'.*mt_bench.*rag"
    ):
        of_categories(tasks, ["mtbench"])
