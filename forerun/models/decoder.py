"""The one decoder. Families are fields of ModelConfig; there is no second forward pass.

It computes flat tokens, whatever rows and trees they belong to: attention is a callable that stores
the keys and values and knows who sees whom. The decoder never sees pages, requests or drafts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from forerun.kernels import reference as kernels
from forerun.models.config import ModelConfig, load_config
from forerun.models.rope import rope_tables
from forerun.models.shortlist import spread
from forerun.models.weights import Layer, Linear, Norm, Weights, load_weights
from forerun.types import Forward

# (layer, q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D]) -> [T, Hq, D]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Decoder:
    """A loaded model: `forward` maps tokens and positions to logits."""

    def __init__(
        self, config: ModelConfig, directory: Path, dtype: torch.dtype, device: torch.device, context: int,
        said: Tensor | None = None,
    ) -> None:  # fmt: skip
        """`context` is how many positions to prepare for; `said` [Vd] int64, ascending, the tokens
        that are scored, if
        not all: logits of others are -inf."""
        self.config, self.dtype, self.device, self.context = config, dtype, device, context
        self.weights = self._load(directory, said)
        self.said = None if said is None else said.to(device)
        tables = [rope_tables(config, rope, context, dtype) for rope in config.ropes]
        self.ropes = [(cos.to(device), sin.to(device)) for cos, sin in tables]
        self.kept: Sequence[int] = range(config.layers)

    def _load(self, directory: Path, said: Tensor | None) -> Weights:
        return load_weights(self.config, directory, self.dtype, self.device, said=said)

    def abridged(self, kept: Sequence[int], window: int | None) -> Decoder:
        """The same model with only these of its layers, and a window of so many keys (None: its
        own), which share weights and cache with it."""
        part = copy.copy(self)
        part.config, part.kept = self.config.abridged(window), kept
        return part

    @property
    def weight_bytes(self) -> int:
        """Bytes one pass reads: every weight once, the embedding only where it is the head too."""
        w = self.weights
        layers = [w.layers[i] for i in self.kept]
        matrices = [
            m.weight for layer in layers for m in (layer.qkv, layer.out, layer.up, layer.down)
        ]
        return sum(m.numel() * m.element_size() for m in [*matrices, w.head.weight])

    @property
    def weight_bits(self) -> float:
        """Bits of a weight."""
        return 8.0 * self.dtype.itemsize

    @property
    def precision(self) -> str:
        """In which numbers its matrices are, and whose kernels multiply them."""
        return f"{str(self.dtype).removeprefix('torch.')}, torch on {self.device}"

    @torch.inference_mode()
    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        attend: Attend,
        want: Tensor,
        aux_hidden_layers: Sequence[int] = (),
    ) -> Forward:
        """One pass over flat tokens.

        Args:
            ids, positions: [T] int64 tokens and their logical positions.
            attend: attention over what is stored and these tokens.
            want: [M] int64 indices in T whose logits are needed.
            boundaries: hidden states to return: i enters layer i, `layers` left the last one.

        Returns:
            logits [M, V] in float32 at least, and the features asked for, [T, H] each.
        """
        c, w = self.config, self.weights
        x = w.embed[ids] * c.embed_scale if c.embed_scale != 1.0 else w.embed[ids]
        if w.positions is not None:
            x = x + w.positions[positions]
        rotations = [(cos[positions], sin[positions]) for cos, sin in self.ropes]
        features = {}
        for i in self.kept:
            layer = w.layers[i]
            if i in aux_hidden_layers:
                features[i] = x
            rope = c.rope_of[i]
            x = self._attention(x, i, layer, None if rope is None else rotations[rope], attend)
            x = self._mlp(x, layer)
        if c.layers in aux_hidden_layers:
            features[c.layers] = x
        logits = self._linear(self._norm(x[want], w.norm), w.head)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if c.logit_softcap:
            logits = torch.tanh(logits / c.logit_softcap) * c.logit_softcap
        return Forward(spread(logits, self.said, c.vocab), features)

    def _attention(
        self,
        x: Tensor,
        i: int,
        layer: Layer,
        rotation: tuple[Tensor, Tensor] | None,
        attend: Attend,
    ) -> Tensor:
        c, tokens = self.config, x.shape[0]
        qkv = self._linear(self._norm(x, layer.attention_norm), layer.qkv).view(
            tokens, -1, c.head_dim
        )
        qk, v = qkv[:, : c.heads + c.kv_heads], qkv[:, c.heads + c.kv_heads :]
        if layer.q_norm and layer.k_norm:
            q, k = qk[:, : c.heads], qk[:, c.heads :]
            qk = torch.cat((self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)), dim=1)
        if rotation:
            qk = kernels.rotate(qk, *rotation)
        out = attend(i, qk[:, : c.heads], qk[:, c.heads :], v)
        out = self._linear(out.reshape(tokens, -1), layer.out)
        return x + (self._norm(out, layer.attention_out_norm) if layer.attention_out_norm else out)

    def _mlp(self, x: Tensor, layer: Layer) -> Tensor:
        c = self.config
        up = self._linear(self._norm(x, layer.mlp_norm), layer.up)
        if c.gated:
            gate, up = up.chunk(2, dim=-1)
            up = kernels.activate(gate, c.activation) * up
        else:
            up = kernels.activate(up, c.activation)
        out = self._linear(up, layer.down)
        return x + (self._norm(out, layer.mlp_out_norm) if layer.mlp_out_norm else out)

    def _norm(self, x: Tensor, norm: Norm) -> Tensor:
        return kernels.norm(x, norm.weight, norm.bias, self.config.norm_eps)

    def _linear(self, x: Tensor, linear: Linear) -> Tensor:
        return kernels.linear(x, linear.weight, linear.bias)


def load_decoder(
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    context: int | None = None,
    said: Tensor | None = None,
) -> Decoder:
    """Read a Hugging Face model directory. `context` limits the positions; None takes the model's
    own. `said`: the tokens to score, as in `Decoder`."""
    config = load_config(directory)
    return Decoder(config, directory, dtype, device, context or default_context(config), said)


def default_context(config: ModelConfig) -> int:
    """The positions a model serves unless told otherwise: its own, with longrope those of its short
    factors."""
    original = [r.parameters.get("original_max_position_embeddings") for r in config.ropes]
    longrope = [r.parameters["rope_type"] == "longrope" for r in config.ropes]
    return original[0] if any(longrope) and original[0] else config.context


def longest_context(config: ModelConfig) -> int:
    """The most positions a model can serve: its own, times the factor of a dynamic rope scaling."""
    factors = [
        r.parameters.get("factor", 1.0)
        for r in config.ropes
        if r.parameters["rope_type"] == "dynamic"
    ]
    return int(config.context * max(factors, default=1.0))
