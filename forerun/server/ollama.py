"""Ollama's API under /api: the same chats in its shapes, as lines of JSON."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

import numpy as np
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.concurrency import run_in_threadpool

from forerun import __version__
from forerun.server import errors
from forerun.server.answers import Answer, finish
from forerun.server.api import accepted, chat_orders, submit, unless_gone, warned
from forerun.server.dialects import Chat
from forerun.server.embeddings import Embedder, check_size, tokens_of
from forerun.server.errors import ApiError
from forerun.server.kitchen import Kitchen
from forerun.server.ollama_card import Card
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
from forerun.server.tickets import Group, Order

NOT_HERE = "this server has the one model that it was started with: for another, start forerun serve MODEL"
ACTIONS = (("POST", "pull"), ("POST", "push"), ("POST", "create"), ("POST", "copy"), ("DELETE", "delete"))
Json = dict[str, Any]


def mount(app: FastAPI, kitchen: Kitchen, embedder: Embedder) -> None:
    """Add the routes under /api."""
    _generation(app, kitchen)
    _embedding(app, kitchen, embedder)
    _models(app, kitchen)
    for method, name in ACTIONS:
        app.add_api_route(f"/api/{name}", _not_here, methods=[method], include_in_schema=False)


async def _not_here() -> None:
    """Not here: this server serves one model."""
    raise ApiError(501, NOT_HERE)


def _generation(app: FastAPI, kitchen: Kitchen) -> None:
    @app.post("/api/chat")
    async def ollama_chat(body: OllamaChat, request: Request) -> Response:
        """Answer a conversation, as Ollama's API does."""
        if not body.messages:
            return _loaded(kitchen, body, {"message": {"role": "assistant", "content": ""}})
        return await _answer(kitchen, body, partial(chat_of, body), request)

    @app.post("/api/generate")
    async def ollama_generate(body: OllamaGenerate, request: Request) -> Response:
        """Answer a prompt, as Ollama's API does."""
        if not body.prompt:
            chat_of_prompt(body)
            return _loaded(kitchen, body, {"response": ""})
        return await _answer(kitchen, body, partial(chat_of_prompt, body), request, body.prompt if body.raw else None)


def _loaded(kitchen: Kitchen, body: OllamaGeneration, said: Json) -> Response:
    """The answer to a request that says nothing: it asks for the model to be loaded, or unloaded."""
    kitchen.check(body.model)
    reason = "unload" if body.keep_alive in (0, "0") else "load"
    return JSONResponse({"model": body.model, "created_at": _now(), **said, "done": True, "done_reason": reason})


async def _answer(
    kitchen: Kitchen, body: OllamaGeneration, read: Callable[[], ChatRequest], http: Request, raw: str | None = None
) -> Response:
    kitchen.check(body.model)

    def ordered() -> tuple[ChatRequest, Chat, list[Order]]:
        chat = read()
        return chat, *chat_orders(kitchen, chat, None if raw is None else kitchen.tokens(raw))

    chat, dialect, orders = await kitchen.prepare(ordered)
    group = await submit(kitchen, orders)
    writer = Writer(dialect, body)
    response: Response
    if body.stream is False:
        response = await unless_gone(http, lambda: writer.whole(group), lambda: kitchen.service.cancel(group))
    else:
        await accepted(kitchen, group)
        response = StreamingResponse(writer.stream(group), media_type="application/x-ndjson")
    return warned(response, [*chat.left_out, *(["keep_alive"] if body.keep_alive is not None else [])])


