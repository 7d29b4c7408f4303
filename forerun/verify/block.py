"""Block verification of a chain (Sun et al. 2403.10444): the best rule for a single sampled path.

With rho_i = p(x_i) / q(x_i): pi_0 = 1, pi_i = min(1, pi_(i-1) rho_i) is the mass of the prefix
x_1..x_i; Z_i = sum [pi_i p_i - q_i]+; the longest prefix is kept with probability Z_i / (Z_i + 1 -
pi_i), tested from the end, and the token after it is drawn from [pi_i p_i - q_i]+. On average it
accepts at least as much as token-level rejection. Preserves the target's distribution.
"""

import numpy as np

from forerun.types import Draft, Verdict
from forerun.verify.base import Coins, probs_of, residual


def verify_chain(draft: Draft, p: np.ndarray, coins: Coins) -> Verdict:
    """Verify a chain. p [N, V]: the target's probabilities after each node."""
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
