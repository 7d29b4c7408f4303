"""XPress's law (2608.02438): a causal refiner of rank r corrects what slots say.

Of each slot it joins what the layers made of it, their mean over the block, and the token before; mixes that with what
it made of the slots before, channel by channel; and after a small gated MLP reads out a correction.

Its authors guess all tokens of a block at once, correct the guess, and guess again: Jacobi's passes. In such a pass a
slot sees a guess that later passes may change, so what it says follows from no prefix, and is no law that a token could
be drawn from. But the refiner looks backwards alone: behind a path that is drafted already its correction of the next
slot is settled. So slots are corrected one after the other here, each behind the path above it. Greedy that is what
Jacobi's passes end at (after k of them the first k tokens do not change any more); drawn, q is the law of the path, and
every rule stays exact, trees included.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forerun.draft.block_law import Behind, BlockLaw
from forerun.draft.block_shapes import RefinerShape


class Refiner(BlockLaw):
    """It. Tensors are called as in the speculators format. The state is what it made of the slots so far, [k, r]."""

    def __init__(self, shape: RefinerShape, hidden: int, vocab: int, said: int, block: int, first: int) -> None:
        """hidden: Hd; vocab, said: tokens the target has, and the head says; block: S; first: the slot that says the
        first token."""
        super().__init__()
        rank, inner = shape.rank, shape.rank * shape.ratio
        self.rank, self.first = rank, first
        self.token_embed = nn.Embedding(vocab, rank)
        self.down_h = nn.Linear(hidden, rank, bias=False)
        self.down_g = nn.Linear(hidden, rank, bias=False)
        self.in_proj = nn.Linear(3 * rank, rank, bias=False)
        self.mix_l = nn.Parameter(torch.zeros(rank, block, block))
        self.mlp_gate = nn.Linear(rank, inner, bias=False)
        self.mlp_up = nn.Linear(rank, inner, bias=False)
        self.mlp_down = nn.Linear(inner, rank, bias=False)
        self.readout = nn.Linear(rank, said, bias=False)

    def begin(self, made: Tensor, tokens: Tensor) -> Tensor:
        """Where the anchor's slot says nothing it counts all the same, with the token before the anchor."""
        before = [self._enter(made, slot, tokens[:1]) for slot in range(self.first)]
        return torch.cat(before) if before else made.new_zeros(0, self.rank)

    def forward(self, behind: Behind, state: Tensor) -> tuple[Tensor, Tensor]:
        slot = behind.slot
        entered = self._enter(behind.made, slot, behind.previous)
        state = torch.cat((state, entered[:, None]), 1)
        x = entered + torch.einsum("ck,fkc->fc", self.mix_l[:, slot, : slot + 1], state)
        x = x + self.mlp_down(F.silu(self.mlp_gate(x)) * self.mlp_up(x))
        return behind.said + self.readout(x), state

    def _enter(self, made: Tensor, slot: int, previous: Tensor) -> Tensor:
        """A slot before it is mixed with others, behind some tokens. made [S, Hd], previous [F] -> [F, r]"""
        own, mean = self.down_h(made[slot : slot + 1]), self.down_g(made.mean(0, keepdim=True))
        block = torch.cat((own, mean), -1).expand(len(previous), -1)
        out: Tensor = self.in_proj(torch.cat((block, self.token_embed(previous)), -1))
        return out
