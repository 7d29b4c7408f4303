"""Block drafters written out again, each law from its paper: the whole text anew for each path."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from forerun.draft.block.module import BlockHead
from tests.draft.twins import Twin, states_of


class BlockTwin(Twin):
    def __init__(self, head: BlockHead) -> None:
        super().__init__(head, head.config.layer)
        self.config = head.config
        self.made = functools.cache(self._made)

    def layer(self, i: int, x: Tensor, context: Tensor, positions: Tensor) -> Tensor:
        """One layer over the block x, whose slots see all context and one another, as far as
        nothing says otherwise."""
        at = f"layers.{i}."
        normed = self.norm(x, f"{at}input_layernorm")
        x = x + self.within(i, normed, context, positions)
        normed = self.norm(x, f"{at}post_attention_layernorm")
        return x + self.mlp(normed, at)

    def within(self, i: int, x: Tensor, context: Tensor, positions: Tensor) -> Tensor:
        """The attention of a block."""
        c, own, both, begins = (
            self.c,
            f"layers.{i}.self_attn.",
            torch.cat((context, x)),
            len(context),
        )
        parts = (("q", x), ("k", both), ("v", both))
        q, k, v = (self.product(y, f"{own}{n}_proj").view(len(y), -1, c.head_dim) for n, y in parts)
        if c.qk_norm:
            q, k = self.norm(q, f"{own}q_norm"), self.norm(k, f"{own}k_norm")
        slots, keys, window = (
            torch.arange(len(x))[:, None],
            torch.arange(len(both))[None],
            c.windows[i],
        )
        unseen = keys < (begins - window if window else 0)
        if window and self.config.window_causal:
            unseen = unseen | (keys > begins + slots)
        q, k = self.rotate(q, positions[begins:]), self.rotate(k, positions)
        return self.product(self.attend(q, k, v, unseen), f"{own}o_proj")

    def _made(self, tokens: tuple[int, ...], first: int = 0) -> Tensor:
        """What it makes of each slot of the block behind `tokens`, whose states are known from
        `first` on. [S, Hd]"""
        c = self.config
        context = self.norm(
            self.product(states_of(tokens[:-1], c.aux_hidden_layers)[first:], "fc"), "hidden_norm"
        )
        x = self.embedded([tokens[-1], *[c.mask_token] * (c.block - 1)])
        positions = torch.arange(first, len(tokens) - 1 + c.block)
        for i in range(self.c.layers):
            x = self.layer(i, x, context, positions)
        return self.norm(x, "norm")

    def logits(self, tokens: tuple[int, ...], path: tuple[int, ...], first: int = 0) -> Tensor:
        c = self.config
        made = self.made(tokens, first)
        slot = len(path) + (0 if c.sample_from_anchor else 1)
        own = (
            self.w["lm_head.weight"] @ made[slot]
            if c.own_head
            else self.view.head(made[slot, None])[0].double()
        )
        return self.everywhere(
            self.markov(own, made[: slot + 1], (*tokens, *path)) if c.markov else own
        )

    def trust(self, tokens: tuple[int, ...], path: tuple[int, ...]) -> float:
        """The confidence in the token after the path."""
        known = self.w["markov_head.markov_w1.weight"][(*tokens, *path)[-1]]
        return float(
            self.product(
                torch.cat((self.made(tokens)[len(path)], known)), "confidence_head.proj"
            ).sigmoid()
        )

    def markov(self, said: Tensor, made: Tensor, tokens: tuple[int, ...]) -> Tensor:
        """With a Markov head: made [slots up to this one, Hd]; the token before this slot is the
        last of `tokens`."""
        kind, table = self.config.markov.kind, self.w["markov_head.markov_w1.weight"]
        known, rank = table[tokens[-1]], table.shape[1]
        if kind == "gated":
            known = (
                known
                * self.product(torch.cat((made[-1], known)), "markov_head.gate_proj").sigmoid()
            )
        if kind == "rnn":
            state, before = torch.zeros(rank).double(), list(tokens[-len(made) :])
            if (
                not self.config.sample_from_anchor
            ):  # the anchor stands before its own slot, and before the next
                before = [before[1] if len(before) > 1 else before[0], *before[1:]]
            for h, token in zip(made, before, strict=True):
                z = self.product(torch.cat((state, table[token], h)), "markov_head.joint_proj")
                gate, new, out = z[:rank].sigmoid(), z[rank : 2 * rank].tanh(), z[2 * rank :].tanh()
                state, known = gate * state + (1 - gate) * new, out
        return said + self.product(known, "markov_head.markov_w2")
