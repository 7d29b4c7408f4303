"""Server processes from start to end: signals, clients that misbehave, files and batches."""

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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
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
from tests.server.serving import head, until

ROOT = Path(__file__).parents[2]
PROMPT = "def walk(path):\n    for name in os.listdir(path):\n"
MODEL = str(tiny.spoken())
LONG = 8000  # tokens: 24 texts of that length take longer than any test waits
ONE = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0.8, "seed": 3, "return_token_ids": True}
GUARD = "times the speed of plain decoding: nothing is drafted"  # logged if drafts do not pay


def start_fresh(*arguments: str) -> subprocess.Popen[str]:
    """Start a process that has not imported anything yet."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "forerun", *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def run(*arguments: str) -> tuple[int, str]:
    """Return (exit code, stderr) of a process that ends by itself."""
    process = start(*arguments)
    try:
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode is not None
    return process.returncode, errors


class Server:
    """A server process that is up; `lines` are those of its stderr."""

    def __init__(self, process: start) -> None:
        self.process = process
        self.lines: list[str] = []
        self.reader = threading.Thread(
            target=lambda: self.lines.extend(process.stderr or ()), daemon=True
        )
        self.usual_files = 0
        self.address = ("", 0)
        self.headers = {"Content-Type": "application/json"}

    def wait_until_up(self) -> None:
        for line in self.process.stderr or ():
            self.lines.append(line)
            if "serving" in line:
                host, _, port = line.rsplit("//", 1)[1].strip().rpartition(":")
                self.address = (host, int(port))
                break
        assert self.address[1], "".join(self.lines)
        self.url = f"http://{self.address[0]}:{self.address[1]}"
        self.reader.start()
        until(self._answers, "the server answers", 10)
        self.usual_files = self.files() + 1  # the connection that asks may count

    def _answers(self) -> bool:
        try:
            return self.get("/health")[0] == 200
        except ConnectionError:
            return False

    def connect(self, sent: bytes = b"", receive_buffer: int = 0) -> socket.socket:
        connection = socket.socket()
        connection.settimeout(30)
        if receive_buffer:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.connect(self.address)
        connection.sendall(sent)
        return connection

    def _ask(self, method: str, path: str, body: Any = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection(*self.address, timeout=30)
        try:
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, self.headers)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def get(self, path: str) -> tuple[int, str]:
        return self._ask("GET", path)

    def post(self, body: Any, path: str = "/v1/completions") -> tuple[int, dict[str, Any]]:
        status, content = self._ask("POST", path, body)
        return status, json.loads(content)

    def open_stream(self, **body: Any) -> Iterator[str]:
        """Start a stream, and yield its data lines."""
        connection = http.client.HTTPConnection(*self.address, timeout=30)
        content = json.dumps(ONE | {"stream": True} | body)
        connection.request("POST", "/v1/completions", content, self.headers)
        response = connection.getresponse()
        assert response.status == 200
        return (line.decode().strip().removeprefix("data: ") for line in response if line.strip())

    def gauge(self, name: str) -> float:
        lines = self.get("/metrics")[1].splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    def idle(self) -> bool:
        return not any(self.gauge(f"forerun_{name}") for name in ("running", "waiting", "kv_used"))

    def closed(self) -> bool:
        """Return True if no more files and connections are open than at the start."""
        return self.files() <= self.usual_files

    def files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def end(self, seconds: float) -> int | None:
        """Return the exit code, which must come in time and without a traceback."""
        code = self.process.wait(timeout=seconds)
        self.reader.join(timeout=10)
        assert "Traceback" not in "".join(self.lines), "".join(self.lines)
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
    """A server that must be idle at its end and have logged nothing but the guard's line.

    Each chunk of a stream names the model; a long name soon fills the buffers of clients that do
    not read.
    """
    flags = ("--context", "2048", "--max-rows", "4", "--max-body", "100000")
    with serving(*flags, "--served-name", "x" * 20_000) as server:
        yield server
        until(server.idle, "nothing runs, waits or holds pages")
        server.process.send_signal(signal.SIGTERM)
        assert server.end(10) == 0
        lines = [line[-300:] for line in server.lines[1:] if GUARD not in line]
        assert not lines, lines


def load(server: Server, count: int, tokens: int) -> list[Iterator[str]]:
    """Start streams, of which some wait for a place."""
    body = {"max_tokens": tokens, "ignore_eos": True, "speculative": False}
    with ThreadPoolExecutor(count) as pool:
        streams = list(pool.map(lambda seed: server.open_stream(**body, seed=seed), range(count)))
    until(lambda: server.gauge("forerun_running"), "requests run")
    return streams


def finish(streams: list[Iterator[str]]) -> list[int]:
    """Read streams to their orderly ends; return their numbers of tokens."""
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


@pytest.mark.full
def test_running_requests_end_after_sigterm_and_new_ones_are_refused() -> None:
    with serving("--max-rows", "4", "--shutdown-timeout", "40") as server:
        streams = load(server, 8, 1000)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: server.get("/health")[0] == 503, "the server drains")
        status, body = server.post(ONE)
        assert status == 503 and body["error"]["type"] == "server_error"
        assert server.get("/ready")[0] == 503
        assert finish(streams) == [1000] * 8
        assert server.end(5) == 0


@pytest.mark.parametrize(("sign", "bound"), [(signal.SIGTERM, 0.5), (signal.SIGINT, 0.0)])
def test_the_shutdown_is_bounded_and_streams_end_in_order(sign: int, bound: float) -> None:
    with serving("--max-rows", "2", "--shutdown-timeout", str(bound)) as server:
        streams = load(server, 24, LONG)
        server.process.send_signal(sign)
        assert sum(finish(streams)) < 24 * LONG
        assert server.end(bound + 4) == 0


@pytest.mark.full
def test_a_second_sigterm_ends_at_once() -> None:
    with serving("--max-rows", "2", "--shutdown-timeout", "60") as server:
        streams = load(server, 24, LONG)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: server.get("/health")[0] == 503, "the server drains")
        server.process.send_signal(signal.SIGTERM)
        assert server.end(15) == 0
        del streams  # they were open until now


def test_no_thread_of_the_engine_outlives_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a second signal uvicorn skips the application's shutdown; a thread in native code has
    then aborted Python's exit."""
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


