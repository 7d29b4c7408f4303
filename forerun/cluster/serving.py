"""The cluster: replicas that Ray Serve keeps, and the ingress in front of them.

The ingress runs in the process of `forerun deploy`, behind the same bounded connections as a single
server. Ray's own HTTP proxy has no limits on headers, framing and connections, and is not used.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import ray
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from ray.exceptions import RayActorError, TaskCancelledError
from ray.serve.exceptions import RayServeException
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route, request_response
from starlette.types import Message, Scope

from forerun.cluster.plan import Plan
from forerun.cluster.router import AffinityRouter, affinity_key
from forerun.config import Config
from forerun.errors import ForerunError, one_line, shorten
from forerun.hardware import share_arenas
from forerun.llm import LLM
from forerun.server import app, auth, errors, limits, listen, ollama, streaming
from forerun.server import run as server
from forerun.server.errors import UnavailableError
from forerun.server.monitoring import start_logging
from forerun.server.probe import probe
from forerun.server.settings import Settings
from forerun.utils import json_line

log = logging.getLogger("forerun.server")
MAX_REQUESTS = 1 << 20  # of a deployment: the engines limit their requests themselves
RETRIES = 2  # times that a request is sent again because its replica died
PAGE_SECONDS = 5.0  # in which a replica must answer /health, /ready or /metrics
CHECK_SECONDS = 1.0  # between two checks of all replicas
NICENESS = 5  # of replicas: the ingress of a busy machine goes first
APPLICATION = "forerun-"  # Ray Serve's names of the models begin with it
QUIET = {"enable_access_log": False, "log_level": "ERROR"}
MANAGEMENT = {f"/api/{action}" for action in ollama.ACTIONS}  # refused, whatever they name
LISTS = {"/v1/models": "data", "/api/tags": "models", "/api/ps": "models"}
SCOPE = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers")
HEALTH: Scope = dict(
    zip(SCOPE, ("http", "1.1", "GET", "http", "/health", b"/health", b"", []), strict=True)
)


class Replica:
    """An engine and the application of `forerun serve`, in a process that Ray watches."""

    async def __init__(  # type: ignore[misc]
        self, engine: Config, settings: Settings, keys: auth.ApiKeys, verbose: bool
    ) -> None:
        """Load the model and start its engine."""
        with suppress(OSError):
            os.nice(NICENESS)
        start_logging(verbose, terminal=False)
        llm = LLM(**asdict(engine))
        probe(llm)
        self.app = app.make_app(llm, settings, keys)
        self.service = self.app.state.service
        self._lifespan = self.app.router.lifespan_context(self.app)
        await self._lifespan.__aenter__()  # it ends with the process

    async def answer(self, scope: Scope, body: bytes, key: str) -> AsyncIterator[list[Message]]:
        """Yield the ASGI messages of the answer, each time all that are available.

        The start comes with the first part of the body; before, another replica may answer instead.
        `key` is for the router.
        """
        received: asyncio.Queue[Message] = asyncio.Queue()
        received.put_nowait({"type": "http.request", "body": body})
        sent: asyncio.Queue[Message | None] = asyncio.Queue()
        task = asyncio.create_task(self.app(scope, received.get, sent.put))
        task.add_done_callback(lambda _: sent.put_nowait(None))
        try:
            while not task.done() or not sent.empty():
                batch = [await sent.get()]
                while not sent.empty() or (batch[-1] or {}).get("type") == "http.response.start":
                    batch.append(await sent.get())
                yield [message for message in batch if message is not None]
            task.result()  # raises the error of the application
        finally:
            received.put_nowait({"type": "http.disconnect"})
            task.cancel()

    async def page(self, scope: Scope, key: str = "") -> tuple[str, str]:
        """Return the name of this replica and a page, empty if the application refuses it."""
        messages = [message async for batch in self.answer(scope, b"", key) for message in batch]
        body = b"".join(message.get("body", b"") for message in messages)
        name = serve.get_replica_context().replica_id.unique_id
        return name, body.decode() if messages[0]["status"] == 200 else ""

    async def end_all(self) -> None:
        """End all running requests with an error."""
        self.service.draining = True
        self.service.end_all()

    def check_health(self) -> None:
        """Raise RuntimeError if the engine's thread has ended; Ray then replaces the replica."""
        if self.service.broken:
            raise RuntimeError(self.service.reason)


