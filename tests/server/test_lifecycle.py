"""Server processes from their beginning to their end: signals, clients that misbehave, files,
batches.

Every wait is a bounded poll for something that must come.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from forerun.server import run as server_run
from forerun.server.batch import read_requests
from forerun.server.listen import listen
from forerun.server.settings import Settings
from tests import tiny
from tests.forked import Spoken as start

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "forerun"]
PROMPT = "def walk(path):\n    for name in os.listdir(path):\n"
MODEL = str(tiny.spoken())
LONG = 8000  # tokens: some 24 texts of that take longer than any test waits
ONE = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0.8, "seed": 3, "return_token_ids": True}
GUARD = (
    "times the speed of plain decoding: nothing is drafted"  # once, where speculation does not pay
)


def until(condition: Callable[[], Any], what: str, seconds: float = 30.0) -> Any:
    """The first true value of a condition; fails where there is none in time."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"waited {seconds:g} s: {what}"
        time.sleep(0.02)
    return value


def start_fresh(*arguments: str) -> subprocess.Popen[str]:
    """A forerun process that has all of its imports before it."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [*COMMAND, *arguments],
        cwd=ROOT,
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(*arguments: str) -> tuple[int, str]:
    """(exit code, stderr) of a forerun process that ends by itself."""
    process = start(*arguments)
    try:
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, said


class Server:
    """A server process that is up."""

    def __init__(self, process: start) -> None:
        self.process, self.said = process, list[str]()
        assert process.stderr is not None
        self.reader = threading.Thread(
            target=lambda: self.said.extend(process.stderr or ()), daemon=True
        )
        self.usual, self.address, self.headers = 0, ("", 0), {"Content-Type": "application/json"}

    def wait_until_up(self) -> None:
        for line in self.process.stderr or ():
            self.said.append(line)
            if "serving" in line:
                host, _, port = line.rsplit("//", 1)[1].strip().rpartition(":")
                self.address = (host, int(port))
                break
        assert self.address[1], "".join(self.said)
        self.reader.start()
        until(self._answers, "the server answers", 10)
        self.usual = self.files() + 1  # the connection that asks may count

    def _answers(self) -> bool:
        try:
            return self.get("/health")[0] == 200
        except ConnectionError:
            return False

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(*self.address, timeout=30)

    def raw(self, text: str) -> socket.socket:
        """A connection that has said something, and has not read anything."""
        connection = socket.create_connection(self.address, timeout=30)
        connection.sendall(text.encode())
        return connection

    def get(self, path: str) -> tuple[int, str]:
        connection = self.connect()
        try:
            connection.request("GET", path, headers=self.headers)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def post(
        self, body: dict[str, Any], path: str = "/v1/completions"
    ) -> tuple[int, dict[str, Any]]:
        connection = self.connect()
        try:
            connection.request("POST", path, json.dumps(body), self.headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def open_stream(self, **body: Any) -> Iterator[str]:
        """The data lines of a stream, which has begun when this returns."""
        connection = self.connect()
        connection.request(
            "POST", "/v1/completions", json.dumps(ONE | {"stream": True} | body), self.headers
        )
        response = connection.getresponse()
        assert response.status == 200
        return (line.decode().strip().removeprefix("data: ") for line in response if line.strip())

    def gauge(self, name: str) -> float:
        lines = self.get("/metrics")[1].splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    def idle(self) -> bool:
        return not any(self.gauge(f"forerun_{name}") for name in ("running", "waiting", "kv_used"))

    def closed(self) -> bool:
        """Whether it holds no file or connection that it did not hold when it began."""
        return self.files() <= self.usual

    def files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def end(self, seconds: float) -> int:
        """The exit code, which must come in time; nothing on stderr may look like an accident."""
        code = self.process.wait(timeout=seconds)
        self.reader.join(timeout=10)
        assert "Traceback" not in "".join(self.said), "".join(self.said)
        return code


@contextmanager
def serving(*flags: str, **env: str) -> Iterator[Server]:
    with start("serve", MODEL, "--port", "0", *flags, **env) as process:
        server = Server(process)
        try:
            server.wait_until_up()
            yield server
        finally:
            process.kill()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One server for everything that must not end it; at its end it must be idle and have said
    nothing, but
    for the guard, perhaps: drafts of so small a model hardly pay.

    Every chunk of a stream names the model: with a name so long, what nobody reads soon fills a
        socket's buffers.
    """
    flags = ("--context", "2048", "--max-rows", "4")
    with serving(*flags, "--max-body", "100000", "--served-name", "x" * 20_000) as server:
        yield server
        until(server.idle, "nothing runs, waits or holds pages")
        server.process.send_signal(signal.SIGTERM)
        assert server.end(10) == 0
        said = [line[-300:] for line in server.said[1:] if GUARD not in line]
        assert not said, said


