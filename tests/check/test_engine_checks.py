"""Several drafters that sample into one tree draw independently of each other."""

from __future__ import annotations

import pytest

from forerun import rng
from forerun.check.engine_checks import TARGET, check_two_drafters, compare_drafters
from forerun.verify import Noise


class SharedSources(Noise):
    """Noise of a drafter that ignores its index among the drafters of a tree."""

    def draft(self, node: int) -> int:
        return Noise(self.seed, self.root).draft(node)


def test_drafters_of_one_tree_draw_independently() -> None:
    assert check_two_drafters().passed


def test_shared_random_numbers_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault is found in the drafters and in the engine, which once gave both the same source."""
    test = compare_drafters(SharedSources)
    assert test.rejected and test.describe_worst()[0] // len(TARGET) == 1
    monkeypatch.setattr(
        Noise, "draft", lambda self, node: rng.stream(self.seed, rng.Lane.DRAFT, self.root, node)
    )
    assert not check_two_drafters().passed
