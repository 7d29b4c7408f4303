"""Block drafters written out again, each law from its paper: the whole text anew for each path."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from forerun.draft.block_head import BlockHead
from forerun.draft.block_shapes import GruShape, MarkovShape, RefinerShape, SelectorShape
from tests.draft.twins import Twin, states_of


class BlockTwin(Twin):
    def __init__(self, head: BlockHead) -> None:
        super().__init__(head, head.config.layer)
        self.config = head.config
        self.made = functools.cache(self._made)

    def convolved(self, x: Tensor, own: Tensor, name: str, which: int) -> Tensor:
        """Each channel of each slot, by itself: own [S, 2, taps, groups]."""
        base, out = self.w[f"{name}.base_kernel"][which], torch.zeros_like(x)
        group = torch.arange(x.shape[1]) // self.config.conv.group
        for slot in range(len(x)):
            for tap in range(min(self.config.conv.taps, slot + 1)):
                out[slot] += (base[tap] + own[slot, which, tap, group]) * x[slot - tap]
        return out

    def around(self, name: str, part: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """A part of a layer, between two convolutions if it has some."""
        c = self.config.conv
        if c is None:
            return part(x)
        own = self.product(x, f"{name}.kernel_projection").view(len(x), 2, c.taps, -1)
        return self.convolved(part(self.convolved(x, own, name, 0)), own, name, 1)

    def layer(self, i: int, x: Tensor, context: Tensor, positions: Tensor) -> Tensor:
        """One layer over the block x, whose slots see all context and one another, as far as nothing says otherwise."""
        at = f"layers.{i}."
        normed = self.norm(x, f"{at}input_layernorm")
        x = x + self.around(f"{at}attention_conv", lambda y: self.within(i, y, context, positions), normed)
        normed = self.norm(x, f"{at}post_attention_layernorm")
        return x + self.around(f"{at}mlp_conv", lambda y: self.mlp(y, at), normed)

    def within(self, i: int, x: Tensor, context: Tensor, positions: Tensor) -> Tensor:
        """The attention of a block."""
        c, own, both, begins = self.c, f"layers.{i}.self_attn.", torch.cat((context, x)), len(context)
        parts = (("q", x), ("k", both), ("v", both))
        q, k, v = (self.product(y, f"{own}{n}_proj").view(len(y), -1, c.head_dim) for n, y in parts)
        if c.qk_norm:
            q, k = self.norm(q, f"{own}q_norm"), self.norm(k, f"{own}k_norm")
        slots, keys, window = torch.arange(len(x))[:, None], torch.arange(len(both))[None], c.windows[i]
        unseen = keys < (begins - window if window else 0)
        if self.config.window_causal if window else self.config.causal:
            unseen = unseen | (keys > begins + slots)
        q, k = self.rotate(q, positions[begins:]), self.rotate(k, positions)
        return self.product(self.attend(q, k, v, unseen), f"{own}o_proj")

    def _made(self, tokens: tuple[int, ...], first: int = 0) -> Tensor:
        """What it makes of each slot of the block behind `tokens`, whose states are known from `first` on. [S, Hd]"""
        c = self.config
        context = self.norm(self.product(states_of(tokens[:-1], c.boundaries)[first:], "fc"), "hidden_norm")
        x = self.embedded([tokens[-1], *[c.mask_token] * (c.block - 1)])
        positions = torch.arange(first, len(tokens) - 1 + c.block)
        for i in range(self.c.layers):
            x = self.layer(i, x, context, positions)
        return self.norm(x, "norm")

    def logits(self, tokens: tuple[int, ...], path: tuple[int, ...], first: int = 0) -> Tensor:
        c = self.config
        made = self.made(tokens, first)
        self.mean = made.mean(0)
        slot = len(path) + (0 if c.sample_from_anchor else 1)
        own = self.w["lm_head.weight"] @ made[slot] if c.own_head else self.view.head(made[slot, None])[0].double()
        return self.everywhere(LAWS[type(c.law)](self, own, made[: slot + 1], (*tokens, *path)))

    def trust(self, tokens: tuple[int, ...], path: tuple[int, ...]) -> float:
        """The confidence in the token after the path."""
        known = self.w["markov_head.markov_w1.weight"][(*tokens, *path)[-1]]
        return float(self.product(torch.cat((self.made(tokens)[len(path)], known)), "confidence_head.proj").sigmoid())

    def markov(self, said: Tensor, made: Tensor, tokens: tuple[int, ...]) -> Tensor:
        """With a Markov head: made [slots up to this one, Hd]; the token before this slot is the last of `tokens`."""
        kind, table = self.config.law.kind, self.w["markov_head.markov_w1.weight"]
        known, rank = table[tokens[-1]], table.shape[1]
        if kind == "gated":
            known = known * self.product(torch.cat((made[-1], known)), "markov_head.gate_proj").sigmoid()
        if kind == "rnn":
            state, before = torch.zeros(rank).double(), list(tokens[-len(made) :])
            if not self.config.sample_from_anchor:  # the anchor stands before its own slot, and before the next
                before = [before[1] if len(before) > 1 else before[0], *before[1:]]
            for h, token in zip(made, before, strict=True):
                z = self.product(torch.cat((state, table[token], h)), "markov_head.joint_proj")
                gate, new, out = z[:rank].sigmoid(), z[rank : 2 * rank].tanh(), z[2 * rank :].tanh()
                state, known = gate * state + (1 - gate) * new, out
        return said + self.product(known, "markov_head.markov_w2")

    def domino(self, said: Tensor, made: Tensor, tokens: tuple[int, ...]) -> Tensor:
        """With a GRU over the anchor and what came since."""
        shape, first = self.config.law, self.config.first
        if len(made) - 1 < first + shape.plain:
            return said
        state = torch.zeros(shape.state).double()
        for token in tokens[len(tokens) - (len(made) - first) :]:
            x = self.embedded([token])[0]
            reads = (self.w["domino_head.prefix_gru.weight_ih_l0"] @ x).chunk(3)
            keeps = (self.w["domino_head.prefix_gru.weight_hh_l0"] @ state).chunk(3)
            reset, update = ((a + b).sigmoid() for a, b in zip(reads[:2], keeps[:2], strict=True))
            state = update * state + (1 - update) * (reads[2] + reset * keeps[2]).tanh()
        z = self.product(torch.cat((made[-1], state)), "domino_head.embed_proj.0")
        return said + self.product(z / (1 + (-z).exp()), "domino_head.embed_proj.2")

    def selected(self, said: Tensor, made: Tensor, tokens: tuple[int, ...]) -> Tensor:
        """Of the likeliest tokens by themselves, with how well they fit the one before."""
        before, behind = (self.w[f"candidate_selector.{name}_codebook"] for name in ("predecessor", "successor"))
        wanted = before[tokens[-1]] * self.product(made[-1], "candidate_selector.hidden_projection")
        full = torch.full_like(said, -torch.inf)
        for token in said.argsort(descending=True)[: self.config.law.most].tolist():
            full[token] = said[token] + wanted @ behind[token]
        return full

    def refined(self, said: Tensor, made: Tensor, tokens: tuple[int, ...]) -> Tensor:
        """With the refiner over all slots up to this one, each behind its own token; the mean is of the whole block."""
        of = {n.removeprefix("refiner_head."): w for n, w in self.w.items() if n.startswith("refiner_head.")}
        entered = []
        for h, token in zip(made, tokens[-len(made) :], strict=True):
            parts = (of["down_h.weight"] @ h, of["down_g.weight"] @ self.mean, of["token_embed.weight"][token])
            entered.append(of["in_proj.weight"] @ torch.cat(parts))
        x = entered[-1].clone()
        for channel in range(len(x)):
            for slot, other in enumerate(entered):
                x[channel] += of["mix_l"][channel, len(made) - 1, slot] * other[channel]
        gate = of["mlp_gate.weight"] @ x
        x = x + of["mlp_down.weight"] @ (gate / (1 + (-gate).exp()) * (of["mlp_up.weight"] @ x))
        return said + of["readout.weight"] @ x


LAWS: dict[type, Callable[..., Tensor]] = {  # what is said, with what the tokens before a slot add to it
    type(None): lambda twin, said, made, tokens: said, MarkovShape: BlockTwin.markov, GruShape: BlockTwin.domino,
    SelectorShape: BlockTwin.selected, RefinerShape: BlockTwin.refined,
}  # fmt: skip
