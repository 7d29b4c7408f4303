#!/usr/bin/env python3
"""Load a running server with many streams, clients that vanish among them, and check that it stays
exact and whole.

    forerun serve --port 8000 &
    python scripts/load.py http://127.0.0.1:8000 --streams 64 --seconds 300 --pid $!

Checked: fixed probes give the same token ids alone, under load and afterwards, with speculation and
without; every stream that is read to its end has a finish reason, [DONE] and as many tokens as its
usage says; no error but 429; afterwards nothing runs, nothing waits and no page is held; memory
does not grow. Exit code 1 where one of these fails."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any

try:
    import httpx2 as httpx
except ImportError:
    import httpx

TEXTS = (
    "import argparse\nimport sys\n\n\ndef main():\n    parser = argparse.ArgumentParser()\n"
    "    parser.add_argument('--name', default=None)\n    args = parser.parse_args()\n    return args\n",
    "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n\n"
    "    def __add__(self, other):\n        return Point(self.x + other.x, self.y + other.y)\n",
    "def quicksort(items):\n    if len(items) <= 1:\n        return items\n    pivot = items[0]\n"
    "    left = [x for x in items[1:] if x < pivot]\n    right = [x for x in items[1:] if x >= pivot]\n"
    "    return quicksort(left) + [pivot] + quicksort(right)\n",
    "import os\n\n\ndef walk(path):\n    for name in os.listdir(path):\n        full = os.path.join(path, name)\n"
    "        if os.path.isdir(full):\n            yield from walk(full)\n        else:\n            yield full\n",
)
GAUGES = ("forerun_running", "forerun_waiting", "forerun_kv_used", "forerun_engine_failures_total")


@dataclass
class Tally:
    """What happened, over all streams."""

    requests: int = 0
    finished: int = 0
    vanished: int = 0
    tokens: int = 0
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    probes: int = 0
    wrong: list[str] = field(default_factory=list)
    samples: list[dict[str, float]] = field(default_factory=list)


def probes() -> dict[str, tuple[str, dict[str, Any]]]:
    """Fixed requests by name; those whose names are alike up to the dot must give the same
    tokens."""
    warm, plain = {"temperature": 0.8, "seed": 11}, {"speculative": False}
    chat = {"messages": [{"role": "user", "content": "Add two points."}], "max_tokens": 48, **warm}
    long = {
        "prompt": TEXTS[1] + TEXTS[2],
        "max_tokens": 64,
        "temperature": 1.1,
        "seed": 5,
        "top_p": 0.9,
    }
    bodies = {
        "greedy.draft": {"prompt": TEXTS[0], "max_tokens": 64, "temperature": 0},
        "greedy.plain": {"prompt": TEXTS[0], "max_tokens": 64, "temperature": 0, **plain},
        "warm.draft": {"prompt": TEXTS[3][:150], "max_tokens": 48, **warm},
        "warm.deep": {
            "prompt": TEXTS[3][:150],
            "max_tokens": 48,
            **warm,
            "speculative": {"depth": 8},
        },
        "warm.documents": {
            "prompt": TEXTS[3][:150],
            "max_tokens": 48,
            **warm,
            "documents": [TEXTS[3]],
        },
        "warm.plain": {"prompt": TEXTS[3][:150], "max_tokens": 48, **warm, **plain},
        "long.draft": long,
        "long.plain": long | plain,
        "chat.predicted": chat | {"prediction": {"type": "content", "content": TEXTS[1]}},
        "chat.plain": chat | plain,
    }
    paths = {
        name: "/v1/chat/completions" if name.startswith("chat") else "/v1/completions"
        for name in bodies
    }
    return {name: (paths[name], body | {"return_token_ids": True}) for name, body in bodies.items()}


def random_request(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """(path, body) of one streamed request of a random kind."""
    text = rng.choice(TEXTS)
    start = rng.randrange(len(text) // 2)
    piece = text[start : start + rng.randrange(10, 300)]
    body: dict[str, Any] = {
        "max_tokens": rng.randrange(8, 160),
        "temperature": rng.choice([0, 0, 0.5, 0.8, 1.0, 1.3]),
        "seed": rng.randrange(1 << 40),
        "ignore_eos": rng.random() < 0.5,
        "stream": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }
    kind = rng.random()
    if kind < 0.2:
        body["speculative"] = False
    elif kind < 0.35:
        body["speculative"] = {"draft": rng.choice(["ngram", "suffix"]), "depth": rng.randrange(9)}
    elif kind < 0.45:
        body["documents"] = [rng.choice(TEXTS)]
    if rng.random() < 0.7:
        return "/v1/completions", body | {"prompt": piece}
    if rng.random() < 0.5:
        body["prediction"] = {"type": "content", "content": text}
    return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": piece}]}


class Load:
    """One run against one server."""

    def __init__(self, url: str, options: argparse.Namespace) -> None:
        self.options, self.tally = options, Tally()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self.client = httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(120), limits=limits)
        self.begun = self.end = time.monotonic()

    async def run(self) -> list[str]:
        """Load the server; returns what went wrong, nothing if all is well."""
        async with self.client:
            alone = await self._probe_all()
            failed = [
                f"{name}: not the tokens of {alike(name, alone)}"
                for name in alone
                if alike(name, alone)
            ]
            await self._sample()
            self.begun = time.monotonic()
            self.end = self.begun + self.options.seconds
            async with asyncio.TaskGroup() as group:
                for i in range(self.options.streams):
                    group.create_task(self._stream_all(random.Random(1000 * self.options.seed + i)))
                group.create_task(self._probe_on(alone))
                group.create_task(self._sample_on())
            failed += await self._idle()
            self._compare(alone, await self._probe_all(), "afterwards")
        return failed + self._failures()

    async def _stream_all(self, rng: random.Random) -> None:
        """Requests one after the other until the time is up."""
        while time.monotonic() < self.end:
            path, body = random_request(rng)
            leave = rng.randrange(12) if rng.random() < self.options.vanish else None
            self.tally.requests += 1
            try:
                async with asyncio.timeout(120):
                    await self._stream(path, body, leave)
            except TimeoutError:
                self.tally.errors["no end within 120 s"] += 1
            except httpx.HTTPError as error:
                self.tally.errors[type(error).__name__] += 1

    async def _stream(self, path: str, body: dict[str, Any], leave: int | None) -> None:
        """One stream, left behind after `leave` of its events if that is a number."""
        sent = last = time.monotonic()
        count, events, done, reason, used = 0, 0, False, None, None
        async with self.client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                await response.aread()
                self.tally.errors[f"status {response.status_code}"] += 1
                await asyncio.sleep(0.2 if response.status_code == 429 else 0)
                return
            async for line in response.aiter_lines():
                if events == leave:
                    self.tally.vanished += 1
                    return
                events += bool(line)
                done |= line == "data: [DONE]"
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    self.tally.errors[f"error event: {chunk['error']['message'][:60]}"] += 1
                    continue
                used = chunk.get("usage") or used
                for choice in chunk["choices"]:
                    reason = choice["finish_reason"] or reason
                    count += (new := len(choice.get("token_ids") or ()))
                    if new:
                        last = self._note(sent, last, new, first=count == new)
        self._check_end(done, reason, used, count)

    def _note(self, sent: float, last: float, tokens: int, first: bool) -> float:
        """Times of one event; returns now."""
        now = time.monotonic()
        self.tally.tokens += tokens
        if first:
            self.tally.first.append(now - sent)
        else:
            self.tally.between += [(now - last) / tokens] * tokens
        return now

    def _check_end(
        self, done: bool, reason: str | None, used: dict[str, Any] | None, count: int
    ) -> None:
        self.tally.finished += 1
        if not done:
            self.tally.errors["no [DONE]"] += 1
        if reason is None:
            self.tally.errors["no finish reason"] += 1
        if used is None or used["completion_tokens"] != count:
            self.tally.errors["usage is not what was streamed"] += 1

    async def _probe_all(self) -> dict[str, list[int]]:
        """The token ids of every probe, one after the other."""
        return {name: await self._probe(path, body) for name, (path, body) in probes().items()}

    async def _probe(self, path: str, body: dict[str, Any]) -> list[int]:
        while True:
            response = await self.client.post(path, json=body)
            if response.status_code == 200:
                return list(response.json()["choices"][0]["token_ids"])
            if response.status_code != 429:
                raise SystemExit(
                    f"a probe was answered {response.status_code}: {response.text[:300]}"
                )
            await asyncio.sleep(0.5)

    async def _probe_on(self, alone: dict[str, list[int]]) -> None:
        """Probes again and again under load."""
        while time.monotonic() < self.end:
            for name, (path, body) in probes().items():
                self._compare(
                    {name: alone[name]}, {name: await self._probe(path, body)}, "under load"
                )

    def _compare(
        self, expected: dict[str, list[int]], got: dict[str, list[int]], when: str
    ) -> None:
        self.tally.probes += len(got)
        self.tally.wrong += [f"{name} {when}" for name in got if got[name] != expected[name]]

    async def _sample_on(self) -> None:
        while time.monotonic() < self.end:
            await asyncio.sleep(min(10.0, max(0.0, self.end - time.monotonic())))
            await self._sample()

    async def _sample(self) -> dict[str, float]:
        """The gauges, and the server's memory where its process is known."""
        text = (await self.client.get("/metrics")).text
        values = dict.fromkeys(GAUGES, 0.0)  # of a cluster, the sum over its replicas
        for line in text.splitlines():
            name = line.partition("{")[0].partition(" ")[0]
            if name in values:
                values[name] += float(line.rsplit(" ", 1)[1])
        sample = {"seconds": round(time.monotonic() - self.begun, 1)} | values
        if self.options.pid:
            sample |= process(self.options.pid)
        self.tally.samples.append(sample)
        return sample

    async def _idle(self) -> list[str]:
        """Wait until the server has nothing to do; what does not come to rest within 30 s."""
        end = time.monotonic() + 30
        while True:
            sample = await self._sample()
            if not any(sample[name] for name in GAUGES[:3]) or time.monotonic() > end:
                break
            self.tally.samples.pop()
            await asyncio.sleep(0.2)
        return [f"idle, but {name} is {sample[name]:g}" for name in GAUGES[:3] if sample[name]]

    def _failures(self) -> list[str]:
        """What the figures say against the server."""
        tally, samples = self.tally, self.tally.samples
        failed = [
            f"{count} times: {kind}" for kind, count in tally.errors.items() if kind != "status 429"
        ]
        failed += [f"other tokens: {what}" for what in sorted(set(tally.wrong))]
        if samples[-1][GAUGES[3]] != samples[0][GAUGES[3]]:
            failed.append("the engine started over")
        grown = growth(samples, "rss_mib", self.options.seconds)
        if grown is not None and grown > self.options.growth:
            failed.append(f"memory grew by {grown:.0f} MiB, more than {self.options.growth}")
        files = growth(samples, "files", self.options.seconds)
        if files is not None and files > 2:
            failed.append(f"{files:g} more open files at the end than under load")
        return failed

    def report(self) -> dict[str, Any]:
        """The figures."""
        tally, samples = self.tally, self.tally.samples
        return {
            "streams": self.options.streams,
            "seconds": self.options.seconds,
            "requests": tally.requests,
            "finished": tally.finished,
            "vanished": tally.vanished,
            "tokens": tally.tokens,
            "tokens_per_second": round(tally.tokens / self.options.seconds, 1),
            "first_token_ms": percentiles(tally.first, (50, 95, 99)),
            "inter_token_ms": percentiles(tally.between, (50, 95)),
            "probes": tally.probes,
            "probes_wrong": len(tally.wrong),
            "errors": dict(tally.errors),
            "rss_growth_mib": growth(samples, "rss_mib", self.options.seconds),
            "samples": samples,
        }


