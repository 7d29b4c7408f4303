"""Limits on what clients can use up: request bodies, parsed JSON, threads and file descriptors."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import resource
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from anyio import CapacityLimiter, to_thread
from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

from forerun.errors import BusyError
from forerun.server import errors
from forerun.server.errors import ApiError, UnavailableError
from forerun.server.settings import Settings

log = logging.getLogger("forerun.server")
R = TypeVar("R")

# JSON of one request
VALUES = 1 << 18  # in lists and objects together; mostly token ids
OBJECTS = 1 << 13  # lists and objects
FIELDS = 1 << 15  # of all objects together
ENTRIES = 1 << 12  # of one object
DEPTH = 100
DIGITS = 640  # of one number: Python's conversion takes quadratic time
SMALL_BODY = 1 << 14  # bytes of a body that is parsed on the event loop
NOT_JSON = "a number or a character in this request is none that JSON has"
QUOTE, COMMA, COLON = b'",:'
OPENING = b"[{"
CLOSING = b"]}"

# bodies
UNCOUNTED = 64 << 10  # bytes of each body outside --max-bodies: large bodies leave room for small
SHOWN = 100  # characters of a client's header in an error message

# throttled threads
REST_FACTOR = 2.0  # a thread rests this many times the duration of its last call,
MAX_REST = 0.25  # but no longer than this many seconds
SHORT_CALL = 0.002  # seconds; a shorter call needs no rest

# file descriptors
SPARE_DESCRIPTORS = 64  # for files, pipes of worker processes and other needs of requests
MAX_PENDING = 1024  # connections that have not sent a request yet
SURPLUS = 16  # connections over --max-connections until the excess is closed


# ------------------------------------------------------------ JSON


def parse(body: bytes) -> Any:
    """Parse the JSON of a request body within the limits of this module.

    The limits are checked on the bytes first, because parsing and validating many values would
    hold the interpreter lock, and with it the event loop and the engine. Raises ApiError, or
    ValueError for a body that is not JSON.
    """
    text = body.decode("utf-8")
    _check_structure(body)
    value = json.loads(
        text,
        parse_int=partial(_parse_number, int),
        parse_float=partial(_parse_number, _finite),
        parse_constant=_reject_constant,
        object_pairs_hook=_parse_object,
    )
    if "\\ud" in text or "\\uD" in text:
        # A lone surrogate can only be written as an escape, and no response could repeat it.
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ApiError(400, NOT_JSON) from None
    return value


async def parse_in_thread(body: bytes, threads: ThrottledThreads) -> Any:
    """Parse a large body in a thread, because it takes up to 30 ms, and a small one at once."""
    if len(body) < SMALL_BODY:
        return parse(body)
    return await threads.run(parse, body)


def count_characters(value: Any) -> int:
    """Count the characters of all strings of a JSON value, names of fields included."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(len(name) + count_characters(item) for name, item in value.items())
    return sum(map(count_characters, value)) if isinstance(value, list) else 0


def _check_structure(body: bytes) -> None:
    """Raise ApiError for too many or too deeply nested values."""
    if len(body) < FIELDS and body.count(b"[") + body.count(b"{") <= DEPTH:
        return  # too short for any limit
    if b"\\" in body:  # remove escaped quotation marks: those that are left delimit strings
        body = body.replace(b"\\\\", b"  ").replace(b'\\"', b"  ")
    characters = np.frombuffer(body, np.uint8)
    in_string = np.bitwise_xor.accumulate(characters == QUOTE)
    marks = characters[~in_string]
    opening = (marks == OPENING[0]) | (marks == OPENING[1])
    closing = (marks == CLOSING[0]) | (marks == CLOSING[1])
    num_objects = int(np.count_nonzero(opening))
    num_fields = int(np.count_nonzero(marks == COLON))
    num_values = num_objects + int(np.count_nonzero(marks == COMMA))
    for count, limit, what in (
        (num_values, VALUES, "values"),
        (num_objects, OBJECTS, "lists and objects"),
        (num_fields, FIELDS, "fields"),
    ):
        if count > limit:
            message = f"this request has {count} {what}, this server takes {limit}"
            raise ApiError(400, f"{message}: send less at once")
    steps = opening[opening | closing].astype(np.int32) * 2 - 1
    if steps.size and int(np.cumsum(steps).max()) > DEPTH:
        message = f"this request has lists and objects over {DEPTH} deep"
        raise ApiError(400, f"{message}, this server takes no more")


def _parse_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > ENTRIES:
        message = f"an object in this request has {len(pairs)} entries"
        raise ApiError(400, f"{message}, this server takes {ENTRIES}")
    return dict(pairs)


def _parse_number(convert: Callable[[str], Any], digits: str) -> Any:
    if len(digits) > DIGITS:
        message = f"a number in this request has {len(digits)} digits"
        raise ApiError(400, f"{message}, this server takes {DIGITS}")
    return convert(digits)


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ApiError(400, NOT_JSON)
    return number


