"""What the modules of drafters are made of: attention, a gated MLP, and their products on the native kernels.

Shapes are free up to the last axes, so that a module computes flat tokens while it drafts and rows of texts while it
is trained; whoever calls it brings the rotations and the attention, and so decides who sees whom.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from forerun.kernels import reference as kernels
from forerun.models.config import ModelConfig, make_config
from forerun.models.decoder import Attend
from forerun.packed import Linear

M = TypeVar("M", bound=nn.Module)
ACTIVATIONS = {"gelu_tanh": "gelu_pytorch_tanh"}  # as transformers calls them, where that is not our name


def layer_like(c: ModelConfig, intermediate: int | None = None) -> ModelConfig:
    """A Llama layer of the sizes of another family's: what a drafter of our own has, whatever its target. It norms
    queries and keys (as Qwen3 does) and turns them as the target's last layer does."""
    rope = c.ropes[c.rope_of[-1]].parameters if c.rope_of[-1] is not None else {}
    raw = {
        "model_type": "qwen3" if c.qk_norm else "llama", "vocab_size": c.vocab, "hidden_size": c.hidden,
        "num_hidden_layers": 1, "intermediate_size": intermediate or c.intermediate, "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads, "head_dim": c.head_dim, "max_position_embeddings": c.context,
        "rms_norm_eps": c.norm_eps, "rope_theta": rope.get("rope_theta", 10000.0),
        "hidden_act": ACTIVATIONS.get(c.activation, c.activation),
    }  # fmt: skip
    return make_config(raw, Path("config.json"))


class SelfAttention(nn.Module):
    """Attention over inputs of any width. Tensors are called as in Llama and Qwen3."""

    def __init__(self, c: ModelConfig, width: int, layer: int = 0) -> None:
        """`width` is that of its inputs, `layer` the number it has for `attend`."""
        super().__init__()
        queries, keys = c.heads * c.head_dim, c.kv_heads * c.head_dim
        self.head_dim, self.layer = c.head_dim, layer
        self.q_proj = nn.Linear(width, queries, bias=c.qkv_bias)
        self.k_proj = nn.Linear(width, keys, bias=c.qkv_bias)
        self.v_proj = nn.Linear(width, keys, bias=c.qkv_bias)
        self.o_proj = nn.Linear(queries, c.hidden, bias=False)
        self.q_norm = nn.RMSNorm(c.head_dim, c.norm_eps) if c.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(c.head_dim, c.norm_eps) if c.qk_norm else nn.Identity()

    def products(self) -> Tensor:
        """The weights of queries, keys and values, one below the other."""
        return torch.cat((self.q_proj.weight, self.k_proj.weight, self.v_proj.weight))

    def biases(self) -> Tensor | None:
        """What is added to these products, if anything is."""
        q, k, v = (product.bias for product in (self.q_proj, self.k_proj, self.v_proj))
        return None if q is None else torch.cat((q, k, v))

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """x [.., width]; rotation: cos and sin of each position, [.., 1, D / 2]. -> [.., H]"""
        heads = (*x.shape[:-1], -1, self.head_dim)
        q, k, v = (product(x).view(heads) for product in (self.q_proj, self.k_proj, self.v_proj))
        q, k = kernels.rotate(self.q_norm(q), *rotation), kernels.rotate(self.k_norm(k), *rotation)
        out: Tensor = self.o_proj(attend(self.layer, q, k, v).flatten(-2))
        return out


class Mlp(nn.Module):
    """A gated MLP."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.activation = c.activation
        self.gate_proj = nn.Linear(c.hidden, c.intermediate, bias=False)
        self.up_proj = nn.Linear(c.hidden, c.intermediate, bias=False)
        self.down_proj = nn.Linear(c.intermediate, c.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(kernels.activate(self.gate_proj(x), self.activation) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """What all layers of drafters have. Subclasses make the parts, in the order in which they are stored."""

    self_attn: SelfAttention
    post_attention_layernorm: nn.RMSNorm
    mlp: Mlp

    def along(self, x: Tensor, read: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """x [.., H] with what attention makes of `read`, and the MLP of both, added. -> [.., H]"""
        x = x + self.self_attn(read, rotation, attend)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class DecoderLayer(Layer):
    """An ordinary decoder layer. `layer` is the number it has for `attend`."""

    def __init__(self, c: ModelConfig, layer: int = 0) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(c.hidden, c.norm_eps)
        self.self_attn = SelfAttention(c, c.hidden, layer)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden, c.norm_eps)
        self.mlp = Mlp(c)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """[.., H] -> [.., H]"""
        return self.along(x, self.input_layernorm(x), rotation, attend)


class JoinedLayer(Layer):
    """A decoder layer, and before it the product that makes one vector of two."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.input_proj = nn.Linear(2 * c.hidden, c.hidden, bias=False)
        self.input_layernorm = nn.RMSNorm(c.hidden, c.norm_eps)
        self.self_attn = SelfAttention(c, c.hidden)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden, c.norm_eps)
        self.mlp = Mlp(c)


class Native(nn.Module):
    """A linear layer on the native kernels."""

    def __init__(self, linear: nn.Linear, form: str) -> None:
        super().__init__()
        self.product = Linear(linear.weight.detach(), form, linear.bias)
        self.packed = self.product.packed  # the weight in the kernels' layout

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x)


def with_native_products(module: M, form: str, leave: str | None = None) -> M:
    """The same module, its norms shared, its products in `form` on the native kernels: for drafting, not training.

    Parts whose names begin with `leave` stay as they are.
    """
    shared = {id(tensor): tensor for tensor in module.parameters()}
    fast = copy.deepcopy(module, shared)  # copies the structure only
    for within, part in list(fast.named_modules()):
        if leave is not None and within.startswith(leave):
            continue
        for name, child in part.named_children():
            if isinstance(child, nn.Linear):
                setattr(part, name, Native(child, form))
    return fast
