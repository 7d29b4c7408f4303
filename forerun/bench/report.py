"""What measurements have in common: where they were made, medians with their uncertainty, whether two outputs are the
same, tables. Nothing of torch until it is asked for a machine: clients of a server use this too."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

RESAMPLES = 4000


def bootstrap_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float] | None:
    """The percentile bootstrap interval of the median; None of fewer than two values.

    Resamples rounds, each of which holds both sides of a comparison (Efron 1979). The same values give the same
    interval. With five rounds it is nearly their range: that is how much five rounds say.
    """
    if len(values) < 2:
        return None
    data = np.asarray(values, dtype=float)
    chosen = np.random.default_rng(0).integers(len(data), size=(RESAMPLES, len(data)))
    low, high = np.quantile(np.median(data[chosen], axis=1), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def median(values: Sequence[float]) -> float:
    """The median as a plain number."""
    return float(np.median(values))


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first index where two outputs differ, the end of the shorter one included; None if they are the same."""
    if list(one) == list(other):
        return None
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on stdout: with rules on a terminal, aligned columns and nothing else in a pipe. Numbers to the right."""
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
    """`print_table` of rows with the same keys; an optional column that says the same everywhere is left out."""
    columns = [c for c in rows[0] if c not in optional or len({row[c] for row in rows if row[c]}) > 1]
    print_table(columns, [[row[c] for c in columns] for row in rows])


def machine(threads: int = 0) -> dict[str, Any]:
    """Where something was measured, in plain values."""
    import torch

    from forerun import __version__
    from forerun.kernels import native
    from forerun.machine import cores, processor

    has_kernels = native.library() is not None
    return {
        "processor": processor(), "cores": cores(), "threads": threads or cores(),
        "instructions": native.instructions() if has_kernels else "torch", "torch": torch.__version__,
        "forerun": __version__, "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }  # fmt: skip


def print_json(data: dict[str, Any]) -> None:
    """One JSON object on stdout."""
    print(json.dumps(data))
