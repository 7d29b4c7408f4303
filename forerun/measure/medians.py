"""Medians with their uncertainty, and comparison of outputs. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.random import default_rng

RESAMPLES = 4000


def bootstrap_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % percentile bootstrap interval of the median (Efron 1979).

    Deterministic. None for fewer than two values; for five it is nearly their range.
    """
    if len(values) < 2:
        return None
    data = np.asarray(values, dtype=float)
    chosen = default_rng(0).integers(len(data), size=(RESAMPLES, len(data)))
    low, high = np.quantile(np.median(data[chosen], axis=1), [0.025, 0.975])
    return float(low), float(high)


def median(values: Sequence[float]) -> float:
    """Return the median as a Python float."""
    return float(np.median(values))


def median_if_known(values: Sequence[float | None]) -> float | None:
    """Return the median if there are values and none of them is None."""
    known = [value for value in values if value is not None]
    return median(known) if known and len(known) == len(values) else None


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the first index where two outputs differ, also in length; None if they are equal."""
    pairs = zip(one, other, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
    return None if at == len(one) == len(other) else at
