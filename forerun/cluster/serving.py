"""The Ray Serve application: requests pass Ray's HTTP proxy, the ingress and a replica."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
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
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route, request_response
from starlette.types import Message, Receive, Scope, Send

from forerun.cluster.plan import Plan
from forerun.cluster.router import AffinityRouter, affinity_key
from forerun.config import Config
from forerun.errors import ForerunError, one_line, shorten
from forerun.llm import LLM
from forerun.server import app, auth, errors, limits, listen, ollama
from forerun.server.errors import UnavailableError
from forerun.server.logs import start_logging
from forerun.server.probe import probe
from forerun.server.settings import Settings
from forerun.utils import json_line

MAX_REQUESTS = 1 << 20  # of a deployment: the engines limit their requests themselves
RETRIES = 2  # times that a request is sent again because its replica died
PAGE_SECONDS = 5.0  # in which a replica must answer /health or /metrics
OVERTIME = 10.0  # seconds after the timeout of a request in which its replica reports it
QUIET = {"enable_access_log": False, "log_level": "ERROR"}
MANAGEMENT = {f"/api/{action}" for _, action in ollama.ACTIONS}  # refused, whatever they name
LISTS = {"/v1/models": "data", "/api/tags": "models", "/api/ps": "models"}
SCOPE = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers")


class Replica:
    """An engine and the application of `forerun serve`, in a process that Ray watches."""

    async def __init__(  # type: ignore[misc]
        self, engine: Config, settings: Settings, keys: auth.ApiKeys, verbose: bool
    ) -> None:
        """Load the model and start its engine."""
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
        messages = [each async for batch in self.answer(scope, b"", key) for each in batch]
        body = b"".join(message.get("body", b"") for message in messages)
        name = serve.get_replica_context().replica_id.unique_id
        return name, body.decode() if messages[0]["status"] == 200 else ""

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, wait for the running ones, end the rest with an error."""
        self.service.draining = True
        for patience in (seconds, OVERTIME):
            end = asyncio.get_running_loop().time() + patience
            while self.service.jobs and asyncio.get_running_loop().time() < end:
                await asyncio.sleep(0.05)
            self.service.end_all()

    def check_health(self) -> None:
        """Raise RuntimeError if the engine's thread has ended; Ray then replaces the replica."""
        if self.service.broken:
            raise RuntimeError(self.service.reason)


class Ingress:
    """Checks keys, host names and sizes, and forwards requests to the replicas of their model."""

    def __init__(self, plan: Plan, handles: Mapping[str, Any], keys: auth.ApiKeys) -> None:
        """`handles` are Ray's `DeploymentHandle`s by the name of the model."""
        self.plan = plan
        self.handles = handles
        self._lists: dict[tuple[str, str], list[Any]] = {}
        self._parser = limits.ThrottledThreads(1)
        pages = {"/health": self._health, "/ready": self._health, "/metrics": self._metrics}
        pages |= dict.fromkeys(LISTS, self._list)
        routes = [Route(path, page) for path, page in pages.items()]
        self.gate = Starlette(
            routes=[*routes, Mount("/", request_response(self._answer))],
            exception_handlers=dict.fromkeys(errors.KINDS, errors.handle),
        )
        auth.add_access_control(self.gate, plan.settings, keys)

    async def drain(self, seconds: float) -> None:
        """Drain all replicas, and give the last parts of their answers time to pass the proxy."""
        calls = [handle.broadcast("drain", seconds) for handle in self.handles.values()]
        await asyncio.gather(*(call.results_async() for call in calls), return_exceptions=True)
        await asyncio.sleep(0.5)

    async def _answer(self, request: Request) -> Response:
        body = await request.body()
        value = None
        with suppress(errors.ApiError, ForerunError, ValueError):  # a replica reports them
            value = await limits.parse_in_thread(body, self._parser)
        value = value if isinstance(value, dict) else {}
        model = self._find_model(value, request.url.path)
        key = affinity_key(value, auth.tenant_of(str(value.get("cache_salt") or "")))
        messages = self._forward(model, _scope(request), body, key)
        async with asyncio.timeout(self.plan.settings.timeout or None):
            start = await anext(messages)
        response = StreamingResponse(_body(start, messages), start["status"])
        response.raw_headers = start["headers"]
        return response

    async def _forward(self, model: str, *request: Any) -> AsyncIterator[Message]:
        """Yield the answer of a replica, of another one if the first dies before it has begun."""
        begun = False
        for _ in range(RETRIES + 1):
            stream = self.handles[model].options(stream=True).answer.remote(*request)
            try:
                async for messages in stream:
                    begun = True
                    for message in messages:
                        yield message
                return
            except (RayActorError, TaskCancelledError, RayServeException):
                if begun:
                    break
            finally:
                stream.cancel()
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

    async def _pages(self, request: Request) -> dict[tuple[str, str], str]:
        """Return the answers of all replicas to a GET request, by model and replica."""
        pages: dict[tuple[str, str], str] = {}
        for model, handle in self.handles.items():
            call = handle.broadcast("page", _scope(request))
            with suppress(RayServeException, TimeoutError):  # there is no replica
                answers = await call.results_async(timeout_s=PAGE_SECONDS, return_exceptions=True)
                pages |= {(model, each[0]): each[1] for each in answers if isinstance(each, tuple)}
        return {name: page for name, page in pages.items() if page}

    async def _health(self, request: Request) -> Response:
        missing = {model.name for model in self.plan.models if model.replicas.min}
        missing -= {model for model, _ in await self._pages(request)}
        if missing:
            raise UnavailableError(f"no replica of {min(missing)} is up")
        return JSONResponse({"status": "ready" if request.url.path == "/ready" else "ok"})

    async def _metrics(self, request: Request) -> Response:
        if not auth.CALLER.get().operator:
            raise errors.ApiError(403, "this page needs a key of the operator (api_key)")
        merged = await asyncio.to_thread(merge_metrics, await self._pages(request))
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
    """Return what a replica needs of a scope."""
    return {name: request.scope[name] for name in SCOPE}


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
            raise  # Ray's proxy closes the connection before the body is complete


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


