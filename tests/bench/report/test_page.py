"""The page: in a browser it is whole, still and safe, whatever the names; its figures show what was
measured."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="the page needs matplotlib")

from forerun import ForerunError
from forerun.bench.report.drawing import look, short_names
from forerun.bench.report.figures import Figure, sections_of
from forerun.bench.report.page import limits_of, render, write_page
from forerun.bench.report.summary import entries_of, shown
from tests.bench.report.reports import large, report, result

CHROMIUM = shutil.which("chromium")
HOSTILE = "</h1><script>window.pwned = 1</script><img src=x onerror='window.pwned = 2'>\"'&lt;{{ 7*7 }}$x^2$\n\0\ud800"
LONG = HOSTILE + "long" * 80


def figures(*results: dict[str, Any]) -> dict[str, Figure]:
    return {
        f.title: f
        for section in sections_of(entries_of(report([*results])))
        for f in section.figures
    }


def hostile() -> dict[str, Any]:
    """Names that are made to break the page, everywhere that a name can stand."""
    names = dict(category=LONG, quantization=LONG)
    results = [result(draft="off", rule=LONG, **names)]
    for i in range(3):
        sources = {LONG: [10, 5], "suffix": [3, 1]}
        results.append(
            result(
                draft=f"model:{LONG}{i}", rule=f"{LONG}{i}", sources=sources, same=i != 1, **names
            )
        )
    return report(results, model=LONG, kind=LONG, machine={LONG: LONG, "cores": 2})


# ---- figures


def test_figures_add_up_what_was_measured() -> None:
    found = figures(
        result(
            lengths=[1, 1], acceptance=[[10, 5], [9, 9]], sources={"suffix": [10, 5]}, positions=[[0, 4, 8]],
            times_plain=1.5, draft_ms=1.0, pass_ms=2.0, other_ms=0.5,
        ),
        result(
            lengths=[0, 2], acceptance=[[10, 10], [11, 1], [9, 9]], sources={"suffix": [30, 5]},
            positions=[[0, 4, 4], [64, 2, 7]], times_plain=2.5, draft_ms=3.0, pass_ms=2.0, other_ms=1.5,
            category="chat",
        ),
    )  # fmt: skip
    assert [found[title].words for title in found] == [
        "Speed-up by category, times plain decoding: from 1.50 (suffix, edit) to 2.50 (suffix, chat)",
        "Accepted length, mean tokens a pass: from 1.75 (suffix) to 1.75 (suffix)",
        "Acceptance by level, share of drafts accepted: from 0.500 (suffix, level of the draft: 2)"
        " to 0.750 (suffix, level of the draft: 1)",
        "Time of a step, ms a step: from 5.00 (suffix) to 5.00 (suffix)",
        "Acceptance by source, % accepted: from 25.0 (suffix: suffix) to 25.0 (suffix: suffix)",
        "Accepted length by position, tokens a pass: from 1.50 (suffix, position in the output, in tokens: 0)"
        " to 3.50 (suffix, position in the output, in tokens: 64)",
    ]
    assert ">mean 1.75, 4 passes<" in found["Accepted length"].svg
    assert ">25 % of 40<" in found["Acceptance by source"].svg


def test_what_was_not_measured_has_no_figure() -> None:
    nothing = dict(
        lengths=[], acceptance=[], sources={}, positions=[], draft_ms=0.0, pass_ms=0.0, other_ms=0.0
    )
    assert [*figures(result(**nothing))] == ["Speed-up"]
    assert figures(result(draft="off", **nothing)) == {}
    more = {
        "lengths": ([1, 2], "Accepted length"), "acceptance": ([[10, 1]], "Acceptance by level"),
        "pass_ms": (3.0, "Time of a step"), "sources": ({"suffix": [3, 0]}, "Acceptance by source"),
        "positions": ([[0, 1, 1]], "Accepted length by position"), "joules_per_token": (0.0, "Energy"),
        "cost_per_million": (1.2, "Cost"),
    }  # fmt: skip
    for field, (value, title) in more.items():
        assert [*figures(result(**nothing | {field: value}))] == ["Speed-up", title]
    empty = dict(
        lengths=[0], acceptance=[[9, 9]], sources={"suffix": [0, 0]}, positions=[[0, 0, 0]]
    )
    assert [*figures(result(**nothing | empty))] == ["Speed-up"]


def test_requests_and_depths_have_figures_where_there_are_several() -> None:
    at_once = figures(
        result(draft="off", tokens_per_second=9.0), result(times_plain=2.0),
        result(draft="off", tokens_per_second=30.0, requests=4), result(times_plain=1.2, requests=4),
    )  # fmt: skip
    assert at_once["Speed-up by requests at once"].words.endswith(
        "from 1.20 (suffix, requests at once: 4) to 2.00 (suffix, requests at once: 1)"
    )
    assert (
        "from 9.00 (plain decoding, requests at once: 1)"
        in at_once["Speed by requests at once"].words
    )
    assert {"Speed-up, one request at a time", "Speed-up, 4 requests at once"} <= {*at_once}
    depths = figures(
        *(result(depth=depth, times_plain=1 + 0.1 * (depth == 3)) for depth in range(1, 12))
    )
    assert "to 1.10 (suffix, levels drafted: 3)" in depths["Speed-up by depth"].words
    assert (
        "from 1.10 (suffix, depth 3, edit) to 1.10" in depths["Speed-up"].words
    )  # eleven lines would be too many
    assert all(
        depths[name].caption.startswith("Only the quickest")
        for name in ("Speed-up", "Accepted length")
    )
    few = figures(
        result(depth=1), result(depth=2, requests=4)
    )  # measured elsewhere is not left out
    assert not any("Only the quickest" in figure.caption for figure in few.values())


def test_long_histograms_end_in_one_bar() -> None:
    svg = figures(result(lengths=[0] * 23 + [1] * 40))["Accepted length"].svg
    assert ">20+<" in svg and ">21<" not in svg and ">mean 43.50, 40 passes<" in svg


def test_a_page_stays_small_however_much_was_counted() -> None:
    many = result(
        lengths=[1] * 5000, acceptance=[[19, 1]] * 5000, positions=[[i, 1, 1 + i % 7] for i in range(5000)],
        sources={f"source {i}": [1, 1] for i in range(50)},
    )  # fmt: skip
    assert len(render(report([many]))) < 400_000


def test_sources_stand_under_their_draft_where_there_are_several() -> None:
    one, other = (
        result(sources={"suffix": [4, 2], "prediction": [8, 2]}),
        result(draft="ngram", sources={"ngram": [4, 1]}),
    )
    texts = re.findall(r">([^<]+)</text>", figures(one, other)["Acceptance by source"].svg)
    names = [text for text in texts if re.match(r"[a-z]", text)]
    assert names == ["suffix", "suffix", "prediction", "ngram", "ngram"]


def test_limits_are_told_apart() -> None:
    data = report([result(draft="off"), result(requests=4, draft="off")])
    alike = data["limits"][0]
    data["limits"] = [alike | {"requests": 1}, alike | {"requests": 4}]
    assert [row[0] for row in limits_of(data["limits"])] == [
        "weights as they are, one request at a time", "weights as they are, 4 requests at once",
    ]  # fmt: skip
    assert [row[0] for row in limits_of(data["limits"][1:])] == ["weights as they are"]


def test_another_text_is_marked() -> None:
    svg = figures(
        result(times_plain=2.0, same=False, first_difference=3), result(draft="ngram", same=True)
    )["Speed-up"]
    assert svg.svg.count("\N{NOT EQUAL TO}") == 1 and "2.00 \N{NOT EQUAL TO}" in svg.svg
    page = render(report([result(draft="off"), result(same=False, first_difference=3)]))
    assert (
        'class="verdict bad"' in page
        and '<td data-sort="DIFFERENT from token 3" class="warns">' in page
    )
    assert 'class="verdict bad"' not in render(report([result(draft="off"), result()]))


def test_odd_numbers_are_drawn() -> None:
    odd = dict(
        interval=[3.0, 1.0],
        acceptance=[[10, 70]],
        lengths=[10**14],
        times_plain=0.0,
        tokens_per_second=1e14,
    )
    page = render(
        report(
            [
                result(**odd),
                result(requests=0, temperature=1e9, draft_ms=1e14, **odd),
                result(depth=10**9),
            ]
        )
    )
    assert page.count("<figure>") > 8


def test_drawings_leave_colours_and_references_to_the_page() -> None:
    page = render(large())
    for drawing in re.findall(r"<svg.*?</svg>", page, re.S):
        assert not re.search(r"#[0-9a-fA-F]{3,6}|\bid=|href|url\(|DejaVu|<style|<defs", drawing)
        assert "var(--ink)" in drawing
    assert len({look(i) for i in range(63)}) == 63
    assert short_names(["a" * 40 + "1" * 40, "a" * 50 + "1" * 40, "b"]) == [
        "aaaaaaaa…111111111111111",
        "aaaaaaa…1111111111111 #2",
        "b",
    ]


def test_a_dollar_is_a_dollar() -> None:
    """matplotlib would set what stands between two as mathematics, or fail to."""
    named = figures(result(category="$x^2$"), result(category="$\\frac$ _ & <b>"))[
        "Speed-up by category"
    ].svg
    assert ">$x^2$<" in named and ">$\\frac$ _ &amp; &lt;b&gt;<" in named


def test_the_same_report_gives_the_same_page(monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib

    data = report([result(draft="off"), result()])
    page = render(data)
    monkeypatch.setitem(
        matplotlib.rcParams, "lines.linewidth", 9.0
    )  # the reader's own settings are none of ours
    assert render(data) == page
    assert render(data, "A title") == page.replace("decode: pair/target", "A title")
    assert matplotlib.rcParams["lines.linewidth"] == 9.0


# ---- files


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ForerunError, match=re.escape("pip install 'forerun[bench]'")):
        write_page(tmp_path / "page.html", report([result(draft="off"), result()]))
    assert [*tmp_path.iterdir()] == []


def test_what_is_no_report_leaves_the_page_that_is_there(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("old")
    for broken in ({}, report([]), report([result(times_plain=float("nan"))])):
        with pytest.raises(ForerunError):
            write_page(path, broken)
    assert path.read_text() == "old" and [*tmp_path.iterdir()] == [path]


# ---- in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="the browser tests need the package playwright"
    )
    if CHROMIUM is None:
        pytest.skip("the browser tests need a `chromium` on the path")
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium has no sandbox for root
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=sandbox)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages on disk: everything at once, and hostile names."""
    directory = tmp_path_factory.mktemp("pages")
    written = {"large": large(), "hostile": hostile()}
    for name, data in written.items():
        write_page(directory / f"{name}.html", data)
    return {name: directory / f"{name}.html" for name in written}


