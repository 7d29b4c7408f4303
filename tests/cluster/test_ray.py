"""The whole of `forerun deploy` on Ray: two replicas of a tiny model, a stream, a death, an orderly
end."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx2
import pytest

from tests import tiny
from tests.cluster.deployed import NEEDS_RAY, deployed
from tests.server.serving import sse, until

pytestmark = NEEDS_RAY


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[subprocess.Popen[str], httpx2.Client]]:
    with deployed(
        f"[[models]]\nname = 'tiny'\nmodel = '{tiny.spoken()}'\nreplicas = 2\nthreads = 1\nkv_tokens = 4096"
    ) as running:
        yield running


def where(http: httpx2.Client) -> dict[str, float]:
    """Requests that each replica has answered, by its own counters."""
    page = http.get("/metrics").text
    counted = re.findall(r'^forerun_requests_total\{.*replica="(\w+)".*\} ([0-9.]+)$', page, re.M)
    return {replica: float(count) for replica, count in counted}


def test_conversations_stay_where_they_began(
    cluster: tuple[subprocess.Popen[str], httpx2.Client],
) -> None:
    _, http = cluster
    prompts = [f"{name} is here " * 40 for name in ("ann", "bob", "eve", "joe")]
    for prompt in prompts * 3:
        answer = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2})
        assert answer.status_code == 200, answer.text
    cached = [
        http.post("/v1/completions", json={"prompt": p, "max_tokens": 1}).json()["usage"]
        for p in prompts
    ]
    assert all(usage["prompt_tokens_details"]["cached_tokens"] > 0 for usage in cached)
    assert sum(where(http).values()) == 16


def test_a_stream_is_that_of_a_whole_answer(
    cluster: tuple[subprocess.Popen[str], httpx2.Client],
) -> None:
    _, http = cluster
    body = {"prompt": "hello", "max_tokens": 12, "seed": 3}
    whole = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        assert "".join(event["choices"][0]["text"] for event in sse(response)) == whole


def test_answers_come_over_sockets(cluster: tuple[subprocess.Popen[str], httpx2.Client]) -> None:
    process, http = cluster
    folder = Path(process.args[-1]).parent  # type: ignore[index]
    body = {"prompt": "hello", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    http.post("/v1/completions", json=body | {"max_tokens": 1, "stream": False})
    until(lambda: len(sockets(folder)) == 2, "each replica listens, and nothing else is open")
    with http.stream("POST", "/v1/completions", json=body) as response:
        next(iter(response.iter_lines()))
        assert len(sockets(folder)) == 3


def sockets(folder: Path) -> list[str]:
    """Sockets of replicas, those that listen and those of a request."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return [line.split()[-1] for line in lines if f"{folder}/forerun-" in line]


def test_a_hold_on_a_replica_that_has_died_waits_for_nobody() -> None:
    """In Ray's queue it would keep all requests behind it from every replica."""
    from forerun.cluster.envelope import Hold
    from forerun.cluster.router import PrefixRouter

    router = object.__new__(PrefixRouter)
    router.named = {"here": "here"}  # type: ignore[dict-item]
    for replica, chosen in (("here", ["here"]), ("gone", ["here", "there"])):
        pending = SimpleNamespace(args=[Hold("one", replica)], routing_context=SimpleNamespace())
        assert asyncio.run(router.choose_replicas(["here", "there"], pending)) == [chosen]  # type: ignore[arg-type]


def test_a_model_that_nothing_is_asked_of_ends_and_starts_again() -> None:
    model = f"[[models]]\nname = 'tiny'\nmodel = '{tiny.spoken()}'\nthreads = 1\nkv_tokens = 1024"
    with deployed(f"{model}\nreplicas = {{ min = 0, max = 2, idle = 1 }}") as (_, http):
        body = {"prompt": "hello", "max_tokens": 12, "seed": 3}
        before = http.post("/v1/completions", json=body).json()["choices"]
        end = time.monotonic() + 120
        while 'forerun_replicas{model="tiny"} 0.0' not in http.get("/metrics").text:
            assert time.monotonic() < end
            time.sleep(0.5)
        assert http.get("/health").status_code == 200
        assert http.post("/v1/completions", json=body).json()["choices"] == before


def test_a_new_file_replaces_all_replicas_and_costs_no_request(tmp_path: Path) -> None:
    plan = f"[[models]]\nname = 'tiny'\nmodel = '{tiny.spoken()}'\nreplicas = 2\nthreads = 1\nkv_tokens = "
    file = tmp_path / "plan.toml"
    with deployed(f"{plan}1024", file) as (process, http):
        before, after = there(http), set[str]()
        file.write_text("no plan")
        process.send_signal(signal.SIGUSR1)
        assert process.stderr and next(
            line for line in process.stderr if "replicas are not replaced" in line
        )
        assert there(http) == before
        file.write_text(f"{plan}2048")
        process.send_signal(signal.SIGUSR1)
        end = time.monotonic() + 120
        while before & after or len(after) < 2:
            assert (
                http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code
                == 200
            )
            after = there(http)
            assert time.monotonic() < end


def there(http: httpx2.Client) -> set[str]:
    """The replicas."""
    return {*re.findall(r'^forerun_running\{.*replica="(\w+)"', http.get("/metrics").text, re.M)}


def test_a_replica_that_is_killed_costs_no_request(
    cluster: tuple[subprocess.Popen[str], httpx2.Client],
) -> None:
    process, http = cluster
    listed = subprocess.run(
        ["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()[1:]]
    parents = {int(pid): int(parent) for pid, parent, _ in rows}

    def ours(pid: int) -> bool:
        while pid in parents and pid != process.pid:
            pid = parents[pid]
        return pid == process.pid

    replicas = [
        int(pid)
        for pid, _, words in rows
        if words.startswith("ray::ServeReplica") and ours(int(pid))
    ]
    assert len(replicas) == 2
    os.kill(replicas[0], signal.SIGKILL)
    for _ in range(6):
        assert (
            http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200
        )
    end = time.monotonic() + 60
    while (
        'forerun_replicas{model="tiny"} 2.0' not in http.get("/metrics").text
    ):  # and another one takes its place
        assert time.monotonic() < end
