"""Connections that cannot be held for nothing: deadlines for requests and for readers, and a bound on their number."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from forerun.server import errors
from forerun.server.errors import ApiError
from forerun.server.settings import Settings

log = logging.getLogger("forerun.server")


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


class Connection(H11Protocol):
    """uvicorn's connection, which by itself waits without end for a request's headers and for a client to read."""

    settings: ClassVar[Settings]
    waiting: ClassVar[dict[Connection, None]]  # for their clients: for a request or the rest of one, the longest first

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.request_clock, self.reader_clock = Clock(), Clock()

    @property
    def answering(self) -> bool:
        """Whether a request is being worked on."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def incomplete(self) -> bool:
        """Whether it waits for the client: for a request, or the rest of one."""
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY) and not self.transport.is_closing()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection if there is room. Where all are used, the one that waits longest for its client ends."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # writing pauses as soon as the client does not keep up
        if len(self.connections) > self.settings.max_connections:
            oldest = next(iter(self.waiting), None)
            if oldest is None:
                self._refuse(503, "this server has as many connections as it takes (--max-connections)")
                return
            oldest.drop()
        self._wait()

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
        self.waiting.pop(self, None)
        self.request_clock.stop()
        self.reader_clock.stop()

    def data_received(self, data: bytes) -> None:
        """Something of a request."""
        super().data_received(data)
        if not self.incomplete:
            self.waiting.pop(self, None)
        self._watch_request()

    def on_response_complete(self) -> None:
        """An answer is written. What is left of its request, and the next one, may take as long as the first."""
        super().on_response_complete()
        self._wait()

    def _watch_request(self) -> None:
        """The clock runs from the start and from the end of each answer until the next request has its headers."""
        if self.answering or self.transport.is_closing():
            self.request_clock.stop()
        elif self.request_clock.handle is None:
            self.request_clock.start(self.settings.header_timeout, self._no_request)

    def _no_request(self) -> None:
        if self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]:
            self._refuse(408, f"the headers did not come within {self.settings.header_timeout:g} s (--header-timeout)")
        else:
            self.transport.close()

    def pause_writing(self) -> None:
        """The client does not keep up: the clock runs until all that was written is on its way."""
        super().pause_writing()
        self._watch_reader(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """The client has caught up."""
        super().resume_writing()
        self.reader_clock.stop()

    def _watch_reader(self, left: int) -> None:
        self.reader_clock.start(self.settings.write_timeout, lambda: self._still_reading(left))

    def _still_reading(self, before: int) -> None:
        left = self.transport.get_write_buffer_size()
        if left < before:
            self._watch_reader(left)
            return
        log.info("a client took nothing of its answer for %g s: its connection ends", self.settings.write_timeout)
        self.transport.abort()

    def _refuse(self, status: int, message: str) -> None:
        """An answer before there is a request, and the end of the connection."""
        body = json.dumps(errors.body(ApiError(status, message))[1]).encode()
        headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
        headers |= {"retry-after": "1"} if status == 503 else {}
        answer = (h11.Response(status_code=status, headers=list(headers.items())), h11.Data(data=body))
        self.transport.write(b"".join(self.conn.send(event) or b"" for event in (*answer, h11.EndOfMessage())))
        self.transport.close()


def connections(limits: Settings) -> type[Connection]:
    """The connections of a server with these settings, for uvicorn to make."""

    class Limited(Connection):
        settings = limits
        waiting: ClassVar[dict[Connection, None]] = {}

    return Limited
