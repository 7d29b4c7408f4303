"""The operations of a layer between its products equal their references, row by row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from forerun.kernels.triton import fused
from tests.kernels.triton.compiled import check_machine_code
from tests.kernels.triton.inputs import random, tensor

# the interpreter truncates to bfloat16 where a GPU rounds
SLACK = {torch.float32: dict(rtol=1e-5, atol=1e-5), torch.bfloat16: dict(rtol=2**-5, atol=2**-5)}


def rows_alone_equal(found: Tensor, run: Any, rows: tuple[int, ...]) -> None:
    for row in rows:
        assert torch.equal(run(slice(row, row + 1))[0], found[row])


def case_add_norm() -> None:
    """Covers odd widths, one part and several, all options, and both dtypes."""
    for rows, width, count in ((1, 1, 1), (5, 33, 2), (3, 300, 8), (64, 64, 4)):
        for dtype in SLACK:
            x, parts = random(1, rows, width).to(dtype), random(2, count, rows, width)
            weight, bias = random(3, width), random(4, width).to(dtype)
            options: list[dict[str, Any]] = [
                {},
                dict(bias=bias, scale=0.3),
                dict(bias=bias, branch_norm=weight),
            ]
            for own in options[: 1 if rows == 64 else 3]:
                found = fused.add_norm(x, parts, weight, 1e-5, **own)
                expected = fused.add_norm_reference(x, parts, weight, 1e-5, **own)
                for one, other in zip(found, expected, strict=True):
                    assert one.dtype == dtype
                    torch.testing.assert_close(one, other, **SLACK[dtype])
            (_, normed), (stream, same) = (
                fused.add_norm(x, None, weight, 1e-5),
                fused.add_norm(x, parts, None, 1e-5),
            )
            expected = fused.add_norm_reference(x, None, weight, 1e-5)
            torch.testing.assert_close(normed, expected[1], **SLACK[dtype])
            assert same is x and torch.equal(stream, fused.add_norm(x, parts, weight, 1e-5)[0])


def case_broken_rows() -> None:
    """A row that is not finite stays so, as in torch, and changes no other; zeros give zeros."""
    x, parts, weight = random(1, 6, 40), random(2, 3, 6, 40), random(3, 40)
    clean = fused.add_norm(x, parts, weight, 1e-6)
    x[1, 3], parts[1, 2, 0], x[4] = torch.nan, torch.inf, -torch.inf
    x[5], parts[:, 5] = 0, 0
    found = fused.add_norm(x, parts, weight, 1e-6)
    expected = fused.add_norm_reference(x, parts, weight, 1e-6)
    for one, other, before in zip(found, expected, clean, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True, **SLACK[torch.float32])
        assert torch.equal(one[[0, 3]], before[[0, 3]]) and not one[5].any()
    rows_alone_equal(
        found[1], lambda own: fused.add_norm(x[own], parts[:, own], weight, 1e-6)[1], (0, 3)
    )


# heads, heads of keys, size of a head, rotated pairs, norms by head, bias
SHAPES = [
    (4, 2, 16, 8, False, False),
    (3, 1, 24, 4, True, True),
    (2, 2, 80, 40, True, False),
    (4, 1, 8, 0, False, True),
]


def case_rotate_and_store() -> None:
    """Partial rotations, norms, biases, cache rows in any order, and padding without a row."""
    for heads, kv_heads, size, pairs, norms, biased in SHAPES:
        for dtype in SLACK:
            width, tokens = (heads + 2 * kv_heads) * size, 7
            parts = random(1, 3, tokens, width)
            angles = random(2, 50, 1, pairs) * 3
            rotation = (angles.cos().to(dtype), angles.sin().to(dtype)) if pairs else None
            positions = tensor([0, 49, 3, 3, 4, 7, 0])
            rows = tensor([5, 90, 0, 17, -1, 99, -1])
            options: dict[str, Any] = dict(eps=1e-6)
            if norms:
                options |= dict(q_norm=random(3, size), k_norm=random(4, size))
            if biased:
                options |= dict(bias=random(5, width).to(dtype))
            cache = [random(6, 100, kv_heads, size).to(dtype) for _ in range(2)]
            caches = [[stored.clone() for stored in cache] for _ in range(2)]
            found = fused.rotate_and_store(parts, rotation, positions, rows, *caches[0], **options)
            expected = fused.rotate_and_store_reference(
                parts, rotation, positions, rows, *caches[1], **options
            )
            assert found.dtype == dtype
            is_kept = rows >= 0
            torch.testing.assert_close(found[is_kept], expected[is_kept], **SLACK[dtype])
            untouched = [row for row in range(100) if row not in rows.tolist()]
            for own, other, before in zip(*caches, cache, strict=True):
                torch.testing.assert_close(own, other, **SLACK[dtype])
                assert torch.equal(own[untouched], before[untouched])

            def alone(
                own: slice,
                rotation: Any = rotation,
                options: Any = options,
                parts: Tensor = parts,
                cache: Any = caches[0],
                positions: Tensor = positions,
                rows: Tensor = rows,
            ) -> Tensor:
                return fused.rotate_and_store(
                    parts[:, own], rotation, positions[own], rows[own], *cache, **options
                )

            rows_alone_equal(found, alone, (1, 5))


def case_gate() -> None:
    for rows, inner, count in ((1, 1, 1), (3, 1025, 2), (64, 7, 1)):
        for dtype in SLACK:
            parts = random(1, count, rows, 2 * inner) * 4
            parts[0, 0, 0], parts[0, -1, -1] = torch.nan, 1e30
            bias = random(2, 2 * inner).to(dtype)
            for kind in fused.ACTIVATIONS:
                found = fused.gate(parts, kind, dtype, bias=bias)
                expected = fused.gate_reference(parts, kind, dtype, bias=bias)
                slack = SLACK[dtype]
                torch.testing.assert_close(found, expected, equal_nan=True, **slack)


def compile_fused() -> None:
    kinds = dict.fromkeys(("x", "bias", "stream_out", "normed_out", "q_out", "out"), "*bf16")
    kinds |= dict.fromkeys(("cos", "sin", "keys", "values"), "*bf16")
    kinds |= dict.fromkeys(("parts", "branch_weight", "weight", "q_weight", "k_weight"), "*fp32")
    kinds |= dict(eps="fp32", scale="fp32", positions="*i64", rows="*i64")
    norm = dict(PARTS=4, HAS_BIAS=True, NORMS_BRANCH=True, NORMS=True, BN=4096)
    counts = kinds | dict(rows="i32")
    check_machine_code(fused._add_norm, counts, norm, registers=96, warps=8, aligned=("width",))
    gated = dict(PARTS=1, HAS_BIAS=False, KIND=1, BN=fused.GATED)
    check_machine_code(fused._gate, counts, gated, registers=64, aligned=("inner",))
    rotation = dict(PARTS=4, HAS_BIAS=True, NORMS_Q=True, NORMS_K=True, R=64, D=128, DP=128)
    plain = dict.fromkeys(("HAS_BIAS", "NORMS_Q", "NORMS_K"), False) | dict(R=0)
    for options in (rotation, rotation | plain):
        check_machine_code(fused._rotate_and_store, kinds, options, registers=96, warps=1)
