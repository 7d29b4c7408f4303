"""What a rule is, the noise rules draw with, and what the ratio rules share.

`match` draws the target's own token at every node with noise keyed by seed and absolute position,
so its output is a function of (weights, prompt, parameters, seed) alone. The ratio rules toss coins
keyed by (seed, root position): each round commits at least one token, so no coin is ever used
twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from forerun import rng
from forerun.rng import Lane
from forerun.types import Draft, Proposal, Verdict


@dataclass(frozen=True, slots=True)
class Noise:
    """The noise of one request in one round.

    Attributes:
        seed: the request's seed.
        root: absolute position of the draft's root.
        source: which of several drafters draws. Drafters whose nodes are merged into one tree must
            draw independently: a rule takes every sampled node for a draw from its own q, whatever
                else stands in the tree.
    """

    seed: int
    root: int
    source: int = 0

    def target(self, depth: int) -> int:
        """The stream of the target's draw after a node at `depth`; a coupled drafter draws its
        children with it."""
        return rng.stream(self.seed, Lane.TARGET, self.root + depth + 1)

    def draft(self, node: int) -> int:
        """The stream of a drafter's own draw of a child of `node` in its own draft."""
        return rng.stream(
            self.seed, Lane.DRAFT, self.root, node, *([self.source] if self.source else [])
        )

    def accept(self, p: float, q: float, node: int) -> bool:
        """True with probability min(1, p / q); never where p is 0."""
        return rng.uniform(rng.stream(self.seed, Lane.ACCEPT, self.root, node)) * q < p

    def draw(self, weights: np.ndarray, node: int) -> int:
        """A token with probability proportional to its weight [V]; never one of weight 0."""
        total = np.cumsum(weights)
        u = rng.uniform(rng.stream(self.seed, Lane.RESIDUAL, self.root, node))
        return int(
            np.searchsorted(total, min(u * total[-1], np.nextafter(total[-1], 0)), side="right")
        )


class Coins(Protocol):
    """The part of `Noise` the ratio rules use; tests replace it by one that enumerates every
    outcome."""

    def accept(self, p: float, q: float, node: int) -> bool: ...
    def draw(self, weights: np.ndarray, node: int) -> int: ...


Verify = Callable[[Sequence[Draft], Tensor, Sequence[Noise]], list[Verdict]]
Follow = Callable[[Sequence[Draft], Sequence[int]], list[Verdict]]
RatioRule = Callable[[Draft, np.ndarray, Coins], Verdict]


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule and what drafting must know of it.

    coupled: drafters share the target's noise and every node is GIVEN; otherwise they sample and
        keep their law.
    branching: the draft may be a tree; otherwise a chain.
    lossy: the output is not the target's.
    follow: the same verdicts from the target's own tokens after every node, where a rule needs
        nothing else.
    """

    name: str
    verify: Verify
    coupled: bool = False
    branching: bool = False
    lossy: bool = False
    follow: Follow | None = None


def ratio(rule: RatioRule) -> Verify:
    """Run a rule on float64 probabilities, one request at a time."""

    def verify(drafts: Sequence[Draft], scores: Tensor, noises: Sequence[Noise]) -> list[Verdict]:
        laws = torch.split(scores.double().softmax(-1).cpu(), [len(draft) for draft in drafts])
        return [
            rule(draft, p.numpy(), noise)
            for draft, p, noise in zip(drafts, laws, noises, strict=True)
        ]

    return verify


def residual(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """[p - q]+, the unnormalised law after a rejection; p itself where rounding left nothing.
    [V]"""
    rest = np.maximum(p - q, 0)
    return rest if rest.sum() > 0 else p


def probs_of(draft: Draft, node: int, p: np.ndarray) -> np.ndarray:
    """q of `node` given everything drafted before it; one-hot where it is GIVEN, in the dtype of p
    [N, V]. [V]"""
    parent, token = draft.parents[node], draft.tokens[node]
    if draft.proposals[node] is Proposal.DETERMINISTIC:
        q: np.ndarray = np.zeros_like(p[parent])
        q[token] = 1
        return q
    assert draft.probs is not None, "a sampled node needs the law it was drawn from"
    q = draft.probs[parent]
    if draft.proposals[node] is Proposal.WITHOUT_REPLACEMENT:
        earlier = [
            i
            for i in range(1, node)
            if draft.parents[i] == parent and draft.proposals[i] is Proposal.WITHOUT_REPLACEMENT
        ]
        q = q.copy()
        q[[draft.tokens[i] for i in earlier]] = 0
        q = q / q.sum()
    assert q[token] > 0, "a drafter proposed a token its own law forbids"
    return q
