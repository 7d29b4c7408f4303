"""Small helpers: atomic writes, JSON lines, text files of users, and validators of numbers."""

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

MOST_RECALLED = 16 << 20  # bytes of a file that is recalled: more than any process has written
T = TypeVar("T")


@contextmanager
def atomic_directory(out: Path) -> Iterator[Path]:
    """A directory beside `out` that becomes `out` at the end, and goes if anything is raised
    before.

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
def atomic_file(path: Path) -> Iterator[Path]:
    """A name beside `path` of what becomes `path` at the end, and goes if anything is raised
    before. Raises OSError where the disk does."""
    work = path.with_name(f".{path.name}-{secrets.token_hex(4)}.tmp")
    try:
        yield work
        os.replace(work, path)
    finally:
        with suppress(OSError):
            work.unlink(missing_ok=True)


def write_atomic(path: Path, text: str) -> None:
    """Write a file beside its place, then move it there in one step; links are followed to what
    they name.

    Raises:
        ForerunError: it cannot be written, or something that is no file has that name.
    """
    try:
        place = path.resolve()
        if place.exists() and not place.is_file():
            raise ForerunError(
                f"{path} cannot be written: there is something that is no file; give another name"
            )
        with atomic_file(place) as work, work.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except (
        OSError,
        ValueError,
        RuntimeError,
    ) as error:  # RuntimeError: links that go round in circles
        raise ForerunError(
            f"{path} cannot be written: {getattr(error, 'strerror', None) or error}"
        ) from None


def recalled(path: Path, read: Callable[[Any], T]) -> T | None:
    """What `read` makes of the JSON in a file that an earlier process has left; None where there is
    none.

    Such a file is a convenience: one that cannot be read, or that `read` raises anything for, is as
        good as none, and
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
    except (
        Exception
    ) as error:  # too deep, too large a number, no right to read: whatever a file can be
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


LARGEST_TEXT = 64 << 20  # bytes of a configuration, a schema or a conversation
BYTE_ORDER_MARK = "\ufeff"
MARKS = (  # those of UTF-32 before those of UTF-16, which they begin with
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)


class UnreadableError(ValueError):
    """Says in a few words why a file is no text: "it is not UTF-8 text (line 3)", "Is a directory".
    `line` is where in the file that was seen; 0 where the file could not be read at all."""

    def __init__(self, why: str, line: int = 0) -> None:
        super().__init__(why)
        self.line = line


def decoded(content: bytes) -> str:
    """The text in the bytes of a file, without its byte order mark. Raises UnreadableError."""
    mark, encoding = next(((m, name) for m, name in MARKS if content.startswith(m)), (b"", "utf-8"))
    if content == mark and encoding != "utf-8":
        mark, encoding = b"", "utf-8"  # two or four bytes alone are no text in UTF-16
    try:
        return content[len(mark) :].decode(encoding)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, len(mark) + error.start) + 1
        raise UnreadableError(f"it is not UTF-8 text (line {line})", line) from None


def text_of(path: Path, largest: int | None = LARGEST_TEXT) -> str:
    """The text of a file with "\\n" at the end of each line. `largest` bounds its bytes. Raises
    UnreadableError."""
    try:
        with path.open("rb") as file:
            content = file.read() if largest is None else file.read(largest + 1)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise UnreadableError(getattr(error, "strerror", None) or str(error)) from None
    if largest is not None and len(content) > largest:
        raise UnreadableError(f"it has over {largest >> 20} MB")
    return decoded(content).replace("\r\n", "\n").replace("\r", "\n")


LARGEST = 1 << 31  # of what has no limit of its own
MOST = 1e6  # the same of numbers that are not whole


def check_integer(name: str, value: object, low: int, high: int | None = None) -> None:
    """Raise ConfigError unless `value` is a whole number from `low` to `high`; without that, from
    `low` up, 31 bits."""
    most = LARGEST - 1 if high is None else high
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= most:
        raise _out_of_range(name, value, f"a whole number from {low}", high)


def check_number(name: str, value: object, low: float, high: float | None = None) -> None:
    """Raise ConfigError unless `value` is a number from `low` to `high`; without that, from `low`
    up."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and value < math.inf
    if not number or not low <= value <= (math.inf if high is None else high):  # type: ignore[operator]
        raise _out_of_range(name, value, f"a number from {low:g}", high)


def check_numbers(settings: Any, lowest: dict[str, int]) -> None:
    """Check every field of a dataclass that is declared a number or None: whole ones have their
    `lowest`, 0 unless it says otherwise. Raises ConfigError."""
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
