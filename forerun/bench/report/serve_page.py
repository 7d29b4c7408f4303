"""A page of what `forerun bench serve` measured: latency and throughput by requests at once and by
draft.

The same page as for decoding (`page`), with a table of its own; there are no figures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from forerun.bench.report.lines import PERCENTILES, Line
from forerun.bench.report.page import SPEEDS, Column, fill, numbers, table_of
from forerun.bench.report.summary import (
    PLAIN,
    PLAIN_NAME,
    TEXTS,
    claimed,
    condition,
    number,
    same_text,
    shown,
    unique,
)
from forerun.utils import write_atomic

FOOTER = (
    "As a client sees it: speeds are medians of the rounds, of all requests together and with the reading of prompts;"
    " milliseconds are percentiles over all answers, the wait for a piece of text shared among its tokens. Times plain:"
    " the speed over that of plain decoding in the same round, with its 95 % bootstrap interval. Accepted length:"
    " tokens a pass of the target, its own included, as the server counts."
)


def _latency(name: str, field: str, percentile: str) -> Column:
    return Column(
        f"{name} ms, {percentile}", lambda line: line[field].get(percentile), number, numeric=True
    )


def _failed(line: Line) -> int | None:
    return sum(line["errors"].values()) or None


def _text(line: Line) -> str | None:
    return None if line["same"] is None else same_text([line])


def asked_by(line: Line) -> str:
    """The part of the API that was asked."""
    return "chat completions" if line["chat"] else "completions"


CONDITIONS = (
    Column("server", lambda line: f"{line['server']} at {line['url']}"),
    Column("model", lambda line: line["model"]),
    Column("asked by", asked_by),
    numbers("tokens", "tokens", str),
    numbers("temperature", "temperature", "{:g}".format),
    Column("draft", lambda line: line["draft"]),
    Column("depth", lambda line: line["depth"], numeric=True),
    numbers("at once", "requests", str),
)
MEASURED = (
    *SPEEDS,
    Column("text", _text),
    numbers("requests/s", "requests_per_second"),
    *(_latency("first token", "first_token_ms", percentile) for percentile in PERCENTILES),
    *(_latency("between tokens", "inter_token_ms", percentile) for percentile in PERCENTILES),
    numbers("accepted length", "accepted_length", "{:.2f}".format),
    numbers("acceptance", "acceptance", "{:.0%}".format),
    numbers("prompts from cache", "cached", "{:.0%}".format),
    numbers("answers", "finished", str),
    Column("failed", _failed, str, numeric=True),
)


def write_served_page(path: Path, lines: Sequence[Line]) -> None:
    """Write lines of `lines.read_served`, at least one, as one HTML file. Raises ForerunError."""
    write_atomic(path, render(lines))


def render(lines: Sequence[Line]) -> str:
    """The page of checked lines. The same lines give the same page."""
    return fill(
        title=shown(f"serve: {', '.join(unique(line['model'] for line in lines))}"),
        headline=headline(lines),
        verdict=verdict(lines),
        facts=facts_of(lines),
        table=table_of(lines, CONDITIONS, MEASURED, "at once"),
        footer=FOOTER,
    )


def headline(lines: Sequence[Line]) -> tuple[str, str]:
    """The quickest draft beside plain decoding, or the most tokens a second; and how soon its
    tokens came."""
    drafts = [
        line
        for line in lines
        if line["draft"] not in (None, PLAIN) and line["times_plain"] is not None
    ]
    best = max(
        drafts or lines,
        key=lambda line: line["times_plain"] if drafts else line["tokens_per_second"],
    )
    terms = [condition("requests", best["requests"])]
    for what, field in (
        ("{} ms to the first token", "first_token_ms"),
        ("{} ms between tokens", "inter_token_ms"),
    ):
        terms += [what.format(number(best[field]["p50"]))] if best[field] else []
    if not drafts:
        return f"{number(best['tokens_per_second'])} tokens/s", ", ".join(terms)
    times = best["times_plain"]
    terms += [TEXTS["same"]] if best["same"] and times >= 1 else []
    return claimed(shown(best["draft"]), times, best["interval"], terms)


def verdict(lines: Sequence[Line]) -> tuple[bool, str]:
    """Whether all was answered with plain decoding's text, and that in a sentence."""
    compared = [line for line in lines if line["draft"] != PLAIN and line["same"] is not None]
    differing = [line for line in compared if not line["same"]]
    failed, ended = (
        sum(_failed(line) or 0 for line in lines),
        unique(line["stopped"] for line in lines),
    )
    troubles = (
        [f"{len(differing)} of {len(compared)} results gave another text than {PLAIN_NAME}"]
        if differing
        else []
    )
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
