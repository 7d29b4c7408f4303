"""Measured acceptance and speed of drafters, kept on this machine per target and kind of text.

One file of JSON lines in forerun's cache holds counts and names, no texts. Several processes may
append to it at the same time; of equal conditions the last line counts. It is a convenience: lines
that are no measurements are skipped, and a file that cannot be used is one line on stderr.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from forerun.errors import RequestError, one_line
from forerun.models.packed_cache import cache_folder

FILE = "drafters.jsonl"
MAX_BYTES = 16 << 20  # that are read
COMPACT_BYTES = 4 << 20  # from which on replaced lines are removed
MAX_NAME = 1024  # characters
NAMES = ("target", "drafter", "kind", "category")


@dataclass(frozen=True, slots=True)
class Measurement:
    """One measurement of a drafter.

    Attributes:
        target, drafter: names that `--model` and `--draft` accept.
        kind: kind of drafter as in `--draft`, such as eagle3 or model.
        category: kind of text, such as code or law.
        accepted_length: emitted tokens per forward pass of the target.
        times_plain: speed relative to plain decoding; None where only acceptance was counted.
        depth: "auto" or a number.
        temperature: sampling temperature.
        machine: where the speed was measured.
        passes: number of forward passes counted.
        seconds: when, since 1970.
    """

    target: str
    drafter: str
    kind: str
    category: str
    accepted_length: float
    times_plain: float | None = None
    depth: str = "auto"
    temperature: float = 0.0
    machine: str = ""
    passes: int = 0
    seconds: float = 0.0

    def conditions(self) -> tuple[str | float, ...]:
        """Return the key; a later measurement with the same key replaces this one."""
        names = (self.target, self.drafter, self.category)
        return (*names, self.depth, self.temperature, self.machine)


def record(measurement: Measurement) -> None:
    """Store a measurement; it replaces an earlier one under the same conditions.

    Raises:
        RequestError: a name is empty or too long, or a figure is no positive number.
    """
    if wrong := _invalid(asdict(measurement)):
        raise RequestError(f"this is no measurement of a drafter: {wrong}")
    path = database_path()
    if path is None or not _is_usable(path):
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size > COMPACT_BYTES:
            _compact(path)
        with path.open("a", encoding="utf-8") as file:  # after a line that was cut off, if any
            file.write(f"\n{json.dumps(asdict(replace(measurement, seconds=time.time())))}\n")
    except OSError as error:
        _note(f"measurements of drafters cannot be kept in {path}: {error.strerror or error}")


def load(target: str | None = None) -> list[Measurement]:
    """Return the measurements of one target or all, by kind of text and the fastest first."""
    path = database_path()
    if path is None or not path.exists() or not _is_usable(path):
        return []
    try:
        with path.open("rb") as file:
            lines = file.read(MAX_BYTES).decode(errors="replace").splitlines()
    except OSError as error:
        _note(f"measurements of drafters cannot be read from {path}: {error.strerror or error}")
        return []
    latest: dict[tuple[str | float, ...], Measurement] = {}
    for line in lines:
        measurement = _parse(line)
        if measurement and target in (None, measurement.target):
            latest[measurement.conditions()] = measurement
    order = sorted(latest.values(), key=lambda m: (-(m.times_plain or 0.0), -m.accepted_length))
    return sorted(order, key=lambda m: m.category)


def database_path() -> Path | None:
    """Return the path of the file; None if caching is off (FORERUN_CACHE=off)."""
    folder = cache_folder()
    return folder / FILE if folder else None


def _parse(line: str) -> Measurement | None:
    """Return the measurement in a line; None if it holds something else."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    known = {field.name for field in fields(Measurement)}
    if not isinstance(values, dict) or values.keys() != known or _invalid(values):
        return None
    return Measurement(**values)


def _invalid(values: Mapping[str, Any]) -> str:
    """Describe the first invalid value of a measurement; "" if all are valid."""
    for name in (*NAMES, "depth", "machine"):
        value = values[name]
        least = 1 if name in NAMES else 0
        if not isinstance(value, str) or not least <= len(value) <= MAX_NAME:
            return f"{name} must be a text of at most {MAX_NAME} characters"
    for name in ("accepted_length", "times_plain", "temperature", "passes", "seconds"):
        value = values[name]
        if name == "times_plain" and value is None:
            continue
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        is_figure = name in ("accepted_length", "times_plain")
        if not is_number or not math.isfinite(value) or value < 0 or (is_figure and value == 0):
            return f"{name} must be a {'positive ' if is_figure else ''}number"
    return ""


def _compact(path: Path) -> None:
    """Rewrite the file without replaced measurements."""
    lines = [json.dumps(asdict(measurement)) for measurement in load()]
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def _is_usable(path: Path) -> bool:
    """Return True for a file or nothing; a pipe would block."""
    if path.exists() and not path.is_file():
        _note(f"measurements of drafters cannot be kept in {path}: it is no file")
        return False
    return True


def _note(text: str) -> None:
    print(f"note: {one_line(text)}", file=sys.stderr)
