"""HTTP connections with bounded work and memory: limits for headers, framing and unread answers,
deadlines, and a bound on their number.

uvicorn's connection parses whatever a read brings, at once. Here what comes is kept until it is
this connection's turn (`Turns`), and the parser (llhttp, in C) is given at most one request's
headers, or a slice of one body, at a time."""

from __future__ import annotations

import asyncio
import enum
import json
import logging
import re
import time
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import Any, ClassVar

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from forerun.server import errors
from forerun.server.errors import ApiError
from forerun.server.settings import Settings

log = logging.getLogger("forerun.server")
MAX_HEADER_BYTES = 16 << 10  # of one request, its first line included
MAX_HEADERS = 100  # lines
MAX_FRAMING = (
    32 << 10
)  # bytes that say where chunks begin and end, and a sixteenth of what is in the chunks
SLICE = 16 << 10  # bytes of a body that are parsed in one turn
READ_AHEAD = 64 << 10  # bytes that are kept before they are parsed; then reading pauses
TURN_SECONDS = (
    0.002,
    0.001,
)  # for headers and for bodies, of all connections, in one round of the event loop
BLANK_LINES = (b"\n\r\n", b"\n\n")  # the parser refuses the second
FIRST = b"GET /health "  # goes before all other requests
INVALID = "this is no HTTP/1.1 request"
FULL = "this server has as many connections as it takes (--max-connections)"
UPGRADE = re.compile(
    rb"\r\n(upgrade[ \t]*:)", re.IGNORECASE
)  # the parser would leave out the request's body
LINGER_SECONDS, LINGER_BYTES = (
    1.0,
    1 << 20,
)  # in which a client that was refused may read why: a reset would lose it
LARGE_WRITE = 64 << 10  # bytes; what streams write is less, and is not added up


class Phase(enum.Enum):
    """What a connection expects next of its client."""

    HEADERS = enum.auto()
    BODY = enum.auto()
    NOTHING = enum.auto()  # a whole request is there, and not answered yet
    END = enum.auto()  # it was refused, and what it still sends is thrown away


def headers_length(received: bytearray, searched: int = 0) -> int:
    """Return the number of bytes of a request's headers, their blank line included; 0 if they are
    not complete.

    The end is not in the first `searched` bytes. Empty lines before the request are removed from
    `received`, since some clients end a body with one. Raises ApiError for headers that are too
    long, too many or no HTTP."""
    if received.startswith((b"\r", b"\n")):
        received[:] = received.lstrip(b"\r\n")
    ends = [
        (received.find(blank, max(0, searched - 3), MAX_HEADER_BYTES), len(blank))
        for blank in BLANK_LINES
    ]
    found = min((at + size for at, size in ends if at >= 0), default=0)
    length = found or len(received)
    if length > MAX_HEADER_BYTES or received.count(b"\n", 0, length) > MAX_HEADERS + 2:
        most = f"{MAX_HEADERS} headers of {MAX_HEADER_BYTES} bytes together"
        raise ApiError(431, f"a request has at most {most}: send fewer or shorter ones")
    if not found and received and received[0] < ord("A"):
        raise ApiError(400, INVALID)
    return found


@lru_cache(64)
def refusal(status: int, message: str) -> bytes:
    """Build the whole response to a request that does not reach the application; the connection
    ends after it."""
    body = json.dumps(errors.body(ApiError(status, message))[1]).encode()
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
    }
    headers |= {"retry-after": "1"} if status == 503 else {}
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return STATUS_LINE[status] + lines.encode() + b"\r\n" + body


def late(seconds: float) -> str:
    """Return the message for a client whose headers did not arrive in time."""
    return f"the headers did not come within {seconds:g} s (--header-timeout)"