def load(server: Server, count: int, tokens: int) -> list[Iterator[str]]:
    """Streams that have begun; some wait for a place."""
    body = {"max_tokens": tokens, "ignore_eos": True, "speculative": False}
    with ThreadPoolExecutor(count) as pool:
        streams = list(pool.map(lambda seed: server.open_stream(**body, seed=seed), range(count)))
    until(lambda: server.gauge("forerun_running"), "requests run")
    return streams


def finish(streams: list[Iterator[str]]) -> list[int]:
    """Read streams to their ends, which must be in order; the numbers of their tokens."""
    with ThreadPoolExecutor(len(streams)) as pool:
        read = list(pool.map(list, streams))
    counts = []
    for lines in read:
        assert lines[-1] == "[DONE]"
        chunks = [json.loads(line) for line in lines[:-1]]
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        counts.append(sum(len(chunk["choices"][0]["token_ids"]) for chunk in chunks))
    return counts


# ------------------------------------------------------------ signals


def test_running_requests_end_after_sigterm_and_new_ones_are_told() -> None:
    with serving("--max-rows", "4", "--shutdown-timeout", "40") as server:
        streams = load(server, 8, 2000)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: server.get("/health")[0] == 503, "the server says that it ends")
        status, body = server.post(ONE)
        assert status == 503 and body["error"]["type"] == "server_error"
        assert server.get("/ready")[0] == 503
        assert finish(streams) == [2000] * 8
        assert server.end(5) == 0


@pytest.mark.parametrize(("sign", "bound"), [(signal.SIGTERM, 0.5), (signal.SIGINT, 0.0)])
def test_the_shutdown_is_bounded_and_streams_end_in_order(sign: int, bound: float) -> None:
    with serving("--max-rows", "2", "--shutdown-timeout", str(bound)) as server:
        streams = load(server, 24, LONG)
        server.process.send_signal(sign)
        counts = finish(streams)
        assert sum(counts) < 24 * LONG
        assert server.end(bound + 4) == 0


def test_no_thread_of_the_engine_outlives_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvicorn leaves out the end of the application after a second signal; a thread in native code
    that Python meets while it ends has aborted the process."""
    servers: list[server_run.Server] = []

    def second_signal(server: server_run.Server, sockets: list[socket.socket]) -> None:
        async def begin() -> None:
            server.service.start()

        asyncio.run(begin())
        server.started = True
        servers.append(server)
        sockets[0].close()

    monkeypatch.setattr(server_run.Server, "run", second_signal)
    monkeypatch.setattr(server_run, "start_logging", lambda *_: None)
    options, listener = {"model": str(tiny.worded()), "kv_tokens": 256}, listen(Settings(port=0))
    assert server_run.run(options, Settings(), listener, False) == 0
    assert not servers[0].service._thread.is_alive()


def test_a_second_sigterm_ends_at_once() -> None:
    with serving("--max-rows", "2", "--shutdown-timeout", "60") as server:
        streams = load(server, 24, LONG)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: server.get("/health")[0] == 503, "the server says that it ends")
        server.process.send_signal(signal.SIGTERM)
        assert server.end(15) == 0  # far below the 60 s it may otherwise take
        del streams  # were open until now


def test_an_idle_server_ends_at_once() -> None:
    with serving() as server:
        keep_alive = server.connect()
        keep_alive.request("GET", "/health")
        keep_alive.getresponse().read()
        server.process.send_signal(signal.SIGTERM)
        assert server.end(3) == 0
        assert keep_alive.sock.recv(1) == b""


@pytest.mark.parametrize(
    ("sign", "codes"), [(signal.SIGTERM, (-signal.SIGTERM, 0)), (signal.SIGINT, (130,))]
)
def test_a_signal_while_the_model_loads(sign: int, codes: tuple[int, ...]) -> None:
    with start_fresh("serve", MODEL, "--port", "0") as process:
        try:
            maps = Path(f"/proc/{process.pid}/maps")
            until(lambda: "libtorch_python" in maps.read_text(), "torch is loaded")
            process.send_signal(sign)
            _, said = process.communicate(timeout=10)
        finally:
            process.kill()
    assert process.returncode in codes
    assert "Traceback" not in said and len(said.splitlines()) <= 1, said


def test_the_address_is_said_when_it_answers() -> None:
    with start_fresh("serve", MODEL, "--port", "0") as process:
        try:
            line = process.stderr.readline() if process.stderr else ""
            host, _, port = line.rsplit("//", 1)[1].strip().rpartition(":")
            socket.create_connection((host, int(port)), timeout=10).close()
        finally:
            process.kill()


def test_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, said = run("serve", MODEL, "--port", str(taken.getsockname()[1]))
    assert code == 2 and len(said.splitlines()) == 1 and "cannot listen" in said, said


# ------------------------------------------------------------ clients

CLIENT = """
import json, select, socket, sys
body = json.dumps({"prompt": "def f(", "max_tokens": 1900, "ignore_eos": True, "speculative": False, "stream": True})
head = "POST /v1/completions HTTP/1.1\\r\\nHost: localhost\\r\\nContent-Type: application/json\\r\\nContent-Length: "
streams = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(12)]
for stream in streams:
    stream.sendall(f"{head}{len(body)}\\r\\n\\r\\n{body}".encode())
