"""Conversations of API requests: prompts from chat templates, and tool calls in answers.

A tool call gets a grammar where the request requires one, and a parser where the model may choose.
Models write calls in different ways. The parser reads <tool_call>{"name", "arguments"}</tool_call>
(Qwen, Hermes, and our plain layout), also without the closing tag, and a text that begins with such
objects, with "parameters" (Llama 3), or with a list of them (Mistral). Full and streamed responses
use the same parser.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from forerun.errors import RequestError, shorten
from forerun.llm import LLM
from forerun.models.tokenizer import Tokenizer
from forerun.sampling.grammar import Grammar
from forerun.server import limits
from forerun.server.errors import ApiError
from forerun.server.protocol import (
    CallPart,
    ChatRequest,
    DetokenizeRequest,
    Message,
    NamedTool,
    Part,
    RefusalPart,
    ResultPart,
    ThoughtPart,
    TokenizeRequest,
    Tool,
    ToolCall,
)

Json = dict[str, Any]
# Arguments of `apply_chat_template` that the server sets or that would replace the template.
RESERVED_VARIABLES = {
    *("self", "messages", "conversation", "tools", "documents", "chat_template"),
    *("add_generation_prompt", "continue_final_message", "tokenize", "tokenizer_kwargs"),
    *("return_dict", "return_tensors", "padding", "truncation"),
}
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


OPENING = "<tool_call>"
CLOSING = "</tool_call>"
SPACE = re.compile(r"\s*+")
WITHIN_STRING = re.compile(r'[^"\\]*+')
BETWEEN_STRINGS = re.compile(r"[\s,:\d.+\-eEtruefalsn]*+")  # JSON outside of strings and brackets
REQUEST_DEPTH = 10  # nesting of a request above the arguments of a call in its messages


def required_call(tools: Sequence[Tool], choice: str | NamedTool | None) -> Grammar | None:
    """Return the grammar of a call where `tool_choice` requires one. Raises ApiError."""
    if choice in (None, "none", "auto"):
        return None
    if isinstance(choice, NamedTool):
        name = choice.function.name
        tools = [tool for tool in tools if tool.function.name == name]
        if not tools:
            message = f"tool_choice names {shorten(name)}, which is not among tools"
            raise ApiError(400, message, "tool_choice")
    if not tools:
        raise ApiError(400, "tool_choice requires a call, but there are no tools", "tool_choice")
    alternatives = [[tool.function.name, _arguments_schema(tool)] for tool in tools]
    return Grammar.of("tool_calls", alternatives)


def _arguments_schema(tool: Tool) -> Json:
    """Return the JSON schema of a tool's arguments, which are an object. Raises ApiError."""
    schema = tool.function.parameters or {}
    kinds = schema.get("type", "object")
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        message = f"the parameters of {shorten(tool.function.name)} must be a schema of type object"
        raise ApiError(400, message, "tools")
    return schema | {"type": "object"}


