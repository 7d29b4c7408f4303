"""What a server may be told besides the engine's own options, from flags or a file."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from forerun.config import Config
from forerun.errors import ConfigError, one_line, suggest
from forerun.server.tenants import clean_key
from forerun.utils import UnreadableError, check_integer, check_number, text_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How the server listens, whom it serves and how much.

    Args:
        host: address to listen on; 127.0.0.1 is this machine only.
        port: port to listen on; 0 takes a free one and says which.
        api_key: keys of the operator, besides FORERUN_API_KEY; everything but /health then needs
            one.
        api_keys: a file with keys of clients, one NAME KEY on each line; they learn nothing of each
            other.
        share_memory: requests of all clients draft from each other's texts; without it only those
            with the same key do.
        served_name: what the model is called in the API; the model's own name by default.
        allowed_hosts: names that clients may call the server by, besides localhost and, where
            others reach it, addresses and the machine's own name; * takes any.
        allowed_origins: web pages of these origins may call (CORS), besides the server's own; *
            takes any.
        max_queue: requests that may wait for a place; more are told to come back (429).
        max_body: largest request body in bytes.
        max_bodies: most bytes of request bodies that are held at once, the first 64 KiB of each not
            counted (503).
        max_unread: most bytes of answers that are held for clients that do not read them, divided
            among the requests; a request pauses when its share is full.
        max_connections: most connections at once; the one that waits longest for its client makes
            room (503).
        max_prompt: most tokens of one prompt; 0 leaves it to the model's context.
        timeout: most seconds one request may take; 0 for no limit.
        header_timeout: seconds until a connection has sent the headers of a request; 0 for no
            limit.
        body_timeout: seconds that a request's body may take; 0 for no limit.
        write_timeout: seconds that a client may take nothing of its answer; 0 for no limit.
        shutdown_timeout: seconds that running requests are given to end after SIGTERM.
        indices: a folder of indices (forerun index --out FOLDER/NAME): all clients draft from those
            that lie in it, and the operator loads and unloads more of it at /v1/indices.
        metrics_compat: vllm adds its names for our counters.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: tuple[str, ...] = ()
    api_keys: str = ""
    share_memory: bool = False
    served_name: str = ""
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    max_queue: int = 256
    max_body: int = 8 << 20
    max_bodies: int = 64 << 20
    max_unread: int = 64 << 20
    max_connections: int = 512
    max_prompt: int = 0
    timeout: float = 600.0
    header_timeout: float = 10.0
    body_timeout: float = 30.0
    write_timeout: float = 60.0
    shutdown_timeout: float = 30.0
    indices: str = ""
    metrics_compat: str = "none"

    def __post_init__(self) -> None:
        for name, low, high in (
            ("port", 0, 65535),
            ("max_queue", 0, 1 << 20),
            ("max_body", 1, 1 << 40),
            ("max_bodies", 1, 1 << 40),
            ("max_unread", 1, 1 << 40),
            ("max_connections", 1, 1 << 20),
            ("max_prompt", 0, 1 << 31),
            ("timeout", 0, 1 << 31),
            ("header_timeout", 0, 1 << 31),
            ("body_timeout", 0, 1 << 31),
            ("write_timeout", 0, 1 << 31),
            ("shutdown_timeout", 0, 1 << 31),
        ):
            check = check_number if name.endswith("timeout") else check_integer
            check(name, getattr(self, name), low, high)
        if not isinstance(self.host, str) or not self.host or not isinstance(self.served_name, str):
            raise ConfigError(
                f"host={self.host!r} and served_name={self.served_name!r} must be texts, host not empty"
            )
        if self.metrics_compat not in ("none", "vllm"):
            raise ConfigError(
                f"there is no metrics_compat {self.metrics_compat!r}: give none or vllm"
            )
        for name in ("api_key", "allowed_hosts", "allowed_origins"):
            value = getattr(self, name)
            values = (value,) if isinstance(value, str) else value
            if not isinstance(values, (list, tuple)) or not all(
                isinstance(v, str) and v for v in values
            ):
                raise ConfigError(f"{name} must be texts that are not empty")
            object.__setattr__(
                self, name, tuple(map(clean_key, values)) if name == "api_key" else tuple(values)
            )
        if not all(
            isinstance(name, str) for name in (self.api_keys, self.indices)
        ) or not isinstance(self.share_memory, bool):
            raise ConfigError(
                "api_keys must be the name of a file, indices of a folder, share_memory true or false"
            )


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """What a TOML file holds; `what` it is, for errors. Raises ConfigError."""
    try:
        return tomllib.loads(text_of(path))
    except UnreadableError as error:
        wrong = "is not TOML" if error.line else "cannot be read"
        raise ConfigError(f"the {what} file {path} {wrong}: {error}") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"the {what} file {path} is not TOML: {one_line(str(error))}") from None


def read_file(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of the engine and of the server from a TOML file; flags may still override them.
    Raises ConfigError."""
    options = read_toml(path, "configuration")
    options = {name.replace("-", "_"): value for name, value in options.items()}
    engine, server = ({f.name for f in fields(kind)} for kind in (Config, Settings))
    for name in options:
        if name not in engine | server:
            raise ConfigError(
                f"{path}: there is no option {name!r}: {suggest(name, sorted(engine | server))}"
            )
    return (
        {name: value for name, value in options.items() if name in engine},
        {name: value for name, value in options.items() if name in server},
    )
