"""A page of what `forerun bench serve` measured: latency and throughput by requests at once and by draft.

The same page as for decoding (`page`), with a table of its own; there are no figures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from forerun.bench.report.page import Column, fill, table_of
from forerun.bench.report.serve_lines import PERCENTILES, Line
from forerun.bench.report.summary import (
    LONGEST_NAME,
    PLAIN,
    PLAIN_NAME,
    TEXTS,
    condition,
    number,
    shorten,
    shown,
    unique,
)
from forerun.whole import write_whole

FOOTER = (
    "As a client sees it: speeds are medians of the rounds, of all requests together and with the reading of prompts;"
    " milliseconds are percentiles over all answers, the wait for a piece of text shared among its tokens. Times plain:"
    " the speed over that of plain decoding in the same round, with its 95 % bootstrap interval. Accepted length:"
    " tokens a pass of the target, its own included, as the server counts."
)


def _column(name: str, value: Callable[[Line], Any], text: Callable[[Any], str] = number) -> Column:
    return Column(name, value, text, numeric=True)


def _field(name: str, field: str, text: Callable[[Any], str] = number) -> Column:
    return _column(name, lambda line: line[field], text)


def _latency(name: str, field: str, percentile: str) -> Column:
    return _column(f"{name} ms, {percentile}", lambda line: line[field].get(percentile))


def _failed(line: Line) -> int | None:
    return sum(line["errors"].values()) or None


def _text(line: Line) -> str | None:
    if line["same"] is None:
        return None
    at = line["first_difference"]
    return "same" if line["same"] else "DIFFERENT" + ("" if at is None else f" from token {at}")


CONDITIONS = (
    Column("server", lambda line: f"{line['server']} at {line['url']}"),
    Column("model", lambda line: line["model"]),
    Column("asked by", lambda line: asked_by(line)),
    _field("tokens", "tokens", str),
    _field("temperature", "temperature", "{:g}".format),
    Column("draft", lambda line: line["draft"]),
    Column("depth", lambda line: line["depth"], numeric=True),
    _field("at once", "requests", str),
)
MEASURED = (
    _field("tokens/s", "tokens_per_second"),
    _field("times plain", "times_plain", "{:.2f}".format),
    _column("95 % interval", lambda line: line["interval"], lambda pair: f"{pair[0]:.2f} to {pair[1]:.2f}"),
    Column("text", _text),
    _field("requests/s", "requests_per_second"),
    *(_latency("first token", "first_token_ms", percentile) for percentile in PERCENTILES),
    *(_latency("between tokens", "inter_token_ms", percentile) for percentile in PERCENTILES),
    _field("accepted length", "accepted_length", "{:.2f}".format),
    _field("acceptance", "acceptance", "{:.0%}".format),
    _field("prompts from cache", "cached", "{:.0%}".format),
    _field("answers", "finished", str),
    _column("failed", _failed, str),
)


def write_served_page(path: Path, lines: Sequence[Line]) -> None:
    """Write lines of `serve_lines.read_served`, at least one, as one HTML file. Raises ForerunError."""
    write_whole(path, render(lines))


def render(lines: Sequence[Line]) -> str:
    """The page of checked lines. The same lines give the same page."""
    columns, rows = table_of(lines, CONDITIONS, MEASURED, "at once")
    claim, terms = headline(lines)
    held, said = verdict(lines)
    return fill(
        title=shown(f"serve: {', '.join(unique(line['model'] for line in lines))}"),
        claim=claim,
        terms=terms,
        held=held,
        verdict=said,
        facts=facts_of(lines),
        best=[],
        columns=columns,
        rows=rows,
        sections=[],
        limits=[],
        footer=FOOTER,
    )


def asked_by(line: Line) -> str:
    """The part of the API that was asked."""
    return "chat completions" if line["chat"] else "completions"


def headline(lines: Sequence[Line]) -> tuple[str, str]:
    """The quickest draft beside plain decoding, or the most tokens a second; and how soon its tokens came."""
    drafts = [line for line in lines if line["draft"] not in (None, PLAIN) and line["times_plain"] is not None]
    best = max(drafts or lines, key=lambda line: line["times_plain"] if drafts else line["tokens_per_second"])
    terms = [condition("requests", best["requests"])]
    for what, field in (("{} ms to the first token", "first_token_ms"), ("{} ms between tokens", "inter_token_ms")):
        terms += [what.format(number(best[field]["p50"]))] if best[field] else []
    if not drafts:
        return f"{number(best['tokens_per_second'])} tokens/s", ", ".join(terms)
    span = f" ({best['interval'][0]:.2f} to {best['interval'][1]:.2f})" if best["interval"] else ""
    claim = f"{shorten(shown(best['draft']), LONGEST_NAME)}: {best['times_plain']:.2f} times {PLAIN_NAME}{span}"
    if best["times_plain"] < 1:
        return f"No draft is quicker than {PLAIN_NAME}", ", ".join([f"the best is {claim}", *terms])
    return claim, ", ".join([*terms, *([TEXTS["same"]] if best["same"] else [])])


def verdict(lines: Sequence[Line]) -> tuple[bool, str]:
    """Whether all was answered with plain decoding's text, and that in a sentence."""
    compared = [line for line in lines if line["draft"] != PLAIN and line["same"] is not None]
    differing = [line for line in compared if not line["same"]]
    failed, ended = sum(_failed(line) or 0 for line in lines), unique(line["stopped"] for line in lines)
    troubles = [f"{len(differing)} of {len(compared)} results gave another text than {PLAIN_NAME}"] if differing else []
    troubles += [f"{failed} requests failed"] if failed else []
    troubles += [f"ended early: {shown(reason)}" for reason in ended if reason]
    if troubles:
        return False, "; ".join(troubles)
    if not compared:
        return True, "every request was answered; no text was compared"
    return True, f"every request was answered, with the text of {PLAIN_NAME} token for token"


def facts_of(lines: Sequence[Line]) -> list[tuple[str, str]]:
    """(what, in words) of the servers and of how they were asked."""

    def words(value: Callable[[Line], Any]) -> str:
        return shown(", ".join(unique(str(value(line)) for line in lines)))

    return [
        ("model", words(lambda line: line["model"])),
        ("server", words(lambda line: f"{line['server'] or 'unknown'} at {line['url']}")),
        ("asked by", words(asked_by)),
        ("at most", f"{words(lambda line: line['tokens'])} tokens an answer"),
        ("temperature", words(lambda line: f"{line['temperature']:g}")),
        ("rounds", words(lambda line: line["repeats"])),
        ("different prompts", words(lambda line: line["prompts"])),
    ]
