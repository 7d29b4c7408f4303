"""Tool calls: what is asked of the model, and what is found in its text."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


PIECES = st.lists(
    st.sampled_from(
        ["<tool_call>", "</tool_call>", '{"name": "f"}', "{", "}", " ", "\n", "x", '{"name": "g"}', "<tool"]
    ),
    max_size=12,
)


def naive(text: str) -> tuple[str, list[str]]:
    """The text without calls, and the names that are called: by one pattern for a whole block, tried at each place."""
    calls: list[str] = []

    def name(body: str) -> str | None:
        try:
            value: Any = json.loads(body)
        except ValueError:
            return None
        return value.get("name") if isinstance(value, dict) and value.get("name") == "f" else None

    def take(block: re.Match[str]) -> str:
        found = name(block[1])
        calls.extend([found] if found else [])
        return "" if found else block[0]

    if name(text.strip()):
        return "", ["f"]
    rest = re.sub(r"<tool_call>\s*(\{.*?\})\s*(?:</tool_call>|$)", take, text, flags=re.S)
    return rest if rest.strip() else "", calls


@given(PIECES)
def test_calls_are_found_as_by_one_pattern(pieces: list[str]) -> None:
    text = "".join(pieces)
    rest, calls = tools.find(text, [tool("f")])
    assert (rest, [call["function"]["name"] for call in calls]) == naive(text)


@given(PIECES)
def test_a_text_is_suspected_as_its_whole_is(pieces: list[str]) -> None:
    suspicion, text = tools.Suspicion(), ""
    for piece in pieces:
        text += piece
        begun = text.lstrip()
        part = any(text.endswith("<tool_call>"[:n]) for n in range(1, len("<tool_call>")))
        assert suspicion.add(piece) == (not begun or begun.startswith("{") or "<tool_call>" in text or part)


@pytest.mark.parametrize("piece", ["<tool_call>{", "<tool_call> ", "}", "} <tool_call>{", " ", "{"])
def test_many_marks_that_lead_nowhere_take_linear_time(piece: str) -> None:
    text, start = piece * 40_000 + "x", time.perf_counter()
    assert tools.find(text, [tool("f")])[1] == []
    assert time.perf_counter() - start < 3  # it took minutes
