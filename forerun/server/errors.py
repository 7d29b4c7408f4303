"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}; under /api in
Ollama's."""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Sequence
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from forerun.errors import BusyError, CapacityError, ConfigError, RequestError
from forerun.server.descriptors import is_out_of_descriptors
from forerun.server.service import UnavailableError

log = logging.getLogger("forerun.server")


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code


TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
}

OURS = (
    RequestError,
    CapacityError,
    ConfigError,
)  # what a request got wrong; a LoadError may name files of the server
MOST_READ = 4096  # characters of a message that are looked at: it may repeat what was sent

KINDS = (
    *(
        ApiError,
        RequestValidationError,
        HTTPException,
        *OURS,
        BusyError,
        UnavailableError,
        TimeoutError,
        OSError,
    ),
    Exception,  # what is in no other kind is logged with a traceback, and its connection closed
)


def body(error: Exception) -> tuple[int, dict[str, Any]]:
    """(HTTP status, body) of any error."""
    status, param, code = 500, None, None
    message = "the server failed while it worked on this request; its log says why"
    if isinstance(error, ApiError):
        status, message, param, code = error.status, str(error), error.param, error.code
    elif isinstance(error, OURS):
        status, message = 400, str(error)
        code = "context_length_exceeded" if "context" in message and "prompt" in message else None
    elif isinstance(error, BusyError):
        status, message = 429, str(error)
    elif isinstance(error, UnavailableError):
        status, message = 503, f"{error}: try again in a moment"
    elif is_out_of_descriptors(error):
        status, message = 503, "this server has no file descriptor left: try again in a moment"
    elif isinstance(error, TimeoutError):
        status, message, code = (
            504,
            "the request took longer than this server allows (--timeout)",
            "timeout",
        )
    elif isinstance(error, HTTPException):
        status, message = error.status_code, str(error.detail)
    elif isinstance(error, RequestValidationError):
        # where a field may be of several kinds, the error that went furthest into it says most, or
        # names a field
        first = max(error.errors(), key=lambda e: (len(e["loc"]), e["type"] == "field"))
        status, param = 400, _where(first["loc"]) if first["type"] != "json_invalid" else None
        message = f"{param}: {first['msg']}" if param else str(first["msg"])
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    message, param = " ".join(message[:MOST_READ].split())[:500], param and param[:100]
    return status, {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _where(loc: Sequence[Any]) -> str | None:
    """The path of a field, without what pydantic adds for the alternatives of a union."""
    parts = [str(part) for part in loc if part != "body"]
    fields = [
        part
        for part in parts
        if part.isdigit() or (re.fullmatch(r"[a-z_]+", part) and part not in UNION)
    ]
    return ".".join(fields or parts[:1]) or None


UNION = ("str", "int", "bool", "float")


def told(error: Exception) -> tuple[int, dict[str, Any]]:
    """`body` of an error that is told within a stream or a batch; a fault of ours is logged, as
    elsewhere."""
    status, content = body(error)
    if status == 500:
        log.error("a request failed", exc_info=error)
    return status, content


def answer(error: Exception, path: str = "") -> JSONResponse:
    """The response of any error of a request for `path`."""
    status, content = body(error)
    if path.startswith("/api/"):
        content = {"error": content["error"]["message"]}
    headers = dict(getattr(error, "headers", None) or {})
    return JSONResponse(
        content, status, headers=headers | ({"Retry-After": "1"} if status in (429, 503) else {})
    )


async def handle(request: Request, error: Exception) -> JSONResponse:
    """The handler of every exception of the application."""
    response = answer(error, request.url.path)
    if isinstance(error, OSError) and response.status_code == 500:
        log.error("a request failed", exc_info=error)
    _forget(error)
    return response


def _forget(error: BaseException | None) -> None:
    """Free what the frames of an error hold. Some of them hold the error: the request's body, of
    which there may be megabytes, would stay with them until cycles are looked for."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
