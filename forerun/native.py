"""The decoder on native kernels: the same weights and fields, recorded as a program over packed matrices.

It computes what `Decoder` computes, bit for bit the same for a row whatever else is in the pass. Activations are
float32 between operations; a product reads them as its format asks (float32, bfloat16, or int8 in groups of 64).
"""

from __future__ import annotations

import ctypes
import hashlib
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.cache.attention import Segment
from forerun.cache.kv import KVCache
from forerun.kernels import native
from forerun.kernels.native import CChain, CMatrix, CNorm, COp, CProgram, address
from forerun.kernels.native.layout import interleave, lay_out
from forerun.models.config import ModelConfig
from forerun.models.packed_cache import Broken, Kept, PackedCache, open_cache
from forerun.models.quantized import Exact, Stored, is_quantised
from forerun.models.rope import rope_tables
from forerun.models.weights import Layer, Norm, Source, load_weights
from forerun.passes import Link, Pass, Steps
from forerun.types import Forward

BLOCK = 32
X, QKV, ATTENDED, HIDDEN, BRANCH, LOGITS = range(6)  # buffers
AT_ONCE = 1 << 16  # floats of a block of rows that are converted together, or one block
LARGE = 1 << 20  # bytes of a matrix whose temporaries are felt
ROOM = 64  # tokens that buffers have room for at first; they grow


