"""Tasks: the built-in set, files in every format, passages of the library, chat templates."""

import json
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from forerun import ConfigError, RequestError
from forerun.bench.pair import Pair
from forerun.measure.workloads import (
    MT_BENCH,
    TASKS,
    Task,
    builtin,
    choose_tasks,
    conversation,
    excerpts,
    of_categories,
    read_tasks,
    token_ids,
)
from tests import tiny

CATEGORIES = ["completion", "edit", "grounded", "summary"]
CATEGORIES += ["translation", "chat", "mathematics", "free"]
MAX_CHARACTERS = 1000  # some 350 tokens, so that small contexts hold an answer too
SPEED_BENCH = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"

Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def make(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return make


def test_the_builtin_set() -> None:
    """Eight categories of four short tasks; predictions and documents are part of the prompts."""
    tasks = builtin()
    assert Counter(t.category for t in tasks) == dict.fromkeys(CATEGORIES, 4)
    assert list(dict.fromkeys(t.category for t in tasks)) == CATEGORIES
    assert len({t.prompt for t in tasks}) == 32
    for t in tasks:
        assert isinstance(t.prompt, str) and len(t.prompt) <= MAX_CHARACTERS
        assert (t.prediction is not None) == (t.category == "edit")
        assert (t.prediction or "") in t.prompt
        assert bool(t.documents) == (t.category == "grounded")
        assert all(document in t.prompt for document in t.documents)
        is_transcript = t.prompt.startswith("User:") and t.prompt.endswith("\nAssistant:")
        assert t.category != "chat" or is_transcript


def test_the_builtin_set_is_packaged() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["forerun"]
    assert any(TASKS in TASKS.parents[1].glob(pattern) for pattern in patterns)


TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("name", "text", "prompts"),
    [
        ("a.txt", "two\nlines", ["two\nlines"]),
        ("a.py", "print()", ["print()"]),
        ("a.md", "\ufeffmark", ["mark"]),
        ("a.jsonl", '"ab"\n\n[1, 2]\n{"prompt": "c"}\n{"text": [3]}\n', ["ab", [1, 2], "c", [3]]),
        ("A.JSONL", '"ab"\n"c"', ["ab", "c"]),
        ("a.jsonl", '"a\u2028b"\n"c\x85d"', ["a\u2028b", "c\x85d"]),
        (
            "a.jsonl",
            '{"question_id": 1, "category": "qa", "turns": ["d", "e"], "reference": ["f"]}',
            ["d"],
        ),
        ("a.json", '["ab", [1, 2], {"text": "c"}]', ["ab", [1, 2], "c"]),
        ("a.json", '{"prompts": [[4, 5]], "recipe": {}}', [[4, 5]]),
        ("a.json", json.dumps([{"prompt": TALK}]), [TALK]),
        (
            "a.jsonl",
            json.dumps({"src_id": "x", "messages": [*TALK, {"role": "user", "content": "2"}]}),
            [TALK],
        ),
    ],
)
def test_file_formats(write: Write, name: str, text: str, prompts: list) -> None:
    """A text file is one prompt; JSON lines end at newlines only, not at other line breaks."""
    assert [t.prompt for t in read_tasks(write(name, text))] == prompts


def test_fields_of_tasks(write: Write) -> None:
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
        Task("a", "edit", "x", "y", ("u", "v")),
        Task("81", "writing", "x"),
        Task("line 3", "file", "x"),
    ]
    assert [t.id for t in read_tasks(write("a.json", '["x", "y"]'))] == ["prompt 1", "prompt 2"]


def line(**fields: object) -> tuple[str, str]:
    """Return a file whose second line is an object with these fields."""
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
    "a fraction": (("a.jsonl", "[1.5]"), "[1.5] is no prompt"),
    "a boolean": (("a.jsonl", "[true]"), "[true] is no prompt"),
    "a token below 0": (("a.jsonl", "[1, -1]"), "[1, -1] is no prompt"),
    "no tokens": (("a.jsonl", "[]"), "[] is no prompt"),
    "several texts": (("a.jsonl", '["x", "y"]'), "is no prompt"),
    "no such field": (line(promt="x"), "line 2: there is no field 'promt': did you mean 'prompt'?"),
    "another field": (line(prompt="x", zebra=1), "there is no field 'zebra': known: category"),
    "a field like Spec-Bench's": (line(turn=["x"]), "did you mean 'turns'?"),
    "no prompt": (line(category="edit"), "line 2: it has no prompt: give one of prompt"),
    "two prompts": (line(prompt="x", text="y"), "it has prompt and text: give one"),
    "an empty prompt": (line(prompt=""), "line 2: the prompt is empty"),
    "half a character": (
        ("a.jsonl", '{"prompt": "\\ud83d"}'),
        "line 1: the prompt is not valid Unicode",
    ),
    "a prediction that is no text": (
        line(prompt="x", prediction=["y"]),
        'prediction must be a text, not ["y"]',
    ),
    "an empty prediction": (line(prompt="x", prediction=""), "the prediction is empty"),
    "one document": (line(prompt="x", documents="y"), 'documents must be a list of texts, not "y"'),
    "documents that are no texts": (
        line(prompt="x", documents=["y", 3]),
        "a document must be a text, not 3",
    ),
    "a category that is no text": (
        line(prompt="x", category=3),
        "the category must be a text, not 3",
    ),
    "an id that is no text": (line(prompt="x", id=True), "the id must be a text, not true"),
    "the same id": (
        ("a.json", '[{"id": 7, "text": "x"}, {"id": "7", "text": "y"}]'),
        'prompt 2: the id "7" is used twice',
    ),
    "no turns": (line(turns=[]), "turns and messages must be lists, not []"),
    "a turn that is a text": (line(turns="x"), 'turns and messages must be lists, not "x"'),
    "an empty turn": (line(turns=["", "x"]), "the prompt is empty"),
    "turns of numbers": (line(turns=[1]), "there is no user message"),
    "messages without a user": (line(messages=TALK[:1]), "there is no user message"),
    "messages that are numbers": (
        line(messages=[3, TALK[1]]),
        "is no prompt: give a text, token ids or messages",
    ),
    "a message without content": (
        line(prompt=[{"role": "user"}]),
        "the content of a message must be a text, not null",
    ),
    "a turn to be filled in": (
        line(turns=[f"{SPEED_BENCH}\n\n{{question}}"]),
        "line 2: the prompt is a placeholder",
    ),
    "a message to be filled in": (
        line(messages=[{"role": "user", "content": SPEED_BENCH}]),
        "is a placeholder",
    ),
    "a long value": (line(prompt={"x": "y" * 500}), '{"x": "yyyy'),
}


