"""Clients that hold connections for nothing: slow headers, bodies and readers, and too many of
them."""

from __future__ import annotations

import gc
import json
import socket
import struct
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from forerun.llm import LLM
from forerun.server import bodies, connections, service
from forerun.server.tickets import Ticket
from tests.server.serving import Serving, held, serving, slow, until

ASKED = {"prompt": "def add(a, b):", "max_tokens": 8, "seed": 1}
STREAM = {
    "prompt": "x = 1\n",
    "max_tokens": 1900,
    "ignore_eos": True,
    "speculative": False,
    "stream": True,
}
SOON = 0.1
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@contextmanager
def connected(s: Serving, said: bytes = b"", room: int = 0) -> Iterator[socket.socket]:
    """A connection on which this was said. `room` bounds what may be on its way to it."""
    host, port = s.url.removeprefix("http://").split(":")
    with socket.socket() as connection:
        if room:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
        connection.settimeout(20)
        connection.connect((host, int(port)))
        connection.sendall(said)
        yield connection


def narrow() -> socket.socket:
    """A listener that lets little be on its way, so that a reader that stops is noticed at once."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return listener


def rest(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    parts = []
    while part := connection.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


def trickled(connection: socket.socket, drop: bytes) -> bytes:
    """The answer to a client that says a little again and again."""
    connection.settimeout(SOON / 10)
    drops = 0
    while drops < 1000:
        try:
            connection.sendall(drop)
            drops += 1
            first = connection.recv(4096)
            assert drops > 5, "it was told before its time"
            connection.settimeout(20)
            return first + rest(connection)  # its head may come before its body
        except TimeoutError:
            pass
    raise AssertionError("it was never told to stop")


def post(body: dict[str, Any], length: int | None = None) -> bytes:
    content = json.dumps(body).encode()
    return HEAD + f"Content-Length: {length or len(content)}\r\n\r\n".encode() + content


def message(answer: bytes) -> str:
    head, _, body = answer.partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert len(error["message"].splitlines()) == 1, head
    return f"{head.split()[1].decode()} {error['message']}"


# ------------------------------------------------------------ headers


@pytest.fixture(scope="module")
def front_of_limits(spare: LLM) -> Iterator[Serving]:
    """One server for clients that are refused, or that ask once."""
    with serving(spare) as s:
        yield s


@pytest.mark.parametrize(
    "said", [b"GET /hea", HEAD, b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 9000]
)
def test_headers_that_do_not_come_whole(spare: LLM, said: bytes) -> None:
    with serving(spare, header_timeout=SOON) as s, connected(s, said) as connection:
        assert message(rest(connection)).startswith("408 ") and s.complete()["choices"]


def test_a_connection_that_says_nothing_is_closed(spare: LLM) -> None:
    with serving(spare, header_timeout=SOON) as s, connected(s) as connection:
        assert rest(connection) == b""


def test_headers_that_trickle_do_not_move_the_deadline(spare: LLM) -> None:
    with serving(spare, header_timeout=3 * SOON) as s, connected(s, HEAD) as connection:
        assert message(trickled(connection, b"X: y\r\n")).startswith("408 ")


def test_the_next_request_has_a_deadline_too(spare: LLM) -> None:
    with serving(spare, header_timeout=SOON) as s:
        for more in (b"GET /hea", b"GET /health HTTP/1.1\r\n"):
            with connected(
                s, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" + more
            ) as connection:
                answers = rest(connection)
                assert answers.startswith(b"HTTP/1.1 200") and b"HTTP/1.1 408" in answers


def test_what_nobody_asked_for_is_not_read_for_ever(spare: LLM) -> None:
    """The rest of a body whose request is answered already."""
    begun = b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n"
    with serving(spare, header_timeout=SOON) as s, connected(s, begun) as connection:
        assert connection.recv(12) == b"HTTP/1.1 404"
        until(lambda: not s.server.server_state.connections, "it is closed", patience=5)


def test_a_request_in_work_has_no_deadline_for_headers(spare: LLM) -> None:
    with serving(spare, header_timeout=SOON) as s, connected(s) as other:
        with held(s.service), connected(s, post(ASKED)) as connection:
            assert rest(other) == b""  # which came before it, so its time would be up as well
            until(lambda: s.service.jobs, "it is taken")
        with connected(s, post(ASKED)) as connection:
            assert connection.recv(12) == b"HTTP/1.1 200"


# ------------------------------------------------------------ headers and framing without end

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n"
CLOSE = b"Connection: close\r\n"


def chunks(content: bytes, size: int, extension: bytes = b"") -> bytes:
    pieces = [content[at : at + size] for at in range(0, len(content), size)]
    return (
        b"".join(b"%x%s\r\n%s\r\n" % (len(piece), extension, piece) for piece in pieces)
        + b"0\r\n\r\n"
    )


def answer_to(s: Serving, said: bytes) -> bytes:
    with connected(s, said) as connection:
        return rest(connection)


@pytest.mark.parametrize(
    "more",
    [
        b"X: y\r\n" * 2000,
        b":\r\n" * 5000,
        b"A:\r\n " * 3000,
        b"X: " + b"a" * 20_000 + b"\r\n",
        b"X: y\r\n" * 101,
    ],
    ids=["many", "without names", "folded", "long", "one too many"],
)
@pytest.mark.parametrize("end", [b"\r\n", b""], ids=["whole", "without an end"])
def test_headers_are_bounded_before_they_are_parsed(
    front_of_limits: Serving, more: bytes, end: bytes
) -> None:
    """Thousands of headers, for which no key is needed, held up everybody while they were
    parsed."""
    assert message(answer_to(front_of_limits, HEALTH + more + end)).startswith(
        "431 a request has at most 100 headers"
    )


def test_as_many_headers_as_clients_send(front_of_limits: Serving) -> None:
    said = (
        HEALTH
        + CLOSE
        + b"X-Trace: 0123456789abcdef\r\n" * 90
        + b"Cookie: "
        + b"a" * 8000
        + b"\r\n\r\n"
    )
    assert answer_to(front_of_limits, said).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("length", "size", "extension"),
    [
        (40_000, 1, b""),
        (40_000, 2, b""),
        (4_000, 1, b";x=" + b"y" * 200),
        (40_000, 64, b";" + b"y" * 300),
    ],
)
def test_the_framing_of_chunks_is_bounded(
    front_of_limits: Serving, length: int, size: int, extension: bytes
) -> None:
    """258 KB in chunks of one byte took a second of the event loop; so do long chunk extensions."""
    content = json.dumps(ASKED | {"user": "x" * length}).encode()
    said = CHUNKED + b"\r\n" + chunks(content, size, extension)
    assert message(answer_to(front_of_limits, said)).startswith(
        "400 the body comes in too many small chunks"
    )
    assert front_of_limits.complete()["choices"] and not front_of_limits.logged


@pytest.mark.parametrize(("size", "length"), [(8, 8_000), (128, 90_000), (16_384, 90_000)])
def test_chunks_as_clients_send_them(front_of_limits: Serving, size: int, length: int) -> None:
    content = json.dumps(ASKED | {"user": "x" * length}).encode()
    answer = answer_to(front_of_limits, CHUNKED + CLOSE + b"\r\n" + chunks(content, size))
    assert answer.startswith(b"HTTP/1.1 200"), answer[:300]


def test_trailers_are_no_headers_and_are_bounded(front_of_limits: Serving) -> None:
    content = chunks(json.dumps(ASKED).encode(), 1000).removesuffix(b"\r\n")
    said = CHUNKED + CLOSE + b"\r\n" + content
    assert answer_to(front_of_limits, said + b"Host: elsewhere.example\r\n\r\n").startswith(
        b"HTTP/1.1 200"
    )
    assert message(answer_to(front_of_limits, said + b"X: y\r\n" * 8000)).startswith("400 ")


def test_keys_are_asked_for_before_a_body_is_read(spare: LLM) -> None:
    """Chunks of a client without a key are not waited for, and are counted though nobody wants
    them."""
    with (
        serving(spare, api_key=("k",)) as s,
        connected(s, CHUNKED + b"\r\n5\r\nhello\r\n") as connection,
    ):
        assert connection.recv(12) == b"HTTP/1.1 401"
        connection.sendall(b"1\r\nx\r\n" * 20_000)
        until(lambda: not s.server.server_state.connections, "it is closed", patience=5)


@pytest.mark.parametrize(
    "said",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"GET /health HTTP/1.1\nHost: localhost\n\n",
        b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost localhost\r\n\r\n",
        HEAD + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        HEAD + b"Content-Length: -1\r\n\r\n",
        CHUNKED + b"\r\nx\r\n",
    ],
)
def test_what_is_no_http_is_told_so_at_once(front_of_limits: Serving, said: bytes) -> None:
    assert message(answer_to(front_of_limits, said)) == "400 this is no HTTP/1.1 request"
    assert not front_of_limits.logged


def test_requests_of_one_connection_are_answered_in_turn(front_of_limits: Serving) -> None:
    """Sent at once, with an empty line between them, as some old clients do."""
    content = post(ASKED)
    both = answer_to(
        front_of_limits, content + b"\r\n" + content + b"GET /nowhere HTTP/1.0\r\n\r\n"
    )
    assert both.count(b"HTTP/1.1 200") == 2 and both.count(b"HTTP/1.1 404") == 1


def test_a_request_behind_chunks_is_not_taken_with_them(front_of_limits: Serving) -> None:
    """Where only its chunks tell where a body ends, the request behind it has to be sent again."""
    said = CHUNKED + b"\r\n" + chunks(json.dumps(ASKED).encode(), 1000)
    answer = answer_to(front_of_limits, said + HEALTH + b"\r\n")
    assert (
        answer.count(b"HTTP/1.1") == 1
        and answer.startswith(b"HTTP/1.1 200")
        and b"connection: close" in answer
    )
    assert not front_of_limits.logged


@pytest.mark.parametrize("framing", [b"", b"Transfer-Encoding: chunked\r\n"])
def test_an_upgrade_that_is_not_done_changes_nothing(
    front_of_limits: Serving, framing: bytes
) -> None:
    """Java's client asks for HTTP/2 in its first request."""
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQBAAAAAAIAAAAA\r\n"
    content = json.dumps(ASKED).encode()
    body = chunks(content, 1000) if framing else content
    head = HEAD + upgrade + (framing or b"Content-Length: %d\r\n" % len(content)) + b"\r\n"
    with connected(front_of_limits, head + body) as connection:
        assert b"HTTP/1.1 200" in rest_until(connection, b"usage")
        connection.sendall(HEALTH + upgrade.replace(b"Upgrade,", b"close, Upgrade,") + b"\r\n")
        assert b"HTTP/1.1 200" in rest(connection)


