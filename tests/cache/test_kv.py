"""The KV tensors: a commit keeps exactly the path it is given, and moves nothing that is anybody else's.

Protects: compaction of any path against lists, over scattered pages and several slots; shared prefixes; that scratch
rows are only scratch; the bytes of a token.
"""

from __future__ import annotations

import random

import pytest
import torch

from forerun.cache.kv import KVCache
from forerun.models.config import load_config
from tests import tiny

CONFIG = load_config(tiny.family("llama"))


def cache(tokens: int = 144, page: int = 4, slots: int = 3, context: int = 48) -> KVCache:
    return KVCache(
        CONFIG, tokens=tokens, page=page, slots=slots, context=context, dtype=torch.float64, device=torch.device("cpu")
    )


class Naive:
    """Every slot a list of marks; a mark stands for the keys and values of one token in all layers and heads."""

    def __init__(self, kv: KVCache, seed: int) -> None:
        self.kv, self.chance, self.mark = kv, random.Random(seed), 0
        self.lists: list[list[int]] = [[] for _ in kv.length]
        self.chance.shuffle(kv.pages.free)
        layers, _, heads, size = kv.data.shape[1:]
        self.shape = torch.arange(2 * layers * heads * size).reshape(2, layers, heads, size).double() / 1024

    def write(self, slot: int, count: int) -> list[int]:
        """A pass: `count` nodes behind what is committed. Their marks."""
        at = len(self.lists[slot])
        assert self.kv.pages.grow(slot, at + count)
        marks = []
        for i in range(count):
            self.mark += 1
            self.kv.data[:, :, self.kv.pages.rows[slot, at + i]] = self.shape + self.mark
            marks.append(self.mark)
        return marks

    def commit(self, slot: int, marks: list[int], path: list[int]) -> None:
        self.kv.commit(slot, path)
        self.lists[slot] += [marks[i] for i in path]

    def check(self) -> None:
        self.kv.pages.check()
        for slot, marks in enumerate(self.lists):
            assert self.kv.length[slot] == len(marks)
            rows = self.kv.data[:, :, self.kv.pages.rows[slot, : len(marks)]]
            expected = self.shape[:, :, None] + torch.tensor(marks, dtype=torch.float64)[:, None, None]
            assert torch.equal(rows, expected)


@pytest.mark.parametrize("seed", range(8))
def test_random_passes_and_commits(seed: int) -> None:
    """Trees of random size and random increasing paths, the empty one and the whole one among them."""
    naive = Naive(cache(), seed)
    for _ in range(60):
        slot = naive.chance.randrange(3)
        if len(naive.lists[slot]) > 30:
            naive.kv.close(slot)
            naive.lists[slot] = []
        count = naive.chance.randint(1, 12)
        marks = naive.write(slot, count)
        kept = naive.chance.choice([0, count, naive.chance.randint(0, count)])
        naive.commit(slot, marks, sorted(naive.chance.sample(range(count), kept)))
        naive.kv.pages.shrink(slot, naive.kv.length[slot])
        naive.check()


@pytest.mark.parametrize(
    "path", [[], [0], [2], [0, 1, 2], [0, 2, 5], [1, 2, 3, 4, 5, 6], [0, 3, 4, 5, 6, 7, 8], [8], range(1, 9)], ids=str
)
def test_commit_of_one_path(path: list[int]) -> None:
    """Sources and targets may overlap, and both cross page borders."""
    naive = Naive(cache(), 1)
    naive.commit(1, naive.write(1, 5), [0, 1, 2, 3, 4])
    naive.commit(0, naive.write(0, 3), [0, 2])
    naive.commit(1, naive.write(1, 9), list(path))
    naive.check()
    naive.commit(1, naive.write(1, 2), [1])
    naive.check()


def test_commit_touches_only_the_rows_it_fills() -> None:
    naive = Naive(cache(), 2)
    naive.commit(0, naive.write(0, 6), list(range(6)))
    marks = naive.write(0, 7)
    before = naive.kv.data.clone()
    naive.commit(0, marks, [1, 4, 6])
    changed = (naive.kv.data != before).flatten(3).any(-1).any(0).any(0).nonzero().flatten().tolist()
    assert sorted(changed) == sorted(naive.kv.pages.rows[0, 6:9].tolist())


def test_commit_of_the_first_nodes_moves_nothing() -> None:
    naive = Naive(cache(), 3)
    marks = naive.write(0, 7)
    before = naive.kv.data.clone()
    naive.commit(0, marks, [0, 1, 2])
    assert torch.equal(naive.kv.data, before)
    naive.check()


def test_open_takes_a_known_prefix_and_close_gives_it_back() -> None:
    naive, text = Naive(cache(), 4), list(range(11))
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


def test_room_is_at_least_what_was_asked_for() -> None:
    kv = cache(tokens=10, page=4)
    assert kv.pages.count == 3
    assert kv.data.shape[:2] == (2, CONFIG.layers)
    assert kv.data.shape[2] >= 12
    assert kv.data.shape[3:] == (CONFIG.kv_heads, CONFIG.head_dim)
    assert torch.isfinite(kv.data).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_token_bytes_is_what_a_token_takes(dtype: torch.dtype) -> None:
    kv = KVCache(CONFIG, tokens=64, page=4, slots=1, context=16, dtype=dtype, device=torch.device("cpu"))
    assert KVCache.token_bytes(CONFIG, dtype) == kv.data[:, :, 0].numel() * kv.data.element_size()
