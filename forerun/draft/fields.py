"""Fields of a drafter's config.json, which may be of any type: read as what they must be, or refused in a line."""

from __future__ import annotations

from typing import Any

from forerun.errors import LoadError, shown
from forerun.models.families import Json, is_whole

LARGEST = 1 << 31  # of any size


def read_bool(raw: Json, name: str, default: bool) -> bool:
    """True or false, `default` where it is not said. Raises LoadError."""
    value = raw.get(name, default)
    if not isinstance(value, bool):
        raise LoadError(f"{name} in config.json is {shown(value)}, not true or false")
    return value


def read_whole(raw: Json, name: str, low: int = 1, high: int = LARGEST, default: int | None = None) -> int:
    """A whole number from `low` to `high`, which must be there unless there is a default. Raises LoadError."""
    value: Any = raw.get(name, default)
    if not is_whole(value) or not low <= value <= high:
        raise LoadError(f"{name} in config.json is {shown(value)}, not a whole number from {low} to {high}")
    return int(value)


def read_ids(raw: Json, name: str) -> tuple[int, ...]:
    """Numbers of hidden states, one at least. Raises LoadError."""
    ids = raw.get(name)
    if not isinstance(ids, list) or not ids or not all(is_whole(i) for i in ids):
        raise LoadError(f"{name} in config.json is {shown(ids)}, not a list of hidden states to read")
    return tuple(ids)
