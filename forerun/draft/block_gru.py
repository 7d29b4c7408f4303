"""Domino's law (2605.29707): a GRU reads the anchor and the tokens drafted since, and corrects what slots say.

The correction of a slot is W2 SiLU(W1 [h; s]), h being what the layers made of the slot and s the GRU's state behind
the token before. The first slots that say something may go without. The state follows from the path alone.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from forerun.draft.block_law import Behind, BlockLaw
from forerun.draft.block_shapes import GruShape


class GruLaw(BlockLaw):
    """It. Tensors are called as in SpecForge, where they stand by themselves; W1 and W2 are `embed_proj`'s."""

    def __init__(self, shape: GruShape, hidden: int, said: int, first: int) -> None:
        """hidden: Hd; said: tokens that the head says; first: the slot that says the first."""
        super().__init__()
        self.corrected = first + shape.plain  # the first slot that is
        self.prefix_gru = nn.GRU(hidden, shape.state, bias=False, batch_first=True)
        inner = nn.Linear(hidden + shape.state, shape.inner, bias=False)
        self.embed_proj = nn.Sequential(inner, nn.SiLU(), nn.Linear(shape.inner, said, bias=False))

    def begin(self, made: Tensor, tokens: Tensor) -> Tensor:
        return made.new_zeros(self.prefix_gru.hidden_size)

    def forward(self, behind: Behind, state: Tensor) -> tuple[Tensor, Tensor]:
        read = behind.embed(behind.previous).to(state.dtype)
        state = self.prefix_gru(read[:, None], state[None].contiguous())[1][0]
        if behind.slot < self.corrected:
            return behind.said, state
        made = behind.made[behind.slot].expand(len(state), -1)
        return behind.said + self.embed_proj(torch.cat((made, state), -1)), state