def test_one_connection_that_fails_keeps_no_other_from_its_turn() -> None:
    """Where clients reset their connections while they are refused, all others waited for ever."""
    parsed, later = list[str](), list[Callable[[], None]]()

    class One:
        def __init__(self, name: str) -> None:
            self.name, self.phase, self.queued, self.first = (
                name,
                connections.Phase.HEADERS,
                False,
                False,
            )
            self.loop = type("Loop", (), {"call_soon": staticmethod(later.append)})
            self.transport = type("Transport", (), {"abort": lambda _: parsed.append("aborted")})()

        def parse(self) -> None:
            if self.name == "first":
                raise OSError("not connected")
            parsed.append(self.name)

    turns: Any = connections.Turns()
    for name in ("first", "second"):
        turns.add(One(name))
    while later:
        later.pop(0)()
    assert parsed == ["aborted", "second"]


def test_clients_that_reset_what_is_refused_hold_up_nobody(front_of_limits: Serving) -> None:
    for _ in range(100):
        with connected(front_of_limits, HEALTH + b"X: y\r\n" * 2000) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert front_of_limits.http.get("/health").status_code == 200
    assert [record.exc_info for record in front_of_limits.logged] == []


def test_parsing_takes_a_bounded_time_in_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many connections have something to parse; headers come first."""
    now, parsed, later = [0.0], list[str](), list[Callable[[], None]]()
    monkeypatch.setattr(connections.time, "perf_counter", lambda: now[0])

    class Busy:
        def __init__(self, name: str, phase: connections.Phase) -> None:
            self.name, self.phase, self.queued, self.first = name, phase, False, False
            self.loop = type("Loop", (), {"call_soon": staticmethod(later.append)})

        def parse(self) -> None:
            now[0] += 0.0005
            parsed.append(self.name)
            turns.add(self)

    turns: Any = connections.Turns()
    for i in range(100):
        turns.add(Busy(f"body {i}", connections.Phase.BODY))
    for i in range(100):
        turns.add(Busy(f"head {i}", connections.Phase.HEADERS))
    for at in range(50):
        assert len(later) == at + 1, "one round asks for the next"
        begun = now[0]
        later[at]()
        assert now[0] - begun <= 0.0045
    assert set(parsed) == {f"{kind} {i}" for kind in ("body", "head") for i in range(100)}, (
        "everybody has a turn"
    )


def test_one_request_begins_in_a_round_and_health_before_it() -> None:
    begun, later = list[str](), list[Callable[[], None]]()

    class Whole:
        def __init__(self, name: str) -> None:
            self.name, self.phase, self.queued = name, connections.Phase.HEADERS, False
            self.first = name.startswith("health")
            self.loop = type("Loop", (), {"call_soon": staticmethod(later.append)})

        def parse(self) -> None:
            self.phase = connections.Phase.NOTHING
            begun.append(self.name)

    turns: Any = connections.Turns()
    for name in ("a", "b", "c", "health 1", "health 2"):
        turns.add(Whole(name))
    rounds = []
    while later:
        begun.clear()
        later.pop(0)()
        rounds.append(list(begun))
    assert rounds == [["health 2", "health 1", "a"], ["b"], ["c"]]


# ------------------------------------------------------------ bodies


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/api/chat"])
def test_bodies_that_stop_half_way(spare: LLM, path: str) -> None:
    begun = post(ASKED, 1000).replace(b"/v1/completions", path.encode())
    with (
        serving(spare, body_timeout=SOON, header_timeout=SOON) as s,
        connected(s, begun) as connection,
    ):
        assert b"HTTP/1.1 408" in (answer := rest(connection)) and b"--body-timeout" in answer
        assert s.complete()["choices"] and not s.logged


def test_bodies_that_trickle_do_not_move_the_deadline(spare: LLM) -> None:
    with (
        serving(spare, body_timeout=3 * SOON) as s,
        connected(s, HEAD + b"Content-Length: 9999\r\n\r\n") as connection,
    ):
        assert message(trickled(connection, b" ")).startswith("408 ")


def test_bodies_over_all_are_bounded_and_small_ones_pass(
    spare: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is refused is the body that would be too much; when another ends there is room again."""
    monkeypatch.setattr(bodies, "SMALL", 1000)
    monkeypatch.setattr(connections, "HIGH_WATER_LIMIT", 1000)
    large = {"prompt": "x " * 2400}
    with serving(spare, max_body=5000, max_bodies=6000) as s:
        refused: list[str] = []
        with connected(s, post(large, 4990)), connected(s, post(large, 4990)):
            until(lambda: full(s, large, refused), "they have come", patience=5)
            assert refused[0].startswith("the requests in work hold 6000 bytes")
            assert s.complete()["choices"], "small ones pass"
        until(lambda: not full(s, large, refused), "there is room again", patience=5)


