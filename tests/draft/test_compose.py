"""Composed drafts: which proposers are asked, how drafts merge into one tree, and exactness under
every rule."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from forerun import LLM, ConfigError, SamplingParams
from forerun.check import oracle
from forerun.draft.compose import (
    MAX_COMPOSED,
    AskContext,
    BestOf,
    InTurn,
    Merged,
    Offer,
    ask,
    merge_drafts,
)
from forerun.draft.proposer import DraftRequest, Proposer
from forerun.types import Draft, Proposal
from forerun.verify import RULES
from forerun.verify.ratio import verify_tree
from tests import exact, tiny
from tests.draft.helpers import KERNELS, pure_params
from tests.texts import plain


class Named(Proposer):
    def __init__(self, name: str) -> None:
        self.name = name

    def propose(self, rows: Sequence[DraftRequest]) -> list[Draft]:
        raise NotImplementedError


class Copying(Named):
    copies_text = True


def ask_parts(
    proposer: Proposer,
    drafts: dict[str, Draft],
    settles: str = "",
    branching: bool = True,
    speeds: str = "",
) -> tuple[list[str], Draft]:
    """Return which parts were asked, and the draft, if parts have `drafts`; `speeds` lists those
    that copy, the slowest first."""
    backwards = AskContext(branching, lambda parts: parts[::-1])
    asking, asked, root = ask(proposer, backwards), list[str](), Draft.root(1)
    wanted = next(asking)
    try:
        while True:
            asked.append(wanted.name)
            draft = drafts.get(wanted.name, root)
            wanted = asking.send(
                Offer(draft, draft, wanted.name == settles, 1.0 + speeds.find(wanted.name))
            )
    except StopIteration as end:
        return asked, end.value


a, b, c = (Named(name) for name in "abc")
d, e = (Copying(name) for name in "de")
A, B, C = (
    Draft.chain(1, tokens, name) for name, tokens in (("a", [2, 3]), ("b", [2, 4]), ("c", [5]))
)


def test_which_proposers_are_asked() -> None:
    either, both = InTurn((a, b, c)), Merged((a, b, c))
    assert ask_parts(either, {"b": B}) == (["a", "b"], B)
    assert ask_parts(either, {})[0] == ["a", "b", "c"]
    assert ask_parts(both, {"a": A, "b": B})[0] == ["a", "b", "c"]
    assert ask_parts(both, {"a": A, "b": B}, settles="a") == (["a"], A)
    assert ask_parts(both, {"b": B, "c": C}, branching=False) == (["a", "b"], B)
    nested = Merged((InTurn((a, b)), c))
    assert nested.name == "(a+b)&c"
    assert [part.name for part in nested.parts] == ["a", "b", "c"]
    assert nested.merges_drafts
    assert ask_parts(nested, {"b": B, "c": C})[0] == ["a", "b", "c"]
    best = InTurn((a, BestOf((b, c))))
    assert ask_parts(best, {"b": B, "c": C}) == (["a", "c"], C), "the ranking here reverses them"
    assert ask_parts(best, {"b": B})[0] == ["a", "c", "b"]
    assert best.rivals == (b, c)
    assert not either.rivals
    assert (best.name, Merged((a, best.inner[1])).name, BestOf((a, both)).name) == (
        "a+b?c",
        "a&(b?c)",
        "a?a&b&c",
    )
    copied = BestOf((d, a, e, b))
    assert copied.rivals == (a, b), "proposers that copy are all asked, so none is a rival"
    assert ask_parts(copied, {"d": A, "e": B}, speeds="de") == (["d", "e"], B)
    assert ask_parts(copied, {"d": A, "e": B}, speeds="ed") == (["d", "e"], A)
    assert ask_parts(copied, {"a": A, "b": B}, speeds="de") == (["d", "e", "b"], B)
    assert len(ask_parts(BestOf((d, e)), {}, speeds="de")[1]) == 1
    asked, draft = ask_parts(InTurn((a, Merged((b, c)))), {"b": B, "c": C})
    assert asked == ["a", "b", "c"] and sorted(draft.tokens) == [1, 2, 4, 5]


def test_a_token_that_several_draft_is_one_node() -> None:
    A.path_probs, B.path_probs, C.path_probs = [0.5, 0.4], [0.6, 0.1], [0.3]
    try:
        draft = merge_drafts([A, B, C])
    finally:
        for one in (A, B, C):
            one.path_probs = []
    assert draft.tokens == [1, 2, 3, 5, 4] and draft.parents == [-1, 0, 1, 0, 1]
    assert draft.sources == ["", "a&b", "a", "c", "b"] and draft.path_probs == [0.6, 0.4, 0.3, 0.1]
    assert merge_drafts([A, Draft.root(1)]) is A and len(merge_drafts([Draft.root(1)])) == 1
    assert merge_drafts([A, A, A]).sources == ["", "a", "a"]


def test_no_child_is_likelier_than_its_parent() -> None:
    one, other = Draft.chain(1, [2, 3, 4], "a"), Draft.chain(1, [2, 3, 6], "b")
    one.path_probs, other.path_probs = [0.2, 0.1, 0.05], [0.1, 0.9, 0.9]
    draft = merge_drafts([one, other])
    for node, prob in enumerate(draft.path_probs, start=1):
        parent = draft.parents[node]
        assert parent < node and (parent == 0 or prob <= draft.path_probs[parent - 1])
    assert draft.path_probs == sorted(draft.path_probs, reverse=True)


# ---------------------------------------------------------------- exactness


def copy_of(tokens: Sequence[int]) -> Draft:
    return Draft.chain(0, list(tokens), "copy")


def with_copies(
    drafter: oracle.Table, copies: Sequence[Draft], depth: int
) -> Iterator[tuple[Draft, float]]:
    """Yield every chain that may be sampled, merged with copies of the text."""
    for draft, weight in oracle.proposals(oracle.sampled, drafter, depth):
        yield merge_drafts([*copies[:1], draft, *copies[1:]]), weight


@pytest.mark.parametrize("vocab", [2, 3])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("copies", [[(0, 0)], [(1,), (0, 1)], [(0,), (1, 1)]], ids=str)
def test_a_sampled_chain_among_copies_is_exact(
    seed: int, vocab: int, copies: list[tuple[int, ...]]
) -> None:
    """The rule is `tree`; every draft and every coin is enumerated."""
    target, drafter = oracle.toy_models("float", vocab, 2, seed)
    assert (
        exact.bias(verify_tree, with_copies(drafter, [copy_of(c) for c in copies], 2), target, 2)
        < 1e-12
    )


def test_the_enumeration_detects_a_wrong_distribution() -> None:
    """In the wrong tree, distributions belong to other nodes."""
    target, drafter = oracle.toy_models("float", 3, 2, 1)

    def wrong() -> Iterator[tuple[Draft, float]]:
        for draft, weight in with_copies(drafter, [copy_of((0, 1))], 2):
            assert draft.probs is not None
            draft.probs = np.roll(draft.probs, 1, axis=-1)
            yield draft, weight

    assert exact.bias(verify_tree, wrong(), target, 2) > 1e-3


def test_sampled_siblings_come_first() -> None:
    probs = np.array([[0.5, 0.5], [0.0, 0.0]])
    chosen = [Proposal.DETERMINISTIC, Proposal.SAMPLED]
    sampled = Draft([0, 1], [-1, 0], ["", "head"], chosen, probs)
    draft = merge_drafts([copy_of((0, 1)), sampled])
    assert draft.tokens[1] == 1
    assert draft.proposals[1] is Proposal.SAMPLED
    assert draft.proposals[2:] == [Proposal.DETERMINISTIC] * 2
    same = merge_drafts([copy_of((1,)), sampled])
    assert len(same) == 2
    assert same.proposals[1] is Proposal.SAMPLED
    assert same.sources[1] == "copy&head"
    assert same.probs is not None and same.probs[0].tolist() == [0.5, 0.5]


PROMPTS = [
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return",
    "the name",
    "[1, 2, [1, 2, [",
]


@pytest.mark.one_in(9)  # of ten of each composition: every rule and both kernels in turn
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize(
    "spec",
    [
        *("suffix&model:{}", "(suffix|ngram)&model:{}", "ngram|suffix&recycle&model:{}"),
        "suffix|lookahead&model:{}",
        *("ngram?model:{}", "model:{}?model:{}", "ngram>model:{}|recycle", "model:{}>model:{}"),
        *("ahead(model:{})", "ahead(suffix>model:{})", "ahead(model:{})&recycle"),
    ],
)
def test_composed_drafts_change_no_text(kernels: str, rule: str, spec: str) -> None:
    """Requests run in batches with preemption, at a fixed and at an automatic depth."""
    dtype = "float32" if kernels == "native" else "float64"
    models = [tiny.repetitive(0.3), tiny.repetitive(0.1)][2 - spec.count("{}") :]
    options = {"kernels": kernels, "rule": rule, "dtype": dtype, "max_rows": 3, "kv_tokens": 192}
    llm = LLM(tiny.repetitive(), draft=spec.format(*models), **options)
    for temperature in (0.0, 0.8):
        params = pure_params(24, temperature, seed=4)
        for depth in (3, "auto"):
            outputs = llm.generate(PROMPTS, params, depth=depth)
            if rule == "match" or (not temperature and rule != "typical"):
                expected = plain(tiny.repetitive(), PROMPTS, params, kernels, dtype)
                assert [c.token_ids for c in outputs] == expected
            assert depth == "auto" or sum(c.stats.accepted for c in outputs) > 0
    llm.engine.target.cache.pages.check()


def test_requests_may_compose_the_engine_s_proposers() -> None:
    """Any spelling works, unknown parts are refused, and unused compositions are dropped."""
    llm = LLM(
        tiny.repetitive(), draft=f"model:{tiny.repetitive(0.05)}", dtype="float64", kv_tokens=1024
    )
    params = SamplingParams.pure(max_tokens=30, seed=1)
    plain = llm.generate(PROMPTS[0], params, draft="off")[0].token_ids
    for draft in ("suffix&model", "(suffix|ngram)&recycle", "ngram|model", "suffix|recycle?model"):
        (output,) = llm.generate(PROMPTS[0], params, draft=draft, prediction=PROMPTS[1])
        assert output.token_ids == plain
    before = len(llm.engine.proposers)
    for draft, message in (
        ("suffix&eagle3", "has no draft"),
        ("suffix&suffix", "stands twice"),
        ("suffix&model:x", "has no draft"),
        ("auto&suffix", "has no draft"),
        ("(" * 300, "too deep"),
        ("suffix&off", "has no draft"),
        ("suffix&", "has no"),
    ):
        with pytest.raises(ConfigError, match=message):
            llm.generate(PROMPTS[0], params, draft=draft)
    assert len(llm.engine.proposers) == before
    names = ["suffix", "ngram", "recycle", "model"]
    for order in itertools.permutations(names):
        for signs in itertools.product("+&", repeat=3):
            parts = [name + sign for name, sign in zip(order, [*signs, ""], strict=True)]
            llm.engine.proposers.known("".join(parts), ())
    assert len(llm.engine.proposers) <= before + MAX_COMPOSED


@pytest.mark.parametrize("seed", range(3))
def test_two_sampled_chains_are_exact(seed: int) -> None:
    """One of two distributions is kept; the drafters share their noise or draw independently."""
    target, one = oracle.toy_models("float", 2, 2, seed)
    _, other = oracle.toy_models("float", 2, 2, seed + 50)
    every = [list(oracle.proposals(oracle.sampled, table, 2)) for table in (one, other)]
    both = ((merge_drafts([x, y]), p * q) for x, p in every[0] for y, q in every[1])
    assert exact.bias(verify_tree, both, target, 2) < 1e-12
    shared = ((merge_drafts([x, copy_of(x.tokens[1:])]), p) for x, p in every[0])
    assert exact.bias(verify_tree, shared, target, 2) < 1e-12


def test_a_node_that_two_drafted_counts_for_both() -> None:
    llm = LLM(
        tiny.repetitive(),
        draft=f"suffix&model:{tiny.repetitive(0.05)}",
        dtype="float64",
        kv_tokens=1024,
    )
    (output,) = llm.generate(PROMPTS[0], SamplingParams.pure(max_tokens=60, seed=1), depth=3)
    sources = output.stats.by_source
    assert set(sources) == {"suffix", "model"}
    assert sum(s.drafted for s in sources.values()) > output.stats.drafted
