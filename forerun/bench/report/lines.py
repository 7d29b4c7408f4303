"""Reports on disk: their shape, and JSON lines of them.

A report of decoding is what `as_dict()` of a measurement gives: fields of the run (`RUN`),
"results" and "limits". On disk every result is one line that repeats the fields of its run and the
limits of its weights, so that files of several runs can be put one after the other. `read_lines`
gives one report again. Where runs differ, the fields of the first stand above all results, and the
results and limits of the others carry those of their own that differ.

What `forerun bench serve` measured is of another kind: clients measured it, so it has latencies,
and nothing of weights, categories or the machine that answered. A line of it is a result with the
fields of its run, on disk and off.

What holds: nobody gets a report from here that has not been checked, and one of decoding is checked
before it is written; a file that is there already is replaced whole or stays as it was.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from forerun.errors import ForerunError
from forerun.utils import UnreadableError, json_line, text_of, write_atomic

SERVE = "serve"
PERCENTILES = ("p50", "p95", "p99")
LARGEST = 1e15  # no measurement comes near; beyond it neither JSON nor a plot is exact
Check = Callable[[Any], bool]
Kind = tuple[str, Check]  # what a field must be, in the words of an error, and how that is told
Line = dict[str, Any]


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _number(value: Any) -> bool:
    """Not negative, not infinite, and not NaN, which compares to nothing."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < LARGEST


