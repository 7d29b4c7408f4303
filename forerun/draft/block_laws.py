"""What a block drafter says of a slot behind the tokens that were drafted before it.

The layers make all slots at once, so each would say its token without knowing those before it. A law adds what follows
from them, one level of a draft after the other. What it says of a node's children depends on the text and on the path
down to the node alone, never on what else is drafted, is drawn or is about to be: so q is the law a token was really
drawn from, and every rule stays exact with chains, trees and laws that are kept.

Tensors are called as in the speculators format, and Domino's as in SpecForge.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forerun.draft.block_shapes import BlockConfig, GruShape, MarkovShape, RefinerShape, SelectorShape


@dataclass(frozen=True, slots=True)
class Behind:
    """What a law knows of some nodes of a draft, of one level.

    Attributes:
        slot: which slot of the block says their children.
        made [S, Hd]: what the layers made of all slots.
        said [F, Vd]: what that slot says by itself.
        previous [F]: the nodes' tokens.
        embed: tokens to what enters the layers, [..] -> [.., Hd].
    """

    slot: int
    made: Tensor
    said: Tensor
    previous: Tensor
    embed: Callable[[Tensor], Tensor]


class BlockLaw(nn.Module):
    """One of them. It may carry a state from a node to its children."""

    def begin(self, made: Tensor, tokens: Tensor) -> Tensor:
        """What stands above the root, [..]. made [S, Hd], of all slots; tokens [2]: the last one before the anchor, and
        the anchor."""
        return made.new_zeros(0)

    def forward(self, behind: Behind, state: Tensor) -> tuple[Tensor, Tensor]:
        """Logits behind some nodes [F, Vd], and the state for their children; state [F, ..]: that of their parents."""
        raise NotImplementedError


class Markov(BlockLaw):
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


class GruLaw(BlockLaw):
    """Domino's law (2605.29707): a GRU reads the anchor and the tokens drafted since, and corrects what slots say.

    The correction of a slot is W2 SiLU(W1 [h; s]), h being what the layers made of the slot and s the GRU's state
    behind the token before; W1 and W2 are `embed_proj`'s. The first slots that say something may go without. The state
    follows from the path alone.
    """

    def __init__(self, shape: GruShape, config: BlockConfig) -> None:
        super().__init__()
        hidden = config.layer.hidden
        self.corrected = config.first + shape.plain  # the first slot that is
        self.prefix_gru = nn.GRU(hidden, shape.state, bias=False, batch_first=True)
        inner = nn.Linear(hidden + shape.state, shape.inner, bias=False)
        self.embed_proj = nn.Sequential(inner, nn.SiLU(), nn.Linear(shape.inner, config.draft_vocab, bias=False))

    def begin(self, made: Tensor, tokens: Tensor) -> Tensor:
        return made.new_zeros(self.prefix_gru.hidden_size)

    def forward(self, behind: Behind, state: Tensor) -> tuple[Tensor, Tensor]:
        read = behind.embed(behind.previous).to(state.dtype)
        state = self.prefix_gru(read[:, None], state[None].contiguous())[1][0]
        if behind.slot < self.corrected:
            return behind.said, state
        made = behind.made[behind.slot].expand(len(state), -1)
        return behind.said + self.embed_proj(torch.cat((made, state), -1)), state


class Selector(BlockLaw):
    """DFlash2's law: of the tokens that a slot finds likeliest by itself, those that fit the token before.

    A candidate's score is the slot's own logit plus <A[x] * P h, B[candidate]>: x is the token before, h what the
    layers made of the slot. What is no candidate has no chance. Which tokens are candidates follows from the slot
    alone. It is for drafters that say all of the target's tokens.
    """

    def __init__(self, shape: SelectorShape, config: BlockConfig) -> None:
        super().__init__()
        self.most = shape.most
        self.predecessor_codebook = nn.Parameter(torch.zeros(config.layer.vocab, shape.rank))
        self.successor_codebook = nn.Parameter(torch.zeros(config.layer.vocab, shape.rank))
        self.hidden_projection = nn.Linear(config.layer.hidden, shape.rank, bias=False)

    def forward(self, behind: Behind, state: Tensor) -> tuple[Tensor, Tensor]:
        own, ids = behind.said.topk(self.most, -1)
        made = self.hidden_projection(behind.made[behind.slot : behind.slot + 1])
        wanted = self.predecessor_codebook[behind.previous] * made
        scores = own + (self.successor_codebook[ids] * wanted[:, None]).sum(-1)
        return torch.full_like(behind.said, -torch.inf).scatter(-1, ids, scores.to(own.dtype)), state


class Refiner(BlockLaw):
    """XPress's law (2608.02438): a causal refiner of rank r corrects what slots say.

    Of each slot it joins what the layers made of it, their mean over the block, and the token before; mixes that with
    what it made of the slots before, channel by channel; and after a small gated MLP reads out a correction. The state
    is what it made of the slots so far, [k, r].

    Its authors guess all tokens of a block at once, correct the guess, and guess again: Jacobi's passes. In such a pass
    a slot sees a guess that later passes may change, so what it says follows from no prefix, and is no law that a token
    could be drawn from. But the refiner looks backwards alone: behind a path that is drafted already its correction of
    the next slot is settled. So slots are corrected one after the other here, each behind the path above it. Greedy
    that is what Jacobi's passes end at (after k of them the first k tokens do not change any more); drawn, q is the law
    of the path, and every rule stays exact, trees included.
    """

    def __init__(self, shape: RefinerShape, config: BlockConfig) -> None:
        super().__init__()
        rank, inner, hidden = shape.rank, shape.rank * shape.ratio, config.layer.hidden
        self.rank, self.first = rank, config.first
        self.token_embed = nn.Embedding(config.layer.vocab, rank)
        self.down_h = nn.Linear(hidden, rank, bias=False)
        self.down_g = nn.Linear(hidden, rank, bias=False)
        self.in_proj = nn.Linear(3 * rank, rank, bias=False)
        self.mix_l = nn.Parameter(torch.zeros(rank, config.block, config.block))
        self.mlp_gate = nn.Linear(rank, inner, bias=False)
        self.mlp_up = nn.Linear(rank, inner, bias=False)
        self.mlp_down = nn.Linear(inner, rank, bias=False)
        self.readout = nn.Linear(rank, config.draft_vocab, bias=False)

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
