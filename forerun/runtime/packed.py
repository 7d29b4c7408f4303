"""Packed matrices: weights in the memory layout of the native kernels.

A linear layer is one `PackedMatrix`, or a `MixedMatrix` if the rows of a GGUF file have several
types. `pack` chooses the format: that of the file if a native format holds the same numbers,
rounded otherwise."""

from __future__ import annotations

import ctypes
import hashlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import pad

from forerun.hardware import trim_heap
from forerun.kernels import native
from forerun.kernels.native import BLOCK, CMatrix, COp
from forerun.models.experts import StackedRows
from forerun.models.gguf.blocks import FLOATS, FORMS, TYPE_IDS, Blocks, floats, not_finite
from forerun.models.gguf.container import open_gguf
from forerun.models.packed_cache import BrokenCacheError, CachedMatrix, PackedCache
from forerun.models.parameters import Matrix, Source
from forerun.models.quantized import LosslessMatrix, QuantizedMatrix

GROUP4 = 32  # inputs that share a scale in int4
ROUNDED = ("int8", "int4")  # formats that floats are rounded to
PACK_FLOATS = 1 << 16  # floats converted at a time, unless one block of rows has more
REPACK_BYTES = 1 << 21  # bytes of a file repacked at a time
LARGE = 1 << 20  # bytes of a matrix whose temporaries are worth returning to the system
SCALE_DTYPES = {"int8": np.float32, "int4": np.uint16}  # scales of other formats are opaque


# ---------------------------------------------------------------- memory layout
# `pack` of kernels.cpp without its rounding. Only `layout_int8` and `layout_int4` know the layout
# in Python; change them together with `pack`. `tests/models/test_quantized.py` compares all bytes.


