"""Known ways to get speculative sampling wrong, each put in on purpose: the checks must find every one of them.

A check that passes broken code protects nothing. Each fault is one that real engines shipped or that a refactoring
could bring in; the oracle must show no bias without it and, with it, a bias of the size the fault is known to have.
The last part guards the numerical edges: equal laws, laws without overlap, coins at their extremes, broken logits.
"""

import math

import numpy as np
import pytest
import torch

from forerun import rng
from forerun.check import oracle
from forerun.errors import ForerunError
from forerun.sampling.filters import SamplingState, filter_logits
from forerun.sampling.params import SamplingParams
from forerun.types import Draft, Law, Verdict
from forerun.verify import RULES, Noise, base, block, token, tree
from tests import test_rng

VOCAB, PAIRS = 5, 60
RULES_OF_CHAINS = {"token": token.verify_chain, "block": block.verify_chain, "tree": tree.verify_tree}


def pairs():
    """Target and drafter for one token, with the drafter's scores."""
    dice = np.random.default_rng(3)
    for _ in range(PAIRS):
        scores = dice.normal(size=VOCAB) * 1.5
        drafter = scores + dice.normal(size=VOCAB) * 0.9
        yield oracle.softmax(scores), drafter


def mean_bias(rule, drafts):
    """The mean total variation distance between what is said first and the target. `drafts(scores)` is the proposal."""
    distances = []
    for p, scores in pairs():
        target = dict.fromkeys([(), *((t,) for t in range(VOCAB))], p)
        emitted = oracle.emission(rule, drafts(scores), target)
        completed = oracle.complete(emitted, target, 2)
        distances.append(oracle.tv(completed, oracle.joint(target, 2)))
    return np.mean(distances)


def one(chosen, q, chance, law=Law.SAMPLED):
    """A draft of one token, said to be drawn from q."""
    draft = Draft.root(0)
    draft.add(int(chosen), 0, "toy", law)
    draft.probs = np.stack([q, q * 0])
    return draft, chance


# Faults of the proposal: what was drawn is not what q says.


def drawn_from(law, stored):
    """Every token, drawn from one law and stored with another."""
    return [one(t, stored, law[t]) for t in np.flatnonzero(law > 0)]


def honest(scores):
    q = oracle.softmax(scores)
    return drawn_from(q, q)


def honest_greedy(scores):
    return [one(scores.argmax(), oracle.softmax(scores), 1, Law.GIVEN)]


def greedy_called_sampled(scores):
    return [one(scores.argmax(), oracle.softmax(scores), 1)]


def unlikely_dropped(scores):
    return [(d if d.probs[0][d.tokens[1]] >= 0.3 else Draft.root(0), chance) for d, chance in honest(scores)]


def colder_than_stored(scores):
    return drawn_from(oracle.softmax(scores / 0.8), oracle.softmax(scores))


def drawn_in_bfloat16(scores):
    rounded = torch.tensor(scores).bfloat16().double().numpy()
    return drawn_from(oracle.softmax(rounded), oracle.softmax(scores))


def stored_as_top2(scores):
    q = oracle.softmax(scores)
    top = np.where(q >= np.sort(q)[-2], q, 0)
    return drawn_from(q, top / top.sum())


@pytest.mark.parametrize("drafts", [honest, honest_greedy])
@pytest.mark.parametrize("rule", RULES_OF_CHAINS)
def test_without_a_fault_there_is_no_bias(rule, drafts):
    assert mean_bias(RULES_OF_CHAINS[rule], drafts) < 1e-12


@pytest.mark.parametrize(
    "drafts, low, high",
    [
        (greedy_called_sampled, 0.2, 0.33),
        (unlikely_dropped, 0.09, 0.16),
        (colder_than_stored, 0.03, 0.06),
        (drawn_in_bfloat16, 1e-5, 2e-3),
    ],
)
@pytest.mark.parametrize("rule", RULES_OF_CHAINS)
def test_a_faulty_proposal_is_found_out(rule, drafts, low, high):
    assert low < mean_bias(RULES_OF_CHAINS[rule], drafts) < high


@pytest.mark.parametrize("rule", RULES_OF_CHAINS)
def test_a_truncated_law_is_refused(rule):
    """A token its own stored law forbids is a bug of the drafter, and stops the round."""
    with pytest.raises(AssertionError, match="forbids"):
        mean_bias(RULES_OF_CHAINS[rule], stored_as_top2)


def test_a_truncated_law_is_found_out_without_the_assertion(monkeypatch):
    monkeypatch.setattr(token, "law_of", lambda draft, node: draft.probs[draft.parents[node]])
    assert 0.08 < mean_bias(token.verify_chain, stored_as_top2) < 0.15


# Faults of the rule.


def equal_or_residual(draft, p, coins):
    """Accept iff an independent draw of the target is the drafted token, else draw from the residual."""
    chosen, q = draft.tokens[1], draft.probs[0]
    if coins.draw(p[0], 0) == chosen:
        return Verdict([chosen, coins.draw(p[1], 1)], [0, 1])
    return Verdict([coins.draw(base.residual(p[0], q), 0)], [0])


