"""The verbs `serve` and `batch`; the server itself is imported when they run."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.cli.flags import ENGINE, ENGINE_FLAGS, Group, with_flags
from forerun.config import Config
from forerun.errors import ConfigError
from forerun.models.hub import find_model
from forerun.server.listen import listen
from forerun.server.settings import RANGES, Settings, read_file

LISTS = dict.fromkeys(("api_key", "allowed_hosts", "allowed_origins"), list[str])
BYTES = {name: getattr(Settings(), name) for name in ("max_body", "max_bodies", "max_unread")}
SERVER = Group(
    "server",
    Settings,
    "Server",
    LISTS,
    defaults={name: f"{size}, which is {size >> 20} MiB" for name, size in BYTES.items()},
    rare=tuple(name for name, *_ in RANGES if name != "port"),
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
    require_packages("the server", "serve")
    from forerun.server.auth import ApiKeys

    ApiKeys(chosen)  # reports an unreadable file of keys before the model loads
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
    require_packages("the server", "serve")
    from forerun.server.batch import run

    run(source, target, config)


def require_packages(user: str, extra: str, *more: str) -> None:
    """Raise ConfigError if a package of the server, or one of `more`, is not installed."""
    for name in ("fastapi", "httptools", "prometheus_client", "uvicorn", *more):
        if find_spec(name) is None:
            raise ConfigError(f"{user} needs {name}: pip install 'forerun[{extra}]'")
