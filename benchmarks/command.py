"""Command-line options and error handling that the benchmarks share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forerun import LLM
from forerun.errors import ForerunError
from forerun.measure.workloads import Task, builtin, of_categories, read_tasks


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser that shows a module's docstring, with the option --json."""
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--json", action="store_true", help="print one JSON object")
    return options


def add_engine_options(options: argparse.ArgumentParser) -> None:
    """Add the options that choose a model and its precision."""
    options.add_argument("--model", help="as in forerun; without it, the default model")
    options.add_argument("--dtype", help="as in forerun")
    options.add_argument("--quantization", help="as in forerun")
    options.add_argument("--threads", type=int, help="as in forerun")


def engine_options(given: argparse.Namespace) -> dict[str, Any]:
    """Return the given engine options as fields of `Config`."""
    names = ("model", "dtype", "quantization", "threads")
    return {name: getattr(given, name) for name in names if getattr(given, name) is not None}


def load(given: argparse.Namespace, **options: Any) -> LLM:
    """Load the model that the engine options choose."""
    fields = engine_options(given)
    return LLM(fields.pop("model", None), **fields, **options)


def chosen_tasks(prompts: Path | None, categories: str) -> list[Task]:
    """Return the tasks of a file, or built-in ones of comma-separated categories (or "all")."""
    if prompts is not None:
        return read_tasks(prompts)
    return of_categories(builtin(), [] if categories == "all" else categories.split(","))


def run(main: Callable[[], None]) -> None:
    """Run a benchmark; an error of forerun is one line and exit code 2."""
    try:
        main()
    except ForerunError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
