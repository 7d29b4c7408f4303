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
    file: Annotated[Path, typer.Argument(help="A TOML file with the models and their replicas.", metavar="CONFIG")],
    check: Annotated[bool, typer.Option("--check", help="Say what would be started, and start nothing.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log every request.")] = False,
) -> None:
    """Serve models by replicas on Ray, behind one address; each request goes where its beginning is known."""
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
        _ask_for_key()
    from forerun.cluster.run import run

    sys.exit(run(plan, listener, verbose, file))


def _need_extra(*more: str) -> None:
    missing = next((name for name in ("fastapi", "prometheus_client", "uvicorn", *more) if not find_spec(name)), None)
    if missing:
        raise ConfigError(f"a cluster needs {missing}: pip install 'forerun[cluster]'")


def _ask_for_key() -> None:
    """Make a Ray that is started by this process ask for a key, a new one unless there is one: its ports are open to
    all who reach the machine, and who may use them may run programs. Ray reads which when it is imported: this comes
    before."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    if not any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
