"""The figures of a report: what of it each one shows, in sections of one setting each.

A figure whose data was not measured is left out. All but those of requests at once show the fewest
requests that were measured, since more of them blur what a draft does. Where there are more arms
than markers, figures keep the best depth of each draft and rule, and say so; the table has them
all. An arm looks the same in all figures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from forerun.bench.report.drawing import Line, Row, draw_bars, draw_lines, draw_rows, draw_strips
from forerun.bench.report.summary import (
    PLAIN_NAME,
    Entry,
    arm_name,
    condition,
    mean_ratio,
    number,
    shown,
    standings,
    unique,
)

MOST_ARMS = 9  # as many as there are markers
MOST_COLUMNS = 20  # of a histogram; what is longer shares the last
MOST_LEVELS = 32
FEWEST_DRAFTS = 10  # of fewer a share says nothing
MOST_TICKS = 9
PARTS = ("draft", "pass", "other")
Arms = Mapping[str, Sequence[Entry]]  # an arm's name and its results, by category
Series = Mapping[str, int | None]  # by which an arm is drawn; None is plain decoding


@dataclass(frozen=True, slots=True)
class Figure:
    """A plot with its title, what it says of its data, and itself in words for those who do not see
    it."""

    title: str
    caption: str
    words: str
    svg: str


@dataclass(frozen=True, slots=True)
class Section:
    """The figures of one setting; its title is empty where there is only one."""

    title: str
    figures: Sequence[Figure]


def sections_of(entries: Sequence[Entry]) -> list[Section]:
    """All figures. Raises ForerunError without matplotlib."""
    arms = unique(e.arm for e in entries if not e.plain)
    series = {arm: i for i, arm in enumerate(arms)} | {PLAIN_NAME: None}
    sections = []
    for conditions in unique(e.conditions for e in entries):
        mine = [e for e in entries if e.conditions == conditions]
        figures = [figure for figure in _figures(mine, series) if figure is not None]
        if figures:
            sections.append(Section(conditions, figures))
    return sections


def _figures(entries: Sequence[Entry], series: Series) -> Iterator[Figure | None]:
    levels = sorted({e.requests for e in entries})
    for requests in levels:
        here = [e for e in entries if e.requests == requests]
        yield _times_plain(here, series, condition("requests", requests) if len(levels) > 1 else "")
    yield _by_requests(entries, series, "Speed-up", "times_plain", "times plain decoding")
    yield _by_requests(
        entries, series, "Speed", "tokens_per_second", "tokens/s, all requests together"
    )
    fewest = [e for e in entries if e.requests == levels[0]]
    yield _by_depth(fewest)
    arms = _few_arms(fewest)
    drafts = {arm: mine for arm, mine in arms.items() if arm != PLAIN_NAME}
    note = f"With {condition('requests', levels[0])}. " if len(levels) > 1 else ""
    note += _left_out(arms, fewest)
    for make in (_lengths, _levels, _step, _sources, _positions):
        yield make(arms if make is _step else drafts, series, note)
    yield _costs(arms, series, note, "Energy", "joules_per_token", "joules a token")
    yield _costs(
        arms,
        series,
        note,
        "Cost",
        "cost_per_million",
        "a million tokens, in the currency of the price given",
    )


def _few_arms(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    """The arms to show, in the report's order, plain decoding first."""
    arms = {arm: [e for e in entries if e.arm == arm] for arm in unique(e.arm for e in entries)}
    plain = {PLAIN_NAME: arms.pop(PLAIN_NAME)} if PLAIN_NAME in arms else {}
    if len(arms) > MOST_ARMS:
        best: dict[tuple[str, str], str] = {}
        for standing in standings(entries):
            first = standing.entries[0]
            best.setdefault((first["draft"], first["rule"]), first.arm)
        kept = list(best.values())[:MOST_ARMS]
        arms = {arm: mine for arm, mine in arms.items() if arm in kept}
    return plain | arms


def _left_out(arms: Arms, entries: Sequence[Entry]) -> str:
    return (
        "Only the quickest; the table has all. "
        if len(arms) < len({e.arm for e in entries})
        else ""
    )


def _figure(
    title: str, caption: str, svg: str, values: Sequence[tuple[float, str]], unit: str
) -> Figure:
    """A figure, in words too: from the least to the greatest of its (value, what has it)."""
    (least, low), (greatest, high) = min(values), max(values)
    words = f"{title}, {unit}: from {number(least)} ({low}) to {number(greatest)} ({high})"
    return Figure(title, caption, words, svg)


