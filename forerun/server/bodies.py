"""The bodies of requests: how large one may be and how long it may take, how much is held of all of
them, and where they are parsed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

from forerun.errors import BusyError
from forerun.server import errors
from forerun.server.errors import ApiError
from forerun.server.service import UnavailableError
from forerun.server.settings import Settings

SHOWN = 100  # characters of a header, in an error message
SMALL = (
    64 << 10
    # bytes of each body that the bound on all does not count: large ones must not shut out small ones
)


class Bodies:
    """The bodies that one server holds."""

    def __init__(self, settings: Settings) -> None:
        self.largest, self.seconds = settings.max_body, settings.body_timeout
        self.most = max(settings.max_bodies, settings.max_body)
        self.held = 0

    def refusal(self, headers: Headers) -> ApiError | None:
        """Why a body is refused by what its headers say, if it is."""
        length = headers.get("content-length", "0")
        return (
            ApiError(413, self._too_large())
            if length.isdigit() and int(length) > self.largest
            else None
        )

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


def _is_json(content_type: str) -> bool:
    """Whether a Content-Type is application/json, or another type that is written in JSON."""
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (
        kind.startswith("application/") and kind.endswith("+json")
    )


class BoundedRoute(APIRoute):
    """A route that takes no body before there is a place for its request."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def bounded(request: Request) -> Response:
            if self.body_field is not None and not _is_json(
                request.headers.get("content-type", "")
            ):
                said = request.headers.get("content-type", "none")[:SHOWN]
                raise ApiError(
                    400,
                    f"the body must be JSON: send the header Content-Type: application/json, not {said}",
                )
            return await handler(BoundedRequest(request.scope, request.receive))

        return bounded


class BoundedRequest(Request):
    """A request whose JSON is parsed by `bounds`."""

    async def json(self) -> Any:
        """The body. Raises HTTPException (others would be told as bodies that cannot be read),
        ValueError."""
        body, kitchen = await self.body(), self.app.state.kitchen
        await kitchen.turn()
        if await self.is_disconnected():
            raise ClientDisconnect  # while it waited for its turn
        try:
            return await kitchen.parse(body)
        except (ApiError, BusyError, UnavailableError) as error:
            status, content = errors.body(error)
            raise HTTPException(status, content["error"]["message"]) from None
