"""Measured acceptance and speed of drafters, kept on this machine per target and kind of text.

One SQLite file in forerun's cache holds counts and names, no texts. Any number of processes may
write to it at the same time. It is a convenience: every fault is one line on stderr, and a damaged
file is set aside.
"""

from __future__ import annotations

import math
import os
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from forerun.errors import RequestError
from forerun.models.packed_cache import cache_folder

FILE = "drafters.db"
VERSION = 1
LOCK_TIMEOUT = 10.0  # seconds
MAX_NAME = 1024  # characters
DAMAGED = (  # SQLITE_ERROR: the tables are those of something else
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_ERROR,
)
NAMES = ("target", "drafter", "kind", "category")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Measurement:
    """One measurement of a drafter.

    Attributes:
        target, drafter: names that `--model` and `--draft` accept.
        kind: kind of drafter as in `--draft`, such as eagle3 or model.
        category: kind of text, such as code or law.
        accepted_length: emitted tokens per forward pass of the target.
        times_plain: speed relative to plain decoding; None where only acceptance was counted.
        depth: "auto" or a number.
        temperature: sampling temperature.
        machine: where the speed was measured.
        passes: number of forward passes counted.
        seconds: when, since 1970.
    """

    target: str
    drafter: str
    kind: str
    category: str
    accepted_length: float
    times_plain: float | None = None
    depth: str = "auto"
    temperature: float = 0.0
    machine: str = ""
    passes: int = 0
    seconds: float = 0.0


COLUMNS = tuple(field.name for field in fields(Measurement))
KEY = ("target", "drafter", "category", "depth", "temperature", "machine")
TABLE = (
    f"CREATE TABLE IF NOT EXISTS measurements ({', '.join(COLUMNS)},"
    f" PRIMARY KEY ({', '.join(KEY)}))"
)


def record(measurement: Measurement) -> None:
    """Store a measurement; it replaces an earlier one under the same conditions.

    Raises:
        RequestError: a name is empty or too long, or a figure is no positive number.
    """
    for name in NAMES:
        value = getattr(measurement, name)
        if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME:
            raise RequestError(f"a measurement needs a {name} of at most {MAX_NAME} characters")
    length, speed = measurement.accepted_length, measurement.times_plain
    if not _is_positive(length) or not (speed is None or _is_positive(speed)):
        raise RequestError(
            f"{length!r} tokens per pass, {speed!r} times plain: give numbers over 0"
        )
    values = (*astuple(measurement)[:-1], time.time())
    command = f"INSERT OR REPLACE INTO measurements VALUES ({', '.join('?' * len(COLUMNS))})"
    _run(lambda db: db.execute(command, values), writing=True)


def load(target: str | None = None) -> list[Measurement]:
    """Return the measurements of one target or all, by kind of text and the fastest first."""
    where, values = ("", ()) if target is None else (" WHERE target = ?", (target,))
    order = "category, times_plain IS NULL, times_plain DESC, accepted_length DESC"
    query = f"SELECT {', '.join(COLUMNS)} FROM measurements{where} ORDER BY {order}"
    rows = _run(lambda db: db.execute(query, values).fetchall(), writing=False) or []
    return [Measurement(*row) for row in rows if _is_valid(row)]


def database_path() -> Path | None:
    """Return the path of the file; None if caching is off (FORERUN_CACHE=off)."""
    folder = cache_folder()
    return folder / FILE if folder else None


def _is_number(value: object) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and math.isfinite(value)  # type: ignore[arg-type]


def _is_positive(value: object) -> bool:
    return _is_number(value) and value > 0  # type: ignore[operator]


def _is_valid(row: tuple[Any, ...]) -> bool:
    """Return True if a row has the right types; SQLite stores any type in any column."""
    values = dict(zip(COLUMNS, row, strict=True))
    speed = values["times_plain"]
    return (
        all(isinstance(values[name], str) for name in (*NAMES, "depth", "machine"))
        and all(_is_number(values[name]) for name in ("temperature", "passes", "seconds"))
        and _is_positive(values["accepted_length"])
        and (speed is None or _is_positive(speed))
    )


def _run(use: Callable[[sqlite3.Connection], T], writing: bool) -> T | None:
    """Use the database, a new one if it is damaged; None if that is impossible."""
    path = database_path()
    if path is None or not (writing or path.exists()):
        return None
    what = f"measurements of drafters cannot be kept in {path}"
    if path.exists() and not path.is_file():
        _note(f"{what}: it is no file")
        return None
    for _ in range(2):
        seen = _inode(path)
        try:
            with _connection(path, writing) as db:
                return use(db)
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", None)
            if code is None or code & 0xFF not in DAMAGED:
                _note(f"{what}: {error}")
                return None
            if seen is not None and _inode(path) == seen:  # else another process replaced it
                _set_aside(path)
        except OSError as error:
            _note(f"{what}: {error.strerror or error}")
            return None
    return None


@contextmanager
def _connection(path: Path, writing: bool) -> Iterator[sqlite3.Connection]:
    if writing:
        path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path, timeout=LOCK_TIMEOUT)) as db:
        db.execute("PRAGMA trusted_schema = OFF")  # run nothing that a hostile file defines
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version > VERSION:
            raise sqlite3.NotSupportedError("it was written by a newer forerun")
        if version < VERSION:  # also when reading: another process may have just created the file
            with suppress(sqlite3.OperationalError):  # locked: the other process does the same
                db.execute("PRAGMA journal_mode = WAL")
            with db:
                db.execute("BEGIN IMMEDIATE")
                db.execute(TABLE)
                db.execute(f"PRAGMA user_version = {VERSION}")
        with db:
            yield db


def _inode(path: Path) -> tuple[int, int] | None:
    with suppress(OSError):
        status = path.stat()
        return status.st_dev, status.st_ino
    return None


def _set_aside(path: Path) -> None:
    aside = path.with_name(f"{path.name}.damaged")
    with suppress(OSError):
        os.replace(path, aside)
        for suffix in ("-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
    _note(f"{path} is damaged: renamed to {aside.name}; earlier measurements are lost")


def _note(text: str) -> None:
    print(f"note: {' '.join(text.split())}", file=sys.stderr)
