"""Matrices of a GGUF file in their quantized blocks, read on demand and row by row.

Floats come from the `gguf` package, whose `dequantize` is also the reference that the native
repacking is tested against.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from forerun.errors import LoadError
from forerun.models.gguf.container import TYPES, Entry

Rows = np.ndarray[Any, np.dtype[np.uint8]]

# type -> the native format that holds the same numbers
FORMS = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "Q4_0": "int4",
    "Q8_0": "q8_0",
    "IQ4_NL": "q8_0",
    "Q4_1": "q4_1",
    "Q5_0": "q5_0",
    "Q5_1": "q5_1",
    "Q4_K": "q4_k",
    "Q5_K": "q5_k",
    "Q6_K": "q6_k",
    "Q3_K": "q6_k",
    "MXFP4": "mxfp4",
}
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
TYPE_IDS = {name: kind for kind, (name, _, _) in TYPES.items()}
CHUNK_BYTES = 1 << 22  # bytes of a file that are dequantized at a time


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one tensor: all in order, or those listed in `order` [rows]."""

    entry: Entry
    order: np.ndarray[Any, np.dtype[np.int64]] | None = None

    def __len__(self) -> int:
        return self.entry.shape[0] if self.order is None else len(self.order)

    def read(self, first: int, count: int) -> Rows:
        """Read rows as they are stored, uint8 [count, row bytes]. Raises LoadError."""
        if self.order is None:
            return self.entry.read(first, count)
        rows = self.order[first : first + count]
        low = int(rows.min())
        return self.entry.read(low, int(rows.max()) + 1 - low)[rows - low]


@dataclass(frozen=True, slots=True)
class Blocks:
    """A matrix [out, in] of pieces stacked along the outputs."""

    pieces: tuple[Piece, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return sum(map(len, self.pieces)), self.pieces[0].entry.shape[1]

    @property
    def kind(self) -> str:
        """The type of the first piece."""
        return self.pieces[0].entry.kind

    @property
    def form(self) -> str | None:
        """The native format that holds the numbers of the first piece, if there is one."""
        return FORMS.get(self.kind)

    def select_rows(self, rows: Tensor) -> Blocks:
        """Return some rows of a matrix that is one whole tensor. rows [n] int64"""
        (piece,) = self.pieces
        return Blocks((replace(piece, order=rows.numpy()),))

    def by_type(self) -> list[Blocks]:
        """Split into runs of pieces of the same type."""
        runs = groupby(self.pieces, key=lambda piece: piece.entry.kind)
        return [Blocks(tuple(run)) for _, run in runs]

    def read(self, first: int, count: int) -> Rows:
        """Read rows as they are stored, uint8 [count, row bytes]; pieces must have one type.

        Raises LoadError."""
        found = []
        for piece in self.pieces:
            if count > 0 and first < len(piece):
                found.append(piece.read(first, min(count, len(piece) - first)))
                count -= len(found[-1])
            first = max(first - len(piece), 0)
        return np.concatenate(found) if len(found) > 1 else found[0]

    def dequantize(self) -> Tensor:
        """Return [out, in] float32. Raises LoadError."""
        out, first = torch.empty(self.shape), 0
        for piece in self.pieces:
            entry = piece.entry
            step = max(CHUNK_BYTES // entry.row_bytes, 1) if piece.order is None else len(piece)
            for at in range(0, len(piece), step):
                values = floats(entry.kind, piece.read(at, min(step, len(piece) - at)))
                if entry.kind not in FLOATS and not values.isfinite().all():
                    raise not_finite(entry)
                out[first + at : first + at + len(values)] = values
            first += len(piece)
        return out


def stack_blocks(parts: Sequence[Blocks]) -> Blocks:
    """Stack matrices along the outputs."""
    return Blocks(tuple(piece for part in parts for piece in part.pieces))


def not_finite(entry: Entry) -> LoadError:
    """Return the error for a tensor with infinite or NaN scales."""
    return LoadError(
        f"{entry.path}: tensor {entry.name} has scales that are not finite; download it again"
    )


def floats(kind: str, rows: Rows) -> Tensor:
    """Dequantize rows of a file. -> float32 [rows, in]. Raises LoadError for unsupported types."""
    if kind in FLOATS:
        return torch.from_numpy(rows).view(FLOATS[kind]).float()
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        with np.errstate(all="ignore"):
            values = dequantize(rows, GGMLQuantizationType(TYPE_IDS[kind]))
    except (ValueError, NotImplementedError, KeyError):
        raise LoadError(
            f"weights of the type {kind} are not supported: use another file, such as Q4_K_M"
        ) from None
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))


# ---------------------------------------------------------------- integers for torch devices


class Integers(NamedTuple):
    """A matrix whose elements are value * scale + minimum, exactly those that `floats` returns.

    Attributes:
        form: "int4" for values from -8 to 7, or with minima from 0 to 15; otherwise "int8".
        values: int8 [rows, in].
        scale: [rows, groups] float16, or int8 factors of the scales of blocks.
        minimum: of the same shape and dtype; None if there is none.
        block_scale, block_minimum: float16 [rows, blocks], which the scales and minima of a block's
            groups are multiplied by in float32; None without blocks.
    """

    form: str
    values: Tensor
    scale: Tensor
    minimum: Tensor | None = None
    block_scale: Tensor | None = None
    block_minimum: Tensor | None = None


