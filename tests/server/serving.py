"""A real server in a thread of the test process, and helpers to talk to it."""

from __future__ import annotations

import json
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2
import pytest

from forerun.llm import LLM
from forerun.server.app import make_app
from forerun.server.jobs import EngineService
from forerun.server.run import Server
from forerun.server.settings import Settings
from forerun.types import Event

TIMEOUT = 30.0  # maximum number of seconds that a test waits for a condition
REQUEST = {"prompt": "def add(a, b):", "max_tokens": 8, "seed": 1}
HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {  # short requests, without the model that Ollama's API needs
    "/v1/completions": {"prompt": "x = ", "max_tokens": 2},
    "/v1/chat/completions": {"messages": HI, "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/embeddings": {"input": "hi"},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [5]},
    "/api/chat": {"messages": HI, "options": {"num_predict": 2}},
    "/api/generate": {"prompt": "x", "options": {"num_predict": 2}},
    "/api/embed": {"input": "x"},
    "/api/embeddings": {"prompt": "x"},
    "/api/show": {},
}
IDLE = re.compile(r"^forerun_(?:running|waiting|kv_used)(?:\{.*\})? 0\.0$", re.M)


@dataclass(kw_only=True)
class Client:
    """A server known only by its address; `logged` has its errors if it runs in this process."""

    url: str
    http: httpx2.Client
    logged: list[logging.LogRecord] = field(default_factory=list)

    def complete(self, **options: Any) -> dict[str, Any]:
        """Return the answer to a completion, which must succeed."""
        return self.answer(
            "/v1/completions", {"prompt": "def add(a, b):", "max_tokens": 8} | options
        )

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request, which must succeed."""
        answer = self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def wait_until_idle(self) -> None:
        """Wait until the metrics show no running or waiting request and no KV page in use."""

        def idle() -> bool:
            page = self.http.get("/metrics").text
            return (
                len(IDLE.findall(page))
                == len(re.findall(r"^forerun_(?:running|waiting|kv_used)\b", page, re.M))
                > 0
            )

        until(idle, "the server is idle")


@dataclass(kw_only=True)
class Serving(Client):
    """A server in this process."""

    server: Server
    service: EngineService
    thread: threading.Thread

    def wait_until_idle(self) -> None:
        """Wait until nothing runs, and check that no KV page is in use or lost."""
        engine = self.service.llm.engine
        until(lambda: not engine.busy and not self.service.jobs, "the engine is idle")
        until(lambda: engine.target.cache.pages.used == 0, "no page is in use", timeout=3)
        engine.target.cache.pages.check()


def until(condition: Callable[[], object], what: str, timeout: float = TIMEOUT) -> None:
    """Wait until a condition holds, which must happen within `timeout` seconds."""
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"timed out: {what}"
        time.sleep(0.005)


def sse(response: httpx2.Response) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream without [DONE]."""
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


@contextmanager
def engine_blocked(service: EngineService) -> Iterator[None]:
    """Block the engine's thread."""
    begun, go = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        go.wait(TIMEOUT)

    service._commands.put(hold)
    assert begun.wait(TIMEOUT)
    try:
        yield
    finally:
        go.set()


def make_engine_fail(llm: LLM, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Make the engine fail once, after this number of steps."""
    engine = llm.engine
    step = engine.step
    steps: list[int] = []

    def step_or_fail() -> list[Event]:
        steps.append(1)
        if len(steps) == after + 1:
            raise RuntimeError("on purpose")
        return step()

    monkeypatch.setattr(engine.multi_step, "seconds", 0.0)  # it would need too few steps
    monkeypatch.setattr(engine, "step", step_or_fail)


@contextmanager
def slow(service: EngineService, seconds: float = 0.01) -> Iterator[None]:
    """Make each step of the engine take `seconds`, so that long requests do not end by themselves."""
    engine = service.llm.engine
    step = engine.step

    def slow_step() -> list[Event]:
        time.sleep(seconds)
        return step()

    engine.step = slow_step  # type: ignore[method-assign]
    try:
        yield
    finally:
        del engine.step


def post_headers(length: int | None, path: str = "/v1/completions", more: str = "") -> bytes:
    """Return the headers of a POST request; without a length the headers are not complete."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    text = "\r\n".join(lines) + f"\r\n{more}"
    return (text if length is None else f"{text}Content-Length: {length}\r\n\r\n").encode()


def post(body: dict[str, Any], length: int | None = None, path: str = "/v1/completions") -> bytes:
    """Return a POST request, which announces `length` bytes if that is given."""
    content = json.dumps(body).encode()
    return post_headers(length or len(content), path) + content


@contextmanager
def connected(s: Client, sent: bytes = b"", receive_buffer: int = 0) -> Iterator[socket.socket]:
    """Open a connection and send something."""
    host, port = s.url.removeprefix("http://").split(":")
    with socket.socket() as connection:
        if receive_buffer:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(20)
        connection.connect((host, int(port)))
        connection.sendall(sent)
        yield connection


def received(connection: socket.socket, end: bytes = b"") -> bytes:
    """Return what the server sends until `end`, or until it closes the connection."""
    data = b""
    while part := connection.recv(1 << 16):
        data += part
        if end and end in data:
            return data
    assert not end, data[-300:]
    return data


def small_buffer_listener() -> socket.socket:
    """Return a listener with a small send buffer, so that a client that stops reading is noticed."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return listener


class ErrorCollector(logging.Handler):
    """Collects log records of errors and records with a traceback."""

    def __init__(self, records: list[logging.LogRecord]) -> None:
        super().__init__(logging.DEBUG)
        self.records = records

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR or record.exc_info:
            self.records.append(record)


@contextmanager
def serving(
    llm: LLM,
    listener: socket.socket | None = None,
    headers: dict[str, str] | None = None,
    **options: Any,
) -> Iterator[Serving]:
    """Run a server with these settings on a free port, or on the given listener."""
    settings = Settings(**({"port": 0, "shutdown_timeout": 1.0} | options))
    app = make_app(llm, settings)
    listener = listener or socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    if not listener.getsockname()[1]:
        listener.bind(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = Server(app, settings)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    logged: list[logging.LogRecord] = []
    handler = ErrorCollector(logged)
    logging.getLogger().addHandler(handler)
    try:
        thread.start()
        until(lambda: server.started, "the server starts")
        with httpx2.Client(base_url=url, timeout=TIMEOUT, headers=headers) as http:
            service = app.state.service
            yield Serving(
                url=url, http=http, logged=logged, server=server, service=service, thread=thread
            )
    finally:
        server.should_exit = True
        thread.join(TIMEOUT)
        logging.getLogger().removeHandler(handler)
        listener.close()
    assert not thread.is_alive(), "the server did not shut down"
