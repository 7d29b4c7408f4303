"""Plots as inline SVG: rows with intervals, lines, bars and strips, in colours that the page
decides.

Plots are drawn in placeholder colours, which become CSS variables: one drawing serves light and
dark pages. Text stays text, in the page's font. Series differ in colour (Okabe and Ito's, told
apart by colour-blind readers) and in marker. The same input gives the same bytes; no drawing has an
id, a script or a reference that another one has.

A drawing is `WIDTH` points wide, and made to be shown 300 to 480 pixels wide. Raises ForerunError
without matplotlib."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

from forerun.bench.report.summary import shorten
from forerun.errors import ForerunError

WIDTH = 340.0  # points; at 9 points, text is 9.5 pixels high where the page is 400 pixels wide
LABELS = 122.0  # of that, for the names of rows
TEXT, SMALL, LINE = 9.0, 8.0, 14.0
MOST_MARKERS = 32  # on a line
NAME_LENGTH = 24  # characters of a name that fit
INK, QUIET, RULE, PANEL = "#010203", "#040506", "#070809", "#0a0b0c"
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1")
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "<", ">")
VARIABLES = {INK: "ink", QUIET: "quiet", RULE: "line", PANEL: "panel"} | {
    c: f"series-{i}" for i, c in enumerate(SERIES)
}
SVG, XLINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}"
LEFT_OUT = (f"{SVG}defs", f"{SVG}metadata")
FONT = re.compile(r"'DejaVu Sans'[^;]*")
TICKS = {"color": RULE, "labelcolor": QUIET, "labelsize": SMALL, "major.size": 0}
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "forerun",
    "text.parse_math": False,  # a dollar in a name is a dollar
    "font.family": "DejaVu Sans",  # comes with matplotlib: what it measures with
    "font.size": TEXT,
    "text.color": INK,
    "axes.edgecolor": RULE,
    "axes.labelcolor": QUIET,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    **{f"{axis}tick.{name}": value for axis in "xy" for name, value in TICKS.items()},
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "legend.frameon": False,
    "legend.fontsize": SMALL,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Look:
    """How a series is drawn: one of the placeholder colours, and a marker."""

    colour: str
    marker: str


def look(series: int | None) -> Look:
    """The look of the series with this number, of which 63 differ; without a number, of plain
    decoding."""
    if series is None:
        return Look(QUIET, "o")
    return Look(SERIES[series % len(SERIES)], MARKERS[series % len(MARKERS)])


@dataclass(frozen=True, slots=True)
class Row:
    """A named value with its interval, if there is one, parts of a bar, or shares of a histogram;
    `words` stand at the end. Without values, a heading."""

    name: str
    values: Sequence[float] = ()
    words: str = ""
    series: int | None = None
    interval: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """A named series of points (x, y), and points of it that the line does not join."""

    name: str
    points: Sequence[tuple[float, float]]
    series: int | None
    apart: Sequence[tuple[float, float]] = ()


def draw_rows(rows: Sequence[Row], unit: str, reference: float) -> str:
    """Values below each other on one axis, with a line at `reference`."""

    def draw(figure: Any) -> None:
        axes = _axes(figure, LABELS, 44, 4, 30)
        ends = [x for row in rows for x in (*row.values, *(row.interval or ()))]
        low, high = min([reference, *ends]), max([reference, *ends])
        margin = 0.06 * (high - low) or 0.1
        axes.set_xlim(low - margin, high + margin)
        axes.axvline(reference, color=QUIET, linewidth=1, dashes=(4, 2))
        for y, row in enumerate(rows):
            mark = look(row.series)
            if row.interval:
                axes.plot(
                    row.interval, (y, y), color=mark.colour, linewidth=1.8, solid_capstyle="butt"
                )
            for value in row.values:
                axes.plot([value], [y], color=mark.colour, marker=mark.marker, markersize=5)
        _label(axes, rows, unit, TEXT)

    return _draw(LINE * len(rows) + 34, draw)


def draw_lines(
    lines: Sequence[Line],
    x_name: str,
    y_name: str,
    ticks: Sequence[tuple[float, str]] = (),
    top: float = 0.0,
) -> str:
    """Lines with a legend above. `ticks` are the places on the x axis and their names; the y axis
    reaches `top`."""
    legend_rows = math.ceil(len(lines) / 2)

    def draw(figure: Any) -> None:
        from matplotlib.ticker import MaxNLocator

        axes = _axes(figure, 36, 10, LINE * legend_rows + 22, 32)
        for line, name in zip(lines, short_names([line.name for line in lines]), strict=True):
            mark = look(line.series)
            style = dict(color=mark.colour, marker=mark.marker, markersize=4.5)
            every = math.ceil(len(line.points) / MOST_MARKERS)
            axes.plot(
                *zip(*line.points, strict=True), **style, markevery=every, linewidth=1.5, label=name
            )
            for x, y in line.apart:
                axes.plot([x], [y], **style)
        if ticks:
            axes.set_xticks([x for x, _ in ticks], [name for _, name in ticks])
        else:
            axes.xaxis.set_major_locator(MaxNLocator(nbins=9, integer=True))
        axes.margins(x=0.04)
        axes.set_ylim(
            0,
            max(1.08 * max(y for line in lines for _, y in (*line.points, *line.apart)), top, 1e-3),
        )
        axes.ticklabel_format(axis="y", style="plain", useOffset=False)
        axes.set_xlabel(x_name, fontsize=SMALL)
        axes.set_title(y_name, loc="left", x=-0.08, fontsize=SMALL, color=QUIET, pad=7)
        figure.legend(
            loc="upper left", ncols=2, bbox_to_anchor=(0, 1), handlelength=1.8, labelspacing=0.35
        )

    return _draw(176 + LINE * legend_rows, draw)


def draw_bars(bars: Sequence[Row], unit: str, part_names: Sequence[str] = ()) -> str:
    """Bars below each other. Parts, if they are named, have colours of their own and a legend
    above."""
    above = LINE + 6 if part_names else 4

    def draw(figure: Any) -> None:
        axes = _axes(figure, LABELS, 62, above, 30)
        axes.set_xlim(0, 1.02 * max(sum(bar.values) for bar in bars) or 1)
        for y, bar in enumerate(bars):
            start = 0.0
            for i, part in enumerate(bar.values):
                colour = look(i if part_names else bar.series).colour
                label = part_names[i] if part_names and y == 0 else None
                axes.barh(
                    y,
                    part,
                    left=start,
                    height=0.66,
                    color=colour,
                    edgecolor=PANEL,
                    linewidth=0.5,
                    label=label,
                )
                start += part
        _label(axes, bars, unit, SMALL)
        if part_names:
            figure.legend(
                loc="upper left", ncols=len(part_names), bbox_to_anchor=(0, 1), handlelength=1
            )

    return _draw(1.15 * LINE * len(bars) + above + 30, draw)


def draw_strips(strips: Sequence[Row], columns: Sequence[str], unit: str) -> str:
    """Histograms of shares below each other, on common axes; `columns` name their bars."""

    def draw(figure: Any) -> None:
        from matplotlib.ticker import MultipleLocator

        height = figure.get_figheight() * 72
        most = max(max(strip.values) for strip in strips)
        each = (height - 32) / len(strips)
        for i, (strip, name) in enumerate(
            zip(strips, short_names([s.name for s in strips]), strict=True)
        ):
            axes = _axes(figure, 36, 10, i * each + 19, height - (i + 1) * each)
            axes.bar(range(len(columns)), strip.values, width=0.82, color=look(strip.series).colour)
            axes.set_xlim(-0.6, len(columns) - 0.4)
            axes.set_ylim(0, 1.02 * most)
            axes.yaxis.set_major_locator(
                MultipleLocator(0.5 if most > 0.6 else 0.2 if most > 0.25 else 0.1)
            )
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
            axes.grid(axis="x", visible=False)
            last = i == len(strips) - 1
            axes.set_xticks(range(len(columns)), columns if last else [""] * len(columns))
            axes.set_title(name, loc="left", fontsize=SMALL, color=INK, pad=3)
            axes.set_title(strip.words, loc="right", fontsize=SMALL, color=QUIET, pad=3)
        axes.set_xlabel(unit, fontsize=SMALL)

    return _draw(55.0 * len(strips) + 32, draw)


def short_names(names: Sequence[str]) -> list[str]:
    """Names that fit beside a plot: long ones lose their middle, and get a number where they look
    alike then."""
    found: list[str] = []
    of: dict[str, str] = {}
    for name in names:
        if name not in of:
            short = shorten(name, NAME_LENGTH)
            if short in of.values():
                mark = f" #{len(of) + 1}"
                short = shorten(name, NAME_LENGTH - len(mark)) + mark
            of[name] = short
        found.append(of[name])
    return found


def _axes(figure: Any, left: float, right: float, above: float, below: float) -> Any:
    """Axes with these margins, in points."""
    width, height = figure.get_figwidth() * 72, figure.get_figheight() * 72
    place = (
        left / width,
        below / height,
        (width - left - right) / width,
        (height - above - below) / height,
    )
    return figure.add_axes(place)


def _label(axes: Any, rows: Sequence[Row], unit: str, heading: float) -> None:
    """Rows from above to below, names at the left edge of the drawing; headings are bold, and of
    that size."""
    from matplotlib.ticker import MaxNLocator

    left = -LABELS / (axes.get_position().width * WIDTH)
    style = dict(transform=axes.get_yaxis_transform(), ha="left", va="center", color=INK)
    for y, (row, name) in enumerate(
        zip(rows, short_names([row.name for row in rows]), strict=True)
    ):
        size, weight = (SMALL, "normal") if row.values else (heading, "bold")
        axes.text(left, y, name, fontsize=size, fontweight=weight, **style)
        axes.text(1.02, y, row.words, fontsize=SMALL, **style)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
    axes.ticklabel_format(axis="x", style="plain", useOffset=False)
    axes.set_xlabel(unit, fontsize=SMALL)


def _draw(height: float, draw: Callable[[Any], None]) -> str:
    """Have a figure of this height, in points, drawn on, as SVG for a page."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise ForerunError(
            "plots need matplotlib, which is not installed: pip install 'forerun[bench]'"
        ) from None
    out = io.StringIO()
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()  # not what the reader has set for plots of their own
        matplotlib.rcParams.update(STYLE)
        warnings.filterwarnings(
            "ignore", message="Glyph", category=UserWarning
        )  # the reader's fonts have more
        figure = Figure(figsize=(WIDTH / 72, height / 72))
        draw(figure)
        figure.savefig(
            out, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
        )
    return _for_page(out.getvalue())


