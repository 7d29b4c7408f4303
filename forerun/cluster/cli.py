"""The verb `deploy`. What it imports is imported when it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from forerun.cluster.key import ask_for_key
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
        ask_for_key()
    from forerun.cluster.run import run

    sys.exit(run(plan, listener, verbose, file))


def _need_extra(*more: str) -> None:
    from importlib.util import find_spec

    missing = next((name for name in ("fastapi", "prometheus_client", "uvicorn", *more) if not find_spec(name)), None)
    if missing:
        raise ConfigError(f"a cluster needs {missing}: pip install 'forerun[cluster]'")
