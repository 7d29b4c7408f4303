"""Grammars of requests, compiled before the engine sees them: its thread never does that."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from anyio import CapacityLimiter, to_thread

from forerun.sampling.compiler import GrammarCompiler
from forerun.sandbox import WORKERS
from forerun.server.tickets import Order


class Grammars:
    """Compiles as many grammars at once as there are processes for it; others wait, and hold no thread meanwhile."""

    def __init__(self, compiler: GrammarCompiler, timeout: float) -> None:
        """`timeout` is the seconds that a request may take; 0 for no limit."""
        self.compiler, self.timeout, self.places = compiler, timeout, CapacityLimiter(WORKERS)

    async def compile(self, orders: Sequence[Order]) -> Sequence[Order]:
        """The orders of one request with their grammar compiled. Raises RequestError or TimeoutError."""
        grammar = orders[0].params.grammar
        if grammar is None:
            return orders
        compiled = self.compiler.kept(grammar)
        if compiled is None:
            async with asyncio.timeout(self.timeout or None):
                compiled = await to_thread.run_sync(self.compiler.compiled, grammar, limiter=self.places)
        return [replace(order, compiled=compiled) for order in orders]
