"""Grammars compiled for the tokens of one model, with the bounds that strangers' grammars need.

llguidance does the work, and some grammars keep it busy for ever. So each is compiled in a sandbox
first, and here only
once that has shown what it takes: compiling does the same every time. There are as few tokens in
the sandbox as can be; what compiling costs does not depend on them, and the limits do not count
them.

Every request compiles its grammar for itself. What llguidance compiles is not constant: its lexer
collects states while texts are matched, copies share it, and it fails for all of them once it has
reached a limit. So what is kept from one request to the next is only what a grammar takes, and no
request can change what another one gets."""

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
from forerun.hardware import give_back, heap
from forerun.sampling.grammar import Grammar, short
from forerun.sampling.matcher import Compiled, MaskThreads, Matcher, bits
from forerun.worker_process import WALL, RefusedError, WorkerProcess, WorkerProcessError, own_work

SECONDS = 0.8  # of computing; a grammar that takes longer to compile is refused
STACK = (
    120 << 20
    # as in the sandbox: the compiler recurses along chains of rules, and overflowing ends the process
)
MEMORY = 64 << 20  # bytes that compiling may take
HELD = 16 << 20  # bytes that one compiled grammar may hold,
ALL_HELD = 256 << 20  # and all of them together; the requests of one client half of that
ALL_SECONDS = 2.0  # of compiling, for all completions of one request
FUEL = 200_000  # llguidance's measure of regex work when it compiles; a repeat of 10,000 fits
# What one request may use while it is matched: about 20 MB of lexer states, and for each mask a
# part of the work that llguidance allows by default. A request that reaches a limit goes on with a
# new lexer; see `Matcher`.
STATES, STEP_FUEL, STEP_ITEMS, ROW_ITEMS = 20_000, 100_000, 12_000, 1000
THREADS = 64  # in which masks are computed at once, where clients are strangers
# tokens tried when a grammar is compiled: most that go over a limit of llguidance do so at once
PROBED = 3
CACHED = 256  # grammars of which it is known what they take
NICENESS = (
    10  # of processes that compile; of threads half of it, since they have less time by the clock
)
END = "<|forerun:end of grammar|>"
SANDBOX = WorkerProcess(
    "forerun.sampling.compiler:tried", seconds=SECONDS, memory=MEMORY, niceness=NICENESS
)
_STACKS = threading.Lock()


class Spelling(Protocol):
    """The part of a tokenizer that grammars need."""

    def with_special_token(self, text: str) -> tuple[str, int]: ...


@dataclass(frozen=True, slots=True)
class Cost:
    """What compiling a grammar takes: bytes that it holds, and seconds."""

    size: int
    seconds: float


