"""Draft trees under construction, one level at a time: from a drafter's logits to nodes.

Under a coupled rule tokens are drawn with the target's own noise, so that they agree about as often
as the two distributions overlap; at width n the likeliest n paths of a beam are kept. Under the
ratio rules a chain is sampled and its distributions are kept; the rule `tree` has the likeliest
tokens beside sampled ones (greedy + 1, 2502.18779), and all of them have children.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from forerun import rng
from forerun.draft.proposer import DraftRequest
from forerun.kernels.draw import gumbel_argmax, sample_tokens, shape_scores
from forerun.runtime.program import ChainStart, DraftedChain
from forerun.types import NUM_CONFIDENCE_BINS, Draft, Proposal

# Assumptions by which trees branch under `tree`; accepted lengths hardly depend on them.
SAMPLED_RATE = 0.65  # probability that a sampled token is accepted
REST_RATE = 0.85  # the same beside deterministic siblings, if the target draws none of these
SIBLING_GAIN = 0.45  # gain of a deterministic sibling of a sampled token, by its probability


@dataclass(slots=True)
class Tree:
    """A draft under construction.

    Attributes:
        request: what is drafted for.
        draft: the nodes so far.
        frontier: the nodes to expand next.
        values: log-probability of the path to each of them.
        fed: number of nodes that a drafter with a cache has read. The root is read together with
            the tokens before it and, like the other nodes, is not committed.
        probs: by node, the distribution that its sampled children were drawn from.
    """

    request: DraftRequest
    draft: Draft = field(init=False)
    frontier: list[int] = field(default_factory=lambda: [0])
    values: list[float] = field(default_factory=lambda: [0.0])
    fed: int = 1
    probs: dict[int, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.draft = Draft.root(self.request.tokens[-1])

    @property
    def is_plain(self) -> bool:
        """True if chains are drawn with the target's noise, as native calls do."""
        return self.request.coupled

    @property
    def level(self) -> int:
        """The depth of the frontier."""
        return len(self.draft.path_to(self.frontier[0])) - 1

    @property
    def is_growing(self) -> bool:
        """True if there is something to expand and the draft is not as deep as requested."""
        return bool(self.frontier) and self.level < self.request.depth

    def link(self, offset: int, first: int | None = None) -> ChainStart:
        """Return the start of a chain that continues behind the last node, `offset` rows behind the
        committed ones; its first token is drawn at depth `first`, by default behind what was
        read."""
        request = self.request
        first = self.fed if first is None else first
        keys = [request.noise.target(depth) for depth in range(first, request.depth)]
        sampling = request.params.sampling
        return ChainStart(
            request.slot, self.draft.tokens[-1], offset, sampling, keys, request.min_prob
        )

    def cut_to(self, request: DraftRequest) -> Tree:
        """Return the tree for a later request: without deeper nodes, and growing if it is not as
        deep."""
        depths = self.draft.depths()
        kept = sum(depth <= request.depth for depth in depths)
        tree = Tree(request, values=self.values)
        tree.draft = self.draft.first(kept - 1)
        tree.probs = {node: q for node, q in self.probs.items() if node in tree.draft.parents}
        tree.frontier = self.frontier if kept == len(depths) else []
        return tree

    def extend(self, tokens: Sequence[int], source: str) -> None:
        """Add a chain behind the last node."""
        for token in tokens:
            self.frontier = [self.draft.add(token, len(self.draft) - 1, source)]

    def add_drafted(self, drafted: DraftedChain, source: str, max_siblings: int) -> None:
        """Add the result of a native call behind the root, the likeliest nodes first.

        That is a chain and at most `max_siblings` siblings of its nodes, by the acceptance rates of
        their confidence bins (`DraftRequest.confidence_rates`).
        """
        rates = self.request.confidence_rates
        if rates is None:
            self.extend(drafted.tokens, source)
            return
        chain: list[tuple[float, int, int, int]] = []  # (path probability, level, token, bin)
        siblings: list[tuple[float, int, int, int]] = []
        above = 1.0
        for level, token in enumerate(drafted.tokens):
            for sibling, confidence in drafted.alternatives[level]:
                confidence += NUM_CONFIDENCE_BINS
                siblings.append((above * rates[confidence], level, sibling, confidence))
            above *= min(rates[drafted.bins[level]], 1.0)
            chain.append((above, level, token, drafted.bins[level]))
        siblings.sort(key=lambda node: -node[0])
        nodes = chain + siblings[: max_siblings if self.request.branching else 0]
        nodes.sort(key=lambda node: (-node[0], node[1]))
        chain_nodes = [0]  # by level
        for path_prob, level, token, confidence in nodes:
            node = self.draft.add(token, chain_nodes[level], source)
            if confidence < NUM_CONFIDENCE_BINS:
                chain_nodes.append(node)
            self.draft.confidence_bins.append(confidence)
            self.draft.path_probs.append(path_prob)

    def finish(self, vocab: int) -> Draft:
        """Return the draft, with the distributions that its sampled nodes were drawn from."""
        if self.probs:
            zero = np.zeros(vocab)
            self.draft.probs = np.stack([self.probs.get(i, zero) for i in range(len(self.draft))])
        return self.draft


