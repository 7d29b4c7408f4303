"""The FastAPI application: routes, middleware, and the start of the engine's service."""

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
from forerun.server import conversation, errors, ollama, openai
from forerun.server.auth import CALLER, ApiKeys, add_access_control
from forerun.server.embeddings import Embedder, embeddings
from forerun.server.errors import ApiError
from forerun.server.indices import Indices, mount
from forerun.server.jobs import EngineService
from forerun.server.large_responses import TOKEN_ID_BYTES, check_size
from forerun.server.limits import LimitedRoute
from forerun.server.metrics import Metrics, RequestLog
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
from forerun.server.settings import Settings
from forerun.server.state import ServerState
from forerun.server.streaming import with_ignored
from forerun.types import RETRIEVAL
from forerun.verify import RULES

POLICY = "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'"
STRETCH = 2.0  # prompts may make a step this many times as long as decoding alone
PLAYGROUND = Path(str(files("forerun.server") / "playground"))
STATUS_TEXTS = {
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


def make_app(llm: LLM, settings: Settings, keys: ApiKeys | None = None) -> FastAPI:
    """Build the server's application around a loaded model, without a listening socket.

    Args:
        llm: the model; its engine runs on a thread of its own while the application is up.
        settings: options of the server.
        keys: API keys; by default those of the settings.

    Returns:
        The application. `app.state.service` is its `EngineService`, `app.state.server` its
        `ServerState`.
    """
    keys = ApiKeys.of(settings) if keys is None else keys
    name = served_name(llm, settings)
    llm.engine.stretch = STRETCH
    service = EngineService(llm, settings.max_queue, settings.max_unread, settings.write_timeout)
    metrics = Metrics(service, settings.metrics_compat)
    service.observers = (metrics, RequestLog(name))
    state = ServerState(service, name, fingerprint(llm), settings.timeout, settings.max_prompt)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        await asyncio.create_task(warm_up(app))
        yield
        await asyncio.to_thread(service.stop)

    app = FastAPI(
        title="forerun",
        version=__version__,
        lifespan=lifespan,
        responses={status: {"description": text} for status, text in STATUS_TEXTS.items()},
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    app.state.server = state
    app.router.route_class = LimitedRoute
    for kind in errors.KINDS:
        app.add_exception_handler(kind, errors.handle)
    embedder = Embedder(state)
    card = ollama.ModelCard(state)
    _add_generation(app, state, embedder)
    ollama.mount(app, state, embedder, card)
    _add_tokenization(app, state)
    _add_operation(app, state, metrics)
    _add_models(app, state, card.modified)
    _add_playground(app)
    if settings.indices:
        indices = Indices(service, Path(settings.indices).expanduser(), keys.clients)
        indices.load_all()
        if f"{RETRIEVAL}+{llm.draft}" in llm.engine.proposers:
            llm.draft = f"{RETRIEVAL}+{llm.draft}"
        mount(app, indices)
    add_page(app, name, bool(keys))
    app.add_middleware(HeadAsGet)
    add_access_control(app, settings, keys)
    return app


def describe(llm: LLM, settings: Settings) -> dict[str, Any]:
    """Return what is served, for the line that a starting server prints.

    A missing chat template is mentioned, a present one is not.
    """
    facts = {
        "model": served_name(llm, settings),
        "draft": llm.draft,
        "depth": llm.config.depth,
        "rule": llm.config.rule,
    }
    if llm.tokenizer is None or not llm.tokenizer.has_chat_template:
        facts["chat_template"] = False
    return facts


def public_name(llm: LLM) -> str:
    """Return the name of the model; of a path only the part that reveals no other folders."""
    model = llm.config.model or DEFAULT
    path = Path(model).expanduser()
    return title(str(path.absolute())) if path.exists() else model


def served_name(llm: LLM, settings: Settings) -> str:
    """Return the name of the model in the API."""
    return settings.served_name or title(public_name(llm))


def fingerprint(llm: LLM) -> str:
    """Return a name of all that the tokens of a seed depend on: version, model, kernels, rule."""
    facts = (
        __version__,
        public_name(llm),
        llm.decoder.weight_bytes,
        llm.decoder.precision,
        llm.config.rule,
    )
    return f"forerun-{__version__}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:8]}"


class HeadAsGet:
    """Middleware that answers HEAD as GET; the HTTP server omits the body."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self.app(scope, receive, send)


async def warm_up(app: FastAPI) -> None:
    """Send the application some requests before clients can.

    Libraries import modules and read files at their first use, which would fail while clients hold
    all file descriptors.
    """

    async def discard(message: Message) -> None:
        pass

    await to_thread.run_sync(lambda: None)  # anyio imports its backend with the first thread
    for method, path, body in (
        ("GET", "/", b""),
        ("GET", "/openapi.json", b""),
        ("POST", "/tokenize", b'{"prompt": "x"}'),
        ("POST", "/v1/completions", b"{}"),
    ):
        scope = {
            "type": "http",
            "http_version": "1.1",
            "scheme": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        }
        messages: asyncio.Queue[Message] = asyncio.Queue()
        messages.put_nowait({"type": "http.request", "body": body, "more_body": False})
        with suppress(Exception):  # a client's request will show the same error
            await app(scope, messages.get, discard)


def _add_generation(app: FastAPI, state: ServerState, embedder: Embedder) -> None:
    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue texts, as OpenAI's API does."""
        return await openai.completions(state, body, request)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation, as OpenAI's API does."""
        return await openai.chat(state, body, request)

    @app.post("/v1/responses")
    async def respond(body: ResponsesRequest, request: Request) -> Response:
        """Answer as OpenAI's Responses API does, without stored conversations."""
        return await responses(state, body, request)

    @app.post("/v1/embeddings")
    async def embed(body: EmbeddingsRequest, request: Request) -> Response:
        """Embed texts: the mean of the last hidden states, of length 1."""
        return await embeddings(state, embedder, body, request)


def _add_tokenization(app: FastAPI, state: ServerState) -> None:
    llm = state.service.llm

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        """Convert a text or a conversation to token ids."""
        state.check(body.model)
        tokens = await state.prepare(conversation.tokenize, llm, body, state.check_characters)
        content = {"count": len(tokens), "max_model_len": llm.decoder.context, "tokens": tokens}
        response = await state.write(lambda: content, TOKEN_ID_BYTES * len(tokens))
        return with_ignored(response, body.ignored)

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        """Convert token ids to text."""
        state.check(body.model)
        text = await state.prepare(conversation.detokenize, llm, body)
        check_size(len(text), "send fewer tokens at once")
        return await state.write(lambda: {"prompt": text}, len(text))


def _add_operation(app: FastAPI, state: ServerState, metrics: Metrics) -> None:
    service, llm = state.service, state.service.llm

    def check_alive() -> None:
        if not service.alive:
            raise ApiError(503, service.reason)

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Tell whether the server is up. It needs no key."""
        check_alive()
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> dict[str, str]:
        """Tell whether the engine works: it answers between two steps."""
        check_alive()
        async with asyncio.timeout(60):
            await service.call(lambda: None)
        return {"status": "ready"}

    @app.get("/version")
    async def version() -> dict[str, str]:
        """Return the version of forerun."""
        return {"version": __version__}

    @app.get("/metrics")
    async def prometheus() -> Response:
        """Return Prometheus metrics."""
        if not CALLER.get().operator:
            raise ApiError(
                403, "this counts everybody's requests: it needs a key of the operator (--api-key)"
            )
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/server_info")
    async def info() -> dict[str, Any]:
        """Return what is served and how."""
        # Costs depend on the requests of all clients, so only the operator sees them.
        step_costs, draft_costs = (
            llm.engine.policy.cost_table() if CALLER.get().operator else ({}, {})
        )
        drafts = [name for name in llm.engine.proposers if "reference" not in name]
        return {
            "version": __version__,
            "model": state.name,
            "isolation": True,
            "context": llm.decoder.context,
            "chat": llm.tokenizer is not None and llm.tokenizer.has_chat_template,
            "sampling": llm.recommended,
            "default_sampling": dict(DEFAULT_SAMPLING),
            "drafts": ["off", *(name for name in drafts if name != "auto")],
            "draft": llm.draft,
            "depth": llm.config.depth,
            "rules": list(RULES),
            "rule": llm.config.rule,
            "kernels": llm.decoder.precision,
            "threads": llm.config.threads or len(os.sched_getaffinity(0)),
            "costs": {
                "pass_ms": _milliseconds(step_costs),
                "draft_ms": {name: _milliseconds(costs) for name, costs in draft_costs.items()},
            },
        }


def _milliseconds(costs: dict[int, float]) -> dict[str, float]:
    return {str(size): round(1e3 * seconds, 4) for size, seconds in sorted(costs.items())}


def _add_models(app: FastAPI, state: ServerState, created: int) -> None:
    llm = state.service.llm
    card = {
        "id": state.name,
        "object": "model",
        "created": created,  # time of the model's file: the same for all replicas and restarts
        "owned_by": "forerun",
        "max_model_len": llm.decoder.context,
        "root": public_name(llm),
    }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List the one model that is served."""
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """Describe the model of this name, with or without `:latest`."""
        if not name:
            return await models()
        state.check(name.removesuffix("/"))
        return card


def _add_playground(app: FastAPI) -> None:
    # Read now, since a request must not need a file descriptor.
    pages = {path.name: path.read_bytes() for path in PLAYGROUND.iterdir() if path.is_file()}

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return await page("index.html")

    @app.get("/playground/{name}", include_in_schema=False)
    async def page(name: str) -> Response:
        if name not in pages:
            raise ApiError(404, "there is no such page")
        headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"}
        return Response(pages[name], media_type=guess_type(name)[0], headers=headers)