def integers(kind: str, rows: Tensor) -> Integers:
    """Take rows of a file apart, uint8 [rows, row bytes]; `kind` is one of `INTEGERS`."""
    _, _, size = TYPES[TYPE_IDS[kind]]
    form, values, *more = INTEGERS[kind](rows.view(len(rows), -1, size))
    scale, *rest = (None if part is None else part.flatten(1) for part in more)
    assert scale is not None
    return Integers(form, values.flatten(1), scale, *rest)


def _half(b: Tensor, at: int) -> Tensor:
    """Return the half-precision number at byte `at` of each block. -> [rows, blocks, 1]"""
    return b[..., at : at + 2].contiguous().view(torch.float16)


def _unpack(b: Tensor, bits: int, run: int) -> Tensor:
    """Return the lowest bits of `run` bytes, then the next bits of these, and so on run by run.

    [rows, blocks, n] -> int8 [rows, blocks, n * 8 / bits]"""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=b.device)[:, None]
    runs = b.view(*b.shape[:2], -1, 1, run)
    return (runs >> shifts & (1 << bits) - 1).view(torch.int8).flatten(2)


def _k_scales(b: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the scales and minima of groups in Q4_K and Q5_K, int8 [rows, blocks, 8], and of
    blocks, float16 [rows, blocks, 1]."""
    first, second, upper = b[..., 4:8], b[..., 8:12], b[..., 12:16]
    scale = torch.cat((first & 63, upper & 15 | first >> 6 << 4), dim=-1)
    minimum = torch.cat((second & 63, upper >> 4 | second >> 6 << 4), dim=-1)
    return scale.view(torch.int8), minimum.view(torch.int8), _half(b, 0), -_half(b, 2)


def _q5_0(b: Tensor) -> tuple[str, Tensor, Tensor]:
    values = _unpack(b[..., 6:], 4, 16) | _unpack(b[..., 2:6], 1, 1) << 4
    return "int8", values - 16, _half(b, 0)


def _q5_1(b: Tensor) -> tuple[str, Tensor, Tensor, Tensor]:
    values = _unpack(b[..., 8:], 4, 16) | _unpack(b[..., 4:8], 1, 1) << 4
    return "int8", values, _half(b, 0), _half(b, 2)


def _q5_k(b: Tensor) -> tuple[Any, ...]:
    values = _unpack(b[..., 48:], 4, 32) | _unpack(b[..., 16:48], 1, 32) << 4
    return "int8", values, *_k_scales(b)


def _q6_k(b: Tensor) -> tuple[Any, ...]:
    values = _unpack(b[..., :128], 4, 64) | _unpack(b[..., 128:192], 2, 32) << 4
    return "int8", values - 32, b[..., 192:208].view(torch.int8), None, _half(b, 208)


def _q3_k(b: Tensor) -> tuple[Any, ...]:
    values = _unpack(b[..., 32:96], 2, 32) | _unpack(b[..., :32], 1, 32) << 2
    scale = _unpack(b[..., 96:104], 4, 8) | _unpack(b[..., 104:108], 2, 4) << 4
    return "int8", values - 4, scale - 32, None, _half(b, 108)


# type -> a function from blocks uint8 [rows, blocks, bytes] to the fields of `Integers`
INTEGERS: dict[str, Callable[[Tensor], tuple[Any, ...]]] = {
    "Q8_0": lambda b: ("int8", b[..., 2:].view(torch.int8), _half(b, 0)),
    "Q4_0": lambda b: ("int4", _unpack(b[..., 2:], 4, 16) - 8, _half(b, 0)),
    "Q4_1": lambda b: ("int4", _unpack(b[..., 4:], 4, 16), _half(b, 0), _half(b, 2)),
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q3_K": _q3_k,
    "Q4_K": lambda b: ("int4", _unpack(b[..., 16:], 4, 32), *_k_scales(b)),
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


def read_tensor(entry: Entry) -> Tensor:
    """Read a whole tensor: float32, or int64 where the file has integers. Raises LoadError."""
    if entry.kind in ("I32", "I64"):
        stored = entry.read().view(np.int32 if entry.kind == "I32" else np.int64)
        return torch.from_numpy(stored.astype(np.int64)).reshape(entry.shape)
    if len(entry.shape) == 2:
        return Blocks((Piece(entry),)).dequantize()
    return floats(entry.kind, entry.read()).reshape(entry.shape)


def unpermuted(rows: int, heads: int, rotary: int) -> Tensor:
    """Return the row order that undoes llama.cpp's permutation of queries and keys.

    llama.cpp rotates neighbouring channels, the first `rotary` of each head; Hugging Face rotates
    the two halves of those channels. -> int64 [rows]"""
    order = torch.arange(rows).view(heads, -1)
    halves = order[:, :rotary].view(heads, -1, 2).transpose(1, 2).flatten(1)
    return torch.cat((halves, order[:, rotary:]), 1).flatten()