class GrammarCompiler:
    """Grammars to matchers, for one model: its tokenizer, the width of its logits, its end-of-text
    tokens."""

    def __init__(self, tokenizer: Spelling | None, vocab: int, end_ids: Collection[int]) -> None:
        self.tokenizer, self.vocab, self.end_ids = tokenizer, vocab, end_ids
        self.threads: MaskThreads | None = None  # where the time of masks is bounded
        self._costs: OrderedDict[Grammar, Cost] = OrderedDict()
        self._living: WeakSet[Compiled] = WeakSet()
        self._lock = threading.Lock()

    def confine(self) -> None:
        """From now on grammars are strangers': prepare what the first one would wait for, and bound
        the time that a request's masks take from other requests. Reading a large vocabulary holds
        the interpreter for a second."""
        if self.tokenizer is None or self.threads is not None:
            return
        self.threads = MaskThreads(THREADS)
        SANDBOX.warm()
        with suppress(RequestError):  # the first grammar says what is wrong
            self._tokens  # noqa: B018

    def matcher(
        self, grammar: Grammar | None, end_ids: Collection[int], compiled: Compiled | None = None
    ) -> Matcher | None:
        """A matcher for one request that `end_ids` end; nothing is compiled where `compiled` is
        what `grammar` became.

        Raises RequestError where the grammar cannot be used.
        """
        if grammar is None:
            return None
        own = compiled or self.compiled(grammar)
        return Matcher(own, self._tokens[1], self.vocab, self.end_ids, end_ids, self.threads)

    def compiled(self, grammar: Grammar, owner: str = "") -> Compiled:
        """A grammar compiled for one request of a client (`owner`). Raises RequestError where it
        cannot be used, BusyError where there is no room now."""
        return self.compiled_each(grammar, 1, owner)[0]

    def compiled_each(self, grammar: Grammar, count: int, owner: str = "") -> list[Compiled]:
        """The same for each of `count` completions of one request."""
        tokenizer, last, _ = self._tokens
        cost = self._cost(grammar)
        if cost.seconds * count > ALL_SECONDS:
            raise RequestError(
                f"the {grammar.kind} grammar takes {cost.seconds:.2g} s to prepare, too long for {count} completions:"
                " ask for fewer"
            )
        return [self._private(grammar, tokenizer, last, cost.size, owner) for _ in range(count)]

    def _cost(self, grammar: Grammar) -> Cost:
        """What a grammar takes, found out in the sandbox where that is not known."""
        with self._lock:
            if grammar in self._costs:
                self._costs.move_to_end(grammar)
                return self._costs[grammar]
        _, last, added = self._tokens
        try:
            size, seconds = SANDBOX.call(
                grammar.kind, grammar.text, max(self.vocab, last + 1), last, added
            )
        except WorkerProcessError as error:
            raise RequestError(f"the {grammar.kind} grammar cannot be compiled: {error}") from None
        except RefusedError as error:
            raise RequestError(
                f"the {grammar.kind} grammar cannot be used: {short(str(error))}"
            ) from None
        if size > HELD:
            raise RequestError(
                f"the {grammar.kind} grammar is too complex: it takes over {HELD >> 20} MiB to keep"
            )
        cost = Cost(size, seconds)
        with self._lock:
            self._costs[grammar] = cost
            if len(self._costs) > CACHED:
                self._costs.popitem(last=False)
        return cost

    def _private(
        self, grammar: Grammar, tokenizer: Any, last: int, size: int, owner: str
    ) -> Compiled:
        """A grammar compiled for one request alone, counted until that has ended."""
        self._check_room(size, owner)
        core = self._built(grammar, tokenizer, PROBED)
        if not bits(core) & ~(1 << last):
            raise RequestError(
                f"the {grammar.kind} grammar allows no text, or none this model has tokens for"
            )
        compiled = Compiled(
            core, size, partial(self._built, grammar, tokenizer, 0), grammar.kind, owner
        )
        with self._lock:
            self._living.add(compiled)
        return compiled

    def _built(self, grammar: Grammar, tokenizer: Any, probed: int) -> Any:
        core = aside(lambda: build(grammar, tokenizer, probed), 2 * WALL * SECONDS)
        if core is None:
            raise RequestError(
                f"the {grammar.kind} grammar is too complex: it takes over {SECONDS} seconds to compile"
            )
        if isinstance(core, BaseException):
            raise RequestError(f"the {grammar.kind} grammar cannot be used: {_reason(core)}")
        return core

    def _check_room(self, size: int, owner: str) -> None:
        """Raise BusyError if grammars of running and waiting requests leave no room for another
        one."""
        with self._lock:
            living = list(self._living)
        held, own = sum(c.size for c in living), sum(c.size for c in living if c.owner == owner)
        if held + size > ALL_HELD or (owner and own + size > ALL_HELD // 2):
            raise BusyError(
                "the grammars of running requests take all the memory there is: try again in a moment"
            )

    @cached_property
    def _tokens(self) -> tuple[Any, int, tuple[tuple[int, str], ...]]:
        """llguidance's view of the tokenizer, the token by which it says that the text may end, and
        special tokens.

        That token is one the model does not have: which tokens end a request is the request's
            affair.
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
            raise RequestError(
                f"this model's tokenizer cannot be used with grammars: {short(str(error))}"
            ) from None


def build(grammar: Grammar, tokenizer: Any, probed: int = PROBED) -> Any:
    """A compiled grammar, after `probed` tokens were tried with it, or the error that says why
    there is none."""
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
        probe = core.deep_copy()  # which shares the lexer: an error of either ends both
        for _ in range(probed):
            row = bits(probe)
            probe.consume_tokens(
                [(row & -row).bit_length() - 1] if row and not probe.is_stopped() else []
            )
        return RequestError(probe.get_error()) if probe.is_error() else core
    except BaseException as error:  # a panic of the Rust side is no Exception
        return error


def aside(work: Callable[[], Any], seconds: float) -> Any:
    """What `work` gives, done in a thread with a large stack; None where that takes over so many
    seconds."""
    found: list[Any] = []

    def run() -> None:
        with suppress(OSError, AttributeError):
            os.nice(NICENESS // 2)  # of this thread alone, on Linux: running requests go first
        found.append(work())

    worker = threading.Thread(target=run, name="forerun-grammar", daemon=True)
    with _STACKS:  # the size is the process's, and the server compiles in several threads
        usual = threading.stack_size(STACK)
        worker.start()
        threading.stack_size(usual)
    worker.join(seconds)
    return found[0] if found else None


def tried(
    kind: str, text: str, vocab: int, last: int, special: tuple[tuple[int, str], ...]
) -> tuple[int, float]:
    """Compile a grammar for a vocabulary of bytes and special tokens: the bytes that it holds, and
    the seconds that it took. Runs in the sandbox."""
    with own_work():
        tokenizer = _spelled(vocab, last, special)
        give_back()
    before, start = heap(), time.thread_time()
    core = build(Grammar(kind, text), tokenizer)
    if isinstance(core, BaseException):
        raise RequestError(_reason(core))
    seconds = time.thread_time() - start
    give_back()
    return max(0, heap() - before), seconds


@lru_cache(4)
def _spelled(vocab: int, last: int, special: tuple[tuple[int, str], ...]) -> Any:
    from llguidance import LLTokenizer

    tokenizer: Any = _Bytes(vocab, last, special)
    return LLTokenizer(tokenizer, n_vocab=vocab + 256, eos_token=last, slices=[])


class _Bytes:
    """A tokenizer as llguidance takes them: special tokens where they are, and the 256 bytes behind
    all others."""

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
