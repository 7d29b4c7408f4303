"""Building blocks of draft heads: layers in torch, the same as native programs, and what a head
borrows from its target.

In torch a layer this small takes longer to call than to compute, so heads run as programs of native
kernels where these are available. A program computes what the module's `forward` does up to the
precision of its products: a draft may differ, the generated text cannot.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from forerun.cache.kv import KVCache
from forerun.draft.head_config import HeadConfig
from forerun.draft.head_files import Tensors, size_of
from forerun.draft.proposer import TargetView
from forerun.errors import LoadError
from forerun.kernels import native
from forerun.kernels import reference as kernels
from forerun.kernels.native import CNorm, COp
from forerun.models.config import ModelConfig, make_config
from forerun.models.decoder import Attend
from forerun.models.shortlist import ids_of, maps_of
from forerun.runtime.packed import Linear, PackedMatrix
from forerun.runtime.program import (
    ATTENDED,
    HIDDEN,
    QKV,
    ForwardBatch,
    Program,
    X,
    embed_op,
)

M = TypeVar("M", bound=nn.Module)
Rotation = tuple[Tensor, Tensor]  # cos and sin of positions, [.., 1, D / 2] each

EMBEDDING = "embed_tokens.weight"
LM_HEAD = "lm_head.weight"
ROUNDING = 2.0**-8  # rows that differ by at most this share do so by 16-bit rounding
CHUNK_ROWS = 4096  # rows of two embeddings compared at a time
NUM_PROBES = 8  # random vectors with which two lm heads are compared
# names in config.json; activations of other kinds of MLPs are replaced in draft heads
TRANSFORMERS_ACTIVATIONS = {
    "gelu_tanh": "gelu_pytorch_tanh",
    "clamped_swiglu": "silu",
    "xielu": "silu",
}


# ---------------------------------------------------------------- layers


def layer_like(c: ModelConfig, intermediate: int | None = None) -> ModelConfig:
    """Return the config of a Llama layer with the sizes of another family's layer.

    Drafters trained by forerun have such layers whatever their target is. Queries and keys are
    normed (as in Qwen3) if the target does so, and rotated as in the target's last layer.
    """
    last = c.rope_of[-1]
    rope = c.ropes[last].parameters if last is not None else {}
    raw = {
        "model_type": "qwen3" if c.qk_norm == "head" else "llama",
        "vocab_size": c.vocab,
        "hidden_size": c.hidden,
        "num_hidden_layers": 1,
        "intermediate_size": intermediate or c.intermediate,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads if c.latent is None else c.heads,
        "head_dim": c.head_dim if c.latent is None else c.latent.plain,
        "max_position_embeddings": c.context,
        "rms_norm_eps": c.norm_eps,
        "rope_theta": rope.get("rope_theta", 10000.0),
        "hidden_act": TRANSFORMERS_ACTIVATIONS.get(c.activation, c.activation),
    }
    return make_config(raw, Path("config.json"))


class SelfAttention(nn.Module):
    """Attention over inputs of any width. Tensor names are those of Llama and Qwen3."""

    def __init__(self, c: ModelConfig, width: int, layer: int = 0) -> None:
        """`width` is the size of the inputs, `layer` the index passed to `attend`."""
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
        """Return the weights of queries, keys and values, stacked by rows."""
        return torch.cat((self.q_proj.weight, self.k_proj.weight, self.v_proj.weight))

    def biases(self) -> Tensor | None:
        """Return the stacked biases of queries, keys and values, if there are any."""
        q, k, v = (product.bias for product in (self.q_proj, self.k_proj, self.v_proj))
        return None if q is None else torch.cat((q, k, v))

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """Attend from x [.., width] at the positions of `rotation`. -> [.., H]"""
        heads = (*x.shape[:-1], -1, self.head_dim)
        q, k, v = (product(x).view(heads) for product in (self.q_proj, self.k_proj, self.v_proj))
        q, k = kernels.rotate(self.q_norm(q), *rotation), kernels.rotate(self.k_norm(k), *rotation)
        attended = attend(self.layer, q, k, v).flatten(-2)
        out: Tensor = self.o_proj(attended)
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
        """[.., H] -> [.., H]"""
        gate = kernels.activate(self.gate_proj(x), self.activation)
        out: Tensor = self.down_proj(gate * self.up_proj(x))
        return out


class HeadLayer(nn.Module):
    """Base of all layers of draft heads. Subclasses create the parts in the order in which they are
    stored, with whatever norms they have."""

    self_attn: SelfAttention
    post_attention_layernorm: nn.RMSNorm
    mlp: Mlp

    def add_residuals(
        self, x: Tensor, attention_input: Tensor, rotation: Rotation, attend: Attend
    ) -> Tensor:
        """Add attention over `attention_input` [.., width], then the MLP, to x. [.., H] -> [.., H]

        `attention_input` is normed already, or as this head wants it.
        """
        x = x + self.self_attn(attention_input, rotation, attend)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class DecoderLayer(HeadLayer):
    """An ordinary decoder layer; `layer` is the index passed to `attend`."""

    def __init__(self, c: ModelConfig, layer: int = 0) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(c.hidden, c.norm_eps)
        self.self_attn = SelfAttention(c, c.hidden, layer)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden, c.norm_eps)
        self.mlp = Mlp(c)

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """[.., H] -> [.., H]"""
        return self.add_residuals(x, self.input_layernorm(x), rotation, attend)


class JoinedLayer(HeadLayer):
    """A decoder layer after a product that joins an embedding and a state into one vector."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.input_proj = nn.Linear(2 * c.hidden, c.hidden, bias=False)
        self.input_layernorm = nn.RMSNorm(c.hidden, c.norm_eps)
        self.self_attn = SelfAttention(c, c.hidden)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden, c.norm_eps)
        self.mlp = Mlp(c)


