"""What one request may hold. It is told from the bytes before they are parsed: to parse or to check
a value holds the interpreter, and with it the event loop and the engine, so there must not be too
many."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from forerun.server.errors import ApiError
from forerun.server.lanes import Lane

VALUES = 1 << 18  # of lists and objects together: token ids, mostly
OBJECTS = 1 << 13  # lists and objects
FIELDS = 1 << 15  # of all objects together
ENTRIES = 1 << 12  # of one object
DEPTH = 100
DIGITS = 640  # of one number; Python takes quadratic time to read one
SMALL = 1 << 14  # bytes of a body that is parsed on the spot

NOT_JSON = "a number or a character in this request is none that JSON has"
QUOTE, COMMA, COLON = b'",:'


def parse(body: bytes) -> Any:
    """The value that a request's body is. Raises ApiError, ValueError for what is no JSON."""
    text = body.decode("utf-8")
    _check_structure(body)
    value = json.loads(
        text,
        parse_int=_whole,
        parse_float=_number,
        parse_constant=_constant,
        object_pairs_hook=_object,
    )
    if (
        "\\ud" in text or "\\uD" in text
    ):  # half a character can only be written so; no answer could repeat it
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ApiError(400, NOT_JSON) from None
    return value


async def parse_aside(body: bytes, lane: Lane) -> Any:
    """The same, beside the event loop where it is large, one at a time: each holds the interpreter
    for up to 30 ms."""
    if len(body) < SMALL:
        return parse(body)
    return await lane.do(parse, body)


def _check_structure(body: bytes) -> None:
    """Refuse too many values, or too deep ones."""
    if len(body) < FIELDS and body.count(b"[") + body.count(b"{") <= DEPTH:
        return  # there cannot be too many of anything
    if b"\\" in body:  # within a string: the quotation marks that are left begin and end one
        body = body.replace(b"\\\\", b"  ").replace(b'\\"', b"  ")
    characters = np.frombuffer(body, np.uint8)
    inside = np.bitwise_xor.accumulate(characters == QUOTE)
    marks = characters[~inside]
    opening, closing = _brackets(marks, b"[{"), _brackets(marks, b"]}")
    objects, fields = int(np.count_nonzero(opening)), int(np.count_nonzero(marks == COLON))
    values = objects + int(np.count_nonzero(marks == COMMA))
    for count, most, what in (
        (values, VALUES, "values"),
        (objects, OBJECTS, "lists and objects"),
        (fields, FIELDS, "fields"),
    ):
        if count > most:
            raise ApiError(
                400, f"this request has {count} {what}, this server takes {most}: send less at once"
            )
    steps = opening[opening | closing].astype(np.int32) * 2 - 1
    if steps.size and int(np.cumsum(steps).max()) > DEPTH:
        raise ApiError(
            400, f"this request has lists and objects over {DEPTH} deep, this server takes no more"
        )


def _brackets(marks: np.ndarray, pair: bytes) -> np.ndarray:
    either: np.ndarray = np.logical_or(marks == pair[0], marks == pair[1])
    return either


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > ENTRIES:
        raise ApiError(
            400, f"an object in this request has {len(pairs)} entries, this server takes {ENTRIES}"
        )
    return dict(pairs)


def _short(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    def read(digits: str) -> Any:
        if len(digits) > DIGITS:
            raise ApiError(
                400,
                f"a number in this request has {len(digits)} digits, this server takes {DIGITS}",
            )
        return convert(digits)

    return read


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ApiError(400, NOT_JSON)
    return number


def _constant(name: str) -> Any:
    raise ApiError(400, NOT_JSON)


_whole, _number = _short(int), _short(_finite)


def characters_of(value: Any) -> int:
    """Characters of all texts in a value, names of fields too."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(len(name) + characters_of(item) for name, item in value.items())
    return sum(map(characters_of, value)) if isinstance(value, list) else 0
