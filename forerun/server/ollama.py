"""Ollama's API under /api: the same chats in its shapes, as lines of JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool

from forerun import __version__
from forerun.server import errors
from forerun.server.answers import Answer, finish
from forerun.server.api import answer, chat_orders, warned
from forerun.server.dialects import Chat, Dialect
from forerun.server.embeddings import Content, Embedder, check_size
from forerun.server.errors import ApiError
from forerun.server.jobs import Job
from forerun.server.ollama_card import Card, stamp
from forerun.server.ollama_protocol import (
    OllamaChat,
    OllamaEmbed,
    OllamaEmbeddings,
    OllamaGenerate,
    OllamaGeneration,
    OllamaShow,
    chat_of,
    chat_of_prompt,
)
from forerun.server.protocol import ChatRequest
from forerun.server.state import ServerState
from forerun.server.translate import THOUGHTS
from forerun.types import Event
from forerun.utils import json_line

NOT_HERE = (
    "this server has the one model that it was started with: for another, start forerun serve MODEL"
)
ACTIONS = (
    ("POST", "pull"),
    ("POST", "push"),
    ("POST", "create"),
    ("POST", "copy"),
    ("DELETE", "delete"),
)
Json = dict[str, Any]


def mount(app: FastAPI, kitchen: ServerState, embedder: Embedder, card: Card) -> None:
    """Add the routes under /api."""
    _generation(app, kitchen)
    _embedding(app, kitchen, embedder)
    _models(app, kitchen, card)
    for method, name in ACTIONS:
        app.add_api_route(f"/api/{name}", _not_here, methods=[method], include_in_schema=False)


async def _not_here() -> None:
    """Not here: this server serves one model."""
    raise ApiError(501, NOT_HERE)


def _generation(app: FastAPI, kitchen: ServerState) -> None:
    @app.post("/api/chat")
    async def ollama_chat(body: OllamaChat, request: Request) -> Response:
        """Answer a conversation, as Ollama's API does."""
        if not body.messages:
            return _loaded(kitchen, body, {"message": {"role": "assistant", "content": ""}})
        return await _answer(kitchen, body, request, partial(chat_of, body))

    @app.post("/api/generate")
    async def ollama_generate(body: OllamaGenerate, request: Request) -> Response:
        """Answer a prompt, as Ollama's API does."""
        if not body.prompt:
            chat_of_prompt(body)
            return _loaded(kitchen, body, {"response": ""})
        return await _answer(
            kitchen, body, request, partial(chat_of_prompt, body), body.prompt if body.raw else None
        )


def _loaded(kitchen: ServerState, body: OllamaGeneration, said: Json) -> Response:
    """The answer to a request that says nothing: it asks for the model to be loaded, or
    unloaded."""
    kitchen.check(body.model)
    reason = "unload" if body.keep_alive in (0, "0") else "load"
    return JSONResponse(
        {"model": body.model, "created_at": stamp(), **said, "done": True, "done_reason": reason}
    )


async def _answer(
    kitchen: ServerState,
    body: OllamaGeneration,
    http: Request,
    read: Callable[[], ChatRequest],
    raw: str | None = None,
) -> Response:
    """The answer to a chat; `raw` is a prompt that stands for its messages."""
    kitchen.check(body.model)

    def ordered() -> tuple[Chat, list[Job]]:
        return chat_orders(kitchen, read(), None if raw is None else kitchen.tokens(raw))

    chat, orders = await kitchen.prepare(ordered)
    return await answer(kitchen, Ollama(chat, body), orders, http)


