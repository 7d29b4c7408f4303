"""Grammars: allowed, forced and pruned tokens at every node of a tree, and refusals in time.

The reference is llguidance itself: a fresh matcher for each prefix consumes its tokens one by one,
with the tokenizer's own end-of-text token. `Matcher` must find the same while it moves back and
forth in one matcher."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from forerun.errors import BusyError, RequestError
from forerun.models.tokenizer import Tokenizer
from forerun.sampling import compiler as compiler_module
from forerun.sampling import matcher as matcher_module
from forerun.sampling.compiler import GrammarCompiler, _Bytes
from forerun.sampling.grammar import LONGEST, Grammar
from forerun.sampling.matcher import Matcher, NotReadyError
from forerun.sampling.params import SamplingParams
from forerun.types import Draft, Proposal
from tests import tiny
from tests.models.test_tokenizer import PLAIN, byte_fallback, write

END, VOCAB = 2, tiny.PADDED_VOCAB
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["alpha", "beta", "alphabet"]},
        "sizes": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 99},
            "maxItems": 4,
        },
        "next": {"type": "string", "maxLength": 6},
        "deep": {
            "type": "object",
            "properties": {"colour": {"type": "boolean"}},
            "additionalProperties": False,
        },
    },
    "required": ["name", "sizes", "next"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": Grammar.of("json_schema", SCHEMA),
    "spaced": Grammar.of("json_schema", SCHEMA | {"x-guidance": {"whitespace_flexible": True}}),
    "object": Grammar.of("json_object"),
    "regex": Grammar.of("regex", "(grey|green|colour: [0-9]{2,5})( null)*"),
    "lark": Grammar.of("lark", 'start: "(" start ")" | "<" start ">" start | /[a-f]{1,3}/'),
    "choice": Grammar.of("choice", ["yes", "no", "nought", 'a "quoted"\n\x7f', "grün 😀"]),
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(tiny.with_tokenizer())


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCAB, [END])


class Reference:
    """Finds what a grammar allows after some tokens, with a fresh matcher each time."""

    def __init__(self, grammar: Grammar, tokenizer: Tokenizer) -> None:
        text = (tokenizer.path / "tokenizer.json").read_text()
        self.tokens = llguidance.LLTokenizer(text, n_vocab=VOCAB, eos_token=END)
        self.source = grammar.source()

    def allowed(self, tokens: Sequence[int]) -> set[int]:
        """Return the allowed next tokens: none if `tokens` are not allowed, or end the text."""
        matcher = llguidance.LLMatcher(self.tokens, self.source, log_level=0)
        for token in tokens:
            if token == END or token not in bits(matcher.compute_bitmask()):
                return set()
            assert matcher.consume_token(token)
        return bits(matcher.compute_bitmask())


def bits(packed: bytes) -> set[int]:
    unpacked = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")
    return set(np.flatnonzero(unpacked).tolist())


def open_matcher(
    compiler: GrammarCompiler, grammar: Grammar, ends: Sequence[int] = (END,)
) -> Matcher:
    matcher = compiler.matcher(grammar, ends)
    assert matcher is not None
    return matcher


def random_tree(
    generator: random.Random, reference: Reference, text: list[int], nodes: int = 9
) -> Draft:
    """Make a tree of mostly allowed nodes, so that it has long paths."""
    draft = Draft.root(0)
    while len(draft) < nodes:
        parent = generator.choice([len(draft) - 1, generator.randrange(len(draft))])
        allowed = reference.allowed(text + path_to(draft, parent))
        token = generator.randrange(VOCAB)
        if allowed and generator.random() < 0.8:
            token = generator.choice(sorted(allowed))
        draft.add(token, parent, generator.choice(["one", "two"]))
    return draft


def path_to(draft: Draft, node: int) -> list[int]:
    return [draft.tokens[i] for i in draft.path_to(node)[1:]]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", GRAMMARS)
def test_masks_pruning_and_forced_tokens_on_trees(
    name: str, seed: int, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    """Each step asks about a tree in any order and commits a path of it or another token."""
    generator = random.Random(seed)
    reference = Reference(GRAMMARS[name], tokenizer)
    matcher = open_matcher(compiler, GRAMMARS[name])
    text: list[int] = []
    for _ in range(25):
        draft = random_tree(generator, reference, text)
        allowed = [reference.allowed(text + path_to(draft, node)) for node in range(len(draft))]
        valid = [
            node
            for node in range(len(draft))
            if all(draft.tokens[i] in allowed[draft.parents[i]] for i in draft.path_to(node)[1:])
        ]
        questions = ["masks", "prune", "forced", "state"]
        for question in generator.sample(questions, generator.randrange(5)):
            if question == "masks":
                check_masks(matcher, draft, allowed)
            elif question == "prune":
                check_pruned(matcher.prune(draft), draft, valid)
            elif question == "forced":
                check_forced(matcher.forced(6), reference, text)
            else:
                assert matcher.accepting == (END in allowed[0])
                assert matcher.stopped == (allowed[0] == {END})
        path = path_to(draft, generator.choice(valid))
        last = reference.allowed(text + path)
        for token in [*path, *([generator.choice(sorted(last))] if last else [])]:
            matcher.advance(token)
            text.append(token)
        if text and text[-1] == END:
            break
    assert not matcher.broken and len(text) > 1


def check_masks(matcher: Matcher, draft: Draft, allowed: list[set[int]]) -> None:
    for mask, expected in zip(matcher.masks(draft), allowed, strict=True):
        assert len(mask) == (VOCAB + 7) // 8
        assert bits(mask) == expected if expected else bits(mask)


def check_pruned(pruned: Draft, draft: Draft, valid: list[int]) -> None:
    """Check that exactly the valid nodes are left, in order, with their parents."""
    assert pruned.tokens == [draft.tokens[i] for i in valid]
    assert pruned.sources == [draft.sources[i] for i in valid]
    assert [path_to(pruned, i) for i in range(len(pruned))] == [path_to(draft, i) for i in valid]
    assert len(pruned.proposals) == len(pruned) and pruned.probs is None


def check_forced(forced: list[int], reference: Reference, text: list[int]) -> None:
    for i, token in enumerate(forced):
        assert reference.allowed(text + forced[:i]) == {token}
    left = reference.allowed(text + forced)
    assert len(forced) == 6 or len(left) != 1 or left == {END}


def test_sampled_drafts_are_not_pruned(compiler: GrammarCompiler) -> None:
    draft = Draft.root(0)
    draft.add(100, 0, "model", Proposal.SAMPLED)
    draft.probs = np.full((2, VOCAB), 1 / VOCAB)
    assert open_matcher(compiler, GRAMMARS["schema"]).prune(draft) is draft


def test_pruning_a_draft_prunes_its_probs(compiler: GrammarCompiler) -> None:
    matcher = open_matcher(compiler, Grammar.of("regex", "[ab]+"))
    a, x, b = (compiler.tokenizer.encode(c)[0] for c in "axb")  # type: ignore[union-attr]
    draft = Draft(
        [0, x, a, a, b], [-1, 0, 0, 1, 2], ["", "p", "q", "r", "s"], [Proposal.DETERMINISTIC] * 5
    )
    draft.probs = np.arange(5.0)[:, None]
    pruned = matcher.prune(draft)
    assert (pruned.tokens, pruned.parents) == ([0, a, b], [-1, 0, 1])
    assert pruned.sources == ["", "q", "s"]
    assert pruned.probs is not None and pruned.probs.ravel().tolist() == [0, 2, 4]


def test_every_end_token_of_the_request_ends_a_text(compiler: GrammarCompiler) -> None:
    grammar = Grammar.of("choice", ["a"])
    (a,) = open_matcher(compiler, grammar).forced(5)
    for ends, after in (((END, 9, 40), {END, 9, 40}), ((9,), {9})):
        matcher = open_matcher(compiler, grammar, ends)
        assert [bits(m) for m in matcher.masks(Draft.root(0))] == [{a}]
        matcher.advance(a)
        assert [bits(m) for m in matcher.masks(Draft.root(a))] == [after] and matcher.ending is None
        matcher.advance(9)
        assert not matcher.broken


def test_without_end_tokens_the_grammar_ends_the_request(compiler: GrammarCompiler) -> None:
    matcher = open_matcher(compiler, Grammar.of("choice", ["aa"]), ends=())
    for _ in range(5):
        if matcher.ending:
            break
        (token, *_) = matcher.forced(1)
        matcher.advance(token)
    assert matcher.ending == "stop" and matcher.stopped
    open_end = open_matcher(compiler, Grammar.of("regex", "a+"), ends=())
    open_end.advance(token)
    assert open_end.accepting and not open_end.stopped and open_end.ending is None


@pytest.mark.parametrize("ends", [(END,), ()])
def test_a_token_outside_of_the_grammar_aborts_the_request(
    ends: tuple[int, ...], compiler: GrammarCompiler
) -> None:
    """Such a token is drawn only if the grammar allows none."""
    for token in (100, *ends):
        matcher = open_matcher(compiler, GRAMMARS["schema"], ends)
        matcher.advance(token)
        assert matcher.broken and matcher.ending == "abort" and not matcher.accepting


def test_json_is_compact_by_default(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    space = tokenizer.encode(" ")[0]
    for name, allowed in (("schema", False), ("spaced", True)):
        matcher = open_matcher(compiler, GRAMMARS[name])
        matcher.advance(tokenizer.encode("{")[0])
        assert (space in bits(matcher.masks(Draft.root(0))[0])) == allowed


def test_tokenizers_with_byte_fallback(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write(tmp_path, byte_fallback(), **PLAIN))
    matcher = GrammarCompiler(tokenizer, 300, [2]).matcher(Grammar.of("choice", ["ab cé"]), [2])
    assert matcher is not None
    text = []
    while not matcher.stopped:
        text.append(min(bits(matcher.masks(Draft.root(0))[0])))
        matcher.advance(text[-1])
    assert tokenizer.decode(text) == "ab cé"


INVALID_VALUES = {
    "kind": (("jsonschema", "{}"), "did you mean 'json_schema'"),
    "empty": (("regex", ""), "not empty"),
    "text of json_object": (("json_object", "{}"), "no text"),
    "not JSON": (("json_schema", "{"), "not valid JSON"),
    "no schema": (("json_schema", "[1]"), "object"),
    "deep": (("json_schema", '{"a":' * 5000 + "1" + "}" * 5000), "JSON"),
    "no choices": (("choice", []), "list of strings"),
    "empty choice": (("choice", ["a", ""]), "list of strings"),
    "choices that are no strings": (("choice", [1]), "list of strings"),
    "too long": (("regex", "a" * (LONGEST + 1)), "at most"),
    "no Unicode": (("regex", "\udcff"), "Unicode"),
    "no JSON value": (("json_schema", {"a": object()}), "plain values"),
}


@pytest.mark.parametrize("given, message", INVALID_VALUES.values(), ids=INVALID_VALUES.keys())
def test_invalid_values_are_refused(given: tuple[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Grammar.of(*given)


def test_a_text_may_have_the_greatest_length() -> None:
    assert len(Grammar.of("regex", "a" * LONGEST).text) == LONGEST


def test_grammars_are_compared_by_value() -> None:
    assert Grammar.of("json_schema", SCHEMA) == Grammar("json_schema", json.dumps(SCHEMA))
    assert len({Grammar.of("regex", "a"), Grammar("regex", "a"), Grammar("lark", "a")}) == 2
    assert SamplingParams(grammar=GRAMMARS["regex"]).grammar == GRAMMARS["regex"]
    with pytest.raises(RequestError, match=r"Grammar\.of"):
        SamplingParams(grammar={"type": "object"})  # type: ignore[arg-type]


def chain(rule: str, count: int) -> str:
    rules = [rule.format(i, i + 1) for i in range(count)]
    return "\n".join(["start: a0", *rules, f'a{count}: "x"'])


UNUSABLE = {
    "regex": Grammar.of("regex", "[a"),
    "lark": Grammar.of("lark", "begin: x"),
    "schema": Grammar.of("json_schema", {"type": "strin"}),
    "remote": Grammar.of("json_schema", {"$ref": "http://127.0.0.1:9/schema"}),
    "surrogate": Grammar("choice", '["\\ud800"]'),
    "empty language": Grammar.of("lark", 'start: a\na: a "x"'),
    "only the empty text": Grammar.of("regex", "(?:)"),
    "many states": Grammar.of("json_schema", {"type": "integer", "multipleOf": 100_000_007}),
    "states in lark": Grammar.of("lark", 'start: %json {"type": "number", "multipleOf": 99991.7}'),
    "rules that double": Grammar.of("lark", chain("a{0}: a{1} a{1}", 30)),
    "states by another spelling": Grammar.of(
        "lark", 'start: %json {"type": "integer", "multiple\\u004ff": 100000007}'
    ),
    "repeats of repeats": Grammar.of("regex", "(a{1000}){1000}{1000}"),
    "deep": Grammar.of("regex", "(" * 20_000 + "a" + ")" * 20_000),
    "more than may be kept": Grammar.of("json_schema", {"type": "integer", "multipleOf": 150_001}),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_an_unusable_grammar_is_refused_in_one_line_within_a_second(
    name: str, compiler: GrammarCompiler
) -> None:
    start = time.process_time()
    with pytest.raises(RequestError) as caught:
        compiler.matcher(UNUSABLE[name], [END])
    assert time.process_time() - start < 1
    assert len(str(caught.value).splitlines()) == 1 and len(str(caught.value)) < 400


@pytest.mark.parametrize("rule", ["a{0}: a{1}", 'a{0}: "x" a{1}'])
def test_long_chains_of_rules_do_not_end_the_process(rule: str, compiler: GrammarCompiler) -> None:
    """llguidance compiles them by recursion; the usual stack would overflow."""
    count = (LONGEST - 200) // len(rule.format(1000, 1000) + "\n")
    assert open_matcher(compiler, Grammar.of("lark", chain(rule, count))).forced(3)


def test_a_grammar_that_takes_too_long_is_refused(
    monkeypatch: pytest.MonkeyPatch, compiler: GrammarCompiler
) -> None:
    """The worker process has accepted it before."""
    monkeypatch.setattr(compiler_module, "SECONDS", 0.01)
    monkeypatch.setattr(compiler_module, "build", lambda *_: time.sleep(0.3))
    with pytest.raises(RequestError, match="too complex"):
        compiler.matcher(Grammar.of("regex", "never compiled"), [END])


@pytest.mark.parametrize(
    "name", [name for name in UNUSABLE if "states" in name or "spelling" in name]
)
def test_a_grammar_beyond_the_limits_is_not_compiled_in_this_process(
    name: str, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An abandoned thread would take a core and 45 MB a second until the process ends."""
    monkeypatch.setattr(compiler_module, "build", lambda *_: pytest.fail("it is compiled here"))
    with pytest.raises(
        RequestError, match=r"cannot be compiled: it takes over 0\.8 seconds or 64 MiB"
    ):
        compiler.matcher(UNUSABLE[name], [END])
    wait_until(lambda: not compiler_module.SANDBOX._busy, "the worker process is idle")


