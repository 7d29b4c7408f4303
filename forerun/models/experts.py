"""Weights of experts in checkpoints: one tensor an expert, or one for all of a layer.

A layer's experts become two matrices: the gates of all experts and then their ups, [2 * E * I, H],
and the downs of all experts, [E * H, I]. They are nearly as large as the model, so the native
kernels pack them while their rows are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.errors import LoadError
from forerun.models.gguf.blocks import Blocks, Piece

MX_GROUP = 32  # values that share a scale in MXFP4


class StackedRows:
    """A matrix [out, in] of parts that are read when their rows are; the last two stay in memory.

    Gates and ups lie far apart and are read in turn, which is why two are kept."""

    def __init__(self, parts: Sequence[Callable[[], Tensor]], rows: int, inputs: int) -> None:
        """parts: functions that read [rows, inputs] floats each."""
        self.parts, self.rows = parts, rows
        self.shape = (rows * len(parts), inputs)
        self._kept: dict[int, Tensor] = {}

    def read(self, first: int, count: int) -> Tensor:
        """Return some rows, [count, in], as they are stored. Raises LoadError."""
        return _rows(lambda part, rows: self._part(part)[rows], self.rows, first, count)

    def _part(self, index: int) -> Tensor:
        if index not in self._kept:
            while len(self._kept) > 1:
                del self._kept[next(iter(self._kept))]
            self._kept[index] = self.parts[index]()
        return self._kept[index]

    def dequantize(self) -> Tensor:
        """Return all rows as floats [out, in]. Raises LoadError."""
        out: Tensor | None = None
        for i, part in enumerate(self.parts):
            rows = part()
            if out is None:
                out = torch.empty(self.shape, dtype=rows.dtype)
            out[i * self.rows : (i + 1) * self.rows] = rows
        assert out is not None
        return out


def _rows(read: Callable[[int, slice], Tensor], size: int, first: int, count: int) -> Tensor:
    """Return rows [first, first + count) of a matrix of parts of `size` rows; `read` returns some
    rows of a part."""
    found = []
    end = first + count
    while first < end:
        part, at = divmod(first, size)
        found.append(read(part, slice(at, min(at + end - first, size))))
        first += len(found[-1])
    return torch.cat(found) if len(found) > 1 else found[0]


def split_experts(
    read: Callable[[int], Tensor],
    count: int,
    halves: int,
    rows: int,
    inputs: int,
    interleaved: bool,
) -> StackedRows:
    """Take the matrix of a layer apart whose experts are stacked in one tensor.

    Args:
        read: returns the matrix of one expert, [halves * rows, inputs].
        halves: 2 if gate and up are one matrix, 1 otherwise.
        interleaved: gates are the even rows and ups the odd ones, instead of one after the other.
    """

    def part(expert: int, half: int) -> Tensor:
        matrix = read(expert)
        if interleaved:
            return matrix[half::halves].contiguous()
        return matrix[half * rows : (half + 1) * rows].contiguous()

    parts = [
        lambda expert=expert, half=half: part(expert, half)
        for half in range(halves)
        for expert in range(count)
    ]
    return StackedRows(parts, rows, inputs)


# ---------------------------------------------------------------- MXFP4 of safetensors


@dataclass(frozen=True, slots=True)
class MxEntry:
    """Blocks and scales of a safetensors checkpoint, read in the layout of GGUF's MXFP4.

    `shape` is (out, in) of all experts, `scales` uint8 [out, in / 32], and `blocks` reads rows
    [first, first + count) of the packed values, uint8 [count, in / 32, 16].

    A byte of the checkpoint holds values 2i and 2i + 1 of a group, one of GGUF values i and i + 16;
    scale bytes are the same, and no number changes (OCP Microscaling Formats 1.0)."""

    name: str
    path: Path
    shape: tuple[int, int]
    blocks: Callable[[int, int], Tensor]
    scales: Tensor
    kind: str = "MXFP4"

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.shape[1] // MX_GROUP * 17

    def read(self, first: int = 0, rows: int | None = None) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Read rows, uint8 [rows, row bytes]. Raises LoadError."""
        count = self.shape[0] - first if rows is None else rows
        stored = self.blocks(first, count).numpy()
        values = np.empty((*stored.shape[:2], MX_GROUP), np.uint8)
        values[..., 0::2], values[..., 1::2] = stored & 15, stored >> 4
        found = np.empty((*stored.shape[:2], 17), np.uint8)
        found[..., 0] = self.scales[first : first + count].numpy()
        found[..., 1:] = values[..., :16] | values[..., 16:] << 4
        return found.reshape(count, -1)


def mx_matrix(
    blocks: Any, scales: Tensor, count: int, halves: int, rows: int, inputs: int, where: str
) -> Blocks:
    """Return the matrix of a layer's experts in MXFP4; gates are even rows and ups odd ones.

    Args:
        blocks: a safetensors slice, uint8 [E, halves * rows, in / 32, 16].
        scales: uint8 [E, halves * rows, in / 32].

    Raises:
        LoadError: the tensors have other shapes.
    """
    groups, size = -(-inputs // MX_GROUP), halves * rows
    if (
        inputs % MX_GROUP
        or list(blocks.get_shape()) != [count, size, groups, MX_GROUP // 2]
        or tuple(scales.shape) != (count, size, groups)
        or scales.dtype != torch.uint8
    ):
        raise LoadError(
            f"{where}: blocks {blocks.get_shape()} and scales {list(scales.shape)} are not "
            f"{count} experts of {size} by {inputs}"
        )

    def read(first: int, length: int) -> Tensor:
        return _rows(lambda expert, rows: blocks[expert, rows], size, first, length)

    entry: Any = MxEntry(where, Path(where), (count * size, inputs), read, scales.flatten(0, 1))
    if halves == 1:
        return Blocks((Piece(entry),))
    order = np.arange(count * size).reshape(count * rows, halves)
    pieces = (Piece(entry, np.ascontiguousarray(order[:, half])) for half in range(halves))
    return Blocks(tuple(pieces))
