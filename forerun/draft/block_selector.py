"""DFlash2's law: of the tokens that a slot finds likeliest by itself, those that fit the token before.

A candidate's score is the slot's own logit plus <A[x] * P h, B[candidate]>: x is the token before, h what the layers
made of the slot. What is no candidate has no chance. Which tokens are candidates follows from the slot alone.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from forerun.draft.block_law import Behind, BlockLaw
from forerun.draft.block_shapes import SelectorShape


class Selector(BlockLaw):
    """It. Tensors are called as in the speculators format."""

    def __init__(self, shape: SelectorShape, hidden: int, vocab: int) -> None:
        """hidden: Hd; vocab: the target's tokens, all of which the head says."""
        super().__init__()
        self.most = shape.most
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab, shape.rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab, shape.rank))
        self.hidden_projection = nn.Linear(hidden, shape.rank, bias=False)

    def forward(self, behind: Behind, state: Tensor) -> tuple[Tensor, Tensor]:
        own, ids = behind.said.topk(self.most, -1)
        made = self.hidden_projection(behind.made[behind.slot : behind.slot + 1])
        wanted = self.predecessor_codebook[behind.previous] * made
        scores = own + (self.successor_codebook[ids] * wanted[:, None]).sum(-1)
        return torch.full_like(behind.said, -torch.inf).scatter(-1, ids, scores.to(own.dtype)), state
