"""Requests over a socket: what an application says arrives as it is, and whoever goes away is
missed."""

import asyncio
from array import array
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from forerun import RequestError
from forerun.cluster.envelope import Envelope
from forerun.cluster.relay import LostError
from forerun.cluster.sharing import Heard
from forerun.cluster.wire import Line, Listener, place, tell
from forerun.server.tenants import CALLER, Caller

SCOPE = {"method": "POST", "path": "/v1/completions", "headers": []}
START = {"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]}


def envelope(body: bytes = b"") -> Envelope:
    return Envelope("one", dict(SCOPE), body, Caller("ann"))


def piece(text: str, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text.encode(), "more_body": more}


async def no_text(heard: Heard) -> None:
    raise AssertionError(heard)


@asynccontextmanager
async def listening(app: ASGIApp, directory: Path) -> AsyncGenerator[tuple[Listener, Path], None]:
    listener, path = Listener(app, no_text), place(str(directory), "r1")
    assert path
    await listener.start(path)
    try:
        yield listener, path
    finally:
        await listener.close()


async def answer_of(path: Path, asked: Envelope) -> list[Any]:
    line = await Line.to(path)
    assert line
    return [message async for messages in line.ask(asked) for message in messages]


def test_an_answer_arrives_as_it_was_said(tmp_path: Path) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive())["body"]
        assert scope["type"] == "http" and scope["path"] == "/v1/completions"
        await send(START)
        await send(piece(f"{len(body)} of {CALLER.get().tenant} "))
        await send(piece("end", more=False))

    async def check() -> None:
        async with listening(app, tmp_path) as (_, path):
            found = await answer_of(path, envelope(b"x" * 3_000_000))
            assert found == [START, piece("3000000 of ann "), piece("end", more=False)]

    asyncio.run(check())


def test_pieces_arrive_before_the_end(tmp_path: Path) -> None:
    async def check() -> None:
        first_seen = asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await send(START)
            await send(piece("first"))
            await first_seen.wait()
            await send(piece("last", more=False))

        async with listening(app, tmp_path) as (_, path):
            line = await Line.to(path)
            assert line
            async for messages in line.ask(envelope()):
                if piece("first") in messages:
                    first_seen.set()
            assert first_seen.is_set()

    asyncio.run(asyncio.wait_for(check(), 30))


def test_an_application_waits_for_whoever_reads_its_answer(tmp_path: Path) -> None:
    """What a replica says was kept without end where the client behind the door does not read."""

    async def check() -> None:
        said = [0]

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await send(START)
            for _ in range(200):
                await send(piece("x" * 100_000))
                said[0] += 1
            await send(piece("end", more=False))

        async with listening(app, tmp_path) as (_, path):
            line = await Line.to(path)
            assert line
            async with aclosing(line.ask(envelope())) as answer:
                found = await anext(answer)
                before = -1
                while said[0] > before:  # until it says no more
                    before = said[0]
                    await asyncio.sleep(0.2)
                assert said[0] < 100
                async for messages in answer:
                    found += messages
            assert found == [START, *[piece("x" * 100_000)] * 200, piece("end", more=False)]

    asyncio.run(asyncio.wait_for(check(), 30))


def waiting_app(left: asyncio.Event) -> ASGIApp:
    """Says something, then waits; `left` is when it is ended."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send(START)
        try:
            await receive()
        finally:
            left.set()

    return app


def test_a_client_that_goes_away_ends_the_work(tmp_path: Path) -> None:
    async def check() -> None:
        left = asyncio.Event()
        async with listening(waiting_app(left), tmp_path) as (listener, path):
            line = await Line.to(path)
            assert line
            async with aclosing(line.ask(envelope())) as answer:
                await anext(answer)
            await listener.ended("one")
            await left.wait()

    asyncio.run(asyncio.wait_for(check(), 30))


@pytest.mark.parametrize("said", [False, True])
def test_a_replica_that_dies_is_lost(tmp_path: Path, said: bool) -> None:
    async def dies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if said:
            await reader.read(1)
            writer.write((100).to_bytes(8, "big") + b"half of it")
        writer.transport.abort()

    async def check() -> None:
        async with await asyncio.start_unix_server(dies, tmp_path / "r1"):
            with pytest.raises(LostError):
                await answer_of(tmp_path / "r1", envelope())

    asyncio.run(asyncio.wait_for(check(), 30))


def test_an_application_that_fails_ends_its_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        raise RuntimeError("no")

    async def check() -> None:
        async with listening(app, tmp_path) as (_, path):
            assert await answer_of(path, envelope()) == [START]

    asyncio.run(asyncio.wait_for(check(), 30))
    assert "a request failed" in caplog.text


def test_a_text_that_cannot_be_remembered_is_said_and_does_no_harm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def refuses(heard: Heard) -> None:
        raise RequestError("it has tokens that nobody has")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        await send(piece("whole", more=False))

    async def check() -> None:
        listener, path = Listener(app, refuses), tmp_path / "r1"
        await listener.start(path)
        await tell(path, Heard("m", "ann", array("q", [1])))
        while "nobody has" not in caplog.text:
            await asyncio.sleep(0.01)
        assert await answer_of(path, envelope()) == [START, piece("whole", more=False)]
        await listener.close()

    asyncio.run(asyncio.wait_for(check(), 30))


def test_the_end_waits_for_what_is_in_work_and_takes_nothing_new(tmp_path: Path) -> None:
    async def check() -> None:
        go = asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await send(START)
            await go.wait()
            await send(piece("whole", more=False))

        async with listening(app, tmp_path) as (listener, path):
            line = await Line.to(path)
            assert line
            answer = line.ask(envelope())
            assert await anext(answer) == [START]
            closing = asyncio.ensure_future(listener.close())
            await asyncio.sleep(0)
            assert await Line.to(path) is None
            assert not closing.done()
            go.set()
            assert [m async for messages in answer for m in messages] == [
                piece("whole", more=False)
            ]
            await closing

    asyncio.run(asyncio.wait_for(check(), 30))


def test_where_nobody_can_listen_there_is_no_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def check(path: Path | None) -> None:
        listener = Listener(waiting_app(asyncio.Event()), no_text)
        await listener.start(path)
        assert await Line.to(path) is None
        await listener.ended("one")
        await listener.close()

    taken = tmp_path / "taken"
    taken.mkdir()
    asyncio.run(check(taken))
    assert "goes through Ray" in caplog.text
    long = place(str(tmp_path / ("x" * 120)), "r1")
    assert long is None
    asyncio.run(check(long))
    asyncio.run(check(tmp_path / "on another machine" / "r1"))
