"""Moving accepted rows gives the cache the bits that `KVCache.commit` gives it."""

from __future__ import annotations

import torch

from forerun.cache.kv import KVCache
from forerun.kernels.triton import compact as kernels
from forerun.kernels.triton.compact import compact
from tests import tiny
from tests.kernels.triton.compiled import check_machine_code
from tests.kernels.triton.inputs import DEVICE, random, tensor

# accepted nodes of each request: none, the root, a prefix, jumps, the last node alone
PATHS = [[], [0], [0, 1, 2], [0, 2, 3, 7], [0, 8], [0, 3, 4, 5, 6, 8]]


def case_equals_commit() -> None:
    """Six requests with 9 nodes on pages of 3."""
    config = tiny.decoder(tiny.family("gemma3")).config
    for dtype in (torch.float32, torch.bfloat16):
        sizes = dict(tokens=200, page=3, slots=6, context=40, dtype=dtype)
        caches = [KVCache(config, **sizes, device=DEVICE) for _ in range(2)]
        data = torch.randn(caches[0].data.shape, generator=torch.Generator().manual_seed(1))
        data[:, ::7] = torch.nan
        for cache in caches:
            cache.data.copy_(data)
            for slot in range(6):
                cache.length[slot] = 2 * slot
                assert cache.pages.grow(slot, 2 * slot + 9)
        for slot, path in enumerate(PATHS):
            if path:
                caches[0].commit(slot, path)
        rows = [caches[1].pages.rows[slot, 2 * slot : 2 * slot + 9].tolist() for slot in range(6)]
        path = tensor([own + [-1] * (16 - len(own)) for own in PATHS], dtype=torch.int32)
        accepted = tensor([len(own) for own in PATHS], dtype=torch.int32)
        for keys_and_values in caches[1]._groups:
            for stored in keys_and_values:
                compact(stored, tensor(rows), path, accepted)
        bits = [cache.data.view(torch.int16) for cache in caches]
        assert torch.equal(*bits)


def case_wide_rows() -> None:
    """Rows of several pieces, with a last piece that is not full."""
    stored = random(2, 2, 12, 3, 700)
    expected = stored.clone()
    rows = tensor([[11, 4, 0, 7, 2]])
    compact(stored, rows, tensor([[0, 2, 4]], dtype=torch.int32), tensor([3]).int())
    expected[:, 4], expected[:, 0] = expected[:, 0].clone(), expected[:, 2].clone()
    assert torch.equal(stored, expected)


def compile_compact() -> None:
    kinds = dict(stored="*i16", rows="*i64", path="*i32", accepted="*i32", plane_stride="i64")
    check_machine_code(
        kernels._compact, kinds, dict(B=kernels.PIECE), registers=64, aligned=("width",)
    )
