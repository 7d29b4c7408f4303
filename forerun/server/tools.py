"""Tool calls: asked for by grammar where one is required, found in the text where the model may
choose.

Models write calls in their own ways. Read here: <tool_call>{"name", "arguments"}</tool_call> (Qwen,
Hermes, and our plain layout), also without the closing mark, and a text that begins with such
objects, "parameters" included (Llama 3), or with a list of them (Mistral). One reader serves
answers that are written whole and those that are streamed."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from typing import Any

from forerun.errors import shorten
from forerun.sampling.grammar import Grammar
from forerun.server import limits
from forerun.server.errors import ApiError
from forerun.server.protocol import NamedTool, Tool

OPENING, CLOSING = "<tool_call>", "</tool_call>"
SPACE = re.compile(r"\s*+")
WITHIN_STRING = re.compile(r'[^"\\]*+')
BETWEEN_STRINGS = re.compile(
    r"[\s,:\d.+\-eEtruefalsn]*+"
)  # what JSON has outside of strings, brackets apart
LEVELS = 10  # of a request, above the arguments of a call in its messages

Json = dict[str, Any]


def required(tools: Sequence[Tool], choice: Any) -> Grammar | None:
    """The grammar of a call, where `tool_choice` demands one."""
    if choice in (None, "none", "auto"):
        return None
    names = [tool.function.name for tool in tools]
    if isinstance(choice, NamedTool):
        if choice.function.name not in names:
            message = f"tool_choice names {shorten(choice.function.name)}, which is not among tools"
            raise ApiError(400, message, "tool_choice")
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
    if not tools:
        raise ApiError(400, "tool_choice demands a call, but there are no tools", "tool_choice")
    return Grammar.of(
        "tool_calls", [[tool.function.name, _arguments_schema(tool)] for tool in tools]
    )


def _arguments_schema(tool: Tool) -> dict[str, Any]:
    """The JSON schema of a tool's arguments, which are always an object. Raises ApiError where it
    allows no object."""
    schema = tool.function.parameters or {}
    kinds = schema.get("type", "object")
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        message = f"the parameters of {shorten(tool.function.name)} must be a schema of type object"
        raise ApiError(400, message, "tools")
    return schema | {"type": "object"}


def find(text: str, tools: Sequence[Tool]) -> tuple[str, list[Json]]:
    """(the text without calls, the calls in OpenAI's shape) of a whole answer."""
    reader = CallReader(tools)
    (before, calls), (rest, more) = reader.add(text), reader.end()
    return before + rest, calls + more


class CallReader:
    """Separates the tool calls of an answer from its text while the answer arrives in pieces.

    A JSON value is read from each opening mark, from the beginning of the answer, and behind each
    call. Where it is a call of a known tool, or a list of such calls, it is no text; everything
    else is, as it was written. An answer that is blank apart from calls has no text.

    The time is linear in the length of the answer. A value that turns out to be none is read again
    as text, but a mark is only possible within its strings, and what is within a string of one
    value is outside of those of the next: at each place at most two values go on.
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._known = {tool.function.name for tool in tools}
        self._state = (
            CallReader._before_value
        )  # reads on in the buffer; False where that is not enough
        self._buffer, self._at, self._last = "", 0, False
        self._opening: list[
            str
        ] = []  # stands in front of a value, and is text where the value is no call
        self._value: list[str] = []  # pieces of a value that began in an earlier buffer
        self._scan = ValueScan()
        self._blank: (
            list[str] | None
        ) = []  # white space in front of all text; None behind the first text
        self._text: list[str] = []
        self._calls: list[Json] = []

    def add(self, piece: str) -> tuple[str, list[Json]]:
        """Read the next piece and return (text, calls) that are certain now."""
        return self._read(piece, last=False)

    def end(self) -> tuple[str, list[Json]]:
        """Return (text, calls) of what was not certain before the answer ended."""
        return self._read("", last=True)

    def _read(self, piece: str, last: bool) -> tuple[str, list[Json]]:
        self._buffer, self._at, self._last = self._buffer[self._at :] + piece, 0, last
        while self._state(self):
            pass
        found = "".join(self._text), self._calls
        self._text, self._calls = [], []
        return found

    def _in_text(self) -> bool:
        found = self._buffer.find(OPENING, self._at)
        if found >= 0:
            self._give(self._buffer[self._at : found])
            self._opening, self._at, self._state = (
                [OPENING],
                found + len(OPENING),
                CallReader._before_value,
            )
            return True
        rest = self._buffer[self._at :]
        kept = 0 if self._last else _overlap(rest, OPENING)
        self._give(rest[: len(rest) - kept])
        self._at = len(self._buffer) - kept
        return False

    def _before_value(self) -> bool:
        self._skip_space()
        begun = self._buffer[self._at : self._at + 1]
        if begun and begun in "{[":
            self._value, self._scan, self._state = [], ValueScan(), CallReader._in_value
            return True
        if begun or self._last:
            self._give_opening()
        return bool(begun)

    def _in_value(self) -> bool:
        try:
            end = self._scan.end(self._buffer, self._at)
            if end is None and not self._last:
                self._value.append(self._buffer[self._at :])
                self._at = len(self._buffer)
                return False
            text = "".join([*self._value, self._buffer[self._at : end]])
            value = json.loads(text, strict=False)  # models write line ends into strings
        except (ValueError, RecursionError):  # it is no value: marks within it count
            if self._value:
                self._buffer, self._at = "".join([*self._value, self._buffer[self._at :]]), 0
            self._give_opening()
            return True
        self._at = len(self._buffer) if end is None else end
        calls = _calls(value, self._known)
        if calls:
            self._calls += calls
            self._opening, self._state = [], CallReader._after_call
        else:
            self._give_opening()
            self._give(text)
        return True

    def _after_call(self) -> bool:
        """A closing mark, if there is one, or another call."""
        self._skip_space()
        rest = self._buffer[self._at : self._at + len(CLOSING)]
        if rest == CLOSING:
            self._opening, self._at, self._state = [], self._at + len(CLOSING), CallReader._in_text
            return True
        if not self._last and CLOSING.startswith(rest):
            return False
        if rest[:1] in (";", ","):
            self._opening.append(rest[0])
            self._at += 1
        self._state = CallReader._before_value
        return True

    def _skip_space(self) -> None:
        end = SPACE.match(self._buffer, self._at).end()  # type: ignore[union-attr]  # it matches nothing, too
        self._opening.append(self._buffer[self._at : end])
        self._at = end

    def _give_opening(self) -> None:
        """What was held for a value is text, and so is what follows."""
        self._give("".join(self._opening))
        self._opening, self._value, self._state = [], [], CallReader._in_text

    def _give(self, text: str) -> None:
        if self._blank is not None:
            self._blank.append(text)
            if not text.strip():
                return
            text, self._blank = "".join(self._blank), None
        self._text.append(text)


def _overlap(text: str, mark: str) -> int:
    """How many characters at the end of `text` may be the beginning of `mark`."""
    return next((n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), 0)


class ValueScan:
    """Looks for the end of a JSON object or list in a text that arrives in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    def end(self, text: str, at: int) -> int | None:
        """Read on from `at`: where the value ends in `text`, None where it does not. Raises
        ValueError where what is read can be no JSON."""
        while at < len(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                at = WITHIN_STRING.match(text, at).end()  # type: ignore[union-attr]
                self._escaped, self._in_string = text[at : at + 1] == "\\", text[at : at + 1] != '"'
            else:
                at = BETWEEN_STRINGS.match(text, at).end()  # type: ignore[union-attr]
                if at < len(text) and self._mark(text[at]):
                    return at + 1
            at += 1
        return None

    def _mark(self, mark: str) -> bool:
        """Read a character between strings; True for the one that ends the value."""
        if mark == '"':
            self._in_string = True
        elif mark in "{[" and self._depth < limits.DEPTH:
            self._depth += 1
        elif mark in "]}":
            self._depth -= 1
        else:
            raise ValueError
        return self._depth == 0


def _calls(value: Any, known: set[str]) -> list[Json]:
    """The calls that a JSON value is, none where it is not a call or a list of nothing else."""
    calls = [_call(item, known) for item in (value if isinstance(value, list) else [value])]
    found = [call for call in calls if call is not None]
    return found if len(found) == len(calls) else []


def _call(value: Any, known: set[str]) -> Json | None:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if (
        not isinstance(value, dict)
        or not isinstance(value.get("name"), str)
        or value["name"] not in known
    ):
        return None
    given = [value[name] for name in ("arguments", "parameters") if value.get(name) is not None]
    arguments = _arguments(given[0] if given else {})
    if arguments is None:
        return None
    function = {"name": value["name"], "arguments": arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def _arguments(value: Any) -> str | None:
    """The arguments of a call as JSON that the next request may hold, None where they are no
    object."""
    try:
        if isinstance(value, str):
            value = json.loads(value, strict=False) if value.strip() else {}
        if value is None:
            value = {}
        text = json.dumps(value, ensure_ascii=False)
        text = text.encode("utf-16", "surrogatepass").decode(
            "utf-16", "replace"
        )  # half a character is none
        limits.parse(f"{'[' * LEVELS}{text}{']' * LEVELS}".encode())
    except (ApiError, ValueError, RecursionError):
        return None
    return text if isinstance(value, dict) else None