def grow(trees: Sequence[Tree], logits: Tensor, width: int, source: str) -> None:
    """Add one level of at most `width` nodes to each tree, called `source` in statistics.

    logits [F, V]: the drafter's after each frontier node, the trees one after the other.
    """
    if width == 1 and all(tree.is_plain for tree in trees):
        _grow_plain(trees, logits, source)
        return
    requests = [tree.request for tree in trees]
    is_beam = [r.params.greedy and (r.coupled or r.branching) for r in requests]
    counts = [len(tree.frontier) for tree in trees]
    shaped = logits
    if not all(is_beam):
        samplings = [tree.request.params.sampling for tree in trees for _ in tree.frontier]
        shaped = shape_scores(logits, samplings)
    parts = zip(torch.split(logits, counts), torch.split(shaped, counts), strict=True)
    for tree, greedy, (raw, scores) in zip(trees, is_beam, parts, strict=True):
        if tree.request.coupled or greedy:
            _grow_beam(tree, raw if greedy else scores, greedy, width, source)
        else:
            _grow_sampled(tree, scores, width if tree.request.branching else 1, source)


def grow_all(trees: Sequence[Tree], logits: Sequence[Tensor], width: int, source: str) -> None:
    """Grow each tree to its depth with a drafter whose levels do not depend on the nodes above.

    logits [depth, V] for each tree.
    """
    growing = list(zip(trees, logits, strict=True))
    level = 0
    while growing:
        rows = [levels[level].expand(len(tree.frontier), -1) for tree, levels in growing]
        grow([tree for tree, _ in growing], torch.cat(rows), width, source)
        level += 1
        growing = [
            (tree, levels)
            for tree, levels in growing
            if tree.request.depth > level and tree.frontier
        ]


def _grow_plain(trees: Sequence[Tree], logits: Tensor, source: str) -> None:
    """Extend chains that are drawn with the target's noise, all of them in one call."""
    keys = [tree.request.noise.target(tree.level) for tree in trees]
    samplings = [tree.request.params.sampling for tree in trees]
    tokens = sample_tokens(logits, samplings, keys, strict=False)
    for tree, token in zip(trees, tokens, strict=True):
        tree.frontier = [tree.draft.add(token, tree.frontier[0], source)]


def _grow_beam(tree: Tree, scores: Tensor, greedy: bool, width: int, source: str) -> None:
    """Add the likeliest `width` nodes, ranked with the noise that the target will draw with."""
    noise = tree.request.noise
    keys = [noise.target(len(tree.draft.path_to(node)) - 1) for node in tree.frontier]
    if width == 1:
        token = scores.argmax(-1) if greedy else gumbel_argmax(scores, keys)
        tree.frontier = [tree.draft.add(int(token), tree.frontier[0], source)]
        return
    if not greedy:
        scores = rng.perturb(scores, keys)
    ranked = torch.log_softmax(scores.double(), -1)
    best, tokens = ranked.topk(min(width, ranked.shape[-1]))
    candidates = []  # (value, token, parent)
    for i, parent in enumerate(tree.frontier):
        for value, token in zip(best[i].tolist(), tokens[i].tolist(), strict=True):
            if value > -torch.inf:
                candidates.append((tree.values[i] + value, token, parent))
    candidates = sorted(candidates, key=lambda c: -c[0])[:width]
    tree.frontier = [tree.draft.add(token, parent, source) for _, token, parent in candidates]
    tree.values = [value for value, _, _ in candidates]


def _grow_sampled(tree: Tree, scores: Tensor, width: int, source: str) -> None:
    """Add the `width` nodes that are expected to add most: sampled children and likely tokens.

    A sampled child is drawn from the distribution without its deterministic siblings, and precedes
    them.
    """
    probs = scores.double().softmax(-1)
    best, tokens = probs.topk(min(width - 1, probs.shape[-1]))
    children = _best_children(tree.values, best)[:width]
    frontier, values = [], []
    for i, (parent, value) in enumerate(zip(tree.frontier, tree.values, strict=True)):
        ranks = [rank for node, rank in children if node == i and rank >= 0]
        likely = tokens[i, ranks]
        likely_probs = best[i, ranks]
        rest = scores[i].index_fill(0, likely, -torch.inf)
        if (i, -1) in children and torch.isfinite(rest).any():
            token = int(gumbel_argmax(rest[None], [tree.request.noise.draft(parent)]))
            tree.probs[parent] = rest.double().softmax(-1).cpu().numpy()
            frontier.append(tree.draft.add(token, parent, source, Proposal.SAMPLED))
            remaining = max(1 - float(likely_probs.sum()), 1e-9)
            values.append(value + math.log(REST_RATE * remaining if ranks else SAMPLED_RATE))
        for token, prob in zip(likely.tolist(), likely_probs.tolist(), strict=True):
            frontier.append(tree.draft.add(token, parent, source))
            values.append(value + math.log(prob))
    tree.frontier = frontier
    tree.values = values


def _best_children(values: Sequence[float], best: Tensor) -> list[tuple[int, int]]:
    """Rank the possible children of a frontier by the accepted length they are expected to add.

    Args:
        values: log-probability of each frontier node's path.
        best: [F, R] probabilities of the likeliest tokens.

    Returns:
        (index in the frontier, rank of the token) of each child; rank -1 is a sampled one.
    """
    found = []
    for i, value in enumerate(values):
        found.append((math.exp(value) * SAMPLED_RATE, i, -1))
    for i, value in enumerate(values):
        for rank, prob in enumerate(best[i].tolist()):
            if prob > 0:
                found.append((math.exp(value) * prob * SIBLING_GAIN, i, rank))
    return [(i, rank) for _, i, rank in sorted(found, key=lambda child: -child[0])]
