"""What a block drafter says of a slot behind the tokens that were drafted before it.

The layers make all slots at once, so each would say its token without knowing those before it. A law adds what follows
from them, one level of a draft after the other. What it says of a node's children depends on the text and on the path
down to the node alone, never on what else is drafted, is drawn or is about to be: so q is the law a token was really
drawn from, and every rule stays exact with chains, trees and laws that are kept.

Tensors are called as in the speculators format.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from forerun.draft.block_shapes import BlockConfig, MarkovShape


@dataclass(frozen=True, slots=True)
class Behind:
    """What a law knows of some nodes of a draft, of one level.

    Attributes:
        slot: which slot of the block says their children.
        made [S, Hd]: what the layers made of all slots.
        said [F, Vd]: what that slot says by itself.
        previous [F]: the nodes' tokens.
    """

    slot: int
    made: Tensor
    said: Tensor
    previous: Tensor


class Markov(nn.Module):
    """DSpark's Markov head (2607.05147): a bias of low rank, by the token before.

    - vanilla: W2 W1[x].
    - gated: W2 (g * W1[x]), where the gate g sees the slot and the token.
    - rnn: a state of the size of the rank goes along the block. From the state, the token and the slot come a gate, a
      candidate and an output; the state moves to the candidate as far as the gate is closed, and W2 says the output.
    """

    def __init__(self, shape: MarkovShape, config: BlockConfig) -> None:
        super().__init__()
        rank, hidden = shape.rank, config.layer.hidden
        self.kind, self.first = shape.kind, config.first
        self.markov_w1 = nn.Embedding(config.layer.vocab, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        if self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def bias(self, previous: Tensor) -> Tensor:
        """What a vanilla one adds behind these tokens, whatever the slot. [..] -> [.., Vd]"""
        out: Tensor = self.markov_w2(self.markov_w1(previous))
        return out

    def begin(self, made: Tensor, anchor: Tensor) -> Tensor:
        """The state above the root, [..]; made [S, Hd], of all slots; anchor [1]."""
        if self.kind != "rnn":
            return made.new_zeros(0)
        state = made.new_zeros(1, self.markov_w1.embedding_dim)
        for slot in range(self.first):  # slots that say nothing move it, too, as they did when it was trained
            state, _ = self._step(made[slot : slot + 1], self.markov_w1(anchor), state)
        return state[0]

    def forward(self, behind: Behind, state: Tensor) -> tuple[Tensor, Tensor]:
        """Logits behind some nodes [F, Vd], and the state for their children; state [F, ..]: that of their parents."""
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
