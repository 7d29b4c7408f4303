"""Batch files: an answer to every line, once, the same as the server's."""

import asyncio
import json
from pathlib import Path

import pytest

from forerun.errors import RequestError
from forerun.llm import LLM
from forerun.server import batch
from tests.server.serving import Serving

CHAT = [{"role": "user", "content": "hi"}]
JOBS = [
    (
        "c",
        "/v1/completions",
        {"prompt": "def add(a, b):", "max_tokens": 20, "seed": 3, "temperature": 0.9},
    ),
    ("n", "/v1/completions", {"prompt": ["x = ", "import "], "n": 2, "max_tokens": 9, "seed": 4}),
    (
        "h",
        "/v1/chat/completions",
        {"messages": CHAT, "max_tokens": 12, "seed": 5, "logprobs": True},
    ),
    ("r", "/v1/responses", {"input": "hi", "max_output_tokens": 12, "seed": 6}),
    ("s", "/v1/completions", {"prompt": "x = ", "max_tokens": 6, "seed": 7, "stream": True}),
]


@pytest.fixture
def work(spare: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Runs a batch with the spare model; returns the answers by custom_id, and counts models
    made."""
    monkeypatch.setattr(batch, "LLM", lambda **options: spare)

    def run(lines: list, target: Path = tmp_path / "out.jsonl") -> dict[str, dict]:
        source = tmp_path / "in.jsonl"
        source.write_text(
            "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines)
        )
        batch.run(source, target, {})
        answers = [json.loads(line) for line in target.read_text().splitlines()]
        assert len({a["custom_id"] for a in answers}) == len(answers)
        return {a["custom_id"]: a for a in answers}

    return run


def line(name: str, url: str, body: object) -> dict:
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def essence(value: object) -> object:
    """An answer without what differs from time to time: ids, times, counts of the cache, what
    speculation did."""
    if isinstance(value, dict):
        out = (
            "id",
            "created",
            "created_at",
            "metrics",
            "prompt_tokens_details",
            "input_tokens_details",
        )
        return {k: essence(v) for k, v in value.items() if k not in out}
    return [essence(v) for v in value] if isinstance(value, list) else value


def test_answers_are_the_servers(work, server: Serving) -> None:
    answers = work([line(*job) for job in JOBS])
    assert set(answers) == {name for name, *_ in JOBS}
    for name, url, body in JOBS:
        answer = answers[name]
        assert answer["error"] is None and answer["response"]["status_code"] == 200
        assert answer["id"] and answer["response"]["request_id"]
        assert essence(answer["response"]["body"]) == essence(
            server.answer(url, body | {"stream": False})
        )


def test_a_bad_line_is_an_answer_like_any_other(work) -> None:
    bad = {
        "url": line("url", "/v1/embeddings", {}),
        "no url": {"custom_id": "no url", "body": {}},
        "list url": line("list url", [], {}),  # type: ignore[arg-type]
        "no body": {"custom_id": "no body", "url": "/v1/completions"},
        "field": line("field", "/v1/completions", {"prompt": "x", "more": 1}),
        "range": line("range", "/v1/completions", {"prompt": "x", "temperature": -1}),
        "model": line("model", "/v1/completions", {"prompt": "x", "model": "gpt"}),
        "long": line("long", "/v1/completions", {"prompt": "x = 1\n" * 3000}),
        "body text": line("body text", "/v1/completions", "x"),
        "body list": line("body list", "/v1/completions", [1, 2]),
        "body number": line("body number", "/v1/completions", 5),
        "surrogate": line("surrogate", "/v1/completions", {"prompt": "\ud800"}),
        "grammar": line(
            "grammar",
            "/v1/completions",
            {"prompt": "x", "response_format": {"type": "regex", "regex": "("}},
        ),
    }
    answers = work(
        [*bad.values(), line("good", "/v1/completions", {"prompt": "x", "max_tokens": 2})]
    )
    assert answers.pop("good")["response"]["status_code"] == 200
    statuses = {name: answer["response"]["status_code"] for name, answer in answers.items()}
    assert set(statuses) == set(bad) and all(400 <= status < 500 for status in statuses.values()), (
        statuses
    )
    for answer in answers.values():
        assert set(answer["response"]["body"]["error"]) == {"message", "type", "param", "code"}


def test_more_lines_than_places(work) -> None:
    jobs = [
        line(str(i), "/v1/completions", {"prompt": f"x{i} = ", "max_tokens": 3, "seed": i})
        for i in range(40)
    ]
    answers = work(jobs)
    assert len(answers) == 40 and all(a["response"]["status_code"] == 200 for a in answers.values())


def test_a_cut_output_is_gone_on_with(
    work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, target = [line(*job) for job in JOBS], tmp_path / "out.jsonl"
    first = work(lines)
    whole = target.read_text().splitlines(keepends=True)
    target.write_text("".join(whole[:2]) + whole[2][: len(whole[2]) // 2])  # as a crash leaves it
    again = work(lines)
    assert target.read_text().splitlines(keepends=True)[:2] == whole[:2]  # not done again
    assert {n: essence(a["response"]["body"]) for n, a in again.items()} == {
        n: essence(a["response"]["body"]) for n, a in first.items()
    }

    def never(**options: object) -> LLM:
        raise AssertionError("there is nothing to do, no model is needed")

    monkeypatch.setattr(batch, "LLM", never)
    before = target.read_bytes()
    work(lines)
    assert target.read_bytes() == before


def test_an_interrupted_batch_is_gone_on_with(
    work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spare: LLM
) -> None:
    """The engine's failure is nobody's fault: such a line is done again the next time."""
    step, calls = spare.engine.step, []

    def fails() -> list:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("on purpose")
        return step()

    monkeypatch.setattr(spare.engine, "step", fails)
    lines = [line("a", "/v1/completions", {"prompt": "x", "max_tokens": 30, "speculative": False})]
    work(lines)
    monkeypatch.setattr(spare.engine, "step", step)
    del spare.engine.step
    assert work(lines)["a"]["response"]["status_code"] == 200


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{\n", "line 1 is not JSON"),
        ('{"custom_id": "a", "url": "x"}\nnope\n', "line 2 is not JSON"),
        ("[" * 100_000, "line 1 is not JSON"),
        ("5\n", "line 1: a request needs a custom_id"),
        ("{}\n", "line 1: a request needs a custom_id"),
        ('{"custom_id": 5}\n', "line 1: a request needs a custom_id"),
        (
            '\n{"custom_id": "a"}\n\n{"custom_id": "a"}\n',
            "line 4: the custom_id 'a' was there before",
        ),
    ],
    ids=["cut", "second", "deep", "number", "empty", "id", "twice"],
)
def test_a_bad_file_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(text)
    with pytest.raises(RequestError) as error:
        batch.run(source, target, {})
    assert said in str(error.value) and len(str(error.value).splitlines()) == 1
    assert not target.exists()  # nothing is begun


def test_files_that_are_none(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"custom_id": "a"}\n')
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(b'{"custom_id": "\xff"}\n')
    for wrong in (tmp_path / "missing.jsonl", tmp_path, latin):
        with pytest.raises(RequestError, match="cannot be read"):
            batch.run(wrong, tmp_path / "out.jsonl", {})
    for wrong in (tmp_path / "no" / "folder.jsonl", tmp_path):
        with pytest.raises(RequestError, match="cannot be"):
            batch.run(source, wrong, {})
    for content in (
        "something else\n",
        "5\n",
        "[]\n",
        '{"id": 1}\n',
        '{"custom_id": "a"}\n',
        '{"custom_id": []}\n',
        b"\xff\xfe\x00\xd8\n",
    ):
        other = tmp_path / "other.txt"
        other.write_bytes(content if isinstance(content, bytes) else content.encode())
        before = other.read_bytes()
        with pytest.raises(RequestError, match="is no batch output"):
            batch.run(source, other, {})
        assert other.read_bytes() == before


def test_a_file_of_ones_own_is_not_emptied(tmp_path: Path) -> None:
    """Without a line's end it looks like nothing but a cut line: it must not be thrown away."""
    source, notes = tmp_path / "in.jsonl", tmp_path / "notes.txt"
    source.write_text('{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x"}}\n')
    notes.write_text("my only copy")
    with pytest.raises(RequestError, match="is no batch output"):
        batch.run(source, notes, {})
    assert notes.read_text() == "my only copy"


def test_separators_inside_texts_end_no_line(work) -> None:
    """JSON may hold U+2028, U+0085 and such as they are; only a newline ends a line."""
    body = {"prompt": "a\u2028b\u0085c\u000bd".replace("\u000b", ""), "max_tokens": 2}
    text = json.dumps(line("a", "/v1/completions", body), ensure_ascii=False) + "\r\n"
    assert work([text])["a"]["response"]["status_code"] == 200
    assert work([text])["a"]["response"]["status_code"] == 200  # and its output can be gone on with


def test_nobody_goes_away() -> None:
    request = batch._http("/v1/completions")

    async def gone() -> bool:
        return await asyncio.wait_for(request.is_disconnected(), 5)

    assert asyncio.run(gone()) is False
