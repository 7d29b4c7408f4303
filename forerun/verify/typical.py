"""Typical acceptance (Medusa, 2401.10774): LOSSY. A drafted token passes if the target finds it
plausible enough.

x passes where p(x) > min(EPSILON, DELTA * exp(-entropy(p))); the deepest passing path is kept. The
output is neither the target's tokens nor its distribution; it is here for comparison and is never
chosen by default."""

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.types import Draft, Verdict
from forerun.verify.base import Noise
from forerun.verify.match import draw

EPSILON, DELTA = 0.09, 0.3


def verify(drafts: Sequence[Draft], scores: Tensor, noises: Sequence[Noise]) -> list[Verdict]:
    """One verdict a draft. scores [M, V]: the nodes of all drafts one after the other."""
    p = scores.double().softmax(-1)
    entropy = torch.special.entr(p).sum(-1)
    floor = torch.clamp(DELTA * torch.exp(-entropy), max=EPSILON).tolist()
    drawn = draw(drafts, scores, noises)
    verdicts, start = [], 0
    for draft in drafts:
        passed, depths = [True], draft.depths()
        for node in range(1, len(draft)):
            parent = draft.parents[node]
            plausible = p[start + parent, draft.tokens[node]].item() > floor[start + parent]
            passed.append(passed[parent] and plausible)
        best = max((i for i, ok in enumerate(passed) if ok), key=lambda i: (depths[i], -i))
        path = draft.path_to(best)
        verdicts.append(Verdict([*(draft.tokens[i] for i in path[1:]), drawn[start + best]], path))
        start += len(draft)
    return verdicts
