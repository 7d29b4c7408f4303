"""An independent small model as drafter, with its own KV cache: chains, or trees of `width` nodes a level.

How its laws become nodes is in `tree`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.cache.attention import Segment
from forerun.cache.kv import KVCache
from forerun.draft.base import Proposer, Reference, Row
from forerun.draft.tree import Tree, grow
from forerun.runner import Runner
from forerun.types import Draft

CHUNK = 512  # most tokens of a slot read in one pass while catching up


class DraftModel(Proposer):
    """Proposes what `runner`'s model would say. `vocab` is the target's; `width` the nodes of a level."""

    def __init__(self, runner: Runner, vocab: int, width: int = 1, name: str = "model") -> None:
        self.runner, self.vocab, self.width, self.name = runner, vocab, width, name

    @property
    def source(self) -> str:
        """What statistics call its tokens."""
        return self.name

    def open(self, slot: int, tokens: Sequence[int], references: Sequence[Reference] = (), tenant: str = "") -> None:
        self.runner.cache.open(slot, tokens, tenant)

    def close(self, slot: int, finished: Sequence[int] | None = None) -> None:
        self.runner.cache.close(slot)

    def reset(self) -> None:
        self.runner.reset()

    def kv(self) -> KVCache:
        return self.runner.cache

    def make_room(self, tokens: int) -> None:
        self.runner.make_room(tokens)

    def propose(self, rows: Sequence[Row]) -> list[Draft]:
        return self.complete([Tree(row) for row in rows])

    def complete(self, trees: Sequence[Tree]) -> list[Draft]:
        """The drafts of trees that have been begun, or not, as deep as they are to be."""
        active = [tree for tree in trees if self._has_room(tree.row)]
        if active:
            self._say_first(active)
        while active := [tree for tree in active if tree.frontier and tree.row.depth > tree.level]:
            self._go_on(active)
        return [tree.finish(self.vocab) for tree in trees]

    def _say_first(self, trees: Sequence[Tree]) -> None:
        """Read what the slots have missed, and what has been drafted, and add a level."""
        logits = self.read([tree.row for tree in trees], [(tree.draft, tree.frontier) for tree in trees])
        for tree in trees:
            tree.fed = len(tree.draft)
        grow(trees, logits, self.width, self.source)

    def _go_on(self, trees: Sequence[Tree]) -> None:
        """Add what is still to be drafted, or a level of it."""
        if not self._chain(trees):
            grow(trees, self._feed(trees), self.width, self.source)

    def _has_room(self, row: Row) -> bool:
        """Without room, in the pool or the model's context, the request goes on without a draft; so it does after a
        token that this model does not have."""
        upto, cache = len(row.tokens) + row.depth * self.width, self.runner.cache
        if max(row.tokens[cache.length[row.slot] :]) >= self.runner.decoder.config.vocab:
            return False
        return upto <= self.runner.decoder.context and cache.pages.grow(row.slot, upto)

    def read(self, rows: Sequence[Row], behind: Sequence[tuple[Draft, Sequence[int]]] = ()) -> Tensor:
        """Read the committed tokens each slot has missed, and what stands `behind` each root, a draft, which is not
        committed; the logits after those of its nodes that are named, row by row; the root's without any. [N, V]"""
        cache, found = self.runner.cache, []
        ends = behind or [(Draft.root(row.tokens[-1]), [0]) for row in rows]
        lags = [list(row.tokens[cache.length[row.slot] :]) for row in rows]
        while any(lags):
            segments, done = [], []
            for i, (row, (draft, nodes)) in enumerate(zip(rows, ends, strict=True)):
                chunk, lags[i] = lags[i][:CHUNK], lags[i][CHUNK:]
                if chunk:
                    tokens, parents, root = chunk, list(range(-1, len(chunk) - 1)), len(chunk) - 1
                    if lags[i]:
                        nodes = []
                    else:
                        tokens, parents = chunk + draft.tokens[1:], parents + [root + p for p in draft.parents[1:]]
                    segments.append(Segment(row.slot, tokens, parents, [root + node for node in nodes]))
                    done.append((i, root if nodes else len(chunk)))
            logits, start = self.say(segments), 0
            for segment, (i, known) in zip(segments, done, strict=True):
                found.append((i, logits[start : start + len(segment.want)]))
                start += len(segment.want)
                cache.commit(segment.slot, range(known))
        for row in rows:
            cache.pages.seal(row.slot, row.tokens, self._settled(row.slot))
        return torch.cat([part for _, part in sorted(found, key=lambda pair: pair[0])])

    def _settled(self, slot: int) -> int:
        """How many of the tokens that were read will stand, so that other slots may share them."""
        return self.runner.cache.length[slot]

    def _feed(self, trees: Sequence[Tree]) -> Tensor:
        """Run the nodes added last; the logits after each tree's frontier. [F, V]"""
        segments = []
        for tree in trees:
            draft, first = tree.draft, tree.fed
            want = [node - first for node in tree.frontier]
            segments.append(Segment(tree.row.slot, draft.tokens[first:], draft.parents, want, offset=first))
            tree.fed = len(draft)
        return self.say(segments)

    def _chain(self, trees: Sequence[Tree]) -> bool:
        """Finish drafts that are chains in one native call. False, and nothing done, where a level needs more than
        that: branches, a law to keep, a filter, a model on torch."""
        if self.width > 1 or not all(tree.is_plain for tree in trees):
            return False
        said = self.runner.chain([tree.link(tree.fed) for tree in trees], self.vocab)
        for tree, tokens in zip(trees, said, strict=True) if said else ():
            tree.extend(tokens, self.source)
        return said is not None

    def say(self, segments: Sequence[Segment]) -> Tensor:
        """One pass, its logits cut or padded to the target's vocabulary (padding rows differ between sizes)."""
        logits = self.runner.forward(segments).logits[:, : self.vocab]
        missing = self.vocab - logits.shape[1]
        return F.pad(logits, (0, missing), value=-torch.inf) if missing else logits
