"""The multi-token module in a target's own checkpoint or GGUF file.

Its layer is built and stored like the target's own layers, so the target's loader reads it and the
target's decoder computes it: latent attention, experts, gates and biases included. Matrices stay as
they are stored where the native kernels hold the same numbers. Embedding and lm head are the
target's; copies of them that some checkpoints have beside the module are not read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.draft.eagle.module import EagleModule
from forerun.draft.eagle.mtp import MTP, MtpModule, load_module
from forerun.draft.eagle.mtp_formats import (
    GGUF_LAYOUT,
    GGUF_LAYOUTS,
    TARGET_COPIES,
    TRAINED_GGUF_NAMES,
    TRAINED_GGUF_NORMS,
    OwnLayout,
    holds_trained_module,
    own_layout,
    refuse_gguf_module,
    refuse_own_module,
    trained_names,
)
from forerun.draft.head_config import read_config, reading
from forerun.draft.head_files import Tensors, assemble, read_layer, read_tensors, size_of
from forerun.draft.head_modules import Rotation, layer_like
from forerun.draft.proposer import TargetView
from forerun.errors import LoadError, shown
from forerun.kernels import reference as kernels
from forerun.kernels.device_matrix import DeviceMatrix
from forerun.models.checkpoint import Checkpoint
from forerun.models.config import TRAINED_MTP_PREFIX, ModelConfig, load_config
from forerun.models.decoder import Attend, DecoderLayers
from forerun.models.directory_weights import DirectoryLoader
from forerun.models.experts import StackedRows
from forerun.models.families import is_integer
from forerun.models.files import joined
from forerun.models.gguf.blocks import read_tensor
from forerun.models.gguf.config import TRAINED_BLOCK
from forerun.models.gguf.container import NewTensor, append_tensors, open_gguf
from forerun.models.gguf.weights import GgufLoader
from forerun.models.packed_cache import PackedCache
from forerun.models.parameters import LayerWeights, LinearWeights, Matrix, Norm, Source
from forerun.models.quantized import is_quantized
from forerun.models.weights import MakeLinear, WeightLoader
from forerun.runtime.native import pack_part


@dataclass(frozen=True, slots=True)
class OwnWeights:
    """The weights of a module.

    Attributes:
        embed_norm, state_norm: norms of the two halves of a pair.
        join: [H, 2 H], joins a pair.
        layers: the decoder layer.
        last_norm: the norm behind it.
        state_first: the state is the first half of a pair, not the second.
        shares_norm: the last norm is the target's, and states are those before it.
    """

    embed_norm: Norm
    state_norm: Norm
    join: Any
    layers: list[LayerWeights]
    last_norm: Norm
    state_first: bool
    shares_norm: bool


class _Layer(DecoderLayers):
    """The decoder layer of a module in torch, and the norms and the product around it."""

    def __init__(self, config: ModelConfig, weights: OwnWeights) -> None:
        self.config, self.weights = config, weights

    def run(self, embedded: Tensor, state: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """Run pairs of embeddings and states, [T, H] each. -> [T, H]"""
        w = self.weights
        pair = [self._norm(embedded, w.embed_norm), self._norm(state, w.state_norm)]
        joined = torch.cat(pair[::-1] if w.state_first else pair, dim=-1)
        return self.run_layer(self._linear(joined, w.join), 0, [rotation], attend)


class OwnModule(EagleModule):
    """A multi-token module that the target's loader has read.

    Attributes:
        weights: in torch, or packed for the native kernels.
        dtype: of the states that enter the module.
    """

    title = MTP

    def __init__(
        self, layer: ModelConfig, target_layers: int, weights: OwnWeights, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.layer, self.aux_hidden_layers = layer, (target_layers,)
        self.weights, self._dtype = weights, dtype
        self.init_token_map(layer.vocab, layer.vocab)

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def forward(
        self, embedded: Tensor, state: Tensor, rotation: Rotation, attend: Attend
    ) -> Tensor:
        return _Layer(self.layer, self.weights).run(embedded, state, rotation, attend)

    def fuse(self, states: Tensor) -> Tensor:
        return states if self.weights.shares_norm else super().fuse(states)

    def logits(self, output: Tensor) -> Tensor:
        return self.compute_logits(self._normed(output))

    def next_state(self, output: Tensor) -> Tensor:
        return output if self.weights.shares_norm else self._normed(output)

    def _normed(self, output: Tensor) -> Tensor:
        norm = self.weights.last_norm
        return kernels.norm(output, norm.weight, norm.bias, self.layer.norm_eps)


def load_any_module(path: Path, target: TargetView) -> OwnModule | MtpModule:
    """Load the module of a target's own checkpoint, or one of a directory of its own. Raises
    LoadError."""
    if path.is_file() or "speculators_model_type" not in read_config(path, MTP):
        return load_own_module(path, target)
    return load_module(path, target)


def load_own_module(path: Path, target: TargetView) -> OwnModule | MtpModule:
    """Load the module of a target's own checkpoint or GGUF file: the one that `forerun train` made,
    if it is there, or else the first multi-token layer, in torch or for the target's native form.
    Raises LoadError."""
    if path.is_file():
        gguf = open_gguf(path)
        with reading(path, MTP):
            if reason := refuse_gguf_module(gguf):
                raise LoadError(reason)
            if TRAINED_BLOCK in gguf.metadata:
                names = trained_names(gguf).items()
                tensors = {own: read_tensor(gguf.tensors[name]) for own, name in names}
                return _assemble_trained(tensors, target.config)
            return _load(path, GGUF_LAYOUTS[gguf.architecture], target)
    raw = read_config(path, MTP)
    with reading(path, MTP):
        checkpoint = Checkpoint(path)
        if reason := refuse_own_module(raw, checkpoint.where):
            raise LoadError(reason)
        if holds_trained_module(checkpoint.where):
            own = [name for name in checkpoint.where if name.startswith(TRAINED_MTP_PREFIX)]
            tensors = {name: checkpoint.floats(name).float() for name in own}
            return _assemble_trained(tensors, target.config)
        layout = own_layout(raw)
        assert layout is not None
        return _load(path, layout, target)


def _assemble_trained(tensors: Tensors, target: ModelConfig) -> MtpModule:
    """Build a module with the layer that modules of `forerun train` have for this target, of any
    inner size."""
    gate = f"{TRAINED_MTP_PREFIX}mlp.gate_proj.weight"
    layer = layer_like(target, size_of(tensors, gate, 0))
    return assemble(lambda: MtpModule(layer, target.layers), tensors, MTP)


def store_module(directory: Path, target: Path, out: Path) -> None:
    """Write a copy of a target's GGUF file with the module that `forerun train` made for it.

    The module becomes a block behind the model's layers, as llama.cpp's converter writes modules,
    with rows in the order of transformers. Its numbers are kept.

    Raises:
        LoadError: the module cannot be read or is not for this target, or the file cannot be read.
        OSError: the copy cannot be written.
    """
    config, gguf = load_config(target), open_gguf(target)
    if TRAINED_BLOCK in gguf.metadata:
        raise LoadError(f"{target} has a module of forerun train already: give the original file")
    raw, tensors = read_config(directory, MTP), read_tensors(directory, MTP)
    with reading(directory, MTP):
        layer = raw.get("transformer_layer_config")
        if raw.get("speculators_model_type") != "mtp" or not isinstance(layer, dict):
            raise LoadError("config.json does not describe one of the speculators layout")
        if "d2t" in tensors:
            raise LoadError(
                "it predicts part of the vocabulary, and such a module cannot be stored with its"
                " target"
            )
        module = _assemble_trained(tensors, config)
        own = read_layer(layer, tensors, config.vocab, TRAINED_MTP_PREFIX)
        if _essentials(own) != _essentials(module.layer):
            raise LoadError("its layer is not the one that forerun train makes for this target")
    metadata, prefix = gguf.metadata, f"{gguf.architecture}."
    block = metadata[f"{prefix}block_count"]
    extra = metadata.get(f"{prefix}nextn_predict_layers", 0)
    if not is_integer(block) or not is_integer(extra):
        raise LoadError(f"{target}: {prefix}block_count is {shown(block)}, not a whole number")
    names = TRAINED_GGUF_NAMES | (TRAINED_GGUF_NORMS if module.layer.qk_norm else {})
    added = [
        _as_stored(
            f"{GGUF_LAYOUT.at(block)}{name}.weight", tensors[f"{TRAINED_MTP_PREFIX}{part}.weight"]
        )
        for part, name in names.items()
    ]
    numbers = {
        f"{prefix}block_count": block + 1,
        f"{prefix}nextn_predict_layers": extra + 1,
        TRAINED_BLOCK: block,
    }
    append_tensors(target, out, added, numbers)


def _essentials(c: ModelConfig) -> tuple[Any, ...]:
    """Return what the weights of a layer do not show."""
    rope = c.ropes[0].parameters
    sizes = c.hidden, c.heads, c.kv_heads, c.head_dim
    return *sizes, c.norm_eps, c.activation, c.qk_norm, rope["rope_type"], rope["rope_theta"]


def _as_stored(name: str, tensor: Tensor) -> NewTensor:
    """Return a tensor in float32, or a matrix in bfloat16 if that holds its numbers."""
    shape, short = tuple(tensor.shape), tensor.bfloat16()
    if tensor.ndim > 1 and torch.equal(short.float(), tensor):
        return NewTensor(name, "BF16", shape, short.contiguous().view(torch.int16).numpy())
    return NewTensor(name, "F32", shape, tensor.float().contiguous().numpy())


def _load(path: Path, layout: OwnLayout, target: TargetView) -> OwnModule:
    config = load_config(path)
    if (config.hidden, config.layers) != (target.hidden, target.layers):
        raise LoadError("its multi-token layers are for this model alone, the target is another")
    dtype = dtype_beside(target)
    make_linear = _packing(config, path, target.form) if target.form is not None else in_torch
    loader_of = GgufLoader if path.is_file() else DirectoryLoader
    loader = loader_of(config, path, dtype, target.device, make_linear, Source.weight)
    weights = _read(loader, layout)
    return OwnModule(layout.layer_config(config), target.layers, weights, dtype)


def _read(loader: WeightLoader, layout: OwnLayout) -> OwnWeights:
    """Read a module from behind a model's layers. Raises LoadError, also for tensors that no part
    of a module has."""
    at = layout.at(loader.config.layers)
    last_norm = loader.norm("norm") if layout.shares_norm else None
    loader.prefix = ""
    outside = {part: f"{at}{name}" for part, name in layout.outside.items()}
    loader.names = loader.names | outside | {"layer": f"{at}{layout.layer}"}
    loader.config = c = layout.layer_config(loader.config)
    weights = OwnWeights(
        embed_norm=loader.norm("embed_norm"),
        state_norm=loader.norm("state_norm"),
        join=loader.linear("join", None, [c.hidden], 2 * c.hidden, False),
        layers=[loader.layer(0)],
        last_norm=last_norm or loader.norm("last_norm"),
        state_first=layout.state_first,
        shares_norm=layout.shares_norm,
    )
    if isinstance(loader, GgufLoader):  # the names in a checkpoint were compared before
        unread = sorted(n for n in loader.gguf.tensors.keys() - loader.taken if n.startswith(at))
        unread = [name for name in unread if not name.endswith(TARGET_COPIES)]
        if unread:
            raise LoadError(f"it has {joined(unread, 3)}, which is not supported")
    return weights


def dtype_beside(target: TargetView) -> torch.dtype:
    """Return the dtype in which a module of a target computes: the target's own in torch."""
    if target.form is None and isinstance(target.table, Tensor | DeviceMatrix):
        return target.table.dtype
    return torch.float32


