"""/v1/completions and /v1/chat/completions: one request to its answer, whole or streamed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any

from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from forerun.server import fields, sizes, tools, translate
from forerun.server.answers import Answer
from forerun.server.dialects import Chat, Completions, Dialect
from forerun.server.errors import ApiError
from forerun.server.jobs import EngineService, Job, RequestHandle
from forerun.server.numbers import FILL
from forerun.server.protocol import ChatRequest, CompletionRequest
from forerun.server.state import ServerState

GONE = 499  # nginx's status for a client that did not wait


async def completions(kitchen: ServerState, body: CompletionRequest, http: Request) -> Response:
    """Answer /v1/completions."""
    kitchen.check(body.model)
    written = translate.completion_prompts(body)
    dialect, orders = await kitchen.prepare(
        completion_orders, kitchen, body, written, count=len(written) * max(1, body.n or 1)
    )
    return await answer(kitchen, dialect, orders, http)


def completion_orders(
    kitchen: ServerState, body: CompletionRequest, written: Sequence[str | list[int]]
) -> tuple[Completions, list[Job]]:
    """Prompts as orders for the engine, and the dialect their answer is written in."""
    llm = kitchen.service.llm
    wanted = translate.COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    grammar = translate.grammar_of(body.response_format)
    params = translate.sampling(llm, body, wanted, body.logprobs, grammar, translate.scored(body))
    prompts = [kitchen.tokens(prompt) for prompt in written]
    orders = translate.orders(llm, prompts, params, body, fill=wanted == FILL)
    return Completions(kitchen, body, params.n, params.seed, prompts), orders


async def chat(kitchen: ServerState, body: ChatRequest, http: Request) -> Response:
    """Answer /v1/chat/completions."""
    kitchen.check(body.model)
    dialect, orders = await kitchen.prepare(chat_orders, kitchen, body, count=max(1, body.n or 1))
    return await answer(kitchen, dialect, orders, http)


def chat_orders(
    kitchen: ServerState, body: ChatRequest, prompt: list[int] | None = None
) -> tuple[Chat, list[Job]]:
    """A chat as orders for the engine, and the dialect its answer is written in. `prompt` stands
    for its messages."""
    llm = kitchen.service.llm
    templated = prompt is None
    if prompt is None:
        prompt = translate.chat_prompt(llm, body, kitchen.check_characters)
    kitchen.check_prompt(prompt)
    forced = tools.required(body.tools or (), body.tool_choice)
    if forced and body.response_format and body.response_format.type != "text":
        raise ApiError(
            400, "tool_choice and response_format both demand a form: give one", "response_format"
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", "top_logprobs")
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    wanted = translate.answer_tokens(llm, prompt, body, asked, templated=templated)
    params = translate.sampling(
        llm,
        body,
        wanted,
        (body.top_logprobs or 0) if body.logprobs else None,
        forced or translate.grammar_of(body.response_format),
        body.prompt_logprobs,
    )
    prediction = translate.text_of(body.prediction.content) if body.prediction else None
    orders = translate.orders(
        llm, [prompt], params, body, prediction, fill=asked is None or wanted == FILL
    )
    chat = Chat(kitchen, body, params.n, params.seed)
    chat.left_out = [*chat.left_out, *translate.without_effect(llm, body)]
    return chat, orders


async def answer(
    kitchen: ServerState, dialect: Dialect, orders: Sequence[Job], http: Request
) -> Response:
    """Have the orders done and write the answer; the requests end when the client goes away."""
    service = kitchen.service
    orders = sizes.fitted(orders, service.llm.room, dialect.weight)
    group = await kitchen.submit(orders)
    response: Response
    if dialect.streams:
        try:
            await group.accepted()  # what the engine says against it is an HTTP status
        except BaseException:
            service.cancel(group)
            raise
        lines = stream(service, dialect, group)
        response = StreamingResponse(lines, media_type=dialect.media_type, headers=dialect.headers)
    else:
        try:
            response = await unless_gone(http, whole(kitchen, dialect, group))
        finally:
            service.cancel(group)
    return warned(response, dialect.left_out)


async def whole(kitchen: ServerState, dialect: Dialect, group: RequestHandle) -> Response:
    """The answer in one piece."""
    answers = [Answer(job) for job in group.jobs]
    characters = 0
    await group.accepted()
    async for job, event in group.events():
        answers[job.index].add(event)
        characters += len(event.text)
        sizes.check(characters, "its tokens are longer than usual: give a lower max_tokens or n")
    orders = [answer.job for answer in answers]
    size = dialect.weight(orders, [len(answer.token_ids) for answer in answers])
    return await kitchen.write(lambda: dialect.whole(answers), size)


async def stream(
    service: EngineService, dialect: Dialect, group: RequestHandle
) -> AsyncIterator[str]:
    """The answer event by event. An error on the way is a line too."""
    answers = [Answer(job) for job in group.jobs]
    try:
        for line in dialect.begin(answers):
            yield line
        async for job, event in group.events():
            answers[job.index].add(event)
            for i, line in enumerate(dialect.lines(answers, job.index, event)):
                if i:
                    await asyncio.sleep(
                        0
                    )  # an echo has many lines: others take their turns between them
                yield line
        for line in dialect.end(answers):
            yield line
    except Exception as error:
        yield dialect.failed(error)
    finally:
        service.cancel(group)
    if dialect.closing:
        yield dialect.closing


def warned(response: Response, left_out: Sequence[str]) -> Response:
    """An answer that says which fields of the request had no effect."""
    if left_out:
        response.headers[fields.HEADER] = ", ".join(left_out)
    return response


async def unless_gone(http: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """What `work` answers; as soon as the client is gone, it is cancelled and there is no
    answer."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(http))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else Response(status_code=GONE)
    finally:
        for pending in (task, gone):
            pending.cancel()


async def _gone(http: Request) -> None:
    while not await http.is_disconnected():
        await asyncio.sleep(0.1)
