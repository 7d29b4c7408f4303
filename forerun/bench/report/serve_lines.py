"""What `forerun bench serve` measured, on disk: JSON lines, one a result, each with the fields of its run.

Nobody gets a line from here that has not been checked. They are of another kind than those of `lines`: clients measured
them, so they have latencies, and nothing of weights, categories or the machine that answered.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forerun.bench.report.lines import NUMBER, NUMBER_OR_NULL, TEXT, WHOLE, Check, check_fields, objects_of, or_null
from forerun.errors import ForerunError
from forerun.whole import write_whole

SERVE = "serve"
PERCENTILES = ("p50", "p95", "p99")
Line = dict[str, Any]


def _latencies(value: Any) -> bool:
    """Milliseconds at each percentile, or nothing where no answer had any."""
    return value == {} or (isinstance(value, Mapping) and all(NUMBER[1](value.get(name)) for name in PERCENTILES))


def _interval(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(NUMBER[1], value))


LATENCIES = "an object of p50, p95 and p99 in milliseconds", _latencies
TEXT_OR_NULL = "text, or null", or_null(TEXT[1])
FIELDS: dict[str, tuple[str, Check]] = {
    "kind": ('"serve"', lambda value: value == SERVE),
    "url": TEXT,
    "server": TEXT,
    "model": TEXT,
    "chat": ("true or false", lambda value: isinstance(value, bool)),
    "tokens": WHOLE,
    "temperature": NUMBER,
    "repeats": WHOLE,
    "prompts": WHOLE,
    "stopped": TEXT_OR_NULL,
    "draft": TEXT_OR_NULL,
    "depth": ('a whole number from 0 up, "auto" or null', lambda value: value in (None, "auto") or WHOLE[1](value)),
    "requests": WHOLE,
    "tokens_per_second": NUMBER,
    "times_plain": NUMBER_OR_NULL,
    "interval": ("null or two numbers", or_null(_interval)),
    "requests_per_second": NUMBER,
    "first_token_ms": LATENCIES,
    "inter_token_ms": LATENCIES,
    "finished": WHOLE,
    "errors": (
        "an object of counts",
        lambda value: isinstance(value, Mapping) and all(WHOLE[1](count) for count in value.values()),
    ),
    "accepted_length": NUMBER_OR_NULL,
    "acceptance": NUMBER_OR_NULL,
    "cached": NUMBER_OR_NULL,
    "same": ("true, false or null", lambda value: value is None or isinstance(value, bool)),
    "first_difference": ("a whole number from 0 up, or null", or_null(WHOLE[1])),
}


def write_served(path: Path, report: Mapping[str, Any]) -> None:
    """Write a report of a server, as its `as_dict()` gives it, in place of what is there. Raises ForerunError."""
    write_whole(path, "".join(f"{json.dumps(line)}\n" for line in lines_of(report)))


def lines_of(report: Mapping[str, Any]) -> list[Line]:
    """The results of a report, each with the fields of its run."""
    run = {name: value for name, value in report.items() if name != "results"}
    return [run | result for result in report["results"]]


def read_served(paths: Sequence[Path]) -> list[Line]:
    """The results of servers in files that `write_served` wrote, each once; none where all lines are of another kind.

    Raises:
        ForerunError: a file that cannot be read, a line that is none of ours, or both kinds in one call.
    """
    found: dict[str, Line] = {}
    other = ""
    for where, line in (item for path in paths for item in objects_of(path)):
        if line.get("kind") != SERVE:
            other = other or where
            continue
        check_fields(line, FIELDS, where)
        found.setdefault(json.dumps(line, sort_keys=True), line)
    if found and other:
        raise ForerunError(f"{other} is not of a server, as others are: a page shows one or the other, so make two")
    return list(found.values())
