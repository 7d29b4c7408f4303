"""Routes whose bodies are parsed within bounds, beside the event loop where they are large."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from forerun.errors import BusyError
from forerun.server import errors
from forerun.server.errors import ApiError
from forerun.server.service import UnavailableError


class BoundedRoute(APIRoute):
    """A route that takes no body before there is a place for its request."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def bounded(request: Request) -> Response:
            return await handler(BoundedRequest(request.scope, request.receive))

        return bounded


class BoundedRequest(Request):
    """A request whose JSON is parsed by `bounds`."""

    async def json(self) -> Any:
        """The body. Raises HTTPException (others would be told as bodies that cannot be read), ValueError."""
        body, kitchen = await self.body(), self.app.state.kitchen
        await kitchen.turn()
        if await self.is_disconnected():
            raise ClientDisconnect  # while it waited for its turn
        try:
            return await kitchen.parse(body)
        except (ApiError, BusyError, UnavailableError) as error:
            status, content = errors.body(error)
            raise HTTPException(status, content["error"]["message"]) from None
