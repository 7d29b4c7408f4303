"""Accepted length by arithmetic: against rounds tossed one by one, and against every outcome of
short texts."""

import itertools

import numpy as np
import pytest
import torch

from forerun.train.lengths import (
    Stretch,
    accepted_length,
    chances_of,
    expected_passes,
    from_any,
    unfolded,
)


def tossed(chances: np.ndarray, stretch: Stretch, dice: np.random.Generator) -> int:
    """Passes of one run of rounds, each draft as deep as the engine would make it."""
    at, passes = stretch.first, 0
    while at < stretch.end:
        passes += 1
        allowed, kept = min(chances.shape[1], stretch.limit - at - 1), 0
        while kept < allowed and (at + kept >= stretch.end or dice.random() < chances[at, kept]):
            kept += 1
        at += kept + 1
    return passes


@pytest.mark.parametrize("limit", [30, 34, 90])
def test_passes_are_those_of_rounds_that_are_tossed(limit: int) -> None:
    dice = np.random.default_rng(1)
    along = torch.tensor(dice.random(40) ** 0.3)[None]
    chances = unfolded(along, 3)[0].numpy()
    stretch = Stretch(4, 30, limit)
    mean = np.mean([tossed(chances, stretch, dice) for _ in range(4000)])
    assert expected_passes(chances, stretch) == pytest.approx(mean, rel=0.01)
    assert accepted_length(torch.tensor(chances)[None], [stretch]) == pytest.approx(
        26 / mean, rel=0.01
    )


def test_the_length_is_that_of_exact_speculation() -> None:
    """Every text of a two-token world, every coin: texts from p with their expected passes, against
    the token rule's own law of rounds, enumerated without a text being fixed first."""
    p, q, depth, count = np.array([0.7, 0.3]), np.array([0.4, 0.6]), 2, 4
    expected = 0.0
    for text in itertools.product((0, 1), repeat=count):
        a = torch.tensor(
            [[chances_of(torch.tensor(p[t]).log(), torch.tensor(q[t]).log()) for t in text]]
        )
        chances = unfolded(torch.cat((torch.zeros(1, 1), a.float()), 1), depth)[0].numpy()
        expected += np.prod(p[list(text)]) * expected_passes(
            chances, Stretch(1, count + 1, count + 1)
        )
    alpha = np.minimum(p, q).sum()

    def passes(left: int) -> float:
        if left == 0:
            return 0.0
        allowed = min(depth, left - 1)
        kept = [alpha**k * (1 - alpha if k < allowed else 1.0) for k in range(allowed + 1)]
        return 1 + sum(chance * passes(left - k - 1) for k, chance in enumerate(kept))

    assert expected == pytest.approx(passes(count), rel=1e-6)


def test_extremes() -> None:
    always, never = torch.ones(1, 20, 4), torch.zeros(1, 20, 4)
    assert accepted_length(never, [Stretch(2, 20, 20)]) == 1
    assert accepted_length(always, [Stretch(5, 20, 40)]) == 5
    assert (
        accepted_length(always, [Stretch(19, 19, 40)]) == 1
    )  # a text that ended with the first token


def test_what_lies_past_the_end_changes_nothing() -> None:
    chances = torch.rand(1, 12, 3)
    other = chances.clone()
    other[0, 9:] = 0
    other[0, 8, 1:] = 0
    other[0, 7, 2] = 0
    assert accepted_length(chances, [Stretch(1, 9, 50)]) == accepted_length(
        other, [Stretch(1, 9, 50)]
    )
    other[0, 7, 0] = 0
    assert accepted_length(chances, [Stretch(1, 9, 50)]) != accepted_length(
        other, [Stretch(1, 9, 50)]
    )


def test_chances() -> None:
    p = torch.tensor([0.5, 0.2, 0.2, 1.0, 0.0, 0.0]).log()
    q = torch.tensor([0.25, 0.4, 0.0, 1.0, 0.0, 0.3]).log()
    assert chances_of(p, q).tolist() == pytest.approx([0.5, 1, 0, 1, 0, 1])


def test_from_any_counts_whole_drafts_only() -> None:
    overlap = unfolded(torch.tensor([[0.5, 0.5, 1.0, 0.0]]), 2)
    mask = torch.tensor([[False, True, True, True]])
    assert from_any(overlap, mask) == pytest.approx(((1 + 0.5 + 0.5) + (1 + 1 + 0)) / 2)
    assert from_any(overlap, torch.zeros_like(mask)) == 1