class Clock:
    """Calls back after some seconds, unless it is stopped before; after 0 seconds never."""

    def __init__(self) -> None:
        self.handle: asyncio.TimerHandle | None = None  # while it will call back

    def start(self, seconds: float, call: Callable[[], None]) -> None:
        """Call back after so many seconds from now, and not when it was to before."""
        self.stop()
        if seconds:
            self.handle = asyncio.get_running_loop().call_later(seconds, self._ring, call)

    def stop(self) -> None:
        """Do not call back."""
        if self.handle is not None:
            self.handle.cancel()
            self.handle = None

    def _ring(self, call: Callable[[], None]) -> None:
        self.handle = None
        call()


class Turns:
    """Lets connections parse what has come, one piece each in turn, for a bounded time in each
    round of the event loop.

    Headers come before bodies, and one request begins in each round, so that /health and running
    streams do not wait for all the requests of a burst.
    """

    def __init__(self) -> None:
        self._queues: tuple[deque[Connection], deque[Connection]] = (deque(), deque())
        self._scheduled = False

    def add(self, connection: Connection) -> None:
        """Let a connection parse when it is its turn."""
        if connection.queued:
            return
        connection.queued = True
        queue = self._queues[connection.phase is not Phase.HEADERS]
        (queue.appendleft if connection.first else queue.append)(connection)
        if not self._scheduled:
            self._scheduled = True
            connection.loop.call_soon(self._round)

    def _round(self) -> None:
        self._scheduled = False
        for queue, seconds in zip(self._queues, TURN_SECONDS, strict=True):
            end, begun = time.perf_counter() + seconds, False
            while queue and time.perf_counter() < end and (queue[0].first or not begun):
                connection = queue.popleft()
                connection.queued = False
                counts = connection.phase is Phase.HEADERS and not connection.first
                try:
                    connection.parse()
                except OSError:  # the client has gone
                    connection.transport.abort()
                except (
                    Exception
                ):  # one connection's fault must not keep the others from their turns
                    log.exception("a connection failed")
                    connection.transport.abort()
                begun = begun or (counts and connection.phase is not Phase.HEADERS)
        for queue in self._queues:
            if queue and not self._scheduled:
                self._scheduled = True
                queue[0].loop.call_soon(self._round)


class Unread:
    """Bytes of answers that are written and not taken by their clients, of all connections; over
    the bound, the connection with the most of them ends."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._connections: set[Connection] = set()

    def add(self, connection: Connection) -> None:
        """Count a connection that has more to send than its client takes now."""
        self._connections.add(connection)
        sizes = {one: one.transport.get_write_buffer_size() for one in self._connections}
        while sum(sizes.values()) > self.most:
            largest = max(sizes, key=lambda one: sizes[one])
            log.warning(
                "clients have not taken %d bytes of their answers: the largest of them ends",
                self.most,
            )
            del sizes[largest]
            self.discard(largest)
            largest.transport.abort()

    def discard(self, connection: Connection) -> None:
        """A connection has nothing more to send."""
        self._connections.discard(connection)


class ReadControl(FlowControl):
    """uvicorn's flow control, which leaves it to the connection when to read."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection.transport)
        self._connection = connection

    def pause_reading(self) -> None:
        """The request holds as much of its body as it may before it asks for it."""
        self.read_paused = True

    def resume_reading(self) -> None:
        """The request asks for more of its body."""
        if self.read_paused:
            self.read_paused = False
            self._connection.go_on()


