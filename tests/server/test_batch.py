"""Batch files: every line gets one response, which equals that of the server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forerun.errors import RequestError
from forerun.llm import LLM
from forerun.server import batch
from tests.server.serving import Serving, make_engine_fail

Json = dict[str, Any]
COMPLETIONS = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


def line(name: str, url: Any, body: Any) -> Json:
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


CODE = {"prompt": "def add(a, b):", "max_tokens": 20, "seed": 3, "temperature": 0.9}
LINES = [
    line("completion", COMPLETIONS, CODE),
    line("many", COMPLETIONS, {"prompt": ["x = ", "import "], "n": 2, "max_tokens": 9, "seed": 4}),
    line(
        "chat",
        "/v1/chat/completions",
        {"messages": HI, "max_tokens": 12, "seed": 5, "logprobs": True},
    ),
    line("response", "/v1/responses", {"input": "hi", "max_output_tokens": 12, "seed": 6}),
    line("stream", COMPLETIONS, {"prompt": "x = ", "max_tokens": 6, "seed": 7, "stream": True}),
]


@pytest.fixture
def run(spare: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Run a batch with the spare model and return the responses by custom_id."""
    monkeypatch.setattr(batch, "LLM", lambda **options: spare)

    def run(lines: list[Json | str]) -> dict[str, Json]:
        source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        texts = [text if isinstance(text, str) else json.dumps(text) + "\n" for text in lines]
        source.write_text("".join(texts))
        batch.run(source, target, {})
        answers = [json.loads(text) for text in target.read_text().splitlines()]
        assert len({answer["custom_id"] for answer in answers}) == len(answers)
        return {answer["custom_id"]: answer for answer in answers}

    return run


CHANGING = ("id", "created", "created_at", "metrics", "prompt_tokens_details")


def stable(value: Any) -> Any:
    """Drop what differs between runs: ids, times, counts of the cache, speculation."""
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if k not in (*CHANGING, "input_tokens_details")}
        return {name: stable(item) for name, item in kept.items()}
    return [stable(item) for item in value] if isinstance(value, list) else value


def test_responses_equal_those_of_the_server(run: Any, server: Serving) -> None:
    answers = run(LINES)
    assert sorted(answers) == sorted(request["custom_id"] for request in LINES)
    for request in LINES:
        answer = answers[request["custom_id"]]
        assert answer["error"] is None and answer["response"]["status_code"] == 200
        assert answer["id"] and answer["response"]["request_id"]
        expected = server.answer(request["url"], request["body"] | {"stream": False})
        assert stable(answer["response"]["body"]) == stable(expected)


def test_invalid_lines_are_answered_with_errors(run: Any) -> None:
    regex = {"type": "regex", "regex": "("}
    wrong = [
        line("url", "/v1/embeddings", {}),
        {"custom_id": "no url", "body": {}},
        line("list url", [], {}),
        {"custom_id": "no body", "url": COMPLETIONS},
        *(line(f"body {body!r}", COMPLETIONS, body) for body in ("x", [1, 2], 5)),
        line("field", COMPLETIONS, {"prompt": "x", "more": 1}),
        line("range", COMPLETIONS, {"prompt": "x", "temperature": -1}),
        line("model", COMPLETIONS, {"prompt": "x", "model": "gpt"}),
        line("long", COMPLETIONS, {"prompt": "x = 1\n" * 3000}),
        line("surrogate", COMPLETIONS, {"prompt": "\ud800"}),
        line("grammar", COMPLETIONS, {"prompt": "x", "response_format": regex}),
    ]
    answers = run([*wrong, line("good", COMPLETIONS, {"prompt": "x", "max_tokens": 2})])
    assert answers.pop("good")["response"]["status_code"] == 200
    assert answers.keys() == {request["custom_id"] for request in wrong}
    for name, answer in answers.items():
        assert 400 <= answer["response"]["status_code"] < 500, name
        error = answer["response"]["body"]["error"]
        assert set(error) == {"message", "type", "param", "code"}


