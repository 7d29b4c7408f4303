"""Accept connections and read the headers of their first requests, on plain sockets.

A connection of asyncio and uvicorn takes 100 microseconds to make, and a request several hundred
more, so that hundreds at once would delay all clients behind them. A plain socket takes about 20. A
connection that sends nothing, half a request or headers that are too long never becomes more than
that."""

from __future__ import annotations

import asyncio
import logging
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from forerun.server.connections import (
    FIRST,
    FULL,
    LINGER_BYTES,
    LINGER_SECONDS,
    Clock,
    headers_length,
    late,
    refusal,
)
from forerun.server.descriptors import is_out_of_descriptors
from forerun.server.errors import ApiError

log = logging.getLogger("forerun.server")
PIECE = 4 << 10  # bytes that are read and checked at once
TURN_SECONDS = 0.004  # for accepting, and again for reading, in one round of the event loop
# requests that are handed on in one round of the event loop; one of them may be other than /health
BEGUN = 8
LEAST_SECONDS = 0.01  # between two checks for connections that have timed out
RETRY_SECONDS = 0.1  # until the next accept when there was no file descriptor left


@dataclass(eq=False, slots=True)
class Arrival:
    """A connection without a request.

    Attributes:
        end: when it times out, in the time of `time.monotonic`.
        received: what has been read of its headers.
        refused: bytes that came after it was refused; None if it was not.
    """

    sock: socket.socket
    end: float
    received: bytearray = field(default_factory=bytearray)
    refused: int | None = None

    @property
    def first(self) -> bool:
        """Whether its request goes before others."""
        return self.received.startswith(FIRST)


