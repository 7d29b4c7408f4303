"""An independent small model as drafter, with its own KV cache: chains, or trees of `width` nodes a
level.

How its laws become nodes is in `tree`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.cache.attention import Segment
from forerun.cache.kv import KVCache
from forerun.draft.proposer import DraftRequest, Proposer, Reference
from forerun.draft.tree import Tree, grow, grow_all
from forerun.errors import LoadError
from forerun.models.config import ModelConfig
from forerun.runtime.torch_runner import Runner
from forerun.types import Draft

CHUNK = 512  # most tokens of a slot read in one pass while catching up


class DraftModel(Proposer):
    """Proposes what `runner`'s model would say. `vocab` is the target's; `width` the nodes of a
    level."""

    def __init__(self, runner: Runner, vocab: int, width: int = 1, name: str = "model") -> None:
        self.runner, self.vocab, self.width, self.name = runner, vocab, width, name

    @property
    def source(self) -> str:
        """What statistics call its tokens."""
        return self.name

    def open(
        self,
        slot: int,
        tokens: Sequence[int],
        references: Sequence[Reference] = (),
        tenant: str = "",
    ) -> None:
        self.runner.cache.open(slot, tokens, tenant)

    def close(self, slot: int, finished: Sequence[int] | None = None) -> None:
        self.runner.cache.close(slot)

    def reset(self) -> None:
        self.runner.reset()

    def kv(self) -> KVCache:
        return self.runner.cache

    def make_room(self, tokens: int) -> None:
        self.runner.make_room(tokens)

    def propose(self, rows: Sequence[DraftRequest]) -> list[Draft]:
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
        logits = self.read(
            [tree.row for tree in trees], [(tree.draft, tree.frontier) for tree in trees]
        )
        for tree in trees:
            tree.fed = len(tree.draft)
        self._grow(trees, logits)

    def _go_on(self, trees: Sequence[Tree]) -> None:
        """Add what is still to be drafted, or a level of it."""
        if not self._chain(trees):
            self._grow(trees, self._feed(trees))

    def _grow(self, trees: Sequence[Tree], logits: Tensor) -> None:
        """Add a level below the frontiers; logits [F, V] after each of their nodes."""
        grow(trees, logits, self.width, self.source)

    def _has_room(self, row: DraftRequest) -> bool:
        """Without room, in the pool or the model's context, the request goes on without a draft; so
        it does after a token that this model does not have."""
        upto, cache = len(row.tokens) + row.depth * self.width, self.runner.cache
        if max(row.tokens[cache.length[row.slot] :]) >= self.runner.decoder.config.vocab:
            return False
        return upto <= self.runner.decoder.context and cache.pages.grow(row.slot, upto)

    def read(
        self, rows: Sequence[DraftRequest], behind: Sequence[tuple[Draft, Sequence[int]]] = ()
    ) -> Tensor:
        """Read the committed tokens each slot has missed, and what stands `behind` each root, a
        draft, which is not committed; the logits after those of its nodes that are named, row by
        row; the root's without any. [N, V]"""
        cache, segments = self.runner.cache, []
        self._catch_up(rows)
        ends = behind or [(Draft.root(row.tokens[-1]), [0]) for row in rows]
        for row, (draft, nodes) in zip(rows, ends, strict=True):
            lag = list(row.tokens[cache.length[row.slot] :])
            root = len(lag) - 1
            parents = list(range(-1, root)) + [root + parent for parent in draft.parents[1:]]
            want = [root + node for node in nodes]
            segments.append(Segment(row.slot, lag + draft.tokens[1:], parents, want))
        logits = self.say(segments)
        for row in rows:
            cache.commit(row.slot, range(len(row.tokens) - 1 - cache.length[row.slot]))
            cache.pages.seal(row.slot, row.tokens, self._settled(row.slot))
        return logits

    def _catch_up(self, rows: Sequence[DraftRequest]) -> None:
        """Read what slots have missed up to the last `CHUNK` tokens at most."""
        cache = self.runner.cache
        while late := [row for row in rows if len(row.tokens) - cache.length[row.slot] > CHUNK]:
            parents, lags = (
                list(range(-1, CHUNK - 1)),
                [row.tokens[cache.length[row.slot] :] for row in late],
            )
            self.say(
                [
                    Segment(row.slot, list(lag[:CHUNK]), parents, [])
                    for row, lag in zip(late, lags, strict=True)
                ]
            )
            for row in late:
                cache.commit(row.slot, range(CHUNK))

    def _settled(self, slot: int) -> int:
        """How many of the tokens that were read will stand, so that other slots may share them."""
        return self.runner.cache.length[slot]

    def _feed(self, trees: Sequence[Tree]) -> Tensor:
        """Run the nodes added last; the logits after each tree's frontier. [F, V]"""
        segments = []
        for tree in trees:
            draft, first = tree.draft, tree.fed
            want = [node - first for node in tree.frontier]
            segments.append(
                Segment(tree.row.slot, draft.tokens[first:], draft.parents, want, offset=first)
            )
            tree.fed = len(draft)
        return self.say(segments)

    def _chain(self, trees: Sequence[Tree]) -> bool:
        """Finish drafts that are chains in one native call. False, and nothing done, where a level
        needs more than
        that: branches, a law to keep, a filter, a model on torch."""
        if self.width > 1 or not all(tree.is_plain for tree in trees):
            return False
        said = self.runner.draft_chains([tree.link(tree.fed) for tree in trees], self.vocab)
        for tree, tokens in zip(trees, said, strict=True) if said else ():
            tree.extend(tokens, self.source)
        return said is not None

    def say(self, segments: Sequence[Segment]) -> Tensor:
        """One pass, its logits cut or padded to the target's vocabulary (padding rows differ
        between sizes)."""
        logits = self.runner.forward(segments).logits[:, : self.vocab]
        missing = self.vocab - logits.shape[1]
        return F.pad(logits, (0, missing), value=-torch.inf) if missing else logits


