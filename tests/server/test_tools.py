"""Tool calls: the grammar of required ones, and the parser of chosen ones."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forerun.errors import RequestError
from forerun.llm import LLM
from forerun.sampling.grammar import Grammar
from forerun.server import conversation, limits
from forerun.server.errors import ApiError
from forerun.server.protocol import NamedTool, Tool

CALL = '{"name": "w", "arguments": {"c": 1}}'
TAGGED = f"<tool_call>{CALL}</tool_call>"


def tool(name: str, **parameters: object) -> Tool:
    return Tool.model_validate(
        {"type": "function", "function": {"name": name, "parameters": parameters}}
    )


W = [tool("w"), tool("v")]


def found(text: str, known: list[Tool] = W) -> tuple[str, list[tuple[str, Any]]]:
    """The text that is left, and the calls as (name, arguments)."""
    rest, calls = conversation.parse_tool_calls(text, known)
    assert all(call["type"] == "function" and call["id"].startswith("call_") for call in calls)
    return rest, [
        (call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls
    ]


def streamed(pieces: list[str], known: list[Tool] = W) -> tuple[str, list[tuple[str, Any]]]:
    reader = conversation.ToolCallParser(known)
    parts = [*(reader.add(piece) for piece in pieces), reader.end()]
    calls = [call["function"] for _, calls in parts for call in calls]
    return "".join(text for text, _ in parts), [
        (call["name"], json.loads(call["arguments"])) for call in calls
    ]


def test_blocks_that_are_no_calls_stay_text() -> None:
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    other = '<tool_call>{"name": "g"}</tool_call>'
    text, (only,) = conversation.parse_tool_calls(f"{other}\n{call}", [tool("f")])
    assert text == f"{other}\n" and only["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert conversation.parse_tool_calls(f" {call}\n{call}", [tool("f")])[0] == ""
    assert conversation.parse_tool_calls(other, [tool("f")]) == (other, [])


C1 = ("w", {"c": 1})
OPEN = "<tool_call>"
OTHER = '<tool_call>{"name": "x"}</tool_call>'
TAG_IN_STRING = '<tool_call>{"name":"w","arguments":{"c":"{}</tool_call>"}}</tool_call>'
CALL_IN_STRING = '{"name":"w","arguments":{"c":"<tool_call>{\\"name\\": \\"w\\"}"}}'
BROKEN = '<tool_call>{"name": "w", "arguments": {"c": 1}\n'
CUT = '<tool_call>{"name": "w", "arg'
EMOJI = '{"name": "\\u0077", "arguments": {"c": "\\ud83d\\ude00"}}'
SURROGATE = '{"name": "w", "arguments": {"c": "\\ud800"}}'
UNUSUAL: dict[str, tuple[str, str, list[tuple[str, Any]]]] = {  # text, text without calls, calls
    "closing tag in a string": (TAG_IN_STRING, "", [("w", {"c": "{}</tool_call>"})]),
    "call in a string": (CALL_IN_STRING, "", [("w", {"c": '<tool_call>{"name": "w"}'})]),
    "first call not closed": (f"{OPEN}{CALL}\n{TAGGED}", "", [C1, C1]),
    "first call broken": (f"{BROKEN}{TAGGED}", BROKEN, [C1]),
    "tag in prose": (f"Write {OPEN}{{name}}. {TAGGED}", f"Write {OPEN}{{name}}. ", [C1]),
    "tag and quote in prose": (f'{OPEN}{{"name" of}} {TAGGED}', f'{OPEN}{{"name" of}} ', [C1]),
    "tag alone in prose": (f"Use {OPEN} tags: {TAGGED}", f"Use {OPEN} tags: ", [C1]),
    "text around and between": (f"a {TAGGED} b {TAGGED} c", "a  b  c", [C1, C1]),
    "prose after a call not closed": (f"{OPEN}{CALL} I wait.", " I wait.", [C1]),
    "unknown tool in between": (f"{TAGGED}{OTHER}{TAGGED}", OTHER, [C1, C1]),
    "several within tags": (f"{OPEN}\n{CALL}\n{CALL}\n</tool_call>", "", [C1, C1]),
    "list within tags": (f"{OPEN}[{CALL}, {CALL}]</tool_call>", "", [C1, C1]),
    "line ends and spaces": (f"{OPEN}\n\n {CALL} \n</tool_call>\n", "", [C1]),
    "line end in a string": (CALL.replace("1", '"a\nb"'), "", [("w", {"c": "a\nb"})]),
    "object before text": (f"{CALL} and that is all", " and that is all", [C1]),
    "several objects": (f"{CALL}; {CALL}\n{CALL}", "", [C1, C1, C1]),
    "list of calls": (f" [{CALL}, {CALL}]", "", [C1, C1]),
    "list of calls and others": (f"[{CALL}, 1]", f"[{CALL}, 1]", []),
    "empty list": ("[]", "[]", []),
    "parameters": ('{"name": "w", "parameters": {"c": 1}}', "", [C1]),
    "no arguments": ('{"name": "w"}', "", [("w", {})]),
    "arguments as text": ('{"name": "w", "arguments": "{\\"c\\": 1}"}', "", [C1]),
    "function within": (f'{{"type": "function", "function": {CALL}}}', "", [C1]),
    "unicode escapes": (EMOJI, "", [("w", {"c": "\U0001f600"})]),
    "lone surrogate": (SURROGATE, "", [("w", {"c": "\ufffd"})]),
    "name that is a list": ('{"name": ["w"]}', '{"name": ["w"]}', []),
    "object that is no call": (f"{{}} {TAGGED}", "{} ", [C1]),
    "prose like an object": (f"{{x}} is a set. {TAGGED}", "{x} is a set. ", [C1]),
    "cut short": (CUT, CUT, []),
}


@pytest.mark.parametrize("case", UNUSUAL)
def test_calls_are_found_in_unusual_texts(case: str) -> None:
    text, rest, calls = UNUSUAL[case]
    assert found(text) == (rest, calls)
    assert streamed(list(text)) == (rest, calls)


NOT_OBJECTS = ['"Paris"', '["a"]', "5", "true", '"[1]"', '"null and void"', '{"x": NaN}']
NOT_OBJECTS += [
    f'{{"x": {x}}}' for x in ("1e999", "9" * 700, "[" * 99 + "]" * 99, "[" * 91 + "]" * 91)
]


@pytest.mark.parametrize("arguments", NOT_OBJECTS)
def test_a_call_whose_arguments_could_not_come_back_is_none(arguments: str) -> None:
    """What is handed out as a call must be accepted in the next request."""
    text = f'<tool_call>{{"name": "w", "arguments": {arguments}}}</tool_call>'
    assert found(text) == (text, []) == streamed(list(text))


@pytest.mark.parametrize("arguments", ['""', "null", '" "', '"null"', '"{}"', "{}"])
def test_no_arguments_are_an_empty_object(arguments: str) -> None:
    assert found(f'{{"name": "w", "arguments": {arguments}}}') == ("", [("w", {})])
    assert found(f'{{"name": "w", "parameters": {arguments}}}') == ("", [("w", {})])


MARKS = ["<tool_call>", "</tool_call>", "<tool", "x", "\\", *'{}[]":,; \n']
OBJECTS = [CALL, '{"name": "w"}', '{"name": "x"}', '{"a": "', '"name": "w"', '["']
PIECES = st.lists(st.sampled_from([*MARKS, *OBJECTS]), max_size=14)


def expected(text: str) -> tuple[str, list[str]]:
    """The text without calls and the names that are called, by Python's own reader of one JSON
    value."""
    decoder = json.JSONDecoder(strict=False)
    rest: list[str] = []
    calls: list[str] = []

    def value(at: int) -> tuple[Any, int] | None:
        try:
            return decoder.raw_decode(text, at) if text[at : at + 1] in ("{", "[") else None
        except ValueError:
            return None

    def skipped(at: int) -> int:
        while text[at : at + 1].isspace():
            at += 1
        return at

    at, opening = 0, 0  # where reading goes on, and what is text if no call follows
    wanted = True
    while True:
        read = value(skipped(at)) if wanted else None
        if read is not None:
            items = read[0] if isinstance(read[0], list) else [read[0]]
            names = [item.get("name") if isinstance(item, dict) else None for item in items]
            if names and all(name == "w" for name in names):
                calls += names
                at = opening = read[1]
                behind = skipped(at)
                if text.startswith("</tool_call>", behind):
                    at = opening = behind + len("</tool_call>")
                    wanted = False
                elif text[behind : behind + 1] in (";", ","):
                    at = behind + 1
                continue
            at = read[1]
        mark = text.find("<tool_call>", at)
        rest.append(text[opening : mark if mark >= 0 else len(text)])
        if mark < 0:
            break
        at, opening, wanted = mark + len("<tool_call>"), mark, True
    left = "".join(rest)
    return left if left.strip() else "", calls


@given(PIECES)
@example(["{", '"name": "w"', "}", ",", "x"])
def test_calls_are_found_as_by_a_reader_of_values(pieces: list[str]) -> None:
    text = "".join(pieces)
    rest, calls = conversation.parse_tool_calls(text, [tool("w")])
    assert (rest, [call["function"]["name"] for call in calls]) == expected(text)


@given(PIECES, st.lists(st.integers(0, 200), max_size=30))
def test_a_stream_says_what_the_whole_says(pieces: list[str], cuts: list[int]) -> None:
    text = "".join(pieces)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    parts = [text[a:b] for a, b in pairwise(places)]
    assert streamed(parts) == streamed(list(text)) == found(text)


def test_text_is_streamed_as_soon_as_it_can_be_no_call() -> None:
    """And a call as soon as it is whole: nobody waits for the end of the answer."""
    reader = conversation.ToolCallParser(W)
    assert reader.add("Use <tool_call>{") == ("Use ", [])
    assert reader.add("name} here <to") == ("<tool_call>{name} here ", [])
    assert reader.add("ol> and ") == ("<tool> and ", [])
    text, (call,) = reader.add(f"<tool_call>{CALL}")
    assert text == "" and call["function"]["name"] == "w"
    assert reader.add("</tool_call>") == ("", []) and reader.add(" x") == (" x", [])
    assert reader.end() == ("", [])


@given(PIECES)
def test_calls_that_are_handed_out_can_come_back(pieces: list[str]) -> None:
    for call in conversation.parse_tool_calls("".join(pieces), W)[1]:
        assert isinstance(limits.parse(call["function"]["arguments"].encode()), dict)


NOWHERE = ["<tool_call>{", "<tool_call> ", "}", "} <tool_call>{", " ", "{", '<tool_call>{"']
NOWHERE += ['<tool_call>{"a":"', "<tool_call>[", '<tool_call>{"a":"\\"', '<tool_call>{",":[","']
NOWHERE += ['<tool_call>{"a":{"b":', "<tool_call>{}", '{"a":"<tool_call>"},']


@pytest.mark.parametrize("piece", NOWHERE)
@pytest.mark.parametrize("size", [1 << 20, 12], ids=["whole", "streamed"])
def test_many_marks_that_lead_nowhere_take_linear_time(
    piece: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No character is read for more than two values, which is counted here: it took minutes
    once."""
    scans = [Counted(conversation.WITHIN_STRING), Counted(conversation.BETWEEN_STRINGS)]
    monkeypatch.setattr(conversation, "WITHIN_STRING", scans[0])
    monkeypatch.setattr(conversation, "BETWEEN_STRINGS", scans[1])
    text = piece * 2000 + "x"
    rest, calls = streamed([text[at : at + size] for at in range(0, len(text), size)])
    assert not calls and rest == text
    assert sum(scan.read for scan in scans) <= 2 * len(text)