class ToolCallParser:
    """Separates the tool calls of an answer from its text while the answer arrives in pieces.

    A JSON value is read at the beginning of the answer, after each opening tag, and after each
    call. If it is a call of a known tool, or a list of such calls, it is removed from the text;
    everything else stays as it was written. An answer that is blank apart from calls has no text.

    The time is linear in the length of the answer. A value that turns out to be invalid is read
    again as text, but a tag is only possible within its strings, and what is within a string of one
    value is outside of those of the next: no character is read for more than two values.
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._known = {tool.function.name for tool in tools}
        # The state reads on in the buffer and returns False if it needs more text. It is a plain
        # function, because a bound method would make a reference cycle.
        self._state = ToolCallParser._before_value
        self._buffer = ""
        self._position = 0
        self._is_last = False
        self._opening: list[str] = []  # text before a value, which stays if it is no call
        self._value: list[str] = []  # pieces of a value that began in an earlier buffer
        self._scanner = JsonScanner()
        self._blank: list[str] | None = []  # white space before all text; None after the first text
        self._text: list[str] = []
        self._calls: list[Json] = []

    def read(self, piece: str, is_last: bool) -> tuple[str, list[Json]]:
        """Read the next piece and return the text and the calls (OpenAI's format) that are final.

        With the last piece, all that was not final before is.
        """
        self._buffer = self._buffer[self._position :] + piece
        self._position = 0
        self._is_last = is_last
        while self._state(self):
            pass
        found = "".join(self._text), self._calls
        self._text = []
        self._calls = []
        return found

    def _in_text(self) -> bool:
        found = self._buffer.find(OPENING, self._position)
        if found >= 0:
            self._emit(self._buffer[self._position : found])
            self._opening = [OPENING]
            self._position = found + len(OPENING)
            self._state = ToolCallParser._before_value
            return True
        rest = self._buffer[self._position :]
        num_held = 0 if self._is_last else _overlap(rest, OPENING)
        self._emit(rest[: len(rest) - num_held])
        self._position = len(self._buffer) - num_held
        return False

    def _before_value(self) -> bool:
        self._skip_space()
        first = self._buffer[self._position : self._position + 1]
        if first and first in "{[":
            self._value = []
            self._scanner = JsonScanner()
            self._state = ToolCallParser._in_value
            return True
        if first or self._is_last:
            self._emit_opening()
        return bool(first)

    def _in_value(self) -> bool:
        try:
            end = self._scanner.end(self._buffer, self._position)
            if end is None and not self._is_last:
                self._value.append(self._buffer[self._position :])
                self._position = len(self._buffer)
                return False
            text = "".join([*self._value, self._buffer[self._position : end]])
            value = json.loads(text, strict=False)  # models write line ends into strings
        except (ValueError, RecursionError):  # invalid JSON: read it again as text
            if self._value:
                self._buffer = "".join([*self._value, self._buffer[self._position :]])
                self._position = 0
            self._emit_opening()
            return True
        self._position = len(self._buffer) if end is None else end
        calls = _calls(value, self._known)
        if calls:
            self._calls += calls
            self._opening = []
            self._state = ToolCallParser._after_call
        else:
            self._emit_opening()
            self._emit(text)
        return True

    def _after_call(self) -> bool:
        """Read a closing tag, if there is one, or the beginning of another call."""
        self._skip_space()
        rest = self._buffer[self._position : self._position + len(CLOSING)]
        if rest == CLOSING:
            self._opening = []
            self._position += len(CLOSING)
            self._state = ToolCallParser._in_text
            return True
        if not self._is_last and CLOSING.startswith(rest):
            return False
        if rest[:1] in (";", ","):
            self._opening.append(rest[0])
            self._position += 1
        self._state = ToolCallParser._before_value
        return True

    def _skip_space(self) -> None:
        end = _match_end(SPACE, self._buffer, self._position)
        self._opening.append(self._buffer[self._position : end])
        self._position = end

    def _emit_opening(self) -> None:
        """Emit what was held before a value, and go on with text."""
        self._emit("".join(self._opening))
        self._opening = []
        self._value = []
        self._state = ToolCallParser._in_text

    def _emit(self, text: str) -> None:
        if self._blank is not None:
            self._blank.append(text)
            if not text.strip():
                return
            text = "".join(self._blank)
            self._blank = None
        self._text.append(text)


def _overlap(text: str, tag: str) -> int:
    """Return how many characters at the end of `text` may begin `tag`."""
    return next((n for n in range(len(tag) - 1, 0, -1) if text.endswith(tag[:n])), 0)


def _match_end(pattern: re.Pattern[str], text: str, position: int) -> int:
    """Return where a match at `position` ends; the pattern matches the empty string too."""
    match = pattern.match(text, position)
    assert match is not None
    return match.end()


class JsonScanner:
    """Finds the end of a JSON object or list in a text that arrives in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def end(self, text: str, position: int) -> int | None:
        """Read on from `position` and return where the value ends in `text`, or None.

        Raises ValueError where the text cannot be JSON.
        """
        while position < len(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                position = _match_end(WITHIN_STRING, text, position)
                character = text[position : position + 1]
                self._escaped = character == "\\"
                self._in_string = character != '"'
            else:
                position = _match_end(BETWEEN_STRINGS, text, position)
                if position < len(text) and self._ends_with(text[position]):
                    return position + 1
            position += 1
        return None

    def _ends_with(self, character: str) -> bool:
        """Read a character between strings; return True if it ends the value."""
        if character == '"':
            self._in_string = True
        elif character in "{[" and self._depth < limits.DEPTH:
            self._depth += 1
        elif character in "]}":
            self._depth -= 1
        else:
            raise ValueError
        return self._depth == 0


def _calls(value: Any, known: set[str]) -> list[Json]:
    """Return the calls of a value that is a call, or a list of nothing else."""
    calls = [_call(item, known) for item in (value if isinstance(value, list) else [value])]
    found = [call for call in calls if call is not None]
    return found if len(found) == len(calls) else []


def _call(value: Any, known: set[str]) -> Json | None:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or name not in known:
        return None
    given = [value[key] for key in ("arguments", "parameters") if value.get(key) is not None]
    arguments = _arguments_text(given[0] if given else {})
    if arguments is None:
        return None
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def _arguments_text(value: Any) -> str | None:
    """Return arguments as JSON that the next request may hold, or None if they are no object."""
    try:
        if isinstance(value, str):
            value = json.loads(value, strict=False) if value.strip() else {}
        if value is None:
            value = {}
        text = json.dumps(value, ensure_ascii=False)
        # replace lone surrogates, which no client could send back
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        limits.parse(f"{'[' * REQUEST_DEPTH}{text}{']' * REQUEST_DEPTH}".encode())
    except (ApiError, ValueError, RecursionError):
        return None
    return text if isinstance(value, dict) else None
