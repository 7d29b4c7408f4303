"""Small helpers: atomic writes, validators of numbers, and JSON lines."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from forerun.cli.conversation import Conversation, read
from forerun.errors import ConfigError, ForerunError, first_line
from forerun.utils import (
    atomic_directory,
    atomic_file,
    check_integer,
    check_number,
    check_numbers,
    json_line,
    write_atomic,
)


def test_an_atomic_directory_is_renamed_when_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for out in (tmp_path / "a", Path("b")):
        with atomic_directory(out) as work:
            assert work.parent == tmp_path and work.is_dir() and not out.exists()
            (work / "file").write_text("text")
        assert (out / "file").read_text() == "text"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_a_failed_atomic_directory_is_removed(tmp_path: Path) -> None:
    """This holds for errors and Ctrl-C; an existing directory of that name stays."""
    there = tmp_path / "there"
    there.mkdir()
    (there / "mine").touch()
    for error, out in ((OSError, tmp_path / "a"), (KeyboardInterrupt, tmp_path / "a")):
        with pytest.raises(error), atomic_directory(out) as work:
            (work / "file").touch()
            raise error
    with pytest.raises(OSError), atomic_directory(there) as work:
        (work / "file").touch()
    assert list(tmp_path.rglob("*")) == [there, there / "mine"]


def test_an_atomic_file_is_renamed_when_complete(tmp_path: Path) -> None:
    """An interrupted write leaves the old file and no temporary file."""
    path = tmp_path / "a"
    for text, error in (
        ("old", None),
        ("half", OSError),
        ("half", KeyboardInterrupt),
        ("new", None),
    ):
        before = path.read_text() if path.exists() else None
        with pytest.raises(error) if error else nullcontext(), atomic_file(path) as work:
            work.write_text(text)
            assert work.parent == tmp_path
            assert (path.read_text() if path.exists() else None) == before
            if error:
                raise error
        assert path.read_text() == (before if error else text)
        assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_replaced_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, link = tmp_path / "a", tmp_path / "link"
    write_atomic(path, "old")
    link.symlink_to(path)
    write_atomic(link, "new")
    assert link.is_symlink() and path.read_text() == "new"

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(ForerunError, match="cannot be written: No space left on device"):
        write_atomic(path, "newer")
    assert path.read_text() == "new" and sorted(tmp_path.iterdir()) == [path, link]


def test_paths_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    (tmp_path / "round").symlink_to(tmp_path / "round")
    os.mkfifo(tmp_path / "pipe")
    for name in ("", "no/a", "round", "pipe", "/dev/null", "a\0"):
        with pytest.raises(ForerunError, match="cannot be written"):
            write_atomic(tmp_path / name, "text")


# Numbers in options: invalid values and those out of range are refused in one line with the name.


@dataclass
class Settings:
    rows: int = 4
    seed: int = 0
    limit: int | None = None
    share: float = 0.5
    name: str = "x"


@pytest.mark.parametrize("value", [1, 5, 64])
def test_integers_within_their_range_are_valid(value: int) -> None:
    check_integer("depth", value, 1, 64)
    check_number("depth", value, 1, 64)


@pytest.mark.parametrize(
    "value", [0, 65, -1, 1 << 80, 1.0, True, None, "4", float("nan"), float("inf")]
)
def test_integers_out_of_range_are_refused(value: object) -> None:
    with pytest.raises(
        ConfigError, match=r"^depth=.* is out of range: give a whole number from 1 to 64$"
    ):
        check_integer("depth", value, 1, 64)


@pytest.mark.parametrize(
    "value", [-0.1, 1.01, True, None, "0.5", float("nan"), float("inf"), -float("inf")]
)
def test_numbers_out_of_range_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^share=.* is out of range: give a number from 0 to 1$"):
        check_number("share", value, 0, 1)


def test_numbers_too_large_for_a_float() -> None:
    check_number("seconds", 10**400, 0)
    for value in (10**400, -(10**400)):
        with pytest.raises(ConfigError, match=r"^seconds="):
            check_number("seconds", value, 0, 1 << 31)


def test_ranges_without_an_upper_bound() -> None:
    check_number("seconds", 1e300, 0)
    for check, what in ((check_integer, "a whole number"), (check_number, "a number")):
        with pytest.raises(ConfigError, match=f"seconds=-1 is out of range: give {what} from 0 up"):
            check("seconds", -1, 0)
    with pytest.raises(ConfigError, match="from 0 up"):
        check_integer("seconds", 1 << 31, 0)


def test_all_numbers_of_a_dataclass_are_checked() -> None:
    check_numbers(Settings(), {"rows": 1})
    check_numbers(Settings(limit=0), {"rows": 1})
    wrong = {"rows": (0, None), "seed": (-1,), "limit": (-1,), "share": (-0.1, 1e9)}
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(ConfigError, match=f"^{name}="):
                check_numbers(Settings(**{name: value}), {"rows": 1})


# JSON lines are one line for every reader, also for readers that split at Unicode line separators.


LINE_ENDS = [chr(code) for code in range(0x3000) if len(f"a{chr(code)}b".splitlines()) > 1]


@pytest.mark.parametrize("end", LINE_ENDS, ids=lambda end: f"U+{ord(end):04X}")
@pytest.mark.parametrize("ascii_only", [False, True])
def test_json_lines_contain_no_line_separators(end: str, ascii_only: bool) -> None:
    value = {f"key{end}": [f"one{end}two", "caf\u00e9 \U0001f600"]}
    line = json_line(value, ascii_only)
    assert line.splitlines() == [line] and json.loads(line) == value
    assert line.isascii() is ascii_only


def test_a_saved_conversation_is_one_line(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "".join(LINE_ENDS)}]
    conversation = Conversation.__new__(Conversation)
    conversation.messages, conversation.forgotten = messages, []
    conversation.save(str(tmp_path / "saved.json"))
    text = (tmp_path / "saved.json").read_bytes().decode()
    assert len(text.splitlines()) == 1 and read(tmp_path / "saved.json") == messages


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("\n a\nb"), "a"),
        (ValueError("a | b"), "a | b"),
        (ValueError(), "ValueError()"),
        (ValueError(" \n"), "ValueError(' \\n')"),
    ],
)
def test_first_line_of_an_error(error: Exception, line: str) -> None:
    """Errors without a message give their repr."""
    assert first_line(error) == line
