"""Batch files in OpenAI's format: requests in, answers out, as many at once as the engine takes.

An answer is written whole as soon as it is there. What the output file holds already is not done
again, so an interrupted batch is simply started again; a line cut short by a crash is dropped and
done again."""

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
from forerun.server import api, errors, limits
from forerun.server.app import fingerprint, served_name
from forerun.server.errors import ApiError
from forerun.server.jobs import EngineService
from forerun.server.protocol import ChatRequest, CompletionRequest, ResponsesRequest
from forerun.server.responses import responses
from forerun.server.settings import Settings
from forerun.server.state import ServerState
from forerun.server.writing import content_of
from forerun.utils import UnreadableError, json_line, text_of

AGAIN = (429, 500, 503, 504)  # failures of the moment: such lines are done again
OURS = b'{"id": "batch_req_'
Handler = Callable[[ServerState, Any, Request], Awaitable[Response]]
ROUTES: dict[str, tuple[type[BaseModel], Handler]] = {
    "/v1/completions": (CompletionRequest, api.completions),
    "/v1/chat/completions": (ChatRequest, api.chat),
    "/v1/responses": (ResponsesRequest, responses),
}


def run(source: Path, target: Path, options: dict[str, Any]) -> None:
    """Answer every request of `source` that `target` has no answer to. Raises RequestError for
    files that are wrong."""
    jobs = read_jobs(source)
    done = resume(target)
    left = [job for job in jobs if job["custom_id"] not in done]
    print(
        f"forerun: {len(jobs)} requests, {len(jobs) - len(left)} answered before", file=sys.stderr
    )
    if left:
        with progress(quiet=False) as tell:
            tell("loading")
            asyncio.run(_work(LLM(**options), left, target, tell))


def read_jobs(source: Path) -> list[dict[str, Any]]:
    """The requests of a file, each checked for what every line needs. Raises RequestError naming
    the line."""
    jobs, seen = [], set()
    try:
        lines = text_of(source, largest=None).split("\n")  # no other separator ends a line
    except UnreadableError as error:
        raise RequestError(f"{source} cannot be read: {error}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            job = json.loads(line)
        except (ValueError, RecursionError):
            raise RequestError(f"{source}, line {number} is not JSON") from None
        if not isinstance(job, dict) or not isinstance(job.get("custom_id"), str):
            raise RequestError(
                f"{source}, line {number}: a request needs a custom_id, a url and a body"
            )
        if job["custom_id"] in seen:
            raise RequestError(
                f"{source}, line {number}: the custom_id {job['custom_id']!r} was there before"
            )
        seen.add(job["custom_id"])
        jobs.append(job)
    return jobs


def resume(target: Path) -> set[str]:
    """The custom ids that `target` has answers to; a last line that was cut short is taken off."""
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
    whole = content[: content.rfind(b"\n") + 1]
    try:
        lines = [json.loads(line) for line in whole.split(b"\n") if line.strip()]
        again = {line["custom_id"] for line in lines if line["response"]["status_code"] in AGAIN}
        done = {line["custom_id"] for line in lines} - again
        if not lines and not OURS.startswith(content[: len(OURS)]) and not content.startswith(OURS):
            raise ValueError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise RequestError(f"{target} exists and is no batch output: give another name") from None
    if again:
        fresh = target.with_name(f".{target.name}.new")
        kept = [json_line(line, ascii_only=True) for line in lines if line["custom_id"] in done]
        fresh.write_text("".join(f"{line}\n" for line in kept))
        fresh.replace(target)
    elif len(whole) < len(content):
        with target.open("r+b") as file:
            file.truncate(len(whole))
    return done


async def _work(llm: LLM, jobs: list[dict[str, Any]], target: Path, tell: Tell) -> None:
    settings = Settings()
    service = EngineService(llm, max_queue=1 << 20)
    kitchen = ServerState(service, served_name(llm, settings), fingerprint(llm), 0, 0)
    service.start()
    places = asyncio.Semaphore(2 * llm.config.max_rows)
    try:
        with target.open("a", encoding="utf-8") as file:
            done = 0
            tell(f"0 of {len(jobs)} requests", 0, len(jobs))

            async def one(job: dict[str, Any]) -> None:
                nonlocal done
                async with places:
                    answer = await _answer(kitchen, job)
                file.write(json_line(answer, ascii_only=True) + "\n")
                file.flush()
                done += 1
                tell(f"{done} of {len(jobs)} requests", done, len(jobs))

            async with asyncio.TaskGroup() as group:
                for job in jobs:
                    group.create_task(one(job))
    except* OSError as group_error:
        raise group_error.exceptions[0] from None
    finally:
        await asyncio.to_thread(service.stop)


async def _answer(kitchen: ServerState, job: dict[str, Any]) -> dict[str, Any]:
    """One line of output: the response as the server would have given it."""
    request_id = secrets.token_hex(8)
    try:
        if not isinstance(job.get("url"), str) or job["url"] not in ROUTES:
            raise ApiError(404, f"there is no {job.get('url')!r} here: {', '.join(ROUTES)}", "url")
        kind, handler = ROUTES[job["url"]]
        if not isinstance(job.get("body"), dict):
            raise ApiError(400, "a request needs a body that is an object", "body")
        body = job["body"] | {"stream": False}
        request = kind.model_validate(limits.parse(json.dumps(body).encode()))
        response = await handler(kitchen, request, _nobody(job["url"]))
        status, content = response.status_code, json.loads(content_of(response))
    except RecursionError:
        status, content = errors.body(
            ApiError(400, "the body is too deep: send less of it", "body")
        )
    except ValidationError as error:
        status, content = errors.body(RequestValidationError(error.errors()))
    except Exception as error:
        status, content = errors.logged_body(error)
    return {
        "id": f"batch_req_{request_id}",
        "custom_id": job["custom_id"],
        "response": {"status_code": status, "request_id": request_id, "body": content},
        "error": None,
    }


def _nobody(path: str) -> Request:
    """A request of a client that never goes away."""

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    return Request({"type": "http", "method": "POST", "path": path, "headers": []}, receive)
