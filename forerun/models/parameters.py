"""The weights of a decoder, as `weights` loads them and decoders read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forerun.models.experts import StackedRows
from forerun.models.gguf.blocks import Blocks
from forerun.models.quantized import QuantizedMatrix


@dataclass(slots=True)
class Norm:
    """Weight [H] of a norm and, for layer norms, bias [H]; float32 or wider.

    eps: its epsilon if it is not the model's."""

    weight: Tensor
    bias: Tensor | None = None
    eps: float | None = None


@dataclass(slots=True)
class LinearWeights:
    """A linear layer: weight [out, in], which `kernels.reference.linear` takes, and bias [out]."""

    weight: Any  # a tensor or a `DeviceMatrix`
    bias: Tensor | None = None


# the weight of a linear layer or of an embedding, as it is stored
Matrix = Tensor | QuantizedMatrix | Blocks | StackedRows


@dataclass(slots=True)
class Source:
    """The weight of a linear layer or embedding in the checkpoint, read on demand.

    Attributes:
        name: its place in the model: "3.qkv", "head", "embed".
        shape: (out, in).
        read: returns [out, in] as stored: floats, or quantized values with their scales.
        dtype, device: those of the decoder.
    """

    name: str
    shape: tuple[int, int]
    read: Callable[[], Matrix]
    dtype: torch.dtype
    device: torch.device

    def weight(self) -> Tensor:
        """Read the weight [out, in] in the decoder's dtype and on its device."""
        return self.floats(self.read())

    def floats(self, held: Matrix) -> Tensor:
        """Return what was read in the decoder's dtype and on its device."""
        floats = held if isinstance(held, Tensor) else held.dequantize()
        return floats.to(device=self.device, dtype=self.dtype).contiguous()


@dataclass(slots=True)
class ExpertWeights:
    """The mixture of experts of one layer, E experts of inner size I.

    Attributes:
        router: [E, H].
        up: [2 * E * I, H]: the gates of all experts, then their ups; [E * I, H] without gates.
        down: [E * H, I].
        choice_bias: [E] float32, added to scores for the choice.
        expert_scale: [E] float32, factors on the weights.
        shared_gate: [1, H], gates the dense MLP that runs beside the experts.
        latent_in, latent_out: [L, H] and [H, L], to and from what experts read and write, whose
            width is then L in place of H.
        router_norm, norm, out_norm, shared_out_norm: norms of the inputs of router and experts if
            they do not share the MLP's, and of the outputs of experts and dense MLP.
    """

    router: LinearWeights
    up: LinearWeights
    down: LinearWeights
    choice_bias: Tensor | None = None
    expert_scale: Tensor | None = None
    shared_gate: LinearWeights | None = None
    latent_in: LinearWeights | None = None
    latent_out: LinearWeights | None = None
    router_norm: Norm | None = None
    norm: Norm | None = None
    out_norm: Norm | None = None
    shared_out_norm: Norm | None = None


@dataclass(slots=True)
class LatentWeights:
    """Latent attention with n heads; the sizes are those of `LatentAttention`.

    Attributes:
        query_down, query_norm: to the latent vector of queries, if there is one.
        query_plain: [n * plain, query rank or H]; query_rotary: [n * rotary, the same].
        down: [rotary + rank, H], the rotated part of the keys, then the latent vector.
        norm: of the latent vector.
        key_up: [n * rank, plain], from a head's query to its query for latent vectors.
        value_up: [n * value, rank], from a sum of latent vectors to a head's output.
    """

    query_plain: LinearWeights
    query_rotary: LinearWeights
    down: LinearWeights
    norm: Norm
    key_up: LinearWeights
    value_up: LinearWeights
    query_down: LinearWeights | None = None
    query_norm: Norm | None = None


@dataclass(slots=True)
class RecurrentWeights:
    """A recurrent layer with C channels in its convolution, if it has one, and n value heads.

    Attributes:
        input: the channels, then the gates of the output; for "conv" input gates, output gates and
            channels, C each.
        decay: what the decay of each head depends on, and behind it beta for the delta rule; None
            if decays are the same for all tokens.
        out: of the output.
        conv_weight: [C, taps] float32, conv_bias: [C].
        decay_bias, decay_rate: [n] float32.
        skip: [n] float32, the share of its input in the output of a head.
        norm: of the output.
    """

    input: LinearWeights
    out: LinearWeights
    conv_weight: Tensor | None = None
    conv_bias: Tensor | None = None
    decay: LinearWeights | None = None
    decay_bias: Tensor | None = None
    decay_rate: Tensor | None = None
    skip: Tensor | None = None
    norm: Norm | None = None


