"""Convert the conversations of API requests to prompts through chat templates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from forerun.errors import RequestError, shorten
from forerun.llm import LLM
from forerun.models.tokenizer import Tokenizer
from forerun.server import limits
from forerun.server.errors import ApiError
from forerun.server.protocol import (
    CallPart,
    ChatRequest,
    DetokenizeRequest,
    Message,
    Part,
    RefusalPart,
    ResultPart,
    ThoughtPart,
    TokenizeRequest,
    ToolCall,
)

Json = dict[str, Any]
# Arguments of `apply_chat_template` that the server sets or that would replace the template.
RESERVED_VARIABLES = frozenset(
    [
        "self",
        "messages",
        "conversation",
        "tools",
        "tokenize",
        "add_generation_prompt",
        "chat_template",
        "documents",
        "continue_final_message",
        "return_dict",
        "return_tensors",
        "tokenizer_kwargs",
        "padding",
        "truncation",
    ]
)
THINKING_VARIABLES = ("enable_thinking", "reasoning_effort")  # of templates of reasoning models


def chat_prompt(
    llm: LLM, request: ChatRequest, check_characters: Callable[[int], None]
) -> list[int]:
    """Return the token ids of a conversation.

    `check_characters` raises ApiError for a number of characters that cannot fit. Raises ApiError,
    RequestError.
    """
    if llm.tokenizer is None:
        raise RequestError("this model directory has no tokenizer: it cannot chat")
    variables = template_variables(request)
    if reserved := RESERVED_VARIABLES & variables.keys():
        name = "chat_template_kwargs"
        raise ApiError(400, f"{name} may not set {min(reserved)}", name)
    tools = []
    if request.tool_choice != "none":
        tools = [tool.model_dump(exclude_none=True) for tool in request.tools or []]
    return _encode(llm.tokenizer, request.messages, check_characters, tools, variables)


def template_variables(request: ChatRequest) -> Json:
    """Return template variables; those of the request override its reasoning effort."""
    effort = request.reasoning_effort
    variables: Json = {}
    if effort == "none":
        variables = {"enable_thinking": False}
    elif effort is not None:
        variables = {"enable_thinking": True, "reasoning_effort": effort}
    return variables | (request.chat_template_kwargs or {})


def fields_without_effect(llm: LLM, request: ChatRequest) -> list[str]:
    """Return the names of reasoning fields that this model's template does not use."""
    template = llm.tokenizer.template if llm.tokenizer else ""
    if any(name in template for name in THINKING_VARIABLES):
        return []
    ignored = []
    if (request.chat_template_kwargs or {}).get("enable_thinking"):
        ignored.append("enable_thinking")
    if request.reasoning_effort not in (None, "none"):
        ignored.append("reasoning_effort")
    return ignored


def tokenize(
    llm: LLM, request: TokenizeRequest, check_characters: Callable[[int], None]
) -> list[int]:
    """Return the token ids of a text or a conversation. Raises ApiError."""
    if (request.prompt is None) == (request.messages is None) or llm.tokenizer is None:
        raise ApiError(400, "give a prompt or messages, to a model that has a tokenizer", "prompt")
    if request.messages is not None:
        return _encode(llm.tokenizer, request.messages, check_characters)
    prompt = request.prompt or ""
    check_characters(len(prompt))
    return llm.tokenizer.encode(prompt, request.add_special_tokens)


def detokenize(llm: LLM, request: DetokenizeRequest) -> str:
    """Return the text of token ids. Raises ApiError."""
    tokens = request.tokens
    vocab = llm.decoder.config.vocab
    if llm.tokenizer is None or (tokens and not 0 <= min(tokens) <= max(tokens) < vocab):
        message = f"tokens must be token ids under {vocab}, of a model that has a tokenizer"
        raise ApiError(400, message, "tokens")
    return llm.tokenizer.decode(tokens)


def _encode(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    check_characters: Callable[[int], None],
    tools: Sequence[Json] = (),
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    variables = dict(variables or {})
    given = [message.model_dump(exclude_none=True) for message in messages]
    check_characters(limits.count_characters([given, list(tools), variables]))
    formatted = [values for message in messages for values in template_messages(message)]
    return tokenizer.chat(formatted, tools, **variables)


def template_messages(message: Message) -> list[Json]:
    """Return a message as chat templates take it.

    Its content becomes one text, arguments of calls become values, and reasoning is a field of its
    own. Tool results among its parts become messages before it. Raises ApiError.
    """
    parts = [] if isinstance(message.content, str) else message.content or []
    results: list[Json] = [
        {"role": "tool", "content": text_of(part.content), "tool_call_id": part.tool_use_id}
        for part in parts
        if isinstance(part, ResultPart)
    ]
    if results and len(results) == len(parts):
        return results
    values: Json = {
        "role": "system" if message.role == "developer" else message.role,
        "content": text_of(message.content) or message.refusal or "",
    }
    if reasoning := message.reasoning_content or reasoning_of(message.content):
        values["reasoning_content"] = reasoning
    calls = [(call.id, call.function.name, _arguments(call)) for call in message.tool_calls or ()]
    for part in parts:
        if isinstance(part, CallPart):
            calls.append((part.id, part.name, part.input or {}))
    if calls:
        values["tool_calls"] = [
            {"type": "function", "id": id_, "function": {"name": name, "arguments": arguments}}
            for id_, name, arguments in calls
        ]
    if message.name is not None:
        values["name"] = message.name
    if message.tool_call_id is not None:
        values["tool_call_id"] = message.tool_call_id
    return [*results, values]


def _arguments(call: ToolCall) -> Any:
    """Return the arguments of a call as a value; absent ones are an empty object."""
    text = call.function.arguments
    try:
        value = limits.parse(text.encode()) if text and text.strip() else None
    except ValueError:
        message = f"the arguments of {shorten(call.function.name)} are not JSON"
        raise ApiError(400, message, "messages") from None
    return {} if value is None else value


def text_of(content: Sequence[Part] | str | None) -> str:
    """Return the text of a content, its refusals included."""
    if isinstance(content, str):
        return content
    return "".join(
        part.refusal if isinstance(part, RefusalPart) else getattr(part, "text", "")
        for part in content or ()
    )


def reasoning_of(content: Sequence[Part] | str | None) -> str:
    """Return the reasoning among the parts of a content."""
    parts = [] if isinstance(content, str) else content or []
    return "".join(text_of(part.thinking) for part in parts if isinstance(part, ThoughtPart))