def _reject_constant(name: str) -> Any:
    raise ApiError(400, NOT_JSON)  # NaN, Infinity


# ------------------------------------------------------------ bodies


class BodyLimiter:
    """Limits the size and duration of each request body, and the memory of all of them."""

    def __init__(self, settings: Settings) -> None:
        self.max_body = settings.max_body
        self.seconds = settings.body_timeout
        self.max_held = max(settings.max_bodies, settings.max_body)
        self.held = 0

    def refusal(self, headers: Headers) -> ApiError | None:
        """Return the error for a body whose announced length is too large."""
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self.max_body:
            return ApiError(413, self._too_large())
        return None

    @contextmanager
    def limited(self, receive: Receive) -> Iterator[Receive]:
        """Yield `receive` with the limits; the body counts as held until the request ends."""
        size = 0
        held = 0
        complete = False
        deadline = asyncio.get_running_loop().time() + self.seconds if self.seconds else None

        async def limited() -> Message:
            nonlocal size, held, complete
            if complete:  # only a disconnection can follow
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                late = f"the request body did not come within {self.seconds:g} s (--body-timeout)"
                raise HTTPException(408, late) from None
            complete = not message.get("more_body", False)
            size += len(message.get("body", b""))
            if size > self.max_body:
                raise HTTPException(413, self._too_large())  # FastAPI lets HTTPException through
            more = max(0, size - UNCOUNTED) - held
            if self.held + more > self.max_held:
                full = f"the requests in work hold {self.max_held} bytes already (--max-bodies)"
                raise HTTPException(503, f"{full}: try again in a moment")
            held += more
            self.held += more
            return message

        try:
            yield limited
        finally:
            self.held -= held

    def _too_large(self) -> str:
        return f"the request body is over {self.max_body} bytes (--max-body)"


class LimitedRoute(APIRoute):
    """A route that accepts only JSON bodies and parses them through `LimitedRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def limited(request: Request) -> Response:
            content_type = request.headers.get("content-type", "")
            if self.body_field is not None and not _is_json(content_type):
                shown = (content_type or "none")[:SHOWN]
                message = f"send the header Content-Type: application/json, not {shown}"
                raise ApiError(400, f"the body must be JSON: {message}")
            return await handler(LimitedRequest(request.scope, request.receive))

        return limited


class LimitedRequest(Request):
    """A request whose body is parsed by `parse`, when there is a place for the request."""

    async def json(self) -> Any:
        """Parse the body.

        Raises ValueError, or HTTPException: FastAPI would report others as an unreadable body.
        """
        body = await self.body()
        state = self.app.state.server
        await state.wait_turn()
        if await self.is_disconnected():
            raise ClientDisconnect
        try:
            return await state.parse(body)
        except (ApiError, BusyError, UnavailableError) as error:
            status, content = errors.body(error)
            raise HTTPException(status, content["error"]["message"]) from None


def _is_json(content_type: str) -> bool:
    """Return True for application/json and for types with the suffix `+json`."""
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (
        kind.startswith("application/") and kind.endswith("+json")
    )


# ------------------------------------------------------------ threads


class ThrottledThreads:
    """A thread pool whose threads rest after each call.

    A call competes with the engine for the interpreter lock and the processors. The rest bounds
    its share of the time, so that large requests of some clients do not stop the tokens of others.
    """

    def __init__(self, num_threads: int) -> None:
        self._free = asyncio.Semaphore(num_threads)
        self._threads = CapacityLimiter(num_threads)

    async def run(self, work: Callable[..., R], *arguments: object) -> R:
        """Call `work` in a thread and return its result. Raises what it raises."""
        await self._free.acquire()
        start = time.perf_counter()
        try:
            return await to_thread.run_sync(partial(work, *arguments), limiter=self._threads)
        finally:
            duration = time.perf_counter() - start
            rest = 0.0 if duration < SHORT_CALL else min(REST_FACTOR * duration, MAX_REST)
            asyncio.get_running_loop().call_later(rest, self._free.release)


# ------------------------------------------------------------ file descriptors


def raise_descriptor_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def max_pending_connections() -> int:
    """Return how many connections may wait without a request, besides --max-connections."""
    return max(4, min(MAX_PENDING, _descriptor_limit() // 8))


def fit_connections(settings: Settings) -> Settings:
    """Lower `max_connections` to what the limit of open files allows, with a warning."""
    directory = Path("/proc/self/fd")
    used = len(os.listdir(directory)) if directory.is_dir() else SPARE_DESCRIPTORS
    limit = _descriptor_limit()
    allowed = max(1, limit - used - SPARE_DESCRIPTORS - SURPLUS - max_pending_connections())
    if allowed >= settings.max_connections:
        return settings
    log.warning(
        "this process may have %d files open, which is enough for %d connections and not for %d"
        " (--max-connections): raise the limit with ulimit -n",
        limit,
        allowed,
        settings.max_connections,
    )
    return replace(settings, max_connections=allowed)


def _descriptor_limit() -> int:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft
