"""Texts that have ended, told from replica to replica on one machine: each copies from what any of
them said.

What a tenant's requests said is told under the tenant's name and remembered under it, as by one
server. It is a help,
never needed: a replica that is busy or gone misses some, and where much is said at once the rest is
not told."""

from __future__ import annotations

import asyncio
from array import array
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from forerun.engine.request import OFF
from forerun.server.service import Service, Watcher
from forerun.server.tickets import Ticket
from forerun.types import SALT

WAITING = 64  # texts that have not been told yet; what comes when there are so many is not told
# tokens of a text that are told, its end: to remember them takes an engine some milliseconds
LAST = 2048


@dataclass(frozen=True, slots=True)
class Heard:
    """The end of a text: `kind` names the model that its tokens are of, `tenant` is whose it is."""

    kind: str
    tenant: str
    tokens: array[int]


class Sharing(Watcher):
    """Keeps texts that end here until they are told, and lets the engine remember those of
    others."""

    def __init__(self, service: Service, kind: str) -> None:
        """`kind` names everything that tokens of these replicas have in common."""
        self._service, self._kind = service, kind
        self.waiting: asyncio.Queue[Heard] = asyncio.Queue(WAITING)
        service.watchers = (*service.watchers, self)

    def end(self, ticket: Ticket, error: BaseException | None) -> None:
        """A text has ended. One whose tenant nobody is again, or that nothing was to be drafted
        for, is no help."""
        request = ticket.request
        if error or request is None or request.draft == OFF or request.tenant.startswith(2 * SALT):
            return
        with suppress(asyncio.QueueFull):
            self.waiting.put_nowait(
                Heard(self._kind, request.tenant, array("q", request.tokens[-LAST:]))
            )

    async def hear(self, heard: Heard) -> None:
        """Remember a text, if it is one of this model. Raises RequestError for tokens that it has
        not got."""
        if heard.kind == self._kind and self._service.alive:
            remember = self._service.llm.engine.remember
            await self._service.call(partial(remember, heard.tenant, heard.tokens.tolist()))
