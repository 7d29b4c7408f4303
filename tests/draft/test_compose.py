"""Drafts made of drafts: who is asked, one tree of what several say, and exactness of that under
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
from tests.draft.asking import KERNELS
from tests.texts import plain


class Named(Proposer):
    def __init__(self, name: str) -> None:
        self.name = name

    def propose(self, rows: Sequence[DraftRequest]) -> list[Draft]:
        raise NotImplementedError


class Copying(Named):
    copies_text = True


def answered(
    proposer: Proposer,
    has: dict[str, Draft],
    settles: str = "",
    branching: bool = True,
    speeds: str = "",
) -> tuple[list[str], Draft]:
    """Who was asked, and what came of it, where some have drafts; `speeds` names who copies, the
    slowest first."""
    backwards = AskContext(branching, lambda parts: parts[::-1])
    asking, asked, root = ask(proposer, backwards), list[str](), Draft.root(1)
    wanted = next(asking)
    try:
        while True:
            asked.append(wanted.name)
            draft = has.get(wanted.name, root)
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


def test_who_is_asked() -> None:
    either, both = InTurn((a, b, c)), Merged((a, b, c))
    assert answered(either, {"b": B}) == (["a", "b"], B)
    assert answered(either, {})[0] == ["a", "b", "c"]
    assert answered(both, {"a": A, "b": B})[0] == ["a", "b", "c"]
    assert answered(both, {"a": A, "b": B}, settles="a") == (["a"], A)
    assert answered(both, {"b": B, "c": C}, branching=False) == (["a", "b"], B)
    nested = Merged((InTurn((a, b)), c))
    assert nested.name == "(a+b)&c"
    assert [part.name for part in nested.parts] == ["a", "b", "c"]
    assert nested.merges_drafts
    assert answered(nested, {"b": B, "c": C})[0] == ["a", "b", "c"]
    best = InTurn((a, BestOf((b, c))))
    assert answered(best, {"b": B, "c": C}) == (["a", "c"], C), "the ranking here turns them round"
    assert answered(best, {"b": B})[0] == ["a", "c", "b"]
    assert best.rivals == (b, c)
    assert not either.rivals
    assert (best.name, Merged((a, best.inner[1])).name, BestOf((a, both)).name) == (
        "a+b?c",
        "a&(b?c)",
        "a?a&b&c",
    )
    copied = BestOf((d, a, e, b))
    assert copied.rivals == (a, b), "who copies need not be tried: all are looked at"
    assert answered(copied, {"d": A, "e": B}, speeds="de") == (["d", "e"], B)
    assert answered(copied, {"d": A, "e": B}, speeds="ed") == (["d", "e"], A)
    assert answered(copied, {"a": A, "b": B}, speeds="de") == (["d", "e", "b"], B)
    assert len(answered(BestOf((d, e)), {}, speeds="de")[1]) == 1
    asked, draft = answered(InTurn((a, Merged((b, c)))), {"b": B, "c": C})
    assert asked == ["a", "b", "c"] and sorted(draft.tokens) == [1, 2, 4, 5]


def test_what_several_say_is_one_node() -> None:
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
    for node, chance in enumerate(draft.path_probs, start=1):
        parent = draft.parents[node]
        assert parent < node and (parent == 0 or chance <= draft.path_probs[parent - 1])
    assert draft.path_probs == sorted(draft.path_probs, reverse=True)


# ---------------------------------------------------------------- exactness


def given(tokens: Sequence[int]) -> Draft:
    return Draft.chain(0, list(tokens), "copy")


def pairs(
    drafter: oracle.Table, copies: Sequence[Draft], depth: int
) -> Iterator[tuple[Draft, float]]:
    """Every chain that may be sampled, with copies of the text beside it."""
    for draft, weight in oracle.proposals(oracle.sampled, drafter, depth):
        yield merge_drafts([*copies[:1], draft, *copies[1:]]), weight


@pytest.mark.parametrize("vocab", [2, 3])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("copies", [[(0, 0)], [(1,), (0, 1)], [(0,), (1, 1)]], ids=str)
def test_a_sampled_chain_among_copies_is_exact(
    seed: int, vocab: int, copies: list[tuple[int, ...]]
) -> None:
    """Under `tree`, whatever coincides: enumerated over every draft and every coin."""
    target, drafter = oracle.toy_models("float", vocab, 2, seed)
    assert exact.bias(verify_tree, pairs(drafter, [given(c) for c in copies], 2), target, 2) < 1e-12


def test_the_enumeration_sees_a_wrong_law() -> None:
    """A merged tree whose laws belong to another node is caught."""
    target, drafter = oracle.toy_models("float", 3, 2, 1)

    def wrong() -> Iterator[tuple[Draft, float]]:
        for draft, weight in pairs(drafter, [given((0, 1))], 2):
            assert draft.probs is not None
            draft.probs = np.roll(draft.probs, 1, axis=-1)
            yield draft, weight

    assert exact.bias(verify_tree, wrong(), target, 2) > 1e-3


def test_sampled_siblings_come_first() -> None:
    law = np.array([[0.5, 0.5], [0.0, 0.0]])
    sampled = Draft([0, 1], [-1, 0], ["", "head"], [Proposal.DETERMINISTIC, Proposal.SAMPLED], law)
    draft = merge_drafts([given((0, 1)), sampled])
    assert draft.tokens[1] == 1
    assert draft.proposals[1] is Proposal.SAMPLED
    assert draft.proposals[2:] == [Proposal.DETERMINISTIC] * 2
    same = merge_drafts([given((1,)), sampled])
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
def test_the_same_text_as_alone(kernels: str, rule: str, spec: str) -> None:
    """In batches, with preemption, at both kinds of depth."""
    dtype = "float32" if kernels == "native" else "float64"
    models = [tiny.spoken(0.3), tiny.spoken(0.1)][2 - spec.count("{}") :]
    options = {"kernels": kernels, "rule": rule, "dtype": dtype, "max_rows": 3, "kv_tokens": 192}
    llm = LLM(tiny.spoken(), draft=spec.format(*models), **options)
    for temperature in (0.0, 0.8):
        params = SamplingParams.pure(
            max_tokens=24, temperature=temperature, seed=4, ignore_eos=True
        )
        for depth in (3, "auto"):
            said = llm.generate(PROMPTS, params, depth=depth)
            if rule == "match" or (not temperature and rule != "typical"):
                expected = plain(tiny.spoken(), PROMPTS, params, kernels, dtype)
                assert [c.token_ids for c in said] == expected
            assert depth == "auto" or sum(c.stats.accepted for c in said) > 0
    llm.engine.target.cache.pages.check()


def test_requests_may_compose_what_the_engine_has() -> None:
    """By any spelling of it; what is not there is told, and what is not used any more goes."""
    llm = LLM(tiny.spoken(), draft=f"model:{tiny.spoken(0.05)}", dtype="float64", kv_tokens=1024)
    params = SamplingParams.pure(max_tokens=30, seed=1)
    plain = llm.generate(PROMPTS[0], params, draft="off")[0].token_ids
    for draft in ("suffix&model", "(suffix|ngram)&recycle", "ngram|model", "suffix|recycle?model"):
        (said,) = llm.generate(PROMPTS[0], params, draft=draft, prediction=PROMPTS[1])
        assert said.token_ids == plain
    before = len(llm.engine.proposers)
    for draft, says in (
        ("suffix&eagle3", "has no draft"),
        ("suffix&suffix", "stands twice"),
        ("suffix&model:x", "has no draft"),
        ("auto&suffix", "has no draft"),
        ("(" * 300, "too deep"),
        ("suffix&off", "has no draft"),
        ("suffix&", "has no"),
    ):
        with pytest.raises(ConfigError, match=says):
            llm.generate(PROMPTS[0], params, draft=draft)
    assert len(llm.engine.proposers) == before
    names = ["suffix", "ngram", "recycle", "model"]
    for order in itertools.permutations(names):
        for signs in itertools.product("+&", repeat=3):
            llm.engine.proposers.known(
                "".join(itertools.chain(*zip(order, [*signs, ""], strict=True))), ()
            )
    assert len(llm.engine.proposers) <= before + MAX_COMPOSED


@pytest.mark.parametrize("seed", range(3))
def test_two_sampled_chains_are_exact(seed: int) -> None:
    """Of two laws in one place one is kept; both drafters share their noise or do not."""
    target, one = oracle.toy_models("float", 2, 2, seed)
    _, other = oracle.toy_models("float", 2, 2, seed + 50)
    every = [list(oracle.proposals(oracle.sampled, table, 2)) for table in (one, other)]
    both = ((merge_drafts([x, y]), p * q) for x, p in every[0] for y, q in every[1])
    assert exact.bias(verify_tree, both, target, 2) < 1e-12
    shared = ((merge_drafts([x, given(x.tokens[1:])]), p) for x, p in every[0])
    assert exact.bias(verify_tree, shared, target, 2) < 1e-12


def test_a_node_that_two_said_counts_for_both() -> None:
    llm = LLM(
        tiny.spoken(), draft=f"suffix&model:{tiny.spoken(0.05)}", dtype="float64", kv_tokens=1024
    )
    (said,) = llm.generate(PROMPTS[0], SamplingParams.pure(max_tokens=60, seed=1), depth=3)
    sources = said.stats.by_source
    assert set(sources) == {"suffix", "model"}
    assert sum(s.drafted for s in sources.values()) > said.stats.drafted
