"""Where requests come in: it reads each whole, finds its model, and has one of the model's replicas
answer it.

The door asks for keys, names and sizes exactly as `forerun serve` does, with the same `Gate` in
front of it. Everything else is said by a replica, which runs the application of `forerun serve`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from anyio import to_thread
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount
from starlette.types import Message, Receive, Scope, Send

from forerun.cluster import pages
from forerun.cluster.affinity import prefixes
from forerun.cluster.envelope import Envelope, asked
from forerun.cluster.plan import Plan
from forerun.cluster.relay import Crew, Relay
from forerun.errors import BusyError, ForerunError, shorten
from forerun.server import bounds, errors
from forerun.server.errors import ApiError
from forerun.server.gate import guard
from forerun.server.journal import REQUEST_ID
from forerun.server.lanes import Lane
from forerun.server.ollama import ACTIONS
from forerun.server.service import UnavailableError
from forerun.server.tenants import CALLER, Callers, tenant_of

log = logging.getLogger("forerun.server")
PATIENCE = 5.0  # seconds until a page about all replicas goes without one
LISTS = {
    "/v1/models": "data",
    "/api/tags": "models",
    "/api/ps": "models",
}  # pages that every model has a part of
CARDS = "/v1/models/"  # pages about one model, which the path names
MANAGED = {action for _, action in ACTIONS}
Page = Callable[[Scope], Awaitable[Response]]


class Door:
    """An ASGI application in front of the replicas of all models. To `Server` it looks like a
    service."""

    def __init__(self, plan: Plan, crew: Crew) -> None:
        self.plan, self.crew = plan, crew
        self.draining = False
        self.tickets: set[Relay] = set()  # requests in work
        self.again: Counter[str] = Counter()
        self._reading = 0  # requests whose bodies are on their way
        self._limit = plan.settings.max_queue + sum(
            m.replicas.max * m.engine.max_rows for m in plan.models
        )
        self._parsing = Lane(1)
        self._said: dict[
            tuple[str, str], str
        ] = {}  # lists by page and model: one that sleeps is not woken for them
        self._names = {model.name.removesuffix(":latest"): model.name for model in plan.models}
        self._pages: Mapping[str, Page] = {
            "/health": self._health,
            "/ready": self._ready,
            "/metrics": self._metrics,
        }

    # ------------------------------------------------------------ as a service

    def end_all(self) -> None:
        """End every request as it is."""
        for relay in list(self.tickets):
            relay.end()

    def stop(self) -> None:
        """Nothing is left to end."""

    # ------------------------------------------------------------ as an application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Raises what comes too late to be told: it ends the connection."""
        begun = False

        async def reply(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._answer(scope, receive, reply)
        except ClientDisconnect:
            return
        except errors.KINDS as error:
            if begun:
                raise
            if errors.body(error)[0] == 500:
                log.error("a request failed", exc_info=error)
            await errors.answer(error, scope["path"])(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path in self._pages and scope["method"] == "GET":
            await (await self._pages[path](scope))(scope, receive, send)
            return
        self._admit()
        if path in LISTS and scope["method"] == "GET":
            await (await self._list(scope, LISTS[path]))(scope, receive, send)
        else:
            await self._relay(scope, receive, send)

    def _admit(self) -> None:
        if self.draining:
            raise UnavailableError("the server is shutting down")
        taken = len(self.tickets) + self._reading
        if taken >= self._limit:
            raise BusyError(
                f"{taken} requests are running or waiting already: try again in a moment"
            )

    async def _relay(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._reading += 1
        try:
            body = await Request(scope, receive).body()
            value = await self._parsed(body)
        finally:
            self._reading -= 1
        model = self._model_of(value, scope["path"])
        known = (
            prefixes(value, self._tenant(value), self.plan.routing)
            if scope["method"] == "POST"
            else ()
        )
        relay = Relay(self.crew, model, self.plan.retries, self.plan.settings.timeout)
        self.tickets.add(relay)
        try:
            await relay.run(self._envelope(scope, body, known), receive, send)
        finally:
            self.tickets.discard(relay)
            self.again[model] += max(0, relay.attempts - 1)

    async def _parsed(self, body: bytes) -> Mapping[str, Any]:
        """What a body says, as far as it can be read: what is wrong with it, a replica says."""
        try:
            value = await bounds.parse_aside(body, self._parsing)
        except (ApiError, ForerunError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}

    def _model_of(self, value: Mapping[str, Any], path: str) -> str:
        given = value.get("model") or (value.get("name") if path.startswith("/api/") else None)
        if path.startswith(CARDS):
            given = path.removeprefix(CARDS).removesuffix("/")
        manages = (
            path.removeprefix("/api/") in MANAGED
        )  # these may name a model that is not here, and are refused
        if manages or not given or not isinstance(given, str):
            return self.plan.models[0].name
        known = self._names.get(given.removesuffix(":latest"))
        if known is None:
            there = ", ".join(repr(name) for name in self._names.values())
            raise ApiError(
                404,
                f"there is no model {shorten(given)} here, only {there}",
                "model",
                "model_not_found",
            )
        return known

    def _tenant(self, value: Mapping[str, Any]) -> str | None:
        if CALLER.get().tenant is None and not value.get("cache_salt"):
            return None
        salt = value.get("cache_salt")
        return tenant_of(salt if isinstance(salt, str) else None)

    def _envelope(
        self, scope: Scope, body: bytes, known: tuple[int, ...] = (), replica: str = ""
    ) -> Envelope:
        MutableHeaders(scope=scope)["x-request-id"] = (
            REQUEST_ID.get()
        )  # so that both name it in their logs
        return Envelope("", asked(scope), body, CALLER.get(), known, replica)

    # ------------------------------------------------------------ pages

    async def _health(self, scope: Scope) -> Response:
        if self.draining:
            raise UnavailableError("the server is shutting down")
        self._all_there()
        return JSONResponse({"status": "ok"})

    async def _ready(self, scope: Scope) -> Response:
        self._all_there()
        awake = [model for model in self.plan.models if self.crew.ledgers[model.name].live]
        await asyncio.gather(*(self._fetched(scope, model.name) for model in awake))
        return JSONResponse({"status": "ready"})

    def _all_there(self) -> None:
        """Raises UnavailableError where a model has no replica that should have one: others start
        when asked."""
        for model in self.plan.models:
            if model.replicas.min and not self.crew.ledgers[model.name].live:
                raise UnavailableError(f"no replica of {model.name} is up")

    async def _list(self, scope: Scope, field: str) -> Response:
        """A page of which each model has a part."""
        parts = await asyncio.gather(
            *(self._listed(scope, model.name) for model in self.plan.models)
        )
        values = [json.loads(part) for part in parts]
        return JSONResponse(
            values[0] | {field: [entry for value in values for entry in value[field]]}
        )

    async def _listed(self, scope: Scope, model: str) -> str:
        """A model's part of a list: what it said last, if it sleeps; else it is woken."""
        key = scope["path"], model
        if self.crew.ledgers[model].live or key not in self._said:
            self._said[key] = await self._fetched(scope, model)
        return self._said[key]

    async def _metrics(self, scope: Scope) -> Response:
        if not CALLER.get().operator:
            raise ApiError(
                403, "this counts everybody's requests: it needs a key of the operator (api_key)"
            )
        where = [
            (model, replica)
            for model, ledger in self.crew.ledgers.items()
            for replica in ledger.live
        ]
        texts = await asyncio.gather(
            *(self._fetched(scope, *one) for one in where), return_exceptions=True
        )
        found = {one: text for one, text in zip(where, texts, strict=True) if isinstance(text, str)}
        page = await to_thread.run_sync(
            pages.merged, found, list(pages.counted(self.crew.ledgers, self.again))
        )
        return Response(page, media_type=CONTENT_TYPE_LATEST)

    async def _fetched(self, scope: Scope, model: str, replica: str = "") -> str:
        """The same page of one replica. Raises ApiError, UnavailableError."""
        answer: dict[str, Any] = {"status": 500, "body": b""}

        async def keep(message: Any) -> None:
            answer["status"] = message.get("status", answer["status"])
            answer["body"] += message.get("body", b"")

        async def waiting() -> Any:
            await asyncio.Event().wait()

        sleeps = not self.crew.ledgers[
            model
        ].live  # a model that starts when it is asked takes as long as it takes
        try:
            async with asyncio.timeout(
                (self.plan.settings.timeout or None) if sleeps else PATIENCE
            ):
                relay = Relay(self.crew, model, 0 if replica else self.plan.retries, 0)
                await relay.run(self._envelope(scope, b"", (), replica), waiting, keep)
        except TimeoutError:
            raise UnavailableError(f"a replica of {model} does not answer") from None
        if answer["status"] != 200:
            raise UnavailableError(f"a replica of {model} answers with {answer['status']}")
        return str(answer["body"], "utf-8")


def make_door(plan: Plan, crew: Crew) -> Starlette:
    """The application of the door, gate included. `app.state.service` is the door."""
    settings, door = plan.settings, Door(plan, crew)
    app = Starlette(routes=[Mount("/", door)])
    app.state.service = door
    guard(app, settings, Callers.of(settings))
    return app
