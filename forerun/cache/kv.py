"""The KV tensors, and commit: the one mutation of what a slot has said.

A slot's rows 0..length-1 are committed; a pass writes its nodes behind them, in place; `commit` keeps a path of those
nodes and makes it contiguous. Rows past the length are scratch: the next pass overwrites them, which is all that a
rollback is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forerun.cache.pages import Pages
from forerun.models.config import ModelConfig


class KVCache:
    """Paged keys and values of one model. data [2, L, rows, Hkv, D]"""

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
    ) -> None:
        """Room for `tokens` tokens in all, `context` a slot, in pages of `page` tokens. What is kept of a token may
        depend on as many as `ahead` tokens behind it."""
        self.pages = Pages(-(-tokens // page), page, slots, context, ahead)
        rows = self.pages.count * page + 1  # vector loads of the last row may reach past it
        # zeros, not empty: a masked key of NaN would still poison the sum
        self.data = torch.zeros((2, config.layers, rows, config.kv_heads, config.head_dim), dtype=dtype, device=device)
        self.length = [0] * slots
        # what native passes are told each time: addresses of keys and values, elements between layers, dtype
        pointers = self.data[0].data_ptr(), self.data[1].data_ptr()
        self.layout = (*pointers, self.data.stride(1), str(dtype).removeprefix("torch."))

    @staticmethod
    def token_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
        """Bytes of one token's keys and values."""
        return 2 * config.layers * config.kv_heads * config.head_dim * dtype.itemsize

    def open(self, slot: int, tokens: Sequence[int]) -> int:
        """Start a slot with whatever prefix of `tokens` is cached; returns how many tokens that is."""
        self.length[slot] = self.pages.match(slot, tokens)
        return self.length[slot]

    def close(self, slot: int) -> None:
        """Give back the slot's pages."""
        self.pages.release(slot)
        self.length[slot] = 0

    def commit(self, slot: int, path: Sequence[int]) -> None:
        """Keep the rows at offsets `path` (increasing) past the committed length, in that order, and only them."""
        start, count = self.length[slot], len(path)
        if list(path) != list(range(count)):
            rows = self.pages.rows[slot]
            source = torch.from_numpy(rows[[start + i for i in path]]).to(self.data.device)
            target = torch.from_numpy(rows[start : start + count].copy()).to(self.data.device)
            self.data[:, :, target] = self.data[:, :, source]
        self.length[slot] += count
