"""Structured output: grammars as values, which `compiler` compiles for a model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from forerun.errors import RequestError, suggest

KINDS = ("json_schema", "json_object", "regex", "lark", "choice", "tool_calls")
LONGEST = 1 << 16  # characters of a grammar


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form of an output, from its first token to its last.

    JSON comes without optional white space, which small models tend to get lost in; a schema with
    {"x-guidance": {"whitespace_flexible": true}} allows it again.

    Args:
        kind: json_schema, json_object (any JSON object), regex (Rust syntax, the whole output),
            lark (llguidance's dialect, its rule `start`), choice, or tool_calls (a call of one of
            several tools).
        text: the schema as JSON, the regex, the Lark grammar, a JSON list of strings, or a JSON
            list of [name of a tool, JSON schema of its arguments]; "" for json_object.

    Raises:
        RequestError: the text is not valid for this kind.
    """

    kind: str
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise RequestError(
                f"there is no grammar kind {self.kind!r}: {suggest(str(self.kind), KINDS)}"
            )
        if not isinstance(self.text, str) or bool(self.text) == (self.kind == "json_object"):
            wanted = "no text" if self.kind == "json_object" else "a text that is not empty"
            raise RequestError(
                f"a {self.kind} grammar needs {wanted}, not {short(repr(self.text))}"
            )
        if len(self.text) > LONGEST:
            raise RequestError(
                f"the grammar has {len(self.text)} characters: give at most {LONGEST}"
            )
        try:
            self.text.encode()
        except UnicodeEncodeError:  # invalid UTF-8 of a command line becomes lone surrogates
            raise RequestError("the grammar is not valid Unicode text: give UTF-8") from None
        if self.kind not in ("json_schema", "choice", "tool_calls"):
            return
        value = _parse(self.text)
        is_list = isinstance(value, list) and bool(value)
        if self.kind == "json_schema" and not isinstance(value, dict):
            raise RequestError(f"a JSON schema must be an object, not {short(self.text)}")
        if self.kind == "tool_calls" and not (is_list and all(map(_is_tool, value))):
            raise RequestError(
                f"tool calls need a list of [name, JSON schema], not {short(self.text)}"
            )
        if self.kind == "choice" and not (is_list and all(map(_is_text, value))):
            raise RequestError(
                f"choices must be a list of strings, none of them empty, not {short(self.text)}"
            )

    @classmethod
    def of(cls, kind: str, value: dict[str, Any] | list[Any] | str = "") -> Grammar:
        """Return a grammar of Python values, or of its text. Raises RequestError."""
        try:
            return cls(kind, value if isinstance(value, str) else json.dumps(value))
        except (TypeError, ValueError, RecursionError):
            raise RequestError(
                f"this {kind} grammar cannot be written as JSON: give plain values"
            ) from None

    def source(self) -> str:
        """Return the grammar in llguidance's language. Raises RequestError."""
        from llguidance import LLMatcher

        if self.kind == "regex":
            return LLMatcher.grammar_from_regex(self.text)
        if self.kind == "choice":
            choices = " | ".join(map(json.dumps, json.loads(self.text)))
            return LLMatcher.grammar_from_lark(f"start: {choices}")
        if self.kind == "lark":
            return LLMatcher.grammar_from_lark(self.text)
        if self.kind == "tool_calls":
            return _calls(json.loads(self.text))
        return _schema(json.loads(self.text or '{"type": "object"}'))


def _schema(schema: dict[str, Any]) -> str:
    """Return a JSON schema in llguidance's language."""
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(
        json.dumps(schema), defaults={"whitespace_flexible": False}
    )


def _calls(tools: list[tuple[str, dict[str, Any]]]) -> str:
    """Return the grammar of {"name":...,"arguments":...} with one of the names.

    The schema of each tool stays a document of its own, because its references start at its root.
    """
    rules, documents = [], []
    for i, (name, schema) in enumerate(tools):
        beginning = json.dumps(f'{{"name":{json.dumps(name)},"arguments":')
        rules.append(f'call{i}: {beginning} @arguments{i} "}}"')
        (document,) = json.loads(_schema(schema))["grammars"]
        documents.append(document | {"name": f"arguments{i}"})
    start = "start: " + " | ".join(f"call{i}" for i in range(len(tools)))
    return json.dumps({"grammars": [{"lark_grammar": "\n".join([start, *rules])}, *documents]})


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the grammar is not valid JSON: {short(str(error))}") from None


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _is_tool(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and _is_text(value[0])
        and isinstance(value[1], dict)
    )


def short(text: str) -> str:
    """Return a text on one line of at most 200 characters, for a message."""
    line = " ".join(text.split())
    return line if len(line) <= 200 else line[:200] + " ..."
