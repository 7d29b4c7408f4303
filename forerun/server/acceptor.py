"""Accepting connections: the headers of the first request are read on a plain socket.

asyncio and uvicorn take 100 microseconds for a connection and several hundred for a request, so
that hundreds at once would delay all clients behind them; a plain socket takes about 20. A
connection that sends nothing, half a request or too many headers never becomes more than that.
"""

from __future__ import annotations

import asyncio
import json
import logging
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from forerun.server import errors
from forerun.server.errors import ApiError, is_out_of_descriptors

log = logging.getLogger("forerun.server")
MAX_HEADER_BYTES = 16 << 10  # of one request, its first line included
MAX_HEADERS = 100  # lines
BLANK_LINES = (b"\n\r\n", b"\n\n")  # ends of headers; the parser refuses the second
HEALTH = b"GET /health "  # served before all other requests
INVALID = "this is no HTTP/1.1 request"
FULL = "this server has as many connections as it takes (--max-connections)"
LATE = "the headers did not come within {:g} s (--header-timeout)"
NO_DESCRIPTOR = "no file descriptor is left for another connection: raise the limit with ulimit -n"
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
        log.error(NO_DESCRIPTOR)
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
