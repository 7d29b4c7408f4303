"""Attention in which each token walks its own keys equals the reference, and a token of a tree has
the bits of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch
import triton.language as tl
from torch import Tensor

from forerun.kernels import reference
from forerun.kernels.triton import attention
from forerun.kernels.triton.attention import SPAN, Walk, attend
from tests.kernels.triton.compiled import check_machine_code
from tests.kernels.triton.inputs import DEVICE, random, tensor

ROWS = 700
# query heads, key heads, size of a head, committed tokens, softcap, window, and other options
SHAPES: list[tuple[Any, ...]] = [
    (4, 2, 16, 0, None, None, {}),
    (3, 3, 24, 300, None, None, {"chunk": 64}),
    (8, 1, 32, SPAN - 1, 20.0, None, {"sink_logits": True}),
    (4, 4, 80, 2 * SPAN, None, 40, {"sinks": SPAN + 3}),
    (6, 2, 16, 257, 5.0, 128, {}),
    (2, 2, 16, 2 * SPAN + 9, None, 9, {"sinks": 5, "sink_logits": True}),
]
PARENTS = [-1, 0, 0, 1, 1, 2, 3, 3, 6]  # a draft tree


def paths(parents: Sequence[int]) -> list[list[int]]:
    """Return the path of each node from the root to the node."""
    found: list[list[int]] = []
    for node, parent in enumerate(parents):
        found.append([*(found[parent] if parent >= 0 else []), node])
    return found


def walk_of(
    lines: Tensor, lengths: Sequence[int], trees: Sequence[Sequence[int]], each: int
) -> Walk:
    """Return the walk of a tree behind each segment's committed rows, padded to `each` tokens."""
    position, direct, extra_at, extra = [], [], [], []
    for line, length, parents in zip(lines, lengths, trees, strict=True):
        for path in paths(parents):
            position.append(length + len(path) - 1)
            direct.append(length)
            extra_at.append(len(extra))
            extra += [int(line[length + node]) for node in path]
        padding = each - len(parents)
        position += [-1] * padding
        direct += [0] * padding
        extra_at += [0] * padding

    def ints(numbers: Sequence[int]) -> Tensor:
        return tensor(numbers, torch.int32)

    rows = tensor([*extra, 0])
    return Walk(ints(position), ints(direct), lines, rows, ints(extra_at))


def lines_of(segments: int, columns: int) -> Tensor:
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    return torch.stack([order.roll(17 * r)[:columns] for r in range(segments)])


def options_of(options: dict[str, Any], heads: int) -> dict[str, Any]:
    return options | ({"sink_logits": random(7, heads)} if "sink_logits" in options else {})


def visible_from(last: int, window: int | None, options: dict[str, Any]) -> list[int]:
    """Return the positions that are visible to a token at `last`."""
    first = max(last - window + 1, 0) if window else 0
    if "chunk" in options:
        first = max(first, last - last % options["chunk"])
    return [p for p in range(last + 1) if p >= first or p < options.get("sinks", 0)]


def nan_tensor(*shape: Any, **options: Any) -> Tensor:
    return torch.full(*shape, torch.nan, **options)


def case_reference() -> None:
    """Two segments, one of them a tree, compared with softmax over the rows of each token."""
    for heads, kv_heads, size, length, softcap, window, more in SHAPES:
        options = options_of(more, heads)
        keys, values = (random(seed, ROWS, kv_heads, size) for seed in (1, 2))
        lines = lines_of(2, 3 * SPAN)
        trees, lengths = [PARENTS, [-1]], [length, 5]
        q = random(4, 2 * len(PARENTS), heads, size)
        walk = walk_of(lines, lengths, trees, len(PARENTS))
        with patch.object(torch, "empty", nan_tensor):  # no uncomputed part may be read
            found = attend(q, keys, values, walk, size**-0.5, softcap, window, **options)
        for r, (line, own, parents) in enumerate(zip(lines, lengths, trees, strict=True)):
            for node, path in enumerate(paths(parents)):
                rows = [*line[:own].tolist(), *(int(line[own + i]) for i in path)]
                rows = [rows[p] for p in visible_from(len(rows) - 1, window, more)]
                token = r * len(PARENTS) + node
                expected = reference.attention(
                    q[None, token : token + 1],
                    keys[None, rows],
                    values[None, rows],
                    None,
                    size**-0.5,
                    softcap,
                    options.get("sink_logits"),
                )
                torch.testing.assert_close(found[token], expected[0, 0], rtol=1e-5, atol=1e-5)


def case_bits() -> None:
    """Each node of a tree has the bits of a pass over that token alone, after its path."""
    for heads, kv_heads, size, length, softcap, window, more in (*SHAPES[::2], SHAPES[-1]):
        options = options_of(more, heads)
        keys, values = (random(seed, ROWS, kv_heads, size) for seed in (1, 2))
        (line,) = lines = lines_of(1, 3 * SPAN)
        q = random(4, len(PARENTS), heads, size)
        walk = walk_of(lines, [length], [PARENTS], len(PARENTS))
        tree = attend(q, keys, values, walk, size**-0.5, softcap, window, **options)
        for node, path in list(enumerate(paths(PARENTS)))[::4]:
            own = line.clone()
            own[length : length + len(path)] = line[[length + i for i in path]]
            alone = walk_of(own[None], [length + len(path) - 1], [[-1]], 1)
            own_q, scale = q[node : node + 1], size**-0.5
            single = attend(own_q, keys, values, alone, scale, softcap, window, **options)
            assert torch.equal(single[0], tree[node])


def case_padding() -> None:
    """Padding tokens read nothing and get zeros; nan in rows that no token sees does no harm."""
    keys, values = random(1, ROWS, 2, 16), random(2, ROWS, 2, 16)
    lines = lines_of(1, SPAN)
    keys[lines[0, 40:]] = values[lines[0, 40:]] = torch.nan
    walk = walk_of(lines, [39], [[-1]], 4)
    found = attend(random(4, 4, 4, 16), keys, values, walk, 0.25)
    assert found[0].isfinite().all() and not found[1:].any()


def compile_attention() -> None:
    """Compile both kernels for heads of 128 in groups of four."""
    sizes = dict(G=4, GP=16, D=128, DP=128, SPLITS=8, SPAN=SPAN)
    kinds = {"q": "*bf16", "keys": "*bf16", "values": "*bf16", "out": "*bf16"}
    kinds |= {"table": "*i64", "extra": "*i64", "scale": "fp32", "softcap": "fp32"}
    kinds |= dict.fromkeys(("direct", "extra_at", "position"), "*i32")
    kinds |= {
        f"{name}_{way}": "*fp32" for name in ("most", "total", "sums") for way in ("in", "out")
    }
    split = sizes | dict(KEYS=64, DOT=tl.bfloat16)
    check_machine_code(attention._attend_split, kinds, split, registers=168, contains="HMMA")
    kinds["sink_logits"] = "*fp32"
    for has_sink_logits in (False, True):
        join = sizes | dict(HAS_SINK_LOGITS=has_sink_logits)
        check_machine_code(attention._attend_join, kinds, join, registers=64)