async def _ingress_app(scope: Scope, receive: Receive, send: Send) -> None:
    """Pass a request to the `Ingress` of this process."""

    async def reply(message: Message) -> None:
        if message["type"] == "http.response.start":
            del MutableHeaders(scope=message)["x-request-id"]  # Ray's proxy adds it
        await send(message)

    await serve.get_replica_context().servable_object.gate(scope, receive, reply)


def build_application(plan: Plan, keys: auth.ApiKeys, verbose: bool) -> serve.Application:
    """Return the Ray Serve application: a deployment of each model, and the ingress."""
    models = {}
    for index, model in enumerate(plan.models):
        settings = replace(plan.settings, served_name=model.name, allowed_hosts=("*",))
        deployment = serve.deployment(
            Replica,
            name=f"model-{index}",
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
        models[model.name] = deployment.bind(model.engine, settings, keys, verbose)
    wrapped = serve.ingress(Starlette(routes=[Mount("/", _ingress_app)]))(Ingress)
    return serve.deployment(
        wrapped, max_ongoing_requests=MAX_REQUESTS, ray_actor_options={"num_cpus": 0}
    ).bind(plan, models, keys)


def run(plan: Plan, listener: socket.socket, verbose: bool) -> int:
    """Serve a plan at the address of a bound socket until a signal. Returns the exit code.

    The first SIGINT or SIGTERM lets running requests end within `shutdown_timeout`, the second ends
    them at once. Raises ForerunError if Ray or a model does not start.
    """
    settings = plan.settings
    start_logging(verbose, sys.stderr.isatty())
    keys = auth.ApiKeys.of(settings)
    if not listen.is_loopback(settings.host) and not keys:
        logging.getLogger("forerun.server").warning("%s is open to all: set api_key", settings.host)
    host, port = listener.getsockname()[:2]
    listener.close()  # Ray's proxy binds the address itself
    num_cpus = sum((model.engine.threads or 1) * model.replicas.max for model in plan.models)
    own_ray = {"num_cpus": num_cpus, "include_dashboard": False}  # whatever the machine has
    where = {"address": plan.address} if plan.address else own_ray
    timeout = settings.timeout + OVERTIME if settings.timeout else None
    http = {"host": settings.host, "port": port, "request_timeout_s": timeout}
    application = build_application(plan, keys, verbose)
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **where)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.default_int_handler)  # raises KeyboardInterrupt
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        serve.start(proxy_location="HeadOnly", http_options=http, logging_config=QUIET)
        ingress = serve.run(application, name="forerun", logging_config=QUIET)
        models = json_line({m.name: m.replicas.min for m in plan.models}, ascii_only=True)
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        with suppress(KeyboardInterrupt):
            print(f"forerun: serving replicas {models} on {address}", file=sys.stderr, flush=True)
            while True:
                signal.pause()
        with suppress(KeyboardInterrupt):
            ingress.drain.remote(settings.shutdown_timeout).result()
        if plan.address:
            serve.delete("forerun")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ForerunError(f"the cluster does not start: {_reason(error)}") from None
    finally:
        ray.shutdown()  # this ends a Ray cluster that was started here
    return 0


def _reason(error: Exception) -> str:
    """Return the last of forerun's own errors that Ray Serve reports, or the given one."""
    application = serve.status().applications.get("forerun") if ray.is_initialized() else None
    deployments = application.deployments.values() if application else ()
    messages = "\n".join(deployment.message for deployment in deployments)
    found = re.findall(r"forerun\.errors\.\w+: (.*)", messages)
    return one_line(found[-1] if found else str(error))
