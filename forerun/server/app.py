"""The application: routes, and around them keys, limits and request ids."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib.resources import files
from mimetypes import guess_type
from pathlib import Path
from typing import Any

from anyio import to_thread
from fastapi import FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forerun import __version__
from forerun.llm import LLM
from forerun.models.files import title
from forerun.models.hub import DEFAULT
from forerun.sampling.params import DEFAULT as DEFAULT_SAMPLING
from forerun.server import api, errors, ollama, sizes, translate
from forerun.server.answers import started
from forerun.server.bodies import BoundedRoute
from forerun.server.embeddings import Embedder, embeddings
from forerun.server.errors import ApiError
from forerun.server.gate import guard
from forerun.server.indices import Indices, mount
from forerun.server.journal import Journal
from forerun.server.kitchen import Kitchen
from forerun.server.metrics import Metrics
from forerun.server.ollama_card import Card
from forerun.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingsRequest,
    ResponsesRequest,
    TokenizeRequest,
)
from forerun.server.reference import add_page
from forerun.server.responses import responses
from forerun.server.service import Service
from forerun.server.settings import Settings
from forerun.server.tenants import CALLER, Callers
from forerun.types import RETRIEVAL
from forerun.verify import RULES

POLICY = "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'"
STRETCH = 2.0  # prompts may make a pass this many times as long as the decoding requests alone
PAGES = Path(str(files("forerun.server") / "playground"))
FAILURES = {
    400: "Bad request",
    401: "No valid key",
    403: "Not for pages of that origin",
    404: "No such model",
    408: "Too slow",
    413: "Too large",
    421: "Not the name of this server",
    429: "Busy",
    503: "Not available",
}


def make_app(llm: LLM, settings: Settings, callers: Callers | None = None) -> FastAPI:
    """The server's application around a loaded model. `app.state.service` is its service;
    `callers`, unless somebody else knows them, are those of the settings."""
    name = served_name(llm, settings)
    llm.engine.stretch = STRETCH
    service = Service(llm, settings.max_queue, settings.max_unread, settings.write_timeout)
    metrics = Metrics(service, settings.metrics_compat)
    service.watchers = (metrics, Journal(name))
    kitchen = Kitchen(service, name, fingerprint(llm), settings.timeout, settings.max_prompt)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        service.start()
        started()
        await asyncio.create_task(ask_first(_app))
        yield
        await asyncio.to_thread(service.stop)

    app = FastAPI(
        title="forerun",
        version=__version__,
        lifespan=lifespan,
        responses={status: {"description": text} for status, text in FAILURES.items()},
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
    )
    app.state.service, app.state.kitchen = service, kitchen
    app.router.route_class = BoundedRoute
    for kind in errors.KINDS:
        app.add_exception_handler(kind, errors.handle)
    embedder, card = Embedder(kitchen), Card(kitchen)
    _generation(app, kitchen, embedder)
    ollama.mount(app, kitchen, embedder, card)
    _texts(app, kitchen)
    _operation(app, kitchen, metrics)
    _models(app, kitchen, card.modified)
    _playground(app)
    callers = Callers.of(settings) if callers is None else callers
    if settings.indices:
        indices = Indices(service, Path(settings.indices).expanduser(), callers.clients)
        indices.load_all()
        if f"{RETRIEVAL}+{llm.draft}" in llm.engine.proposers:
            llm.draft = f"{RETRIEVAL}+{llm.draft}"
        mount(app, indices)
    add_page(app, name, bool(callers))
    app.add_middleware(HeadsAsPages)
    guard(app, settings, callers)
    return app


class HeadsAsPages:
    """Answers HEAD as GET; the HTTP server leaves the body out."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self.app(scope, receive, send)


async def ask_first(app: FastAPI) -> None:
    """Ask an application for some pages, before anybody else does.

    Libraries import modules and read files when they are first used: when a client has taken all
    file descriptors, that would fail.
    """

    await to_thread.run_sync(lambda: None)  # anyio imports its backend with the first thread
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    for method, path, body in (
        ("GET", "/", b""),
        ("GET", "/openapi.json", b""),
        ("POST", "/tokenize", b'{"prompt": "x"}'),
        ("POST", "/v1/completions", b"{}"),
    ):
        where = {
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
        }
        scope = {
            "type": "http",
            "http_version": "1.1",
            "scheme": "http",
            "headers": headers,
            **where,
        }
        said: asyncio.Queue[Message] = asyncio.Queue()
        said.put_nowait({"type": "http.request", "body": body, "more_body": False})
        with suppress(Exception):  # the same request of a client will say it
            await app(scope, said.get, _drop)


async def _drop(message: Message) -> None:
    """Send a message of an answer to nobody."""


def public_name(llm: LLM) -> str:
    """What the model is known by; of a path only what says nothing of this machine."""
    model = llm.config.model or DEFAULT
    path = Path(model).expanduser()
    return title(str(path.absolute())) if path.exists() else model


def served_name(llm: LLM, settings: Settings) -> str:
    """What the model is called in the API."""
    return settings.served_name or title(public_name(llm))


