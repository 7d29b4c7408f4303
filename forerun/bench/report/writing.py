"""Where a report goes besides the terminal: a page, or lines of JSON, by the ending of the file's
name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forerun.bench.report.lines import SERVE, served_lines, write_lines
from forerun.bench.report.page import write_page
from forerun.bench.report.serve_page import write_served_page
from forerun.errors import ConfigError

ENDINGS = (".html", ".jsonl")


def check_out(paths: Sequence[Path]) -> None:
    """Raise ConfigError now for what could not be written after an hour of measuring."""
    for path in paths:
        if path.suffix not in ENDINGS:
            raise ConfigError(
                f"--out {path} is neither a page nor lines: end it in {' or '.join(ENDINGS)}"
            )
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise ConfigError(
                f"--out {path} cannot be written: it is a directory, or there is none to hold it"
            )


def write_out(paths: Sequence[Path], data: dict[str, Any]) -> None:
    """Write the report, of a server or of decoding, to each."""
    for path in paths:
        if path.suffix != ".html":
            write_lines(path, data)
        elif data.get("kind") == SERVE:
            write_served_page(path, served_lines(data))
        else:
            write_page(path, data)