def _whole(value: Any) -> bool:
    return isinstance(value, int) and _number(value)


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _or_null(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _list_of(check: Check, length: int | None = None) -> Check:
    """A list (of exactly `length`, if given) whose items pass."""
    return lambda value: (
        isinstance(value, list | tuple)
        and length in (None, len(value))
        and all(check(item) for item in value)
    )


def _object_of(check: Check) -> Check:
    """An object whose values pass."""
    return lambda value: (
        isinstance(value, Mapping)
        and all(_text(name) and check(item) for name, item in value.items())
    )


def _latencies(value: Any) -> bool:
    """Milliseconds at each percentile, or nothing where no answer had any."""
    return value == {} or (
        isinstance(value, Mapping) and all(_number(value.get(name)) for name in PERCENTILES)
    )


# Null stands for what was not measured.
TEXT: Kind = "text", _text
TEXT_OR_NULL: Kind = "text, or null", _or_null(_text)
NUMBER: Kind = "a finite number from 0 up", _number
NUMBER_OR_NULL: Kind = "a finite number from 0 up, or null", _or_null(_number)
WHOLE: Kind = "a whole number from 0 up", _whole
WHOLE_OR_NULL: Kind = "a whole number from 0 up, or null", _or_null(_whole)
FLAG_OR_NULL: Kind = "true, false or null", _or_null(_flag)
INTERVAL: Kind = "null or two numbers", _or_null(_list_of(_number, 2))
LATENCIES: Kind = "an object of p50, p95 and p99 in milliseconds", _latencies
RUN: dict[str, Kind] = {
    "kind": TEXT,
    "model": TEXT,
    "tokens": WHOLE,
    "repeats": WHOLE,
    "machine": (
        "an object of texts, numbers and nulls",
        _object_of(lambda value: value is None or _text(value) or _number(value)),
    ),
}
RESULT: dict[str, Kind] = {
    "quantization": TEXT,
    "draft": TEXT,
    "depth": (
        'a whole number from 0 up, or "auto"',
        lambda value: value == "auto" or _whole(value),
    ),
    "rule": TEXT,
    "category": TEXT,
    "temperature": NUMBER,
    "requests": WHOLE,
    "tokens_per_second": NUMBER,
    "times_plain": NUMBER,
    "interval": INTERVAL,
    "accepted_length": NUMBER,
    "drafted": NUMBER,
    "draft_ms": NUMBER,
    "pass_ms": NUMBER,
    "other_ms": NUMBER,
    "same": FLAG_OR_NULL,
    "first_difference": WHOLE_OR_NULL,
    "lengths": ("a list of whole numbers", _list_of(_whole)),
    "acceptance": ("a list of [tried, accepted]", _list_of(_list_of(_whole, 2))),
    "sources": ("an object of [drafted, accepted]", _object_of(_list_of(_whole, 2))),
    "positions": ("a list of [start, passes, tokens]", _list_of(_list_of(_number, 3))),
    "joules_per_token": NUMBER_OR_NULL,
    "cost_per_million": NUMBER_OR_NULL,
}
LIMIT: dict[str, Kind] = {
    "quantization": TEXT,
    "weight_bytes": WHOLE,
    "bandwidth": NUMBER_OR_NULL,
    "tokens_per_second": NUMBER_OR_NULL,
    "share": NUMBER_OR_NULL,
}
SERVED: dict[str, Kind] = {
    "url": TEXT,
    "server": TEXT,
    "model": TEXT,
    "chat": ("true or false", _flag),
    "tokens": WHOLE,
    "temperature": NUMBER,
    "repeats": WHOLE,
    "prompts": WHOLE,
    "stopped": TEXT_OR_NULL,
    "draft": TEXT_OR_NULL,
    "depth": (
        'a whole number from 0 up, "auto" or null',
        lambda value: value in (None, "auto") or _whole(value),
    ),
    "requests": WHOLE,
    "tokens_per_second": NUMBER,
    "times_plain": NUMBER_OR_NULL,
    "interval": INTERVAL,
    "requests_per_second": NUMBER,
    "first_token_ms": LATENCIES,
    "inter_token_ms": LATENCIES,
    "finished": WHOLE,
    "errors": ("an object of counts", _object_of(_whole)),
    "accepted_length": NUMBER_OR_NULL,
    "acceptance": NUMBER_OR_NULL,
    "cached": NUMBER_OR_NULL,
    "same": FLAG_OR_NULL,
    "first_difference": WHOLE_OR_NULL,
}


def check_report(report: Any) -> None:
    """Raise ForerunError if this is no report, with the first field that is missing or not what it
    has to be.

    Fields that are not known here are let through: they are not this version's to judge.
    """
    _check_fields(report, RUN, "the report")
    for name, fields in (("results", RESULT), ("limits", LIMIT)):
        if not isinstance(report.get(name), list | tuple):
            raise ForerunError(
                f"the report has no list of {name}: give what a measurement's as_dict() returns"
            )
        for i, item in enumerate(report[name]):
            _check_fields(item, fields, f"{name[:-1]} {i + 1} of the report")
            _check_fields(
                item, {key: RUN[key] for key in RUN if key in item}, f"{name[:-1]} {i + 1}"
            )
    if not report["results"]:
        raise ForerunError("the report has no results: there is nothing to write")


def _check_fields(item: Any, fields: Mapping[str, Kind], where: str) -> None:
    """Raise ForerunError, which begins with `where`, unless it is an object that has all fields as
    they have to be."""
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
    if report.get("kind") == SERVE:
        return _write(path, served_lines(report))
    check_report(report)
    run = {name: report[name] for name in RUN}
    lines = []
    for result in report["results"]:
        own = [limit for limit in report["limits"] if _belong(run, result, limit)]
        limits = [
            {name: value for name, value in limit.items() if name not in RUN} for limit in own
        ]
        lines.append({**run, **result, "limits": limits})
    return _write(path, lines)


def _write(path: Path, lines: Sequence[Line]) -> None:
    write_atomic(path, "".join(f"{json_line(line, ascii_only=True)}\n" for line in lines))


def _belong(run: Mapping[str, Any], result: Mapping[str, Any], limit: Mapping[str, Any]) -> bool:
    """Whether a limit is that of the weights a result was measured with."""
    keys = ("quantization", *(["requests"] if "requests" in limit else []), *RUN)
    return all({**run, **result}[key] == {**run, **limit}[key] for key in keys)


def served_lines(report: Mapping[str, Any]) -> list[Line]:
    """The results of a server's report, each with the fields of its run."""
    run = {name: value for name, value in report.items() if name != "results"}
    return [run | result for result in report["results"]]


def read_lines(paths: Sequence[Path]) -> dict[str, Any]:
    """One report of all results in files that `write_lines` wrote; lines that are there twice count
    once.

    Raises:
        ForerunError: a file that cannot be read, or, with its file and number, a line that is none
            of ours.
    """
    run: dict[str, Any] = {}
    results: dict[str, dict[str, Any]] = {}
    limits: dict[str, dict[str, Any]] = {}
    for where, line in _objects_of(paths):
        one = {**line, "results": [line], "limits": line.get("limits")}
        try:
            check_report(one)
        except ForerunError as error:
            raise ForerunError(f"{where} is no result of a measurement: {error}") from None
        own = {name: line[name] for name in RUN}
        run = run or own
        differing = {name: value for name, value in own.items() if value != run[name]}
        result = {
            name: value for name, value in line.items() if name not in RUN and name != "limits"
        }
        results.setdefault(json.dumps([own, result], sort_keys=True), result | differing)
        for limit in one["limits"]:
            limits.setdefault(json.dumps([own, limit], sort_keys=True), differing | limit)
    if not run:
        names = ", ".join(str(path) for path in paths) or "no file"
        raise ForerunError(
            f"there are no results in {names}: give files of JSON lines that forerun bench wrote"
        )
    return {**run, "results": list(results.values()), "limits": list(limits.values())}


def read_served(paths: Sequence[Path]) -> list[Line]:
    """The results of servers in files that `write_lines` wrote, each once; none where all lines are
    of decoding.

    Raises:
        ForerunError: a file that cannot be read, a line that is none of ours, or both kinds in one
            call.
    """
    found: dict[str, Line] = {}
    other = ""
    for where, line in _objects_of(paths):
        if line.get("kind") == SERVE:
            _check_fields(line, SERVED, where)
            found.setdefault(json.dumps(line, sort_keys=True), line)
        else:
            other = other or where
    if found and other:
        raise ForerunError(
            f"{other} is not of a server, as others are: a page shows one or the other, so make two"
        )
    return list(found.values())


def _objects_of(paths: Sequence[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where it stands, the object) of each line that is not blank."""
    for path in paths:
        try:
            lines = text_of(path, largest=None).split("\n")
        except UnreadableError as error:
            wrong = (
                f"{path}, line {error.line} is not JSON" if error.line else f"{path} cannot be read"
            )
            raise ForerunError(f"{wrong}: {error}") from None
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                item = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ForerunError(
                    f"{where} is not JSON ({error}): give JSON lines that forerun bench wrote"
                ) from None
            if not isinstance(item, dict):
                raise ForerunError(f"{where} is no result of a measurement, but {_start_of(item)}")
            yield where, item
