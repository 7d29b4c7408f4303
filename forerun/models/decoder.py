"""The decoder. Families are fields of `ModelConfig`; there is no second forward pass.

It processes flat tokens of any mixture of requests and draft trees. Attention is a callable that
stores keys and values and knows which tokens attend to which; the decoder is independent of pages,
requests and drafts.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.kernels import reference as kernels
from forerun.kernels.device_matrix import DeviceMatrix
from forerun.kernels.experts import ComputeExperts, ExpertMlps, by_expert
from forerun.models.config import ModelConfig, load_config, note
from forerun.models.families import Experts, QueryGrowth
from forerun.models.parameters import (
    AltUpWeights,
    ExpertWeights,
    LaurelWeights,
    LayerWeights,
    LinearWeights,
    Norm,
    RecurrentWeights,
    Source,
    Weights,
)
from forerun.models.quantized import keep_packed, round_packed, unpacked_kind
from forerun.models.rope import rope_tables
from forerun.models.shortlist import spread
from forerun.models.weights import load_weights
from forerun.types import Forward

# linear layers that may be packed; the others are small, or are read as floats
PACKED_PARTS = {
    *("qkv", "out", "up", "down", "sparse_up", "shared_up", "shared_down", "output_gate", "head"),
    *("query_plain", "query_rotary", "query_down", "latent_down", "expert_up", "expert_down"),
}
# (layer, q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D], sink logits [Hq] or None) -> [T, Hq, D];
# k and v are None if the layer reads the keys and values of an earlier one
Attend = Callable[..., Tensor]
# (layer, inputs of the convolution [T, C], inputs of the decays [T, n or 2n], weights of the layer)
# -> [T, inner] before gate and norm; all float32
Recur = Callable[[int, Tensor, Tensor, RecurrentWeights], Tensor]


class DecoderLayers:
    """The layers of a decoder on torch, or those of a drafter that is built like them.

    Attributes:
        config: the shape of the layers.
        weights: anything whose `layers` are their `LayerWeights`.
    """

    config: ModelConfig
    weights: Any

    def run_layer(
        self,
        x: Tensor,
        i: int,
        rotations: Sequence[tuple[Tensor, Tensor]],
        attend: Attend,
        *,
        recur: Recur | None = None,
        growth: Tensor | None = None,
        own: Tensor | None = None,
        experts: ComputeExperts = by_expert,
    ) -> Tensor:
        """Run layer `i` on the residual stream x [T, H]. -> [T, H]

        Args:
            rotations: cos and sin of the tokens' positions, of each rotary embedding.
            attend, recur: as in `Decoder.forward`.
            growth: factors on the queries [T, 1, 1], see `query_growth`.
            own: the layer's own embedding of the tokens [T, P], if it has one.
            experts: what computes the chosen experts.
        """
        c, layer = self.config, self.weights.layers[i]
        rope = c.rope_of[i]
        rotation = None if rope is None else rotations[rope]
        read = self._norm(x, layer.attention_norm)
        branches = []
        if layer.recurrent is not None:
            assert recur is not None
            branches.append(self._recurrence(read, i, layer.recurrent, recur))
        if c.has_attention(i):
            own_growth = growth if c.grows_queries(i) else None
            branch = self._attention(read, i, layer, rotation, own_growth, attend)
            branches.append(self._norm(branch, layer.attention_out_norm))
        if layer.laurel is not None:
            branches.append(self._laurel(read, layer.laurel))
        if c.parallel:
            branches.insert(0, self._mlp_branch(read, i, layer, experts))
        if c.normed_residual:
            x = read * c.normed_residual[i][0]
        for branch in branches:
            x = x + branch * c.residual_scale
        if layer.laurel is not None:
            x = x * 2**-0.5
        if c.has_mlp(i) and not c.parallel:
            branch = self._mlp_branch(x, i, layer, experts)
            if c.normed_residual:
                x = self._norm(x, layer.mlp_norm) * c.normed_residual[i][1]
            x = x + branch * c.residual_scale
        if own is not None and layer.altup is None:  # with AltUp only other streams take it
            x = x + self._layer_input(x, layer, own)
        if layer.scale != 1.0:
            x = x * layer.scale
        return x

    def _laurel(self, x: Tensor, w: LaurelWeights) -> Tensor:
        """Return the output of the low-rank branch for its input x [T, H]."""
        out: Tensor = self._norm(self._linear(self._linear(x, w.left), w.right), w.norm)
        return x + out

    def _attention(
        self,
        x: Tensor,
        i: int,
        layer: LayerWeights,
        rotation: tuple[Tensor, Tensor] | None,
        growth: Tensor | None,
        attend: Attend,
    ) -> Tensor:
        """Return the output of the attention branch of layer `i` for its input x [T, H]."""
        c, tokens = self.config, x.shape[0]
        if layer.latent is not None:
            return self._latent_attention(x, i, layer, rotation, growth, attend)
        assert layer.qkv is not None and layer.out is not None
        kv_heads, head_dim = c.head_shape(i)
        qkv = self._linear(x, layer.qkv).view(tokens, -1, head_dim)
        q, k, v = qkv[:, : c.heads], qkv[:, c.heads : c.heads + kv_heads], qkv[:, c.heads :]
        v = v[:, kv_heads:]
        q = self._qk(q, layer.q_norm, rotation)
        if growth is not None:
            q = q * growth
        if c.kv_layer(i) != i:
            out = attend(i, q, None, None, layer.sink_logits)
        else:
            if c.value_norm:
                v = kernels.norm(v, torch.ones(head_dim, device=v.device), None, c.norm_eps)
            out = attend(i, q, self._qk(k, layer.k_norm, rotation), v, layer.sink_logits)
        out = out.reshape(tokens, -1)
        if layer.output_gate is not None:
            out = out * self._linear(x, layer.output_gate).sigmoid()
        return self._linear(out, layer.out) * c.attention_out_scale

    def _recurrence(self, x: Tensor, i: int, w: RecurrentWeights, recur: Recur) -> Tensor:
        """Return the output of the recurrent branch of layer `i` for its input x [T, H]."""
        r = self.config.recurrent
        assert r is not None
        inputs = self._linear(x, w.input).float()
        if r.kind == "conv":
            before, after, channels = inputs.chunk(3, dim=-1)
            out = recur(i, before * channels, inputs[:, :0], w) * after
            return self._linear(out.to(x.dtype), w.out) * r.out_scale
        channels, gates = torch.split(inputs, [r.channels, r.inner], dim=-1)
        decays = inputs[:, :0]
        if w.decay is not None:
            decays = self._linear(x, w.decay).float() * r.decay_scale
        out, gates = recur(i, channels, decays, w), kernels.activate(gates * r.gate_scale, r.gate)
        if r.gate_first:
            out = out * gates
        if w.norm is not None:
            size = r.inner // (r.norm_groups or r.value_heads)
            eps = self.config.norm_eps if w.norm.eps is None else w.norm.eps
            out = kernels.group_norm(out, w.norm.weight, size, eps)
        if not r.gate_first:
            out = out * gates
        return self._linear(out.to(x.dtype), w.out) * r.out_scale

    def _latent_attention(
        self,
        x: Tensor,
        i: int,
        layer: LayerWeights,
        rotation: tuple[Tensor, Tensor] | None,
        growth: Tensor | None,
        attend: Attend,
    ) -> Tensor:
        """Return the output of latent attention for its input x [T, H]; see `LatentAttention`."""
        c, a, w, tokens = self.config, self.config.latent, layer.latent, x.shape[0]
        assert a is not None and w is not None and layer.out is not None and rotation is not None
        read = x if w.query_down is None else self._linear(x, w.query_down)
        read = self._norm(read, w.query_norm)
        plain = self._linear(read, w.query_plain).view(tokens, c.heads, a.plain)
        key_up = w.key_up.weight.view(c.heads, a.rank, a.plain)
        rotary = self._linear(read, w.query_rotary).view(tokens, c.heads, a.rotary)
        q = torch.cat((rotary, torch.einsum("thp,hrp->thr", plain, key_up)), dim=-1)
        down = self._linear(x, w.down)
        vector = self._norm(down[:, a.rotary :], w.norm)
        k = torch.cat((down[:, : a.rotary], vector), dim=-1)[:, None]
        v = torch.cat((torch.zeros_like(down[:, : a.rotary]), vector), dim=-1)[:, None]
        q, k = kernels.rotate(q, *rotation), kernels.rotate(k, *rotation)
        if growth is not None:
            q = q * growth
        out = attend(i, q, k, v, None)[..., a.rotary :]
        value_up = w.value_up.weight.view(c.heads, a.value, a.rank)
        out = torch.einsum("thr,hvr->thv", out, value_up)
        return self._linear(out.reshape(tokens, -1), layer.out)

    def _qk(self, x: Tensor, norm: Norm | None, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        """Normalise and rotate queries or keys x [T, heads, D]."""
        where = self.config.qk_norm
        if norm and where == "row":
            x = self._norm(x.flatten(1), norm).view(x.shape)
        if norm and where == "head":
            x = self._norm(x, norm)
        if rotation:
            x = kernels.rotate(x, *rotation)
        return self._norm(x, norm) if norm and where.endswith("_after_rope") else x

    def _mlp_branch(
        self, x: Tensor, i: int, layer: LayerWeights, experts: ComputeExperts
    ) -> Tensor:
        """Return the output of the MLP branch of layer `i` after its norm, for x [T, H]."""
        return self._norm(self._mlp(x, i, layer, experts), layer.mlp_out_norm)

    def _mlp(self, x: Tensor, i: int, layer: LayerWeights, experts: ComputeExperts) -> Tensor:
        """Return the output of the MLP branch of layer `i`, experts included, for x [T, H]."""
        read = self._norm(x, layer.mlp_norm)
        if layer.up is None or layer.down is None:
            return self._experts(x, read, layer, experts)
        up = self._linear(read, layer.up)
        if layer.xielu is not None:
            inner = kernels.xielu(up, *layer.xielu)
        else:
            parts = up.chunk(2 if self.config.gated else 1, dim=-1)
            cutoff = self.config.gate_cutoff(i)
            if cutoff is not None:
                parts = (kernels.above_cutoff(parts[0], cutoff), parts[1])
            inner = self._activate(*parts)
        out = self._linear(inner, layer.down) * self.config.mlp_out_scale
        e = layer.experts
        if e is None:
            return out
        if e.shared_gate is not None:
            out = out * self._linear(read, e.shared_gate).sigmoid()
        return self._experts(x, read, layer, experts) + self._norm(out, e.shared_out_norm)

    def _activate(self, gates: Tensor, ups: Tensor | None = None) -> Tensor:
        """Activate the inside of an MLP; `gates` are its ups where nothing is gated."""
        if ups is None:
            return kernels.activate(gates, self.config.activation)
        return kernels.gate(gates * self.config.mlp_gate_scale, ups, self.config.activation)

    def _experts(
        self, x: Tensor, read: Tensor, layer: LayerWeights, compute: ComputeExperts
    ) -> Tensor:
        """Return the weighted sum of the experts of each token.

        x [T, H] is the residual stream, `read` [T, H] the input of the MLP; `compute` gives the
        outputs of the chosen experts."""
        e, mixture = layer.experts, self.config.experts
        assert e is not None and mixture is not None
        if e.router_norm is not None:
            logits = self._linear(self._norm(x, e.router_norm), e.router)
        else:
            logits = self._linear(read, e.router)
        choice, weights = route(logits.float(), mixture, e.choice_bias, e.expert_scale)
        if e.norm is not None:
            read = self._norm(x, e.norm)
        if e.latent_in is not None:
            read = self._linear(read, e.latent_in)
        factors = weights if mixture.weighs_inputs else None
        out = compute(read, choice, factors, self.expert_mlps(e))
        if not mixture.weighs_inputs:
            out = out * weights.to(out.dtype)[..., None]
        total = out.sum(1)
        if e.latent_out is not None:
            total = self._linear(total, e.latent_out)
        return self._norm(total, e.out_norm)

    def expert_mlps(self, e: ExpertWeights) -> ExpertMlps:
        """Return the MLPs of a layer's experts, as `kernels.experts` computes them."""
        c, mixture = self.config, self.config.experts
        assert mixture is not None
        halves = 2 if c.gated else 1
        up_bias = None if e.up.bias is None else e.up.bias.view(halves, mixture.count, -1)
        down_bias = None if e.down.bias is None else e.down.bias.view(mixture.count, -1)
        kind = c.activation if c.gated and c.mlp_gate_scale == 1.0 else ""
        matrices = e.up.weight, e.down.weight
        return ExpertMlps(
            *matrices, mixture.count, halves, self._activate, up_bias, down_bias, kind
        )

    def _layer_input(self, x: Tensor, layer: LayerWeights, own: Tensor) -> Tensor:
        """Return what a layer's own embedding of the tokens, own [T, P], adds to the residual
        stream; x [T, H] gates it."""
        w = layer.layer_input
        assert w is not None
        gated = kernels.activate(self._linear(x, w.gate), self.config.activation) * own
        return self._norm(self._linear(gated, w.projection), w.norm)

    def _norm(self, x: Tensor, norm: Norm | None) -> Tensor:
        """Normalise; without a norm x is returned."""
        if norm is None:
            return x
        eps = self.config.norm_eps if norm.eps is None else norm.eps
        return kernels.norm(x, norm.weight, norm.bias, eps)

    def _linear(self, x: Tensor, linear: LinearWeights) -> Tensor:
        return kernels.linear(x, linear.weight, linear.bias)


