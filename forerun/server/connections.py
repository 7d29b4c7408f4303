"""HTTP connections with bounded work and memory.

A connection goes through two classes:

1. `Acceptor` reads the headers of its first request on a plain socket. asyncio and uvicorn take
   100 microseconds for a connection and several hundred for a request, so that hundreds at once
   would delay all clients behind them; a plain socket takes about 20. A connection that sends
   nothing, half a request or too many headers never becomes more than that.
2. `Connection`, uvicorn's HTTP protocol with limits and timeouts. It buffers input until its turn
   to parse (`ConnectionPool`), and gives the parser (llhttp) at most the headers of one request or
   a slice of one body at a time.
"""

from __future__ import annotations

import asyncio
import enum
import json
import logging
import re
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from forerun.server import errors
from forerun.server.errors import ApiError, is_out_of_descriptors
from forerun.server.settings import Settings

log = logging.getLogger("forerun.server")
MAX_HEADER_BYTES = 16 << 10  # of one request, its first line included
MAX_HEADERS = 100  # lines
MAX_FRAMING = 32 << 10  # bytes of chunk framing, besides a sixteenth of the content
BODY_SLICE = 16 << 10  # bytes of a chunked body that are parsed in one turn
READ_AHEAD = 64 << 10  # bytes that are kept before they are parsed; then reading pauses
LARGE_WRITE = 64 << 10  # bytes; streams write less, and are not counted in the pool
HEADER_SECONDS, BODY_SECONDS = 0.002, 0.001  # for parsing, in one iteration of the event loop
BLANK_LINES = (b"\n\r\n", b"\n\n")  # ends of headers; the parser refuses the second
HEALTH = b"GET /health "  # served before all other requests
UPGRADE = re.compile(rb"\r\n(upgrade[ \t]*:)", re.IGNORECASE)  # the parser would skip the body
INVALID = "this is no HTTP/1.1 request"
FULL = "this server has as many connections as it takes (--max-connections)"
LATE = "the headers did not come within {:g} s (--header-timeout)"
# After a refusal the connection stays open for reading: a reset would lose the error message.
LINGER_SECONDS = 1.0
LINGER_BYTES = 1 << 20

ACCEPT_SECONDS = 0.004  # for accepting, and again for reading, in one iteration of the event loop
RECEIVE_BYTES = 4 << 10  # read from a pending connection at once
MAX_STARTS = 8  # requests handed on in one iteration; at most one of them is not for /health
MIN_TIMER_SECONDS = 0.01  # between two checks for expired connections
RETRY_SECONDS = 0.1  # until the next accept when no file descriptor was left


def headers_length(received: bytearray, searched: int = 0) -> int:
    """Return the number of bytes of a request's headers, or 0 if they are incomplete.

    The blank line counts; it is not within the first `searched` bytes. Empty lines before the
    request are removed from `received`, since some clients end a body with one. Raises ApiError for
    headers that are too long, too many or not HTTP.
    """
    if received.startswith((b"\r", b"\n")):
        received[:] = received.lstrip(b"\r\n")
    start = max(0, searched - 3)
    ends = [
        at + len(blank)
        for blank in BLANK_LINES
        if (at := received.find(blank, start, MAX_HEADER_BYTES)) >= 0
    ]
    found = min(ends, default=0)
    length = found or len(received)
    if length > MAX_HEADER_BYTES or received.count(b"\n", 0, length) > MAX_HEADERS + 2:
        limit = f"{MAX_HEADERS} headers of {MAX_HEADER_BYTES} bytes together"
        raise ApiError(431, f"a request has at most {limit}: send fewer or shorter ones")
    if not found and received and received[0] < ord("A"):
        raise ApiError(400, INVALID)
    return found


@lru_cache(64)
def refusal(status: int, message: str) -> bytes:
    """Build the response to a request that does not reach the application."""
    body = json.dumps(errors.body(ApiError(status, message))[1]).encode()
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
    }
    if status == 503:
        headers["retry-after"] = "1"
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return STATUS_LINE[status] + lines.encode() + b"\r\n" + body


