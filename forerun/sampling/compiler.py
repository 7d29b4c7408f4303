"""Compilation of grammars for a model's tokens, with the bounds that untrusted grammars need.

llguidance does the work, and some grammars keep it busy for ever. So each is compiled in a worker
process first, and in this process only once its cost is known: compiling is deterministic. The
worker's vocabulary is as small as can be; the cost does not depend on it.

Every request compiles its grammar for itself. What llguidance compiles is not constant: its lexer
collects states while texts are matched, copies share it, and it fails for all of them once it has
reached a limit. So only the cost of a grammar is kept from one request to the next, and no request
can change what another one gets.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, Protocol
from weakref import WeakSet

from forerun.errors import BusyError, RequestError
from forerun.hardware import heap, trim_heap
from forerun.sampling.grammar import Grammar, short
from forerun.sampling.matcher import Compiled, MaskThreads, Matcher, bits
from forerun.worker_process import WALL, RefusedError, WorkerProcess, WorkerProcessError, own_work

SECONDS = 0.8  # of CPU time; a grammar that takes longer to compile is refused
# Bytes, as in the worker: the compiler recurses along chains of rules, and an overflow would end
# the process.
STACK = 120 << 20
MEMORY = 64 << 20  # bytes that compiling may take
HELD = 16 << 20  # bytes that one compiled grammar may hold
ALL_HELD = 256 << 20  # bytes for all of them; the requests of one client may hold half of that
ALL_SECONDS = 2.0  # of compiling, for all completions of one request
FUEL = 200_000  # llguidance's measure of regex work in compiling; a repeat of 10,000 fits
# Bounds of one request's matching: about 20 MB of lexer states, and for each mask a part of the
# work that llguidance allows by default. A request that meets a bound continues with a new lexer;
# see `Matcher`.
STATES = 20_000
STEP_FUEL = 100_000
STEP_ITEMS = 12_000
ROW_ITEMS = 1000
THREADS = 64  # that compute masks, where clients are untrusted
PROBED = 3  # tokens tried after compiling: most grammars that exceed a limit do so at once
CACHED = 256  # grammars whose cost is kept
NICENESS = 10  # of the worker; threads get half of it, since their wall-clock time is bounded
END = "<|forerun:end of grammar|>"
SANDBOX = WorkerProcess(
    "forerun.sampling.compiler:measure", seconds=SECONDS, memory=MEMORY, niceness=NICENESS
)
_STACKS = threading.Lock()


class ExtendableTokenizer(Protocol):
    """The part of a tokenizer that grammars need."""

    def with_special_token(self, text: str) -> tuple[str, int]: ...


@dataclass(frozen=True, slots=True)
class CompileCost:
    """The cost of compiling a grammar: bytes that it holds, and seconds."""

    size: int
    seconds: float


class GrammarCompiler:
    """Compiles grammars for one model: its tokenizer, the width of its logits and its end-of-text
    tokens."""

    def __init__(
        self, tokenizer: ExtendableTokenizer | None, vocab: int, end_ids: Collection[int]
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab = vocab
        self.end_ids = end_ids
        self.threads: MaskThreads | None = None  # if the time of masks is bounded
        self._costs: OrderedDict[Grammar, CompileCost] = OrderedDict()
        self._living: WeakSet[Compiled] = WeakSet()
        self._lock = threading.Lock()

    def confine(self) -> None:
        """Prepare for untrusted grammars: bound the time that a request's masks take from other
        requests, and load what the first grammar would wait for (a large vocabulary holds the
        interpreter for a second)."""
        if self.tokenizer is None or self.threads is not None:
            return
        self.threads = MaskThreads(THREADS)
        SANDBOX.warm()
        with suppress(RequestError):  # the first grammar reports the error
            self._tokens  # noqa: B018

    def matcher(
        self, grammar: Grammar | None, end_ids: Collection[int], compiled: Compiled | None = None
    ) -> Matcher | None:
        """Return a matcher for one request that `end_ids` end.

        Nothing is compiled if `compiled` is the compiled `grammar`. Raises RequestError.
        """
        if grammar is None:
            return None
        own = compiled or self.compiled_each(grammar, 1)[0]
        return Matcher(own, self._tokens[1], self.vocab, self.end_ids, end_ids, self.threads)

    def compiled_each(self, grammar: Grammar, count: int, owner: str = "") -> list[Compiled]:
        """Compile a grammar for each of `count` completions of one request of a client (`owner`).

        Raises:
            RequestError: it cannot be used.
            BusyError: there is no room now.
        """
        tokenizer, last, _ = self._tokens
        cost = self._cost(grammar)
        if cost.seconds * count > ALL_SECONDS:
            raise RequestError(
                f"the {grammar.kind} grammar takes {cost.seconds:.2g} s to prepare, too long for"
                f" {count} completions: ask for fewer"
            )
        return [self._compile(grammar, tokenizer, last, cost.size, owner) for _ in range(count)]

    def _cost(self, grammar: Grammar) -> CompileCost:
        """Return the cost of a grammar, measured in the worker if it is not known."""
        with self._lock:
            if grammar in self._costs:
                self._costs.move_to_end(grammar)
                return self._costs[grammar]
        _, last, special = self._tokens
        vocab = max(self.vocab, last + 1)
        try:
            size, seconds = SANDBOX.call(grammar.kind, grammar.text, vocab, last, special)
        except WorkerProcessError as error:
            raise RequestError(f"the {grammar.kind} grammar cannot be compiled: {error}") from None
        except RefusedError as error:
            raise _unusable(grammar, short(str(error))) from None
        if size > HELD:
            raise RequestError(
                f"the {grammar.kind} grammar is too complex: it takes over {HELD >> 20} MiB to keep"
            )
        cost = CompileCost(size, seconds)
        with self._lock:
            self._costs[grammar] = cost
            if len(self._costs) > CACHED:
                self._costs.popitem(last=False)
        return cost

    def _compile(
        self, grammar: Grammar, tokenizer: Any, last: int, size: int, owner: str
    ) -> Compiled:
        """Compile a grammar for one request; its memory counts until that has ended."""
        self._check_room(size, owner)
        core = self._build(grammar, tokenizer, PROBED)
        if not bits(core) & ~(1 << last):
            raise RequestError(
                f"the {grammar.kind} grammar allows no text, or none this model has tokens for"
            )
        renew = partial(self._build, grammar, tokenizer, 0)
        compiled = Compiled(core, size, renew, grammar.kind, owner)
        with self._lock:
            self._living.add(compiled)
        return compiled

    def _build(self, grammar: Grammar, tokenizer: Any, probed: int) -> Any:
        core = run_aside(lambda: build(grammar, tokenizer, probed), 2 * WALL * SECONDS)
        if core is None:
            raise RequestError(
                f"the {grammar.kind} grammar is too complex: it takes over {SECONDS} seconds to"
                " compile"
            )
        if isinstance(core, BaseException):
            raise _unusable(grammar, _reason(core))
        return core

    def _check_room(self, size: int, owner: str) -> None:
        """Raise BusyError if the grammars of running and waiting requests leave no room."""
        with self._lock:
            living = list(self._living)
        held = sum(compiled.size for compiled in living)
        own = sum(compiled.size for compiled in living if compiled.owner == owner)
        if held + size > ALL_HELD or (owner and own + size > ALL_HELD // 2):
            raise BusyError(
                "the grammars of running requests take all the memory there is: try again in a"
                " moment"
            )

    @cached_property
    def _tokens(self) -> tuple[Any, int, tuple[tuple[int, str], ...]]:
        """llguidance's tokenizer, its token for a possible end of the text, and the special tokens.

        The model does not have that token: requests decide which tokens end them.
        """
        if self.tokenizer is None:
            raise RequestError(
                "grammars need a tokenizer, and this model has none: leave grammar out"
            )
        try:
            from llguidance import LLTokenizer
        except ImportError:
            raise RequestError(
                "grammars need llguidance: pip install 'forerun[structured]'"
            ) from None
        text, last = self.tokenizer.with_special_token(END)
        added = tuple((token["id"], token["content"]) for token in json.loads(text)["added_tokens"])
        try:
            return LLTokenizer(text, n_vocab=max(self.vocab, last + 1), eos_token=last), last, added
        except ValueError as error:
            why = short(str(error))
            raise RequestError(
                f"this model's tokenizer cannot be used with grammars: {why}"
            ) from None


def build(grammar: Grammar, tokenizer: Any, probed: int = PROBED) -> Any:
    """Return a compiled grammar, after `probed` tokens were tried with it, or the exception
    raised while compiling it."""
    from llguidance import LLMatcher, LLParserLimits

    try:
        limits = LLParserLimits(
            initial_lexer_fuel=FUEL,
            step_lexer_fuel=STEP_FUEL,
            step_max_items=STEP_ITEMS,
            max_items_in_row=ROW_ITEMS,
            max_lexer_states=STATES,
        )
        core = LLMatcher(tokenizer, grammar.source(), log_level=0, limits=limits)
        core.compute_bitmask()  # what is built on first use belongs to compiling
        probe = core.deep_copy()  # it shares the lexer: an error of either ends both
        for _ in range(probed):
            row = bits(probe)
            lowest = [(row & -row).bit_length() - 1] if row and not probe.is_stopped() else []
            probe.consume_tokens(lowest)
        return RequestError(probe.get_error()) if probe.is_error() else core
    except BaseException as error:  # a panic of the Rust side is no Exception
        return error


def run_aside(work: Callable[[], Any], seconds: float) -> Any:
    """Return the result of `work`, done in a thread with a large stack; None after `seconds`."""
    found: list[Any] = []

    def run() -> None:
        with suppress(OSError, AttributeError):
            os.nice(NICENESS // 2)  # of this thread alone, on Linux: running requests go first
        found.append(work())

    worker = threading.Thread(target=run, name="forerun-grammar", daemon=True)
    with _STACKS:  # the stack size is the process's, and the server compiles in several threads
        usual = threading.stack_size(STACK)
        worker.start()
        threading.stack_size(usual)
    worker.join(seconds)
    return found[0] if found else None


def measure(
    kind: str, text: str, vocab: int, last: int, special: tuple[tuple[int, str], ...]
) -> tuple[int, float]:
    """Compile a grammar for a vocabulary of bytes and special tokens, in the worker process.

    Returns:
        the bytes that it holds and the seconds that it took.
    """
    with own_work():
        tokenizer = _byte_tokenizer(vocab, last, special)
        trim_heap()
    before = heap()
    start = time.thread_time()
    core = build(Grammar(kind, text), tokenizer)
    if isinstance(core, BaseException):
        raise RequestError(_reason(core))
    seconds = time.thread_time() - start
    trim_heap()
    return max(0, heap() - before), seconds


@lru_cache(4)
def _byte_tokenizer(vocab: int, last: int, special: tuple[tuple[int, str], ...]) -> Any:
    from llguidance import LLTokenizer

    tokenizer: Any = _Bytes(vocab, last, special)
    return LLTokenizer(tokenizer, n_vocab=vocab + 256, eos_token=last, slices=[])


class _Bytes:
    """A tokenizer for llguidance: special tokens, and the 256 bytes behind the vocabulary."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocab: int, last: int, special: Sequence[tuple[int, str]]) -> None:
        self.vocab = vocab
        self.eos_token_id = last
        self.special_token_ids = [token for token, _ in special if token < vocab]
        self.tokens = [b""] * vocab + [bytes([byte]) for byte in range(256)]
        for token, text in special:
            if token < vocab:
                self.tokens[token] = text.encode()

    def __call__(self, text: bytes | str) -> list[int]:
        encoded = text.encode() if isinstance(text, str) else text
        return [self.vocab + byte for byte in encoded]


def _unusable(grammar: Grammar, why: str) -> RequestError:
    return RequestError(f"the {grammar.kind} grammar cannot be used: {why}")


def _reason(error: BaseException) -> str:
    """Return llguidance's message without the state that it adds."""
    return short(str(error).partition("<state>")[0])
