"""A whole HTTP request as it goes to a replica, and the answer as it comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Scope

from forerun.server.tenants import CALLER, Caller, Callers

AHEAD = 16  # messages of an answer that wait for whoever reads it
ASKED = (
    "http_version",
    "method",
    "scheme",
    "path",
    "raw_path",
    "query_string",
    "headers",
    "client",
    "server",
)


@dataclass(frozen=True, slots=True)
class Envelope:
    """One request, for one attempt.

    Attributes:
        id: names the attempt.
        scope: what ASGI says of the request.
        body: all of it.
        caller: who asks, as the door has found out.
        prefixes: hashes of the beginning of its text, by which a replica is chosen.
        replica: the only one that is to have it; "" is any.
        avoid: replicas that have failed it.
    """

    id: str
    scope: dict[str, Any]
    body: bytes
    caller: Caller
    prefixes: tuple[int, ...] = ()
    replica: str = ""
    avoid: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Hold:
    """A request that a replica works on without Ray's knowledge, which is to count it."""

    id: str
    replica: str


def asked(scope: Scope) -> dict[str, Any]:
    """What a replica needs of a request's scope."""
    return {name: scope[name] for name in ASKED if name in scope}


class Trusted(Callers):
    """Everybody is who the door says: `CALLER` is set before the application is asked."""

    def __init__(self, keys: bool) -> None:
        """`keys`: whether the door asks for any."""
        self._keys = keys

    def __len__(self) -> int:
        return int(self._keys)

    def find(self, authorization: str) -> Caller | None:
        """Who is asking."""
        return CALLER.get()


async def answers(app: ASGIApp, envelope: Envelope) -> AsyncGenerator[list[Message], None]:
    """What an application answers, as ASGI messages: each time all that have come. Closed early, it
    is told that the client has gone."""
    told: asyncio.Queue[Message] = asyncio.Queue()
    written: asyncio.Queue[Message | None] = asyncio.Queue()
    room = asyncio.Semaphore(AHEAD)

    async def write(message: Message) -> None:
        await room.acquire()  # the application waits for whoever reads
        written.put_nowait(message)

    async def work() -> None:
        CALLER.set(envelope.caller)
        try:
            await app(
                {"type": "http", "asgi": {"version": "3.0"}, **envelope.scope}, told.get, write
            )
        finally:
            written.put_nowait(None)  # the last thing written

    told.put_nowait({"type": "http.request", "body": envelope.body, "more_body": False})
    task = asyncio.create_task(work())
    try:
        while True:
            messages = [await written.get()]
            while not written.empty():
                messages.append(written.get_nowait())
            known = [message for message in messages if message is not None]
            if known:
                yield known
            for _ in known:
                room.release()
            if None in messages:
                break
        await task  # raises what the application raised
    finally:
        told.put_nowait({"type": "http.disconnect"})
        task.cancel()
