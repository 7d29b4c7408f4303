"""One page of HTML from a report: a sentence, the machine, a table of everything, figures, limits.

The page stands alone: it asks the network for nothing and forbids itself to, can be read without
its script (which sorts the table) and printed. Names are text: the template escapes all that is not
a figure."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from forerun.bench.report.figures import sections_of
from forerun.bench.report.lines import check_report
from forerun.bench.report.summary import (
    NOTHING,
    Entry,
    Standing,
    condition,
    entries_of,
    headline,
    in_brackets,
    number,
    place_of,
    same_text,
    shown,
    span,
    standings,
    unique,
    verdict,
)
from forerun.utils import write_atomic


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table of results.

    Attributes:
        name: in its head, with the unit.
        value: of a result; it is sorted by that, and None comes last.
        text: what is shown of a value.
        numeric: stands to the right.
    """

    name: str
    value: Callable[[Any], Any]
    text: Callable[[Any], str] = shown
    numeric: bool = False


def numbers(name: str, field: str, text: Callable[[Any], str] = number) -> Column:
    """A column of a field that holds numbers."""
    return Column(name, lambda row: row[field], text, numeric=True)


CONDITIONS = (  # shown where rows differ in them
    Column("model", lambda entry: entry["model"]),
    Column("machine", lambda entry: entry.machine),
    numbers("tokens", "tokens", str),
    Column("weights", lambda entry: entry["quantization"]),
    Column("category", lambda entry: entry.category),
    Column("draft", lambda entry: entry["draft"]),
    Column("depth", lambda entry: None if entry.plain else entry["depth"], numeric=True),
    Column("rule", lambda entry: None if entry.plain else entry["rule"]),
    numbers("temperature", "temperature", "{:g}".format),
    numbers("requests", "requests", str),
)
SPEEDS = (
    numbers("tokens/s", "tokens_per_second"),
    numbers("times plain", "times_plain", "{:.2f}".format),
    numbers("95 % interval", "interval", span),
)
MEASURED = (  # shown where they are known
    *SPEEDS,
    Column("text", lambda entry: same_text([entry])),
    numbers("accepted length", "accepted_length", "{:.2f}".format),
    numbers("drafted a step", "drafted", "{:.1f}".format),
    numbers("draft ms", "draft_ms"),
    numbers("pass ms", "pass_ms"),
    numbers("other ms", "other_ms"),
    numbers("joules a token", "joules_per_token"),
    numbers("cost a million", "cost_per_million"),
)
FOOTER = (
    "Times plain: the speed over that of plain decoding of the same weights and prompts in the same round, the median"
    " of all rounds, with its 95 % bootstrap interval. Accepted length: tokens a pass of the target, its own included."
    " Reading prompts is not counted."
)


def write_page(path: Path, data: Mapping[str, Any]) -> None:
    """Write a report, as `as_dict()` of a measurement or `lines.read_lines` gives it, as one HTML
    file.

    Raises:
        ForerunError: it is no report, the file cannot be written, or matplotlib is not installed.
    """
    check_report(data)
    write_atomic(path, render(data))


def render(data: Mapping[str, Any], title: str | None = None) -> str:
    """The page of a checked report; without a title, it is called by the model and what was
    measured. The same report gives the same page."""
    entries = entries_of(data)
    return fill(
        title=shown(title or f"{data['kind']}: {data['model']}"),
        headline=headline(entries),
        verdict=verdict(entries),
        facts=facts_of(data, entries),
        best=best_of(entries),
        table=table_of(entries, CONDITIONS, MEASURED, "draft"),
        sections=sections_of(entries),
        limits=limits_of(data["limits"]),
        footer=FOOTER,
    )


def fill(**values: Any) -> str:
    """The template with what it asks for."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["digest"] = _digest
    template = environment.from_string(
        (files("forerun.bench.report") / "page.html").read_text(encoding="utf-8")
    )
    return template.render(
        {"best": [], "sections": [], "limits": []} | values
    )  # not all pages have these


def _digest(script: str) -> str:
    """The hash by which a content security policy knows an inline script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(str(script).encode()).digest()).decode()


