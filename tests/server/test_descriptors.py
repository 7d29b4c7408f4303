"""A server that runs out of file descriptors refuses connections, and fails in nothing else."""

from __future__ import annotations

import errno
import json
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from forerun.llm import LLM
from forerun.server import descriptors, errors
from forerun.server.settings import Settings
from tests import tiny
from tests.server.serving import held, serving, until
from tests.server.test_lifecycle import Server

ROOT = Path(__file__).parents[2]
ASKED = {"prompt": "def add(a, b):", "max_tokens": 8, "seed": 1}


def limited_to(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit))


def test_connections_are_bounded_below_the_limit_of_the_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limited_to(monkeypatch, 100_000)
    assert descriptors.within_limit(Settings()).max_connections == 512 and not caplog.records
    limited_to(monkeypatch, 400)
    one, two = (descriptors.within_limit(Settings(), each).max_connections for each in (1, 2))
    assert 0 < two <= one // 2 < one < 400 - descriptors.SPARE
    assert "may have 400 files open" in caplog.text and "--max-connections" in caplog.text
    assert len(caplog.records) == 2
    limited_to(monkeypatch, 50)
    assert descriptors.within_limit(Settings()).max_connections == 1
    limited_to(monkeypatch, resource.RLIM_INFINITY)
    assert descriptors.within_limit(Settings()).max_connections == 512


@pytest.mark.parametrize(
    "error", [OSError(errno.EMFILE, "Too many open files"), OSError(errno.ENFILE, "x")]
)
def test_what_needs_a_descriptor_that_is_not_there_is_told_to_come_back(error: OSError) -> None:
    status, body = errors.body(error)
    assert status == 503 and "no file descriptor left" in body["error"]["message"]


@pytest.mark.parametrize(
    "error", [OSError(errno.EMFILE, "Too many open files"), OSError(errno.EIO, "Broken")]
)
def test_a_preparation_that_fails_concerns_its_own_request(
    spare: LLM, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    def fail(*_: object) -> None:
        raise error

    with serving(spare) as s:
        with monkeypatch.context() as patch:
            patch.setattr(spare.engine.grammars, "compiled_each", fail)
            answer = s.http.post(
                "/v1/completions",
                json=ASKED | {"response_format": {"type": "regex", "regex": "zq+"}},
            )
            assert answer.status_code == (503 if error.errno == errno.EMFILE else 500)
            assert s.complete()["choices"] and s.service.failures == 0
        assert len(s.logged) == (0 if error.errno == errno.EMFILE else 1)


def test_what_the_engine_does_while_it_rests_ends_no_request(
    spare: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An import that found no descriptor ended all requests: "the engine failed; it starts
    over"."""
    tried = []

    def fail() -> None:
        tried.append(1)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("forerun.server.service.REST", 0.01)
    with serving(spare) as s, monkeypatch.context() as patch:
        patch.setattr(type(spare.learned), "keep", lambda self: fail())
        until(lambda: tried, "the engine rests")
        with held(s.service):
            pass
        assert s.complete()["choices"] and s.service.failures == 0


FIRST = """
import json, sys, threading
from forerun.llm import LLM
from tests.server.serving import serving
found = []
def hook(event, arguments):
    if event == "import" and threading.current_thread() is not threading.main_thread():
        found.append(arguments[0])
llm = LLM(sys.argv[1], context=2048, kv_tokens=8192, max_rows=8)
with serving(llm, api_key=tuple(sys.argv[2:])) as s:
    s.http.headers["authorization"] = f"Bearer {sys.argv[-1]}"
    s.http.get("/health")
    sys.addaudithook(hook)
    for kind, value in (("regex", "a+"), ("choice", ["a", "b"]), ("grammar", 'start: "a"'), ("json_object", None)):
        s.complete(response_format={"type": kind, kind: value} if value else {"type": kind})
    s.complete(logprobs=3, n=2, top_k=5, stop=["q"], logit_bias={"5": 1}, repetition_penalty=1.1)
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    s.answer("/v1/chat/completions", chat)
    s.http.post("/v1/chat/completions", json=chat | {"stream": True}).raise_for_status()
    s.answer("/v1/responses", {"input": "x", "max_output_tokens": 4})
    s.answer("/v1/embeddings", {"input": "x"})
    s.answer("/tokenize", {"prompt": "x"})
    for path in ("/metrics", "/server_info", "/ready", "/v1/models", "/"):
        s.http.get(path).raise_for_status()
    s.http.post("/nowhere", json={})
print(json.dumps(found))
"""


@pytest.mark.parametrize("key", [(), ("key",)], ids=["without keys", "with keys"])
def test_nothing_is_imported_for_a_request(key: tuple[str, ...]) -> None:
    """What may need a descriptor is there before the first client."""
    command = [sys.executable, "-c", FIRST, str(tiny.spoken()), *key]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []


@contextmanager
def started(limit: int) -> Iterator[Server]:
    """A server process that may have so many files open."""
    command = f"ulimit -n {limit}; exec {sys.executable} -m forerun serve {tiny.spoken()} --port 0"
    with subprocess.Popen(
        ["bash", "-c", command], cwd=ROOT, stderr=subprocess.PIPE, text=True
    ) as process:
        server = Server(process)  # type: ignore[arg-type]
        try:
            server.wait_until_up()
            yield server
        finally:
            process.kill()


def test_clients_cannot_take_all_descriptors() -> None:
    """400 half-sent connections under a low limit: others are served, grammars too, and the log has
    few lines."""
    with started(160) as server, ExitStack() as stack:
        usual = server.post(ASKED)
        for _ in range(400):
            connection = stack.enter_context(socket.socket())
            connection.settimeout(10)
            connection.connect(server.address)
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Le")
        for i in range(4):
            asked = {
                "prompt": "x",
                "max_tokens": 4,
                "response_format": {"type": "regex", "regex": f"a+{i}"},
            }
            assert server.post(asked)[0] == 200
        assert server.post(ASKED)[1]["choices"] == usual[1]["choices"]
        server.process.terminate()
        server.end(20)
    said = "".join(server.said)
    assert said.count("may have 160 files open") == 1 and len(server.said) < 6, said