# ---------------------------------------------------------------- heads and their targets


class Head(nn.Module):
    """Base of heads that may borrow the target's embedding and lm head, and may predict only part
    of its vocabulary.

    Attributes:
        title: the kind of head in messages.
        target: what the head borrows from; set by `attach`.
        embed_tokens, lm_head: the head's own; None where the target's are used.
        d2t, t2d: present if the head predicts part of the vocabulary. Its token i is the target's
            token i + d2t[i], d2t [Vd] int64; t2d [V] bool marks these tokens.
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

    def init_token_map(self, count: int, vocab: int) -> None:
        """Prepare for `count` of a target's `vocab` tokens: the first until `set_token_ids`."""
        reduced = count < vocab
        self.register_buffer("d2t", torch.zeros(count, dtype=torch.int64) if reduced else None)
        self.register_buffer("t2d", torch.arange(vocab) < count if reduced else None)

    def set_token_ids(self, ids: Tensor) -> None:
        """Set which of the target's tokens the head predicts: ascending ids [Vd]."""
        assert self.d2t is not None and self.t2d is not None
        d2t, t2d = maps_of(ids, len(self.t2d))
        self.d2t.copy_(d2t)
        self.t2d.copy_(t2d)

    def tokens(self) -> Tensor | None:
        """Return the target's token ids in the order of the logits, [Vd] int64; None if all."""
        if self.d2t is None:
            return None
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def embed(self, ids: Tensor) -> Tensor:
        """[..] int64 -> [.., Hd]"""
        embed = self.target.embed if self.embed_tokens is None else self.embed_tokens
        out: Tensor = embed(ids)
        return out

    def compute_logits(self, normed: Tensor) -> Tensor:
        """Return the logits of normed states. [.., Hd] -> [.., Vd]"""
        lm_head = self.target.head if self.lm_head is None else self.lm_head
        out: Tensor = lm_head(normed)
        return out

    def table(self) -> tuple[Tensor | PackedMatrix, float]:
        """Return the embedding [.., Hd] and the factor of its rows."""
        if self.embed_tokens is None:
            return self.target.table, self.target.scale
        return self.embed_tokens.weight.detach(), 1.0

    def packed_lm_head(self) -> tuple[PackedMatrix | None, float]:
        """Return the lm head for the native kernels, None if it is not packed, and the softcap of
        its logits, 0 for none."""
        if self.lm_head is None:
            return self.target.packed, self.target.softcap
        return (self.lm_head.packed if isinstance(self.lm_head, NativeLinear) else None), 0.0


