"""Decoders computed by the kernels of `kernels/triton`: ten a layer, and routers on torch.

The layers of a `Decoder` run on torch, one operation after the other. For the common families the
kernels compute the same, with the roundings of the torch decoder, and give a token the same bits
whatever else is in the pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields, replace

import torch
from torch import Tensor

from forerun.cache.kv import KVCache
from forerun.kernels.device_matrix import DeviceMatrix
from forerun.kernels.experts import without_padding
from forerun.kernels.triton import experts, fused, linear
from forerun.kernels.triton.attention import Walk, attend
from forerun.models.config import ModelConfig
from forerun.models.decoder import Decoder, route
from forerun.models.parameters import ExpertWeights, LayerWeights, LinearWeights, Norm
from forerun.runtime.captured import can_walk
from forerun.types import Forward

# Fields of a configuration that may have any value; all others must have their defaults, so that a
# field which is added later is refused until it is listed here.
FREE_FIELDS = {
    *("windows", "ropes", "rope_of", "raw", "layout", "norm", "norm_bias", "sandwich", "qk_norm"),
    *("rotates_pairs", "activation", "qkv_bias", "out_bias", "mlp_bias", "attention_softcap"),
    *("logit_softcap", "embed_scale", "residual_scale", "logit_scale", "head_bias", "head_shapes"),
    *("mlp_sizes", "tied", "end_ids", "experts"),
}


@dataclass(slots=True)
class _Product:
    """A matrix as the kernels read it, and its bias."""

    matrix: DeviceMatrix
    bias: Tensor | None

    @classmethod
    def of(cls, weights: LinearWeights | None) -> _Product:
        assert weights is not None
        weight = weights.weight
        if not isinstance(weight, DeviceMatrix):
            weight = DeviceMatrix.from_floats(weight)
        return cls(weight, weights.bias)

    def parts(self, x: Tensor) -> Tensor:
        """Multiply x [T, K] with the matrix, in parts."""
        return linear.linear_parts(x, self.matrix)

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply x [T, K] with the matrix, and add the bias. -> [T, N]"""
        return linear.join_parts(self.parts(x), self.bias, x.dtype)


class _Mixture:
    """The experts of a layer as the kernels read them."""

    def __init__(self, weights: ExpertWeights, decoder: Decoder) -> None:
        mlps = decoder.expert_mlps(weights)
        self.weights = weights
        self.mlps = replace(mlps, up=experts.packed(mlps.up), down=experts.packed(mlps.down))
        self.router = _Product.of(weights.router)
        gate = weights.shared_gate
        self.shared_gate = None if gate is None else _Product.of(gate)


class _Layer:
    """A layer's weights, and its products as the kernels read them."""

    def __init__(self, weights: LayerWeights, decoder: Decoder) -> None:
        self.weights = weights
        self.qkv, self.out = _Product.of(weights.qkv), _Product.of(weights.out)
        self.up = None if weights.up is None else _Product.of(weights.up)
        self.down = None if weights.down is None else _Product.of(weights.down)
        e = weights.experts
        self.mixture = None if e is None else _Mixture(e, decoder)


