"""/v1/completions and /v1/chat/completions: one request to its answer, whole or streamed."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.concurrency import run_in_threadpool

from forerun.server import errors, tools, translate
from forerun.server.answers import (
    Answer,
    chat_logprobs,
    completion_choice,
    completion_logprobs,
    finish,
    metrics,
    trace,
    usage,
)
from forerun.server.errors import ApiError
from forerun.server.protocol import ChatRequest, CompletionRequest, Generation
from forerun.server.service import Group, Order, Service
from forerun.types import Event

GONE = 499  # nginx's status for a client that did not wait


@dataclass(frozen=True, slots=True)
class Kitchen:
    """What every handler needs: the service and what the server was told."""

    service: Service
    name: str
    fingerprint: str
    timeout: float
    max_prompt: int

    def check(self, model: str | None, prompts: Sequence[Sequence[int]] = ()) -> None:
        """Refuse a model that is not served, and prompts over this server's limit."""
        if model is not None and model != self.name:
            raise ApiError(404, f"there is no model {model!r} here, only {self.name!r}", "model", "model_not_found")
        longest = max((len(p) for p in prompts), default=0)
        if self.max_prompt and longest > self.max_prompt:
            raise ApiError(400, f"the prompt has {longest} tokens, this server takes {self.max_prompt}", "prompt")


async def completions(kitchen: Kitchen, body: CompletionRequest, http: Request) -> Response:
    """Answer /v1/completions."""
    llm = kitchen.service.llm
    many = isinstance(body.prompt, list) and not isinstance((body.prompt or [0])[0], int)
    kitchen.service.admit((len(body.prompt) if many else 1) * (body.n or 1))  # before any work is done on them
    prompts = await run_in_threadpool(translate.completion_prompts, llm, body)
    kitchen.check(body.model, prompts)
    wanted = translate.COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    params = translate.sampling(llm, body, wanted, body.logprobs, translate.grammar_of(body.response_format))
    orders = await run_in_threadpool(
        lambda: [order for prompt in prompts for order in translate.orders(llm, prompt, params, body)]
    )
    dialect = Completions(kitchen, body, params.n, params.seed, prompts)
    return await answer(kitchen, dialect, orders, http)


async def chat(kitchen: Kitchen, body: ChatRequest, http: Request) -> Response:
    """Answer /v1/chat/completions."""
    dialect, orders = await run_in_threadpool(chat_orders, kitchen, body)
    return await answer(kitchen, dialect, orders, http)


def chat_orders(kitchen: Kitchen, body: ChatRequest) -> tuple[Chat, list[Order]]:
    """A chat as orders for the engine, and the dialect its answer is written in."""
    llm = kitchen.service.llm
    prompt = translate.chat_prompt(llm, body)
    kitchen.check(body.model, [prompt])
    forced = tools.required(body.tools or (), body.tool_choice)
    if forced and body.response_format and body.response_format.type != "text":
        raise ApiError(400, "tool_choice and response_format both demand a form: give one", "response_format")
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", "top_logprobs")
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    params = translate.sampling(
        llm,
        body,
        translate.room(llm, prompt, asked),
        (body.top_logprobs or 0) if body.logprobs else None,
        forced or translate.grammar_of(body.response_format),
    )
    prediction = translate.text_of(body.prediction.content) if body.prediction else None
    orders = translate.orders(llm, prompt, params, body, prediction)
    return Chat(kitchen, body, params.n, params.seed), orders


