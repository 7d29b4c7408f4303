#!/usr/bin/env python3
"""Kill random replicas of a cluster under load and check that every request has an end.

    python scripts/cluster_soak.py --minutes 10

Starts `forerun deploy` on 127.0.0.1 with replicas of the default model (or of `--model`). Every
request must end with its answer or one error within two minutes; the same request with a seed must
have the same tokens from every replica, whole and streamed; killed replicas must be replaced;
memory must not grow; the cluster must exit in order. The exit code is 1 if one of these fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from load import TEXTS, growth, httpx, percentiles
from processes import address, below, memory

PATIENCE = 120.0  # seconds within which every request must have ended
MOST_SHOWN = 5  # errors of its log
REQUESTS = 60  # different ones: few, so that each is asked again and again


@contextmanager
def cluster(plan: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run `forerun deploy` with a plan in TOML; yield its process and address."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cluster.toml"
        file.write_text(f'host = "127.0.0.1"\nport = 0\nshutdown_timeout = 5\n{plan}')
        log_path = Path(folder) / "log"
        with log_path.open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "forerun", "deploy", str(file)], stderr=log
            )
        try:
            yield process, address(process, log_path, r"serving replicas .* on (http://\S+)")
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
            lines = log_path.read_text().splitlines()
            errors = [line for line in lines if '"level": "error"' in line]
            print(*errors[:MOST_SHOWN], sep="\n", end="\n" * bool(errors), file=sys.stderr)


def replicas_of(pid: int) -> list[int]:
    """Return the processes of a cluster's replicas."""
    found = []
    for one in below(pid):
        with suppress(OSError):  # it may end meanwhile
            command = Path(f"/proc/{one}/cmdline").read_bytes()
            found += [one] if command.startswith(b"ray::ServeReplica:forerun-") else []
    return found


@dataclass
class Tally:
    """What happened."""

    ended: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    back: list[float] = field(default_factory=list)
    kills: int = 0
    tokens: int = 0
    tokens_by_request: dict[int, list[int]] = field(default_factory=dict)
    samples: list[dict[str, float]] = field(default_factory=list)


