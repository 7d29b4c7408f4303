"""Clients cannot fill the log: of lines that are alike some are written, and the others are
counted."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from forerun.server import logs
from forerun.server.logs import LONGEST, MOST_KINDS, MOST_LINES, WINDOW, LimitedHandler
from forerun.server.run import JsonLines, PlainLines


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    time = [0.0]
    monkeypatch.setattr(logs.time, "monotonic", lambda: time[0])
    return time


@pytest.fixture
def log(now: list[float]) -> Iterator[tuple[logging.Logger, io.StringIO]]:
    written, handler = io.StringIO(), LimitedHandler()
    handler.setStream(written)
    log = logging.getLogger("forerun.test_logs")
    log.handlers, log.propagate = [handler], False
    log.setLevel(logging.INFO)
    yield log, written
    log.handlers = []


def lines(written: io.StringIO) -> list[str]:
    return written.getvalue().splitlines()


def test_lines_that_are_alike_are_counted(
    log: tuple[logging.Logger, io.StringIO], now: list[float]
) -> None:
    """Whatever is put into them; what else is logged meanwhile is written."""
    logger, written = log
    for i in range(1000):
        logger.error("request %d failed", i)
    logger.error("something else: 100 %")
    assert lines(written) == [
        *(f"request {i} failed" for i in range(MOST_LINES)),
        "something else: 100 %",
    ]
    now[0] = WINDOW
    logger.handlers[0].settle()  # type: ignore[attr-defined]
    ignored = f"{1000 - MOST_LINES} more lines like this one were left out: request %d failed"
    assert lines(written)[-1] == ignored
    logger.error("request %d failed", 1001)
    assert lines(written)[-1] == "request 1001 failed"


def test_lines_of_requests_that_the_operator_asks_for_are_all_written(
    log: tuple[logging.Logger, io.StringIO],
) -> None:
    logger, written = log
    for _ in range(100):
        logger.info("request")
    assert len(lines(written)) == 100


def test_kinds_are_bounded_too(log: tuple[logging.Logger, io.StringIO]) -> None:
    logger, written = log
    for i in range(10 * MOST_KINDS):
        logger.warning(f"what a client has sent: {i}")
    assert len(lines(written)) == MOST_KINDS + MOST_LINES
    assert len(logger.handlers[0]._windows) == MOST_KINDS + 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("formatter", [JsonLines(), PlainLines()])
def test_a_line_is_bounded(formatter: logging.Formatter) -> None:
    record = logging.LogRecord("forerun", logging.ERROR, "", 0, "x" * 10_000_000, (), None)
    line = formatter.format(record)
    assert len(line) < LONGEST + 200 and "characters" in line
    if isinstance(formatter, JsonLines):
        assert json.loads(line)["level"] == "error"
