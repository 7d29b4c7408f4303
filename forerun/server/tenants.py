"""Who asks, and what that opens: requests of one tenant share a memory and a prefix cache, with
nobody else's.

A tenant is an API key, and within it whoever gives the same `cache_salt`. Without keys everybody on
this machine is one person; from elsewhere every request is a tenant of its own, unless the operator
says that all may share."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.errors import ConfigError
from forerun.server.listen import is_loopback
from forerun.types import SALT
from forerun.utils import UnreadableError, text_of

if TYPE_CHECKING:
    from forerun.server.settings import Settings

LONGEST_KEY = 512  # characters


@dataclass(frozen=True, slots=True)
class Caller:
    """Somebody who may ask.

    Attributes:
        tenant: whose memory requests share; None for one of its own to each.
        operator: may read what is counted over all tenants.
    """

    tenant: str | None = ""
    operator: bool = True


ANYBODY = Caller()
CALLER: ContextVar[Caller] = ContextVar(
    "caller", default=ANYBODY
)  # of the request that is worked on


def tenant_of(salt: str | None) -> str:
    """The tenant of the request that is worked on, which gave this `cache_salt`."""
    tenant = CALLER.get().tenant
    if salt:
        return f"{tenant or ''}{SALT}{salt}"  # no name of a key has a line end
    return f"{SALT}{SALT}{secrets.token_hex(16)}" if tenant is None else tenant


class Callers:
    """Everybody with a key; without any, everybody.

    Keys given one by one are the operator's. Those of a file, one `NAME KEY` on each line, are
    clients': they read nothing that is counted over all.
    """

    def __init__(self, keys: Sequence[str], file: Path | None, host: str, shared: bool) -> None:
        """Raises ConfigError."""
        known = {_digest(key): Caller(f"key {_digest(key).hex()}", operator=True) for key in keys}
        for name, key in read_keys(file) if file else ():
            if _digest(key) in known:
                raise ConfigError(
                    f"{file}: the key of {name} is given twice: one key is one tenant"
                )
            known[_digest(key)] = Caller(name, operator=False)
        self._known = known
        self._anybody = Caller("" if shared or is_loopback(host) else None)
        self._shared = shared

    @classmethod
    def of(cls, settings: Settings) -> Callers:
        """Who may ask, by the settings and FORERUN_API_KEY. Raises ConfigError."""
        named = os.environ.get("FORERUN_API_KEY", "")
        keys = [*settings.api_key, *([clean_key(named)] if named.strip() else [])]
        return cls(
            keys,
            Path(settings.api_keys) if settings.api_keys else None,
            settings.host,
            settings.share_memory,
        )

    def __len__(self) -> int:
        return len(self._known)

    @property
    def clients(self) -> set[str]:
        """The names of clients with keys in the file."""
        named = {
            caller.tenant
            for caller in self._known.values()
            if caller.tenant and not caller.operator
        }
        return set() if self._shared else named

    def find(self, authorization: str) -> Caller | None:
        """Who sends this header; None is nobody. All keys are compared, so that the time says
        nothing."""
        if not self._known:
            return self._anybody
        scheme, _, key = authorization.partition(" ")
        given = _digest(key.strip())
        found = [
            caller for digest, caller in self._known.items() if hmac.compare_digest(digest, given)
        ]
        if scheme.lower() != "bearer" or not found:
            return None
        return Caller("", found[0].operator) if self._shared else found[0]


def read_keys(file: Path) -> list[tuple[str, str]]:
    """(name, key) of each line of a file that is neither empty nor a comment. Raises
    ConfigError."""
    try:
        lines = text_of(file).splitlines()
    except UnreadableError as error:
        raise ConfigError(f"the keys in {file} cannot be read: {error}") from None
    found: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        parts = line.split()
        if not parts or parts[0].startswith("#"):
            continue
        if len(parts) != 2:
            raise ConfigError(
                f"{file}, line {number}: give a name and a key, with a space between them"
            )
        name, key = parts
        if name in found:
            raise ConfigError(f"{file}, line {number}: the name {name!r} was there before")
        found[name] = clean_key(key)
    if not found:
        raise ConfigError(f"{file} has no keys: write a name and a key on each line")
    return list(found.items())


def clean_key(key: str) -> str:
    """A key without the white space around it, which files and variables end in. Raises
    ConfigError."""
    key = key.strip()
    if (
        not key
        or len(key) > LONGEST_KEY
        or not key.isascii()
        or not key.isprintable()
        or " " in key
    ):
        raise ConfigError(
            f"an API key has 1 to {LONGEST_KEY} visible ASCII characters, and no spaces"
        )
    return key


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
