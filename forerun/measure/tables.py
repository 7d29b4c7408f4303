"""What commands read and print: comma-separated option values, tables and one JSON object. Imports
no torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from forerun.errors import ConfigError
from forerun.utils import json_line


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: ruled on a terminal, plain aligned columns in a pipe. Numbers align right."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False)
    if not console.is_terminal:
        console.width = 1000  # a pipe has no width: nothing is wrapped or truncated
    for i, name in enumerate(columns):
        numeric = all(row[i][:1].isdigit() for row in rows)
        table.add_column(Text(name), justify="right" if numeric else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


def print_columns(rows: Sequence[dict[str, str]], optional: Sequence[str] = ()) -> None:
    """Print rows with the same keys; optional columns with a single value are left out."""
    columns = [c for c in rows[0] if c not in optional or len({r[c] for r in rows if r[c]}) > 1]
    print_table(columns, [[row[c] for c in columns] for row in rows])


def times_and_interval(times: float, interval: tuple[float, float] | None) -> str:
    """Return a ratio of speeds with its 95 % interval, if there is one."""
    return f"{times:.2f}" + (f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else "")


def print_json(data: dict[str, Any]) -> None:
    """Print one JSON object."""
    print(json_line(data, ascii_only=True))


def listed(text: str) -> list[str]:
    """Split a comma-separated value; empty entries are dropped."""
    return [part.strip() for part in text.split(",") if part.strip()]


def plural(
    values: str | None,
    value: Any,
    name: str,
    default: str,
    split: Callable[[str], list[str]] = listed,
) -> list[str]:
    """Return the values of `--NAMEs`, the one of `--NAME`, or the default's.

    Raises ConfigError if both options were given.
    """
    if values is not None and value is not None:
        raise ConfigError(f"--{name} and --{name}s were both given: give one of them")
    return [str(value)] if value is not None else split(default if values is None else values)


def parse_integer(text: str, name: str) -> int:
    """Parse a whole number. Raises ConfigError, which names the option."""
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"--{name}: {text!r} is not a whole number") from None


def parse_number(text: str, name: str) -> float:
    """Parse a number. Raises ConfigError, which names the option."""
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"--{name}: {text!r} is not a number") from None
