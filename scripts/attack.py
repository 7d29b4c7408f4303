#!/usr/bin/env python3
"""Attack a server of this machine with all that strangers may send, while innocent clients stream
from it.

    python scripts/attack.py                       # starts a server with the default model; 60 s
    python scripts/attack.py --each --seconds 9    # one kind of attack after the other, 9 s each
    python scripts/attack.py --model DIR --only "long prompt" --only "hung body" --seconds 30
    python scripts/attack.py --url http://127.0.0.1:8000 --pid PID

The attackers have one address of their own (--source). The innocents ask for the same text again
and again: alone, beside honest clients with ordinary questions (as many as there will be attackers,
unless --honest says otherwise), and under the attack. Printed are how long the innocents waited
between tokens, at worst and in the median, how long /health took at worst, the memory of the server
(and of the KV cache, which takes what --kv-tokens allows page by page as prompts come, from any
client), and how it ended. Exit code 1 where a promise of docs/security.md is broken: another text,
an answer of 500, a median twice as long as beside honest clients, /health over 100 ms, memory that
does not come back to within 100 MiB, or a server that SIGTERM does not end in its time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from ipaddress import ip_address
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from attack_corpus import (
    BEHAVIOURS,
    CHAT,
    COMPLETIONS,
    NAMES,
    REQUESTS,
    Wire,
    begun,
    posted,
    strike,
)
from processes import address, below, memory

SHUTDOWN = 5.0  # seconds that the server gives running requests
GRACE = 10.0  # seconds that its own end may take
REST = 2.0  # seconds before the first request, for work that a server defers after its start
LOGGED = 2000  # lines of its log, of all phases
ROOM = 100  # MiB that it may have more at the end than at the beginning
PROMPT = "def walk(path):\n    for name in os.listdir(path):\n"
ASKED = {
    "prompt": PROMPT,
    "max_tokens": 64,
    "seed": 7,
    "temperature": 0.8,
    "ignore_eos": True,
    "stream": True,
}
HONEST = {
    "messages": [{"role": "user", "content": "Describe the sea in a few sentences. " * 8}],
    "max_tokens": 64,
}


Over = Callable[[], bool]  # whether it is time to stop


def within(seconds: float) -> Over:
    """Return a function that is true once so many seconds are over."""
    end = time.monotonic() + seconds
    return lambda: time.monotonic() > end


@dataclass
class Waits:
    """What innocent clients saw in one phase."""

    between: list[float] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    texts: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)

    def report(self) -> dict[str, Any]:
        """In milliseconds."""
        return {
            "median_ms": round(1e3 * median(self.between), 2) if self.between else None,
            "worst_ms": round(1e3 * max(self.between, default=0.0), 1),
            "worst_health_ms": round(1e3 * max(self.health, default=0.0), 1),
            "texts": sum(self.texts.values()),
            "failures": dict(self.failures),
        }


class Innocents:
    """Ordinary clients that stream, and one that polls /health."""

    def __init__(self, host: str, port: int, streams: int) -> None:
        self.host, self.port, self.streams = host, port, streams

    def watch(self, over: Over) -> Waits:
        """Stream until the phase is over, at least once."""
        return asyncio.run(self._watch(over))

    async def _watch(self, over: Over) -> Waits:
        waits = Waits()
        async with asyncio.TaskGroup() as group:
            for _ in range(self.streams):
                group.create_task(self._again(over, waits, self._stream))
            group.create_task(self._again(over, waits, self._health))
        return waits

    async def _again(self, over: Over, waits: Waits, what: Any) -> None:
        begun = False
        while not (begun and over()):
            begun = True
            try:
                async with asyncio.timeout(60):
                    await what(waits)
            except (OSError, TimeoutError, ValueError, LookupError) as error:
                waits.failures[f"{what.__name__[1:]}: {type(error).__name__} {error}"] += 1
                await asyncio.sleep(0.2)

    async def _open(self, request: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(self.host, self.port)
        writer.write(request.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1))
        line = await reader.readline()
        if line[9:12] != b"200":
            writer.close()
            raise LookupError(line.decode(errors="replace").strip() or "no answer")
        return reader, writer

    async def _health(self, waits: Waits) -> None:
        asked = time.monotonic()
        reader, writer = await self._open(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await reader.read()
        writer.close()
        waits.health.append(time.monotonic() - asked)
        await asyncio.sleep(0.05)

    async def _stream(self, waits: Waits) -> None:
        path, content = posted(COMPLETIONS, ASKED | {"return_token_ids": True})
        reader, writer = await self._open(begun(path, len(content)) + content)
        last, text = 0.0, ""
        async for line in reader:
            if not line.startswith(b"data: {"):
                continue
            now, (choice,) = time.monotonic(), json.loads(line[6:])["choices"]
            text += choice["text"]
            if last:
                count = len(choice["token_ids"])
                waits.between += [(now - last) / count] * count
            last = now
        writer.close()
        waits.texts[text] += 1


# ------------------------------------------------------------ others, in processes of their own


async def attacker(
    wire: Wire, number: int, options: argparse.Namespace, over: Over, outcomes: Counter[str]
) -> None:
    """Send the corpus in random order, again and again: requests, and at the same time behaviours
    that hold connections."""
    rng = random.Random(number)

    async def all_of(names: list[str]) -> None:
        if options.once:  # the attackers share them
            for name in names[number :: options.attackers]:
                outcomes[f"{name}: {await strike(wire, name, options.scale)}"] += 1
            return
        while names:
            for name in rng.sample(names, len(names)):
                if over():
                    return
                outcomes[f"{name}: {await strike(wire, name, options.scale)}"] += 1

    held = [name for name in options.only if name in BEHAVIOURS]
    await asyncio.gather(all_of(held), all_of([name for name in options.only if name in REQUESTS]))


async def honest(
    wire: Wire, number: int, options: argparse.Namespace, over: Over, outcomes: Counter[str]
) -> None:
    """Ordinary questions, one after the other."""
    while not over():
        outcomes[f"honest: {await wire.ask(*posted(CHAT, HONEST))}"] += 1


def others(work: Any, host: str, port: int, options: argparse.Namespace, pipe: Connection) -> None:
    """Run several clients of a kind until the time is up, and send the outcomes of their requests.

    By default they take the processor only when the server does not want it: clients elsewhere
    would not take it at all."""
    os.nice(options.nice)
    outcomes: Counter[str] = Counter()

    async def all_of_them() -> None:
        source = options.source if work is attacker else ""
        wire, over = Wire(host, port, options.patience, source), within(options.seconds / 3)
        count = options.honest if work is honest else options.attackers
        await asyncio.gather(*(work(wire, i, options, over, outcomes) for i in range(count)))

    pipe.send("begun")
    asyncio.run(all_of_them())
    pipe.send(outcomes)


@contextmanager
def beside(
    work: Any, server: Server, options: argparse.Namespace
) -> Iterator[tuple[Counter[str], Over]]:
    """Run other clients at the same time.

    Yields the outcomes of their requests, filled in at the end, and a function that is true once
    the clients have finished."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe()
    process = context.Process(target=others, args=(work, server.host, server.port, options, sender))
    process.start()
    sender.close()
    receiver.recv()  # it has begun
    outcomes: Counter[str] = Counter()
    try:
        yield outcomes, receiver.poll
        if not receiver.poll(2 * options.patience + 60):
            raise SystemExit("the attack itself has not ended")
        outcomes.update(receiver.recv())
    finally:
        process.kill()
        process.join()


