"""Numbers that somebody set: what is none or out of range is refused in one line that names it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from forerun.errors import ConfigError
from forerun.utils import check_integer, check_number, check_numbers


@dataclass
class Settings:
    rows: int = 4
    seed: int = 0
    most: int | None = None
    share: float = 0.5
    name: str = "x"


@pytest.mark.parametrize("value", [1, 5, 64])
def test_whole_numbers_within_their_range(value: int) -> None:
    check_integer("depth", value, 1, 64)
    check_number("depth", value, 1, 64)


@pytest.mark.parametrize(
    "value", [0, 65, -1, 1 << 80, 1.0, True, None, "4", float("nan"), float("inf")]
)
def test_what_is_no_whole_number_within_its_range(value: object) -> None:
    with pytest.raises(
        ConfigError, match=r"^depth=.* is out of range: give a whole number from 1 to 64$"
    ):
        check_integer("depth", value, 1, 64)


@pytest.mark.parametrize(
    "value", [-0.1, 1.01, True, None, "0.5", float("nan"), float("inf"), -float("inf")]
)
def test_what_is_no_number_within_its_range(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^share=.* is out of range: give a number from 0 to 1$"):
        check_number("share", value, 0, 1)


def test_what_no_float_can_hold() -> None:
    check_number("seconds", 10**400, 0)
    for value in (10**400, -(10**400)):
        with pytest.raises(ConfigError, match=r"^seconds="):
            check_number("seconds", value, 0, 1 << 31)


def test_without_an_end() -> None:
    check_number("seconds", 1e300, 0)
    for check, what in ((check_integer, "a whole number"), (check_number, "a number")):
        with pytest.raises(ConfigError, match=f"seconds=-1 is out of range: give {what} from 0 up"):
            check("seconds", -1, 0)
    with pytest.raises(ConfigError, match="from 0 up"):
        check_integer("seconds", 1 << 31, 0)


def test_every_number_of_a_dataclass() -> None:
    check_numbers(Settings(), {"rows": 1})
    check_numbers(Settings(most=0), {"rows": 1})
    for name, value in (
        ("rows", 0),
        ("rows", None),
        ("seed", -1),
        ("most", -1),
        ("share", -0.1),
        ("share", 1e9),
    ):
        with pytest.raises(ConfigError, match=f"^{name}="):
            check_numbers(Settings(**{name: value}), {"rows": 1})
