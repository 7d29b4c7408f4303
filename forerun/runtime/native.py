"""The decoder on native kernels: the same weights and fields, recorded as a program over packed
matrices.

It computes the same function as `Decoder`; the result of a row is bitwise independent of the rest
of the batch. Activations are float32 between operations; a product converts them as its format
needs (float32, bfloat16, or int8 in groups of 64)."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.cache.attention import Segment
from forerun.cache.kv import KVCache
from forerun.kernels import native
from forerun.kernels.native import CNorm, COp
from forerun.models.config import ModelConfig
from forerun.models.packed_cache import PackedCache, open_cache
from forerun.models.quantized import is_quantized
from forerun.models.rope import rope_tables
from forerun.models.shortlist import spread
from forerun.models.weights import LayerWeights, Norm, Source, load_weights
from forerun.runtime.packed import (
    MixedMatrix,
    PackedMatrix,
    all_packed,
    fingerprint,
    is_kept,
    note_rounded_types,
    pack,
    pack_blocks,
    parts_of,
)
from forerun.runtime.program import (
    ATTENDED,
    BRANCH,
    HIDDEN,
    LOGITS,
    QKV,
    ChainStart,
    ForwardBatch,
    Program,
    X,
    embed_op,
)
from forerun.types import Forward


class NativeDecoder:
    """A loaded model as a program of native operations, on the CPU.

    Attributes:
        form: the weight format asked for: float32, bfloat16, int8 or int4.
        dtype: of the embedding and the KV cache.
        layer_ids: the layers that a forward pass runs.
        shortlist: ascending token ids [Vd] that are scored, if not all are.
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
        self._lock = threading.Lock()  # asynchronous drafting uses buffers from another thread

    def _load(self, path: Path, keep: bool) -> Any:
        config, form, shortlist = self.config, self.form, self.shortlist
        is_rounded = form in ("int8", "int4")
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
            is_gated = part == "up" and config.gated
            return pack(source, bias, form, keep, is_gated, no_cache if is_partial else cache)

        def make_embedding(source: Source) -> Tensor | PackedMatrix:
            held = source.read()
            if not is_kept(held, form, keep):
                return source.weight()
            tables.extend(all_packed([pack_blocks(held, None, gated=False)]))
            return tables[0]

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
        """Bytes a forward pass reads: every matrix once, scales included."""
        return sum(m.bytes for m in self._matrices)

    @property
    def weight_bits(self) -> float:
        """Mean bits per weight of the matrices, scales included."""
        weights: int = sum(m.matrix.inputs * m.matrix.outputs for m in self._matrices)
        return 8 * self.weight_bytes / weights

    @property
    def precision(self) -> str:
        """Number formats of the matrices and the kernels that multiply them, for display."""
        forms = " and ".join(dict.fromkeys(m.form for m in self._matrices))
        return f"{forms}, native {native.instructions()}"

    @property
    def _matrices(self) -> list[PackedMatrix]:
        layers = [self.weights.layers[i] for i in self.layer_ids]
        matrices = [m for layer in layers for m in (layer.qkv, layer.out, layer.up, layer.down)]
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
        at `aux_hidden_layers` (see `Forward`). Without `keep` the next forward pass overwrites the
        logits."""
        layers = tuple(sorted(set(aux_hidden_layers)))
        program, batch = self._program(layers), ForwardBatch(segments, cache)
        with self._lock:
            buffers, scratch = program.buffers.fit(batch.tokens, batch.wanted)
            native.loaded().forerun_run(program.program, batch.fill(buffers, scratch, cache))
            saved = program.buffers.arrays[LOGITS + 1 :]
            features = {
                layer: torch.from_numpy(x[: batch.tokens].copy())
                for layer, x in zip(layers, saved, strict=True)
            }
            logits = program.buffers.logits(batch.wanted)
            logits = logits.clone() if keep else logits
        return Forward(spread(logits, self.shortlist, self.config.vocab), features)

    def draft_chains(
        self, starts: Sequence[ChainStart], cache: KVCache, vocab: int
    ) -> list[list[int]]:
        """Draft a token for each key of each start in one native call; the slots have room.

        Only tokens below `vocab` are drafted."""
        token_ids = None if self.shortlist is None else self.shortlist.numpy()
        program = self._program(())
        with self._lock:
            return program.draft_chains(starts, cache, min(vocab, self.config.vocab), token_ids)

    def _program(self, aux_hidden_layers: tuple[int, ...]) -> Program:
        """Return the decoder as a program that saves hidden states on the way, recorded once."""
        if aux_hidden_layers not in self._programs:
            self._programs[aux_hidden_layers] = self._record(aux_hidden_layers)
        return self._programs[aux_hidden_layers]

    def _record(self, aux_hidden_layers: tuple[int, ...]) -> Program:
        c, w = self.config, self.weights
        saves = {
            layer: COp(kind=native.SAVE, input=X, output=LOGITS + 1 + i)
            for i, layer in enumerate(aux_hidden_layers)
        }
        table = w.embed if isinstance(w.embed, PackedMatrix) else w.embed.contiguous()
        self._owned.append(table)
        positions = self._own(w.positions.float()) if w.positions is not None else None
        ops = [embed_op(table, X, c.embed_scale, positions)]
        for i in self.layer_ids:
            if i in saves:
                ops.append(saves[i])
            ops += self._layer(i)
        if c.layers in saves:
            ops.append(saves[c.layers])
        ops += self._linear(w.head, X, LOGITS, w.norm, wanted=1, softcap=c.logit_softcap or 0)
        heads = (c.heads + 2 * c.kv_heads) * c.head_dim
        inner = -(-c.intermediate // 16) * 16
        logits = c.vocab if self.shortlist is None else len(self.shortlist)
        widths = [c.hidden, heads, c.heads * c.head_dim, inner, c.hidden, logits]
        widths += [c.hidden] * len(aux_hidden_layers)
        return Program(c, ops, np.array(widths, dtype=np.int32))

    def _layer(self, i: int) -> list[COp]:
        c, layer = self.config, self.weights.layers[i]
        window, sinks = c.visible_keys(i)
        attend = COp(
            kind=native.ATTEND,
            input=QKV,
            output=ATTENDED,
            layer=i,
            scale=c.attention_scale,
            softcap=c.attention_softcap or 0,
            window=window or 0,
            sinks=sinks,
        )
        activation = native.ACTIVATIONS[c.activation]
        return [
            *self._linear(layer.qkv, X, QKV, layer.attention_norm),
            self._rotate(i, layer),
            attend,
            *self._branch(layer.out, ATTENDED, layer.attention_out_norm),
            *self._linear(
                layer.up, X, HIDDEN, layer.mlp_norm, gated=c.gated, activation=activation
            ),
            *self._branch(layer.down, HIDDEN, layer.mlp_out_norm),
        ]

    def _linear(
        self, linear: Any, source: int, to: int, norm: Norm | None, **options: Any
    ) -> list[COp]:
        """Return one product for each matrix of a layer; a separate gate precedes the matrix it
        gates."""
        ops = []
        for part in parts_of(linear):
            own = options
            if part.is_gate:
                own = {"activation": options["activation"]}
            elif part.is_gated:
                own = {"combine": native.TIMES}
            op = COp(
                kind=native.LINEAR,
                input=source,
                output=to,
                norm=self._norm(norm),
                matrix=part.packed.matrix,
                column=part.column,
                **own,
            )
            ops.append(op)
        return ops

    def _branch(self, layer: Any, source: int, after: Norm | None) -> list[COp]:
        """Add the output of a branch to the residual stream, after its norm if there is one."""
        if after is None:
            return self._linear(layer, source, X, None, combine=native.ADD)
        return self._linear(layer, source, BRANCH, None, after=self._norm(after), layer=X)

    def _rotate(self, i: int, layer: LayerWeights) -> COp:
        op = COp(
            kind=native.ROTATE,
            input=QKV,
            layer=i,
            norm=self._norm(layer.q_norm),
            key_norm=self._norm(layer.k_norm),
        )
        rope = self.config.rope_of[i]
        if rope is not None:
            cosine, sine = self.ropes[rope]
            op.cosine, op.sine, op.rotary = cosine.data_ptr(), sine.data_ptr(), 2 * cosine.shape[-1]
        return op

    def _norm(self, norm: Norm | None) -> CNorm:
        if norm is None:
            return CNorm()
        bias = None if norm.bias is None else self._own(norm.bias)
        kind = native.NORMS[self.config.norm]
        return CNorm(self._own(norm.weight), bias, self.config.norm_eps, kind)

    def _own(self, tensor: Tensor) -> int:
        """Keep a tensor alive as long as this decoder; return its address."""
        tensor = tensor.contiguous()
        self._owned.append(tensor)
        return tensor.data_ptr()
