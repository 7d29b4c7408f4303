"""A replica: a model in a process of its own, behind the application that `forerun serve` runs."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

from ray import serve
from starlette.types import Message

from forerun.cluster.envelope import Envelope, Trusted, answers
from forerun.llm import LLM
from forerun.probe import probe
from forerun.sandbox import stop_all
from forerun.server.app import make_app
from forerun.server.settings import Settings

log = logging.getLogger("forerun.server")


class Replica:
    """Answers whole HTTP requests. Ray makes it, asks it how it is, and ends it."""

    def __init__(self, options: Mapping[str, Any], settings: Settings, keys: bool) -> None:
        """Load the model.

        Args:
            options: of the engine.
            settings: of its application.
            keys: whether clients need one.
        """
        self.name = serve.get_replica_context().replica_id.unique_id
        llm = LLM(**options)
        fault = probe(llm)
        if fault:
            log.warning("%s", fault)
        self.app = make_app(llm, settings, Trusted(keys))
        self._lifespan = self.app.router.lifespan_context(self.app)
        self._starting: asyncio.Task[Any] | None = None
        gc.collect()
        gc.freeze()

    async def answer(self, envelope: Envelope) -> AsyncIterator[list[Message]]:
        """The answer to a request, as ASGI messages."""
        await self._started()
        async for messages in answers(self.app, envelope):
            yield messages

    async def check_health(self) -> None:
        """Raises where it has to be replaced: its engine's thread has ended."""
        await self._started()
        if self.app.state.service.broken:
            raise RuntimeError(self.app.state.service.reason)

    async def _started(self) -> None:
        if self._starting is None:  # the engine tells this event loop, so it starts on it and not where it is loaded
            self._starting = asyncio.ensure_future(self._lifespan.__aenter__())
        await asyncio.shield(self._starting)

    async def __del__(self) -> None:
        """The end: no request is left."""
        await self._lifespan.__aexit__(None, None, None)
        stop_all()
