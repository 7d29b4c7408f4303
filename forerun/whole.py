"""Files and directories that are written whole or not at all: beside their place, then moved there in one step."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from forerun.errors import ForerunError


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
