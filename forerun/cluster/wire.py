"""Requests and answers over a socket, between a door and replicas on the same machine.

A call of Ray's takes milliseconds, and so does each piece of its answer: as long as a token of a
small model. So Ray starts replicas, watches them and counts what they work on, and what is asked
and answered goes past it. The sockets lie in a directory that only one user may enter, which is all
that keeps strangers away: what comes is believed."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message

from forerun.cluster.envelope import Envelope, answers
from forerun.cluster.relay import LostError
from forerun.cluster.sharing import Heard
from forerun.errors import ForerunError, one_line

log = logging.getLogger("forerun.server")
SIZE = 8  # bytes that say how long what follows is
HURRY = 1.0  # seconds for another replica to take a text
LONGEST_PATH = 100  # bytes of the name of a socket that every system takes


def place(directory: str, replica: str) -> Path | None:
    """Where a replica listens; None where no socket can have such a name."""
    path = Path(directory, replica)
    return path if len(os.fsencode(path)) <= LONGEST_PATH else None


@dataclass(slots=True)
class Line:
    """A connection to a replica, for one request."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    async def to(cls, path: Path | None) -> Line | None:
        """Connected to whoever listens there; None where nobody does."""
        if path is None:
            return None
        try:
            return cls(*await asyncio.open_unix_connection(path))
        except OSError:
            return None

    async def ask(self, envelope: Envelope) -> AsyncGenerator[list[Message], None]:
        """What the replica answers. Raises LostError when it is no more. Closed early, the replica
        is told."""
        try:
            await _write(self.writer, envelope)
            while messages := await _read(self.reader):
                yield messages
        except (OSError, EOFError):
            raise LostError from None
        finally:
            self.writer.close()


async def tell(path: Path, heard: Heard) -> None:
    """Let whoever listens there know of a text, if that goes quickly."""
    with suppress(OSError):  # TimeoutError is one
        async with asyncio.timeout(HURRY):
            _, writer = await asyncio.open_unix_connection(path)
            try:
                await _write(writer, heard)
            finally:
                writer.close()


class Listener:
    """Answers what comes over a replica's socket."""

    def __init__(self, app: ASGIApp, hear: Callable[[Heard], Awaitable[None]]) -> None:
        """`hear` takes texts of other replicas."""
        self._app, self._hear = app, hear
        self._work: dict[str, asyncio.Event] = {}  # whether a request has ended
        self._server: asyncio.Server | None = None
        self._path: Path | None = None

    async def start(self, path: Path | None) -> None:
        """Listen, if that can be done there: what is asked goes through Ray else, as where the door
        is on another machine."""
        if path is None or not path.parent.is_dir():
            return
        try:
            self._server, self._path = await asyncio.start_unix_server(self._answer, path), path
        except OSError as error:
            log.warning(
                "no socket at %s, what is asked goes through Ray: %s", path, one_line(str(error))
            )

    async def spread(self, heard: asyncio.Queue[Heard]) -> None:
        """Tell all other replicas that listen beside this one, one text after the other, for
        ever."""
        while self._path is not None:
            text = await heard.get()
            others = [
                other
                for other in self._path.parent.iterdir()
                if other != self._path and other.is_socket()
            ]
            await asyncio.gather(*(tell(other, text) for other in others))

    async def ended(self, request: str) -> None:
        """Returns when there is nothing left to do for a request."""
        if request in self._work:
            await self._work[request].wait()

    async def close(self) -> None:
        """Take no more requests, and wait for those that are in work."""
        if self._server is None or self._path is None:
            return
        self._server.close()
        self._path.unlink(missing_ok=True)
        for ended in list(self._work.values()):
            await ended.wait()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(OSError, EOFError):
            envelope: Envelope | Heard = await _read(reader)
            if isinstance(envelope, Heard):
                await self._heard(envelope)
                return
            ended = self._work[envelope.id] = asyncio.Event()
            work = asyncio.ensure_future(self._written(envelope, writer))
            gone = asyncio.ensure_future(
                reader.read(1)
            )  # nothing more is said: what comes is the end
            try:
                await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (work, gone):
                    task.cancel()
                await asyncio.gather(work, gone, return_exceptions=True)
                del self._work[envelope.id]
                ended.set()

    async def _heard(self, heard: Heard) -> None:
        try:
            await self._hear(heard)
        except ForerunError as error:
            log.error("a text of another replica was not remembered: %s", error)

    async def _written(self, envelope: Envelope, writer: asyncio.StreamWriter) -> None:
        try:
            async with aclosing(answers(self._app, envelope)) as answer:
                async for messages in answer:
                    await _write(writer, messages)
        except OSError:  # the door has gone
            return
        except Exception as error:
            log.error("a request failed", exc_info=error)
        await _write(writer, [])


async def _write(writer: asyncio.StreamWriter, what: Any) -> None:
    data = pickle.dumps(what, pickle.HIGHEST_PROTOCOL)
    writer.write(len(data).to_bytes(SIZE, "big") + data)
    await writer.drain()


async def _read(reader: asyncio.StreamReader) -> Any:
    """Raises EOFError (IncompleteReadError is one) where the other side has gone."""
    size = int.from_bytes(await reader.readexactly(SIZE), "big")
    return pickle.loads(await reader.readexactly(size))
