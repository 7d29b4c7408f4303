"""Token-level rejection sampling on a chain (Leviathan et al. 2211.17192; Chen et al. 2302.01318).

Accept x with probability min(1, p(x) / q(x)); at the first rejection draw from [p - q]+; after the
last node, from p. Promises the target's distribution.
"""

import numpy as np

from forerun.types import Draft, Verdict
from forerun.verify.base import Coins, probs_of, residual


def verify_chain(draft: Draft, p: np.ndarray, coins: Coins) -> Verdict:
    """p [N, V]: the target's law after each node."""
    for node in range(1, len(draft)):
        token, law, q = draft.tokens[node], p[node - 1], probs_of(draft, node, p)
        if not coins.accept(law[token], q[token], node):
            drawn = coins.draw(residual(law, q), node - 1)
            return Verdict([*draft.tokens[1:node], drawn], list(range(node)))
    last = len(draft) - 1
    return Verdict([*draft.tokens[1:], coins.draw(p[last], last)], list(range(len(draft))))
