"""The replicas of a plan on Ray Serve: started, asked, and ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import asdict
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError, TaskCancelledError
from ray.serve.config import AutoscalingConfig, ProxyLocation, RequestRouterConfig
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.types import Message

from forerun.cluster.envelope import Envelope, Hold
from forerun.cluster.ledger import new_ledger
from forerun.cluster.plan import Model, Plan, replica_settings
from forerun.cluster.relay import LostError
from forerun.cluster.replica import Replica
from forerun.cluster.router import PrefixRouter
from forerun.cluster.sockets import socket_directory
from forerun.cluster.wire import Line, place
from forerun.errors import BusyError, ForerunError, one_line
from forerun.server.service import UnavailableError
from forerun.server.tenants import Callers

log = logging.getLogger("forerun.server")
SPARE = 64  # calls of a replica besides its requests: how it is, what it counts
SOON = (
    0.1  # seconds after which Ray is told of a request that goes past it: most are not over sooner
)
# seconds between two questions to a replica whether it works; three without an answer are its end
HEALTH = 5.0


class RayCrew:
    """The replicas of all models, each model a deployment."""

    def __init__(self, plan: Plan, sockets: str) -> None:
        """Start them and wait until they are up; those on this machine listen in a directory that
        nobody else may enter. Raises ForerunError."""
        self.plan, self._sockets = plan, sockets
        self.ledgers = {
            model.name: new_ledger(f"model-{i}", plan.routing)
            for i, model in enumerate(plan.models)
        }
        self._handles: dict[str, DeploymentHandle] = {}
        self._start(plan)

    def renew(self, plan: Plan) -> None:
        """Replace all replicas by those of another plan for the same models, some at a time: what
        an old one works on may end within `shutdown_timeout`. Returns when it is done. Raises
        ForerunError."""
        self._start(plan)
        self.plan = plan

    def _start(self, plan: Plan) -> None:
        for i, model in enumerate(plan.models):
            name = f"model-{i}"
            application = _deployment(plan, model, name).bind(
                model.options | {"threads": plan.threads(model)},
                replica_settings(plan, model),
                bool(Callers.of(plan.settings)),
                self._sockets,
            )
            try:
                handle = serve.run(application, name=name, route_prefix=None)
            except RuntimeError as error:
                raise ForerunError(
                    f"model {model.name!r} does not start: {_reason(name, error)}"
                ) from None
            self._handles[model.name] = handle

    async def ask(self, model: str, envelope: Envelope) -> AsyncGenerator[list[Message], None]:
        """What a replica answers. Raises LostError, BusyError, UnavailableError."""
        replica = envelope.replica or self.ledgers[model].choose(
            envelope.id, envelope.prefixes, envelope.avoid
        )
        line = await Line.to(place(self._sockets, replica)) if replica else None
        # without a line it begins, it is on another machine, or there is none and Ray starts one
        by = (
            self._past_ray(model, line, replica, envelope)
            if replica and line
            else self._called(model, envelope)
        )
        async with aclosing(by) as answer:
            async for messages in answer:
                yield messages

    async def _past_ray(
        self, model: str, line: Line, replica: str, envelope: Envelope
    ) -> AsyncGenerator[list[Message], None]:
        """The same over a socket. Ray is to count it, unless it is over soon."""
        count = self._handles[model].hold.remote
        counting = asyncio.get_running_loop().call_later(SOON, count, Hold(envelope.id, replica))
        try:
            async with aclosing(line.ask(envelope)) as answer:
                async for messages in answer:
                    yield messages
        finally:
            counting.cancel()

    async def _called(self, model: str, envelope: Envelope) -> AsyncGenerator[list[Message], None]:
        """The same by a call of Ray."""
        answer = self._handles[model].options(stream=True).answer.remote(envelope)
        try:
            async for messages in answer:
                yield messages
        except (RayActorError, TaskCancelledError):
            raise LostError from None
        except BackPressureError:
            raise BusyError(
                "no replica has a place for this request: try again in a moment"
            ) from None
        except DeploymentUnavailableError:
            raise UnavailableError(f"no replica of {model} is up") from None
        finally:
            answer.cancel()


def _reason(name: str, error: RuntimeError) -> str:
    """Why a deployment has failed: the last error of forerun's in what Ray reports of its replicas,
    if there is one."""
    application = serve.status().applications.get(name)
    told = [d.message for d in application.deployments.values()] if application else []
    lines = [
        line.partition("forerun.errors.")[2] for message in told for line in message.splitlines()
    ]
    ours = [line.partition(": ")[2] for line in lines if line]
    return one_line(ours[-1] if ours else str(error))


@contextmanager
def on_ray(plan: Plan) -> Iterator[RayCrew]:
    """Replicas until the end of the block. Raises ForerunError."""
    options: dict[str, Any] = {"address": plan.address}
    if not plan.address:  # with as many processors as the plan says, however many there are
        options = {"num_cpus": plan.processors, "include_dashboard": False}
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
        serve.start(proxy_location=ProxyLocation.Disabled)
        logging.getLogger("ray.serve").setLevel(logging.ERROR)  # what matters of it is told here
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = f"at {plan.address}" if plan.address else "here"
        raise ForerunError(
            f"Ray cannot be reached or started {where}: {one_line(str(error))}"
        ) from None
    try:
        with socket_directory() as sockets:
            yield RayCrew(plan, sockets)
    finally:
        with suppress(Exception):  # it may be gone already
            for i in range(len(plan.models)):
                serve.delete(f"model-{i}")
        ray.shutdown()


def _deployment(plan: Plan, model: Model, name: str) -> serve.Deployment:
    settings, replicas = plan.settings, model.replicas
    at_once = settings.max_queue + model.engine.max_rows + SPARE
    scale: dict[str, Any] = {"num_replicas": replicas.min}
    if replicas.max > replicas.min:
        scale = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=replicas.min,
                initial_replicas=max(
                    1, replicas.min
                ),  # so that a model that does not start is told at once
                max_replicas=replicas.max,
                target_ongoing_requests=replicas.requests,
                downscale_to_zero_delay_s=replicas.idle if not replicas.min else None,
            )
        }
    return serve.deployment(
        Replica,
        name=name,
        ray_actor_options={"num_cpus": plan.threads(model)},
        max_ongoing_requests=at_once,
        max_queued_requests=at_once,
        health_check_period_s=HEALTH,
        health_check_timeout_s=3 * HEALTH,
        graceful_shutdown_timeout_s=settings.shutdown_timeout,
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter,
            request_router_kwargs={"deployment": name, "routing": asdict(plan.routing)},
        ),
        max_constructor_retry_count=1,
        **scale,
    )
