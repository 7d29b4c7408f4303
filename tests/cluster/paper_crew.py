"""Replicas without Ray: applications in this process, which die when they are told to; and a client
of the door."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message

from forerun.cluster.door import make_door
from forerun.cluster.envelope import Envelope, answers
from forerun.cluster.ledger import Ledger
from forerun.cluster.plan import Plan, make_plan
from forerun.cluster.relay import LostError
from forerun.errors import BusyError
from forerun.server.service import UnavailableError


class PaperCrew:
    """Replicas of each model, by model and name. `dies` says after how many messages a replica is
    lost."""

    def __init__(self, plan: Plan, apps: Mapping[str, Mapping[str, ASGIApp]]) -> None:
        self.apps, self.dies, self.asked = apps, dict[str, int](), list[tuple[str, str]]()
        self.full = False
        self.ledgers = {model: Ledger(plan.routing, seed=1) for model in apps}
        for model, replicas in apps.items():
            self.ledgers[model].set_live(sorted(replicas))

    async def ask(self, model: str, envelope: Envelope) -> AsyncGenerator[list[Message], None]:
        """What the chosen replica answers."""
        if self.full:
            raise BusyError("no replica has a place for this request: try again in a moment")
        ledger = self.ledgers[model]
        name = envelope.replica or ledger.choose(envelope.id, envelope.prefixes, envelope.avoid)
        if name is None:
            raise UnavailableError(f"no replica of {model} is up")
        self.asked.append((model, name))
        written = answers(self.apps[model][name], envelope)
        left = self.dies.get(name)
        try:
            async for messages in written:
                for message in messages:
                    if left == 0:
                        raise LostError
                    left = None if left is None else left - 1
                    yield [message]
        finally:
            await written.aclose()


@dataclass
class Reply:
    """What a client got."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    whole: bool = False

    def json(self) -> Any:
        """The body as a value."""
        return json.loads(self.body)


async def ask(
    app: ASGIApp,
    path: str,
    body: object = None,
    headers: Mapping[str, str] | None = None,
    got: Callable[[Reply], object] | None = None,
    leave: asyncio.Event | None = None,
) -> Reply:
    """The answer to a request; `got` is told of each piece, and at `leave` the client goes away."""
    sent = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {"host": "127.0.0.1", "content-type": "application/json"} | dict(headers or {})
    scope = {
        "type": "http", "http_version": "1.1", "method": "GET" if body is None else "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "client": ("127.0.0.1", 5), "root_path": "",
        "server": ("127.0.0.1", 80), "headers": [(k.encode(), v.encode()) for k, v in given.items()],
    }  # fmt: skip
    reply, parts, leave = Reply(), [sent], leave or asyncio.Event()

    async def receive() -> Message:
        if parts:
            return {"type": "http.request", "body": parts.pop(), "more_body": False}
        await leave.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            reply.status = message["status"]
            reply.headers = {k.decode().lower(): v.decode() for k, v in message["headers"]}
            return
        reply.body += message.get("body", b"")
        reply.whole = not message.get("more_body", False)
        if got is not None:
            got(reply)

    await app(scope, receive, send)
    return reply


def door_of(apps: Mapping[str, Mapping[str, ASGIApp]], **options: Any) -> tuple[Any, PaperCrew]:
    """A door in front of these replicas, with these settings, and its crew."""
    plan = make_plan({"models": [{"name": name} for name in apps]} | options)
    crew = PaperCrew(plan, apps)
    return make_door(plan, crew), crew
