"""Files and directories that are written whole or not at all: beside their place, then moved there in one step; and
files that are read only if they are whole."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from forerun.errors import ForerunError, one_line

MOST_RECALLED = 16 << 20  # bytes of a file that is recalled: more than any process has written
T = TypeVar("T")


@contextmanager
def whole_directory(out: Path) -> Iterator[Path]:
    """A directory beside `out` that becomes `out` at the end, and goes if anything is raised before.

    `out` must not exist or be empty, and its parent must exist. Raises OSError where the disk does.
    """
    out = Path(os.path.abspath(out))
    work = out.with_name(f".{out.name}-{secrets.token_hex(4)}")
    work.mkdir()
    try:
        yield work
        work.replace(out)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A name beside `path` of what becomes `path` at the end, and goes if anything is raised before. Raises OSError
    where the disk does."""
    work = path.with_name(f".{path.name}-{secrets.token_hex(4)}.tmp")
    try:
        yield work
        os.replace(work, path)
    finally:
        with suppress(OSError):
            work.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write a file beside its place, then move it there in one step; links are followed to what they name.

    Raises:
        ForerunError: it cannot be written, or something that is no file has that name.
    """
    try:
        place = path.resolve()
        if place.exists() and not place.is_file():
            raise ForerunError(f"{path} cannot be written: there is something that is no file; give another name")
        with whole_file(place) as work, work.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: links that go round in circles
        raise ForerunError(f"{path} cannot be written: {getattr(error, 'strerror', None) or error}") from None


def recalled(path: Path, read: Callable[[Any], T]) -> T | None:
    """What `read` makes of the JSON in a file that an earlier process has left; None where there is none.

    Such a file is a convenience: one that cannot be read, or that `read` raises anything for, is as good as none, and
    is told of in one line on stderr.
    """
    try:
        if not os.path.lexists(path):
            return None
        if not path.is_file():  # a pipe would be waited for
            raise ValueError("it is no file")
        if path.stat().st_size > MOST_RECALLED:
            raise ValueError(f"it has more than {MOST_RECALLED >> 20} MiB")
        return read(json.loads(path.read_text(encoding="utf-8")))
    except Exception as error:  # too deep, too large a number, no right to read: whatever a file can be
        why = (isinstance(error, OSError) and error.strerror) or one_line(str(error)) or type(error).__name__
        print(f"note: {path} is damaged and ignored ({why}): what it held is found out anew", file=sys.stderr)
        return None
