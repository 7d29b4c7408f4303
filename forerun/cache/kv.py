"""The KV tensors, and commit: the one mutation of what a slot has said.

A slot's rows 0..length-1 are committed; a pass writes its nodes behind them, in place; `commit`
keeps a path of those nodes and makes it contiguous. Rows past the length are scratch: the next pass
overwrites them, which is all that a rollback is.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.cache.pages import Pages
from forerun.errors import CapacityError
from forerun.models.config import ModelConfig

LANES = 16  # rows of a block of keys, see kernels/native/attention.h


class KVCache:
    """Paged keys and values of one model: both [L, rows, Hkv, D]. For native passes, what one head
    reads lies in one
    piece: keys [L, Hkv, rows / 16, D, 16], values [L, Hkv, rows, D]."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        tokens: int,
        page: int,
        slots: int,
        context: int,
        dtype: torch.dtype,
        device: torch.device,
        ahead: int = 0,
        native: bool = False,
    ) -> None:
        """Room for `tokens` tokens in all, `context` a slot, in pages of `page` tokens. What is
        kept of a token may depend on as many as `ahead` tokens behind it. `native`: passes are
        native."""
        self.pages, self.native = Pages(-(-tokens // page), page, slots, context, ahead), native
        layers, heads, width = config.layers, config.kv_heads, config.head_dim
        blocks = (
            -(-self.pages.count * page // LANES) + 1
        )  # vector loads of the last row may reach past it
        # zeros, not empty: a masked key of NaN would still poison the sum
        self.data = _zeros((2, layers, blocks * LANES, heads, width), dtype, device)
        self.keys, self.values = self.data
        if native:
            self.keys = self.keys.view(layers, heads, blocks, width, LANES)
            self.values = self.values.view(layers, heads, blocks * LANES, width)
        self.length = [0] * slots
        self.moves: list[tuple[Tensor, Tensor]] | None = (
            None  # rows that were moved, where somebody wants to know
        )
        # what native passes are told each time: addresses of keys and values, elements between
        # layers, dtype
        pointers = self.keys.data_ptr(), self.values.data_ptr()
        self.layout = (*pointers, self.data.stride(1), str(dtype).removeprefix("torch."))

    @staticmethod
    def token_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
        """Bytes of one token's keys and values."""
        return 2 * config.layers * config.kv_heads * config.head_dim * dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of one row: keys and values of a token in all layers."""
        return self.data.nbytes // self.data.shape[2]

    def open(self, slot: int, tokens: Sequence[int], tenant: str = "") -> int:
        """Start a slot with whatever prefix of `tokens` is cached of this tenant; returns how many
        tokens that is."""
        self.length[slot] = self.pages.match(slot, tokens, tenant)
        return self.length[slot]

    def close(self, slot: int) -> None:
        """Give back the slot's pages."""
        self.pages.release(slot)
        self.length[slot] = 0

    def rewind(self, slot: int, length: int) -> None:
        """Take back committed rows past `length`; what is sealed may be another slot's too, and
        stands."""
        assert len(self.pages.chain[slot]) * self.pages.size <= length <= self.length[slot]
        self.length[slot] = length

    def commit(self, slot: int, path: Sequence[int]) -> None:
        """Keep the rows at offsets `path` (increasing) past the committed length, in that order,
        and only them."""
        start, count = self.length[slot], len(path)
        if list(path) != list(range(count)):
            rows = self.pages.rows[slot]
            source = torch.from_numpy(rows[[start + i for i in path]]).to(self.data.device)
            target = torch.from_numpy(rows[start : start + count].copy()).to(self.data.device)
            self.move(source, target)
        self.length[slot] += count

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy rows, in all layers. source, target [n] int64"""
        if self.moves is not None:
            self.moves.append((source, target))
        if self.native:
            lanes = self.keys[:, :, source // LANES, :, source % LANES]
            self.keys[:, :, target // LANES, :, target % LANES] = lanes
            self.values[:, :, target] = self.values[:, :, source]
        else:
            self.data[:, :, target] = self.data[:, :, source]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on CPU memory that the system gives page by page when it is written to, since most of
    it never is."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    try:
        memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    except OSError as error:
        raise CapacityError(
            f"there is no memory for a KV cache of this size ({error}): set kv_tokens"
        ) from None
    return torch.frombuffer(memory, dtype=dtype).view(shape)
