"""Access control: API keys, tenants, and the hosts and origins that a server answers to.

Requests of one tenant share draft memory and prefix cache with each other and with no other
tenant. A tenant is an API key, subdivided by the request's `cache_salt`. Without keys, all requests
from this machine are one tenant, and every request from elsewhere is a tenant of its own unless
the operator shares the memory (--share-memory).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import socket
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forerun.errors import ConfigError
from forerun.server import errors, fields
from forerun.server.errors import ApiError
from forerun.server.limits import SHOWN, BodyLimiter
from forerun.server.listen import is_address, is_loopback
from forerun.server.settings import Settings, clean_key
from forerun.types import SALT
from forerun.utils import UnreadableError, text_of

FORM = "application/x-www-form-urlencoded"
BROWSER_HEADERS = {"origin", "sec-fetch-site", "sec-fetch-mode"}
ANY = "*"
DEFAULT_PORTS = {"http": ":80", "https": ":443"}  # browsers leave them out of Origin


# ------------------------------------------------------------ keys and tenants


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request.

    Attributes:
        tenant: name of the tenant; None gives every request a tenant of its own.
        operator: may read metrics of all tenants.
    """

    tenant: str | None = ""
    operator: bool = True


UNRESTRICTED = Caller()
REQUEST_ID: ContextVar[str] = ContextVar("forerun_request_id", default="")  # of this HTTP request
CALLER: ContextVar[Caller] = ContextVar("caller", default=UNRESTRICTED)  # of the current request
# The client of the current request, with which others share the engine's slots: the name of its
# key, or without keys its address.
CLIENT: ContextVar[str] = ContextVar("client", default="")


def tenant_of(salt: str | None) -> str:
    """Return the tenant of the current request, which gave this `cache_salt`.

    The separator is a line end, which no name in a file of keys contains.
    """
    tenant = CALLER.get().tenant
    if salt:
        return f"{tenant or ''}{SALT}{salt}"
    return f"{SALT}{SALT}{secrets.token_hex(16)}" if tenant is None else tenant


class ApiKeys:
    """The API keys of a server; without any key, every request is admitted.

    Keys from the command line belong to the operator. Those of a file, one `NAME KEY` a line,
    belong to clients, who cannot read metrics of all tenants.
    """

    def __init__(self, settings: Settings) -> None:
        """Read the keys of the settings and of FORERUN_API_KEY. Raises ConfigError."""
        self._callers: dict[bytes, Caller] = {}
        keys = list(settings.api_key)
        variable = os.environ.get("FORERUN_API_KEY", "")
        if variable.strip():
            keys.append(clean_key(variable))
        for key in keys:
            digest = _digest(key)
            self._callers[digest] = Caller(f"key {digest.hex()}", operator=True)
        file = Path(settings.api_keys)
        for name, key in read_keys(file) if settings.api_keys else ():
            if _digest(key) in self._callers:
                raise ConfigError(
                    f"{file}: the key of {name} is given twice: one key is one tenant"
                )
            self._callers[_digest(key)] = Caller(name, operator=False)
        self._shared = settings.share_memory
        one_tenant = self._shared or is_loopback(settings.host)
        self._without_keys = Caller("" if one_tenant else None)

    def __len__(self) -> int:
        return len(self._callers)

    @property
    def clients(self) -> set[str]:
        """Names of the clients in the file; empty if the memory is shared."""
        if self._shared:
            return set()
        callers = self._callers.values()
        return {caller.tenant for caller in callers if caller.tenant and not caller.operator}

    def find(self, authorization: str) -> Caller | None:
        """Return the sender of this Authorization header, or None for an invalid key.

        Every key is compared in constant time, so that timing reveals nothing.
        """
        if not self._callers:
            return self._without_keys
        scheme, _, key = authorization.partition(" ")
        digest = _digest(key.strip())
        found = [
            caller for known, caller in self._callers.items() if hmac.compare_digest(known, digest)
        ]
        if scheme.lower() != "bearer" or not found:
            return None
        return Caller("", found[0].operator) if self._shared else found[0]


def read_keys(file: Path) -> list[tuple[str, str]]:
    """Read (name, key) from each line that is neither empty nor a comment. Raises ConfigError."""
    try:
        lines = text_of(file).splitlines()
    except UnreadableError as error:
        raise ConfigError(f"the keys in {file} cannot be read: {error}") from None
    keys: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        parts = line.split()
        if not parts or parts[0].startswith("#"):
            continue
        where = f"{file}, line {number}"
        if len(parts) != 2:
            raise ConfigError(f"{where}: give a name and a key, with a space between them")
        name, key = parts
        if name in keys:
            raise ConfigError(f"{where}: the name {name!r} was there before")
        keys[name] = clean_key(key)
    if not keys:
        raise ConfigError(f"{file} has no keys: write a name and a key on each line")
    return list(keys.items())


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


# ------------------------------------------------------------ hosts and origins


