"""Ollama's API under /api: the same chats and embeddings in its formats, streamed as JSON lines."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BeforeValidator, Field, ValidationError
from pydantic_core import PydanticCustomError
from starlette.concurrency import run_in_threadpool

from forerun import __version__
from forerun.catalog.survey import Survey, survey
from forerun.llm import LLM
from forerun.models.hub import find_model
from forerun.models.local import LocalModel
from forerun.server import errors, fields, limits
from forerun.server.conversation import THINKING_VARIABLES
from forerun.server.embeddings import Embedder, MakeContent, check_dimensions
from forerun.server.errors import ApiError
from forerun.server.jobs import Job
from forerun.server.openai import Chat, prepare_chat
from forerun.server.outputs import Json, Output, finish_reason
from forerun.server.protocol import (
    EFFORTS,
    MAX_MESSAGES,
    AnyMessage,
    Body,
    ChatRequest,
    Integer,
    List,
    Number,
    StrictModel,
    TokenIds,
    Tool,
)
from forerun.server.state import ServerState
from forerun.server.streaming import Formatter, respond, with_ignored
from forerun.types import Event
from forerun.utils import json_line

ACTIONS = {"pull": "POST", "push": "POST", "create": "POST", "copy": "POST", "delete": "DELETE"}
OPTIONS = [  # names in `options`, besides those in the table of foreign fields
    *("temperature", "top_k", "top_p", "min_p", "seed", "stop"),
    *("min_tokens", "max_tokens", "ignore_eos", "speculative", "cache_salt"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
]
UNSUPPORTED = {  # of /api/generate
    "suffix": "this server cannot fill gaps",
    "template": "the model's own is used; give raw and a prompt that has the layout",
    "images": "this server reads text only",
    "context": "send the conversation to /api/chat",
}
NEVER = datetime(2100, 1, 1, tzinfo=UTC).timestamp()  # when the model is unloaded


# Requests


def _read_think(value: Any) -> Any:
    if isinstance(value, bool) or (isinstance(value, str) and value in EFFORTS):
        return value
    raise PydanticCustomError("think", 'give true, false, "low", "medium" or "high"', {})


def _read_arguments(value: Any) -> Any:
    """Return the arguments of a call; OpenAI's clients keep them as JSON text."""
    if isinstance(value, str):
        try:
            value = limits.parse(value.encode()) if value.strip() else {}
        except ValueError:
            return value  # refused because it is not an object
    return {} if value is None else value


class OllamaFunction(StrictModel):
    """Name and arguments of a tool call."""

    foreign_fields = fields.CALL

    name: str
    arguments: Annotated[
        Json, BeforeValidator(_read_arguments, json_schema_input_type=Json | str | None)
    ] = Field(default_factory=dict)
    index: int | None = None


class OllamaCall(StrictModel):
    """A tool call as Ollama writes it."""

    foreign_fields = fields.CALL

    id: str | None = None
    type: str | None = None
    function: OllamaFunction


class OllamaMessage(AnyMessage):
    """A message of /api/chat."""

    tool_calls: List[OllamaCall] | None = None


class OllamaRequest(Body):
    """Fields of every request."""

    model: str
    options: Json | None = None
    keep_alive: Number | str | None = None


class OllamaGeneration(OllamaRequest):
    """Fields of every request that generates."""

    stream: bool | None = None
    format: str | Json | None = None
    think: Annotated[bool | str, BeforeValidator(_read_think)] | None = None
    truncate: bool | None = None
    shift: bool | None = None


