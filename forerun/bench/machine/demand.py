"""What a target pass demands of a machine: bytes by kind and operations by format, counted from the
loaded model.

A pass over n rows (the nodes of one request's draft) reads every weight once, whatever n is, and
multiplies it with n rows. Counted are weights with their scales, the embedding's rows, keys and
values (committed ones read, new ones written), and the operations of linear layers and of
attention, a multiply-add being two. What linear layers read and write besides is counted too, but
stays in the caches. Norms, biases and rotations, thousandths of it all, are not."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.models.decoder import Decoder
from forerun.runtime.native import NativeDecoder
from forerun.runtime.packed import MixedMatrix, PackedMatrix, all_packed


@dataclass(frozen=True, slots=True)
class Matrix:
    """A linear layer, or those of its rows that are stored in one format: what it is part of, its
    weights' format, their bytes (scales included), and its shape."""

    part: str
    format: str
    bytes: int
    inputs: int
    outputs: int


@dataclass(frozen=True, slots=True)
class Demand:
    """What one pass moves, in bytes by kind, and computes, in operations by format."""

    bytes: dict[str, int]
    operations: dict[str, int]

    @property
    def moved(self) -> int:
        """Bytes that have to come from memory or go there: all but the activations."""
        return sum(size for kind, size in self.bytes.items() if kind != "activations")


def matrices(decoder: Decoder | NativeDecoder) -> list[Matrix]:
    """Every linear layer of a model, the head last."""
    c = decoder.config
    heads, both = c.heads * c.head_dim, (c.heads + 2 * c.kv_heads) * c.head_dim
    found = []
    for layer in decoder.weights.layers:
        found += [
            *_matrices("attention", layer.qkv, c.hidden, both),
            *_matrices("attention", layer.out, heads, c.hidden),
            *_matrices("feed-forward", layer.up, c.hidden, c.intermediate * (2 if c.gated else 1)),
            *_matrices("feed-forward", layer.down, c.intermediate, c.hidden),
        ]
    return [*found, *_matrices("head", decoder.weights.head, c.hidden, c.vocab)]


def _matrices(part: str, linear: Any, inputs: int, outputs: int) -> list[Matrix]:
    if isinstance(linear, MixedMatrix):
        return [
            Matrix(part, p.form, p.bytes, inputs, p.matrix.outputs) for p in all_packed([linear])
        ]
    if isinstance(linear, PackedMatrix):
        return [Matrix(part, linear.form, linear.bytes, inputs, outputs)]
    weight = linear.weight
    return [
        Matrix(part, _name(weight.dtype), weight.numel() * weight.element_size(), inputs, outputs)
    ]


def _row_bytes(table: Tensor | PackedMatrix) -> int:
    """Bytes of a row of an embedding, scales included."""
    if isinstance(table, PackedMatrix):
        return table.bytes // int(table.matrix.outputs)
    return table.shape[1] * table.element_size()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def demand_of(decoder: Decoder | NativeDecoder, rows: int, context: int) -> Demand:
    """What a pass over a chain of `rows` tokens below `context` committed ones moves and
    computes."""
    c, layers = decoder.config, matrices(decoder)
    computed = (
        torch.float32 if isinstance(decoder, NativeDecoder) else decoder.dtype
    )  # of all but the weights
    size: Counter[str] = Counter()
    operations: Counter[str] = Counter()
    for m in layers:
        size[m.part] += m.bytes
        operations[m.format] += 2 * m.inputs * m.outputs * rows
    size["embedding"] = rows * _row_bytes(decoder.weights.embed)
    if decoder.weights.positions is not None:
        size["embedding"] += rows * _row_bytes(decoder.weights.positions)
    for window in c.windows:
        most = window or context + rows
        seen = sum(np.minimum(context + 1 + np.arange(rows), most).tolist())  # keys, over all rows
        operations[_name(computed)] += (
            4 * c.heads * c.head_dim * seen
        )  # scores, and the values they weigh
        committed = min(context, most - 1)
        size["cache"] += 2 * c.kv_heads * c.head_dim * decoder.dtype.itemsize * (committed + rows)
    size["activations"] = rows * computed.itemsize * sum(m.inputs + m.outputs for m in layers)
    return Demand(dict(size), dict(operations))
