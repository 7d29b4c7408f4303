"""A report on disk: its shape, and JSON lines of it.

A report is what `as_dict()` of a measurement gives: fields of the run (`RUN`), "results" and "limits". On disk every
result is one line that repeats the fields of its run and the limits of its weights, so that files of several runs can
be put one after the other. `read_lines` gives one report again. Where runs differ, the fields of the first stand above
all results, and the results and limits of the others carry those of their own that differ.

What holds: nobody gets a report from here, and no file is written, that has not been checked (`check_report`); a file
that is there already is replaced whole or stays as it was.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from forerun.errors import ForerunError
from forerun.whole import write_whole

RUN = ("kind", "model", "tokens", "repeats", "machine")
LARGEST = 1e15  # no measurement comes near; beyond it neither JSON nor a plot is exact
Check = Callable[[Any], bool]


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _number(value: Any) -> bool:
    """Not negative, not infinite, and not NaN, which compares to nothing."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < LARGEST


def _whole(value: Any) -> bool:
    return isinstance(value, int) and _number(value)


def or_null(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _list_of(check: Check, length: int | None = None) -> Check:
    """A list (of exactly `length`, if given) whose items pass."""
    return lambda value: (
        isinstance(value, list | tuple) and length in (None, len(value)) and all(check(item) for item in value)
    )


def _machine(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        _text(key) and (v is None or _text(v) or _number(v)) for key, v in value.items()
    )


def _sources(value: Any) -> bool:
    pair = _list_of(_whole, 2)
    return isinstance(value, Mapping) and all(_text(name) and pair(counts) for name, counts in value.items())


# What a field must be, in the words of an error, and how that is told. Null stands for what was not measured.
TEXT = "text", _text
NUMBER = "a finite number from 0 up", _number
NUMBER_OR_NULL = "a finite number from 0 up, or null", or_null(_number)
WHOLE = "a whole number from 0 up", _whole
RUN_FIELDS: dict[str, tuple[str, Check]] = {
    "kind": TEXT,
    "model": TEXT,
    "tokens": WHOLE,
    "repeats": WHOLE,
    "machine": ("an object of texts, numbers and nulls", _machine),
}
RESULT_FIELDS: dict[str, tuple[str, Check]] = {
    "quantization": TEXT,
    "draft": TEXT,
    "depth": ('a whole number from 0 up, or "auto"', lambda value: value == "auto" or _whole(value)),
    "rule": TEXT,
    "category": TEXT,
    "temperature": NUMBER,
    "requests": WHOLE,
    "tokens_per_second": NUMBER,
    "times_plain": NUMBER,
    "interval": ("null or two numbers", or_null(_list_of(_number, 2))),
    "accepted_length": NUMBER,
    "drafted": NUMBER,
    "draft_ms": NUMBER,
    "pass_ms": NUMBER,
    "other_ms": NUMBER,
    "same": ("true, false or null", lambda value: value is None or isinstance(value, bool)),
    "first_difference": ("a whole number from 0 up, or null", or_null(_whole)),
    "lengths": ("a list of whole numbers", _list_of(_whole)),
    "acceptance": ("a list of [tried, accepted]", _list_of(_list_of(_whole, 2))),
    "sources": ("an object of [drafted, accepted]", _sources),
    "positions": ("a list of [start, passes, tokens]", _list_of(_list_of(_number, 3))),
    "joules_per_token": NUMBER_OR_NULL,
    "cost_per_million": NUMBER_OR_NULL,
}
LIMIT_FIELDS: dict[str, tuple[str, Check]] = {
    "quantization": TEXT,
    "weight_bytes": WHOLE,
    "bandwidth": NUMBER_OR_NULL,
    "tokens_per_second": NUMBER_OR_NULL,
    "share": NUMBER_OR_NULL,
}


def check_report(report: Any) -> None:
    """Raise ForerunError if this is no report, with the first field that is missing or not what it has to be.

    Fields that are not known here are let through: they are not this version's to judge.
    """
    check_fields(report, RUN_FIELDS, "the report")
    for name, fields in (("results", RESULT_FIELDS), ("limits", LIMIT_FIELDS)):
        if not isinstance(report.get(name), list | tuple):
            raise ForerunError(f"the report has no list of {name}: give what a measurement's as_dict() returns")
        for i, item in enumerate(report[name]):
            check_fields(item, fields, f"{name[:-1]} {i + 1} of the report")
            check_fields(item, {key: RUN_FIELDS[key] for key in RUN if key in item}, f"{name[:-1]} {i + 1}")
    if not report["results"]:
        raise ForerunError("the report has no results: there is nothing to write")


def check_fields(item: Any, fields: Mapping[str, tuple[str, Check]], where: str) -> None:
    """Raise ForerunError, which begins with `where`, unless it is an object that has all fields as they have to be."""
    if not isinstance(item, Mapping):
        raise ForerunError(f"{where} is no object, but {_start_of(item)}")
    for name, (kind, check) in fields.items():
        if name not in item:
            raise ForerunError(f"{where} has no {name}: it has to be {kind}")
        if not check(item[name]):
            raise ForerunError(f"{where} has {name} {_start_of(item[name])}: it has to be {kind}")


def _start_of(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:40] + "..."


def write_lines(path: Path, report: Mapping[str, Any]) -> None:
    """Write a report as JSON lines, one a result.

    Raises:
        ForerunError: it is no report, or the file cannot be written.
    """
    check_report(report)
    run = {name: report[name] for name in RUN}
    lines = []
    for result in report["results"]:
        own = [limit for limit in report["limits"] if _belong(run, result, limit)]
        limits = [{name: value for name, value in limit.items() if name not in RUN} for limit in own]
        lines.append(json.dumps({**run, **result, "limits": limits}) + "\n")
    write_whole(path, "".join(lines))


def _belong(run: Mapping[str, Any], result: Mapping[str, Any], limit: Mapping[str, Any]) -> bool:
    """Whether a limit is that of the weights a result was measured with."""
    keys = ("quantization", *(["requests"] if "requests" in limit else []), *RUN)
    return all({**run, **result}[key] == {**run, **limit}[key] for key in keys)


def read_lines(paths: Sequence[Path]) -> dict[str, Any]:
    """One report of all results in files that `write_lines` wrote; lines that are there twice count once.

    Raises:
        ForerunError: a file that cannot be read, or, with its file and number, a line that is none of ours.
    """
    run: dict[str, Any] = {}
    results: dict[str, dict[str, Any]] = {}
    limits: dict[str, dict[str, Any]] = {}
    for path in paths:
        for where, line in objects_of(path):
            one = {**line, "results": [line], "limits": line.get("limits")}
            try:
                check_report(one)
            except ForerunError as error:
                raise ForerunError(f"{where} is no result of a measurement: {error}") from None
            own = {name: line[name] for name in RUN}
            run = run or own
            differing = {name: value for name, value in own.items() if value != run[name]}
            result = {name: value for name, value in line.items() if name not in RUN and name != "limits"}
            results.setdefault(json.dumps([own, result], sort_keys=True), result | differing)
            for limit in one["limits"]:
                limits.setdefault(json.dumps([own, limit], sort_keys=True), differing | limit)
    if not run:
        names = ", ".join(str(path) for path in paths) or "no file"
        raise ForerunError(f"there are no results in {names}: give files of JSON lines that forerun bench wrote")
    return {**run, "results": list(results.values()), "limits": list(limits.values())}


def objects_of(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """(where it stands, the object) of each line that is not blank."""
    found = []
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        raise ForerunError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            item = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ForerunError(f"{where} is not JSON ({error}): give JSON lines that forerun bench wrote") from None
        if not isinstance(item, dict):
            raise ForerunError(f"{where} is no result of a measurement, but {_start_of(item)}")
        found.append((where, item))
    return found