@pytest.fixture
def open_page(browser: Any, pages: dict[str, Path]) -> Iterator[Callable[..., Any]]:
    """Opens a page without a network. It may ask for nothing but itself, and nothing may complain
    on the console."""
    complaints: list[str] = []
    contexts: list[Any] = []

    def note_request(request: Any) -> None:
        if not request.url.startswith(("file://", "data:")):
            complaints.append(request.url)

    def open_page(name: str, width: int = 1280, scheme: str = "light", script: bool = True) -> Any:
        context = browser.new_context(
            viewport={"width": width, "height": 800},
            color_scheme=scheme,
            offline=True,
            java_script_enabled=script,
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", note_request)
        page.goto(pages[name].as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (400, "dark")])
@pytest.mark.parametrize("name", ["large", "hostile"])
def test_every_figure_is_seen_and_nothing_scrolls_sideways(
    open_page: Any, name: str, width: int, scheme: str
) -> None:
    page = open_page(name, width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    boxes = page.eval_on_selector_all(
        "figure svg",
        "es => es.map(e => [e.getBoundingClientRect().width, e.getBBox().width, e.checkVisibility()])",
    )
    assert len(boxes) == page.locator("figure [role=img]").count() == (16 if name == "large" else 6)
    assert all(visible and 250 < shown <= width and inner > 200 for shown, inner, visible in boxes)
    labels = page.eval_on_selector_all("figure [role=img]", "es => es.map(e => e.ariaLabel)")
    assert all(": from " in label for label in labels)
    wide = "es => es.filter(e => e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 99))"
    assert page.eval_on_selector_all("body > *, figure, h1, p, dl, .scroll, svg text", wide) == []


def test_all_of_it_fits_on_paper(open_page: Any) -> None:
    page = open_page("large", 720, "dark")
    page.emulate_media(media="print")
    assert page.evaluate("document.documentElement.scrollWidth") <= 720
    assert page.eval_on_selector_all(
        ".scroll", "es => es.every(e => e.scrollHeight <= e.clientHeight + 1)"
    )
    assert (
        page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--panel')")
        == "#ffffff"
    )


def test_names_are_text(open_page: Any) -> None:
    page = open_page("hostile")
    assert page.evaluate("window.pwned") is None
    assert page.locator("script").count() == 1 and page.locator("img, main b").count() == 0
    cells = page.locator("table.sortable tbody tr:nth-child(2) td").all_text_contents()
    assert shown(f"model:{LONG}0") in cells and shown(f"{LONG}0") in cells
    assert shown(LONG) in page.locator("dd").all_text_contents()
    assert page.title() == f"{shown(LONG)}: {shown(LONG)}"
    assert any(text.startswith("model:</") for text in page.locator("svg text").all_text_contents())


def test_the_table_sorts_and_does_without_a_script(open_page: Any) -> None:
    page, still = open_page("large"), open_page("large", script=False)
    assert still.locator("table.sortable button").count() == 0
    rows = still.locator("table.sortable tbody tr").all_text_contents()
    assert len(rows) == 112 and rows == page.locator("table.sortable tbody tr").all_text_contents()

    def column(name: str) -> list[str]:
        heads = page.locator("table.sortable thead th").all_text_contents()
        return page.locator(
            f"table.sortable tbody td:nth-child({heads.index(name) + 1})"
        ).all_text_contents()

    def click(name: str) -> list[str]:
        page.get_by_role("button", name=name, exact=True).click()
        return column(name)

    speeds = [float(text) for text in column("times plain")]
    assert [float(text) for text in click("times plain")] == sorted(speeds, reverse=True)
    assert [float(text) for text in click("times plain")] == sorted(speeds)
    assert page.locator("th[aria-sort]").all_text_contents() == ["times plain"]
    assert click("draft") == sorted(column("draft"))
    missing = ["\N{EN DASH}"] * 16
    assert click("95 % interval")[-16:] == missing and click("95 % interval")[-16:] == missing


def test_the_page_may_ask_for_nothing(browser: Any, pages: dict[str, Path]) -> None:
    page = browser.new_page()
    page.goto(pages["large"].as_uri())
    refused = page.evaluate(
        """async () => {
          const refused = [];
          addEventListener("securitypolicyviolation", (e) => refused.push(e.effectiveDirective));
          const script = document.createElement("script");
          script.textContent = "window.pwned = 1";
          document.body.append(script);
          await fetch("http://127.0.0.1:9/").catch(() => {});
          const image = new Image();
          await new Promise((done) => { image.onerror = done; image.src = "http://127.0.0.1:9/a.png"; });
          return refused;
        }"""
    )
    page.close()
    assert sorted(refused) == ["connect-src", "img-src", "script-src-elem"]
