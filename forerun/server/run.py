"""The server process: start, signals, and a bounded shutdown."""

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
from forerun.server.acceptor import Acceptor
from forerun.server.app import describe, make_app
from forerun.server.auth import ApiKeys
from forerun.server.connections import Connection, ConnectionPool
from forerun.server.errors import is_out_of_descriptors
from forerun.server.limits import (
    fit_connections,
    max_pending_connections,
    raise_descriptor_limit,
)
from forerun.server.listen import is_loopback
from forerun.server.logs import report_omitted, start_logging
from forerun.server.probe import probe
from forerun.server.settings import Settings
from forerun.utils import json_line
from forerun.worker_process import stop_all

log = logging.getLogger("forerun.server")
SWITCH_SECONDS = 0.001  # after which the engine's thread yields the interpreter to the event loop
BACKLOG = 2048  # connections that wait to be accepted


class Service(Protocol):
    """The object behind an application: an engine's service, or the ingress of a cluster.

    Attributes:
        draining: new requests are refused since the server shuts down.
    """

    draining: bool

    @property
    def jobs(self) -> Collection[Any]:
        """Running requests."""

    def end_all(self) -> None:
        """End all running requests with an error."""

    def stop(self) -> None:
        """Stop when the application has been shut down."""


def run(options: dict[str, Any], settings: Settings, listener: socket.socket, verbose: bool) -> int:
    """Load a model and serve it on a bound socket until a signal. Returns the exit code."""
    terminal = sys.stderr.isatty()
    start_logging(verbose, terminal)
    raise_descriptor_limit()
    try:
        llm = LLM(**options)
        warning = probe(llm)  # also runs the first forward passes, before a client waits for them
        app = make_app(llm, settings)
        gc.collect()
        gc.freeze()  # keeps garbage collections from traversing the model, which takes long
    except BaseException:
        listener.close()
        raise
    if warning:
        log.warning("%s", warning)
    if not is_loopback(settings.host) and not ApiKeys.of(settings):
        log.warning(
            "everybody who reaches %s may use this server: give --api-key or --api-keys",
            settings.host,
        )
    announce = greeting if terminal else announcement
    return serve(app, settings, listener, partial(announce, describe(llm, settings)))


def serve(
    app: Starlette,
    settings: Settings,
    listener: socket.socket,
    announce: Callable[[str], str],
) -> int:
    """Serve an application on a bound socket until a signal.

    `app.state.service` is its `Service`. `announce` makes the text to print from the server's URL.
    Returns the exit code: 0 after an orderly shutdown.
    """
    host, port = listener.getsockname()[:2]
    listener.listen(BACKLOG)
    settings = fit_connections(settings)
    authority = f"[{host}]" if ":" in host else host
    print(announce(f"http://{authority}:{port}"), file=sys.stderr, flush=True)
    sys.setswitchinterval(SWITCH_SECONDS)
    server = Server(app, settings)
    server.run(sockets=[listener])
    # After a second signal the engine's thread still runs, and Python could abort at its exit.
    server.service.stop()
    return 0 if server.started else 1


def greeting(facts: dict[str, Any], url: str) -> str:
    """Return the text for a terminal that the server has started."""
    draft = "no draft" if facts["draft"] == "off" else f"draft {facts['draft']}"
    template = "" if facts.get("chat_template", True) else ", which has no chat template"
    return (
        f"Serving {facts['model']} ({draft}){template}; Ctrl-C ends it\n"
        f"  API         {url}/v1\n"
        f"  Playground  {url}/\n"
        f"  Docs        {url}/docs"
    )


def announcement(facts: dict[str, Any], url: str) -> str:
    """Return the same for a program: one line that ends with the URL."""
    return f"forerun: serving {json_line(facts, ascii_only=True)} on {url}"


class Server(uvicorn.Server):
    """uvicorn's server with its own connections, which drains at the first signal.

    Draining means that running requests may end while new ones get 503.
    """

    def __init__(self, app: Starlette, settings: Settings) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                loop="asyncio",  # also where uvloop is installed: Acceptor is tested with asyncio
                ws="none",
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=2,
                server_header=False,
            )
        )
        self.service: Service = app.state.service
        self.settings = settings
        self.pool = ConnectionPool(settings)
        self.acceptors: list[Acceptor] = []
        self._drain: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, then accept connections."""
        asyncio.get_running_loop().set_exception_handler(_handle_exception)
        await super().startup([])
        make = partial(Connection, self.pool, self.config, self.server_state, self.lifespan.state)
        max_pending = min(max_pending_connections(), self.settings.max_connections)
        for listener in sockets or ():
            listener.listen(BACKLOG)
            acceptor = Acceptor(listener, make, self.settings.header_timeout, max_pending)
            self.acceptors.append(acceptor)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting connections, and shut the application down."""
        for acceptor in self.acceptors:
            acceptor.close()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start to drain at the first signal, and end at once at the second one.

        uvicorn's method would re-raise the signal after the shutdown.
        """
        if self.service.draining or not self.started:
            self.should_exit = True
            self.force_exit = True
            stop_all()
            return
        log.info(
            "%s: running requests may end within %g s",
            signal.Signals(sig).name,
            self.settings.shutdown_timeout,
        )
        self.service.draining = True

    async def on_tick(self, counter: int) -> bool:
        """Do the periodic work every 0.1 s; return True to end."""
        report_omitted()
        if self.service.draining and self._drain is None:
            self._drain = asyncio.create_task(self._wait_for_jobs())
        return await super().on_tick(counter)

    async def _wait_for_jobs(self) -> None:
        end = time.monotonic() + self.settings.shutdown_timeout
        while self.service.jobs and time.monotonic() < end:
            await asyncio.sleep(0.05)
        self.service.end_all()
        stop_all()
        while self.service.jobs and time.monotonic() < end + 5:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.1)  # for the last events of streams
        self.should_exit = True


def _handle_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an exception that no task and no callback handles."""
    if is_out_of_descriptors(context.get("exception")):
        log.error(
            "no file descriptor is left for another connection: raise the limit with ulimit -n"
        )
    else:
        loop.default_exception_handler(context)