class HostPolicy:
    """The hosts that a server answers to, and the origins of web pages that may call it.

    A web page elsewhere can resolve its own name to this machine (DNS rebinding), or post here
    without asking (a simple request). The former sends a foreign name in Host, the latter a foreign
    Origin. An address in Host is safe, because only names can be rebound.
    """

    def __init__(self, settings: Settings) -> None:
        self.loopback = is_loopback(settings.host)
        own = () if self.loopback else (settings.host, socket.gethostname())
        self.names = {"localhost", *(host_of(name) for name in (*own, *settings.allowed_hosts))}
        self.origins = settings.allowed_origins

    def refusal(self, headers: Headers) -> ApiError | None:
        """Return the error for a request that is not meant for this server."""
        host = headers.get("host", "")
        origin = headers.get("origin")
        if host and not self._is_own(host):
            message = f"this server does not answer to {host[:SHOWN]!r}"
            advice = "if that is its name, start it with --allowed-hosts NAME"
            return ApiError(421, f"{message}: {advice}")
        if origin is None or _same_host(origin, host) or {origin, ANY} & set(self.origins):
            return None
        message = f"pages of {origin[:SHOWN]!r} may not ask this server"
        advice = "if they should, start it with --allowed-origins ORIGIN"
        return ApiError(403, f"{message}: {advice}")

    def _is_own(self, value: str) -> bool:
        host = host_of(value)
        if self.names & {host, ANY}:
            return True
        return host is not None and is_address(host) and (not self.loopback or is_loopback(host))


def host_of(value: str) -> str | None:
    """Return the normalized host of HOST, HOST:PORT or [ADDRESS]:PORT, or None if malformed."""
    if is_address(value):
        return value.lower()
    match = re.fullmatch(r"(?:\[([^\[\]]+)\]|([^:\[\]]+))(?::\d*)?", value)
    return (match[1] or match[2]).lower().removesuffix(".") if match else None


def _same_host(origin: str, host: str) -> bool:
    """Return True if a page's origin is the host it calls."""
    scheme, _, authority = origin.lower().partition("://")
    port = DEFAULT_PORTS.get(scheme)
    return port is not None and authority.removesuffix(port) == host.lower().removesuffix(port)


# ------------------------------------------------------------ middleware


def add_access_control(app: Starlette, settings: Settings, keys: ApiKeys) -> None:
    app.add_middleware(
        AccessControl, keys=keys, hosts=HostPolicy(settings), bodies=BodyLimiter(settings)
    )
    if settings.allowed_origins:
        # Outside of AccessControl: a preflight carries no key, and pages may read refusals.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After", fields.HEADER],
        )


class AccessControl:
    """Middleware that gives every request an id and checks host, origin, key and body size.

    All checks precede the body. `OPEN` paths need no key: the pages hold no secret, and the
    playground asks for the key itself.
    """

    OPEN = ("/health", "/", "/docs")
    OPEN_BELOW = "/playground/"

    def __init__(self, app: ASGIApp, keys: ApiKeys, hosts: HostPolicy, bodies: BodyLimiter) -> None:
        self.app = app
        self.keys = keys
        self.hosts = hosts
        self.bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        path = scope["path"]
        request_id = re.sub(r"[^\w.-]", "", headers.get("x-request-id", "")[:128])
        request_id = request_id or secrets.token_hex(8)
        REQUEST_ID.set(request_id)
        if not BROWSER_HEADERS & set(headers):
            _assume_json(scope)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        address = scope["client"][0] if scope.get("client") else ""
        error = self._refusal(path, headers, address)
        if error is None:
            with self.bodies.limited(receive) as limited:
                await self.app(scope, limited, send_with_id)
        else:
            await errors.response(error, path)(scope, receive, send_with_id)

    def _refusal(self, path: str, headers: Headers, address: str) -> ApiError | None:
        misdirected = self.hosts.refusal(headers)
        if misdirected:
            return misdirected
        caller = self.keys.find(headers.get("authorization", ""))
        if caller is not None:
            CALLER.set(caller)
            CLIENT.set(caller.tenant or address)
        elif path not in self.OPEN and not path.startswith(self.OPEN_BELOW):
            message = "give a valid key: Authorization: Bearer KEY"
            return ApiError(401, message, None, "invalid_api_key")
        return self.bodies.refusal(headers)


def _assume_json(scope: Scope) -> None:
    """Treat a body without Content-Type as JSON; under /api also a form, as Ollama does.

    `curl -d` labels bodies as forms. This is only for clients that are no browsers: for web pages
    elsewhere, the content type decides whether the browser asks before it posts. A form of an old
    browser has a content type and no Origin, so forms are accepted only where Ollama's clients
    need it.
    """
    headers = MutableHeaders(scope=scope)
    content_type = headers.get("content-type")
    is_form = content_type == FORM and scope["path"].startswith("/api/")
    if content_type is None or is_form:
        headers["content-type"] = "application/json"
