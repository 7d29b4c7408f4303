"""Large responses: their size is estimated before generation, and their JSON is written in pieces.

A request of a few bytes (`n`, `logprobs`, `echo`, many texts to embed) must not ask for a response
of unlimited size, so requests whose response would be too large are refused. The constants are
average numbers of bytes of JSON; single tokens may be longer.

Writing a large response in one call would hold the interpreter, and with it the event loop.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from fastapi import Response
from starlette.types import Receive, Scope, Send

from forerun.server.errors import ApiError
from forerun.server.jobs import Job

MAX_BYTES = 32 << 20  # of one response
CHOICE_BYTES = 400  # of a choice without its tokens
TOKEN_BYTES = 8  # of a token as text
TOKEN_ID_BYTES = 8  # of a token id in a list
LOGPROB_BYTES = 32  # of one log-probability with its token, as /v1/completions writes it
LONG_LOGPROB_BYTES = 80  # the same in chats and prompt_logprobs, with bytes or rank
FLOAT_BYTES = 22  # of one element of a vector
BASE64_FLOAT_BYTES = 6
MIN_TOKENS = 16  # a request without a limit must have room for this many tokens

SLICE_ITEMS = 64  # items of a list that are written in one piece
SLICE_CHARACTERS = 1 << 16  # characters of a string that are written in one piece
PART_BYTES = 1 << 16  # minimal size of a part that is sent
SLICE_LEVELS = 5  # nesting down to the entries of log-probabilities

# Estimates the bytes of a response from its jobs and the number of tokens of each.
SizeEstimate = Callable[[Sequence[Job], Sequence[int]], int]


def choice_size(job: Job, num_tokens: int, logprob_bytes: int, token_ids: bool) -> int:
    """Estimate the bytes of a choice; `token_ids` says whether it lists them."""
    token = TOKEN_BYTES + (TOKEN_ID_BYTES if token_ids else 0)
    if job.params.logprobs is not None:
        token += logprob_bytes * (1 + job.params.logprobs)
    return CHOICE_BYTES + num_tokens * token


def prompt_logprobs_size(job: Job, logprob_bytes: int) -> int:
    """Estimate the bytes of the log-probabilities of a prompt."""
    count = job.params.prompt_logprobs
    return 0 if count is None else len(job.tokens) * logprob_bytes * (1 + count)


def limit_jobs(jobs: Sequence[Job], context: int, estimate: SizeEstimate) -> Sequence[Job]:
    """Return the jobs of a response that is not too large.

    Jobs without a limit of their own (`fills`) get one where that makes the response fit.
    `context` is the number of tokens of a prompt and its answer. Raises ApiError.
    """
    lengths = [max(0, min(job.params.length_limit, context - len(job.tokens))) for job in jobs]
    size = estimate(jobs, lengths)
    if size > MAX_BYTES and any(job.fills for job in jobs):
        empty = estimate(jobs, [0] * len(jobs))
        per_token = estimate(jobs, [1] * len(jobs)) - empty
        fitting = (MAX_BYTES - empty) // per_token
        if fitting >= MIN_TOKENS:
            limits = [min(job.params.length_limit, fitting) for job in jobs]
            return [
                replace(job, params=replace(job.params, max_tokens=limit))
                for job, limit in zip(jobs, limits, strict=True)
            ]
    advice = "completions (n), tokens (max_tokens) or log-probabilities (logprobs)"
    check_size(size, f"ask for fewer {advice}, or leave echo out")
    return jobs


def check_size(size: int, advice: str) -> None:
    """Raise ApiError if a response of about `size` bytes is too large."""
    if size > MAX_BYTES:
        problem = f"this asks for a response of about {size / (1 << 20):.4g} MiB"
        limit = f"this server sends at most {MAX_BYTES / (1 << 20):.4g}"
        raise ApiError(400, f"{problem}, {limit}: {advice}")


def json_slices(value: Any, levels: int = SLICE_LEVELS) -> Iterator[str]:
    """Yield a value as JSON in small pieces."""
    if levels and isinstance(value, dict):
        yield "{"
        for i, (name, item) in enumerate(value.items()):
            yield f"{',' if i else ''}{_dumps(name)}:"
            yield from json_slices(item, levels - 1)
        yield "}"
    elif levels and isinstance(value, list):
        yield "["
        if levels > 1 and value and isinstance(value[0], dict | list):
            for i, item in enumerate(value):
                yield "," if i else ""
                yield from json_slices(item, levels - 1)
        else:
            for start in range(0, len(value), SLICE_ITEMS):
                items = _dumps(value[start : start + SLICE_ITEMS])[1:-1]
                yield ("," if start else "") + items
        yield "]"
    elif isinstance(value, str) and len(value) > SLICE_CHARACTERS:
        yield '"'
        for start in range(0, len(value), SLICE_CHARACTERS):
            yield _dumps(value[start : start + SLICE_CHARACTERS])[1:-1]
        yield '"'
    else:
        yield _dumps(value)


class LargeResponse(Response):
    """A response whose JSON is encoded by the thread that creates it and is sent in parts."""

    media_type = "application/json"

    def __init__(self, content: dict[str, Any]) -> None:
        super().__init__()
        self.parts = list(_join(json_slices(content)))
        self.headers["content-length"] = str(sum(map(len, self.parts)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        for part in self.parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def body_of(response: Response) -> bytes:
    """Return the body of a response, large or not."""
    if isinstance(response, LargeResponse):
        return b"".join(response.parts)
    return bytes(response.body)


def _join(pieces: Iterator[str]) -> Iterator[bytes]:
    """Join pieces to parts of at least PART_BYTES."""
    held: list[str] = []
    size = 0
    for piece in pieces:
        held.append(piece)
        size += len(piece)
        if size >= PART_BYTES:
            yield "".join(held).encode()
            held = []
            size = 0
    yield "".join(held).encode()


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
