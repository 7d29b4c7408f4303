"""Generalised traversal verification: one recursion, exact for any mixture of children.

A node has the target's distribution, scaled by the mass with which its prefix is accepted. Each
child takes its share: if its subtree is accepted, done; if not, what it could have taken is
subtracted and the next sibling is tried. Children may be sampled with or without replacement or be
deterministic (n-gram, greedy); on a chain this is block verification, with children drawn without
replacement it is traversal verification (2505.12398). Sampled siblings should come before
deterministic ones. Preserves the target's distribution.
"""

import numpy as np

from forerun.types import Draft, Verdict
from forerun.verify.base import Coins, probs_of


def verify_tree(draft: Draft, p: np.ndarray, coins: Coins) -> Verdict:
    """Verify a tree. p [N, V]: the target's probabilities after each node."""
    children = draft.children()

    def visit(node: int, mass: float) -> tuple[int, int] | None:
        """Return (last node kept, token drawn after it), or None if the prefix that ends in `node`
        is rejected."""
        rest = mass * p[node]
        for child in children[node]:
            token = draft.tokens[child]
            q = probs_of(draft, child, p)
            accepted = visit(child, min(1, rest[token] / q[token]))
            if accepted:
                return accepted
            rest = np.maximum(rest - q, 0)
            left = rest.sum()
            whole = left + 1 - mass
            if whole > 0:
                rest = rest / whole
                mass = left / whole
        if node == 0 or coins.accept(mass, 1, node):
            return node, coins.draw(rest if rest.sum() > 0 else p[node], node)
        return None

    accepted = visit(0, 1)
    assert accepted is not None, "the root always accepts"
    node, drawn = accepted
    path = draft.path_to(node)
    return Verdict([*(draft.tokens[i] for i in path[1:]), drawn], path)
