"""The one reading of numbers in requests: which JSON values are numbers, and what special values
mean.

| field | special value | meaning |
|---|---|---|
| every whole number | `256.0` | 256: JSON does not separate whole numbers from others |
| `max_tokens` and its other names | -1; -2 | as many tokens as there is room for |
| `seed` | below 0 | any seed: a new one is drawn |
| `top_k` | -1; 0 | all tokens |
| `logprobs` of completions | false | none |
| every field | null | as if the field were absent |

Booleans and texts are no numbers. What is refused says what to send.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from forerun.errors import shorten

T = TypeVar("T")
List = Annotated[
    list[T], Field(fail_fast=True)
]  # an error for each of a million elements would take gigabytes

FILL = -1  # a length: as many tokens as there is room for
FILLS = (-1, -2)  # llama.cpp's and Ollama's values for that
DEEPEST = 64  # a depth of drafts
ALL = 0  # a top_k: all tokens
WHOLE_TEXT = re.compile(r"([+-]?[0-9]{1,30})(\.0{0,30})?")


def _refused(value: Any, wanted: str) -> PydanticCustomError:
    if isinstance(value, str):
        wanted += ", without quotation marks"
    return PydanticCustomError(
        "number", "{wanted}, instead of {value}", {"wanted": wanted, "value": shorten(value)}
    )


def whole(value: Any) -> Any:
    """A whole number, however it is written: 256.0 is 256."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise _refused(value, "give a whole number")
    return value


def _number(value: Any) -> Any:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise _refused(value, "give a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise PydanticCustomError("number", "give a smaller number: this one is too large", {})
    return number


def _whole_numbers(value: Any) -> Any:
    """Token ids. Lists are long: the whole numbers among their elements are not looked at one by
    one."""
    if isinstance(value, list) and float in set(map(type, value)):
        return [int(item) if type(item) is float and item.is_integer() else item for item in value]
    return value


def _length(value: Any) -> int:
    count = whole(value)
    if count < 0 and count not in FILLS:
        raise _refused(
            value, "give a whole number from 1, or -1 for as many tokens as there is room for"
        )
    return FILL if count < 0 else int(count)


def _top_k(value: Any) -> int:
    count = whole(value)
    if count < -1:
        raise _refused(value, "give a whole number from 1, or 0 for all tokens")
    return ALL if count == -1 else int(count)


def _top_logprobs(value: Any) -> Any:
    if value is False:
        return None
    if value is True:
        raise PydanticCustomError(
            "number", "give the number of likeliest tokens to list, such as 5", {}
        )
    return whole(value)


def _depth(value: Any) -> Any:
    if value == "auto":
        return value
    depth = whole(value) if not isinstance(value, str) else -1
    if not 0 <= depth <= DEEPEST:
        raise _refused(value, f'give "auto" or a whole number from 0 to {DEEPEST}')
    return depth


def whole_of_text(text: str) -> int | None:
    """The whole number that a name of a field is, such as "50256" or "50256.0"; None where it is
    none."""
    match = WHOLE_TEXT.fullmatch(text)
    return int(match[1]) if match else None


Whole = Annotated[int, BeforeValidator(whole)]
Number = Annotated[float, BeforeValidator(_number)]
TokenIds = Annotated[List[int], BeforeValidator(_whole_numbers)]
Length = Annotated[int, BeforeValidator(_length)]  # a count of tokens to write, or FILL
TopK = Annotated[int, BeforeValidator(_top_k)]
Depth = Annotated[Literal["auto"] | int, BeforeValidator(_depth)]
TopLogprobs = Annotated[int | None, BeforeValidator(_top_logprobs)]
