"""/v1/responses, without memory: the same chats in the Responses API's shapes and events."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from fastapi import Request, Response
from pydantic import ValidationError

from forerun.server import errors
from forerun.server.answers import Answer, finish, usage
from forerun.server.api import answer, chat_orders
from forerun.server.dialects import Chat, Dialect, event_line
from forerun.server.errors import ApiError
from forerun.server.protocol import (
    ChatRequest,
    Content,
    FlatToolChoice,
    InputItem,
    ResponsesRequest,
    Sampled,
)
from forerun.server.state import ServerState
from forerun.server.translate import text_of, thoughts_of
from forerun.types import Event

SAME = {*Sampled.__annotations__, "chat_template_kwargs"}  # as in a chat


async def responses(kitchen: ServerState, body: ResponsesRequest, http: Request) -> Response:
    """Answer /v1/responses."""
    if body.previous_response_id is not None:
        raise ApiError(
            400, "this server keeps nothing: send the conversation itself", "previous_response_id"
        )
    if body.background:
        raise ApiError(400, "background is not supported: this server keeps nothing", "background")
    kitchen.check(body.model)
    try:
        chat, orders = await kitchen.prepare(lambda: chat_orders(kitchen, as_chat(body)))
    except ApiError as error:
        error.param = "input" if error.param == "messages" else error.param
        raise
    return await answer(kitchen, Responses(chat, body), orders, http)


def as_chat(body: ResponsesRequest) -> ChatRequest:
    """The chat that a Responses request asks for."""
    messages = [{"role": "system", "content": body.instructions}] if body.instructions else []
    items = (
        [InputItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    )
    said: dict[str, Any] = {}
    for item in items:
        message = _message(item)
        if not _joined(said, message):
            messages.append(message)
            said = message
    chat = body.model_dump(include=SAME, exclude_none=True, by_alias=True)
    chat["messages"] = messages
    if body.max_output_tokens is not None:
        chat["max_tokens"] = body.max_output_tokens
    if body.tools:
        chat["tools"] = [
            {"type": "function", "function": t.model_dump(exclude={"type"}, exclude_none=True)}
            for t in body.tools
        ]
    if body.reasoning and body.reasoning.effort:
        chat["reasoning_effort"] = body.reasoning.effort
    choice = body.tool_choice
    if choice is not None:
        chat["tool_choice"] = (
            choice
            if isinstance(choice, str)
            else {"type": "function", "function": {"name": choice.name}}
        )
    form = body.text.format if body.text else None
    if form and body.response_format:
        raise ApiError(
            400, "text.format and response_format both demand a form: give one", "response_format"
        )
    if form and form.type == "json_schema":
        chat["response_format"] = {
            "type": form.type,
            "json_schema": {"name": form.name, "schema": form.schema_ or {}},
        }
    elif form:
        chat["response_format"] = {"type": form.type}
    try:
        return ChatRequest.model_validate(chat)
    except ValidationError as error:
        first = error.errors()[0]
        raise ApiError(
            400, f"{'.'.join(map(str, first['loc']))}: {first['msg']}", "input"
        ) from None


NEEDED = {"function_call": ("call_id", "name"), "function_call_output": ("call_id", "output")}


def _message(item: InputItem) -> dict[str, Any]:
    """One input item as a chat message."""
    for name in NEEDED.get(item.type or "message", ()):
        if getattr(item, name) is None:
            raise ApiError(400, f"an input item of type {item.type} needs {name}", "input")
    if item.type == "function_call_output":
        return {"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)}
    if item.type == "function_call":
        call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
        return {"role": "assistant", "tool_calls": [call]}
    if item.type == "reasoning":
        thoughts = thoughts_of(item.content) or text_of(item.content) or thoughts_of(item.summary)
        return {"role": "assistant", "reasoning_content": thoughts}
    more = {"name": item.name, "refusal": item.refusal, "reasoning_content": item.reasoning_content}
    return {"role": item.role or "user", "content": _content(item.content)} | {
        k: v for k, v in more.items() if v
    }


def _content(content: Content | None) -> Any:
    """A content as JSON has it."""
    return (
        content
        if isinstance(content, str)
        else [part.model_dump(exclude_none=True) for part in content or ()]
    )


def _joined(said: dict[str, Any], more: dict[str, Any]) -> bool:
    """Put an item into the message before it where both are parts of one answer: thoughts, then a
    text, then calls."""
    order = ("reasoning_content", "content", "tool_calls")
    if said.get("role") != "assistant" or more["role"] != "assistant":
        return False
    last = max(i for i, name in enumerate(order) if name in said)
    first = min(i for i, name in enumerate(order) if name in more)
    if first < last or (first == last and order[last] != "tool_calls"):
        return False
    said.update(more | {"tool_calls": [*said.get("tool_calls", ()), *more.get("tool_calls", ())]})
    if not said["tool_calls"]:
        del said["tool_calls"]
    return True


class Responses(Dialect):
    """OpenAI's Responses: one answer, whole or as events with rising sequence numbers."""

    def __init__(self, chat: Chat, body: ResponsesRequest) -> None:
        super().__init__(bool(body.stream), [*body.left_out, *_renamed(chat.left_out)])
        self.chat, self.body, self.number = chat, body, 0
        self.id, self.item = f"resp_{secrets.token_hex(16)}", f"msg_{secrets.token_hex(16)}"
        self.at: dict[str, Any] = {"item_id": self.item, "output_index": 0, "content_index": 0}
        self.texts: list[str] = []

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        return self._response(answers[0])

    def begin(self, answers: Sequence[Answer]) -> Iterable[str]:
        yield self._event("response.created", response=self._response(None))
        yield self._event("response.in_progress", response=self._response(None))

    def lines(self, answers: Sequence[Answer], index: int, event: Event) -> Iterable[str]:
        text = self.chat.change(answers[0], 0, event)["delta"].get("content")
        if not text:
            return
        if not self.texts:
            empty = {
                "id": self.item,
                "type": "message",
                "role": "assistant",
                "status": "in_progress",
                "content": [],
            }
            yield self._event("response.output_item.added", output_index=0, item=empty)
            yield self._event("response.content_part.added", **self.at, part=_part(""))
        self.texts.append(text)
        yield self._event("response.output_text.delta", **self.at, delta=text, logprobs=[])

    def end(self, answers: Sequence[Answer]) -> Iterable[str]:
        """What was streamed is done, then calls, then the whole."""
        response, sent = self._response(answers[0]), "".join(self.texts)
        for i, item in enumerate(response["output"]):
            if item["type"] == "message" and sent:
                yield self._event("response.output_text.done", **self.at, text=sent, logprobs=[])
                yield self._event("response.content_part.done", **self.at, part=_part(sent))
            else:
                begun = item | (
                    {"arguments": "", "status": "in_progress"}
                    if item["type"] == "function_call"
                    else {}
                )
                yield self._event("response.output_item.added", output_index=i, item=begun)
            if item["type"] == "function_call":
                where, said = {"item_id": item["id"], "output_index": i}, item["arguments"]
                yield self._event("response.function_call_arguments.delta", **where, delta=said)
                done = where | {"name": item["name"], "arguments": said}
                yield self._event("response.function_call_arguments.done", **done)
            yield self._event("response.output_item.done", output_index=i, item=item)
        kind = "response.incomplete" if response["status"] == "incomplete" else "response.completed"
        yield self._event(kind, response=response)

    def failed(self, error: Exception) -> str:
        return self._event(
            "error",
            **{k: v for k, v in errors.logged_body(error)[1]["error"].items() if k != "type"},
        )

    def _event(self, kind: str, **values: Any) -> str:
        line = event_line({"type": kind, "sequence_number": self.number, **values})
        self.number += 1
        return f"event: {kind}\n{line}"

    def _response(self, answer: Answer | None) -> dict[str, Any]:
        """The response object; None while nothing is done."""
        body, chat = self.body, self.chat
        cut = answer is not None and finish(answer.finish_reason) == "length"
        status = "in_progress" if answer is None else "incomplete" if cut else "completed"
        form = (
            body.text.format.model_dump(by_alias=True, exclude_none=True)
            if body.text and body.text.format
            else None
        )
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
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": chat.sampling["temperature"]
            if body.temperature is None
            else body.temperature,
            "top_p": chat.sampling["top_p"] if body.top_p is None else body.top_p,
            "text": {"format": form or {"type": "text"}},
            "tool_choice": body.tool_choice.model_dump()
            if isinstance(body.tool_choice, FlatToolChoice)
            else body.tool_choice or "auto",
            "tools": [
                {"strict": None, **t.model_dump(exclude_none=True)} for t in body.tools or []
            ],
            "truncation": "disabled",
            "seed": chat.head["seed"],
            "usage": _usage(answer) if answer else None,
        }

    def _output(self, answer: Answer, status: str) -> list[dict[str, Any]]:
        text, calls = self.chat.found(answer)
        items: list[dict[str, Any]] = []
        if text or not calls:
            message = {"id": self.item, "type": "message", "role": "assistant", "status": status}
            items.append(message | {"content": [_part(text)]})
        for call in calls:
            function = {"call_id": call["id"], **call["function"], "status": "completed"}
            items.append({"id": f"fc_{secrets.token_hex(16)}", "type": "function_call", **function})
        return items


def _renamed(names: Iterable[str]) -> list[str]:
    """Fields of the chat without effect, by their names in a Responses request."""
    return ["reasoning" if name == "reasoning_effort" else name for name in names]


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