def asked(number: int) -> dict[str, Any]:
    """One of the requests; the same for the same number."""
    draw = random.Random(number)
    body = {
        "prompt": draw.choice(TEXTS)[: draw.randrange(20, 200)],
        "max_tokens": draw.randrange(8, 120),
        "temperature": draw.choice([0, 0.7, 1.1]),
        "seed": number,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return body | ({"speculative": False} if draw.random() < 0.3 else {})


class Soak:
    """One run."""

    def __init__(self, pid: int, url: str, options: argparse.Namespace) -> None:
        self.pid, self.options, self.tally = pid, options, Tally()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self.client = httpx.AsyncClient(
            base_url=url, timeout=httpx.Timeout(PATIENCE), limits=limits
        )
        self.begun = time.monotonic()
        self.end = self.begun + 60 * options.minutes

    async def run(self) -> list[str]:
        """Returns what went wrong, nothing if all is well."""
        async with self.client:
            async with asyncio.TaskGroup() as group:
                for i in range(self.options.streams):
                    group.create_task(
                        self._ask_on(random.Random(f"{self.options.seed}, stream {i}"))
                    )
                group.create_task(self._kill_on(random.Random(f"{self.options.seed}, deaths")))
                group.create_task(self._sample_on())
            await self._whole(PATIENCE)
            await asyncio.sleep(1)
            await self._sample()
        return self._failures()

    async def _ask_on(self, draw: random.Random) -> None:
        while time.monotonic() < self.end:
            number, start = draw.randrange(REQUESTS), time.monotonic()
            try:
                async with asyncio.timeout(PATIENCE):
                    how = await (
                        self._streamed(number) if draw.random() < 0.6 else self._answered(number)
                    )
            except TimeoutError:
                how = ""
                self.tally.failed[f"no end within {PATIENCE:g} s"] += 1
            except (httpx.HTTPError, ValueError, KeyError) as error:
                how = ""
                self.tally.failed[f"neither an answer nor an error: {type(error).__name__}"] += 1
            self.tally.seconds.append(time.monotonic() - start)
            self.tally.ended[how or "failed"] += 1
            if how != "answer":
                await asyncio.sleep(0.5)

    async def _answered(self, number: int) -> str:
        response = await self.client.post("/v1/completions", json=asked(number))
        if response.status_code != 200:
            return self._refusal(response.status_code, response.json())
        self._compare(number, response.json()["choices"][0]["token_ids"])
        return "answer"

    async def _streamed(self, number: int) -> str:
        tokens: list[int] = []
        errors, done, reason = [], 0, None
        async with self.client.stream(
            "POST", "/v1/completions", json=asked(number) | {"stream": True}
        ) as response:
            if response.status_code != 200:
                await response.aread()
                return self._refusal(response.status_code, response.json())
            async for line in response.aiter_lines():
                done += line == "data: [DONE]"
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        errors.append(event["error"]["message"])
                        continue
                    (choice,) = event["choices"]
                    tokens += choice["token_ids"]
                    reason = choice["finish_reason"] or reason
        if done != 1 or len(errors) + bool(reason) != 1:
            self.tally.failed[
                f"a stream with {done} ends, {len(errors)} errors, finish reason {reason}"
            ] += 1
        self._compare(number, tokens, is_complete=not errors)
        return f"error in a stream: {errors[0]}" if errors else "answer"

    def _refusal(self, status: int, body: dict[str, Any]) -> str:
        if status not in (429, 503):
            self.tally.failed[f"status {status}"] += 1
        return f"status {status}: {body['error']['message']}"

    def _compare(self, number: int, tokens: list[int], is_complete: bool = True) -> None:
        """Compare with an earlier answer; a stream that broke off must be its beginning."""
        self.tally.tokens += len(tokens)
        known = self.tally.tokens_by_request.get(number)
        if known is None and is_complete:
            self.tally.tokens_by_request[number] = tokens
        elif known is not None and known[: len(known) if is_complete else len(tokens)] != tokens:
            self.tally.failed[f"request {number} has other tokens"] += 1

    async def _kill_on(self, draw: random.Random) -> None:
        while True:
            await asyncio.sleep(
                min(
                    draw.uniform(0.5, 1.5) * self.options.every,
                    max(0.0, self.end - time.monotonic()),
                )
            )
            if time.monotonic() > self.end - self.options.every:
                return
            there = replicas_of(self.pid)
            if not there:
                continue
            os.kill(draw.choice(there), signal.SIGKILL)
            self.tally.kills += 1
            start = time.monotonic()
            await asyncio.sleep(0.5)
            if draw.random() < 0.8:  # else the next one may die while this one is not back
                await self._whole(PATIENCE)
                self.tally.back.append(time.monotonic() - start)

    async def _whole(self, patience: float) -> None:
        """Wait until all replicas are there."""
        end = time.monotonic() + patience
        while time.monotonic() < end:
            page = (await self.client.get("/metrics")).text
            if len(re.findall(r"^forerun_running\{", page, re.M)) == self.options.replicas:
                return
            await asyncio.sleep(0.5)
        self.tally.failed["a replica that was killed was not replaced"] += 1

    async def _sample_on(self) -> None:
        while time.monotonic() < self.end:
            await asyncio.sleep(min(10.0, max(0.1, self.end - time.monotonic())))
            await self._sample()

    async def _sample(self) -> None:
        replicas, ingress = replicas_of(self.pid), [self.pid]
        rest = [pid for pid in below(self.pid) if pid not in (*replicas, *ingress)]
        sample = {
            "seconds": round(time.monotonic() - self.begun, 1),
            "ingress_mib": memory(ingress),
        }
        sample |= {"ray_mib": memory(rest), "replicas": len(replicas)}
        sample["files"] = sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in ingress)
        if len(replicas) == self.options.replicas:
            sample["replicas_mib"] = memory(replicas)
        self.tally.samples.append(sample)

    def _failures(self) -> list[str]:
        failed = [f"{count} times: {kind}" for kind, count in self.tally.failed.items()]
        for name, most in (
            ("ingress_mib", self.options.growth),
            ("ray_mib", self.options.growth),
            ("files", 20),
        ):
            grown = growth(self.tally.samples, name, 60 * self.options.minutes)
            if grown is not None and grown > most:
                failed.append(f"{name} grew by {grown:g}, more than {most:g}")
        return failed

    def report(self) -> dict[str, Any]:
        """The figures."""
        tally, seconds = self.tally, 60 * self.options.minutes
        names = ("ingress_mib", "ray_mib", "replicas_mib", "files")
        return {
            "minutes": self.options.minutes,
            "kills": tally.kills,
            "requests": sum(tally.ended.values()),
            "ended": dict(tally.ended),
            "compared": f"{len(tally.tokens_by_request)} requests, each with its seed",
            "tokens_per_second": round(tally.tokens / seconds, 1),
            "request_ms": percentiles(tally.seconds, (50, 99))
            | {"most": round(1e3 * max(tally.seconds, default=0))},
            "back_after_s": {
                "median": round(median(tally.back or [0]), 1),
                "most": round(max(tally.back or [0]), 1),
            },
            "grown": {name: growth(tally.samples, name, seconds) for name in names},
            "samples": tally.samples,
        }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default: 10)")
    parser.add_argument("--replicas", type=int, default=2, help="of the model (default: 2)")
    parser.add_argument(
        "--streams", type=int, default=6, help="clients at the same time (default: 6)"
    )
    parser.add_argument(
        "--every", type=float, default=20.0, help="seconds from one death to the next (default: 20)"
    )
    parser.add_argument(
        "--growth",
        type=float,
        default=64.0,
        help="most MiB that the ingress may grow (default: 64)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the requests and the deaths")
    parser.add_argument("--model", help="instead of the default one")
    options = parser.parse_args()
    model = f"model = {json.dumps(options.model)}\n" if options.model else ""
    model += f"replicas = {options.replicas}\nthreads = 1\nkv_tokens = 16384\n"
    plan = f'[[models]]\nname = "soak"\n{model}'
    with cluster(plan) as (process, url):
        soak = Soak(process.pid, url, options)
        failed = asyncio.run(soak.run())
    if process.returncode:
        failed.append(f"the cluster ended with {process.returncode}")
    print(json.dumps(soak.report() | {"failed": failed}, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
