"""`forerun index`: indexed files and text, unchanged files, and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forerun import RequestError
from forerun.cli.index import build
from forerun.cli.progress import nothing
from forerun.draft.corpus import LIST, Index
from forerun.models.tokenizer import Tokenizer
from tests import tiny
from tests.cli.test_main import MODEL


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer(tiny.repetitive())


def files(directory: Path) -> Path:
    directory.mkdir()
    (directory / "a.py").write_text("def add(a, b):\n    return a + b\n")
    (directory / "b.md").write_text("# Words\n")
    (directory / "bytes.py").write_bytes(b"\xff\xfe\x00")
    (directory / "image.png").write_bytes(b"x")
    (directory / ".hidden").mkdir()
    (directory / ".hidden" / "c.py").write_text("secret")
    question = {"role": "user", "content": "Hello?"}
    answer = {"role": "assistant", "content": "def add(a, b):"}
    lines = [{"messages": [question, answer]}, {"text": "return b"}]
    (directory / "log.JSONL").write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    return directory


def text_of(index: Index, tokenizer: Tokenizer) -> str:
    return "|".join(
        tokenizer.decode([t for t in segment.tokens.tolist() if t < index.vocab])
        for segment in index.segments
    )


def test_only_texts_code_and_answers_are_indexed(tmp_path: Path, tokenizer: Tokenizer) -> None:
    made = build([files(tmp_path / "in")], tmp_path / "out", tokenizer, 1 << 16, nothing)
    assert (made.files, made.unchanged, made.unreadable) == (3, 0, 1)
    assert made.tokens == made.total > 10
    text = text_of(Index(tmp_path / "out"), tokenizer)
    assert text == "def add(a, b):\n    return a + b\n# Words\ndef add(a, b):return b"


def test_unchanged_files_are_not_read_again(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source, out = files(tmp_path / "in"), tmp_path / "out"
    first = build([source, source / "a.py"], out, tokenizer, 1 << 16, nothing)
    again = build([source], out, tokenizer, 1 << 16, nothing)
    assert (again.files, again.unchanged, again.total) == (0, 3, first.total)
    assert len(Index(out).segments) == 1
    (source / "b.md").write_text("# Other words\n")
    third = build([source], out, tokenizer, 1 << 16, nothing)
    assert (third.files, third.unchanged) == (1, 2)
    assert "Other words" in text_of(Index(out), tokenizer)


def test_files_of_an_interrupted_build_are_overwritten(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "0001.tokens").write_bytes(b"1234")
    assert build([files(tmp_path / "in")], tmp_path / "out", tokenizer, 1 << 16, nothing).files == 3
    assert Index(tmp_path / "out").count > 10


@pytest.mark.parametrize("wrong", ["missing", "json", "no index", "a file"])
def test_invalid_input_is_refused_without_an_index(
    wrong: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    source, out = files(tmp_path / "in"), tmp_path / "out"
    if wrong == "json":
        (source / "log.jsonl").write_text("{]")
    if wrong == "no index":
        out.mkdir()
        (out / "mine").write_text("precious")
    if wrong == "a file":
        out.write_text("precious")
    paths = [tmp_path / "nowhere" if wrong == "missing" else source]
    with pytest.raises(RequestError):
        build(paths, out, tokenizer, 1 << 16, nothing)
    assert not (out / LIST).exists() and (wrong in ("no index", "a file")) == out.exists()


def test_the_command_prints_a_summary(tmp_path: Path, forerun) -> None:
    words = ["index", str(files(tmp_path / "in")), "--out", str(tmp_path / "out"), *MODEL]
    code, out, _ = forerun(*words, "--json")
    assert code == 0 and json.loads(out)["files"] == 3
    code, out, err = forerun(*words)
    assert code == 0 and "--draft retrieval:" in out and "3 unchanged" in err


def test_files_that_cannot_be_read_are_named(tmp_path: Path, forerun) -> None:
    source = files(tmp_path / "in")
    for i in range(7):
        (source / f"empty{i}.txt").write_text("")
    code, _, err = forerun("index", str(source), "--out", str(tmp_path / "out"), *MODEL)
    assert code == 0
    line = next(line for line in err.splitlines() if line.startswith("not UTF-8 text, or empty: "))
    assert str(source / "bytes.py") in line
    assert str(source / "empty3.txt") in line
    assert line.endswith(" and 3 more")
