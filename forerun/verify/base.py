"""Verification rules: their interface and their noise.

`match` draws the target's own token at every node with noise keyed by seed and absolute position,
so its output is a function of (weights, prompt, parameters, seed) alone. The ratio rules draw
random numbers keyed by (seed, root position): each step commits at least one token, so none is used
twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from torch import Tensor

from forerun import rng
from forerun.rng import Lane
from forerun.types import Draft, Verdict


@dataclass(frozen=True, slots=True)
class Noise:
    """The noise of one request in one step.

    Attributes:
        seed: the request's seed.
        root: absolute position of the draft's root.
        source: the number of the drafter that draws. Drafters whose nodes are merged into one tree
            must draw independently: a rule takes every sampled node for a draw from its own q,
            whatever else is in the tree.
    """

    seed: int
    root: int
    source: int = 0

    def target(self, depth: int) -> int:
        """Return the key of the target's draw after a node at `depth`; a coupled drafter draws its
        children with it."""
        return rng.stream(self.seed, Lane.TARGET, self.root + depth + 1)

    def draft(self, node: int) -> int:
        """Return the key of a drafter's own draw of a child of `node`."""
        source = [self.source] if self.source else []
        return rng.stream(self.seed, Lane.DRAFT, self.root, node, *source)

    def accept(self, p: float, q: float, node: int) -> bool:
        """Return True with probability min(1, p / q); never if p is 0."""
        return rng.uniform(rng.stream(self.seed, Lane.ACCEPT, self.root, node)) * q < p

    def draw(self, weights: np.ndarray, node: int) -> int:
        """Draw a token with probability proportional to its weight [V]; never one of weight 0."""
        total = np.cumsum(weights)
        u = rng.uniform(rng.stream(self.seed, Lane.RESIDUAL, self.root, node))
        position = min(u * total[-1], np.nextafter(total[-1], 0))
        return int(np.searchsorted(total, position, side="right"))


class Coins(Protocol):
    """The part of `Noise` that the ratio rules use; tests and `forerun check` pass an object that
    enumerates every outcome."""

    def accept(self, p: float, q: float, node: int) -> bool: ...
    def draw(self, weights: np.ndarray, node: int) -> int: ...


Verify: TypeAlias = Callable[[Sequence[Draft], Tensor, Sequence[Noise]], list[Verdict]]
Follow: TypeAlias = Callable[[Sequence[Draft], Sequence[int]], list[Verdict]]
RatioRule: TypeAlias = Callable[[Draft, np.ndarray, Coins], Verdict]


@dataclass(frozen=True, slots=True)
class Rule:
    """A verification rule.

    Attributes:
        name: what users call it.
        verify: returns one verdict per draft; scores [M, V] of the nodes of all drafts.
        coupled: drafters share the target's noise and all nodes are deterministic; otherwise they
            sample and keep their distributions.
        branching: drafts may be trees; otherwise they are chains.
        lossy: the output is not the target's.
        follow: returns the same verdicts from the target's own token after every node, if the rule
            needs nothing else.
    """

    name: str
    verify: Verify
    coupled: bool = False
    branching: bool = False
    lossy: bool = False
    follow: Follow | None = None
