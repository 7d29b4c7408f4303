#!/usr/bin/env python3
"""The rooms of the house: lines of each folder of the package, and which folders it imports from,
by number of imports.

python scripts/rooms.py                 # of this checkout
python scripts/rooms.py OTHER/forerun   # of another one
python scripts/rooms.py --modules       # folders within folders one by one
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "package", nargs="?", type=Path, default=Path(__file__).parent.parent / "forerun"
    )
    parser.add_argument(
        "--modules", action="store_true", help="Folders within folders are rooms of their own."
    )
    asked = parser.parse_args()
    lines: Counter[str] = Counter()
    imports: dict[str, Counter[str]] = {}
    for path in sorted(asked.package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        room = _room(
            path.relative_to(asked.package.parent).with_suffix("").parts,
            asked.modules,
            asked.package,
        )
        lines[room] += text.count("\n")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("forerun."):
                other = _room(tuple((node.module or "").split(".")), asked.modules, asked.package)
                if other != room:
                    imports.setdefault(room, Counter())[other] += 1
    for room, count in sorted(lines.items(), key=lambda pair: -pair[1]):
        named = ", ".join(f"{other} {n}" for other, n in imports.get(room, Counter()).most_common())
        print(f"{room:<20}{count:>7}   {named}")
    print(f"{'all':<20}{sum(lines.values()):>7}")


def _room(parts: tuple[str, ...], modules: bool, package: Path) -> str:
    """The folder that a module is in; those in none share a room, `forerun`."""
    folders = [
        part for i, part in enumerate(parts) if (package.parent / Path(*parts[: i + 1])).is_dir()
    ]
    return ".".join(folders[1 : 3 if modules else 2]) or "forerun"


if __name__ == "__main__":
    main()