class Decoder(DecoderLayers):
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
        packing: str = "",
    ) -> None:
        """Load the weights in `path` and compute rotary tables for `context` positions.

        Args:
            shortlist: ascending token ids [Vd] int64 to score; logits of other tokens are -inf.
            packing: how matrices stay packed: "int8" or "int4" rounds them, "stored" keeps those
                whose stored numbers a packed form holds; "" dequantizes all.

        Raises:
            LoadError: the model cannot be loaded.
        """
        self.config = config
        self.dtype = dtype
        self.device = device
        self.context = context
        self.packing = packing
        self.weights = self._load(path, shortlist)
        self.shortlist = None if shortlist is None else shortlist.to(device)
        tables = [rope_tables(config, rope, context, dtype) for rope in config.ropes]
        self.ropes = [(cos.to(device), sin.to(device)) for cos, sin in tables]
        self.layer_ids: Sequence[int] = range(config.layers)

    def _load(self, path: Path, shortlist: Tensor | None) -> Weights:
        if not self.packing:
            return load_weights(self.config, path, self.dtype, self.device, shortlist=shortlist)
        packer = _Packer(self.packing, self.config.tied and shortlist is None)
        weights = load_weights(
            self.config, path, self.dtype, self.device, packer.linear, packer.embedding, shortlist
        )
        packer.note_dequantized(self.dtype)
        return weights

    def with_layers(self, layer_ids: Sequence[int], window: int | None) -> Decoder:
        """Return the model restricted to these layers, and to `window` keys if given.

        Weights and KV cache are shared with this decoder (layer skipping, self-speculation)."""
        part = copy.copy(self)
        part.config = self.config.with_window(window)
        part.layer_ids = layer_ids
        return part

    def pass_bytes(self, rows: float = 1) -> int:
        """Return the bytes that a forward pass over `rows` tokens reads: of experts those that
        tokens with independent routes use."""
        e = self.config.experts
        if e is None:
            return self.weight_bytes
        layers = [self.weights.layers[i].experts for i in self.layer_ids]
        matrices = [m.weight for own in layers if own for m in (own.up, own.down)]
        size: int = sum(weight.nbytes for weight in matrices)
        return self.weight_bytes - round(size * (1 - e.share(rows)))

    @property
    def weight_bytes(self) -> int:
        """Bytes of the matrices of a forward pass, the embedding only as a tied head."""
        size: int = sum(weight.nbytes for weight in self._matrices)
        return size

    @property
    def precision(self) -> str:
        """Number formats of the matrices and the kernels that multiply them, for display."""
        forms = [
            weight.form if isinstance(weight, DeviceMatrix) else str(weight.dtype)
            for weight in self._matrices
        ]
        names = " and ".join(dict.fromkeys(form.removeprefix("torch.") for form in forms))
        return f"{names}, torch on {self.device}"

    @property
    def _matrices(self) -> list[Any]:
        w = self.weights
        layers = [w.layers[i] for i in self.layer_ids]
        matrices = [matrix for layer in layers for matrix in layer.matrices]
        return [matrix.weight for matrix in (*matrices, w.head)]

    @torch.inference_mode()
    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        attend: Attend,
        want: Tensor,
        aux_hidden_layers: Sequence[int] = (),
        recur: Recur | None = None,
        experts: ComputeExperts = by_expert,
    ) -> Forward:
        """Run one forward pass over flat tokens.

        Args:
            ids: [T] int64 token ids.
            positions: [T] int64 logical positions.
            attend: attention over the cached tokens and these.
            want: [M] int64 indices in T whose logits are needed.
            aux_hidden_layers: hidden states to return. i is the input of layer i, `config.layers`
                the output of the last layer.
            recur: the recurrent layers, of a model that has some.
            experts: what computes the chosen experts, of a model that has some.

        Returns:
            logits [M, V], float32 or wider, and the hidden states asked for, [T, H] each.
        """
        c, w = self.config, self.weights
        x = w.embed[ids] * c.embed_scale if c.embed_scale != 1.0 else w.embed[ids]
        if w.positions is not None:
            x = x + w.positions[positions]
        rotations = [(cos[positions], sin[positions]) for cos, sin in self.ropes]
        growth = None
        if c.query_growth is not None:
            growth = query_scale(c.query_growth, positions).to(x.dtype)[:, None, None]
        inputs = self._layer_inputs(ids, x)
        streams = self._open_streams(x)
        features = {}
        for i in self.layer_ids:
            if i in aux_hidden_layers:
                features[i] = streams[0]
            own = None if inputs is None else inputs[:, i]
            streams = self._predict_streams(streams, w.layers[i])
            x = self.run_layer(
                streams[0],
                i,
                rotations,
                attend,
                recur=recur,
                growth=growth,
                own=own,
                experts=experts,
            )
            streams = self._correct_streams(streams, x, w.layers[i], own)
        x = self._join_streams(streams)
        if c.layers in aux_hidden_layers:
            features[c.layers] = x
        logits = self._linear(self._norm(x[want], w.norm), w.head)
        return Forward(self.finish_logits(logits), features)

    def finish_logits(self, logits: Tensor) -> Tensor:
        """Widen, scale and cap what the head computes, [M, Vd], and give tokens that it does not
        score -inf: [M, V]."""
        c = self.config
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * c.logit_scale
        if c.logit_softcap:
            logits = torch.tanh(logits / c.logit_softcap) * c.logit_softcap
        return spread(logits, self.shortlist, c.vocab)

    def _layer_inputs(self, ids: Tensor, x: Tensor) -> Tensor | None:
        """Return the layers' own embeddings of these tokens [T, L, P]; x is their embedding."""
        c, w = self.config, self.weights.layer_inputs
        if w is None:
            return None
        shape = (len(ids), c.layers, c.layer_input)
        if c.layer_input_vocab:
            ids = ids.masked_fill(ids >= c.layer_input_vocab, 0)
        projected = self._linear(x * c.hidden**-0.5, w.projection).view(shape)
        stored = w.embed[ids].view(shape) * c.layer_input**0.5
        combined: Tensor = self._norm(projected, w.norm) + stored
        return combined * 2**-0.5

    # Residual streams are one tensor [N, T, H]; layers read and write the first of them. Models
    # without AltUp have a single one.

    def _open_streams(self, x: Tensor) -> Tensor:
        """Return the residual streams of the embedding x [T, H]."""
        w = self.weights.streams
        if w is None:
            return x[None]
        projected = [self._linear(x, projection) for projection in w.opening]
        further = [kernels.with_magnitude(stream, x) for stream in projected]
        return torch.stack([x, *further])

    def _predict_streams(self, streams: Tensor, layer: LayerWeights) -> Tensor:
        """Mix the residual streams before a layer."""
        w = layer.altup
        if w is None:
            return streams
        coefficients = self._linear(self._router_inputs(streams[0], w), w.predict)
        matrices = coefficients.view(-1, len(streams), len(streams))
        return streams + torch.einsum("tij,jth->ith", matrices, streams)

    def _correct_streams(
        self, streams: Tensor, x: Tensor, layer: LayerWeights, own: Tensor | None
    ) -> Tensor:
        """Return the residual streams behind a layer, which made x [T, H] of the first; `own` is
        its own embedding of the tokens."""
        w = layer.altup
        if w is None:
            return x[None]
        assert own is not None
        shares = self._linear(self._router_inputs(x, w), w.correct)
        streams = streams + shares.T[:, :, None] * (x - streams[0])
        read = streams[0]
        if w.scale is not None:
            read = (read.to(w.scale.dtype) * w.scale).to(read.dtype)
        return torch.cat((streams[:1], streams[1:] + self._layer_input(read, layer, own)))

    def _router_inputs(self, x: Tensor, w: AltUpWeights) -> Tensor:
        """Return what the coefficients of residual streams depend on. x [T, H] -> [T, N]"""
        return self._linear(self._norm(x, w.norm), w.router).tanh()

    def _join_streams(self, streams: Tensor) -> Tensor:
        """Return the mean of the residual streams, the further ones projected: [T, H]."""
        w = self.weights.streams
        if w is None:
            return streams[0]
        pairs = zip(w.joining, streams[1:], strict=True)
        projected = [self._linear(stream, projection) for projection, stream in pairs]
        found = [kernels.with_magnitude(y, streams[0]) for y in projected]
        return torch.stack([streams[0], *found]).mean(0)


