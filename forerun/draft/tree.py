"""Drafts under construction, a level at a time: from a drafter's laws to nodes, as the rule wants them drawn.

Under a coupled rule tokens are drawn with the target's own noise, so they agree about as often as the two laws overlap;
at width n the n likeliest paths of a beam are kept. Under the ratio rules a chain is sampled and its law kept; `tree`
has the width - 1 likeliest other tokens beside each sampled one (greedy + 1, 2502.18779).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from forerun import rng
from forerun.draft.base import Row
from forerun.kernels.draw import gumbel_argmax
from forerun.sampling.filters import shape_logits
from forerun.types import Draft, Law


@dataclass(slots=True)
class Tree:
    """A draft under construction.

    `frontier` are the nodes to expand next, `values` how likely their paths are. `fed` is how many nodes a drafter with
    a cache has read: the root comes with its lag and, like them, is not committed.
    """

    row: Row
    draft: Draft = field(init=False)
    frontier: list[int] = field(default_factory=lambda: [0])
    values: list[float] = field(default_factory=lambda: [0.0])
    fed: int = 1
    laws: dict[int, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.draft = Draft.root(self.row.tokens[-1])

    def finish(self, vocab: int) -> Draft:
        """The draft, with the laws its sampled nodes were drawn from."""
        if self.laws:
            zero = np.zeros(vocab)
            self.draft.probs = np.stack([self.laws.get(i, zero) for i in range(len(self.draft))])
        return self.draft


def grow(trees: Sequence[Tree], logits: Tensor, width: int, source: str) -> None:
    """Add one level of at most `width` nodes below every frontier; `source` is what statistics call them.

    logits [F, V]: the drafter's after each frontier node, the trees one after the other.
    """
    shaped = shape_logits(logits, [tree.row.params for tree in trees for _ in tree.frontier])
    start = 0
    for tree in trees:
        end = start + len(tree.frontier)
        if tree.row.coupled:
            greedy = tree.row.params.greedy
            _coupled(tree, logits[start:end] if greedy else shaped[start:end], greedy, width, source)
        else:
            _sampled(tree, shaped[start], width, source)
        start = end


def _coupled(tree: Tree, scores: Tensor, greedy: bool, width: int, source: str) -> None:
    """The likeliest `width` nodes of the next level, ranked with the noise the target will draw with."""
    keys = [tree.row.noise.target(len(tree.draft.path_to(node)) - 1) for node in tree.frontier]
    if width == 1:
        token = scores.argmax(-1) if greedy else gumbel_argmax(scores, keys)
        tree.frontier = [tree.draft.add(int(token), tree.frontier[0], source)]
        return
    if not greedy:
        scores = rng.perturb(scores, keys)
    ranked = torch.log_softmax(scores.double(), -1)
    best, tokens = ranked.topk(min(width, ranked.shape[-1]))
    candidates = [
        (self_value + value, token, parent)
        for self_value, parent, values, ids in zip(
            tree.values, tree.frontier, best.tolist(), tokens.tolist(), strict=True
        )
        for value, token in zip(values, ids, strict=True)
        if value > -torch.inf
    ]
    candidates = sorted(candidates, key=lambda c: -c[0])[:width]
    tree.frontier = [tree.draft.add(token, parent, source) for _, token, parent in candidates]
    tree.values = [value for value, _, _ in candidates]


def _sampled(tree: Tree, scores: Tensor, width: int, source: str) -> None:
    """One child drawn from q, first; beside it the likeliest others where the rule takes trees."""
    (parent,), others = tree.frontier, []
    if tree.row.branching and width > 1 and not tree.row.params.greedy:
        best, tokens = scores.topk(min(width - 1, len(scores)))
        others = tokens[best > -torch.inf].tolist()
        scores = scores.index_fill(0, torch.tensor(others, device=scores.device), -torch.inf)
    tree.frontier = []
    if torch.isfinite(scores).any():
        token = int(gumbel_argmax(scores[None], [tree.row.noise.draft(parent)]))
        tree.laws[parent] = scores.double().softmax(-1).cpu().numpy()
        tree.frontier = [tree.draft.add(token, parent, source, Law.SAMPLED)]
    for token in others:
        tree.draft.add(token, parent, source)
