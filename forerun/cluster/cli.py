"""The verb `deploy`. It imports its modules when it runs."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path
from typing import Annotated

import typer

from forerun.server.cli import require_packages
from forerun.server.listen import listen


def deploy(
    file: Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file with the models.")],
    check: Annotated[bool, typer.Option("--check", help="Show what would be started.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log every request.")] = False,
) -> None:
    """Serve models by replicas on Ray Serve, behind one address."""
    require_packages("a cluster", "cluster", "ray")
    from forerun.cluster.plan import divide_machine, read_plan, summary

    plan = divide_machine(read_plan(file))
    if check:
        print(summary(plan))
        return
    listener = listen(plan.settings)
    if not plan.address:
        # Replicas inherit this. Ray has many threads, and memory that is freed in the arena of one
        # is not reused by others: large requests would leave hundreds of megabytes in each replica.
        os.environ.setdefault("MALLOC_ARENA_MAX", "2")
        # Whoever reaches the ports of Ray can run programs: it listens on loopback, as on systems
        # where no other machine takes part, and requires a token. Ray reads this on its import.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        if not os.environ.get("RAY_AUTH_TOKEN") and not os.environ.get("RAY_AUTH_TOKEN_PATH"):
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    from forerun.cluster.serving import run

    sys.exit(run(plan, listener, verbose))
