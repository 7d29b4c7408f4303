"""The ratio rules `token`, `block` and `tree`: accept a token by the ratio of p, the target's
probability, to q, the drafter's.

They run on float64 probabilities, one request at a time, and preserve the target's distribution.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from forerun.types import Draft, Proposal, Verdict
from forerun.verify.base import Coins, Noise, RatioRule, Verify


def ratio_rule(rule: RatioRule) -> Verify:
    """Return a rule that runs on float64 probabilities, one request at a time."""

    def verify(drafts: Sequence[Draft], scores: Tensor, noises: Sequence[Noise]) -> list[Verdict]:
        probs = torch.split(scores.double().softmax(-1).cpu(), [len(draft) for draft in drafts])
        return [
            rule(draft, p.numpy(), noise)
            for draft, p, noise in zip(drafts, probs, noises, strict=True)
        ]

    return verify


def residual(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Return [p - q]+ [V], unnormalised; p if rounding left nothing."""
    rest = np.maximum(p - q, 0)
    return rest if rest.sum() > 0 else p


def probs_of(draft: Draft, node: int, p: np.ndarray) -> np.ndarray:
    """Return q [V] of a node given everything drafted before it: one-hot if it is deterministic.

    p [N, V]: the target's probabilities; q has its dtype then.
    """
    parent, token = draft.parents[node], draft.tokens[node]
    if draft.proposals[node] is Proposal.DETERMINISTIC:
        one_hot: np.ndarray = np.zeros_like(p[parent])
        one_hot[token] = 1
        return one_hot
    assert draft.probs is not None, "a sampled node needs the distribution it was drawn from"
    q: np.ndarray = draft.probs[parent]
    if draft.proposals[node] is Proposal.WITHOUT_REPLACEMENT:
        q = q.copy()
        for i in range(1, node):
            is_earlier = draft.proposals[i] is Proposal.WITHOUT_REPLACEMENT
            if is_earlier and draft.parents[i] == parent:
                q[draft.tokens[i]] = 0
        q /= q.sum()
    assert q[token] > 0, "a drafter proposed a token to which it gives no probability"
    return q


def verify_token(draft: Draft, p: np.ndarray, coins: Coins) -> Verdict:
    """Verify a chain token by token: rejection sampling (Leviathan et al. 2211.17192; Chen et al.
    2302.01318).

    Accept x with probability min(1, p(x) / q(x)); at the first rejection draw from [p - q]+; after
    the last node, from p.

    p [N, V]: the target's probabilities after each node.
    """
    last = len(draft) - 1
    for node in range(1, len(draft)):
        token = draft.tokens[node]
        target = p[node - 1]
        q = probs_of(draft, node, p)
        if not coins.accept(target[token], q[token], node):
            drawn = coins.draw(residual(target, q), node - 1)
            return Verdict([*draft.tokens[1:node], drawn], list(range(node)))
    return Verdict([*draft.tokens[1:], coins.draw(p[last], last)], list(range(len(draft))))


def verify_block(draft: Draft, p: np.ndarray, coins: Coins) -> Verdict:
    """Verify a chain as a block (Sun et al. 2403.10444): the best rule for a single sampled path.

    With rho_i = p(x_i) / q(x_i): pi_0 = 1, pi_i = min(1, pi_(i-1) rho_i) is the mass of the prefix
    x_1..x_i; Z_i = sum [pi_i p_i - q_i]+; the longest prefix is kept with probability Z_i / (Z_i +
    1 - pi_i), tested from the end, and the token after it is drawn from [pi_i p_i - q_i]+. On
    average it accepts at least as much as token-level rejection.

    p [N, V]: the target's probabilities after each node.
    """
    last = len(draft) - 1
    q = [probs_of(draft, node, p) for node in range(1, len(draft))]  # q[i] is of node i + 1
    mass = [1]  # mass[i] is pi_i
    for node in range(1, len(draft)):
        token = draft.tokens[node]
        mass.append(min(1, mass[-1] * p[node - 1][token] / q[node - 1][token]))
    if coins.accept(mass[last], 1, last):
        return Verdict([*draft.tokens[1:], coins.draw(p[last], last)], list(range(last + 1)))
    for node in range(last - 1, -1, -1):
        rest = np.maximum(mass[node] * p[node] - q[node], 0).sum()
        if node == 0 or coins.accept(rest, rest + 1 - mass[node], node):
            break
    drawn = coins.draw(residual(mass[node] * p[node], q[node]), node)
    return Verdict([*draft.tokens[1 : node + 1], drawn], list(range(node + 1)))


def verify_tree(draft: Draft, p: np.ndarray, coins: Coins) -> Verdict:
    """Verify a tree by generalised traversal: one recursion, exact for any mixture of children.

    A node has the target's distribution, scaled by the mass with which its prefix is accepted. Each
    child takes its share: if its subtree is accepted, done; if not, what it could have taken is
    subtracted and the next sibling is tried. Children may be sampled with or without replacement or
    be deterministic (n-gram, greedy); on a chain this is block verification, with children drawn
    without replacement it is traversal verification (2505.12398). Sampled siblings should come
    before deterministic ones.

    p [N, V]: the target's probabilities after each node.
    """
    children = draft.children()

    def visit(node: int, mass: float) -> tuple[int, int] | None:
        """Return (last node kept, token drawn after it); None if the node's prefix is rejected."""
        rest = mass * p[node]
        for child in children[node]:
            token = draft.tokens[child]
            q = probs_of(draft, child, p)
            accepted = visit(child, min(1, rest[token] / q[token]))
            if accepted:
                return accepted
            rest = np.maximum(rest - q, 0)
            left = rest.sum()
            total = left + 1 - mass
            if total > 0:
                rest = rest / total
                mass = left / total
        if node == 0 or coins.accept(mass, 1, node):
            return node, coins.draw(rest if rest.sum() > 0 else p[node], node)
        return None

    accepted = visit(0, 1)
    assert accepted is not None, "the root always accepts"
    node, drawn = accepted
    path = draft.path_to(node)
    return Verdict([*(draft.tokens[i] for i in path[1:]), drawn], path)