def test_more_lines_than_slots(run: Any) -> None:
    bodies = [{"prompt": f"x{i} = ", "max_tokens": 3, "seed": i} for i in range(40)]
    answers = run([line(str(i), COMPLETIONS, body) for i, body in enumerate(bodies)])
    assert len(answers) == 40
    assert all(answer["response"]["status_code"] == 200 for answer in answers.values())


def test_a_truncated_output_is_continued(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out.jsonl"
    first = run(LINES)
    lines = target.read_text().splitlines(keepends=True)
    target.write_text("".join(lines[:2]) + lines[2][: len(lines[2]) // 2])  # as a crash leaves it
    again = run(LINES)
    assert target.read_text().splitlines(keepends=True)[:2] == lines[:2]  # not done again
    for name, answer in again.items():
        assert stable(answer["response"]["body"]) == stable(first[name]["response"]["body"])

    def never(**options: Any) -> LLM:
        raise AssertionError("nothing is left to do, so no model is needed")

    monkeypatch.setattr(batch, "LLM", never)
    before = target.read_bytes()
    run(LINES)
    assert target.read_bytes() == before


def test_failures_of_the_engine_are_retried(
    run: Any, monkeypatch: pytest.MonkeyPatch, spare: LLM
) -> None:
    body = {"prompt": "x", "max_tokens": 30, "speculative": False}
    with monkeypatch.context() as patch:
        make_engine_fail(spare, patch, after=2)
        assert run([line("a", COMPLETIONS, body)])["a"]["response"]["status_code"] == 503
    assert run([line("a", COMPLETIONS, body)])["a"]["response"]["status_code"] == 200


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{\n", "line 1 is not JSON"),
        ('{"custom_id": "a", "url": "x"}\nnope\n', "line 2 is not JSON"),
        ("[" * 100_000, "line 1 is not JSON"),
        ("5\n", "line 1: a request needs a custom_id"),
        ('{"custom_id": 5}\n', "line 1: a request needs a custom_id"),
        ('\n{"custom_id": "a"}\n\n{"custom_id": "a"}\n', "line 4: the custom_id 'a' is used twice"),
    ],
    ids=["cut", "second", "deep", "number", "id", "twice"],
)
def test_an_invalid_input_is_reported_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(text)
    with pytest.raises(RequestError) as error:
        batch.run(source, target, {})
    assert message in str(error.value) and len(str(error.value).splitlines()) == 1
    assert not target.exists()


def test_unusable_files_are_refused(tmp_path: Path) -> None:
    source, latin = tmp_path / "in.jsonl", tmp_path / "latin.jsonl"
    source.write_text('{"custom_id": "a"}\n')
    latin.write_bytes(b'{"custom_id": "\xff"}\n')
    for wrong in (tmp_path / "missing.jsonl", tmp_path, latin):
        with pytest.raises(RequestError, match="cannot be read"):
            batch.run(wrong, tmp_path / "out.jsonl", {})
    for wrong in (tmp_path / "no" / "folder.jsonl", tmp_path):
        with pytest.raises(RequestError, match="cannot be"):
            batch.run(source, wrong, {})


@pytest.mark.parametrize(
    "content",
    [
        b"my only copy",
        b"text\n",
        b"5\n",
        b'{"id": 1}\n',
        b'{"custom_id": []}\n',
        b"\xff\xfe\0\xd8\n",
    ],
)
def test_other_files_are_not_overwritten(tmp_path: Path, content: bytes) -> None:
    """A text without a newline looks like a truncated line, which must not be dropped."""
    source, other = tmp_path / "in.jsonl", tmp_path / "notes.txt"
    source.write_text('{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x"}}\n')
    other.write_bytes(content)
    with pytest.raises(RequestError, match="is no batch output"):
        batch.run(source, other, {})
    assert other.read_bytes() == content


def test_only_a_newline_ends_a_line(run: Any) -> None:
    """JSON may hold U+2028 and U+0085 as they are."""
    body = {"prompt": "a\u2028b\u0085c", "max_tokens": 2}
    text = json.dumps(line("a\u2028b", COMPLETIONS, body), ensure_ascii=False) + "\r\n"
    for _ in range(2):  # the second run continues the output of the first
        assert run([text])["a\u2028b"]["response"]["status_code"] == 200
