"""Reports on disk: nothing is lost or invented on the way, and what is no report is refused in one
line."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from forerun import ForerunError
from forerun.bench.report.lines import check_report, read_lines, write_lines
from tests.bench.report.reports import MACHINE, large, report, result


@pytest.fixture
def small() -> dict[str, Any]:
    return report([result(draft="off"), result(joules_per_token=1.5, same=None)])


def test_a_report_comes_back(tmp_path: Path) -> None:
    data = large()
    write_lines(tmp_path / "a.jsonl", data)
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    assert len(lines) == len(data["results"])
    assert all(json.loads(line)["machine"] == MACHINE for line in lines)
    assert read_lines([tmp_path / "a.jsonl"]) == data


def test_a_line_has_the_limits_of_its_own_weights_and_requests(tmp_path: Path) -> None:
    data = report([result(requests=n, quantization=w) for w in ("none", "int8") for n in (1, 4)])
    data["limits"] = [limit | {"requests": n} for limit in data["limits"] for n in (1, 4)]
    write_lines(tmp_path / "a.jsonl", data)
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [line["limits"] for line in lines] == [[limit] for limit in data["limits"]]
    assert read_lines([tmp_path / "a.jsonl"]) == data


def test_files_one_after_the_other_are_one_report(tmp_path: Path, small: dict[str, Any]) -> None:
    other = report(
        [result(draft="ngram", quantization="int8")], model="other", machine=MACHINE | {"cores": 64}
    )
    one, two, both = (tmp_path / name for name in ("one.jsonl", "two.jsonl", "both.jsonl"))
    write_lines(one, small)
    write_lines(two, other)
    both.write_bytes(
        one.read_bytes() + b"\n" + two.read_bytes() + one.read_bytes()
    )  # one of them twice
    merged = read_lines([both])
    assert merged == read_lines([one, two])
    own = {"model": "other", "machine": other["machine"]}
    assert merged["results"] == [*small["results"], other["results"][0] | own]
    assert merged["limits"] == [*small["limits"], own | other["limits"][0]]
    assert {**merged, "results": 0, "limits": 0} == {**small, "results": 0, "limits": 0}
    write_lines(both, merged)
    assert read_lines([both]) == merged
    write_lines(both, read_lines([two, one]))
    assert read_lines([both]) == read_lines([two, one])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"3", "is no result of a measurement, but 3"),
        (b'{"kind": "decode"}', "has no model"),
    ],
)
def test_a_broken_line_is_named(
    tmp_path: Path, small: dict[str, Any], line: bytes, words: str
) -> None:
    path = tmp_path / "a.jsonl"
    write_lines(path, small)
    path.write_bytes(path.read_bytes() + b"\n" + line + b"\n")
    with pytest.raises(ForerunError, match=words) as raised:
        read_lines([path])
    assert str(raised.value).startswith(f"{path}, line 4 ")
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 400


def test_files_without_results(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    for paths in ([], [tmp_path / "empty.jsonl"]):
        with pytest.raises(ForerunError, match="no results in"):
            read_lines(paths)
    for path in (tmp_path, tmp_path / "missing", Path("null\0")):
        with pytest.raises(ForerunError, match="cannot be read"):
            read_lines([path])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("draft", None), ("depth", "deep"), ("depth", -1), ("times_plain", float("nan")), ("times_plain", True),
        ("tokens_per_second", float("inf")), ("tokens_per_second", 10**400), ("interval", [1.0]), ("interval", 2),
        ("same", 1), ("lengths", [1.5]), ("lengths", "12"), ("acceptance", [[1, 2, 3]]), ("sources", {"suffix": 3}),
        ("positions", [[0, 1]]), ("joules_per_token", "much"), ("machine", []), ("model", 3),
    ],
)  # fmt: skip
def test_what_a_field_may_not_be(small: dict[str, Any], field: str, value: Any) -> None:
    check_report(small)
    small["results"][1][field] = value
    with pytest.raises(ForerunError, match=f"result 2.* has {field} .*: it has to be "):
        check_report(small)


def test_every_field_has_to_be_there(small: dict[str, Any]) -> None:
    def without(place: Any, key: str) -> dict[str, Any]:
        broken = copy.deepcopy(small)
        target = broken if place is None else broken[place][0]
        del target[key]
        return broken

    for place in (None, "results", "limits"):
        for key in small if place is None else small[place][0]:
            with pytest.raises(ForerunError, match=key):
                check_report(without(place, key))
    check_report(
        without("results", "draft") | {"results": [small["results"][0] | {"new": object()}]}
    )
    for broken in (
        None,
        [],
        {**small, "results": []},
        {**small, "results": [3]},
        {**small, "limits": None},
    ):
        with pytest.raises(ForerunError):
            check_report(broken)