class Dialect:
    """How one endpoint writes answers. `body` is the request, n its completions for each prompt."""

    prefix, kind, chunk_kind = "", "", ""

    def __init__(self, kitchen: Kitchen, body: Generation, n: int, seed: int | None) -> None:
        self.kitchen, self.body, self.n = kitchen, body, n
        self.tokenizer = kitchen.service.llm.tokenizer
        self.head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": kitchen.name,
            "system_fingerprint": kitchen.fingerprint,
            "seed": seed,
        }

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        choices = [self.choice(answer, i) for i, answer in enumerate(answers)]
        counted = {"usage": usage(answers, self.n), "metrics": metrics(answers)}
        return {**self.head, "object": self.kind, "choices": choices, **counted}

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """One chunk of a streamed answer."""
        return {**self.head, "object": self.chunk_kind, "choices": choices, **more}

    def last(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The chunk behind all choices, where usage is wanted."""
        return self.chunk([], usage=usage(answers, self.n), metrics=metrics(answers))

    def choice(self, answer: Answer, index: int) -> dict[str, Any]:
        """One choice of a whole answer."""
        raise NotImplementedError

    def first(self, count: int) -> list[dict[str, Any]]:
        """Chunks before anything has been said."""
        return []

    def deltas(self, answer: Answer, index: int, event: Event) -> list[dict[str, Any]]:
        """The choices of the chunk for an event that has just been added to `answer`."""
        raise NotImplementedError

    def with_ids(self, choice: dict[str, Any], token_ids: list[int]) -> dict[str, Any]:
        return choice | {"token_ids": token_ids} if self.body.return_token_ids else choice


class Completions(Dialect):
    """OpenAI's text completions."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(
        self, kitchen: Kitchen, body: CompletionRequest, n: int, seed: int | None, prompts: list[list[int]]
    ) -> None:
        super().__init__(kitchen, body, n, seed)
        self.echoes = [self._echo(prompt) if body.echo else "" for prompt in prompts]

    def _echo(self, prompt: list[int]) -> str:
        return self.tokenizer.decode(prompt) if self.tokenizer else ""

    def choice(self, answer: Answer, index: int) -> dict[str, Any]:
        text = self.echoes[index // self.n] + answer.text
        return self.with_ids(completion_choice(answer, index, self.tokenizer, text), answer.token_ids)

    def deltas(self, answer: Answer, index: int, event: Event) -> list[dict[str, Any]]:
        echo = self.echoes[index // self.n] if len(answer.token_ids) == len(event.token_ids) else ""
        choice = {"index": index, "text": echo + event.text, "logprobs": None}
        choice["finish_reason"] = finish(event.finish_reason)
        if event.logprobs is not None:
            before = len(answer.text) - len(event.text)
            choice["logprobs"] = completion_logprobs(event.logprobs, event.pieces, before, self.tokenizer)
        return [self.with_ids(choice, event.token_ids)]


class Chat(Dialect):
    """OpenAI's chat completions, tool calls included."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, kitchen: Kitchen, body: ChatRequest, n: int, seed: int | None) -> None:
        super().__init__(kitchen, body, n, seed)
        self.tools = (body.tools or []) if body.tool_choice != "none" else []
        self.sent: dict[int, int] = {}  # characters of each choice that have been streamed

    def choice(self, answer: Answer, index: int) -> dict[str, Any]:
        text, calls = tools.find(answer.text, self.tools) if self.tools else (answer.text, [])
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        if calls:
            message["tool_calls"] = calls
        choice = {
            "index": index,
            "message": message,
            "finish_reason": "tool_calls" if calls else finish(answer.finish_reason),
            "logprobs": chat_logprobs(answer.logprobs, self.tokenizer) if self._logprobs(answer) else None,
        }
        return self.with_ids(choice, answer.token_ids)

    def first(self, count: int) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": "", "refusal": None}
        return [{"index": i, "delta": delta, "finish_reason": None, "logprobs": None} for i in range(count)]

    def deltas(self, answer: Answer, index: int, event: Event) -> list[dict[str, Any]]:
        delta: dict[str, Any] = {}
        reason = finish(event.finish_reason)
        if not self.tools:
            delta["content"] = event.text
        elif event.finish_reason is not None or not tools.may_be_call(answer.text):
            text, calls = answer.text, list[dict[str, Any]]()
            if event.finish_reason is not None:
                text, calls = tools.find(answer.text, self.tools)
            delta["content"] = text[self.sent.get(index, 0) :]
            self.sent[index] = len(text)
            if calls:
                delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
                reason = "tool_calls"
        choice = {"index": index, "delta": delta, "finish_reason": reason, "logprobs": None}
        if event.logprobs is not None:
            choice["logprobs"] = chat_logprobs(event.logprobs, self.tokenizer)
        return [self.with_ids(choice, event.token_ids)]

    @staticmethod
    def _logprobs(answer: Answer) -> bool:
        return answer.ticket.order.params.logprobs is not None


async def answer(kitchen: Kitchen, dialect: Dialect, orders: Sequence[Order], http: Request) -> Response:
    """Have the orders done and write the answer; the requests end when the client goes away."""
    service = kitchen.service
    group = await submit(kitchen, orders)
    if dialect.body.stream:
        await accepted(kitchen, group)
        return sse(stream(kitchen, dialect, group))
    return await unless_gone(http, lambda: whole(kitchen, dialect, group), lambda: service.cancel(group))


async def submit(kitchen: Kitchen, orders: Sequence[Order]) -> Group:
    """Hand orders to the engine. Their grammar is compiled first, so that the engine only looks it up."""
    grammar = orders[0].params.grammar
    if grammar is not None:
        await run_in_threadpool(kitchen.service.llm.engine.grammars.matcher, grammar, ())
    return kitchen.service.submit(orders)


async def accepted(kitchen: Kitchen, group: Group) -> None:
    """Wait until the engine has taken a group that is to be streamed: what it says against it is an HTTP status."""
    try:
        async with asyncio.timeout(kitchen.timeout or None):
            await group.accepted()
    except BaseException:
        kitchen.service.cancel(group)
        raise


def sse(lines: AsyncIterator[str]) -> StreamingResponse:
    """A stream of server-sent events."""
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(lines, media_type="text/event-stream", headers=headers)


async def whole(kitchen: Kitchen, dialect: Dialect, group: Group) -> Response:
    """The answer in one piece."""
    answers = [Answer(ticket) for ticket in group.tickets]
    async with asyncio.timeout(kitchen.timeout or None):
        await group.accepted()
        async for ticket, event in group.events():
            answers[ticket.index].add(event)
    return JSONResponse(dialect.whole(answers))


async def stream(kitchen: Kitchen, dialect: Dialect, group: Group) -> AsyncIterator[str]:
    """The answer event by event. An error on the way is an event too."""
    answers = [Answer(ticket) for ticket in group.tickets]
    options = dialect.body.stream_options
    try:
        for choice in dialect.first(len(answers)):
            yield event_line(dialect.chunk([choice]))
        async with asyncio.timeout(kitchen.timeout or None):
            async for ticket, event in group.events():
                mine = answers[ticket.index]
                mine.add(event)
                more: dict[str, Any] = {}
                if event.round is not None:
                    more["x_spec"] = trace(event.round, event, dialect.tokenizer)
                if options and options.continuous_usage_stats:
                    more["usage"] = usage(answers, dialect.n)
                yield event_line(dialect.chunk(dialect.deltas(mine, ticket.index, event), **more))
        if options and options.include_usage:
            yield event_line(dialect.last(answers))
    except Exception as error:
        yield event_line(errors.told(error)[1])
    finally:
        kitchen.service.cancel(group)
    yield "data: [DONE]\n\n"


def event_line(value: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


async def unless_gone(http: Request, work: Callable[[], Awaitable[Response]], cancel: Callable[[], None]) -> Response:
    """What `work` answers; as soon as the client is gone, `cancel` and no answer."""
    task = asyncio.ensure_future(work())
    gone = asyncio.ensure_future(_gone(http))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else Response(status_code=GONE)
    finally:
        for pending in (task, gone):
            pending.cancel()
        cancel()


async def _gone(http: Request) -> None:
    while not await http.is_disconnected():
        await asyncio.sleep(0.1)
