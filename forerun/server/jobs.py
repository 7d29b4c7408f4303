"""Run generation jobs of the event loop on the engine's thread.

Only the engine's thread touches the engine. Jobs and cancellations reach it through a queue, and
the events of each step return to the event loop in one call. If a step fails, the affected jobs
get an error and the engine restarts empty; an error of one request alone ends only that request.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import Context, copy_context
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from forerun.draft.proposer import Reference
from forerun.engine.request import Request
from forerun.errors import BusyError, ForerunError, LostError, RequestError
from forerun.hardware import share_arenas, trim_heap
from forerun.llm import LLM
from forerun.runtime.program import release_buffers
from forerun.sampling.matcher import Compiled
from forerun.sampling.params import SamplingParams
from forerun.server.errors import UnavailableError
from forerun.types import Event

log = logging.getLogger("forerun.server")
IDLE_SECONDS = 1.0  # idle time after which the engine's thread does its housekeeping, repeatedly
RELEASE_AFTER = 10  # such times until it gives up what the next requests would make anew
ADMISSION_SECONDS = 0.01  # time for admitting jobs between two steps
MIN_UNREAD = 16 << 10  # bytes of unread events that every job may have


@dataclass(eq=False)
class Job:
    """One generation request to the engine, and its progress.

    Attributes:
        tokens: token ids of the prompt.
        fills: the request names no `max_tokens`: it may use all the room that there is.
        compiled: the compiled grammar of `params`, since the engine's thread never compiles.
        index: position among the jobs that were submitted together.
        arrived: time of submission (`time.perf_counter`); `first` and `last` are the times of the
            first and the latest event, 0 before them.
        request: the engine's request once it is admitted.
        cancelled: nothing reads its events any more.
        context: context variables of the HTTP request, for log lines and spans.
    """

    tokens: list[int]
    params: SamplingParams
    draft: str
    depth: int | str
    rule: str | None = None
    references: Sequence[Reference] = ()
    trace: bool = False
    tenant: str = ""
    fills: bool = False
    compiled: Compiled | None = None
    client: str = ""
    index: int = field(default=0, init=False)
    arrived: float = field(default=0.0, init=False)
    first: float = field(default=0.0, init=False)
    last: float = field(default=0.0, init=False)
    request: Request | None = field(default=None, init=False)
    cancelled: bool = field(default=False, init=False)
    context: Context = field(default_factory=copy_context, init=False, repr=False)


def event_bytes(item: Event | BaseException | None) -> int:
    """Estimate the memory of an event."""
    if not isinstance(item, Event):
        return 0
    alternatives = sum(len(entry.top) for entry in item.logprobs or ())
    nodes = len(item.round.draft) if item.round else 0
    return 500 + 260 * len(item.token_ids) + 80 * alternatives + 500 * nodes


class RequestHandle:
    """The event stream of the jobs that one HTTP request submits together.

    Jobs do not refer to their handle. Without that cycle, memory is freed as soon as the HTTP
    request drops the handle.

    Attributes:
        capacity: bytes of unread events above which the jobs pause; 0 for no limit.
        unread: bytes of unread events.
        paused: the jobs wait until the client has read half of `capacity`.
        admitted: result of the admission by the engine.
        timer: ends the jobs if they stay paused for too long.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        timeout: float = 0.0,
        capacity: int = 0,
        on_resume: Callable[[RequestHandle], None] | None = None,
    ) -> None:
        """Number the jobs; all of them must end within `timeout` seconds (0 for no limit)."""
        loop = asyncio.get_running_loop()
        self.jobs = list(jobs)
        self.deadline = loop.time() + timeout if timeout else None
        self.capacity = capacity
        self.unread = 0
        self.paused = False
        self.admitted: asyncio.Future[None] = loop.create_future()
        self.timer: asyncio.TimerHandle | None = None
        self._on_resume = on_resume
        self._queue: asyncio.Queue[tuple[Job, Event | BaseException | None]] = asyncio.Queue()
        context = copy_context()
        for index, job in enumerate(self.jobs):
            job.index = index
            job.arrived = time.perf_counter()
            job.context = context

    def put(self, job: Job, item: Event | BaseException | None) -> None:
        """Add an event of a job, the error that ended it, or None at its end."""
        self.unread += event_bytes(item)
        self._queue.put_nowait((job, item))

    def close(self) -> None:
        """Discard unread events."""
        self.stop_timer()
        self.unread = 0
        while not self._queue.empty():
            self._queue.get_nowait()

    def stop_timer(self) -> None:
        """Keep the jobs however long they stay paused."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    async def accepted(self) -> None:
        """Wait until the engine has admitted every job. Raises its refusal or TimeoutError."""
        async with asyncio.timeout_at(self.deadline):
            await asyncio.shield(self.admitted)

    async def events(self) -> AsyncIterator[tuple[Job, Event]]:
        """Yield (job, event) of all jobs as they arrive.

        Raises the error that ended a job, or TimeoutError after the deadline.
        """
        remaining = len(self.jobs)
        while remaining:
            # The timeout must not enclose `yield`, where it would cancel the consumer's code.
            async with asyncio.timeout_at(self.deadline):
                job, item = await self._queue.get()
                self.unread -= event_bytes(item)
                if self.paused and self.unread <= self.capacity // 2 and self._on_resume:
                    self._on_resume(self)
            if self.deadline is not None and asyncio.get_running_loop().time() > self.deadline:
                raise TimeoutError
            if isinstance(item, BaseException):
                raise item
            if item is None:
                remaining -= 1
            else:
                yield job, item


class JobObserver:
    """Interface for metrics and logs: it is called on the event loop. This one does nothing."""

    def on_event(self, job: Job, event: Event, now: float) -> None:
        """Observe an event before its delivery; `job.last` is the time of the previous one."""

    def on_end(self, job: Job, error: BaseException | None) -> None:
        """Observe the end of a job, after its last event or by an error."""


class EngineService:
    """Asynchronous front of one engine, which runs on a thread of its own.

    Attributes:
        limit: number of jobs that may run and wait together.
        unread_each: bytes of unread events a job may have; 0 for no limit.
        jobs: jobs that have not ended, with the handle that receives their events.
        reserved: places of jobs that are being prepared.
        draining: new jobs are refused since the server shuts down.
        broken: the engine cannot work any more.
        failures: number of times the engine has restarted.
    """

    def __init__(
        self, llm: LLM, max_queue: int, max_unread: int = 0, write_timeout: float = 0.0
    ) -> None:
        """Prepare a service that `start` begins.

        About `max_unread` bytes of unread events are held, divided among all possible jobs. The
        jobs of a handle over its share pause, and end after `write_timeout` seconds. 0 means no
        limit.
        """
        self.llm = llm
        self.draining = False
        self.broken = False
        self.write_timeout = write_timeout
        self.observers: tuple[JobObserver, ...] = ()
        self.limit = max_queue + llm.config.max_rows
        self.unread_each = max_unread and max(MIN_UNREAD, max_unread // self.limit)
        self.jobs: dict[Job, RequestHandle] = {}
        self.reserved = 0
        self.failures = 0
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # Jobs whose last event was not posted yet, by request id; only the engine's thread uses it.
        self._running: dict[int, Job] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._work, name="forerun-engine", daemon=True)

    def start(self) -> None:
        """Start the engine's thread for the running event loop.

        From now on input is untrusted: grammars and chat templates run in worker processes.
        """
        self._loop = asyncio.get_running_loop()
        share_arenas()
        with suppress(ImportError):  # imported now, while file descriptors are certainly left
            import llguidance  # noqa: F401
        self.llm.engine.grammars.confine()
        if self.llm.tokenizer is not None:
            self.llm.tokenizer.confine()
        self._thread.start()

    def stop(self) -> None:
        """End the engine's thread after its current step."""
        if self._thread.is_alive():
            self._commands.put(None)
            self._thread.join(timeout=60)

    @property
    def alive(self) -> bool:
        """Return True while jobs are accepted and run."""
        return self._thread.is_alive() and not self.draining and not self.broken

    @property
    def reason(self) -> str:
        """The reason why `alive` is False."""
        if self.broken:
            return "the engine has failed for good: restart this server"
        return "the server is shutting down"

    def admit(self, count: int) -> None:
        """Check that `count` more jobs would be accepted now. Raises as `submit` does."""
        if not self.alive:
            raise UnavailableError(self.reason)
        if count > self.limit:
            raise RequestError(
                f"this asks for {count} completions at once, this server takes {self.limit}"
            )
        taken = len(self.jobs) + self.reserved
        if taken + count > self.limit:
            raise BusyError(
                f"{taken} requests are running or waiting already: try again in a moment"
            )

    @contextmanager
    def reserve(self, count: int) -> Iterator[None]:
        """Reserve places for jobs while they are prepared. Raises as `submit` does."""
        self.admit(count)
        self.reserved += count
        try:
            yield
        finally:
            self.reserved -= count

    def submit(self, jobs: Sequence[Job], timeout: float = 0.0) -> RequestHandle:
        """Queue all of these jobs or none; they may take `timeout` seconds (0 for no limit).

        Raises BusyError, UnavailableError, or RequestError for more jobs than can ever run.
        """
        self.admit(len(jobs))
        resume = partial(self._set_paused, paused=False)
        handle = RequestHandle(jobs, timeout, len(jobs) * self.unread_each, resume)
        self.jobs.update(dict.fromkeys(handle.jobs, handle))
        self._commands.put(partial(self._add, handle))
        return handle

    def cancel(self, handle: RequestHandle) -> None:
        """Abort the jobs of a handle that have not ended, and discard their events."""
        for job in self._active(handle):
            del self.jobs[job]
            job.cancelled = True
            self._commands.put(partial(self._abort, job))
        handle.close()

    def end_all(self) -> None:
        """Abort every job; clients get the text so far."""
        for job in list(self.jobs):
            self._commands.put(partial(self._abort, job))

    async def call(self, work: Callable[[], object]) -> object:
        """Run `work` on the engine's thread between two steps and return its result."""
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
            self._run()
        except BaseException as error:  # such as a panic in a library
            log.critical(
                "the engine's thread has ended: this server has to be restarted", exc_info=error
            )
            self._give_up(error)

    def _run(self) -> None:
        engine = self.llm.engine
        while True:
            try:
                if not self._run_commands(wait=not engine.busy):
                    return
                if engine.busy:
                    self._post_events(engine.step())
            except Exception as error:
                log.exception("the engine failed; it starts over")
                if not self._restart(error):
                    return

    def _post_events(self, events: Sequence[Event]) -> None:
        """Send the events of a step to the event loop."""
        deliveries = [
            (self._running[event.request_id], event)
            for event in events
            if event.request_id in self._running
        ]
        for _, event in deliveries:
            if event.finish_reason is not None:
                del self._running[event.request_id]
            if isinstance(event.error, RequestError):
                log.info("a request ended: %s", event.error)
            elif event.error:
                log.error("a request failed; the others go on", exc_info=event.error)
            if event.round is not None:
                # The distributions [N, V] of unread events would take gigabytes.
                event.round.draft = replace(event.round.draft, probs=None)
        self._post(partial(self._deliver, deliveries))

    def _run_commands(self, wait: bool) -> bool:
        """Run the commands that are queued now; return False if one of them asks to end.

        Commands that are queued meanwhile wait, so that they cannot keep the engine from its step.
        """
        for _ in range(self._commands.qsize() or int(wait)):
            command = self._next_command()
            if command is None:
                return False
            command()
        return True

    def _next_command(self) -> Callable[[], None] | None:
        idle = 0
        while True:
            try:
                return self._commands.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                idle += 1
                self._do_housekeeping(release=idle == RELEASE_AFTER)

    def _do_housekeeping(self, release: bool) -> None:
        """Save learned costs and return free memory to the system; failures are only logged.

        With `release` also what an idle engine need not hold: cycles of objects, such as errors
        with the bodies of their requests, and buffers that grew to the longest pass.
        """
        released = (gc.collect, release_buffers) if release else ()
        for work in (self.llm.cost_store.save, *released, trim_heap):
            try:
                work()
            except Exception:
                log.exception("housekeeping of the idle engine failed")

    def _add(self, handle: RequestHandle, start: int = 0) -> None:
        """Admit the jobs of a handle from index `start`; long lists continue after a step."""
        end = time.perf_counter() + ADMISSION_SECONDS
        try:
            for i, job in enumerate(handle.jobs[start:], start=start):
                if time.perf_counter() > end:
                    self._commands.put(partial(self._add, handle, i))
                    return
                if not job.cancelled:
                    self._admit_job(job, handle.paused)
        except Exception as error:
            if not isinstance(error, ForerunError):
                log.exception("the engine could not take a request")
                error = UnavailableError(
                    f"the engine could not take this request: {type(error).__name__}"
                )
            for job in handle.jobs:
                self._abort(job)
            self._post(partial(self._refuse, handle, error))
            return
        self._post(partial(_settle, handle.admitted, None))

    def _admit_job(self, job: Job, paused: bool) -> None:
        job.request = self.llm.engine.add(
            job.tokens,
            job.params,
            draft=job.draft,
            depth=job.depth,
            rule=job.rule,
            references=job.references,
            trace=job.trace,
            tenant=job.tenant,
            client=job.client,
            compiled=job.compiled,
        )
        self._running[job.request.id] = job
        if paused:
            self.llm.engine.pause(job.request)

    def _pause_requests(self, jobs: Sequence[Job], paused: bool) -> None:
        engine = self.llm.engine
        for job in jobs:
            if job.request is not None and job.request.id in self._running:
                (engine.pause if paused else engine.resume)(job.request)

    def _abort(self, job: Job) -> None:
        if job.request is not None:
            self.llm.engine.abort(job.request)

    def _restart(self, error: Exception) -> bool:
        """Reset the engine after a failed step; return False if that is impossible."""
        self.failures += 1
        lost = list(self._running.values())
        self._running = {}
        try:
            if isinstance(error, LostError):
                raise error
            self.llm.engine.reset()
        except Exception:
            log.exception("the engine cannot start over: this server has to be restarted")
            self._give_up(error)
        else:
            self._post(partial(self._finish_all, lost, _failure(error)))
        return not self.broken

    def _give_up(self, error: BaseException) -> None:
        """End every job with an error and accept no more."""
        self.broken = True
        self._post(lambda: self._finish_all(list(self.jobs), _failure(error)))

    def _post(self, call: Callable[[], object]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:  # the event loop is closed
            log.debug("an event came after the end of the event loop")

    # ------------------------------------------------------------ on the event loop

    def _deliver(self, deliveries: Sequence[tuple[Job, Event]]) -> None:
        now = time.perf_counter()
        for job, event in deliveries:
            if event.error:
                self._finish(job, event.error)
                continue
            for observer in self.observers:
                observer.on_event(job, event, now)
            job.first = job.first or now
            job.last = now
            handle = self.jobs.get(job)
            if handle is not None:
                handle.put(job, event)
                if 0 < handle.capacity < handle.unread and not handle.paused:
                    self._set_paused(handle, paused=True)
            if event.finish_reason is not None:
                self._finish(job, None)

    def _finish_all(self, jobs: Iterable[Job], error: BaseException) -> None:
        for job in jobs:
            self._finish(job, error)

    def _finish(self, job: Job, error: BaseException | None) -> None:
        handle = self.jobs.pop(job, None)
        for observer in self.observers:
            observer.on_end(job, error)
        if handle is not None:
            if error:  # the HTTP request may still wait for admission
                _settle(handle.admitted, None)
            handle.put(job, error)

    def _active(self, handle: RequestHandle) -> list[Job]:
        return [job for job in handle.jobs if job in self.jobs]

    def _set_paused(self, handle: RequestHandle, paused: bool) -> None:
        """Pause the jobs of a handle whose client does not read, or resume them."""
        handle.paused = paused
        handle.stop_timer()
        self._commands.put(partial(self._pause_requests, self._active(handle), paused))
        if paused and self.write_timeout:
            loop = asyncio.get_running_loop()
            handle.timer = loop.call_later(self.write_timeout, self._end_unread, handle)

    def _end_unread(self, handle: RequestHandle) -> None:
        """End the jobs of a handle that stayed paused for `write_timeout` seconds."""
        jobs = self._active(handle)
        if not jobs:
            return
        self.cancel(handle)
        seconds = f"{self.write_timeout:g} s"
        message = (
            f"the client has not read its answer for {seconds} (--write-timeout): it ends here"
        )
        handle.put(jobs[0], RequestError(message))
        log.warning("a client did not read its answer for %s: its request ends", seconds)

    def _refuse(self, handle: RequestHandle, error: Exception) -> None:
        for job in handle.jobs:
            self.jobs.pop(job, None)
        if not handle.admitted.done():
            handle.admitted.set_exception(error)
            handle.admitted.exception()  # mark it as retrieved: the HTTP request may be gone


def _failure(error: BaseException) -> UnavailableError:
    return UnavailableError(f"the engine failed while it worked on this: {type(error).__name__}")


def _settle(future: asyncio.Future[Any], result: object) -> None:
    if future.done():  # cancelled meanwhile
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
