"""Logs and the first lines of a server: their form, their limits, and one line for each request."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import pty
import re
import signal
from collections.abc import Iterator

import httpx2
import pytest

from forerun import LLM
from forerun.server import monitoring
from forerun.server.app import make_app
from forerun.server.monitoring import (
    MAX_KINDS,
    MAX_LENGTH,
    MAX_LINES,
    WINDOW,
    JsonLines,
    LimitedHandler,
    PlainLines,
)
from forerun.server.run import announcement, greeting
from forerun.server.settings import Settings
from tests import tiny
from tests.forked import Process

FACTS = {"model": "tiny", "draft": "suffix", "depth": "auto", "rule": "match"}
URL = "http://127.0.0.1:8000"


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    time = [0.0]
    monkeypatch.setattr(monitoring.time, "monotonic", lambda: time[0])
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


def test_lines_of_one_kind_are_limited_and_counted(
    log: tuple[logging.Logger, io.StringIO], now: list[float]
) -> None:
    logger, written = log
    for i in range(1000):
        logger.error("request %d failed", i)
        logger.info("requests are logged only with --verbose, all of them")
    logger.error("something else: 100 %")
    lines = [line for line in written.getvalue().splitlines() if "--verbose" not in line]
    expected = [f"request {i} failed" for i in range(MAX_LINES)]
    assert lines == [*expected, "something else: 100 %"]
    assert written.getvalue().count("--verbose") == 1000
    now[0] = WINDOW
    logger.handlers[0].report_omitted()  # type: ignore[attr-defined]
    omitted = f"{1000 - MAX_LINES} more lines like this one were left out: request %d failed\n"
    assert written.getvalue().endswith(omitted)
    logger.error("request %d failed", 1001)
    assert written.getvalue().endswith("request 1001 failed\n")


def test_the_number_of_kinds_is_limited(log: tuple[logging.Logger, io.StringIO]) -> None:
    logger, written = log
    for i in range(10 * MAX_KINDS):
        logger.warning(f"what a client has sent: {i}")
    assert len(written.getvalue().splitlines()) == MAX_KINDS + MAX_LINES
    assert len(logger.handlers[0]._windows) == MAX_KINDS + 1  # type: ignore[attr-defined]


def test_lines_for_terminals_and_programs_are_limited_in_length() -> None:
    record = logging.LogRecord("forerun", logging.WARNING, "", 0, "the request is late", (), None)
    record.facts = {"seconds": 1.5, "error": None}
    plain = PlainLines().format(record)
    assert re.fullmatch(r"\d\d:\d\d:\d\d WARNING: the request is late seconds=1.5", plain)
    assert json.loads(JsonLines().format(record))["seconds"] == 1.5
    record.msg = "x" * 10_000_000
    for formatter in (PlainLines(), JsonLines()):
        line = formatter.format(record)
        assert len(line) < MAX_LENGTH + 200 and "characters" in line


def test_greeting_and_announcement() -> None:
    lines = greeting(FACTS, URL).splitlines()
    assert len(lines) == 4 and max(map(len, lines)) < 80 and "tiny (draft suffix)" in lines[0]
    assert [line.split()[-1] for line in lines[1:]] == [f"{URL}/v1", f"{URL}/", f"{URL}/docs"]
    assert "no chat template" in greeting(FACTS | {"chat_template": False}, "")
    assert "template" not in greeting(FACTS, "")
    assert "(no draft)" in greeting(FACTS | {"draft": "off"}, "")
    match = re.fullmatch(rf"forerun: serving (\{{.*\}}) on {URL}", announcement(FACTS, URL))
    assert match and json.loads(match[1]) == FACTS


def test_a_terminal_gets_the_greeting_and_nothing_else() -> None:
    outer, inner = pty.openpty()
    devnull = os.open(os.devnull, os.O_RDWR)
    flags = ["serve", str(tiny.repetitive()), "--port", "0", "--kv-tokens", "2048"]
    process = Process(flags, devnull, devnull, inner, {**os.environ})
    os.close(devnull)
    os.close(inner)
    printed = b""
    try:
        while b"/docs" not in printed:
            printed += os.read(outer, 4096)
        address = re.search(rb"http://[0-9.:]+", printed)
        assert address
        assert httpx2.get(f"{address[0].decode()}/health", timeout=30).status_code == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    finally:
        process.kill()
        os.close(outer)
    lines = printed.decode().splitlines()
    first = "Serving tiny (draft suffix), which has no chat template"
    assert len(lines) == 4 and lines[0].startswith(first), lines


def test_a_request_is_one_line_and_one_span(caplog: pytest.LogCaptureFixture) -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    export = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    from opentelemetry import trace

    exporter, provider = export.InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(sdk.export.SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    app = make_app(LLM(tiny.repetitive(), kv_tokens=2048), Settings())
    body = {"prompt": "def f(", "max_tokens": 5, "temperature": 0}
    headers = {"X-Request-Id": "mine-1"}

    async def ask() -> httpx2.Response:
        transport = httpx2.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client,
        ):
            return await client.post("/v1/completions", json=body, headers=headers)

    with caplog.at_level(logging.INFO, logger="forerun.server"):
        answer = asyncio.run(ask())
    assert answer.status_code == 200 and answer.headers["x-request-id"] == "mine-1"
    (line,) = [r for r in caplog.records if r.message == "request"]
    assert line.facts["request_id"] == "mine-1" and line.facts["completion_tokens"] == 5
    spans = {span.name: span for span in exporter.get_finished_spans()}
    own = spans["generate"]
    assert own.attributes["gen_ai.usage.input_tokens"] == 6
    assert own.attributes["gen_ai.usage.output_tokens"] == 5
    assert own.parent and own.context.trace_id == spans["POST /v1/completions"].context.trace_id
