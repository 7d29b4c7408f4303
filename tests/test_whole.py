"""What is written whole or not at all: what has its name is all there, and what fails leaves
nothing."""

import os
from pathlib import Path
from typing import Any

import pytest

from forerun.errors import ForerunError
from forerun.utils import atomic_directory, atomic_file, write_atomic


def test_a_directory_gets_its_name_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for out in (tmp_path / "a", Path("b")):
        with atomic_directory(out) as work:
            assert work.parent == tmp_path and work.is_dir() and not out.exists()
            (work / "file").write_text("text")
        assert (out / "file").read_text() == "text"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_nothing_stays_of_one_that_fails(tmp_path: Path) -> None:
    """Neither after an error nor after Ctrl-C; what was there under the name stays."""
    there = tmp_path / "there"
    there.mkdir()
    (there / "mine").touch()
    for error, out in ((OSError, tmp_path / "a"), (KeyboardInterrupt, tmp_path / "a")):
        with pytest.raises(error), atomic_directory(out) as work:
            (work / "file").touch()
            raise error
    with pytest.raises(OSError), atomic_directory(there) as work:
        (work / "file").touch()
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == [
        "there",
        "there/mine",
    ]


def test_a_file_gets_its_name_at_the_end(tmp_path: Path) -> None:
    """One that is interrupted leaves what was there, and nothing beside it."""
    path = tmp_path / "a"
    for text, error in (
        ("old", None),
        ("half", OSError),
        ("half", KeyboardInterrupt),
        ("new", None),
    ):
        before = path.read_text() if path.exists() else None
        try:
            with atomic_file(path) as work:
                work.write_text(text)
                assert (
                    work.parent == tmp_path
                    and (path.read_text() if path.exists() else None) == before
                )
                if error:
                    raise error
        except (OSError, KeyboardInterrupt) as raised:
            assert type(raised) is error
        assert path.read_text() == (before if error else text) and list(tmp_path.iterdir()) == [
            path
        ]


def test_a_file_is_replaced_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "round").symlink_to(tmp_path / "round")
    os.mkfifo(tmp_path / "pipe")
    for path in (
        tmp_path,
        tmp_path / "no" / "a",
        tmp_path / "round",
        tmp_path / "pipe",
        Path("/dev/null"),
        Path("a\0"),
    ):
        with pytest.raises(ForerunError, match="cannot be written"):
            write_atomic(path, "text")
