"""An independent small model as drafter, with its own KV cache: chains, or trees of `width` nodes
per level. `tree` makes nodes of its logits."""

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

CHUNK = 512  # most tokens of a slot per forward pass while catching up


class DraftModel(Proposer):
    """Proposes what the model of `runner` would generate.

    `vocab` is the target's vocabulary, `width` the number of nodes per level.
    """

    def __init__(self, runner: Runner, vocab: int, width: int = 1, name: str = "model") -> None:
        self.runner = runner
        self.vocab = vocab
        self.width = width
        self.name = name

    @property
    def source(self) -> str:
        """The name of its tokens in statistics."""
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

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return self.complete([Tree(request) for request in requests])

    def complete(self, trees: Sequence[Tree]) -> list[Draft]:
        """Grow trees, which may have nodes already, to the depth of their requests."""
        active = [tree for tree in trees if self._has_room(tree.request)]
        if active:
            self._start(active)
        while active := [tree for tree in active if tree.is_growing]:
            self._continue(active)
        return [tree.finish(self.vocab) for tree in trees]

    def _start(self, trees: Sequence[Tree]) -> None:
        """Process the tokens that the slots have missed and the nodes so far, and add a level."""
        requests = [tree.request for tree in trees]
        logits = self.read(requests, [(tree.draft, tree.frontier) for tree in trees])
        for tree in trees:
            tree.fed = len(tree.draft)
        if not self._chain(trees, logits):
            self._grow(trees, logits)

    def _continue(self, trees: Sequence[Tree]) -> None:
        """Add a level, or all that is left to draft."""
        if not self._chain(trees):
            self._grow(trees, self._feed(trees))

    def _grow(self, trees: Sequence[Tree], logits: Tensor) -> None:
        """Add a level below the frontiers; logits [F, V] after each of their nodes."""
        grow(trees, logits, self.width, self.source)

    def _has_room(self, request: DraftRequest) -> bool:
        """Return True if a draft fits the pool and the model's context, and the model has all the
        tokens of the text. The request goes on without a draft otherwise."""
        num_tokens = len(request.tokens) + request.depth * self.width
        decoder, cache = self.runner.decoder, self.runner.cache
        if max(request.tokens[cache.length[request.slot] :]) >= decoder.config.vocab:
            return False
        return num_tokens <= decoder.context and cache.pages.grow(request.slot, num_tokens)

    def read(
        self, requests: Sequence[DraftRequest], drafts: Sequence[tuple[Draft, Sequence[int]]] = ()
    ) -> Tensor:
        """Read and commit the tokens that each slot has missed, and read drafts behind them, which
        are not committed.

        Args:
            drafts: for each request a draft, and its nodes whose logits are wanted; without any,
                the roots alone.

        Returns:
            logits [N, V] after the wanted nodes, request by request.
        """
        self._catch_up(requests)
        cache = self.runner.cache
        drafts = drafts or [(Draft.root(request.tokens[-1]), [0]) for request in requests]
        segments = []
        for request, (draft, nodes) in zip(requests, drafts, strict=True):
            lag = list(request.tokens[cache.length[request.slot] :])
            root = len(lag) - 1
            parents = list(range(-1, root)) + [root + parent for parent in draft.parents[1:]]
            wanted = [root + node for node in nodes]
            segments.append(Segment(request.slot, lag + draft.tokens[1:], parents, wanted))
        logits = self.forward(segments)
        for request in requests:
            slot = request.slot
            cache.commit(slot, range(len(request.tokens) - 1 - cache.length[slot]))
            cache.pages.seal(slot, request.tokens, self._num_shareable(slot))
        return logits

    def _catch_up(self, requests: Sequence[DraftRequest]) -> None:
        """Process the tokens that slots have missed, except at most the last `CHUNK` ones."""
        length = self.runner.cache.length
        while late := [r for r in requests if len(r.tokens) - length[r.slot] > CHUNK]:
            segments = []
            for request in late:
                start = length[request.slot]
                tokens = list(request.tokens[start : start + CHUNK])
                segments.append(Segment(request.slot, tokens, list(range(-1, CHUNK - 1)), []))
            self.forward(segments)
            for request in late:
                self.runner.cache.commit(request.slot, range(CHUNK))

    def _num_shareable(self, slot: int) -> int:
        """Return how many of the committed tokens other slots may share."""
        return self.runner.cache.length[slot]

    def _feed(self, trees: Sequence[Tree]) -> Tensor:
        """Read the nodes added last; returns the logits [F, V] after each tree's frontier."""
        segments = []
        for tree in trees:
            draft, first = tree.draft, tree.fed
            wanted = [node - first for node in tree.frontier]
            tokens = draft.tokens[first:]
            segments.append(Segment(tree.request.slot, tokens, draft.parents, wanted, offset=first))
            tree.fed = len(draft)
        return self.forward(segments)

    def _chain(self, trees: Sequence[Tree], logits: Tensor | None = None) -> bool:
        """Finish chains in one native call, or with `logits` [F, V] after each frontier without
        waiting for the device on the way.

        Returns False, and does nothing, where that is impossible: branches, sampled nodes, or a
        model whose passes are neither native nor recorded.
        """
        if self.width > 1 or not all(tree.is_plain for tree in trees):
            return False
        if logits is None:
            chains = self.runner.draft_chains([tree.link(tree.fed) for tree in trees], self.vocab)
        else:
            starts = [tree.link(tree.fed, tree.level) for tree in trees]
            chains = self.runner.draft_chains_from(starts, self.vocab, logits)
        if chains is None:
            return False
        for tree, tokens in zip(trees, chains, strict=True):
            tree.extend(tokens, self.source)
        return True

    def forward(self, segments: Sequence[Segment]) -> Tensor:
        """Run a forward pass, and cut or pad its logits to the target's vocabulary: models of one
        family differ in the padding of theirs."""
        logits = self.runner.forward(segments).logits[:, : self.vocab]
        missing = self.vocab - logits.shape[1]
        return F.pad(logits, (0, missing), value=-torch.inf) if missing else logits


