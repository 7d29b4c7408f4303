"""The FastAPI application: routes, middleware, and the start of the engine's service.

/v1/indices changes the document indices that answers are drafted from while the server runs. An
index serves the requests of all clients or of one.

/docs is a page with every endpoint, its fields and a command to try it; it is made from the OpenAPI
document /openapi.json. It has no scripts and loads nothing from elsewhere, so it works without a
network. Both are made once, in a worker thread.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import re
import shlex
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress
from functools import lru_cache, partial
from importlib.resources import files
from mimetypes import guess_type
from pathlib import Path
from typing import Annotated, Any

import jinja2
from anyio import CapacityLimiter, to_thread
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import Field
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forerun import __version__
from forerun.draft.corpus import LIST, Index
from forerun.draft.retrieval import Retrieval
from forerun.errors import LoadError
from forerun.llm import LLM
from forerun.models.files import title
from forerun.models.hub import DEFAULT
from forerun.sampling.params import DEFAULT as DEFAULT_SAMPLING
from forerun.server import conversation, errors, ollama, openai
from forerun.server.auth import CALLER, ApiKeys, add_access_control
from forerun.server.embeddings import Embedder, embeddings
from forerun.server.errors import ApiError
from forerun.server.jobs import EngineService
from forerun.server.large_responses import TOKEN_ID_BYTES, check_size
from forerun.server.limits import LimitedRoute
from forerun.server.monitoring import Metrics, RequestLog
from forerun.server.protocol import (
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingsRequest,
    ResponsesRequest,
    TokenizeRequest,
)
from forerun.server.responses import responses
from forerun.server.settings import Settings
from forerun.server.state import ServerState
from forerun.server.streaming import with_ignored
from forerun.types import RETRIEVAL
from forerun.verify import RULES

log = logging.getLogger("forerun.server")
Json = dict[str, Any]
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
    keys = ApiKeys(settings) if keys is None else keys
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


NAME = re.compile(r"\w[\w.-]{0,63}(/\w[\w.-]{0,63}){0,3}", re.ASCII)
PATTERNS = ("*", "*/*", "*/*/*", "*/*/*/*")  # of the paths that match NAME


class IndexRequest(Body):
    """An index of the server's folder, and the client whose requests it serves."""

    name: Annotated[
        str, Field(max_length=260, description="Its directory, below the folder of --indices.")
    ]
    client: Annotated[
        str,
        Field(
            max_length=512,
            description="Only for requests with this client's key (a NAME in --api-keys).",
        ),
    ] = ""


class Indices:
    """The indices of a folder, some of which are loaded."""

    def __init__(self, service: EngineService, folder: Path, clients: Collection[str]) -> None:
        self.service = service
        self.folder = folder
        self.clients = clients
        self._lock = asyncio.Lock()

    @property
    def retrieval(self) -> Retrieval:
        """The proposer that drafts from the loaded indices."""
        proposer = self.service.llm.engine.proposers[RETRIEVAL]
        assert isinstance(proposer, Retrieval)
        return proposer

    def load_all(self) -> None:
        """Load all indices directly in the folder, for all clients. Raises LoadError."""
        if not self.folder.is_dir():
            advice = f"make it, and indices in it with forerun index --out {self.folder}/NAME"
            raise LoadError(f"there is no folder {self.folder}: {advice}")
        for path in sorted(path.parent for path in self.folder.glob(f"*/{LIST}")):
            self.retrieval.add(path.name, self.service.llm.index(path))

    async def cards(self) -> list[dict[str, Any]]:
        """Return the cards of all indices, loaded or not."""
        present = await asyncio.to_thread(self._names)
        loaded = self.retrieval.indices.copy()
        names = sorted(present | loaded.keys())
        return [_card(name, *loaded.get(name, (None, ""))) for name in names]

    def _names(self) -> set[str]:
        """Return the names of all indices below the folder."""
        paths = [path for depth in PATTERNS for path in self.folder.glob(f"{depth}/{LIST}")]
        return {str(path.parent.relative_to(self.folder)) for path in paths}

    async def load(self, name: str, client: str) -> dict[str, Any]:
        """Load an index, or read it again, and return its card. Raises ApiError."""
        if client and client not in self.clients:
            message = f"there is no client {client!r}: give a NAME of the file of --api-keys"
            raise ApiError(400, message, "client")
        async with self._lock:
            try:
                index = await asyncio.to_thread(_read, self.service.llm, self.folder, name)
            except LoadError as error:
                log.warning("an index was not loaded: %s", error)
                message = f"{name!r} holds no index that can be used; the server's log says why"
                raise ApiError(400, message, "name") from None
            await self.service.call(partial(self.retrieval.add, name, index, client))
        return _card(name, index, client)

    async def unload(self, name: str) -> None:
        """Stop drafting from an index. Raises ApiError."""
        async with self._lock:
            if name not in self.retrieval.indices:
                raise ApiError(404, f"no index {name!r} is in use", "name")
            await self.service.call(partial(self.retrieval.remove, name))


