"""The decoder on native kernels: the same weights and fields, recorded as a program over packed
matrices.

It computes the same function as `Decoder`; the result of a row is bitwise independent of the rest
of the batch. Activations are float32 between operations; a product converts them as its format
needs (float32, bfloat16, or int8 in groups of 64)."""

from __future__ import annotations

import copy
import ctypes
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.cache.attention import Segment
from forerun.cache.kv import KVCache
from forerun.errors import LoadError
from forerun.kernels import native
from forerun.kernels.native import BLOCK
from forerun.models.config import ModelConfig
from forerun.models.gguf.blocks import Blocks
from forerun.models.packed_cache import PackedCache, open_cache
from forerun.models.parameters import Source
from forerun.models.quantized import is_quantized
from forerun.models.rope import rope_tables
from forerun.models.shortlist import spread
from forerun.models.weights import load_weights
from forerun.runtime.packed import (
    MixedMatrix,
    PackedMatrix,
    all_packed,
    fingerprint,
    is_kept,
    note_rounded_types,
    pack,
    pack_blocks,
)
from forerun.runtime.program import (
    LOGITS,
    ChainStart,
    ForwardBatch,
    Program,
)
from forerun.runtime.recorder import DecoderRecorder
from forerun.types import Forward, States

# matrices that run in float32: they are small, and all outputs of a layer depend on what they give
EXACT_PARTS = (
    "router",
    "shared_gate",
    "recurrent_decay",
    "altup_router",
    "altup_predict",
    "altup_correct",
)


class NativeDecoder:
    """A loaded model as a program of native operations, on the CPU.

    Attributes:
        form: the weight format asked for: float32, bfloat16, int8 or int4.
        dtype: of the embedding and the KV cache.
        layer_ids: the layers that a forward pass runs.
        shortlist: ascending token ids [Vd] that are scored, if not all are.
        lock: held while a pass or what it left is used.
    """

    def __init__(
        self,
        config: ModelConfig,
        path: Path,
        form: str,
        context: int,
        keep: bool = False,
        shortlist: Tensor | None = None,
    ) -> None:
        """Load and pack the weights in `path`; compute rotary tables for `context` positions.

        Args:
            form: float32, bfloat16, int8 or int4; with int4 the output head is int8.
            keep: keep the stored values of matrices if a native format can represent them exactly.
            shortlist: as in `Decoder`.

        Raises:
            LoadError: the model cannot be loaded.
            CapacityError: there is not enough memory.
        """
        self.config = config
        self.context = context
        self.form = form
        self.shortlist = shortlist
        self.device = torch.device("cpu")
        self.dtype = torch.float32 if form == "float32" else torch.bfloat16
        self.weights = self._load(path, keep)
        rotations = [rope_tables(config, rope, context, torch.float32) for rope in config.ropes]
        self.ropes = [(cos.contiguous(), sin.contiguous()) for cos, sin in rotations]
        self.layer_ids: Sequence[int] = range(config.layers)
        self._reset_programs()

    def _reset_programs(self) -> None:
        self._owned: list[Any] = []  # tensors that the programs point to
        self._programs: dict[tuple[int, ...], Program] = {}  # by hidden layers
        self.lock = threading.Lock()  # asynchronous drafting uses buffers from another thread

    def _load(self, path: Path, keep: bool) -> Any:
        config, form, shortlist = self.config, self.form, self.shortlist
        is_rounded = form in ("int8", "int4")
        if config.latent is not None:
            _check_latent(config, path)
        cache, no_cache = PackedCache(None), PackedCache(None)
        if is_rounded or (keep and path.is_dir() and is_quantized(config.raw)):
            cache = open_cache(path, (form, str(keep), native.instructions(), fingerprint()))
        tables: list[PackedMatrix] = []  # an embedding in its stored numbers; a tied head shares it

        def make_linear(
            part: str, source: Source, bias: Tensor | None
        ) -> PackedMatrix | MixedMatrix:
            if part == "head" and config.tied and tables and shortlist is None:
                return tables[0]
            is_partial = part == "head" and shortlist is not None  # the cache holds all its rows
            own_cache = no_cache if is_partial else cache
            return pack_part(part, source, bias, config, path, form, keep, own_cache)

        def make_embedding(source: Source) -> Tensor | PackedMatrix:
            held = source.read()
            if not is_kept(held, form, keep):
                return source.weight()
            (table,) = all_packed([pack_blocks(held, None, gated=False)])
            if source.name == "embed":
                tables.append(table)
            return table

        weights = load_weights(
            config, path, self.dtype, self.device, make_linear, make_embedding, shortlist
        )
        cache.finish()
        if keep and path.is_file():
            note_rounded_types(path)
        return weights

    def with_layers(self, layer_ids: Sequence[int], window: int | None) -> NativeDecoder:
        """Return the model restricted to some layers, as `Decoder.with_layers` does."""
        part = copy.copy(self)
        part.config = self.config.with_window(window)
        part.layer_ids = layer_ids
        part._reset_programs()
        return part

    @property
    def weight_bytes(self) -> int:
        """Bytes of the matrices of a forward pass, all experts and scales included."""
        return sum(m.bytes for m in self._matrices)

    def pass_bytes(self, rows: float = 1) -> int:
        """Return the bytes that a forward pass over `rows` tokens reads: of experts those that
        tokens with independent routes use."""
        return self.weight_bytes - self._unused_bytes(rows)

    def _unused_bytes(self, rows: float) -> int:
        e = self.config.experts
        if e is None:
            return 0
        layers = [self.weights.layers[i].experts for i in self.layer_ids]
        matrices = [matrix for own in layers if own for matrix in (own.up, own.down)]
        size = sum(m.bytes for m in all_packed(matrices))
        return round(size * (1 - e.share(rows)))

    @property
    def precision(self) -> str:
        """Number formats of the matrices and the kernels that multiply them, for display."""
        forms = " and ".join(dict.fromkeys(m.form for m in self._matrices))
        return f"{forms}, native {native.instructions()}"

    @property
    def _matrices(self) -> list[PackedMatrix]:
        layers = [self.weights.layers[i] for i in self.layer_ids]
        matrices = [matrix for layer in layers for matrix in layer.matrices]
        return all_packed([*matrices, self.weights.head])

    def forward(
        self,
        segments: Sequence[Segment],
        cache: KVCache,
        aux_hidden_layers: Sequence[int] = (),
        keep: bool = True,
    ) -> Forward:
        """Run one forward pass over segments whose slots have room.

        Returns logits [M, V] float32 of the positions they want, and hidden states [T, H] float32
        at `aux_hidden_layers` (see `Forward`). Without `keep` the next forward pass overwrites
        both."""
        layers = tuple(sorted(set(aux_hidden_layers)))
        program, batch = self.program(layers), ForwardBatch(segments, cache)
        with self.lock:
            buffers, scratch = program.buffers.fit(batch.tokens, batch.wanted)
            filled = batch.fill(buffers, scratch, cache)
            if cache.recurrent is None:
                native.loaded().forerun_run(program.program, filled)
            else:
                runs = cache.recurrent.plan(segments, cache.length)
                structure = runs.structure()
                filled.recurrent = ctypes.pointer(structure)
                native.loaded().forerun_run(program.program, filled)
                runs.settle()
            saved = program.buffers.arrays[LOGITS + 1 : LOGITS + 1 + len(layers)]
            features: dict[int, States] = {
                layer: x[: batch.tokens].copy() if keep else x[: batch.tokens]
                for layer, x in zip(layers, saved, strict=True)
            }
            logits = program.buffers.logits(batch.wanted)
            logits = logits.clone() if keep else logits
            experts = self._experts_of(program, batch.tokens)
        return Forward(spread(logits, self.shortlist, self.config.vocab), features, experts)

    def _experts_of(self, program: Program, tokens: int) -> np.ndarray | None:
        """Return the experts of the tokens of the pass that was just run; see `Forward`."""
        e = self.config.experts
        if e is None:
            return None
        choices = program.buffers.arrays[program.choices][:tokens]
        return choices.reshape(tokens, -1, 2, e.used)[:, :, 0].astype(np.int16)

    def draft_chains(
        self, starts: Sequence[ChainStart], cache: KVCache, vocab: int
    ) -> list[list[int]]:
        """Draft a token for each key of each start in one native call; the slots have room.

        Only tokens below `vocab` are drafted. The model has no recurrent layers."""
        token_ids = None if self.shortlist is None else self.shortlist.numpy()
        program = self.program(())
        with self.lock:
            return program.draft_chains(starts, cache, min(vocab, self.config.vocab), token_ids)

    def program(self, aux_hidden_layers: tuple[int, ...]) -> Program:
        """Return the decoder as a program that saves hidden states on the way, recorded once."""
        if aux_hidden_layers not in self._programs:
            self._programs[aux_hidden_layers] = self._record(aux_hidden_layers)
        return self._programs[aux_hidden_layers]

    def _record(self, aux_hidden_layers: tuple[int, ...]) -> Program:
        recorder = DecoderRecorder(
            self.config, self.weights, self.ropes, self.context, self.shortlist, aux_hidden_layers
        )
        self._owned.append(recorder.owned)
        return recorder.program(self.layer_ids)


