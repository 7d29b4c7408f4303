"""Matrices in the native kernels' layout, rounded to a format or the very numbers that a file holds; linear layers."""

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

from forerun.kernels import native
from forerun.kernels.native import CMatrix, COp
from forerun.kernels.native.layout import interleave, lay_out
from forerun.machine import give_back
from forerun.models.gguf.blocks import FLOATS, FORMS, TYPE_IDS, Blocks, floats, no_numbers
from forerun.models.gguf.container import open_gguf
from forerun.models.packed_cache import Broken, Kept, PackedCache
from forerun.models.quantized import Exact, Stored
from forerun.models.weights import Matrix, Source

BLOCK = 32
AT_ONCE = 1 << 16  # floats of a block of rows that are converted together, or one block
LARGE = 1 << 20  # bytes of a matrix whose temporaries are felt
PART = 1 << 21  # bytes of a file that are repacked together
ROUNDED = ("int8", "int4")


class Packed:
    """A linear layer in the kernels' layout, in memory of its own."""

    _memory = 0

    def __init__(self, weight: Tensor | Exact | Kept | Blocks, bias: Tensor | None, form: str, gated: bool) -> None:
        """weight [out, in]: floats, what `form` holds exactly, or a copy from the cache (may raise Broken). `gated`
        interleaves gate and up by 16 rows, so that one block holds both. Raises LoadError for a broken file."""
        lib = native.loaded()
        outputs, inputs = weight.shape
        if gated:
            outputs, bias = -(-outputs // 32) * 32, None if bias is None else interleave(bias.float())
        padded = int(lib.forerun_padded_inputs(inputs))
        rows = -(-outputs // BLOCK) * BLOCK
        size, scales = (int(f(native.FORMATS[form], rows, padded)) for f in (lib.forerun_bytes, lib.forerun_scales))
        self._lib, self._memory = lib, native.allocate(size)
        self.data = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self._memory))
        self.scale = np.zeros(max(scales, 4), np.uint8).view(SCALES.get(form, np.uint8))
        self.rows, self.bias = rows, None if bias is None else np.zeros(rows, dtype=np.float32)
        if bias is not None and self.bias is not None:
            self.bias[:outputs] = bias.float().numpy()
        self.form, self.bytes = form, size + scales
        self.matrix = CMatrix(
            self._memory, self.scale.ctypes.data, None if self.bias is None else self.bias.ctypes.data,
            native.FORMATS[form], inputs, outputs, padded,
        )  # fmt: skip
        self._fill(weight, gated, padded)
        if size >= LARGE:
            give_back()

    def _fill(self, weight: Tensor | Exact | Kept | Blocks, gated: bool, padded: int) -> None:
        if isinstance(weight, Kept):
            weight.fill(self.data, self.scale)
        elif isinstance(weight, Exact):
            integers = (interleave(t) if gated else t for t in (weight.values, weight.scale))
            data, scale = lay_out(self.form, self.rows, padded, *integers)
            self.data[:], self.scale[:] = data.numpy(), scale.numpy().view(self.scale.dtype)
        elif isinstance(weight, Tensor):
            self._pack(weight.shape, lambda at, count: weight[at : at + count], gated, padded)
        elif weight.kind in FLOATS:
            self._pack(weight.shape, lambda at, count: floats(weight.kind, weight.read(at, count)), gated, padded)
        else:
            self._repack(weight, gated)

    def _pack(self, shape: Sequence[int], read: Callable[[int, int], Tensor], gated: bool, padded: int) -> None:
        """Round and lay out floats, some rows at a time: a float32 copy of a large matrix would be felt."""
        halves = 2 if gated else 1
        rows, step = shape[0] // halves, max(AT_ONCE // (4 * padded), 1) * BLOCK
        each, sizes = len(self.data) // self.rows, self.scale.nbytes // self.rows
        for at in range(0, rows, step):
            part = torch.cat([read(half * rows + at, min(step, rows - at)) for half in range(halves)]).float()
            given, first = (interleave(part) if gated else part).contiguous(), at * halves
            self._lib.forerun_pack(
                native.FORMATS[self.form], given.data_ptr(), len(given), shape[1],
                self._memory + first * each, self.scale.ctypes.data + first * sizes,
            )  # fmt: skip

    def _repack(self, blocks: Blocks, gated: bool) -> None:
        """Lay out the integers of a file and their scales as they are, on as many threads as passes have."""
        halves = 2 if gated else 1
        rows, each = blocks.shape[0] // halves, blocks.pieces[0].entry.row_bytes
        step = max(PART // each // BLOCK, 1) * BLOCK // halves
        data, scale = (len(a.view(np.uint8)) // self.rows for a in (self.data, self.scale))

        def run(at: int) -> None:
            parts = [blocks.read(half * rows + at, min(step, rows - at)) for half in range(halves)]
            given = [_addresses(part, 16 if gated else 1) for part in parts]
            taken = np.ascontiguousarray(np.stack(given, axis=1)).ravel() if gated else given[0].ravel()
            if not self._lib.forerun_repack(
                TYPE_IDS[blocks.kind], native.FORMATS[self.form], taken.ctypes.data, len(taken), blocks.shape[1],
                self._memory + at * halves * data, self.scale.ctypes.data + at * halves * scale,
            ):  # fmt: skip
                raise no_numbers(blocks.pieces[0].entry)

        starts = range(0, rows, step)
        if len(starts) == 1:
            return run(0)
        with ThreadPoolExecutor(native.threads()) as pool:
            list(pool.map(run, starts))
        return None

    def __getitem__(self, rows: Tensor) -> Tensor:
        """Rows as floats, of a matrix that is not interleaved. rows [...] int64 -> float32 [..., in]"""
        index = rows.to(torch.int64).contiguous()
        out = torch.empty(*index.shape, self.matrix.inputs)
        self._lib.forerun_unpack(ctypes.byref(self.matrix), index.data_ptr(), index.numel(), out.data_ptr())
        return out

    def __del__(self) -> None:
        if self._memory:
            self._lib.forerun_release(self._memory)


SCALES = {"int8": np.float32, "int4": np.uint16}  # others are of more than one kind


def _addresses(rows: np.ndarray, multiple: int) -> np.ndarray:
    """Where rows of bytes begin, filled up with nulls. -> uint64 [n, multiple]"""
    found = np.zeros(-(-len(rows) // multiple) * multiple, np.uint64)
    found[: len(rows)] = rows.ctypes.data + np.arange(len(rows), dtype=np.uint64) * np.uint64(rows.strides[0])
    return found.reshape(-1, multiple)


@dataclass(frozen=True, slots=True)
class Part:
    """One of the matrices that a linear layer is made of: where in a row its outputs begin, and whether it is what
    lets the next one through."""

    packed: Packed
    column: int = 0
    gate: bool = False
    gated: bool = False


class Mixed:
    """A linear layer whose rows are stored in several types: a matrix for each."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)


def parts_of(layer: Packed | Mixed) -> tuple[Part, ...]:
    """The matrices of a linear layer."""
    return layer.parts if isinstance(layer, Mixed) else (Part(layer),)


def pack(source: Source, bias: Tensor | None, form: str, keep: bool, gated: bool, cache: PackedCache) -> Packed | Mixed:
    """A linear layer from the cache, or as it is stored where that is allowed and possible, or rounded to `form`."""
    kept = cache.find(source.name, source.shape)
    if kept is not None:
        try:
            packed = Packed(kept, bias, kept.form, gated)
        except Broken:
            cache.tell_broken()
        else:
            cache.keep(source.name, kept.form, source.shape, (packed.data, packed.scale), new=False)
            return packed
    held = source.read()
    if stays(held, form, keep):
        return pack_blocks(held, bias, gated)
    exact = held.exact() if isinstance(held, Stored) else None
    chosen = "int8" if source.name == "head" and form == "int4" else form
    if exact is not None and (keep or exact.form == form):
        packed = Packed(exact, bias, exact.form, gated)
    elif isinstance(held, Blocks) and held.kind == "Q4_0" == held.alike()[-1].kind and chosen == "int4":
        packed = Packed(held, bias, chosen, gated)
    else:
        packed = Packed(held if isinstance(held, Tensor) else held.dequantise(), bias, chosen, gated)
    if packed.form in ROUNDED:
        cache.keep(source.name, packed.form, source.shape, (packed.data, packed.scale))
    return packed


def stays(held: Matrix, form: str, keep: bool) -> TypeGuard[Blocks]:
    """Whether a matrix of a GGUF file is left in its numbers: where it may be, unless floats are to be rounded."""
    return keep and isinstance(held, Blocks) and not (form in ROUNDED and held.kind in FLOATS)


def pack_blocks(blocks: Blocks, bias: Tensor | None, gated: bool) -> Packed | Mixed:
    """A linear layer in the numbers of its file; in bfloat16 where no native format holds them."""
    same = blocks.alike()
    if len(same) == 1:
        return _as_stored(blocks, bias, gated)
    made, column = [], 0
    for i, part in enumerate(same):
        rows = part.shape[0]
        own = None if bias is None else bias[column : column + rows]
        made.append(Part(_as_stored(part, own, False), 0 if gated else column, gated and i == 0, gated and i == 1))
        column += rows
    return Mixed(made)


def _as_stored(blocks: Blocks, bias: Tensor | None, gated: bool) -> Packed:
    form = blocks.form
    return Packed(blocks, bias, form, gated) if form else Packed(blocks.dequantise(), bias, "bfloat16", gated)


def say_what_is_rounded(path: Path) -> None:
    """One line on stderr if a GGUF file has types that no native format holds."""
    kinds = Counter(entry.kind for entry in open_gguf(path).tensors.values() if len(entry.shape) == 2)
    rounded = [f"{count} in {kind}" for kind, count in kinds.items() if kind not in FORMS]
    if rounded:
        print(
            f"note: matrices that run in bfloat16, since no native format holds them: {', '.join(rounded)}",
            file=sys.stderr,
        )


def embed_op(table: Tensor | Packed, output: int, scale: float, positions: int | None = None) -> COp:
    """The operation that writes rows of an embedding to a buffer; a dense one [V, H] is float32 or bfloat16."""
    if isinstance(table, Packed):
        return COp(kind=native.EMBED, output=output, scale=scale, positions=positions, matrix=table.matrix)
    return COp(
        kind=native.EMBED, output=output, scale=scale, positions=positions, table=table.data_ptr(),
        matrix=CMatrix(inputs=table.shape[1], format=0 if table.dtype == torch.float32 else 1),
    )  # fmt: skip


def fingerprint() -> str:
    """What the packing code makes of a fixed matrix: another layout or another rounding gives another one."""
    probe = (torch.arange(90 * 200) * 7919 % 1009 - 504).view(90, 200) / 300
    digest = hashlib.sha256()
    for form in ROUNDED:
        packed = Packed(probe, None, form, gated=True)
        digest.update(packed.data.tobytes() + packed.scale.tobytes())
    return digest.hexdigest()


def all_packed(layers: Iterable[Packed | Mixed]) -> list[Packed]:
    """Every matrix of some linear layers."""
    return [part.packed for layer in layers for part in parts_of(layer)]


class Linear:
    """x [T, in] times weight [out, in] transposed; on the native kernels no row depends on another, to the last bit."""

    def __init__(self, weight: Tensor, form: str | None, bias: Tensor | None = None) -> None:
        """`form` is float32, bfloat16, int8 or int4 on the native kernels; None computes on torch in float32. `bias`
        [out] is added."""
        bias = None if bias is None else bias.detach().float()
        self.outputs, self.form = weight.shape[0], form
        if form is None:
            self.weight, self.bias = weight.float(), bias
        else:
            self._multiply_with(Packed(weight, bias, form, gated=False))

    @classmethod
    def of(cls, packed: Packed) -> Linear:
        """A layer that is packed already; its memory is shared."""
        linear = cls.__new__(cls)
        linear.outputs, linear.form = packed.matrix.outputs, packed.form
        linear._multiply_with(packed)
        return linear

    def _multiply_with(self, packed: Packed) -> None:
        self.packed, inputs = packed, packed.matrix.inputs
        self._widths = np.array([inputs, self.outputs], dtype=np.int32)
        self._op = (COp * 1)(COp(kind=native.LINEAR, input=0, output=1, matrix=packed.matrix))
        self._program = native.CProgram(ops=self._op, count=1, buffers=2, widths=self._widths.ctypes.data)
        self._row_bytes = int(native.loaded().forerun_scratch_row_bytes(inputs))

    def __call__(self, x: Tensor) -> Tensor:
        """float32 [T, in] -> float32 [T, out]"""
        if self.form is None:
            return F.linear(x.float(), self.weight, self.bias)
        given, out = x.float().contiguous(), torch.empty(len(x), self.outputs)
        pointers = np.array([given.data_ptr(), out.data_ptr()], dtype=np.uint64)
        scratch = np.empty(len(x) * self._row_bytes + 64, np.uint8)
        batch = native.CBatch(tokens=len(x), buffers=pointers.ctypes.data, scratch=-(-scratch.ctypes.data // 64) * 64)
        native.loaded().forerun_run(self._program, batch)
        return out
