"""The server process: start, signals, a bounded shutdown, and HTTP connections with bounded work
and memory.

A connection goes through two classes:

1. `Acceptor` (`acceptor.py`) reads the headers of its first request on a plain socket.
2. `Connection`, uvicorn's HTTP protocol with limits and timeouts. It buffers input until its turn
   to parse (`ConnectionPool`), and gives the parser (llhttp) at most the headers of one request or
   a slice of one body at a time.
"""

from __future__ import annotations

import asyncio
import enum
import gc
import logging
import re
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from types import FrameType
from typing import Any, Protocol

import httptools
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from forerun.llm import LLM
from forerun.server.acceptor import (
    FULL,
    HEALTH,
    INVALID,
    LATE,
    LINGER_BYTES,
    LINGER_SECONDS,
    NO_DESCRIPTOR,
    Acceptor,
    Timer,
    headers_length,
    refusal,
)
from forerun.server.app import describe, make_app
from forerun.server.auth import ApiKeys
from forerun.server.errors import ApiError, is_out_of_descriptors
from forerun.server.limits import (
    fit_connections,
    max_pending_connections,
    raise_descriptor_limit,
)
from forerun.server.listen import is_loopback
from forerun.server.monitoring import report_omitted, start_logging
from forerun.server.probe import probe
from forerun.server.settings import Settings
from forerun.utils import json_line
from forerun.worker_process import stop_all

log = logging.getLogger("forerun.server")
MAX_FRAMING = 32 << 10  # bytes of chunk framing, besides a sixteenth of the content
BODY_SLICE = 16 << 10  # bytes of a chunked body that are parsed in one turn
READ_AHEAD = 64 << 10  # bytes that are kept before they are parsed; then reading pauses
LARGE_WRITE = 64 << 10  # bytes; streams write less, and are not counted in the pool
HEADER_SECONDS, BODY_SECONDS = 0.002, 0.001  # for parsing, in one iteration of the event loop
SWITCH_SECONDS = 0.001  # after which the engine's thread yields the interpreter to the event loop
BACKLOG = 2048  # connections that wait to be accepted
UPGRADE = re.compile(rb"\r\n(upgrade[ \t]*:)", re.IGNORECASE)  # the parser would skip the body


class Phase(enum.Enum):
    """State of a connection: the input it expects next from its client."""

    HEADERS = enum.auto()
    BODY = enum.auto()
    COMPLETE = enum.auto()  # no input: a complete request is being answered
    REFUSED = enum.auto()  # no input: all of it is discarded


class ConnectionPool:
    """Shared state of a server's connections: turns for parsing, and the bytes they write.

    Connections parse one piece each in turn, for a bounded time in each iteration of the event
    loop. Headers come before bodies, and one request starts in each iteration, so that /health and
    running streams do not wait for all the requests of a burst.

    Attributes:
        waiting: connections that wait for their clients, the longest first.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.waiting: dict[Connection, None] = {}
        self._header_queue: deque[Connection] = deque()
        self._body_queue: deque[Connection] = deque()
        self._scheduled = False
        self._unread: set[Connection] = set()

    def schedule(self, connection: Connection) -> None:
        """Let a connection parse when it is its turn."""
        if connection.queued:
            return
        connection.queued = True
        if connection.is_health:
            self._header_queue.appendleft(connection)
        elif connection.phase is Phase.HEADERS:
            self._header_queue.append(connection)
        else:
            self._body_queue.append(connection)
        self._schedule_turns(connection)

    def _schedule_turns(self, connection: Connection) -> None:
        if not self._scheduled:
            self._scheduled = True
            connection.loop.call_soon(self._run_turns)

    def _run_turns(self) -> None:
        self._scheduled = False
        for queue, seconds in (
            (self._header_queue, HEADER_SECONDS),
            (self._body_queue, BODY_SECONDS),
        ):
            end = time.perf_counter() + seconds
            started = False
            while queue and time.perf_counter() < end and (queue[0].is_health or not started):
                connection = queue.popleft()
                connection.queued = False
                may_start = connection.phase is Phase.HEADERS and not connection.is_health
                try:
                    connection.parse()
                except OSError:  # the client has gone
                    connection.transport.abort()
                except Exception:  # a fault of one connection must not stop the others
                    log.exception("a connection failed")
                    connection.transport.abort()
                started = started or (may_start and connection.phase is not Phase.HEADERS)
        for queue in (self._header_queue, self._body_queue):
            if queue:
                self._schedule_turns(queue[0])

    def add_unread(self, connection: Connection) -> None:
        """Count the bytes that a connection has written and its client has not read.

        If all of them exceed --max-unread, the connection with the most is closed.
        """
        self._unread.add(connection)
        sizes = {unread: unread.transport.get_write_buffer_size() for unread in self._unread}
        while sum(sizes.values()) > self.settings.max_unread:
            largest = max(sizes, key=lambda unread: sizes[unread])
            log.warning(
                "clients have not taken %d bytes of their answers: the largest of them ends",
                self.settings.max_unread,
            )
            del sizes[largest]
            self.discard_unread(largest)
            largest.transport.abort()

    def discard_unread(self, connection: Connection) -> None:
        self._unread.discard(connection)


class ReadControl(FlowControl):
    """uvicorn's flow control, which leaves reading to the connection."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection.transport)
        self._connection = connection

    def pause_reading(self) -> None:
        """Stop parsing until the application has read the buffered part of the body."""
        self.read_paused = True

    def resume_reading(self) -> None:
        """Resume parsing: the application asks for more of the body."""
        if self.read_paused:
            self.read_paused = False
            self._connection.proceed()


