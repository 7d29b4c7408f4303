"""Logs of the server on stderr: JSON or plain lines, limited in number and length."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from contextvars import ContextVar
from dataclasses import dataclass
from typing import IO, Any

from forerun.utils import json_line

REQUEST_ID: ContextVar[str] = ContextVar("forerun_request_id", default="")  # of this HTTP request
MAX_LINES = 10  # warnings and errors of one kind in a window; the rest is counted
WINDOW = 10.0  # seconds
MAX_KINDS = 256
MAX_LENGTH = 16 << 10  # characters of a message or a traceback
OTHER_KINDS = ("", 0, "")  # the kind of all records beyond MAX_KINDS

Kind = tuple[str, int, str]


@dataclass(slots=True)
class _Window:
    start: float
    num_lines: int = 0
    num_omitted: int = 0


class LimitedHandler(logging.StreamHandler[IO[str]]):
    """A handler that writes at most `MAX_LINES` warnings or errors of one kind in a window.

    A kind is a logger, a level and a message before its arguments are put in. At the end of the
    window, one line tells how many were omitted. Lines below a warning are not limited: they are
    written only with --verbose.
    """

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self._windows: dict[Kind, _Window] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, or count it as omitted."""
        if record.levelno < logging.WARNING:
            super().emit(record)
            return
        self.report_omitted()
        kind = (record.name, record.levelno, str(record.msg))
        if kind not in self._windows and len(self._windows) >= MAX_KINDS:
            kind = OTHER_KINDS
        window = self._windows.setdefault(kind, _Window(time.monotonic()))
        window.num_lines += 1
        if window.num_lines > MAX_LINES:
            window.num_omitted += 1
        else:
            super().emit(record)

    def report_omitted(self) -> None:
        """Close the windows that are over, and write how many lines were omitted in each."""
        now = time.monotonic()
        self.acquire()  # a reentrant lock, which `emit` holds already
        try:
            over = [kind for kind, window in self._windows.items() if now - window.start >= WINDOW]
            for name, level, message in over:
                omitted = self._windows.pop((name, level, message)).num_omitted
                if omitted:
                    text = f"{omitted} more lines like this one were left out: {message[:200]}"
                    super().emit(logging.LogRecord(name, level, "", 0, text, (), None))
        finally:
            self.release()


class JsonLines(logging.Formatter):
    """Formats one JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        entry: dict[str, Any] = {"time": self.formatTime(record), "level": record.levelname.lower()}
        entry |= {"message": shorten_middle(record.getMessage())} | getattr(record, "facts", {})
        if record.exc_info:
            entry["error"] = shorten_middle(self.formatException(record.exc_info))
        return json_line(entry, ascii_only=True)


class PlainLines(logging.Formatter):
    """Formats a line for a terminal, with the facts of a request behind the message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s: %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a record."""
        return shorten_middle(super().format(record))

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the message of a record with its facts."""
        facts: dict[str, Any] = getattr(record, "facts", {})
        parts = [f"{name}={value}" for name, value in facts.items() if value is not None]
        return " ".join([super().formatMessage(record), *parts])


def start_logging(verbose: bool, terminal: bool) -> None:
    """Log to stderr: plain lines on a terminal, JSON otherwise; requests only if `verbose`."""
    handler = LimitedHandler()
    handler.setFormatter(PlainLines() if terminal else JsonLines())
    handler.addFilter(_is_not_cancellation)
    levels = {
        "forerun": logging.INFO if verbose else logging.WARNING,
        "uvicorn.error": logging.WARNING,
        "asyncio": logging.ERROR,  # its warnings are about clients that have gone
    }
    for name, level in levels.items():
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level)


def report_omitted() -> None:
    """Let forerun's handlers report how many lines they omitted, where a window is over."""
    for handler in logging.getLogger("forerun").handlers:
        if isinstance(handler, LimitedHandler):
            handler.report_omitted()


def shorten_middle(text: str) -> str:
    """Replace the middle of a text over `MAX_LENGTH` characters."""
    if len(text) <= MAX_LENGTH:
        return text
    half = MAX_LENGTH // 2
    return f"{text[:half]} ... {len(text) - MAX_LENGTH} characters ... {text[-half:]}"


def _is_not_cancellation(record: logging.LogRecord) -> bool:
    """Drop uvicorn's records of requests that were cancelled by the end of the server."""
    if record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError):
        return False
    return "CancelledError" not in record.getMessage()
