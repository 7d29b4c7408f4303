"""Checkpoint tensors to the decoder's weights: nothing missing, nothing misshapen, nothing left
over.

A table names, for each of the decoder's tensors, the checkpoint tensors it is made of (query, key
and value become one matrix, gate and up another). Files are mapped, one tensor at a time is
converted, so the peak is one tensor over the model itself. Linear layers are read when they are
asked for, since a packed copy may be at hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from forerun.errors import LoadError, one_line
from forerun.models.config import OWN_DRAFTER, ModelConfig
from forerun.models.files import check_pointer, indexed, weight_files
from forerun.models.gguf.blocks import Blocks
from forerun.models.names import listed
from forerun.models.quantized import PARTS, Scheme, Stored, read_stored, scheme_of, stack


class Checkpoint:
    """The safetensors files of a directory, read tensor by tensor; remembers what has been
    taken."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.taken: set[str] = set()
        try:
            paths = self._paths()
            for path in paths:
                check_pointer(path)
            files = [(path, safe_open(path, framework="pt")) for path in paths]
            self.where = {name: (path, file) for path, file in files for name in file.keys()}  # type: ignore[no-untyped-call]  # noqa: SIM118
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            raise LoadError(
                f"the weights in {directory} cannot be read: {one_line(str(error))}"
            ) from None

    def _paths(self) -> list[Path]:
        index = self.directory / "model.safetensors.index.json"
        if index.exists():
            paths = indexed(index)
            missing = one_line(", ".join(path.name for path in paths if not path.is_file()))
            if missing:
                raise LoadError(
                    f"{index} names files that are not there: {missing}; download them again"
                )
            return paths
        paths = [path for path in weight_files(self.directory) if path.is_file()]
        if not paths:
            pickled = any(self.directory.glob("*.bin"))
            hint = (
                "convert its .bin files to safetensors"
                if pickled
                else "give a Hugging Face model directory"
            )
            raise LoadError(f"{self.directory} has no *.safetensors weights; {hint}")
        return paths

    def claim(self, name: str, shape: tuple[int, ...] | None = None) -> None:
        """Count a tensor as used, without reading it. Raises LoadError if it is absent or of
        another shape."""
        if name not in self.where:
            raise LoadError(
                f"{self.directory}: the checkpoint lacks the tensor {name}; it is incomplete"
            )
        held = self.where[name][1].get_slice(name).get_shape()  # type: ignore[no-untyped-call]
        if shape is not None and tuple(held) != shape:
            raise LoadError(
                f"{self.directory}: tensor {name} is {held}, but config.json asks for {list(shape)}"
            )
        self.taken.add(name)

    def read(self, name: str) -> Tensor:
        """A tensor as it is stored."""
        # a mapping of its own, which goes with the tensor: what was read does not stay in memory
        try:
            with safe_open(self.where[name][0], framework="pt") as file:
                tensor: Tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise LoadError(
                f"{self.directory}: tensor {name} cannot be read: {one_line(str(error))}"
            ) from None
        return tensor

    def floats(self, name: str) -> Tensor:
        """A tensor that is not quantised."""
        tensor = self.read(name)
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            raise LoadError(
                f"{self.directory}: tensor {name} is {tensor.dtype}, as in a quantised checkpoint, but nothing in"
                " config.json or beside it says how to read it"
            )
        return tensor

    def has(self, name: str) -> bool:
        return name in self.where

    def parts(self, layout: str, stem: str) -> list[str]:
        """What there is of a quantised linear layer, without `stem`."""
        return [part for part in sum(PARTS[layout], ()) if self.has(f"{stem}.{part}")]

    def stored(self, scheme: Scheme, layout: str, stem: str, shape: tuple[int, int]) -> Stored:
        """A quantised linear layer of `shape` (out, in). Raises LoadError."""
        held = {part: self.read(f"{stem}.{part}") for part in self.parts(layout, stem)}
        return read_stored(scheme, layout, held, shape, f"{self.directory}: {stem}")

    def finish(self, ignored: tuple[str, ...], others: str | None = None) -> None:
        """Raise LoadError for tensors nobody took, but for those whose names end in one of
        `ignored`, or begin with `others`."""
        left = sorted(n for n in self.where if n not in self.taken and not n.endswith(ignored))
        left = [name for name in left if others is None or not name.startswith(others)]
        if left:
            names = listed(map(one_line, left), 4)
            raise LoadError(
                f"{self.directory}: {len(left)} tensors fit no part of this model: {names}"
            )


