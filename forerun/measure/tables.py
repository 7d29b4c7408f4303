"""What commands print: tables, and one JSON object. Nothing of torch: clients of a server use this
too."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from forerun.utils import json_line


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on stdout: with rules on a terminal, aligned columns and nothing else in a pipe.
    Numbers to the right."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False)
    if not console.is_terminal:
        console.width = 1000  # a pipe has no width: nothing is folded or cut
    for i, name in enumerate(columns):
        numeric = all(row[i][:1].isdigit() for row in rows)
        table.add_column(Text(name), justify="right" if numeric else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


def print_columns(rows: Sequence[dict[str, str]], optional: Sequence[str] = ()) -> None:
    """`print_table` of rows with the same keys; an optional column that says the same everywhere is
    left out."""
    columns = [
        c for c in rows[0] if c not in optional or len({row[c] for row in rows if row[c]}) > 1
    ]
    print_table(columns, [[row[c] for c in columns] for row in rows])


def print_json(data: dict[str, Any]) -> None:
    """One JSON object on stdout."""
    print(json_line(data, ascii_only=True))
