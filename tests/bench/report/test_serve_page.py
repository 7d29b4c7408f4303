"""Lines of a server and their page: nothing is lost, latencies stand beside drafts, and what is
none is refused."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from forerun import ForerunError
from forerun.bench.report.lines import read_served, write_lines
from forerun.bench.report.serve_page import headline, render, verdict
from forerun.bench.server.load import ServeReport
from forerun.bench.server.result import Result
from tests.bench.report.reports import report as decoded
from tests.bench.report.reports import result as decoded_result
from tests.cli.test_main import run

HOSTILE = "</h1><script>window.pwned = 1</script>{{ 7*7 }}\n\0"


def result(
    draft: str | None = "suffix", requests: int = 1, times: float | None = 1.5, **fields: Any
) -> Result:
    values: dict[str, Any] = dict(
        draft=draft, depth=None, requests=requests, rounds=3, tokens_per_second=80.0, times_plain=times,
        interval=(1.4, 1.6), requests_per_second=1.25, first_token_ms={"p50": 31.0, "p95": 62.0, "p99": 93.0},
        inter_token_ms={"p50": 11.0, "p95": 12.0, "p99": 13.0}, finished=9, errors={}, counted="usage",
        accepted_length=2.5, acceptance=0.4, cached=0.0, same=True, first_difference=None,
    )  # fmt: skip
    return Result(**(values | fields))


def report(*results: Result, **fields: Any) -> dict[str, Any]:
    values: dict[str, Any] = dict(
        url="http://127.0.0.1:8000", server="forerun", model="tiny", chat=False, tokens=128, temperature=0.0, repeats=3,
        seconds=None, prompts=100, repeated=False, stopped=None, results=list(results),
    )  # fmt: skip
    return ServeReport(**(values | fields)).as_dict()


def lines(tmp_path: Path, *reports: dict[str, Any]) -> list[dict[str, Any]]:
    paths = [tmp_path / f"{i}.jsonl" for i in range(len(reports))]
    for path, data in zip(paths, reports, strict=True):
        write_lines(path, data)
    return read_served(paths)


def test_lines_come_back_and_once(tmp_path: Path) -> None:
    one = report(
        result("off", times=1.0, interval=None), result(errors={"429 busy": 2}, first_token_ms={})
    )
    found = lines(tmp_path, one, one, report(result(None, 4, None, same=None), model="other"))
    run_ = {name: value for name, value in one.items() if name != "results"}
    assert found[:2] == json.loads(json.dumps([run_ | r for r in one["results"]]))
    assert [(line["model"], line["requests"]) for line in found] == [
        ("tiny", 1),
        ("tiny", 1),
        ("other", 4),
    ]


def test_the_table_has_throughput_and_latency_by_requests_and_draft(tmp_path: Path) -> None:
    page = render(lines(tmp_path, report(
        result("off", 1, 1.0, interval=None, accepted_length=1.0, acceptance=None), result("suffix", 1, 1.5),
        result("suffix", 16, 0.5, interval=None, same=False, first_difference=7, errors={"503": 3}),
    )))  # fmt: skip
    heads = re.findall(r"<th scope=\"col\"[^>]*>([^<]*)<", page)
    assert heads == [
        "draft", "at once", "tokens/s", "times plain", "95 % interval", "text", "requests/s", "first token ms, p50",
        "first token ms, p95", "first token ms, p99", "between tokens ms, p50", "between tokens ms, p95",
        "between tokens ms, p99", "accepted length", "acceptance", "prompts from cache", "answers", "failed",
    ]  # fmt: skip
    rows = [
        re.findall(r"<td[^>]*>([^<]*)<", row)
        for row in re.findall(r"<tr>(<td.*?)</tr>", page, re.S)
    ]
    assert [row[:3] for row in rows] == [
        ["off", "1", "80.0"],
        ["suffix", "1", "80.0"],
        ["suffix", "16", "80.0"],
    ]
    assert rows[1][4:10] == ["1.40 to 1.60", "same", "1.25", "31.0", "62.0", "93.0"]
    assert (
        rows[2][5] == "DIFFERENT from token 7"
        and rows[2][-1] == "3"
        and rows[0][14] == "\N{EN DASH}"
    )
    assert 'class="verdict bad"' in page and "1 of 2 results gave another text" in page
    assert "suffix: 1.50 times plain decoding (1.40 to 1.60)" in page


def test_it_is_said_in_a_sentence(tmp_path: Path) -> None:
    slow = lines(tmp_path, report(result("off", 1, 1.0), result("suffix", 1, 0.8)))
    assert headline(slow)[0] == "No draft is quicker than plain decoding" and verdict(slow)[0]
    alone = lines(
        tmp_path,
        report(result(None, 1, None, same=None), result(None, 16, None, tokens_per_second=300.0)),
    )
    assert headline(alone) == (
        "300 tokens/s",
        "16 requests at once, 31.0 ms to the first token, 11.0 ms between tokens",
    )
    ended = lines(tmp_path, report(result(None, 1, None, same=None), stopped="interrupted"))
    assert verdict(ended) == (False, "ended early: interrupted")


def test_names_are_text(tmp_path: Path) -> None:
    named = result(HOSTILE, errors={HOSTILE: 1})
    page = render(
        lines(tmp_path, report(named, model=HOSTILE, url=HOSTILE, server=HOSTILE, stopped=HOSTILE))
    )
    assert (
        "window.pwned" in page
        and "<script>window" not in page
        and "49" not in page
        and "\0" not in page
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokens_per_second", float("nan")), ("requests", 1.5), ("first_token_ms", {"p50": 1.0}), ("chat", 1),
        ("inter_token_ms", 3.0), ("errors", {"x": "many"}), ("interval", [1.0]), ("draft", 3), ("depth", "deep"),
        ("same", "yes"), ("stopped", 0),
    ],
)  # fmt: skip
def test_what_is_no_line_of_a_server(tmp_path: Path, field: str, value: Any) -> None:
    path = tmp_path / "x.jsonl"
    (line,) = lines(tmp_path, report(result()))
    path.write_text(json.dumps(line | {field: value}))
    with pytest.raises(ForerunError, match=rf"x.jsonl, line 1 has {field} .*: it has to be "):
        read_served([path])
    del line[field]
    path.write_text(json.dumps(line))
    with pytest.raises(ForerunError, match=f"line 1 has no {field}"):
        read_served([path])


def test_the_verb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A page of a server, without what draws figures; both kinds at once, or lines as a page, end
    in one line."""
    served, other, out = tmp_path / "serve.jsonl", tmp_path / "decode.jsonl", tmp_path / "page.html"
    write_lines(served, report(result()))
    write_lines(other, decoded([decoded_result()]))

    def page(*args: object) -> tuple[int, str, str]:
        return run(monkeypatch, capsys, "bench", "page", *map(str, args))

    assert page(served, "--out", out) == (0, f"{out}\n", "") and "first token ms" in out.read_text()
    code, text, err = page(served, other, "--out", tmp_path / "both.html")
    assert (
        (code, text) == (1, "")
        and f"{other}, line 1 is not of a server" in err
        and len(err.splitlines()) == 1
    )
    code, text, err = page(served, "--out", tmp_path / "x.jsonl")
    assert (code, text) == (2, "") and "end it in .html" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "decode.jsonl",
        "page.html",
        "serve.jsonl",
    ]
