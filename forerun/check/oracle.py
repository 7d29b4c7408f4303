"""Exact laws of speculative decoding on toy models: every draft, every coin, no sampling error.

A toy model is a table from each prefix to the law of the next token, in float64 or in fractions.
`emission` runs the code of a ratio rule on every draft a scheme can give and on every outcome of
its coins. A round is exact if what it emits, completed by the target, has the target's joint law;
rounds then compose by induction."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
from numpy.random import default_rng

from forerun.draft.compose import merged
from forerun.types import Draft, Proposal, Verdict
from forerun.verify.base import RatioRule

Chance = Any  # a float or a Fraction
Prefix = tuple[int, ...]
Table = dict[Prefix, np.ndarray]
Strings = dict[Prefix, Chance]
Children = tuple[list[tuple[int, Proposal]], "np.ndarray | None", Chance]
Scheme = Callable[[Draft, int, np.ndarray], Iterable[Children]]
Merged = tuple[Scheme, Scheme]  # of two drafters whose drafts are merged into one tree
Proposals = Iterable[tuple[Draft, Chance]]


class Coins:
    """Coins that repeat a script of earlier choices, then take first branches and note the others
    as new scripts."""

    def __init__(self, script: list[int]) -> None:
        self.script = script
        self.taken: list[int] = []
        self.others: list[list[int]] = []
        self.weight: Chance = 1

    def accept(self, p: Chance, q: Chance, node: int) -> bool:
        chance = min(1, p / q) if q else int(p > 0)
        return bool(self._choose([True, False], [chance, 1 - chance]))

    def draw(self, weights: np.ndarray, node: int) -> int:
        return int(self._choose(range(len(weights)), weights / weights.sum()))

    def _choose(self, values: Iterable[Any], chances: Iterable[Chance]) -> Any:
        branches = [
            (value, chance) for value, chance in zip(values, chances, strict=True) if chance > 0
        ]
        choice = 0
        if len(self.taken) < len(self.script):
            choice = self.script[len(self.taken)]
        else:
            self.others += [[*self.taken, other] for other in range(1, len(branches))]
        self.taken.append(choice)
        value, chance = branches[choice]
        self.weight *= chance
        return value


def outcomes(play: Callable[[Coins], Verdict]) -> Iterator[tuple[Verdict, Chance]]:
    """Every verdict of code that tosses coins, once for each way to it, and the chance of that
    way."""
    scripts: list[list[int]] = [[]]
    while scripts:
        coins = Coins(scripts.pop())
        yield play(coins), coins.weight
        scripts += coins.others


def softmax(scores: np.ndarray) -> np.ndarray:
    weights: np.ndarray = np.exp(scores - scores.max(-1, keepdims=True))
    law: np.ndarray = weights / weights.sum(-1, keepdims=True)
    return law


def fractions(weights: Iterable[int]) -> np.ndarray:
    """A law with exact arithmetic, from whole weights. [V] object"""
    weights = [int(w) for w in weights]
    return np.array([Fraction(w, sum(weights)) for w in weights], dtype=object)


def toy_models(kind: str, vocab: int, depth: int, seed: int) -> tuple[Table, Table]:
    """A target and a drafter with laws for every prefix of at most `depth` tokens.

    `kind` is "float"; "exact", in fractions; or "sparse", in fractions with zeros, one-hot laws and
    equal laws."""
    rng = default_rng(seed)
    target: Table = {}
    drafter: Table = {}
    for length in range(depth + 1):
        for prefix in itertools.product(range(vocab), repeat=length):
            if kind == "float":
                scores = rng.normal(size=vocab) * 1.5
                target[prefix], drafter[prefix] = (
                    softmax(scores),
                    softmax(scores + rng.normal(size=vocab) * 0.9),
                )
            else:
                low = 0 if kind == "sparse" else 1
                p, q = rng.integers(low, 6, (2, vocab))
                p[rng.integers(vocab)] += p.sum() == 0
                q[rng.integers(vocab)] += q.sum() == 0
                same = kind == "sparse" and rng.random() < 0.2
                target[prefix], drafter[prefix] = fractions(p), fractions(p if same else q)
    return target, drafter


def prefix_of(draft: Draft, node: int) -> Prefix:
    """The tokens between the root and `node`, that included."""
    return tuple(draft.tokens[i] for i in draft.path_to(node)[1:])


def sampled(draft: Draft, node: int, q: np.ndarray) -> Iterator[Children]:
    """The scheme of a chain: one child, drawn from q."""
    for token in np.flatnonzero(q > 0):
        yield [(int(token), Proposal.SAMPLED)], q, q[token]


def proposals(scheme: Scheme, drafter: Table, depth: int) -> Iterator[tuple[Draft, Chance]]:
    """Every draft a scheme can give and its chance; nodes are expanded in the order in which they
    were added.

    A scheme sees the draft so far and the node to expand, and gives every set of children with the
    law its sampled ones are drawn from and the chance of the set.
    """

    def grow(
        draft: Draft, laws: list[np.ndarray], weight: Chance
    ) -> Iterator[tuple[Draft, Chance]]:
        node = len(laws)
        if node == len(draft):
            yield (
                Draft(draft.tokens, draft.parents, draft.sources, draft.proposals, np.stack(laws)),
                weight,
            )
            return
        prefix = prefix_of(draft, node)
        nothing: Children = ([], None, 1)
        for children, q, chance in (
            [nothing] if len(prefix) == depth else scheme(draft, node, drafter[prefix])
        ):
            wider = Draft([*draft.tokens], [*draft.parents], [*draft.sources], [*draft.proposals])
            for token, law in children:
                wider.add(token, node, "toy", law)
            row = drafter[()] * 0 if q is None else q
            yield from grow(wider, [*laws, row], weight * chance)

    yield from grow(Draft.root(0), [], 1)


def merged_proposals(
    schemes: Merged, drafters: Sequence[Table], depth: int
) -> Iterator[tuple[Draft, Chance]]:
    """Every tree that two drafters give together, each by a scheme of its own and drawing
    independently."""
    first, second = (
        list(proposals(scheme, own, depth)) for scheme, own in zip(schemes, drafters, strict=True)
    )
    for (one, chance), (other, chance_of_other) in itertools.product(first, second):
        yield merged([one, other]), chance * chance_of_other


def rows(draft: Draft, target: Table) -> np.ndarray:
    """The target's law after each node. [N, V]"""
    return np.stack([target[prefix_of(draft, node)] for node in range(len(draft))])


def emission(rule: RatioRule, drafts: Proposals, target: Table) -> Strings:
    """The law of the string that one round emits."""
    law: Strings = defaultdict(int)
    for draft, weight in drafts:
        p = rows(draft, target)
        for verdict, chance in outcomes(partial(rule, draft, p)):
            kept = tuple(draft.tokens[node] for node in verdict.path[1:])
            assert draft.path_to(verdict.path[-1]) == verdict.path, (
                "what is kept is a path from the root"
            )
            assert tuple(verdict.tokens[:-1]) == kept, "accepted tokens are those of the path"
            law[tuple(verdict.tokens)] += weight * chance
    return law


def complete(emitted: Strings, target: Table, length: int) -> Strings:
    """The law of strings of `length` tokens when the target goes on from what was emitted."""
    law: Strings = defaultdict(int, emitted)
    for short in range(length):
        for string in [s for s in law if len(s) == short]:
            chance = law.pop(string)
            for token in np.flatnonzero(target[string] > 0):
                law[(*string, int(token))] += chance * target[string][token]
    return law


def joint(target: Table, length: int) -> Strings:
    """The target's own law of strings of `length` tokens."""
    return complete({(): 1}, target, length)
