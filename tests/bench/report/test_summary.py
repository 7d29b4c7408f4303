"""What a report says in words: the quickest first, compared like with like, and honest about text
and chance."""

from __future__ import annotations

from typing import Any

import pytest

from forerun.bench.report.summary import (
    entries_of,
    headline,
    mean_ratio,
    number,
    shorten,
    shown,
    standings,
    verdict,
)
from tests.bench.report.reports import MACHINE, report, result


def arm(times: float, **fields: Any) -> dict[str, Any]:
    return result(times_plain=times, **{"interval": [times - 0.1, times + 0.1]} | fields)


def said(*results: dict[str, Any]) -> str:
    return " | ".join(headline(entries_of(report([result(draft="off"), *results]))))


def test_headlines() -> None:
    assert said(arm(2.2), arm(1.5, draft="ngram")) == (
        "suffix, depth auto: 2.20 times plain decoding (2.10 to 2.30) | token for token the same text"
    )
    assert said(arm(1.05)).endswith("| which may be chance, token for token the same text")
    assert said(arm(2.0, interval=None, same=None)) == (
        "suffix, depth auto: 2.00 times plain decoding | text not compared"
    )
    assert said(arm(2.0), arm(2.0, category="chat", same=None)).endswith(
        "the same text where texts were compared"
    )
    assert said(arm(2.0, same=False, first_difference=7)).endswith(
        "| but the text is DIFFERENT from token 7"
    )
    assert said(arm(0.9)) == (
        "No draft is quicker than plain decoding | the best is suffix, depth auto: 0.90 times plain decoding"
        " (0.80 to 1.00), token for token the same text"
    )
    assert said() == "plain decoding: 41.0 tokens/s | no draft was measured"
    assert said(arm(2.0), arm(8.0, category="chat"), arm(3.0, requests=4)).split(" | ") == [
        "suffix, depth auto: 4.00 times plain decoding",
        "on average over 2 categories (2.00 to 8.00), one request at a time, token for token the same text",
    ]
    assert "int8 weights" in said(arm(2.0), arm(3.0, quantization="int8"))
    assert "over 2 measurements (2.00 to 2.42)" in said(arm(2.0), arm(2.42))
    assert len(said(arm(2.0, draft="model:" + "long/" * 100))) < 200


def test_an_arm_that_lacks_a_category_is_not_ranked() -> None:
    results = [arm(2.0), arm(2.0, category="chat"), arm(9.0, draft="ngram")]
    assert [s.entries[0].arm for s in standings(entries_of(report(results)))] == ["suffix"]
    complete = [*results, arm(1.0, draft="ngram", category="chat")]
    ranked = standings(entries_of(report(complete)))
    assert [(s.entries[0].arm, s.times) for s in ranked] == [
        ("ngram", pytest.approx(3.0)),
        ("suffix", pytest.approx(2.0)),
    ]


def test_names_mention_what_differs() -> None:
    def names(*results: dict[str, Any]) -> list[tuple[str, str]]:
        return [(e.arm, e.conditions) for e in entries_of(report([result(draft="off"), *results]))]

    assert names(result()) == [
        ("plain decoding", ""),
        ("suffix", ""),
    ]  # the depth 0 of plain decoding is none
    assert names(result(depth=3), result(rule="token"))[1:] == [
        ("suffix, depth 3, rule match", ""), ("suffix, depth auto, rule token", ""),
    ]  # fmt: skip
    assert names(result(temperature=1.0, quantization="int4")) == [
        ("plain decoding", "weights as they are, temperature 0"), ("suffix", "int4 weights, temperature 1"),
    ]  # fmt: skip
    other = names(result(machine=MACHINE | {"torch": "2.13.0"}, model="new"))
    assert other == [
        ("plain decoding", "torch 2.12.0, model pair/target"), ("suffix", "torch 2.13.0, model new"),
    ]  # fmt: skip


def test_verdicts() -> None:
    def told(*results: dict[str, Any]) -> tuple[bool, str]:
        return verdict(entries_of(report([result(draft="off"), *results])))

    assert told(result(), result(depth=2), result(depth=3, same=None)) == (
        True, "all 2 results that promised plain decoding's text gave it, token for token",
    )  # fmt: skip
    assert told(result(same=None))[0] and told(result(same=None))[1].startswith(
        "no text was compared"
    )
    held, words = told(
        result(), result(depth=2, same=False), result(depth=3, same=False, first_difference=9)
    )
    assert not held
    assert (
        words
        == "2 of 3 results gave another text than plain decoding; the first is suffix, depth 2, edit: DIFFERENT"
    )


def test_numbers_and_names() -> None:
    texts = [number(x) for x in (None, 0, 0.0123, 0.5, 1.234, 12.34, 123.4, 1234.5, 1e7)]
    assert texts == [
        "\N{EN DASH}",
        "0.00",
        "0.0123",
        "0.500",
        "1.23",
        "12.3",
        "123",
        "1,234",
        "10,000,000",
    ]
    assert mean_ratio([2.0, 8.0]) == pytest.approx(4.0) and mean_ratio([0.0, 8.0]) == 0.0
    assert shown("a\n\0\ud800\u202eb é 字") == "a" + "\N{REPLACEMENT CHARACTER}" * 4 + "b é 字"
    assert shorten("abcdefghij", 10) == "abcdefghij" and shorten("abcdefghijk", 10) == "abc…fghijk"