class Ollama(Dialect):
    """Ollama's chats and generations, whole or as lines of JSON."""

    media_type = "application/x-ndjson"
    headers: ClassVar[dict[str, str]] = {}

    def __init__(self, chat: Chat, body: OllamaGeneration) -> None:
        idle = ["keep_alive"] if body.keep_alive is not None else []
        left_out = ["think" if name in THOUGHTS else name for name in chat.left_out]
        super().__init__(
            body.stream is not False, [*dict.fromkeys([*left_out, *body.left_out, *idle])]
        )
        self.chat, self.body, self.talks = chat, body, isinstance(body, OllamaChat)

    def whole(self, answers: Sequence[Answer]) -> Json:
        return self._line(self.chat.choice(answers[0], 0)["message"]) | self._end(answers[0])

    def lines(self, answers: Sequence[Answer], index: int, event: Event) -> Iterable[str]:
        delta = self.chat.change(answers[0], 0, event)["delta"]
        if delta.get("content") or delta.get("tool_calls"):
            yield _json_line(self._line(delta) | {"done": False})

    def end(self, answers: Sequence[Answer]) -> Iterable[str]:
        yield _json_line(self._line({}) | self._end(answers[0]))

    def failed(self, error: Exception) -> str:
        return _json_line({"error": errors.logged_body(error)[1]["error"]["message"]})

    def _line(self, said: Json) -> Json:
        text = said.get("content") or ""
        line: Json = {"model": self.body.model, "created_at": stamp()}
        if not self.talks:
            return line | {"response": text}
        message: Json = {"role": "assistant", "content": text}
        if calls := said.get("tool_calls"):
            message["tool_calls"] = [
                {
                    "id": call["id"],
                    "function": {
                        "index": call.get("index", i),
                        "name": call["function"]["name"],
                        "arguments": _arguments(call["function"]["arguments"]),
                    },
                }
                for i, call in enumerate(calls)
            ]
        return line | {"message": message}

    def _end(self, answer: Answer) -> Json:
        """What the last line says: why it ended, and times in nanoseconds."""
        job, now = answer.job, time.perf_counter()
        first = job.first or now
        return {
            "done": True,
            "done_reason": finish(answer.finish_reason),
            "total_duration": _nanoseconds(now - job.arrived),
            "load_duration": 0,
            "prompt_eval_count": answer.stats.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(first - job.arrived),
            "eval_count": len(answer.token_ids),
            "eval_duration": _nanoseconds((job.last or now) - first),
        }


def _arguments(text: str) -> Any:
    """Arguments as an object; a model may have written something else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _embedding(app: FastAPI, kitchen: ServerState, embedder: Embedder) -> None:
    llm = kitchen.service.llm

    async def answered(
        http: Request,
        body: OllamaEmbed | OllamaEmbeddings,
        texts: list[str],
        content: Content,
        cut: bool = True,
    ) -> Response:
        idle = [name for name in ("options", "keep_alive") if getattr(body, name) is not None]
        if not texts:
            return warned(JSONResponse(content(np.empty((0, 0)), 0)), idle)
        return warned(await embedder.answer(http, texts, content, cut), idle)

    @app.post("/api/embed")
    async def ollama_embed(body: OllamaEmbed, request: Request) -> Response:
        """Vectors of texts."""
        kitchen.check(body.model)
        check_size(llm, body.dimensions or None)
        texts = ([body.input] if body.input else []) if isinstance(body.input, str) else body.input
        start = time.perf_counter()

        def content(vectors: np.ndarray, count: int) -> Json:
            took = {"total_duration": _nanoseconds(time.perf_counter() - start), "load_duration": 0}
            return {
                "model": body.model,
                "embeddings": vectors.tolist(),
                **took,
                "prompt_eval_count": count,
            }

        return await answered(request, body, texts, content, body.truncate is not False)

    @app.post("/api/embeddings")
    async def ollama_embeddings(body: OllamaEmbeddings, request: Request) -> Response:
        """The vector of one text."""
        kitchen.check(body.model)
        texts = [body.prompt] if body.prompt else []
        return await answered(
            request, body, texts, lambda vectors, _: {"embedding": vectors.ravel().tolist()}
        )


def _models(app: FastAPI, kitchen: ServerState, card: Card) -> None:
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
        """What the model is."""
        if body.model is None and body.name is None:
            raise ApiError(400, "give a model", "model")
        kitchen.check(body.model or body.name)
        return await run_in_threadpool(card.shown)

    @app.get("/api/version")
    async def ollama_version() -> dict[str, str]:
        """The version of forerun."""
        return {"version": __version__}


def _json_line(value: Json) -> str:
    return json_line(value) + "\n"


def _nanoseconds(seconds: float) -> int:
    return int(1e9 * seconds)