def _card(name: str, index: Index | None, client: str) -> dict[str, Any]:
    card: dict[str, Any] = {"id": name, "object": "index", "in_use": index is not None}
    if index is not None:
        num_files = sum(len(segment.files) for segment in index.segments)
        card |= {"client": client, "tokens": index.count, "files": num_files}
    return card


def _read(llm: LLM, folder: Path, name: str) -> Index:
    """Read an index for this model. Raises LoadError, and ApiError if it is not in the folder."""
    path = (folder / name).resolve() if NAME.fullmatch(name) else folder
    is_inside = path != folder and path.is_relative_to(folder.resolve())
    if not is_inside or not (path / LIST).is_file():
        raise ApiError(404, f"there is no index {name!r} in the folder of --indices", "name")
    return llm.index(path)


def mount(app: FastAPI, indices: Indices) -> None:
    """Add the endpoints, which are the operator's."""

    def check_operator() -> None:
        if not CALLER.get().operator:
            message = "indices are for all clients: this needs a key of the operator (--api-key)"
            raise ApiError(403, message)

    @app.get("/v1/indices")
    async def listing() -> dict[str, Any]:
        """The indices of the folder of --indices, and which of them are in use."""
        check_operator()
        return {"object": "list", "data": await indices.cards()}

    @app.post("/v1/indices")
    async def load(body: IndexRequest) -> dict[str, Any]:
        """Draft from an index, for all clients or for one. An index in use is read again."""
        check_operator()
        return await indices.load(body.name, body.client)

    @app.delete("/v1/indices/{name:path}")
    async def unload(name: str) -> dict[str, Any]:
        """Stop drafting from an index."""
        check_operator()
        await indices.unload(name)
        return {"id": name, "object": "index", "deleted": True}


# The page /docs.
DOCS_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'; "
    "base-uri 'none'"
)
FOREIGN = ("Becomes ", "Ignored: ", "Other values are refused: ")  # from `fields.describe`
CHAT: Json = {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}
EXAMPLES: dict[str, Json] = {
    "/v1/completions": {"prompt": "def fib(n):", "max_tokens": 64, "seed": 1},
    "/v1/chat/completions": CHAT | {"stream": True},
    "/v1/responses": {"input": "Why is the sky blue?"},
    "/v1/embeddings": {"input": ["a cat", "a dog"]},
    "/tokenize": {"prompt": "def fib(n):"},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/api/chat": CHAT,
    "/api/generate": {"prompt": "Why is the sky blue?"},
    "/api/embed": {"input": ["a cat", "a dog"]},
    "/api/embeddings": {"prompt": "a cat"},
    "/api/show": {},
}
CACHED_PAGES = 8  # one for each address under which the server is reached
TEMPLATE = Path(__file__).with_name("docs.html")


