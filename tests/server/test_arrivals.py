"""Connections wait for their first request outside asyncio: which of them are handed on, refused or
closed."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

pytest.importorskip("fastapi")

from forerun.server import arrivals
from forerun.server.arrivals import Arrivals

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def request(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


class Fixture:
    """A listening socket, its clients, and the requests that were handed on, in order."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack
        self.listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=64))
        self.handed: list[str] = []

    def begin(self, seconds: float = 10.0, most: int = 64) -> Arrivals:
        return Arrivals(self.listener, self.make, seconds, most)

    def make(self, received: bytes) -> asyncio.Protocol:
        self.handed.append(received.split()[1].decode())
        return asyncio.Protocol()

    def client(self, said: bytes) -> socket.socket:
        client = self.stack.enter_context(socket.create_connection(self.listener.getsockname()))
        client.sendall(said)
        return client


def run(scenario: Callable[[Fixture], Any]) -> None:
    async def main() -> None:
        with ExitStack() as stack:
            await scenario(Fixture(stack))

    asyncio.run(asyncio.wait_for(main(), 20))


async def until(true: Callable[[], object]) -> None:
    while not true():
        await asyncio.sleep(0.001)


async def answer(client: socket.socket) -> bytes:
    """All that a client is sent until its connection ends."""
    client.setblocking(False)
    loop, parts = asyncio.get_running_loop(), [b""]
    while part := await loop.sock_recv(client, 4096):
        parts.append(part)
    return b"".join(parts)


def test_whole_requests_are_handed_on_in_order_and_health_before_them() -> None:
    async def scenario(f: Fixture) -> None:
        for path in ("/a", "/b", "/c"):
            f.client(request(path))
        f.client(HEALTH)
        waiting = f.begin()
        await until(lambda: len(f.handed) == 4)
        assert f.handed == ["/health", "/a", "/b", "/c"]
        waiting.close()

    run(scenario)


def test_a_client_that_has_left_is_not_worked_for() -> None:
    async def scenario(f: Fixture) -> None:
        f.client(request("/left")).close()
        f.client(request("/here"))
        waiting = f.begin()
        await until(lambda: f.handed)
        assert f.handed == ["/here"] and not waiting._whole
        waiting.close()

    run(scenario)


def test_headers_in_pieces_are_put_together() -> None:
    async def scenario(f: Fixture) -> None:
        waiting = f.begin()
        whole = request("/pieces").replace(
            b"\r\n\r\n", b"\r\nX: " + b"x" * 3 * arrivals.PIECE + b"\r\n\r\n"
        )
        client = f.client(whole[:30])
        await until(lambda: any(arrival.received for arrival in waiting._waiting))
        client.sendall(whole[30:])
        await until(lambda: f.handed)
        assert f.handed == ["/pieces"]
        waiting.close()

    run(scenario)


def test_more_whole_requests_than_there_is_room_for_are_told_so_but_for_health() -> None:
    async def scenario(f: Fixture) -> None:
        waiting = f.begin(most=2)
        go_on, waiting._go_on = waiting._go_on, lambda: None  # type: ignore[method-assign]
        for path in ("/a", "/b"):
            f.client(request(path))
        await until(lambda: len(waiting._whole) == 2)
        said = await answer(f.client(request("/c")))
        assert said.startswith(b"HTTP/1.1 503") and b"--max-connections" in said
        f.client(HEALTH)
        await until(lambda: len(waiting._whole) == 3)
        waiting._go_on = go_on  # type: ignore[method-assign]
        go_on()
        await until(lambda: len(f.handed) == 3)
        assert f.handed == ["/health", "/a", "/b"]
        waiting.close()

    run(scenario)


def test_whoever_sends_nothing_or_half_a_request_is_timed_out() -> None:
    async def scenario(f: Fixture) -> None:
        silent, half = f.client(b""), f.client(b"GET / HTTP/1.1\r\nHost")
        waiting = f.begin(seconds=0.05)
        assert await answer(silent) == b""
        assert (await answer(half)).startswith(b"HTTP/1.1 408")
        waiting.close()

    run(scenario)


def test_without_descriptors_the_oldest_makes_room_and_accepting_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(f: Fixture) -> None:
        oldest = f.client(b"")
        waiting = f.begin()
        await until(lambda: waiting._waiting)
        real, left = waiting.listener, [2]

        class Exhausted:
            """Two times there is no descriptor: once while a client waits, once while none does."""

            def fileno(self) -> int:
                return real.fileno()

            def accept(self) -> Any:
                if left[0]:
                    left[0] -= 1
                    raise OSError(errno.EMFILE, "Too many open files")
                return real.accept()

        waiting.listener = Exhausted()  # type: ignore[assignment]
        f.client(request("/later"))
        assert await answer(oldest) == b""
        await until(lambda: f.handed)
        assert f.handed == ["/later"] and left == [0]
        waiting.close()

    with caplog.at_level(logging.ERROR):
        run(scenario)
    assert caplog.text.count("no file descriptor") == 2


def test_closing_leaves_no_connection_open() -> None:
    async def scenario(f: Fixture) -> None:
        silent = f.client(b"")
        waiting = f.begin()
        await until(lambda: waiting._waiting)
        waiting.close()
        assert await answer(silent) == b""

    run(scenario)