def full(s: Serving, body: dict[str, Any], said: list[str]) -> bool:
    """Whether there is no room for a body; what is said of it goes into a list."""
    answer = s.http.post("/tokenize", json=body)
    if answer.status_code == 503:
        assert answer.headers["retry-after"]
        said.append(answer.json()["error"]["message"])
    return answer.status_code == 503


def test_a_body_is_held_as_long_as_its_request(spare: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "SMALL", 1000)
    with serving(spare, max_body=5000, max_bodies=5000) as s:
        with (
            held(s.service),
            connected(s, post(ASKED | {"prompt": "x " * 900, "user": "x" * 2000})) as connection,
        ):
            until(lambda: s.service.jobs, "it is taken")
            assert s.http.post("/tokenize", json={"prompt": "x " * 2400}).status_code == 503
        assert connection.fileno() < 0
        until(
            lambda: s.http.post("/tokenize", json={"prompt": "x " * 2400}).status_code == 200,
            "it ends",
            patience=5,
        )


# ------------------------------------------------------------ how many


def test_a_connection_that_is_answered_is_left_alone_though_it_is_to_close_then(spare: LLM) -> None:
    """`Connection: close` is no sign that more of the request will come."""
    asked = post(STREAM | {"max_tokens": 300}).replace(
        b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1
    )
    with (
        serving(spare, max_connections=2) as s,
        slow(s.service, 0.003),
        connected(s, asked) as connection,
    ):
        until(lambda: s.service.jobs, "it is taken")
        for _ in range(4):
            with connected(s):
                until(lambda: len(s.server.server_state.connections) <= 2, "there is room")
        assert rest_until(connection, b"[DONE]").count(b'"text"') == 300


