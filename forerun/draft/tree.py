"""Drafts under construction, a level at a time: from a drafter's laws to nodes, as the rule wants
them drawn.

Under a coupled rule tokens are drawn with the target's own noise, so they agree about as often as
the two laws overlap; at width n the n likeliest paths of a beam are kept. Under the ratio rules a
chain is sampled and its law kept; `tree` has the likeliest tokens beside sampled ones (greedy + 1,
2502.18779), all of them with children of their own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from forerun import rng
from forerun.draft.proposer import DraftRequest
from forerun.kernels.draw import gumbel_argmax, sample_tokens
from forerun.runtime.program import ChainStart, DraftedChain
from forerun.sampling.filters import shape_logits
from forerun.types import NUM_CONFIDENCE_BINS, Draft, Proposal

# How trees branch under `tree`. Accepted lengths with a small draft model hardly depend on them.
SAMPLED = 0.65  # chance assumed of a sampled token that it stands
AMONG_REST = 0.85  # of one that was sampled beside given ones, if the target says none of these
BESIDE = 0.45  # what a given token adds beside a sampled one, as a share of its chance


@dataclass(slots=True)
class Tree:
    """A draft under construction.

    `frontier` are the nodes to expand next, `values` how likely their paths are. `fed` is how many
    nodes a drafter with
    a cache has read: the root comes with its lag and, like them, is not committed.
    """

    row: DraftRequest
    draft: Draft = field(init=False)
    frontier: list[int] = field(default_factory=lambda: [0])
    values: list[float] = field(default_factory=lambda: [0.0])
    fed: int = 1
    probs: dict[int, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.draft = Draft.root(self.row.tokens[-1])

    @property
    def is_plain(self) -> bool:
        """Whether its chains are drawn with the target's noise and no filter: all that a native
        call knows."""
        return self.row.coupled and self.row.params.unfiltered

    @property
    def level(self) -> int:
        """How deep its frontier is."""
        return len(self.draft.path_to(self.frontier[0])) - 1

    def link(self, offset: int) -> ChainStart:
        """What a native call has to know to go on behind its last node, `offset` rows behind what
        is committed."""
        row = self.row
        keys = [row.noise.target(depth) for depth in range(self.fed, row.depth)]
        return ChainStart(
            row.slot, self.draft.tokens[-1], offset, row.params.heat, keys, row.min_prob
        )

    def until(self, row: DraftRequest) -> Tree:
        """The same tree as another row asks for it: no deeper, and to be gone on with where it is
        not as deep."""
        tree, levels = Tree(row), self.draft.depths()
        kept = sum(level <= row.depth for level in levels)
        tree.draft, tree.values = self.draft.first(kept - 1), self.values
        tree.probs = {node: law for node, law in self.probs.items() if node in tree.draft.parents}
        tree.frontier = self.frontier if kept == len(levels) else []
        return tree

    def extend(self, tokens: Sequence[int], source: str) -> None:
        """Add a chain behind the last node."""
        for token in tokens:
            self.frontier = [self.draft.add(token, len(self.draft) - 1, source)]

    def weigh(self, said: DraftedChain, source: str, beside: int) -> None:
        """Add what a native round said behind the root, the likeliest nodes first: its chain, and
        at most `beside` of the tokens next to it, all by what became of such ones
        (`DraftRequest.stands`)."""
        stands = self.row.confidence_rates
        if stands is None:
            return self.extend(said.tokens, source)
        chain, others, above = [], [], 1.0  # (chance, level, token, sixteenth)
        for level, (token, sure, near) in enumerate(
            zip(said.tokens, said.bins, said.alternatives, strict=True)
        ):
            others += [
                (above * stands[NUM_CONFIDENCE_BINS + i], level, t, NUM_CONFIDENCE_BINS + i)
                for t, i in near
            ]
            above *= min(stands[sure], 1.0)
            chain.append((above, level, token, sure))
        suggest = sorted(others, key=lambda node: -node[0])[: beside if self.row.branching else 0]
        last = [0]  # the chain's nodes by level
        for chance, level, token, sure in sorted(
            chain + suggest, key=lambda node: (-node[0], node[1])
        ):
            node = self.draft.add(token, last[level], source)
            if sure < NUM_CONFIDENCE_BINS:
                last.append(node)
            self.draft.confidence_bins.append(sure)
            self.draft.path_probs.append(chance)
        return None

    def finish(self, vocab: int) -> Draft:
        """The draft, with the laws its sampled nodes were drawn from."""
        if self.probs:
            zero = np.zeros(vocab)
            self.draft.probs = np.stack([self.probs.get(i, zero) for i in range(len(self.draft))])
        return self.draft


def grow(trees: Sequence[Tree], logits: Tensor, width: int, source: str) -> None:
    """Add one level of at most `width` nodes below every frontier; `source` is what statistics call
    them.

    logits [F, V]: the drafter's after each frontier node, the trees one after the other.
    """
    if width == 1 and all(tree.is_plain for tree in trees):
        return _plain(trees, logits, source)
    beams = [tree.row.params.greedy and (tree.row.coupled or tree.row.branching) for tree in trees]
    shaped = (
        logits
        if all(beams)
        else shape_logits(logits, [tree.row.params for tree in trees for _ in tree.frontier])
    )
    counts = [len(tree.frontier) for tree in trees]
    parts = zip(torch.split(logits, counts), torch.split(shaped, counts), strict=True)
    for tree, greedy, (raw, scores) in zip(trees, beams, parts, strict=True):
        if tree.row.coupled or greedy:
            _coupled(tree, raw if greedy else scores, greedy, width, source)
        else:
            _sampled(tree, scores, width if tree.row.branching else 1, source)
    return None


def _plain(trees: Sequence[Tree], logits: Tensor, source: str) -> None:
    """Chains where only temperatures count: a level of all of them in one call."""
    nodes = [tree.frontier[0] for tree in trees]
    keys = [tree.row.noise.target(tree.level) for tree in trees]
    heat = [tree.row.params.heat for tree in trees]
    for tree, node, token in zip(
        trees, nodes, sample_tokens(logits, heat, keys, strict=False), strict=True
    ):
        tree.frontier = [tree.draft.add(token, node, source)]


def grow_all(trees: Sequence[Tree], said: Sequence[Tensor], width: int, source: str) -> None:
    """Grow each tree as deep as its row allows, where a level's law is the same behind whatever
    stands above it.

    said [depth, V] of each tree: logits of its levels.
    """
    growing, level = list(zip(trees, said, strict=True)), 0
    while growing:
        logits = torch.cat([laws[level].expand(len(tree.frontier), -1) for tree, laws in growing])
        grow([tree for tree, _ in growing], logits, width, source)
        level += 1
        growing = [
            (tree, laws) for tree, laws in growing if tree.row.depth > level and tree.frontier
        ]


def _coupled(tree: Tree, scores: Tensor, greedy: bool, width: int, source: str) -> None:
    """The likeliest `width` nodes of the next level, ranked with the noise the target will draw
    with."""
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
        (so_far + value, token, parent)
        for so_far, parent, values, ids in zip(
            tree.values, tree.frontier, best.tolist(), tokens.tolist(), strict=True
        )
        for value, token in zip(values, ids, strict=True)
        if value > -torch.inf
    ]
    candidates = sorted(candidates, key=lambda c: -c[0])[:width]
    tree.frontier = [tree.draft.add(token, parent, source) for _, token, parent in candidates]
    tree.values = [value for value, _, _ in candidates]


def _sampled(tree: Tree, scores: Tensor, width: int, source: str) -> None:
    """The next level where laws are kept: nodes get a sampled child and their likeliest tokens
    beside it, those that are expected to add most. What is sampled comes from the law without the
    given tokens, and stands first."""
    chances = scores.double().softmax(-1)
    best, tokens = chances.topk(min(width - 1, chances.shape[-1]))
    wishes = _wishes(tree.values, best)[:width]
    frontier, values = [], []
    for i, (parent, value) in enumerate(zip(tree.frontier, tree.values, strict=True)):
        ranks = [rank for node, rank in wishes if node == i and rank >= 0]
        given, beside = tokens[i, ranks], best[i, ranks]
        rest = scores[i].index_fill(0, given, -torch.inf)
        if (i, -1) in wishes and torch.isfinite(rest).any():
            token = int(gumbel_argmax(rest[None], [tree.row.noise.draft(parent)]))
            tree.probs[parent] = rest.double().softmax(-1).cpu().numpy()
            frontier.append(tree.draft.add(token, parent, source, Proposal.SAMPLED))
            chance = AMONG_REST * max(1 - float(beside.sum()), 1e-9) if ranks else SAMPLED
            values.append(value + math.log(chance))
        for token, chance in zip(given.tolist(), beside.tolist(), strict=True):
            frontier.append(tree.draft.add(token, parent, source))
            values.append(value + math.log(chance))
    tree.frontier, tree.values = frontier, values


def _wishes(values: Sequence[float], best: Tensor) -> list[tuple[int, int]]:
    """Children there could be, those that add most first: (which node of the frontier, the rank of
    a given token or -1 for a sampled one). best [F, R]: chances of the likeliest tokens."""
    wishes = [(math.exp(value) * SAMPLED, i, -1) for i, value in enumerate(values)]
    wishes += [
        (math.exp(value) * chance * BESIDE, i, rank)
        for i, (value, chances) in enumerate(zip(values, best.tolist(), strict=True))
        for rank, chance in enumerate(chances)
        if chance > 0
    ]
    return [(i, rank) for _, i, rank in sorted(wishes, key=lambda wish: -wish[0])]
