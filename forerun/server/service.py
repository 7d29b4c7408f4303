"""One engine on a thread of its own, and asynchronous tickets in front of it.

Only the engine's thread touches the engine. Requests and cancellations reach it through a queue, events come back to
the event loop in one call a step. If a step fails, everybody is told, the engine starts over empty, and the service
goes on: nobody waits for an answer that cannot come.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from forerun.draft.base import Reference
from forerun.engine.request import Request
from forerun.errors import ForerunError, RequestError
from forerun.llm import LLM
from forerun.sampling.params import SamplingParams
from forerun.types import Event

log = logging.getLogger("forerun.server")


class BusyError(Exception):
    """The queue is full: come back later."""


class UnavailableError(Exception):
    """The server is shutting down, or the engine failed while it worked on this request."""


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


@dataclass(eq=False)
class Ticket:
    """One request as the event loop sees it."""

    order: Order
    index: int
    group: Group
    arrived: float = field(default_factory=time.perf_counter)
    request: Request | None = None
    cancelled: bool = False
    first: float = 0.0  # when its first event came, and the latest
    last: float = 0.0


class Group:
    """Requests that were submitted together and are answered together."""

    def __init__(self, orders: Sequence[Order]) -> None:
        self.tickets = [Ticket(order, i, self) for i, order in enumerate(orders)]
        self.inbox: asyncio.Queue[tuple[Ticket, Event | BaseException | None]] = asyncio.Queue()
        self.context = copy_context()  # of the HTTP request: whoever writes it down is to know which
        self.taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def accepted(self) -> None:
        """Wait until the engine has taken every request. Raises what it says against one of them."""
        await asyncio.shield(self.taken)

    async def events(self) -> AsyncIterator[tuple[Ticket, Event]]:
        """The events of all requests as they come. Raises what ended one of them, if it was not its own end."""
        left = len(self.tickets)
        while left:
            ticket, item = await self.inbox.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield ticket, item


class Service:
    """Takes orders while it is up; `watchers` are told of every event and end (metrics, logs)."""

    def __init__(self, llm: LLM, max_queue: int, watchers: Sequence[Watcher] = ()) -> None:
        self.llm, self.watchers, self.draining = llm, watchers, False
        self.limit = max_queue + llm.config.max_rows
        self.tickets: set[Ticket] = set()
        self.failures = 0
        self.broken = False
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._running: dict[int, Ticket] = {}  # the engine's thread alone touches it: whose last event was not posted
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._work, name="forerun-engine", daemon=True)

    def start(self) -> None:
        """Begin to work, for the event loop that calls this."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """End the engine's thread, if it runs; it finishes its step first."""
        if self._thread.is_alive():
            self._commands.put(None)
            self._thread.join(timeout=60)

    @property
    def alive(self) -> bool:
        """Whether orders are taken and worked on."""
        return self._thread.is_alive() and not self.draining and not self.broken

    @property
    def reason(self) -> str:
        """Why it is not alive."""
        return "the engine has failed for good: restart this server" if self.broken else "the server is shutting down"

    def admit(self, count: int) -> None:
        """Refuse so many requests if there is no place for them now, or never. Raises as `submit` does."""
        if not self.alive:
            raise UnavailableError(self.reason)
        if count > self.limit:
            raise RequestError(f"this asks for {count} completions at once, this server takes {self.limit}")
        if len(self.tickets) + count > self.limit:
            raise BusyError(f"{len(self.tickets)} requests are running or waiting already")

    def submit(self, orders: Sequence[Order]) -> Group:
        """Take all of these orders or none. Raises BusyError, UnavailableError or, for too many, RequestError."""
        self.admit(len(orders))
        group = Group(orders)
        self.tickets.update(group.tickets)
        self._commands.put(partial(self._add, group))
        return group

    def cancel(self, group: Group) -> None:
        """Nobody waits for these requests any more."""
        for ticket in group.tickets:
            if ticket in self.tickets:
                self.tickets.discard(ticket)
                ticket.cancelled = True
                self._commands.put(partial(self._abort, ticket))

    def end_all(self) -> None:
        """End every request as it is; those who wait get what there is."""
        for ticket in list(self.tickets):
            self._commands.put(partial(self._abort, ticket))

    async def call(self, work: Callable[[], object]) -> object:
        """The result of `work`, done on the engine's thread between two steps."""
        assert self._loop is not None
        future: asyncio.Future[object] = self._loop.create_future()

        def run() -> None:
            try:
                self._post(partial(_settle, future, work()))
            except Exception as error:
                self._post(partial(_settle, future, error))

        self._commands.put(run)
        return await future

    # ------------------------------------------------------------ on the engine's thread

    def _work(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # a panic of a library, say: nobody would ever be answered again
            log.critical("the engine's thread has ended: this server has to be restarted", exc_info=error)
            self._give_up(error)

    def _serve(self) -> None:
        engine = self.llm.engine
        while True:
            try:
                if not self._obey(wait=not engine.busy):
                    return
                if engine.busy:
                    self._hand_over(engine.step())
            except Exception as error:
                log.exception("the engine failed; it starts over")
                if not self._start_over(error):
                    return

    def _hand_over(self, events: Sequence[Event]) -> None:
        """Post events to those whom they are for."""
        found = [(self._running[event.request_id], event) for event in events if event.request_id in self._running]
        for _, event in found:
            if event.finish_reason is not None:
                del self._running[event.request_id]
        self._post(partial(self._deliver, found))

    def _obey(self, wait: bool) -> bool:
        """Carry out what has been asked for; False to end."""
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            wait = False

    def _add(self, group: Group) -> None:
        try:
            for ticket in group.tickets:
                if not ticket.cancelled:
                    self._take(ticket)
        except Exception as error:
            if not isinstance(error, ForerunError):
                log.exception("the engine could not take a request")
                error = UnavailableError(f"the engine could not take this request: {type(error).__name__}")
            for ticket in group.tickets:
                self._abort(ticket)
            self._post(partial(self._refuse, group, error))
            return
        self._post(partial(_settle, group.taken, None))

    def _take(self, ticket: Ticket) -> None:
        o = ticket.order
        ticket.request = self.llm.engine.add(
            o.tokens, o.params, draft=o.draft, depth=o.depth, rule=o.rule, references=o.references, trace=o.trace
        )
        self._running[ticket.request.id] = ticket

    def _abort(self, ticket: Ticket) -> None:
        if ticket.request is not None:
            self.llm.engine.abort(ticket.request)

    def _start_over(self, error: Exception) -> bool:
        self.failures += 1
        lost, self._running = list(self._running.values()), {}
        try:
            self.llm.engine.reset()
        except Exception:
            log.exception("the engine cannot start over: this server has to be restarted")
            self._give_up(error)
        else:
            self._post(partial(self._end_each, lost, _failure(error)))
        return not self.broken

    def _give_up(self, error: BaseException) -> None:
        """Nothing will be worked on any more: tell everybody who waits when the event loop comes to it."""
        self.broken = True
        self._post(lambda: self._end_each(list(self.tickets), _failure(error)))

    def _post(self, call: Callable[[], object]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:  # the loop is closed: nobody is left to be told
            log.debug("an event came after the end of the event loop")

    # ------------------------------------------------------------ on the event loop

    def _deliver(self, events: Sequence[tuple[Ticket, Event]]) -> None:
        now = time.perf_counter()
        for ticket, event in events:
            for watcher in self.watchers:
                watcher.event(ticket, event, now)
            ticket.first, ticket.last = ticket.first or now, now
            ticket.group.inbox.put_nowait((ticket, event))
            if event.finish_reason is not None:
                self._end(ticket, None)

    def _end_each(self, tickets: Sequence[Ticket], error: BaseException) -> None:
        for ticket in tickets:
            self._end(ticket, error)

    def _end(self, ticket: Ticket, error: BaseException | None) -> None:
        self.tickets.discard(ticket)
        for watcher in self.watchers:
            watcher.end(ticket, error)
        if error:  # whoever still waits to be taken
            _settle(ticket.group.taken, None)
        ticket.group.inbox.put_nowait((ticket, error))

    def _refuse(self, group: Group, error: Exception) -> None:
        self.tickets.difference_update(group.tickets)
        if not group.taken.done():
            group.taken.set_exception(error)
            group.taken.exception()  # whoever was to ask may have gone


def _failure(error: BaseException) -> UnavailableError:
    return UnavailableError(f"the engine failed while it worked on this: {type(error).__name__}")


def _settle(future: asyncio.Future[Any], result: object) -> None:
    if future.done():  # whoever waited may have gone
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)


class Watcher:
    """Is told what happens to tickets, on the event loop. This one does nothing with it."""

    def event(self, ticket: Ticket, event: Event, now: float) -> None:
        """An event is about to be delivered; `ticket.last` is when the one before it was."""

    def end(self, ticket: Ticket, error: BaseException | None) -> None:
        """A ticket has ended, with its last event or with an error."""
