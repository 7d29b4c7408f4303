"""What a server may be told besides the engine's own options, from flags or a file."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from forerun.config import Config
from forerun.errors import ConfigError, nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How the server listens, whom it serves and how much.

    Args:
        host: address to listen on; 127.0.0.1 is this machine only.
        port: port to listen on; 0 takes a free one and says which.
        api_key: keys that are accepted, besides FORERUN_API_KEY; everything but /health then needs one.
        served_name: what the model is called in the API; the model's own name by default.
        allowed_origins: web pages of these origins may call (CORS); none by default.
        max_queue: requests that may wait for a place; more are told to come back (429).
        max_body: largest request body in bytes.
        max_prompt: most tokens of one prompt; 0 leaves it to the model's context.
        timeout: most seconds one request may take; 0 for no limit.
        shutdown_timeout: seconds that running requests are given to end after SIGTERM.
        metrics_compat: vllm adds its names for our counters.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: tuple[str, ...] = ()
    served_name: str = ""
    allowed_origins: tuple[str, ...] = ()
    max_queue: int = 256
    max_body: int = 8 << 20
    max_prompt: int = 0
    timeout: float = 600.0
    shutdown_timeout: float = 30.0
    metrics_compat: str = "none"

    def __post_init__(self) -> None:
        for name, low, high in (
            ("port", 0, 65535),
            ("max_queue", 0, 1 << 20),
            ("max_body", 1, 1 << 40),
            ("max_prompt", 0, 1 << 31),
            ("timeout", 0, 1 << 31),
            ("shutdown_timeout", 0, 1 << 31),
        ):
            value = getattr(self, name)
            whole = name not in ("timeout", "shutdown_timeout")
            if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
                raise ConfigError(f"{name}={value!r} must be a {'whole ' if whole else ''}number")
            if not low <= value <= high:
                raise ConfigError(f"{name}={value!r} is out of range: give a number from {low} to {high}")
        if not isinstance(self.host, str) or not self.host or not isinstance(self.served_name, str):
            raise ConfigError(f"host={self.host!r} and served_name={self.served_name!r} must be texts, host not empty")
        if self.metrics_compat not in ("none", "vllm"):
            raise ConfigError(f"there is no metrics_compat {self.metrics_compat!r}: give none or vllm")
        for name in ("api_key", "allowed_origins"):
            value = getattr(self, name)
            values = (value,) if isinstance(value, str) else value
            if not isinstance(values, (list, tuple)) or not all(isinstance(v, str) and v for v in values):
                raise ConfigError(f"{name} must be texts that are not empty")
            object.__setattr__(self, name, tuple(values))


def read_file(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of the engine and of the server from a TOML file; flags may still override them. Raises ConfigError."""
    try:
        options = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the configuration file {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration file {path} is not TOML: {error}") from None
    options = {name.replace("-", "_"): value for name, value in options.items()}
    engine, server = ({f.name for f in fields(kind)} for kind in (Config, Settings))
    for name in options:
        if name not in engine | server:
            raise ConfigError(f"{path}: there is no option {name!r}: {nearest(name, sorted(engine | server))}")
    return (
        {name: value for name, value in options.items() if name in engine},
        {name: value for name, value in options.items() if name in server},
    )
