"""Walks through drafts give the paths and tokens of the rule `match`."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from forerun.kernels.triton import walk as kernels
from forerun.kernels.triton.walk import walk
from forerun.types import Draft, Proposal, Verdict
from forerun.verify.match import follow
from tests.kernels.triton.compiled import check_machine_code
from tests.kernels.triton.inputs import tensor


def draft_of(tokens: list[int], parents: list[int]) -> Draft:
    count = len(tokens)
    return Draft(tokens, parents, [""] * count, [Proposal.DETERMINISTIC] * count)


def walked(drafts: Sequence[Draft | None], drawn: Sequence[Sequence[int]]) -> list[Verdict]:
    """Walk through drafts; None is an empty one."""
    counts = [0 if draft is None else len(draft) for draft in drafts]
    tokens = [token for draft in drafts if draft for token in draft.tokens]
    parents = [parent for draft in drafts if draft for parent in draft.parents]
    firsts = [sum(counts[:i]) for i in range(len(counts))]
    found = walk(
        tensor(tokens),
        tensor(parents, dtype=torch.int32),
        tensor([token for own in drawn for token in own]),
        tensor(firsts, dtype=torch.int32),
        tensor(counts, dtype=torch.int32),
        max(counts),
    )
    verdicts = []
    for path, own, accepted in zip(
        found.path.tolist(), found.tokens.tolist(), found.accepted.tolist(), strict=True
    ):
        assert set(path[accepted:]) <= {-1} and set(own[accepted:]) <= {-1}
        verdicts.append(Verdict(own[:accepted], path[:accepted]))
    return verdicts


def grown(rng: random.Random, count: int, vocab: int) -> Draft:
    """Return a random tree; siblings may have equal tokens."""
    parents = [-1, *(rng.randrange(max(0, i - 5), i) for i in range(1, count))]
    return draft_of([rng.randrange(vocab) for _ in range(count)], parents)


def case_equals_match() -> None:
    """Chains and trees of 1 to 64 nodes; with few tokens, paths are long and siblings equal."""
    rng = random.Random(3)
    for _ in range(12):
        drafts, drawn = [], []
        for count in rng.sample([1, 2, 3, 7, 16, 33, 64], 3):
            draft = grown(rng, count, 3)
            if rng.random() < 0.4:
                draft = Draft.chain(1, [rng.randrange(2) for _ in range(count - 1)], "x")
            drafts.append(draft)
            drawn.append([rng.randrange(2) for _ in range(count)])
        expected = [follow(draft, own) for draft, own in zip(drafts, drawn, strict=True)]
        assert walked(drafts, drawn) == expected


def case_all_or_nothing() -> None:
    """A fully accepted chain, a fully rejected one, a single root, and empty drafts."""
    chain = Draft.chain(9, list(range(31)), "x")
    drafts = [None, chain, Draft.chain(9, [5, 6], "x"), Draft.root(4), None]
    drawn: list[list[int]] = [[], [*range(31), 77], [4, 5, 6], [1 << 40], []]
    found = walked(drafts, drawn)
    assert found[1] == Verdict([*range(31), 77], list(range(32)))
    assert found[2] == Verdict([4], [0]) and found[3] == Verdict([1 << 40], [0])
    assert found[0] == found[4] == Verdict([], [])


def case_not_finite() -> None:
    """A row without a drawn token ends the walk before it."""
    chain = Draft.chain(9, [1, 2, 3], "x")
    assert walked([chain, chain], [[1, 2, -1, 4], [-1, 2, 3, 4]]) == [
        Verdict([1, 2], [0, 1]),
        Verdict([], []),
    ]


def compile_walk() -> None:
    kinds = dict.fromkeys(("parents", "first", "count", "path", "accepted"), "*i32")
    kinds |= dict.fromkeys(("tokens", "drawn", "emitted"), "*i64")
    for nodes in (1, 64):
        check_machine_code(kernels._walk, kinds, dict(N=nodes), registers=64, warps=1)
