"""The application: routes, and around them keys, limits and request ids."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import FileResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forerun import __version__
from forerun.llm import LLM
from forerun.models.hub import DEFAULT
from forerun.models.names import title
from forerun.sampling.params import SamplingParams
from forerun.server import api, errors, translate
from forerun.server.answers import started
from forerun.server.api import Kitchen
from forerun.server.errors import ApiError
from forerun.server.journal import REQUEST_ID, Journal
from forerun.server.metrics import Metrics
from forerun.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponsesRequest,
    TokenizeRequest,
)
from forerun.server.responses import responses
from forerun.server.service import Service
from forerun.server.settings import Settings
from forerun.verify import RULES

POLICY = "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'"
PAGES = Path(str(files("forerun.server") / "playground"))
FAILURES = {
    400: "Bad request",
    401: "No valid key",
    404: "No such model",
    413: "Too large",
    429: "Busy",
    503: "Not available",
}


def make_app(llm: LLM, settings: Settings) -> FastAPI:
    """The server's application around a loaded model. `app.state.service` is its service."""
    metrics = Metrics(settings.metrics_compat)
    name = served_name(llm, settings)
    service = Service(llm, settings.max_queue, (metrics, Journal(name)))
    metrics.attach(service)
    kitchen = Kitchen(service, name, fingerprint(llm), settings.timeout, settings.max_prompt)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        service.start()
        started()
        yield
        await asyncio.to_thread(service.stop)

    app = FastAPI(
        title="forerun",
        version=__version__,
        lifespan=lifespan,
        responses={status: {"description": text} for status, text in FAILURES.items()},
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    for kind in errors.KINDS:
        app.add_exception_handler(kind, errors.handle)
    _generation(app, kitchen)
    _texts(app, kitchen)
    _operation(app, kitchen, metrics)
    _playground(app)
    keys = [key for key in (*settings.api_key, os.environ.get("FORERUN_API_KEY", "")) if key]
    app.add_middleware(Gate, keys=keys, max_body=settings.max_body)
    if settings.allowed_origins:  # outside the gate: a preflight carries no key, and a page may read why it is refused
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    return app


def _root(llm: LLM) -> str:
    """What the model is known by, as vLLM says it; of a path only what says nothing of this machine."""
    model = llm.config.model or DEFAULT
    return title(model) if Path(model).expanduser().exists() else model


def served_name(llm: LLM, settings: Settings) -> str:
    """What the model is called in the API."""
    return settings.served_name or title(llm.config.model or DEFAULT)


def fingerprint(llm: LLM) -> str:
    """Names everything the tokens of a seed depend on, besides the seed: version, model, precision, kernels."""
    facts = (__version__, llm.config.model, llm.decoder.precision, llm.config.rule)
    return f"forerun-{__version__}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:8]}"


def _generation(app: FastAPI, kitchen: Kitchen) -> None:
    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await api.completions(kitchen, body, request)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await api.chat(kitchen, body, request)

    @app.post("/v1/responses")
    async def respond(body: ResponsesRequest, request: Request) -> Response:
        return await responses(kitchen, body, request)


def _texts(app: FastAPI, kitchen: Kitchen) -> None:
    llm = kitchen.service.llm

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        kitchen.check(body.model)
        if (body.prompt is None) == (body.messages is None) or llm.tokenizer is None:
            raise ApiError(400, "give a prompt or messages, to a model that has a tokenizer", "prompt")
        if body.messages is not None:
            tokens = await run_in_threadpool(llm.tokenizer.chat, [translate.plain(m) for m in body.messages])
        else:
            tokens = await run_in_threadpool(llm.tokenizer.encode, body.prompt or "", body.add_special_tokens)
        return {"count": len(tokens), "max_model_len": llm.decoder.context, "tokens": tokens}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        kitchen.check(body.model)
        vocab = llm.decoder.config.vocab
        if llm.tokenizer is None or not all(0 <= token < vocab for token in body.tokens):
            raise ApiError(400, f"tokens must be token ids under {vocab}, of a model that has a tokenizer", "tokens")
        return {"prompt": await run_in_threadpool(llm.tokenizer.decode, body.tokens)}


def _operation(app: FastAPI, kitchen: Kitchen, metrics: Metrics) -> None:
    service, llm = kitchen.service, kitchen.service.llm

    @app.get("/health")
    async def health() -> dict[str, str]:
        if not service.alive:
            raise ApiError(503, service.reason)
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> dict[str, str]:
        """Whether the engine does its steps: it answers between two of them."""
        if not service.alive:
            raise ApiError(503, service.reason)
        async with asyncio.timeout(60):
            await service.call(lambda: None)
        return {"status": "ready"}

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        card = {"id": kitchen.name, "object": "model", "created": started(), "owned_by": "forerun"}
        return {"object": "list", "data": [card | {"max_model_len": llm.decoder.context, "root": _root(llm)}]}

    @app.get("/metrics")
    async def prometheus() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/server_info")
    async def info() -> dict[str, Any]:
        passes, drafts = llm.engine.policy.costs()
        return {
            "version": __version__,
            "model": kitchen.name,
            "context": llm.decoder.context,
            "drafts": ["off", *(name for name in llm.engine.proposers if "reference" not in name)],
            "draft": llm.draft,
            "depth": llm.config.depth,
            "rules": list(RULES),
            "rule": llm.config.rule,
            "kernels": llm.decoder.precision,
            "threads": llm.config.threads or len(os.sched_getaffinity(0)),
            "costs": {"pass_ms": _in_ms(passes), "draft_ms": {name: _in_ms(c) for name, c in drafts.items()}},
        }


def _in_ms(costs: dict[int, float]) -> dict[str, float]:
    return {str(size): round(1e3 * seconds, 4) for size, seconds in sorted(costs.items())}


def _playground(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    async def index() -> FileResponse:
        return _page("index.html")

    @app.get("/playground/{name}", include_in_schema=False)
    async def page(name: str) -> FileResponse:
        return _page(name)


def _page(name: str) -> FileResponse:
    path = PAGES / name
    if path.parent != PAGES or not path.is_file():
        raise ApiError(404, "there is no such page")
    return FileResponse(path, headers={"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"})


class Gate:
    """Before everything else: a request id, the key, the size of the body."""

    OPEN = ("/health", "/", "/playground/")  # the page itself holds no secret, and asks for the key

    def __init__(self, app: ASGIApp, keys: list[str], max_body: int) -> None:
        self.app, self.max_body = app, max_body
        self.keys = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = "".join(c for c in headers.get("x-request-id", "")[:128] if c.isalnum() or c in "-_.")
        request_id = request_id or secrets.token_hex(8)

        REQUEST_ID.set(request_id)

        async def reply(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        error = self._refusal(scope["path"], headers)
        if error is None:
            await self.app(scope, self._limited(receive), reply)
            return
        await errors.answer(error)(scope, receive, reply)

    def _refusal(self, path: str, headers: Headers) -> ApiError | None:
        if self.keys and path not in self.OPEN[:2] and not path.startswith(self.OPEN[2]):
            scheme, _, key = headers.get("authorization", "").partition(" ")
            given = hashlib.sha256(key.strip().encode()).digest()
            if scheme.lower() != "bearer" or not self._known(given):
                return ApiError(401, "give a valid key: Authorization: Bearer KEY", None, "invalid_api_key")
        length = headers.get("content-length", "0")
        return self._too_large() if length.isdigit() and int(length) > self.max_body else None

    def _known(self, given: bytes) -> bool:
        """Whether it is one of the keys; all are compared, so that the time says nothing."""
        return sum(hmac.compare_digest(given, key) for key in self.keys) > 0

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the request body is over {self.max_body} bytes (--max-body)")

    def _limited(self, receive: Receive) -> Receive:
        left = self.max_body

        async def limited() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise HTTPException(413, str(self._too_large()))  # FastAPI lets these through
            return message

        return limited


def warm(llm: LLM) -> None:
    """One short generation, so that the first client does not pay for first calls."""
    vocab = llm.decoder.config.vocab
    llm.generate([[min(3, vocab - 1)] * 4], SamplingParams(max_tokens=4, ignore_eos=True))
    llm.forget()


def describe(llm: LLM, settings: Settings) -> str:
    """What is served and how, as one line of JSON for the log."""
    return json.dumps(
        {"model": served_name(llm, settings), "draft": llm.draft, "depth": llm.config.depth, "rule": llm.config.rule}
    )