class Connection(HttpToolsProtocol):
    """uvicorn's connection, which by itself waits without end for a request's headers and for a
    client to read, and parses without end what comes."""

    settings: ClassVar[Settings]
    waiting: ClassVar[
        dict[Connection, None]
    ]  # for their clients: for a request or the rest of one, the longest first
    turns: ClassVar[Turns]
    unread: ClassVar[Unread]

    def __init__(self, *args: Any, received: bytes = b"", **options: Any) -> None:
        """`received` is what the client has sent already."""
        super().__init__(*args, **options)
        self.request_clock, self.reader_clock = Clock(), Clock()
        self.phase = Phase.HEADERS
        self.queued = False  # for its turn to parse
        self._received = bytearray(received)  # and not parsed yet
        self._searched = 0  # bytes of it that do not hold the end of the headers
        self._stopped = False  # reading
        self._left: int | None = (
            None  # bytes of the body that are to come; None where chunks say so
        )
        self._wire, self._content = (
            0,
            0,
        )  # bytes of the body as it was sent, and without its framing

    @property
    def answering(self) -> bool:
        """Whether a request is being worked on."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def first(self) -> bool:
        """Whether the next request goes before all others."""
        return self.phase is Phase.HEADERS and self._received.startswith(FIRST)

    @property
    def incomplete(self) -> bool:
        """Whether it waits for the client: for a request, or the rest of one."""
        return self.phase is not Phase.NOTHING and not self.transport.is_closing()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection if there is room. Where all are used, the one that waits longest for
        its client ends."""
        super().connection_made(transport)
        self.flow = ReadControl(self)
        transport.set_write_buffer_limits(
            0
        )  # writing pauses as soon as the client does not keep up
        if len(self.connections) > self.settings.max_connections and not self.first:
            oldest = next(iter(self.waiting), None)
            if oldest is None:
                self._refuse(503, FULL)
                return
            oldest.drop()
        self._wait()
        self.go_on()

    def drop(self) -> None:
        """Make room for another one."""
        self.transport.abort()
        self.waiting.pop(self, None)
        self.connections.discard(self)

    def _wait(self) -> None:
        """From now on it waits for its client, unless a whole request has come already."""
        self.waiting.pop(self, None)
        if self.incomplete:
            self.waiting[self] = None
        self._watch_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """The end."""
        super().connection_lost(exc)
        self._received.clear()
        self.waiting.pop(self, None)
        self.unread.discard(self)
        self.request_clock.stop()
        self.reader_clock.stop()

    # ------------------------------------------------------------ requests

    def data_received(self, data: bytes) -> None:
        """Keep something of a request until it is parsed."""
        self._unset_keepalive_if_required()
        if self.phase is Phase.END:
            self._wire += len(data)
            if self._wire > LINGER_BYTES:
                self.transport.abort()
        elif not self.transport.is_closing():
            self._received += data
            self.go_on()

    def go_on(self) -> None:
        """Parse what is there when it is this connection's turn, and read no more than is
        parsed."""
        ready = self.phase in (Phase.HEADERS, Phase.BODY) and not self.flow.read_paused
        if ready and len(self._received) > self._searched:
            self.turns.add(self)
        stop = len(self._received) > READ_AHEAD or (
            not ready and bool(self._received or self.flow.read_paused)
        )
        if stop != self._stopped and not self.transport.is_closing():
            self._stopped = stop
            (self.transport.pause_reading if stop else self.transport.resume_reading)()

    def parse(self) -> None:
        """Parse the headers of one request, or a slice of its body."""
        if self.transport.is_closing() or self.flow.read_paused:
            return
        if self.phase is Phase.HEADERS:
            self._parse_headers()
        elif self.phase is Phase.BODY:
            self._parse_body()
        if self.transport.is_closing() or self.phase is Phase.END:
            return
        if not self.incomplete:
            self.waiting.pop(self, None)
        self._watch_request()
        self.go_on()

    def _parse_headers(self) -> None:
        """Give the parser the headers of one request, if they are whole and within the limits."""
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
        piece = self._take(SLICE if self._left is None else min(self._left, HIGH_WATER_LIMIT))
        self._wire += len(piece)
        self._feed(piece)
        if self._left is None and self._wire - self._content > MAX_FRAMING + self._content // 16:
            most = f"{MAX_FRAMING} bytes and a sixteenth of the body"
            self._refuse(
                400,
                f"the body comes in too many small chunks, whose framing is over {most}: send larger ones",
            )

    def _take(self, size: int) -> bytes:
        """The first bytes of what has come."""
        piece = bytes(self._received[:size])
        del self._received[:size]
        self._searched = 0
        return piece

    def _feed(self, piece: bytes) -> None:
        """Let the parser have something, which calls the `on_` methods."""
        try:
            self.parser.feed_data(piece)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            if (
                self.phase is Phase.NOTHING and self.answering
            ):  # a request behind one whose end only its chunks told
                self.cycle.keep_alive = False  # its client sends it again, on another connection
                self._received.clear()
            else:
                self._refuse(400, INVALID)

    def on_message_begin(self) -> None:
        """A request begins. Raises ValueError where the one before it is not answered yet."""
        if self.phase is Phase.NOTHING:
            raise ValueError("the request before is not answered yet")
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; what comes behind a body (trailers) is none."""
        if self.phase is Phase.HEADERS:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin to work on a request."""
        super().on_headers_complete()
        self.phase, self._wire, self._content = Phase.BODY, 0, 0
        lengths = [int(value) for name, value in self.headers if name == b"content-length"]
        chunked = any(name == b"transfer-encoding" for name, _ in self.headers)
        self._left = None if chunked else lengths[0] if lengths else 0

    def on_body(self, body: bytes) -> None:
        """Keep a part of a body. The request is woken when the body is whole, or when there is much
        of it."""
        self._content += len(body)
        if self._left is not None:
            self._left -= len(body)
        if self.cycle.response_complete:
            return
        self.cycle.body += body
        if len(self.cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
            self.cycle.message_event.set()

    def on_message_complete(self) -> None:
        """A whole request is there."""
        super().on_message_complete()
        self.phase = Phase.NOTHING if self.answering else Phase.HEADERS

    def on_response_complete(self) -> None:
        """An answer is written. What is left of its request, and the next one, may take as long as
        the first."""
        super().on_response_complete()
        if self.phase is Phase.NOTHING:
            self.phase = Phase.HEADERS
        if self._received:
            self._unset_keepalive_if_required()
        self._wait()
        self.go_on()

    def _watch_request(self) -> None:
        """The clock runs from the start and from the end of each answer until the next request has
        its headers."""
        if self.answering or self.transport.is_closing():
            self.request_clock.stop()
        elif self.request_clock.handle is None:
            self.request_clock.start(self.settings.header_timeout, self._no_request)

    def _no_request(self) -> None:
        if self.phase is Phase.HEADERS and self._received:
            self._refuse(408, late(self.settings.header_timeout))
        else:
            self.transport.close()

    # ------------------------------------------------------------ answers

    def pause_writing(self) -> None:
        """The client does not keep up: the clock runs until all that was written is on its way."""
        super().pause_writing()
        left = self.transport.get_write_buffer_size()
        self._watch_reader(left)
        if left > LARGE_WRITE:
            self.unread.add(self)

    def resume_writing(self) -> None:
        """The client has caught up."""
        super().resume_writing()
        self.reader_clock.stop()
        self.unread.discard(self)

    def _watch_reader(self, left: int) -> None:
        self.reader_clock.start(self.settings.write_timeout, lambda: self._still_reading(left))

    def _still_reading(self, before: int) -> None:
        left = self.transport.get_write_buffer_size()
        if left < before:
            self._watch_reader(left)
            return
        log.info(
            "a client took nothing of its answer for %g s: its connection ends",
            self.settings.write_timeout,
        )
        self.transport.abort()

    def _refuse(self, status: int, message: str) -> None:
        """Answer in place of the application, and end the connection."""
        if self.answering:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self.transport.abort()
                return
        self.transport.write(refusal(status, message))
        if (
            self.phase is Phase.HEADERS and not self._received
        ):  # nothing was sent that a reset could be the answer to
            self.transport.close()
            return
        try:
            self.transport.write_eof()
        except OSError:  # the client has gone
            self.transport.abort()
            return
        self._received.clear()
        self.phase, self._wire = Phase.END, 0
        if self._stopped:
            self._stopped = False
            self.transport.resume_reading()
        self.request_clock.start(LINGER_SECONDS, self.transport.abort)


def connections(limits: Settings) -> type[Connection]:
    """The connections of a server with these settings, for uvicorn to make."""

    class Limited(Connection):
        settings = limits
        waiting: ClassVar[dict[Connection, None]] = {}
        turns = Turns()
        unread = Unread(limits.max_unread)

    return Limited
