"""Load checkpoint tensors into the decoder's weights and reject incomplete or foreign checkpoints.

`NAMES` maps each tensor of the decoder to the checkpoint tensors it is made of: query, key and
value become one matrix, gate and up another. Files are memory-mapped and converted one tensor at a
time, so the peak is one tensor above the model itself. Linear layers are read on demand, since a
packed copy may be cached."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from forerun.errors import LoadError, one_line
from forerun.models.config import MTP_PREFIXES, ModelConfig
from forerun.models.files import check_pointer, indexed_files, joined, weight_files
from forerun.models.gguf.blocks import Blocks
from forerun.models.quantized import (
    TENSORS,
    QuantizedMatrix,
    Scheme,
    read_matrix,
    read_scheme,
    stack,
)

# ---------------------------------------------------------------- safetensors checkpoints


class Checkpoint:
    """The safetensors files of a directory. `taken` holds the names of tensors already used."""

    def __init__(self, directory: Path) -> None:
        """Open the files. Raises LoadError."""
        self.directory = directory
        self.taken: set[str] = set()
        try:
            paths = self._paths()
            for path in paths:
                check_pointer(path)
            files = [(path, safe_open(path, framework="pt")) for path in paths]
            self.where = {
                name: (path, file)
                for path, file in files
                for name in file.keys()  # type: ignore[no-untyped-call]  # noqa: SIM118
            }
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            why = one_line(str(error))
            raise LoadError(f"the weights in {directory} cannot be read: {why}") from None

    def _paths(self) -> list[Path]:
        index = self.directory / "model.safetensors.index.json"
        if index.exists():
            paths = indexed_files(index)
            missing = one_line(", ".join(path.name for path in paths if not path.is_file()))
            if missing:
                raise LoadError(f"{index} names missing files: {missing}; download them again")
            return paths
        paths = [path for path in weight_files(self.directory) if path.is_file()]
        if not paths:
            hint = "give a Hugging Face model directory"
            if any(self.directory.glob("*.bin")):
                hint = "convert its .bin files to safetensors"
            raise LoadError(f"{self.directory} has no *.safetensors weights; {hint}")
        return paths

    def claim(self, name: str, shape: tuple[int, ...] | None = None) -> None:
        """Mark a tensor as used without reading it.

        Raises LoadError if it is missing or has another shape."""
        if name not in self.where:
            raise LoadError(
                f"{self.directory}: the checkpoint lacks tensor {name}; it is incomplete"
            )
        held = self.where[name][1].get_slice(name).get_shape()  # type: ignore[no-untyped-call]
        if shape is not None and tuple(held) != shape:
            raise LoadError(
                f"{self.directory}: tensor {name} is {held}, but config.json asks for {list(shape)}"
            )
        self.taken.add(name)

    def read(self, name: str) -> Tensor:
        """Return a tensor as it is stored. Raises LoadError."""
        # a separate mapping is released with the tensor, so that read pages do not stay in memory
        try:
            with safe_open(self.where[name][0], framework="pt") as file:
                tensor: Tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            why = one_line(str(error))
            raise LoadError(f"{self.directory}: tensor {name} cannot be read: {why}") from None
        return tensor

    def floats(self, name: str) -> Tensor:
        """Return a tensor that is not quantized. Raises LoadError for integers and 8-bit floats."""
        tensor = self.read(name)
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            raise LoadError(
                f"{self.directory}: tensor {name} is {tensor.dtype}, as in a quantized checkpoint, "
                "but config.json has no quantization_config that says how to read it"
            )
        return tensor

    def has(self, name: str) -> bool:
        return name in self.where

    def suffixes(self, layout: str, stem: str) -> list[str]:
        """Return the suffixes of the tensors that make up the quantized linear layer `stem`."""
        return [suffix for suffix in sum(TENSORS[layout], ()) if self.has(f"{stem}.{suffix}")]

    def quantized(
        self, scheme: Scheme, layout: str, stem: str, shape: tuple[int, int]
    ) -> QuantizedMatrix:
        """Read a quantized linear layer of `shape` (out, in). Raises LoadError."""
        held = {suffix: self.read(f"{stem}.{suffix}") for suffix in self.suffixes(layout, stem)}
        return read_matrix(scheme, layout, held, shape, f"{self.directory}: {stem}")

    def finish(self, ignored: tuple[str, ...], prefix: str | None = None) -> None:
        """Raise LoadError for unused tensors, except those that end in `ignored` or start with
        `prefix`."""
        left = sorted(n for n in self.where if n not in self.taken and not n.endswith(ignored))
        left = [name for name in left if prefix is None or not name.startswith(prefix)]
        if left:
            names = joined(map(one_line, left), 4)
            raise LoadError(
                f"{self.directory}: {len(left)} tensors fit no part of this model: {names}"
            )


# ---------------------------------------------------------------- the decoder's weights


@dataclass(slots=True)
class Norm:
    """Weight [H] of a norm and, for layer norms, bias [H]; float32 or wider."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(slots=True)