@dataclass(slots=True)
class Norm:
    """A norm's weight [H] and, for layer norms, bias [H]; kept in float32 at least."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(slots=True)
class Linear:
    """A linear layer: weight [out, in], bias [out]."""

    weight: Tensor
    bias: Tensor | None = None


Matrix = Tensor | Stored | Blocks  # a linear layer's weight, or an embedding


def chosen_rows(held: Matrix, rows: Tensor) -> Matrix:
    """Some rows of a matrix, as they are stored. rows [n] int64"""
    if isinstance(held, Tensor):
        return held[rows.to(held.device)]
    if isinstance(held, Blocks):
        return held.chosen(rows)
    return Stored(held.values[rows], held.scale[rows], held.group)


@dataclass(slots=True)
class Source:
    """The weight of a linear layer as the checkpoint holds it.

    `name` is its place in the model ("3.qkv", "head", "embed"), `shape` (out, in); `read` gives
    [out, in] floats of any precision, or numbers with scales where it is stored quantised.
    """

    name: str
    shape: tuple[int, int]
    read: Callable[[], Matrix]
    dtype: torch.dtype
    device: torch.device

    def weight(self) -> Tensor:
        """[out, in] in the decoder's dtype, on its device."""
        held = self.read()
        floats = held if isinstance(held, Tensor) else held.dequantise()
        return floats.to(device=self.device, dtype=self.dtype).contiguous()


# (part, weight, bias [out] or None) -> a linear layer
MakeLinear = Callable[[str, Source, Tensor | None], Any]
MakeTable = Callable[[Source], Any]  # an embedding


@dataclass(slots=True)
class Layer:
    """One decoder layer. qkv stacks query, key and value; up stacks gate and up where the MLP is
    gated."""

    attention_norm: Norm
    qkv: Linear
    out: Linear
    mlp_norm: Norm
    up: Linear
    down: Linear
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    attention_out_norm: Norm | None = None
    mlp_out_norm: Norm | None = None


@dataclass(slots=True)
class Weights:
    """All tensors of a decoder. `positions` [context, H] only where positions are learned; `embed`
    [V, H] is whatever the decoder reads rows of."""

    embed: Any
    layers: list[Layer]
    norm: Norm
    head: Linear
    positions: Tensor | None = None


Names = dict[str, str | list[str]]

