"""Ways to draft on toy models: what may hang below a node, and how likely each set of children is
(`oracle.Scheme`)."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable

import numpy as np

from forerun.check.oracle import Children, Merged, Scheme, prefix_of, sampled
from forerun.types import Draft, Proposal


def iid2(draft: Draft, node: int, q: np.ndarray) -> Iterable[Children]:
    """Two independent draws; they may be equal."""
    support = np.flatnonzero(q > 0)
    for a, b in itertools.product(support, support):
        yield [(int(a), Proposal.SAMPLED), (int(b), Proposal.SAMPLED)], q, q[a] * q[b]


def without_replacement2(draft: Draft, node: int, q: np.ndarray) -> Iterable[Children]:
    """Two different tokens, the second from q without the first; one where q has no second."""
    for a in np.flatnonzero(q > 0):
        others = [b for b in np.flatnonzero(q > 0) if b != a]
        first = (int(a), Proposal.WITHOUT_REPLACEMENT)
        if not others:
            yield [first], q, q[a]
        for b in others:
            yield [first, (int(b), Proposal.WITHOUT_REPLACEMENT)], q, q[a] * q[b] / (sum(q[others]))


def top2(draft: Draft, node: int, q: np.ndarray) -> Iterable[Children]:
    """The two likeliest, given."""
    yield [(int(t), Proposal.DETERMINISTIC) for t in np.argsort(-q, kind="stable")[:2]], None, 1


def greedy_plus_one(
    draft: Draft, node: int, q: np.ndarray, sampled_first: bool = True
) -> Iterable[Children]:
    """The likeliest token given, and one drawn from the others."""
    best = int(np.argmax(q))
    rest = q.copy()
    rest[best] = 0
    given = (best, Proposal.DETERMINISTIC)
    if not rest.sum():
        yield [given], None, 1
        return
    rest = rest / rest.sum()
    for t in np.flatnonzero(rest > 0):
        pair = [(int(t), Proposal.SAMPLED), given]
        yield pair if sampled_first else pair[::-1], rest, rest[t]


def ngram_plus_sample(
    draft: Draft, node: int, q: np.ndarray, distinct: bool = False
) -> Iterable[Children]:
    """A draw, and a token looked up from the prefix, which may be the same; with `distinct` it is
    then left out."""
    found = sum(prefix_of(draft, node)) % len(q)
    for t in np.flatnonzero(q > 0):
        both = [(int(t), Proposal.SAMPLED), (found, Proposal.DETERMINISTIC)]
        yield both[:1] if distinct and t == found else both, q, q[t]


def crossed(draft: Draft, node: int, q: np.ndarray) -> Iterable[Children]:
    """Two different draws; whether one is expanded depends on the other, as under a budget for the
    whole tree."""
    siblings = draft.children()[draft.parents[node]] if node else []
    if any(draft.tokens[s] % 2 for s in siblings if s != node):
        return [([], None, 1)]
    return without_replacement2(draft, node, q)


def mixed(draft: Draft, node: int, q: np.ndarray) -> Iterable[Children]:
    """A chain of given and sampled tokens, the kind chosen from what stands before."""
    prefix = prefix_of(draft, node)
    if (sum(prefix) + len(prefix)) % 2:
        return [([(int(np.argmax(q)), Proposal.DETERMINISTIC)], None, 1)]
    return sampled(draft, node, q)


def greedy(draft: Draft, node: int, q: np.ndarray) -> Iterable[Children]:
    """A chain of likeliest tokens, given."""
    return [([(int(np.argmax(q)), Proposal.DETERMINISTIC)], None, 1)]


given_first = functools.partial(greedy_plus_one, sampled_first=False)
CHAINS: dict[str, Scheme] = {"sampled chain": sampled, "given chain": greedy, "mixed chain": mixed}
TREES: dict[str, Scheme] = {
    "sampled chain": sampled,
    "iid2": iid2,
    "without replacement 2": without_replacement2,
    "top2": top2,
    "greedy + 1": greedy_plus_one,
    "1 + greedy": given_first,
    "n-gram + sample": ngram_plus_sample,
    "n-gram + other sample": functools.partial(ngram_plus_sample, distinct=True),
    "crossed": crossed,
    "mixed chain": mixed,
}
MERGED: dict[str, Merged] = {
    "sampled chain & greedy + 1": (sampled, greedy_plus_one),
    "greedy + 1 & greedy + 1": (greedy_plus_one, greedy_plus_one),
    "given chain & sampled chain": (greedy, sampled),
    "top2 & greedy + 1": (top2, greedy_plus_one),
    "sampled chain & n-gram + sample": (sampled, ngram_plus_sample),
}
