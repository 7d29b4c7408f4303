"""Differences of exact distributions (`forerun.check.oracle`) and mean numbers of emitted
tokens."""

from __future__ import annotations

from forerun.check.oracle import (
    Probability,
    Proposals,
    StringProbs,
    Table,
    complete,
    emission,
    joint,
)
from forerun.verify.base import RatioRule


def error(one: StringProbs, other: StringProbs) -> Probability:
    """Return the largest difference of two distributions."""
    return max(abs(one.get(s, 0) - other.get(s, 0)) for s in {*one, *other})


def bias(rule: RatioRule, drafts: Proposals, target: Table, depth: int) -> Probability:
    """Return the error of a round's distribution: 0, or float64 rounding, for an exact rule."""
    return error(
        complete(emission(rule, drafts, target), target, depth + 1), joint(target, depth + 1)
    )


def mean_tokens(emitted: StringProbs) -> Probability:
    """Return the mean number of tokens that a round emits."""
    return sum(len(string) * chance for string, chance in emitted.items())