LLAMA_NAMES: Names = {
    "embed": "embed_tokens",
    "norm": "norm",
    "layer": "layers.{i}.",
    "attention_norm": "input_layernorm",
    "qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "up": ["mlp.gate_proj", "mlp.up_proj"],
    "down": "mlp.down_proj",
    "head": "lm_head",
}
NAMES: dict[str, Names] = {
    "llama": LLAMA_NAMES,
    "phi3": LLAMA_NAMES | {"qkv": "self_attn.qkv_proj", "up": "mlp.gate_up_proj"},
    "gpt2": {
        "embed": "wte",
        "positions": "wpe",
        "norm": "ln_f",
        "layer": "h.{i}.",
        "attention_norm": "ln_1",
        "qkv": "attn.c_attn",
        "out": "attn.c_proj",
        "mlp_norm": "ln_2",
        "up": "mlp.c_fc",
        "down": "mlp.c_proj",
        "head": "lm_head",
    },
}
SANDWICH: Names = {
    "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}
IGNORED = (
    "rotary_emb.inv_freq",
    ".attn.bias",
    ".attn.masked_bias",
)  # buffers that older versions saved


class Builder:
    """Takes the decoder's tensors out of a checkpoint, in the engine's dtype and on its device."""

    def __init__(
        self, config: ModelConfig, path: Path, dtype: torch.dtype, device: torch.device, make: MakeLinear,
        table: MakeTable, said: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.config, self.dtype, self.device, self.make, self.table = (
            config,
            dtype,
            device,
            make,
            table,
        )
        self.said = said
        keys = config.kv_heads * config.head_dim
        self.sizes = {
            "qkv": [config.heads * config.head_dim, keys, keys],
            "up": [config.intermediate] * 2,
        }
        self.open(path)

    def open(self, path: Path) -> None:
        """Find the files and the names of their tensors: here those of a Hugging Face directory."""
        config, self.checkpoint = self.config, Checkpoint(path)
        self.scheme = scheme_of(config.raw, str(path / "config.json"))
        self.names = NAMES[config.layout] | (SANDWICH if config.sandwich else {})
        prefixes = ("model.", "transformer.", "")
        self.prefix = next(
            (p for p in prefixes if self.checkpoint.has(f"{p}{self.names['embed']}.weight")),
            "model.",
        )

    def stems(self, part: str, layer: int | None, rows: int) -> list[tuple[str, int]]:
        """The checkpoint's names for a part, with their rows: one, or those that are stacked."""
        stems = self.names[part]
        at = self.prefix + ("" if layer is None else str(self.names["layer"]).format(i=layer))
        names = [f"{at}{stem}" for stem in ([stems] if isinstance(stems, str) else stems)]
        return list(zip(names, self.sizes[part] if len(names) > 1 else [rows], strict=True))

    def tensor(self, part: str, layer: int | None, suffix: str, shape: tuple[int, ...]) -> Tensor:
        """A norm, a bias, an embedding or learned positions, as floats."""
        stems = self.stems(part, layer, shape[0])
        found = [self.floats(f"{stem}.{suffix}", (size, *shape[1:])) for stem, size in stems]
        return torch.cat(found) if len(found) > 1 else found[0]

    def floats(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A tensor of this shape, counted as used."""
        self.checkpoint.claim(name, shape)
        return self.checkpoint.floats(name)

    def matrix(
        self, stem: str, shape: tuple[int, int], bias: bool, transposed: bool
    ) -> Callable[[], Matrix]:
        """A function that reads one linear layer's weight, whose tensors are claimed here."""
        checkpoint, scheme = self.checkpoint, self.scheme
        layout = scheme.layout(checkpoint.has, stem) if scheme else None
        if scheme is None or layout is None:
            checkpoint.claim(f"{stem}.weight", shape[::-1] if transposed else shape)
            return lambda: (
                checkpoint.floats(f"{stem}.weight").T
                if transposed
                else checkpoint.floats(f"{stem}.weight")
            )
        for part in checkpoint.parts(layout, stem):
            checkpoint.claim(f"{stem}.{part}")
        if (
            not bias
            and checkpoint.has(f"{stem}.bias")
            and not checkpoint.read(f"{stem}.bias").any()
        ):
            checkpoint.claim(f"{stem}.bias")  # older writers of GPTQ give each layer one
        return lambda: checkpoint.stored(scheme, layout, stem, shape)

    def to(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return tensor.to(device=self.device, dtype=dtype or self.dtype).contiguous()

    def norm(self, part: str, layer: int | None = None, size: int | None = None) -> Norm:
        """Norm weights stay in float32 at least: they are few and half precision would round 1 +
        w."""
        shape, kind = (size or self.config.hidden,), self.config.norm
        exact = torch.promote_types(self.dtype, torch.float32)
        weight = self.to(self.tensor(part, layer, "weight", shape), exact)
        if kind == "rms_plus_one":
            weight = weight + 1
        return Norm(
            weight,
            self.to(self.tensor(part, layer, "bias", shape), exact) if kind == "layer" else None,
        )

    def linear(self, part: str, layer: int, out: int, inner: int, bias: bool) -> Any:
        transposed = self.config.layout == "gpt2"  # it keeps its matrices as [in, out]
        readers = [
            self.matrix(stem, (n, inner), bias, transposed)
            for stem, n in self.stems(part, layer, out)
        ]
        source = self.source(
            f"{layer}.{part}", (out, inner), lambda: stack([read() for read in readers])
        )
        return self.make(
            part, source, self.to(self.tensor(part, layer, "bias", (out,))) if bias else None
        )

    def source(self, name: str, shape: tuple[int, int], read: Callable[[], Matrix]) -> Source:
        return Source(name, shape, read, self.dtype, self.device)

    def layer(self, i: int) -> Layer:
        c = self.config
        queries, both = c.heads * c.head_dim, (c.heads + 2 * c.kv_heads) * c.head_dim
        return Layer(
            attention_norm=self.norm("attention_norm", i),
            qkv=self.linear("qkv", i, both, c.hidden, c.qkv_bias),
            out=self.linear("out", i, c.hidden, queries, c.out_bias),
            mlp_norm=self.norm("mlp_norm", i),
            up=self.linear("up", i, c.intermediate * (2 if c.gated else 1), c.hidden, c.mlp_bias),
            down=self.linear("down", i, c.hidden, c.intermediate, c.mlp_bias),
            q_norm=self.norm("q_norm", i, c.head_dim) if c.qk_norm else None,
            k_norm=self.norm("k_norm", i, c.head_dim) if c.qk_norm else None,
            attention_out_norm=self.norm("attention_out_norm", i) if c.sandwich else None,
            mlp_out_norm=self.norm("mlp_out_norm", i) if c.sandwich else None,
        )

    def embedding(self) -> Callable[[], Matrix]:
        """A function that reads the embedding [V, H]."""
        return lambda: self.tensor("embed", None, "weight", (self.config.vocab, self.config.hidden))

    def finish(self) -> None:
        """Raise LoadError if there is more in the checkpoint than was taken."""
        own = OWN_DRAFTER.get(self.config.family)
        self.checkpoint.finish((*IGNORED, "lm_head.weight") if self.config.tied else IGNORED, own)

    def build(self) -> Weights:
        """All of the model. Raises LoadError for what is missing, misshapen or left over."""
        c = self.config
        shape = (c.vocab, c.hidden)
        read = self.embedding()
        embed = self.table(self.source("embed", shape, read))
        positions = None
        if c.learned_positions:
            positions = self.to(self.tensor("positions", None, "weight", (c.context, c.hidden)))
        layers = [self.layer(i) for i in range(c.layers)]
        norm = self.norm("norm")
        if not c.tied:
            read = self.matrix(str(self.names["head"]), shape, bias=False, transposed=False)
        elif isinstance(embed, Tensor):
            read = lambda: embed  # noqa: E731
        self.finish()
        whole, said = read, self.said
        if said is not None:
            shape, read = (len(said), c.hidden), lambda: chosen_rows(whole(), said)
        head = self.make("head", self.source("head", shape, read), None)
        return Weights(embed, layers, norm, head, positions)


def load_weights(
    config: ModelConfig,
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    make: MakeLinear = lambda _, source, bias: Linear(source.weight(), bias),
    table: MakeTable = lambda source: source.weight(),
    said: Tensor | None = None,
) -> Weights:
    """Read every tensor of the model in a directory or a GGUF file. Raises LoadError for one
    missing, misshapen, left over or quantised in a way that is not supported.

    `make` turns each linear layer, named as in `Layer` or "head", into what the decoder multiplies
    with; `table` the embedding into what it reads rows of. `said` [Vd] int64 are the tokens that
    the head has rows for; None: all.
    """
    from forerun.models.gguf.weights import GgufBuilder

    builder = GgufBuilder if path.is_file() else Builder
    return builder(config, path, dtype, device, make, table, said).build()
