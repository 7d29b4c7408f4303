"""The code of mistakes that `faults` puts in: rules with a change, drafters that misstate their law, noise used twice.

Most were shipped by somebody. Sizes on random laws: mean total variation distances from 0.26 (a likeliest token called
sampled) down to 1e-4 (a draw in bfloat16).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from forerun import rng
from forerun.check.oracle import Children
from forerun.rng import Lane
from forerun.types import Draft, Law, Verdict
from forerun.verify import Noise, block, match
from forerun.verify.base import Coins, RatioRule, law_of, one_hot, residual

LENIENCE = 0.8
UNLIKELY = 0.3


# Mistakes with the coins.


class _Lenient:
    """Coins that accept a token although it is a little too unlikely."""

    def __init__(self, coins: Coins) -> None:
        self.draw, self._accept = coins.draw, coins.accept

    def accept(self, p: float, q: float, node: int) -> bool:
        return self._accept(p, LENIENCE * q, node)


class _NoResidual:
    """Coins that draw from the target's law after a rejection too."""

    def __init__(self, coins: Coins, p: np.ndarray) -> None:
        self.accept, self._draw, self._p = coins.accept, coins.draw, p

    def draw(self, weights: np.ndarray, node: int) -> int:
        return self._draw(self._p[node], node)


def lenient(rule: RatioRule) -> RatioRule:
    """Tokens are accepted although a little too unlikely."""
    return lambda draft, p, coins: rule(draft, p, _Lenient(coins))


def no_residual(rule: RatioRule) -> RatioRule:
    """After a rejection the token is drawn from the target's whole law."""
    return lambda draft, p, coins: rule(draft, p, _NoResidual(coins, p))


# Mistakes in the rule.


def lenient_match(rule: RatioRule) -> RatioRule:
    """Follow a child that the target finds nearly as likely as its own draw."""

    def follow(draft: Draft, p: np.ndarray, coins: Coins) -> Verdict:
        children, path, tokens = draft.children(), [0], [coins.draw(p[0], 0)]
        while True:
            law = p[path[-1]]
            near = [c for c in children[path[-1]] if law[draft.tokens[c]] >= LENIENCE * law[tokens[-1]]]
            if not near:
                return Verdict(tokens, path)
            path.append(near[0])
            tokens[-1] = draft.tokens[near[0]]
            tokens.append(coins.draw(p[near[0]], near[0]))

    return follow


def late_match(rule: RatioRule) -> RatioRule:
    """Draw with the row after the token that is to be checked."""

    class Late:
        def __init__(self, p: np.ndarray, coins: Coins) -> None:
            self.p, self.coins = p, coins

        def __getitem__(self, node: int) -> int:
            late = min(node + 1, len(self.p) - 1)
            return self.coins.draw(self.p[late], late)

    return lambda draft, p, coins: match.follow(draft, Late(p, coins))  # type: ignore[arg-type]


def rows_late(rule: RatioRule) -> RatioRule:
    """Each token tested with the law after it."""
    return lambda draft, p, coins: rule(draft, np.concatenate([p[1:], p[-1:]]), coins)


def independent_match(rule: RatioRule) -> RatioRule:
    """Accept if an independent draw of the target gives the same token, else draw from the residual."""

    def verify(draft: Draft, p: np.ndarray, coins: Coins) -> Verdict:
        for node in range(1, len(draft)):
            if coins.draw(p[node - 1], node - 1) != draft.tokens[node]:
                rest = residual(p[node - 1], _law(draft, node, p))
                return Verdict([*draft.tokens[1:node], coins.draw(rest, node + len(draft))], list(range(node)))
        last = len(draft) - 1
        return Verdict([*draft.tokens[1:], coins.draw(p[last], last)], list(range(len(draft))))

    return verify


def skipped_rejection(rule: RatioRule) -> RatioRule:
    """Accept the deepest token that passes its own test, whatever came before it."""

    def verify(draft: Draft, p: np.ndarray, coins: Coins) -> Verdict:
        laws = [_law(draft, node, p) for node in range(1, len(draft))]
        tests = [(p[i][draft.tokens[i + 1]], q[draft.tokens[i + 1]]) for i, q in enumerate(laws)]
        last = max((i + 1 for i, (a, b) in enumerate(tests) if coins.accept(a, b, i + 1)), default=0)
        law = p[last] if last == len(draft) - 1 else residual(p[last], laws[last])
        return Verdict([*draft.tokens[1 : last + 1], coins.draw(law, last)], list(range(last + 1)))

    return verify


def residual_of_token(rule: RatioRule) -> RatioRule:
    """Block acceptance, but the token after it drawn as token-level rejection would."""

    def verify(draft: Draft, p: np.ndarray, coins: Coins) -> Verdict:
        verdict = block.verify_chain(draft, p, coins)
        last = len(verdict.path) - 1
        if last == len(draft) - 1:
            return verdict
        rest = residual(p[last], _law(draft, last + 1, p))
        return Verdict([*verdict.tokens[:-1], coins.draw(rest, last + len(draft))], verdict.path)

    return verify