def pack_part(
    part: str,
    source: Source,
    bias: Tensor | None,
    config: ModelConfig,
    path: Path,
    form: str,
    keep: bool,
    cache: PackedCache,
) -> PackedMatrix | MixedMatrix:
    """Pack a linear layer of a decoder, named as in `LayerWeights`; `form` and `keep` are as in
    `NativeDecoder`. Raises LoadError, which names `path`, for experts that do not fit."""
    if part in EXACT_PARTS:
        return PackedMatrix(_exact(source), bias, "float32", gated=False)
    is_gated = part in ("up", "shared_up", "expert_up") and config.gated
    packed = pack(source, bias, form, keep, is_gated, cache)
    if part in ("expert_up", "expert_down"):
        _check_experts(config, isinstance(packed, MixedMatrix), path)
    return packed


def _exact(source: Source) -> Tensor:
    """Read the weight of a matrix that runs in float32: of a GGUF file without rounding."""
    held = source.read()
    return held.dequantize() if isinstance(held, Blocks) else source.weight()


def _check_experts(config: ModelConfig, is_mixed: bool, path: Path) -> None:
    """Raise LoadError unless experts begin with a block of outputs of their matrix.

    is_mixed: gates and ups are two matrices."""
    e = config.experts
    assert e is not None
    width, inner = e.latent or config.hidden, e.intermediate
    least = BLOCK // 2 if config.gated and not is_mixed else BLOCK
    if width % BLOCK or inner % least:
        raise LoadError(
            f"{path}: experts of the size {width} by {inner} do not fit the native kernels,"
            f" which need multiples of {BLOCK} and {least}; use kernels=torch"
        )


def _check_latent(config: ModelConfig, path: Path) -> None:
    """Raise LoadError unless the heads' matrices begin with a block of outputs."""
    a = config.latent
    assert a is not None
    if any(size % BLOCK for size in (a.rank, a.rotary, a.value)):
        raise LoadError(
            f"{path}: latent attention of {a.rank}, {a.rotary} and {a.value} channels does not fit"
            f" the native kernels, which need multiples of {BLOCK}; use kernels=torch"
        )
