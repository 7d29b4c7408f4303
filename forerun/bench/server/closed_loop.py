"""Clients that keep a server busy: each sends its next request as soon as its last one has ended. One run at a time.

A run's window opens with its first request and closes when a client first finds nothing left to send: in it the number
of requests at once is what was asked for. What runs on then is waited for, so that long answers are not left out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from forerun.bench.server.answer import Answer, Speculated
from forerun.bench.server.endpoint import Prompt, Server

FAILURES = 3  # of all clients together, without a success of any, after which a server counts as gone
PAUSE = 0.25  # seconds a client waits after a failure: a server that refuses is not to be hammered

Request = tuple[int, Prompt, dict[str, Any]]  # index, prompt, and the other fields of the body


@dataclass(slots=True)
class Run:
    """One run; times are `time.perf_counter` seconds.

    Attributes:
        opened, closed: the window. It closes at the last piece of text where the run was cut short.
        answers: in the order in which they were asked for.
        broken: why the run was given up.
        whole: whether it came to its end, neither interrupted nor broken.
        counted: speculation by the server's own counters, where it has any; other clients' requests are in it.
    """

    opened: float = 0.0
    closed: float = 0.0
    answers: list[Answer] = field(default_factory=list)
    broken: str | None = None
    whole: bool = False
    counted: Speculated | None = None

    @property
    def finished(self) -> list[Answer]:
        """The answers that came to their end."""
        return [answer for answer in self.answers if answer.finished and answer.error is None]

    @property
    def speed(self) -> float:
        """Tokens a second in the window; a chunk counts as its share of its answer's tokens."""
        tokens = sum(
            count * answer.scale
            for answer in self.answers
            if answer.error is None
            for when, count in answer.chunks
            if when <= self.closed
        )
        return tokens / (self.closed - self.opened) if tokens else 0.0


async def drive(run: Run, server: Server, clients: int, requests: Iterator[Request]) -> None:
    """Let `clients` clients send the requests. What has been measured is in `run`, cancelled or not."""
    before = await server.counters()
    streaks = [0] * clients
    run.opened = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            for i in range(clients):
                group.create_task(_client(run, server, streaks, i, requests))
        run.whole = run.broken is None
    finally:
        if not run.whole:
            run.closed = max((when for answer in run.answers for when, _ in answer.chunks), default=run.opened)
    after = await server.counters()
    if before and after:
        run.counted = after - before


async def _client(run: Run, server: Server, streaks: list[int], mine: int, requests: Iterator[Request]) -> None:
    """One client; `streaks` are the failures of each since its last success."""
    for index, prompt, fields in requests:
        answer = Answer(index)
        run.answers.append(answer)
        await server.stream(answer, prompt, fields)
        streaks[mine] = streaks[mine] + 1 if answer.error else 0
        if all(streaks) and sum(streaks) >= FAILURES:
            run.broken = answer.error
        if run.broken is not None:
            return
        if answer.error:
            await asyncio.sleep(PAUSE)
    run.closed = run.closed or time.perf_counter()
