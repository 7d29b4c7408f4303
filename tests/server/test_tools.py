"""Tool calls: what is asked of the model, and what is found in its text."""

from __future__ import annotations

import pytest

pytest.importorskip("fastapi")

from forerun.server import tools
from forerun.server.errors import ApiError
from forerun.server.protocol import Tool


def tool(name: str, **parameters: object) -> Tool:
    return Tool.model_validate({"type": "function", "function": {"name": name, "parameters": parameters}})


def test_blocks_that_are_no_calls_stay_text() -> None:
    call, other = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', '<tool_call>{"name": "g"}</tool_call>'
    text, (found,) = tools.find(f"{other}\n{call}", [tool("f")])
    assert text == f"{other}\n" and found["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert tools.find(f" {call}\n{call}", [tool("f")])[0] == "", "what is left is no text"
    assert tools.find(other, [tool("f")]) == (other, [])


def test_definitions_of_several_tools_must_not_differ() -> None:
    """They stand in one schema: those of one tool would become those of the other."""
    text, number = ({"Item": {"type": kind}} for kind in ("string", "integer"))
    item = {"a": {"$ref": "#/$defs/Item"}}
    same = [tool(name, type="object", properties=item, **{"$defs": text}) for name in "fg"]
    assert tools.required(same, "required") is not None
    with pytest.raises(ApiError, match="two tools define 'Item'") as error:
        tools.required([same[0], tool("h", type="object", properties=item, **{"$defs": number})], "required")
    assert error.value.status == 400