# ------------------------------------------------------------ the server


def is_here(host: str) -> bool:
    """Whether a host is this machine and nothing else."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


class Server:
    """A server process: started here, or one that runs already. `peak` is the most memory that was
    seen."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.pid: int | None = options.pid
        self.peak, self.watched = 0.0, True
        self.log = tempfile.NamedTemporaryFile("a", suffix=".log")  # noqa: SIM115 (as long as this)
        url = options.url or self._start(options)
        parts = urlsplit(url)
        if not is_here(parts.hostname or ""):
            raise SystemExit(
                f"{url} is not of this machine: attack only what is yours, on 127.0.0.1"
            )
        self.host, self.port = str(parts.hostname), parts.port or 80
        threading.Thread(target=self._watch, daemon=True).start()

    def _start(self, options: argparse.Namespace) -> str:
        command = [sys.executable, "-m", "forerun", "serve", "--port", "0"]
        command += ["--shutdown-timeout", f"{SHUTDOWN:g}", *options.serve.split()]
        command += ["--model", options.model] if options.model else []
        if options.descriptors:
            limited = f'ulimit -n {options.descriptors}; exec "$@"'
            command = ["bash", "-c", limited, "bash", *command]
        self.process = subprocess.Popen(command, stderr=self.log)
        self.pid = self.process.pid
        return address(self.process, Path(self.log.name))

    def logged(self) -> str:
        """Return what it has written to stderr."""
        return Path(self.log.name).read_text()

    def memory(self, kind: str = "RssAnon") -> float:
        """MiB of its process and of those that it has started."""
        return memory(below(self.pid), kind) if self.pid else 0.0

    def _watch(self) -> None:
        while self.watched:
            self.peak = max(self.peak, self.memory())
            time.sleep(0.1)

    def rested(self, goal: float) -> float:
        """Its memory when it has come down to a goal, or after half a minute."""
        end = time.monotonic() + 30
        while self.memory() > goal and time.monotonic() < end:
            time.sleep(0.2)
        return self.memory()

    def end(self, options: argparse.Namespace) -> float | None:
        """Seconds that SIGTERM took while others hold on to it; None if it did not end, or is not
        ours."""
        if self.process is None:
            return None
        with beside(attacker, self, options):
            time.sleep(min(1.0, options.patience / 2))
            begun_at = time.monotonic()
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(SHUTDOWN + 60)
            except subprocess.TimeoutExpired:
                return None
            return round(time.monotonic() - begun_at, 1)

    def stop(self) -> None:
        """Leave nothing behind."""
        self.watched = False
        if self.process is not None:
            self.process.kill()
            self.process.wait()


