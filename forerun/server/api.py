"""/v1/completions and /v1/chat/completions: one request to its answer, whole or streamed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from forerun.server import errors, fields, tools, translate
from forerun.server.answers import Answer, trace, usage
from forerun.server.dialects import Chat, Completions, Dialect
from forerun.server.errors import ApiError
from forerun.server.kitchen import Kitchen
from forerun.server.protocol import ChatRequest, CompletionRequest
from forerun.server.tickets import Group, Order

GONE = 499  # nginx's status for a client that did not wait


async def completions(kitchen: Kitchen, body: CompletionRequest, http: Request) -> Response:
    """Answer /v1/completions."""
    kitchen.check(body.model)
    written = translate.completion_prompts(body)
    dialect, orders = await kitchen.prepare(
        completion_orders, kitchen, body, written, count=len(written) * max(1, body.n or 1)
    )
    return await answer(kitchen, dialect, orders, http)


def completion_orders(
    kitchen: Kitchen, body: CompletionRequest, written: Sequence[str | list[int]]
) -> tuple[Completions, list[Order]]:
    """Prompts as orders for the engine, and the dialect their answer is written in."""
    llm = kitchen.service.llm
    wanted = translate.COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    params = translate.sampling(llm, body, wanted, body.logprobs, translate.grammar_of(body.response_format))
    prompts = [kitchen.tokens(prompt) for prompt in written]
    orders = translate.orders(llm, prompts, params, body)
    return Completions(kitchen, body, params.n, params.seed, prompts), orders


async def chat(kitchen: Kitchen, body: ChatRequest, http: Request) -> Response:
    """Answer /v1/chat/completions."""
    kitchen.check(body.model)
    dialect, orders = await kitchen.prepare(chat_orders, kitchen, body, count=max(1, body.n or 1))
    return await answer(kitchen, dialect, orders, http)


def chat_orders(kitchen: Kitchen, body: ChatRequest, prompt: list[int] | None = None) -> tuple[Chat, list[Order]]:
    """A chat as orders for the engine, and the dialect its answer is written in. `prompt` stands for its messages."""
    llm = kitchen.service.llm
    kitchen.check(body.model)
    if prompt is None:
        prompt = translate.chat_prompt(llm, body, kitchen.check_characters)
    kitchen.check_prompt(prompt)
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
    orders = translate.orders(llm, [prompt], params, body, prediction)
    return Chat(kitchen, body, params.n, params.seed), orders


async def answer(kitchen: Kitchen, dialect: Dialect, orders: Sequence[Order], http: Request) -> Response:
    """Have the orders done and write the answer; the requests end when the client goes away."""
    service = kitchen.service
    group = await submit(kitchen, orders)
    if dialect.body.stream:
        await accepted(kitchen, group)
        return sse(stream(kitchen, dialect, group))
    return await unless_gone(http, lambda: whole(kitchen, dialect, group), lambda: service.cancel(group))


async def submit(kitchen: Kitchen, orders: Sequence[Order]) -> Group:
    """Hand orders to the engine, with their grammar compiled."""
    return kitchen.service.submit(await kitchen.grammars.compile(orders), kitchen.timeout)


async def accepted(kitchen: Kitchen, group: Group) -> None:
    """Wait until the engine has taken a group that is to be streamed: what it says against it is an HTTP status."""
    try:
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
    await group.accepted()
    async for ticket, event in group.events():
        answers[ticket.index].add(event)
    return await kitchen.write(lambda: dialect.whole(answers), sum(map(size_of, answers)))


def size_of(answer: Answer) -> int:
    """About how many values it is written with."""
    return len(answer.token_ids) * (1 + (answer.ticket.order.params.logprobs or 0))


async def stream(kitchen: Kitchen, dialect: Dialect, group: Group) -> AsyncIterator[str]:
    """The answer event by event. An error on the way is an event too."""
    answers = [Answer(ticket) for ticket in group.tickets]
    options = dialect.body.stream_options
    try:
        for choice in dialect.first(len(answers)):
            yield event_line(dialect.chunk([choice]))
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


def warned(response: Response, left_out: Sequence[str]) -> Response:
    """An answer that says which fields of the request had no effect."""
    if left_out:
        response.headers[fields.HEADER] = ", ".join(left_out)
    return response


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
