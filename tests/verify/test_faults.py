"""Known ways to get speculative sampling wrong, each put in on purpose: the checks must find every
one of them.

A check that passes broken code protects nothing. Each fault is one that real engines shipped or
that a refactoring could bring in; the oracle must show no bias without it and, with it, a bias of
the size the fault is known to have.
The last part guards the numerical edges: equal laws, laws without overlap, coins at their extremes,
broken logits."""

import math

import numpy as np
import pytest
import torch

from forerun import rng
from forerun.check import oracle
from forerun.errors import ForerunError
from forerun.sampling.filters import SamplingState, filter_logits
from forerun.sampling.params import SamplingParams
from forerun.types import Draft, Proposal
from forerun.verify import RULES, Noise, ratio
from forerun.verify.ratio import verify_block, verify_token, verify_tree
from tests import exact, test_rng
from tests.check.faults import FAULTS

VOCAB, PAIRS = 5, 60
RULES_OF_CHAINS = {
    "token": verify_token,
    "block": verify_block,
    "tree": verify_tree,
}


def pairs():
    """Target and drafter for one token, with the drafter's scores."""
    dice = np.random.default_rng(3)
    for _ in range(PAIRS):
        scores = dice.normal(size=VOCAB) * 1.5
        drafter = scores + dice.normal(size=VOCAB) * 0.9
        yield oracle.softmax(scores), drafter


def mean_bias(rule, drafts):
    """The mean total variation distance between what is said first and the target. `drafts(scores)`
    is the proposal."""
    distances = []
    for p, scores in pairs():
        target = dict.fromkeys([(), *((t,) for t in range(VOCAB))], p)
        emitted = oracle.emission(rule, drafts(scores), target)
        completed = oracle.complete(emitted, target, 2)
        distances.append(exact.tv(completed, oracle.joint(target, 2)))
    return np.mean(distances)


def one(chosen, q, chance, law=Proposal.SAMPLED):
    """A draft of one token, said to be drawn from q."""
    draft = Draft.root(0)
    draft.add(int(chosen), 0, "toy", law)
    draft.probs = np.stack([q, q * 0])
    return draft, chance


def honest(scores):
    """Every token, drawn from q and stored with it."""
    q = oracle.softmax(scores)
    return [one(t, q, q[t]) for t in np.flatnonzero(q > 0)]


def honest_greedy(scores):
    return [one(scores.argmax(), oracle.softmax(scores), 1, Proposal.DETERMINISTIC)]


def greedy_called_sampled(scores):
    return [one(scores.argmax(), oracle.softmax(scores), 1)]


def two_drafts(scores):
    q = oracle.softmax(scores)
    for a in range(VOCAB):
        for b in range(VOCAB):
            draft, _ = one(a, q, 1)
            draft.add(b, 0, "toy", Proposal.SAMPLED)
            draft.probs = np.stack([q, q * 0, q * 0])
            yield draft, q[a] * q[b]


@pytest.mark.parametrize("drafts", [honest, honest_greedy])
@pytest.mark.parametrize("rule", RULES_OF_CHAINS)
def test_without_a_fault_there_is_no_bias(rule, drafts):
    assert mean_bias(RULES_OF_CHAINS[rule], drafts) < 1e-12


@pytest.mark.parametrize("rule", RULES_OF_CHAINS)
def test_a_likeliest_token_called_sampled_is_found_out(rule):
    assert 0.2 < mean_bias(RULES_OF_CHAINS[rule], greedy_called_sampled) < 0.33


@pytest.mark.parametrize(
    "name, low, high",
    [
        ("dropped", 0.09, 0.16),
        ("other-temperature", 0.02, 0.06),
        ("bfloat16-draw", 1e-5, 2e-3),
        ("lenient", 0.05, 0.11),
        ("no-residual", 0.06, 0.14),
    ],
)
@pytest.mark.parametrize("rule", RULES_OF_CHAINS)
def test_a_fault_has_the_size_it_is_known_to_have(rule, name, low, high):
    """On random laws; `forerun check` shows that each is found, this that each is the fault it says
    it is."""
    assert low < mean_bias(FAULTS[name].code(rule), honest) < high


@pytest.mark.parametrize("rule", RULES_OF_CHAINS)
def test_a_truncated_law_is_refused(rule):
    """A token its own stored law forbids is a bug of the drafter, and stops the round."""
    with pytest.raises(AssertionError, match="gives no probability"):
        mean_bias(FAULTS["truncated-law"].code(rule), honest)


def test_a_truncated_law_is_found_out_without_the_assertion(monkeypatch):
    monkeypatch.setattr(ratio, "probs_of", lambda draft, node, p: draft.probs[draft.parents[node]])
    assert 0.08 < mean_bias(FAULTS["truncated-law"].code("token"), honest) < 0.15


def test_two_drafts_against_one_law_are_found_out():
    assert mean_bias(verify_tree, two_drafts) < 1e-12
    assert 0.06 < mean_bias(FAULTS["siblings"].code("tree"), two_drafts) < 0.14


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["shared-recovery", "shared-coins"])
@pytest.mark.parametrize("rule", RULES_OF_CHAINS)
def test_shared_noise_is_found_out(rule, name):
    """The rule is right and the oracle has nothing to say: only a test of the real noise can see
    this one."""
    assert (
        test_rng.first_token_p_value(rule, [FAULTS[name].noise(i, 7) for i in range(5000)]) < 1e-7
    )


# Faults that only longer drafts show.


def chain_bias(rule, seed=0):
    target, drafter = oracle.toy_models("float", 3, 3, seed)
    return exact.bias(rule, oracle.proposals(oracle.sampled, drafter, 3), target, 3)


@pytest.mark.parametrize(
    "name, rule, size",
    [
        ("token-residual", "block", 3e-3),
        ("uncapped", "block", 3e-2),
        ("skipped-rejection", "token", 1e-1),
        ("rows-late", "token", 1e-1),
    ],
)
def test_a_faulty_chain_rule_is_found_out(name, rule, size):
    assert chain_bias(RULES_OF_CHAINS[rule]) < 1e-12
    assert max(chain_bias(FAULTS[name].code(rule), seed) for seed in range(8)) > size


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
    draft = Draft(
        [0] + [best] * depth,
        list(range(-1, depth)),
        ["toy"] * (depth + 1),
        [Proposal.SAMPLED] * (depth + 1),
    )
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
        [0, 0, 1, 3, 1],
        [-1, 0, 0, 0, 1],
        ["toy"] * 5,
        [
            Proposal.DETERMINISTIC,
            Proposal.SAMPLED,
            Proposal.SAMPLED,
            Proposal.DETERMINISTIC,
            Proposal.DETERMINISTIC,
        ],
    )
    draft.probs = np.tile(q, (5, 1))
    verdict = verify_tree(draft, np.tile(p, (5, 1)), Noise(1, 1))
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


def test_forbidden_tokens_are_no_error():
    logits = torch.zeros(1, 8)
    logits[0, 3:] = -math.inf
    scores = filter_logits(
        logits, [Draft.root(0)], [SamplingState(SamplingParams(temperature=1.0), [1], [2])]
    )
    assert scores.isfinite().sum() == 3


def test_comparing_with_an_independent_draw_is_found_out():
    assert 0.16 < mean_bias(FAULTS["independent-match"].code("token"), honest) < 0.27


def test_one_nan_in_a_row_is_enough():
    logits = torch.zeros(1, 8)
    logits[0, 7] = math.nan
    with pytest.raises(ForerunError):
        filter_logits(logits, [Draft.root(0)], [SamplingState(SamplingParams(), [1], [2])])
