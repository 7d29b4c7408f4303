"""The rules themselves: their own code, run over every draft and every outcome of its coins on toy models.

Probabilities are fractions, so what is right has an error of exactly 0. Since enumeration replaces the coins, the real
noise is put to a test of its own: a rule whose coins, draws and drafts are not independent is right coin by coin, and
still wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from forerun import rng
from forerun.check import oracle
from forerun.check.findings import Finding
from forerun.check.oracle import Scheme
from forerun.check.schemes import CHAINS, TREES
from forerun.check.wager import Wager
from forerun.types import Draft, Law, Verdict
from forerun.verify import Noise, block, match, token, tree
from forerun.verify.base import Coins, RatioRule

TOYS = [("exact", 2, 1), ("exact", 2, 2), ("sparse", 2, 2), ("exact", 3, 1), ("sparse", 3, 1), ("float", 3, 2)]
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
    """The default rule with its draws by coins: one a node, since a path meets each depth once. p [N, V]"""
    return match.follow(draft, _Drawn(p, coins))  # type: ignore[arg-type]


ENUMERABLE: dict[str, RatioRule] = {
    "match": match_chain,
    "token": token.verify_chain,
    "block": block.verify_chain,
    "tree": tree.verify_tree,
}


def enumerate_rule(name: str, rule: RatioRule, schemes: Mapping[str, Scheme] | None = None) -> Finding:
    """Whether rounds of `rule` have the target's law, over every way to draft it takes, on every toy model."""
    schemes = schemes or (TREES | CHAINS if name in ("match", "tree") else CHAINS)
    cases = 0
    for kind, vocab, depth in TOYS:
        for seed in SEEDS:
            models = oracle.toy_models(kind, vocab, depth, seed)
            for scheme, grow in schemes.items():
                cases += 1
                where = {"scheme": scheme, "vocabulary": vocab, "depth": depth, "kind": kind, "seed": seed}
                try:
                    wrong = _first_error(rule, grow, models, depth, ROUNDING if kind == "float" else 0)
                except AssertionError as error:  # the rule itself noticed that a draft cannot be
                    return Finding("rules", name, False, f"refused: {error}", where)
                if wrong:
                    string, said, meant = wrong
                    text = (
                        f"wrong with a draft of kind {scheme!r}, depth {depth}, over {vocab} tokens ({kind}, seed"
                        f" {seed}): the string {' '.join(map(str, string))} is said with probability {said:.6f}, the"
                        f" target says it with {meant:.6f}"
                    )
                    return Finding("rules", name, False, text, where | {"said": said, "target": meant})
    text = f"{cases} toy models and ways to draft, every draft and every coin: the target's law, error 0"
    return Finding("rules", name, True, text, {"cases": cases})


def _first_error(
    rule: RatioRule, grow: Scheme, models: tuple[oracle.Table, oracle.Table], depth: int, allowed: float
) -> tuple[oracle.Prefix, float, float] | None:
    """The string whose probability is furthest off and both probabilities; None if none is off."""
    target, drafter = models
    said = oracle.complete(oracle.emission(rule, oracle.proposals(grow, drafter, depth), target), target, depth + 1)
    meant = oracle.joint(target, depth + 1)
    off = {s: abs(said.get(s, 0) - meant.get(s, 0)) for s in {*said, *meant}}
    string = max(sorted(off), key=lambda s: off[s])
    if off[string] <= allowed:
        return None
    return string, float(said.get(string, 0)), float(meant.get(string, 0))


def try_noise(name: str, rule: RatioRule, noise: type[Noise] = Noise) -> Finding:
    """Whether rounds with the real noise say the target's first token: the wager on P, drafts of two tokens of Q."""
    wager = Wager(len(P))
    for start in range(0, ROUNDS, TOGETHER):
        noises = [noise(seed, 7) for seed in range(start, start + TOGETHER)]
        for draft, mine in zip(_drafted(noises), noises, strict=True):
            try:
                verdict = rule(draft, np.stack([P] * 3), mine)
            except AssertionError as error:
                return Finding("rules", f"{name}, real noise", False, f"refused: {error}")
            wager.add(np.arange(len(P)) == verdict.tokens[0], P)
        if wager.refuted:
            break
    worst = int(np.argmax(np.abs(wager.excess)))
    details = {"rounds": wager.tokens, "evidence": wager.evidence, "token": worst, "excess": wager.excess[worst]}
    if wager.refuted:
        text = (
            f"drafts, coins and draws are not independent: token {worst} comes {abs(wager.excess[worst]):.3f} too"
            f" {'often' if wager.excess[worst] > 0 else 'seldom'} (evidence {wager.evidence:.0f} to 1)"
        )
        return Finding("rules", f"{name}, real noise", False, text, details)
    text = f"{ROUNDS} rounds with the real noise: no evidence against the target's law ({wager.evidence:.2f} to 1)"
    return Finding("rules", f"{name}, real noise", True, text, details)


def _drafted(noises: Sequence[Noise]) -> list[Draft]:
    """Chains of two tokens drawn from Q as a drafter draws them."""
    drafts = [Draft.root(0) for _ in noises]
    for node in range(2):
        keys = [noise.draft(node) for noise in noises]
        drawn = rng.gumbel_argmax(torch.tensor(Q).log().expand(len(keys), -1), keys)
        for draft, chosen in zip(drafts, drawn.tolist(), strict=True):
            draft.add(chosen, node, "toy", Law.SAMPLED)
            draft.probs = np.stack([Q, Q, 0 * Q])
    return drafts