def alike(name: str, tokens: dict[str, list[int]]) -> str:
    """The first probe that must give the same tokens as this one and does not; "" if all do."""
    same = (other for other in tokens if other.split(".")[0] == name.split(".")[0])
    return next((other for other in same if tokens[other] != tokens[name]), "")


def process(pid: int) -> dict[str, float]:
    """Memory, open files and threads of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines if ":" in line)
    files = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    rss = int(status["VmRSS"].split()[0]) / 1024
    return {"rss_mib": round(rss, 1), "files": files, "threads": int(status["Threads"])}


def growth(samples: Sequence[dict[str, float]], name: str, seconds: float) -> float | None:
    """How much a figure rose from minute 1 (of a short run: its first fifth) to the end."""
    known = [s for s in samples if name in s]
    base = next((s for s in known if s["seconds"] >= min(60.0, seconds / 5)), None)
    return round(known[-1][name] - base[name], 1) if base else None


def percentiles(values: Sequence[float], which: Sequence[int]) -> dict[str, float]:
    """Percentiles in milliseconds."""
    known = values if len(values) > 1 else [max(values, default=0.0)] * 2
    cuts = quantiles(known, n=100, method="inclusive")
    return {f"p{p}": round(1e3 * cuts[p - 1], 2) for p in which}


def lines(report: dict[str, Any]) -> Iterator[str]:
    """The figures for people."""
    for name, value in report.items():
        if name != "samples":
            yield f"{name:<18}{value}"
    for sample in report["samples"]:
        yield "  " + "  ".join(
            f"{name.removeprefix('forerun_')} {value:g}" for name, value in sample.items()
        )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url", help="where the server is, such as http://127.0.0.1:8000")
    parser.add_argument(
        "--streams", type=int, default=64, help="clients at the same time (default: 64)"
    )
    parser.add_argument("--seconds", type=float, default=300.0, help="how long (default: 300)")
    parser.add_argument(
        "--vanish", type=float, default=0.33, help="share that closes mid-stream (default: 0.33)"
    )
    parser.add_argument(
        "--pid", type=int, help="the server's process, to watch its memory and open files"
    )
    parser.add_argument(
        "--growth",
        type=float,
        default=64.0,
        help="most MiB it may grow after minute 1 (default: 64)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random requests")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    load = Load(options.url, options)
    failed = asyncio.run(load.run())
    report = load.report() | {"failed": failed}
    print(json.dumps(report) if options.json else "\n".join(lines(report)))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