def check_sizes(
    title: str, target: TargetView, hidden: int, vocab: int, fewer: bool = False
) -> None:
    """Raise LoadError unless a head for these sizes fits the target; `fewer` allows a smaller
    vocabulary."""
    fits = vocab <= target.vocab if fewer else vocab == target.vocab
    if hidden != target.hidden or not fits:
        raise LoadError(
            f"this {title} is for a target with states of {hidden} and {vocab} tokens, this one has"
            f" {target.hidden} and {target.vocab}: {_advice(title)}"
        )


def check_fit(
    title: str, target: TargetView, c: HeadConfig, *, borrows: bool, fewer: bool = False
) -> None:
    """Raise LoadError unless the target has the sizes, hidden states and mask token that a head
    needs, and the weights that it `borrows` have the size of its states."""
    layer, ids = c.layer, c.aux_hidden_layers
    check_sizes(title, target, c.target_hidden, layer.vocab, fewer)
    if borrows and layer.hidden != target.hidden:
        raise LoadError(
            f"this {title} has states of {layer.hidden}, its target of {target.hidden}, so the"
            " target's weights do not fit, and it has none of its own: its checkpoint is incomplete"
        )
    if not ids or len(set(ids)) < len(ids) or not all(0 <= i <= target.layers for i in ids):
        raise LoadError(
            f"this {title} reads the hidden states {list(ids)}, which must be different numbers"
            f" from 0 to {target.layers}, the layers of this target: {_advice(title)}"
        )
    if c.mask_token is not None and not 0 <= c.mask_token < layer.vocab:
        raise LoadError(
            f"the mask token {c.mask_token} of this {title} is not one of its {layer.vocab} tokens"
        )


def check_fc_width(title: str, target: TargetView, ids: Sequence[int], tensors: Tensors) -> None:
    """Raise LoadError unless fc.weight reads exactly the hidden states `ids` of the target."""
    width, fused = size_of(tensors, "fc.weight", 1), len(ids) * target.hidden
    if width != fused:
        raise LoadError(
            f"fc.weight reads {width} numbers, but the hidden states {list(ids)} of this target"
            f" have {fused}: {_advice(title)}"
        )


def _advice(title: str) -> str:
    return f"use a {title.split()[-1]} that was trained for it"


def normalise_token_map(tensors: Tensors, size: int, vocab: int) -> None:
    """Check d2t of a checkpoint, and derive t2d from it. Raises LoadError unless d2t holds offsets
    of `size` ascending ids of `vocab`."""
    tensors.pop("t2d", None)
    stored = tensors.pop("d2t", None)
    if size < vocab:
        tensors["d2t"], tensors["t2d"] = maps_of(ids_of(stored, size, vocab), vocab)


def is_target_embedding(table: Tensor, target: TargetView, tolerance: float = ROUNDING) -> bool:
    """Return True if every row of an embedding [V, H] is the target's (as used), up to a relative
    difference."""
    if table.shape != (target.vocab, target.hidden):
        return False
    for start in range(0, target.vocab, CHUNK_ROWS):
        ids = torch.arange(start, min(start + CHUNK_ROWS, target.vocab))
        own = table[ids]
        if not _close(own - target.embed(ids.to(target.device)).cpu(), own, tolerance):
            return False
    return True


def is_target_lm_head(weight: Tensor, target: TargetView) -> bool:
    """Return True if an lm head [V, H] equals the target's, up to rounding.

    If the target caps its logits the answer is no, since borrowing would cap the head's too.
    """
    if weight.shape != (target.vocab, target.hidden) or target.softcap:
        return False
    generator = torch.Generator().manual_seed(0)
    probes = torch.randint(0, 2, (NUM_PROBES, target.hidden), generator=generator) * 2.0 - 1
    theirs = target.head(probes.to(target.device)).float().cpu().T
    return _close((weight @ probes.T - theirs) / NUM_PROBES**0.5, weight)


