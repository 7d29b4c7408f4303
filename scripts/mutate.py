#!/usr/bin/env python3
"""Change the package at random places, one at a time, and see whether the tests notice.

    python scripts/mutate.py --count 60 --seed 1     # prints each change and what became of it

A change turns a comparison, an arithmetic or Boolean operation or a constant into another. First
the test of the same name runs, then those of the same folder, then those of the engine, of
verification and of drafts, until one fails. The changes are made in a copy of the repository. Exit status 1 if a
change survived: look at each, since some change nothing (a cache, a lower bound of a sleep).
"""

from __future__ import annotations

import argparse
import ast
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("engine", "verify", "cache", "draft", "sampling")
SECONDS = 900  # that the tests of one change may take: more is a change that hangs, and noticed
OTHER: dict[type[ast.AST], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.FloorDiv: "*",
    ast.And: "or",
    ast.Or: "and",
}

# (first character, end, replacement) in the text of a module
Change = tuple[int, int, str]


def changes(text: str) -> Iterator[Change]:
    """Yield every change of a module's text."""
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def span(node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        first = starts[node.lineno - 1] + node.col_offset
        return first, starts[node.end_lineno - 1] + node.end_col_offset

    def between(left: ast.expr, right: ast.expr, operator: ast.AST) -> Change | None:
        """Replace an operator, unless parentheses stand beside it."""
        first, last = span(left)[1], span(right)[0]
        other = OTHER.get(type(operator))
        gap = text.encode()[first:last].decode()
        return (first, last, f" {other} ") if other and not set(gap) & set("()#") else None

    for node in ast.walk(ast.parse(text)):
        found: list[Change | None] = []
        if isinstance(node, ast.Compare):
            found.append(between(node.left, node.comparators[0], node.ops[0]))
        elif isinstance(node, ast.BinOp):
            found.append(between(node.left, node.right, node.op))
        elif isinstance(node, ast.BoolOp):
            found.append(between(node.values[0], node.values[1], node.op))
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            found.append((*span(node), ast.unparse(node.operand)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            found.append((*span(node), str(not node.value)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, int):
            found.append((*span(node), str(node.value + 1)))
        yield from (change for change in found if change)


def tests_of(module: Path, copy: Path) -> list[list[str]]:
    """Return the groups of tests that may notice a change, the nearest first."""
    folder = module.relative_to("forerun").parts[0]
    own = Path("tests", *module.relative_to("forerun").parts[:-1], f"test_{module.name}")
    groups = [[str(own)]] if (copy / own).exists() else []
    return [*groups, [f"tests/{folder}"], ["tests/engine", "tests/verify", "tests/draft"]]


def is_noticed(module: Path, copy: Path) -> str:
    """Return the tests that failed or hung, or "" if all passed."""
    options = ["-x", "-q", "-n", "2", "-m", "not full", "-p", "no:cacheprovider"]
    for group in tests_of(module, copy):
        command = [sys.executable, "-m", "pytest", *options, *group]
        try:
            ended = subprocess.run(command, cwd=copy, capture_output=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return f"{' '.join(group)} (hung)"
        if ended.returncode:
            return " ".join(group)
    return ""


def main() -> int:
    """Run from the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=60, help="Number of changes.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the choice of changes.")
    parser.add_argument("--folders", default=",".join(FOLDERS), help="Folders of forerun/.")
    given = parser.parse_args()
    chance, survived = random.Random(given.seed), 0
    folders = given.folders.split(",")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "repository"
        ignored = shutil.ignore_patterns(".git", ".venv", "build", ".*_cache", "__pycache__")
        shutil.copytree(ROOT, copy, ignore=ignored)
        for number in range(given.count):
            folder = folders[number % len(folders)]
            every = [
                (path.relative_to(ROOT), change)
                for path in sorted((ROOT / "forerun" / folder).rglob("*.py"))
                for change in changes(path.read_text())
            ]
            module, (first, last, other) = chance.choice(every)
            text = (ROOT / module).read_bytes()
            line = text[:first].count(b"\n") + 1
            (copy / module).write_bytes(text[:first] + other.encode() + text[last:])
            noticed = is_noticed(module, copy)
            (copy / module).write_bytes(text)
            survived += not noticed
            was = text[first:last].decode()
            print(f"{module}:{line}: {was!r} to {other!r}: {noticed or 'SURVIVED'}", flush=True)
    print(f"{given.count - survived} of {given.count} changes were noticed")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