def _times_plain(entries: Sequence[Entry], series: Series, note: str) -> Figure | None:
    arms = _few_arms(entries)
    drafts = [e for arm, mine in arms.items() if arm != PLAIN_NAME for e in mine]
    if not drafts:
        return None
    rows: list[Row] = []
    categories = unique(e.category for e in drafts)
    for category in categories:
        rows += [Row(category)] if len(categories) > 1 else []
        for e in (e for e in drafts if e.category == category):
            times, interval = e["times_plain"], e["interval"]
            differs = e["same"] is False
            words = f"{times:.2f}" + (" \N{NOT EQUAL TO}" if differs else "")
            rows.append(
                Row(e.arm, [times], words, series[e.arm], tuple(interval) if interval else None)
            )
    caption = (
        _left_out(arms, entries) + "Lines are 95 % intervals; the dashed line is plain decoding."
    )
    if any(row.words.endswith("\N{NOT EQUAL TO}") for row in rows):
        caption += " \N{NOT EQUAL TO}: another text than plain decoding's."
    values = [(e["times_plain"], f"{e.arm}, {e.category}") for e in drafts]
    unit = "times plain decoding"
    title = ("Speed-up by category" if len(categories) > 1 else "Speed-up") + (
        f", {note}" if note else ""
    )
    return _figure(title, caption, draw_rows(rows, unit, 1.0), values, unit)


def _by_requests(
    entries: Sequence[Entry], series: Series, title: str, field: str, unit: str
) -> Figure | None:
    """A field against requests at once, averaged over the categories that an arm has at all of its
    numbers."""
    levels = sorted({e.requests for e in entries})
    arms = _few_arms(entries) if len(levels) > 1 else {}
    lines = []
    for arm, mine in arms.items():
        if arm == PLAIN_NAME and field == "times_plain":
            continue
        found = {n: {e.category: e[field] for e in mine if e.requests == n} for n in levels}
        common = set.intersection(*(set(values) for values in found.values() if values))
        points = [
            (i, mean_ratio([found[n][category] for category in common]))
            for i, n in enumerate(levels)
            if common and found[n]
        ]
        lines += [Line(arm, points, series[arm])] if points else []
    ticks = [(i, str(n)) for i, n in enumerate(levels)]
    return _line_figure(
        f"{title} by requests at once", _averaged(entries), lines, "requests at once", unit, ticks
    )


def _by_depth(entries: Sequence[Entry]) -> Figure | None:
    """Speed-up against the depth, for drafts of which three depths and more were measured; auto
    stands apart."""
    several_rules = len({e["rule"] for e in entries if not e.plain}) > 1
    found: dict[str, dict[Any, float]] = {}
    for standing in standings(entries):
        name = arm_name(standing.entries[0].values, ["rule"] if several_rules else [])
        found.setdefault(name, {})[standing.entries[0]["depth"]] = standing.times
    found = {name: times for name, times in found.items() if len(times) > 2}
    depths = unique(depth for times in found.values() for depth in times)
    places = [
        *sorted(depth for depth in depths if depth != "auto"),
        *(["auto"] if "auto" in depths else []),
    ]
    lines = []
    for i, (name, times) in enumerate(list(found.items())[:MOST_ARMS]):
        points = [(places.index(depth), times[depth]) for depth in places if depth in times]
        joined = [point for point in points if places[point[0]] != "auto"]
        lines.append(Line(name, joined, i, points[len(joined) :]))
    ticks = [(i, str(depth)) for i, depth in enumerate(places)]
    return _line_figure(
        "Speed-up by depth",
        _averaged(entries),
        lines,
        "levels drafted",
        "times plain decoding",
        ticks,
    )


def _averaged(entries: Sequence[Entry]) -> str:
    return "Geometric mean over categories." if len({e.category for e in entries}) > 1 else ""


def _line_figure(
    title: str,
    caption: str,
    lines: Sequence[Line],
    x_name: str,
    unit: str,
    ticks: Sequence[tuple[float, str]] = (),
    top: float = 0.0,
) -> Figure | None:
    if not lines:
        return None
    names = dict(ticks)
    values = [
        (y, f"{line.name}, {x_name}: {names.get(x, f'{x:g}')}")
        for line in lines
        for x, y in (*line.points, *line.apart)
    ]
    return _figure(title, caption, draw_lines(lines, x_name, unit, ticks, top), values, unit)


def _lengths(arms: Arms, series: Series, note: str) -> Figure | None:
    counts = {arm: _added(e["lengths"] for e in mine) for arm, mine in arms.items()}
    counts = {arm: found for arm, found in counts.items() if sum(found)}
    if not counts:
        return None
    longest = max(i + 1 for found in counts.values() for i, n in enumerate(found) if n)
    columns = [str(i + 1) for i in range(min(longest, MOST_COLUMNS))]
    strips, values = [], []
    for arm, found in counts.items():
        passes = sum(found)
        shares = [n / passes for n in found[: len(columns)]] + [0.0] * (len(columns) - len(found))
        shares[-1] += sum(found[len(columns) :]) / passes
        mean = sum((i + 1) * n for i, n in enumerate(found)) / passes
        strips.append(Row(arm, shares, f"mean {mean:.2f}, {passes:,} passes", series[arm]))
        values.append((mean, arm))
    if longest > MOST_COLUMNS:
        columns[-1] += "+"
    caption = f"{note}How many tokens a pass of the target gave, its own included; plain decoding gives one."
    svg = draw_strips(strips, columns, "tokens a pass")
    return _figure("Accepted length", caption, svg, values, "mean tokens a pass")