@dataclass(slots=True)
class LayerInputWeights:
    """Weights that add a layer's own embedding of the token to the residual stream (Gemma 4).

    Attributes:
        gate: [P, H], projection: [H, P]; P is `ModelConfig.layer_input`.
        norm: of the projection's output.
    """

    gate: LinearWeights
    projection: LinearWeights
    norm: Norm


@dataclass(slots=True)
class AltUpWeights:
    """Weights of a layer that mix N residual streams; see `families.AltUp`.

    Attributes:
        norm, router: [N, H], from a stream to the inputs of the coefficients, through a tanh.
        predict: [N * N, N], to the coefficients with which every stream enters every other.
        correct: [N, N], to the share of the layer's change that each stream takes; its bias is 1.
        scale: [H], factors on what the gate of the layer's own embedding reads; None without.
    """

    norm: Norm
    router: LinearWeights
    predict: LinearWeights
    correct: LinearWeights
    scale: Tensor | None = None


@dataclass(slots=True)
class LaurelWeights:
    """A linear branch of low rank R beside attention: left [R, H], right [H, R], and a norm."""

    left: LinearWeights
    right: LinearWeights
    norm: Norm


@dataclass(slots=True)
class LayerWeights:
    """One decoder layer. `qkv` stacks query, key and value; `up` stacks gate and up if gated.

    A layer that reads the keys of another has only queries in `qkv`, and one without attention has
    none. `up` and `down` are None if the MLP has nothing but experts, or if there is no MLP.
    Without `mlp_norm` the MLP reads what `attention_norm` gives, or the residual stream."""

    attention_norm: Norm | None
    qkv: LinearWeights | None
    out: LinearWeights | None
    mlp_norm: Norm | None
    up: LinearWeights | None = None
    down: LinearWeights | None = None
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    attention_out_norm: Norm | None = None
    mlp_out_norm: Norm | None = None
    sink_logits: Tensor | None = None  # [heads] float32
    experts: ExpertWeights | None = None
    latent: LatentWeights | None = None
    recurrent: RecurrentWeights | None = None
    output_gate: LinearWeights | None = None  # of attention [heads * head size, H]
    layer_input: LayerInputWeights | None = None
    xielu: Tensor | None = None  # [4], the parameters of `kernels.reference.xielu`
    altup: AltUpWeights | None = None
    laurel: LaurelWeights | None = None
    scale: float = 1.0

    @property
    def matrices(self) -> list[Any]:
        """All matrices of the layer that a forward pass reads, those of experts included."""
        found: list[Any] = [self.qkv, self.out, self.up, self.down, self.output_gate]
        if self.latent is not None:
            a = self.latent
            found += [a.query_down, a.query_plain, a.query_rotary, a.down, a.key_up, a.value_up]
        if self.recurrent is not None:
            found += [self.recurrent.input, self.recurrent.out, self.recurrent.decay]
        if self.experts is not None:
            e = self.experts
            found += [e.router, e.up, e.down, e.shared_gate, e.latent_in, e.latent_out]
        if self.layer_input is not None:
            found += [self.layer_input.gate, self.layer_input.projection]
        if self.altup is not None:
            found += [self.altup.router, self.altup.predict, self.altup.correct]
        if self.laurel is not None:
            found += [self.laurel.left, self.laurel.right]
        return [matrix for matrix in found if matrix is not None]


@dataclass(slots=True)
class LayerInputs:
    """Weights that give the layers' own embeddings of a token (Gemma 4).

    Attributes:
        embed: maps token ids to rows [V, L * P].
        projection: [L * P, H], of the scaled embedding.
        norm: of each P values of its output.
    """

    embed: Any
    projection: LinearWeights
    norm: Norm


@dataclass(slots=True)
class StreamWeights:
    """Weights that open further residual streams behind the embedding, and join them before the
    last norm: for each of the further streams a matrix [H, H]."""

    opening: list[LinearWeights]
    joining: list[LinearWeights]


@dataclass(slots=True)
class Weights:
    """All tensors of a decoder.

    `embed` is anything that maps token ids to rows [V, H]; `positions` [context, H] exists only
    where position embeddings are learned."""

    embed: Any
    layers: list[LayerWeights]
    norm: Norm
    head: LinearWeights
    positions: Tensor | None = None
    layer_inputs: LayerInputs | None = None
    streams: StreamWeights | None = None
