"""`forerun deploy` from end to end: a cluster on Ray with two models, used over HTTP."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from tests import tiny
from tests.cluster.deployed import NEEDS_RAY, deployed, descendants
from tests.server.serving import sse, until

pytestmark = NEEDS_RAY
MODEL = f"model = '{tiny.repetitive()}'\nthreads = 1\nkv_tokens = 8192\ncontext = 2048\n"
KEY = {"authorization": "Bearer secret"}
LONG = {"prompt": "hello", "max_tokens": 1900, "ignore_eos": True}


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[subprocess.Popen[str], httpx2.Client]]:
    first = f"[[models]]\nname = 'small'\nreplicas = 2\n{MODEL}"
    second = f"[[models]]\nname = 'other'\n{MODEL}"
    with deployed(f"api_key = 'secret'\n{first}{second}") as (process, http):
        http.headers.update(KEY)
        yield process, http


@pytest.fixture
def http(cluster: tuple[subprocess.Popen[str], httpx2.Client]) -> httpx2.Client:
    return cluster[1]


def metric(http: httpx2.Client, name: str, model: str = "small") -> dict[str, float]:
    """Return the values of a metric by replica."""
    found = re.findall(rf"^{name}{{(.*)}} (\S+)$", http.get("/metrics").text, re.M)
    values: dict[str, float] = {}
    for labels, value in found:
        if f'model="{model}"' in labels:
            replica = re.search(r'replica="(\w+)"', labels)
            assert replica
            values[replica[1]] = values.get(replica[1], 0.0) + float(value)
    return values


def test_keys_are_needed_for_all_but_health(http: httpx2.Client) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    without = httpx2.Client(base_url=http.base_url)
    assert without.get("/health").status_code == 200
    assert without.get("/v1/models").status_code == 401
    assert without.post("/v1/completions", json={"prompt": "x"}).status_code == 401
    assert http.get("/ready").json() == {"status": "ready"}


def test_a_stream_has_the_text_of_a_full_answer(http: httpx2.Client) -> None:
    body = {"prompt": "hello", "max_tokens": 12, "seed": 3}
    answer = http.post("/v1/completions", json=body, headers={"x-request-id": "mine"})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-request-id"] == "mine"
    full = answer.json()["choices"][0]["text"]
    with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        assert "".join(event["choices"][0]["text"] for event in sse(response)) == full
    other = http.post("/v1/completions", json=body | {"model": "other"}).json()
    assert other["model"] == "other"
    assert other["choices"][0]["text"] == full


def test_models_are_listed_together_and_unknown_ones_refused(http: httpx2.Client) -> None:
    assert [card["id"] for card in http.get("/v1/models").json()["data"]] == ["small", "other"]
    assert http.get("/v1/models/other").json()["id"] == "other"
    answer = http.post("/v1/completions", json={"prompt": "x", "model": "absent"})
    assert answer.status_code == 404
    assert "'small', 'other'" in answer.json()["error"]["message"]


def test_turns_of_a_conversation_use_the_prefix_cache(http: httpx2.Client) -> None:
    before = metric(http, "forerun_requests_total")
    for name in ("ann", "bob", "eve", "joe", "kim", "lea"):
        prompt = f"{name} is here and asks for more. " * 20
        for turn in range(3):
            body = {"prompt": prompt, "max_tokens": 2}
            usage = http.post("/v1/completions", json=body).json()["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert (cached > 0) == (turn > 0), (name, turn)
            prompt += f"turn {turn} "
    after = metric(http, "forerun_requests_total")
    assert sum(after.values()) - sum(before.values()) == 18
    assert len(after) == 2  # the conversations are spread over both replicas


def test_a_disconnect_ends_the_request(http: httpx2.Client) -> None:
    body = LONG | {"n": 32, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        assert sum(metric(http, "forerun_running").values()) > 0
    until(lambda: not sum(metric(http, "forerun_running").values()), "the request has ended")


def test_a_killed_replica_ends_streams_with_an_error_and_other_requests_succeed(
    cluster: tuple[subprocess.Popen[str], httpx2.Client],
) -> None:
    process, http = cluster
    replicas = descendants(process.pid, "ray::ServeReplica:forerun-0:")
    assert len(replicas) == 2

    def ask(number: int) -> dict[str, Any]:
        body = LONG | {"prompt": f"question {number}", "stream": number % 2 == 0}
        with http.stream("POST", "/v1/completions", json=body, timeout=60) as response:
            assert response.status_code == 200
            if number % 2:
                response.read()
                return dict(response.json())
            *_, last = sse(response)
            return last

    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(ask, number) for number in range(8)]
        until(lambda: sum(metric(http, "forerun_running").values()) > 4, "a stream is running")
        for pid in replicas:
            os.kill(pid, signal.SIGKILL)
        last = [answer.result() for answer in answers]
    full, streamed = last[1::2], last[0::2]
    assert all(answer["usage"]["completion_tokens"] == 1900 for answer in full)
    errors = [event["error"]["message"] for event in streamed if "error" in event]
    assert errors
    assert all("has died" in error for error in errors)
    assert all("error" in event or event["choices"][0]["finish_reason"] for event in streamed)
    until(lambda: len(metric(http, "forerun_running")) == 2, "new replicas are up", timeout=90)


def test_sigterm_finishes_running_requests_and_refuses_new_ones() -> None:
    """The fixture `deployed` checks that the exit code is 0 and no process is left."""
    with deployed(f"[[models]]\nname = 'small'\n{MODEL}") as (process, http):
        short = LONG | {"max_tokens": 900, "stream": True}
        with ThreadPoolExecutor(1) as pool:
            long = pool.submit(http.post, "/v1/completions", json=LONG)
            with http.stream("POST", "/v1/completions", json=short) as response:
                events = sse(response)
                next(events)
                process.send_signal(signal.SIGTERM)
                until(lambda: http.get("/health").status_code == 503, "health reports the shutdown")
                *_, last = events
        assert last["choices"][0]["finish_reason"] == "length"
        assert long.result().status_code in (200, 503)  # it completed, or was ended with an error
