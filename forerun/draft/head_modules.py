"""What a head has of its target: the embedding and the head, unless it has its own, and all of its
tokens or some."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from forerun.draft.head_files import Tensors, size_of
from forerun.draft.proposer import TargetView
from forerun.errors import LoadError
from forerun.kernels import reference as kernels
from forerun.models.config import ModelConfig, make_config
from forerun.models.decoder import Attend
from forerun.models.shortlist import ids_of, maps_of
from forerun.runtime.packed import Linear, PackedMatrix

M = TypeVar("M", bound=nn.Module)
ACTIVATIONS = {
    "gelu_tanh": "gelu_pytorch_tanh"
}  # as transformers calls them, where that is not our name


def layer_like(c: ModelConfig, intermediate: int | None = None) -> ModelConfig:
    """A Llama layer of the sizes of another family's: what a drafter of our own has, whatever its
    target. It norms queries and keys (as Qwen3 does) and turns them as the target's last layer
    does."""
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
        out: Tensor = self.down_proj(
            kernels.activate(self.gate_proj(x), self.activation) * self.up_proj(x)
        )
        return out


class Layer(nn.Module):
    """What all layers of drafters have. Subclasses make the parts, in the order in which they are
    stored."""

    self_attn: SelfAttention
    post_attention_layernorm: nn.RMSNorm
    mlp: Mlp

    def along(
        self, x: Tensor, read: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend
    ) -> Tensor:
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
    """The same module, its norms shared, its products in `form` on the native kernels: for
    drafting, not training.

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


EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
EXACT = 2.0**-8  # rows that differ by less than this share do so by how 16 bits round
ROWS, PROBES = 4096, 8  # rows compared at a time; vectors that tell two heads apart


class Head(nn.Module):
    """Base of modules that may borrow from their target, and may say some of its tokens alone.

    Attributes:
        title: what messages call it.
        target: what it borrows from; there once it is attached.
        embed_tokens, lm_head: its own; None where they are the target's.
        d2t, t2d: there where it says some tokens alone. d2t [Vd] int64: its token i is the target's
            token i + d2t[i]; t2d [V] bool marks those tokens.
    """

    title: str
    target: TargetView
    embed_tokens: nn.Embedding | None
    lm_head: nn.Linear | None
    d2t: Tensor | None
    t2d: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens, self.lm_head = None, None

    def list_tokens(self, count: int, vocab: int) -> None:
        """It says `count` of a target's `vocab` tokens: the first ones, until `say_only` tells
        which."""
        reduced = count < vocab
        self.register_buffer("d2t", torch.zeros(count, dtype=torch.int64) if reduced else None)
        self.register_buffer("t2d", torch.arange(vocab) < count if reduced else None)

    def say_only(self, ids: Tensor) -> None:
        """Which of the target's tokens it says, ascending: as many as it has rows for."""
        assert self.d2t is not None and self.t2d is not None
        d2t, t2d = maps_of(ids, len(self.t2d))
        self.d2t.copy_(d2t)
        self.t2d.copy_(t2d)

    def tokens(self) -> Tensor | None:
        """The target's token ids it says, in the order of its logits, [Vd] int64; None: all of
        them."""
        return (
            None
            if self.d2t is None
            else self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)
        )

    def embed(self, ids: Tensor) -> Tensor:
        """[..] int64 -> [.., Hd]"""
        out: Tensor = (
            self.target.embed(ids) if self.embed_tokens is None else self.embed_tokens(ids)
        )
        return out

    def say(self, made: Tensor) -> Tensor:
        """Logits of the tokens it says, of what is normed. [.., Hd] -> [.., Vd]"""
        out: Tensor = self.target.head(made) if self.lm_head is None else self.lm_head(made)
        return out

    def table(self) -> tuple[Tensor | PackedMatrix, float]:
        """The embedding [.., Hd], and what rows are multiplied with."""
        own = self.embed_tokens
        return (self.target.table, self.target.scale) if own is None else (own.weight.detach(), 1.0)

    def packed(self) -> tuple[PackedMatrix | None, float]:
        """What says tokens on the native kernels, if that is there, and what bounds its logits, or
        0."""
        if self.lm_head is None:
            return self.target.packed, self.target.softcap
        return (self.lm_head.packed if isinstance(self.lm_head, Native) else None), 0.0


