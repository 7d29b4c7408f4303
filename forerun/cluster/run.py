"""A cluster from its beginning to its end."""

from __future__ import annotations

import json
import logging
import socket
import sys

from forerun.cluster.crew import on_ray
from forerun.cluster.door import make_door
from forerun.cluster.plan import Plan
from forerun.server.addresses import is_loopback
from forerun.server.run import Server, start_logging
from forerun.server.tenants import Callers

log = logging.getLogger("forerun.server")


def run(plan: Plan, listener: socket.socket, verbose: bool) -> int:
    """Serve a plan on a socket of `listen` until a signal ends it. Returns the exit code. Raises ForerunError."""
    start_logging(verbose, sys.stderr.isatty())
    settings = plan.settings
    if not is_loopback(settings.host) and not Callers.of(settings):
        log.warning("everybody who reaches %s may use this cluster: give api_key or api_keys", settings.host)
    try:
        with on_ray(plan) as crew:
            listener.listen(2048)
            host, port = listener.getsockname()[:2]
            where = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            print(announcement(plan, where), file=sys.stderr, flush=True)
            server = Server(make_door(plan, crew), settings)
            server.run(sockets=[listener])
            return 0 if server.started else 1
    finally:
        listener.close()


def announcement(plan: Plan, where: str) -> str:
    """One line that ends with the address."""
    facts = {model.name: model.replicas.min for model in plan.models}
    return f"forerun: serving replicas {json.dumps(facts)} on {where}"
