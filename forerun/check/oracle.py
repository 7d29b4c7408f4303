"""Exact output distributions of speculative decoding on toy models, by enumeration.

A toy model is a table from each prefix to the distribution of the next token, in float64 or in
fractions. `emission` runs a verification rule on every draft that a drafting scheme can produce
and on every outcome of the rule's coin tosses, so its result has no sampling error. A round is
exact if the tokens it emits, completed by the target, have the target's joint distribution. Exact
rounds compose by induction.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
from numpy.random import default_rng

from forerun.types import Draft, Proposal, Verdict
from forerun.verify.base import RatioRule

Probability = Any  # a float or a Fraction
Prefix = tuple[int, ...]
Table = dict[Prefix, np.ndarray]  # the next token's distribution [V] after each prefix
StringProbs = dict[Prefix, Probability]
Children = tuple[list[tuple[int, Proposal]], "np.ndarray | None", Probability]
Scheme = Callable[[Draft, int, np.ndarray], Iterable[Children]]
Proposals = Iterable[tuple[Draft, Probability]]


# Enumeration of coin tosses.


class EnumeratedCoins:
    """Coins that replay a script of choices, then take the first branch of every further toss.

    `others` are the scripts of branches not taken, `weight` the probability of those taken.
    """

    def __init__(self, script: list[int]) -> None:
        self.script = script
        self.taken: list[int] = []
        self.others: list[list[int]] = []
        self.weight: Probability = 1

    def accept(self, p: Probability, q: Probability, node: int) -> bool:
        """Return True on the branch of probability min(1, p / q)."""
        accepted = min(1, p / q) if q else int(p > 0)
        return bool(self._choose([True, False], [accepted, 1 - accepted]))

    def draw(self, weights: np.ndarray, node: int) -> int:
        """Return a token, one branch for each token of non-zero weight. weights [V]"""
        return int(self._choose(range(len(weights)), weights / weights.sum()))

    def _choose(self, values: Iterable[Any], probs: Iterable[Probability]) -> Any:
        branches = [(value, prob) for value, prob in zip(values, probs, strict=True) if prob > 0]
        choice = 0
        if len(self.taken) < len(self.script):
            choice = self.script[len(self.taken)]
        else:
            self.others += [[*self.taken, other] for other in range(1, len(branches))]
        self.taken.append(choice)
        value, prob = branches[choice]
        self.weight *= prob
        return value


def outcomes(run: Callable[[EnumeratedCoins], Verdict]) -> Iterator[tuple[Verdict, Probability]]:
    """Yield every verdict of code that tosses coins, with the probability of its tosses.

    A verdict that is reached in several ways is yielded once for each.
    """
    scripts: list[list[int]] = [[]]
    while scripts:
        coins = EnumeratedCoins(scripts.pop())
        yield run(coins), coins.weight
        scripts += coins.others


# Toy models.


def softmax(logits: np.ndarray) -> np.ndarray:
    """Normalise logits along the last axis."""
    weights: np.ndarray = np.exp(logits - logits.max(-1, keepdims=True))
    probs: np.ndarray = weights / weights.sum(-1, keepdims=True)
    return probs


def fractions(weights: Iterable[int]) -> np.ndarray:
    """Normalise integer weights in exact arithmetic. Returns [V] of Fraction (dtype object)."""
    weights = [int(w) for w in weights]
    return np.array([Fraction(w, sum(weights)) for w in weights], dtype=object)


def toy_models(kind: str, vocab: int, depth: int, seed: int) -> tuple[Table, Table]:
    """Return a random target and a random drafter for every prefix of at most `depth` tokens.

    Args:
        kind: "float"; "exact" (fractions); or "sparse" (fractions with zeros, one-hot
            distributions, and target and drafter sometimes equal).
        vocab: number of tokens.
        depth: length of the longest prefix.
        seed: seed of the random tables.
    """
    rng = default_rng(seed)
    target: Table = {}
    drafter: Table = {}
    for length in range(depth + 1):
        for prefix in itertools.product(range(vocab), repeat=length):
            if kind == "float":
                logits = rng.normal(size=vocab) * 1.5
                target[prefix] = softmax(logits)
                drafter[prefix] = softmax(logits + rng.normal(size=vocab) * 0.9)
            else:
                low = 0 if kind == "sparse" else 1
                p, q = rng.integers(low, 6, (2, vocab))
                p[rng.integers(vocab)] += p.sum() == 0
                q[rng.integers(vocab)] += q.sum() == 0
                same = kind == "sparse" and rng.random() < 0.2
                target[prefix] = fractions(p)
                drafter[prefix] = fractions(p if same else q)
    return target, drafter


# Drafting schemes. A scheme gets the draft so far, the node to expand and the drafter's
# distribution there, and yields every set of children with the distribution that its sampled
# tokens are drawn from and the probability of the set.


def prefix_of(draft: Draft, node: int) -> Prefix:
    """Return the tokens on the path from the root (excluded) to `node` (included)."""
    return tuple(draft.tokens[i] for i in draft.path_to(node)[1:])


def sampled(draft: Draft, node: int, q: np.ndarray) -> Iterator[Children]:
    """Draft a chain: one child, drawn from q."""
    for token in np.flatnonzero(q > 0):
        yield [(int(token), Proposal.SAMPLED)], q, q[token]


def greedy(draft: Draft, node: int, q: np.ndarray) -> Iterable[Children]:
    """Draft a chain of most likely tokens, which are deterministic."""
    return [([(int(np.argmax(q)), Proposal.DETERMINISTIC)], None, 1)]


def mixed(draft: Draft, node: int, q: np.ndarray) -> Iterable[Children]:
    """Draft a chain of deterministic and sampled tokens; the prefix decides which."""
    prefix = prefix_of(draft, node)
    if (sum(prefix) + len(prefix)) % 2:
        return greedy(draft, node, q)
    return sampled(draft, node, q)


def without_replacement2(draft: Draft, node: int, q: np.ndarray) -> Iterable[Children]:
    """Draft two different tokens without replacement; one where q has no second token."""
    for a in np.flatnonzero(q > 0):
        others = [b for b in np.flatnonzero(q > 0) if b != a]
        first = (int(a), Proposal.WITHOUT_REPLACEMENT)
        if not others:
            yield [first], q, q[a]
        for b in others:
            second = (int(b), Proposal.WITHOUT_REPLACEMENT)
            yield [first, second], q, q[a] * q[b] / sum(q[others])


def greedy_plus_one(
    draft: Draft, node: int, q: np.ndarray, sampled_first: bool = True
) -> Iterable[Children]:
    """Draft the most likely token deterministically, and one token sampled from the others."""
    best = int(np.argmax(q))
    rest = q.copy()
    rest[best] = 0
    top = (best, Proposal.DETERMINISTIC)
    if not rest.sum():
        yield [top], None, 1
        return
    rest = rest / rest.sum()
    for token in np.flatnonzero(rest > 0):
        pair = [(int(token), Proposal.SAMPLED), top]
        yield pair if sampled_first else pair[::-1], rest, rest[token]


CHAINS: dict[str, Scheme] = {"sampled": sampled, "greedy": greedy, "mixed": mixed}
TREES: dict[str, Scheme] = {"two samples": without_replacement2, "greedy + sample": greedy_plus_one}


# Exact distributions.


def proposals(scheme: Scheme, drafter: Table, depth: int) -> Iterator[tuple[Draft, Probability]]:
    """Yield every draft that a scheme can produce, with its probability.

    Nodes are expanded in the order in which they were added.
    """

    def expand(
        draft: Draft, rows: list[np.ndarray], weight: Probability
    ) -> Iterator[tuple[Draft, Probability]]:
        node = len(rows)
        if node == len(draft):
            probs = np.stack(rows)
            yield Draft(draft.tokens, draft.parents, draft.sources, draft.proposals, probs), weight
            return
        prefix = prefix_of(draft, node)
        leaf: Children = ([], None, 1)
        choices = [leaf] if len(prefix) == depth else scheme(draft, node, drafter[prefix])
        for children, q, prob in choices:
            wider = Draft([*draft.tokens], [*draft.parents], [*draft.sources], [*draft.proposals])
            for token, law in children:
                wider.add(token, node, "toy", law)
            row = drafter[()] * 0 if q is None else q
            yield from expand(wider, [*rows, row], weight * prob)

    yield from expand(Draft.root(0), [], 1)


def rows(draft: Draft, target: Table) -> np.ndarray:
    """Return the target's distribution after each node. [N, V]"""
    return np.stack([target[prefix_of(draft, node)] for node in range(len(draft))])