def test_connections_that_wait_for_their_client_make_room(spare: LLM) -> None:
    """Whoever holds all of them with half a request shuts nobody out."""
    unfinished = post(ASKED, 999)
    with (
        serving(spare, max_connections=3) as s,
        connected(s, unfinished) as a,
        connected(s, unfinished) as b,
        connected(s, unfinished) as c,
    ):
        until(lambda: len(s.server.server_state.connections) == 3, "they are there")
        assert s.complete()["choices"]
        assert rest(a) == b"", "the one that has waited longest made room"
        for _ in range(3):
            with connected(
                s, b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
            ) as other:
                assert rest(other).startswith(b"HTTP/1.1 200")
        assert len(s.server.server_state.connections) <= 3 and b.fileno() > 0 and c.fileno() > 0


def gone(connection: socket.socket) -> bool:
    """Whether the server has ended a connection without a word."""
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True
    except BlockingIOError:
        return False


@pytest.mark.parametrize("said", [b"", HEAD], ids=["nothing", "half of its headers"])
def test_connections_without_a_request_make_room_for_those_that_come_later(
    spare: LLM, said: bytes
) -> None:
    with serving(spare, max_connections=3) as s, ExitStack() as stack:
        silent = [stack.enter_context(connected(s, said)) for _ in range(5)]
        for longest in silent[:2]:
            until(lambda longest=longest: gone(longest), "those that have waited longest made room")
        assert s.complete()["choices"]
        assert len(s.server.arrivals[0]._waiting) <= 3


