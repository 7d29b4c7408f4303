"""Requests on their way through the service: orders, tickets, and the group that is answered
together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field

from forerun.draft.proposer import Reference
from forerun.engine.request import Request
from forerun.sampling.matcher import Compiled
from forerun.sampling.params import SamplingParams
from forerun.types import Event


@dataclass(frozen=True, slots=True)
class Order:
    """Everything the engine must know of one request."""

    tokens: list[int]
    params: SamplingParams
    draft: str
    depth: int | str
    rule: str | None = None
    references: Sequence[Reference] = ()
    trace: bool = False
    tenant: str = ""
    fills: bool = False  # without a limit of its own: it may be as long as there is room for
    compiled: Compiled | None = None  # its grammar, so that the engine's thread never compiles


def weight(item: Event | BaseException | None) -> int:
    """About how many bytes an event holds."""
    if not isinstance(item, Event):
        return 0
    tops = sum(len(entry.top) for entry in item.logprobs or ())
    nodes = len(item.round.draft) if item.round else 0
    return 500 + 260 * len(item.token_ids) + 80 * tops + 500 * nodes


class Desk:
    """Where it is told what becomes of the requests of a group. It knows none of them, so that what
    has ended, and the index of its documents, is freed at once and not when a cycle is found.

    Attributes:
        room: bytes of events that may lie here before its requests pause; 0 for any number.
        unread: bytes of events that lie here.
        paused: whether its requests wait until some of that is taken.
        pauses: how often they have.
    """

    def __init__(self, room: int = 0, on_room: Callable[[Desk], None] | None = None) -> None:
        """`on_room` is called when its requests have paused and may go on."""
        self.room, self._on_room = room, on_room
        self.unread, self.paused, self.pauses = 0, False, 0
        self.inbox: asyncio.Queue[tuple[Ticket, Event | BaseException | None]] = asyncio.Queue()
        self.context = (
            copy_context()
        )  # of the HTTP request: whoever writes it down is to know which
        self.taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def tell(self, ticket: Ticket, item: Event | BaseException | None) -> None:
        """An event of a ticket, or its end; not to those who have gone."""
        if not ticket.cancelled:
            self.unread += weight(item)
            self.inbox.put_nowait((ticket, item))

    async def take(self) -> tuple[Ticket, Event | BaseException | None]:
        """The next thing that is told. What has paused goes on when half of the room is free
        again."""
        ticket, item = await self.inbox.get()
        self.unread -= weight(item)
        if self.paused and self.unread <= self.room // 2:
            self.paused = False
            if self._on_room is not None:
                self._on_room(self)
        return ticket, item

    @property
    def full(self) -> bool:
        """Whether more lies here than there is room for."""
        return 0 < self.room < self.unread

    def close(self) -> None:
        """Nobody will ask any more."""
        self.unread = 0
        while not self.inbox.empty():
            self.inbox.get_nowait()


@dataclass(eq=False)
class Ticket:
    """One request as the event loop sees it."""

    order: Order
    index: int
    desk: Desk
    arrived: float = field(default_factory=time.perf_counter)
    request: Request | None = None
    cancelled: bool = False
    first: float = 0.0  # when its first event came, and the latest
    last: float = 0.0


class Group:
    """Requests that were submitted together and are answered together."""

    def __init__(
        self, orders: Sequence[Order], timeout: float = 0.0, desk: Desk | None = None
    ) -> None:
        """All of it may take `timeout` seconds from now; 0 for no limit."""
        self.desk = desk or Desk()
        self.end = asyncio.get_running_loop().time() + timeout if timeout else None
        self.tickets = [Ticket(order, i, self.desk) for i, order in enumerate(orders)]

    async def accepted(self) -> None:
        """Wait until the engine has taken every request. Raises what it says against one of them,
        TimeoutError."""
        async with asyncio.timeout_at(self.end):
            await asyncio.shield(self.desk.taken)

    async def events(self) -> AsyncIterator[tuple[Ticket, Event]]:
        """The events of all requests as they come. Raises what ended one of them, if it was not its
        own end, and TimeoutError."""
        left = len(self.tickets)
        while left:
            async with asyncio.timeout_at(
                self.end
            ):  # never around a `yield`: it would end whoever takes the event
                ticket, item = await self.desk.take()
            if (
                self.end is not None and asyncio.get_running_loop().time() > self.end
            ):  # whoever takes them is late
                raise TimeoutError
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield ticket, item