def uncapped(rule: RatioRule) -> RatioRule:
    """Block verification that accepts the whole draft by the plain product of ratios, not capped at 1 on the way."""

    def verify(draft: Draft, p: np.ndarray, coins: Coins) -> Verdict:
        product, last = 1, len(draft) - 1
        for node in range(1, len(draft)):
            product *= p[node - 1][draft.tokens[node]] / _law(draft, node, p)[draft.tokens[node]]

        class Uncapped:
            draw = staticmethod(coins.draw)

            def accept(self, mass: float, whole: float, node: int) -> bool:
                return coins.accept(product if node == last else mass, whole, node)

        return block.verify_chain(draft, p, Uncapped())

    return verify


def one_law_for_siblings(rule: RatioRule) -> RatioRule:
    """Each sibling tested against the whole law: what the ones before it could have taken is not subtracted."""

    def verify(draft: Draft, p: np.ndarray, coins: Coins) -> Verdict:
        children, node = draft.children(), 0
        while True:
            rest = p[node]
            for child in children[node]:
                q = _law(draft, child, p)
                if coins.accept(p[node][draft.tokens[child]], q[draft.tokens[child]], child):
                    node = child
                    break
                rest = residual(p[node], q)
            else:
                path = draft.path_to(node)
                return Verdict([*(draft.tokens[i] for i in path[1:]), coins.draw(rest, node)], path)

    return verify


def _law(draft: Draft, node: int, p: np.ndarray) -> np.ndarray:
    """q of a node, one-hot rows written out. [V]"""
    q = law_of(draft, node)
    return one_hot(draft.tokens[node], p[draft.parents[node]]) if q is None else q


# Mistakes of the drafter, as the rule sees them: what was drawn is not what q says.


def other_law(stored: Callable[[np.ndarray], np.ndarray]) -> Callable[[RatioRule], RatioRule]:
    """The law that is stored is a function of the one that was drawn from."""

    def change(rule: RatioRule) -> RatioRule:
        def verify(draft: Draft, p: np.ndarray, coins: Coins) -> Verdict:
            if draft.probs is None:
                return rule(draft, p, coins)
            laws = [stored(law.astype(float)) if law.sum() else law for law in draft.probs]
            return rule(replace(draft, probs=np.stack(laws)), p, coins)

        return verify

    return change


def hotter(law: np.ndarray) -> np.ndarray:
    """The law at another temperature. [V]"""
    law = law**LENIENCE
    law = law / law.sum()
    return law


def in_bfloat16(law: np.ndarray) -> np.ndarray:
    """The law of scores that were rounded. [V]"""
    with np.errstate(divide="ignore"):
        scores = torch.tensor(np.log(law)).bfloat16().double()
    rounded: np.ndarray = scores.softmax(-1).numpy()
    return rounded


def top2(law: np.ndarray) -> np.ndarray:
    """The two likeliest tokens alone. [V]"""
    kept: np.ndarray = np.where(law >= np.sort(law)[-2], law, 0)
    law = kept / kept.sum()
    return law


def unlikely_dropped(rule: RatioRule) -> RatioRule:
    """A chain cut before its first sampled token that the drafter finds unlikely: its law is no longer q."""

    def verify(draft: Draft, p: np.ndarray, coins: Coins) -> Verdict:
        if draft.parents != list(range(-1, len(draft) - 1)):
            return rule(draft, p, coins)
        sampled = [n for n in range(1, len(draft)) if draft.laws[n] is Law.SAMPLED]
        cut = next((n for n in sampled if _law(draft, n, p)[draft.tokens[n]] < UNLIKELY), len(draft))
        short = Draft(draft.tokens[:cut], draft.parents[:cut], draft.sources[:cut], draft.laws[:cut], draft.probs)
        return rule(short, p[:cut], coins)

    return verify


def greedy_called_sampled(draft: Draft, node: int, q: np.ndarray) -> list[Children]:
    """The likeliest token, said to be drawn from q."""
    return [([(int(np.argmax(q)), Law.SAMPLED)], q, 1)]


# Mistakes with the noise: coin by coin the rule is right.


class SharedRecovery(Noise):
    """Gumbel noise of the draft used again for the token after a rejection."""

    def draw(self, weights: np.ndarray, node: int) -> int:
        with np.errstate(divide="ignore"):
            scores = torch.tensor(np.log(np.asarray(weights, dtype=float)))
        return int(rng.gumbel_argmax(scores[None], [self.draft(node)]))


class SharedCoins(Noise):
    """The draft's stream used again for its coin."""

    def accept(self, p: float, q: float, node: int) -> bool:
        return rng.uniform(self.draft(node - 1)) * q < p


class NoiseByRound(Noise):
    """Noise of the round and the depth within it, not of the position in the text."""

    def target(self, depth: int) -> int:
        return rng.stream(self.seed, Lane.TARGET, self.root, depth + 1)
