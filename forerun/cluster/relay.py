"""One request on its way to a replica and back, and what happens when the replica dies meanwhile.

Nothing of an answer goes out before some of its body is there. Until then the request is given to
another replica; from then on it ends with one error in its stream.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from typing import Protocol

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Send

from forerun.cluster.envelope import Envelope
from forerun.cluster.ledger import Ledger
from forerun.server import errors
from forerun.server.service import UnavailableError
from forerun.utils import json_line

log = logging.getLogger("forerun.server")
# seconds that a replica may take longer than the time of a request, to say that it is over
OVERTIME = 10.0
CORS = b"access-control-"  # what the door answers for


class LostError(Exception):
    """The replica that worked on a request is no more."""


class Crew(Protocol):
    """Whoever has the replicas."""

    @property
    def ledgers(self) -> Mapping[str, Ledger]:
        """Who works on what, by model."""

    def ask(self, model: str, envelope: Envelope) -> AsyncGenerator[list[Message], None]:
        """What a replica answers. Raises LostError, BusyError, UnavailableError."""


class Relay:
    """One request and its answer."""

    def __init__(self, crew: Crew, model: str, retries: int, timeout: float) -> None:
        """It may be given to `retries` other replicas, and take `timeout` seconds in all; 0 for no
        limit."""
        self.crew, self.model, self.retries, self.timeout = crew, model, retries, timeout
        self.begun = False
        self.attempts = 0
        self._start: Message | None = None
        self._ended = False
        self._over = asyncio.Event()

    def end(self) -> None:
        """End it as it is, with an error."""
        self._over.set()

    async def run(self, envelope: Envelope, receive: Receive, send: Send) -> None:
        """Have it answered, unless the client goes away before. Raises what no answer could be
        begun for."""
        try:
            async with asyncio.timeout(self.timeout + OVERTIME if self.timeout else None):
                await self._raced(envelope, receive, send)
        except Exception as error:
            if not self.begun or not await self._said(error, send):
                raise

    async def _raced(self, envelope: Envelope, receive: Receive, send: Send) -> None:
        """The answer, the end of the client or the end of the server, whichever comes first."""
        work = asyncio.ensure_future(self._tried(envelope, send))
        others = [asyncio.ensure_future(_gone(receive)), asyncio.ensure_future(self._over.wait())]
        try:
            await asyncio.wait((work, *others), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            elif self._over.is_set():
                raise UnavailableError("the server is shutting down")
        finally:
            for task in (work, *others):
                task.cancel()
            await asyncio.gather(
                work, *others, return_exceptions=True
            )  # the replica is told before this ends

    async def _tried(self, envelope: Envelope, send: Send) -> None:
        avoid: tuple[str, ...] = ()
        while True:
            self.attempts += 1
            envelope = replace(envelope, id=secrets.token_hex(8), avoid=avoid)
            try:
                await self._passed(envelope, send)
                return
            except LostError:
                if self.begun or self.attempts > self.retries:
                    raise UnavailableError("the replica that worked on this has died") from None
            finally:
                replica = self._left(envelope)
            log.warning(
                "replica %s of %s has died: its request goes to another one", replica, self.model
            )
            avoid = (*avoid, replica) if replica else avoid

    def _left(self, envelope: Envelope) -> str | None:
        """The replica that has no more to do for this attempt; None if that is known already."""
        return self.crew.ledgers[self.model].ended(
            envelope.id, counts=envelope.scope["method"] == "POST"
        )

    async def _passed(self, envelope: Envelope, send: Send) -> None:
        self._start, self._ended = None, False
        answer = self.crew.ask(self.model, envelope)
        try:
            async for messages in answer:
                for message in messages:
                    if _is_last(
                        message
                    ):  # before the client knows: what it asks next may go to the same replica
                        self._left(envelope)
                    await self._pass(message, send)
        finally:
            await answer.aclose()
        if not self._ended:
            raise LostError

    async def _pass(self, message: Message, send: Send) -> None:
        if message["type"] == "http.response.start":
            headers = [
                (name, value)
                for name, value in message["headers"]
                if not name.lower().startswith(CORS)
            ]
            self._start = dict(message) | {"headers": headers}
            return
        if not self.begun and self._start is not None:
            self.begun = True
            await send(self._start)
        await send(message)
        self._ended = _is_last(message)

    async def _said(self, error: Exception, send: Send) -> bool:
        """End a stream with an error; False for an answer that has no place for one."""
        assert self._start is not None
        kind = Headers(raw=self._start["headers"]).get("content-type", "")
        content = errors.told(error)[1]
        if kind.startswith("text/event-stream"):
            last = f"data: {json_line(content)}\n\ndata: [DONE]\n\n"
        elif kind.startswith("application/x-ndjson"):
            last = json_line({"error": content["error"]["message"]}) + "\n"
        else:
            return False
        await send({"type": "http.response.body", "body": last.encode(), "more_body": False})
        return True


def _is_last(message: Message) -> bool:
    return message["type"] == "http.response.body" and not message.get("more_body", False)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