class Pard(DraftModel):
    """A model that predicts all tokens of a draft in one forward pass (PARD, 2504.18583).

    It is an ordinary model that was trained to continue behind mask tokens: `depth - 1` masks stand
    behind the text, the last token of the text predicts the first drafted token and mask j the one
    after the next j. A prediction does not depend on the tokens drafted before it, and masks are
    never committed. The same model drafts for every target of its vocabulary.
    """

    def __init__(self, runner: Runner, token: int, vocab: int, width: int = 1) -> None:
        """`token` is the mask, `vocab` the target's vocabulary."""
        super().__init__(runner, vocab, width)
        self.token = token

    def _start(self, trees: Sequence[Tree]) -> None:
        requests = [tree.request for tree in trees]
        drafts = [Draft.chain(r.tokens[-1], [self.token] * (r.depth - 1), "") for r in requests]
        logits = self.read(requests, [(draft, range(len(draft))) for draft in drafts])
        levels = torch.split(logits, [request.depth for request in requests])
        grow_all(trees, levels, self.width, self.name)


def draft_model(runner: Runner, where: str, vocab: int, width: int) -> DraftModel:
    """Return a draft model, a `Pard` if it was trained as one.

    Args:
        where: its name in messages.

    Raises:
        LoadError: it cannot draft for a target of `vocab` tokens.
    """
    shortlist = runner.decoder.shortlist
    try:
        token = mask_of(runner.decoder.config)
        if shortlist is not None and shortlist[0] >= vocab:
            raise LoadError(f"its shortlist has none of the {vocab} tokens of the target")
    except LoadError as error:
        raise LoadError(f"{where} is no draft model that can be used here: {error}") from None
    return DraftModel(runner, vocab, width) if token is None else Pard(runner, token, vocab, width)


def mask_of(config: ModelConfig) -> int | None:
    """Return the mask token of a PARD model, None for other models. Raises LoadError."""
    kind = config.raw.get("spd_type")
    token = config.raw.get("pard_token")
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
