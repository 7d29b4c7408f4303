"""How far apart exact laws are (`forerun.check.oracle`), and how many tokens a round emits."""

from __future__ import annotations

from forerun.check.oracle import Chance, Proposals, Strings, Table, complete, emission, joint
from forerun.verify.base import RatioRule


def error(one: Strings, other: Strings) -> Chance:
    """The largest difference of two laws."""
    return max(abs(one.get(s, 0) - other.get(s, 0)) for s in {*one, *other})


def tv(one: Strings, other: Strings) -> Chance:
    """The total variation distance of two laws."""
    return sum(abs(one.get(s, 0) - other.get(s, 0)) for s in {*one, *other}) / 2


def bias(rule: RatioRule, drafts: Proposals, target: Table, depth: int) -> Chance:
    """By how much a round's law differs from the target's: 0, or float64 rounding, for an exact
    rule."""
    return error(
        complete(emission(rule, drafts, target), target, depth + 1), joint(target, depth + 1)
    )


def mean_tokens(emitted: Strings) -> Chance:
    """Tokens a round emits on average."""
    return sum(len(string) * chance for string, chance in emitted.items())
