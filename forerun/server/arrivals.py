"""New connections, until the headers of their first request are there.

A connection of asyncio and uvicorn takes 100 microseconds to make, and a request some hundred more: hundreds that come
at once would hold up whoever comes behind them. Here a connection takes a few, and one that says nothing, half a
request or one that is too long never gets any further.
"""

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
PIECE = 4 << 10  # bytes that are read at once: of what is refused, no more is looked at
TURN_SECONDS = 0.004  # for accepting and for reading each, in one round of the event loop
BEGUN = 8  # requests that are handed on in one round, of which all but the last go before others
LEAST_SECONDS = 0.01  # between two looks at whose time is over
RETRY_SECONDS = 0.1  # after which accepting is tried again where no descriptor was left


@dataclass(eq=False, slots=True)
class Arrival:
    """A connection without a request. `end` is when its time is over, and `refused` how many bytes came behind the
    answer that it has got already, if it has."""

    sock: socket.socket
    end: float
    received: bytearray = field(default_factory=bytearray)
    refused: int | None = None


class Arrivals:
    """Accepts connections and reads the headers of their first requests."""

    def __init__(
        self, listener: socket.socket, make: Callable[..., asyncio.Protocol], seconds: float, most: int
    ) -> None:
        """`make` makes the protocol of a connection that has sent its argument `received`. At most `most` may have sent
        no request yet, for so many `seconds` (0: any time); the one that has waited longest makes room."""
        self.listener, self.make, self.seconds, self.most = listener, make, seconds, most
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[Arrival, None] = {}  # the longest first
        self._refused: dict[Arrival, None] = {}  # answered, and what they still send is thrown away
        self._whole: deque[Arrival] = deque()  # with headers to the end
        self._selector = selectors.DefaultSelector()
        self._readable: deque[Arrival] = deque()
        self._clock, self._begins = Clock(), False
        self._tasks: set[asyncio.Task[None]] = set()
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept)
        self._loop.add_reader(self._selector.fileno(), self._read)

    def close(self) -> None:
        """Accept nothing more; who has sent no request yet is closed."""
        self._clock.stop()
        self._loop.remove_reader(self.listener)
        self._loop.remove_reader(self._selector.fileno())
        for arrival in [*self._waiting, *self._refused, *self._whole]:
            arrival.sock.close()
        self._selector.close()

    # ------------------------------------------------------------ accepting

    def _accept(self) -> None:
        """Take connections for a moment."""
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
            arrival = Arrival(sock, time.monotonic() + self.seconds if self.seconds else float("inf"))
            self._waiting[arrival] = None
            self._selector.register(sock, selectors.EVENT_READ, arrival)
            if len(self._waiting) > self.most:
                self._drop(next(iter(self._waiting)))
        self._watch()

    def _make_room(self) -> None:
        """Where no descriptor is left, close who has waited longest; where nobody waits, try again later."""
        log.error("no file descriptor is left for another connection: raise the limit with ulimit -n")
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
        """Read what has come, for a moment."""
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
        first = arrival.received.startswith(FIRST)
        if whole and len(self._whole) >= self.most and not first:
            self._refuse(arrival, 503, FULL)
        elif whole:
            del self._waiting[arrival]
            self._selector.unregister(arrival.sock)
            (self._whole.appendleft if first else self._whole.append)(arrival)
            self._go_on()

    def _refuse(self, arrival: Arrival, status: int, message: str) -> None:
        """Answer, and let the client read that before the connection ends."""
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
        """Be called when the time of the first is over."""
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
        """Make a connection of one that has a request, in each round of the event loop."""
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
            if not arrival.received.startswith(FIRST):
                break
        self._go_on()

    async def _connect(self, arrival: Arrival) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: self.make(received=bytes(arrival.received)), arrival.sock)
        except OSError:  # the client has gone
            arrival.sock.close()


def _has_gone(sock: socket.socket) -> bool:
    """Whether the client has closed a connection."""
    try:
        return not sock.recv(1, socket.MSG_PEEK)
    except (BlockingIOError, InterruptedError):
        return False
    except OSError:
        return True
