"""Checks of the verification rules themselves, on toy models.

`enumerate_rule` runs a rule's own code on every draft and every outcome of its coin tosses.
Probabilities are fractions, so a correct rule has an error of exactly 0. Enumeration replaces the
random numbers, so `check_random_numbers` tests a rule with the real ones: a rule whose coins,
residual draws and drafts share random numbers is correct coin by coin, and still biased.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from forerun import rng
from forerun.check import oracle
from forerun.check.oracle import CHAINS, TREES, Scheme
from forerun.check.report import Finding
from forerun.check.sequential_test import SequentialTest
from forerun.types import Draft, Proposal, Verdict
from forerun.verify import RULES, Noise, block, match, token, tree
from forerun.verify.base import Coins, RatioRule

# kind, vocabulary and depth of the toy models, each with every seed
TOY_MODELS = [
    ("exact", 2, 1),
    ("exact", 2, 2),
    ("sparse", 2, 2),
    ("exact", 3, 1),
    ("sparse", 3, 1),
    ("float", 3, 2),
]
SEEDS = range(3)
ROUNDING = 1e-12  # tolerance of a probability computed in float64
NUM_ROUNDS = 6000
BATCH_SIZE = 1000
# target and drafter that show a large bias if random numbers are shared
P = np.array([0.62, 0.25, 0.04, 0.08, 0.01])
Q = np.array([0.43, 0.02, 0.49, 0.05, 0.01])


class _LazyDraws:
    """The target's draw after each node, made by coins when it is read."""

    def __init__(self, p: np.ndarray, coins: Coins) -> None:
        self._p = p
        self._coins = coins

    def __getitem__(self, node: int) -> int:
        return self._coins.draw(self._p[node], node)


def match_by_coins(draft: Draft, p: np.ndarray, coins: Coins) -> Verdict:
    """Run the `match` rule with coins for its draws, as the ratio rules are run. p [N, V]"""
    return match.follow(draft, _LazyDraws(p, coins))  # type: ignore[arg-type]


ENUMERABLE: dict[str, RatioRule] = {
    "match": match_by_coins,
    "token": token.verify_chain,
    "block": block.verify_chain,
    "tree": tree.verify_tree,
}


def enumerate_rule(
    name: str,
    rule: RatioRule,
    schemes: Mapping[str, Scheme] | None = None,
    exact: bool = True,
) -> Finding:
    """Compare the distribution that rounds of `rule` emit with the target's, on every toy model.

    Args:
        name: the rule's name.
        rule: its code, possibly with a fault.
        schemes: drafting schemes; by default all whose drafts the rule accepts.
        exact: demand an error of 0 where probabilities are fractions. False allows rounding there
            too, for faults that compute in float64: rounding alone must not reject them.
    """
    if schemes is None:
        schemes = {**CHAINS, **(TREES if RULES[name].branching else {})}
    num_cases = 0
    for scheme, grow in schemes.items():
        for kind, vocab, depth in TOY_MODELS:
            for seed in SEEDS:
                case = {"scheme": scheme, "kind": kind, "vocabulary": vocab}
                case |= {"depth": depth, "seed": seed}
                allowed = 0.0 if exact and kind != "float" else ROUNDING
                try:
                    wrong = _compare(rule, grow, case, allowed)
                except AssertionError as error:  # the rule noticed an impossible draft
                    wrong = {"error": str(error)}
                if wrong:
                    return Finding("rules", name, False, _describe(case, wrong), case | wrong)
                num_cases += 1
    text = f"{num_cases} combinations of toy model and drafting scheme: error 0"
    return Finding("rules", name, True, text, {"cases": num_cases})


def _compare(
    rule: RatioRule, grow: Scheme, case: Mapping[str, Any], allowed: float
) -> dict[str, Any]:
    """Return the string with the largest error of probability; {} if all are within `allowed`."""
    kind, vocab, depth, seed = (case[key] for key in ("kind", "vocabulary", "depth", "seed"))
    target, drafter = oracle.toy_models(kind, vocab, depth, seed)
    drafts = oracle.proposals(grow, drafter, depth)
    emitted = oracle.complete(oracle.emission(rule, drafts, target), target, depth + 1)
    expected = oracle.joint(target, depth + 1)
    errors = {s: emitted.get(s, 0) - expected.get(s, 0) for s in {*emitted, *expected}}
    worst = max(sorted(errors), key=lambda s: abs(errors[s]))
    if abs(errors[worst]) <= allowed:
        return {}
    target_prob = float(expected.get(worst, 0))
    error = float(errors[worst])
    return {"tokens": list(worst), "expected": target_prob, "error": error, "allowed": allowed}


def _describe(case: Mapping[str, Any], wrong: Mapping[str, Any]) -> str:
    where = (
        f"toy model {case['kind']}, seed {case['seed']}, {case['vocabulary']} tokens,"
        f" scheme {case['scheme']!r}, depth {case['depth']}"
    )
    if "tokens" not in wrong:
        return f"{where}: the rule rejected a draft as impossible: {wrong['error']}"
    tokens = " ".join(map(str, wrong["tokens"]))
    direction = "high" if wrong["error"] > 0 else "low"
    return (
        f"{where}: the probability of the tokens {tokens} is {abs(wrong['error']):.2g} too"
        f" {direction} (the target's is {wrong['expected']:.4g}, the allowed error"
        f" {wrong['allowed']:g})"
    )


def check_random_numbers(name: str, rule: RatioRule, noise: type[Noise] = Noise) -> Finding:
    """Test the first token of rounds with the real random numbers against the target P.

    Drafts are chains of two tokens sampled from Q.
    """
    subject = f"{name}, real random numbers"
    test = SequentialTest(len(P))
    for start in range(0, NUM_ROUNDS, BATCH_SIZE):
        noises = [noise(seed, 7) for seed in range(start, start + BATCH_SIZE)]
        for draft, own in zip(_sample_chains(noises), noises, strict=True):
            try:
                verdict = rule(draft, np.stack([P] * 3), own)
            except AssertionError as error:
                return Finding("rules", subject, False, f"the rule rejected a draft: {error}")
            test.add(np.arange(len(P)) == verdict.tokens[0], P)
        if test.rejected:
            break
    worst, words = test.describe_worst()
    details = {"rounds": test.num_tokens, "evidence": test.evidence}
    details |= {"token": worst, "bias": test.bias[worst]}
    text = f"{test.num_tokens} rounds: {test.describe()}"
    if test.rejected:
        text += f"; token {worst} {words}"
    return Finding("rules", subject, not test.rejected, text, details)


def _sample_chains(noises: Sequence[Noise]) -> list[Draft]:
    """Sample chains of two tokens from Q as a drafter does."""
    drafts = [Draft.root(0) for _ in noises]
    logits = torch.tensor(Q).log().expand(len(noises), -1)
    for node in range(2):
        drawn = rng.gumbel_argmax(logits, [noise.draft(node) for noise in noises])
        for draft, chosen in zip(drafts, drawn.tolist(), strict=True):
            draft.add(chosen, node, "toy", Proposal.SAMPLED)
            draft.probs = np.stack([Q, Q, 0 * Q])
    return drafts
