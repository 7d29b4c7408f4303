"""Tool calls: asked for by grammar where one is required, found in the text where the model may choose.

Models write calls in their own ways. Read here: <tool_call>{"name", "arguments"}</tool_call> (Qwen, Hermes, and our
plain layout), and a text that is nothing but such an object, "parameters" included (Llama 3).
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from forerun.errors import brief
from forerun.sampling.grammar import Grammar
from forerun.server.errors import ApiError
from forerun.server.protocol import NamedTool, Tool

OPENING = "<tool_call>"
BEGINNING = re.compile(r"<tool_call>\s*+\{")
CLOSING = re.compile(r"\}\s*+(?:</tool_call>|$)")


def required(tools: Sequence[Tool], choice: Any) -> Grammar | None:
    """The grammar of a call, where `tool_choice` demands one."""
    if choice in (None, "none", "auto"):
        return None
    names = [tool.function.name for tool in tools]
    if isinstance(choice, NamedTool):
        if choice.function.name not in names:
            message = f"tool_choice names {brief(choice.function.name)}, which is not among tools"
            raise ApiError(400, message, "tool_choice")
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
    if not tools:
        raise ApiError(400, "tool_choice demands a call, but there are no tools", "tool_choice")
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                "arguments": tool.function.parameters or {"type": "object"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    return Grammar.of("json_schema", {"anyOf": calls, **({"$defs": shared} if (shared := _definitions(tools)) else {})})


def _definitions(tools: Sequence[Tool]) -> dict[str, Any]:
    """A schema's references count from the root, so its definitions move there. Raises ApiError where two differ."""
    shared: dict[str, Any] = {}
    for tool in tools:
        own = (tool.function.parameters or {}).get("$defs", {})
        for name, definition in own.items() if isinstance(own, dict) else ():
            if shared.setdefault(name, definition) != definition:
                message = f"two tools define {brief(name)} in different ways: rename it in one of them"
                raise ApiError(400, message, "tools")
    return shared


def find(text: str, tools: Sequence[Tool]) -> tuple[str, list[dict[str, Any]]]:
    """(the text without calls, the calls in OpenAI's shape)."""
    known = {tool.function.name for tool in tools}
    bare = _call(text.strip(), known)
    if bare:
        return "", [bare]
    calls: list[dict[str, Any]] = []
    pieces, at = [], 0
    for start, body, end in _blocks(text):
        call = _call(text[body], known)
        if call:
            calls.append(call)
            pieces.append(text[at:start])
            at = end
    rest = "".join([*pieces, text[at:]])
    return rest if rest.strip() else "", calls


def _blocks(text: str) -> Iterator[tuple[int, slice, int]]:
    """Where calls are written: (the beginning of the opening, the object, the end of the closing), one behind the
    other. Both marks are looked for once over the whole text, so that many that lead nowhere take no longer."""
    closings, at = CLOSING.finditer(text), 0
    closing = next(closings, None)
    for opening in BEGINNING.finditer(text):
        if opening.start() < at:
            continue
        while closing and closing.start() < opening.end():
            closing = next(closings, None)
        if closing is None:
            return
        at = closing.end()
        yield opening.start(), slice(opening.end() - 1, closing.start() + 1), at


class Suspicion:
    """Whether a text that arrives in pieces may turn out to be a call: it must not be streamed as text then."""

    def __init__(self) -> None:
        self.begun = self.certain = False
        self._end = ""  # of the text, as long as a part of an opening can be

    def add(self, piece: str) -> bool:
        """Read on, and say whether it may be one now."""
        if not self.begun:
            piece = piece.lstrip()
            self.begun = bool(piece)
            self.certain = piece.startswith("{")
        end = self._end + piece
        self.certain = self.certain or OPENING in end
        self._end = end[1 - len(OPENING) :]
        return not self.begun or self.certain or any(end.endswith(OPENING[:n]) for n in range(1, len(OPENING)))


def _call(text: str, known: set[str]) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or value.get("name") not in known:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {
            "name": value["name"],
            "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments),
        },
    }