def layout_int8(values: Tensor) -> Tensor:
    """Lay out int8 [N, K] (N a multiple of 32, K of 64) in the INT8 format. -> uint8 [N * K]

    Each block of 32 outputs holds four inputs of output 0, the same four of output 1, and so on;
    128 is added to every value."""
    blocks, inputs = len(values) // BLOCK, values.shape[1]
    fours = (values.view(torch.uint8) ^ 128).view(torch.int32).view(blocks, BLOCK, inputs // 4)
    return fours.transpose(1, 2).contiguous().view(torch.uint8).flatten()


def layout_int4(values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Lay out int8 [N, K] from -8 to 7 and scales [N, K / 32] in the INT4 format (N a multiple of
    32, K of 64). -> uint8 [N * K / 2], scales [N * K / 32]

    A byte holds input i in its low half and input i + 4 in its high half, 8 added to both; each
    block of 32 outputs holds four such bytes of output 0, of output 1, and so on. Scales are
    ordered by block, group and output."""
    blocks, inputs = len(values) // BLOCK, values.shape[1]
    halves = (values + 8).view(torch.int32).view(blocks, BLOCK, inputs // 8, 2)
    fours = halves[..., 0] | halves[..., 1] << 4
    groups = scales.view(blocks, BLOCK, inputs // GROUP4)
    data = fours.transpose(1, 2).contiguous().view(torch.uint8).flatten()
    return data, groups.transpose(1, 2).flatten()


def lay_out(
    form: str, rows: int, padded: int, values: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Pad integers [out, in] and their scales to `rows` x `padded`, and lay them out.

    Scales are [out] float32 for int8, [out, groups of 32] float16 for int4."""
    more = rows - len(values)
    values = _padded(values, 0, padded - values.shape[1], 0, more)
    if form == "int8":
        return layout_int8(values), _padded(scale, 0, more)
    return layout_int4(values, _padded(scale, 0, padded // GROUP4 - scale.shape[1], 0, more))


def interleave(stacked: Tensor) -> Tensor:
    """Reorder rows [gate; up] into blocks of 16 gates and their 16 ups, padded with zeros."""
    gate, up = stacked.chunk(2)
    short = [0, 0] * (gate.ndim - 1) + [0, -len(gate) % 16]
    gate, up = (_padded(t, *short).view(-1, 16, *t.shape[1:]) for t in (gate, up))
    return torch.stack((gate, up), dim=1).flatten(0, 2)


def _padded(t: Tensor, *widths: int) -> Tensor:
    """Pad with zeros and make contiguous, without a copy if nothing changes."""
    return pad(t, widths) if any(widths) else t.contiguous()


# ---------------------------------------------------------------- matrices


class PackedMatrix:
    """A linear layer in the native layout, in memory of its own.

    Attributes:
        form: the format, a key of `native.FORMATS`.
        bytes: size of weights and scales.
        matrix: the C structure.
    """

    _memory = 0

    def __init__(
        self,
        weight: Tensor | LosslessMatrix | CachedMatrix | Blocks | StackedRows,
        bias: Tensor | None,
        form: str,
        gated: bool,
    ) -> None:
        """Pack weight [out, in]: floats, which are rounded, or numbers that `form` holds exactly.

        gated: interleave gate and up by 16 rows, so that one block holds both.
        Raises LoadError for a broken model file, BrokenCacheError for a broken cache file."""
        lib = native.loaded()
        outputs, inputs = weight.shape
        if gated:
            outputs = -(-outputs // 32) * 32
            bias = None if bias is None else interleave(bias.float())
        padded = int(lib.forerun_padded_inputs(inputs))
        self.rows = -(-outputs // BLOCK) * BLOCK
        size = int(lib.forerun_bytes(native.FORMATS[form], self.rows, padded))
        scales = int(lib.forerun_scales(native.FORMATS[form], self.rows, padded))
        self._lib, self._memory = lib, native.allocate(size)
        self.data = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self._memory))
        self.scale = np.zeros(max(scales, 4), np.uint8).view(SCALE_DTYPES.get(form, np.uint8))
        self.bias = None if bias is None else np.zeros(self.rows, dtype=np.float32)
        if bias is not None and self.bias is not None:
            self.bias[:outputs] = bias.float().numpy()
        self.form = form
        self.bytes = size + scales
        self.matrix = CMatrix(
            weight=self._memory,
            scale=self.scale.ctypes.data,
            bias=None if self.bias is None else self.bias.ctypes.data,
            format=native.FORMATS[form],
            inputs=inputs,
            outputs=outputs,
            padded=padded,
        )
        self._fill(weight, gated, padded)
        if size >= LARGE:
            trim_heap()

    def _fill(
        self,
        weight: Tensor | LosslessMatrix | CachedMatrix | Blocks | StackedRows,
        gated: bool,
        padded: int,
    ) -> None:
        if isinstance(weight, CachedMatrix):
            weight.read_into(self.data, self.scale)
        elif isinstance(weight, LosslessMatrix):
            integers = (interleave(t) if gated else t for t in (weight.values, weight.scale))
            data, scale = lay_out(self.form, self.rows, padded, *integers)
            self.data[:] = data.numpy()
            self.scale[:] = scale.numpy().view(self.scale.dtype)
        elif isinstance(weight, Tensor):
            tensor = weight
            self._pack(weight.shape, lambda at, n: tensor[at : at + n], gated, padded)
        elif isinstance(weight, StackedRows):
            self._pack(weight.shape, weight.read, gated, padded)
        elif weight.kind in FLOATS:
            blocks = weight
            read = lambda at, n: floats(blocks.kind, blocks.read(at, n))  # noqa: E731
            self._pack(weight.shape, read, gated, padded)
        else:
            self._repack(weight, gated)

    def _pack(
        self, shape: Sequence[int], read: Callable[[int, int], Tensor], gated: bool, padded: int
    ) -> None:
        """Round and lay out floats, some rows at a time to save a float32 copy of the matrix.

        read: returns rows [count, in] from (first, count)."""
        halves = 2 if gated else 1
        rows, step = shape[0] // halves, max(PACK_FLOATS // (4 * padded), 1) * BLOCK
        row_bytes, scale_bytes = len(self.data) // self.rows, self.scale.nbytes // self.rows
        for at in range(0, rows, step):
            count = min(step, rows - at)
            part = torch.cat([read(half * rows + at, count) for half in range(halves)]).float()
            part = (interleave(part) if gated else part).contiguous()
            first = at * halves
            self._lib.forerun_pack(
                native.FORMATS[self.form],
                part.data_ptr(),
                len(part),
                shape[1],
                self._memory + first * row_bytes,
                self.scale.ctypes.data + first * scale_bytes,
            )

    def _repack(self, blocks: Blocks, gated: bool) -> None:
        """Lay out the integers and scales of GGUF blocks as they are, on all threads."""
        halves = 2 if gated else 1
        rows, stored_bytes = blocks.shape[0] // halves, blocks.pieces[0].entry.row_bytes
        step = max(REPACK_BYTES // stored_bytes // BLOCK, 1) * BLOCK // halves
        row_bytes = len(self.data) // self.rows
        scale_bytes = self.scale.nbytes // self.rows

        def repack(at: int) -> None:
            count = min(step, rows - at)
            parts = [blocks.read(half * rows + at, count) for half in range(halves)]
            found = [_row_addresses(part, 16 if gated else 1) for part in parts]
            addresses = np.ascontiguousarray(np.stack(found, axis=1)).ravel()
            first = at * halves
            is_finite = self._lib.forerun_repack(
                TYPE_IDS[blocks.kind],
                native.FORMATS[self.form],
                addresses.ctypes.data,
                len(addresses),
                blocks.shape[1],
                self._memory + first * row_bytes,
                self.scale.ctypes.data + first * scale_bytes,
            )
            if not is_finite:
                raise not_finite(blocks.pieces[0].entry)

        starts = range(0, rows, step)
        if len(starts) == 1:
            repack(0)
        else:
            with ThreadPoolExecutor(native.threads()) as pool:
                list(pool.map(repack, starts))

    def __getitem__(self, rows: Tensor) -> Tensor:
        """Dequantize rows of a matrix that is not interleaved. int64 [...] -> float32 [..., in]"""
        index = rows.to(torch.int64).contiguous()
        out = torch.empty(*index.shape, self.matrix.inputs)
        matrix = ctypes.byref(self.matrix)
        self._lib.forerun_unpack(matrix, index.data_ptr(), index.numel(), out.data_ptr())
        return out

    def __del__(self) -> None:
        if self._memory:
            self._lib.forerun_release(self._memory)


def _row_addresses(rows: np.ndarray, multiple: int) -> np.ndarray:
    """Return the addresses of rows of bytes, padded with nulls. -> uint64 [n, multiple]"""
    found = np.zeros(-(-len(rows) // multiple) * multiple, np.uint64)
    offsets = np.arange(len(rows), dtype=np.uint64) * np.uint64(rows.strides[0])
    found[: len(rows)] = rows.ctypes.data + offsets
    return found.reshape(-1, multiple)


@dataclass(frozen=True, slots=True)
class MatrixPart:
    """One of the matrices that make up a linear layer.

    Attributes:
        column: where its outputs begin in a row.
        is_gate: it computes the gate of the next part.
        is_gated: it is multiplied by the gate.
    """

    packed: PackedMatrix
    column: int = 0
    is_gate: bool = False
    is_gated: bool = False


class MixedMatrix:
    """A linear layer whose rows are stored in several types, with a matrix for each."""

    def __init__(self, parts: Sequence[MatrixPart]) -> None:
        self.parts = tuple(parts)


def parts_of(layer: PackedMatrix | MixedMatrix) -> tuple[MatrixPart, ...]:
    """Return the matrices of a linear layer."""
    return layer.parts if isinstance(layer, MixedMatrix) else (MatrixPart(layer),)


def all_packed(layers: Iterable[PackedMatrix | MixedMatrix]) -> list[PackedMatrix]:
    """Return every matrix of some linear layers."""
    return [part.packed for layer in layers for part in parts_of(layer)]


def pack(
    source: Source, bias: Tensor | None, form: str, keep: bool, gated: bool, cache: PackedCache
) -> PackedMatrix | MixedMatrix:
    """Pack a linear layer: from the cache, as it is stored, or rounded to `form`.

    keep: leave the numbers as they are stored if a native format holds them exactly."""
    cached = cache.find(source.name, source.shape)
    if cached is not None:
        try:
            packed = PackedMatrix(cached, bias, cached.form, gated)
        except BrokenCacheError:
            cache.report_broken()
        else:
            arrays = (packed.data, packed.scale)
            cache.add(source.name, cached.form, source.shape, arrays, new=False)
            return packed
    held = source.read()
    if is_kept(held, form, keep):
        return pack_blocks(held, bias, gated)
    lossless = held.lossless() if isinstance(held, QuantizedMatrix) else None
    target = "int8" if source.name == "head" and form == "int4" else form
    if lossless is not None and (keep or lossless.form == form):
        packed = PackedMatrix(lossless, bias, lossless.form, gated)
    elif target == "int4" and isinstance(held, Blocks) and _is_all_q4_0(held):
        packed = PackedMatrix(held, bias, target, gated)
    else:
        values = held if isinstance(held, Tensor | StackedRows) else held.dequantize()
        packed = PackedMatrix(values, bias, target, gated)
    if packed.form in ROUNDED:
        cache.add(source.name, packed.form, source.shape, (packed.data, packed.scale))
    return packed


def is_kept(matrix: Matrix, form: str, keep: bool) -> TypeGuard[Blocks]:
    """Return True if a matrix of a GGUF file stays in its own numbers; floats may be rounded."""
    return keep and isinstance(matrix, Blocks) and not (form in ROUNDED and matrix.kind in FLOATS)


def _is_all_q4_0(blocks: Blocks) -> bool:
    return {piece.entry.kind for piece in blocks.pieces} == {"Q4_0"}


def pack_blocks(blocks: Blocks, bias: Tensor | None, gated: bool) -> PackedMatrix | MixedMatrix:
    """Pack a linear layer in the numbers of its file, or in bfloat16 if no native format holds
    them."""
    runs = blocks.by_type()
    if len(runs) == 1:
        return _pack_as_stored(blocks, bias, gated)
    parts, first = [], 0
    for i, run in enumerate(runs):
        rows = run.shape[0]
        own_bias = None if bias is None else bias[first : first + rows]
        packed = _pack_as_stored(run, own_bias, gated=False)
        column = 0 if gated else first
        parts.append(MatrixPart(packed, column, gated and i == 0, gated and i == 1))
        first += rows
    return MixedMatrix(parts)


def _pack_as_stored(blocks: Blocks, bias: Tensor | None, gated: bool) -> PackedMatrix:
    if blocks.form is None:
        return PackedMatrix(blocks.dequantize(), bias, "bfloat16", gated)
    return PackedMatrix(blocks, bias, blocks.form, gated)


def note_rounded_types(path: Path) -> None:
    """Print a note if a GGUF file has matrices that no native format holds."""
    tensors = open_gguf(path).tensors.values()
    kinds = Counter(entry.kind for entry in tensors if len(entry.shape) >= 2)
    rounded = [f"{count} in {kind}" for kind, count in kinds.items() if kind not in FORMS]
    if rounded:
        which = ", ".join(rounded)
        print(
            f"note: matrices that run in bfloat16, since no native format holds them: {which}",
            file=sys.stderr,
        )


def fingerprint() -> str:
    """Return a digest of a packed constant matrix, which changes with layout and rounding."""
    probe = (torch.arange(90 * 200) * 7919 % 1009 - 504).view(90, 200) / 300
    digest = hashlib.sha256()
    for form in ROUNDED:
        packed = PackedMatrix(probe, None, form, gated=True)
        digest.update(packed.data.tobytes() + packed.scale.tobytes())
    return digest.hexdigest()


class Linear:
    """A linear layer: x [T, in] times weight [out, in] transposed, plus bias.

    On the native kernels the result of a row does not depend on other rows, to the last bit."""

    def __init__(self, weight: Tensor, form: str | None, bias: Tensor | None = None) -> None:
        """Pack natively as float32, bfloat16, int8 or int4; None uses torch in float32."""
        bias = None if bias is None else bias.detach().float()
        self.outputs, self.form = weight.shape[0], form
        if form is None:
            self.weight, self.bias = weight.float(), bias
        else:
            self._use(PackedMatrix(weight, bias, form, gated=False))

    @classmethod
    def of(cls, packed: PackedMatrix) -> Linear:
        """Wrap a matrix that is packed already; its memory is shared."""
        linear = cls.__new__(cls)
        linear.outputs, linear.form = packed.matrix.outputs, packed.form
        linear._use(packed)
        return linear

    def _use(self, packed: PackedMatrix) -> None:
        self.packed, inputs = packed, packed.matrix.inputs
        self._widths = np.array([inputs, self.outputs], dtype=np.int32)
        self._op = (COp * 1)(COp(kind=native.LINEAR, input=0, output=1, matrix=packed.matrix))
        widths = self._widths.ctypes.data
        self._program = native.CProgram(ops=self._op, count=1, buffers=2, widths=widths)
        self._row_bytes = int(native.loaded().forerun_scratch_row_bytes(inputs))

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the layer. float32 [T, in] -> float32 [T, out]"""
        if self.form is None:
            return F.linear(x.float(), self.weight, self.bias)
        x, out = x.float().contiguous(), torch.empty(len(x), self.outputs)
        buffers = np.array([x.data_ptr(), out.data_ptr()], dtype=np.uint64)
        scratch = np.empty(len(x) * self._row_bytes + 64, np.uint8)
        aligned = -(-scratch.ctypes.data // 64) * 64
        batch = native.CBatch(tokens=len(x), buffers=buffers.ctypes.data, scratch=aligned)
        native.loaded().forerun_run(self._program, batch)
        return out