class Timer:
    """Calls a function once after some seconds, unless it is stopped before."""

    def __init__(self) -> None:
        self.handle: asyncio.TimerHandle | None = None  # None if the timer is not running

    def start(self, seconds: float, call: Callable[[], None]) -> None:
        """Restart the timer; after 0 seconds it never calls."""
        self.stop()
        if seconds:
            self.handle = asyncio.get_running_loop().call_later(seconds, self._run, call)

    def stop(self) -> None:
        """Stop the timer."""
        if self.handle is not None:
            self.handle.cancel()
            self.handle = None

    def _run(self, call: Callable[[], None]) -> None:
        self.handle = None
        call()


# ------------------------------------------------------------ before the first request


@dataclass(eq=False, slots=True)
class PendingConnection:
    """A connection that has not sent the headers of a request.

    Attributes:
        end: when it expires (`time.monotonic`).
        received: bytes of its headers.
        discarded: bytes that came after it was refused; None if it was not.
    """

    sock: socket.socket
    end: float
    received: bytearray = field(default_factory=bytearray)
    discarded: int | None = None

    @property
    def is_health(self) -> bool:
        """Return True if its request goes before all others."""
        return self.received.startswith(HEALTH)

    def has_gone(self) -> bool:
        """Return True if the client has closed the connection."""
        try:
            return not self.sock.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            return True


