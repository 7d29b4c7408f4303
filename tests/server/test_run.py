"""Clients that occupy connections: slow headers, bodies and readers, and too many clients."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import logging
import socket
import struct
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from forerun.llm import LLM
from forerun.server import jobs, limits, run
from forerun.server.acceptor import RECEIVE_BYTES, Acceptor
from forerun.server.run import ConnectionPool, Phase
from forerun.server.settings import Settings
from tests.server.serving import (
    REQUEST,
    Serving,
    connected,
    engine_blocked,
    post,
    post_headers,
    received,
    serving,
    slow,
    small_buffer_listener,
    until,
)

LONG = {"prompt": "x = 1\n", "ignore_eos": True, "speculative": False, "stream": True}
STREAM = LONG | {"max_tokens": 1900}
SHORT = 0.1
HEADERS = post_headers(None)
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = HEADERS + b"Transfer-Encoding: chunked\r\n"
CLOSE = b"Connection: close\r\n"


def error_of(answer: bytes) -> str:
    """Return status and message of an error response."""
    headers, _, body = answer.partition(b"\r\n\r\n")
    message = json.loads(body)["error"]["message"]
    assert len(message.splitlines()) == 1, headers
    return f"{headers.split()[1].decode()} {message}"


def answer_to(s: Serving, sent: bytes) -> bytes:
    with connected(s, sent) as connection:
        return received(connection)


def trickled(connection: socket.socket, piece: bytes) -> bytes:
    """Send a piece repeatedly until the server answers; return the answer."""
    connection.settimeout(SHORT / 10)
    for count in range(1000):
        connection.sendall(piece)
        try:
            first = connection.recv(4096)
        except TimeoutError:
            continue
        assert count > 5, "it was refused too early"
        connection.settimeout(20)
        return first + received(connection)
    raise AssertionError("it was never refused")


def num_open(s: Serving) -> int:
    return len(s.server.server_state.connections)


@pytest.fixture(scope="module")
def shared(spare: LLM) -> Iterator[Serving]:
    """A server for tests whose clients are refused or send a single request."""
    with serving(spare) as s:
        yield s


# ------------------------------------------------------------ deadlines of headers and bodies


def test_incomplete_headers_expire(spare: LLM) -> None:
    with serving(spare, header_timeout=SHORT) as s:
        long = HEALTH + b"X: " + b"a" * 9000
        for sent in (b"GET /hea", HEADERS, long):
            assert error_of(answer_to(s, sent)).startswith("408 ")
        assert answer_to(s, b"") == b"" and s.complete()["choices"]
        for more in (b"GET /hea", b"GET /health HTTP/1.1\r\n"):  # the second request expires too
            answers = answer_to(s, HEALTH + b"\r\n" + more)
            assert answers.startswith(b"HTTP/1.1 200") and b"HTTP/1.1 408" in answers
        with connected(s, post_headers(1_000_000, "/nowhere")) as connection:  # before its body
            assert connection.recv(12) == b"HTTP/1.1 404"
            until(lambda: not num_open(s), "the rest of the body expires", timeout=5)
        with connected(s) as other:
            with engine_blocked(s.service), connected(s, post(REQUEST)) as connection:
                assert received(other) == b"", "a running request would have expired by now"
                until(lambda: s.service.jobs, "it is accepted")
            with connected(s, post(REQUEST)) as connection:
                assert connection.recv(12) == b"HTTP/1.1 200"


def test_trickling_does_not_move_the_deadlines(spare: LLM) -> None:
    with serving(spare, header_timeout=3 * SHORT, body_timeout=3 * SHORT) as s:
        for sent, piece in ((HEADERS, b"X: y\r\n"), (post_headers(9999), b" ")):
            with connected(s, sent) as connection:
                assert error_of(trickled(connection, piece)).startswith("408 ")


def test_incomplete_bodies_expire(spare: LLM) -> None:
    with serving(spare, body_timeout=SHORT, header_timeout=SHORT) as s:
        for path in ("/v1/completions", "/tokenize", "/api/chat"):
            answer = answer_to(s, post(REQUEST, 1000, path))
            assert b"HTTP/1.1 408" in answer and b"--body-timeout" in answer, path
        assert s.complete()["choices"] and not s.logged


# ------------------------------------------------------------ size of headers and framing


def chunks(content: bytes, size: int, extension: bytes = b"") -> bytes:
    pieces = [content[at : at + size] for at in range(0, len(content), size)]
    lines = [b"%x%s\r\n%s\r\n" % (len(piece), extension, piece) for piece in pieces]
    return b"".join(lines) + b"0\r\n\r\n"


def padded(length: int) -> bytes:
    return json.dumps(REQUEST | {"user": "x" * length}).encode()


@pytest.mark.parametrize(
    "more",
    [b"X: y\r\n" * 2000, b":\r\n" * 5000, b"A:\r\n " * 3000, b"X: " + b"a" * 20_000, b"X: y\r\n" * 101],
    ids=["many", "without names", "folded", "long", "one too many"],
)  # fmt: skip
@pytest.mark.parametrize("end", [b"\r\n\r\n", b""], ids=["complete", "without an end"])
def test_headers_are_bounded_before_they_are_parsed(
    shared: Serving, more: bytes, end: bytes
) -> None:
    answer = answer_to(shared, HEALTH + more + end)
    assert error_of(answer).startswith("431 a request has at most 100 headers")


def test_headers_as_clients_send_them(shared: Serving) -> None:
    more = b"X-Trace: 0123456789abcdef\r\n" * 90 + b"Cookie: " + b"a" * 8000 + b"\r\n\r\n"
    assert answer_to(shared, HEALTH + CLOSE + more).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("length", "size", "extension", "fits"),
    [
        (40_000, 1, b"", False),
        (40_000, 2, b"", False),
        (4_000, 1, b";x=" + b"y" * 200, False),
        (40_000, 64, b";" + b"y" * 300, False),
        (8_000, 8, b"", True),
        (90_000, 128, b"", True),
        (90_000, 16_384, b"", True),
    ],
)
def test_the_framing_of_chunks_is_bounded(
    shared: Serving, length: int, size: int, extension: bytes, fits: bool
) -> None:
    answer = answer_to(shared, CHUNKED + CLOSE + b"\r\n" + chunks(padded(length), size, extension))
    if fits:
        assert answer.startswith(b"HTTP/1.1 200"), answer[:300]
    else:
        assert error_of(answer).startswith("400 the body comes in too many small chunks")
        assert shared.complete()["choices"] and not shared.logged


def test_trailers_are_ignored_and_bounded(shared: Serving) -> None:
    sent = CHUNKED + CLOSE + b"\r\n" + chunks(padded(0), 1000).removesuffix(b"\r\n")
    answer = answer_to(shared, sent + b"Host: elsewhere.example\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200")
    assert error_of(answer_to(shared, sent + b"X: y\r\n" * 8000)).startswith("400 ")


def test_keys_are_checked_before_a_body_is_read(spare: LLM) -> None:
    half = CHUNKED + b"\r\n5\r\nhello\r\n"
    with serving(spare, api_key=("k",)) as s, connected(s, half) as connection:
        assert connection.recv(12) == b"HTTP/1.1 401"
        connection.sendall(b"1\r\nx\r\n" * 20_000)
        until(lambda: not num_open(s), "it is closed", timeout=5)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"GET /health HTTP/1.1\nHost: localhost\n\n",
        b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost localhost\r\n\r\n",
        HEADERS + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEADERS + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        HEADERS + b"Content-Length: -1\r\n\r\n",
        CHUNKED + b"\r\nx\r\n",
    ],
)
def test_invalid_http_is_refused_at_once(shared: Serving, sent: bytes) -> None:
    assert error_of(answer_to(shared, sent)) == "400 this is no HTTP/1.1 request"
    assert not shared.logged


def test_pipelined_requests_are_answered_in_turn(shared: Serving) -> None:
    """Empty lines between requests are allowed; a chunked body ends the connection."""
    twice = post(REQUEST) + b"\r\n" + post(REQUEST)
    both = answer_to(shared, twice + b"GET /nowhere HTTP/1.0\r\n\r\n")
    assert both.count(b"HTTP/1.1 200") == 2 and both.count(b"HTTP/1.1 404") == 1
    answer = answer_to(shared, CHUNKED + b"\r\n" + chunks(padded(0), 1000) + HEALTH + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 200") and answer.count(b"HTTP/1.1") == 1
    assert b"connection: close" in answer and not shared.logged


@pytest.mark.parametrize("chunked", [False, True])
def test_an_upgrade_is_ignored(shared: Serving, chunked: bool) -> None:
    """Java's client asks for HTTP/2 in its first request, and the parser would skip its body."""
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAA\r\n"
    body = chunks(padded(0), 1000) if chunked else padded(0)
    framing = (
        b"Transfer-Encoding: chunked\r\n" if chunked else b"Content-Length: %d\r\n" % len(body)
    )
    with connected(shared, HEADERS + upgrade + framing + b"\r\n" + body) as connection:
        assert b"HTTP/1.1 200" in received(connection, b"usage")
        connection.sendall(HEALTH + upgrade.replace(b"Upgrade,", b"close, Upgrade,") + b"\r\n")
        assert b"HTTP/1.1 200" in received(connection)


