"""Grammars compiled for the tokens of one model, with the bounds that strangers' grammars need.

llguidance does the work, and some grammars keep it busy for ever. So each is compiled in a sandbox first, and here only
once that has shown what it takes: compiling does the same every time. There are as few tokens in the sandbox as can be;
what compiling costs does not depend on them.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from typing import Any, Protocol
from weakref import WeakSet

from forerun.errors import BusyError, RequestError
from forerun.machine import give_back, heap
from forerun.sampling.grammar import Grammar, short
from forerun.sampling.matcher import Compiled, Matcher, bits
from forerun.sandbox import WALL, RefusedError, Sandbox, SandboxError

SECONDS = 0.8  # of computing; a grammar that takes longer to compile is refused
STACK = 120 << 20  # as in the sandbox: the compiler recurses along chains of rules, and overflowing ends the process
MEMORY = 64 << 20  # bytes that compiling may take
HELD = 16 << 20  # bytes that one compiled grammar may hold,
ALL_HELD = 256 << 20  # and all of them together
FUEL = 200_000  # llguidance's measure of regex work when it compiles; a repeat of 10,000 fits
PROBED = 3  # tokens tried when a grammar is compiled: most that go over a limit of llguidance do so at once
CACHED = 32  # compiled grammars kept
END = "<|forerun:end of grammar|>"
SANDBOX = Sandbox("forerun.sampling.compiler:tried", seconds=SECONDS, memory=MEMORY, niceness=10)
_STACKS = threading.Lock()


class Spelling(Protocol):
    """The part of a tokenizer that grammars need."""

    def extended(self, special: str) -> tuple[str, int]: ...


class GrammarCompiler:
    """Grammars to matchers, for one model: its tokenizer, the width of its logits, its end-of-text tokens."""

    def __init__(self, tokenizer: Spelling | None, vocab: int, end_ids: Collection[int]) -> None:
        self.tokenizer, self.vocab, self.end_ids = tokenizer, vocab, end_ids
        self._kept: OrderedDict[Grammar, Compiled] = OrderedDict()
        self._living: WeakSet[Compiled] = WeakSet()
        self._lock = threading.Lock()
        self._prepared = False

    def matcher(
        self, grammar: Grammar | None, end_ids: Collection[int], compiled: Compiled | None = None
    ) -> Matcher | None:
        """A matcher for one request that `end_ids` end; nothing is compiled where `compiled` is what `grammar` became.

        Raises RequestError where the grammar cannot be used.
        """
        if grammar is None:
            return None
        return Matcher(compiled or self.compiled(grammar), self._tokens[1], self.vocab, self.end_ids, end_ids)

    def kept(self, grammar: Grammar) -> Compiled | None:
        """A grammar that has been compiled lately."""
        with self._lock:
            if grammar in self._kept:
                self._kept.move_to_end(grammar)
            return self._kept.get(grammar)

    def compiled(self, grammar: Grammar) -> Compiled:
        """A grammar, compiled. Raises RequestError where it cannot be used, BusyError where there is no room now."""
        found = self.kept(grammar)
        if found is None:
            found = self._compile(grammar)
            with self._lock:
                self._kept[grammar] = found
                self._living.add(found)
                if len(self._kept) > CACHED:
                    self._kept.popitem(last=False)
        return found

    def warm(self) -> None:
        """Start what the first grammar would wait for."""
        if self.tokenizer is not None:
            SANDBOX.warm()

    def prepare(self) -> None:
        """Read the tokenizer as grammars need it, which holds the interpreter for some hundred milliseconds; the first
        call alone does something."""
        if not self._prepared:
            self._prepared = True
            with suppress(RequestError):  # the first grammar will say it
                self._tokens  # noqa: B018

    @cached_property
    def _tokens(self) -> tuple[Any, int, tuple[tuple[int, str], ...]]:
        """llguidance's view of the tokenizer, the token by which it says that the text may end, and special tokens.

        That token is one the model does not have: which tokens end a request is the request's affair.
        """
        if self.tokenizer is None:
            raise RequestError("grammars need a tokenizer, and this model has none: leave grammar out")
        try:
            from llguidance import LLTokenizer
        except ImportError:
            raise RequestError("grammars need llguidance: pip install 'forerun[structured]'") from None
        text, last = self.tokenizer.extended(END)
        added = tuple((token["id"], token["content"]) for token in json.loads(text)["added_tokens"])
        try:
            return LLTokenizer(text, n_vocab=max(self.vocab, last + 1), eos_token=last), last, added
        except ValueError as error:
            raise RequestError(f"this model's tokenizer cannot be used with grammars: {short(str(error))}") from None

    def _compile(self, grammar: Grammar) -> Compiled:
        tokenizer, last, added = self._tokens
        try:
            size = SANDBOX.call(grammar.kind, grammar.text, max(self.vocab, last + 1), last, added)
        except SandboxError as error:
            raise RequestError(f"the {grammar.kind} grammar cannot be compiled: {error}") from None
        except RefusedError as error:
            raise RequestError(f"the {grammar.kind} grammar cannot be used: {short(str(error))}") from None
        self._make_room(grammar, size)
        core = aside(lambda: build(grammar, tokenizer), WALL * SECONDS)
        if core is None:
            raise RequestError(f"the {grammar.kind} grammar is too complex: it takes over {SECONDS} seconds to compile")
        if isinstance(core, BaseException):
            raise RequestError(f"the {grammar.kind} grammar cannot be used: {_reason(core)}")
        if not bits(core) & ~(1 << last):
            raise RequestError(f"the {grammar.kind} grammar allows no text, or none this model has tokens for")
        return Compiled(core, size)

    def _make_room(self, grammar: Grammar, size: int) -> None:
        """Forget grammars that nobody uses until one of `size` has room. Raises RequestError where it never has."""
        if size > HELD:
            raise RequestError(f"the {grammar.kind} grammar is too complex: it takes over {HELD >> 20} MiB to keep")
        with self._lock:
            while self._kept and self._held() + size > ALL_HELD:
                self._kept.popitem(last=False)
            if self._held() + size > ALL_HELD:
                raise BusyError("the grammars of running requests take all the memory there is: try again in a moment")

    def _held(self) -> int:
        return sum(compiled.size for compiled in self._living)


def build(grammar: Grammar, tokenizer: Any) -> Any:
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


def aside(work: Callable[[], Any], seconds: float) -> Any:
    """What `work` gives, done in a thread with a large stack; None where that takes over so many seconds."""
    found: list[Any] = []
    worker = threading.Thread(target=lambda: found.append(work()), name="forerun-grammar", daemon=True)
    with _STACKS:  # the size is the process's, and the server compiles in several threads
        usual = threading.stack_size(STACK)
        worker.start()
        threading.stack_size(usual)
    worker.join(seconds)
    return found[0] if found else None


def tried(kind: str, text: str, vocab: int, last: int, special: tuple[tuple[int, str], ...]) -> int:
    """Compile a grammar for a vocabulary of bytes and special tokens; the bytes that it holds. Runs in the sandbox."""
    tokenizer = _spelled(vocab, last, special)
    give_back()
    before = heap()
    core = build(Grammar(kind, text), tokenizer)
    if isinstance(core, BaseException):
        raise RequestError(_reason(core))
    give_back()
    return max(0, heap() - before)


@lru_cache(4)
def _spelled(vocab: int, last: int, special: tuple[tuple[int, str], ...]) -> Any:
    from llguidance import LLTokenizer

    tokenizer: Any = _Bytes(vocab, last, special)
    return LLTokenizer(tokenizer, n_vocab=vocab + 256, eos_token=last)


class _Bytes:
    """A tokenizer as llguidance takes them: special tokens where they are, and the 256 bytes behind all others."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocab: int, last: int, special: Sequence[tuple[int, str]]) -> None:
        self.vocab, self.eos_token_id = vocab, last
        self.special_token_ids = [token for token, _ in special if token < vocab]
        self.tokens = [b""] * vocab + [bytes([byte]) for byte in range(256)]
        for token, text in special:
            if token < vocab:
                self.tokens[token] = text.encode()

    def __call__(self, text: bytes | str) -> list[int]:
        return [self.vocab + byte for byte in (text.encode() if isinstance(text, str) else text)]


def _reason(error: BaseException) -> str:
    """What llguidance says, without the state that it adds."""
    return short(str(error).partition("<state>")[0])
