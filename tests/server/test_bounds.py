"""What a request may hold is told from its bytes, and what is within bounds is read as json reads
it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.server.bounds import DEPTH, ENTRIES, FIELDS, OBJECTS, VALUES, characters_of, parse
from forerun.server.errors import ApiError
from forerun.server.large_responses import json_slices

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ['"', "\\", '\\"', "[{,:", '"\\']
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
)
VALUE = st.recursive(
    LEAVES | TEXT,
    lambda items: st.lists(items, max_size=5) | st.dictionaries(TEXT, items, max_size=5),
    max_leaves=40,
)


@given(VALUE, st.booleans())
def test_read_as_json_reads_it(value: Any, escaped: bool) -> None:
    assert parse(json.dumps(value, ensure_ascii=escaped).encode()) == value


@given(VALUE)
def test_written_as_json_writes_it(value: Any) -> None:
    for levels in range(6):
        assert "".join(json_slices(value, levels)) == json.dumps(
            value, ensure_ascii=False, separators=(",", ":")
        )


@pytest.mark.parametrize(
    "items", [list(range(1000)), [[1.5] * 200] * 3, [{"a": i} for i in range(200)]]
)
def test_slices_of_long_lists_join(items: list[Any]) -> None:
    value = {"choices": [{"logprobs": {"content": items}}], "data": items}
    assert json.loads("".join(json_slices(value))) == value


def test_what_is_in_texts_is_not_counted() -> None:
    text = '[{,:"\\' * 100_000
    assert parse(json.dumps([text]).encode()) == [text]


@pytest.mark.parametrize(
    "body, says",
    [
        (b"[" + b"1," * VALUES + b"1]", "values"),
        (b"[" + b"[]," * OBJECTS + b"1]", "lists and objects"),
        (b"[" + b",".join([b'{"a": 1, "b": 1, "c": 1, "d": 1, "e": 1}'] * 7000) + b"]", f"takes {FIELDS}"),
        (json.dumps(dict.fromkeys(map(str, range(ENTRIES + 1)))).encode(), "entries"),
        (b"[" * (DEPTH + 1) + b"]" * (DEPTH + 1), "deep"),
        (b'["' + b"a" * 50 + b'\\\\", ' + b"[" * (DEPTH + 1) + b"]" * (DEPTH + 2), "deep"),
        (b"[1" + b"0" * 5000 + b"]", "5001 digits"),
        *((f"[{text}]".encode(), "none that JSON has") for text in ("NaN", "1e999", '"\\ud800"', '"\\uDfff"')),
    ],
)  # fmt: skip
def test_over_a_bound(body: bytes, says: str) -> None:
    with pytest.raises(ApiError, match=says) as told:
        parse(body)
    assert told.value.status == 400 and len(str(told.value)) < 120


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b'"', b"\xff", b'{"a": 1}}', "[1]".encode("utf-16"), b'\\"[', b"\xef\xbb\xbf1"],
)
def test_no_json_at_all(body: bytes) -> None:
    with pytest.raises(ValueError):
        parse(body)


def test_as_deep_and_as_many_as_may_be() -> None:
    assert parse(b"[" * DEPTH + b"]" * DEPTH)
    assert len(parse(b"[" + b"1," * (VALUES - 2) + b"1]")) == VALUES - 1
    assert len(parse(json.dumps(dict.fromkeys(map(str, range(ENTRIES)))).encode())) == ENTRIES


def test_characters_of_all_texts() -> None:
    assert characters_of([{"role": "user", "n": 5, "parts": [{"text": "abc"}, None]}]) == len(
        "roleusernpartstextabc"
    )
