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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from forerun.server import run as server_run
from forerun.server.listen import listen
from forerun.server.settings import Settings
from tests import tiny
from tests.forked import StderrProcess as start
from tests.server.serving import post_headers, until

ROOT = Path(__file__).parents[2]
PROMPT = "def walk(path):\n    for name in os.listdir(path):\n"
MODEL = str(tiny.repetitive())
LONG = 8000  # tokens; 24 texts of this length take longer than any test waits
REQUEST = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0.8, "seed": 3}
REQUEST |= {"return_token_ids": True}


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
        assert self.get("/health")[0] == 200
        self.usual_files = self.files() + 1  # the connection of this request may count

    def connect(self, sent: bytes) -> socket.socket:
        connection = socket.create_connection(self.address, timeout=30)
        connection.sendall(sent)
        return connection

    def get(self, path: str) -> tuple[int, str]:
        response = httpx2.get(self.url + path, headers=self.headers, timeout=30)
        return response.status_code, response.text

    def post(self, body: Any, path: str = "/v1/completions") -> tuple[int, dict[str, Any]]:
        response = httpx2.post(self.url + path, json=body, headers=self.headers, timeout=30)
        return response.status_code, response.json()

    def open_stream(self, **body: Any) -> Iterator[str]:
        """Start a stream, and yield its data lines."""
        connection = http.client.HTTPConnection(*self.address, timeout=30)
        content = json.dumps(REQUEST | {"stream": True} | body)
        connection.request("POST", "/v1/completions", content, self.headers)
        response = connection.getresponse()
        assert response.status == 200
        return (line.decode().strip().removeprefix("data: ") for line in response if line.strip())

    def gauge(self, name: str) -> float:
        lines = self.get("/metrics")[1].splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

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


def start_streams(server: Server, count: int, tokens: int) -> list[Iterator[str]]:
    """Start streams, of which some wait for a slot."""
    body = {"max_tokens": tokens, "ignore_eos": True, "speculative": False}
    with ThreadPoolExecutor(count) as pool:
        streams = list(pool.map(lambda seed: server.open_stream(**body, seed=seed), range(count)))
    until(lambda: server.gauge("forerun_running"), "requests run")
    return streams


def read_streams(streams: list[Iterator[str]]) -> list[int]:
    """Read streams, which must end regularly; return their numbers of tokens."""
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


@pytest.mark.parametrize(("sig", "bound"), [(signal.SIGTERM, 0.5), (signal.SIGINT, 0.0)])
def test_the_shutdown_timeout_ends_all_streams_regularly(sig: int, bound: float) -> None:
    with serving("--max-rows", "2", "--shutdown-timeout", str(bound)) as server:
        streams = start_streams(server, 24, LONG)
        server.process.send_signal(sig)
        assert sum(read_streams(streams)) < 24 * LONG
        assert server.end(bound + 4) == 0


def test_no_thread_of_the_engine_outlives_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a second signal uvicorn skips the application's shutdown; a thread in native code
    once aborted Python's exit then."""
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
    options, listener = (
        {"model": str(tiny.with_tokenizer()), "kv_tokens": 256},
        listen(Settings(port=0)),
    )
    assert server_run.run(options, Settings(), listener, False) == 0
    assert not servers[0].service._thread.is_alive()


def test_idle_and_incomplete_connections_do_not_delay_the_shutdown() -> None:
    with serving("--shutdown-timeout", "0") as server, ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(server.connect(post_headers(100) + b'{"prompt"'))
        idle = stack.enter_context(
            server.connect(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        )
        assert idle.recv(4096)
        server.process.send_signal(signal.SIGTERM)
        assert server.end(8) == 0


@pytest.mark.parametrize(
    ("sig", "codes"), [(signal.SIGTERM, (-signal.SIGTERM, 0)), (signal.SIGINT, (130,))]
)
def test_a_signal_during_loading_ends_the_process(sig: int, codes: tuple[int, ...]) -> None:
    with start_fresh("serve", MODEL, "--port", "0") as process:
        try:
            maps = Path(f"/proc/{process.pid}/maps")
            until(lambda: "libtorch_python" in maps.read_text(), "torch is loaded")
            process.send_signal(sig)
            _, errors = process.communicate(timeout=10)
        finally:
            process.kill()
    assert process.returncode in codes
    assert "Traceback" not in errors and len(errors.splitlines()) <= 1, errors


# ------------------------------------------------------------ clients


def test_incomplete_requests_are_closed_with_their_clients() -> None:
    with serving() as server:
        for body in (b"", b'{"prompt": "de'):
            with ExitStack() as stack:
                for _ in range(20):
                    stack.enter_context(server.connect(post_headers(100) + body))
                until(lambda: server.files() >= server.usual_files + 18, "they are open", 5)
                assert server.post(REQUEST)[0] == 200
            until(server.closed, "the connections are closed")


# ------------------------------------------------------------ files and keys


def test_configuration_file_flags_and_keys(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    lines = ["max-rows = 2", 'served_name = "from the file"', 'api_key = ["one"]', "max_queue = 0"]
    file.write_text("\n".join([*lines, 'draft = "ngram"']))
    flags = ("--config", str(file), "--served-name", "from the flag")
    with serving(*flags, FORERUN_API_KEY="two") as server:
        assert server.get("/health")[0] == 200 and server.post(REQUEST)[0] == 401
        for key, status in (("one", 200), ("two", 200), ("three", 401)):
            server.headers["Authorization"] = f"Bearer {key}"
            assert server.get("/v1/models")[0] == status
        server.headers["Authorization"] = "Bearer two"
        assert json.loads(server.get("/v1/models")[1])["data"][0]["id"] == "from the flag"
        assert json.loads(server.get("/server_info")[1])["draft"] == "ngram"
        assert server.post(REQUEST | {"n": 3})[0] in (400, 429)
        assert server.post(REQUEST | {"n": 2})[0] == 200


def test_an_interrupted_batch_continues(tmp_path: Path) -> None:
    flags = ("--model", MODEL, "--max-rows", "1", "--draft", "off")
    source, complete, cut = (tmp_path / name for name in ("input", "complete", "cut"))
    body = {"prompt": PROMPT, "max_tokens": 100, "temperature": 1, "ignore_eos": True}
    lines = [
        json.dumps({"custom_id": f"job {i}", "url": "/v1/completions", "body": body | {"seed": i}})
        for i in range(8)
    ]
    source.write_text("\n".join(lines))
    assert run("batch", str(source), str(complete), *flags)[0] == 0
    with start("batch", str(source), str(cut), *flags) as process:
        try:
            until(lambda: cut.exists() and cut.read_bytes().count(b"\n") >= 2, "two answers")
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 130 and "Traceback" not in errors, errors
    assert len(texts(cut)) < 8
    cut.write_bytes(cut.read_bytes()[:-20])  # as after a crash while writing
    assert run("batch", str(source), str(cut), *flags)[0] == 0
    assert texts(cut) == texts(complete) and len(texts(complete)) == 8


def texts(file: Path) -> dict[str, str]:
    """Return the texts by custom id, each of which must occur once."""
    answers = [json.loads(line) for line in file.read_text().splitlines()]
    found = {a["custom_id"]: a["response"]["body"]["choices"][0]["text"] for a in answers}
    assert len(found) == len(answers)
    return found