def in_torch(part: str, source: Source, bias: Tensor | None) -> LinearWeights:
    """Make a linear layer in torch. Raises LoadError for numbers that are not finite."""
    return LinearWeights(finite(source).weight(), bias)


def finite(source: Source) -> Source:
    """Return a source that raises LoadError where the floats it reads are not finite."""

    def check(rows: Tensor) -> Tensor:
        if not rows.isfinite().all():
            part = source.name.removeprefix("0.")
            raise LoadError(f"{part} holds numbers that are not finite: download it again")
        return rows

    def read() -> Matrix:
        held = source.read()
        if isinstance(held, StackedRows):
            parts = [lambda part=part: check(part()) for part in held.parts]
            return StackedRows(parts, held.rows, held.shape[1])
        return check(held) if isinstance(held, Tensor) else held

    return replace(source, read=read)


def _packing(config: ModelConfig, path: Path, form: str) -> MakeLinear:
    """Return a function that packs a linear layer: in the numbers of a GGUF file or a quantized
    checkpoint where they are supported, else in `form`."""
    keep, no_cache = path.is_file() or is_quantized(config.raw), PackedCache(None)

    def pack(part: str, source: Source, bias: Tensor | None) -> Any:
        return pack_part(part, finite(source), bias, config, path, form, keep, no_cache)

    return pack
