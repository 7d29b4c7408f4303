"""The verbs `serve` and `batch`; the server itself is imported when they run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.cli.flags import ENGINE, ENGINE_FLAGS, Group, with_flags
from forerun.config import Config
from forerun.errors import ConfigError
from forerun.models.hub import find_model
from forerun.server.listen import listen
from forerun.server.settings import Settings, read_file

LISTS = dict.fromkeys(("api_key", "allowed_hosts", "allowed_origins"), list[str])
LIMITS = (
    *("max_queue", "max_body", "max_bodies", "max_unread", "max_connections", "max_prompt"),
    *("timeout", "header_timeout", "body_timeout", "write_timeout", "shutdown_timeout"),
)
BYTES = {name: getattr(Settings(), name) for name in ("max_body", "max_bodies", "max_unread")}
SERVER = Group(
    "server",
    Settings,
    "Server",
    LISTS,
    defaults={name: f"{size}, which is {size >> 20} MiB" for name, size in BYTES.items()},
    rare=LIMITS,
    rare_panel="Server limits",
)
FILE = Annotated[
    Path | None, typer.Option("--config", help="TOML file with any of the options below.")
]


@with_flags(ENGINE, SERVER)
def serve(
    file: FILE = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log every request.")] = False,
    *,
    config: dict[str, Any],
    server: dict[str, Any],
) -> None:
    """Serve a model through OpenAI's API, with a playground at / that shows the speculation."""
    engine, settings = read_file(file) if file else ({}, {})
    options = engine | config
    chosen = Settings(**(settings | server))
    find_model(Config.of(**options).model)
    _require_extra()
    from forerun.server.auth import ApiKeys

    ApiKeys.of(chosen)  # reports an unreadable file of keys before the model loads
    listener = listen(chosen)
    from forerun.server.run import run

    sys.exit(run(options, chosen, listener, verbose))


@with_flags(ENGINE_FLAGS)
def batch(
    source: Annotated[Path, typer.Argument(help="Requests in OpenAI's batch format, one a line.")],
    target: Annotated[
        Path,
        typer.Argument(help="File for the answers; requests answered in it already are skipped."),
    ],
    *,
    config: dict[str, Any],
) -> None:
    """Answer a file of requests; after an interruption, the same command continues."""
    find_model(Config.of(**config).model)
    _require_extra()
    from forerun.server.batch import run

    run(source, target, config)


def _require_extra() -> None:
    try:
        import fastapi  # noqa: F401
        import httptools  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"the server needs {error.name}: pip install 'forerun[serve]'") from None