class Counted:
    """A pattern that counts the characters it has matched."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self.pattern, self.read = pattern, 0

    def match(self, text: str, at: int) -> re.Match[str]:
        match = self.pattern.match(text, at)
        assert match is not None
        self.read += match.end() - at
        return match


# Required calls


def accepts(llm: LLM, grammar: Grammar | None, text: str) -> bool:
    """Whether the compiled grammar takes the text, and nothing has to follow."""
    assert grammar is not None and llm.tokenizer is not None
    core = llm.engine.grammars.compiled(grammar).core.deep_copy()
    return (
        all(core.consume_token(token) for token in llm.tokenizer.encode(text, False))
        and core.is_accepting()
    )


LEAF = {"enum": ["leaf"]}
CLOSED = {"type": "object", "additionalProperties": False}
DEFS = {"$defs": {"x": LEAF}}
NAMED = {"type": "function", "function": {"name": "f"}}
TREE = {"next": {"$ref": "#/$defs/tree"}, "leaf": {"$ref": "#/$defs/leaf"}}


def closed(**properties: Any) -> dict[str, Any]:
    return CLOSED | {"properties": properties}


REFERENCES: dict[
    str, tuple[dict[str, Any], list[Any], list[Any]]
] = {  # a schema, what it takes, what it does not
    "$defs": (closed(a={"$ref": "#/$defs/x"}) | DEFS, [{"a": "leaf"}, {}], [{"a": 1}]),
    "definitions": (
        closed(a={"$ref": "#/definitions/x"}) | {"definitions": {"x": LEAF}},
        [{"a": "leaf"}],
        [{"a": 1}],
    ),
    "a property": (
        closed(a={"type": "integer"}, b={"$ref": "#/properties/a"}),
        [{"a": 1, "b": 2}],
        [{"b": "x"}],
    ),
    "the root": (closed(a={"$ref": "#"}), [{"a": {"a": {}}}], [{"a": 1}, {"name": "f"}]),
    "nested $defs": (
        closed(a={"$ref": "#/$defs/x/$defs/y"}) | {"$defs": {"x": {"$defs": {"y": LEAF}}}},
        [{"a": "leaf"}],
        [{"a": "other"}],
    ),
    "definitions that refer to each other": (
        {"$ref": "#/$defs/tree", "$defs": {"tree": closed(**TREE), "leaf": LEAF}},
        [{"next": {"next": {"leaf": "leaf"}}}],
        [{"next": 1}, {"next": {"leaf": 1}}],
    ),
    "within a list": (
        closed(a={"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/x"}, {"$ref": "#"}]}})
        | DEFS,
        [{"a": ["leaf", {"a": []}]}],
        [{"a": [1]}],
    ),
    "escaped pointers": (
        closed(a={"$ref": "#/$defs/x~1y"}, b={"$ref": "#/$defs/p%25q"})
        | {"$defs": {"x/y": LEAF, "p%q": {"enum": [2]}}},
        [{"a": "leaf", "b": 2}],
        [{"a": 2}, {"b": "leaf"}],
    ),
    "$anchor": (
        closed(a={"$ref": "#here"}) | {"$defs": {"x": LEAF | {"$anchor": "here"}}},
        [{"a": "leaf"}],
        [{"a": 1}],
    ),
    "$id": (
        closed(a={"$ref": "t.json#/$defs/x"}) | {"$id": "https://example.com/t.json"} | DEFS,
        [{"a": "leaf"}],
        [{"a": 1}],
    ),
    "a reference that is data": (
        closed(a={"const": {"$ref": "#/$defs/x"}}, b={"enum": [{"$ref": "#"}]}),
        [{"a": {"$ref": "#/$defs/x"}, "b": {"$ref": "#"}}],
        [{"a": {"$ref": "#"}}],
    ),
    "a property called $ref": (
        CLOSED | {"properties": {"$ref": LEAF, "b": {"$ref": "#/properties/$ref"}}},
        [{"$ref": "leaf", "b": "leaf"}],
        [{"$ref": 1}, {"b": 1}],
    ),
    "a default": (
        closed(a={"type": "string", "default": {"$ref": "#/no"}, "examples": [{"$ref": "#/no"}]}),
        [{"a": "x"}],
        [{"a": 1}],
    ),
}


@pytest.mark.parametrize("case", REFERENCES)
def test_parameters_mean_what_they_mean_as_a_response_format(llm: LLM, case: str) -> None:
    """References count from the root of the tool's own schema, wherever it stands in the grammar of
    the call."""
    schema, right, wrong = REFERENCES[case]
    form = Grammar.of("json_schema", schema)
    other = tool("g", **closed(a={"$ref": "#/$defs/x"}), **{"$defs": {"x": {"enum": ["other"]}}})
    call = conversation.required_call([other, tool("f", **schema)], "required")
    named = conversation.required_call(
        [other, tool("f", **schema)], NamedTool.model_validate(NAMED)
    )
    for value in [*right, *wrong]:
        text = json.dumps(value, separators=(",", ":"))
        assert accepts(llm, form, text) is (value in right), text
        for grammar in (call, named):
            assert accepts(llm, grammar, f'{{"name":"f","arguments":{text}}}') is (
                value in right
            ), text
    assert accepts(llm, call, '{"name":"g","arguments":{"a":"other"}}'), (
        "each tool has its own definitions"
    )
    assert not accepts(llm, call, '{"name":"g","arguments":{"a":"leaf"}}')
    assert not accepts(llm, named, '{"name":"g","arguments":{}}')


@pytest.mark.parametrize(
    "parameters",
    [{}, {"description": "x"}, {"properties": {"a": LEAF}}, {"type": ["object", "null"]}],
)
def test_arguments_that_are_demanded_are_an_object(llm: LLM, parameters: dict[str, Any]) -> None:
    """Other values are no arguments: a client could not send them back."""
    grammar = conversation.required_call([tool("f", **parameters)], "required")
    assert accepts(llm, grammar, '{"name":"f","arguments":{}}')
    for text in ("null", "5", '"x"', "[]"):
        assert not accepts(llm, grammar, f'{{"name":"f","arguments":{text}}}')


@pytest.mark.parametrize("kind", ["string", ["string", "null"], 5])
def test_parameters_that_allow_no_object_are_refused(kind: object) -> None:
    with pytest.raises(ApiError, match="the parameters of 'f' must be a schema of type object"):
        conversation.required_call([tool("f", type=kind)], "required")


def test_a_schema_that_cannot_be_used_is_refused_in_one_line(llm: LLM) -> None:
    """It says what is wrong with the schema, and nothing of the grammar that is made of it."""
    grammar = conversation.required_call([tool("f", **closed(a={"$ref": "#/nowhere"}))], "required")
    with pytest.raises(RequestError) as error:
        accepts(llm, grammar, "")
    assert (
        str(error.value)
        == "the tool_calls grammar cannot be used: Pointer '/nowhere' does not exist"
    )