def test_where_all_are_answered_one_more_is_told_so(spare: LLM) -> None:
    with serving(spare, max_connections=2) as s:
        with held(s.service), connected(s, post(ASKED)) as a, connected(s, post(ASKED)) as b:
            until(lambda: len(s.service.jobs) == 2, "two are in work")
            with connected(s, post(ASKED)) as more:
                answer = rest(more)
                assert (
                    message(answer).startswith("503 ")
                    and b"retry-after" in answer
                    and b"--max-connections" in answer
                )
            assert s.http.get("/health").status_code == 200, (
                "who watches the server is not shut out"
            )
            assert {a.fileno(), b.fileno()} and len(s.service.jobs) == 2
        assert s.complete()["choices"]


# ------------------------------------------------------------ readers


def test_a_client_that_does_not_read_its_stream(spare: LLM) -> None:
    """Its request ends and what it was sent is forgotten; others get their text."""
    expected = spare_text(spare)
    with serving(spare, listener=narrow(), write_timeout=SOON) as s:
        body = STREAM | {"logprobs": 20, "n": 2}
        with connected(s, post(body), room=4096) as connection:
            assert connection.recv(12) == b"HTTP/1.1 200"
            desk = weakref.ref(until_ticket(s).desk)
            until(
                lambda: not s.server.server_state.connections,
                "the server ends the connection",
                patience=20,
            )
            s.rest()
            until(
                lambda: gc.collect() >= 0 and desk() is None, "its events are forgotten", patience=5
            )
            assert s.complete(seed=1)["choices"][0]["text"] == expected
        assert not s.logged


def spare_text(llm: LLM) -> str:
    with serving(llm) as s:
        return str(s.complete(seed=1)["choices"][0]["text"])