class _Packer:
    """Packs the linear layers of a decoder while they are loaded."""

    def __init__(self, packing: str, is_tied: bool) -> None:
        """`packing` as in `Decoder`; `is_tied`: the head has the rows of the embedding."""
        self.packing, self.is_tied = packing, is_tied
        self._table: DeviceMatrix | None = None
        self._dequantized = Counter[str]()  # matrices by what kept them from being packed

    def linear(self, part: str, source: Source, bias: Tensor | None) -> LinearWeights:
        """Load a linear layer, packed if it may be."""
        if part == "head" and self.is_tied and self._table is not None:
            return LinearWeights(self._table, bias)
        held, kept = source.read(), None
        if part not in PACKED_PARTS:
            if self.packing != "stored" or unpacked_kind(held):
                self._dequantized[part] += 1
        elif self.packing == "stored":
            kept = keep_packed(held, source.device, source.dtype)
            if kept is None and (kind := unpacked_kind(held)):
                self._dequantized[kind] += 1
        else:
            is_head = source.name == "head"
            kept = round_packed(held, self.packing, source.device, source.dtype, is_head)
        return LinearWeights(source.floats(held) if kept is None else kept, bias)

    def embedding(self, source: Source) -> Tensor | DeviceMatrix:
        """Load an embedding; where matrices are rounded it has floats, as on the native kernels."""
        held, kept = source.read(), None
        if self.packing == "stored":
            kept = keep_packed(held, source.device, source.dtype)
        if source.name == "embed":
            self._table = kept
        return source.floats(held) if kept is None else kept

    def note_dequantized(self, dtype: torch.dtype) -> None:
        """Print a note about the matrices that are not packed, if there are some."""
        if self._dequantized:
            which = ", ".join(f"{count} {kind}" for kind, count in self._dequantized.items())
            note(
                f"matrices that run in {str(dtype).removeprefix('torch.')}, since they cannot be"
                f" packed on this device: {which}"
            )


