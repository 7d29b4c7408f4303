"""Tool calls: asked for by grammar where one is required, found in the text where the model may choose.

Models write calls in their own ways. Read here: <tool_call>{"name", "arguments"}</tool_call> (Qwen, Hermes, and our
plain layout), and a text that is nothing but such an object, "parameters" included (Llama 3).
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from typing import Any

from forerun.sampling.grammar import Grammar
from forerun.server.errors import ApiError
from forerun.server.protocol import NamedTool, Tool

OPENING = "<tool_call>"
BLOCK = re.compile(r"<tool_call>\s*(\{.*?\})\s*(?:</tool_call>|$)", flags=re.S)


def required(tools: Sequence[Tool], choice: Any) -> Grammar | None:
    """The grammar of a call, where `tool_choice` demands one."""
    if choice in (None, "none", "auto"):
        return None
    names = [tool.function.name for tool in tools]
    if isinstance(choice, NamedTool):
        if choice.function.name not in names:
            raise ApiError(400, f"tool_choice names {choice.function.name!r}, which is not among tools", "tool_choice")
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
                raise ApiError(400, f"two tools define {name!r} in different ways: rename it in one of them", "tools")
    return shared


def find(text: str, tools: Sequence[Tool]) -> tuple[str, list[dict[str, Any]]]:
    """(the text without calls, the calls in OpenAI's shape)."""
    known = {tool.function.name for tool in tools}
    bare = _call(text.strip(), known)
    if bare:
        return "", [bare]
    calls: list[dict[str, Any]] = []

    def take(block: re.Match[str]) -> str:
        call = _call(block[1], known)
        calls.extend([call] if call else [])
        return "" if call else block[0]

    rest = BLOCK.sub(take, text)
    return rest if rest.strip() else "", calls


def may_be_call(text: str) -> bool:
    """Whether a text that has begun so may turn out to be a call: it must not be streamed as text then."""
    begun = text.lstrip()
    return not begun or begun.startswith("{") or OPENING in text or _ends_with_part(text)


def _ends_with_part(text: str) -> bool:
    return any(text.endswith(OPENING[:n]) for n in range(1, len(OPENING)))


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