def test_the_worker_process_knows_the_special_tokens_that_grammars_name(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    """Grammars name them by text or number; the process is given no others."""
    special = tokenizer.spell(END)
    for text in (f"start: {special} /[a-z]/", f"start: <[{END}]> /[a-z]/", "start: <[60-80]>"):
        with suppress(RequestError):  # the model's end token is kept for the end of the text
            compiler.matcher(Grammar.of("lark", text), [END])
        source = llguidance.LLMatcher.grammar_from_lark(text)
        mine = compiler_module._byte_tokenizer(
            VOCAB, VOCAB - 1, ((END, special), (VOCAB - 1, "<end>"))
        )
        assert not llguidance.LLMatcher(mine, source, log_level=0).is_error()
    with pytest.raises(RequestError, match="<unheard>"):
        compiler.matcher(Grammar.of("lark", "start: <unheard>"), [END])


def test_compiled_grammars_are_bounded_in_total_and_per_client(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    monkeypatch.setattr(compiler_module, "ALL_HELD", 4 << 20)
    monkeypatch.setattr(compiler_module, "SANDBOX", FakeWorker())
    mine = GrammarCompiler(tokenizer, VOCAB, [END])
    running = [
        mine.compiled_each(Grammar("regex", "a"), 1, owner)
        for owner in ("one", "one", "other", "other")
    ]
    with pytest.raises(BusyError, match="try again"):
        mine.compiled_each(Grammar("regex", "a"), 1, "third")
    del running[0]
    assert mine.compiled_each(Grammar("regex", "a"), 1, "third"), (
        "an ended request is still counted"
    )
    with pytest.raises(BusyError, match="try again"):
        mine.compiled_each(Grammar("regex", "a"), 1, "other")  # one client may have half of it


class FakeWorker:
    """A worker process that finds every grammar to take one MiB."""

    def call(self, *_: object) -> tuple[int, float]:
        return 1 << 20, 0.001


def wait_until(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, f"timed out waiting until {what}"
        time.sleep(0.005)


def test_a_missing_tokenizer_or_package_is_named(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match="tokenizer"):
        GrammarCompiler(None, VOCAB, [END]).matcher(GRAMMARS["regex"], [END])
    assert GrammarCompiler(None, VOCAB, [END]).matcher(None, [END]) is None
    words = Backend(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    with pytest.raises(RequestError, match="tokenizer cannot be used"):
        GrammarCompiler(Tokenizer(write(tmp_path, words, **PLAIN)), 4, []).matcher(
            GRAMMARS["regex"], []
        )
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"pip install 'forerun\[structured\]'"):
        GrammarCompiler(tokenizer, VOCAB, [END]).matcher(GRAMMARS["regex"], [END])


# Requests do not affect one another.

EXPLODING = Grammar.of(
    "regex", r"(.|\n)*[aeiou](.|\n){30}x"
)  # the number of lexer states doubles with each character


def random_tokens(matcher: Matcher, seed: int, count: int) -> list[int]:
    """Advance by tokens drawn from all allowed ones, as at a high temperature."""
    generator, tokens = random.Random(seed), []
    for _ in range(count):
        allowed = sorted(bits(matcher.masks(Draft.root(0))[0]) - {END})
        tokens.append(generator.choice(allowed))
        matcher.advance(tokens[-1])
    return tokens


def test_a_request_does_not_change_what_another_one_is_allowed(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lexer that all requests share would be full after the first one."""
    monkeypatch.setattr(compiler_module, "STATES", 3000)
    fresh = random_tokens(open_matcher(compiler, EXPLODING), 1, 12)
    waiting, heavy = open_matcher(compiler, EXPLODING), open_matcher(compiler, EXPLODING)
    random_tokens(heavy, 2, 60)
    assert random_tokens(waiting, 1, 12) == fresh
    assert random_tokens(open_matcher(compiler, EXPLODING), 1, 12) == fresh


def test_a_full_lexer_is_replaced_and_allows_the_same(
    compiler: GrammarCompiler, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking ahead fills the lexer; the allowed tokens are those without a bound."""
    monkeypatch.setattr(compiler_module, "STATES", 400)
    reference = Reference(EXPLODING, tokenizer)
    generator = random.Random(0)
    matcher = open_matcher(compiler, EXPLODING)
    text = []
    renewals, renew = [], matcher.compiled.renew
    matcher.compiled.renew = lambda: renewals.append(1) or renew()
    for _ in range(25):
        draft = random_tree(generator, reference, text, nodes=5)
        root_mask, *_ = matcher.masks(matcher.prune(draft))
        assert bits(root_mask) - {END} == reference.allowed(text) - {END}
        token = generator.choice(sorted(reference.allowed(text) - {END}))
        matcher.advance(token)
        text.append(token)
    assert renewals


def test_a_mask_that_exceeds_the_bound_ends_the_request_with_its_reason(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading the text alone takes a state for each character here."""
    monkeypatch.setattr(compiler_module, "STATES", 60)
    matcher = open_matcher(compiler, EXPLODING)
    with pytest.raises(
        RequestError,
        match=r"regex grammar is too complex to match after \d+ tokens .*: give one with",
    ):
        random_tokens(matcher, 3, 200)
    assert 3 < len(matcher.tokens) < 100


def test_completions_of_one_request_are_bounded_together(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler_module, "SANDBOX", FakeWorker())
    monkeypatch.setattr(compiler_module, "ALL_SECONDS", 0.005)
    mine = GrammarCompiler(compiler.tokenizer, VOCAB, [END])
    first, second = mine.compiled_each(Grammar("regex", "[ab]"), 2)
    assert first.core is not second.core
    with pytest.raises(RequestError, match="too long for 6 completions"):
        mine.compiled_each(Grammar("regex", "[ab]"), 6)


# Slow masks.


class SlowCore:
    """A core that computes a mask only while its gate is open."""

    def __init__(self, core: Any) -> None:
        self.core, self.gate = core, threading.Event()

    def compute_bitmask(self) -> bytes:
        assert self.gate.wait(20)
        return self.core.compute_bitmask()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.core, name)


@pytest.fixture
def slow(tokenizer: Tokenizer) -> Iterator[Matcher]:
    mine = GrammarCompiler(tokenizer, VOCAB, [END])
    mine.confine()
    matcher = open_matcher(mine, GRAMMARS["regex"])
    matcher.core = SlowCore(matcher.core)
    yield matcher
    matcher.core.gate.set()


def test_a_matcher_whose_mask_is_not_computed_yet_is_not_ready(slow: Matcher) -> None:
    slow.begin()
    assert not slow.ready()
    with pytest.raises(NotReadyError):
        slow.prune(Draft.chain(0, [5, 6], "toy"))
    slow.core.gate.set()
    wait_until(slow.ready, "the mask is ready")
    assert len(slow.masks(Draft.root(0))) == 1


def test_a_matcher_that_was_slow_is_late_from_then_on(
    slow: Matcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matcher_module, "MOMENT", 0.0)  # every mask takes longer
    slow.begin()
    assert not slow.ready()
    slow.core.gate.set()
    wait_until(slow.ready, "the mask is ready")
    (allowed,) = slow.masks(Draft.root(0))
    slow.core.gate.clear()
    slow.advance(min(bits(allowed) - {END}))
    slow.begin()
    assert slow.late


def test_masks_computed_in_threads_are_the_same(
    tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    """Whether a mask only needs a look-up is known before a thread begins to compute it."""
    mine = GrammarCompiler(tokenizer, VOCAB, [END])
    mine.confine()
    for name, grammar in GRAMMARS.items():
        threaded = open_matcher(mine, grammar)
        plain = open_matcher(compiler, grammar)
        generator = random.Random(name)
        for _ in range(12):
            draft = Draft.chain(0, [generator.randrange(VOCAB) for _ in range(3)], "toy")
            assert threaded.masks(draft) == plain.masks(draft)
            allowed = sorted(bits(plain.masks(Draft.root(0))[0]) - {END})
            if not allowed or plain.stopped:
                break
            token = generator.choice(allowed)
            threaded.advance(token)
            plain.advance(token)


def test_a_killed_compilation_is_an_error_and_later_ones_succeed(compiler: GrammarCompiler) -> None:
    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(compiler.matcher, UNUSABLE["states by another spelling"], [END])
        wait_until(lambda: compiler_module.SANDBOX._busy, "the compilation begins")
        os.kill(compiler_module.SANDBOX.processes[0], signal.SIGKILL)
        with pytest.raises(RequestError, match="ended"):
            work.result(20)
    assert compiler.matcher(Grammar.of("regex", "another"), [END])


def write_large_tokenizer(directory: Path, count: int = 262_144) -> Path:
    """Write a byte-level tokenizer of as many tokens as Gemma's."""
    vocabulary = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    letters = "etaoinshrdlu"
    for number in itertools.count(12**3):
        if len(vocabulary) == count - 1:
            break
        digits = []
        while number:
            number, digit = divmod(number, len(letters))
            digits.append(letters[digit])
        vocabulary.setdefault("".join(digits), len(vocabulary))
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    backend.add_special_tokens(["<eos>"])
    return write(directory, backend, **PLAIN)


@pytest.fixture(scope="module")
def gemma_sized(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    tokenizer = Tokenizer(write_large_tokenizer(tmp_path_factory.mktemp("large")))
    return GrammarCompiler(tokenizer, 262_144, [262_143])


@pytest.mark.parametrize(
    "grammar", [*GRAMMARS.values(), Grammar.of("regex", "[A-Z][a-z]+")], ids=str
)
def test_the_memory_limit_does_not_count_the_models_vocabulary(
    grammar: Grammar, gemma_sized: GrammarCompiler
) -> None:
    """The vocabulary alone would take most of the memory that a grammar may take."""
    matcher = gemma_sized.matcher(grammar, [262_143])
    assert matcher is not None and any(matcher.masks(Draft.root(0))[0])


def test_limits_of_a_grammar_hold_with_a_large_vocabulary_too(gemma_sized: GrammarCompiler) -> None:
    with pytest.raises(RequestError, match=r"takes over 0\.8 seconds or 64 MiB"):
        gemma_sized.matcher(UNUSABLE["many states"], [262_143])
    assert gemma_sized.matcher(Grammar.of("regex", "b+"), [262_143])


def test_special_tokens_outside_of_the_vocabulary_do_not_hide_bytes() -> None:
    """The byte tokens come after the vocabulary, where the id of such a token points."""
    made = _Bytes(8, 7, [(3, "<a>"), (8, "<b>"), (9, "<c>")])
    assert made.special_token_ids == [3] and made.tokens[3] == b"<a>"
    assert made.tokens[8:] == [bytes([byte]) for byte in range(256)]