def emission(rule: RatioRule, drafts: Proposals, target: Table) -> StringProbs:
    """Return the distribution of the string that one round emits.

    Raises:
        AssertionError: the rule's verdict is not a path from the root followed by one token.
    """
    emitted: StringProbs = defaultdict(int)
    for draft, weight in drafts:
        p = rows(draft, target)
        for verdict, prob in outcomes(partial(rule, draft, p)):
            kept = tuple(draft.tokens[node] for node in verdict.path[1:])
            assert draft.path_to(verdict.path[-1]) == verdict.path, "not a path from the root"
            assert tuple(verdict.tokens[:-1]) == kept, "the tokens are not those of the path"
            emitted[tuple(verdict.tokens)] += weight * prob
    return emitted


def complete(emitted: StringProbs, target: Table, length: int) -> StringProbs:
    """Let the target continue every emitted string to `length` tokens."""
    probs: StringProbs = defaultdict(int, emitted)
    for short in range(length):
        for string in [s for s in probs if len(s) == short]:
            prob = probs.pop(string)
            for token in np.flatnonzero(target[string] > 0):
                probs[(*string, int(token))] += prob * target[string][token]
    return probs


def joint(target: Table, length: int) -> StringProbs:
    """Return the target's own distribution of strings of `length` tokens."""
    return complete({(): 1}, target, length)
