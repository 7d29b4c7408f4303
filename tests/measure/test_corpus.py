"""Prompts to measure with from what every machine has: passages of the standard library."""

import json

import pytest

from forerun import RequestError
from forerun.measure.corpus import excerpts


def encode(text: str) -> list[int]:
    return [ord(c) for c in text]


def test_passages_are_different_and_of_the_right_length() -> None:
    found = excerpts(encode, 300, 40)  # more than there are files: some files give two
    assert [len(p) for p in found] == [40] * 300 and len({json.dumps(p) for p in found}) > 290
    assert excerpts(encode, 5, 40) == found[:5]
    with pytest.raises(RequestError, match="ask for fewer"):
        excerpts(encode, 3, 10_000_000)
