"""Which names the server answers to, and which web pages may ask it.

A page elsewhere can make its own name lead to this machine (DNS rebinding) and can post here without asking first. The
one sends a name that is not ours in Host, the other its own origin. An address in Host is no page's doing: what is
rebound is always a name.
"""

from __future__ import annotations

import re
import socket

from starlette.datastructures import Headers

from forerun.server.addresses import is_address, is_loopback
from forerun.server.errors import ApiError
from forerun.server.settings import Settings

ANY = "*"
PORTS = {"http": ":80", "https": ":443"}  # what a browser leaves out
SHOWN = 100  # characters of what a client sent, in an error message


class Hosts:
    """The names and addresses of one server, and the origins that may ask it besides its own pages."""

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