class Writer:
    """Writes one answer, whole or line by line."""

    def __init__(self, chat: Chat, body: OllamaGeneration) -> None:
        self.chat, self.body, self.talks = chat, body, isinstance(body, OllamaChat)

    async def whole(self, group: Group) -> Response:
        """The answer in one piece."""
        answer = Answer(group.tickets[0])
        await group.accepted()
        async for _, event in group.events():
            answer.add(event)
        message = self.chat.choice(answer, 0)["message"]
        return JSONResponse(self._line(message) | self._end(answer))

    async def stream(self, group: Group) -> AsyncIterator[str]:
        """The answer line by line. An error on the way is a line too."""
        answer = Answer(group.tickets[0])
        try:
            async for _, event in group.events():
                answer.add(event)
                for choice in self.chat.deltas(answer, 0, event):
                    delta = choice["delta"]
                    if delta.get("content") or delta.get("tool_calls"):
                        yield _json_line(self._line(delta) | {"done": False})
            yield _json_line(self._line({}) | self._end(answer))
        except Exception as error:
            yield _json_line({"error": errors.told(error)[1]["error"]["message"]})
        finally:
            self.chat.kitchen.service.cancel(group)

    def _line(self, said: Json) -> Json:
        text = said.get("content") or ""
        line: Json = {"model": self.body.model, "created_at": _now()}
        if not self.talks:
            return line | {"response": text}
        message: Json = {"role": "assistant", "content": text}
        if calls := said.get("tool_calls"):
            message["tool_calls"] = [
                {
                    "id": call["id"],
                    "function": {
                        "index": i,
                        "name": call["function"]["name"],
                        "arguments": _arguments(call["function"]["arguments"]),
                    },
                }
                for i, call in enumerate(calls)
            ]
        return line | {"message": message}

    def _end(self, answer: Answer) -> Json:
        """What the last line says: why it ended, and times in nanoseconds."""
        ticket, now = answer.ticket, time.perf_counter()
        first = ticket.first or now
        return {
            "done": True,
            "done_reason": finish(answer.finish_reason),
            "total_duration": _nanoseconds(now - ticket.arrived),
            "load_duration": 0,
            "prompt_eval_count": answer.stats.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(first - ticket.arrived),
            "eval_count": len(answer.token_ids),
            "eval_duration": _nanoseconds((ticket.last or now) - first),
        }


def _arguments(text: str) -> Any:
    """Arguments as an object; a model may have written something else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _embedding(app: FastAPI, kitchen: Kitchen, embedder: Embedder) -> None:
    llm = kitchen.service.llm

    def idle(body: OllamaEmbed | OllamaEmbeddings) -> list[str]:
        return [name for name in ("options", "keep_alive") if getattr(body, name) is not None]

    async def vectors(texts: list[str], cut: bool) -> tuple[Sequence[np.ndarray], int]:
        """(a vector for each text, how many tokens were read)."""
        tokens = await kitchen.prepare(tokens_of, kitchen, texts, embedder.most if cut else None) if texts else []
        return list(await embedder.embed(tokens)) if tokens else [], sum(map(len, tokens))

    @app.post("/api/embed")
    async def ollama_embed(body: OllamaEmbed, request: Request) -> Response:
        """Vectors of texts."""
        kitchen.check(body.model)
        check_size(llm, body.dimensions or None)
        texts = ([body.input] if body.input else []) if isinstance(body.input, str) else body.input
        start = time.perf_counter()

        async def work() -> Response:
            made, count = await vectors(texts, body.truncate is not False)
            took = {"total_duration": _nanoseconds(time.perf_counter() - start), "load_duration": 0}

            def content() -> Json:
                listed = [vector.tolist() for vector in made]
                return {"model": body.model, "embeddings": listed, **took, "prompt_eval_count": count}

            return await kitchen.write(content, sum(map(len, made)))

        return warned(await unless_gone(request, work, lambda: None), idle(body))

    @app.post("/api/embeddings")
    async def ollama_embeddings(body: OllamaEmbeddings, request: Request) -> Response:
        """The vector of one text."""
        kitchen.check(body.model)

        async def work() -> Response:
            made, _ = await vectors([body.prompt] if body.prompt else [], True)
            return JSONResponse({"embedding": made[0].tolist() if made else []})

        return warned(await unless_gone(request, work, lambda: None), idle(body))


def _models(app: FastAPI, kitchen: Kitchen) -> None:
    card = Card(kitchen)

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
    return json.dumps(value, ensure_ascii=False) + "\n"


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _nanoseconds(seconds: float) -> int:
    return int(1e9 * seconds)
