"""Limits of JSON, threads and file descriptors, and the order in which requests start."""

from __future__ import annotations

import asyncio
import errno
import json
import resource
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.llm import LLM
from forerun.server import errors, limits
from forerun.server.errors import ApiError
from forerun.server.large_responses import json_slices
from forerun.server.limits import (
    DEPTH,
    ENTRIES,
    FIELDS,
    OBJECTS,
    VALUES,
    ThrottledThreads,
    count_characters,
    parse,
)
from forerun.server.settings import Settings
from forerun.server.state import ServerState
from tests import tiny
from tests.server.serving import REQUEST, connected, engine_blocked, post, serving, until
from tests.server.test_lifecycle import Server

ROOT = Path(__file__).parents[2]
STRINGS = st.sampled_from(['"', "\\", '\\"', "[{,:", '"\\'])
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | STRINGS
NUMBERS = st.integers(-(10**30), 10**30) | st.floats(allow_nan=False, allow_infinity=False)
VALUE = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda items: st.lists(items, max_size=5) | st.dictionaries(TEXT, items, max_size=5),
    max_leaves=40,
)


# ------------------------------------------------------------ JSON


@given(VALUE, st.booleans())
def test_json_is_parsed_and_written_as_json_does(value: Any, escaped: bool) -> None:
    assert parse(json.dumps(value, ensure_ascii=escaped).encode()) == value
    expected = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    assert {"".join(json_slices(value, levels)) for levels in range(6)} == {expected}


@pytest.mark.parametrize(
    "items", [list(range(1000)), [[1.5] * 200] * 3, [{"a": i} for i in range(200)]]
)
def test_slices_of_long_lists_join_to_the_value(items: list[Any]) -> None:
    value = {"choices": [{"logprobs": {"content": items}}], "data": items}
    assert json.loads("".join(json_slices(value))) == value


@pytest.mark.parametrize(
    "body, message",
    [
        (b"[" + b"1," * VALUES + b"1]", "values"),
        (b"[" + b"[]," * OBJECTS + b"1]", "lists and objects"),
        (b"[" + b",".join([b'{"a": 1, "b": 1, "c": 1, "d": 1, "e": 1}'] * 7000) + b"]", f"takes {FIELDS}"),
        (json.dumps(dict.fromkeys(map(str, range(ENTRIES + 1)))).encode(), "entries"),
        (b"[" * (DEPTH + 1) + b"]" * (DEPTH + 1), "deep"),
        (b'["' + b"a" * 50 + b'\\\\", ' + b"[" * (DEPTH + 1) + b"]" * (DEPTH + 2), "deep"),
        (b"[1" + b"0" * 5000 + b"]", "5001 digits"),
        *((f"[{text}]".encode(), "none that JSON has") for text in ("NaN", "1e999", '"\\ud800"', '"\\uDfff"')),
    ],
)  # fmt: skip
def test_json_over_a_limit_is_refused(body: bytes, message: str) -> None:
    with pytest.raises(ApiError, match=message) as error:
        parse(body)
    assert error.value.status == 400 and len(str(error.value)) < 120


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b'"', b"\xff", b'{"a": 1}}', "[1]".encode("utf-16"), b'\\"[', b"\xef\xbb\xbf1"],
)
def test_invalid_json_is_a_value_error(body: bytes) -> None:
    with pytest.raises(ValueError):
        parse(body)


def test_json_at_the_limits_is_parsed() -> None:
    assert parse(b"[" * DEPTH + b"]" * DEPTH)
    assert len(parse(b"[" + b"1," * (VALUES - 2) + b"1]")) == VALUES - 1
    assert len(parse(json.dumps(dict.fromkeys(map(str, range(ENTRIES)))).encode())) == ENTRIES
    text = '[{,:"\\' * 100_000  # brackets in a string do not count
    assert parse(json.dumps([text]).encode()) == [text]
    value = [{"role": "user", "n": 5, "parts": [{"text": "abc"}, None]}]
    assert count_characters(value) == len("roleusernpartstextabc")


# ------------------------------------------------------------ threads and turns


def test_threads_rest_after_long_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[float] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        call_later = loop.call_later
        await ThrottledThreads(1).run(lambda: None)  # the first thread takes longer

        def recorded(rest: float, call: Any) -> asyncio.TimerHandle:
            rests.append(rest)
            return call_later(rest, call)

        monkeypatch.setattr(loop, "call_later", recorded)
        threads = ThrottledThreads(1)
        assert await threads.run(lambda: 7) == 7
        await threads.run(time.sleep, 0.02)
        with pytest.raises(ZeroDivisionError):
            await threads.run(lambda: 1 / 0)
        monkeypatch.undo()

    monkeypatch.setattr(limits, "SHORT_CALL", 0.015)
    asyncio.run(main())
    assert rests[0] == rests[2] == 0.0
    assert limits.REST_FACTOR * 0.02 <= rests[1] <= limits.MAX_REST


def test_no_more_calls_run_than_there_are_threads() -> None:
    meeting = threading.Barrier(3)
    broken: list[bool] = []

    def work() -> None:
        try:
            meeting.wait(0.01)  # a third call at the same time would let all pass
        except threading.BrokenBarrierError:
            broken.append(True)

    async def main() -> None:
        threads = ThrottledThreads(2)
        await asyncio.gather(*(threads.run(work) for _ in range(6)))

    asyncio.run(main())
    assert len(broken) == 6


