"""Tables of successors: what they learn, and the trees that grow from them."""

from __future__ import annotations

import random

import torch

from forerun.kernels import successors as twin
from forerun.kernels.successors import NONE, Predictions, TableTensors, TreeRoots
from forerun.kernels.triton import successors as kernels
from tests.kernels.triton.compiled import check_machine_code
from tests.kernels.triton.inputs import DEVICE, tensor

VOCAB = 20


def taught(seed: int, entries: int, rows: int) -> tuple[TableTensors, TableTensors]:
    """Tables that the kernel and its twin have taught the same, in two portions."""
    generator = torch.Generator().manual_seed(seed)
    ours, theirs = (TableTensors.empty(entries, DEVICE) for _ in range(2))
    for count in (rows, rows // 2 + 1):
        words = torch.randint(0, VOCAB, (2, count), generator=generator)
        before, last = words[0] - (words[0] == 0).long(), words[1]
        is_valid = torch.rand(count, generator=generator) < 0.9
        logits = 3 * torch.randn(count, VOCAB, generator=generator)
        logits[0] = torch.nan
        logits[1, 3:] = -torch.inf
        given = [each.to(DEVICE) for each in (before, last, is_valid, logits)]
        seen = Predictions.of(*given)
        kernels.learn(ours, seen)
        twin.learn(theirs, seen)
    return ours, theirs


def case_learn() -> None:
    """Small tables, so that entries are pushed out, and tokens that come again."""
    for seed, entries, rows in ((0, 8, 30), (1, 64, 40), (2, 1024, 25)):
        ours, theirs = taught(seed, entries, rows)
        assert torch.equal(ours.keys[:entries], theirs.keys[:entries])
        held = theirs.keys[:entries] != 0
        assert held.any()
        assert torch.equal(ours.tokens[:entries][held], theirs.tokens[:entries][held])
        assert torch.equal(ours.logs[:entries][held], theirs.logs[:entries][held])


def case_grow() -> None:
    """Chains and trees, with noise and without, in one table and in two."""
    rng = random.Random(5)
    first, second = taught(3, 256, 60)[1], taught(4, 64, 60)[1]
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
        ours = kernels.grow(tables, roots, nodes, is_chain)
        theirs = twin.grow(tables, roots, nodes, is_chain)
        is_node = theirs.parents >= 0
        lengths |= set(is_node.sum(1).tolist())
        assert torch.equal(ours.tokens, theirs.tokens) and torch.equal(ours.parents, theirs.parents)
        assert torch.equal(ours.bins[is_node], theirs.bins[is_node])
        torch.testing.assert_close(ours.probs, theirs.probs, rtol=1e-12, atol=0)
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
