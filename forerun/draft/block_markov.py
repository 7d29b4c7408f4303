"""DSpark's Markov head (2607.05147): a bias of low rank, by the token before.

- vanilla: W2 W1[x].
- gated: W2 (g * W1[x]), where the gate g sees the slot and the token.
- rnn: a state of the size of the rank goes along the block. From the state, the token and the slot come a gate, a
  candidate and an output; the state moves to the candidate as far as the gate is closed, and W2 says the output.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from forerun.draft.block_law import Behind, BlockLaw
from forerun.draft.block_shapes import MarkovShape


class Markov(BlockLaw):
    """All three kinds. Tensors are called as in the speculators format."""

    def __init__(self, shape: MarkovShape, hidden: int, vocab: int, said: int, first: int) -> None:
        """hidden: Hd; vocab, said: tokens the target has, and the head says; first: the slot that says the first."""
        super().__init__()
        rank = shape.rank
        self.kind, self.first = shape.kind, first
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, said, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        if self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def bias(self, previous: Tensor) -> Tensor:
        """What a vanilla one adds behind these tokens, whatever the slot. [..] -> [.., Vd]"""
        out: Tensor = self.markov_w2(self.markov_w1(previous))
        return out

    def begin(self, made: Tensor, tokens: Tensor) -> Tensor:
        if self.kind != "rnn":
            return super().begin(made, tokens)
        state = made.new_zeros(1, self.markov_w1.embedding_dim)
        for slot in range(self.first):  # slots that say nothing move it, too, as they did when it was trained
            state, _ = self._step(made[slot : slot + 1], self.markov_w1(tokens[-1:]), state)
        return state[0]

    def forward(self, behind: Behind, state: Tensor) -> tuple[Tensor, Tensor]:
        known = self.markov_w1(behind.previous)
        made = behind.made[behind.slot].expand(len(known), -1)
        if self.kind == "gated":
            known = self.gate_proj(torch.cat((made, known), -1)).sigmoid() * known
        if self.kind == "rnn":
            state, known = self._step(made, known, state)
        return behind.said + self.markov_w2(known), state

    def _step(self, made: Tensor, known: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The next state, and what W2 says. made [F, Hd], known and state [F, r]"""
        gate, candidate, output = self.joint_proj(torch.cat((state, known, made), -1)).chunk(3, -1)
        gate = gate.sigmoid()
        return gate * state + (1 - gate) * candidate.tanh(), output.tanh()