def route(
    logits: Tensor, experts: Experts, choice_bias: Tensor | None, expert_scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token; of equal scores the first expert wins.

    Args:
        logits: [T, E] float32, the router's output.
        choice_bias: [E], added to the scores for the choice only.
        expert_scale: [E], factors on the weights.

    Returns:
        experts [T, k] int64, best first, and their weights [T, k] float32.
    """
    if experts.scores == "softmax":
        scores = logits.softmax(-1)
    else:
        scores = logits.sigmoid() if experts.scores == "sigmoid" else logits
    rank = scores if choice_bias is None else scores + choice_bias
    if experts.groups > 1:
        by_group = rank.view(len(rank), experts.groups, -1)
        rated = by_group.topk(experts.best, dim=-1).values.sum(-1)
        used = rated.sort(dim=-1, descending=True, stable=True).indices[:, : experts.used_groups]
        is_used = torch.zeros_like(rated, dtype=torch.bool).scatter_(1, used, True)
        rank = by_group.masked_fill(~is_used[..., None], -torch.inf).flatten(1)
    choice = rank.sort(dim=-1, descending=True, stable=True).indices[:, : experts.used]
    weights = scores.gather(1, choice)
    if experts.scores == "logit_sigmoids":
        weights = weights.sigmoid()
    if experts.scores == "logits":
        weights = weights.softmax(-1)
    elif experts.normalised:
        weights = weights / (weights.sum(-1, keepdim=True) + experts.epsilon)
    weights = weights * experts.scale
    return choice, weights if expert_scale is None else weights * expert_scale[choice]


def load_decoder(
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    context: int | None = None,
    shortlist: Tensor | None = None,
    packing: str = "",
) -> Decoder:
    """Load a model directory or GGUF file on torch; `context` defaults to the model's own.

    Raises LoadError. See `Decoder`."""
    config = load_config(path)
    context = context or default_context(config)
    return Decoder(config, path, dtype, device, context, shortlist, packing)


def query_scale(growth: QueryGrowth, positions: Tensor) -> Tensor:
    """Return the factors on the queries of these positions, float32."""
    steps = torch.floor((positions.float() + growth.offset) / growth.length)
    return 1 + growth.beta * torch.log1p(steps)


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
