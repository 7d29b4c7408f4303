"""Measurements are stored, replaced and shared between processes; a broken file is never an
error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from forerun.catalog import measurements
from forerun.catalog.measurements import FILE, Measurement, database_path, load, record
from forerun.errors import RequestError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_best_of_each_kind_of_text_comes_first(folder: Path) -> None:
    assert load() == [] and not folder.exists(), "loading creates nothing"
    record(Measurement("t", "slow", "model", "code", 3.0, 1.1))
    record(Measurement("t", "fast", "eagle3", "code", 2.5, 1.7, machine="m1", passes=9))
    record(Measurement("t", "counted", "eagle3", "code", 9.0))
    record(Measurement("t", "slow", "model", "law", 2.0, 1.4))
    record(Measurement("other", "slow", "model", "law", 2.0, 1.4))
    assert [(m.category, m.drafter) for m in load("t")] == [
        ("code", "fast"), ("code", "slow"), ("code", "counted"), ("law", "slow"),
    ]  # fmt: skip
    assert len(load()) == 5 and load("unknown") == []
    first = load("t")[0]
    assert (first.machine, first.passes, first.times_plain) == ("m1", 9, 1.7)
    assert first.seconds > 0


def test_a_repeated_measurement_replaces_the_older_one() -> None:
    record(Measurement("t", "d", "eagle3", "code", 2.0, 1.1))
    record(Measurement("t", "d", "eagle3", "code", 2.2, 1.2))
    record(Measurement("t", "d", "eagle3", "code", 2.2, 1.2, temperature=0.8))
    assert [(m.accepted_length, m.temperature) for m in load("t")] == [(2.2, 0.0), (2.2, 0.8)]


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
def test_invalid_measurements_are_refused(wrong: tuple) -> None:
    with pytest.raises(RequestError):
        record(Measurement(*wrong))
    assert load() == []


def test_invalid_lines_are_skipped(folder: Path) -> None:
    record(Measurement("t", "d", "eagle3", "code", 2.0))
    valid = json.loads((folder / FILE).read_text())
    broken = [valid | changed for changed in (
        {"accepted_length": -2.0}, {"accepted_length": "much"}, {"times_plain": 0}, {"category": 5},
        {"passes": float("inf")}, {"seconds": None}, {"kind": ""}, {"more": 1},
    )]  # fmt: skip
    with (folder / FILE).open("ab") as file:
        for values in (*broken, [], "text"):
            file.write(f"{json.dumps(values)}\n".encode())
        file.write(b"\xff\xfe\x00\n" + b"[" * 100_000 + b"\n" + json.dumps(valid).encode()[:40])
    record(Measurement("t", "after a cut line", "eagle3", "code", 1.0))
    assert [m.drafter for m in load("t")] == ["d", "after a cut line"]


def test_a_large_file_is_compacted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurements, "COMPACT_BYTES", 2000)
    for length in range(1, 100):
        record(Measurement("t", "d", "eagle3", "code", length))
    assert (folder / FILE).stat().st_size < 3000 and [p.name for p in folder.iterdir()] == [FILE]
    assert [m.accepted_length for m in load()] == [99]


def test_a_folder_that_cannot_be_written_gives_one_note(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.write_text("a file where the folder should be")
    record(Measurement("t", "d", "eagle3", "code", 2.0))
    err = capsys.readouterr().err
    assert err.startswith("note: ") and err.count("\n") == 1 and load("t") == []
    monkeypatch.setenv("FORERUN_CACHE", "off")
    record(Measurement("t", "d", "eagle3", "code", 2.0))
    assert database_path() is None and load() == [] and not capsys.readouterr().err


@pytest.mark.parametrize("kind", ["directory", "pipe"])
def test_a_directory_or_pipe_instead_of_the_file_gives_one_note(
    kind: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.mkdir()
    (os.mkfifo if kind == "pipe" else os.mkdir)(folder / FILE)
    assert load("t") == []
    assert capsys.readouterr().err.count("\n") == 1
    record(Measurement("t", "d", "eagle3", "code", 2.0))
    assert capsys.readouterr().err.count("\n") == 1


def test_several_processes_write_concurrently(folder: Path) -> None:
    """The file does not exist at first, so several processes may create it."""
    code = (
        "import sys; from forerun.catalog.measurements import Measurement, record\n"
        "for i in range(20): record(Measurement('t', f'{sys.argv[1]}-{i}', 'eagle3', 'code', 2.0))"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(n)], env=environment, stderr=subprocess.PIPE, text=True
        )
        for n in range(4)
    ]
    assert [writer.communicate()[1] for writer in writers] == [""] * 4
    assert len(load("t")) == 80
