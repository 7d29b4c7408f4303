"""Typical acceptance (Medusa, 2401.10774): LOSSY. A drafted token is accepted if it is plausible.

x is accepted if p(x) > min(EPSILON, DELTA * exp(-entropy(p))); the deepest accepted path is kept.
The output is neither the target's tokens nor its distribution; the rule is here for comparison and
is never chosen by default.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.types import Draft, Verdict
from forerun.verify.base import Noise
from forerun.verify.match import draw

EPSILON = 0.09
DELTA = 0.3


def verify(drafts: Sequence[Draft], scores: Tensor, noises: Sequence[Noise]) -> list[Verdict]:
    """Return one verdict per draft. scores [M, V]: the nodes of all drafts one after the other."""
    p = scores.double().softmax(-1)
    entropy = torch.special.entr(p).sum(-1)
    floor = torch.clamp(DELTA * torch.exp(-entropy), max=EPSILON).tolist()
    drawn = draw(drafts, scores, noises)
    verdicts = []
    start = 0  # of the draft's rows
    for draft in drafts:
        accepted = [True]
        for node in range(1, len(draft)):
            parent = draft.parents[node]
            is_plausible = p[start + parent, draft.tokens[node]].item() > floor[start + parent]
            accepted.append(accepted[parent] and is_plausible)
        depths = draft.depths()
        nodes = [node for node, ok in enumerate(accepted) if ok]
        best = max(nodes, key=lambda node: (depths[node], -node))
        path = draft.path_to(best)
        verdicts.append(Verdict([*(draft.tokens[i] for i in path[1:]), drawn[start + best]], path))
        start += len(draft)
    return verdicts
