"""Log lines of a server, of which clients cannot cause any number."""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass
from typing import IO

MOST_LINES, WINDOW = (
    10,
    10.0,
)  # warnings and errors of one kind in so many seconds; the rest is counted
MOST_KINDS = 256
LONGEST = 16 << 10  # characters of a message or a traceback
OTHERS = ("", 0, "")  # the kind of all that are more than MOST_KINDS

Kind = tuple[str, int, str]


@dataclass(slots=True)
class _Window:
    begun: float
    lines: int = 0
    left_out: int = 0


class LimitedHandler(logging.StreamHandler[IO[str]]):
    """Writes at most `MOST_LINES` warnings or errors of one kind in a window, and then how many it
    left out.

    A kind is a logger, a level and a message before its arguments are put in. Lines below a warning
    are not limited: they are only written where the operator asks for them (--verbose).
    """

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self._windows: dict[Kind, _Window] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, or count it."""
        if record.levelno < logging.WARNING:
            super().emit(record)
            return
        self.settle()
        kind = (record.name, record.levelno, str(record.msg))
        if kind not in self._windows and len(self._windows) >= MOST_KINDS:
            kind = OTHERS
        window = self._windows.setdefault(kind, _Window(time.monotonic()))
        window.lines += 1
        if window.lines > MOST_LINES:
            window.left_out += 1
        else:
            super().emit(record)

    def settle(self) -> None:
        """Begin again with the kinds whose time is over, and write how many lines of each were left
        out."""
        now = time.monotonic()
        self.acquire()  # `emit` has it already, and may have it twice
        try:
            over = [kind for kind, window in self._windows.items() if now - window.begun >= WINDOW]
            windows = [(kind, self._windows.pop(kind)) for kind in over]
            for (name, level, message), window in windows:
                if window.left_out:
                    text = (
                        f"{window.left_out} more lines like this one were left out: {message[:200]}"
                    )
                    super().emit(logging.LogRecord(name, level, "", 0, text, (), None))
        finally:
            self.release()


def settle() -> None:
    """Let the handlers of forerun's loggers write how many lines they left out, where it is time
    for that."""
    for handler in logging.getLogger("forerun").handlers:
        if isinstance(handler, LimitedHandler):
            handler.settle()


def shortened(text: str) -> str:
    """A text with its middle left out, where it is too long for a log."""
    if len(text) <= LONGEST:
        return text
    half = LONGEST // 2
    return f"{text[:half]} ... {len(text) - LONGEST} characters ... {text[-half:]}"
