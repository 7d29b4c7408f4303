"""Prompts to measure with: files in every form they come in, and passages of the standard library."""

import json
from pathlib import Path

import pytest

from forerun import RequestError
from forerun.bench.corpus import excerpts, groups, read_prompts


def encode(text: str) -> list[int]:
    return [ord(c) for c in text]


@pytest.mark.parametrize(
    ("name", "text", "prompts"),
    [
        ("a.txt", "two\nlines", [encode("two\nlines")]),
        ("a.jsonl", '"ab"\n\n[1, 2]\n{"prompt": "c"}\n{"text": [3]}\n', [[97, 98], [1, 2], [99], [3]]),
        ("a.jsonl", '{"question_id": 1, "turns": ["d", "e"]}', [[100]]),
        ("a.json", '["ab", [1, 2]]', [[97, 98], [1, 2]]),
        ("a.json", '{"prompts": [[4, 5]]}', [[4, 5]]),
    ],
)
def test_files(tmp_path: Path, name: str, text: str, prompts: list[list[int]]) -> None:
    (tmp_path / name).write_text(text)
    assert read_prompts(tmp_path / name, encode) == prompts


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.txt", ""), ("a.json", "{"), ("a.json", "{}"), ("a.json", "3"), ("a.json", "[]"), ("a.jsonl", "word"),
        ("a.jsonl", '{"other": 1}'), ("a.jsonl", "[1.5]"), ("a.jsonl", "[true]"), ("a.jsonl", "null"),
    ],
)  # fmt: skip
def test_files_that_hold_no_prompts(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(RequestError):
        read_prompts(tmp_path / name, encode)
    with pytest.raises(RequestError):
        read_prompts(tmp_path / "missing", encode)


def test_passages_are_different_and_of_the_right_length() -> None:
    found = excerpts(encode, 300, 40)  # more than there are files: some files give two
    assert [len(p) for p in found] == [40] * 300 and len({json.dumps(p) for p in found}) > 290
    assert excerpts(encode, 5, 40) == found[:5]
    with pytest.raises(RequestError, match="ask for fewer"):
        excerpts(encode, 3, 10_000_000)


def test_groups() -> None:
    prompts = [[i] for i in range(5)]
    assert groups(prompts, 2) == [[[0], [1]], [[2], [3]]]
    with pytest.raises(RequestError, match="5 prompts, but 6"):
        groups(prompts, 6)
