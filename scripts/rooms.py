#!/usr/bin/env python3
"""Print the number of lines of each folder of the package, and the folders it imports from with the
number of imports.

python scripts/rooms.py                 # of this checkout
python scripts/rooms.py OTHER/forerun   # of another one
python scripts/rooms.py --modules       # with subfolders on their own
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
    parser.add_argument("--modules", action="store_true", help="List subfolders on their own.")
    options = parser.parse_args()
    lines: Counter[str] = Counter()
    imports: dict[str, Counter[str]] = {}
    for path in sorted(options.package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        folder = _folder_of(
            path.relative_to(options.package.parent).with_suffix("").parts,
            options.modules,
            options.package,
        )
        lines[folder] += text.count("\n")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("forerun."):
                other = _folder_of(
                    tuple((node.module or "").split(".")), options.modules, options.package
                )
                if other != folder:
                    imports.setdefault(folder, Counter())[other] += 1
    for folder, count in sorted(lines.items(), key=lambda pair: -pair[1]):
        named = ", ".join(
            f"{other} {n}" for other, n in imports.get(folder, Counter()).most_common()
        )
        print(f"{folder:<20}{count:>7}   {named}")
    print(f"{'all':<20}{sum(lines.values()):>7}")


def _folder_of(parts: tuple[str, ...], modules: bool, package: Path) -> str:
    """Return the folder that a module is in; `forerun` for modules of the package itself."""
    folders = [
        part for i, part in enumerate(parts) if (package.parent / Path(*parts[: i + 1])).is_dir()
    ]
    return ".".join(folders[1 : 3 if modules else 2]) or "forerun"


if __name__ == "__main__":
    main()
