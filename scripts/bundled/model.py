"""The bundled decoder while it is trained: Llama's arithmetic in plain torch, its loss in chunks, its sizes by name.

Tensors are called as in Hugging Face's Llama, less the leading "model.". Letters: B rows, T tokens of a row, H hidden
size, V vocabulary. What the repository holds of size "base" (64 MB at most), in millions of bytes:

    target   int8: 9 layers of 2.95M weights, one byte each, and their scales;          26.5 + 0.1
             bfloat16: the embedding, which is the head too, 4096 x 512                  4.2
    draft    bfloat16: base-draft, 2.5M weights                                          5.1
    eagle3   bfloat16: fusion 0.8M, layer (MLP of 1024) 2.9M, head 2.1M                 11.5
    medusa   bfloat16: 3 heads of 4096 x 512 and a block of 512 x 512 each              14.2
    tokenizers and cards                                                                 1.3
                                                                                        62.9

A vocabulary of 4096 is what lets Medusa heads in: each costs V x H weights, as much as the embedding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from forerun.errors import ConfigError, nearest

THETA, EPS = 10000.0, 1e-6
CHUNK = 1 << 15  # tokens whose logits are there at the same time
INITIAL = 0.02  # standard deviation of weights, and of what layers add to the residual nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A shape, and how it is trained and stored.

    Attributes:
        rows: texts of `context` tokens in one pass; passes: of these, whose gradients make one step.
        cut: of how many shorter rows a row is read as in most of the run.
        store: what is written: int8 (one scale an output) or bfloat16.
    """

    vocab: int = 4096
    context: int = 4096
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    rows: int
    passes: int
    cut: int = 4
    store: str = "int8"

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


def _small(hidden: int, intermediate: int, layers: int, heads: int, rows: int, **other: Any) -> Size:
    """Of what others begin with."""
    return Size(
        hidden=hidden, intermediate=intermediate, layers=layers, heads=heads, kv_heads=heads // 2, rows=rows, passes=1,
        store="bfloat16", **other,
    )  # fmt: skip


SIZES = {
    "tiny": Size(vocab=512, context=256, hidden=64, intermediate=192, layers=3, heads=4, kv_heads=2, rows=8, passes=1),
    "tiny-seed": _small(32, 96, 3, 2, 8, vocab=512, context=256),
    "tiny-draft": _small(32, 96, 2, 2, 8, vocab=512, context=256),
    "small": Size(context=2048, hidden=512, intermediate=1408, layers=7, heads=8, kv_heads=4, rows=4, passes=1),
    "small-seed": _small(256, 704, 6, 4, 4, context=1024),
    "small-draft": _small(256, 704, 4, 4, 2),
    "base": Size(hidden=512, intermediate=1408, layers=9, heads=8, kv_heads=4, rows=32, passes=2),
    "base-draft": _small(256, 704, 2, 4, 64),
}  # tiny runs to its end in two minutes anywhere, small is for a patient CPU, base is the real one
SEED = "-seed"  # the name of the size that another is grown from, where there is one, ends so


def size_of(name: str) -> Size:
    """A size by its name. Raises ConfigError."""
    if name not in SIZES:
        raise ConfigError(f"there is no size {name!r}: {nearest(name, SIZES)}")
    return SIZES[name]


class Norm(nn.Module):
    """Llama's norm: in float32, then in the precision of what it was given."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
        return (self.weight * wide).to(x.dtype)


class Attention(nn.Module):
    """Causal attention within a row; several query heads share a key head."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads, self.kv_heads, keys = size.heads, size.kv_heads, size.kv_heads * size.head_dim
        self.q_proj = nn.Linear(size.hidden, size.hidden, bias=False)
        self.k_proj = nn.Linear(size.hidden, keys, bias=False)
        self.v_proj = nn.Linear(size.hidden, keys, bias=False)
        self.o_proj = nn.Linear(size.hidden, size.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, tokens, hidden = x.shape
        q, k, v = (
            product(x).view(rows, tokens, heads, -1).transpose(1, 2)
            for product, heads in (
                (self.q_proj, self.heads),
                (self.k_proj, self.kv_heads),
                (self.v_proj, self.kv_heads),
            )
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = (each.repeat_interleave(self.heads // self.kv_heads, dim=1) for each in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(rows, tokens, hidden))
        return out


class Mlp(nn.Module):
    """A gated MLP."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size.hidden, size.intermediate, bias=False)
        self.up_proj = nn.Linear(size.hidden, size.intermediate, bias=False)
        self.down_proj = nn.Linear(size.intermediate, size.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Attention and MLP on a residual stream."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(size.hidden), Norm(size.hidden)
        self.self_attn, self.mlp = Attention(size), Mlp(size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """The model; its head is its embedding. `cos` and `sin` [context, head size / 2] are no part of a checkpoint."""

    cos: Tensor
    sin: Tensor

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.embed_tokens = nn.Embedding(size.vocab, size.hidden)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.norm = Norm(size.hidden)
        slow = THETA ** (-torch.arange(0, size.head_dim, 2) / size.head_dim)
        angles = torch.outer(torch.arange(size.context), slow)
        self.loss_of = loss_of
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, weight in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(weight)
            elif weight.ndim > 1:
                nn.init.normal_(weight, std=INITIAL)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """The mean cross entropy in nats of `targets` behind `ids`, both int64 [B, T]. A scalar."""
        tokens = ids.shape[1]
        cos, sin = self.cos[:tokens], self.sin[:tokens]
        x = self.embed_tokens(ids)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))  # the residual stream is what most bytes are moved for
        for layer in self.layers:
            x = layer(x, cos, sin)
        states, wanted = self.norm(x).flatten(0, 1), targets.flatten()
        total = torch.zeros((), device=x.device)
        for at in range(0, len(wanted), CHUNK):
            part = states[at : at + CHUNK], self.embed_tokens.weight, wanted[at : at + CHUNK]
            one = len(wanted) <= CHUNK
            total = total + (self.loss_of(*part) if one else checkpoint(self.loss_of, *part, use_reentrant=False))
        return total / len(wanted)

    def compile_parts(self) -> None:
        """Compile what the time goes into. Layer by layer: they share one graph, so that it takes seconds."""
        for layer in self.layers:
            layer.compile(dynamic=False)
        self.loss_of = torch.compile(loss_of, dynamic=False)

    def matrices(self) -> list[nn.Parameter]:
        """The weights of all linear layers, which Muon is for."""
        return [p for name, p in self.named_parameters() if p.ndim > 1 and "embed" not in name]

    def others(self) -> list[nn.Parameter]:
        """The embedding and the norms."""
        return [p for name, p in self.named_parameters() if p.ndim <= 1 or "embed" in name]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions, halves apart as in Llama. x [B, heads, T, D], cos and sin [T, D / 2]."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


def loss_of(states: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """The summed cross entropy of some tokens: states [N, H], head [V, H], targets [N]."""
    return F.cross_entropy(F.linear(states, head).float(), targets, reduction="sum")


def flops_of(size: Size, tokens: int) -> float:
    """Floating-point operations that a token of rows of `tokens` costs in training, forward and backward: six for each
    weight it is multiplied with (the head's too), and twelve for each channel of half the tokens before it, a layer.
    """
    heads_kept = size.kv_heads / size.heads
    layer = size.hidden * size.hidden * (2 + 2 * heads_kept) + 3 * size.hidden * size.intermediate
    weights = size.layers * layer + size.vocab * size.hidden
    return 6 * weights + 12 * size.layers * size.hidden * tokens / 2
