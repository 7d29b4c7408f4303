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
    TARGET_COPIES,
    OwnLayout,
    holds_trained_module,
    own_layout,
    refuse_gguf_module,
    refuse_own_module,
)
from forerun.draft.head_config import read_config, reading
from forerun.draft.head_files import assemble, size_of
from forerun.draft.head_modules import Rotation, layer_like
from forerun.draft.proposer import TargetView
from forerun.errors import LoadError
from forerun.kernels import reference as kernels
from forerun.models.checkpoint import Checkpoint
from forerun.models.config import TRAINED_MTP_PREFIX, ModelConfig, load_config
from forerun.models.decoder import Attend, DecoderLayers
from forerun.models.directory_weights import DirectoryLoader
from forerun.models.experts import StackedRows
from forerun.models.files import joined
from forerun.models.gguf.container import open_gguf
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
    """

    embed_norm: Norm
    state_norm: Norm
    join: Any
    layers: list[LayerWeights]
    last_norm: Norm
    state_first: bool


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

    def logits(self, output: Tensor) -> Tensor:
        return self.compute_logits(self.next_state(output))

    def next_state(self, output: Tensor) -> Tensor:
        norm = self.weights.last_norm
        return kernels.norm(output, norm.weight, norm.bias, self.layer.norm_eps)


def own_layer_config(c: ModelConfig) -> ModelConfig:
    """Return the config of the only layer of a target's module: like the target's last layer with
    attention, and with experts if the target has any."""
    attends = [i for i in range(c.layers) if c.has_attention(i)]
    rope = c.rope_of[attends[-1]]
    return replace(
        c,
        layers=1,
        ropes=() if rope is None else c.ropes[rope : rope + 1],
        rope_of=(None if rope is None else 0,),
        windows=(None,),
        sinks=(),
        experts=None if c.experts is None else replace(c.experts, layers=(True,)),
        recurrent=None,
        attends=(),
    )


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
            return _load(path, GGUF_LAYOUT, target)
    raw = read_config(path, MTP)
    with reading(path, MTP):
        checkpoint = Checkpoint(path)
        if reason := refuse_own_module(raw, checkpoint.where):
            raise LoadError(reason)
        if holds_trained_module(checkpoint.where):
            return _load_trained(checkpoint, target)
        layout = own_layout(raw)
        assert layout is not None
        return _load(path, layout, target)


def _load_trained(checkpoint: Checkpoint, target: TargetView) -> MtpModule:
    """Load a module as `forerun train` writes it, from among the tensors of its target. It has the
    layer that modules of `forerun train` have for this target, of any inner size."""
    at = TRAINED_MTP_PREFIX
    own = [name for name in checkpoint.where if name.startswith(at)]
    tensors = {name: checkpoint.floats(name).float() for name in own}
    layer = layer_like(target.config, size_of(tensors, f"{at}mlp.gate_proj.weight", 0))
    return assemble(lambda: MtpModule(layer, target.layers), tensors, MTP)


def _load(path: Path, layout: OwnLayout, target: TargetView) -> OwnModule:
    config = load_config(path)
    if (config.hidden, config.layers) != (target.hidden, target.layers):
        raise LoadError("its multi-token layers are for this model alone, the target is another")
    is_native = target.form is not None
    dtype, device = torch.float32, target.device
    if not is_native and isinstance(target.table, Tensor):
        dtype = target.table.dtype
    make_linear = _packing(config, path, target.form) if target.form is not None else _in_torch
    loader_of = GgufLoader if path.is_file() else DirectoryLoader
    loader = loader_of(config, path, dtype, device, make_linear, Source.weight)
    weights = _read(loader, layout)
    return OwnModule(own_layer_config(config), target.layers, weights, dtype)


def _read(loader: WeightLoader, layout: OwnLayout) -> OwnWeights:
    """Read a module from behind a model's layers. Raises LoadError, also for tensors that no part
    of a module has."""
    at = layout.at(loader.config.layers)
    loader.prefix = ""
    outside = {part: f"{at}{name}" for part, name in layout.outside.items()}
    loader.names = loader.names | outside | {"layer": f"{at}{layout.layer}"}
    loader.config = c = own_layer_config(loader.config)
    weights = OwnWeights(
        embed_norm=loader.norm("embed_norm"),
        state_norm=loader.norm("state_norm"),
        join=loader.linear("join", None, [c.hidden], 2 * c.hidden, False),
        layers=[loader.layer(0)],
        last_norm=loader.norm("last_norm"),
        state_first=layout.state_first,
    )
    if isinstance(loader, GgufLoader):  # the names in a checkpoint were compared before
        unread = sorted(n for n in loader.gguf.tensors.keys() - loader.taken if n.startswith(at))
        unread = [name for name in unread if not name.endswith(TARGET_COPIES)]
        if unread:
            raise LoadError(f"it has {joined(unread, 3)}, which is not supported")
    return weights


def _in_torch(part: str, source: Source, bias: Tensor | None) -> LinearWeights:
    return LinearWeights(_finite(source).weight(), bias)


def _finite(source: Source) -> Source:
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
        return pack_part(part, _finite(source), bias, config, path, form, keep, no_cache)

    return pack