def drop_borrowed(tensors: Tensors, target: TargetView, tolerance: float = ROUNDING) -> None:
    """Remove the target's own embedding and lm head from a checkpoint: the head borrows them.

    `tolerance` is the relative difference up to which an embedding is the target's.
    """
    if EMBEDDING in tensors and is_target_embedding(tensors[EMBEDDING], target, tolerance):
        del tensors[EMBEDDING]
    if LM_HEAD in tensors and is_target_lm_head(tensors[LM_HEAD], target):
        del tensors[LM_HEAD]


def _close(difference: Tensor, rows: Tensor, tolerance: float = ROUNDING) -> bool:
    return bool((difference.norm(dim=1) <= tolerance * rows.norm(dim=1)).all())


# ---------------------------------------------------------------- native kernels


class NativeLinear(nn.Module):
    """A linear layer on the native kernels."""

    def __init__(self, linear: nn.Linear, form: str) -> None:
        super().__init__()
        self.product = Linear(linear.weight.detach(), form, linear.bias)
        self.packed = self.product.packed

    def forward(self, x: Tensor) -> Tensor:
        """[.., in] -> [.., out]"""
        return self.product(x)


def with_native_products(module: M, form: str, skip: str | None = None) -> M:
    """Return a copy of a module for drafting, with its linear layers packed in `form`.

    Norms and embeddings are shared with the original. Parts whose names begin with `skip` stay in
    torch.
    """
    shared = {id(tensor): tensor for tensor in module.parameters()}
    packed = copy.deepcopy(module, shared)  # copies the structure only
    for name, part in list(packed.named_modules()):
        if skip is not None and name.startswith(skip):
            continue
        for child_name, child in part.named_children():
            if isinstance(child, nn.Linear):
                setattr(part, child_name, NativeLinear(child, form))
    return packed


def release_weights(module: nn.Module, prefix: str) -> None:
    """Drop the weights of linear layers whose names begin with `prefix`; they cannot be called
    then. A native program has packed copies of them."""
    for name, part in module.named_modules():
        if name.startswith(prefix) and isinstance(part, nn.Linear):
            part.register_parameter("weight", None)
            part.register_parameter("bias", None)


