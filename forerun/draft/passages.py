"""The passages of an index's segment by the tokens in them: a full-text table in a file (SQLite's FTS5).

A passage's words are its token ids as decimal strings, so neither a tokenizer nor a language is needed to ask. The
table says which passages hold a token and no more: no texts, and no positions. FTS5's own `bm25()` would be 0 without
positions, but with them a table takes two and a half times the room, and its scores are of one segment alone.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from functools import cache
from pathlib import Path

import numpy as np

from forerun.errors import LoadError

TABLE = "CREATE VIRTUAL TABLE passages USING fts5(tokens, content='', detail=none, columnsize=0, tokenize='ascii')"


class Passages:
    """A table that was written before; any thread may ask, one at a time."""

    def __init__(self, path: Path, count: int) -> None:
        """`count`: passages, as the index says. Raises LoadError where it is damaged."""
        self.count = count
        try:
            place = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
            self._table = sqlite3.connect(place, uri=True, check_same_thread=False)
            self._table.execute("SELECT rowid FROM passages('0')").fetchone()
        except sqlite3.Error as error:
            raise LoadError(f"{path} is damaged ({error}): make the index again with forerun index") from None

    def holding(self, token: int, most: int) -> list[int]:
        """Where the passages begin that hold a token, in order, the first `most` of them. Nothing where the file turns
        out to be damaged: drafts are worse then."""
        try:
            rows = self._table.execute("SELECT rowid FROM passages(?)", (str(token),)).fetchmany(most)
        except sqlite3.Error:
            return []
        return [place for (place,) in rows]


@cache
def supported() -> bool:
    """Whether Python's SQLite has FTS5."""
    with closing(sqlite3.connect(":memory:")) as memory:
        try:
            memory.execute(TABLE)
        except sqlite3.OperationalError:
            return False
    return True


def write(path: Path, passages: Iterable[tuple[int, np.ndarray]]) -> int:
    """Write a table of passages, each with the place where it begins, in order; how many there were. Raises OSError
    where the disk does, and then the file is worth nothing."""
    words = ((place, " ".join(map(str, set(tokens.tolist())))) for place, tokens in passages)
    try:
        with closing(sqlite3.connect(path, isolation_level=None)) as table:
            table.execute("PRAGMA journal_mode=OFF")  # a file that is not whole is never read
            table.execute("PRAGMA synchronous=OFF")
            table.execute(TABLE)
            table.execute("BEGIN")
            count = table.executemany("INSERT INTO passages(rowid, tokens) VALUES (?, ?)", words).rowcount
            table.execute("COMMIT")
    except sqlite3.Error as error:
        raise OSError(errno.EIO, str(error), str(path)) from None
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return count
