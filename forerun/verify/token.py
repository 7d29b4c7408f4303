"""Token-level rejection sampling on a chain (Leviathan et al. 2211.17192; Chen et al. 2302.01318).

Accept x with probability min(1, p(x) / q(x)); at the first rejection draw from [p - q]+; after the
last node, from p. Preserves the target's distribution.
"""

import numpy as np

from forerun.types import Draft, Verdict
from forerun.verify.base import Coins, probs_of, residual


def verify_chain(draft: Draft, p: np.ndarray, coins: Coins) -> Verdict:
    """Verify a chain. p [N, V]: the target's probabilities after each node."""
    last = len(draft) - 1
    for node in range(1, len(draft)):
        token = draft.tokens[node]
        target = p[node - 1]
        q = probs_of(draft, node, p)
        if not coins.accept(target[token], q[token], node):
            drawn = coins.draw(residual(target, q), node - 1)
            return Verdict([*draft.tokens[1:node], drawn], list(range(node)))
    return Verdict([*draft.tokens[1:], coins.draw(p[last], last)], list(range(len(draft))))
