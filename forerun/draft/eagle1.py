"""EAGLE-1 and EAGLE-2 heads (Li et al. 2401.15077, 2406.16858): the target's last state, one layer ahead.

The pair of the embedding of token t + 1 and the target's normalised last state of token t is joined by one product,
goes through a decoder layer without a norm before its attention, and comes out as a guess of the target's normalised
last state of token t + 1: the target's own head says token t + 2 from it, and a drafted token is paired with it as it
is. EAGLE-2 is the same head, drafting trees.

Two layouts are read: that of its authors, a config.json of a Llama of one layer, and that of vLLM, the same in `model`.
Either may come with a head of its own.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from forerun.draft.borrowed import EMBEDDING, HEAD, borrow
from forerun.draft.eagle3 import read_named
from forerun.draft.eagle_dialects import read_flag
from forerun.draft.layers import Layer, Mlp, SelfAttention
from forerun.draft.pair_head import PairHead, Parts
from forerun.draft.stored import LAYER, assemble, read_config, read_layer, reading, size_of
from forerun.draft.view import TargetView
from forerun.errors import LoadError, shown
from forerun.models.config import ModelConfig
from forerun.models.families import Json

KIND = "EAGLE head"
ALIKE = 0.1  # rows of two embeddings that differ by less than this share are the same but for how they are stored


class _Layer(Layer):
    """A decoder layer whose attention reads what enters it as it is."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.self_attn = SelfAttention(c, c.hidden)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden, c.norm_eps)
        self.mlp = Mlp(c)


class FirstHead(PairHead):
    """The head under the names of its authors; what it makes of a pair is a state that the target's head can read."""

    title = KIND

    def __init__(
        self, layer: ModelConfig, target_layers: int, bias: bool = True, own_embedding: bool = False,
        own_head: bool = False,
    ) -> None:  # fmt: skip
        """`bias`: what joins a pair adds one. `own_embedding`, `own_head`: it has one that is not the target's."""
        super().__init__()
        self.layer, self.boundaries = layer, (target_layers,)
        self.inner = "layers." if own_head else ""  # all of it, where the target's head says the tokens
        self.list_tokens(layer.vocab, layer.vocab)
        self.fc = nn.Linear(2 * layer.hidden, layer.hidden, bias=bias)
        self.layers = nn.ModuleList([_Layer(layer)])
        self.embed_tokens = nn.Embedding(layer.vocab, layer.hidden) if own_embedding else None
        self.lm_head = nn.Linear(layer.hidden, layer.vocab, bias=False) if own_head else None

    def parts(self) -> Parts:
        (own,) = self.layers
        assert isinstance(own, _Layer)
        return Parts(layer=own, join=self.fc)


def load_first_head(directory: Path, target: TargetView) -> FirstHead:
    """Read an EAGLE-1 or EAGLE-2 head for this target, in float32. Raises LoadError, also where it does not fit."""
    raw, tensors = read_config(directory, KIND), read_named(directory, KIND)
    with reading(directory, KIND):
        said = _fields(raw)
        if "norm.weight" in tensors:
            raise LoadError("it has a norm before its lm_head, as EAGLE-3 heads have: give it as eagle3:")
        if said.get("truncated_vocab_size") not in (None, target.vocab):
            raise LoadError(f"it says {shown(said['truncated_vocab_size'])} tokens alone, which is not supported")
        width = size_of(tensors, "fc.weight", 1)
        if width != 2 * target.hidden:
            raise LoadError(
                f"fc.weight reads {width} numbers, but an embedding and a state of this target have"
                f" {2 * target.hidden}: use a head that was trained for it"
            )
        # the layer is Llama's, whatever the target is; what adds a bias is said apart
        layer = read_layer(said | {"model_type": "llama", "attention_bias": False}, tensors, target.vocab)
        layer = replace(layer, qkv_bias=read_flag(said, "qkv_bias", f"{LAYER}self_attn.q_proj.bias" in tensors))
        bias = read_flag(said, "bias", "fc.bias" in tensors)
        borrow(tensors, target, _is_target_s)
        own = EMBEDDING in tensors, HEAD in tensors
        head = assemble(lambda: FirstHead(layer, target.layers, bias, *own), tensors, KIND)
        head.attach(target)
        return head


def _fields(raw: Json) -> Json:
    """The fields of the layer, with the flags beside them. Raises LoadError."""
    inner = raw.get("model", {})
    if not isinstance(inner, dict):
        raise LoadError("model in config.json is not an object")
    return raw | inner


def _is_target_s(table: Tensor, target: TargetView) -> bool:
    """Whether an embedding is the target's, as some rows from all over it tell: it is then borrowed, not kept twice."""
    if table.shape != (target.vocab, target.hidden):
        return False
    ids = torch.linspace(0, target.vocab - 1, min(64, target.vocab)).long()
    theirs = target.embed(ids.to(target.device)).cpu()
    return bool((table[ids] - theirs).norm() <= ALIKE * theirs.norm())
