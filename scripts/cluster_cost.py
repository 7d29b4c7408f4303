#!/usr/bin/env python3
"""Measure what Ray Serve costs in front of replicas, compared with servers that are asked directly.

    python scripts/cluster_cost.py

Starts two replicas behind `forerun deploy` and two `forerun serve` with the same options on
127.0.0.1 and sends requests to both in turn, so that a slow moment of the machine affects both.
Prints JSON:

- `prefixes`: share of prompt tokens found in a prefix cache, in conversations of several turns, of
  one server and of the cluster.
- `small`: milliseconds of a request that costs a replica next to nothing; `added_ms` are those that
  the cluster adds.
- `first`: milliseconds to the first part of a stream.
- `tokens`: tokens per second of concurrent streams, and processor time per token of each kind of
  process.
- `ray`: milliseconds of a call of Ray that streams one object: there, back, and in all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from cluster_soak import cluster, replicas_of
from load import httpx
from processes import address, below

OPTIONS = {"threads": 1, "kv_tokens": 32768, "max_rows": 8}
SYSTEMS, CONVERSATIONS, TURNS = 4, 12, 5
TICK = os.sysconf("SC_CLK_TCK")
Stats = dict[str, float]
Ask = Callable[[Any, int], Awaitable[float]]


def plan(draft: str) -> str:
    """Return the TOML file of a cluster with two replicas."""
    options = "\n".join(f"{name} = {value}" for name, value in OPTIONS.items())
    return f'[[models]]\nname = "m"\nreplicas = 2\ndraft = "{draft}"\n{options}\n'


@contextmanager
def server(draft: str) -> Iterator[tuple[int, str]]:
    """`forerun serve` with the options of a replica: its process and its address."""
    command = [sys.executable, "-m", "forerun", "serve", "--port", "0"]
    command += ["--served-name", "m", "--draft", draft]
    command += [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    with tempfile.NamedTemporaryFile("w") as log:
        process = subprocess.Popen(command, stderr=log)
        try:
            yield process.pid, address(process, Path(log.name))
        finally:
            process.terminate()
            process.wait(30)


# ------------------------------------------------------------ prefixes


async def cached_share(url: str, at_once: int = 3) -> float:
    """Of the prompt tokens of all conversations' turns, the share that came from a cache."""
    turns = [list(range(TURNS)) for _ in range(CONVERSATIONS)]
    gate = asyncio.Semaphore(at_once)
    conversations: list[list[dict[str, str]]] = []
    for i in range(CONVERSATIONS):
        system = (
            f"You are assistant {i % SYSTEMS}, and these are your rules. "
            + "Be exact and kind. " * 40
        )
        conversations.append([{"role": "system", "content": system}])
    usages: list[dict[str, Any]] = []

    async def converse(client: Any, number: int) -> None:
        for turn in turns[number]:
            question = (
                f"Question {turn} of conversation {number}: "
                f"what about {'abcdefgh'[(number + turn) % 8] * 9}? " * 3
            )
            conversations[number].append({"role": "user", "content": question})
            async with gate:
                messages = conversations[number]
                body = {"model": "m", "messages": messages, "max_tokens": 24, "temperature": 0}
                answer = (
                    (await client.post("/v1/chat/completions", json=body)).raise_for_status().json()
                )
            usages.append(answer["usage"])
            conversations[number].append(
                {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}
            )

    async with httpx.AsyncClient(base_url=url, timeout=120) as client, asyncio.TaskGroup() as group:
        for number in range(CONVERSATIONS):
            group.create_task(converse(client, number))
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    return round(cached / sum(usage["prompt_tokens"] for usage in usages), 4)


# ------------------------------------------------------------ time


