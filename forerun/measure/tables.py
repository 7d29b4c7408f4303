"""Output of commands: tables and one JSON object. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

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


def print_json(data: dict[str, Any]) -> None:
    """Print one JSON object."""
    print(json_line(data, ascii_only=True))
