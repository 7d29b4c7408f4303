"""Chains of a draft model or an EAGLE head in rounds on a device (see `runtime.device_rounds`): the
host knows nothing of the round before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forerun.devices import as_tensor, upload
from forerun.runtime.captured import CapturedPasses
from forerun.runtime.device_rounds import (
    Drafts,
    Draw,
    Nodes,
    RoundRequest,
    RoundState,
    Verified,
    cache_table,
)
from forerun.runtime.padded_pass import PaddedPass, PassShape, padded_shape

if TYPE_CHECKING:
    from forerun.draft.draft_model import DraftModel
    from forerun.draft.eagle.proposer import EagleProposer

REREAD = 2  # tokens that a draft model reads first: it may have missed the last but one


class ModelDrafter:
    """Makes `ModelChains` of one draft model and its recorded passes."""

    aux_hidden_layers: tuple[int, ...] = ()
    width = 0

    def __init__(self, model: DraftModel, passes: CapturedPasses) -> None:
        self.model, self.passes = model, passes

    def drafts(self, target: CapturedPasses, shape: PassShape, depth: int) -> Drafts:
        return ModelChains(self, target.decoder.config.vocab, shape, depth)


class ModelChains:
    """Chains of a draft model."""

    def __init__(self, drafter: ModelDrafter, vocab: int, shape: PassShape, depth: int) -> None:
        self.model, self.depth, self.vocab = drafter.model, depth, vocab
        self.count = shape.segments
        shapes = [padded_shape(self.count, tokens, shape.keys) for tokens in (REREAD, 1)]
        self._first, self._next = (drafter.passes.new_pass(part) for part in shapes if part)

    def begin(self, requests: Sequence[RoundRequest]) -> None:
        slots = [request.slot for request in requests]
        for part, last in ((self._first, REREAD - 1), (self._next, 0)):
            wanted = [r * part.shape.tokens + last for r in range(self.count)]
            table = cache_table(part.cache, slots, part.shape, part.device)
            part.begin_chains(table, upload(wanted, torch.int64, part.device))

    def draft(self, state: RoundState, nodes: Nodes, draw: Draw) -> None:
        drafted = nodes.tokens
        # The row of the token before the last is written anew, with the same numbers, where the
        # model had read it.
        self._first.place(torch.stack((state.before, state.last), 1), state.position - 1)
        logits = self._first.compute().logits
        for level in range(self.depth):
            if level:
                self._next.place(drafted[:, level - 1 : level], state.position + level)
                logits = self._next.compute().logits
            drafted[:, level] = draw(
                logits[: self.count, : self.vocab], state.position[:, None] + level
            )

    def keep(self, state: RoundState, nodes: Nodes, verified: Verified) -> None:
        """Keep nothing: the model reads tokens alone."""

    def end(self, number: int, slot: int, tokens: Sequence[int], root: int, accepted: int) -> None:
        cache = self.model.runner.cache
        # it does not read the last token of a chain
        read = root + 1 + min(accepted, self.depth - 1)
        cache.commit(slot, range(read - cache.length[slot]))
        self.model.share(slot, tokens)
        cache.pages.shrink(slot, len(tokens))


class HeadDrafter:
    """Makes `HeadChains` of one EAGLE head and its cache."""

    width = 0

    def __init__(self, proposer: EagleProposer) -> None:
        self.proposer, self.cache = proposer, proposer.cache
        self.aux_hidden_layers = proposer.aux_hidden_layers

    def drafts(self, target: CapturedPasses, shape: PassShape, depth: int) -> Drafts:
        return HeadChains(self, target.own_attention, shape, depth)


class HeadChains:
    """Chains of an EAGLE head.

    Its first pass of a round reads the pairs of the last round: the target's states of the root and
    of accepted tokens, each with the token behind it. What stands behind them in the buffers is
    read, too, and its rows of the cache are overwritten by the next passes before anything sees
    them.

    Attributes:
        states: [R, n, Hd], fused states that the head has not read.
        tokens: int64 [R, n], the tokens behind them.
        counts: int64 [R], how many of them are valid.
        begins: int64 [R], the position of the first row in the head's cache.
    """

    def __init__(self, drafter: HeadDrafter, walks: bool, shape: PassShape, depth: int) -> None:
        self.proposer, self.cache, self.depth = drafter.proposer, drafter.cache, depth
        self.count, self.target_tokens = shape.segments, shape.tokens
        proposer, device, nodes = self.proposer, self.proposer.target.device, depth + 1
        self._first, self._next = (
            PaddedPass(
                proposer.layer,
                self.cache,
                PassShape(self.count, tokens, shape.keys),
                walks,
                device,
            )
            for tokens in (nodes, 1)
        )
        hidden = proposer.layer.hidden
        self.states = torch.zeros((self.count, nodes, hidden), dtype=proposer.dtype, device=device)
        self.tokens = torch.zeros((self.count, nodes), dtype=torch.int64, device=device)
        self.counts = torch.ones(self.count, dtype=torch.int64, device=device)
        self.begins = torch.zeros(self.count, dtype=torch.int64, device=device)

    def begin(self, requests: Sequence[RoundRequest]) -> None:
        """Begin with the one state of each request that is not read (`EagleProposer.begin_rounds`
        has read the others)."""
        pending = self.proposer.pending
        begins = [pending[request.slot].begin if request.depth else 0 for request in requests]
        begins += [0] * (self.count - len(requests))
        self.begins.copy_(upload(begins, torch.int64, self.begins.device))
        self.counts.fill_(1)
        lasts = [request.tokens[-1] for request in requests]
        self.tokens[: len(lasts), 0] = upload(lasts, torch.int64, self.tokens.device)
        for r, request in enumerate(requests):
            if request.depth:
                self.states[r, 0] = pending[request.slot].fused[0][-1]
        slots = [request.slot for request in requests]
        nothing = torch.zeros(0, dtype=torch.int64, device=self.begins.device)
        for part in (self._first, self._next):
            part.begin_chains(cache_table(self.cache, slots, part.shape, part.device), nothing)

    def draft(self, state: RoundState, nodes: Nodes, draw: Draw) -> None:
        drafted = nodes.tokens
        first = (state.position - self.counts - self.begins).clamp(min=0)
        outputs = self._read(self._first, self.tokens, first, self.states)
        index = (self.counts - 1)[:, None, None].expand(-1, 1, outputs.shape[-1])
        last = outputs.gather(1, index)[:, 0]
        for level in range(self.depth):
            logits = self.proposer.logits(last)
            drafted[:, level] = draw(logits, state.position[:, None] + level)
            if level < self.depth - 1:
                carried = self.proposer.head.next_state(last)[:, None]
                at = state.position + level - self.begins
                last = self._read(self._next, drafted[:, level : level + 1], at, carried)[:, 0]

    def _read(self, part: PaddedPass, tokens: Tensor, first: Tensor, states: Tensor) -> Tensor:
        """Read pairs of tokens [R, n] and states [R, n, Hd] at positions from `first` [R] on;
        returns the head's outputs [R, n, Hd]."""
        part.place(tokens, first)
        proposer, ids = self.proposer, part.inputs.ids
        embedded = proposer.head.embed(ids).to(proposer.dtype)
        rotation = proposer.rotation_at(part.inputs.positions)
        flat = states.reshape(len(ids), -1)
        outputs: Tensor = proposer.head(embedded, flat, rotation, part.attend)
        return outputs.view(*states.shape[:2], -1)

    def keep(self, state: RoundState, nodes: Nodes, verified: Verified) -> None:
        grid = (self.count, self.target_tokens, -1)
        seen = [as_tensor(verified.features[layer]) for layer in self.proposer.aux_hidden_layers]
        rows = [states.view(grid)[:, : self.depth + 1] for states in seen]
        self.states.copy_(self.proposer.fuse(torch.cat(rows, -1).to(self.proposer.dtype)))
        self.tokens.copy_(verified.drawn)
        self.counts.copy_(verified.accepted + 1)

    def end(self, number: int, slot: int, tokens: Sequence[int], root: int, accepted: int) -> None:
        unread = self.states[number, : accepted + 1].clone()
        num_read = root - self.proposer.next_position(slot)
        self.proposer.end_rounds(slot, tokens, num_read, fused=[unread])