class KernelDecoder:
    """A `Decoder` whose layers the kernels compute; `supports` tells which.

    Matrices that are packed or fit the tiles of the products share their memory with the decoder's;
    others are copied with padding.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        layers = decoder.weights.layers
        self._layers = {i: _Layer(layers[i], decoder) for i in decoder.layer_ids}
        self._head = _Product.of(decoder.weights.head)

    @staticmethod
    def supports(decoder: Decoder) -> bool:
        """Return True if the kernels compute all that this model's layers do."""
        c = decoder.config
        return (
            _has_defaults(c)
            and decoder.dtype in experts.DTYPES
            and c.qk_norm in ("", "head")
            and c.activation in fused.ACTIVATIONS
            and c.hidden <= fused.MAX_WIDTH
            and can_walk(decoder)
            and (c.experts is None or not (c.experts.weighs_inputs or c.experts.latent))
            and all(_is_plain(layer, decoder) for layer in decoder.weights.layers)
            and _is_rms(decoder.weights.norm)
        )

    @torch.inference_mode()
    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        rows: Tensor,
        walk: Walk,
        cache: KVCache,
        want: Tensor,
        aux_hidden_layers: Sequence[int] = (),
    ) -> Forward:
        """Run one forward pass, as `Decoder.forward` does.

        Args:
            rows: int64 [T], the cache row of each token.
            walk: the rows that each token sees.
        """
        decoder, c, w = self.decoder, self.decoder.config, self.decoder.weights
        x = w.embed[ids] * c.embed_scale if c.embed_scale != 1.0 else w.embed[ids]
        is_padding = walk.position < 0
        rows = torch.where(is_padding, -1, rows)  # of padding nothing is stored
        layer_ids = list(self._layers)
        norms = [w.layers[i].attention_norm for i in layer_ids]
        x, normed = fused.add_norm(x, None, _weight(norms[0]), c.norm_eps)
        features = {}
        for i, next_norm in zip(layer_ids, [*norms[1:], None], strict=True):
            layer = self._layers[i]
            if i in aux_hidden_layers:
                features[i] = x
            heads = self._attend(normed, i, positions, rows, walk, cache)
            own = layer.weights
            parts, bias = layer.out.parts(heads), layer.out.bias
            x, normed = self._add(x, parts, bias, own.attention_out_norm, own.mlp_norm)
            parts, bias = self._mlp(normed, layer, is_padding)
            x, normed = self._add(x, parts, bias, own.mlp_out_norm, next_norm)
        if c.layers in aux_hidden_layers:
            features[c.layers] = x
        _, normed = fused.add_norm(x[want], None, w.norm.weight, c.norm_eps)
        return Forward(decoder.finish_logits(self._head(normed)), features)

    def _attend(
        self,
        normed: Tensor,
        i: int,
        positions: Tensor,
        rows: Tensor,
        walk: Walk,
        cache: KVCache,
    ) -> Tensor:
        """Return what the heads of layer `i` read, [T, heads * D]."""
        c, layer, rope = self.decoder.config, self._layers[i], self.decoder.config.rope_of[i]
        keys, values = cache.keys[i], cache.values[i]
        q = fused.rotate_and_store(
            layer.qkv.parts(normed),
            None if rope is None else self.decoder.ropes[rope],
            positions,
            rows,
            keys,
            values,
            bias=layer.qkv.bias,
            q_norm=_weight(layer.weights.q_norm),
            k_norm=_weight(layer.weights.k_norm),
            eps=c.norm_eps,
        )
        kind, softcap = c.visible_keys(i), c.attention_softcap
        seen = attend(
            q,
            keys,
            values,
            walk,
            c.attention_scale,
            softcap,
            kind.window,
            sinks=kind.sinks,
            chunk=kind.chunk,
            sink_logits=layer.weights.sink_logits,
        )
        return seen.flatten(1)

    def _mlp(
        self, normed: Tensor, layer: _Layer, is_padding: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output of the MLP of a layer in parts [S, T, H], and the bias to add."""
        down = None
        if layer.up is not None and layer.down is not None:
            parts, kind = layer.up.parts(normed), self.decoder.config.activation
            inner = fused.gate(parts, kind, normed.dtype, bias=layer.up.bias)
            down = layer.down.parts(inner)
        mixture = layer.mixture
        if mixture is None:
            assert down is not None and layer.down is not None
            return down, layer.down.bias
        total = self._experts(normed, mixture, is_padding)
        if down is not None and layer.down is not None:
            shared = linear.join_parts(down, layer.down.bias, normed.dtype)
            if mixture.shared_gate is not None:
                shared = shared * mixture.shared_gate(normed).sigmoid()
            total = total + shared
        return total.float()[None], None

    def _experts(self, normed: Tensor, mixture: _Mixture, is_padding: Tensor) -> Tensor:
        """Return the weighted sum of the experts of each token, [T, H]."""
        kind, mlps = self.decoder.config.experts, mixture.mlps
        assert kind is not None
        assert isinstance(mlps.up, DeviceMatrix) and isinstance(mlps.down, DeviceMatrix)
        logits = mixture.router(normed).float()
        own = mixture.weights
        choice, weights = route(logits, kind, own.choice_bias, own.expert_scale)
        tiles = experts.assign_tiles(without_padding(choice, is_padding[:, None]), kind.count)
        up = experts.products(normed, mlps.up, kind.count, tiles, halves=mlps.halves)
        inner = fused.gate(up, mlps.kind, normed.dtype)
        down = experts.products(inner, mlps.down, kind.count, tiles)
        return experts.combine(down, weights, normed.dtype)

    def _add(
        self,
        x: Tensor,
        parts: Tensor,
        bias: Tensor | None,
        branch_norm: Norm | None,
        norm: Norm | None,
    ) -> tuple[Tensor, Tensor]:
        """Add a branch, which its last product left in parts, to the residual stream, and normalise
        it."""
        return fused.add_norm(
            x,
            parts,
            _weight(norm),
            self.decoder.config.norm_eps,
            bias=bias,
            branch_norm=_weight(branch_norm),
            scale=self.decoder.config.residual_scale,
        )


def _has_defaults(config: ModelConfig) -> bool:
    """Return True if all fields but the free ones have their default values."""
    return all(
        getattr(config, field.name) == field.default
        for field in fields(config)
        if field.default is not MISSING and field.name not in FREE_FIELDS
    )


def _is_plain(layer: LayerWeights, decoder: Decoder) -> bool:
    """Return True if a layer has attention, a dense MLP or experts that the kernels compute, and
    norms before both."""
    products = [layer.qkv, layer.out]
    if layer.experts is None or layer.up is not None:
        products += [layer.up, layer.down]
    if layer.experts is not None:
        products += _products_of(layer.experts, decoder)
    norms = (layer.attention_out_norm, layer.mlp_out_norm, layer.q_norm, layer.k_norm)
    return (
        None not in products
        and len(layer.matrices) == len(products)
        and layer.attention_norm is not None
        and layer.mlp_norm is not None
        and all(
            norm is None or _is_rms(norm) for norm in (layer.attention_norm, layer.mlp_norm, *norms)
        )
    )


def _products_of(e: ExpertWeights, decoder: Decoder) -> list[LinearWeights | None]:
    """Return the products of a mixture, [None] if the kernels do not compute it."""
    has_norms = any((e.router_norm, e.norm, e.out_norm, e.shared_out_norm))
    has_biases = e.up.bias is not None or e.down.bias is not None
    if has_norms or has_biases or not experts.fits(decoder.expert_mlps(e)):
        return [None]
    return [e.router, e.up, e.down, *([] if e.shared_gate is None else [e.shared_gate])]


def _is_rms(norm: Norm) -> bool:
    """Return True for an RMS norm with the model's epsilon."""
    return norm.bias is None and norm.eps is None


def _weight(norm: Norm | None) -> Tensor | None:
    return None if norm is None else norm.weight