begun = 0
while begun < 4:  # all four places are taken: what the server has not read yet would never be counted
    begun = len(select.select(streams, [], [])[0])
print("begun", flush=True)
sys.stdin.read()
"""


def test_requests_of_a_killed_client_end(server: Server) -> None:
    arguments = [sys.executable, "-c", CLIENT, str(server.address[1])]
    with subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as client:
        try:
            assert client.stdout is not None and client.stdout.readline() == "begun\n"
        finally:
            client.kill()
    until(
        lambda: server.gauge('forerun_requests_total{reason="cancelled"}') >= 4,
        "those that ran are cancelled",
        5,
    )
    until(server.idle, "nothing runs", 5)
    until(server.closed, "its connections are closed", 5)


def test_a_client_that_never_reads_holds_up_nobody(server: Server) -> None:
    _, alone = server.post(ONE)
    body = ONE | {"max_tokens": 1900, "ignore_eos": True, "speculative": False, "stream": True}
    sockets = [_unread(server, json.dumps(body)) for _ in range(4)]
    try:
        until(lambda: server.gauge("forerun_running"), "the requests run")
        _, beside = server.post(ONE)
        assert beside["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]
        until(server.idle, "the requests end, though nobody reads")
        assert server.get("/ready")[0] == 200
    finally:
        for unread in sockets:
            unread.close()


def _unread(server: Server, body: str) -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(server.address)
    connection.sendall(_head(len(body)).encode() + body.encode())
    return connection


def _head(length: int) -> str:
    kind = "Content-Type: application/json"
    return f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{kind}\r\nContent-Length: {length}\r\n\r\n"


@pytest.mark.parametrize(
    "body", ["", '{"prompt": "de'], ids=["nothing behind the headers", "half a body"]
)
def test_requests_that_never_come_whole(server: Server, body: str) -> None:
    until(server.closed, "nothing is left of other tests")
    sockets = [server.raw(_head(100) + body) for _ in range(20)]
    try:
        until(lambda: server.files() >= server.usual + 18, "the connections are open", 5)
        assert server.post(ONE)[0] == 200
    finally:
        for connection in sockets:
            connection.close()
    until(server.closed, "the connections are closed")
    assert server.get("/health")[0] == 200


def test_requests_that_never_come_whole_do_not_hold_up_the_end() -> None:
    with serving("--shutdown-timeout", "0") as server:
        sockets = [server.raw(_head(100) + '{"prompt"') for _ in range(5)]
        until(lambda: server.get("/health")[0] == 200, "the server has read them")
        server.process.send_signal(signal.SIGTERM)
        assert server.end(8) == 0
        assert len(sockets) == 5


def test_a_body_over_the_limit_without_a_length(server: Server) -> None:
    connection = server.connect()
    chunks = iter([b'{"prompt": "' + b"a" * 60_000, b"a" * 60_000, b'"}'])
    connection.request("POST", "/v1/completions", chunks, server.headers, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


@pytest.mark.parametrize("more", [{}, {"documents": ["def f(x):\n    return x\n" * 500]}])
def test_many_prompts_are_refused_before_work_is_done_on_them(
    server: Server, more: dict[str, Any]
) -> None:
    """They hold up the event loop otherwise, and with it everybody."""
    begun = time.monotonic()
    status, _ = server.post({"prompt": ["a"] * 1000, "n": 100, "max_tokens": 1, **more})
    assert status in (400, 429) and time.monotonic() - begun < 1


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"prompt": "x", "max_tokens": 0}, 400),
        ({"prompt": [1 << 40]}, 400),
        ({"prompt": "def f():" * 1000}, 400),
        ({"prompt": "x", "speculative": {"draft": "nothing"}}, 400),
        ({"prompt": "x", "n": 1000}, 400),
    ],
)
def test_refusals_are_not_accidents(server: Server, body: dict[str, Any], status: int) -> None:
    """They leave no traceback in the log (which the fixture looks at) and the connection open."""
    connection = server.connect()
    try:
        for _ in range(2):
            connection.request("POST", "/v1/completions", json.dumps(body), server.headers)
            response = connection.getresponse()
            assert response.status == status and json.loads(response.read())["error"]["message"]
    finally:
        connection.close()


@pytest.mark.parametrize("options", [{"messages": 1}, {"tools": []}, {"self": None}])
def test_template_options_with_names_of_ours(server: Server, options: dict[str, Any]) -> None:
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 1,
        "chat_template_kwargs": options,
    }
    assert server.post(body, "/v1/chat/completions")[0] == 400


# ------------------------------------------------------------ files and keys


def test_a_configuration_file_flags_and_keys(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(
        'max-rows = 2\nserved_name = "from the file"\napi_key = ["one"]\nmax_queue = 0\ndraft = "ngram"\n'
    )
    with serving(
        "--config", str(file), "--served-name", "from the flag", FORERUN_API_KEY="two"
    ) as server:
        assert server.get("/health")[0] == 200 and server.get("/v1/models")[0] == 401
        assert server.post(ONE)[0] == 401
        for key, status in (("one", 200), ("two", 200), ("three", 401), ("", 401)):
            server.headers["Authorization"] = f"Bearer {key}"
            assert server.get("/v1/models")[0] == status
        server.headers["Authorization"] = "Bearer two"
        assert json.loads(server.get("/v1/models")[1])["data"][0]["id"] == "from the flag"
        assert json.loads(server.get("/server_info")[1])["draft"] == "ngram"
        assert (
            server.post(ONE | {"n": 3})[0] in (400, 429) and server.post(ONE | {"n": 2})[0] == 200
        )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("port = ", "not TOML"),
        ("prot = 1", "did you mean 'port'"),
        ("port = 70000", "out of range"),
        (None, "read"),
    ],
)
def test_a_bad_configuration_file(tmp_path: Path, text: str | None, says: str) -> None:
    file = tmp_path / "serve.toml"
    if text is not None:
        file.write_text(text)
    code, said = run("serve", MODEL, "--config", str(file))
    assert code == 2 and len(said.splitlines()) == 1 and says in said, said


def test_an_interrupted_batch_goes_on_where_it_was(tmp_path: Path) -> None:
    flags = ("--model", MODEL, "--max-rows", "1", "--draft", "off")
    source, whole, parts = (tmp_path / name for name in ("in.jsonl", "whole.jsonl", "parts.jsonl"))
    bodies = [
        {"prompt": PROMPT, "max_tokens": 300, "temperature": 1, "seed": i, "ignore_eos": True}
        for i in range(12)
    ]
    jobs = [
        {"custom_id": f"job {i}", "url": "/v1/completions", "body": body}
        for i, body in enumerate(bodies)
    ]
    source.write_text("".join(json.dumps(job) + "\n" for job in jobs))
    assert run("batch", str(source), str(whole), *flags)[0] == 0
    with start("batch", str(source), str(parts), *flags) as process:
        try:
            until(
                lambda: parts.exists() and parts.read_bytes().count(b"\n") >= 2,
                "some answers are there",
            )
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 130 and "Traceback" not in said, said
    assert len(texts(parts)) < 12
    parts.write_bytes(parts.read_bytes()[:-20])  # as if it had been killed while it wrote
    assert run("batch", str(source), str(parts), *flags)[0] == 0
    assert texts(parts) == texts(whole) and len(texts(whole)) == 12


def texts(file: Path) -> dict[str, str]:
    """Custom ids to texts; each is there once."""
    answers = [json.loads(line) for line in file.read_text().splitlines()]
    found = {a["custom_id"]: a["response"]["body"]["choices"][0]["text"] for a in answers}
    assert len(found) == len(answers)
    return found


def test_a_batch_file_may_hold_any_character(tmp_path: Path) -> None:
    """JSON may hold line separators of Unicode; they end no line of a file."""
    source = tmp_path / "in.jsonl"
    job = {
        "custom_id": "a\u2028b",
        "url": "/v1/completions",
        "body": {"prompt": "x\x85y", "max_tokens": 1},
    }
    source.write_text(json.dumps(job, ensure_ascii=False) + "\r\n", encoding="utf-8")
    assert read_requests(source) == [job]
