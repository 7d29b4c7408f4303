"""Run work in threads beside the event loop for a bounded share of the time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from anyio import CapacityLimiter, to_thread

R = TypeVar("R")
REST = 2.0  # a place stays empty for this many times the time that its last call took,
LONGEST_REST = 0.25  # and for no more than this many seconds
SHORT = 0.002  # seconds; a shorter call leaves its place free at once


class Lane:
    """A thread pool whose places rest after each call.

    A call keeps the interpreter and the processors from the engine. The rest bounds its share of
    the time, so that the large requests of some clients do not stop the tokens of others.
    """

    def __init__(self, places: int) -> None:
        self._free = asyncio.Semaphore(places)
        self._threads = CapacityLimiter(places)

    async def do(self, work: Callable[..., R], *given: object) -> R:
        """Run `work` with the given arguments in a thread and return its result. Raises what it
        raises."""
        await self._free.acquire()
        begun = time.perf_counter()
        try:
            return await to_thread.run_sync(partial(work, *given), limiter=self._threads)
        finally:
            took = time.perf_counter() - begun
            rest = 0.0 if took < SHORT else min(REST * took, LONGEST_REST)
            asyncio.get_running_loop().call_later(rest, self._free.release)
