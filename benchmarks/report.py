"""Print Markdown tables of `forerun bench .. --out FILE.jsonl`, and draw a plot.

python -m benchmarks.report laptop.jsonl server.jsonl            # every result
python -m benchmarks.report sweep.jsonl --best                   # each draft's fastest setting
python -m benchmarks.report sweep.jsonl --plot depths.png        # needs matplotlib
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import run
from forerun.errors import ConfigError
from forerun.measure.tables import times_and_interval

Line = dict[str, Any]  # a result with the fields of its run
DECODE_COLUMNS = {
    "model": "model",
    "weights": "quantization",
    "draft": "draft",
    "category": "category",
    "temperature": "temperature",
    "at once": "requests",
    "rule": "rule",
    "depth": "depth",
    "tokens/s": "tokens_per_second",
    "times plain (95 %)": "times_plain",
    "accepted length": "accepted_length",
    "draft ms": "draft_ms",
    "pass ms": "pass_ms",
}
SERVE_COLUMNS = {
    "server": "server",
    "draft": "draft",
    "at once": "requests",
    "tokens/s": "tokens_per_second",
    "times plain (95 %)": "times_plain",
    "requests/s": "requests_per_second",
    "first token ms": "first_token_ms",
    "between tokens ms": "inter_token_ms",
    "accepted length": "accepted_length",
}
REQUIRED = ("kind", "draft", "tokens_per_second", "times_plain")
OPTIONAL = ("model", "weights", "category", "temperature", "at once", "rule", "server", "draft")


def read_lines(paths: Sequence[Path]) -> list[Line]:
    """Read result lines. Raises ConfigError for a file that does not hold them."""
    lines = []
    for path in paths:
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                line = json.loads(text)
            except ValueError:
                line = None
            if not isinstance(line, dict) or any(name not in line for name in REQUIRED):
                raise ConfigError(f"{path}, line {number} is no result of `forerun bench`")
            lines.append(line)
    if len({line["kind"] == "serve" for line in lines}) != 1:
        raise ConfigError(
            "give lines of `decode` and `sweep`, or lines of `serve`, not both or none"
        )
    return lines


def best_settings(lines: Sequence[Line]) -> list[Line]:
    """Return the fastest line of each model, draft, category and temperature."""
    best: dict[tuple[Any, ...], Line] = {}
    for line in lines:
        key = tuple(line.get(name) for name in ("model", "draft", "category", "temperature"))
        is_faster = key not in best or line["times_plain"] > best[key]["times_plain"]
        if line["draft"] != "off" and is_faster:
            best[key] = line
    return list(best.values())


def table(lines: Sequence[Line]) -> str:
    """Return a Markdown table; columns with a single value are left out."""
    names = SERVE_COLUMNS if lines[0]["kind"] == "serve" else DECODE_COLUMNS
    rows = [{head: _cell(line, name) for head, name in names.items()} for line in lines]
    heads = [head for head in names if head not in OPTIONAL or len({row[head] for row in rows}) > 1]
    cells = [heads, ["---"] * len(heads), *([row[head] for head in heads] for row in rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def _cell(line: Line, name: str) -> str:
    value = line.get(name)
    if name == "times_plain" and value is not None:
        return times_and_interval(value, line.get("interval"))
    if name == "draft" and value is not None:
        return f"`{value}`"
    if isinstance(value, dict):
        return ", ".join(f"{ms:.1f}" for ms in value.values())
    if isinstance(value, float):
        return f"{value:g}" if name == "temperature" else f"{value:.2f}"
    return "" if value is None else str(value)


def plot(lines: Sequence[Line], path: Path) -> None:
    """Draw times plain by depth, one line per draft, category and temperature."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    series: dict[str, list[tuple[int, float]]] = {}
    for line in lines:
        if isinstance(line.get("depth"), int) and line["draft"] != "off":
            name = f"{line['draft']}, {line['category']}, {line['temperature']:g}"
            series.setdefault(name, []).append((line["depth"], line["times_plain"]))
    if not series:
        raise ConfigError("there is nothing to plot: no line has a fixed depth")
    for name, points in series.items():
        depths, times = zip(*sorted(points), strict=True)
        axes.plot(depths, times, marker="o", label=name)
    axes.axhline(1.0, color="grey", linewidth=1)
    axes.set_xlabel("draft depth")
    axes.set_ylabel("times plain decoding")
    axes.legend()
    figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("files", nargs="+", type=Path, help="lines of JSON")
    options.add_argument("--best", action="store_true", help="only each draft's fastest setting")
    options.add_argument("--plot", type=Path, help="also draw times plain by depth to this file")
    given = options.parse_args(arguments)
    lines = read_lines(given.files)
    print(table(best_settings(lines) if given.best else lines))
    if given.plot:
        plot(lines, given.plot)


if __name__ == "__main__":
    run(main)