class Connection(HttpToolsProtocol):
    """uvicorn's HTTP protocol with limits on size, framing and time.

    The base class waits without limit for headers and for clients that do not read, and parses
    all bytes of a read at once.

    Attributes:
        queued: it waits for its turn to parse.
    """

    def __init__(
        self, pool: ConnectionPool, *args: Any, received: bytes = b"", **options: Any
    ) -> None:
        """Start with the bytes `received` already; other arguments are uvicorn's."""
        super().__init__(*args, **options)
        self.pool = pool
        self.settings = pool.settings
        self.request_timer = Timer()
        self.reader_timer = Timer()
        self.phase = Phase.HEADERS
        self.queued = False
        self._received = bytearray(received)  # not parsed yet
        self._searched = 0  # bytes of `_received` without the end of the headers
        self._reading_paused = False
        self._body_left: int | None = None  # bytes to come; None for a chunked body
        self._raw_bytes = 0  # of the body with its framing, or after a refusal
        self._content_bytes = 0  # of the body

    @property
    def answering(self) -> bool:
        """Return True while the application works on a request."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def is_health(self) -> bool:
        """Return True if the next request goes before all others."""
        return self.phase is Phase.HEADERS and self._received.startswith(HEALTH)

    @property
    def incomplete(self) -> bool:
        """Return True if it waits for its client to send a request or the rest of one."""
        return self.phase is not Phase.COMPLETE and not self.transport.is_closing()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start; at the limit, close the connection that has waited longest for its client."""
        super().connection_made(transport)
        self.flow = ReadControl(self)
        transport.set_write_buffer_limits(0)  # writing pauses as soon as the client is behind
        if len(self.connections) > self.settings.max_connections and not self.is_health:
            oldest = next(iter(self.pool.waiting), None)
            if oldest is None:
                self._refuse(503, FULL)
                return
            oldest.transport.abort()
            self.pool.waiting.pop(oldest)
            self.connections.discard(oldest)
        self._start_waiting()
        self.proceed()

    def connection_lost(self, exc: Exception | None) -> None:
        """Release the buffers, timers and entries of the connection."""
        super().connection_lost(exc)
        self._received.clear()
        self.pool.waiting.pop(self, None)
        self.pool.discard_unread(self)
        self.request_timer.stop()
        self.reader_timer.stop()

    # Reading requests

    def data_received(self, data: bytes) -> None:
        """Keep input until it is parsed."""
        self._unset_keepalive_if_required()
        if self.phase is Phase.REFUSED:
            self._raw_bytes += len(data)
            if self._raw_bytes > LINGER_BYTES:
                self.transport.abort()
        elif not self.transport.is_closing():
            self._received += data
            self.proceed()

    def proceed(self) -> None:
        """Ask for a turn if there is something to parse, and pause reading if there is enough."""
        ready = self.phase in (Phase.HEADERS, Phase.BODY) and not self.flow.read_paused
        if ready and len(self._received) > self._searched:
            self.pool.schedule(self)
        blocked = not ready and bool(self._received or self.flow.read_paused)
        pause = blocked or len(self._received) > READ_AHEAD
        if pause != self._reading_paused and not self.transport.is_closing():
            self._reading_paused = pause
            (self.transport.pause_reading if pause else self.transport.resume_reading)()

    def parse(self) -> None:
        """Parse the headers of one request, or a slice of its body."""
        if self.transport.is_closing() or self.flow.read_paused:
            return
        if self.phase is Phase.HEADERS:
            self._parse_headers()
        elif self.phase is Phase.BODY:
            self._parse_body()
        if self.transport.is_closing() or self.phase is Phase.REFUSED:
            return
        if not self.incomplete:
            self.pool.waiting.pop(self, None)
        self._watch_request()
        self.proceed()

    def _parse_headers(self) -> None:
        try:
            length = headers_length(self._received, self._searched)
        except ApiError as error:
            self._refuse(error.status, str(error))
            return
        if length:
            self._feed(UPGRADE.sub(rb"\r\nx-\1", self._take(length)))
        else:
            self._searched = len(self._received)

    def _parse_body(self) -> None:
        left = self._body_left
        piece = self._take(BODY_SLICE if left is None else min(left, HIGH_WATER_LIMIT))
        self._raw_bytes += len(piece)
        self._feed(piece)
        framing = self._raw_bytes - self._content_bytes
        if self._body_left is None and framing > MAX_FRAMING + self._content_bytes // 16:
            limit = f"{MAX_FRAMING} bytes and a sixteenth of the body"
            message = f"the body comes in too many small chunks, whose framing is over {limit}"
            self._refuse(400, f"{message}: send larger ones")

    def _take(self, size: int) -> bytes:
        """Remove and return the first `size` received bytes."""
        piece = bytes(self._received[:size])
        del self._received[:size]
        self._searched = 0
        return piece

    def _feed(self, piece: bytes) -> None:
        """Give bytes to the parser, which calls the `on_` methods."""
        try:
            self.parser.feed_data(piece)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            if self.phase is Phase.COMPLETE and self.answering:
                # The fault is in a request pipelined behind a chunked body. The client will send
                # that request again on another connection.
                self.cycle.keep_alive = False
                self._received.clear()
            else:
                self._refuse(400, INVALID)

    def on_message_begin(self) -> None:
        """Start a request. Raises ValueError if the previous one is not answered yet."""
        if self.phase is Phase.COMPLETE:
            raise ValueError("the request before is not answered yet")
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header; trailers after the body are ignored."""
        if self.phase is Phase.HEADERS:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Let the application work on the request."""
        super().on_headers_complete()
        self.phase = Phase.BODY
        self._raw_bytes = 0
        self._content_bytes = 0
        self._body_left = 0
        for name, value in self.headers:
            if name == b"transfer-encoding":
                self._body_left = None
                return
            if name == b"content-length":
                self._body_left = int(value)

    def on_body(self, body: bytes) -> None:
        """Keep a part of a body; the application wakes up for the whole body or a large part."""
        self._content_bytes += len(body)
        if self._body_left is not None:
            self._body_left -= len(body)
        if self.cycle.response_complete:
            return
        self.cycle.body += body
        if len(self.cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
            self.cycle.message_event.set()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self.phase = Phase.COMPLETE if self.answering else Phase.HEADERS

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        if self.phase is Phase.COMPLETE:
            self.phase = Phase.HEADERS
        if self._received:
            self._unset_keepalive_if_required()
        self._start_waiting()
        self.proceed()

    def _start_waiting(self) -> None:
        """Become the newest connection that waits for its client, unless its request is whole."""
        self.pool.waiting.pop(self, None)
        if self.incomplete:
            self.pool.waiting[self] = None
        self._watch_request()

    def _watch_request(self) -> None:
        """Run the timer from the last response until the next request has its headers."""
        if self.answering or self.transport.is_closing():
            self.request_timer.stop()
        elif self.request_timer.handle is None:
            self.request_timer.start(self.settings.header_timeout, self._expire)

    def _expire(self) -> None:
        if self.phase is Phase.HEADERS and self._received:
            self._refuse(408, LATE.format(self.settings.header_timeout))
        else:
            self.transport.close()

    # Writing responses

    def pause_writing(self) -> None:
        """Start the timer: the client does not read as fast as the application writes."""
        super().pause_writing()
        unread = self.transport.get_write_buffer_size()
        self._watch_reader(unread)
        if unread > LARGE_WRITE:
            self.pool.add_unread(self)

    def resume_writing(self) -> None:
        """Stop the timer: the client has read everything."""
        super().resume_writing()
        self.reader_timer.stop()
        self.pool.discard_unread(self)

    def _watch_reader(self, unread: int) -> None:
        self.reader_timer.start(self.settings.write_timeout, lambda: self._check_reader(unread))

    def _check_reader(self, before: int) -> None:
        unread = self.transport.get_write_buffer_size()
        if unread < before:
            self._watch_reader(unread)
            return
        log.info(
            "a client took nothing of its answer for %g s: its connection ends",
            self.settings.write_timeout,
        )
        self.transport.abort()

    def _refuse(self, status: int, message: str) -> None:
        """Respond in place of the application, and end the connection."""
        if self.answering:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self.transport.abort()
                return
        self.transport.write(refusal(status, message))
        if self.phase is Phase.HEADERS and not self._received:
            self.transport.close()  # the client has sent nothing that could cause a reset
            return
        try:
            self.transport.write_eof()
        except OSError:  # the client has gone
            self.transport.abort()
            return
        self._received.clear()
        self.phase = Phase.REFUSED
        self._raw_bytes = 0
        if self._reading_paused:
            self._reading_paused = False
            self.transport.resume_reading()
        self.request_timer.start(LINGER_SECONDS, self.transport.abort)


# ------------------------------------------------------------ the server


class Service(Protocol):
    """The object behind an application: an engine's service, or the ingress of a cluster."""

    draining: bool  # new requests are refused since the server shuts down

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
    if not is_loopback(settings.host) and not ApiKeys(settings):
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
        asyncio.get_running_loop().set_exception_handler(_handle_exception)
        await super().startup([])
        make = partial(Connection, self.pool, self.config, self.server_state, self.lifespan.state)
        max_pending = min(max_pending_connections(), self.settings.max_connections)
        for listener in sockets or ():
            listener.listen(BACKLOG)
            acceptor = Acceptor(listener, make, self.settings.header_timeout, max_pending)
            self.acceptors.append(acceptor)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
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
        log.error(NO_DESCRIPTOR)
    else:
        loop.default_exception_handler(context)
