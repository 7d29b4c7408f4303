"""Options of the server, from flags or a TOML file."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from forerun.config import Config
from forerun.errors import ConfigError, one_line, suggest
from forerun.utils import UnreadableError, check_integer, check_number, text_of

MAX_KEY = 512  # characters of an API key
RANGES = (
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
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Addresses, access and limits of the server.

    Args:
        host: Address to listen on; 127.0.0.1 is reachable from this machine only.
        port: Port to listen on; 0 takes a free one and prints it.
        api_key: Keys of the operator, besides FORERUN_API_KEY. With any key, all paths but
            /health and the pages require one.
        api_keys: File with keys of clients, one NAME KEY on each line; clients share no memory.
        share_memory: Requests of all clients share draft memory and prefix cache; by default only
            those with the same key do.
        served_name: Name of the model in the API; the model's own name by default.
        allowed_hosts: Host names that clients may use, besides localhost and, if the server is
            reachable from elsewhere, addresses and the machine's own name; * allows any.
        allowed_origins: Origins of web pages that may call (CORS), besides the server's own; *
            allows any.
        max_queue: Number of requests that may wait for a place; further ones get 429.
        max_body: Maximum size of a request body in bytes.
        max_bodies: Bytes of request bodies that are held at once, the first 64 KiB of each not
            counted; further ones get 503.
        max_unread: Bytes of answers that are held for clients that do not read them, divided among
            the requests; a request pauses when its share is full.
        max_connections: Number of open connections; further ones replace the connection that has
            waited longest for its client, or get 503.
        max_prompt: Maximum number of tokens of a prompt; 0 for the model's context.
        timeout: Seconds that a request may take; 0 for no limit.
        header_timeout: Seconds until a connection has sent the headers of a request; 0 for no
            limit.
        body_timeout: Seconds until a request's body has arrived; 0 for no limit.
        write_timeout: Seconds that a client may take to read any of its answer; 0 for no limit.
        shutdown_timeout: Seconds that running requests have to end after SIGTERM.
        indices: Folder of indices (forerun index --out FOLDER/NAME): all clients draft from those
            in it, and the operator loads and unloads more of it at /v1/indices.
        metrics_compat: vllm adds vLLM's names for the metrics.
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
        """Check and normalize the values. Raises ConfigError."""
        for name, low, high in RANGES:
            check = check_number if name.endswith("timeout") else check_integer
            check(name, getattr(self, name), low, high)
        if not isinstance(self.host, str) or not self.host or not isinstance(self.served_name, str):
            raise ConfigError(
                f"host={self.host!r} and served_name={self.served_name!r} must be texts,"
                " host not empty"
            )
        if self.metrics_compat not in ("none", "vllm"):
            raise ConfigError(
                f"there is no metrics_compat {self.metrics_compat!r}: give none or vllm"
            )
        for name in ("api_key", "allowed_hosts", "allowed_origins"):
            value = getattr(self, name)
            values = (value,) if isinstance(value, str) else value
            if not isinstance(values, list | tuple) or not all(
                isinstance(v, str) and v for v in values
            ):
                raise ConfigError(f"{name} must be texts that are not empty")
            if name == "api_key":
                values = map(clean_key, values)
            object.__setattr__(self, name, tuple(values))
        names_are_texts = isinstance(self.api_keys, str) and isinstance(self.indices, str)
        if not names_are_texts or not isinstance(self.share_memory, bool):
            raise ConfigError(
                "api_keys must be the name of a file, indices of a folder,"
                " share_memory true or false"
            )


def clean_key(key: str) -> str:
    """Strip the white space around an API key, such as a file's line end. Raises ConfigError."""
    key = key.strip()
    printable = key.isascii() and key.isprintable() and " " not in key
    if not key or len(key) > MAX_KEY or not printable:
        raise ConfigError(f"an API key has 1 to {MAX_KEY} visible ASCII characters, and no spaces")
    return key


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """Read a TOML file; `what` names its kind in errors. Raises ConfigError."""
    try:
        return tomllib.loads(text_of(path))
    except UnreadableError as error:
        problem = "is not TOML" if error.line else "cannot be read"
        raise ConfigError(f"the {what} file {path} {problem}: {error}") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"the {what} file {path} is not TOML: {one_line(str(error))}") from None


def read_file(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read engine options and server options from a TOML file. Raises ConfigError."""
    engine_names = {f.name for f in fields(Config)}
    server_names = {f.name for f in fields(Settings)}
    engine: dict[str, Any] = {}
    server: dict[str, Any] = {}
    for key, value in read_toml(path, "configuration").items():
        name = key.replace("-", "_")
        if name not in engine_names | server_names:
            advice = suggest(name, sorted(engine_names | server_names))
            raise ConfigError(f"{path}: there is no option {name!r}: {advice}")
        if name in engine_names:
            engine[name] = value
        if name in server_names:
            server[name] = value
    return engine, server
