"""Structured output: a grammar as a value, and compiled for the tokens of one model.

llguidance does the parsing. A grammar may come from a stranger: what cannot be compiled, or not in time, is one line.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property, lru_cache
from typing import Any, Protocol

from forerun.errors import RequestError, nearest
from forerun.sampling.matcher import Matcher, bits

KINDS = ("json_schema", "json_object", "regex", "lark", "choice")
LONGEST = 1 << 16  # characters of a grammar
SECONDS = 0.8  # a grammar that takes longer to compile is refused
STACK = 128 << 20  # the compiler recurses along chains of rules: 8 MiB are not enough, and overflowing ends the process
FUEL = 200_000  # llguidance's measure of regex work when it compiles; a repeat of 10,000 fits
MULTIPLES = 20_000  # multipleOf is compiled into an automaton with about as many states
PROBED = 3  # tokens tried when a grammar is compiled: most that go over a limit of llguidance do so at once
CACHED = 32  # compiled grammars kept
END = "<|forerun:end of grammar|>"
_STACKS = threading.Lock()


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an output must look like, from its first token to its last.

    JSON comes without optional white space, so that small models do not lose themselves in it; a schema with
    {"x-guidance": {"whitespace_flexible": true}} allows it again.

    Args:
        kind: json_schema, json_object (any JSON object), regex (Rust syntax, the whole output), lark (llguidance's
            dialect, its rule `start`), or choice.
        text: the schema as JSON, the regex, the Lark grammar, or a JSON list of strings; "" for json_object.
    """

    kind: str
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise RequestError(f"there is no grammar kind {self.kind!r}: {nearest(str(self.kind), KINDS)}")
        if not isinstance(self.text, str) or bool(self.text) == (self.kind == "json_object"):
            wanted = "no text" if self.kind == "json_object" else "a text that is not empty"
            raise RequestError(f"a {self.kind} grammar needs {wanted}, not {_short(repr(self.text))}")
        if len(self.text) > LONGEST:
            raise RequestError(f"the grammar has {len(self.text)} characters: give at most {LONGEST}")
        try:
            self.text.encode()
        except UnicodeEncodeError:  # lone surrogates, as bytes that are no UTF-8 come in on the command line
            raise RequestError("the grammar is not valid Unicode text: give UTF-8") from None
        value = _parse(self.text) if self.kind in ("json_schema", "choice") else None
        if self.kind == "json_schema" and not isinstance(value, dict):
            raise RequestError(f"a JSON schema must be an object, not {_short(self.text)}")
        if self.kind == "choice" and not (isinstance(value, list) and value and all(_is_text(c) for c in value)):
            raise RequestError(f"choices must be a list of strings, none of them empty, not {_short(self.text)}")

    @classmethod
    def of(cls, kind: str, value: dict[str, Any] | list[Any] | str = "") -> Grammar:
        """A grammar from a schema or choices as Python values, or from its text."""
        try:
            return cls(kind, value if isinstance(value, str) else json.dumps(value))
        except (TypeError, ValueError, RecursionError):
            raise RequestError(f"this {kind} grammar cannot be written as JSON: give plain values") from None

    def source(self) -> str:
        """The grammar in the language of llguidance. Raises RequestError."""
        from llguidance import LLMatcher

        if self.kind == "regex":
            return LLMatcher.grammar_from_regex(self.text)
        if self.kind == "choice":
            return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, json.loads(self.text))))
        text = self.text if self.kind == "lark" else json.dumps(json.loads(self.text or '{"type": "object"}'))
        if _common_multiple(text) > MULTIPLES:
            raise RequestError(f"its multipleOf are too complex: their least common multiple is over {MULTIPLES}")
        if self.kind == "lark":
            return LLMatcher.grammar_from_lark(text)
        return LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_flexible": False})


class Spelling(Protocol):
    """The part of a tokenizer that grammars need."""

    def extended(self, special: str) -> tuple[str, int]: ...