class Operations:
    """Builder of native operations for layers of one shape. Keep it as long as the program: the
    operations point to memory that it owns.
    """

    def __init__(self, config: ModelConfig, form: str, rotation: Rotation | None) -> None:
        """Products are packed in `form`; attention needs `rotation`, cos and sin of all positions,
        float32 [context, 1, D / 2]."""
        self.config, self.form, self.rotation = config, form, rotation
        self._owned: list[Any] = []

    def pack(self, weight: Tensor, bias: Tensor | None = None, gated: bool = False) -> PackedMatrix:
        """Pack a weight [out, in] in the layout of the kernels."""
        bias = None if bias is None else bias.detach()
        return PackedMatrix(weight.detach().contiguous(), bias, self.form, gated=gated)

    def product(
        self,
        weight: Tensor | PackedMatrix | nn.Module,
        source: int,
        to: int,
        norm: nn.Module | None = None,
        bias: Tensor | None = None,
        **options: Any,
    ) -> COp:
        """Multiply buffer `source`, after a norm if there is one, by a weight, a packed weight or
        a NativeLinear. `options` are further fields of `COp`."""
        if isinstance(weight, nn.Module):
            assert isinstance(weight, NativeLinear)
            weight = weight.packed
        if not isinstance(weight, PackedMatrix):
            weight = self.pack(weight, bias, gated=bool(options.get("gated")))
        self._owned.append(weight)
        return COp(
            kind=native.LINEAR,
            input=source,
            output=to,
            norm=self._norm(norm),
            matrix=weight.matrix,
            **options,
        )

    def embedding(self, table: Tensor | PackedMatrix, to: int, scale: float = 1.0) -> COp:
        """Write the rows [.., width] of the pass's tokens to a buffer."""
        if isinstance(table, Tensor):
            exact = table.dtype in (torch.float32, torch.bfloat16)
            table = (table if exact else table.float()).contiguous()
        self._owned.append(table)
        return embed_op(table, to, scale)

    def copy(
        self,
        source: int,
        to: int,
        norm: nn.Module | None = None,
        second_norm: nn.Module | None = None,
        *,
        activation: str = "",
    ) -> COp:
        """Copy a buffer through up to two norms and an activation."""
        return COp(
            kind=native.SAVE,
            input=source,
            output=to,
            norm=self._norm(norm),
            after=self._norm(second_norm),
            activation=native.ACTIVATIONS[activation] if activation else 0,
        )

    def rotate(self, attention: SelfAttention, layer: int) -> COp:
        """Norm and rotate queries and keys in QKV, and write keys and values to the cache."""
        assert self.rotation is not None
        cosine, sine = self.rotation
        return COp(
            kind=native.ROTATE,
            input=QKV,
            **self._heads(layer),
            norm=self._norm(attention.q_norm),
            key_norm=self._norm(attention.k_norm),
            cosine=cosine.data_ptr(),
            sine=sine.data_ptr(),
            rotary=2 * cosine.shape[-1],
        )

    def _heads(self, layer: int) -> dict[str, int]:
        """Return the fields of attention operations that say where a layer's keys are."""
        c = self.config
        offset = c.kv_offsets()[layer]
        return dict(heads=c.heads, kv_heads=c.kv_heads, head_dim=c.head_dim, kv_width=offset)

    def attention_and_mlp(self, layer: HeadLayer, index: int) -> list[COp]:
        """Run a layer from its attention on, added to X; `index` is its index in the cache."""
        c = self.config
        attend = COp(
            kind=native.ATTEND,
            input=QKV,
            output=ATTENDED,
            **self._heads(index),
            scale=c.attention_scale,
            window=c.windows[index] or 0,
        )
        ops, attention = [attend], layer.self_attn
        ops.append(self.product(attention.o_proj.weight, ATTENDED, X, combine=native.ADD))
        mlp, mlp_norm = layer.mlp, layer.post_attention_layernorm
        gate_up = torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight))
        activation = native.ACTIVATIONS[c.activation]
        ops.append(self.product(gate_up, X, HIDDEN, mlp_norm, gated=1, activation=activation))
        return [*ops, self.product(mlp.down_proj.weight, HIDDEN, X, combine=native.ADD)]

    def widths(self, num_logits: int, *others: int) -> np.ndarray:
        """Return the row width of each buffer, int32: a decoder's, and `others` after them."""
        c = self.config
        qkv, inner = (c.heads + 2 * c.kv_heads) * c.head_dim, -(-c.intermediate // 16) * 16
        decoder = [c.hidden, qkv, c.heads * c.head_dim, inner, c.hidden, num_logits]
        return np.array([*decoder, *others], np.int32)

    def _norm(self, norm: nn.Module | None) -> CNorm:
        if norm is None or isinstance(norm, nn.Identity):
            return CNorm()
        tensors = dict(norm.named_parameters())
        pointers = []
        for name in ("weight", "bias"):
            tensor = tensors[name].detach().float().contiguous() if name in tensors else None
            self._owned.append(tensor)
            pointers.append(None if tensor is None else tensor.data_ptr())
        eps = getattr(norm, "eps", None) or self.config.norm_eps
        return CNorm(*pointers, eps, native.NORMS["rms"])


def run_program(
    program: Program, batch: ForwardBatch, cache: KVCache, inputs: Mapping[int, Tensor]
) -> Tensor:
    """Run one forward pass with `inputs`, float32 [T, width], in these buffers.

    Returns buffer X [T, H], which the next pass overwrites.
    """
    buffers, count = program.buffers, batch.tokens
    pointers, scratch = buffers.fit(count, 0)
    for buffer, rows in inputs.items():
        buffers.arrays[buffer][:count] = rows.numpy()
    native.loaded().forerun_run(program.program, batch.fill(pointers, scratch, cache))
    return torch.from_numpy(buffers.arrays[X][:count])
