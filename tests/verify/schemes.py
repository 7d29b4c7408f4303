"""Drafting schemes for enumeration (`forerun.check.oracle.Scheme`): trees of every kind that
drafters make."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from forerun.check.oracle import (
    Children,
    Probability,
    Scheme,
    Table,
    greedy,
    greedy_plus_one,
    mixed,
    prefix_of,
    proposals,
    sampled,
    without_replacement2,
)
from forerun.draft.compose import merge_drafts
from forerun.types import Draft, Proposal

MergedScheme = tuple[Scheme, Scheme]  # two drafters whose drafts are merged into one tree


def iid2(draft: Draft, node: int, q: np.ndarray) -> Iterable[Children]:
    """Draft two independent samples, which may be equal."""
    support = np.flatnonzero(q > 0)
    for a, b in itertools.product(support, support):
        yield [(int(a), Proposal.SAMPLED), (int(b), Proposal.SAMPLED)], q, q[a] * q[b]


def top2(draft: Draft, node: int, q: np.ndarray) -> Iterable[Children]:
    """Draft the two most likely tokens deterministically."""
    yield [(int(t), Proposal.DETERMINISTIC) for t in np.argsort(-q, kind="stable")[:2]], None, 1


def ngram_plus_sample(
    draft: Draft, node: int, q: np.ndarray, distinct: bool = False
) -> Iterable[Children]:
    """Draft a sample and a token looked up from the prefix; with `distinct` only if they differ."""
    found = sum(prefix_of(draft, node)) % len(q)
    for t in np.flatnonzero(q > 0):
        both = [(int(t), Proposal.SAMPLED), (found, Proposal.DETERMINISTIC)]
        yield both[:1] if distinct and t == found else both, q, q[t]


def crossed(draft: Draft, node: int, q: np.ndarray) -> Iterable[Children]:
    """Draft two different samples; one sibling decides whether the other is expanded."""
    siblings = draft.children()[draft.parents[node]] if node else []
    if any(draft.tokens[s] % 2 for s in siblings if s != node):
        return [([], None, 1)]
    return without_replacement2(draft, node, q)


greedy_first = functools.partial(greedy_plus_one, sampled_first=False)
TREES: dict[str, Scheme] = {
    "sampled chain": sampled,
    "iid2": iid2,
    "without replacement 2": without_replacement2,
    "top2": top2,
    "greedy + 1": greedy_plus_one,
    "1 + greedy": greedy_first,
    "n-gram + sample": ngram_plus_sample,
    "n-gram + other sample": functools.partial(ngram_plus_sample, distinct=True),
    "crossed": crossed,
    "mixed chain": mixed,
}
MERGED: dict[str, MergedScheme] = {
    "sampled chain & greedy + 1": (sampled, greedy_plus_one),
    "greedy + 1 & greedy + 1": (greedy_plus_one, greedy_plus_one),
    "greedy chain & sampled chain": (greedy, sampled),
    "top2 & greedy + 1": (top2, greedy_plus_one),
    "sampled chain & n-gram + sample": (sampled, ngram_plus_sample),
    "without replacement 2, twice": (without_replacement2, without_replacement2),
}


def merged_proposals(
    schemes: MergedScheme, drafters: Sequence[Table], depth: int
) -> Iterator[tuple[Draft, Probability]]:
    """Yield every tree that two drafters produce together, each drawing independently."""
    first, second = (
        list(proposals(scheme, own, depth)) for scheme, own in zip(schemes, drafters, strict=True)
    )
    for (one, one_prob), (other, other_prob) in itertools.product(first, second):
        yield merge_drafts([one, other]), one_prob * other_prob
