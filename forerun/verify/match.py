"""The default rule: draw the target's own token at every node, and follow the child that equals it.

Sampling is an argmax of scores plus Gumbel noise keyed by seed and absolute position (Daliri et al. 2408.07978), and
plain decoding draws with the same noise. So the output is, token for token, what plain decoding would have said, at
any temperature and with any draft, tree or pruning: what was drafted decides only how far one pass gets.
"""

from collections.abc import Sequence

from torch import Tensor

from forerun.kernels.draw import gumbel_argmax
from forerun.types import Draft, Verdict
from forerun.verify.base import Noise


def verify(drafts: Sequence[Draft], scores: Tensor, noises: Sequence[Noise]) -> list[Verdict]:
    """One verdict a draft. scores [M, V]: the nodes of all drafts one after the other."""
    drawn = draw(drafts, scores, noises)
    verdicts, start = [], 0
    for draft in drafts:
        verdicts.append(follow(draft, drawn[start : start + len(draft)]))
        start += len(draft)
    return verdicts


def draw(drafts: Sequence[Draft], scores: Tensor, noises: Sequence[Noise]) -> list[int]:
    """The target's own token after every node. [M]"""
    keys = [n.target(depth) for draft, n in zip(drafts, noises, strict=True) for depth in draft.depths()]
    return gumbel_argmax(scores, keys).tolist()


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