class Packed:
    """A linear layer in the kernels' layout, in memory of its own."""

    _memory = 0

    def __init__(self, weight: Tensor | Exact | Kept, bias: Tensor | None, form: str, gated: bool) -> None:
        """weight [out, in]: floats, what `form` holds exactly, or a copy from the cache (may raise Broken). `gated`
        interleaves gate and up by 16 rows, so that one block holds both."""
        lib = native.loaded()
        outputs, inputs = weight.shape
        if gated:
            outputs, bias = -(-outputs // 32) * 32, None if bias is None else interleave(bias.float())
        padded = lib.forerun_padded_inputs(inputs)
        rows = -(-outputs // BLOCK) * BLOCK
        size = int(rows * padded * {"float32": 4, "bfloat16": 2, "int8": 1, "int4": 0.5}[form])
        self._lib, self._memory = lib, native.allocate(size)
        self.data = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self._memory))
        scales = {"int8": (rows, np.float32), "int4": (rows * padded // 32, np.uint16)}.get(form, (1, np.float32))
        self.scale = np.zeros(*scales)
        self.bias = np.zeros(rows, dtype=np.float32)
        if bias is not None:
            self.bias[:outputs] = bias.float().numpy()
        if isinstance(weight, Kept):
            weight.fill(self.data, self.scale)
        elif isinstance(weight, Exact):
            integers = (interleave(t) if gated else t for t in (weight.values, weight.scale))
            data, scale = lay_out(form, rows, padded, *integers)
            self.data[:], self.scale[:] = data.numpy(), scale.numpy().view(self.scale.dtype)
        else:
            self._pack(weight, form, gated, padded)
        self.form, self.bytes = form, size + (self.scale.nbytes if form in ("int8", "int4") else 0)
        self.matrix = CMatrix(
            self._memory, self.scale.ctypes.data, self.bias.ctypes.data if bias is not None else None,
            native.FORMATS[form], inputs, outputs, padded,
        )  # fmt: skip
        if size >= LARGE:
            native.give_back()

    def _pack(self, weight: Tensor, form: str, gated: bool, padded: int) -> None:
        """Round and lay out floats, some rows at a time: a float32 copy of a large matrix would be felt."""
        halves = weight.chunk(2) if gated else (weight,)
        rows, step = len(halves[0]), max(AT_ONCE // (4 * padded), 1) * BLOCK
        sizes = {"int8": 4, "int4": padded // 16}.get(form, 0)  # bytes of scales a row
        for at in range(0, rows, step):
            part = torch.cat([half[at : at + step] for half in halves]).float()
            floats, first = (interleave(part) if gated else part).contiguous(), at * len(halves)
            self._lib.forerun_pack(
                native.FORMATS[form], floats.data_ptr(), len(floats), weight.shape[1],
                self._memory + first * (len(self.data) // len(self.bias)), self.scale.ctypes.data + first * sizes,
            )  # fmt: skip

    def __del__(self) -> None:
        if self._memory:
            self._lib.forerun_release(self._memory)


def _pack(source: Source, bias: Tensor | None, form: str, keep: bool, gated: bool, cache: PackedCache) -> Packed:
    """A linear layer from the cache, or as it is stored where that is allowed and possible, or rounded to `form`."""
    kept = cache.find(source.name, source.shape)
    if kept is not None:
        with suppress(Broken):
            packed = Packed(kept, bias, kept.form, gated)
            cache.keep(source.name, kept.form, source.shape, (packed.data, packed.scale), new=False)
            return packed
    held = source.read()
    exact = held.exact() if isinstance(held, Stored) else None
    chosen = "int8" if source.name == "head" and form == "int4" else form
    if exact is not None and (keep or exact.form == form):
        packed = Packed(exact, bias, exact.form, gated)
    else:
        packed = Packed(held.dequantise() if isinstance(held, Stored) else held, bias, chosen, gated)
    if packed.form in ("int8", "int4"):
        cache.keep(source.name, packed.form, source.shape, (packed.data, packed.scale))
    return packed


def _fingerprint() -> str:
    """What the packing code makes of a fixed matrix: another layout or another rounding gives another one."""
    probe = (torch.arange(90 * 200) * 7919 % 1009 - 504).view(90, 200) / 300
    digest = hashlib.sha256()
    for form in ("int8", "int4"):
        packed = Packed(probe, None, form, gated=True)
        digest.update(packed.data.tobytes() + packed.scale.tobytes())
    return digest.hexdigest()


class NativeDecoder:
    """A loaded model as a program of native operations. CPU only; float32, bfloat16, int8 or int4 weights."""

    def __init__(self, config: ModelConfig, directory: Path, form: str, context: int, keep: bool = False) -> None:
        """`form` is float32, bfloat16, int8 or int4; in int4 the head stays int8. With `keep`, matrices that are stored
        in numbers that int8 or int4 hold exactly stay what they are. `context`: positions to prepare."""
        self.config, self.context, self.form = config, context, form
        self.device = torch.device("cpu")
        self.dtype = torch.float32 if form == "float32" else torch.bfloat16  # of the embedding and the KV cache
        cache = PackedCache(None)
        if form in ("int8", "int4") or (keep and is_quantised(config.raw)):
            cache = open_cache(directory, (form, str(keep), native.instructions(), _fingerprint()))

        def make(part: str, source: Source, bias: Tensor | None) -> Packed:
            return _pack(source, bias, form, keep, gated=part == "up" and config.gated, cache=cache)

        self.weights = load_weights(config, directory, self.dtype, self.device, make)
        cache.finish()
        tables = [rope_tables(config, rope, context, torch.float32) for rope in config.ropes]
        self.ropes = [(cos.contiguous(), sin.contiguous()) for cos, sin in tables]
        self._keep: list[Any] = []  # what the program points to
        self._recorded: dict[tuple[int, ...], Recorded] = {}

    @property
    def weight_bytes(self) -> int:
        """Bytes one pass reads: every weight once, scales included."""
        return sum(m.bytes for m in self._matrices)

    @property
    def precision(self) -> str:
        """In which numbers its matrices are, and whose kernels multiply them."""
        return f"{' and '.join(dict.fromkeys(m.form for m in self._matrices))}, native {native.instructions()}"

    @property
    def _matrices(self) -> list[Any]:
        w = self.weights
        return [*(m for layer in w.layers for m in (layer.qkv, layer.out, layer.up, layer.down)), w.head]

    def forward(self, segments: Sequence[Segment], cache: KVCache, boundaries: Sequence[int] = ()) -> Forward:
        """One pass over segments whose slots have room; logits [M, V] float32 of the positions they want, and hidden
        states [T, H] float32 of all tokens at `boundaries` (see `Forward`)."""
        key = tuple(sorted(set(boundaries)))
        if key not in self._recorded:
            self._recorded[key] = self._record(key)
        recorded, batch = self._recorded[key], Pass(segments, cache)
        pointers, scratch = recorded.buffers.fit(batch.tokens, batch.wanted)
        native.loaded().forerun_run(recorded.program, batch.fill(pointers, scratch, cache))
        logits, *saved = recorded.buffers.arrays[LOGITS:]
        features = {b: torch.from_numpy(x[: batch.tokens].copy()) for b, x in zip(key, saved, strict=True)}
        return Forward(torch.from_numpy(logits[: batch.wanted].copy()), features)

    def chain(self, links: Sequence[Link], cache: KVCache, vocab: int) -> list[list[int]]:
        """Say token after token behind each link, as many as it has keys, in one native call; the slots have room.
        Tokens from `vocab` up are never said."""
        if () not in self._recorded:
            self._recorded[()] = self._record(())
        return self._recorded[()].chain(links, cache, min(vocab, self.config.vocab))

    def _widths(self) -> list[int]:
        c = self.config
        heads = (c.heads + 2 * c.kv_heads) * c.head_dim
        inner = -(-c.intermediate // 16) * 16
        return [c.hidden, heads, c.heads * c.head_dim, inner, c.hidden, c.vocab]

    def _record(self, boundaries: tuple[int, ...]) -> Recorded:
        """The decoder, operation by operation; hidden states at `boundaries` are saved on the way."""
        c, w = self.config, self.weights
        saves = {b: COp(kind=native.SAVE, input=X, output=LOGITS + 1 + i) for i, b in enumerate(boundaries)}
        table = self._own(w.embed)
        ops = [
            COp(
                kind=native.EMBED, output=X, table=table, scale=c.embed_scale,
                positions=self._own(w.positions.float()) if w.positions is not None else None,
                matrix=CMatrix(inputs=c.hidden, format=0 if self.dtype == torch.float32 else 1),
            )
        ]  # fmt: skip
        for i, layer in enumerate(w.layers):
            ops += [saves[i]] if i in saves else []
            ops += [
                self._linear(layer.qkv, X, QKV, layer.attention_norm),
                self._rotate(i, layer),
                COp(
                    kind=native.ATTEND, input=QKV, output=ATTENDED, layer=i, scale=c.attention_scale,
                    softcap=c.attention_softcap or 0, window=c.windows[i] or 0,
                ),
                self._branch(layer.out, ATTENDED, layer.attention_out_norm),
                self._linear(
                    layer.up, X, HIDDEN, layer.mlp_norm, gated=c.gated, activation=native.ACTIVATIONS[c.activation]
                ),
                self._branch(layer.down, HIDDEN, layer.mlp_out_norm),
            ]  # fmt: skip
        ops += [saves[c.layers]] if c.layers in saves else []
        ops.append(self._linear(w.head, X, LOGITS, w.norm, wanted=1, softcap=c.logit_softcap or 0))
        return Recorded(c, ops, np.array(self._widths() + [c.hidden] * len(boundaries), dtype=np.int32))

    def _linear(self, packed: Any, source: int, to: int, norm: Norm | None, **options: Any) -> COp:
        return COp(kind=native.LINEAR, input=source, output=to, norm=self._norm(norm), matrix=packed.matrix, **options)

    def _branch(self, packed: Any, source: int, after: Norm | None) -> COp:
        """The end of a branch: added to the residual stream, after a norm of its own where the family has one."""
        if after is None:
            return self._linear(packed, source, X, None, residual=1)
        return self._linear(packed, source, BRANCH, None, after=self._norm(after), layer=X)

    def _rotate(self, i: int, layer: Layer) -> COp:
        op = COp(
            kind=native.ROTATE, input=QKV, layer=i, norm=self._norm(layer.q_norm), key_norm=self._norm(layer.k_norm)
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
        return CNorm(self._own(norm.weight), bias, self.config.norm_eps, native.NORMS[self.config.norm])

    def _own(self, tensor: Tensor) -> int:
        tensor = tensor.contiguous()
        self._keep.append(tensor)
        return tensor.data_ptr()


class Recorded:
    """A program and its buffers."""

    def __init__(self, c: ModelConfig, ops: list[COp], widths: np.ndarray) -> None:
        self.ops, self.widths = (COp * len(ops))(*ops), widths  # kept: the program points to both
        self.program = CProgram(
            ops=self.ops, count=len(ops), buffers=len(widths), heads=c.heads, kv_heads=c.kv_heads,
            head_dim=c.head_dim, layers=c.layers, widths=widths.ctypes.data,
        )  # fmt: skip
        row_bytes = native.loaded().forerun_scratch_row_bytes
        self.buffers = _Buffers(widths, max(int(row_bytes(int(w))) for w in widths[:LOGITS]))

    def chain(
        self,
        links: Sequence[Link],
        cache: KVCache,
        vocab: int,
        ids: np.ndarray | None = None,
        given: Mapping[int, np.ndarray] = MappingProxyType({}),
    ) -> list[list[int]]:
        """Say token after token behind each link, below `vocab`: the program has a pass over one token a link and its
        logits. `ids` [Vd] int64 are the tokens that these are of, if not the first. `given`: what buffers begin with,
        a row for each link."""
        steps = Steps(links, cache)
        pointers, scratch = self.buffers.fit(len(links), len(links))
        for buffer, rows in given.items():
            self.buffers.arrays[buffer][: len(links)] = rows[steps.order]
        chain = CChain(
            levels=steps.levels, rows=len(links), logits=LOGITS, vocab=vocab, active=address(steps.active),
            temperature=address(steps.temperature), keys=address(steps.keys), tokens=address(steps.drafted),
            ids=None if ids is None else ids.ctypes.data, said=0 if ids is None else len(ids),
        )  # fmt: skip
        native.loaded().forerun_chain(self.program, steps.fill(pointers, scratch, cache), chain)
        return steps.said()


class _Buffers:
    """A program's buffers, grown when a pass needs more rows. All but LOGITS have a row for each token."""

    def __init__(self, widths: np.ndarray, scratch: int) -> None:
        self.widths, self.scratch_row, self.rows, self.wanted = widths, scratch, 0, 0

    def fit(self, rows: int, wanted: int) -> tuple[int, int]:
        """(pointers to the buffers, pointer to scratch) with room for so many rows, and wanted rows of logits."""
        if rows > self.rows or wanted > self.wanted:
            self.rows, self.wanted = max(rows, self.rows, ROOM), max(wanted, self.wanted, ROOM)
            counts = [self.wanted if i == LOGITS else self.rows for i in range(len(self.widths))]
            self.arrays = [np.zeros((n, w), np.float32) for n, w in zip(counts, self.widths, strict=True)]
            self.pointers = array("Q", [a.ctypes.data for a in self.arrays])
            self.scratch = np.zeros(self.rows * self.scratch_row + 64, dtype=np.uint8)
            self.at = address(self.pointers), -(-self.scratch.ctypes.data // 64) * 64
        return self.at
