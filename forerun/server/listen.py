"""The listening socket, which is bound before the model loads: a used port is known at once."""

from __future__ import annotations

import errno
import socket
from ipaddress import ip_address

from forerun.errors import ConfigError
from forerun.server.settings import Settings


def is_address(host: str) -> bool:
    """Return True if a host is an IP address rather than a name."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return True if a host is reachable from this machine only."""
    return host == "localhost" or (is_address(host) and ip_address(host).is_loopback)


def listen(settings: Settings) -> socket.socket:
    """Bind a socket to the host and port of the settings. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # asyncio sets TCP_NODELAY only on sockets with an explicit protocol.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        reason = (error.strerror or str(error)).lower()
        where = f"cannot listen on {settings.host}:{settings.port}: {reason}"
        raise ConfigError(f"{where}; {_advice(error)}") from None
    return listener


def _advice(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "another program has it: give another --port, or --port 0 for any that is free"
    if error.errno in (errno.EACCES, errno.EPERM):
        return "give a --port from 1024 up"
    return (
        "give a --host of this machine, such as 127.0.0.1 for itself alone or 0.0.0.0 for everybody"
    )