class LinearWeights:
    """A linear layer: weight [out, in], bias [out]."""

    weight: Tensor
    bias: Tensor | None = None


Matrix = Tensor | QuantizedMatrix | Blocks  # weight of a linear layer or of an embedding


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
        held = self.read()
        floats = held if isinstance(held, Tensor) else held.dequantize()
        return floats.to(device=self.device, dtype=self.dtype).contiguous()


@dataclass(slots=True)
class LayerWeights:
    """One decoder layer. `qkv` stacks query, key and value; `up` stacks gate and up if gated."""

    attention_norm: Norm
    qkv: LinearWeights
    out: LinearWeights
    mlp_norm: Norm
    up: LinearWeights
    down: LinearWeights
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    attention_out_norm: Norm | None = None
    mlp_out_norm: Norm | None = None


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
SANDWICH_NAMES: Names = {
    "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}
# buffers that older versions of transformers saved
IGNORED = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")

# (part, weight, bias [out] or None) -> a linear layer
MakeLinear = Callable[[str, Source, Tensor | None], Any]
MakeEmbedding = Callable[[Source], Any]


class WeightLoader:
    """Takes the decoder's tensors out of a Hugging Face directory."""

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
        keys = config.kv_heads * config.head_dim
        # rows of the checkpoint tensors that are stacked into one matrix
        self.stacked_rows = {
            "qkv": [config.heads * config.head_dim, keys, keys],
            "up": [config.intermediate] * 2,
        }
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
        if not c.tied:
            read = self.matrix(str(self.names["head"]), shape, bias=False, transposed=False)
        elif isinstance(embed, Tensor):
            read = lambda: embed  # noqa: E731
        self.finish()
        read_all, shortlist = read, self.shortlist
        if shortlist is not None:
            shape = (len(shortlist), c.hidden)
            read = lambda: select_rows(read_all(), shortlist)  # noqa: E731
        head = self.make_linear("head", self.source("head", shape, read), None)
        return Weights(embed, layers, norm, head, positions)

    def layer(self, i: int) -> LayerWeights:
        c = self.config
        queries, all_heads = c.heads * c.head_dim, (c.heads + 2 * c.kv_heads) * c.head_dim
        return LayerWeights(
            attention_norm=self.norm("attention_norm", i),
            qkv=self.linear("qkv", i, all_heads, c.hidden, c.qkv_bias),
            out=self.linear("out", i, c.hidden, queries, c.out_bias),
            mlp_norm=self.norm("mlp_norm", i),
            up=self.linear("up", i, c.intermediate * (2 if c.gated else 1), c.hidden, c.mlp_bias),
            down=self.linear("down", i, c.hidden, c.intermediate, c.mlp_bias),
            q_norm=self.norm("q_norm", i, c.head_dim) if c.qk_norm else None,
            k_norm=self.norm("k_norm", i, c.head_dim) if c.qk_norm else None,
            attention_out_norm=self.norm("attention_out_norm", i) if c.sandwich else None,
            mlp_out_norm=self.norm("mlp_out_norm", i) if c.sandwich else None,
        )

    def norm(self, part: str, layer: int | None = None, size: int | None = None) -> Norm:
        """Load a norm. Its weights stay in float32 or wider: half precision would round 1 + w."""
        shape, kind = (size or self.config.hidden,), self.config.norm
        wide = torch.promote_types(self.dtype, torch.float32)
        weight = self.to(self.tensor(part, layer, "weight", shape), wide)
        if kind == "rms_plus_one":
            weight = weight + 1
        bias = self.to(self.tensor(part, layer, "bias", shape), wide) if kind == "layer" else None
        return Norm(weight, bias)

    def linear(self, part: str, layer: int, out: int, inner: int, bias: bool) -> Any:
        transposed = self.config.layout == "gpt2"  # it stores matrices as [in, out]
        stems = self.stems(part, layer, out)
        readers = [self.matrix(stem, (rows, inner), bias, transposed) for stem, rows in stems]
        read = lambda: stack([reader() for reader in readers])  # noqa: E731
        offsets = self.to(self.tensor(part, layer, "bias", (out,))) if bias else None
        return self.make_linear(part, self.source(f"{layer}.{part}", (out, inner), read), offsets)

    def source(self, name: str, shape: tuple[int, int], read: Callable[[], Matrix]) -> Source:
        return Source(name, shape, read, self.dtype, self.device)

    def to(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return tensor.to(device=self.device, dtype=dtype or self.dtype).contiguous()

    def stems(self, part: str, layer: int | None, rows: int) -> list[tuple[str, int]]:
        """Return (name without suffix, rows) of the checkpoint tensors that make up a part."""
        stems = self.names[part]
        prefix = self.prefix + ("" if layer is None else str(self.names["layer"]).format(i=layer))
        names = [f"{prefix}{stem}" for stem in ([stems] if isinstance(stems, str) else stems)]
        return list(zip(names, self.stacked_rows[part] if len(names) > 1 else [rows], strict=True))

    def tensor(self, part: str, layer: int | None, suffix: str, shape: tuple[int, ...]) -> Tensor:
        """Read a norm, a bias, an embedding or position embeddings as floats."""
        stems = self.stems(part, layer, shape[0])
        found = [self.floats(f"{stem}.{suffix}", (size, *shape[1:])) for stem, size in stems]
        return torch.cat(found) if len(found) > 1 else found[0]

    # The methods below read the container; `gguf.weights.GgufLoader` overrides them.

    def open(self, path: Path) -> None:
        """Open the files at `path` and choose the names of their tensors."""
        config, self.checkpoint = self.config, Checkpoint(path)
        self.scheme = read_scheme(config.raw, str(path / "config.json"))
        self.names = NAMES[config.layout] | (SANDWICH_NAMES if config.sandwich else {})
        embed = f"{self.names['embed']}.weight"
        prefixes = ("model.", "transformer.", "")
        self.prefix = next((p for p in prefixes if self.checkpoint.has(p + embed)), "model.")

    def floats(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Read a tensor of this shape and mark it as used."""
        self.checkpoint.claim(name, shape)
        return self.checkpoint.floats(name)

    def matrix(
        self, stem: str, shape: tuple[int, int], bias: bool, transposed: bool
    ) -> Callable[[], Matrix]:
        """Mark the tensors of a linear layer's weight as used; return a function that reads it."""
        checkpoint, scheme = self.checkpoint, self.scheme
        name = f"{stem}.weight"
        layout = scheme.layout(checkpoint.has, stem) if scheme else None
        if scheme is None or layout is None:
            checkpoint.claim(name, shape[::-1] if transposed else shape)
            if transposed:
                return lambda: checkpoint.floats(name).T
            return lambda: checkpoint.floats(name)
        for suffix in checkpoint.suffixes(layout, stem):
            checkpoint.claim(f"{stem}.{suffix}")
        extra = f"{stem}.bias"  # older GPTQ writers add a bias of zeros to every layer
        if not bias and checkpoint.has(extra) and not checkpoint.read(extra).any():
            checkpoint.claim(extra)
        return lambda: checkpoint.quantized(scheme, layout, stem, shape)

    def embedding(self) -> Callable[[], Matrix]:
        """Return a function that reads the embedding [V, H]."""
        return lambda: self.tensor("embed", None, "weight", (self.config.vocab, self.config.hidden))

    def finish(self) -> None:
        """Raise LoadError if the checkpoint has tensors that were not used."""
        ignored = (*IGNORED, "lm_head.weight") if self.config.tied else IGNORED
        self.checkpoint.finish(ignored, MTP_PREFIXES.get(self.config.family))


def select_rows(matrix: Matrix, rows: Tensor) -> Matrix:
    """Return some rows of a matrix as they are stored. rows [n] int64"""
    if isinstance(matrix, Tensor):
        return matrix[rows.to(matrix.device)]
    if isinstance(matrix, Blocks):
        return matrix.select_rows(rows)
    return QuantizedMatrix(matrix.values[rows], matrix.scale[rows], matrix.group)


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
    from forerun.models.gguf.weights import GgufLoader

    loader = GgufLoader if path.is_file() else WeightLoader
    return loader(config, path, dtype, device, make_linear, make_embedding, shortlist).load()