async def stream(client: Any, number: int, tokens: int) -> tuple[float, int]:
    """(Seconds to the first piece, tokens) of one stream."""
    text = f"{number}: " + "the quick brown fox jumps over the lazy dog " * 3
    body = {
        "model": "m",
        "prompt": text,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    body |= {"stream_options": {"include_usage": True}}
    start, first, count = time.perf_counter(), 0.0, 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                first = first or time.perf_counter() - start
                count = (json.loads(line[6:]).get("usage") or {}).get("completion_tokens", count)
    return first, count


async def first_piece(client: Any, number: int) -> float:
    """Seconds to the first piece of a stream."""
    return (await stream(client, number, 4))[0]


async def small(client: Any, number: int) -> float:
    """Seconds of a request that costs a replica next to nothing."""
    start = time.perf_counter()
    (
        await client.post("/tokenize", json={"model": "m", "prompt": f"{number} hello"})
    ).raise_for_status()
    return time.perf_counter() - start


async def in_turn(ask: Ask, url: str, servers: Sequence[str], count: int) -> dict[str, Any]:
    """Return milliseconds of the cluster and of a server, one request after the other."""
    seconds: dict[str, list[float]] = {"cluster": [], "direct": []}
    async with clients([url, *servers]) as (behind, *ahead):
        for i in range(count + 10):
            for name, client in (("cluster", behind), ("direct", ahead[i % len(ahead)])):
                taken = await ask(client, i)
                if i >= 10:  # the first ones open connections and warm up
                    seconds[name].append(1e3 * taken)
    medians = {name: round(median(values), 2) for name, values in seconds.items()}
    added = [
        behind - ahead for behind, ahead in zip(seconds["cluster"], seconds["direct"], strict=True)
    ]
    quarters = [round(each, 2) for each in quantiles(added, n=4)]
    return {
        "requests": count,
        "ms": medians,
        "added_ms": {"median": quarters[1], "quartiles": quarters[::2]},
    }


async def tokens_a_second(
    proxied: tuple[int, str], servers: Sequence[tuple[int, str]], rounds: int, at_once: int
) -> dict[str, Any]:
    """Measure concurrent streams through the cluster and shared by the servers, in turn."""
    speeds: dict[str, list[float]] = {"cluster": [], "direct": []}
    spent: dict[str, list[Stats]] = {"cluster": [], "direct": []}
    async with clients([proxied[1], *(url for _, url in servers)]) as (behind, *ahead):
        for i in range(rounds + 1):
            for name, those in (("cluster", [behind]), ("direct", ahead)):
                before, start = processor(proxied[0], servers), time.perf_counter()
                work = [stream(those[j % len(those)], 100 * i + j, 96) for j in range(3 * at_once)]
                tokens = sum(await limited(work, at_once))
                after, taken = processor(proxied[0], servers), time.perf_counter() - start
                if i:  # the first round warms up
                    speeds[name].append(tokens / taken)
                    spent[name].append(
                        {kind: 1e3 * (after[kind] - before[kind]) / tokens for kind in after}
                    )
    medians = {name: round(median(values), 1) for name, values in speeds.items()}
    ratios = sorted(a / b for a, b in zip(speeds["cluster"], speeds["direct"], strict=True))
    processors = {
        name: {kind: round(median(row[kind] for row in rows), 2) for kind in rows[0]}
        for name, rows in spent.items()
    }
    ratio = {
        "median": round(median(ratios), 3),
        "least": round(ratios[0], 3),
        "most": round(ratios[-1], 3),
    }
    return {
        "streams": at_once,
        "rounds": rounds,
        "per_second": medians,
        "ratio": ratio,
        "cpu_ms_a_token": processors,
    }


async def limited(work: Sequence[Any], at_once: int) -> list[int]:
    """The tokens of each stream, so many at a time."""
    gate = asyncio.Semaphore(at_once)

    async def one(task: Any) -> int:
        async with gate:
            return int((await task)[1])

    return await asyncio.gather(*(one(task) for task in work))


@asynccontextmanager
async def clients(urls: Sequence[str]) -> AsyncIterator[list[Any]]:
    """Clients of several addresses, closed together."""
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=120))
            for url in urls
        ]


def processor(cluster: int, servers: Sequence[tuple[int, str]]) -> Stats:
    """Seconds of processor time that each kind of process has taken so far."""
    replicas = replicas_of(cluster)
    rest = [pid for pid in below(cluster)[1:] if pid not in replicas]
    kinds = {
        "deploy": [cluster],
        "replicas": replicas,
        "ray": rest,
        "servers": [pid for pid, _ in servers],
    }
    kinds["client"] = [os.getpid()]
    return {kind: sum(map(ticks, pids)) / TICK for kind, pids in kinds.items()}


def ticks(pid: int) -> int:
    """Of the processor, in user and kernel."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(words[11]) + int(words[12])


# ------------------------------------------------------------ Ray alone

ALONE = """
import asyncio, json, statistics, time, logging
import ray
from ray import serve

@serve.deployment(max_ongoing_requests=100)
class Clock:
    async def answer(self, _):
        begun = time.monotonic()
        yield [begun, time.monotonic()]

async def ask(handle):
    rows = []
    for i in range(COUNT + 20):
        start = time.monotonic()
        async for begun, sent in handle.answer.remote(b"x" * 600):
            got = time.monotonic()
        rows.append((1e3 * (begun - start), 1e3 * (got - sent), 1e3 * (got - start)))
    return [round(statistics.median(column), 2) for column in zip(*rows[20:])]

ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
serve.start(proxy_location="Disabled")
handle = serve.run(Clock.bind(), name="clock", route_prefix=None).options(stream=True)
print(json.dumps(dict(zip(("there_ms", "back_ms", "in_all_ms"), asyncio.run(ask(handle))))))
serve.shutdown()
ray.shutdown()
"""


def ray_alone(count: int) -> dict[str, Any]:
    """What a call of a deployment takes that does nothing."""
    script = ALONE.replace("COUNT", str(count))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300
    )
    found: dict[str, Any] = json.loads(
        next(line for line in done.stdout.splitlines() if line.startswith("{"))
    )
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--draft", default="off", help="what drafts (default: off, where tokens cost the same)"
    )
    parser.add_argument(
        "--requests", type=int, default=100, help="for the time to the first piece (default: 100)"
    )
    parser.add_argument("--rounds", type=int, default=7, help="of tokens a second (default: 7)")
    parser.add_argument("--streams", type=int, default=4, help="at once (default: 4)")
    options = parser.parse_args()
    found: dict[str, Any] = {
        "draft": options.draft,
        "options": OPTIONS,
        "ray": ray_alone(options.requests),
    }
    print(found, file=sys.stderr, flush=True)
    with server(options.draft) as one:
        shares = {"one server": asyncio.run(cached_share(one[1]))}
        with cluster(plan(options.draft)) as (process, url), server(options.draft) as other:
            shares["cluster"] = asyncio.run(cached_share(url))
            urls = [one[1], other[1]]
            found["small"] = asyncio.run(in_turn(small, url, urls, options.requests))
            found["first"] = asyncio.run(in_turn(first_piece, url, urls, options.requests))
            speeds = tokens_a_second(
                (process.pid, url), [one, other], options.rounds, options.streams
            )
            found["tokens"] = asyncio.run(speeds)
    print(found, file=sys.stderr, flush=True)
    found["prefixes"] = shares | {
        "of one server's": round(shares["cluster"] / shares["one server"], 3)
    }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
