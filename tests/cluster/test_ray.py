"""The whole of `forerun deploy` on Ray: two replicas of a tiny model, a stream, a death, an orderly end."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests import tiny
from tests.server.serving import sse

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the extra cluster")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[str], httpx2.Client]]:
    file = tmp_path_factory.mktemp("cluster") / "cluster.toml"
    model = f"[[models]]\nname = 'tiny'\nmodel = '{tiny.spoken()}'\nreplicas = 2\nthreads = 1\nkv_tokens = 4096\n"
    file.write_text(f"port = 0\nshutdown_timeout = 2\n{model}")
    command = [sys.executable, "-m", "forerun.cli", "deploy", str(file)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        said = next((line for line in process.stderr if "serving replicas" in line), "")
        address = re.search(r"http://[0-9.:]+$", said.strip())
        assert address, "the cluster did not start"
        with httpx2.Client(base_url=address[0], timeout=60) as http:
            yield process, http
    finally:
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=60)
    assert process.returncode == 0, rest


def where(http: httpx2.Client) -> dict[str, float]:
    """Requests that each replica has answered, by its own counters."""
    page = http.get("/metrics").text
    counted = re.findall(r'^forerun_requests_total\{.*replica="(\w+)".*\} ([0-9.]+)$', page, re.M)
    return {replica: float(count) for replica, count in counted}


def test_conversations_stay_where_they_began(cluster: tuple[subprocess.Popen[str], httpx2.Client]) -> None:
    _, http = cluster
    prompts = [f"{name} is here " * 40 for name in ("ann", "bob", "eve", "joe")]
    for prompt in prompts * 3:
        answer = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2})
        assert answer.status_code == 200, answer.text
    cached = [http.post("/v1/completions", json={"prompt": p, "max_tokens": 1}).json()["usage"] for p in prompts]
    assert all(usage["prompt_tokens_details"]["cached_tokens"] > 0 for usage in cached)
    assert sum(where(http).values()) == 16


def test_a_stream_is_that_of_a_whole_answer(cluster: tuple[subprocess.Popen[str], httpx2.Client]) -> None:
    _, http = cluster
    body = {"prompt": "hello", "max_tokens": 12, "seed": 3}
    whole = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        assert "".join(event["choices"][0]["text"] for event in sse(response)) == whole


def test_a_replica_that_is_killed_costs_no_request(cluster: tuple[subprocess.Popen[str], httpx2.Client]) -> None:
    process, http = cluster
    listed = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()[1:]]
    parents = {int(pid): int(parent) for pid, parent, _ in rows}

    def ours(pid: int) -> bool:
        while pid in parents and pid != process.pid:
            pid = parents[pid]
        return pid == process.pid

    replicas = [int(pid) for pid, _, words in rows if words.startswith("ray::ServeReplica") and ours(int(pid))]
    assert len(replicas) == 2
    os.kill(replicas[0], signal.SIGKILL)
    for _ in range(6):
        assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200
    end = time.monotonic() + 60
    while 'forerun_replicas{model="tiny"} 2.0' not in http.get("/metrics").text:  # and another one takes its place
        assert time.monotonic() < end
