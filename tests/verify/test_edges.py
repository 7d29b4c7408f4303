"""Numerical edge cases of the ratio rules: equal and disjoint distributions, extreme coins, broken
logits.

tests/check/test_certificate.py tests that `forerun check` detects known faults."""

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
from forerun.verify import RULES, Noise
from forerun.verify.ratio import verify_block, verify_token, verify_tree

CHAIN_RULES = {"token": verify_token, "block": verify_block, "tree": verify_tree}
COINS = [2.0**-54, 1e-9, 0.5, 1 - 2.0**-53]
EDGE_DISTRIBUTIONS = {
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
    draft = Draft.chain(0, [best] * depth, "toy")
    draft.proposals = [Proposal.SAMPLED] * (depth + 1)
    draft.probs = np.tile(q, (depth + 1, 1))
    return draft


@pytest.mark.parametrize("u", COINS)
@pytest.mark.parametrize("name", EDGE_DISTRIBUTIONS)
@pytest.mark.parametrize("rule", CHAIN_RULES)
def test_tokens_of_target_probability_0_are_never_emitted(rule, name, u, monkeypatch):
    monkeypatch.setattr(rng, "uniform", lambda key, index=0: u)
    p, q = map(np.array, EDGE_DISTRIBUTIONS[name])
    verdict = CHAIN_RULES[rule](edge_chain(q, 3), np.tile(p, (4, 1)), Noise(1, 1))
    assert all(p[t] > 0 for t in verdict.tokens)
    if name.startswith("equal") or name == "one-hot both":
        assert len(verdict.path) == 4
    if name == "disjoint":
        assert verdict.path == [0]


@pytest.mark.parametrize("u", COINS)
def test_trees_never_emit_tokens_of_target_probability_0(u, monkeypatch):
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


def test_drafts_from_the_target_s_own_distribution_are_accepted():
    """The residual distribution is empty here: its rounding errors must not be sampled from."""
    generator = np.random.default_rng(1)
    for i in range(400):
        q = oracle.softmax(generator.normal(size=50) * 3)
        p = torch.tensor(q).log()[None].expand(4, -1)
        for rule in CHAIN_RULES:
            assert len(RULES[rule].verify([edge_chain(q, 3)], p, [Noise(i, 1)])[0].path) == 4


BROKEN_ROWS = {
    "nan": [math.nan] * 7 + [1.0],
    "one nan": [0.0] * 7 + [math.nan],
    "inf": [math.inf] * 7 + [1.0],
    "-inf": [-math.inf] * 8,
}


@pytest.mark.parametrize("row", BROKEN_ROWS.values(), ids=BROKEN_ROWS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_are_an_error(row, temperature):
    """No token may be returned: an argmax over NaN would give token 0."""
    logits = torch.zeros(4, 8)
    logits[2] = torch.tensor(row)
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
