"""An independent small model as drafter, with its own KV cache: chains, or trees of `width` nodes a level.

Under a coupled rule it draws with the target's own noise, so it agrees about as often as the two laws overlap; at
width n it keeps the n likeliest paths of a beam. Under the ratio rules it samples a chain and keeps its law, or, for
`tree`, adds the width - 1 likeliest other tokens beside each sampled one (greedy + 1, 2502.18779).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun import rng
from forerun.cache.attention import Segment
from forerun.draft.base import Proposer, Reference, Row
from forerun.kernels.draw import gumbel_argmax
from forerun.runner import Runner
from forerun.sampling.filters import shape_logits
from forerun.types import Draft, Law

CHUNK = 512  # most tokens of a slot read in one pass while catching up


@dataclass(slots=True)
class _Tree:
    """A draft under construction. `frontier` are the nodes to expand next, `values` how likely their paths are."""

    row: Row
    draft: Draft
    frontier: list[int] = field(default_factory=lambda: [0])
    values: list[float] = field(default_factory=lambda: [0.0])
    fed: int = 1  # nodes whose keys are in the cache; the root came with the lag and, like them, is not committed
    laws: dict[int, np.ndarray] = field(default_factory=dict)

    def finish(self, vocab: int) -> Draft:
        if self.laws:
            zero = np.zeros(vocab)
            self.draft.probs = np.stack([self.laws.get(i, zero) for i in range(len(self.draft))])
        return self.draft


class DraftModel(Proposer):
    """Proposes what `runner`'s model would say. `vocab` is the target's; `width` the nodes of a level."""

    name = "model"

    def __init__(self, runner: Runner, vocab: int, width: int = 1) -> None:
        self.runner, self.vocab, self.width = runner, vocab, width

    def open(self, slot: int, tokens: Sequence[int], references: Sequence[Reference] = ()) -> None:
        self.runner.cache.open(slot, tokens)

    def close(self, slot: int, finished: Sequence[int] | None = None) -> None:
        self.runner.cache.close(slot)

    def reset(self) -> None:
        self.runner.reset()

    def propose(self, rows: Sequence[Row]) -> list[Draft]:
        trees = [_Tree(row, Draft.root(row.tokens[-1])) for row in rows]
        active = [tree for tree in trees if self._has_room(tree.row)]
        logits = self._read([tree.row for tree in active]) if active else None
        level = 1
        while active and logits is not None:
            self._expand(active, logits)
            active = [tree for tree in active if tree.row.depth > level and tree.frontier]
            logits = self._feed(active) if active else None
            level += 1
        return [tree.finish(self.vocab) for tree in trees]

    def _has_room(self, row: Row) -> bool:
        """Without room, in the pool or the model's context, the request goes on without a draft; so it does after a
        token that this model does not have."""
        upto, cache = len(row.tokens) + row.depth * self.width, self.runner.cache
        if max(row.tokens[cache.length[row.slot] :]) >= self.runner.decoder.config.vocab:
            return False
        return upto <= self.runner.decoder.context and cache.pages.grow(row.slot, upto)

    def _read(self, rows: Sequence[Row]) -> Tensor:
        """Read the committed tokens each slot has missed; the logits after each root. [R, V]"""
        cache, roots = self.runner.cache, []
        lags = [list(row.tokens[cache.length[row.slot] :]) for row in rows]
        while any(lags):
            segments, done = [], []
            for i, (row, lag) in enumerate(zip(rows, lags, strict=True)):
                if lag:
                    chunk, lags[i] = lag[:CHUNK], lag[CHUNK:]
                    want = [] if lags[i] else [len(chunk) - 1]
                    segments.append(Segment(row.slot, chunk, list(range(-1, len(chunk) - 1)), want))
                    done += [i] if want else []
            logits = self._logits(segments)
            roots += list(zip(done, logits, strict=True))
            for segment in segments:
                cache.commit(segment.slot, range(len(segment.tokens) - len(segment.want)))  # all but the root
        for row in rows:
            cache.pages.seal(row.slot, row.tokens, cache.length[row.slot])
        return torch.stack([row for _, row in sorted(roots, key=lambda pair: pair[0])])

    def _feed(self, trees: Sequence[_Tree]) -> Tensor:
        """Run the nodes added last; the logits after each tree's frontier. [F, V]"""
        segments = []
        for tree in trees:
            draft, first = tree.draft, tree.fed
            want = [node - first for node in tree.frontier]
            segments.append(Segment(tree.row.slot, draft.tokens[first:], draft.parents, want, offset=first))
            tree.fed = len(draft)
        return self._logits(segments)

    def _logits(self, segments: Sequence[Segment]) -> Tensor:
        """One pass, its logits cut or padded to the target's vocabulary (padding rows differ between sizes)."""
        logits = self.runner.forward(segments).logits[:, : self.vocab]
        return F.pad(logits, (0, self.vocab - logits.shape[1]), value=-torch.inf)

    def _expand(self, trees: Sequence[_Tree], logits: Tensor) -> None:
        """Add one level below every frontier."""
        shaped = shape_logits(logits, [tree.row.params for tree in trees for _ in tree.frontier])
        start = 0
        for tree in trees:
            end = start + len(tree.frontier)
            if tree.row.coupled:
                greedy = tree.row.params.greedy
                self._coupled(tree, logits[start:end] if greedy else shaped[start:end], greedy)
            else:
                self._sampled(tree, shaped[start])
            start = end

    def _coupled(self, tree: _Tree, scores: Tensor, greedy: bool) -> None:
        """The likeliest `width` nodes of the next level, ranked with the noise the target will draw with."""
        keys = [tree.row.noise.target(len(tree.draft.path_to(node)) - 1) for node in tree.frontier]
        if self.width == 1:
            token = scores.argmax(-1) if greedy else gumbel_argmax(scores, keys)
            tree.frontier = [tree.draft.add(int(token), tree.frontier[0], self.name)]
            return
        if not greedy:
            scores = rng.perturb(scores, keys)
        ranked = torch.log_softmax(scores.double(), -1)
        best, tokens = ranked.topk(min(self.width, ranked.shape[-1]))
        candidates = [
            (self_value + value, token, parent)
            for self_value, parent, values, ids in zip(
                tree.values, tree.frontier, best.tolist(), tokens.tolist(), strict=True
            )
            for value, token in zip(values, ids, strict=True)
            if value > -torch.inf
        ]
        candidates = sorted(candidates, key=lambda c: -c[0])[: self.width]
        tree.frontier = [tree.draft.add(token, parent, self.name) for _, token, parent in candidates]
        tree.values = [value for value, _, _ in candidates]

    def _sampled(self, tree: _Tree, scores: Tensor) -> None:
        """One child drawn from q, first; beside it the likeliest others where the rule takes trees."""
        (parent,), others = tree.frontier, []
        if tree.row.branching and self.width > 1 and not tree.row.params.greedy:
            best, tokens = scores.topk(min(self.width - 1, len(scores)))
            others = tokens[best > -torch.inf].tolist()
            scores = scores.index_fill(0, torch.tensor(others, device=scores.device), -torch.inf)
        tree.frontier = []
        if torch.isfinite(scores).any():
            token = int(gumbel_argmax(scores[None], [tree.row.noise.draft(parent)]))
            tree.laws[parent] = scores.double().softmax(-1).cpu().numpy()
            tree.frontier = [tree.draft.add(token, parent, self.name, Law.SAMPLED)]
        for token in others:
            tree.draft.add(token, parent, self.name)
