"""Heads written out again, from papers and files: no cache, no chunks, no trees; everything anew
for each path.

A head that is fed the states of the wrong position or boundary, or keeps keys of drafted tokens,
still drafts, only
worse: so what is drafted from is compared with what these say, node by node.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from forerun.cache.attention import Segment
from forerun.draft.proposer import TargetView, view_of
from forerun.models.config import ModelConfig
from forerun.models.rope import rope_tables
from forerun.runtime.torch_runner import Runner
from tests import tiny


def target(family: str = "llama") -> TargetView:
    return view_of(tiny.decoder(tiny.family(family)))


@functools.cache
def states_of(tokens: tuple[int, ...], aux_hidden_layers: tuple[int, ...]) -> Tensor:
    """The target's states of each token, side by side, from one pass over the whole text. [T, n *
    H]"""
    runner = Runner(tiny.decoder(tiny.family("llama")), tokens=256, page=256, slots=1)
    runner.cache.pages.grow(0, len(tokens))
    segment = Segment(0, list(tokens), list(range(-1, len(tokens) - 1)), [])
    features = runner.forward([segment], aux_hidden_layers).features
    return torch.cat([features[boundary] for boundary in aux_hidden_layers], -1)


@functools.cache
def last_states(tokens: tuple[int, ...]) -> Tensor:
    """The target's states of each token behind its last norm. [T, H]"""
    decoder = tiny.decoder(tiny.family("llama"))
    x = states_of(tokens, (decoder.config.layers,))
    return norm(x, decoder.weights.norm.weight, decoder.config.norm_eps)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


class Twin:
    """What they share: products by name, norms, rotary embeddings, attention head by head."""

    def __init__(self, head: Any, layer: ModelConfig) -> None:
        self.w, self.c, self.view = head.double().state_dict(), layer, target()
        self.head = tiny.decoder(tiny.family("llama")).weights.head.weight
        self.cos, self.sin = rope_tables(layer, layer.ropes[0], 300, torch.float64)

    def logits(self, tokens: tuple[int, ...], path: tuple[int, ...], first: int = 0) -> Tensor:
        """Over the target's vocabulary, after the last token of the path; states are known from
        `first` on."""
        raise NotImplementedError

    def norm(self, x: Tensor, name: str) -> Tensor:
        return norm(x, self.w[f"{name}.weight"], self.c.norm_eps)

    def product(self, x: Tensor, name: str) -> Tensor:
        return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", 0.0)

    def embedded(self, ids: list[int]) -> Tensor:
        own = self.w.get("embed_tokens.weight")
        return self.view.embed(torch.tensor(ids)).double() if own is None else own[ids]

    def everywhere(self, said: Tensor) -> Tensor:
        """What is said of some tokens, at their places in the target's vocabulary. [.., V]"""
        ids = torch.arange(said.shape[-1]) + self.w.get(
            "d2t", torch.zeros(said.shape[-1], dtype=torch.int64)
        )
        full = torch.full((*said.shape[:-1], self.view.vocab), -torch.inf, dtype=torch.float64)
        full[..., ids] = said
        return full

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """[T, heads, D]"""
        a, b = x.chunk(2, -1)
        cos, sin = self.cos[positions], self.sin[positions]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, unseen: Tensor) -> Tensor:
        """q, k: rotated; unseen [T, K]: what each may not look at. [T, heads * D]"""
        heads = []
        for h in range(self.c.heads):
            shared = h // (self.c.heads // self.c.kv_heads)
            scores = q[:, h] @ k[:, shared].T / self.c.head_dim**0.5
            heads.append(scores.masked_fill(unseen, -torch.inf).softmax(-1) @ v[:, shared])
        return torch.cat(heads, 1)

    def attention(self, x: Tensor, at: str = "layers.0.", window: int | None = None) -> Tensor:
        """Each position over itself and those before it, as far as a window reaches."""
        own, positions = f"{at}self_attn.", torch.arange(len(x))
        q, k, v = (
            self.product(x, f"{own}{n}_proj").view(len(x), -1, self.c.head_dim) for n in "qkv"
        )
        if self.c.qk_norm:
            q, k = self.norm(q, f"{own}q_norm"), self.norm(k, f"{own}k_norm")
        behind = positions[:, None] - positions[None]
        unseen = (behind < 0) | (behind >= (window or len(x)))
        return self.product(
            self.attend(self.rotate(q, positions), self.rotate(k, positions), v, unseen),
            f"{own}o_proj",
        )

    def mlp(self, x: Tensor, at: str = "layers.0.") -> Tensor:
        gate, up = (self.product(x, f"{at}mlp.{n}_proj") for n in ("gate", "up"))
        return self.product(gate / (1 + (-gate).exp()) * up, f"{at}mlp.down_proj")