# ------------------------------------------------------------ all of it


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Attack; returns the figures, with what is `failed`."""
    server = Server(options)
    try:
        time.sleep(REST)
        Innocents(server.host, server.port, options.innocents).watch(
            within(options.seconds / 30)
        )  # first calls
        if options.warm_up:
            warm_up(server, options)
        if not options.each:
            return measure(server, options, last=True)
        kinds: dict[str, Any] = {}
        for name in options.only:
            only = argparse.Namespace(**vars(options) | {"only": [name]})
            kinds[name] = measure(server, only, last=name == options.only[-1])
            print(f"{name:<32}{row(kinds[name])}", file=sys.stderr, flush=True)
        failed = [f"{name}: {what}" for name, report in kinds.items() for what in report["failed"]]
        return {"kinds": kinds, "failed": failed}
    finally:
        server.stop()


def warm_up(server: Server, options: argparse.Namespace) -> None:
    """Run every attack once without judging it, and wait until the memory has settled.

    What a fresh process allocates at the first use of a feature then no longer counts as growth.
    """
    once = argparse.Namespace(**vars(options) | {"once": True})
    with beside(attacker, server, once) as (_, done):
        while not done():
            time.sleep(0.2)
    last, now = float("inf"), server.memory()
    end = time.monotonic() + 30
    while abs(last - now) > 1 and time.monotonic() < end:
        time.sleep(2)
        last, now = now, server.memory()


def row(report: dict[str, Any]) -> str:
    """Sum up one kind of attack in a line."""
    attacked, mib = report["under attack"], report["memory_mib"]
    slow, usual = attacked["median_ms"], report["beside honest clients"]["median_ms"]
    ratio = slow / usual if usual and slow else 0.0
    return (
        f"tokens {slow} ms, {ratio:.2f} times as slow; /health {attacked['worst_health_ms']} ms;"
        f" memory {mib['before']} to {mib['after']} MiB"
    )


def measure(server: Server, options: argparse.Namespace, last: bool) -> dict[str, Any]:
    """Run the phases with the attacks of `options.only` together, and end the server after the
    `last` run."""
    innocents = Innocents(server.host, server.port, options.innocents)
    alone = innocents.watch(within(options.seconds / 3))
    with beside(honest, server, options) as (served, done):
        crowded = innocents.watch(done)
    before = server.peak = server.memory()
    with beside(attacker, server, options) as (outcomes, done):
        attacked = innocents.watch(done if options.once else within(options.seconds / 3))
    after, kv = server.rested(before + ROOM), server.memory("RssShmem")
    alive = innocents.watch(within(options.seconds / 30))
    ended = server.end(options) if last else None
    server.watched = not last
    phases = {
        "alone": alone,
        "beside honest clients": crowded,
        "under attack": attacked,
        "afterwards": alive,
    }
    report: dict[str, Any] = {name: waits.report() for name, waits in phases.items()}
    report["memory_mib"] = {"before": before, "most": server.peak, "after": after, "kv": kv}
    report |= {
        "shutdown_seconds": ended,
        "attacks": dict(sorted(outcomes.items())),
        "honest": dict(served),
    }
    report["tracebacks"] = server.logged().count("Traceback")
    report["log_lines"] = server.logged().count("\n")
    return report | {"failed": failures(report, phases, server, last)}


def failures(
    report: dict[str, Any], phases: dict[str, Waits], server: Server, last: bool
) -> list[str]:
    """Which promises are broken."""
    failed, texts = [], set().union(*(waits.texts for waits in phases.values()))
    if len(texts) != 1:
        failed.append(f"{len(texts)} texts where all must be the same")
        for name, waits in phases.items():
            failed += [
                f"{name}, {count} times: {len(text)} characters, {text[-60:]!r}"
                for text, count in waits.texts.items()
            ]
    for name, waits in phases.items():
        failed += [f"{name}, {count} times: {what}" for what, count in waits.failures.items()]
        if not waits.texts:
            failed.append(f"{name}: no text came to its end")
    failed += [
        f"{what} ({count} times)" for what, count in report["attacks"].items() if ": 500" in what
    ]
    slow, usual = report["under attack"], report["beside honest clients"]["median_ms"]
    if usual and slow["median_ms"] and slow["median_ms"] > 2 * usual:
        failed.append(f"tokens every {slow['median_ms']} ms, beside honest clients {usual}")
    if slow["worst_health_ms"] > 100:
        failed.append(f"/health took {slow['worst_health_ms']} ms")
    mib = report["memory_mib"]
    if mib["after"] > mib["before"] + ROOM:
        failed.append(f"memory is {mib['after']} MiB and was {mib['before']}")
    if report["log_lines"] > LOGGED:
        failed.append(f"the log has {report['log_lines']} lines")
    if (
        last
        and server.process is not None
        and (report["shutdown_seconds"] or 1e9) > SHUTDOWN + GRACE
    ):
        failed.append(f"SIGTERM did not end it within {SHUTDOWN + GRACE:g} s")
    return failed


def lines(report: dict[str, Any]) -> Iterator[str]:
    """The figures for people."""
    for name, value in report.items():
        if name == "kinds":  # a line of each was printed when it ended
            continue
        if name in ("attacks", "failed"):
            items = value if name == "failed" else [f"{v:>4} {k}" for k, v in value.items()]
            yield f"{name}:"
            yield from (f"  {item}" for item in items)
        else:
            yield f"{name:<24}{value}"


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--url", default="", help="a server that runs already, on this machine (default: start one)"
    )
    parser.add_argument("--pid", type=int, help="its process, to watch its memory")
    parser.add_argument("--model", default="", help="what to serve (default: the default model)")
    parser.add_argument(
        "--serve", default="", help='more for forerun serve, such as "--max-connections 64"'
    )
    parser.add_argument(
        "--descriptors", type=int, default=0, help="files that the server may have open (ulimit -n)"
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="of the three phases together (default: 60)"
    )
    parser.add_argument(
        "--innocents", type=int, default=2, help="clients that are watched (default: 2)"
    )
    parser.add_argument(
        "--attackers", type=int, default=4, help="attacks at the same time (default: 4)"
    )
    parser.add_argument(
        "--source",
        default="127.0.0.2",
        help="the attackers' address, by which the server tells clients apart; '' is that of the"
        " innocents (default: 127.0.0.2)",
    )
    parser.add_argument(
        "--nice",
        type=int,
        default=19,
        help="priority of attackers and honest clients beside the server's, as nice takes it; 0 lets"
        " them take its processor (default: 19)",
    )
    parser.add_argument("--honest", type=int, help="honest clients (default: as many as attackers)")
    parser.add_argument(
        "--patience", type=float, default=15.0, help="seconds an attack may hang on (default: 15)"
    )
    parser.add_argument(
        "--scale", type=float, default=1.0, help="size of what is large (default: 1)"
    )
    parser.add_argument(
        "--once", action="store_true", help="each attack once, however long it takes"
    )
    parser.add_argument(
        "--warm-up",
        action="store_true",
        help="run each attack once before the measured ones, so that only leaks count as growth",
    )
    parser.add_argument(
        "--each", action="store_true", help="one kind after the other, each for --seconds"
    )
    parser.add_argument(
        "--only", action="append", choices=NAMES, metavar="NAME", help=f"of: {', '.join(NAMES)}"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(given)
    options.honest = options.honest or options.attackers
    options.only = options.only or list(NAMES)
    return options


def main() -> int:
    options = arguments()
    report = run(options)
    print(json.dumps(report) if options.json else "\n".join(lines(report)))
    return 1 if report["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
