"""Running a request: submit it, and send its outputs as one JSON body or as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from typing import Any, ClassVar

from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from forerun.server import fields, large_responses
from forerun.server.jobs import EngineService, Job, RequestHandle
from forerun.server.large_responses import check_size, choice_size
from forerun.server.outputs import Json, Output
from forerun.server.state import ServerState
from forerun.types import Event
from forerun.utils import json_line

CLIENT_CLOSED_REQUEST = 499  # nginx's status for a client that did not wait


class Formatter:
    """Writes the outputs of one request in the format of one endpoint.

    Attributes:
        streams: whether the response is a stream.
        ignored: fields of the request that have no effect.
        terminator: the end of every stream, also of failed ones.
        token_ids: whether choices list their token ids.
        logprob_bytes: size of one log-probability, where they are written.
    """

    media_type = "text/event-stream"
    headers: ClassVar[dict[str, str]] = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    terminator = ""
    token_ids = False
    logprob_bytes = 0

    def __init__(self, streams: bool, ignored: Sequence[str]) -> None:
        self.streams = streams
        self.ignored = ignored

    def estimate_size(self, jobs: Sequence[Job], lengths: Sequence[int]) -> int:
        """Estimate the bytes of the response with this number of tokens for each job."""
        return sum(
            choice_size(job, count, self.logprob_bytes, self.token_ids)
            for job, count in zip(jobs, lengths, strict=True)
        )

    def full(self, outputs: Sequence[Output]) -> Json:
        """Return the body of a response that is not streamed."""
        raise NotImplementedError

    def begin(self, outputs: Sequence[Output]) -> Iterable[str]:
        """Return the chunks before the first event."""
        return ()

    def chunks(self, outputs: Sequence[Output], index: int, event: Event) -> Iterable[str]:
        """Return the chunks for an event that has just been added to the output at `index`."""
        raise NotImplementedError

    def end(self, outputs: Sequence[Output]) -> Iterable[str]:
        """Return the chunks after the last event."""
        return ()

    def error(self, error: Exception) -> str:
        """Return the chunk that reports the error that ends the stream."""
        raise NotImplementedError


def sse(value: Json) -> str:
    """Return a server-sent event."""
    return f"data: {json_line(value)}\n\n"


async def respond(
    state: ServerState, formatter: Formatter, jobs: Sequence[Job], http: Request
) -> Response:
    """Run the jobs and send their outputs. They are cancelled when the client disconnects."""
    service = state.service
    jobs = large_responses.limit_jobs(jobs, service.llm.room, formatter.estimate_size)
    group = await state.submit(jobs)
    response: Response
    if formatter.streams:
        try:
            await group.accepted()  # a refusal of the engine becomes the HTTP status
        except BaseException:
            service.cancel(group)
            raise
        chunks = _stream(service, formatter, group)
        response = StreamingResponse(
            chunks, media_type=formatter.media_type, headers=formatter.headers
        )
    else:
        try:
            response = await unless_disconnected(http, _full(state, formatter, group))
        finally:
            service.cancel(group)
    return with_ignored(response, formatter.ignored)


async def _full(state: ServerState, formatter: Formatter, group: RequestHandle) -> Response:
    outputs = [Output(job) for job in group.jobs]
    characters = 0
    await group.accepted()
    async for job, event in group.events():
        outputs[job.index].add(event)
        characters += len(event.text)
        check_size(characters, "its tokens are longer than usual: give a lower max_tokens or n")
    jobs = [output.job for output in outputs]
    size = formatter.estimate_size(jobs, [len(output.token_ids) for output in outputs])
    return await state.write(lambda: formatter.full(outputs), size)


async def _stream(
    service: EngineService, formatter: Formatter, group: RequestHandle
) -> AsyncIterator[str]:
    outputs = [Output(job) for job in group.jobs]
    try:
        for chunk in formatter.begin(outputs):
            yield chunk
        async for job, event in group.events():
            outputs[job.index].add(event)
            for i, chunk in enumerate(formatter.chunks(outputs, job.index, event)):
                if i:
                    await asyncio.sleep(0)  # an echo has many chunks: let other requests run
                yield chunk
        for chunk in formatter.end(outputs):
            yield chunk
    except Exception as error:
        yield formatter.error(error)
    finally:
        service.cancel(group)
    if formatter.terminator:
        yield formatter.terminator


def with_ignored(response: Response, ignored: Sequence[str]) -> Response:
    """Add the header that names fields of the request without effect."""
    if ignored:
        response.headers[fields.HEADER] = ", ".join(ignored)
    return response


async def unless_disconnected(http: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Return the response of `work`; cancel it as soon as the client disconnects."""
    task = asyncio.ensure_future(work)
    disconnected = asyncio.ensure_future(_wait_for_disconnect(http))
    try:
        await asyncio.wait((task, disconnected), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        for pending in (task, disconnected):
            pending.cancel()


async def _wait_for_disconnect(http: Request) -> None:
    while not await http.is_disconnected():
        await asyncio.sleep(0.1)
