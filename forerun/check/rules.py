"""The rules themselves: their own code, run over every draft and every outcome of its coins on toy
models.

Probabilities are fractions, so what is right has an error of exactly 0. Since enumeration replaces
the coins, the real
noise is put to a test of its own: a rule whose coins, draws and drafts are not independent is right
coin by coin, and still wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from forerun import rng
from forerun.check import digits, oracle
from forerun.check.findings import Finding
from forerun.check.oracle import Merged, Scheme
from forerun.check.schemes import CHAINS, MERGED, TREES
from forerun.check.wager import ALPHA, Wager
from forerun.types import Draft, Proposal, Verdict
from forerun.verify import RULES, Noise, block, match, token, tree
from forerun.verify.base import Coins, RatioRule

TOYS = [
    ("exact", 2, 1),
    ("exact", 2, 2),
    ("sparse", 2, 2),
    ("exact", 3, 1),
    ("sparse", 3, 1),
    ("float", 3, 2),
]
SEEDS = range(3)
ROUNDING = 1e-12
ROUNDS, TOGETHER = 6000, 1000
# Laws for which a residual or a coin that shares the draft's noise is far off.
P, Q = np.array([0.62, 0.25, 0.04, 0.08, 0.01]), np.array([0.43, 0.02, 0.49, 0.05, 0.01])


class _Drawn:
    """The target's draws after each node, made when they are looked at, by coins."""

    def __init__(self, p: np.ndarray, coins: Coins) -> None:
        self._p, self._coins = p, coins

    def __getitem__(self, node: int) -> int:
        return self._coins.draw(self._p[node], node)


def match_chain(draft: Draft, p: np.ndarray, coins: Coins) -> Verdict:
    """The default rule with its draws by coins: one a node, since a path meets each depth once. p
    [N, V]"""
    return match.follow(draft, _Drawn(p, coins))  # type: ignore[arg-type]


ENUMERABLE: dict[str, RatioRule] = {
    "match": match_chain,
    "token": token.verify_chain,
    "block": block.verify_chain,
    "tree": tree.verify_tree,
}


def samples_trees(name: str) -> bool:
    """Return True if a rule takes trees of sampled tokens, in which several drafters may draw."""
    return RULES[name].branching and not RULES[name].coupled and not RULES[name].lossy


def enumerate_rule(
    name: str,
    rule: RatioRule,
    schemes: Mapping[str, Scheme | Merged] | None = None,
    exact: bool = True,
) -> Finding:
    """Whether rounds of `rule` have the target's law, over every way to draft it takes, on every
    toy model. Unless `exact`, what rounding can do is allowed with fractions too: a mistake that
    computes in floats is no refutation."""
    if schemes is None:
        trees, merged = name in ("match", "tree"), samples_trees(name)
        schemes = {**(TREES if trees else {}), **CHAINS, **(MERGED if merged else {})}
    cases = 0
    for kind, vocab, depth in TOYS:
        for seed in SEEDS:
            models = (
                *oracle.toy_models(kind, vocab, depth, seed),
                oracle.toy_models(kind, vocab, depth, 100 + seed)[1],
            )
            for scheme, grow in schemes.items():
                cases += 1
                where = {
                    "scheme": scheme,
                    "vocabulary": vocab,
                    "depth": depth,
                    "kind": kind,
                    "seed": seed,
                }
                try:
                    wrong = _worst(rule, grow, models, depth)
                except AssertionError as error:  # the rule itself noticed that a draft cannot be
                    text = f"with {_toy(where)}, the rule refused a draft: {error}"
                    return Finding("rules", name, False, text, where)
                allowed = 0.0 if exact and kind != "float" else ROUNDING
                if wrong.apart > allowed:
                    found = {
                        "said": wrong.said,
                        "target": wrong.target,
                        "difference": wrong.apart,
                        "allowed": allowed,
                    }
                    text = f"with {_toy(where)}, {wrong.words(allowed)}"
                    return Finding("rules", name, False, text, where | found)
    text = f"{cases} toy models and ways to draft, every draft and every coin: the target's probabilities, error 0"
    return Finding("rules", name, True, text, {"cases": cases})


