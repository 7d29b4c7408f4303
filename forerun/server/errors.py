"""Map exceptions to responses in OpenAI's error format, or Ollama's for paths under `/api`.

OpenAI's format is {"error": {"message", "type", "param", "code"}}, Ollama's {"error": message}.
"""

from __future__ import annotations

import errno
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

log = logging.getLogger("forerun.server")

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
INTERNAL_ERROR = "the server failed while it worked on this request; its log says why"
MAX_MESSAGE_INPUT = 4096  # characters of a message that are processed: it may quote the request
OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
PYDANTIC_UNION_MEMBERS = ("str", "int", "bool", "float")


class ApiError(Exception):
    """An error response with a chosen HTTP status."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


class UnavailableError(Exception):
    """The server is shutting down, or the engine failed while it worked on this request."""


# Errors of the request. A LoadError is none of them: its message may name files of the server.
CLIENT_ERRORS = (RequestError, CapacityError, ConfigError)
# Exception comes last: Starlette logs what reaches it with a traceback and closes the connection.
KINDS: tuple[type[Exception], ...] = (
    ApiError,
    RequestValidationError,
    HTTPException,
    *CLIENT_ERRORS,
    BusyError,
    UnavailableError,
    TimeoutError,
    OSError,
    Exception,
)


def is_out_of_descriptors(error: BaseException | None) -> bool:
    """Return True if an error means that no file descriptor is left."""
    return isinstance(error, OSError) and error.errno in OUT_OF_DESCRIPTORS


def body(error: Exception) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and the body, in OpenAI's format, of any error."""
    status, message, param, code = 500, INTERNAL_ERROR, None, None
    if isinstance(error, ApiError):
        status, message, param, code = error.status, str(error), error.param, error.code
    elif isinstance(error, CLIENT_ERRORS):
        status, message = 400, str(error)
        if "context" in message and "prompt" in message:
            code = "context_length_exceeded"
    elif isinstance(error, BusyError):
        status, message = 429, str(error)
    elif isinstance(error, UnavailableError):
        status, message = 503, f"{error}: try again in a moment"
    elif is_out_of_descriptors(error):
        status, message = 503, "this server has no file descriptor left: try again in a moment"
    elif isinstance(error, TimeoutError):
        status, code = 504, "timeout"
        message = "the request took longer than this server allows (--timeout)"
    elif isinstance(error, HTTPException):
        status, message = error.status_code, str(error.detail)
    elif isinstance(error, RequestValidationError):
        # For a union, the most specific error is the one with the longest path.
        first = max(error.errors(), key=lambda e: (len(e["loc"]), e["type"] == "field"))
        status, message = 400, str(first["msg"])
        if first["type"] != "json_invalid" and (param := _field_path(first["loc"])):
            message = f"{param}: {message}"
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    message = " ".join(message[:MAX_MESSAGE_INPUT].split())[:500]
    param = param and param[:100]
    return status, {"error": {"message": message, "type": kind, "param": param, "code": code}}


def logged_body(error: Exception) -> tuple[int, dict[str, Any]]:
    """Return `body` of an error reported within a stream or a batch, and log internal errors."""
    status, content = body(error)
    if status == 500:
        log.error("a request failed", exc_info=error)
    return status, content


def response(error: Exception, path: str = "") -> JSONResponse:
    status, content = body(error)
    if path.startswith("/api/"):
        content = {"error": content["error"]["message"]}
    headers = dict(getattr(error, "headers", None) or {})
    if status in (429, 503):
        headers["Retry-After"] = "1"
    return JSONResponse(content, status, headers=headers)


async def handle(request: Request, error: Exception) -> JSONResponse:
    """Answer any exception of the application."""
    answer = response(error, request.url.path)
    if isinstance(error, OSError) and answer.status_code == 500:
        log.error("a request failed", exc_info=error)
    _clear_frames(error)
    return answer


def _field_path(location: Sequence[str | int]) -> str | None:
    """Return the dotted path of a field without the names pydantic adds for union members."""
    parts = [str(part) for part in location if part != "body"]
    fields = [
        part
        for part in parts
        if part.isdigit() or (re.fullmatch(r"[a-z_]+", part) and part not in PYDANTIC_UNION_MEMBERS)
    ]
    return ".".join(fields or parts[:1]) or None


def _clear_frames(error: BaseException | None) -> None:
    """Free the local variables of an error's frames.

    Frames and error refer to each other, so a request body of megabytes would otherwise stay in
    memory until the garbage collector runs.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
