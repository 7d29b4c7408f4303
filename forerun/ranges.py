"""Numbers that somebody set: are they numbers, and in range? An error names the option and says what to give."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from forerun.errors import ConfigError, shown

LARGEST = 1 << 31  # of what has no limit of its own
MOST = 1e6  # the same of numbers that are not whole


def check_whole(name: str, value: object, low: int, high: int | None = None) -> None:
    """Raise ConfigError unless `value` is a whole number from `low` to `high`; without that, from `low` up, 31 bits."""
    most = LARGEST - 1 if high is None else high
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= most:
        raise _out_of_range(name, value, f"a whole number from {low}", high)


def check_number(name: str, value: object, low: float, high: float | None = None) -> None:
    """Raise ConfigError unless `value` is a number from `low` to `high`; without that, from `low` up."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and value < math.inf
    if not number or not low <= value <= (math.inf if high is None else high):  # type: ignore[operator]
        raise _out_of_range(name, value, f"a number from {low:g}", high)


def check_numbers(settings: Any, lowest: dict[str, int]) -> None:
    """Check every field of a dataclass that is declared a number or None: whole ones have their `lowest`, 0 unless it
    says otherwise. Raises ConfigError."""
    for field in fields(settings):
        value, kind = getattr(settings, field.name), str(field.type)
        if value is None and "None" in kind:
            continue
        if kind.startswith("int"):
            check_whole(field.name, value, lowest.get(field.name, 0))
        elif kind.startswith("float"):
            check_number(field.name, value, 0, MOST)


def _out_of_range(name: str, value: object, what: str, high: float | None) -> ConfigError:
    end = "up" if high is None else f"to {high:g}" if isinstance(high, float) else f"to {high}"
    return ConfigError(f"{name}={shown(value)} is out of range: give {what} {end}")