def same_residual_for_both(draft, p, coins):
    """Two drafts tested against the first law: the residual is not carried to the second."""
    for node in (1, 2):
        chosen, q = draft.tokens[node], draft.probs[0]
        if coins.accept(p[0][chosen], q[chosen], node):
            return Verdict([chosen, coins.draw(p[node], node)], [0, node])
    return Verdict([coins.draw(base.residual(p[0], draft.probs[0]), 0)], [0])


def two_drafts(scores):
    q = oracle.softmax(scores)
    for a in range(VOCAB):
        for b in range(VOCAB):
            draft, _ = one(a, q, 1)
            draft.add(b, 0, "toy", Law.SAMPLED)
            draft.probs = np.stack([q, q * 0, q * 0])
            yield draft, q[a] * q[b]


class Lenient:
    """Coins that accept a token `factor` times too unlikely."""

    def __init__(self, coins, factor=0.8):
        self.draw, self._accept, self.factor = coins.draw, coins.accept, factor

    def accept(self, p, q, node):
        return self._accept(p, self.factor * q, node)


@pytest.mark.parametrize("rule", RULES_OF_CHAINS)
def test_lenience_is_found_out(rule):
    lenient = mean_bias(lambda draft, p, coins: RULES_OF_CHAINS[rule](draft, p, Lenient(coins)), honest)
    assert 0.05 < lenient < 0.11


def test_comparing_with_an_independent_draw_is_found_out():
    assert 0.16 < mean_bias(equal_or_residual, honest) < 0.27


def test_two_drafts_against_one_law_are_found_out():
    assert mean_bias(tree.verify_tree, two_drafts) < 1e-12
    assert 0.06 < mean_bias(same_residual_for_both, two_drafts) < 0.14


@pytest.mark.parametrize("module", [token, block])
def test_drawing_from_p_after_a_rejection_is_found_out(module, monkeypatch):
    monkeypatch.setattr(module, "residual", lambda p, q: p)
    assert 0.06 < mean_bias(module.verify_chain, honest) < 0.14


class SharedRecovery(Noise):
    """Gumbel noise of the draft used again for the token after a rejection."""

    def draw(self, weights, node):
        with np.errstate(divide="ignore"):
            return int(rng.gumbel_argmax(torch.tensor(np.log(weights))[None], [self.draft(node)]))


class SharedCoins(Noise):
    """The draft's stream used again for its coin."""

    def accept(self, p, q, node):
        return rng.uniform(self.draft(node - 1)) * q < p


@pytest.mark.parametrize("noise_class", [SharedRecovery, SharedCoins])
@pytest.mark.parametrize("rule", RULES_OF_CHAINS)
def test_shared_noise_is_found_out(rule, noise_class):
    """The rule is right and the oracle has nothing to say: only a test of the real noise can see this one."""
    assert test_rng.first_token_p_value(rule, [noise_class(i, 7) for i in range(5000)]) < 1e-7


# Faults that only longer drafts show.


def chain_bias(rule, seed=0):
    target, drafter = oracle.toy_models("float", 3, 3, seed)
    return oracle.bias(rule, oracle.proposals(oracle.sampled, drafter, 3), target, 3)


def block_with_residual_of_token(draft, p, coins):
    """Block acceptance, but the token after it drawn as token-level rejection would."""
    verdict = block.verify_chain(draft, p, coins)
    last = len(verdict.path) - 1
    if last == len(draft) - 1:
        return verdict
    return Verdict([*verdict.tokens[:-1], coins.draw(base.residual(p[last], draft.probs[last]), last)], verdict.path)


def block_without_cap(draft, p, coins):
    """The final acceptance by the plain product of ratios, not capped at 1 on the way."""
    steps = range(1, len(draft))
    product = np.prod([p[i - 1][draft.tokens[i]] / draft.probs[i - 1][draft.tokens[i]] for i in steps])

    class Uncapped(Lenient):
        def accept(self, mass, whole, node):
            return self._accept(product if node == len(draft) - 1 else mass, whole, node)

    return block.verify_chain(draft, p, Uncapped(coins))


def token_that_skips_a_rejection(draft, p, coins):
    """Accept the deepest token that passes its own test, whatever came before it."""
    passed = [
        i
        for i in range(1, len(draft))
        if coins.accept(p[i - 1][draft.tokens[i]], draft.probs[i - 1][draft.tokens[i]], i)
    ]
    last = max(passed, default=0)
    law = p[last] if last == len(draft) - 1 else base.residual(p[last], draft.probs[last])
    return Verdict([*draft.tokens[1 : last + 1], coins.draw(law, last)], list(range(last + 1)))


def rows_one_late(draft, p, coins):
    """Each token tested with the law after it, not before it."""
    return token.verify_chain(draft, np.concatenate([p[1:], p[-1:]]), coins)


