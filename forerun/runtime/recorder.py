"""Recording of a decoder as a program of native operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.cache.recurrent import StateLayout
from forerun.kernels import native
from forerun.kernels.native import CNorm, COp
from forerun.kernels.reference import MIN_SQUARE
from forerun.models.config import ModelConfig
from forerun.models.decoder import query_scale
from forerun.models.parameters import (
    AltUpWeights,
    ExpertWeights,
    LatentWeights,
    LaurelWeights,
    LayerInputWeights,
    LayerWeights,
    Norm,
    RecurrentWeights,
)
from forerun.runtime.packed import PackedMatrix, parts_of
from forerun.runtime.program import (
    ATTENDED,
    BRANCH,
    HIDDEN,
    LOGITS,
    QKV,
    Program,
    X,
    embed_op,
    mix_op,
    route_op,
)


class DecoderRecorder:
    """Records a decoder as a program.

    Attributes:
        owned: what the operations point to.
        at: buffers behind those that every decoder has, by name.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Any,
        ropes: Sequence[tuple[Tensor, Tensor]],
        context: int,
        shortlist: Tensor | None,
        aux_hidden_layers: tuple[int, ...],
    ) -> None:
        """Prepare to record; arguments as in `NativeDecoder`, with packed `weights`."""
        self.config, self.weights = config, weights
        self.ropes, self.shortlist, self.context = ropes, shortlist, context
        self.aux_hidden_layers = aux_hidden_layers
        self.kv_offsets = self.config.kv_offsets()
        recurrent = self.config.recurrent
        self.states = None if recurrent is None else StateLayout.of(self.config)
        self.owned: list[Any] = []
        self.widths = self._widths()
        self.at: dict[str, int] = {}
        for name, width in self._further_widths().items():
            self.at[name] = len(self.widths)
            self.widths.append(width)
        growth = self.config.query_growth
        self.query_scale = None
        if growth is not None:
            self.query_scale = self._own(query_scale(growth, torch.arange(self.context)))

    def _widths(self) -> list[int]:
        """Return the widths of the buffers that every decoder has, and of saved hidden states."""
        c = self.config
        shapes = [c.head_shape(i) for i in range(c.layers)]
        heads = max((c.heads + 2 * kv_heads) * size for kv_heads, size in shapes)
        attended = max(c.heads * size for _, size in shapes)
        inner = max(c.mlp_size(i) for i in range(c.layers))
        logits = c.vocab if self.shortlist is None else len(self.shortlist)
        widths = [c.hidden, heads, attended, max(-(-inner // 16) * 16, 1), c.hidden, logits]
        return widths + [c.hidden] * len(self.aux_hidden_layers)

    def _further_widths(self) -> dict[str, int]:
        c, widths = self.config, dict[str, int]()
        if c.experts is not None:
            e = c.experts
            sparse = sum(e.layers)
            widths |= {
                "scores": e.count,
                "choice": 2 * e.used * sparse,
                "expert_inner": e.used * e.intermediate,
                "expert_out": e.used * (e.latent or c.hidden),
                "shared": c.hidden,
                "shared_gate": 1,
            }
            if e.latent:
                widths |= {"latent_in": e.latent, "latent_out": e.latent}
        if c.latent is not None:
            a = c.latent
            widths |= {"latent_queries": max(a.query_rank, 1), "plain": c.heads * a.plain}
            widths |= {"latent": a.rotary + a.rank, "values": c.heads * a.value}
        if c.recurrent is not None:
            r = c.recurrent
            inner = 3 * r.inner if r.kind == "conv" else r.channels + r.inner
            widths |= {"inputs": inner, "decays": max(2 * r.value_heads, 1)}
            widths |= {"convolved": r.channels + 2 * r.value_heads, "recurrent_out": r.inner}
        if c.layer_input:
            all_layers = c.layers * c.layer_input
            widths |= {"projected": all_layers, "stored": all_layers}
            widths |= {"own": c.layer_input, "own_gate": c.layer_input}
        if c.altup is not None:
            count = c.altup.streams
            widths |= {"streams": count * c.hidden, "routed": count, "factors": count * count}
        if c.laurel_rank:
            widths |= {"laurel": c.laurel_rank, "laurel_out": c.hidden}
        with_cutoff = [c.mlp_size(i) for i in range(c.layers) if c.gate_cutoff(i) is not None]
        if with_cutoff:
            widths["gates_and_ups"] = 2 * max(with_cutoff)
        return widths

    def program(self, layer_ids: Sequence[int]) -> Program:
        """Record a forward pass through these layers."""
        c, w = self.config, self.weights
        saves = {
            layer: COp(kind=native.SAVE, input=X, output=LOGITS + 1 + i)
            for i, layer in enumerate(self.aux_hidden_layers)
        }
        positions = self._own(w.positions.float()) if w.positions is not None else None
        ops = [self._embed(w.embed, X, c.embed_scale, positions)]
        ops += self._layer_inputs()
        ops += self._open_streams()
        for i in layer_ids:
            if i in saves:
                ops.append(saves[i])
            ops += self._layer(i)
        ops += self._join_streams()
        if c.layers in saves:
            ops.append(saves[c.layers])
        head: dict[str, Any] = dict(wanted=1, softcap=c.logit_softcap or 0)
        ops += self._linear(w.head, X, LOGITS, w.norm, scale=_factor(c.logit_scale), **head)
        return self.make_program(ops)

    def make_program(self, ops: list[COp]) -> Program:
        """Return a program of these operations over the recorder's buffers."""
        c, e = self.config, self.config.experts
        rows_each = {self.at["expert_inner"]: e.used} if e is not None else {}
        if c.latent is not None:  # inputs of heads stand side by side
            rows_each |= {self.at["plain"]: c.heads, ATTENDED: c.heads}
        program = Program(ops, np.array(self.widths, dtype=np.int32), rows_each)
        program.choices = self.at.get("choice", 0)
        return program

    def _embed(self, table: Any, to: int, scale: float, positions: int | None = None) -> COp:
        table = table if isinstance(table, PackedMatrix) else table.contiguous()
        self.owned.append(table)
        return embed_op(table, to, scale, positions)

    def _layer(self, i: int) -> list[COp]:
        c, layer = self.config, self.weights.layers[i]
        branches = self._branches(i, layer)
        if layer.altup is not None:
            before = self._predict_streams(layer.altup)
            return before + branches + self._correct_streams(i, layer.layer_input, layer.altup)
        ops = branches
        if layer.layer_input is not None:
            ops += self._layer_input(i, layer.layer_input, X)
            ops.append(self._add(layer.layer_input.norm))
        if layer.scale != 1.0:
            ops.append(mix_op(X, X, c.hidden, scale=layer.scale))
        return ops

    def _branches(self, i: int, layer: LayerWeights) -> list[COp]:
        """Return the operations that add the branches of a layer to X."""
        c = self.config
        # parallel branches both read X: their sum is added to it behind the MLP
        to = BRANCH if c.parallel else X
        ops: list[COp] = []
        outputs: list[COp] = []  # what changes X comes behind all that reads it
        if layer.recurrent is not None:
            recurrence, output = self._recurrent(i, layer.recurrent, layer.attention_norm)
            ops += recurrence
            outputs += output
        if layer.latent is not None:
            ops += self._latent(i, layer, layer.latent)
        if layer.qkv is not None:
            ops += self._linear(layer.qkv, X, QKV, layer.attention_norm)
            ops += [self._rotate(i, layer), self._attend(i, layer)]
            if layer.output_gate is not None:
                gate: dict[str, Any] = dict(
                    activation=native.ACTIVATIONS["sigmoid"], combine=native.TIMES
                )
                ops += self._linear(layer.output_gate, X, ATTENDED, layer.attention_norm, **gate)
            scale, after = c.attention_out_scale, layer.attention_out_norm
            outputs += self._branch(layer.out, ATTENDED, after, to, scale)
        if layer.laurel is not None:
            ops += self._laurel(layer.laurel, layer.attention_norm)
            outputs.append(mix_op(self.at["laurel_out"], X, c.hidden, combine=native.ADD))
            outputs.append(mix_op(X, X, c.hidden, scale=2**-0.5))
        ops += self._replaced_stream(i, 0, layer.attention_norm) + outputs
        if c.has_mlp(i):
            ops += self._mlp(i, layer)
        if c.parallel:
            ops.append(mix_op(BRANCH, X, c.hidden, combine=native.ADD))
        return ops

    def _replaced_stream(self, i: int, part: int, norm: Norm | None) -> list[COp]:
        """Return the operation that replaces X by what norms make of it, before the first or second
        part of a layer adds its output; see `ModelConfig.normed_residual`."""
        c = self.config
        if not c.normed_residual:
            return []
        return [mix_op(X, X, c.hidden, after=self._norm(norm), scale=c.normed_residual[i][part])]

    def _laurel(self, w: LaurelWeights, norm: Norm | None) -> list[COp]:
        """Return the operations of the low-rank branch beside attention."""
        hidden, inner, out = self.config.hidden, self.at["laurel"], self.at["laurel_out"]
        return [
            *self._linear(w.left, X, inner, norm),
            *self._linear(w.right, inner, BRANCH, None),
            mix_op(X, out, hidden, after=self._norm(norm)),
            mix_op(BRANCH, out, hidden, combine=native.ADD, after=self._norm(w.norm)),
        ]

    def _attend(self, i: int, layer: LayerWeights) -> COp:
        c = self.config
        visible = c.visible_keys(i)
        return COp(
            kind=native.ATTEND,
            input=QKV,
            output=ATTENDED,
            scale=c.attention_scale,
            softcap=c.attention_softcap or 0,
            window=visible.window or 0,
            sinks=visible.sinks,
            chunk=visible.chunk or 0,
            sink_logits=None if layer.sink_logits is None else self._own(layer.sink_logits),
            **self._heads(i),
        )

    def _latent(self, i: int, layer: LayerWeights, w: LatentWeights) -> list[COp]:
        """Return the operations of latent attention. A head's row of QKV is its rotated part, then
        its query for latent vectors; key and value follow."""
        c, a = self.config, self.config.latent
        assert a is not None
        head = a.rotary + a.rank
        key, value = c.heads * head, (c.heads + 1) * head
        queries, plain, down = self.at["latent_queries"], self.at["plain"], self.at["latent"]
        heads: dict[str, Any] = dict(experts=c.heads, slots=c.heads, choice=-1)
        source, norm = X, layer.attention_norm
        ops: list[COp] = []
        if w.query_down is not None:
            ops += self._linear(w.query_down, X, queries, norm)
            source, norm = queries, w.query_norm
        ops += self._linear(w.query_plain, source, plain, norm)
        ops += self._linear(w.query_rotary, source, QKV, norm, out_stride=head, **heads)
        up: dict[str, Any] = dict(spread=1, column=a.rotary, out_stride=head)
        ops += self._linear(w.key_up, plain, QKV, None, **up, **heads)
        ops += self._linear(w.down, X, down, layer.attention_norm)
        normed = self._norm(w.norm)
        ops += [
            mix_op(down, QKV, a.rotary, column=key),
            mix_op(down, QKV, a.rank, in_column=a.rotary, column=key + a.rotary, after=normed),
            mix_op(down, QKV, a.rank, in_column=a.rotary, column=value + a.rotary, after=normed),
            self._rotate(i, layer),
            self._attend(i, layer),
        ]
        out = self.at["values"]
        spread: dict[str, Any] = dict(spread=1, in_column=a.rotary, in_stride=head)
        ops += self._linear(w.value_up, ATTENDED, out, None, **spread, **heads)
        return ops + self._branch(layer.out, out, layer.attention_out_norm, X, 1.0)

    def _recurrent(
        self, i: int, w: RecurrentWeights, norm: Norm | None
    ) -> tuple[list[COp], list[COp]]:
        """Return the operations of a recurrent layer, and those that add its output to X."""
        c, r, states = self.config, self.config.recurrent, self.states
        assert r is not None and states is not None
        number = states.layers.index(i)
        inputs, decays = self.at["inputs"], self.at["decays"]
        convolved, out = self.at["convolved"], self.at["recurrent_out"]
        is_conv, is_delta = r.kind == "conv", r.kind == "delta"
        keys = r.key_heads * r.key_size
        values = r.value_heads * r.value_size
        channel_starts = (values + keys, values, 0) if r.kind == "mamba" else (0, keys, 2 * keys)
        common: dict[str, Any] = dict(
            channels=r.channels,
            taps=r.taps,
            key_heads=r.key_heads,
            key_size=r.key_size,
            value_heads=r.value_heads,
            value_size=r.value_size,
            delta=int(is_delta),
            tiled=int(r.tiled),
            gated=int(is_conv),
            conv_in=inputs,
            state_at=states.state * number,
            half_at=states.layer_half * number,
            history_at=states.history * number,
        )
        if not is_conv:
            common |= dict(zip(("query_at", "key_at", "value_at"), channel_starts, strict=True))
        convolve = COp(
            kind=native.CONVOLVE,
            input=inputs,
            output=convolved,
            gate=-1 if w.decay is None else decays,
            activation=native.ACTIVATIONS["silu"],
            conv_weight=None if w.conv_weight is None else self._own(w.conv_weight),
            conv_bias=None if w.conv_bias is None else self._own(w.conv_bias),
            **common,
        )
        recur = COp(kind=native.RECUR, input=convolved, output=out, **common)
        ops = self._linear(w.input, X, inputs, norm)
        factor = _factor(c.residual_scale * r.out_scale)
        scale: dict[str, Any] = dict(combine=native.ADD, scale=factor)
        if is_conv:
            return [*ops, convolve, recur], self._linear(w.out, convolved, X, None, **scale)
        assert w.decay_rate is not None
        convolve.decay_rate = self._own(w.decay_rate)
        if w.decay is not None and w.decay_bias is not None:
            convolve.decay_bias = self._own(w.decay_bias)
            ops += self._linear(w.decay, X, decays, norm, scale=_factor(r.decay_scale))
        ops += [convolve, recur, self._recurrent_gate(w, channel_starts[2])]
        return ops, self._linear(w.out, out, X, None, **scale)

    def _recurrent_gate(self, w: RecurrentWeights, value_at: int) -> COp:
        """Return the operation that gates and normalises the output of a recurrent layer.

        value_at: where values begin among the channels."""
        r = self.config.recurrent
        assert r is not None
        return COp(
            kind=native.GATE,
            input=self.at["convolved"],
            output=self.at["recurrent_out"],
            gate=self.at["inputs"],
            in_column=r.channels,
            count=r.inner // r.norm_groups if r.norm_groups else r.value_size,
            activation=native.ACTIVATIONS[r.gate],
            gate_first=int(r.gate_first),
            tiled_norm=int(not r.norm_groups),
            norm=self._norm(w.norm, "rms"),
            skip=None if w.skip is None else self._own(w.skip),
            value_heads=r.value_heads,
            value_size=r.value_size,
            value_at=value_at,
            scale=_factor(r.gate_scale),
        )

    def _heads(self, i: int) -> dict[str, int]:
        """Return the fields of attention operations that say where a layer's keys are."""
        kv_heads, head_dim = self.config.head_shape(i)
        offset = self.kv_offsets[self.config.kv_layer(i)]
        return dict(heads=self.config.heads, kv_heads=kv_heads, head_dim=head_dim, kv_width=offset)

    def _rotate(self, i: int, layer: LayerWeights) -> COp:
        c = self.config
        op = COp(
            kind=native.ROTATE,
            input=QKV,
            norm=self._norm(layer.q_norm),
            key_norm=self._norm(layer.k_norm),
            qk_norm=native.QK_NORMS.get(c.qk_norm, 0),
            value_norm=int(c.value_norm),
            epsilon=c.norm_eps,
            query_scale=self.query_scale if c.grows_queries(i) else None,
            **self._heads(i),
        )
        if c.kv_layer(i) != i:
            op.kv_heads = 0
        rope = c.rope_of[i]
        if rope is not None:
            cosine, sine = self.ropes[rope]
            op.cosine, op.sine, op.rotary = cosine.data_ptr(), sine.data_ptr(), 2 * cosine.shape[-1]
        return op

    def _mlp(self, i: int, layer: LayerWeights) -> list[COp]:
        """Return the operations of a layer's MLP, its experts included."""
        c, e = self.config, layer.experts
        norm = layer.attention_norm if c.parallel else layer.mlp_norm
        up: list[COp] = []
        if layer.up is not None:
            up = self._up(i, layer, norm)
        stream = self._replaced_stream(i, 1, norm)
        if e is None:
            to, scale = BRANCH if c.parallel else X, c.mlp_out_scale
            return up + stream + self._branch(layer.down, HIDDEN, layer.mlp_out_norm, to, scale)
        ops = self._experts(i, e, norm)
        out, column = self.at["expert_out"], self._choice_column(i)
        assert c.experts is not None
        choice = -1 if c.experts.weighs_inputs else self.at["choice"]
        weighted: dict[str, Any] = dict(slots=c.experts.used, choice=choice, choice_column=column)
        if e.latent_out is not None:
            total = self.at["latent_out"]
            ops.append(mix_op(out, total, c.experts.latent, **weighted))
            ops += self._linear(e.latent_out, total, BRANCH, None)
        elif layer.up is None and layer.mlp_out_norm is None:
            added = mix_op(out, X, c.hidden, combine=native.ADD, scale=c.residual_scale, **weighted)
            return [*ops, *stream, added]
        else:
            after = self._norm(e.out_norm)
            ops.append(mix_op(out, BRANCH, c.hidden, after=after, **weighted))
        if layer.up is not None:
            shared = self.at["shared"]
            ops += [*up, *self._linear(layer.down, HIDDEN, shared, None)]
            gate = -1
            if e.shared_gate is not None:
                gate = self.at["shared_gate"]
                ops += self._linear(e.shared_gate, X, gate, norm)
            after = self._norm(e.shared_out_norm)
            ops.append(mix_op(shared, BRANCH, c.hidden, combine=native.ADD, after=after, gate=gate))
        return [*ops, *stream, self._add(layer.mlp_out_norm)]

    def _up(self, i: int, layer: LayerWeights, norm: Norm | None) -> list[COp]:
        """Return the operations that give the inside of a layer's dense MLP."""
        c, cutoff = self.config, self.config.gate_cutoff(i)
        if cutoff is None:
            curve = {} if layer.xielu is None else {"xielu": self._own(layer.xielu)}
            return self._linear(layer.up, X, HIDDEN, norm, **self._activation(), **curve)
        gates_and_ups = self.at["gates_and_ups"]
        gate = COp(
            kind=native.CUTOFF,
            input=gates_and_ups,
            output=HIDDEN,
            count=c.mlp_size(i),
            scale=cutoff,
            activation=native.ACTIVATIONS[c.activation],
        )
        return [*self._linear(layer.up, X, gates_and_ups, norm), gate]

    def _experts(self, i: int, e: ExpertWeights, norm: Norm | None) -> list[COp]:
        """Return the operations that write the outputs of each token's experts side by side."""
        mixture = self.config.experts
        assert mixture is not None
        scores, choice = self.at["scores"], self.at["choice"]
        inner, out = self.at["expert_inner"], self.at["expert_out"]
        column = self._choice_column(i)
        common: dict[str, Any] = dict(
            experts=mixture.count, slots=mixture.used, choice=choice, choice_column=column
        )
        route = route_op(
            mixture,
            scores,
            choice,
            column,
            choice_bias=None if e.choice_bias is None else self._own(e.choice_bias),
            expert_scale=None if e.expert_scale is None else self._own(e.expert_scale),
        )
        ops = [*self._linear(e.router, X, scores, e.router_norm or norm), route]
        source, own_norm = X, e.norm or norm
        if e.latent_in is not None:
            source = self.at["latent_in"]
            ops += self._linear(e.latent_in, X, source, own_norm)
            own_norm = None
        weighted = dict(weighted=int(mixture.weighs_inputs))
        ops += self._linear(
            e.up, source, inner, own_norm, **self._activation(), **common, **weighted
        )
        return ops + self._linear(e.down, inner, out, None, spread=1, **common)

    def _activation(self) -> dict[str, Any]:
        """Return the fields of a product that gives the inside of an MLP."""
        c = self.config
        scale = _factor(c.mlp_gate_scale) if c.gated else 0.0
        return dict(gated=c.gated, activation=native.ACTIVATIONS[c.activation], scale=scale)

    def _choice_column(self, i: int) -> int:
        """Return where the experts of layer `i` are in a row of the buffer of choices."""
        e = self.config.experts
        assert e is not None
        return 2 * e.used * sum(e.layers[:i])

    def _layer_inputs(self) -> list[COp]:
        """Return the operations that read the layers' own embeddings of a token."""
        c, w = self.config, self.weights.layer_inputs
        if w is None:
            return []
        stored = self._embed(w.embed, self.at["stored"], (c.layer_input / 2) ** 0.5)
        stored.count = c.layer_input_vocab
        projected = self.at["projected"]
        return [*self._linear(w.projection, X, projected, None, scale=c.hidden**-0.5), stored]

    def _layer_input(self, i: int, w: LayerInputWeights, source: int) -> list[COp]:
        """Return the operations that write what a layer's own embedding adds to the residual stream
        to BRANCH, before its norm; `source` gates it."""
        c, own, gate = self.config, self.at["own"], self.at["own_gate"]
        column: dict[str, Any] = dict(in_column=i * c.layer_input)
        norm = self._norm(self.weights.layer_inputs.norm)
        projected, stored = self.at["projected"], self.at["stored"]
        activation = native.ACTIVATIONS[c.activation]
        return [
            mix_op(projected, own, c.layer_input, after=norm, scale=2**-0.5, **column),
            mix_op(stored, own, c.layer_input, combine=native.ADD, **column),
            *self._linear(w.gate, source, gate, None, activation=activation),
            mix_op(own, gate, c.layer_input, combine=native.TIMES),
            *self._linear(w.projection, gate, BRANCH, None),
        ]

    # X is the first residual stream, and between two layers a copy of it; see `AltUp`

    def _open_streams(self) -> list[COp]:
        """Return the operations that make the residual streams of the embedding in X."""
        hidden, w = self.config.hidden, self.weights.streams
        if w is None:
            return []
        streams = self.at["streams"]
        ops = [mix_op(X, streams, hidden)]
        for n, projection in enumerate(w.opening, start=1):
            ops += self._linear(projection, X, streams, None, column=n * hidden)
        return [*ops, self._rescale()]

    def _predict_streams(self, w: AltUpWeights) -> list[COp]:
        """Return the operations that mix the residual streams before a layer."""
        streams = self.at["streams"]
        copied = mix_op(streams, X, self.config.hidden)
        return [*self._factors(w, w.predict), self._blend(streams), copied]

    def _correct_streams(self, i: int, own: LayerInputWeights, w: AltUpWeights) -> list[COp]:
        """Return the operations that bring the residual streams up to date behind a layer, which
        made X of the first."""
        hidden, streams, source = self.config.hidden, self.at["streams"], X
        ops = [
            *self._factors(w, w.correct),
            mix_op(streams, X, hidden, combine=native.ADD, scale=-1.0),
            self._blend(X),
            mix_op(streams, X, hidden),
        ]
        if w.scale is not None:
            factors = CNorm(self._own(w.scale), None, 0.0, native.NORMS["factors"])
            ops.append(mix_op(X, BRANCH, hidden, after=factors))
            source = BRANCH
        ops += self._layer_input(i, own, source)
        further: dict[str, Any] = dict(combine=native.ADD, after=self._norm(own.norm))
        for column in range(hidden, self.widths[streams], hidden):
            ops.append(mix_op(BRANCH, streams, hidden, column=column, **further))
        return ops

    def _factors(self, w: AltUpWeights, matrix: Any) -> list[COp]:
        """Return the operations that give the factors of residual streams for X."""
        routed, tanh = self.at["routed"], native.ACTIVATIONS["tanh"]
        return [
            *self._linear(w.router, X, routed, w.norm, activation=tanh),
            *self._linear(matrix, routed, self.at["factors"], None),
        ]

    def _blend(self, source: int) -> COp:
        """Return the operation that adds streams, times their factors, to all residual streams."""
        gate, count = self.at["factors"], self.config.hidden
        streams = self.at["streams"]
        return COp(kind=native.BLEND, input=source, output=streams, gate=gate, count=count)

    def _rescale(self) -> COp:
        streams, count = self.at["streams"], self.config.hidden
        return COp(
            kind=native.RESCALE, input=streams, output=streams, count=count, epsilon=MIN_SQUARE
        )

    def _join_streams(self) -> list[COp]:
        """Return the operations that write the mean of the residual streams to X."""
        hidden, w = self.config.hidden, self.weights.streams
        if w is None:
            return []
        streams, ops = self.at["streams"], list[COp]()
        for n, projection in enumerate(w.joining, start=1):
            columns: dict[str, Any] = dict(in_column=n * hidden, column=n * hidden)
            ops += self._linear(projection, streams, streams, None, **columns)
        ops.append(self._rescale())
        scale = hidden / self.widths[streams]
        ops.append(mix_op(streams, X, hidden, scale=scale))
        for column in range(hidden, self.widths[streams], hidden):
            sum_: dict[str, Any] = dict(in_column=column, combine=native.ADD, scale=scale)
            ops.append(mix_op(streams, X, hidden, **sum_))
        return ops

    def _linear(
        self,
        linear: Any,
        source: int,
        to: int,
        norm: Norm | None,
        column: int = 0,
        **options: Any,
    ) -> list[COp]:
        """Return one product for each matrix of a layer; a separate gate precedes the matrix it
        gates."""
        ops = []
        for part in parts_of(linear):
            own = options
            if part.is_gate or part.is_gated:
                own = {name: value for name, value in options.items() if name != "gated"}
            bounds_both = options.get("activation") == native.ACTIVATIONS["clamped_swiglu"]
            is_late = bounds_both or bool(options.get("scale"))  # the activation, not of the gate
            if part.is_gate and is_late:
                own = own | {"activation": 0}
            elif part.is_gated and is_late:
                own = own | {"combine": native.GATED, "scale": 0.0}
            elif part.is_gated:
                own = own | {"combine": native.TIMES, "activation": 0}
            op = COp(
                kind=native.LINEAR,
                input=source,
                output=to,
                norm=self._norm(norm),
                matrix=part.packed.matrix,
                column=column + part.column,
                **own,
            )
            ops.append(op)
        return ops

    def _branch(
        self, layer: Any, source: int, after: Norm | None, to: int, scale: float
    ) -> list[COp]:
        """Add the output of a branch times `scale` to `to`, after its norm if there is one; BRANCH,
        which is only for parallel branches, takes the first of them as it is."""
        if after is not None:
            product = self._linear(layer, source, BRANCH, None, scale=_factor(scale))
            return [*product, self._add(after)]
        combine = native.REPLACE if to == BRANCH and source == ATTENDED else native.ADD
        factor = _factor(self.config.residual_scale * scale)
        return self._linear(layer, source, to, None, combine=combine, scale=factor)

    def _add(self, after: Norm | None) -> COp:
        """Add BRANCH to the residual stream, after a norm if there is one."""
        c, norm = self.config, self._norm(after)
        scale = c.residual_scale
        return mix_op(BRANCH, X, c.hidden, combine=native.ADD, after=norm, scale=scale)

    def _norm(self, norm: Norm | None, kind: str = "") -> CNorm:
        """Return the structure of a norm, by default of the kind of the model's norms."""
        if norm is None:
            return CNorm()
        bias = None if norm.bias is None else self._own(norm.bias)
        eps = self.config.norm_eps if norm.eps is None else norm.eps
        return CNorm(self._own(norm.weight), bias, eps, native.NORMS[kind or self.config.norm])

    def _own(self, tensor: Tensor) -> int:
        """Keep a tensor alive as long as the decoder; return its address."""
        tensor = tensor.contiguous()
        self.owned.append(tensor)
        return tensor.data_ptr()


def _factor(scale: float) -> float:
    """Return the `scale` of a product, which leaves its result as it is where it is 0."""
    return 0.0 if scale == 1.0 else scale
