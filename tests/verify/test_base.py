"""Noise of the rules that accept by ratios."""

from __future__ import annotations

import numpy as np
import pytest

from forerun import rng
from forerun.verify import Noise


@pytest.mark.parametrize("total", [0.3, 1.0, 3.0])
def test_a_draw_at_the_edge_takes_no_token_of_weight_zero(
    monkeypatch: pytest.MonkeyPatch, total: float
) -> None:
    """Where a number below 1 times the sum of the weights rounds to the sum."""
    monkeypatch.setattr(rng, "uniform", lambda key: 1.0)
    weights = np.array([0.0, total / 2, total / 2, 0.0])
    assert Noise(1, 2).draw(weights, 0) == 2
