"""Small helpers: atomic writes, JSON lines, reading of text files, and validators of numbers."""

from __future__ import annotations

import codecs
import json
import math
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from forerun.errors import ConfigError, ForerunError, one_line, shown

MOST_RECALLED = 16 << 20  # maximum bytes of a state file; forerun writes far smaller ones
T = TypeVar("T")


@contextmanager
def atomic_directory(out: Path) -> Iterator[Path]:
    """Yield a temporary directory beside `out` that is renamed to `out` at the end.

    It is deleted if an exception is raised. `out` must not exist or be empty, and its parent must
    exist. Raises OSError.
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
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path` that is renamed to `path` at the end.

    The file is deleted if an exception is raised. Raises OSError.
    """
    work = path.with_name(f".{path.name}-{secrets.token_hex(4)}.tmp")
    try:
        yield work
        os.replace(work, path)
    finally:
        with suppress(OSError):
            work.unlink(missing_ok=True)


def write_atomic(path: Path, text: str) -> None:
    """Write a file atomically: write a temporary file, then rename it. Symbolic links are followed.

    Raises:
        ForerunError: it cannot be written, or `path` exists and is not a regular file.
    """
    try:
        target = path.resolve()
        if target.exists() and not target.is_file():
            raise ForerunError(
                f"{path} cannot be written: there is something that is no file; give another name"
            )
        with atomic_file(target) as work, work.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: circular links
        raise ForerunError(
            f"{path} cannot be written: {getattr(error, 'strerror', None) or error}"
        ) from None


def recalled(path: Path, read: Callable[[Any], T]) -> T | None:
    """Return `read(data)` for the JSON in a file of an earlier process; None if there is no file.

    The file is optional: if it cannot be read, or `read` raises any exception, a note is printed on
    stderr and None is returned.
    """
    try:
        if not os.path.lexists(path):
            return None
        if not path.is_file():  # reading a pipe would block
            raise ValueError("it is no file")
        if path.stat().st_size > MOST_RECALLED:
            raise ValueError(f"it has more than {MOST_RECALLED >> 20} MiB")
        return read(json.loads(path.read_text(encoding="utf-8")))
    except Exception as error:  # a damaged file can cause any error
        why = (
            (isinstance(error, OSError) and error.strerror)
            or one_line(str(error))
            or type(error).__name__
        )
        print(
            f"note: {path} is damaged and ignored ({why}): what it held is found out anew",
            file=sys.stderr,
        )
        return None


# JSON escapes the other characters at which `str.splitlines` and many clients split
LINE_ENDS = {"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def json_line(value: Any, ascii_only: bool = False) -> str:
    """Write a value as JSON on one line, without the line's end.

    `ascii_only` escapes every character beyond ASCII, for terminals and logs whose encoding is
    unknown. Raises TypeError, ValueError, RecursionError for what JSON cannot hold.
    """
    text = json.dumps(value, ensure_ascii=ascii_only)
    for character, escape in LINE_ENDS.items():
        text = text.replace(character, escape)
    return text


LARGEST_TEXT = 64 << 20  # maximum bytes of a configuration, a schema or a conversation
BYTE_ORDER_MARK = "\ufeff"
MARKS = (  # UTF-32 before UTF-16, whose marks are prefixes of those of UTF-32
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)


class UnreadableError(ValueError):
    """A file that cannot be read as text, with a short reason such as "Is a directory".

    `line` is the number of the first invalid line, or 0 if the file could not be read at all.
    """

    def __init__(self, why: str, line: int = 0) -> None:
        super().__init__(why)
        self.line = line


def decoded(content: bytes) -> str:
    """Decode the bytes of a file, without its byte order mark. Raises UnreadableError."""
    mark, encoding = next(((m, name) for m, name in MARKS if content.startswith(m)), (b"", "utf-8"))
    if content == mark and encoding != "utf-8":
        mark, encoding = b"", "utf-8"  # a mark alone is not text
    try:
        return content[len(mark) :].decode(encoding)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, len(mark) + error.start) + 1
        raise UnreadableError(f"it is not UTF-8 text (line {line})", line) from None


def text_of(path: Path, largest: int | None = LARGEST_TEXT) -> str:
    """Read a text file of at most `largest` bytes, with "\\n" line ends. Raises UnreadableError."""
    try:
        with path.open("rb") as file:
            content = file.read() if largest is None else file.read(largest + 1)
    except (OSError, ValueError) as error:  # ValueError: null byte in the name
        raise UnreadableError(getattr(error, "strerror", None) or str(error)) from None
    if largest is not None and len(content) > largest:
        raise UnreadableError(f"it has over {largest >> 20} MB")
    return decoded(content).replace("\r\n", "\n").replace("\r", "\n")


LARGEST = 1 << 31  # exclusive upper bound of integers without a limit of their own
MOST = 1e6  # upper bound of floats without a limit of their own


def check_integer(name: str, value: object, low: int, high: int | None = None) -> None:
    """Raise ConfigError unless `value` is an integer from `low` to `high` (default 2**31 - 1)."""
    most = LARGEST - 1 if high is None else high
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= most:
        raise _out_of_range(name, value, f"a whole number from {low}", high)


def check_number(name: str, value: object, low: float, high: float | None = None) -> None:
    """Raise ConfigError unless `value` is a finite number from `low` to `high` (if given)."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and value < math.inf
    most = math.inf if high is None else high
    if not number or not low <= value <= most:  # type: ignore[operator]
        raise _out_of_range(name, value, f"a number from {low:g}", high)


def check_numbers(settings: Any, lowest: dict[str, int]) -> None:
    """Check the range of every int and float field of a dataclass. Raises ConfigError.

    `lowest` gives the minimum of integer fields, by default 0. None is valid if it is declared.
    """
    for field in fields(settings):
        value, kind = getattr(settings, field.name), str(field.type)
        if value is None and "None" in kind:
            continue
        if kind.startswith("int"):
            check_integer(field.name, value, lowest.get(field.name, 0))
        elif kind.startswith("float"):
            check_number(field.name, value, 0, MOST)


def _out_of_range(name: str, value: object, what: str, high: float | None) -> ConfigError:
    end = "up" if high is None else f"to {high:g}" if isinstance(high, float) else f"to {high}"
    return ConfigError(f"{name}={shown(value)} is out of range: give {what} {end}")
