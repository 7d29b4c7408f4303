"""Faults to inject: those of `forerun check`, and others that tests must find.

A fault changes a rule's code, the draft distribution that the rule receives, or the random numbers.
Most of them occurred in released engines. On random distributions the mean total variation distance
ranges from 0.26 (a greedy token treated as sampled) down to 1e-4 (a draw in bfloat16).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from forerun import rng
from forerun.check.certificate import FAULTS as SHIPPED
from forerun.check.certificate import LENIENCE, RATIO_RULES, Change, ChangedCoins, Fault
from forerun.types import Draft, Proposal, Verdict
from forerun.verify import RULES, Noise, Rule, match
from forerun.verify.base import Coins, RatioRule
from forerun.verify.ratio import probs_of, ratio_rule, residual, verify_block

UNLIKELY = 0.3
FAULTS = dict(SHIPPED)


class MatchFault(Fault):
    """A fault in the code of the `match` rule."""

    def rule(self, name: str) -> Rule:
        """Return the rule for an engine: its coins are the target's own draws."""
        code = self.code(name)

        def verify(
            drafts: Sequence[Draft], scores: Tensor, noises: Sequence[Noise]
        ) -> list[Verdict]:
            drawn = iter(match.draw(drafts, scores, noises))
            draws = [FixedDraws(list(islice(drawn, len(draft)))) for draft in drafts]
            return ratio_rule(code)(drafts, scores, draws)

        return (
            replace(RULES[name], verify=verify, follow=None) if name in self.rules else RULES[name]
        )


@dataclass
class FixedDraws:
    """Coins whose draws are known."""

    drawn: Sequence[int]

    def draw(self, weights: np.ndarray, node: int) -> int:
        return self.drawn[node]

    def accept(self, p: float, q: float, node: int) -> bool:
        raise NotImplementedError


def change(
    name: str, description: str, *rules: str, kind: type[Fault] = Fault
) -> Callable[[Change], Change]:
    """Register the decorated code as a fault."""

    def register(code: Change) -> Change:
        FAULTS[name] = kind(name, description, rules, code)
        return code

    return register


def noise(name: str, description: str, *rules: str) -> Callable[[type[Noise]], type[Noise]]:
    """Register the decorated random numbers as a fault."""

    def register(made: type[Noise]) -> type[Noise]:
        FAULTS[name] = Fault(name, description, rules, noise=made)
        return made

    return register


# Faults of the rule.


@change(
    "no-residual",
    "after a rejection the token is drawn from p instead of the residual",
    *RATIO_RULES,
)
def no_residual(rule: RatioRule, draft: Draft, p: np.ndarray, coins: Coins) -> Verdict:
    return rule(
        draft, p, ChangedCoins(coins.accept, lambda weights, node: coins.draw(p[node], node))
    )


@change("rows-late", "each token is tested with the distribution after it", *RATIO_RULES)
def rows_late(rule: RatioRule, draft: Draft, p: np.ndarray, coins: Coins) -> Verdict:
    return rule(draft, np.concatenate([p[1:], p[-1:]]), coins)


@change("independent-match", "accepted if an independent draw of the target is equal", "token")
def independent_match(rule: RatioRule, draft: Draft, p: np.ndarray, coins: Coins) -> Verdict:
    for node in range(1, len(draft)):
        if coins.draw(p[node - 1], node - 1) != draft.tokens[node]:
            rest = residual(p[node - 1], probs_of(draft, node, p))
            return Verdict(
                [*draft.tokens[1:node], coins.draw(rest, node + len(draft))], list(range(node))
            )
    last = len(draft) - 1
    return Verdict([*draft.tokens[1:], coins.draw(p[last], last)], list(range(len(draft))))


@change("skipped-rejection", "a token is accepted behind a rejected one", "token")
def skipped_rejection(rule: RatioRule, draft: Draft, p: np.ndarray, coins: Coins) -> Verdict:
    probs = [probs_of(draft, node, p) for node in range(1, len(draft))]
    tests = [(p[i][draft.tokens[i + 1]], q[draft.tokens[i + 1]]) for i, q in enumerate(probs)]
    last = max((i + 1 for i, (a, b) in enumerate(tests) if coins.accept(a, b, i + 1)), default=0)
    weights = p[last] if last == len(draft) - 1 else residual(p[last], probs[last])
    return Verdict([*draft.tokens[1 : last + 1], coins.draw(weights, last)], list(range(last + 1)))


@change("token-residual", "block acceptance with the residual of token rejection", "block")
def token_residual(rule: RatioRule, draft: Draft, p: np.ndarray, coins: Coins) -> Verdict:
    verdict = verify_block(draft, p, coins)
    last = len(verdict.path) - 1
    if last == len(draft) - 1:
        return verdict
    rest = residual(p[last], probs_of(draft, last + 1, p))
    return Verdict([*verdict.tokens[:-1], coins.draw(rest, last + len(draft))], verdict.path)


