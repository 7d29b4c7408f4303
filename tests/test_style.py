"""The shape of the code: names, docstrings, line length, import direction, the public surface."""

from __future__ import annotations

import ast
import functools
from collections import Counter, defaultdict
from pathlib import Path

import forerun

PACKAGE = Path(forerun.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
MAX_COLUMNS = 100
MAX_LINES = 700  # of a file
MAX_FUNCTION = 70  # lines of a function's body
# Lines marked `# fmt: skip`, which only tables may have.
MAX_UNFORMATTED = 30
# Modules that a single other module imports should be part of it, unless they are concepts. This
# number may only fall.
MAX_SINGLE_IMPORTER = 24
# Beginnings of docstrings that are neither a sentence nor a noun phrase.
FRAGMENTS = ("Of ", "Who ", "Whose ", "Whom ", "For whom", "What ", "Whether ", "How ", "Where ")

# Each layer imports from itself and from those below it.
LAYERS = [
    {"errors", "types", "rng", "utils", "devices", "hardware", "worker_process", "cli.progress"},
    {"config", "costs", "draft_spec", "kernels", "sampling", "verify"},
    {"models"},
    {"cache"},
    {"runtime", "load"},
    {"draft", "draft_loading"},
    {"catalog"},
    {"engine"},
    {"llm", "measure", "cli.completion", "cli.flags", "cli.terminal"},
    {"bench", "check", "server", "train"},
    {"cluster"},
    {"cli", "__main__", "__init__"},
]


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree_of(path)))


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(file) for file in FILES}


def layer_of(module: str) -> int:
    """Return the layer of a module below `forerun`: that of its longest prefix in LAYERS."""
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        for level, names in enumerate(LAYERS):
            if ".".join(parts[:end]) in names:
                return level
    raise AssertionError(f"{module} has no layer: add it to LAYERS")


@functools.cache
def imported(path: Path) -> set[str]:
    """Return the modules below `forerun` that a file imports, also inside functions."""
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("forerun"):
            base = (node.module or "").removeprefix("forerun").removeprefix(".")
            for alias in node.names:
                name = f"{base}.{alias.name}".removeprefix(".")
                found.add(name if name in MODULES else base)
    return found - {""}


def test_files_and_lines_have_a_maximum_length() -> None:
    for path in FILES:
        lines = path.read_text(encoding="utf-8").splitlines()
        assert len(lines) <= MAX_LINES, path
        long = [i for i, line in enumerate(lines, start=1) if len(line) > MAX_COLUMNS]
        assert not long, f"{path}: lines of more than {MAX_COLUMNS} columns: {long}"


def test_docstrings_are_sentences() -> None:
    for path in FILES:
        if path.name != "__main__.py":
            assert ast.get_docstring(tree_of(path)), f"{path} needs a docstring"
        for node in nodes_of(path):
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            text, place = ast.get_docstring(node) or "", f"{path}:{node.lineno}: {node.name}"
            assert not text.startswith(FRAGMENTS), f"{place}: {text.splitlines()[0]}"
            if isinstance(node, ast.ClassDef):
                assert text or node.name.startswith("_"), f"{place} needs a docstring"
            elif node.end_lineno:
                length = node.end_lineno - node.body[0].lineno + 1
                assert length <= MAX_FUNCTION, f"{place} has {length} lines"


def test_only_tables_are_unformatted() -> None:
    marked = [
        path for path in FILES for line in path.read_text().splitlines() if "fmt: skip" in line
    ]
    assert len(marked) <= MAX_UNFORMATTED, Counter(module_of(path) for path in marked)


def test_imports_follow_the_layers() -> None:
    for path in FILES:
        module = module_of(path)
        if not module or module in ("__init__", "__main__"):
            continue
        for other in imported(path):
            assert layer_of(other) <= layer_of(module), f"{module} imports {other}"


def test_tools_do_not_import_each_other() -> None:
    """Code that bench, check, server and train share is in `measure` or a lower layer."""
    tools = {"bench", "check", "server", "train"}
    for path in FILES:
        own = module_of(path).split(".")[0]
        if own in tools:
            others = {name.split(".")[0] for name in imported(path)} & tools - {own}
            assert not others, f"{module_of(path)} imports {others}"


def test_few_modules_have_a_single_importer() -> None:
    importers: dict[str, set[str]] = defaultdict(set)
    for path in FILES:
        for other in imported(path):
            importers[other].add(module_of(path))
    verbs = {module_of(path) for path in FILES if path.name in ("cli.py", "__init__.py")}
    single = [
        name
        for name, found in sorted(importers.items())
        if len(found) == 1 and name not in verbs and not name.startswith("cli.")
    ]
    assert len(single) <= MAX_SINGLE_IMPORTER, single


def test_no_class_name_is_used_twice() -> None:
    names = Counter(
        node.name
        for path in FILES
        for node in nodes_of(path)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert not {name: count for name, count in names.items() if count > 1}


def test_exported_names_are_sorted_and_documented() -> None:
    assert forerun.__all__ == sorted(forerun.__all__, key=lambda name: (not name.isupper(), name))
    for name in forerun.__all__:
        assert getattr(forerun, name).__doc__, name


def test_typed_options_are_those_of_the_configuration() -> None:
    from dataclasses import fields

    from forerun.config import Config, Options

    known = {field.name for field in fields(Config)} - {"model", "draft"}
    assert set(Options.__annotations__) == known


def test_rule_names_are_those_of_verify() -> None:
    from forerun.config import RULE_NAMES
    from forerun.verify import RULES

    assert tuple(RULES) == RULE_NAMES


def test_random_generators_are_imported_with_the_file() -> None:
    """numpy loads its generators at their first use, and a Ctrl-C during that import is lost."""
    assert not [path for path in FILES if "np.random" in path.read_text()]