def test_one_request_starts_per_iteration_of_the_event_loop() -> None:
    nothing: Any = None
    passed: list[int] = []

    async def main() -> None:
        state, iteration = ServerState(nothing, "", "", 0.0, 0), 0

        async def one() -> None:
            await state.wait_turn()
            passed.append(iteration)

        tasks = [asyncio.create_task(one()) for _ in range(20)]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            iteration += 1

    asyncio.run(main())
    assert len(passed) == 20 == len(set(passed))


def test_nothing_is_parsed_for_a_client_that_left_before_its_turn(
    spare: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[bytes] = []
    turns: list[asyncio.Event] = []

    async def wait(_: ServerState) -> None:
        turns.append(asyncio.Event())
        if len(turns) == 1:
            await turns[0].wait()

    def recorded(body: bytes) -> Any:
        parsed.append(body)
        return parse(body)

    with serving(spare) as s:
        monkeypatch.setattr(ServerState, "wait_turn", wait)
        monkeypatch.setattr(limits, "parse", recorded)
        with connected(s, post(REQUEST)):
            until(lambda: len(turns) == 1, "the request waits for its turn")
        until(lambda: not s.server.server_state.connections, "the client has disconnected")
        s.service._post(turns[0].set)
        until(lambda: not s.server.server_state.tasks, "the request has ended")
        assert not parsed
        assert s.complete()["choices"] and len(parsed) == 1


# ------------------------------------------------------------ file descriptors


def test_the_number_of_connections_leaves_spare_file_descriptors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fitted(limit: int) -> int:
        monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit))
        return limits.fit_connections(Settings()).max_connections

    assert fitted(100_000) == fitted(resource.RLIM_INFINITY) == 512 and not caplog.records
    assert 1 < fitted(400) < 400 - limits.SPARE_DESCRIPTORS
    assert "may have 400 files open" in caplog.text and "--max-connections" in caplog.text
    assert fitted(50) == 1 and len(caplog.records) == 2


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EIO])
def test_a_failed_preparation_fails_only_its_own_request(
    spare: LLM, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    error = OSError(code, "on purpose")

    def fail(*_: object) -> None:
        raise error

    status, exhausted = errors.body(OSError(errno.ENFILE, "Too many open files"))
    assert status == 503 and "no file descriptor left" in exhausted["error"]["message"]
    with serving(spare) as s:
        with monkeypatch.context() as patch:
            patch.setattr(spare.engine.grammars, "compiled_each", fail)
            form = {"response_format": {"type": "regex", "regex": "zq+"}}
            answer = s.http.post("/v1/completions", json=REQUEST | form)
            assert answer.status_code == (503 if code == errno.EMFILE else 500)
            assert s.complete()["choices"] and s.service.failures == 0
        assert len(s.logged) == (0 if code == errno.EMFILE else 1)


def test_failed_housekeeping_ends_no_request(spare: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """An import without a free file descriptor once ended all requests."""
    attempts = []

    def fail(_: object) -> None:
        attempts.append(1)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("forerun.server.jobs.IDLE_SECONDS", 0.01)
    with serving(spare) as s, monkeypatch.context() as patch:
        patch.setattr(type(spare.cost_store), "save", fail)
        until(lambda: attempts, "the engine is idle")
        with engine_blocked(s.service):
            pass
        assert s.complete()["choices"] and s.service.failures == 0


FIRST_REQUESTS = """
import json, sys, threading
from forerun.llm import LLM
from tests.server.serving import serving
found = []
def hook(event, arguments):
    if event == "import" and threading.current_thread() is not threading.main_thread():
        found.append(arguments[0])
llm = LLM(sys.argv[1], context=2048, kv_tokens=8192, max_rows=8)
forms = [{"type": "regex", "regex": "a+"}, {"type": "choice", "choice": ["a", "b"]}]
forms += [{"type": "grammar", "grammar": 'start: "a"'}, {"type": "json_object"}]
with serving(llm, api_key=tuple(sys.argv[2:])) as s:
    s.http.headers["authorization"] = f"Bearer {sys.argv[-1]}"
    s.http.get("/health")
    sys.addaudithook(hook)
    for form in forms:
        s.complete(response_format=form)
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


@pytest.mark.one_in(2)
@pytest.mark.parametrize("key", [(), ("key",)], ids=["without keys", "with keys"])
def test_no_request_imports_a_module(key: tuple[str, ...]) -> None:
    """An import needs a file descriptor, and clients may hold all of them."""
    command = [sys.executable, "-c", FIRST_REQUESTS, str(tiny.repetitive()), *key]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []


def test_clients_cannot_take_all_file_descriptors() -> None:
    """With 160 descriptors and 400 open connections, requests are served and the log is short."""
    command = f"ulimit -n 160; exec {sys.executable} -m forerun serve {tiny.repetitive()} --port 0"
    with (
        subprocess.Popen(
            ["bash", "-c", command], cwd=ROOT, stderr=subprocess.PIPE, text=True
        ) as process,
        ExitStack() as stack,
    ):
        stack.callback(process.kill)
        server = Server(process)  # type: ignore[arg-type]
        server.wait_until_up()
        usual = server.post(REQUEST)
        half = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Le"
        for _ in range(400):
            stack.enter_context(server.connect(half))
        for i in range(4):
            form = {"response_format": {"type": "regex", "regex": f"a+{i}"}}
            assert server.post({"prompt": "x", "max_tokens": 4} | form)[0] == 200
        assert server.post(REQUEST)[1]["choices"] == usual[1]["choices"]
        process.terminate()
        server.end(20)
    lines = "".join(server.lines)
    assert lines.count("may have 160 files open") == 1 and len(server.lines) < 6, lines