def facts_of(data: Mapping[str, Any], entries: Sequence[Entry]) -> list[tuple[str, str]]:
    """(what, in words) of the machine, the run, and all that is the same for every result."""
    rows = [entry.values for entry in entries]
    machines = [row["machine"] for row in rows]
    speculative = [entry.values for entry in entries if not entry.plain]
    tokens, repeats = _values(rows, "tokens"), _values(rows, "repeats")
    facts = [
        ("model", _values(rows, "model")),
        *((shown(name), _values(machines, name)) for name in data["machine"]),
        (
            "measured",
            f"{tokens} tokens a prompt, medians of {repeats} round{'s' * (repeats != '1')}",
        ),
        ("weights", _values(rows, "quantization")),
        ("depth", _values(speculative, "depth")),
        ("rule", _values(speculative, "rule")),
        ("category", _values(rows, "category")),
        ("temperature", _values(rows, "temperature")),
        ("requests at once", _values(rows, "requests")),
    ]
    return [(what, words) for what, words in facts if words]


def _values(rows: Sequence[Mapping[str, Any]], name: str) -> str:
    """All values of a field, in words."""
    values = unique(row[name] for row in rows if row.get(name) not in (None, ""))
    return ", ".join(f"{value:g}" if isinstance(value, float) else shown(value) for value in values)


def best_of(entries: Sequence[Entry]) -> list[tuple[str, list[tuple[str, str, str, bool]]]]:
    """Tables of the quickest arm by category and by setting: (name, [(of what, arm, times plain,
    same text)])."""
    ranked = standings(entries)
    if not ranked:
        return []
    first = ranked[0].entries[0]
    here = [
        e
        for e in entries
        if (e.conditions, e.requests) == (first.conditions, first.requests) and not e.plain
    ]
    where = place_of(first, entries)
    categories = unique(e.category for e in here)
    tables = []
    if len(categories) > 1:
        rows = [
            (name, standings([e for e in here if e.category == name])[0]) for name in categories
        ]
        name = "Quickest draft by category" + (f", {where}" if where else "")
        tables.append((name, [_best_row(category, best) for category, best in rows]))
    settings: dict[str, Standing] = {}
    for standing in ranked:
        settings.setdefault(place_of(standing.entries[0], entries), standing)
    if len(settings) > 1:
        order = [
            place for place in unique(place_of(e, entries) for e in entries) if place in settings
        ]
        tables.append(
            ("Quickest draft by setting", [_best_row(place, settings[place]) for place in order])
        )
    return tables


def _best_row(name: str, best: Standing) -> tuple[str, str, str, bool]:
    times = f"{best.times:.2f}{in_brackets(best.interval)}"
    return name, best.entries[0].arm, times, same_text(best.entries).startswith("DIFFERENT")


def table_of(
    entries: Sequence[Any], conditions: Sequence[Column], measured: Sequence[Column], always: str
) -> tuple[list[Column], list[list[tuple[str, str, str]]]]:
    """The columns that say something, and a row for each result: conditions where they differ, and
    the one that is shown always; figures where they are known. A cell is what it shows, what it is
    sorted by, and its class."""

    def values(column: Column) -> set[str]:
        return {shown(value) for value in map(column.value, entries) if value is not None}

    columns = [c for c in conditions if c.name == always or len(values(c)) > 1]
    columns += [c for c in measured if values(c)]
    return columns, [[_cell(column, entry) for column in columns] for entry in entries]


def _cell(column: Column, entry: Any) -> tuple[str, str, str]:
    value, kind = column.value(entry), "number" if column.numeric else ""
    if value is None:
        return NOTHING, "", kind
    first = value[0] if isinstance(value, list | tuple) else value
    return (
        column.text(value),
        shown(first),
        kind or ("warns" if shown(value).startswith("DIFFERENT") else ""),
    )


def limits_of(limits: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str, str, str]]:
    """Rows of (weights, MB, GB/s, tokens/s that these allow, share that plain decoding reaches)."""
    several = len({limit.get("requests") for limit in limits}) > 1
    named = ("model", "tokens", "quantization", *(["requests"] if several else []))
    return [
        (
            ", ".join(condition(name, limit[name]) for name in named if name in limit),
            f"{limit['weight_bytes'] / 1e6:,.0f}",
            number(limit["bandwidth"]),
            number(limit["tokens_per_second"]),
            NOTHING if limit["share"] is None else f"{limit['share']:.0%}",
        )
        for limit in limits
    ]
