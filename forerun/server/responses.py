"""/v1/responses, stateless: chats in the format and with the events of the Responses API."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence

from fastapi import Request, Response
from pydantic import ValidationError

from forerun.server import errors
from forerun.server.conversation import reasoning_of, text_of
from forerun.server.errors import ApiError
from forerun.server.openai import Chat, prepare_chat
from forerun.server.outputs import Json, Output, finish_reason, usage
from forerun.server.protocol import (
    ChatRequest,
    Content,
    FlatToolChoice,
    GenerationRequest,
    InputItem,
    ResponsesRequest,
)
from forerun.server.state import ServerState
from forerun.server.streaming import Formatter, respond, sse
from forerun.types import Event

CHAT_FIELDS = {*GenerationRequest.model_fields, "chat_template_kwargs"}  # the same in a chat
REQUIRED = {"function_call": ("call_id", "name"), "function_call_output": ("call_id", "output")}
ANSWER_ORDER = ("reasoning_content", "content", "tool_calls")


async def responses(state: ServerState, body: ResponsesRequest, http: Request) -> Response:
    """Answer /v1/responses."""
    if body.previous_response_id is not None:
        message = "this server stores no responses: send the whole conversation"
        raise ApiError(400, message, "previous_response_id")
    if body.background:
        message = "background is not supported: this server stores no responses"
        raise ApiError(400, message, "background")
    state.check(body.model)
    try:
        chat, jobs = await state.prepare(lambda: prepare_chat(state, to_chat(body)))
    except ApiError as error:
        error.param = "input" if error.param == "messages" else error.param
        raise
    return await respond(state, Responses(chat, body), jobs, http)


def to_chat(body: ResponsesRequest) -> ChatRequest:
    """Return the chat that a Responses request asks for. Raises ApiError."""
    chat = body.model_dump(include=CHAT_FIELDS, exclude_none=True, by_alias=True)
    chat["messages"] = _messages(body)
    if body.max_output_tokens is not None:
        chat["max_tokens"] = body.max_output_tokens
    if body.tools:
        functions = [tool.model_dump(exclude={"type"}, exclude_none=True) for tool in body.tools]
        chat["tools"] = [{"type": "function", "function": function} for function in functions]
    if body.reasoning and body.reasoning.effort:
        chat["reasoning_effort"] = body.reasoning.effort
    if isinstance(body.tool_choice, FlatToolChoice):
        function = {"name": body.tool_choice.name}
        chat["tool_choice"] = {"type": "function", "function": function}
    elif body.tool_choice is not None:
        chat["tool_choice"] = body.tool_choice
    format_ = body.text.format if body.text else None
    if format_ and body.response_format:
        message = "text.format and response_format both require a format: give one"
        raise ApiError(400, message, "response_format")
    if format_:
        chat["response_format"] = {"type": format_.type}
    if format_ and format_.type == "json_schema":
        schema = {"name": format_.name, "schema": format_.schema_ or {}}
        chat["response_format"]["json_schema"] = schema
    try:
        return ChatRequest.model_validate(chat)
    except ValidationError as error:
        first = error.errors()[0]
        message = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise ApiError(400, message, "input") from None


def _messages(body: ResponsesRequest) -> list[Json]:
    """Return the messages of a chat; items that belong to one answer become one message."""
    messages: list[Json] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for item in body.input:
        message = _message(item)
        if not messages or not _join(messages[-1], message):
            messages.append(message)
    return messages


def _message(item: InputItem) -> Json:
    for name in REQUIRED.get(item.type or "message", ()):
        if getattr(item, name) is None:
            raise ApiError(400, f"an input item of type {item.type} needs {name}", "input")
    if item.type == "function_call_output":
        return {"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)}
    if item.type == "function_call":
        call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
        return {"role": "assistant", "tool_calls": [call]}
    if item.type == "reasoning":
        content = item.content
        reasoning = reasoning_of(content) or text_of(content) or reasoning_of(item.summary)
        return {"role": "assistant", "reasoning_content": reasoning}
    message = {"role": item.role or "user", "content": _content(item.content)}
    for name in ("name", "refusal", "reasoning_content"):
        if value := getattr(item, name):
            message[name] = value
    return message


def _content(content: Content | None) -> str | list[Json]:
    if isinstance(content, str):
        return content
    return [part.model_dump(exclude_none=True) for part in content or ()]


def _join(message: Json, more: Json) -> bool:
    """Add an item to the message before it if both are parts of one answer.

    An answer consists of reasoning, then a text, then calls. Returns False if they are not.
    """
    if message["role"] != "assistant" or more["role"] != "assistant":
        return False
    last = max(i for i, name in enumerate(ANSWER_ORDER) if name in message)
    first = min(i for i, name in enumerate(ANSWER_ORDER) if name in more)
    if first < last or (first == last and ANSWER_ORDER[last] != "tool_calls"):
        return False
    calls = [*message.get("tool_calls", ()), *more.get("tool_calls", ())]
    message.update(more)
    if calls:
        message["tool_calls"] = calls
    return True


class Responses(Formatter):
    """OpenAI's Responses: one answer, as a body or as events with rising sequence numbers."""

    def __init__(self, chat: Chat, body: ResponsesRequest) -> None:
        renamed = ["reasoning" if name == "reasoning_effort" else name for name in chat.ignored]
        super().__init__(bool(body.stream), [*body.ignored, *renamed])
        self.chat = chat
        self.body = body
        self._sequence_number = 0
        self._id = f"resp_{secrets.token_hex(16)}"
        self._item_id = f"msg_{secrets.token_hex(16)}"
        self._position: Json = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        self._texts: list[str] = []

    def full(self, outputs: Sequence[Output]) -> Json:
        return self._response(outputs[0])

    def begin(self, outputs: Sequence[Output]) -> Iterable[str]:
        yield self._event("response.created", response=self._response(None))
        yield self._event("response.in_progress", response=self._response(None))

    def chunks(self, outputs: Sequence[Output], index: int, event: Event) -> Iterable[str]:
        text = self.chat.delta(outputs[0], 0, event)["delta"].get("content")
        if not text:
            return
        if not self._texts:
            item = self._message("in_progress", [])
            yield self._event("response.output_item.added", output_index=0, item=item)
            yield self._event("response.content_part.added", **self._position, part=_text_part(""))
        self._texts.append(text)
        yield self._event("response.output_text.delta", **self._position, delta=text, logprobs=[])

    def end(self, outputs: Sequence[Output]) -> Iterable[str]:
        """Return the events that end the text, those of the calls, and the whole response."""
        response = self._response(outputs[0])
        sent = "".join(self._texts)
        for i, item in enumerate(response["output"]):
            if item["type"] == "message" and sent:
                position, part = self._position, _text_part(sent)
                yield self._event("response.output_text.done", **position, text=sent, logprobs=[])
                yield self._event("response.content_part.done", **position, part=part)
            elif item["type"] == "message":
                yield self._event("response.output_item.added", output_index=i, item=item)
            else:
                yield from self._call_events(item, i)
            yield self._event("response.output_item.done", output_index=i, item=item)
        kind = "incomplete" if response["status"] == "incomplete" else "completed"
        yield self._event(f"response.{kind}", response=response)

    def _call_events(self, item: Json, index: int) -> Iterable[str]:
        arguments = item["arguments"]
        position = {"item_id": item["id"], "output_index": index}
        started = item | {"arguments": "", "status": "in_progress"}
        done = {"name": item["name"], "arguments": arguments}
        kind = "response.function_call_arguments"
        yield self._event("response.output_item.added", output_index=index, item=started)
        yield self._event(f"{kind}.delta", **position, delta=arguments)
        yield self._event(f"{kind}.done", **position, **done)

    def error(self, error: Exception) -> str:
        fields = errors.logged_body(error)[1]["error"]
        return self._event("error", **{k: v for k, v in fields.items() if k != "type"})

    def _event(self, kind: str, **values: object) -> str:
        event = sse({"type": kind, "sequence_number": self._sequence_number, **values})
        self._sequence_number += 1
        return f"event: {kind}\n{event}"

    def _response(self, output: Output | None) -> Json:
        """Return the response object; `output` is None until it is complete."""
        body = self.body
        chat = self.chat
        incomplete = output is not None and finish_reason(output.finish_reason) == "length"
        status = "in_progress"
        if output is not None:
            status = "incomplete" if incomplete else "completed"
        format_: Json = {"type": "text"}
        if body.text and body.text.format:
            format_ = body.text.format.model_dump(by_alias=True, exclude_none=True)
        choice = body.tool_choice
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or []]
        return {
            "id": self._id,
            "object": "response",
            "created_at": chat.head["created"],
            "model": chat.head["model"],
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if incomplete else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "output": self._items(output, status) if output else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": _or_default(body.temperature, chat.sampling["temperature"]),
            "top_p": _or_default(body.top_p, chat.sampling["top_p"]),
            "text": {"format": format_},
            "tool_choice": (
                choice.model_dump() if isinstance(choice, FlatToolChoice) else choice or "auto"
            ),
            "tools": [{"strict": None, **tool} for tool in tools],
            "truncation": "disabled",
            "seed": chat.head["seed"],
            "usage": _usage(output) if output else None,
        }

    def _items(self, output: Output, status: str) -> list[Json]:
        text, calls = self.chat.text_and_calls(output)
        items: list[Json] = []
        if text or not calls:
            items.append(self._message(status, [_text_part(text)]))
        for call in calls:
            item = {"id": f"fc_{secrets.token_hex(16)}", "type": "function_call"}
            items.append({**item, "call_id": call["id"], **call["function"], "status": "completed"})
        return items

    def _message(self, status: str, content: list[Json]) -> Json:
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }


def _or_default(value: float | None, default: float) -> float:
    return default if value is None else value


def _text_part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(output: Output) -> Json:
    counts = usage([output], 1)
    cached = counts["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts["total_tokens"],
    }
