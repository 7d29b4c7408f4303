#!/usr/bin/env python3
"""Each draft at its best setting, by category: a table in Markdown of what `forerun bench sweep
--out` wrote.

python scripts/best_settings.py lines.jsonl...
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from forerun.bench.report.lines import read_lines

HEADS = (
    "draft",
    "category",
    "temperature",
    "depth",
    "times plain (95 %)",
    "tokens a pass",
    "drafting, ms",
    "a pass, ms",
)


def cells(result: dict[str, Any]) -> list[str]:
    low, high = result["interval"] or (result["times_plain"], result["times_plain"])
    return [
        f"`{result['draft']}`", result["category"], f"{result['temperature']:g}", str(result["depth"]),
        f"{result['times_plain']:.2f} ({low:.2f} to {high:.2f})", f"{result['accepted_length']:.2f}",
        f"{result['draft_ms']:.2f}", f"{result['pass_ms']:.2f}",
    ]  # fmt: skip


def main() -> None:
    best: dict[tuple[str, str, float], dict[str, Any]] = {}
    for result in read_lines([Path(path) for path in sys.argv[1:]])["results"]:
        key = result["draft"], result["category"], result["temperature"]
        if (
            result["draft"] != "off"
            and result["times_plain"] > best.get(key, {"times_plain": 0})["times_plain"]
        ):
            best[key] = result
    for row in (HEADS, ["---"] * len(HEADS), *(cells(best[key]) for key in best)):
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
