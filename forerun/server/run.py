"""A server process from its beginning to its end: logs, the port, signals and a bounded shutdown."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import time
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from forerun.errors import ConfigError
from forerun.llm import LLM
from forerun.server.app import describe, make_app, warm
from forerun.server.service import Service
from forerun.server.settings import Settings

LOCAL = ("127.0.0.1", "localhost", "::1")
log = logging.getLogger("forerun.server")


def run(options: dict[str, Any], settings: Settings, verbose: bool) -> int:
    """Serve until a signal ends it. Returns the exit code: 0 after an orderly shutdown."""
    _log_as_json(verbose)
    listener = _listen(settings)
    try:
        llm = LLM(**options)
        warm(llm)
        app = make_app(llm, settings)
    except BaseException:
        listener.close()
        raise
    host, port = listener.getsockname()[:2]
    if settings.host not in LOCAL and not settings.api_key and not os.environ.get("FORERUN_API_KEY"):
        log.warning("everybody who reaches %s may use this server: give --api-key", settings.host)
    listener.listen(2048)
    where = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    print(f"forerun: serving {describe(llm, settings)} on {where}", file=sys.stderr, flush=True)
    server = Server(app, settings)
    server.run(sockets=[listener])
    server.service.stop()  # a second signal leaves its thread running, under which Python may abort as it ends
    return 0 if server.started else 1


def _listen(settings: Settings) -> socket.socket:
    """The listening socket, before the model is loaded: a port that is taken is known at once."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # by this asyncio knows to set TCP_NODELAY
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {settings.host}:{settings.port}: {error.strerror or error}") from None
    return listener


class Server(uvicorn.Server):
    """uvicorn, but the first signal lets running requests end while new ones are told 503."""

    def __init__(self, app: FastAPI, settings: Settings) -> None:
        super().__init__(
            uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=2, server_header=False)
        )
        self.service: Service = app.state.service
        self.bound = settings.shutdown_timeout
        self._drain: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal begins to drain, the second ends at once. Neither ends the process by itself."""
        if self.service.draining or not self.started:
            self.should_exit = self.force_exit = True
            return
        log.info("%s: running requests may end within %g s", signal.Signals(sig).name, self.bound)
        self.service.draining = True

    async def on_tick(self, counter: int) -> bool:
        """Every tenth of a second: go on, or end."""
        if self.service.draining and self._drain is None:
            self._drain = asyncio.create_task(self._drained())
        return await super().on_tick(counter)

    async def _drained(self) -> None:
        end = time.monotonic() + self.bound
        while self.service.tickets and time.monotonic() < end:
            await asyncio.sleep(0.05)
        self.service.end_all()
        while self.service.tickets and time.monotonic() < end + 5:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.1)  # the last words of the streams
        self.should_exit = True


def _not_cancelled(record: logging.LogRecord) -> bool:
    """Drop what uvicorn says of requests that the end of the server has cut off."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError)) and (
        "CancelledError" not in record.getMessage()
    )


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {"time": self.formatTime(record), "level": record.levelname.lower()}
        entry |= {"message": record.getMessage()} | getattr(record, "facts", {})
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def _log_as_json(verbose: bool) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    handler.addFilter(_not_cancelled)
    logging.getLogger("forerun").handlers = [handler]
    logging.getLogger("forerun").setLevel(logging.INFO if verbose else logging.WARNING)
    logging.getLogger("uvicorn.error").handlers = [handler]
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