@pytest.mark.parametrize(
    "rule, size",
    [
        (block_with_residual_of_token, 3e-3),
        (block_without_cap, 3e-2),
        (token_that_skips_a_rejection, 1e-1),
        (rows_one_late, 1e-1),
    ],
)
def test_a_faulty_chain_rule_is_found_out(rule, size):
    assert chain_bias(token.verify_chain) < 1e-12 > chain_bias(block.verify_chain)
    assert max(chain_bias(rule, seed) for seed in range(8)) > size


# Numerical edges.

COINS = [2.0**-54, 1e-9, 0.5, 1 - 2.0**-53]
EDGE_LAWS = {
    "equal": ([0.1, 0.2, 0.3, 0.4], [0.1, 0.2, 0.3, 0.4]),
    "equal but for rounding": ([0.1, 0.2, 0.3, 0.4], [0.1, 0.2, 0.1 + 0.2, 1 - 0.6]),
    "disjoint": ([0.0, 0.0, 0.5, 0.5], [0.5, 0.5, 0.0, 0.0]),
    "one-hot target": ([0.0, 1.0, 0.0, 0.0], [0.4, 0.2, 0.2, 0.2]),
    "one-hot both": ([0.0, 1.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]),
    "one-hot drafter": ([0.0, 0.3, 0.7, 0.0], [0.0, 0.0, 1.0, 0.0]),
    "tiny": ([1.0, 1e-300, 0.0, 5e-324], [1e-300, 1.0, 0.0, 0.0]),
}


def edge_chain(q, depth):
    best = int(np.argmax(q))
    draft = Draft([0] + [best] * depth, list(range(-1, depth)), ["toy"] * (depth + 1), [Law.SAMPLED] * (depth + 1))
    draft.probs = np.tile(q, (depth + 1, 1))
    return draft


@pytest.mark.parametrize("u", COINS)
@pytest.mark.parametrize("name", EDGE_LAWS)
@pytest.mark.parametrize("rule", RULES_OF_CHAINS)
def test_nothing_is_said_that_the_target_forbids(rule, name, u, monkeypatch):
    monkeypatch.setattr(rng, "uniform", lambda key, index=0: u)
    p, q = map(np.array, EDGE_LAWS[name])
    verdict = RULES_OF_CHAINS[rule](edge_chain(q, 3), np.tile(p, (4, 1)), Noise(1, 1))
    assert all(p[t] > 0 for t in verdict.tokens)
    if name.startswith("equal") or name == "one-hot both":
        assert len(verdict.path) == 4
    if name == "disjoint":
        assert verdict.path == [0]


@pytest.mark.parametrize("u", COINS)
def test_trees_say_nothing_that_the_target_forbids(u, monkeypatch):
    monkeypatch.setattr(rng, "uniform", lambda key, index=0: u)
    p, q = np.array([0.0, 0.5, 0.5, 0.0]), np.array([0.6, 0.4, 0.0, 0.0])
    draft = Draft(
        [0, 0, 1, 3, 1], [-1, 0, 0, 0, 1], ["toy"] * 5, [Law.GIVEN, Law.SAMPLED, Law.SAMPLED, Law.GIVEN, Law.GIVEN]
    )
    draft.probs = np.tile(q, (5, 1))
    verdict = tree.verify_tree(draft, np.tile(p, (5, 1)), Noise(1, 1))
    assert all(p[t] > 0 for t in verdict.tokens)


def test_equal_laws_are_always_accepted():
    """The residual is empty then: what rounding leaves in it must not be drawn from."""
    dice = np.random.default_rng(1)
    for i in range(400):
        q = oracle.softmax(dice.normal(size=50) * 3)
        p = torch.tensor(q).log()[None].expand(4, -1)
        for rule in RULES_OF_CHAINS:
            assert len(RULES[rule].verify([edge_chain(q, 3)], p, [Noise(i, 1)])[0].path) == 4


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_are_an_error(broken, temperature):
    """Never a token: an argmax over NaN would say token 0."""
    logits = torch.zeros(4, 8)
    logits[2] = broken
    logits[2, 5] = broken if broken < 0 else 1.0
    state = SamplingState(SamplingParams(temperature=temperature), [1], [2])
    with pytest.raises(ForerunError, match="not finite"):
        filter_logits(logits, [Draft.chain(0, [1, 2, 3], "toy")], [state])
    filter_logits(logits[:2], [Draft.chain(0, [1], "toy")], [state])


def test_one_nan_in_a_row_is_enough():
    logits = torch.zeros(1, 8)
    logits[0, 7] = math.nan
    with pytest.raises(ForerunError):
        filter_logits(logits, [Draft.root(0)], [SamplingState(SamplingParams(), [1], [2])])


def test_forbidden_tokens_are_no_error():
    logits = torch.zeros(1, 8)
    logits[0, 3:] = -math.inf
    scores = filter_logits(logits, [Draft.root(0)], [SamplingState(SamplingParams(temperature=1.0), [1], [2])])
    assert scores.isfinite().sum() == 3