class Ingress:
    """Checks keys, host names and sizes, and forwards requests to the replicas of their model.

    It is what a `server.run.Server` drains at a signal.

    Attributes:
        gate: the ASGI application.
        draining: new requests are refused since the server shuts down.
        jobs: requests that replicas work on.
    """

    def __init__(self, plan: Plan, handles: Mapping[str, Any], keys: auth.ApiKeys) -> None:
        """`handles` are Ray's `DeploymentHandle`s by the name of the model."""
        self.plan = plan
        self.handles = handles
        self.draining = False
        self.jobs: set[object] = set()
        self._missing = self._needed = {m.name for m in plan.models if m.replicas.min}
        self._calls: list[Any] = []  # of `end_all`; a call without a reference may be dropped
        self._lists: dict[tuple[str, str], list[Any]] = {}
        self._parser = limits.ThrottledThreads(1)
        pages = {"/health": self._health, "/ready": self._ready, "/metrics": self._metrics}
        pages |= dict.fromkeys(LISTS, self._list)
        routes = [Route(path, page) for path, page in pages.items()]
        self.gate = Starlette(
            routes=[*routes, Mount("/", request_response(self._answer))],
            exception_handlers=dict.fromkeys(errors.KINDS, errors.handle),
            lifespan=self._lifespan,
        )
        self.gate.state.service = self
        auth.add_access_control(self.gate, plan.settings, keys)

    def end_all(self) -> None:
        """End all running requests with an error, which their replicas write."""
        self._calls = [handle.broadcast("end_all") for handle in self.handles.values()]

    def stop(self) -> None:
        """Do nothing: replicas end with their application."""

    async def check_replicas(self) -> None:
        """Find out which models that must have a replica have none that answers."""
        self._missing = self._needed - {model for model, _ in await self._pages(HEALTH)}

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        await self.check_replicas()
        checks = asyncio.create_task(self._check_forever())
        yield
        checks.cancel()

    async def _check_forever(self) -> None:
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            try:
                await self.check_replicas()
            except Exception:  # such as one of Ray: the next check may succeed
                log.exception("the replicas cannot be asked whether they are up")
                self._missing = self._needed

    def _check_open(self) -> None:
        if self.draining:
            raise UnavailableError("the server is shutting down")

    async def _answer(self, request: Request) -> Response:
        self._check_open()
        body = await request.body()
        value = None
        with suppress(errors.ApiError, ForerunError, ValueError):  # a replica reports them
            value = await limits.parse_in_thread(body, self._parser)
        value = value if isinstance(value, dict) else {}
        model = self._find_model(value, request.url.path)
        key = affinity_key(value, auth.tenant_of(str(value.get("cache_salt") or "")))
        messages = self._forward(model, _scope(request), body, key)
        return await streaming.unless_disconnected(request, self._begin(messages))

    async def _begin(self, messages: AsyncIterator[Message]) -> Response:
        """Wait for the start of an answer."""
        async with asyncio.timeout(self.plan.settings.timeout or None):
            start = await anext(messages)
        response = StreamingResponse(_body(start, messages), start["status"])
        response.raw_headers = start["headers"]
        return response

    async def _forward(self, model: str, *request: Any) -> AsyncIterator[Message]:
        """Yield the answer of a replica, of another one if the first dies before it has begun."""
        has_begun, job = False, object()
        self.jobs.add(job)
        try:
            for _ in range(RETRIES + 1):
                stream = self.handles[model].options(stream=True).answer.remote(*request)
                try:
                    async for messages in stream:
                        has_begun = True
                        for message in messages:
                            yield message
                    return
                except (RayActorError, TaskCancelledError, RayServeException):
                    if has_begun:
                        break
                finally:
                    stream.cancel()
        finally:
            self.jobs.discard(job)
        raise UnavailableError(f"the replica of {model} that worked on this request has died")

    def _find_model(self, value: Mapping[str, Any], path: str) -> str:
        names = {model.name.removesuffix(":latest"): model.name for model in self.plan.models}
        name = value.get("model") or (value.get("name") if path.startswith("/api/") else None)
        if path.startswith("/v1/models/"):
            name = path.removeprefix("/v1/models/").removesuffix("/")
        if not name or not isinstance(name, str) or path in MANAGEMENT:
            return self.plan.models[0].name
        if name.removesuffix(":latest") not in names:
            known = ", ".join(map(repr, names.values()))
            message = f"there is no model {shorten(name)} here, only {known}"
            raise errors.ApiError(404, message, "model", "model_not_found")
        return names[name.removesuffix(":latest")]

    async def _pages(self, scope: Scope) -> dict[tuple[str, str], str]:
        """Return the answers of all replicas to a GET request, by model and replica."""
        pages: dict[tuple[str, str], str] = {}
        for model, handle in self.handles.items():
            call = handle.broadcast("page", scope)
            with suppress(RayServeException, TimeoutError):  # there is no replica
                answers = await call.results_async(timeout_s=PAGE_SECONDS, return_exceptions=True)
                pages |= {(model, page[0]): page[1] for page in answers if isinstance(page, tuple)}
        return {name: page for name, page in pages.items() if page}

    async def _health(self, request: Request) -> Response:
        """Answer from the last check, since a question to a busy replica would take long."""
        self._check_open()
        if self._missing:
            raise UnavailableError(f"no replica of {min(self._missing)} is up")
        return JSONResponse({"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        """Answer when an engine of each model does."""
        self._check_open()
        found = {model for model, _ in await self._pages(_scope(request))}
        if missing := self._needed - found:
            raise UnavailableError(f"no replica of {min(missing)} is up")
        return JSONResponse({"status": "ready"})

    async def _metrics(self, request: Request) -> Response:
        if not auth.CALLER.get().operator:
            raise errors.ApiError(403, "this page needs a key of the operator (api_key)")
        merged = await asyncio.to_thread(merge_metrics, await self._pages(_scope(request)))
        return Response(merged, media_type=CONTENT_TYPE_LATEST)

    async def _list(self, request: Request) -> Response:
        """Merge the lists of all models. They are kept, so that idle models are not started."""
        path = request.url.path
        for model in self.handles:
            if (path, model) not in self._lists:
                _, page = await self.handles[model].page.remote(_scope(request), "")
                self._lists[path, model] = json.loads(page)[LISTS[path]]
        entries = [entry for model in self.handles for entry in self._lists[path, model]]
        kind = {"object": "list"} if path == "/v1/models" else {}
        return JSONResponse(kind | {LISTS[path]: entries})


def _scope(request: Request) -> Scope:
    """Return what a replica needs of a scope: also the address, and the id that was given."""
    scope = {name: request.scope[name] for name in SCOPE} | {"client": request.scope.get("client")}
    others = [header for header in scope["headers"] if header[0] != b"x-request-id"]
    return scope | {"headers": [*others, (b"x-request-id", auth.REQUEST_ID.get().encode())]}


async def _body(start: Message, messages: AsyncIterator[Message]) -> AsyncIterator[bytes]:
    """Yield the parts of a body. A stream that fails ends with an error event."""
    try:
        async for message in messages:
            yield message["body"]
    except Exception as error:
        content_type = dict(start["headers"]).get(b"content-type", b"")
        content = errors.body(error)[1]
        if content_type.startswith(b"text/event-stream"):
            yield f"data: {json_line(content)}\n\ndata: [DONE]\n\n".encode()
        elif content_type.startswith(b"application/x-ndjson"):
            yield f"{json_line({'error': content['error']['message']})}\n".encode()
        else:
            raise  # the connection is closed before the body is complete


def merge_metrics(pages: Mapping[tuple[str, str], str]) -> bytes:
    """Merge the Prometheus pages of all replicas, with the labels `model` and `replica`."""
    families: dict[str, Metric] = {}
    for (model, replica), page in pages.items():
        for family in text_string_to_metric_families(page):
            empty = Metric(family.name, family.documentation, family.type)
            merged = families.setdefault(family.name, empty)
            for sample in family.samples:
                labels = sample.labels | {"model": model, "replica": replica}
                merged.add_sample(sample.name, labels, sample.value)
    return generate_latest(SimpleNamespace(collect=families.values))


def make_targets(plan: Plan, keys: auth.ApiKeys, verbose: bool) -> list[serve.RunTarget]:
    """Return a Ray Serve application for each model, without routes of Ray's proxy."""
    targets = []
    for index, model in enumerate(plan.models):
        settings = replace(plan.settings, served_name=model.name, allowed_hosts=("*",))
        deployment = serve.deployment(
            Replica,
            name="model",
            ray_actor_options={"num_cpus": model.engine.threads},
            max_ongoing_requests=MAX_REQUESTS,
            graceful_shutdown_timeout_s=settings.shutdown_timeout,
            max_constructor_retry_count=1,
            request_router_config={"request_router_class": AffinityRouter},
            autoscaling_config={
                "min_replicas": model.replicas.min,
                "initial_replicas": max(1, model.replicas.min),  # to fail at once if it cannot load
                "max_replicas": model.replicas.max,
                "target_ongoing_requests": model.replicas.requests,
                "downscale_to_zero_delay_s": None if model.replicas.min else model.replicas.idle,
            },
        )
        replica = deployment.bind(model.engine, settings, keys, verbose)
        name = f"{APPLICATION}{index}"
        targets.append(serve.RunTarget(replica, name, route_prefix=None, logging_config=QUIET))
    return targets


def run(plan: Plan, listener: socket.socket, verbose: bool) -> int:
    """Serve a plan on a bound socket until a signal. Returns the exit code.

    The first SIGINT or SIGTERM lets running requests end within `shutdown_timeout`, the second ends
    them at once. Raises ForerunError if Ray or a model does not start.
    """
    settings = plan.settings
    start_logging(verbose, sys.stderr.isatty())
    limits.raise_descriptor_limit()
    share_arenas()
    keys = auth.ApiKeys(settings)
    if not listen.is_loopback(settings.host) and not keys:
        log.warning("%s is open to all: set api_key", settings.host)
    num_cpus = sum((model.engine.threads or 1) * model.replicas.max for model in plan.models)
    own_ray = {"num_cpus": num_cpus, "include_dashboard": False}  # whatever the machine has
    where = {"address": plan.address} if plan.address else own_ray
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **where)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler)  # raises KeyboardInterrupt
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        serve.start(proxy_location="Disabled", logging_config=QUIET)
        targets = make_targets(plan, keys, verbose)
        handles = serve.run_many(targets)
        by_model = {model.name: handle for model, handle in zip(plan.models, handles, strict=True)}
        ingress = Ingress(plan, by_model, keys)
        models = json_line({m.name: m.replicas.min for m in plan.models}, ascii_only=True)
        gc.collect()
        gc.freeze()  # keeps garbage collections from traversing Ray, which takes 150 ms
        announce = partial("forerun: serving replicas {} on {}".format, models)
        code = server.serve(ingress.gate, settings, listener, announce)
        if plan.address:
            for target in targets:
                serve.delete(target.name)
        return code
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ForerunError(f"the cluster does not start: {_reason(error)}") from None
    finally:
        listener.close()
        ray.shutdown()  # this ends a Ray cluster that was started here


def _reason(error: Exception) -> str:
    """Return the last of forerun's own errors that Ray Serve reports, or the given one."""
    known = serve.status().applications if ray.is_initialized() else {}
    own = [status for name, status in known.items() if name.startswith(APPLICATION)]
    deployments = [deployment for status in own for deployment in status.deployments.values()]
    messages = "\n".join(deployment.message for deployment in deployments)
    found = re.findall(r"forerun\.errors\.\w+: (.*)", messages)
    return one_line(found[-1] if found else str(error))
