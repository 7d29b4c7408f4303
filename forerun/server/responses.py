"""/v1/responses, without memory: the same chats in the Responses API's shapes and events."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request, Response
from pydantic import ValidationError

from forerun.server import errors, tools
from forerun.server.answers import Answer, finish, usage
from forerun.server.api import accepted, chat_orders, event_line, size_of, sse, submit, unless_gone
from forerun.server.dialects import Chat
from forerun.server.errors import ApiError
from forerun.server.kitchen import Kitchen
from forerun.server.protocol import ChatRequest, FlatToolChoice, InputItem, ResponsesRequest
from forerun.server.tickets import Group

SAME = (  # as in a chat
    *("model", "temperature", "top_p", "stream", "seed", "speculative", "stop", "top_k", "min_p", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "response_format", "chat_template_kwargs"),
    "cache_salt",
)


async def responses(kitchen: Kitchen, body: ResponsesRequest, http: Request) -> Response:
    """Answer /v1/responses."""
    if body.previous_response_id is not None:
        raise ApiError(400, "this server keeps nothing: send the conversation itself", "previous_response_id")
    if body.background:
        raise ApiError(400, "background is not supported: this server keeps nothing", "background")
    kitchen.check(body.model)
    try:
        chat, orders = await kitchen.prepare(lambda: chat_orders(kitchen, as_chat(body)))
    except ApiError as error:
        error.param = "input" if error.param == "messages" else error.param
        raise
    group = await submit(kitchen, orders)
    writer = Writer(chat, body)
    if body.stream:
        await accepted(kitchen, group)
        return sse(writer.stream(group))
    return await unless_gone(http, lambda: writer.whole(group), lambda: kitchen.service.cancel(group))


def as_chat(body: ResponsesRequest) -> ChatRequest:
    """The chat that a Responses request asks for."""
    messages = [{"role": "system", "content": body.instructions}] if body.instructions else []
    items = [InputItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    chat: dict[str, Any] = {"messages": messages + [_message(item) for item in items]}
    for name in SAME:
        if (value := getattr(body, name)) is not None:
            chat[name] = value.model_dump(exclude_none=True, by_alias=True) if hasattr(value, "model_dump") else value
    if body.max_output_tokens is not None:
        chat["max_tokens"] = body.max_output_tokens
    if body.tools:
        chat["tools"] = [
            {"type": "function", "function": t.model_dump(exclude={"type"}, exclude_none=True)} for t in body.tools
        ]
    choice = body.tool_choice
    if choice is not None:
        chat["tool_choice"] = (
            choice if isinstance(choice, str) else {"type": "function", "function": {"name": choice.name}}
        )
    form = body.text.format if body.text else None
    if form and body.response_format:
        raise ApiError(400, "text.format and response_format both demand a form: give one", "response_format")
    if form and form.type == "json_schema":
        chat["response_format"] = {"type": form.type, "json_schema": {"name": form.name, "schema": form.schema_ or {}}}
    elif form:
        chat["response_format"] = {"type": form.type}
    try:
        return ChatRequest.model_validate(chat)
    except ValidationError as error:
        first = error.errors()[0]
        raise ApiError(400, f"{'.'.join(map(str, first['loc']))}: {first['msg']}", "input") from None


def _message(item: InputItem) -> dict[str, Any]:
    """One input item as a chat message."""
    needed = {"function_call": ("call_id", "name", "arguments"), "function_call_output": ("call_id", "output")}
    for name in needed.get(item.type, ()):
        if getattr(item, name) is None:
            raise ApiError(400, f"an input item of type {item.type} needs {name}", "input")
    if item.type == "function_call_output":
        return {"role": "tool", "tool_call_id": item.call_id, "content": item.output or ""}
    if item.type == "function_call":
        function = {"name": item.name or "", "arguments": item.arguments or "{}"}
        call = {"id": item.call_id or "", "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    parts = item.content if isinstance(item.content, str) else [p.model_dump() for p in item.content or ()]
    return {"role": item.role or "user", "content": parts}


class Writer:
    """Writes one response, whole or as events with rising sequence numbers."""

    def __init__(self, chat: Chat, body: ResponsesRequest) -> None:
        self.chat, self.body, self.number = chat, body, 0
        self.id, self.item = f"resp_{secrets.token_hex(16)}", f"msg_{secrets.token_hex(16)}"

    async def whole(self, group: Group) -> Response:
        """The answer in one piece."""
        answer = Answer(group.tickets[0])
        await group.accepted()
        async for _, event in group.events():
            answer.add(event)
        return await self.chat.kitchen.write(lambda: self._response(answer), size_of(answer))

    async def stream(self, group: Group) -> AsyncIterator[str]:
        """The answer event by event."""
        answer, at = Answer(group.tickets[0]), {"item_id": self.item, "output_index": 0, "content_index": 0}
        empty = {"id": self.item, "type": "message", "role": "assistant", "status": "in_progress", "content": []}
        texts: list[str] = []
        try:
            yield self._event("response.created", response=self._response(None))
            yield self._event("response.in_progress", response=self._response(None))
            async for _, event in group.events():
                answer.add(event)
                for choice in self.chat.deltas(answer, 0, event):
                    text = choice["delta"].get("content")
                    if not text:
                        continue
                    if not texts:
                        yield self._event("response.output_item.added", output_index=0, item=empty)
                        yield self._event("response.content_part.added", **at, part=_part(""))
                    texts.append(text)
                    yield self._event("response.output_text.delta", **at, delta=text, logprobs=[])
            for line in self._end(answer, "".join(texts), at):
                yield line
        except Exception as error:
            yield self._event("error", **{k: v for k, v in errors.told(error)[1]["error"].items() if k != "type"})
        finally:
            self.chat.kitchen.service.cancel(group)

    def _end(self, answer: Answer, sent: str, at: dict[str, Any]) -> list[str]:
        """The events behind the last text: what was streamed is done, then calls, then the whole."""
        response, lines = self._response(answer), []
        for i, item in enumerate(response["output"]):
            if item["type"] == "message" and sent:
                lines.append(self._event("response.output_text.done", **at, text=sent, logprobs=[]))
                lines.append(self._event("response.content_part.done", **at, part=_part(sent)))
            else:
                begun = item | ({"arguments": "", "status": "in_progress"} if item["type"] == "function_call" else {})
                lines.append(self._event("response.output_item.added", output_index=i, item=begun))
            if item["type"] == "function_call":
                where, said = {"item_id": item["id"], "output_index": i}, item["arguments"]
                lines.append(self._event("response.function_call_arguments.delta", **where, delta=said))
                done = where | {"name": item["name"], "arguments": said}
                lines.append(self._event("response.function_call_arguments.done", **done))
            lines.append(self._event("response.output_item.done", output_index=i, item=item))
        kind = "response.incomplete" if response["status"] == "incomplete" else "response.completed"
        return [*lines, self._event(kind, response=response)]

    def _event(self, kind: str, **values: Any) -> str:
        line = event_line({"type": kind, "sequence_number": self.number, **values})
        self.number += 1
        return f"event: {kind}\n{line}"

    def _response(self, answer: Answer | None) -> dict[str, Any]:
        """The response object; None while nothing is done."""
        body, chat = self.body, self.chat
        cut = answer is not None and finish(answer.finish_reason) == "length"
        status = "in_progress" if answer is None else "incomplete" if cut else "completed"
        form = body.text.format.model_dump(by_alias=True, exclude_none=True) if body.text and body.text.format else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": chat.head["created"],
            "model": chat.head["model"],
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "output": self._output(answer, status) if answer else [],
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "text": {"format": form or {"type": "text"}},
            "tool_choice": body.tool_choice.model_dump()
            if isinstance(body.tool_choice, FlatToolChoice)
            else body.tool_choice or "auto",
            "tools": [{"strict": None, **t.model_dump(exclude_none=True)} for t in body.tools or []],
            "truncation": "disabled",
            "seed": chat.head["seed"],
            "usage": _usage(answer) if answer else None,
        }

    def _output(self, answer: Answer, status: str) -> list[dict[str, Any]]:
        text, calls = tools.find(answer.text, self.chat.tools) if self.chat.tools else (answer.text, [])
        items: list[dict[str, Any]] = []
        if text or not calls:
            message = {"id": self.item, "type": "message", "role": "assistant", "status": status}
            items.append(message | {"content": [_part(text)]})
        for call in calls:
            function = {"call_id": call["id"], **call["function"], "status": "completed"}
            items.append({"id": f"fc_{secrets.token_hex(16)}", "type": "function_call", **function})
        return items


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(answer: Answer) -> dict[str, Any]:
    counts = usage([answer], 1)
    cached = counts["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts["total_tokens"],
    }