class Acceptor:
    """Accepts connections and reads the headers of their first requests."""

    def __init__(
        self,
        listener: socket.socket,
        make: Callable[..., asyncio.Protocol],
        header_timeout: float,
        max_pending: int,
    ) -> None:
        """Start to accept.

        Args:
            listener: listening socket.
            make: makes the protocol of a connection; its argument `received` has the bytes that
                were read already.
            header_timeout: seconds that a connection may wait for a request; 0 for no limit.
            max_pending: number of connections that may wait; above it the oldest is closed.
        """
        self.listener = listener
        self.make = make
        self.header_timeout = header_timeout
        self.max_pending = max_pending
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[PendingConnection, None] = {}  # in order of arrival
        self._refused: dict[PendingConnection, None] = {}  # answered; their input is discarded
        self._complete: deque[PendingConnection] = deque()  # with the headers of a request
        self._selector = selectors.DefaultSelector()
        self._readable: deque[PendingConnection] = deque()
        self._timer = Timer()
        self._scheduled = False
        self._tasks: set[asyncio.Task[None]] = set()
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept)
        self._loop.add_reader(self._selector.fileno(), self._read)

    def close(self) -> None:
        """Stop accepting, and close the pending connections."""
        self._timer.stop()
        self._loop.remove_reader(self.listener)
        self._loop.remove_reader(self._selector.fileno())
        for pending in [*self._waiting, *self._refused, *self._complete]:
            pending.sock.close()
        self._selector.close()

    def _accept(self) -> None:
        end = time.perf_counter() + ACCEPT_SECONDS
        while time.perf_counter() < end:
            try:
                sock, _ = self.listener.accept()
                sock.setblocking(False)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                if is_out_of_descriptors(error):
                    self._free_descriptor()
                    break
                continue  # the client has gone
            timeout = self.header_timeout or float("inf")
            pending = PendingConnection(sock, time.monotonic() + timeout)
            self._waiting[pending] = None
            self._selector.register(sock, selectors.EVENT_READ, pending)
            if len(self._waiting) > self.max_pending:
                self._close(next(iter(self._waiting)))
        self._start_timer()

    def _free_descriptor(self) -> None:
        """Close the oldest connection; if there is none, accept again later."""
        log.error(
            "no file descriptor is left for another connection: raise the limit with ulimit -n"
        )
        if self._waiting:
            self._close(next(iter(self._waiting)))
            return
        self._loop.remove_reader(self.listener)
        self._loop.call_later(RETRY_SECONDS, self._accept_again)

    def _accept_again(self) -> None:
        if self.listener.fileno() >= 0:
            self._loop.add_reader(self.listener, self._accept)

    def _read(self) -> None:
        if not self._readable:
            self._readable += (key.data for key, _ in self._selector.select(0))
        end = time.perf_counter() + ACCEPT_SECONDS
        while self._readable and time.perf_counter() < end:
            pending = self._readable.popleft()
            if pending.sock.fileno() < 0:  # closed meanwhile
                continue
            try:
                data = pending.sock.recv(RECEIVE_BYTES)
            except (BlockingIOError, InterruptedError):
                continue
            except OSError:
                data = b""
            if not data:
                self._close(pending)
            elif pending.discarded is not None:
                pending.discarded += len(data)
                if pending.discarded > LINGER_BYTES:
                    self._close(pending)
            else:
                self._receive(pending, data)

    def _receive(self, pending: PendingConnection, data: bytes) -> None:
        searched = len(pending.received)
        pending.received += data
        try:
            complete = headers_length(pending.received, searched) > 0
        except ApiError as error:
            self._refuse(pending, error.status, str(error))
            return
        if not complete:
            return
        if len(self._complete) >= self.max_pending and not pending.is_health:
            self._refuse(pending, 503, FULL)
            return
        del self._waiting[pending]
        self._selector.unregister(pending.sock)
        if pending.is_health:
            self._complete.appendleft(pending)
        else:
            self._complete.append(pending)
        self._schedule()

    def _refuse(self, pending: PendingConnection, status: int, message: str) -> None:
        del self._waiting[pending]
        pending.received.clear()
        pending.discarded = 0
        pending.end = time.monotonic() + LINGER_SECONDS
        self._refused[pending] = None
        if len(self._refused) > self.max_pending:
            self._close(next(iter(self._refused)))
        try:
            pending.sock.send(refusal(status, message))
            pending.sock.shutdown(socket.SHUT_WR)
        except OSError:
            self._close(pending)
        self._start_timer()

    def _close(self, pending: PendingConnection) -> None:
        self._waiting.pop(pending, None)
        self._refused.pop(pending, None)
        self._selector.unregister(pending.sock)
        pending.sock.close()

    def _start_timer(self) -> None:
        """Start the timer for the connection that expires next."""
        ends = [next(iter(group)).end for group in (self._waiting, self._refused) if group]
        if ends:
            seconds = max(min(ends) - time.monotonic(), MIN_TIMER_SECONDS)
            self._timer.start(seconds, self._expire)

    def _expire(self) -> None:
        now = time.monotonic()
        while self._refused and (oldest := next(iter(self._refused))).end <= now:
            self._close(oldest)
        while self._waiting and (oldest := next(iter(self._waiting))).end <= now:
            if oldest.received:
                self._refuse(oldest, 408, LATE.format(self.header_timeout))
            else:
                self._close(oldest)
        self._start_timer()

    def _schedule(self) -> None:
        if self._complete and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._hand_on)

    def _hand_on(self) -> None:
        """Hand one complete request to the server, after requests of /health."""
        self._scheduled = False
        num_started = 0
        end = time.perf_counter() + ACCEPT_SECONDS
        while self._complete and num_started < MAX_STARTS and time.perf_counter() < end:
            pending = self._complete.popleft()
            if pending.has_gone():
                pending.sock.close()
                continue
            num_started += 1
            task = self._loop.create_task(self._connect(pending))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            if not pending.is_health:
                break
        self._schedule()

    async def _connect(self, pending: PendingConnection) -> None:
        def make() -> asyncio.Protocol:
            return self.make(received=bytes(pending.received))

        try:
            await self._loop.connect_accepted_socket(make, pending.sock)
        except OSError:  # the client has gone
            pending.sock.close()


# ------------------------------------------------------------ from the first request on


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
        sizes = {one: one.transport.get_write_buffer_size() for one in self._unread}
        while sum(sizes.values()) > self.settings.max_unread:
            largest = max(sizes, key=lambda one: sizes[one])
            log.warning(
                "clients have not taken %d bytes of their answers: the largest of them ends",
                self.settings.max_unread,
            )
            del sizes[largest]
            self.discard_unread(largest)
            largest.transport.abort()

    def discard_unread(self, connection: Connection) -> None:
        """Stop counting a connection."""
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
            oldest.drop()
        self._start_waiting()
        self.proceed()

    def drop(self) -> None:
        """Close the connection at once to make room for another."""
        self.transport.abort()
        self.pool.waiting.pop(self, None)
        self.connections.discard(self)

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
        """End a request."""
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
