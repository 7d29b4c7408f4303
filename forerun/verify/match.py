"""The default rule: draw the target's own token at every node, and follow the child that equals it.

Sampling is an argmax of scores plus Gumbel noise keyed by seed and absolute position (Daliri et al.
2408.07978), and plain decoding draws with the same noise. So the output is, token for token, that
of plain decoding, at any temperature and with any draft, tree or pruning: the draft decides only
how far one forward pass gets.
"""

from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from forerun.kernels.draw import gumbel_argmax
from forerun.types import Draft, Verdict
from forerun.verify.base import Noise

EPSILON = 0.09
DELTA = 0.3


def verify(drafts: Sequence[Draft], scores: Tensor, noises: Sequence[Noise]) -> list[Verdict]:
    """Return one verdict per draft. scores [M, V]: the nodes of all drafts one after the other."""
    return follow_all(drafts, draw(drafts, scores, noises))


def draw(drafts: Sequence[Draft], scores: Tensor, noises: Sequence[Noise]) -> list[int]:
    """Return the target's own token after every node. [M]"""
    return gumbel_argmax(scores, streams(drafts, noises)).tolist()


def streams(drafts: Sequence[Draft], noises: Sequence[Noise]) -> list[int]:
    """Return the key of the target's noise after every node. [M]"""
    return [
        noise.target(depth)
        for draft, noise in zip(drafts, noises, strict=True)
        for depth in draft.depths()
    ]


def follow_all(drafts: Sequence[Draft], drawn: Sequence[int]) -> list[Verdict]:
    """Return one verdict per draft, from the target's own tokens [M]."""
    tokens = iter(drawn)
    return [follow(draft, list(islice(tokens, len(draft)))) for draft in drafts]


def follow(draft: Draft, drawn: Sequence[int]) -> Verdict:
    """Walk from the root through children that equal the target's draw."""
    children = draft.children()
    path, tokens = [0], [drawn[0]]
    while True:
        hits = [child for child in children[path[-1]] if draft.tokens[child] == tokens[-1]]
        if not hits:
            return Verdict(tokens, path)
        path.append(hits[0])
        tokens.append(drawn[hits[0]])


def verify_typical(
    drafts: Sequence[Draft], scores: Tensor, noises: Sequence[Noise]
) -> list[Verdict]:
    """Verify by typical acceptance (Medusa, 2401.10774), which is LOSSY: accept what is plausible.

    x is accepted if p(x) > min(EPSILON, DELTA * exp(-entropy(p))); the deepest accepted path is
    kept. The output is neither the target's tokens nor its distribution; the rule is here for
    comparison and is never chosen by default.
    """
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
