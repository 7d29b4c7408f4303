"""Text files as users write them: with a byte order mark, in UTF-8 or UTF-16, with any line ends. No torch here."""

from __future__ import annotations

import codecs
from pathlib import Path

LARGEST = 64 << 20  # bytes of a configuration, a schema or a conversation
BYTE_ORDER_MARK = "\ufeff"
MARKS = (  # those of UTF-32 before those of UTF-16, which they begin with
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)


class UnreadableError(ValueError):
    """Says in a few words why a file is no text: "it is not UTF-8 text (line 3)", "Is a directory". `line` is where in
    the file that was seen; 0 where the file could not be read at all."""

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


def text_of(path: Path, largest: int | None = LARGEST) -> str:
    """The text of a file with "\\n" at the end of each line. `largest` bounds its bytes. Raises UnreadableError."""
    try:
        with path.open("rb") as file:
            content = file.read() if largest is None else file.read(largest + 1)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise UnreadableError(getattr(error, "strerror", None) or str(error)) from None
    if largest is not None and len(content) > largest:
        raise UnreadableError(f"it has over {largest >> 20} MB")
    return decoded(content).replace("\r\n", "\n").replace("\r", "\n")
