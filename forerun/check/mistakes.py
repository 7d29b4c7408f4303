"""Faults put in on purpose: a check that passes them proves nothing.

A fault is a change of the rule's code, of what a drafter says it did (as the rule sees it, so that
it can be put into a running engine too), of a way to draft, or of the noise. Most were shipped by
somebody. Sizes on random laws: mean total variation distances from 0.26 (a likeliest token called
sampled) down to 1e-4 (a draw in bfloat16)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from forerun import rng
from forerun.check.oracle import Children, Scheme
from forerun.check.rules import ENUMERABLE
from forerun.rng import Lane
from forerun.types import Draft, Proposal, Verdict
from forerun.verify import RULES, Noise, Rule, block, match
from forerun.verify.base import Coins, RatioRule, Verify, probs_of, ratio, residual

LENIENCE = 0.8
UNLIKELY = 0.3
RATIO = ("token", "block", "tree")
Change = Callable[[RatioRule, Draft, np.ndarray, Coins], Verdict]  # what runs in place of a rule
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Fault:
    """One mistake.

    Attributes:
        name: what `--inject` calls it.
        what: the mistake in one line.
        rules: the rules it can be made in.
        change: a rule's code with the mistake in it; None where the mistake is elsewhere.
        scheme: a way to draft on toy models that makes the mistake.
        noise: noise that makes it.
    """

    name: str
    what: str
    rules: tuple[str, ...]
    change: Change | None = None
    scheme: Scheme | None = None
    noise: type[Noise] = Noise

    def code(self, rule: str) -> RatioRule:
        """The code of `rule` with the mistake in it."""
        if self.change is None or rule not in self.rules:
            return ENUMERABLE[rule]
        return partial(self.change, ENUMERABLE[rule])

    def rule(self, name: str) -> Rule:
        """The rule `name` for an engine, with the mistake in it."""
        if name not in self.rules or (self.change is None and self.noise is Noise):
            return RULES[name]
        code = self.code(name)
        verify = by_draws(code) if name == "match" else ratio(code)
        return replace(RULES[name], verify=_with_noise(verify, self.noise), follow=None)


def by_draws(rule: RatioRule) -> Verify:
    """A rule that follows the target's own draws, for an engine: its coins are the draws of the
    match rule."""

    def verify(drafts: Sequence[Draft], scores: Tensor, noises: Sequence[Noise]) -> list[Verdict]:
        drawn = iter(match.draw(drafts, scores, noises))
        known = [_Known(list(islice(drawn, len(draft)))) for draft in drafts]
        return ratio(rule)(drafts, scores, known)  # type: ignore[arg-type]

    return verify


class _Known:
    """Draws that are made already."""

    def __init__(self, drawn: Sequence[int]) -> None:
        self._drawn = drawn

    def draw(self, weights: np.ndarray, node: int) -> int:
        return self._drawn[node]

    def accept(self, p: float, q: float, node: int) -> bool:
        raise NotImplementedError("the match rule tosses no coins")


def _with_noise(verify: Verify, noise: type[Noise]) -> Verify:
    return lambda drafts, scores, noises: verify(
        drafts, scores, [noise(n.seed, n.root) for n in noises]
    )


FAULTS: dict[str, Fault] = {}


def _fault(name: str, what: str, *rules: str, part: str = "change") -> Callable[[T], T]:
    """Enter what is behind this among the faults, as that part of a `Fault`."""

    def enter(made: T) -> T:
        parts: dict[str, Any] = {part: made}
        FAULTS[name] = Fault(name, what, rules, **parts)
        return made

    return enter


# Mistakes with the coins.


class _Coins(NamedTuple):
    """Coins of which one part is another."""

    accept: Callable[[float, float, int], bool]
    draw: Callable[[np.ndarray, int], int]


@_fault("lenient", "tokens are accepted although 1.25 times too unlikely", *RATIO)
def _lenient(rule: RatioRule, draft: Draft, p: np.ndarray, coins: Coins) -> Verdict:
    return rule(
        draft, p, _Coins(lambda a, q, node: coins.accept(a, LENIENCE * q, node), coins.draw)
    )


@_fault("no-residual", "after a rejection the token is drawn from the target's whole law", *RATIO)
def _no_residual(rule: RatioRule, draft: Draft, p: np.ndarray, coins: Coins) -> Verdict:
    return rule(draft, p, _Coins(coins.accept, lambda weights, node: coins.draw(p[node], node)))


# Mistakes in the rule.


@_fault("rows-late", "each token is tested with the law after it", *RATIO)
def _rows_late(rule: RatioRule, draft: Draft, p: np.ndarray, coins: Coins) -> Verdict:
    return rule(draft, np.concatenate([p[1:], p[-1:]]), coins)


@_fault("independent-match", "accepted if another draw of the target is equal", "token")
def _independent_match(rule: RatioRule, draft: Draft, p: np.ndarray, coins: Coins) -> Verdict:
    for node in range(1, len(draft)):
        if coins.draw(p[node - 1], node - 1) != draft.tokens[node]:
            rest = residual(p[node - 1], probs_of(draft, node, p))
            return Verdict(
                [*draft.tokens[1:node], coins.draw(rest, node + len(draft))], list(range(node))
            )
    last = len(draft) - 1
    return Verdict([*draft.tokens[1:], coins.draw(p[last], last)], list(range(len(draft))))


@_fault("skipped-rejection", "a token is accepted behind a rejected one", "token")
def _skipped_rejection(rule: RatioRule, draft: Draft, p: np.ndarray, coins: Coins) -> Verdict:
    laws = [probs_of(draft, node, p) for node in range(1, len(draft))]
    tests = [(p[i][draft.tokens[i + 1]], q[draft.tokens[i + 1]]) for i, q in enumerate(laws)]
    last = max((i + 1 for i, (a, b) in enumerate(tests) if coins.accept(a, b, i + 1)), default=0)
    law = p[last] if last == len(draft) - 1 else residual(p[last], laws[last])
    return Verdict([*draft.tokens[1 : last + 1], coins.draw(law, last)], list(range(last + 1)))


@_fault("token-residual", "block acceptance with the residual of token rejection", "block")
def _residual_of_token(rule: RatioRule, draft: Draft, p: np.ndarray, coins: Coins) -> Verdict:
    verdict = block.verify_chain(draft, p, coins)
    last = len(verdict.path) - 1
    if last == len(draft) - 1:
        return verdict
    rest = residual(p[last], probs_of(draft, last + 1, p))
    return Verdict([*verdict.tokens[:-1], coins.draw(rest, last + len(draft))], verdict.path)


@_fault("uncapped", "block acceptance by a product that is not capped", "block")
def _uncapped(rule: RatioRule, draft: Draft, p: np.ndarray, coins: Coins) -> Verdict:
    product, last = 1, len(draft) - 1
    for node in range(1, len(draft)):
        product *= p[node - 1][draft.tokens[node]] / probs_of(draft, node, p)[draft.tokens[node]]

    def accept(mass: float, whole: float, node: int) -> bool:
        return coins.accept(product if node == last else mass, whole, node)

    return block.verify_chain(draft, p, _Coins(accept, coins.draw))


@_fault("siblings", "siblings are tested against one and the same law", "tree")
def _one_law_for_siblings(rule: RatioRule, draft: Draft, p: np.ndarray, coins: Coins) -> Verdict:
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


# Mistakes of the drafter, as the rule sees them: what was drawn is not what q says.


def _stored(stored: Callable[[np.ndarray], np.ndarray]) -> Change:
    """The law that is stored is a function of the one that was drawn from."""

    def change(rule: RatioRule, draft: Draft, p: np.ndarray, coins: Coins) -> Verdict:
        if draft.probs is None:
            return rule(draft, p, coins)
        laws = [stored(law.astype(float)) if law.sum() else law for law in draft.probs]
        return rule(replace(draft, probs=np.stack(laws)), p, coins)

    return change


@_fault("other-temperature", "drafts are drawn colder than their law says", *RATIO)
@_stored
def _hotter(law: np.ndarray) -> np.ndarray:
    law = law**LENIENCE
    law = law / law.sum()
    return law


@_fault("bfloat16-draw", "drafts are drawn in another precision than tested", *RATIO)
@_stored
def _in_bfloat16(law: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        scores = torch.tensor(np.log(law)).bfloat16().double()
    rounded: np.ndarray = scores.softmax(-1).numpy()
    return rounded


@_fault("truncated-law", "the law of a draft is stored as its two likeliest tokens", *RATIO)
@_stored
def _top2(law: np.ndarray) -> np.ndarray:
    kept: np.ndarray = np.where(law >= np.sort(law)[-2], law, 0)
    law = kept / kept.sum()
    return law


@_fault("dropped", "drafted tokens below 0.3 are dropped after they were drawn", *RATIO)
def _unlikely_dropped(rule: RatioRule, draft: Draft, p: np.ndarray, coins: Coins) -> Verdict:
    """A chain is cut before its first such token, so that its law is no longer q."""
    if draft.parents != list(range(-1, len(draft) - 1)):
        return rule(draft, p, coins)
    sampled = [n for n in range(1, len(draft)) if draft.proposals[n] is Proposal.SAMPLED]
    cut = next(
        (n for n in sampled if probs_of(draft, n, p)[draft.tokens[n]] < UNLIKELY), len(draft)
    )
    return rule(draft.first(cut - 1), p[:cut], coins)


@_fault("greedy-as-sampled", "a likeliest token is called sampled", *RATIO, part="scheme")
def _greedy_called_sampled(draft: Draft, node: int, q: np.ndarray) -> list[Children]:
    return [([(int(np.argmax(q)), Proposal.SAMPLED)], q, 1)]


# Mistakes with the noise: coin by coin the rule is right.


@_fault("shared-recovery", "draft and residual share their noise", *RATIO, part="noise")
class _SharedRecovery(Noise):
    """Gumbel noise of the draft used again for the token after a rejection."""

    def draw(self, weights: np.ndarray, node: int) -> int:
        with np.errstate(divide="ignore"):
            scores = torch.tensor(np.log(np.asarray(weights, dtype=float)))
        return int(rng.gumbel_argmax(scores[None], [self.draft(node)]))


@_fault("shared-coins", "draft and coin share their noise", *RATIO, part="noise")
class _SharedCoins(Noise):
    def accept(self, p: float, q: float, node: int) -> bool:
        return rng.uniform(self.draft(node - 1)) * q < p


@_fault("shared-sources", "two drafters of one tree share their noise", "tree", part="noise")
class _SharedSources(Noise):
    def draft(self, node: int) -> int:
        return Noise(self.seed, self.root).draft(node)


# Mistakes in following the target's own draws.


@_fault("lenient-match", "a token nearly as likely as the target's own is accepted", "match")
def _lenient_match(rule: RatioRule, draft: Draft, p: np.ndarray, coins: Coins) -> Verdict:
    children, path, tokens = draft.children(), [0], [coins.draw(p[0], 0)]
    while True:
        law = p[path[-1]]
        near = [c for c in children[path[-1]] if law[draft.tokens[c]] >= LENIENCE * law[tokens[-1]]]
        if not near:
            return Verdict(tokens, path)
        path.append(near[0])
        tokens[-1] = draft.tokens[near[0]]
        tokens.append(coins.draw(p[near[0]], near[0]))


@_fault("late-match", "the target draws with the row after the token", "match")
def _late_match(rule: RatioRule, draft: Draft, p: np.ndarray, coins: Coins) -> Verdict:
    def draw(weights: np.ndarray, node: int) -> int:
        late = min(node + 1, len(p) - 1)
        return coins.draw(p[late], late)

    return rule(draft, p, _Coins(coins.accept, draw))


@_fault("noise-by-round", "the noise depends on where a round begins", "match", part="noise")
class _NoiseByRound(Noise):
    """Noise of the round and the depth within it, not of the position in the text."""

    def target(self, depth: int) -> int:
        return rng.stream(self.seed, Lane.TARGET, self.root, depth + 1)
