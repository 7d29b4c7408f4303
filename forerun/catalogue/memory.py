"""What drafters were measured to give for which target and which kind of text, remembered on this
machine.

One SQLite file in forerun's cache, of counts and names: no text of anybody. Any number of processes
write to it at a time. It is a convenience: whatever is wrong with it is one line, and a file that
is damaged is set aside."""

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
PATIENCE = 10.0  # seconds that one writer waits for another
LONGEST = 1024  # characters of a name
DAMAGED = (
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_ERROR,
)  # the last: tables of something else
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a drafter gave.

    Attributes:
        target, drafter: by the names that `--model` and `--draft` take.
        kind: as `--draft` calls it, eagle3 or model, say.
        category: the kind of text: code, law, or a customer's own word.
        accepted_length: tokens a target pass, the target's own included.
        times_plain: the speed over that of plain decoding; None where only acceptance was counted.
        depth, temperature: at which; depth "auto" or a number.
        machine: where the speed was measured.
        passes: how many were counted.
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
TABLE = f"CREATE TABLE IF NOT EXISTS measurements ({', '.join(COLUMNS)}, PRIMARY KEY ({', '.join(KEY)}))"


def remember(
    target: str, drafter: str, kind: str, category: str, accepted_length: float, times_plain: float | None = None,
    *, depth: str = "auto", temperature: float = 0.0, machine: str = "", passes: int = 0,
) -> None:  # fmt: skip
    """Keep what was measured; the same once more takes its place. Raises RequestError for what is
    no measurement."""
    made = Measurement(
        target,
        drafter,
        kind,
        category,
        accepted_length,
        times_plain,
        depth,
        temperature,
        machine,
        passes,
        time.time(),
    )
    _check(made)
    marks = ", ".join("?" * len(COLUMNS))
    _with(
        lambda db: db.execute(
            f"INSERT OR REPLACE INTO measurements VALUES ({marks})", astuple(made)
        ),
        writing=True,
    )


def recall(target: str | None = None) -> list[Measurement]:
    """What is known of the drafters of a target, or of all, the best for each kind of text
    first."""
    where, values = ("", ()) if target is None else (" WHERE target = ?", (target,))
    order = "category, times_plain IS NULL, times_plain DESC, accepted_length DESC"
    ask = f"SELECT {', '.join(COLUMNS)} FROM measurements{where} ORDER BY {order}"
    rows = _with(lambda db: db.execute(ask, values).fetchall(), writing=False) or []
    return [Measurement(*row) for row in rows if _is_whole(row)]


def place() -> Path | None:
    """The file; None where nothing is kept (FORERUN_CACHE=off)."""
    folder = cache_folder()
    return folder / FILE if folder else None


def _check(made: Measurement) -> None:
    for name in ("target", "drafter", "kind", "category"):
        value = getattr(made, name)
        if not isinstance(value, str) or not 0 < len(value) <= LONGEST:
            raise RequestError(f"a measurement needs a {name} of at most {LONGEST} characters")
    for name in ("accepted_length", "times_plain"):
        value = getattr(made, name)
        if not (value is None and name == "times_plain") and not (_is_number(value) and value > 0):
            raise RequestError(f"{name}={value!r} is no measurement: it must be a number over 0")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(row: tuple[Any, ...]) -> bool:
    """Whether a row is one of ours: SQLite keeps any type in any column."""
    named = dict(zip(COLUMNS, row, strict=True))
    texts = all(
        isinstance(named[name], str)
        for name in ("target", "drafter", "kind", "category", "depth", "machine")
    )
    numbers = all(_is_number(named[name]) for name in ("temperature", "passes", "seconds"))
    figures = [
        named["accepted_length"],
        *([] if named["times_plain"] is None else [named["times_plain"]]),
    ]
    return texts and numbers and all(_is_number(figure) and figure > 0 for figure in figures)


def _with(do: Callable[[sqlite3.Connection], T], writing: bool) -> T | None:
    """Do something with the file, with a new one where it is damaged; None where that cannot be."""
    path = place()
    if path is None or not (writing or path.exists()):
        return None
    if path.exists() and not path.is_file():
        _note(f"what drafters were measured to give cannot be kept in {path}: it is no file")
        return None
    for _ in range(2):
        seen = _identity(path)
        try:
            with _opened(path, writing) as db:
                return do(db)
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", None)
            if code is None or code & 0xFF not in DAMAGED:
                _note(f"what drafters were measured to give cannot be kept in {path}: {error}")
                return None
            _set_aside(path, seen)
        except OSError as error:
            _note(
                f"what drafters were measured to give cannot be kept in {path}: {error.strerror or error}"
            )
            return None
    return None


@contextmanager
def _opened(path: Path, writing: bool) -> Iterator[sqlite3.Connection]:
    if writing:
        path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path, timeout=PATIENCE)) as db:
        db.execute("PRAGMA trusted_schema = OFF")  # whatever such a file may define
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version > VERSION:
            raise sqlite3.NotSupportedError("it was written by a newer forerun")
        if version < VERSION:  # also where it is only read: somebody may be just beginning it
            with suppress(sqlite3.OperationalError):  # locked: whoever else begins it does the same
                db.execute("PRAGMA journal_mode = WAL")
            with db:
                db.execute("BEGIN IMMEDIATE")
                db.execute(TABLE)
                db.execute(f"PRAGMA user_version = {VERSION}")
        with db:
            yield db


def _identity(path: Path) -> tuple[int, int] | None:
    with suppress(OSError):
        status = path.stat()
        return status.st_dev, status.st_ino
    return None


def _set_aside(path: Path, seen: tuple[int, int] | None) -> None:
    """Rename the damaged file, unless somebody else has put a new one in its place meanwhile."""
    if seen is None or _identity(path) != seen:
        return
    aside = path.with_name(f"{path.name}.damaged")
    with suppress(OSError):
        os.replace(path, aside)
        for behind in ("-wal", "-shm"):
            path.with_name(path.name + behind).unlink(missing_ok=True)
    _note(f"{path} is damaged: it is set aside as {aside.name}, and what was measured is forgotten")


def _note(text: str) -> None:
    print(f"note: {' '.join(text.split())}", file=sys.stderr)
