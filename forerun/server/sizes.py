"""The size of an answer, estimated from its request before anything is generated. What would be too
long is refused: a few bytes of a request (`n`, `logprobs`, `echo`, many texts to embed) must not
become an answer without a bound.

The numbers are bytes of JSON as they are on average; a text may have tokens that are longer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from forerun.server.errors import ApiError
from forerun.server.jobs import Job

MOST = 32 << 20  # of one answer
CHOICE = 400  # of a choice without its tokens
TOKEN = 8  # a token as text
TOKEN_ID = 8  # a token as a number, in a list
ENTRY = 32  # one log-probability with its token, as /v1/completions writes it
LONG_ENTRY = 80  # the same as chats and vLLM write it, with the bytes of the token or its rank
FLOAT, BASE64_FLOAT = 22, 6  # a number of a vector
FEWEST = 16  # tokens that a request without a limit must have room for
Weight = Callable[
    [Sequence[Job], Sequence[int]], int
]  # bytes of an answer with so many tokens for each order


def of_choice(order: Job, count: int, entry: int, ids: bool) -> int:
    """Bytes of a choice with `count` tokens and `entry` bytes for each log-probability."""
    each, asked = TOKEN + (TOKEN_ID if ids else 0), order.params.logprobs
    return CHOICE + count * (each + (0 if asked is None else entry * (1 + asked)))


def of_prompt(order: Job, entry: int) -> int:
    """Bytes of the log-probabilities of a prompt."""
    asked = order.params.prompt_logprobs
    return 0 if asked is None else len(order.tokens) * entry * (1 + asked)


def fitted(orders: Sequence[Job], room: int, weight: Weight) -> Sequence[Job]:
    """The orders of an answer that is not too long: those without a limit have one then. Raises
    ApiError."""
    lengths = [max(0, min(order.params.max_tokens, room - len(order.tokens))) for order in orders]
    size = weight(orders, lengths)
    if size > MOST and any(order.fills for order in orders):
        empty, count = weight(orders, [0] * len(orders)), len(orders)
        each = weight(orders, [1] * count) - empty
        most = (MOST - empty) // each
        if most >= FEWEST:
            limits = [min(order.params.max_tokens, most) for order in orders]
            return [
                replace(order, params=replace(order.params, max_tokens=limit))
                for order, limit in zip(orders, limits, strict=True)
            ]
    check(
        size,
        "ask for fewer completions (n), tokens (max_tokens) or log-probabilities (logprobs), or leave echo out",
    )
    return orders


def check(size: int, advice: str) -> None:
    """Refuse an answer of about `size` bytes, if that is too many. Raises ApiError."""
    if size > MOST:
        asked, given = (f"{count / (1 << 20):.4g}" for count in (size, MOST))
        message = (
            f"this asks for an answer of about {asked} MiB, this server gives {given}: {advice}"
        )
        raise ApiError(400, message)
