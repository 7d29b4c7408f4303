"""A real server in a thread, and what to ask of it when it should be at rest."""

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

from forerun.llm import LLM
from forerun.server.app import make_app
from forerun.server.run import Server
from forerun.server.jobs import EngineService as Service
from forerun.server.settings import Settings
from forerun.types import Event

PATIENCE = 30.0  # seconds until a test says that what it waits for does not come


IDLE = re.compile(r"^forerun_(?:running|waiting|kv_used)(?:\{.*\})? 0\.0$", re.M)


@dataclass(kw_only=True)
class Front:
    """What answers at an address, known by nothing else. `http` is a client of it, `logged` what
    was logged as an error while it ran, where that can be seen."""

    url: str
    http: httpx2.Client
    logged: list[logging.LogRecord] = field(default_factory=list)

    def complete(self, **options: Any) -> dict[str, Any]:
        """The answer to a completion that must succeed."""
        return self.answer(
            "/v1/completions", {"prompt": "def add(a, b):", "max_tokens": 8} | options
        )

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to any request that must succeed."""
        answer = self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def rest(self) -> None:
        """Wait until nothing runs nor waits, and no page is held, by what it counts."""

        def idle() -> bool:
            page = self.http.get("/metrics").text
            return (
                len(IDLE.findall(page))
                == len(re.findall(r"^forerun_(?:running|waiting|kv_used)\b", page, re.M))
                > 0
            )

        until(idle, "it is at rest")


@dataclass(kw_only=True)
class Serving(Front):
    """A server in this process."""

    server: Server
    service: Service
    thread: threading.Thread

    def rest(self) -> None:
        """Wait until nothing runs; then no page may be held and every page accounted for."""
        engine = self.service.llm.engine
        until(lambda: not engine.busy and not self.service.jobs, "the engine is at rest")
        until(lambda: engine.target.cache.pages.used == 0, "no page is held", patience=3)
        engine.target.cache.pages.check()


def until(true: Callable[[], object], what: str, patience: float = PATIENCE) -> None:
    """Wait for something that must come."""
    end = time.monotonic() + patience
    while not true():
        assert time.monotonic() < end, f"it never came that {what}"
        time.sleep(0.005)


def sse(response: httpx2.Response) -> Iterator[dict[str, Any]]:
    """The events of a stream, [DONE] left out."""
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


@contextmanager
def held(service: Service) -> Iterator[None]:
    """The engine does nothing meanwhile: what is asked of it waits."""
    begun, go = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        go.wait(PATIENCE)

    service._commands.put(hold)
    assert begun.wait(PATIENCE)
    try:
        yield
    finally:
        go.set()


@contextmanager
def slow(service: Service, seconds: float = 0.01) -> Iterator[None]:
    """Each step takes so long: a request of hundreds of tokens does not end while a test looks at
    it."""
    engine = service.llm.engine
    step = engine.step

    def slowly() -> list[Event]:
        time.sleep(seconds)
        return step()

    engine.step = slowly  # type: ignore[method-assign]
    try:
        yield
    finally:
        del engine.step


class Errors(logging.Handler):
    """Keeps what is logged as an error, or with a traceback."""

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
    """A server with these settings on a free port (or on a listener of the caller's), shut down at
    the end."""
    settings = Settings(**({"port": 0, "shutdown_timeout": 1.0} | options))
    app = make_app(llm, settings)
    listener = listener or socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    if not listener.getsockname()[1]:
        listener.bind(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = Server(app, settings)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    logged: list[logging.LogRecord] = []
    handler = Errors(logged)
    logging.getLogger().addHandler(handler)
    try:
        thread.start()
        until(lambda: server.started, "the server starts")
        with httpx2.Client(base_url=url, timeout=PATIENCE, headers=headers) as http:
            service = app.state.service
            yield Serving(
                url=url, http=http, logged=logged, server=server, service=service, thread=thread
            )
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        logging.getLogger().removeHandler(handler)
        listener.close()
    assert not thread.is_alive(), "the server did not shut down"