class GrammarCompiler:
    """Grammars to matchers, for one model: its tokenizer, the width of its logits, its end-of-text tokens."""

    def __init__(self, tokenizer: Spelling | None, vocab: int, end_ids: Collection[int]) -> None:
        self.tokenizer, self.vocab, self.end_ids = tokenizer, vocab, end_ids
        self._compiled: Callable[[Grammar], Any] = lru_cache(CACHED)(self._compile)

    def matcher(self, grammar: Grammar | None, end_ids: Collection[int]) -> Matcher | None:
        """A matcher for one request that `end_ids` end. Raises RequestError where the grammar cannot be used."""
        if grammar is None:
            return None
        return Matcher(self._compiled(grammar), self._tokens[1], self.vocab, self.end_ids, end_ids)

    @cached_property
    def _tokens(self) -> tuple[Any, int]:
        """llguidance's view of the tokenizer, and the token by which it says that the text may end.

        That token is one the model does not have: which tokens end a request is the request's affair.
        """
        if self.tokenizer is None:
            raise RequestError("grammars need a tokenizer, and this model has none: leave grammar out")
        try:
            from llguidance import LLTokenizer
        except ImportError:
            raise RequestError("grammars need llguidance: pip install 'forerun[structured]'") from None
        text, last = self.tokenizer.extended(END)
        try:
            return LLTokenizer(text, n_vocab=max(self.vocab, last + 1), eos_token=last), last
        except ValueError as error:
            raise RequestError(f"this model's tokenizer cannot be used with grammars: {_short(str(error))}") from None

    def _compile(self, grammar: Grammar) -> Any:
        """llguidance's matcher before its first token; work that must end is done aside, under a deadline."""
        from_tokens, last = self._tokens
        found: list[Any] = []
        worker = threading.Thread(target=lambda: found.append(_build(grammar, from_tokens)), daemon=True)
        with _STACKS:  # the size is the process's, and the server compiles in several threads
            usual = threading.stack_size(STACK)
            worker.start()
            threading.stack_size(usual)
        worker.join(SECONDS)
        if not found:
            raise RequestError(f"the {grammar.kind} grammar is too complex: it takes over {SECONDS} seconds to compile")
        (core,) = found
        if isinstance(core, BaseException):
            why, _, _ = str(core).partition("<state>")
            raise RequestError(f"the {grammar.kind} grammar cannot be used: {_short(why)}")
        if not bits(core) & ~(1 << last):
            raise RequestError(f"the {grammar.kind} grammar allows no text, or none this model has tokens for")
        return core


def _build(grammar: Grammar, tokenizer: Any) -> Any:
    """A compiled grammar, or the error that says why there is none."""
    from llguidance import LLMatcher, LLParserLimits

    try:
        limits = LLParserLimits(initial_lexer_fuel=FUEL)
        core = LLMatcher(tokenizer, grammar.source(), log_level=0, limits=limits)
        core.compute_bitmask()  # what is built on first use belongs to compiling
        probe = core.deep_copy()
        for _ in range(PROBED):
            row = bits(probe)
            probe.consume_tokens([(row & -row).bit_length() - 1] if row and not probe.is_stopped() else [])
        return RequestError(probe.get_error()) if probe.is_error() else core
    except BaseException as error:  # a panic of the Rust side is no Exception
        return error


def _common_multiple(text: str) -> int:
    """The least common multiple of the digits of all multipleOf in a text: what their automata grow with."""
    multiple = 1
    for number in re.findall(r'"multipleOf"\s*:\s*-?([\d.eE+-]+)', text):
        try:
            digits = Decimal(number).normalize().as_tuple().digits
        except ArithmeticError:
            continue
        multiple = math.lcm(multiple, int("".join(map(str, digits))) or 1)
    return multiple


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the grammar is not valid JSON: {_short(str(error))}") from None


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _short(text: str) -> str:
    """One line of a message, not too long."""
    line = " ".join(text.split())
    return line if len(line) <= 200 else line[:200] + " ..."
