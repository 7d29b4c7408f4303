"""Batch files in OpenAI's format: a request on every line, answered with as many at once as fit.

Each response is written as soon as it is complete. Lines that the output file answers already are
skipped, so an interrupted batch is continued by starting it again; a line that was cut short by a
crash is dropped and done again.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.responses import Response

from forerun.cli.progress import Tell, progress
from forerun.errors import RequestError
from forerun.llm import LLM
from forerun.server import errors, limits, openai
from forerun.server.app import fingerprint, served_name
from forerun.server.errors import ApiError
from forerun.server.jobs import EngineService
from forerun.server.large_responses import body_of
from forerun.server.protocol import ChatRequest, CompletionRequest, ResponsesRequest
from forerun.server.responses import responses
from forerun.server.settings import Settings
from forerun.server.state import ServerState
from forerun.utils import UnreadableError, json_line, text_of

Json = dict[str, Any]
RETRIED = (429, 500, 503, 504)  # statuses of temporary failures: their lines are done again
PREFIX = b'{"id": "batch_req_'  # of every line of an output file
Handler = Callable[[ServerState, Any, Request], Awaitable[Response]]
ROUTES: dict[str, tuple[type[BaseModel], Handler]] = {
    "/v1/completions": (CompletionRequest, openai.completions),
    "/v1/chat/completions": (ChatRequest, openai.chat),
    "/v1/responses": (ResponsesRequest, responses),
}


def run(source: Path, target: Path, options: Json) -> None:
    """Answer the requests of `source` that `target` has no response to.

    `options` are those of `LLM`. Raises RequestError for files that are wrong.
    """
    requests = read_requests(source)
    done = _resume(target)
    left = [request for request in requests if request["custom_id"] not in done]
    num_done = len(requests) - len(left)
    print(f"forerun: {len(requests)} requests, {num_done} answered before", file=sys.stderr)
    if left:
        with progress(quiet=False) as tell:
            tell("loading")
            asyncio.run(run_requests(LLM(**options), left, target, tell))


def read_requests(source: Path) -> list[Json]:
    """Return the requests of a file. Raises RequestError naming the line that is wrong."""
    try:
        lines = text_of(source, largest=None).split("\n")  # no other separator ends a line
    except UnreadableError as error:
        raise RequestError(f"{source} cannot be read: {error}") from None
    requests: dict[str, Json] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{source}, line {number}"
        try:
            request = json.loads(line)
        except (ValueError, RecursionError):
            raise RequestError(f"{where} is not JSON") from None
        if not isinstance(request, dict) or not isinstance(request.get("custom_id"), str):
            raise RequestError(f"{where}: a request needs a custom_id, a url and a body")
        if request["custom_id"] in requests:
            raise RequestError(f"{where}: the custom_id {request['custom_id']!r} is used twice")
        requests[request["custom_id"]] = request
    return list(requests.values())


def _resume(target: Path) -> set[str]:
    """Return the custom ids that `target` has responses to, and drop incomplete lines from it."""
    if not target.exists():
        try:
            target.touch()
        except OSError as error:
            raise RequestError(f"{target} cannot be written: {error.strerror}") from None
        return set()
    try:
        content = target.read_bytes()
    except OSError as error:
        raise RequestError(f"{target} cannot be read: {error.strerror}") from None
    complete = content[: content.rfind(b"\n") + 1]
    try:
        lines = [json.loads(line) for line in complete.split(b"\n") if line.strip()]
        retried = {
            line["custom_id"] for line in lines if line["response"]["status_code"] in RETRIED
        }
        done = {line["custom_id"] for line in lines} - retried
        start = content[: len(PREFIX)]
        if not lines and start != PREFIX[: len(start)]:  # a file of another kind without a newline
            raise ValueError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise RequestError(f"{target} exists and is no batch output: give another name") from None
    if retried:
        kept = [json_line(line, ascii_only=True) for line in lines if line["custom_id"] in done]
        new = target.with_name(f".{target.name}.new")
        new.write_text("".join(f"{line}\n" for line in kept))
        new.replace(target)
    elif len(complete) < len(content):
        with target.open("r+b") as file:
            file.truncate(len(complete))
    return done


async def run_requests(llm: LLM, requests: list[Json], target: Path, tell: Tell) -> None:
    """Append the responses to `target`, each as soon as it is complete. Raises OSError."""
    service = EngineService(llm, max_queue=1 << 20)
    state = ServerState(service, served_name(llm, Settings()), fingerprint(llm), 0, 0)
    service.start()
    slots = asyncio.Semaphore(2 * llm.config.max_rows)
    num_done = 0
    try:
        with target.open("a", encoding="utf-8") as file:
            tell(f"0 of {len(requests)} requests", 0, len(requests))

            async def answer(request: Json) -> None:
                nonlocal num_done
                async with slots:
                    line = await _answer(state, request)
                file.write(json_line(line, ascii_only=True) + "\n")
                file.flush()
                num_done += 1
                tell(f"{num_done} of {len(requests)} requests", num_done, len(requests))

            async with asyncio.TaskGroup() as group:
                for request in requests:
                    group.create_task(answer(request))
    except* OSError as group_error:
        raise group_error.exceptions[0] from None
    finally:
        await asyncio.to_thread(service.stop)


async def _answer(state: ServerState, request: Json) -> Json:
    request_id = secrets.token_hex(8)
    url = request.get("url")
    try:
        if not isinstance(url, str) or url not in ROUTES:
            raise ApiError(404, f"a batch has no {url!r}, only {', '.join(ROUTES)}", "url")
        if not isinstance(request.get("body"), dict):
            raise ApiError(400, "a request needs a body that is an object", "body")
        model, handler = ROUTES[url]
        content = json.dumps(request["body"] | {"stream": False}).encode()
        response = await handler(state, model.model_validate(limits.parse(content)), _http(url))
        status, body = response.status_code, json.loads(body_of(response))
    except RecursionError:
        deep = ApiError(400, "the body is too deeply nested", "body")
        status, body = errors.body(deep)
    except ValidationError as error:
        status, body = errors.body(RequestValidationError(error.errors()))
    except Exception as error:
        status, body = errors.logged_body(error)
    return {
        "id": f"batch_req_{request_id}",
        "custom_id": request["custom_id"],
        "response": {"status_code": status, "request_id": request_id, "body": body},
        "error": None,
    }


def _http(path: str) -> Request:
    """Return a request whose client never disconnects."""

    async def receive() -> Json:
        await asyncio.Event().wait()
        return {}

    return Request({"type": "http", "method": "POST", "path": path, "headers": []}, receive)