@dataclass(frozen=True, slots=True)
class Wrong:
    """The string whose probability is furthest off, its probabilities, and how far apart they
    are."""

    string: oracle.Prefix
    said: float
    target: float
    apart: float

    def words(self, allowed: float) -> str:
        """What is wrong, in digits that show it."""
        said, target = digits.pair(self.said, self.target)
        often = "often" if self.said > self.target else "seldom"
        far = digits.times(
            self.apart, allowed, "rounding" if allowed else "arithmetic in fractions"
        )
        return (
            f"the tokens {' '.join(map(str, self.string))} come with probability {said}, but the target says them with"
            f" {target}: {self.apart:.2g} too {often}, {far}"
        )


def _toy(where: Mapping[str, Any]) -> str:
    return (
        f"drafts of kind {where['scheme']!r}, {where['depth']} deep, over {where['vocabulary']} tokens (toy model"
        f" {where['kind']}, seed {where['seed']})"
    )


def _worst(
    rule: RatioRule, grow: Scheme | Merged, models: Sequence[oracle.Table], depth: int
) -> Wrong:
    """The string of a round whose probability is furthest from the target's. models: the target,
    and drafters."""
    target, *drafters = models
    if isinstance(grow, tuple):
        drafts = oracle.merged_proposals(grow, drafters, depth)
    else:
        drafts = oracle.proposals(grow, drafters[0], depth)
    said = oracle.complete(oracle.emission(rule, drafts, target), target, depth + 1)
    meant = oracle.joint(target, depth + 1)
    off = {s: abs(said.get(s, 0) - meant.get(s, 0)) for s in {*said, *meant}}
    string = max(sorted(off), key=lambda s: off[s])
    return Wrong(
        string, float(said.get(string, 0)), float(meant.get(string, 0)), float(off[string])
    )


def try_noise(name: str, rule: RatioRule, noise: type[Noise] = Noise) -> Finding:
    """Whether rounds with the real noise say the target's first token: the wager on P, drafts of
    two tokens of Q."""
    wager = Wager(len(P))
    for start in range(0, ROUNDS, TOGETHER):
        noises = [noise(seed, 7) for seed in range(start, start + TOGETHER)]
        for draft, mine in zip(_drafted(noises), noises, strict=True):
            try:
                verdict = rule(draft, np.stack([P] * 3), mine)
            except AssertionError as error:
                return Finding(
                    "rules", f"{name}, real noise", False, f"the rule refused a draft: {error}"
                )
            wager.add(np.arange(len(P)) == verdict.tokens[0], P)
        if wager.refuted:
            break
    worst = int(np.argmax(np.abs(wager.excess)))
    details = {
        "rounds": wager.tokens,
        "evidence": wager.evidence,
        "token": worst,
        "excess": wager.excess[worst],
    }
    if wager.refuted:
        text = (
            f"refuted after {wager.tokens} rounds with the engine's own random numbers: token {worst}"
            f" {digits.off(P[worst] + wager.excess[worst], P[worst])} (evidence {digits.odds(wager.evidence)},"
            f" {digits.odds(1 / ALPHA)} refutes)"
        )
        return Finding("rules", f"{name}, real noise", False, text, details)
    text = (
        f"{ROUNDS} rounds with the engine's own random numbers: the target's probabilities are not refuted (evidence"
        f" against them {digits.odds(wager.evidence)}, {digits.odds(1 / ALPHA)} refutes)"
    )
    return Finding("rules", f"{name}, real noise", True, text, details)


def _drafted(noises: Sequence[Noise]) -> list[Draft]:
    """Chains of two tokens drawn from Q as a drafter draws them."""
    drafts = [Draft.root(0) for _ in noises]
    for node in range(2):
        keys = [noise.draft(node) for noise in noises]
        drawn = rng.gumbel_argmax(torch.tensor(Q).log().expand(len(keys), -1), keys)
        for draft, chosen in zip(drafts, drawn.tolist(), strict=True):
            draft.add(chosen, node, "toy", Proposal.SAMPLED)
            draft.probs = np.stack([Q, Q, 0 * Q])
    return drafts