class OllamaChat(OllamaGeneration):
    """/api/chat."""

    messages: Annotated[List[OllamaMessage], Field(max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[List[Tool], Field(max_length=128)] | None = None


class OllamaGenerate(OllamaGeneration):
    """/api/generate."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None
    template: str | None = None
    images: List[Any] | None = None
    context: TokenIds | None = None


class OllamaEmbed(OllamaRequest):
    """/api/embed."""

    input: str | List[str]
    truncate: bool | None = None
    dimensions: Integer | None = None


class OllamaEmbeddings(OllamaRequest):
    """/api/embeddings, which /api/embed replaces."""

    prompt: str


class OllamaShow(Body):
    """/api/show; older clients send `name`."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None


def to_chat(body: OllamaChat) -> ChatRequest:
    """Return the chat that a request to /api/chat asks for.

    Raises ApiError, RequestValidationError.
    """
    messages = [_message(message) for message in body.messages or []]
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or []]
    return _chat_request(body, messages, {"tools": tools} if tools else {})


def prompt_to_chat(body: OllamaGenerate) -> ChatRequest:
    """Return the chat of a single prompt, with the options of a raw one. Raises ApiError."""
    for name, advice in UNSUPPORTED.items():
        if getattr(body, name):
            raise ApiError(400, f"{name} is not supported: {advice}", name)
    if body.raw and body.system:
        message = "raw uses the prompt as it is: put the system message into it"
        raise ApiError(400, message, "system")
    system = [{"role": "system", "content": body.system}] if body.system else []
    return _chat_request(body, [*system, {"role": "user", "content": body.prompt}], {})


def _message(message: OllamaMessage) -> Json:
    values = message.model_dump(exclude={"tool_calls"}, exclude_none=True)
    calls = []
    for i, call in enumerate(message.tool_calls or ()):
        arguments = json.dumps(call.function.arguments)
        function = {"name": call.function.name, "arguments": arguments}
        calls.append({"id": call.id or f"call_{i}", "function": function})
    return values | {"tool_calls": calls} if calls else values


def _chat_request(body: OllamaGeneration, messages: list[Json], more: Json) -> ChatRequest:
    options = dict(body.options or {})
    known = [*OPTIONS, *fields.TABLE]
    for name in options:
        if name not in known:
            raise fields.unknown_field(name, known)
    if isinstance(body.think, bool):
        options["enable_thinking"] = body.think
    elif body.think is not None:
        options["reasoning_effort"] = body.think
    if isinstance(body.format, dict) and body.format:
        schema = {"schema": body.format}
        more["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif body.format == "json":
        more["response_format"] = {"type": "json_object"}
    elif body.format:
        raise ApiError(400, "format must be 'json' or a JSON schema", "format")
    try:
        return ChatRequest.model_validate({"messages": messages, **options, **more})
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from None


# Responses


class Ollama(Formatter):
    """Ollama's chats and generations, as a body or as lines of JSON."""

    media_type = "application/x-ndjson"
    headers: ClassVar[dict[str, str]] = {}

    def __init__(self, chat: Chat, body: OllamaGeneration) -> None:
        ignored = ["think" if name in THINKING_VARIABLES else name for name in chat.ignored]
        ignored += body.ignored
        if body.keep_alive is not None:
            ignored.append("keep_alive")
        super().__init__(body.stream is not False, list(dict.fromkeys(ignored)))
        self.chat = chat
        self.body = body

    def full(self, outputs: Sequence[Output]) -> Json:
        message = self.chat.choice(outputs[0], 0)["message"]
        return self._line(message) | self._summary(outputs[0])

    def chunks(self, outputs: Sequence[Output], index: int, event: Event) -> Iterable[str]:
        delta = self.chat.delta(outputs[0], 0, event)["delta"]
        if delta.get("content") or delta.get("tool_calls"):
            yield _json_line(self._line(delta) | {"done": False})

    def end(self, outputs: Sequence[Output]) -> Iterable[str]:
        yield _json_line(self._line({}) | self._summary(outputs[0]))

    def error(self, error: Exception) -> str:
        return _json_line({"error": errors.logged_body(error)[1]["error"]["message"]})

    def _line(self, message: Json) -> Json:
        """Return a line with the content and the calls of an OpenAI message."""
        text = message.get("content") or ""
        line: Json = {"model": self.body.model, "created_at": timestamp(time.time())}
        if not isinstance(self.body, OllamaChat):
            return line | {"response": text}
        own: Json = {"role": "assistant", "content": text}
        if calls := message.get("tool_calls"):
            own["tool_calls"] = [_call(call, i) for i, call in enumerate(calls)]
        return line | {"message": own}

    def _summary(self, output: Output) -> Json:
        """Return the last fields of an answer; durations are in nanoseconds."""
        job = output.job
        now = time.perf_counter()
        first = job.first or now
        return {
            "done": True,
            "done_reason": finish_reason(output.finish_reason),
            "total_duration": _nanoseconds(now - job.arrived),
            "load_duration": 0,
            "prompt_eval_count": output.stats.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(first - job.arrived),
            "eval_count": len(output.token_ids),
            "eval_duration": _nanoseconds((job.last or now) - first),
        }


def _call(call: Json, index: int) -> Json:
    """Return a call of OpenAI's format in Ollama's, with arguments as an object."""
    name = call["function"]["name"]
    arguments = json.loads(call["function"]["arguments"])
    function = {"index": call.get("index", index), "name": name, "arguments": arguments}
    return {"id": call["id"], "function": function}


def timestamp(seconds: float) -> str:
    """Return a time since the epoch in Ollama's format."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _json_line(value: Json) -> str:
    return json_line(value) + "\n"


def _nanoseconds(seconds: float) -> int:
    return int(1e9 * seconds)


class ModelCard:
    """The served model as Ollama's clients read it: its name, its file, its sizes."""

    def __init__(self, state: ServerState) -> None:
        self.llm: LLM = state.service.llm
        self.name = state.name if ":" in state.name else f"{state.name}:latest"
        self.digest = hashlib.sha256(state.fingerprint.encode()).hexdigest()
        # read now, because the files may be gone at a later request
        found = LocalModel(self.name, find_model(self.llm.config.model), "")
        self.file: Survey = survey([found])[0]
        # the time of the file, not of loading: all replicas say the same
        self.modified = int(Path(self.file.path).stat().st_mtime)

    @property
    def details(self) -> Json:
        """Family, format and size of the model."""
        family = self.llm.decoder.config.family
        count = self.file.parameters
        return {
            "parent_model": "",
            "format": "gguf" if self.file.path.endswith(".gguf") else "safetensors",
            "family": family,
            "families": [family],
            "parameter_size": _parameter_size(count) if count else "",
            "quantization_level": self.file.format.split(" ")[0],
        }

    def listed(self) -> Json:
        """Return the entry in /api/tags."""
        return {
            "name": self.name,
            "model": self.name,
            "modified_at": timestamp(self.modified),
            "size": self.file.bytes,
            "digest": self.digest,
            "details": self.details,
        }

    def running(self) -> Json:
        """Return the entry in /api/ps."""
        entry = self.listed()
        del entry["modified_at"]
        size = self.llm.decoder.weight_bytes
        return entry | {
            "size": size,
            "size_vram": size if self.llm.decoder.device.type != "cpu" else 0,
            "expires_at": timestamp(NEVER),
            "context_length": self.llm.decoder.context,
        }

    def shown(self) -> Json:
        """Return the response of /api/show."""
        config = self.llm.decoder.config
        template = self.llm.tokenizer.template if self.llm.tokenizer else ""
        sampling = sorted(self.llm.sampling.items())
        sizes = {
            "context_length": config.context,
            "embedding_length": config.hidden,
            "block_count": config.layers,
            "feed_forward_length": config.intermediate,
            "attention.head_count": config.heads,
            "attention.head_count_kv": config.kv_heads,
            "vocab_size": config.vocab,
        }
        return {
            "modelfile": f"FROM {self.name}",
            "parameters": "\n".join(f"{name} {value}" for name, value in sampling),
            "template": template,
            "details": self.details,
            "model_info": {
                "general.architecture": config.family,
                "general.parameter_count": self.file.parameters,
                **{f"{config.family}.{name}": value for name, value in sizes.items()},
            },
            "capabilities": ["completion", *(["tools"] if "tools" in template else [])],
            "modified_at": timestamp(self.modified),
        }


def _parameter_size(count: int) -> str:
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"


# Routes


def mount(app: FastAPI, state: ServerState, embedder: Embedder, card: ModelCard) -> None:
    """Add the routes under /api."""
    _mount_generation(app, state)
    _mount_embeddings(app, state, embedder)
    _mount_models(app, state, card)
    for action, method in ACTIONS.items():
        path = f"/api/{action}"
        app.add_api_route(path, _refuse_action, methods=[method], include_in_schema=False)


async def _refuse_action() -> None:
    advice = "for another, start forerun serve MODEL"
    raise ApiError(501, f"this server serves the model that it was started with: {advice}")


def _mount_generation(app: FastAPI, state: ServerState) -> None:
    @app.post("/api/chat")
    async def ollama_chat(body: OllamaChat, request: Request) -> Response:
        """Answer a conversation, as Ollama's API does."""
        if not body.messages:
            return _loaded(state, body, {"message": {"role": "assistant", "content": ""}})
        return await _generate(state, body, request, partial(to_chat, body))

    @app.post("/api/generate")
    async def ollama_generate(body: OllamaGenerate, request: Request) -> Response:
        """Answer a prompt, as Ollama's API does."""
        if not body.prompt:
            prompt_to_chat(body)
            return _loaded(state, body, {"response": ""})
        raw = body.prompt if body.raw else None
        return await _generate(state, body, request, partial(prompt_to_chat, body), raw)


def _loaded(state: ServerState, body: OllamaGeneration, content: Json) -> Response:
    """Answer a request without a prompt, with which clients load or unload the model."""
    state.check(body.model)
    reason = "unload" if body.keep_alive in (0, "0") else "load"
    head = {"model": body.model, "created_at": timestamp(time.time())}
    return JSONResponse({**head, **content, "done": True, "done_reason": reason})


async def _generate(
    state: ServerState,
    body: OllamaGeneration,
    http: Request,
    read: Callable[[], ChatRequest],
    raw: str | None = None,
) -> Response:
    """Answer the chat that `read` returns; `raw` is a prompt that replaces its messages."""
    state.check(body.model)

    def prepare() -> tuple[Chat, list[Job]]:
        return prepare_chat(state, read(), None if raw is None else state.tokens(raw))

    chat, jobs = await state.prepare(prepare)
    return await respond(state, Ollama(chat, body), jobs, http)


def _mount_embeddings(app: FastAPI, state: ServerState, embedder: Embedder) -> None:
    async def embed(
        http: Request,
        body: OllamaEmbed | OllamaEmbeddings,
        texts: list[str],
        content: MakeContent,
        truncate: bool,
    ) -> Response:
        ignored = [name for name in ("options", "keep_alive") if getattr(body, name) is not None]
        if not texts:
            return with_ignored(JSONResponse(content(np.empty((0, 0)), 0)), ignored)
        return with_ignored(await embedder.respond(http, texts, content, truncate), ignored)

    @app.post("/api/embed")
    async def ollama_embed(body: OllamaEmbed, request: Request) -> Response:
        """Vectors of texts."""
        state.check(body.model)
        check_dimensions(state.service.llm, body.dimensions or None)
        texts = body.input
        if isinstance(texts, str):
            texts = [texts] if texts else []
        start = time.perf_counter()

        def content(vectors: np.ndarray, num_tokens: int) -> Json:
            return {
                "model": body.model,
                "embeddings": vectors.tolist(),
                "total_duration": _nanoseconds(time.perf_counter() - start),
                "load_duration": 0,
                "prompt_eval_count": num_tokens,
            }

        return await embed(request, body, texts, content, body.truncate is not False)

    @app.post("/api/embeddings")
    async def ollama_embeddings(body: OllamaEmbeddings, request: Request) -> Response:
        """The vector of one text."""
        state.check(body.model)

        def content(vectors: np.ndarray, _: int) -> Json:
            return {"embedding": vectors.ravel().tolist()}

        texts = [body.prompt] if body.prompt else []
        return await embed(request, body, texts, content, True)


def _mount_models(app: FastAPI, state: ServerState, card: ModelCard) -> None:
    @app.get("/api/tags")
    async def ollama_tags() -> Json:
        """The one model that is served."""
        return {"models": [await run_in_threadpool(card.listed)]}

    @app.get("/api/ps")
    async def ollama_ps() -> Json:
        """The one model that is loaded."""
        return {"models": [await run_in_threadpool(card.running)]}

    @app.post("/api/show")
    async def ollama_show(body: OllamaShow) -> Json:
        """Properties of the model."""
        if body.model is None and body.name is None:
            raise ApiError(400, "give a model", "model")
        state.check(body.model or body.name)
        return await run_in_threadpool(card.shown)

    @app.get("/api/version")
    async def ollama_version() -> dict[str, str]:
        """The version of forerun."""
        return {"version": __version__}