class PairTwin(Twin):
    """Heads on pairs: of a drafted token, the head's own state of its parent stands for the
    target's."""

    def states(self, tokens: tuple[int, ...]) -> Tensor:
        """What the embeddings of all tokens but the first are joined with. [T - 1, Hd]"""
        raise NotImplementedError

    def make(self, ids: list[int], states: Tensor) -> Tensor:
        """What it makes of these pairs. [T, Hd]"""
        raise NotImplementedError

    def again(self, made: Tensor) -> Tensor:
        """What is made of a drafted token's parent, as a state."""
        return made

    def say(self, made: Tensor) -> Tensor:
        raise NotImplementedError

    def made(self, tokens: tuple[int, ...], path: tuple[int, ...], first: int = 0) -> Tensor:
        """What it makes of every pair: those of the committed tokens from `first` on, then those of
        the path."""
        ids, states = list(tokens[first + 1 :]), self.states(tokens[:-1])[first:]
        made = self.make(ids, states)
        for token in path:
            states = torch.cat((states, self.again(made[-1:])))
            ids.append(token)
            made = self.make(ids, states)
        return made

    def logits(self, tokens: tuple[int, ...], path: tuple[int, ...], first: int = 0) -> Tensor:
        return self.everywhere(self.say(self.made(tokens, path, first)[-1]))


class EagleTwin(PairTwin):
    """EAGLE-3's."""

    def __init__(self, head: Any) -> None:
        super().__init__(head, head.config.layer)
        self.config = head.config

    def fuse(self, features: Tensor) -> Tensor:
        c = self.config
        if c.norm_before_fc:
            features = self.norm(features, "input_norm")
        if c.fc_norm:
            parts = features.split(c.target_hidden, -1)
            features = torch.cat(
                [self.norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)], -1
            )
        return self.product(features, "fc")

    def states(self, tokens: tuple[int, ...]) -> Tensor:
        return self.fuse(states_of(tokens, self.config.aux_hidden_layers))

    def make(self, ids: list[int], states: Tensor) -> Tensor:
        return self.layer(self.embedded(ids), states)

    def layer(self, embedded: Tensor, state: Tensor) -> Tensor:
        at = "layers.0."
        normed = self.norm(state, f"{at}hidden_norm")
        if self.config.join:
            state = self.product(
                torch.cat((self.norm(embedded, f"{at}embed_norm"), normed), -1), f"{at}input_proj"
            )
            x = self.norm(state, f"{at}input_layernorm")
        else:
            x = torch.cat((self.norm(embedded, f"{at}input_layernorm"), normed), -1)
        out = self.attention(x, at, self.c.windows[0])
        x = (normed if self.config.norm_before_residual else state) + out
        return x + self.mlp(self.norm(x, f"{at}post_attention_layernorm"), at)

    def again(self, made: Tensor) -> Tensor:
        return self.norm(made, "norm") if self.config.norm_output else made

    def say(self, made: Tensor) -> Tensor:
        return self.product(self.norm(made, "norm"), "lm_head")


class ParallelTwin(EagleTwin):
    """P-EAGLE's, over the whole text and all masks."""

    def logits(self, tokens: tuple[int, ...], path: tuple[int, ...], first: int = 0) -> Tensor:
        """Of a path only the length counts."""
        features = states_of(tokens[:-1], self.config.aux_hidden_layers)[first:]
        masks = self.w["mask_hidden"].view(1, -1).expand(len(path), -1)
        x = self.make(
            [*tokens[first + 1 :], *[self.config.mask_token] * len(path)],
            self.fuse(torch.cat((features, masks))),
        )
        for i in range(1, self.c.layers):
            at = f"layers.{i}."
            x = x + self.attention(self.norm(x, f"{at}input_layernorm"), at, self.c.windows[i])
            x = x + self.mlp(self.norm(x, f"{at}post_attention_layernorm"), at)
        return self.everywhere(self.say(x[-1]))


class FirstTwin(PairTwin):
    """EAGLE-1's, from the paper."""

    def __init__(self, head: Any) -> None:
        super().__init__(head, head.layer)

    def states(self, tokens: tuple[int, ...]) -> Tensor:
        return last_states(tokens)

    def make(self, ids: list[int], states: Tensor) -> Tensor:
        x = self.product(torch.cat((self.embedded(ids), states), -1), "fc")
        x = x + self.attention(x)
        return x + self.mlp(self.norm(x, "layers.0.post_attention_layernorm"))

    def say(self, made: Tensor) -> Tensor:
        return made @ self.w.get("lm_head.weight", self.head).T


class MtpTwin(PairTwin):
    """Multi-token modules'."""

    AT = "mtp_layers.0."

    def __init__(self, module: Any) -> None:
        super().__init__(module, module.layer)

    def states(self, tokens: tuple[int, ...]) -> Tensor:
        return last_states(tokens)

    def make(self, ids: list[int], states: Tensor) -> Tensor:
        joined = (self.norm(self.embedded(ids), f"{self.AT}token_layernorm"),
                  self.norm(states, f"{self.AT}hidden_layernorm"))  # fmt: skip
        x = self.product(torch.cat(joined, -1), f"{self.AT}input_proj")
        x = x + self.attention(self.norm(x, f"{self.AT}input_layernorm"), self.AT)
        x = x + self.mlp(self.norm(x, f"{self.AT}post_attention_layernorm"), self.AT)
        return self.norm(x, f"{self.AT}final_layernorm")

    def say(self, made: Tensor) -> Tensor:
        return made @ self.w.get("lm_head.weight", self.head).T
