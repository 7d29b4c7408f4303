"""What the scripts for the bundled models have in common: errors in one line, progress, files written whole."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from forerun.errors import ForerunError

CHUNK = 1 << 20
BEGUN = time.monotonic()


def run(main: Callable[[], None]) -> None:
    """Run a script: what goes wrong is said in one line, with exit code 1; Ctrl-C is 130."""
    try:
        main()
    except ForerunError as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        sys.exit(f"error: {error.strerror or error}{where}: make room or mend it, and run the same command again")
    except KeyboardInterrupt as interruption:
        print(f"interrupted: {str(interruption) or 'run the same command again to go on'}", file=sys.stderr)
        sys.exit(130)


def tell(message: str) -> None:
    """A line of progress on stderr, behind the seconds since the script began."""
    print(f"[{time.monotonic() - BEGUN:7.1f} s] {message}", file=sys.stderr, flush=True)


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A path to write to; it becomes `path` at the end, and is removed if anything is raised before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    work = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield work
        os.replace(work, path)
    finally:
        work.unlink(missing_ok=True)


@contextmanager
def folder_written_whole(path: Path) -> Iterator[Path]:
    """The same for a folder that is not there yet."""
    work = path.with_name(f".{path.name}.{os.getpid()}")
    work.mkdir(parents=True)
    try:
        yield work
        work.replace(path)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
