"""What is remembered of measurements: kept, replaced, shared, and never a reason to fail."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from forerun.catalogue import memory
from forerun.catalogue.memory import FILE, recall, remember
from forerun.errors import RequestError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept"


def test_the_best_of_each_kind_of_text_comes_first(folder: Path) -> None:
    assert recall() == [] and not folder.exists(), "asking leaves nothing behind"
    remember("t", "slow", "model", "code", 3.0, 1.1)
    remember("t", "fast", "eagle3", "code", 2.5, 1.7, machine="here", passes=9)
    remember("t", "counted", "eagle3", "code", 9.0)
    remember("t", "slow", "model", "law", 2.0, 1.4)
    remember("other", "slow", "model", "law", 2.0, 1.4)
    assert [(m.category, m.drafter) for m in recall("t")] == [
        ("code", "fast"), ("code", "slow"), ("code", "counted"), ("law", "slow"),
    ]  # fmt: skip
    assert len(recall()) == 5 and recall("nobody") == []
    first = recall("t")[0]
    assert (first.machine, first.passes, first.times_plain) == (
        "here",
        9,
        1.7,
    ) and first.seconds > 0


def test_the_same_once_more_takes_its_place() -> None:
    remember("t", "d", "eagle3", "code", 2.0, 1.1)
    remember("t", "d", "eagle3", "code", 2.2, 1.2)
    remember("t", "d", "eagle3", "code", 2.2, 1.2, temperature=0.8)
    assert [(m.accepted_length, m.temperature) for m in recall("t")] == [(2.2, 0.0), (2.2, 0.8)]


@pytest.mark.parametrize(
    "wrong",
    [
        ("", "d", "k", "c", 1.0),
        ("t", "d" * 2000, "k", "c", 1.0),
        ("t", "d", "k", "c", float("nan")),
        ("t", "d", "k", "c", True),
        ("t", "d", "k", "c", 0.0),
        ("t", "d", "k", "c", 1.0, -1.0),
        ("t", "d", "k", "c", 1.0, float("inf")),
        ("t", "d", "k", None, 1.0),
    ],
)
def test_what_is_no_measurement_is_refused(wrong: tuple) -> None:
    with pytest.raises(RequestError):
        remember(*wrong)
    assert recall() == []


DAMAGE = {
    "no database": lambda path: path.write_bytes(b"not at all " * 1000),
    "cut in the middle": lambda path: path.write_bytes(path.read_bytes()[:6000]),
    "pages overwritten": lambda path: path.write_bytes(path.read_bytes()[:100] + b"\xff" * 20000),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_file_is_set_aside(
    how: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for i in range(30):
        remember("t", f"d{i}" * 100, "eagle3", "code", 2.0)
    for behind in ("-wal", "-shm"):
        (folder / (FILE + behind)).unlink(missing_ok=True)
    DAMAGE[how](folder / FILE)
    capsys.readouterr()
    assert recall("t") == []
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "is damaged: it is set aside" in err
    assert (folder / f"{FILE}.damaged").exists()
    remember("t", "new", "eagle3", "code", 2.0)
    assert [m.drafter for m in recall("t")] == ["new"] and not capsys.readouterr().err


def test_a_database_of_something_else_is_set_aside(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.mkdir()
    with sqlite3.connect(folder / FILE) as db:
        db.execute("CREATE TABLE measurements (a)")
        db.execute("PRAGMA user_version = 1")
    db.close()
    remember("t", "d", "eagle3", "code", 2.0)
    assert "set aside" in capsys.readouterr().err and len(recall("t")) == 1


def test_rows_of_other_types_are_left_out(folder: Path) -> None:
    remember("t", "d", "eagle3", "code", 2.0)
    with sqlite3.connect(folder / FILE) as db:
        db.execute("INSERT INTO measurements (target, drafter, category) VALUES ('t', x'00', 5)")
        db.execute("UPDATE measurements SET accepted_length = 'much' WHERE drafter = 'no'")
        whole = "('t', ?, 'eagle3', 'code', ?, ?, 'auto', 0.0, '', 9, 1.0)"
        for i, figures in enumerate(
            [(-2.0, None), (2.0, -1.0), (float("inf"), None), (float("nan"), 1.0), (0, None)]
        ):
            db.execute(f"INSERT INTO measurements VALUES {whole}", (f"wrong {i}", *figures))
    db.close()
    assert [m.drafter for m in recall("t")] == ["d"]


def test_what_cannot_be_kept_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.write_text("a file where the folder should be")
    remember("t", "d", "eagle3", "code", 2.0)
    err = capsys.readouterr().err
    assert err.startswith("note: ") and err.count("\n") == 1 and recall("t") == []
    monkeypatch.setenv("FORERUN_CACHE", "off")
    remember("t", "d", "eagle3", "code", 2.0)
    assert memory.place() is None and recall() == [] and not capsys.readouterr().err


@pytest.mark.parametrize("kind", ["directory", "pipe"])
def test_something_else_in_its_place_is_one_line(
    kind: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.mkdir()
    (os.mkfifo if kind == "pipe" else os.mkdir)(folder / FILE)
    assert recall("t") == []
    assert capsys.readouterr().err.count("\n") == 1
    remember("t", "d", "eagle3", "code", 2.0)
    assert capsys.readouterr().err.count("\n") == 1


def test_a_newer_file_is_left_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    remember("t", "d", "eagle3", "code", 2.0)
    with sqlite3.connect(folder / FILE) as db:
        db.execute("PRAGMA user_version = 9")
    db.close()
    assert recall("t") == [] and "newer forerun" in capsys.readouterr().err
    assert not (folder / f"{FILE}.damaged").exists()


def test_many_write_at_once(folder: Path) -> None:
    """Also the first time, when each of them finds that there is no file."""
    code = (
        "import sys; from forerun.catalogue.memory import remember\n"
        "for i in range(20): remember('t', f'{sys.argv[1]}-{i}', 'eagle3', 'code', 2.0)"
    )
    here = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(n)], env=here, stderr=subprocess.PIPE, text=True
        )
        for n in range(4)
    ]
    assert [writer.communicate()[1] for writer in writers] == [""] * 4
    assert len(recall("t")) == 80