class Arrivals:
    """The connections of one listening socket that have not sent a whole request yet."""

    def __init__(
        self,
        listener: socket.socket,
        make: Callable[..., asyncio.Protocol],
        seconds: float,
        most: int,
    ) -> None:
        """Begin to accept.

        `make` makes a connection's protocol; its argument `received` is what was read already. Up
        to `most` connections may wait for a request, each for `seconds` (0: without end); above
        that the oldest one is closed."""
        self.listener, self.make, self.seconds, self.most = listener, make, seconds, most
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[Arrival, None] = {}  # the oldest first
        self._refused: dict[Arrival, None] = {}  # answered; what they still send is discarded
        self._whole: deque[Arrival] = deque()  # whose headers are complete
        self._selector = selectors.DefaultSelector()
        self._readable: deque[Arrival] = deque()
        self._clock, self._begins = Clock(), False
        self._tasks: set[asyncio.Task[None]] = set()
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept)
        self._loop.add_reader(self._selector.fileno(), self._read)

    def close(self) -> None:
        """Stop accepting, and close the connections that have not been handed on."""
        self._clock.stop()
        self._loop.remove_reader(self.listener)
        self._loop.remove_reader(self._selector.fileno())
        for arrival in [*self._waiting, *self._refused, *self._whole]:
            arrival.sock.close()
        self._selector.close()

    # ------------------------------------------------------------ accepting

    def _accept(self) -> None:
        """Accept connections for up to `TURN_SECONDS`."""
        end = time.perf_counter() + TURN_SECONDS
        while time.perf_counter() < end:
            try:
                sock, _ = self.listener.accept()
                sock.setblocking(False)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                if is_out_of_descriptors(error):
                    self._make_room()
                    break
                continue  # the client has gone again
            arrival = Arrival(
                sock, time.monotonic() + self.seconds if self.seconds else float("inf")
            )
            self._waiting[arrival] = None
            self._selector.register(sock, selectors.EVENT_READ, arrival)
            if len(self._waiting) > self.most:
                self._drop(next(iter(self._waiting)))
        self._watch()

    def _make_room(self) -> None:
        """Free a file descriptor by closing the oldest connection; if there is none, accept again
        later."""
        log.error(
            "no file descriptor is left for another connection: raise the limit with ulimit -n"
        )
        if self._waiting:
            self._drop(next(iter(self._waiting)))
            return
        self._loop.remove_reader(self.listener)
        self._loop.call_later(RETRY_SECONDS, self._accept_again)

    def _accept_again(self) -> None:
        if self.listener.fileno() >= 0:
            self._loop.add_reader(self.listener, self._accept)

    # ------------------------------------------------------------ reading

    def _read(self) -> None:
        """Read from readable connections for up to `TURN_SECONDS`."""
        if not self._readable:
            self._readable += (key.data for key, _ in self._selector.select(0))
        end = time.perf_counter() + TURN_SECONDS
        while self._readable and time.perf_counter() < end:
            arrival = self._readable.popleft()
            if arrival.sock.fileno() < 0:  # closed meanwhile
                continue
            try:
                data = arrival.sock.recv(PIECE)
            except (BlockingIOError, InterruptedError):
                continue
            except OSError:
                data = b""
            if not data:
                self._drop(arrival)
            elif arrival.refused is not None:
                arrival.refused += len(data)
                if arrival.refused > LINGER_BYTES:
                    self._drop(arrival)
            else:
                self._take(arrival, data)

    def _take(self, arrival: Arrival, data: bytes) -> None:
        searched = len(arrival.received)
        arrival.received += data
        try:
            whole = headers_length(arrival.received, searched) > 0
        except ApiError as error:
            self._refuse(arrival, error.status, str(error))
            return
        if whole and len(self._whole) >= self.most and not arrival.first:
            self._refuse(arrival, 503, FULL)
        elif whole:
            del self._waiting[arrival]
            self._selector.unregister(arrival.sock)
            (self._whole.appendleft if arrival.first else self._whole.append)(arrival)
            self._go_on()

    def _refuse(self, arrival: Arrival, status: int, message: str) -> None:
        """Send an error and keep the connection for `LINGER_SECONDS`: a reset would lose the
        error."""
        del self._waiting[arrival]
        arrival.received.clear()
        arrival.refused, arrival.end = 0, time.monotonic() + LINGER_SECONDS
        self._refused[arrival] = None
        if len(self._refused) > self.most:
            self._drop(next(iter(self._refused)))
        try:
            arrival.sock.send(refusal(status, message))
            arrival.sock.shutdown(socket.SHUT_WR)
        except OSError:
            self._drop(arrival)
        self._watch()

    def _drop(self, arrival: Arrival) -> None:
        self._waiting.pop(arrival, None)
        self._refused.pop(arrival, None)
        self._selector.unregister(arrival.sock)
        arrival.sock.close()

    # ------------------------------------------------------------ time

    def _watch(self) -> None:
        """Start the clock for the connection that times out next."""
        ends = [next(iter(arrivals)).end for arrivals in (self._waiting, self._refused) if arrivals]
        if ends:
            self._clock.start(max(min(ends) - time.monotonic(), LEAST_SECONDS), self._expire)

    def _expire(self) -> None:
        now = time.monotonic()
        while self._refused and (oldest := next(iter(self._refused))).end <= now:
            self._drop(oldest)
        while self._waiting and (oldest := next(iter(self._waiting))).end <= now:
            if oldest.received:
                self._refuse(oldest, 408, late(self.seconds))
            else:
                self._drop(oldest)
        self._watch()

    # ------------------------------------------------------------ handing on

    def _go_on(self) -> None:
        if self._whole and not self._begins:
            self._begins = True
            self._loop.call_soon(self._begin)

    def _begin(self) -> None:
        """Hand one complete request to the server, and requests of /health before it."""
        self._begins = False
        begun, end = 0, time.perf_counter() + TURN_SECONDS
        while self._whole and begun < BEGUN and time.perf_counter() < end:
            arrival = self._whole.popleft()
            if _has_gone(arrival.sock):
                arrival.sock.close()
                continue
            begun += 1
            task = self._loop.create_task(self._connect(arrival))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            if not arrival.first:
                break
        self._go_on()

    async def _connect(self, arrival: Arrival) -> None:
        try:
            await self._loop.connect_accepted_socket(
                lambda: self.make(received=bytes(arrival.received)), arrival.sock
            )
        except OSError:  # the client has gone
            arrival.sock.close()


def _has_gone(sock: socket.socket) -> bool:
    """Return True if the client has closed the connection."""
    try:
        return not sock.recv(1, socket.MSG_PEEK)
    except (BlockingIOError, InterruptedError):
        return False
    except OSError:
        return True