def test_a_slow_reader_gets_all(spare: LLM) -> None:
    """It takes longer than the limit for the whole, but never that long for a piece."""
    with serving(spare, listener=narrow(), write_timeout=5 * SOON) as s:
        with connected(s, post(STREAM | {"max_tokens": 100}), room=4096) as connection:
            pieces = [connection.recv(2048)]
            for _ in range(12):
                time.sleep(SOON / 2)
                pieces.append(connection.recv(2048))
            assert b"[DONE]" in rest_until(connection, b"[DONE]") and all(pieces)
        assert s.http.get("/health").status_code == 200


def test_a_stream_that_is_not_read_pauses_and_goes_on(
    spare: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nobody takes was bounded in events of any size, 8,192 of them, and then ended. It is
    bounded in bytes, the request leaves its place to others meanwhile, and whoever reads at last
    gets the same text."""
    monkeypatch.setattr(service, "LEAST_UNREAD", 4096)
    asked = {
        "prompt": "x = 1\n",
        "seed": 5,
        "temperature": 0.8,
        "max_tokens": 1000,
        "ignore_eos": True,
    }
    with serving(spare, listener=narrow(), write_timeout=0, max_unread=1) as s:
        expected = s.complete(**asked)["choices"][0]["text"]
        said = post(asked | {"stream": True, "logprobs": 20})
        with connected(s, said, 4096) as one, connected(s, said, 4096) as two:
            until(lambda: len(s.service.jobs) == 2, "they are taken")
            tickets = list(s.service.jobs)
            until(lambda: all(ticket.desk.paused for ticket in tickets), "they pause", patience=20)
            until(lambda: not s.service.llm.engine.busy, "nothing is done for them", patience=5)
            assert all(
                job.request.produced < 1000 and ticket.desk.unread < 500_000
                for ticket in tickets
            )
            assert s.complete()["choices"], "their places are free"
            for connection in (one, two):
                text = "".join(
                    choice["text"] for choice in choices(rest_until(connection, b"[DONE]"))
                )
                assert text == expected
        assert not s.logged


def choices(stream: bytes) -> Iterator[dict[str, Any]]:
    """The choices of the lines of a stream, whose chunks of HTTP end where they do."""
    for line in stream.splitlines():
        if line.startswith(b"data: {"):
            yield from json.loads(line[6:])["choices"]


def test_written_answers_that_are_not_taken_are_bounded_in_all(
    spare: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of whole answers the largest that waits for its client ends; those that are read are
    whole."""
    monkeypatch.setattr(connections, "LARGE_WRITE", 1000)
    said = b"GET /docs HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with serving(spare, listener=narrow(), write_timeout=0) as s:
        size = len(s.http.get("/docs").content)
    with (
        serving(spare, listener=narrow(), write_timeout=0, max_unread=int(2.5 * size)) as s,
        ExitStack() as stack,
    ):
        for _ in range(6):
            stack.enter_context(connected(s, said, 4096))
        until(lambda: held_by(s) > 0, "answers are written")
        assert len(s.http.get("/docs").content) == size
        until(lambda: 0 < held_by(s) <= 2.5 * size, "the others ended", patience=5)


def held_by(s: Serving) -> int:
    """Bytes that connections of a server have to send."""
    return sum(c.transport.get_write_buffer_size() for c in list(s.server.server_state.connections))


def until_ticket(s: Serving) -> Ticket:
    until(lambda: s.service.jobs, "it is taken")
    return next(iter(s.service.jobs))


def rest_until(connection: socket.socket, end: bytes) -> bytes:
    said = b""
    while end not in said:
        part = connection.recv(1 << 16)
        assert part, said[-300:]
        said += part
    return said


def test_what_comes_at_once_is_not_what_nobody_takes(
    spare: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events that gather while the event loop is busy with something else are read as soon as it is
    not."""
    monkeypatch.setattr(service, "LEAST_UNREAD", 4096)
    with (
        serving(spare, max_unread=1) as s,
        connected(s, post(STREAM | {"max_tokens": 1000})) as connection,
    ):
        ticket = until_ticket(s)
        s.service._post(
            lambda: until(lambda: job.request.produced > 500 or ticket.desk.paused, "many wait")
        )
        answer = rest_until(connection, b"[DONE]")
        assert answer.count(b'"text"') == 1000 and b"error" not in answer