@change("uncapped", "block acceptance by a product that is not capped", "block")
def uncapped(rule: RatioRule, draft: Draft, p: np.ndarray, coins: Coins) -> Verdict:
    product, last = 1, len(draft) - 1
    for node in range(1, len(draft)):
        product *= p[node - 1][draft.tokens[node]] / probs_of(draft, node, p)[draft.tokens[node]]

    def accept(mass: float, whole: float, node: int) -> bool:
        return coins.accept(product if node == last else mass, whole, node)

    return verify_block(draft, p, ChangedCoins(accept, coins.draw))


@change("siblings", "all siblings are tested against the same distribution", "tree")
def siblings(rule: RatioRule, draft: Draft, p: np.ndarray, coins: Coins) -> Verdict:
    children, node = draft.children(), 0
    while True:
        rest = p[node]
        for child in children[node]:
            q = probs_of(draft, child, p)
            if coins.accept(p[node][draft.tokens[child]], q[draft.tokens[child]], child):
                node = child
                break
            rest = residual(p[node], q)
        else:
            path = draft.path_to(node)
            return Verdict([*(draft.tokens[i] for i in path[1:]), coins.draw(rest, node)], path)


@change(
    "lenient-match",
    "a token nearly as likely as the target's own is accepted",
    "match",
    kind=MatchFault,
)
def lenient_match(rule: RatioRule, draft: Draft, p: np.ndarray, coins: Coins) -> Verdict:
    children, path, tokens = draft.children(), [0], [coins.draw(p[0], 0)]
    while True:
        row = p[path[-1]]
        near = [c for c in children[path[-1]] if row[draft.tokens[c]] >= LENIENCE * row[tokens[-1]]]
        if not near:
            return Verdict(tokens, path)
        path.append(near[0])
        tokens[-1] = draft.tokens[near[0]]
        tokens.append(coins.draw(p[near[0]], near[0]))


@change("late-match", "the target draws with the row after the token", "match", kind=MatchFault)
def late_match(rule: RatioRule, draft: Draft, p: np.ndarray, coins: Coins) -> Verdict:
    def draw(weights: np.ndarray, node: int) -> int:
        late = min(node + 1, len(p) - 1)
        return coins.draw(p[late], late)

    return rule(draft, p, ChangedCoins(coins.accept, draw))


# Faults of the drafter: tokens were not drawn from the q that the rule receives.


def stored(function: Callable[[np.ndarray], np.ndarray]) -> Change:
    """Return a fault that stores a function of the distribution that tokens were drawn from."""

    def code(rule: RatioRule, draft: Draft, p: np.ndarray, coins: Coins) -> Verdict:
        if draft.probs is None:
            return rule(draft, p, coins)
        probs = [function(row.astype(float)) if row.sum() else row for row in draft.probs]
        return rule(replace(draft, probs=np.stack(probs)), p, coins)

    return code


@change("other-temperature", "drafts are drawn at a lower temperature than q", *RATIO_RULES)
@stored
def hotter(probs: np.ndarray) -> np.ndarray:
    return probs**LENIENCE / (probs**LENIENCE).sum()


@change("bfloat16-draw", "drafts are drawn in another precision than q", *RATIO_RULES)
@stored
def in_bfloat16(probs: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return torch.tensor(np.log(probs)).bfloat16().double().softmax(-1).numpy()


@change("truncated-probs", "q holds only the two most likely tokens", *RATIO_RULES)
@stored
def top2(probs: np.ndarray) -> np.ndarray:
    kept = np.where(probs >= np.sort(probs)[-2], probs, 0)
    return kept / kept.sum()


@change("dropped", "drafted tokens below 0.3 are dropped after they were drawn", *RATIO_RULES)
def unlikely_dropped(rule: RatioRule, draft: Draft, p: np.ndarray, coins: Coins) -> Verdict:
    """A chain is cut before its first such token, so its tokens are not drawn from q any more."""
    if draft.parents != list(range(-1, len(draft) - 1)):
        return rule(draft, p, coins)
    sampled = [n for n in range(1, len(draft)) if draft.proposals[n] is Proposal.SAMPLED]
    cut = next(
        (n for n in sampled if probs_of(draft, n, p)[draft.tokens[n]] < UNLIKELY), len(draft)
    )
    return rule(draft.first(cut - 1), p[:cut], coins)


# Faults of the random numbers.


@noise("shared-coins", "draft and coin share their random numbers", *RATIO_RULES)
class SharedCoins(Noise):
    def accept(self, p: float, q: float, node: int) -> bool:
        return rng.uniform(self.draft(node - 1)) * q < p