# ------------------------------------------------------------ order of parsing


class FakeConnection:
    """A connection that has received data to parse."""

    def __init__(self, name: str, phase: Phase, later: list[Any], parse: Callable[[Any], None]):
        self.name, self.phase, self.queued = name, phase, False
        self.is_health = name.startswith("health")
        self.loop = type("Loop", (), {"call_soon": staticmethod(later.append)})
        self.aborted = False
        self.transport = self
        self.parse = lambda: parse(self)

    def abort(self) -> None:
        self.aborted = True


def parsed_by_iteration(later: list[Callable[[], None]], parsed: list[str]) -> list[list[str]]:
    """Run the iterations of an event loop; return the names parsed in each."""
    iterations = []
    while later:
        parsed.clear()
        later.pop(0)()
        iterations.append(list(parsed))
    return iterations


def test_one_request_starts_per_iteration_after_health_checks() -> None:
    """A connection that fails does not prevent the others from being parsed."""
    parsed: list[str] = []
    later: list[Callable[[], None]] = []
    pool: Any = ConnectionPool(Settings())

    def parse(connection: Any) -> None:
        if connection.name == "gone":
            raise OSError("not connected")
        connection.phase = Phase.COMPLETE
        parsed.append(connection.name)

    names = ("a", "gone", "b", "health 1", "health 2")
    fakes = [FakeConnection(name, Phase.HEADERS, later, parse) for name in names]
    for fake in fakes:
        pool.schedule(fake)
    assert parsed_by_iteration(later, parsed) == [["health 2", "health 1", "a"], ["b"]]
    assert [fake.name for fake in fakes if fake.aborted] == ["gone"]


