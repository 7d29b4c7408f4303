"""Numbers of refutations show the difference that they are about."""

import math

import pytest

from forerun.check import digits


@pytest.mark.parametrize(
    "one, other, shown",
    [
        (0.25, 0.5, ("0.250", "0.500")),
        (0.253968254, 0.253968251, ("0.2539682540", "0.2539682510")),
        (0.1, 0.1, ("0.100", "0.100")),
        (1 / 3, 1 / 3 + 2**-54, ("0.33333333333333331", "0.33333333333333337")),
        (1.0, math.inf, ("1.000", "inf")),
        (1.0, math.nan, ("1.000", "nan")),
        (0.0, 5e-324, ("0.00000000000000000", "0.00000000000000000")),
    ],
)
def test_a_pair_has_the_digits_that_tell_it_apart(
    one: float, other: float, shown: tuple[str, str]
) -> None:
    assert digits.pair(one, other) == shown


@pytest.mark.parametrize("exponent", range(1, 16))
def test_different_numbers_never_look_the_same(exponent: int) -> None:
    one, other = digits.pair(0.253968253968, 0.253968253968 + 3.1 * 10.0**-exponent)
    assert one != other


def test_times_says_how_far_beyond() -> None:
    assert digits.times(3.1e-9, 1e-11, "rounding") == "310 times what rounding allows (1e-11)"
    assert (
        digits.times(0.25, 1e-12, "rounding") == "over 1,000,000 times what rounding allows (1e-12)"
    )
    assert (
        digits.times(0.25, 0.0, "arithmetic in fractions")
        == "where arithmetic in fractions allows none"
    )


@pytest.mark.parametrize(
    "evidence, said",
    [(0.4123, "0.41 to 1"), (17845.2, "17,845 to 1"), (1e61, "over 1,000,000 to 1")],
)
def test_odds(evidence: float, said: str) -> None:
    assert digits.odds(evidence) == said


def test_off_gives_both_frequencies_and_the_points_between_them() -> None:
    assert digits.off(0.332, 0.25) == (
        "comes in 33.2% of cases where the target's own probability is 25.0%, 8.2 points too often"
    )
    assert digits.off(0.2488, 0.25).startswith("comes in 24.88% of cases")
    assert digits.off(0.2488, 0.25).endswith("25.00%, 0.12 points too seldom")
