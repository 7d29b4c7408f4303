"""A replica: a model in a process of its own, behind the application that `forerun serve` runs.

Its door reaches it over a socket where both are on one machine, else by calls of Ray.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

from ray import serve
from starlette.types import Message

from forerun.cluster.envelope import Envelope, Hold, Trusted, answers
from forerun.cluster.sharing import Sharing
from forerun.cluster.wire import Listener, place
from forerun.llm import LLM
from forerun.server.app import fingerprint, make_app
from forerun.server.descriptors import raise_limit
from forerun.server.probe import probe
from forerun.server.run import start_logging
from forerun.server.settings import Settings
from forerun.worker_process import stop_all

log = logging.getLogger("forerun.server")


class Replica:
    """Answers whole HTTP requests. Ray makes it, asks it how it is, and ends it."""

    def __init__(
        self, options: Mapping[str, Any], settings: Settings, keys: bool, sockets: str
    ) -> None:
        """Load the model.

        Args:
            options: of the engine.
            settings: of its application.
            keys: whether clients need one.
            sockets: the directory where it listens.
        """
        start_logging(verbose=False, person=False)
        raise_limit()
        self.name = serve.get_replica_context().replica_id.unique_id
        llm = LLM(**options)
        fault = probe(llm)
        if fault:
            log.warning("%s", fault)
        self.app = make_app(llm, settings, Trusted(keys))
        self._sharing = Sharing(self.app.state.service, fingerprint(llm))
        self._listener, self._place = (
            Listener(self.app, self._sharing.hear),
            place(sockets, self.name),
        )
        self._lifespan = self.app.router.lifespan_context(self.app)
        self._starting: asyncio.Task[Any] | None = None
        self._spreading: asyncio.Task[Any] | None = None
        gc.collect()
        gc.freeze()

    async def answer(self, envelope: Envelope) -> AsyncIterator[list[Message]]:
        """The answer to a request, as ASGI messages."""
        await self._started()
        async for messages in answers(self.app, envelope):
            yield messages

    async def hold(self, hold: Hold) -> None:
        """Returns when a request that came over the socket has ended: so that Ray counts it, and
        waits for it."""
        await self._listener.ended(hold.id)

    async def check_health(self) -> None:
        """Raises where it has to be replaced: its engine's thread has ended."""
        await self._started()
        if self.app.state.service.broken:
            raise RuntimeError(self.app.state.service.reason)

    async def _started(self) -> None:
        if (
            self._starting is None
        ):  # the engine tells this event loop, so it starts on it and not where it is loaded
            self._starting = asyncio.ensure_future(self._start())
        await asyncio.shield(self._starting)

    async def _start(self) -> None:
        await self._lifespan.__aenter__()
        await self._listener.start(self._place)
        self._spreading = asyncio.create_task(self._listener.spread(self._sharing.waiting))

    async def __del__(self) -> None:
        """The end: no request that Ray knows of is left."""
        await self._listener.close()
        if self._spreading is not None:
            self._spreading.cancel()
        await self._lifespan.__aexit__(None, None, None)
        stop_all()
