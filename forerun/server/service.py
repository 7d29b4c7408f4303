"""One engine on a thread of its own, and asynchronous tickets in front of it.

Only the engine's thread touches the engine. Requests and cancellations reach it through a queue,
events come back to the event loop in one call a step. If a step fails, everybody is told, the
engine starts over empty, and the service
goes on: nobody waits for an answer that cannot come. What fails for one request alone is told to
that one."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from forerun.errors import BusyError, ForerunError, LostError, RequestError
from forerun.hardware import give_back, share_arenas
from forerun.llm import LLM
from forerun.server.tickets import Desk, Group, Order, Ticket
from forerun.types import Event

log = logging.getLogger("forerun.server")
REST = 1.0  # seconds without anything to do, after each of which it is a time to tidy up
# seconds in which requests of one group are taken, before those that run are worked on again
AT_ONCE = 0.01
LEAST_UNREAD = (
    16 << 10
)  # bytes of events that a request may have unread, however many requests share the bound


class UnavailableError(Exception):
    """The server is shutting down, or the engine failed while it worked on this request."""


class Service:
    """Takes orders while it is up; `watchers` are told of every event and end (metrics, logs)."""

    def __init__(
        self, llm: LLM, max_queue: int, max_unread: int = 0, write_timeout: float = 0.0
    ) -> None:
        """Of events that are not read, about `max_unread` bytes are held, divided among all
        requests that there may be; a request whose part is full pauses, and ends after
        `write_timeout` seconds. 0 is no limit of either."""
        self.llm, self.draining = llm, False
        self.write_timeout = write_timeout
        self.watchers: tuple[Watcher, ...] = ()
        self.limit = max_queue + llm.config.max_rows
        self.unread_each = max_unread and max(LEAST_UNREAD, max_unread // self.limit)
        self.tickets: set[Ticket] = set()
        self.reserved = 0  # places of requests that are being prepared
        self.failures = 0
        self.broken = False
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._running: dict[
            int, Ticket
        ] = {}  # the engine's thread alone touches it: whose last event was not posted
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._work, name="forerun-engine", daemon=True)

    def start(self) -> None:
        """Begin to work, for the event loop that calls this. From now on texts are strangers'."""
        self._loop = asyncio.get_running_loop()
        share_arenas()
        with suppress(ImportError):  # what may need a file is loaded before a request wants it
            import llguidance  # noqa: F401
        self.llm.engine.grammars.confine()
        if self.llm.tokenizer is not None:
            self.llm.tokenizer.confine()
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
        return (
            "the engine has failed for good: restart this server"
            if self.broken
            else "the server is shutting down"
        )

    def admit(self, count: int) -> None:
        """Refuse so many requests if there is no place for them now, or never. Raises as `submit`
        does."""
        if not self.alive:
            raise UnavailableError(self.reason)
        if count > self.limit:
            raise RequestError(
                f"this asks for {count} completions at once, this server takes {self.limit}"
            )
        taken = len(self.tickets) + self.reserved
        if taken + count > self.limit:
            raise BusyError(
                f"{taken} requests are running or waiting already: try again in a moment"
            )

    @contextmanager
    def place(self, count: int) -> Iterator[None]:
        """Keep places for requests while they are prepared. Raises as `submit` does."""
        self.admit(count)
        self.reserved += count
        try:
            yield
        finally:
            self.reserved -= count

    def submit(self, orders: Sequence[Order], timeout: float = 0.0) -> Group:
        """Take all of these orders or none; they may take `timeout` seconds, 0 for no limit.

        Raises BusyError, UnavailableError or, for too many, RequestError.
        """
        self.admit(len(orders))
        group = Group(
            orders,
            timeout,
            Desk(len(orders) * self.unread_each, partial(self._pause, paused=False)),
        )
        self.tickets.update(group.tickets)
        self._commands.put(partial(self._add, group))
        return group

    def cancel(self, group: Group) -> None:
        """Nobody waits for these requests any more."""
        for ticket in group.tickets:
            if ticket in self.tickets:
                self._leave(ticket)
        group.desk.close()

    def _leave(self, ticket: Ticket) -> None:
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
        except (
            BaseException
        ) as error:  # a panic of a library, say: nobody would ever be answered again
            log.critical(
                "the engine's thread has ended: this server has to be restarted", exc_info=error
            )
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
        found = [
            (self._running[event.request_id], event)
            for event in events
            if event.request_id in self._running
        ]
        for _, event in found:
            if event.finish_reason is not None:
                del self._running[event.request_id]
            if isinstance(event.error, RequestError):  # what its client asked for, and is told
                log.info("a request ended: %s", event.error)
            elif event.error:
                log.error("a request failed; the others go on", exc_info=event.error)
            if (
                event.round is not None
            ):  # distributions [N, V] of events that nobody has read would take gigabytes
                event.round.draft = replace(event.round.draft, probs=None)
        self._post(partial(self._deliver, found))

    def _obey(self, wait: bool) -> bool:
        """Carry out what has been asked for until now, so that a step comes before what follows
        from it; False to end."""
        for _ in range(self._commands.qsize() or int(wait)):
            command = self._next()
            if command is None:
                return False
            command()
        return True

    def _next(self) -> Callable[[], None] | None:
        """The next thing that is asked for. While there is none, memory of requests that ended goes
        back (those that were refused, too, of which this thread knows nothing)."""
        while True:
            try:
                return self._commands.get(timeout=REST)
            except queue.Empty:
                self._tidy()

    def _tidy(self) -> None:
        """Do what is done while there is nothing else to do. No request ends by its faults."""
        for work in (self.llm.learned.keep, give_back):
            try:
                work()
            except Exception:
                log.exception("what the engine does while it rests failed")

    def _add(self, group: Group, first: int = 0) -> None:
        """Take the requests of a group from the `first` on: some now, and after a step the
        others."""
        end = time.perf_counter() + AT_ONCE
        try:
            for i, ticket in enumerate(group.tickets[first:], start=first):
                if time.perf_counter() > end:
                    self._commands.put(partial(self._add, group, i))
                    return
                if not ticket.cancelled:
                    self._take(ticket)
        except Exception as error:
            if not isinstance(error, ForerunError):
                log.exception("the engine could not take a request")
                error = UnavailableError(
                    f"the engine could not take this request: {type(error).__name__}"
                )
            for ticket in group.tickets:
                self._abort(ticket)
            self._post(partial(self._refuse, group, error))
            return
        self._post(partial(_settle, group.desk.taken, None))

    def _take(self, ticket: Ticket) -> None:
        o = ticket.order
        ticket.request = self.llm.engine.add(
            o.tokens, o.params, draft=o.draft, depth=o.depth, rule=o.rule, references=o.references, trace=o.trace,
            tenant=o.tenant, compiled=o.compiled,
        )  # fmt: skip
        self._running[ticket.request.id] = ticket
        if ticket.desk.paused:
            self.llm.engine.pause(ticket.request)

    def _hold(self, tickets: Sequence[Ticket], paused: bool) -> None:
        engine = self.llm.engine
        for ticket in tickets:
            if (
                ticket.request is not None and ticket.request.id in self._running
            ):  # not lost meanwhile
                (engine.pause if paused else engine.resume)(ticket.request)

    def _abort(self, ticket: Ticket) -> None:
        if ticket.request is not None:
            self.llm.engine.abort(ticket.request)

    def _start_over(self, error: Exception) -> bool:
        self.failures += 1
        lost, self._running = list(self._running.values()), {}
        try:
            if isinstance(error, LostError):
                raise error
            self.llm.engine.reset()
        except Exception:
            log.exception("the engine cannot start over: this server has to be restarted")
            self._give_up(error)
        else:
            self._post(partial(self._end_each, lost, _failure(error)))
        return not self.broken

    def _give_up(self, error: BaseException) -> None:
        """Nothing will be worked on any more: tell everybody who waits when the event loop comes to
        it."""
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
            if event.error:
                self._end(ticket, event.error)
                continue
            for watcher in self.watchers:
                watcher.event(ticket, event, now)
            ticket.first, ticket.last = ticket.first or now, now
            ticket.desk.tell(ticket, event)
            if ticket.desk.full and not ticket.desk.paused:
                self._pause(ticket.desk, paused=True)
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
            _settle(ticket.desk.taken, None)
        ticket.desk.tell(ticket, error)

    def _pause(self, desk: Desk, paused: bool) -> None:
        """Let the requests of a group wait, of which too much lies there that nobody has taken, or
        go on again."""
        desk.paused = paused
        self._commands.put(partial(self._hold, self._of(desk), paused))
        if paused:
            desk.pauses += 1
            if self.write_timeout:
                asyncio.get_running_loop().call_later(
                    self.write_timeout, self._end_unread, desk, desk.pauses
                )

    def _end_unread(self, desk: Desk, pauses: int) -> None:
        """End a group that still waits as it did when it paused for that time."""
        mine = self._of(desk)
        if not desk.paused or desk.pauses != pauses or not mine:
            return
        for ticket in mine:
            self._leave(ticket)
        desk.close()
        late = f"the client has not read its answer for {self.write_timeout:g} s (--write-timeout): it ends here"
        desk.inbox.put_nowait((mine[0], RequestError(late)))
        log.warning(
            "a client did not read its answer for %g s: its request ends", self.write_timeout
        )

    def _of(self, desk: Desk) -> list[Ticket]:
        return [ticket for ticket in self.tickets if ticket.desk is desk]

    def _refuse(self, group: Group, error: Exception) -> None:
        self.tickets.difference_update(group.tickets)
        if not group.desk.taken.done():
            group.desk.taken.set_exception(error)
            group.desk.taken.exception()  # whoever was to ask may have gone


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