def fingerprint(llm: LLM) -> str:
    """Names everything the tokens of a seed depend on, besides the seed: version, model, precision,
    kernels."""
    facts = (
        __version__,
        public_name(llm),
        llm.decoder.weight_bytes,
        llm.decoder.precision,
        llm.config.rule,
    )
    return f"forerun-{__version__}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:8]}"


def _generation(app: FastAPI, kitchen: Kitchen, embedder: Embedder) -> None:
    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue texts, as OpenAI's API does."""
        return await api.completions(kitchen, body, request)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation, as OpenAI's API does."""
        return await api.chat(kitchen, body, request)

    @app.post("/v1/responses")
    async def respond(body: ResponsesRequest, request: Request) -> Response:
        """OpenAI's Responses, without memory."""
        return await responses(kitchen, body, request)

    @app.post("/v1/embeddings")
    async def embed(body: EmbeddingsRequest, request: Request) -> Response:
        """Vectors of texts: the mean of the last hidden states, of length 1."""
        return await embeddings(kitchen, embedder, body, request)


def _texts(app: FastAPI, kitchen: Kitchen) -> None:
    llm = kitchen.service.llm

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        """A text or a conversation as token ids."""
        kitchen.check(body.model)
        tokens = await kitchen.prepare(translate.tokenized, llm, body, kitchen.check_characters)
        content = {"count": len(tokens), "max_model_len": llm.decoder.context, "tokens": tokens}
        response = await kitchen.write(lambda: content, sizes.TOKEN_ID * len(tokens))
        return api.warned(response, body.left_out)

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        """Token ids as text."""
        kitchen.check(body.model)
        text = await kitchen.prepare(translate.detokenized, llm, body.tokens)
        sizes.check(len(text), "send fewer tokens at once")
        return await kitchen.write(lambda: {"prompt": text}, len(text))


def _operation(app: FastAPI, kitchen: Kitchen, metrics: Metrics) -> None:
    service, llm = kitchen.service, kitchen.service.llm

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Whether the server is up. It needs no key."""
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
        """The version of forerun."""
        return {"version": __version__}

    @app.get("/metrics")
    async def prometheus() -> Response:
        """Counters for Prometheus."""
        if not CALLER.get().operator:
            raise ApiError(
                403, "this counts everybody's requests: it needs a key of the operator (--api-key)"
            )
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/server_info")
    async def info() -> dict[str, Any]:
        """What is served and how."""
        passes, drafts = llm.engine.policy.costs() if CALLER.get().operator else ({}, {})
        return {
            "version": __version__,
            "model": kitchen.name,
            "isolation": True,
            "context": llm.decoder.context,
            "chat": llm.tokenizer is not None and llm.tokenizer.has_chat_template,
            "sampling": llm.recommended,
            "default_sampling": dict(DEFAULT_SAMPLING),
            "drafts": [
                "off",
                *(
                    name
                    for name in llm.engine.proposers
                    if "reference" not in name and name != "auto"
                ),
            ],
            "draft": llm.draft,
            "depth": llm.config.depth,
            "rules": list(RULES),
            "rule": llm.config.rule,
            "kernels": llm.decoder.precision,
            "threads": llm.config.threads or len(os.sched_getaffinity(0)),
            "costs": {
                "pass_ms": _in_ms(passes),
                "draft_ms": {name: _in_ms(c) for name, c in drafts.items()},
            },
        }


def _models(app: FastAPI, kitchen: Kitchen, created: int) -> None:
    llm = kitchen.service.llm
    card = {
        "id": kitchen.name,
        "object": "model",
        "created": created,  # of its file: all replicas say the same, before and after a restart
        "owned_by": "forerun",
        "max_model_len": llm.decoder.context,
        "root": public_name(llm),
    }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The one model that is served."""
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """The model of this name, with or without `:latest`."""
        if not name:
            return await models()
        kitchen.check(name.removesuffix("/"))
        return card


def _in_ms(costs: dict[int, float]) -> dict[str, float]:
    return {str(size): round(1e3 * seconds, 4) for size, seconds in sorted(costs.items())}


def _playground(app: FastAPI) -> None:
    pages = {
        path.name: path.read_bytes() for path in PAGES.iterdir() if path.is_file()
    }  # a request opens no file

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return await page("index.html")

    @app.get("/playground/{name}", include_in_schema=False)
    async def page(name: str) -> Response:
        if name not in pages:
            raise ApiError(404, "there is no such page")
        headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"}
        return Response(pages[name], media_type=guess_type(name)[0], headers=headers)


def describe(llm: LLM, settings: Settings) -> dict[str, Any]:
    """What is served and how; that a model has no chat template is said where it is so, since it
    may not chat then."""
    facts = {"model": served_name(llm, settings), "draft": llm.draft, "depth": llm.config.depth}
    lacking = llm.tokenizer is None or not llm.tokenizer.has_chat_template
    return facts | {"rule": llm.config.rule} | ({"chat_template": False} if lacking else {})
