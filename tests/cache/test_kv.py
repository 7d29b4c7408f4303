"""The KV tensors: a commit keeps exactly the given path and changes no other row.

Compaction of random paths is compared with lists, over scattered pages and several slots; shared
prefixes, uncommitted rows and the bytes of a token are checked too, in both layouts.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from forerun.cache.kv import LANES, KVCache
from forerun.models.config import load_config
from tests import tiny

CONFIG = load_config(tiny.family("llama"))


@pytest.fixture(params=["torch", "native"])
def cache(request: pytest.FixtureRequest) -> KVCache:
    return new(native=request.param == "native")


def new(
    tokens: int = 144, page: int = 4, dtype: torch.dtype = torch.float64, native: bool = False
) -> KVCache:
    sizes = {"tokens": tokens, "page": page, "slots": 3, "context": 48}
    return KVCache(CONFIG, **sizes, dtype=dtype, device=torch.device("cpu"), native=native)


def row(kv: KVCache, i: int) -> tuple[Tensor, Tensor]:
    """Return views of the keys and values of one row, [L, Hkv, D] each."""
    ((keys, values),) = kv._groups  # all layers have one shape
    if kv.native:
        return keys[:, :, i // LANES, :, i % LANES], values[:, :, i]
    return keys[:, i], values[:, i]


class Naive:
    """A model in which each slot is a list of marks, one for each token's keys and values."""

    def __init__(self, kv: KVCache, seed: int) -> None:
        self.kv, self.dice, self.mark = kv, random.Random(seed), 0
        self.lists: list[list[int]] = [[] for _ in kv.length]
        self.dice.shuffle(kv.pages.free)
        shape = 2, CONFIG.layers, CONFIG.kv_heads, CONFIG.head_dim
        self.shape = torch.arange(math.prod(shape)).reshape(shape).double() / 1024

    def write(self, slot: int, count: int) -> list[int]:
        """Write `count` nodes behind the committed rows, as a pass does; return their marks."""
        at = len(self.lists[slot])
        assert self.kv.pages.grow(slot, at + count)
        marks = []
        for i in range(count):
            self.mark += 1
            stored = row(self.kv, self.kv.pages.rows[slot, at + i])
            for tensor, marked in zip(stored, self.shape + self.mark, strict=True):
                tensor.copy_(marked)
            marks.append(self.mark)
        return marks

    def commit(self, slot: int, marks: list[int], path: list[int]) -> None:
        self.kv.commit(slot, path)
        self.lists[slot] += [marks[i] for i in path]

    def check(self) -> None:
        self.kv.pages.check()
        for slot, marks in enumerate(self.lists):
            assert self.kv.length[slot] == len(marks)
            for i, mark in zip(self.kv.pages.rows[slot], marks, strict=False):
                assert torch.equal(torch.stack(row(self.kv, i)), self.shape + mark)


@pytest.mark.parametrize("seed", range(8))
def test_random_passes_and_commits(cache: KVCache, seed: int) -> None:
    """Trees have random sizes; paths are random, increasing, and sometimes empty or complete."""
    naive = Naive(cache, seed)
    for _ in range(60):
        slot = naive.dice.randrange(3)
        if len(naive.lists[slot]) > 30:
            naive.kv.close(slot)
            naive.lists[slot] = []
        count = naive.dice.randint(1, 12)
        marks = naive.write(slot, count)
        kept = naive.dice.choice([0, count, naive.dice.randint(0, count)])
        naive.commit(slot, marks, sorted(naive.dice.sample(range(count), kept)))
        naive.kv.pages.shrink(slot, naive.kv.length[slot])
        naive.check()


@pytest.mark.parametrize(
    "path",
    [[], [0], [2], [8], [0, 1, 2], [0, 2, 5], range(1, 7), [0, *range(3, 9)], range(1, 9)],
    ids=str,
)
def test_commit_of_one_path(cache: KVCache, path: list[int]) -> None:
    """Source and destination rows may overlap, and both cross page borders."""
    naive = Naive(cache, 1)
    naive.commit(1, naive.write(1, 5), [0, 1, 2, 3, 4])
    naive.commit(0, naive.write(0, 3), [0, 2])
    naive.commit(1, naive.write(1, 9), list(path))
    naive.check()
    naive.commit(1, naive.write(1, 2), [1])
    naive.check()


def test_open_shares_a_cached_prefix_and_close_releases_it(cache: KVCache) -> None:
    naive, text = Naive(cache, 4), list(range(11))
    naive.commit(0, naive.write(0, 11), list(range(11)))
    naive.kv.pages.seal(0, text, 11)
    assert naive.kv.open(1, [*text, 12]) == naive.kv.length[1] == 8
    naive.lists[1] = naive.lists[0][:8]
    naive.check()
    naive.commit(1, naive.write(1, 5), [0, 3])
    naive.check()
    naive.kv.close(0)
    naive.lists[0] = []
    assert naive.kv.length[0] == 0
    naive.check()
    assert naive.kv.open(2, [7, 7, 7, 7, 7]) == 0


def test_rewind_keeps_earlier_rows_and_never_removes_sealed_pages(cache: KVCache) -> None:
    """Another slot may share a sealed page; new tokens are written behind the remaining rows."""
    naive, text = Naive(cache, 5), list(range(11))
    naive.commit(0, naive.write(0, 11), list(range(11)))
    naive.kv.pages.seal(0, text, 8)
    naive.kv.rewind(0, 9)
    del naive.lists[0][9:]
    naive.check()
    naive.commit(0, naive.write(0, 3), [0, 1, 2])
    naive.check()
    for length in (7, 13):
        with pytest.raises(AssertionError):
            naive.kv.rewind(0, length)
    assert naive.kv.open(1, [*text[:8], 50]) == 8


def test_a_native_cache_is_padded_for_vector_loads_past_its_last_row() -> None:
    for tokens in (4, 12, 16, 20, 64):
        kv = new(tokens, native=True)
        channels = CONFIG.layers * CONFIG.kv_heads * CONFIG.head_dim
        assert kv.data[0].numel() >= (kv.pages.count * 4 + LANES) * channels


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_token_bytes_is_the_memory_of_a_token(dtype: torch.dtype) -> None:
    kv = new(dtype=dtype)
    assert KVCache.token_bytes(CONFIG, dtype) == kv.data.nbytes // kv.layout[2] == kv.row_bytes


def rows(kv: KVCache, which: Sequence[int]) -> Tensor:
    """[rows, 2, L, Hkv, D]"""
    return torch.stack([torch.stack(row(kv, i)) for i in which])


def test_commit_changes_only_the_rows_of_the_path(cache: KVCache) -> None:
    naive = Naive(cache, 2)
    naive.commit(0, naive.write(0, 6), list(range(6)))
    marks = naive.write(0, 7)
    before = rows(cache, range(144))
    naive.commit(0, marks, [1, 4, 6])
    changed = (rows(cache, range(144)) != before).flatten(1).any(-1).nonzero().flatten().tolist()
    assert sorted(changed) == sorted(naive.kv.pages.rows[0, 6:9].tolist())


def test_the_cache_has_at_least_the_requested_rows() -> None:
    kv = new(tokens=10, page=4)
    assert kv.pages.count == 3
    assert list(kv.keys) == list(kv.values) == list(range(CONFIG.layers))
    assert kv.keys[0].shape == kv.values[0].shape
    assert kv.keys[0].shape[0] >= 12
    assert kv.keys[0].shape[1:] == (CONFIG.kv_heads, CONFIG.head_dim)
    assert torch.isfinite(kv.data).all()