class Pard(DraftModel):
    """A model that says all tokens of a draft in one pass (PARD, An et al. 2504.18583): chains, or
    trees.

    It is an ordinary model, trained to go on behind a mask token as if that were the token it said
    itself: behind the text stand as many masks as there are tokens to draft but one, the last token
        of the text says the first of them,
    mask j the one after the next j. What is said at a mask does not depend on what is drafted
    before it, and no mask is ever committed. The same model drafts for every target of its
    vocabulary."""

    def __init__(self, runner: Runner, token: int, vocab: int, width: int = 1) -> None:
        """`token` is the mask, `vocab` the target's."""
        super().__init__(runner, vocab, width)
        self.token = token

    def _say_first(self, trees: Sequence[Tree]) -> None:
        rows = [tree.row for tree in trees]
        masks = [Draft.chain(row.tokens[-1], [self.token] * (row.depth - 1), "") for row in rows]
        logits = self.read(rows, [(draft, range(len(draft))) for draft in masks])
        grow_all(trees, torch.split(logits, [row.depth for row in rows]), self.width, self.name)


def draft_model(runner: Runner, where: str, vocab: int, width: int) -> DraftModel:
    """A draft model, drafting as it was trained to; `where` is what messages call it. Raises
    LoadError."""
    said = runner.decoder.shortlist
    try:
        token = mask_of(runner.decoder.config)
        if said is not None and said[0] >= vocab:
            raise LoadError(f"its shortlist has none of the {vocab} tokens of the target")
    except LoadError as error:
        raise LoadError(f"{where} is no draft model that can be used here: {error}") from None
    return DraftModel(runner, vocab, width) if token is None else Pard(runner, token, vocab, width)


def mask_of(config: ModelConfig) -> int | None:
    """The mask token of a model that drafts in parallel, None for all others. Raises LoadError."""
    kind, token = config.raw.get("spd_type"), config.raw.get("pard_token")
    if kind not in (None, "pard"):
        raise LoadError(
            f"spd_type in config.json is {kind!r}: of such models only 'pard' is supported"
        )
    if kind is None and token is None:
        return None
    if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < config.vocab:
        raise LoadError(
            f"pard_token in config.json is {token!r}, not one of its {config.vocab} tokens"
        )
    return token
