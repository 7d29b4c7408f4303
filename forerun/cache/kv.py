"""The KV tensors, and `commit`, which keeps the accepted path of a draft.

A slot's rows 0..length-1 are committed; a forward pass writes its nodes behind them; `commit` keeps
a path of those nodes and makes it contiguous. Rows past the length are scratch space: the next
forward pass overwrites them, which is all there is to a rollback.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from forerun.cache.pages import Pages
from forerun.cache.recurrent import RecurrentStates
from forerun.devices import upload, zeros
from forerun.models.config import ModelConfig

LANES = 16  # rows of a block of keys, see kernels/native/attention.h
CACHE_MEMORY = ("a KV cache of this size", "set kv_tokens")  # what it is for, and how to take less


class KVCache:
    """Paged keys and values of one model.

    `keys` and `values` map a layer to [rows, Hkv, D]. For native forward passes the rows of one
    head are contiguous: keys [Hkv, rows / 16, D, 16], values [Hkv, rows, D]. Layers that read the
    keys of another (`ModelConfig.kv_layer`) have none.

    Attributes:
        data: the memory of all layers, [2, channels * rows]: keys, then values.
        length: by slot, the number of committed rows.
        compact: moves accepted rows as `move` does, given the rows of uncommitted tokens and an
            accepted path; None without a kernel for it.
        moves: the (source, target) rows of each move since the list was set; None: not recorded.
        head_layouts: heads of all layers with as many channels, and their channels, for each such
            group in the order of `data`; then a 0.
        layout: addresses of keys and values, number of rows and the dtype, for native forward
            passes.
    """

    compact: Callable[[KVCache, Sequence[int], Sequence[int]], None] | None = None

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
        """Allocate room for `tokens` tokens, at most `context` per slot, in pages of `page`.

        Args:
            ahead: how many tokens behind its own a row may depend on.
            native: use the layout of native forward passes.
        """
        self.pages = Pages(-(-tokens // page), page, slots, context, ahead)
        self.native = native
        # One block more: vector loads of the last row may reach past it.
        blocks = -(-self.pages.count * page // LANES) + 1
        rows = blocks * LANES
        groups = config.kv_groups()
        channels = sum(heads * size * len(layers) for heads, size, layers in groups)
        # Zeros rather than empty: a masked key of NaN would still poison the sum.
        self.data = zeros((2, channels * rows), dtype, device, *CACHE_MEMORY)
        # [layers, ..] of the layers of one shape, whose rows are moved together
        self._groups: list[tuple[Tensor, ...]] = []
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        first = 0
        for heads, size, layers in groups:
            end = first + heads * size * len(layers) * rows
            shape: tuple[int, ...] = (len(layers), rows, heads, size)
            keys, values = (data[first:end].view(shape) for data in self.data)
            if native:
                keys = keys.view(len(layers), heads, blocks, size, LANES)
                values = values.view(len(layers), heads, rows, size)
            self._groups.append((keys, values))
            self.keys |= zip(layers, keys, strict=True)
            self.values |= zip(layers, values, strict=True)
            first = end
        # the bits of the same memory: moving a few rows takes numpy a fifth of torch's time
        integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        self._arrays = [
            (keys.view(integers).numpy(), values.view(integers).numpy())
            for keys, values in (self._groups if native else ())
        ]
        self.recurrent = None
        if config.recurrent is not None:
            self.recurrent = RecurrentStates(config, slots, page, device)
        self.length = [0] * slots
        self.moves: list[tuple[Sequence[int], Sequence[int]]] | None = None
        self.head_layouts = [n for heads, d, own in groups for n in (heads * len(own), d)] + [0]
        addresses = self.data[0].data_ptr(), self.data[1].data_ptr()
        self.layout = (*addresses, rows, str(dtype).removeprefix("torch."))

    @staticmethod
    def token_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
        """Return the bytes of one token's keys and values."""
        groups = config.kv_groups()
        return 2 * dtype.itemsize * sum(heads * size * len(own) for heads, size, own in groups)

    @property
    def spare_row(self) -> int:
        """A row that no page has; padding writes to it."""
        return int(self.layout[2]) - 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one row: keys and values of a token in all layers."""
        return self.data.nbytes // self.layout[2]

    def open(self, slot: int, tokens: Sequence[int], tenant: str = "") -> int:
        """Start a slot with the tenant's cached prefix of `tokens`; return its length."""
        length = self.pages.match(slot, tokens, tenant)
        if self.recurrent is not None:
            for other, chain in enumerate(self.pages.chain):
                if other != slot:
                    self.recurrent.name_copies(other, chain)
            length = self.recurrent.open(slot, self.pages.chain[slot]) * self.pages.size
            self.pages.shrink(slot, length)
        self.length[slot] = length
        return length

    def close(self, slot: int) -> None:
        """Give back the slot's pages."""
        if self.recurrent is not None:
            self.recurrent.name_copies(slot, self.pages.chain[slot])
            self.recurrent.close(slot)
        self.pages.release(slot)
        self.length[slot] = 0

    def rewind(self, slot: int, length: int) -> None:
        """Take back committed rows past `length`. Sealed pages stay: other slots may share them.

        A recurrent state that has those tokens already starts over: then the length is 0."""
        assert len(self.pages.chain[slot]) * self.pages.size <= length <= self.length[slot]
        count = self.length[slot] - length
        if self.recurrent is not None and not self.recurrent.rewind(slot, count):
            self.recurrent.open(slot, ())
            length = 0
        self.length[slot] = length

    def commit(self, slot: int, path: Sequence[int]) -> None:
        """Keep the rows at offsets `path` (increasing) past the committed length, in that order,
        and drop the others."""
        if self.recurrent is not None:
            self.recurrent.commit(slot, path)
        start, count = self.length[slot], len(path)
        if list(path) != list(range(count)):
            rows = self.pages.rows[slot, start : start + path[-1] + 1].tolist()
            if self.compact is None or self.moves is not None:
                self.move([rows[i] for i in path], rows[:count])
            else:
                self.compact(self, rows, path)
        self.length[slot] += count

    def read(self, slot: int, layer: int, first: int) -> tuple[Tensor, Tensor]:
        """Return copies of the keys and values of a layer, [n, Hkv, D] each: those of the slot's
        committed rows from `first` on."""
        numbers = self.pages.rows[slot, first : self.length[slot]]
        rows = torch.from_numpy(numbers.astype(np.int64)).to(self.data.device)
        keys, values = self.keys[layer], self.values[layer]
        if not self.native:
            return keys[rows], values[rows]
        return keys[:, rows // LANES, :, rows % LANES], values[:, rows].transpose(0, 1)

    @property
    def tensors(self) -> list[Tensor]:
        """Keys and values of all layers, [layers, rows, heads, channels] for each shape."""
        return list(itertools.chain.from_iterable(self._groups))

    def move(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy rows in all layers pair by pair; no target is the source of a later pair."""
        if self.moves is not None:
            self.moves.append((source, target))
        if self.native:
            for keys, values in self._arrays:
                for i, j in zip(source, target, strict=True):
                    keys[:, :, j // LANES, :, j % LANES] = keys[:, :, i // LANES, :, i % LANES]
                    values[:, :, j] = values[:, :, i]
            return
        indices = upload([*source, *target], torch.int64, self.data.device)
        sources, targets = torch.split(indices, len(source))
        for stored in self.tensors:
            stored[:, targets] = stored[:, sources]
