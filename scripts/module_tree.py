#!/usr/bin/env python3
"""Print the package as a tree with one line per module: the first sentence of its docstring.

python scripts/module_tree.py             # for docs/architecture.md
python scripts/module_tree.py --write     # update the tree in docs/architecture.md
"""

from __future__ import annotations

import argparse
import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architecture.md"
WIDTH = 116  # columns of a line of the tree
BEGIN, END = "<!-- tree -->\n```text\n", "```\n<!-- end of tree -->"


def summary(path: Path) -> str:
    """Return the first sentence of a module's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    sentence = re.split(r"(?<=\.) ", " ".join(text.split("\n\n")[0].split()))[0]
    return sentence.rstrip(".")


def lines(folder: Path, indent: str = "") -> list[str]:
    """Return the lines of a folder: its modules, then its folders."""
    found = []
    for path in sorted(folder.glob("*.py")):
        if path.stem not in ("__init__", "__main__"):
            line = f"{indent}{path.stem:<{23 - len(indent)}} {summary(path)}"
            if len(line) > WIDTH:
                line = line[: WIDTH - 4].rsplit(" ", 1)[0].rstrip(",:;") + " ..."
            found.append(line)
    for inner in sorted(path for path in folder.iterdir() if path.is_dir()):
        if (inner / "__init__.py").exists():
            found += [f"{indent}{inner.name}/", *lines(inner, indent + "  ")]
    return found


def tree() -> str:
    """Return the tree of the package."""
    return "\n".join(["forerun/", *lines(ROOT / "forerun", "  ")]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="Update docs/architecture.md.")
    if not parser.parse_args().write:
        print(tree(), end="")
        return
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}{tree()}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
