"""The decoder on native kernels: the same weights and fields, recorded as a program over packed
matrices.

It computes what `Decoder` computes, bit for bit the same for a row whatever else is in the pass.
Activations are float32 between operations; a product reads them as its format asks (float32,
bfloat16, or int8 in groups of 64)."""

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
from forerun.models.quantized import is_quantised
from forerun.models.rope import rope_tables
from forerun.models.shortlist import spread
from forerun.models.weights import Layer, Norm, Source, load_weights
from forerun.runtime.program import (
    ATTENDED,
    BRANCH,
    HIDDEN,
    LOGITS,
    QKV,
    Link,
    Mixed,
    Packed,
    Pass,
    Recorded,
    X,
    all_packed,
    embed_op,
    fingerprint,
    pack,
    pack_blocks,
    parts_of,
    say_what_is_rounded,
    stays,
)
from forerun.types import Forward


class NativeDecoder:
    """A loaded model as a program of native operations. CPU only; float32, bfloat16, int8 or int4
    weights."""

    def __init__(
        self,
        config: ModelConfig,
        path: Path,
        form: str,
        context: int,
        keep: bool = False,
        said: Tensor | None = None,
    ) -> None:
        """`form` is float32, bfloat16, int8 or int4; in int4 the head stays int8. With `keep`,
        matrices that are stored in numbers that a native format holds exactly stay what they are.
        `context`: positions to prepare. `said` is that of `Decoder`."""
        self.said = said
        self.config, self.context, self.form = config, context, form
        self.device = torch.device("cpu")
        self.dtype = (
            torch.float32 if form == "float32" else torch.bfloat16
        )  # of the embedding and the KV cache
        cache = PackedCache(None)
        if form in ("int8", "int4") or (keep and path.is_dir() and is_quantised(config.raw)):
            cache = open_cache(path, (form, str(keep), native.instructions(), fingerprint()))
        tables: list[
            Packed
        ] = []  # an embedding in the numbers of its file, which may be the head too

        def make(part: str, source: Source, bias: Tensor | None) -> Packed | Mixed:
            if part == "head" and config.tied and tables and said is None:
                return tables[0]
            kept = (
                PackedCache(None) if part == "head" and said is not None else cache
            )  # which holds the whole head
            return pack(source, bias, form, keep, gated=part == "up" and config.gated, cache=kept)

        def table(source: Source) -> Tensor | Packed:
            held = source.read()
            if not stays(held, form, keep):
                return source.weight()
            tables.extend(all_packed([pack_blocks(held, None, gated=False)]))
            return tables[0]

        self.weights = load_weights(config, path, self.dtype, self.device, make, table, said)
        cache.finish()
        if keep and path.is_file():
            say_what_is_rounded(path)
        rotations = [rope_tables(config, rope, context, torch.float32) for rope in config.ropes]
        self.ropes = [(cos.contiguous(), sin.contiguous()) for cos, sin in rotations]
        self._keep: list[Any] = []  # what the program points to
        self._recorded: dict[tuple[int, ...], Recorded] = {}
        self.kept: Sequence[int] = range(config.layers)
        self._passing = (
            threading.Lock()
        )  # buffers serve one pass at a time, and who drafts ahead has its own thread

    def abridged(self, kept: Sequence[int], window: int | None) -> NativeDecoder:
        """The same model with only these of its layers, and a window of so many keys (None: its
        own), which share weights and cache with it."""
        part = copy.copy(self)
        part.config, part.kept, part._keep, part._recorded = (
            self.config.abridged(window),
            kept,
            [],
            {},
        )
        part._passing = threading.Lock()
        return part

    @property
    def weight_bytes(self) -> int:
        """Bytes one pass reads: every weight once, scales included."""
        return sum(m.bytes for m in self._matrices)

    @property
    def weight_bits(self) -> float:
        """Bits of a weight of its matrices, in the mean, scales included."""
        weights: int = sum(m.matrix.inputs * m.matrix.outputs for m in self._matrices)
        return 8 * self.weight_bytes / weights

    @property
    def precision(self) -> str:
        """In which numbers its matrices are, and whose kernels multiply them."""
        return f"{' and '.join(dict.fromkeys(m.form for m in self._matrices))}, native {native.instructions()}"

    @property
    def _matrices(self) -> list[Packed]:
        w = self.weights
        own = [w.layers[i] for i in self.kept]
        layers = [m for layer in own for m in (layer.qkv, layer.out, layer.up, layer.down)]
        return all_packed([*layers, w.head])  # type: ignore[list-item]

    def forward(
        self,
        segments: Sequence[Segment],
        cache: KVCache,
        aux_hidden_layers: Sequence[int] = (),
        keep: bool = True,
    ) -> Forward:
        """One pass over segments whose slots have room; logits [M, V] float32 of the positions they
        want, and hidden states [T, H] float32 of all tokens at `aux_hidden_layers` (see `Forward`).
        `keep` as in `Runner.forward`."""
        key = tuple(sorted(set(aux_hidden_layers)))
        if key not in self._recorded:
            self._recorded[key] = self._record(key)
        recorded, batch = self._recorded[key], Pass(segments, cache)
        with self._passing:
            pointers, scratch = recorded.buffers.fit(batch.tokens, batch.wanted)
            native.loaded().forerun_run(recorded.program, batch.fill(pointers, scratch, cache))
            saved = recorded.buffers.arrays[LOGITS + 1 :]
            features = {
                b: torch.from_numpy(x[: batch.tokens].copy())
                for b, x in zip(key, saved, strict=True)
            }
            logits = recorded.buffers.logits(batch.wanted)
            found = logits.clone() if keep else logits
        return Forward(spread(found, self.said, self.config.vocab), features)

    def chain(self, links: Sequence[Link], cache: KVCache, vocab: int) -> list[list[int]]:
        """Say token after token behind each link, as many as it has keys, in one native call; the
        slots have room. Tokens from `vocab` up are never said."""
        if () not in self._recorded:
            self._recorded[()] = self._record(())
        ids = None if self.said is None else self.said.numpy()
        with self._passing:
            return self._recorded[()].chain(links, cache, min(vocab, self.config.vocab), ids)

    def _widths(self) -> list[int]:
        c = self.config
        heads = (c.heads + 2 * c.kv_heads) * c.head_dim
        inner = -(-c.intermediate // 16) * 16
        said = c.vocab if self.said is None else len(self.said)
        return [c.hidden, heads, c.heads * c.head_dim, inner, c.hidden, said]

    def _record(self, aux_hidden_layers: tuple[int, ...]) -> Recorded:
        """The decoder, operation by operation; hidden states at `aux_hidden_layers` are saved on
        the way."""
        c, w = self.config, self.weights
        saves = {
            b: COp(kind=native.SAVE, input=X, output=LOGITS + 1 + i)
            for i, b in enumerate(aux_hidden_layers)
        }
        table = w.embed if isinstance(w.embed, Packed) else w.embed.contiguous()
        self._keep.append(table)
        positions = self._own(w.positions.float()) if w.positions is not None else None
        ops = [embed_op(table, X, c.embed_scale, positions)]
        for i in self.kept:
            layer = w.layers[i]
            ops += [saves[i]] if i in saves else []
            ops += [
                *self._linear(layer.qkv, X, QKV, layer.attention_norm),
                self._rotate(i, layer),
                COp(
                    kind=native.ATTEND, input=QKV, output=ATTENDED, layer=i, scale=c.attention_scale,
                    softcap=c.attention_softcap or 0, window=c.windows[i] or 0, sinks=c.sight(i)[1],
                ),
                *self._branch(layer.out, ATTENDED, layer.attention_out_norm),
                *self._linear(
                    layer.up, X, HIDDEN, layer.mlp_norm, gated=c.gated, activation=native.ACTIVATIONS[c.activation]
                ),
                *self._branch(layer.down, HIDDEN, layer.mlp_out_norm),
            ]  # fmt: skip
        ops += [saves[c.layers]] if c.layers in saves else []
        ops += self._linear(w.head, X, LOGITS, w.norm, wanted=1, softcap=c.logit_softcap or 0)
        return Recorded(
            c, ops, np.array(self._widths() + [c.hidden] * len(aux_hidden_layers), dtype=np.int32)
        )

    def _linear(
        self, linear: Any, source: int, to: int, norm: Norm | None, **options: Any
    ) -> list[COp]:
        """A product, or one for each type that its rows are stored in. A gate of its own comes
        before what it lets through."""
        ops = []
        for part in parts_of(linear):
            own = dict(options)
            if part.gate or part.gated:
                own = (
                    {"activation": options["activation"]}
                    if part.gate
                    else {"combine": native.TIMES}
                )
            ops.append(
                COp(
                    kind=native.LINEAR, input=source, output=to, norm=self._norm(norm), matrix=part.packed.matrix,
                    column=part.column, **own,
                )
            )  # fmt: skip
        return ops

    def _branch(self, layer: Any, source: int, after: Norm | None) -> list[COp]:
        """The end of a branch: added to the residual stream, after a norm of its own where the
        family has one."""
        if after is None:
            return self._linear(layer, source, X, None, combine=native.ADD)
        return self._linear(layer, source, BRANCH, None, after=self._norm(after), layer=X)

    def _rotate(self, i: int, layer: Layer) -> COp:
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
        return CNorm(
            self._own(norm.weight), bias, self.config.norm_eps, native.NORMS[self.config.norm]
        )

    def _own(self, tensor: Tensor) -> int:
        tensor = tensor.contiguous()
        self._keep.append(tensor)
        return tensor.data_ptr()
