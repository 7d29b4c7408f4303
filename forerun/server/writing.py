"""JSON of answers, written slice by slice: to write a long one in one go would hold the
interpreter."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from fastapi import Response
from starlette.types import Receive, Scope, Send

SLICE = 64  # items of a list that are written at once
TEXT = 1 << 16  # characters of a text that are written at once
PART = 1 << 16  # bytes of an answer that are sent at once, at least
LEVELS = 5  # down to the entries of log-probabilities


def written(value: Any, levels: int = LEVELS) -> str:
    """A value as JSON."""
    return "".join(slices(value, levels))


def slices(value: Any, levels: int = LEVELS) -> Iterator[str]:
    """A value as JSON, in pieces of which none takes long."""
    if levels and isinstance(value, dict):
        yield "{"
        for i, (name, item) in enumerate(value.items()):
            yield f"{',' if i else ''}{_dumps(name)}:"
            yield from slices(item, levels - 1)
        yield "}"
    elif levels and isinstance(value, list):
        yield "["
        if levels > 1 and value and isinstance(value[0], dict | list):
            for i, item in enumerate(value):
                yield "," if i else ""
                yield from slices(item, levels - 1)
        else:
            for at in range(0, len(value), SLICE):
                yield ("," if at else "") + _dumps(value[at : at + SLICE])[1:-1]
        yield "]"
    elif isinstance(value, str) and len(value) > TEXT:
        yield '"'
        for at in range(0, len(value), TEXT):
            yield _dumps(value[at : at + TEXT])[1:-1]
        yield '"'
    else:
        yield _dumps(value)


class LongResponse(Response):
    """A long answer, written as JSON where it is made and sent part by part."""

    media_type = "application/json"

    def __init__(self, content: dict[str, Any]) -> None:
        super().__init__()
        self.parts = list(_parts(slices(content)))
        self.headers["content-length"] = str(sum(map(len, self.parts)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        for part in self.parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def content_of(response: Response) -> bytes:
    """The body of an answer of either kind."""
    return b"".join(response.parts) if isinstance(response, LongResponse) else bytes(response.body)


def _parts(pieces: Iterator[str]) -> Iterator[bytes]:
    """The same text in fewer pieces."""
    held, size = [], 0
    for piece in pieces:
        held.append(piece)
        size += len(piece)
        if size >= PART:
            yield "".join(held).encode()
            held, size = [], 0
    yield "".join(held).encode()


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
