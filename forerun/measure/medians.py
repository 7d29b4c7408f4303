"""Medians with their uncertainty, and whether two outputs are the same."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.random import default_rng

RESAMPLES = 4000


def bootstrap_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float] | None:
    """The percentile bootstrap interval of the median; None of fewer than two values.

    Resamples rounds, each of which holds both sides of a comparison (Efron 1979). The same values
    give the same interval. With five rounds it is nearly their range: that is how much five rounds
    say."""
    if len(values) < 2:
        return None
    data = np.asarray(values, dtype=float)
    chosen = default_rng(0).integers(len(data), size=(RESAMPLES, len(data)))
    low, high = np.quantile(np.median(data[chosen], axis=1), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def median(values: Sequence[float]) -> float:
    """The median as a plain number."""
    return float(np.median(values))


def median_if_known(values: Sequence[float | None]) -> float | None:
    """The median of values that are all known; else None."""
    known = [value for value in values if value is not None]
    return median(known) if known and len(known) == len(values) else None


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first index where two outputs differ, the end of the shorter one included; None if they
    are the same."""
    if list(one) == list(other):
        return None
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
