"""Block verification on a chain (Sun et al. 2403.10444): the best rule for a single sampled path.

With rho_i = p(x_i) / q(x_i): pi_0 = 1, pi_i = min(1, pi_(i-1) rho_i) is the mass of the prefix
x_1..x_i; Z_i = sum [pi_i p_i - q_i]+; the longest prefix is kept with probability Z_i / (Z_i + 1 -
pi_i), tested from the end, and the token after it is drawn from [pi_i p_i - q_i]+. Never accepts
less than token-level rejection on average. Promises the target's distribution.
"""

import numpy as np

from forerun.types import Draft, Verdict
from forerun.verify.base import Coins, probs_of, residual


def verify_chain(draft: Draft, p: np.ndarray, coins: Coins) -> Verdict:
    """p [N, V]: the target's law after each node."""
    last = len(draft) - 1
    laws, mass = [], [1]  # laws[i] is q of node i + 1; mass[i] is pi_i
    for node in range(1, len(draft)):
        token, q = draft.tokens[node], probs_of(draft, node, p)
        laws.append(q)
        mass.append(min(1, mass[-1] * p[node - 1][token] / q[token]))
    if coins.accept(mass[last], 1, last):
        return Verdict([*draft.tokens[1:], coins.draw(p[last], last)], list(range(last + 1)))
    for node in range(last - 1, -1, -1):
        rest = np.maximum(mass[node] * p[node] - laws[node], 0).sum()
        whole = rest + 1 - mass[node]
        if node == 0 or coins.accept(rest, whole, node):
            break
    drawn = coins.draw(residual(mass[node] * p[node], laws[node]), node)
    return Verdict([*draft.tokens[1 : node + 1], drawn], list(range(node + 1)))