@pytest.mark.parametrize(("file", "expected"), BAD.values(), ids=BAD.keys())
def test_invalid_files_are_reported_in_one_line(
    write: Write, file: tuple[str, str], expected: str
) -> None:
    """Each error is one short line that names the file and the mistake."""
    with pytest.raises(RequestError) as caught:
        read_tasks(write(*file))
    message = str(caught.value)
    assert expected in message and file[0] in message
    assert "\n" not in message and len(message.replace(str(write(*file)), "")) < 300


def test_unreadable_files_are_reported_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "binary.jsonl").write_bytes(bytes(range(256)))
    (tmp_path / "zeros.txt").write_bytes(bytes(64))
    for name, expected in [
        ("missing", "No such file"),
        (".", "Is a directory"),
        ("binary.jsonl", "not UTF-8"),
        ("zeros.txt", "not UTF-8"),
    ]:
        with pytest.raises(RequestError, match=f"cannot be read: .*{expected}") as caught:
            read_tasks(tmp_path / name)
        assert "\n" not in str(caught.value)


def test_categories() -> None:
    tasks = builtin()
    assert of_categories(tasks, []) == tasks
    assert of_categories(tasks, ["free", "edit", "edit"]) == [
        t for t in tasks if t.category in ("edit", "free")
    ]
    with pytest.raises(ConfigError, match=r"'edits': did you mean 'edit'\?"):
        of_categories(tasks, ["free", "edits"])
    with pytest.raises(ConfigError, match="no category 'zebra': known: chat"):
        of_categories(tasks, ["zebra"])
    with pytest.raises(ConfigError, match="'mt_bench'"):
        of_categories(tasks, ["mt_bench"])


def test_spec_bench(write: Write) -> None:
    """Its thirteen categories are kept, and `mt_bench` selects eight of them, as in its tables."""
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
    with pytest.raises(ConfigError, match="did you mean 'mt_bench'"):
        of_categories(tasks, ["mtbench"])


def test_passages_differ_and_have_the_requested_length() -> None:
    def encode(text: str) -> list[int]:
        return [ord(c) for c in text]

    found = excerpts(encode, 300, 40)  # more than there are files
    assert [len(p) for p in found] == [40] * 300 and len({json.dumps(p) for p in found}) > 290
    assert excerpts(encode, 5, 40) == found[:5]
    with pytest.raises(RequestError, match="ask for fewer"):
        excerpts(encode, 3, 10_000_000)


def test_choice_of_tasks(pair: Pair, write: Write) -> None:
    """Tasks come from a file, built-in categories, prompts beside the model, or passages."""
    target = str(pair.directory / "target")
    assert [t.category for t in choose_tasks(target, None, "chat", 1, 1)] == ["chat"] * 4
    assert len(choose_tasks(target, None, "all", 1, 1)) == 32
    assert choose_tasks(target, write("p.txt", "hello"), None, 1, 1)[0].prompt == "hello"
    assert len(choose_tasks(target, None, None, 1, 1)) == 6
    passages = choose_tasks(str(tiny.repetitive()), None, None, 2, 9)
    assert [len(task.prompt) for task in passages] == [128] * 10


def test_written_out_dialogues_become_messages() -> None:
    """This holds only for dialogues that end before an answer; other texts are one message."""
    user = {"role": "user", "content": "a"}
    dialogue = "User: a\nAssistant: b\nUser: c: d\nAssistant:"
    answer = {"role": "assistant", "content": "b"}
    assert conversation(dialogue) == [user, answer, {"role": "user", "content": "c: d"}]
    assert conversation("User: a\nAssistant:") == [user]
    for text in (
        "hello",
        "Hm.\nUser: a\nAssistant:",
        "User: a\nAssistant: b",
        "User: \nAssistant:",
    ):
        assert conversation(text) == [{"role": "user", "content": text}]


def test_token_ids_of_prompts(pair: Pair) -> None:
    target = str(pair.directory / "target")
    tasks = [Task("a", "file", [5, 6]), Task("b", "file", "def f"), Task("c", "chat", "def f")]
    ids, text, chat = token_ids(target, tasks)
    assert ids == [5, 6] and text == chat  # without a chat template a text is continued
    assert token_ids("./nowhere", tasks[:1]) == [[5, 6]]
