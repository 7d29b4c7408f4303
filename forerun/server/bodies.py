"""The bodies of requests: how large one may be and how long it may take, and how much is held of all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive

from forerun.server.errors import ApiError
from forerun.server.settings import Settings

SMALL = 64 << 10  # bytes of each body that the bound on all does not count: large ones must not shut out small ones


class Bodies:
    """The bodies that one server holds."""

    def __init__(self, settings: Settings) -> None:
        self.largest, self.seconds = settings.max_body, settings.body_timeout
        self.most = max(settings.max_bodies, settings.max_body)
        self.held = 0

    def refusal(self, headers: Headers) -> ApiError | None:
        """Why a body is refused by what its headers say, if it is."""
        length = headers.get("content-length", "0")
        return ApiError(413, self._too_large()) if length.isdigit() and int(length) > self.largest else None

    @contextmanager
    def limited(self, receive: Receive) -> Iterator[Receive]:
        """`receive` within the limits. What it has given is held until the end of the request."""
        size, held, whole = 0, 0, False
        end = asyncio.get_running_loop().time() + self.seconds if self.seconds else None

        async def limited() -> Message:
            nonlocal size, held, whole
            if whole:  # what may come yet is that the client goes away
                return await receive()
            try:
                async with asyncio.timeout_at(end):
                    message = await receive()
            except TimeoutError:
                late = f"the request body did not come within {self.seconds:g} s (--body-timeout)"
                raise HTTPException(408, late) from None
            whole = not message.get("more_body", False)
            size += len(message.get("body", b""))
            if size > self.largest:
                raise HTTPException(413, self._too_large())  # FastAPI lets these through
            more = max(0, size - SMALL) - held
            if self.held + more > self.most:
                full = f"the requests in work hold {self.most} bytes already (--max-bodies): try again in a moment"
                raise HTTPException(503, full)
            held += more
            self.held += more
            return message

        try:
            yield limited
        finally:
            self.held -= held

    def _too_large(self) -> str:
        return f"the request body is over {self.largest} bytes (--max-body)"
