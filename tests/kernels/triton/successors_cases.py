"""Tables of successors learn the entries of their reference, and grow the same trees."""

from __future__ import annotations

import random

import torch

from forerun.kernels import successors as reference
from forerun.kernels.successors import NONE, Predictions, TableTensors, TreeRoots
from forerun.kernels.triton import successors as kernels
from tests.kernels.triton.compiled import check_machine_code
from tests.kernels.triton.inputs import DEVICE, tensor

VOCAB = 20


def trained(seed: int, entries: int, rows: int) -> tuple[TableTensors, TableTensors]:
    """Return tables that the kernel and its reference have filled from the same two batches."""
    generator = torch.Generator().manual_seed(seed)
    found, expected = (TableTensors.empty(entries, DEVICE) for _ in range(2))
    for count in (rows, rows // 2 + 1):
        tokens = torch.randint(0, VOCAB, (2, count), generator=generator)
        before, last = tokens[0] - (tokens[0] == 0).long(), tokens[1]
        is_valid = torch.rand(count, generator=generator) < 0.9
        logits = 3 * torch.randn(count, VOCAB, generator=generator)
        logits[0] = torch.nan
        logits[1, 3:] = -torch.inf
        given = [each.to(DEVICE) for each in (before, last, is_valid, logits)]
        seen = Predictions.of(*given)
        kernels.learn(found, seen)
        reference.learn(expected, seen)
    return found, expected


def case_learn() -> None:
    """The tables are small, so that entries are evicted, and tokens repeat."""
    for seed, entries, rows in ((0, 8, 30), (1, 64, 40), (2, 1024, 25)):
        found, expected = trained(seed, entries, rows)
        assert torch.equal(found.keys[:entries], expected.keys[:entries])
        held = expected.keys[:entries] != 0
        assert held.any()
        assert torch.equal(found.tokens[:entries][held], expected.tokens[:entries][held])
        assert torch.equal(found.logs[:entries][held], expected.logs[:entries][held])


def case_grow() -> None:
    """Chains and trees, with and without noise, from one table and from two."""
    rng = random.Random(5)
    first, second = trained(3, 256, 60)[1], trained(4, 64, 60)[1]
    rates = torch.linspace(0.02, 1.1, 16, dtype=torch.float64, device=DEVICE)
    plain = (torch.arange(16, dtype=torch.float64, device=DEVICE) + 0.5) / 16
    lengths = set()
    for number, tables in enumerate([[first], [first, second], [second]] * 3):
        count, nodes = rng.choice([1, 3]), rng.choice([1, 4, 9])
        roots = TreeRoots(
            tensor([rng.choice([NONE, *range(VOCAB)]) for _ in range(count)]),
            tensor([rng.randrange(VOCAB) for _ in range(count)]),
            tensor([rng.getrandbits(63) - (1 << 62) for _ in range(count)]),
            tensor([rng.randrange(1000) for _ in range(count)]),
            tensor([rng.choice([0.0, 0.7, 1.3]) for _ in range(count)], dtype=torch.float64),
            tensor([rng.randrange(1, 6) for _ in range(count)]),
            tensor([rng.randrange(nodes + 1) for _ in range(count)]),
            (rates if number % 2 else plain).expand(count, -1).contiguous(),
        )
        is_chain = number % 4 == 3
        found = kernels.grow(tables, roots, nodes, is_chain)
        expected = reference.grow(tables, roots, nodes, is_chain)
        is_node = expected.parents >= 0
        lengths |= set(is_node.sum(1).tolist())
        assert torch.equal(found.tokens, expected.tokens)
        assert torch.equal(found.parents, expected.parents)
        assert torch.equal(found.bins[is_node], expected.bins[is_node])
        torch.testing.assert_close(found.probs, expected.probs, rtol=1e-12, atol=0)
    assert max(lengths) > 4 and 0 in lengths


def compile_learn() -> None:
    kinds = dict(keys="*i64", tokens="*i32", logs="*fp32", before="*i64", last="*i64")
    kinds |= dict(is_valid="*i1", next_tokens="*i32", next_logs="*fp32")
    constants = dict(ENTRIES=1 << 16, WAYS=4, NUM_SUCCESSORS=8)
    check_machine_code(kernels._learn, kinds, constants, 64, warps=1)


def compile_grow() -> None:
    numbers = ("before", "root", "noise", "position", "max_depth", "max_nodes")
    results = ("out_tokens", "out_parents", "out_bins")
    kinds = dict.fromkeys(("keys", "keys2", *numbers, *results), "*i64")
    kinds |= dict(tokens="*i32", tokens2="*i32", logs="*fp32", logs2="*fp32")
    kinds |= dict(temperature="*fp64", rates="*fp64", out_probs="*fp64")
    fixed = dict(BINS=16, WAYS=4, NUM_SUCCESSORS=8, MISSING=-1, ENTRIES=1 << 16)
    for nodes, second, is_chain in ((16, 0, False), (8, 1 << 20, True)):
        size = dict(NODES=nodes, C=8 * nodes, N=2 * nodes)
        constants = dict(ENTRIES2=second, IS_CHAIN=is_chain, **size, **fixed)
        check_machine_code(kernels._grow, kinds, constants, 168, warps=1)