def check_sizes(
    title: str, target: TargetView, hidden: int, vocab: int, fewer: bool = False
) -> None:
    """Raise LoadError unless a head for such a target is for this one; `fewer`: it may be for fewer
    tokens."""
    fits = vocab <= target.vocab if fewer else vocab == target.vocab
    if hidden != target.hidden or not fits:
        raise LoadError(
            f"this {title} is for a target with states of {hidden} and {vocab} tokens, this one has"
            f" {target.hidden} and {target.vocab}: {_use(title)}"
        )


def check_aux_hidden_layers(title: str, target: TargetView, ids: Sequence[int]) -> None:
    """Raise LoadError unless this target has the hidden states that a head reads."""
    if not ids or len(set(ids)) < len(ids) or not all(0 <= i <= target.layers for i in ids):
        raise LoadError(
            f"this {title} reads the hidden states {list(ids)}, which must be different numbers from 0 to"
            f" {target.layers}, the layers of this target: {_use(title)}"
        )


def check_fused(title: str, target: TargetView, ids: Sequence[int], tensors: Tensors) -> None:
    """Raise LoadError unless fc reads as many states of this target as there are boundaries."""
    width, fused = size_of(tensors, "fc.weight", 1), len(ids) * target.hidden
    if width != fused:
        raise LoadError(
            f"fc.weight reads {width} numbers, but the hidden states {list(ids)} of this target have {fused}:"
            f" {_use(title)}"
        )


def _use(title: str) -> str:
    return f"use a {title.split()[-1]} that was trained for it"


def check_map(tensors: Tensors, size: int, vocab: int) -> None:
    """See that d2t of a checkpoint is offsets of `size` ascending ids of `vocab`, and make t2d what
    follows from it. Raises LoadError."""
    tensors.pop("t2d", None)
    stored = tensors.pop("d2t", None)
    if size < vocab:
        tensors["d2t"], tensors["t2d"] = maps_of(ids_of(stored, size, vocab), vocab)


def is_embedding(table: Tensor, target: TargetView) -> bool:
    """Whether an embedding [V, H], as it is used, is the target's: every row, but for rounding."""
    if table.shape != (target.vocab, target.hidden):
        return False
    for start in range(0, target.vocab, ROWS):
        ids = torch.arange(start, min(start + ROWS, target.vocab))
        own, theirs = table[ids], target.embed(ids.to(target.device)).cpu()
        if not _alike(own - theirs, own):
            return False
    return True


def is_head(weight: Tensor, target: TargetView) -> bool:
    """Whether a head [V, H] is the target's: every row, but for rounding. One whose logits the
    target bounds is not, as the target's own would be used otherwise."""
    if weight.shape != (target.vocab, target.hidden) or target.softcap:
        return False
    signs = (
        torch.randint(0, 2, (PROBES, target.hidden), generator=torch.Generator().manual_seed(0))
        * 2.0
        - 1
    )
    theirs = target.head(signs.to(target.device)).float().cpu().T
    return _alike((weight @ signs.T - theirs) / PROBES**0.5, weight)


IsTheirs = Callable[[Tensor, TargetView], bool]


def borrow(tensors: Tensors, target: TargetView, is_its_embedding: IsTheirs = is_embedding) -> None:
    """Take the target's own embedding and head out of a checkpoint: they are not kept twice."""
    for name, same in ((EMBEDDING, is_its_embedding), (HEAD, is_head)):
        if name in tensors and same(tensors[name], target):
            del tensors[name]


def _alike(apart: Tensor, rows: Tensor) -> bool:
    """Whether no row is further apart than a share of its size."""
    return bool((apart.norm(dim=1) <= EXACT * rows.norm(dim=1)).all())
