"""Load checkpoint tensors into the decoder's weights and reject incomplete or foreign checkpoints.

`tensor_names.NAMES` maps each tensor of the decoder to the checkpoint tensors it is made of. Query,
key and value become one matrix, gate and up another. Files are memory-mapped and converted one
tensor at a time, so the peak is one tensor above the model itself. Linear layers are read on
demand, since a packed copy may be cached."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.errors import LoadError
from forerun.models.config import ModelConfig
from forerun.models.gguf.blocks import unpermuted
from forerun.models.parameters import (
    AltUpWeights,
    ExpertWeights,
    LatentWeights,
    LaurelWeights,
    LayerInputs,
    LayerInputWeights,
    LayerWeights,
    LinearWeights,
    Matrix,
    Norm,
    RecurrentWeights,
    Source,
    StreamWeights,
    Weights,
)
from forerun.models.quantized import select_rows, stack
from forerun.models.tensor_names import Names

# of the norms of latent vectors and of lightning attention, whatever the model's other norms have
FIXED_EPS = 1e-6
# (part, weight, bias [out] or None) -> a linear layer
MakeLinear = Callable[[str, Source, Tensor | None], Any]
MakeEmbedding = Callable[[Source], Any]


class WeightLoader(ABC):
    """Takes the decoder's tensors out of files, whose kind is that of the subclass.

    Attributes:
        names: of the tensors of each part of the decoder.
        prefix: of all names but the head's.
        rotates_pairs: the rotary embedding of the files turns neighbouring channels.
    """

    names: Names
    prefix: str
    rotates_pairs: bool

    def __init__(
        self,
        config: ModelConfig,
        path: Path,
        dtype: torch.dtype,
        device: torch.device,
        make_linear: MakeLinear,
        make_embedding: MakeEmbedding,
        shortlist: Tensor | None = None,
    ) -> None:
        """Prepare to load; see `load_weights` for the arguments."""
        self.config = config
        self.dtype = dtype
        self.device = device
        self.make_linear = make_linear
        self.make_embedding = make_embedding
        self.shortlist = shortlist
        self.open(path)

    def load(self) -> Weights:
        """Load the model. Raises LoadError for missing, misshapen or unused tensors."""
        c = self.config
        shape = (c.vocab, c.hidden)
        read = self.embedding()
        embed = self.make_embedding(self.source("embed", shape, read))
        positions = None
        if c.learned_positions:
            positions = self.to(self.tensor("positions", None, "weight", (c.context, c.hidden)))
        layers = [self.layer(i) for i in range(c.layers)]
        norm = self.norm("norm")
        layer_inputs = self.layer_inputs() if c.layer_input else None
        streams = self.streams() if c.altup is not None else None
        head_stem = self.head_stem()
        if not c.tied:
            read = self.matrix(head_stem, shape, c.head_bias, transposed=False)
        elif isinstance(embed, Tensor):
            read = lambda: embed  # noqa: E731
        bias = self.to(self.floats(f"{head_stem}.bias", (c.vocab,))) if c.head_bias else None
        self.finish()
        read_all, shortlist = read, self.shortlist
        if shortlist is not None:
            shape = (len(shortlist), c.hidden)
            read = lambda: select_rows(read_all(), shortlist)  # noqa: E731
            bias = None if bias is None else bias[shortlist.to(bias.device)]
        head = self.make_linear("head", self.source("head", shape, read), bias)
        return Weights(embed, layers, norm, head, positions, layer_inputs, streams)

    def layer(self, i: int) -> LayerWeights:
        c = self.config
        kv_heads, head_dim = c.head_shape(i)
        queries, keys = c.heads * head_dim, kv_heads * head_dim
        is_own = c.kv_layer(i) == i  # it has keys and values of its own
        inner, halves = c.mlp_size(i), 2 if c.gated else 1
        up, down = ("shared_up", "shared_down") if c.has_experts(i) else ("up", "down")
        up = "sparse_up" if c.gate_cutoff(i) is not None else up
        attends, mixes = c.has_attention(i), c.mixes_tokens(i)
        has_mlp_norm = c.has_mlp(i) and c.pre_norm and not c.parallel
        qkv, output_gate = None, None
        if c.latent is not None:
            queries = c.heads * c.latent.value
        elif attends and c.output_gate:
            # gates stand behind each head's queries
            own, gates = torch.arange(2 * queries).view(c.heads, 2, -1).transpose(0, 1).flatten(1)
            rows = [2 * queries, keys, keys]
            qkv = self.selected("qkv", i, rows, c.hidden, [own, None, None])
            output_gate = self.selected("qkv", i, rows[:1], c.hidden, [gates], "output_gate")
        elif attends:
            rows = [queries, keys, keys] if is_own else [queries]
            qkv = self.linear("qkv", i, rows, c.hidden, c.qkv_bias, (c.heads, kv_heads))
        q_size, k_size = (queries, keys) if c.qk_norm == "row" else (head_dim, head_dim)
        return LayerWeights(
            attention_norm=self.norm("attention_norm", i) if mixes and c.pre_norm else None,
            qkv=qkv,
            out=self.linear("out", i, [c.hidden], queries, c.out_bias) if attends else None,
            mlp_norm=self.norm("mlp_norm", i) if has_mlp_norm else None,
            up=self.linear(up, i, [inner] * halves, c.hidden, c.mlp_bias) if inner else None,
            down=self.linear(down, i, [c.hidden], inner, c.mlp_bias) if inner else None,
            q_norm=self.qk_norm("q_norm", i, q_size) if attends else None,
            k_norm=self.qk_norm("k_norm", i, k_size) if attends and is_own else None,
            attention_out_norm=self.norm("attention_out_norm", i) if c.sandwich else None,
            mlp_out_norm=self.norm("mlp_out_norm", i) if c.sandwich else None,
            sink_logits=self.vector("sink_logits", i, c.heads) if c.attention_sinks else None,
            experts=self.experts(i) if c.has_experts(i) else None,
            latent=self.latent(i) if c.latent is not None else None,
            recurrent=self.recurrent(i) if c.is_recurrent(i) else None,
            output_gate=output_gate,
            layer_input=self.layer_input(i) if c.layer_input else None,
            xielu=self.xielu(i) if c.activation == "xielu" else None,
            altup=self.altup(i) if c.altup is not None else None,
            laurel=self.laurel(i) if c.laurel_rank else None,
            scale=float(self.tensor("layer_scale", i, "", (1,))[0]) if c.layer_scale else 1.0,
        )

    def selected(
        self,
        part: str,
        layer: int,
        rows: list[int],
        inner: int,
        orders: list[Tensor | None],
        name: str = "",
    ) -> Any:
        """Load a linear layer called `name` from some rows of the tensors of `part`.

        rows: of each tensor. orders: the rows to take of each; None for all."""
        stems = self.stems(part, layer, rows)
        if len(stems) < len(rows):
            raise LoadError(f"{stems[0][0]} is fused, which is not supported for this family")
        readers = [self.matrix(stem, (count, inner), False, False) for stem, count in stems]
        counts = [n if order is None else len(order) for n, order in zip(rows, orders, strict=True)]
        name = name or part
        source = self.source(f"{layer}.{name}", (sum(counts), inner), stacked(readers, orders))
        return self.make_linear(name, source, None)

    def latent(self, i: int) -> LatentWeights:
        """Load the latent attention of layer `i`."""
        c, a = self.config, self.config.latent
        assert a is not None
        pairs = torch.arange(a.rotary)
        if self.rotates_pairs:
            pairs = torch.cat((pairs[0::2], pairs[1::2]))
        per_head = torch.arange(c.heads * (a.plain + a.rotary)).view(c.heads, -1)
        plain = per_head[:, : a.plain].flatten()
        rotary = per_head[:, a.plain :][:, pairs].flatten()
        inner, part = (a.query_rank, "query_up") if a.query_rank else (c.hidden, "query")
        rows = [per_head.numel()]
        down_order = torch.cat((a.rank + pairs, torch.arange(a.rank)))
        found = LatentWeights(
            query_plain=self.selected(part, i, rows, inner, [plain], "query_plain"),
            query_rotary=self.selected(part, i, rows, inner, [rotary], "query_rotary"),
            down=self.selected("latent_down", i, [a.rank + a.rotary], c.hidden, [down_order]),
            norm=replace(self.norm("latent_norm", i, a.rank), eps=FIXED_EPS),
            key_up=self.heads_of_latent(i, keys=True),
            value_up=self.heads_of_latent(i, keys=False),
        )
        if a.query_rank:
            found.query_down = self.linear("query_down", i, [a.query_rank], c.hidden, False)
            found.query_norm = replace(self.norm("query_norm", i, a.query_rank), eps=FIXED_EPS)
        return found

    def heads_of_latent(self, i: int, keys: bool) -> Any:
        """Load the heads' matrices between latent vectors and keys or values."""
        c, a = self.config, self.config.latent
        assert a is not None
        rows = torch.arange(c.heads * (a.plain + a.value)).view(c.heads, -1)
        if not keys:
            order = rows[:, a.plain :].flatten()
            return self.selected("latent_up", i, [rows.numel()], a.rank, [order], "value_up")
        ((stem, _),) = self.stems("latent_up", i, [rows.numel()])
        read = self.matrix(stem, (rows.numel(), a.rank), False, False)

        def transposed() -> Matrix:
            held = read()
            floats = held if isinstance(held, Tensor) else held.dequantize()
            own = floats[rows[:, : a.plain].flatten()].view(c.heads, a.plain, a.rank)
            return own.transpose(1, 2).reshape(c.heads * a.rank, a.plain).contiguous()

        shape = (c.heads * a.rank, a.plain)
        return self.make_linear("key_up", self.source(f"{i}.key_up", shape, transposed), None)

    def recurrent(self, i: int) -> RecurrentWeights:
        """Load the recurrent part of layer `i`."""
        c, r = self.config, self.config.recurrent
        assert r is not None
        heads, inner, hidden = r.value_heads, r.inner, c.hidden
        out = self.linear("recurrent_out", i, [hidden], inner, False)
        norm = None
        if r.norm:
            size = inner if r.norm_groups else r.value_size
            norm = Norm(self.vector("recurrent_norm", i, size, "weight"))
        if r.kind == "lightning":
            return self.lightning(i, out, norm)
        taps = self.tensor("convolution", i, "weight", (r.channels, 1, r.taps))[:, 0]
        convolution = self.to(taps, torch.float32) * self.channel_scales()
        bias = self.vector("convolution", i, r.channels, "bias") if r.conv_bias else None
        if r.kind == "conv":
            source = self.linear("recurrent_input", i, [3 * inner], hidden, r.conv_bias)
            return RecurrentWeights(source, out, convolution, bias)
        if r.kind == "mamba":  # gates, channels and decays are one matrix
            part, rows = "recurrent_input", [inner + r.channels + heads]
            gates, channels, decays = torch.split(torch.arange(rows[0]), [inner, r.channels, heads])
            source = self.selected(part, i, rows, hidden, [torch.cat((channels, gates))])
            decay = self.selected(part, i, rows, hidden, [decays], "recurrent_decay")
        else:
            source = self.delta_part("recurrent_input", i, [r.channels, inner])
            decay = self.delta_part("recurrent_decay", i, [heads, heads])
        return RecurrentWeights(
            input=source,
            out=out,
            conv_weight=convolution,
            conv_bias=bias,
            decay=decay,
            decay_bias=self.vector("decay_bias", i, heads),
            decay_rate=self.decay_rate(self.vector("decay_rate", i, heads)),
            skip=self.vector("skip", i, heads) if r.kind == "mamba" else None,
            norm=norm,
        )

    def lightning(self, i: int, out: Any, norm: Norm | None) -> RecurrentWeights:
        """Load the lightning attention of layer `i`, whose decays depend on head and layer only.

        Queries, keys and values, which are stored head by head, are put one after the other."""
        c, r = self.config, self.config.recurrent
        assert r is not None and norm is not None
        order = torch.arange(r.channels).view(r.value_heads, 3, -1).transpose(0, 1).flatten()
        sizes = [r.channels, r.inner]
        heads = torch.arange(1, r.value_heads + 1, dtype=torch.float64)
        slopes = 2.0 ** (-8 * heads / r.value_heads) * (1 - i / (c.layers - 1 + 1e-5) + 1e-5)
        return RecurrentWeights(
            input=self.selected("recurrent_input", i, sizes, c.hidden, [order, None]),
            out=out,
            decay_rate=self.to(-slopes, torch.float32),
            norm=replace(norm, eps=FIXED_EPS),
        )

    def channel_scales(self) -> Tensor:
        """Return factors on the inputs of a convolution, [C, 1], which its weights take over."""
        r = self.config.recurrent
        assert r is not None
        scales, keys = torch.ones(r.channels, 1, device=self.device), r.key_heads * r.key_size
        if r.kind == "mamba":
            parts = torch.split(scales, [r.inner, keys, keys])
            for part, scale in zip(parts, r.channel_scales, strict=True):
                part.fill_(scale)
        return scales

    def delta_part(self, part: str, i: int, sizes: list[int]) -> Any:
        """Load the inputs of a layer with the delta rule, or of its decays, as one linear layer.

        Qwen3-Next stores them in one tensor: for each key head its query, key, values and gates, or
        its betas and decays."""
        c, r = self.config, self.config.recurrent
        assert r is not None
        if isinstance(self.names[part], list):
            return self.linear(part, i, sizes, c.hidden, False)
        share = r.value_heads // r.key_heads
        values = share * r.value_size
        is_input = part == "recurrent_input"
        split_sizes = [r.key_size, r.key_size, values, values] if is_input else [share, share]
        rows = torch.arange(sum(sizes)).view(r.key_heads, -1)
        parts = [own.flatten() for own in torch.split(rows, split_sizes, dim=1)]
        order = torch.cat(parts if is_input else parts[::-1])
        return self.selected(part, i, [sum(sizes)], c.hidden, [order])

    def experts(self, i: int) -> ExpertWeights:
        """Load the mixture of experts of layer `i`."""
        c, e = self.config, self.config.experts
        assert e is not None
        halves = 2 if c.gated else 1

        def of_experts(part: str, halves: int, rows: int, inputs: int) -> Any:
            read = self.expert_matrix(part, i, halves, rows, inputs)
            shape = (halves * e.count * rows, inputs)
            bias = self.expert_bias(part, i, halves, rows) if e.bias else None
            bias = None if bias is None else self.to(bias)
            return self.make_linear(part, self.source(f"{i}.{part}", shape, read), bias)

        width = e.latent or c.hidden
        found = ExpertWeights(
            router=self.linear("router", i, [e.count], c.hidden, e.router_bias),
            up=of_experts("expert_up", halves, e.intermediate, width),
            down=of_experts("expert_down", 1, width, e.intermediate),
            choice_bias=self.choice_bias(i, e.count) if e.choice_bias else None,
            shared_gate=self.linear("shared_gate", i, [1], c.hidden, False)
            if e.shared_gate
            else None,
        )
        if e.latent:
            found.latent_in = self.linear("latent_in", i, [e.latent], c.hidden, c.mlp_bias)
            found.latent_out = self.linear("latent_out", i, [c.hidden], e.latent, c.mlp_bias)
        if e.separate_norms:
            scale = self.vector("router_scale", i, c.hidden)
            found.router_norm = Norm(scale * c.hidden**-0.5)
            found.expert_scale = self.vector("expert_scale", i, e.count)
            found.norm = self.norm("expert_norm", i)
            found.out_norm = self.norm("expert_out_norm", i)
            found.shared_out_norm = self.norm("shared_out_norm", i)
        return found

    def choice_bias(self, i: int, count: int) -> Tensor:
        """Read the bias of a router's choice, [E]; ERNIE stores [1, E]."""
        shape = (1, count) if self.config.layout == "ernie_moe" else (count,)
        return self.to(self.tensor("choice_bias", i, "", shape), torch.float32).flatten()

    def layer_input(self, i: int) -> LayerInputWeights:
        """Load what adds a layer's own embedding of a token."""
        c = self.config
        return LayerInputWeights(
            gate=self.linear("layer_gate", i, [c.layer_input], c.hidden, False),
            projection=self.linear("layer_projection", i, [c.hidden], c.layer_input, False),
            norm=self.norm("layer_input_norm", i),
        )

    def xielu(self, i: int) -> Tensor:
        """Load the parameters of layer `i`'s activation, [4]; see `kernels.reference.xielu`."""
        alpha_p, alpha_n, beta, eps = self.xielu_parameters(i).double()
        above, below = F.softplus(alpha_p), beta + F.softplus(alpha_n)
        wide = torch.promote_types(self.dtype, torch.float32)
        return self.to(torch.stack((above, below, beta, eps)), wide)

    def altup(self, i: int) -> AltUpWeights:
        """Load what mixes the residual streams before and behind a layer."""
        c, altup = self.config, self.config.altup
        assert altup is not None
        count, norm = altup.streams, self.norm("altup_norm", i)
        norm.weight = norm.weight / c.hidden
        correct = self.source(
            f"{i}.altup_correct",
            (count, count),
            self.matrix(self.stem("altup_correct", i), (count, count), False, False),
        )
        ones = torch.ones(count, dtype=self.dtype, device=self.device)
        scale = self.to(self.tensor("altup_scale", i, "", (c.hidden,)), norm.weight.dtype)
        return AltUpWeights(
            norm=norm,
            router=self.linear("altup_router", i, [count], c.hidden, False),
            predict=self.linear("altup_predict", i, [count * count], count, False),
            correct=self.make_linear("altup_correct", correct, ones),
            scale=scale if altup.scaled else None,
        )

    def laurel(self, i: int) -> LaurelWeights:
        """Load the low-rank branch beside attention."""
        c = self.config
        return LaurelWeights(
            left=self.linear("laurel_left", i, [c.laurel_rank], c.hidden, False),
            right=self.linear("laurel_right", i, [c.hidden], c.laurel_rank, False),
            norm=self.norm("laurel_norm", i),
        )

    def streams(self) -> StreamWeights:
        """Load what opens and joins residual streams."""
        c, altup = self.config, self.config.altup
        assert altup is not None

        def projections(part: str) -> list[Any]:
            shape, found = (c.hidden, c.hidden), []
            for n in range(altup.streams - 1):
                read = self.stream_matrix(part, n)
                found.append(self.make_linear(part, self.source(f"{part}.{n}", shape, read), None))
            return found

        return StreamWeights(projections("stream_opening"), projections("stream_joining"))

    def layer_inputs(self) -> LayerInputs:
        """Load the layers' own embeddings of tokens."""
        c = self.config
        width, vocab = c.layers * c.layer_input, c.layer_input_vocab or c.vocab
        read = self.matrix(self.stem("layer_embed"), (vocab, width), False, False)
        return LayerInputs(
            embed=self.make_embedding(self.source("layer_embed", (vocab, width), read)),
            projection=self.linear("layer_projections", None, [width], c.hidden, False),
            norm=self.norm("layer_inputs_norm", None, c.layer_input),
        )

    def norm(self, part: str, layer: int | None = None, size: int | None = None) -> Norm:
        """Load a norm. Its weights stay in float32 or wider: half precision would round 1 + w."""
        shape, kind = (size or self.config.hidden,), self.config.norm
        wide = torch.promote_types(self.dtype, torch.float32)
        weight = self.to(self.tensor(part, layer, "weight", shape), wide)
        if kind.endswith("_plus_one"):
            weight = weight + 1
        if not kind.startswith("layer"):
            return Norm(weight)
        if not self.config.norm_bias:
            return Norm(weight, torch.zeros_like(weight))
        return Norm(weight, self.to(self.tensor(part, layer, "bias", shape), wide))

    def qk_norm(self, part: str, i: int, size: int) -> Norm | None:
        """Load the norm of the queries or keys of layer `i`, if they are normalised."""
        kind = self.config.qk_norm
        if not kind:
            return None
        if kind != "plain_after_rope":
            return self.norm(part, i, size)
        if self.config.rope_of[i] is None:
            return None
        return Norm(self.to(torch.ones(size), torch.promote_types(self.dtype, torch.float32)))

    def linear(
        self,
        part: str,
        layer: int | None,
        rows: list[int],
        inner: int,
        bias: bool,
        heads: tuple[int, ...] = (),
    ) -> Any:
        """Load a linear layer whose outputs are stacked from parts of `rows` each.

        heads: the number of heads of the first parts; their channels are reordered if the
            checkpoint's rotary embedding turns neighbours."""
        transposed = self.config.layout == "gpt2"  # it stores matrices as [in, out]
        stems = self.stems(part, layer, rows)
        values_from_keys = self.config.values_from_keys
        if part == "qkv" and len(rows) > 2 and values_from_keys and values_from_keys[layer or 0]:
            stems[2] = stems[1]
        readers = [self.matrix(stem, (count, inner), bias, transposed) for stem, count in stems]
        orders: list[Tensor | None] = [None] * len(stems)
        if heads and self.rotates_pairs and self.config.ropes:
            if len(stems) != len(rows):
                raise LoadError(f"{stems[0][0]} is fused, which is not supported for this family")
            for at, (count, n) in enumerate(zip(rows, heads, strict=False)):
                orders[at] = unpermuted(count, n, self.config.ropes[0].dim)
        out = sum(rows)
        offsets = None
        if bias:
            held = self.tensor(part, layer, "bias", (out,), rows)
            pieces = torch.split(held, [count for _, count in stems])
            ordered = zip(pieces, orders, strict=True)
            offsets = self.to(torch.cat([p if o is None else p[o] for p, o in ordered]))
        name = part if layer is None else f"{layer}.{part}"
        source = self.source(name, (out, inner), stacked(readers, orders))
        return self.make_linear(part, source, offsets)

    def source(self, name: str, shape: tuple[int, int], read: Callable[[], Matrix]) -> Source:
        return Source(name, shape, read, self.dtype, self.device)

    def to(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return tensor.to(device=self.device, dtype=dtype or self.dtype).contiguous()

    def stem(self, name: str, layer: int | None = None) -> str:
        """Return the name of a tensor of the model or of a layer, without its suffix."""
        return f"{self.prefix_of(layer)}{self.names.get(name, name)}"

    def prefix_of(self, layer: int | None) -> str:
        """Return how the names of the tensors of a layer begin, or of those of no layer."""
        return self.prefix + ("" if layer is None else str(self.names["layer"]).format(i=layer))

    def stems(self, part: str, layer: int | None, rows: list[int]) -> list[tuple[str, int]]:
        """Return (name without suffix, rows) of the checkpoint tensors that make up a part."""
        stems, prefix = self.names[part], self.prefix_of(layer)
        names = [f"{prefix}{stem}" for stem in ([stems] if isinstance(stems, str) else stems)]
        if len(names) == 1:
            return [(names[0], sum(rows))]
        return list(zip(names[: len(rows)], rows, strict=True))

    def head_stem(self) -> str:
        """Return the name of the output head, without its suffix."""
        return str(self.names["head"])

    def tensor(
        self,
        part: str,
        layer: int | None,
        suffix: str,
        shape: tuple[int, ...],
        rows: list[int] | None = None,
    ) -> Tensor:
        """Read a norm, a bias, an embedding or position embeddings as floats.

        suffix: behind the name; "" if the name is whole. rows: of the parts it is stacked from."""
        stems = self.stems(part, layer, rows or [shape[0]])
        dot = f".{suffix}" if suffix else ""
        found = [self.floats(f"{stem}{dot}", (size, *shape[1:])) for stem, size in stems]
        return torch.cat(found) if len(found) > 1 else found[0]

    def vector(self, part: str, i: int, size: int, suffix: str = "") -> Tensor:
        """Read a tensor of layer `i` as float32 [size]."""
        return self.to(self.tensor(part, i, suffix, (size,)), torch.float32)

    # The methods below read the container.

    @abstractmethod
    def open(self, path: Path) -> None:
        """Open the files at `path` and choose the names of their tensors."""

    @abstractmethod
    def floats(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Read a tensor of this shape and mark it as used."""

    @abstractmethod
    def matrix(
        self, stem: str, shape: tuple[int, int], bias: bool, transposed: bool
    ) -> Callable[[], Matrix]:
        """Mark the tensors of a linear layer's weight as used; return a function that reads it."""

    @abstractmethod
    def expert_matrix(
        self, part: str, layer: int, halves: int, rows: int, inputs: int
    ) -> Callable[[], Matrix]:
        """Mark the tensors of a layer's experts as used; return a function that reads them.

        The matrix has the rows of the first half of all experts, then those of the second."""

    @abstractmethod
    def expert_bias(self, part: str, layer: int, halves: int, rows: int) -> Tensor:
        """Read the biases of a layer's experts, in the order of `expert_matrix`."""

    @abstractmethod
    def stream_matrix(self, part: str, n: int) -> Callable[[], Matrix]:
        """Mark the matrix of a further residual stream as used; return a function that reads it."""

    @abstractmethod
    def decay_rate(self, stored: Tensor) -> Tensor:
        """Return the rates of decay, which are negative, from what is stored."""

    @abstractmethod
    def xielu_parameters(self, i: int) -> Tensor:
        """Read alpha_p, alpha_n, beta and eps of an activation as they are stored, [4]."""

    @abstractmethod
    def embedding(self) -> Callable[[], Matrix]:
        """Return a function that reads the embedding [V, H]."""

    @abstractmethod
    def finish(self) -> None:
        """Raise LoadError if the checkpoint has tensors that were not used."""


def stacked(
    readers: Sequence[Callable[[], Matrix]], orders: Sequence[Tensor | None]
) -> Callable[[], Matrix]:
    """Return a function that reads matrices, takes these rows of each (None: all), and stacks
    them along the outputs."""

    def read() -> Matrix:
        matrices = zip([reader() for reader in readers], orders, strict=True)
        found: Matrix = stack([m if rows is None else select_rows(m, rows) for m, rows in matrices])
        return found

    return read


def load_weights(
    config: ModelConfig,
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    make_linear: MakeLinear = lambda _, source, bias: LinearWeights(source.weight(), bias),
    make_embedding: MakeEmbedding = lambda source: source.weight(),
    shortlist: Tensor | None = None,
) -> Weights:
    """Load every tensor of the model in a directory or a GGUF file.

    Args:
        make_linear: turns each linear layer, named as in `LayerWeights` or "head", into what
            the decoder multiplies with.
        make_embedding: turns the embedding into what the decoder reads rows of.
        shortlist: token ids [Vd] int64 that the head has rows for; None for all.

    Raises:
        LoadError: a tensor is missing, misshapen, unused, or quantized in an unsupported way.
    """
    from forerun.models.directory_weights import DirectoryLoader
    from forerun.models.gguf.weights import GgufLoader

    loader = GgufLoader if path.is_file() else DirectoryLoader
    return loader(config, path, dtype, device, make_linear, make_embedding, shortlist).load()
