"""Lists on the command line: what stands between commas, and what of it is no number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forerun.errors import ConfigError


def listed(text: str) -> list[str]:
    """What stands between commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def plural(
    many: str | None, one: Any, name: str, default: str, split: Callable[[str], list[str]] = listed
) -> list[str]:
    """The values of `--drafts`, or the one of `--draft`, or those of the default; both are an
    error."""
    if many is not None and one is not None:
        raise ConfigError(f"--{name} and --{name}s were both given: give one of them")
    return [str(one)] if one is not None else split(default if many is None else many)


def whole(text: str, name: str) -> int:
    """A whole number. Raises ConfigError, which names the option."""
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"--{name}: {text!r} is not a whole number") from None


def number(text: str, name: str) -> float:
    """A number. Raises ConfigError, which names the option."""
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"--{name}: {text!r} is not a number") from None