def test_idle_and_half_sent_connections_do_not_delay_the_end() -> None:
    with serving("--shutdown-timeout", "0") as server, ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(server.connect(head(100) + b'{"prompt"'))
        idle = stack.enter_context(
            server.connect(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        )
        assert idle.recv(4096)
        server.process.send_signal(signal.SIGTERM)
        assert server.end(8) == 0


@pytest.mark.parametrize(
    ("sign", "codes"), [(signal.SIGTERM, (-signal.SIGTERM, 0)), (signal.SIGINT, (130,))]
)
def test_a_signal_while_the_model_loads(sign: int, codes: tuple[int, ...]) -> None:
    with start_fresh("serve", MODEL, "--port", "0") as process:
        try:
            maps = Path(f"/proc/{process.pid}/maps")
            until(lambda: "libtorch_python" in maps.read_text(), "torch is loaded")
            process.send_signal(sign)
            _, errors = process.communicate(timeout=10)
        finally:
            process.kill()
    assert process.returncode in codes
    assert "Traceback" not in errors and len(errors.splitlines()) <= 1, errors


@pytest.mark.full
def test_the_printed_address_answers() -> None:
    with start_fresh("serve", MODEL, "--port", "0") as process:
        try:
            line = process.stderr.readline() if process.stderr else ""
            host, _, port = line.rsplit("//", 1)[1].strip().rpartition(":")
            socket.create_connection((host, int(port)), timeout=10).close()
        finally:
            process.kill()


def test_a_taken_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, errors = run("serve", MODEL, "--port", str(taken.getsockname()[1]))
    assert code == 2 and len(errors.splitlines()) == 1 and "cannot listen" in errors, errors


# ------------------------------------------------------------ clients

CLIENT = """
import select, socket, sys
request = sys.argv[2].encode()
streams = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(12)]
for stream in streams:
    stream.sendall(request)
started = 0
while started < 4:  # all four places are taken
    started = len(select.select(streams, [], [])[0])
print("started", flush=True)
sys.stdin.read()
"""


def endless() -> bytes:
    body = ONE | {"max_tokens": 1900, "ignore_eos": True, "speculative": False, "stream": True}
    content = json.dumps(body).encode()
    return head(len(content)) + content


@pytest.mark.full
def test_requests_of_a_killed_client_end(server: Server) -> None:
    arguments = [sys.executable, "-c", CLIENT, str(server.address[1]), endless().decode()]
    with subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as client:
        try:
            assert client.stdout is not None and client.stdout.readline() == "started\n"
        finally:
            client.kill()
    cancelled = 'forerun_requests_total{reason="cancelled"}'
    until(lambda: server.gauge(cancelled) >= 4, "those that ran are cancelled", 5)
    until(server.idle, "nothing runs", 5)
    until(server.closed, "its connections are closed", 5)


@pytest.mark.full
def test_a_client_that_never_reads_holds_up_nobody(server: Server) -> None:
    _, alone = server.post(ONE)
    with ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(server.connect(endless(), receive_buffer=4096))
        until(lambda: server.gauge("forerun_running"), "the requests run")
        _, beside = server.post(ONE)
        assert beside["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]
        until(server.idle, "the requests end without a reader")
        assert server.get("/ready")[0] == 200


@pytest.mark.parametrize("body", [b"", b'{"prompt": "de'], ids=["headers alone", "half a body"])
def test_incomplete_requests_are_closed_with_their_clients(server: Server, body: bytes) -> None:
    until(server.closed, "nothing is left of other tests")
    with ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(server.connect(head(100) + body))
        until(lambda: server.files() >= server.usual_files + 18, "the connections are open", 5)
        assert server.post(ONE)[0] == 200
    until(server.closed, "the connections are closed")
    assert server.get("/health")[0] == 200


@pytest.mark.parametrize("more", [{}, {"documents": ["def f(x):\n    return x\n" * 500]}])
def test_too_many_prompts_are_refused_before_work_is_done_on_them(
    server: Server, more: dict[str, Any]
) -> None:
    start_time = time.monotonic()
    status, _ = server.post({"prompt": ["a"] * 1000, "n": 100, "max_tokens": 1, **more})
    assert status in (400, 429) and time.monotonic() - start_time < 1


@pytest.mark.full
def test_refusals_keep_the_connection_and_the_log_clean(server: Server) -> None:
    """The fixture checks the log."""
    connection = http.client.HTTPConnection(*server.address, timeout=30)
    for body in (
        {"prompt": "x", "max_tokens": 0},
        {"prompt": [1 << 40]},
        {"prompt": "def f():" * 1000},
        {"prompt": "x", "speculative": {"draft": "nothing"}},
        {"prompt": "x", "n": 1000},
    ):
        connection.request("POST", "/v1/completions", json.dumps(body), server.headers)
        response = connection.getresponse()
        assert response.status == 400 and json.loads(response.read())["error"]["message"]
    connection.close()
    for options in ({"messages": 1}, {"tools": []}, {"self": None}):  # names of our own
        chat = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": options}
        assert server.post(chat | {"max_tokens": 1}, "/v1/chat/completions")[0] == 400


# ------------------------------------------------------------ files and keys


def test_a_configuration_file_flags_and_keys(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    lines = ["max-rows = 2", 'served_name = "from the file"', 'api_key = ["one"]', "max_queue = 0"]
    file.write_text("\n".join([*lines, 'draft = "ngram"']))
    flags = ("--config", str(file), "--served-name", "from the flag")
    with serving(*flags, FORERUN_API_KEY="two") as server:
        assert server.get("/health")[0] == 200 and server.post(ONE)[0] == 401
        for key, status in (("one", 200), ("two", 200), ("three", 401), ("", 401)):
            server.headers["Authorization"] = f"Bearer {key}"
            assert server.get("/v1/models")[0] == status
        server.headers["Authorization"] = "Bearer two"
        assert json.loads(server.get("/v1/models")[1])["data"][0]["id"] == "from the flag"
        assert json.loads(server.get("/server_info")[1])["draft"] == "ngram"
        assert server.post(ONE | {"n": 3})[0] in (400, 429)
        assert server.post(ONE | {"n": 2})[0] == 200


@pytest.mark.parametrize(("text", "says"), [("prot = 1", "did you mean 'port'"), (None, "read")])
def test_a_bad_configuration_file_is_one_line(tmp_path: Path, text: str | None, says: str) -> None:
    file = tmp_path / "serve.toml"
    if text is not None:
        file.write_text(text)
    code, errors = run("serve", MODEL, "--config", str(file))
    assert code == 2 and len(errors.splitlines()) == 1 and says in errors, errors


def test_an_interrupted_batch_continues(tmp_path: Path) -> None:
    flags = ("--model", MODEL, "--max-rows", "1", "--draft", "off")
    source, whole, parts = (tmp_path / name for name in ("in.jsonl", "whole.jsonl", "parts.jsonl"))
    body = {"prompt": PROMPT, "max_tokens": 100, "temperature": 1, "ignore_eos": True}
    lines = [
        json.dumps({"custom_id": f"job {i}", "url": "/v1/completions", "body": body | {"seed": i}})
        for i in range(8)
    ]
    source.write_text("\n".join(lines))
    assert run("batch", str(source), str(whole), *flags)[0] == 0
    with start("batch", str(source), str(parts), *flags) as process:
        try:
            until(lambda: parts.exists() and parts.read_bytes().count(b"\n") >= 2, "two answers")
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 130 and "Traceback" not in errors, errors
    assert len(texts(parts)) < 8
    parts.write_bytes(parts.read_bytes()[:-20])  # as if it had been killed while it wrote
    assert run("batch", str(source), str(parts), *flags)[0] == 0
    assert texts(parts) == texts(whole) and len(texts(whole)) == 8


def texts(file: Path) -> dict[str, str]:
    """Return the texts by custom id, each of which must be there once."""
    answers = [json.loads(line) for line in file.read_text().splitlines()]
    found = {a["custom_id"]: a["response"]["body"]["choices"][0]["text"] for a in answers}
    assert len(found) == len(answers)
    return found


def test_a_batch_file_may_hold_any_character(tmp_path: Path) -> None:
    """Unicode's line separators within JSON end no line of a file."""
    source = tmp_path / "in.jsonl"
    body = {"prompt": "x\x85y", "max_tokens": 1}
    job = {"custom_id": "a\u2028b", "url": "/v1/completions", "body": body}
    source.write_text(json.dumps(job, ensure_ascii=False) + "\r\n", encoding="utf-8")
    assert read_requests(source) == [job]
