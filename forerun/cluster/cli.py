"""The verb `deploy`. What it imports is imported when it runs."""

from __future__ import annotations

import os
import secrets
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from forerun.errors import ConfigError


def deploy(
    file: Annotated[
        Path,
        typer.Argument(help="A TOML file with the models and their replicas.", metavar="CONFIG"),
    ],
    check: Annotated[
        bool, typer.Option("--check", help="Say what would be started, and start nothing.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log every request.")] = False,
) -> None:
    """Serve models by replicas on Ray, behind one address; each request goes where its beginning is
    known."""
    _need_extra()
    from forerun.cluster.memory import divided
    from forerun.cluster.plan import read_plan, summary
    from forerun.server.listen import listen
    from forerun.server.tenants import Callers

    plan = divided(read_plan(file))
    Callers.of(plan.settings)
    if check:
        print("\n".join(summary(plan)))
        return
    _need_extra("ray")
    listener = listen(plan.settings)
    if not plan.address:
        _keep_to_this_machine()
    from forerun.cluster.run import run

    sys.exit(run(plan, listener, verbose, file))


def _need_extra(*more: str) -> None:
    missing = next(
        (
            name
            for name in ("fastapi", "httptools", "prometheus_client", "uvicorn", *more)
            if not find_spec(name)
        ),
        None,
    )
    if missing:
        raise ConfigError(f"a cluster needs {missing}: pip install 'forerun[cluster]'")


def _keep_to_this_machine() -> None:
    """Make a Ray that is started by this process listen on loopback addresses, its pages of metrics
    among them, and ask
    for a key, a new one unless there is one: who may use its ports may run programs. Ray reads both
        when it is
    imported: this comes before."""
    os.environ.setdefault(
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0"
    )  # as on those systems: no other machine takes part
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    if not any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