def _for_page(text: str) -> str:
    """An SVG file as an element of a page: in the page's font and colours, without ids or
    references.

    Markers, which the file defines once and refers to, are put in their places. What is clipped to
    the axes lies within them anyway.
    """
    root = ElementTree.fromstring(text)
    markers = {
        path.get("id"): path for definitions in root.iter(f"{SVG}defs") for path in definitions
    }
    element = _plain_element(root, markers)
    return ElementTree.tostring(element, encoding="unicode")


def _plain_element(
    element: ElementTree.Element, markers: dict[str | None, ElementTree.Element]
) -> ElementTree.Element:
    """A copy of an element and what is in it: without namespaces, ids and the file's own size."""
    kept = {
        name: value
        for name, value in element.attrib.items()
        if name in ("d", "x", "y", "transform", "viewBox")
    }
    style = element.get("style", "")
    name = element.tag.removeprefix(SVG)
    if name == "use":
        marker = markers[element.attrib[f"{XLINK}href"].removeprefix("#")]
        name, style = "path", f"{marker.get('style', '')}; {style}"
        kept = {"d": marker.attrib["d"], "transform": f"translate({kept['x']} {kept['y']})"}
    if style:
        style = FONT.sub("var(--sans)", style)
        kept["style"] = re.sub("#[0-9a-f]{6}", lambda found: f"var(--{VARIABLES[found[0]]})", style)
    copy = ElementTree.Element(name, {key: " ".join(value.split()) for key, value in kept.items()})
    copy.text = element.text if name == "text" else None
    copy.extend(_plain_element(child, markers) for child in element if child.tag not in LEFT_OUT)
    return copy