def test_parsing_takes_a_bounded_time_in_an_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    parsed: list[str] = []
    later: list[Callable[[], None]] = []
    pool: Any = ConnectionPool(Settings())
    monkeypatch.setattr(run.time, "perf_counter", lambda: now[0])

    def parse(connection: Any) -> None:
        now[0] += 0.0005
        parsed.append(connection.name)
        pool.schedule(connection)

    for phase in (Phase.BODY, Phase.HEADERS):
        for i in range(100):
            pool.schedule(FakeConnection(f"{phase.name} {i}", phase, later, parse))
    for _ in range(50):
        start = now[0]
        (run_turns,) = later
        later.clear()
        run_turns()
        assert now[0] - start <= 0.0045
    assert len(set(parsed)) == 200, "every connection is parsed"


def test_clients_that_reset_refused_connections_do_not_block_others(shared: Serving) -> None:
    for _ in range(100):
        with connected(shared, HEALTH + b"X: y\r\n" * 2000) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert shared.http.get("/health").status_code == 200
    assert [record.exc_info for record in shared.logged] == []


# ------------------------------------------------------------ memory of bodies


def test_the_memory_of_all_bodies_is_bounded(spare: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small bodies are not counted, and a body counts until its request ends."""
    monkeypatch.setattr(limits, "UNCOUNTED", 1000)
    monkeypatch.setattr(run, "HIGH_WATER_LIMIT", 1000)
    large = {"prompt": "x " * 2400}
    with serving(spare, max_body=5000, max_bodies=6000) as s:

        def full() -> str:
            answer = s.http.post("/tokenize", json=large)
            if answer.status_code != 503:
                return ""
            assert answer.headers["retry-after"]
            return str(answer.json()["error"]["message"])

        with connected(s, post(large, 4990)), connected(s, post(large, 4990)):
            until(full, "they have arrived", timeout=5)
            assert full().startswith("the requests in work hold 6000 bytes")
            assert s.complete()["choices"]
        until(lambda: not full(), "there is room again", timeout=5)
        body = post(REQUEST | {"prompt": "x " * 900, "user": "x" * 2000})
        with engine_blocked(s.service), connected(s, body):
            until(lambda: s.service.jobs, "it is accepted")
            assert full()
        until(lambda: not full(), "the request has ended", timeout=5)


# ------------------------------------------------------------ number of connections


def is_closed(connection: socket.socket) -> bool:
    """Return True if the server has closed a connection without an answer."""
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True
    except BlockingIOError:
        return False


def test_connections_with_incomplete_requests_make_room(spare: LLM) -> None:
    with serving(spare, max_connections=3) as s, ExitStack() as stack:
        unfinished = [stack.enter_context(connected(s, post(REQUEST, 999))) for _ in range(3)]
        until(lambda: num_open(s) == 3, "they are open")
        assert s.complete()["choices"]
        assert received(unfinished[0]) == b"", "the connection that waited longest made room"
        for _ in range(3):
            assert answer_to(s, HEALTH + CLOSE + b"\r\n").startswith(b"HTTP/1.1 200")
        assert num_open(s) <= 3


@pytest.mark.parametrize("sent", [b"", HEADERS], ids=["nothing", "half of the headers"])
def test_connections_without_a_request_make_room(spare: LLM, sent: bytes) -> None:
    with serving(spare, max_connections=3) as s, ExitStack() as stack:
        silent = [stack.enter_context(connected(s, sent)) for _ in range(5)]
        for oldest in silent[:2]:
            until(lambda oldest=oldest: is_closed(oldest), "the oldest made room")
        assert s.complete()["choices"]
        assert len(s.server.acceptors[0]._waiting) <= 3


@pytest.fixture
def one_token_llm(spare: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """A model that emits one token per event."""
    monkeypatch.setattr(spare.engine.multi_step, "seconds", 0.0)
    return spare


def test_a_running_request_keeps_its_connection(one_token_llm: LLM) -> None:
    """A request with `Connection: close` is complete and does not count as waiting."""
    asked = post(LONG | {"max_tokens": 300}).replace(b"\r\n\r\n", b"\r\n" + CLOSE + b"\r\n", 1)
    with (
        serving(one_token_llm, max_connections=2) as s,
        slow(s.service, 0.003),
        connected(s, asked) as connection,
    ):
        until(lambda: s.service.jobs, "it is accepted")
        for _ in range(4):
            with connected(s):
                until(lambda: num_open(s) <= 2, "there is room")
        assert received(connection, b"[DONE]").count(b'"text"') == 300


def test_a_full_server_refuses_more_but_answers_health(spare: LLM) -> None:
    with serving(spare, max_connections=2) as s:
        with engine_blocked(s.service), connected(s, post(REQUEST)), connected(s, post(REQUEST)):
            until(lambda: len(s.service.jobs) == 2, "two requests run")
            answer = answer_to(s, post(REQUEST))
            assert error_of(answer).startswith("503 ")
            assert b"retry-after" in answer and b"--max-connections" in answer
            assert s.http.get("/health").status_code == 200 and len(s.service.jobs) == 2
        assert s.complete()["choices"]


# ------------------------------------------------------------ readers


def test_a_client_that_does_not_read_its_stream_is_dropped(spare: LLM) -> None:
    """Its events are freed, and other clients get their text."""
    with serving(spare, listener=small_buffer_listener(), write_timeout=SHORT) as s:
        expected = s.complete(seed=1)["choices"][0]["text"]
        body = post(STREAM | {"logprobs": 20, "n": 2})
        with connected(s, body, receive_buffer=4096) as connection:
            assert connection.recv(12) == b"HTTP/1.1 200"
            until(lambda: s.service.jobs, "it is accepted")
            handle = weakref.ref(next(iter(s.service.jobs.values())))
            until(lambda: not num_open(s), "the server closes the connection")
            s.wait_until_idle()
            until(lambda: gc.collect() >= 0 and handle() is None, "its events are freed")
            assert s.complete(seed=1)["choices"][0]["text"] == expected
        assert not s.logged


def test_a_slow_reader_gets_everything(one_token_llm: LLM) -> None:
    """It takes longer than the limit for the stream, but never that long for one piece."""
    with serving(one_token_llm, listener=small_buffer_listener(), write_timeout=5 * SHORT) as s:
        with connected(s, post(LONG | {"max_tokens": 100}), receive_buffer=4096) as connection:
            for _ in range(12):
                assert connection.recv(2048)
                time.sleep(SHORT / 2)  # the reading speed of the client
            assert b"[DONE]" in received(connection, b"[DONE]")
        assert s.http.get("/health").status_code == 200


def test_an_unread_stream_pauses_and_continues(spare: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its events are bounded in bytes, and other requests use its slot in the meantime."""
    monkeypatch.setattr(jobs, "MIN_UNREAD", 4096)
    asked = {"prompt": "x = 1\n", "seed": 5, "temperature": 0.8, "ignore_eos": True}
    asked["max_tokens"] = 1000
    with serving(spare, listener=small_buffer_listener(), write_timeout=0, max_unread=1) as s:
        expected = s.complete(**asked)["choices"][0]["text"]
        sent = post(asked | {"stream": True, "logprobs": 20})
        with connected(s, sent, 4096) as one, connected(s, sent, 4096) as two:
            until(lambda: len(s.service.jobs) == 2, "they are accepted")
            handles = dict(s.service.jobs)
            until(lambda: all(handle.paused for handle in handles.values()), "they pause")
            until(lambda: not s.service.llm.engine.busy, "the engine is idle", timeout=5)
            for job, handle in handles.items():
                assert job.request and job.request.produced < 1000 and handle.unread < 500_000
            assert s.complete()["choices"], "their slots are free"
            for connection in (one, two):
                lines = received(connection, b"[DONE]").splitlines()
                chunks = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
                assert "".join(c["text"] for chunk in chunks for c in chunk["choices"]) == expected
        assert not s.logged


def test_events_queued_while_the_event_loop_is_busy_do_not_count_as_unread(
    one_token_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They exceed the limit of unread events, but the client had no chance to read them."""
    monkeypatch.setattr(jobs, "MIN_UNREAD", 4096)
    sent = post(LONG | {"max_tokens": 1000})
    with serving(one_token_llm, max_unread=1) as s, connected(s, sent) as connection:
        until(lambda: s.service.jobs, "it is accepted")
        job, handle = next(iter(s.service.jobs.items()))
        busy = lambda: job.request.produced > 500 or handle.paused  # noqa: E731
        s.service._post(lambda: until(busy, "many events are queued"))
        answer = received(connection, b"[DONE]")
        assert answer.count(b'"text"') == 1000 and b"error" not in answer


def test_unread_answers_are_bounded_in_total(spare: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest unread response is dropped; clients that read get their responses."""
    monkeypatch.setattr(run, "LARGE_WRITE", 1000)
    sent = b"GET /docs HTTP/1.1\r\nHost: localhost\r\n\r\n"

    def unsent(s: Serving) -> int:
        open_connections = list(s.server.server_state.connections)
        return sum(one.transport.get_write_buffer_size() for one in open_connections)

    with serving(spare) as s:
        size = len(s.http.get("/docs").content)
    limit = int(2.5 * size)
    with (
        serving(spare, listener=small_buffer_listener(), write_timeout=0, max_unread=limit) as s,
        ExitStack() as stack,
    ):
        for _ in range(6):
            stack.enter_context(connected(s, sent, 4096))
        until(lambda: unsent(s) > 0, "responses are written")
        assert len(s.http.get("/docs").content) == size
        until(lambda: 0 < unsent(s) <= limit, "the others were dropped", timeout=5)


# ------------------------------------------------------------ before the first request


class Clients:
    """A listening socket, its clients, and the paths of requests that were handed on."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack
        self.listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=64))
        self.handed_on: list[str] = []

    def accept(self, max_pending: int = 64) -> Acceptor:
        acceptor = Acceptor(self.listener, self.make, 10.0, max_pending)
        self.stack.callback(acceptor.close)
        return acceptor

    def make(self, received: bytes) -> asyncio.Protocol:
        self.handed_on.append(received.split()[1].decode())
        return asyncio.Protocol()

    def connect(self, sent: bytes) -> socket.socket:
        client = self.stack.enter_context(socket.create_connection(self.listener.getsockname()))
        client.sendall(sent)
        return client

    def get(self, path: str) -> socket.socket:
        return self.connect(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())


def with_clients(scenario: Callable[[Clients], Any]) -> None:
    async def main() -> None:
        with ExitStack() as stack:
            await scenario(Clients(stack))

    asyncio.run(asyncio.wait_for(main(), 20))


async def eventually(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def sent_to(client: socket.socket) -> bytes:
    """Return all that a client receives until its connection ends."""
    client.setblocking(False)
    data = b""
    while part := await asyncio.get_running_loop().sock_recv(client, 4096):
        data += part
    return data


def test_complete_requests_are_handed_on_in_order_after_health() -> None:
    async def scenario(c: Clients) -> None:
        c.get("/left").close()  # a client that has disconnected is ignored
        for path in ("/a", "/b", "/health"):
            c.get(path)
        acceptor = c.accept()
        await eventually(lambda: len(c.handed_on) == 3)
        assert c.handed_on == ["/health", "/a", "/b"] and not acceptor._complete
        padding = b"x" * 3 * RECEIVE_BYTES
        client = c.connect(b"GET /pieces HTTP/1.1\r\nX: ")
        await eventually(lambda: any(pending.received for pending in acceptor._waiting))
        client.sendall(padding + b"\r\n\r\n")
        await eventually(lambda: c.handed_on[-1] == "/pieces")

    with_clients(scenario)


def test_more_requests_than_may_wait_are_refused_except_health() -> None:
    async def scenario(c: Clients) -> None:
        acceptor = c.accept(max_pending=2)
        acceptor._scheduled = True  # hand nothing on for now
        c.get("/a")
        c.get("/b")
        await eventually(lambda: len(acceptor._complete) == 2)
        refused = await sent_to(c.get("/c"))
        assert refused.startswith(b"HTTP/1.1 503") and b"--max-connections" in refused
        c.get("/health")
        await eventually(lambda: len(acceptor._complete) == 3)
        acceptor._hand_on()
        await eventually(lambda: len(c.handed_on) == 3)
        assert c.handed_on == ["/health", "/a", "/b"]

    with_clients(scenario)


def test_pending_connections_are_closed_at_the_end() -> None:
    async def scenario(c: Clients) -> None:
        silent = c.connect(b"")
        acceptor = Acceptor(c.listener, c.make, header_timeout=10.0, max_pending=64)
        await eventually(lambda: acceptor._waiting)
        acceptor.close()
        assert await sent_to(silent) == b""

    with_clients(scenario)


def test_without_descriptors_the_oldest_connection_makes_room(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(c: Clients) -> None:
        oldest = c.connect(b"")
        acceptor = c.accept()
        await eventually(lambda: acceptor._waiting)
        real, failures = acceptor.listener, [2]

        class Exhausted:
            """Listener that fails once while a client waits, and once while none does."""

            def fileno(self) -> int:
                return real.fileno()

            def accept(self) -> Any:
                if failures[0]:
                    failures[0] -= 1
                    raise OSError(errno.EMFILE, "Too many open files")
                return real.accept()

        acceptor.listener = Exhausted()  # type: ignore[assignment]
        c.get("/later")
        assert await sent_to(oldest) == b""
        await eventually(lambda: c.handed_on)
        assert c.handed_on == ["/later"] and failures == [0]

    with caplog.at_level(logging.ERROR):
        with_clients(scenario)
    assert caplog.text.count("no file descriptor") == 2
