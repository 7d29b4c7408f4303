"""What clients of Ollama's API may send, and as which chat it is understood."""

from __future__ import annotations

import json
from typing import Annotated, Any

from fastapi.exceptions import RequestValidationError
from pydantic import BeforeValidator, Field, ValidationError
from pydantic_core import PydanticCustomError

from forerun.server import fields, limits, message_fields
from forerun.server.errors import ApiError
from forerun.server.numbers import List, Number, TokenIds, Whole
from forerun.server.protocol import (
    EFFORTS,
    MOST_MESSAGES,
    AnyMessage,
    Body,
    ChatRequest,
    Strict,
    Tool,
)

Json = dict[str, Any]
OPTIONS = (  # besides what is in the table of fields
    *(
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "seed",
        "stop",
        "min_tokens",
        "max_tokens",
        "ignore_eos",
    ),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "speculative", "cache_salt"),
)


def _think(value: Any) -> Any:
    """Whether a model thinks, or how much."""
    if isinstance(value, bool) or (isinstance(value, str) and value in EFFORTS):
        return value
    raise PydanticCustomError("think", 'give true, false, "low", "medium" or "high"', {})


def _object(value: Any) -> Any:
    """The arguments of a call, which are an object here, and a text with one where OpenAI's clients
    have kept it."""
    if isinstance(value, str):
        try:
            value = limits.parse(value.encode()) if value.strip() else {}
        except ValueError:
            return value  # it is refused, as no object
    return {} if value is None else value


class OllamaFunction(Strict):
    others = message_fields.CALL

    name: str
    arguments: Annotated[
        Json, BeforeValidator(_object, json_schema_input_type=Json | str | None)
    ] = Field(default_factory=dict)
    index: int | None = None


class OllamaCall(Strict):
    others = message_fields.CALL

    id: str | None = None
    type: str | None = None
    function: OllamaFunction


class OllamaMessage(AnyMessage):
    tool_calls: List[OllamaCall] | None = None


class Ollama(Body):
    """What all requests of Ollama's API have in common."""

    model: str
    options: Json | None = None
    keep_alive: Number | str | None = None


class OllamaGeneration(Ollama):
    """What chats and generations have in common."""

    stream: bool | None = None
    format: str | Json | None = None
    think: Annotated[bool | str, BeforeValidator(_think)] | None = None
    truncate: bool | None = None
    shift: bool | None = None


class OllamaChat(OllamaGeneration):
    """/api/chat."""

    messages: Annotated[List[OllamaMessage], Field(max_length=MOST_MESSAGES)] | None = None
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


class OllamaEmbed(Ollama):
    """/api/embed."""

    input: str | List[str]
    truncate: bool | None = None
    dimensions: Whole | None = None


class OllamaEmbeddings(Ollama):
    """/api/embeddings, the older one."""

    prompt: str


class OllamaShow(Body):
    """/api/show; the older clients say `name`."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None


def chat_of(body: OllamaChat) -> ChatRequest:
    """A chat as OpenAI writes it. Raises ApiError, RequestValidationError."""
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or []]
    return _request(
        body,
        [_message(message) for message in body.messages or []],
        {"tools": tools} if tools else {},
    )


def chat_of_prompt(body: OllamaGenerate) -> ChatRequest:
    """The chat of a single prompt; of a raw one it is what its tokens are put in. Raises
    ApiError."""
    refused = {
        "suffix": "this server continues texts, it fills no gaps",
        "template": "the model's own is used; give raw and a prompt that is laid out",
        "images": "this server reads text only",
        "context": "send the conversation to /api/chat",
    }
    for name, why in refused.items():
        if getattr(body, name):
            raise ApiError(400, f"{name} is not supported: {why}", name)
    if body.raw and body.system:
        raise ApiError(
            400, "raw takes the prompt as it is: put the system message into it", "system"
        )
    system = [{"role": "system", "content": body.system}] if body.system else []
    return _request(body, [*system, {"role": "user", "content": body.prompt}], {})


def _message(message: OllamaMessage) -> Json:
    values = message.model_dump(exclude={"tool_calls"}, exclude_none=True)
    if message.tool_calls:
        values["tool_calls"] = [
            {
                "id": call.id or f"call_{i}",
                "function": {
                    "name": call.function.name,
                    "arguments": json.dumps(call.function.arguments),
                },
            }
            for i, call in enumerate(message.tool_calls)
        ]
    return values


def _request(body: OllamaGeneration, messages: list[Json], more: Json) -> ChatRequest:
    for name in body.options or {}:
        if name not in OPTIONS and name not in fields.TABLE:
            raise fields.unknown(name, [*OPTIONS, *fields.TABLE])
    options = dict(body.options or {})
    if isinstance(body.think, bool):
        options["enable_thinking"] = body.think
    elif body.think is not None:
        options["reasoning_effort"] = body.think
    values = {"messages": messages, **options, **more, **_form(body.format)}
    try:
        return ChatRequest.model_validate(values)
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from None


def _form(form: str | Json | None) -> Json:
    if not form:
        return {}
    if form == "json":
        return {"response_format": {"type": "json_object"}}
    if isinstance(form, str):
        raise ApiError(400, "format must be 'json' or a JSON schema", "format")
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": form}}}
