"""The decoder. Families are fields of `ModelConfig`; there is no second forward pass.

It processes flat tokens of any mixture of requests and draft trees. Attention is a callable that
stores keys and values and knows which tokens attend to which; the decoder is independent of pages,
requests and drafts.
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
from forerun.models.weights import LayerWeights, LinearWeights, Norm, Weights, load_weights
from forerun.types import Forward

# (layer, q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D]) -> [T, Hq, D]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Decoder:
    """A loaded model on torch: `forward` maps token ids and positions to logits.

    Attributes:
        layer_ids: the layers that a forward pass runs; all of them unless `with_layers` was used.
        shortlist: ascending token ids [Vd] that are scored, if not all are.
    """

    def __init__(
        self,
        config: ModelConfig,
        path: Path,
        dtype: torch.dtype,
        device: torch.device,
        context: int,
        shortlist: Tensor | None = None,
    ) -> None:
        """Load the weights in `path` and compute rotary tables for `context` positions.

        shortlist: ascending token ids [Vd] int64 to score; logits of other tokens are -inf.
        Raises LoadError."""
        self.config = config
        self.dtype = dtype
        self.device = device
        self.context = context
        self.weights = self._load(path, shortlist)
        self.shortlist = None if shortlist is None else shortlist.to(device)
        tables = [rope_tables(config, rope, context, dtype) for rope in config.ropes]
        self.ropes = [(cos.to(device), sin.to(device)) for cos, sin in tables]
        self.layer_ids: Sequence[int] = range(config.layers)

    def _load(self, path: Path, shortlist: Tensor | None) -> Weights:
        return load_weights(self.config, path, self.dtype, self.device, shortlist=shortlist)

    def with_layers(self, layer_ids: Sequence[int], window: int | None) -> Decoder:
        """Return the model restricted to these layers, and to `window` keys if given.

        Weights and KV cache are shared with this decoder (layer skipping, self-speculation)."""
        part = copy.copy(self)
        part.config = self.config.with_window(window)
        part.layer_ids = layer_ids
        return part

    @property
    def weight_bytes(self) -> int:
        """Bytes a forward pass reads: every matrix once, the embedding only as a tied head."""
        w = self.weights
        layers = [w.layers[i] for i in self.layer_ids]
        matrices = [m for layer in layers for m in (layer.qkv, layer.out, layer.up, layer.down)]
        weights = [matrix.weight for matrix in (*matrices, w.head)]
        return sum(weight.numel() * weight.element_size() for weight in weights)

    @property
    def weight_bits(self) -> float:
        """Bits per weight."""
        return 8.0 * self.dtype.itemsize

    @property
    def precision(self) -> str:
        """Number format of the matrices and the kernels that multiply them, for display."""
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
        """Run one forward pass over flat tokens.

        Args:
            ids: [T] int64 token ids.
            positions: [T] int64 logical positions.
            attend: attention over the cached tokens and these.
            want: [M] int64 indices in T whose logits are needed.
            aux_hidden_layers: hidden states to return. i is the input of layer i, `config.layers`
                the output of the last layer.

        Returns:
            logits [M, V], float32 or wider, and the hidden states asked for, [T, H] each.
        """
        c, w = self.config, self.weights
        x = w.embed[ids] * c.embed_scale if c.embed_scale != 1.0 else w.embed[ids]
        if w.positions is not None:
            x = x + w.positions[positions]
        rotations = [(cos[positions], sin[positions]) for cos, sin in self.ropes]
        features = {}
        for i in self.layer_ids:
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
        return Forward(spread(logits, self.shortlist, c.vocab), features)

    def _attention(
        self,
        x: Tensor,
        i: int,
        layer: LayerWeights,
        rotation: tuple[Tensor, Tensor] | None,
        attend: Attend,
    ) -> Tensor:
        """Add the attention branch of layer `i` to the residual stream x [T, H]."""
        c, tokens = self.config, x.shape[0]
        qkv = self._linear(self._norm(x, layer.attention_norm), layer.qkv)
        qkv = qkv.view(tokens, -1, c.head_dim)
        qk, v = qkv[:, : c.heads + c.kv_heads], qkv[:, c.heads + c.kv_heads :]
        if layer.q_norm and layer.k_norm:
            q, k = qk[:, : c.heads], qk[:, c.heads :]
            qk = torch.cat((self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)), dim=1)
        if rotation:
            qk = kernels.rotate(qk, *rotation)
        out = attend(i, qk[:, : c.heads], qk[:, c.heads :], v)
        out = self._linear(out.reshape(tokens, -1), layer.out)
        return x + (self._norm(out, layer.attention_out_norm) if layer.attention_out_norm else out)

    def _mlp(self, x: Tensor, layer: LayerWeights) -> Tensor:
        """Add the MLP branch to the residual stream x [T, H]."""
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

    def _linear(self, x: Tensor, linear: LinearWeights) -> Tensor:
        return kernels.linear(x, linear.weight, linear.bias)


def load_decoder(
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    context: int | None = None,
    shortlist: Tensor | None = None,
) -> Decoder:
    """Load a model directory or GGUF file on torch; `context` defaults to the model's own.

    Raises LoadError. See `Decoder`."""
    config = load_config(path)
    return Decoder(config, path, dtype, device, context or default_context(config), shortlist)


def default_context(config: ModelConfig) -> int:
    """Return the context length to serve by default: with longrope that of its short factors."""
    original = [r.parameters.get("original_max_position_embeddings") for r in config.ropes]
    longrope = [r.parameters["rope_type"] == "longrope" for r in config.ropes]
    return original[0] if any(longrope) and original[0] else config.context


def longest_context(config: ModelConfig) -> int:
    """Return the longest context a model can serve: dynamic rope scaling multiplies its own."""
    dynamic = [r for r in config.ropes if r.parameters["rope_type"] == "dynamic"]
    factors = [r.parameters.get("factor", 1.0) for r in dynamic]
    return int(config.context * max(factors, default=1.0))
