"""Before everything else: a request id, the name that was asked, the key, the size of the body.

A page elsewhere can make its own name lead to this machine (DNS rebinding) and can post here
without asking first. The one sends a name that is not ours in Host, the other its own origin. An
address in Host is no page's doing: what is rebound is always a name.
"""

from __future__ import annotations

import re
import secrets
import socket
from collections.abc import Collection

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forerun.server import errors, fields
from forerun.server.bodies import Bodies
from forerun.server.errors import ApiError
from forerun.server.journal import REQUEST_ID
from forerun.server.listen import is_address, is_loopback
from forerun.server.settings import Settings
from forerun.server.tenants import CALLER, Callers

FORM = "application/x-www-form-urlencoded"
PAGES = {
    "origin",
    "sec-fetch-site",
    "sec-fetch-mode",
}  # headers that browsers send, and nobody else
ANY = "*"
PORTS = {"http": ":80", "https": ":443"}  # what a browser leaves out
SHOWN = 100  # characters of what a client sent, in an error message


def guard(app: Starlette, settings: Settings, callers: Callers) -> None:
    """Put the gate of these settings in front of an application."""
    app.add_middleware(Gate, callers=callers, hosts=Hosts(settings), bodies=Bodies(settings))
    if (
        settings.allowed_origins
    ):  # outside the gate: a preflight carries no key, and a page may read why it is refused
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After", fields.HEADER],
        )


class Gate:
    """Refuses what asks for somebody else, has no key or is too large, and gives every request an
    id."""

    OPEN = ("/health", "/", "/docs")  # the pages hold no secret; the playground asks for the key
    OPEN_BELOW = "/playground/"

    def __init__(self, app: ASGIApp, callers: Callers, hosts: Hosts, bodies: Bodies) -> None:
        self.app, self.callers, self.hosts, self.bodies = app, callers, hosts, bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = "".join(
            c for c in headers.get("x-request-id", "")[:128] if c.isalnum() or c in "-_."
        )
        request_id = request_id or secrets.token_hex(8)

        REQUEST_ID.set(request_id)
        if not PAGES & set(headers):
            _call_it_json(scope, (None, FORM) if scope["path"].startswith("/api/") else (None,))

        async def reply(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        error = self._refusal(scope["path"], headers)
        if error is None:
            with self.bodies.limited(receive) as limited:
                await self.app(scope, limited, reply)
            return
        await errors.answer(error, scope["path"])(scope, receive, reply)

    def _refusal(self, path: str, headers: Headers) -> ApiError | None:
        elsewhere = self.hosts.refusal(headers)
        if elsewhere:
            return elsewhere
        caller = self.callers.find(headers.get("authorization", ""))
        if caller is not None:
            CALLER.set(caller)
        elif path not in self.OPEN and not path.startswith(self.OPEN_BELOW):
            return ApiError(
                401, "give a valid key: Authorization: Bearer KEY", None, "invalid_api_key"
            )
        return self.bodies.refusal(headers)


def _call_it_json(scope: Scope, kinds: Collection[str | None]) -> None:
    """Take a body of these types for JSON: one without a type everywhere, and like Ollama what
    `curl -d` calls a form.
    Only from where no browser is: of a page elsewhere, the type is what keeps it from asking. A
        form of an old browser
    has a type and no origin, so forms are left to the paths that Ollama's clients need."""
    headers = MutableHeaders(scope=scope)
    if headers.get("content-type") in kinds:
        headers["content-type"] = "application/json"


class Hosts:
    """The names and addresses of one server, and the origins that may ask it besides its own
    pages."""

    def __init__(self, settings: Settings) -> None:
        self.loopback = is_loopback(settings.host)
        own = () if self.loopback else (settings.host, socket.gethostname())
        self.names = {"localhost", *(host_of(name) for name in (*own, *settings.allowed_hosts))}
        self.origins = settings.allowed_origins

    def refusal(self, headers: Headers) -> ApiError | None:
        """Why a request with these headers is not answered, if it is not."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if host and not self._ours(host):
            why = f"this server does not answer to {host[:SHOWN]!r}"
            return ApiError(421, f"{why}: if that is its name, start it with --allowed-hosts NAME")
        if origin is not None and not _same(origin, host) and not {origin, ANY} & set(self.origins):
            why = f"pages of {origin[:SHOWN]!r} may not ask this server"
            return ApiError(403, f"{why}: if they should, start it with --allowed-origins ORIGIN")
        return None

    def _ours(self, value: str) -> bool:
        host = host_of(value)
        if self.names & {host, ANY}:
            return True
        return host is not None and is_address(host) and (not self.loopback or is_loopback(host))


def host_of(value: str) -> str | None:
    """The host of HOST, HOST:PORT or [ADDRESS]:PORT as it is compared; None for anything else."""
    if is_address(value):
        return value.lower()
    match = re.fullmatch(r"(?:\[([^\[\]]+)\]|([^:\[\]]+))(?::\d*)?", value)
    return (match[1] or match[2]).lower().removesuffix(".") if match else None


def _same(origin: str, host: str) -> bool:
    """Whether a page's origin is the host that it asks."""
    scheme, _, authority = origin.lower().partition("://")
    port = PORTS.get(scheme)
    return port is not None and authority.removesuffix(port) == host.lower().removesuffix(port)
