"""Matrices as a GGUF file holds them: rows of blocks, in the order in which a model wants them.

Nothing is read before it is asked for. Floats come from the `gguf` package, which is also the twin
that the native repacking is tested against.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.errors import LoadError
from forerun.models.gguf.container import TYPES, Entry

Rows = np.ndarray[Any, np.dtype[np.uint8]]

# types to the native format that holds their numbers as they are
FORMS = {
    "F32": "float32", "F16": "float16", "BF16": "bfloat16", "Q4_0": "int4", "Q8_0": "q8_0", "IQ4_NL": "q8_0",
    "Q4_1": "q4_1", "Q5_0": "q5_0", "Q5_1": "q5_1", "Q4_K": "q4_k", "Q5_K": "q5_k", "Q6_K": "q6_k", "Q3_K": "q6_k",
}  # fmt: skip
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
TYPE_IDS = {name: kind for kind, (name, _, _) in TYPES.items()}
PART = 1 << 22  # bytes of a file that are turned into floats together


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one tensor; `order` [rows] are their numbers where they are not all of it, one after
    the other."""

    entry: Entry
    order: np.ndarray[Any, np.dtype[np.int64]] | None = None

    def __len__(self) -> int:
        return self.entry.shape[0] if self.order is None else len(self.order)

    def read(self, first: int, count: int) -> Rows:
        """Rows as they are stored, uint8 [count, row bytes]. Raises LoadError."""
        if self.order is None:
            return self.entry.read(first, count)
        rows = self.order[first : first + count]
        low = int(rows.min())
        return self.entry.read(low, int(rows.max()) + 1 - low)[rows - low]


@dataclass(frozen=True, slots=True)
class Blocks:
    """A matrix [out, in]: pieces on top of each other."""

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
        """The native format that holds the numbers of the first piece; None if there is none."""
        return FORMS.get(self.kind)

    def chosen(self, rows: Tensor) -> Blocks:
        """Some rows of a matrix of one piece as it is stored. rows [n] int64"""
        (piece,) = self.pieces
        return Blocks((replace(piece, order=rows.numpy()),))

    def alike(self) -> list[Blocks]:
        """Runs of pieces of the same type."""
        return [
            Blocks(tuple(run))
            for _, run in groupby(self.pieces, key=lambda piece: piece.entry.kind)
        ]

    def read(self, first: int, count: int) -> Rows:
        """Rows as they are stored, uint8 [count, row bytes]; the pieces must be of one type. Raises
        LoadError."""
        found = []
        for piece in self.pieces:
            if count > 0 and first < len(piece):
                found.append(piece.read(first, min(count, len(piece) - first)))
                count -= len(found[-1])
            first = max(first - len(piece), 0)
        return np.concatenate(found) if len(found) > 1 else found[0]

    def dequantise(self) -> Tensor:
        """[out, in] float32, of a few megabytes of the file at a time. Raises LoadError."""
        out, first = torch.empty(self.shape), 0
        for piece in self.pieces:
            entry = piece.entry
            step = max(PART // entry.row_bytes, 1) if piece.order is None else len(piece)
            for at in range(0, len(piece), step):
                values = floats(entry.kind, piece.read(at, min(step, len(piece) - at)))
                if entry.kind not in FLOATS and not values.isfinite().all():
                    raise no_numbers(entry)
                out[first + at : first + at + len(values)] = values
            first += len(piece)
        return out


def stack_blocks(parts: Sequence[Blocks]) -> Blocks:
    """Matrices on top of each other."""
    return Blocks(tuple(piece for part in parts for piece in part.pieces))


def no_numbers(entry: Entry) -> LoadError:
    """What is raised where a scale is infinite or not a number."""
    return LoadError(
        f"{entry.path}: tensor {entry.name} has scales that are no numbers; download it again"
    )


def floats(kind: str, rows: Rows) -> Tensor:
    """Rows of a file as float32 [rows, in]. Raises LoadError for a type whose numbers cannot be
    had."""
    if kind in FLOATS:
        return torch.from_numpy(rows).view(FLOATS[kind]).float()
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        with np.errstate(all="ignore"):
            made = dequantize(rows, GGMLQuantizationType(TYPE_IDS[kind]))
    except (ValueError, NotImplementedError, KeyError):
        raise LoadError(
            f"weights of the type {kind} cannot be read: use another file, such as one of Q4_K_M"
        ) from None
    return torch.from_numpy(np.ascontiguousarray(made, dtype=np.float32))


def rotated(rows: int, heads: int, turns: int) -> Tensor:
    """The rows of a file whose queries or keys rotate neighbouring channels, the first `turns` of
    each head, in the order of the halves that rotate together elsewhere. int64 [rows]"""
    order = torch.arange(rows).view(heads, -1)
    halves = order[:, :turns].view(heads, -1, 2).transpose(1, 2).flatten(1)
    return torch.cat((halves, order[:, turns:]), 1).flatten()
