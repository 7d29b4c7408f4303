"""A server process from its beginning to its end: logs, the port, signals and a bounded
shutdown."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection
from functools import partial
from types import FrameType
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette

from forerun.llm import LLM
from forerun.server.app import describe, make_app
from forerun.server.arrivals import Arrivals
from forerun.server.connections import connections
from forerun.server.descriptors import (
    is_out_of_descriptors,
    most_arrivals,
    raise_limit,
    within_limit,
)
from forerun.server.listen import is_loopback
from forerun.server.logs import LimitedHandler, settle, shortened
from forerun.server.probe import probe
from forerun.server.settings import Settings
from forerun.server.tenants import Callers
from forerun.utils import json_line
from forerun.worker_process import stop_all

log = logging.getLogger("forerun.server")
SWITCH_SECONDS = (
    0.001  # the engine's thread yields the interpreter to the event loop after this time
)
BACKLOG = 2048  # connections that wait to be accepted


def run(options: dict[str, Any], settings: Settings, listener: socket.socket, verbose: bool) -> int:
    """Serve a model on a socket of `listen` until a signal ends it. Returns the exit code, as
    `serve` does."""
    start_logging(verbose, sys.stderr.isatty())
    raise_limit()
    try:
        llm = LLM(**options)
        fault = probe(llm)  # and the first client does not pay for first calls
        app = make_app(llm, settings)
        gc.collect()
        gc.freeze()  # what is loaded stays: looking through it for cycles would hold up everybody
    except BaseException:
        listener.close()
        raise
    if fault:
        log.warning("%s", fault)
    if not is_loopback(settings.host) and not Callers.of(settings):
        log.warning(
            "everybody who reaches %s may use this server: give --api-key or --api-keys",
            settings.host,
        )
    say = greeting if sys.stderr.isatty() else announcement
    return serve(app, settings, listener, partial(say, describe(llm, settings)))


def serve(
    app: Starlette,
    settings: Settings,
    listener: socket.socket,
    say: Callable[[str], str],
    descriptors: int = 1,
) -> int:
    """Serve an application on a socket of `listen` until a signal ends it; `say` makes of the
    address what is printed first, and a connection takes so many `descriptors`. Returns the exit
    code: 0 after an orderly shutdown."""
    host, port = listener.getsockname()[:2]
    listener.listen(BACKLOG)
    settings = within_limit(settings, descriptors)
    print(say(f"http://{f'[{host}]' if ':' in host else host}:{port}"), file=sys.stderr, flush=True)
    sys.setswitchinterval(SWITCH_SECONDS)
    server = Server(app, settings)
    server.run(sockets=[listener])
    # a second signal leaves its thread running, under which Python may abort as it ends
    server.service.stop()
    return 0 if server.started else 1


def greeting(facts: dict[str, Any], where: str) -> str:
    """What a person is told who has started a server."""
    draft = "no draft" if facts["draft"] == "off" else f"draft {facts['draft']}"
    template = "" if facts.get("chat_template", True) else ", which has no chat template"
    return (
        f"Serving {facts['model']} ({draft}){template}; Ctrl-C ends it\n"
        f"  API         {where}/v1\n"
        f"  Playground  {where}/\n"
        f"  Docs        {where}/docs"
    )


def announcement(facts: dict[str, Any], where: str) -> str:
    """The same for a program: one line that ends with the address."""
    return f"forerun: serving {json_line(facts, ascii_only=True)} on {where}"


class Drainable(Protocol):
    """What a server must know of the service behind it, to end in order."""

    draining: bool  # new requests are told 503

    @property
    def tickets(self) -> Collection[object]:
        """Requests that have not ended."""

    def end_all(self) -> None:
        """End every request as it is."""

    def stop(self) -> None:
        """Nothing is asked of it any more."""


class Server(uvicorn.Server):
    """uvicorn, but the first signal lets running requests end while new ones are told 503."""

    def __init__(self, app: Starlette, settings: Settings) -> None:
        self.connection = connections(settings)
        super().__init__(
            uvicorn.Config(
                app,
                # the loop that `Arrivals` was tested on, also where uvloop is installed
                loop="asyncio",
                ws="none",
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=2,
                server_header=False,
            )
        )
        self.service: Drainable = app.state.service
        self.settings = settings
        self.arrivals: list[Arrivals] = []
        self._drain: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, and accept connections from then on."""
        asyncio.get_running_loop().set_exception_handler(_unhandled)
        await super().startup([])
        make = partial(self.connection, self.config, self.server_state, self.lifespan.state)
        most = min(most_arrivals(), self.settings.max_connections)
        for listener in sockets or ():
            listener.listen(BACKLOG)
            self.arrivals.append(Arrivals(listener, make, self.settings.header_timeout, most))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept nothing more, and end the application."""
        for arrivals in self.arrivals:
            arrivals.close()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal begins to drain, the second ends at once. Neither ends the process by
        itself."""
        if self.service.draining or not self.started:
            self.should_exit = self.force_exit = True
            stop_all()
            return
        log.info(
            "%s: running requests may end within %g s",
            signal.Signals(sig).name,
            self.settings.shutdown_timeout,
        )
        self.service.draining = True

    async def on_tick(self, counter: int) -> bool:
        """Every tenth of a second: go on, or end."""
        settle()
        if self.service.draining and self._drain is None:
            self._drain = asyncio.create_task(self._drained())
        return await super().on_tick(counter)

    async def _drained(self) -> None:
        end = time.monotonic() + self.settings.shutdown_timeout
        while self.service.tickets and time.monotonic() < end:
            await asyncio.sleep(0.05)
        self.service.end_all()
        stop_all()
        while self.service.tickets and time.monotonic() < end + 5:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.1)  # the last words of the streams
        self.should_exit = True


def _unhandled(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log what no task and no callback handles."""
    if is_out_of_descriptors(context.get("exception")):
        log.error(
            "no file descriptor is left for another connection: raise the limit with ulimit -n"
        )
    else:
        loop.default_exception_handler(context)


def _not_cancelled(record: logging.LogRecord) -> bool:
    """Drop what uvicorn says of requests that the end of the server has cut off."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError)) and (
        "CancelledError" not in record.getMessage()
    )


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {"time": self.formatTime(record), "level": record.levelname.lower()}
        entry |= {"message": shortened(record.getMessage())} | getattr(record, "facts", {})
        if record.exc_info:
            entry["error"] = shortened(self.formatException(record.exc_info))
        return json_line(entry, ascii_only=True)


class PlainLines(logging.Formatter):
    """A line for a person; facts of a request behind it."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s: %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        return shortened(super().format(record))

    def formatMessage(self, record: logging.LogRecord) -> str:
        facts = {
            name: value for name, value in getattr(record, "facts", {}).items() if value is not None
        }
        return " ".join(
            [super().formatMessage(record), *(f"{name}={value}" for name, value in facts.items())]
        )


def start_logging(verbose: bool, person: bool) -> None:
    """Log to stderr: plain lines for a person, JSON for a program; of many that are alike some."""
    handler = LimitedHandler()
    handler.setFormatter(PlainLines() if person else JsonLines())
    handler.addFilter(_not_cancelled)
    logging.getLogger("forerun").handlers = [handler]
    logging.getLogger("forerun").setLevel(logging.INFO if verbose else logging.WARNING)
    logging.getLogger("uvicorn.error").handlers = [handler]
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    logging.getLogger("asyncio").handlers = [handler]
    logging.getLogger("asyncio").setLevel(
        logging.ERROR
    )  # its warnings are of writes to clients that have gone
