"""The shape of the code: imports go down, files and functions stay short, the public surface is a
decision."""

import ast
import functools
from pathlib import Path

import pytest

import forerun

PACKAGE = Path(forerun.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
# Each floor may import from itself and from those below it.
FLOORS = [
    {
        "errors",
        "types",
        "rng",
        "config",
        "costs",
        "drafts",
        "jsonl",
        "machine",
        "progress",
        "ranges",
        "sandbox",
        "texts",
        "whole",
    },
    {"kernels", "sampling", "verify"},
    {"models"},
    {"cache"},
    {"native", "packed", "parallel", "passes", "recorded", "runner", "load"},
    {"draft"},
    {"catalogue"},
    {"engine"},
    {
        "completion",
        "flags",
        "job",
        "learned",
        "llm",
        "loader",
        "measure",
        "probe",
        "skips",
        "terminal",
    },
    {
        "bench",
        "check",
        "doctor",
        "drafters_cli",
        "generate_cli",
        "index_cli",
        "models_cli",
        "server",
        "train",
    },
    {"tune", "tune_cli"},
    {"cluster"},
    {"chat", "cli", "__main__", "__init__"},
]
FLOOR = {name: i for i, names in enumerate(FLOORS) for name in names}


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def part(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down(path: Path) -> None:
    mine = path.relative_to(PACKAGE).with_suffix("").parts[0]
    if mine == "__init__":
        return
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("forerun."):
            assert FLOOR[part(node.module)] <= FLOOR[mine], f"{path} imports {node.module}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_and_functions_are_short_and_explained(path: Path) -> None:
    text = path.read_text()
    tree = tree_of(path)
    assert len(text.splitlines()) <= 600
    if path.name not in ("__main__.py",) and text.strip():
        assert ast.get_docstring(tree), f"{path} has no docstring"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            body = node.end_lineno - node.body[0].lineno + 1
            assert body <= 60, f"{path}:{node.lineno} {node.name} has {body} lines"


@pytest.mark.parametrize(
    "path", sorted((PACKAGE / "bench").rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_rooms_of_bench_know_reports_and_no_other_room(path: Path) -> None:
    mine = path.relative_to(PACKAGE / "bench").parts[0]
    for node in ast.walk(tree_of(path)):
        if (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").startswith("forerun.bench.")
            and mine != "cli.py"
        ):
            room = (node.module or "").split(".")[2]
            assert room in {mine.removesuffix(".py"), "report", "recipe"}, (
                f"{path} imports {node.module}"
            )


LEAVES = {"bench", "train", "check", "server", "doctor"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_leaf_imports_another(path: Path) -> None:
    """What they share is below them: training, the certificate and the benchmarks have
    `measure`."""
    mine = path.relative_to(PACKAGE).with_suffix("").parts[0]
    for node in ast.walk(tree_of(path)):
        if (
            mine in LEAVES
            and isinstance(node, ast.ImportFrom)
            and (node.module or "").startswith("forerun.")
        ):
            assert part(node.module) not in LEAVES - {mine}, f"{path} imports {node.module}"


def test_exported_names() -> None:
    assert forerun.__all__ == [
        "LLM", "CapacityError", "Completion", "Config", "ConfigError", "Event", "ForerunError", "Grammar", "LoadError",
        "RequestError", "SamplingParams", "Stream",
    ]  # fmt: skip
    for name in forerun.__all__:
        assert getattr(forerun, name).__doc__


def test_rule_names_are_those_of_verify() -> None:
    from forerun.config import RULE_NAMES
    from forerun.verify import RULES

    assert tuple(RULES) == RULE_NAMES


def test_numbers_at_random_are_imported_with_the_file() -> None:
    """numpy loads its generators where `np.random` is first looked up, and what it compiles
    swallows a Ctrl-C then."""
    assert not [path for path in FILES if "np.random" in path.read_text()]
