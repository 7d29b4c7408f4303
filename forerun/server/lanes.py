"""Work beside the event loop that takes a share of the time at most."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from anyio import CapacityLimiter, to_thread

R = TypeVar("R")
REST, LONGEST_REST = 2.0, 0.25  # times what a work took, and seconds at most, before its place is free again
SHORT = 0.002  # seconds after which nothing rests


class Lane:
    """A number of places for work in threads. What computes there keeps the interpreter and the processors from the
    engine: after each work its place rests, so that large requests of some do not stop the tokens of others."""

    def __init__(self, places: int) -> None:
        self._free = asyncio.Semaphore(places)
        self._threads = CapacityLimiter(places)

    async def do(self, work: Callable[..., R], *given: object) -> R:
        """What `work` returns for what is given. Raises what it raises."""
        await self._free.acquire()
        begun = time.perf_counter()
        try:
            return await to_thread.run_sync(partial(work, *given), limiter=self._threads)
        finally:
            took = time.perf_counter() - begun
            rest = 0.0 if took < SHORT else min(REST * took, LONGEST_REST)
            asyncio.get_running_loop().call_later(rest, self._free.release)