def _added(lists: Iterable[Sequence[int]]) -> list[int]:
    """The sums of what stands at the same place."""
    return [sum(values) for values in zip_longest(*lists, fillvalue=0)]


def _levels(arms: Arms, series: Series, note: str) -> Figure | None:
    lines = []
    for arm, mine in arms.items():
        tried, accepted = (
            _added([pair[i] for pair in e["acceptance"]] for e in mine) for i in (0, 1)
        )
        points = [
            (i + 1, a / n)
            for i, (n, a) in enumerate(zip(tried, accepted, strict=True))
            if n >= FEWEST_DRAFTS
        ]
        if points:
            lines.append(Line(arm, points[:MOST_LEVELS], series[arm]))
    caption = (
        f"{note}Of the drafts with so many levels, those accepted down to this one. Levels with fewer than"
        f" {FEWEST_DRAFTS} drafts are left out."
    )
    return _line_figure(
        "Acceptance by level",
        caption,
        lines,
        "level of the draft",
        "share of drafts accepted",
        top=1.0,
    )


def _positions(arms: Arms, series: Series, note: str) -> Figure | None:
    lines = []
    for arm, mine in arms.items():
        sums: dict[float, list[float]] = {}
        for start, passes, tokens in (bucket for e in mine for bucket in e["positions"]):
            total = sums.setdefault(start, [0.0, 0.0])
            total[0] += passes
            total[1] += tokens
        points = [
            (start, tokens / passes) for start, (passes, tokens) in sorted(sums.items()) if passes
        ]
        if points:
            lines.append(Line(arm, points, series[arm]))
    starts = sorted({x for line in lines for x, _ in line.points})
    ticks = [(x, f"{x:g}") for x in starts] if len(starts) <= MOST_TICKS else []
    return _line_figure(
        "Accepted length by position", f"{note}By the place in the output where a pass began.", lines,
        "position in the output, in tokens", "tokens a pass", ticks,
    )  # fmt: skip


def _step(arms: Arms, series: Series, note: str) -> Figure | None:
    bars = []
    for arm, mine in arms.items():
        parts = [sum(e[f"{part}_ms"] for e in mine) / len(mine) for part in PARTS]
        bars.append(Row(arm, parts, f"{number(sum(parts))} ms"))
    if not any(sum(bar.values) for bar in bars):
        return None
    caption = f"{note}Drafting, the target's pass with its verification, and the rest: medians."
    values = [(sum(bar.values), bar.name) for bar in bars]
    return _figure(
        "Time of a step", caption, draw_bars(bars, "ms a step", PARTS), values, "ms a step"
    )


def _sources(arms: Arms, series: Series, note: str) -> Figure | None:
    bars: list[Row] = []
    values: list[tuple[float, str]] = []
    several = any(len(e["sources"]) > 1 for mine in arms.values() for e in mine)
    for arm, mine in arms.items():
        found = []
        for source in unique(name for e in mine for name in e["sources"]):
            pairs = [e["sources"][source] for e in mine if source in e["sources"]]
            drafted, accepted = sum(d for d, _ in pairs), sum(a for _, a in pairs)
            if drafted:
                share = 100 * accepted / drafted
                name = shown(source) if several else arm
                found.append(Row(name, [share], f"{share:.0f} % of {_count(drafted)}", series[arm]))
                values.append((share, f"{arm}: {shown(source)}"))
        bars += [Row(arm)] if found and several else []
        bars += found
    if not bars:
        return None
    caption = f"{note}Of the tokens that a source drafted, those accepted."
    unit = "% accepted"
    return _figure("Acceptance by source", caption, draw_bars(bars, unit), values, unit)


def _count(value: int) -> str:
    """A count in few characters: 950, 12.3k, 4.56M."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{number(value / size)}{letter}"
    return str(value)


def _costs(
    arms: Arms, series: Series, note: str, title: str, field: str, unit: str
) -> Figure | None:
    bars = []
    for arm, mine in arms.items():
        known = [e[field] for e in mine if e[field] is not None]
        if known:
            mean = sum(known) / len(known)
            bars.append(Row(arm, [mean], number(mean), series[arm]))
    if not bars:
        return None
    several = any(len(mine) > 1 for mine in arms.values())
    caption = note + ("Mean over categories." if several else "")
    return _figure(
        title, caption, draw_bars(bars, unit), [(b.values[0], b.name) for b in bars], unit
    )
