"""Requests on their way through the service: orders, tickets, and the group that is answered together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field

from forerun.draft.base import Reference
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


class Desk:
    """Where it is told what becomes of the requests of a group. It knows none of them, so that what has ended, and the
    index of its documents, is freed at once and not when a cycle is found."""

    def __init__(self) -> None:
        self.inbox: asyncio.Queue[tuple[Ticket, Event | BaseException | None]] = asyncio.Queue()
        self.context = copy_context()  # of the HTTP request: whoever writes it down is to know which
        self.taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def tell(self, ticket: Ticket, item: Event | BaseException | None) -> None:
        """An event of a ticket, or its end; not to those who have gone."""
        if not ticket.cancelled:
            self.inbox.put_nowait((ticket, item))

    def close(self) -> None:
        """Nobody will ask any more."""
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

    def __init__(self, orders: Sequence[Order], timeout: float = 0.0) -> None:
        """All of it may take `timeout` seconds from now; 0 for no limit."""
        self.desk = Desk()
        self.end = asyncio.get_running_loop().time() + timeout if timeout else None
        self.tickets = [Ticket(order, i, self.desk) for i, order in enumerate(orders)]

    async def accepted(self) -> None:
        """Wait until the engine has taken every request. Raises what it says against one of them, TimeoutError."""
        async with asyncio.timeout_at(self.end):
            await asyncio.shield(self.desk.taken)

    async def events(self) -> AsyncIterator[tuple[Ticket, Event]]:
        """The events of all requests as they come. Raises what ended one of them, if it was not its own end, and
        TimeoutError."""
        left = len(self.tickets)
        while left:
            async with asyncio.timeout_at(self.end):  # never around a `yield`: it would end whoever takes the event
                ticket, item = await self.desk.inbox.get()
            if self.end is not None and asyncio.get_running_loop().time() > self.end:  # whoever takes them is late
                raise TimeoutError
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield ticket, item