def add_page(app: FastAPI, model: str, keyed: bool) -> None:
    """Add both routes; `keyed` says whether requests need a key."""
    limiter = CapacityLimiter(1)

    @lru_cache(1)
    def document() -> bytes:
        return json.dumps(app.openapi(), ensure_ascii=False, separators=(",", ":")).encode()

    @lru_cache(CACHED_PAGES)
    def page(base: str) -> str:
        return _Page(app.openapi(), model, base, keyed).render()

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        content = await to_thread.run_sync(document, limiter=limiter)
        return Response(content, media_type="application/json")

    @app.get("/docs", include_in_schema=False)
    async def docs(request: Request) -> Response:
        base = str(request.base_url).rstrip("/")
        text = await to_thread.run_sync(page, base, limiter=limiter)
        headers = {"Content-Security-Policy": DOCS_POLICY, "X-Content-Type-Options": "nosniff"}
        return HTMLResponse(text, headers=headers)


class _Page:
    """The page of one server under the address `base`."""

    def __init__(self, document: Json, model: str, base: str, keyed: bool) -> None:
        self.document = document
        self.model = model
        self.base = base
        self.keyed = keyed

    def render(self) -> str:
        """Return the page as HTML."""
        environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
        endpoints = [
            self._endpoint(method.upper(), path, operation)
            for path, operations in self.document["paths"].items()
            for method, operation in operations.items()
        ]
        return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
            endpoints=endpoints,
            model=self.model,
            base=self.base,
            version=self.document["info"]["version"],
            keyed=self.keyed,
        )

    def _endpoint(self, method: str, path: str, operation: Json) -> Json:
        """Return one operation for the template; `others` are the fields of other servers."""
        rows: list[Json] = []
        if body := operation.get("requestBody"):
            schema = self._resolve(body["content"]["application/json"]["schema"])
            required = schema.get("required", ())
            for name, field in schema["properties"].items():
                description = field.get("description", "")
                row = {"name": name, "kind": self._kind(field), "says": description}
                rows.append(row | {"needed": name in required})
        rows.sort(key=lambda row: not row["needed"])
        return {
            "method": method,
            "path": path,
            "says": operation.get("description", ""),
            "fields": [row for row in rows if not row["says"].startswith(FOREIGN)],
            "others": [row for row in rows if row["says"].startswith(FOREIGN)],
            "command": self._command(method, path),
        }

    def _resolve(self, schema: Json) -> Json:
        name = schema.get("$ref", "").rpartition("/")[2]
        return self.document["components"]["schemas"][name] if name else schema

    def _kind(self, schema: Json) -> str:
        """Describe the type of a field in a few words."""
        if "$ref" in schema:
            properties = self._resolve(schema).get("properties", {})
            names = [
                name
                for name, field in properties.items()
                if not field.get("description", "").startswith(FOREIGN)
            ]
            return f"object of {', '.join(names)}"
        if alternatives := schema.get("anyOf") or schema.get("oneOf"):
            kinds = [self._kind(part) for part in alternatives if part.get("type") != "null"]
            return " or ".join(dict.fromkeys(kinds))
        if "enum" in schema or "const" in schema:
            values = schema.get("enum", [schema.get("const")])
            return " or ".join(json.dumps(value) for value in values if value is not None)
        if schema.get("type") == "array":
            return f"list of {self._kind(schema.get('items', {})) or 'anything'}"
        return str(schema.get("type", ""))

    def _command(self, method: str, path: str) -> str:
        """Return a curl command for an operation."""
        words = ["curl"]
        if method not in ("GET", "POST"):
            words += ["-X", method]
        words.append(self.base + path.replace("/v1/models/{name}", f"/v1/models/{self.model}"))
        if self.keyed and path != "/health":
            words += ["-H", "Authorization: Bearer KEY"]
        if path in EXAMPLES:
            model = {} if path in ("/tokenize", "/detokenize") else {"model": self.model}
            body = json.dumps(model | EXAMPLES[path])
            words += ["-H", "Content-Type: application/json", "-d", body]
        return shlex.join(words)
