"""A cluster from its beginning to its end."""

from __future__ import annotations

import logging
import signal
import socket
import sys
from functools import partial
from pathlib import Path
from threading import Lock, Thread

from starlette.applications import Starlette

from forerun.cluster.crew import RayCrew, on_ray
from forerun.cluster.door import make_door
from forerun.cluster.memory import renewed
from forerun.cluster.plan import Plan, read_plan
from forerun.errors import ForerunError
from forerun.server.descriptors import raise_limit
from forerun.server.listen import is_loopback
from forerun.server.run import serve, start_logging
from forerun.server.tenants import Callers
from forerun.utils import json_line

log = logging.getLogger("forerun.server")
DESCRIPTORS = 2  # of a connection: its own, and one to a replica


def run(plan: Plan, listener: socket.socket, verbose: bool, file: Path) -> int:
    """Serve a plan on a socket of `listen` until a signal ends it; SIGUSR1 reads its file again.
    Returns the exit code. Raises ForerunError."""
    start_logging(verbose, sys.stderr.isatty())
    raise_limit()
    settings = plan.settings
    if not is_loopback(settings.host) and not Callers.of(settings):
        log.warning(
            "everybody who reaches %s may use this cluster: give api_key or api_keys", settings.host
        )
    try:
        with on_ray(plan) as crew:
            door = make_door(plan, crew)
            signal.signal(
                signal.SIGUSR1,
                lambda *_: Thread(target=_renew, args=(door, crew, file), daemon=True).start(),
            )
            return serve(door, settings, listener, partial(announcement, plan), DESCRIPTORS)
    finally:
        listener.close()


_RENEWING = Lock()


def _renew(app: Starlette, crew: RayCrew, file: Path) -> None:
    """Replace all replicas by those that the file says now; what is wrong with it is logged, and
    nothing changes."""
    if not _RENEWING.acquire(blocking=False):
        log.warning("replicas are being replaced already: send SIGUSR1 when that is done")
        return
    try:
        plan = renewed(crew.plan, read_plan(file))
        crew.renew(plan)
        app.state.service.plan = plan
        log.warning("all replicas are those of %s now", file)
    except ForerunError as error:
        log.error("replicas are not replaced: %s", error)
    finally:
        _RENEWING.release()


def announcement(plan: Plan, where: str) -> str:
    """One line that ends with the address."""
    facts = {model.name: model.replicas.min for model in plan.models}
    return f"forerun: serving replicas {json_line(facts, ascii_only=True)} on {where}"
