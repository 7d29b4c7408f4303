"""The protocol of the workers, and the timing of a run.

The files in this folder run another engine for `benchmarks.peers`, one process each, by the Python
that has that engine. They are started by path and import nothing of forerun; none may be named like
a package, since a script's own directory comes first on Python's path.

A worker is started with its options as one JSON object, loads, and writes one line: {"ready":
{...}} or {"error": "..."}. Then it answers each line {"depth": k, "prompts": [[ids]], "tokens": n,
"temperature": t} with one line until its input ends. Output of libraries goes to stderr.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

Prompts = list[list[int]]
MANY = 1 << 20  # concurrent requests: no limit of its own


class Engine(Protocol):
    """A loaded engine.

    `version` is its package's. `plain` and `speculative` are the maximum concurrency without and
    with a draft, 0 where it cannot. `depths` is True if it drafts at a requested depth, `samples`
    if it takes temperatures above 0.
    """

    version: str
    plain: int
    speculative: int
    depths: bool
    samples: bool

    def run(self, depth: int, prompts: Prompts, tokens: int, temperature: float) -> dict[str, Any]:
        """Continue all prompts together by exactly `tokens` tokens; depth 0 is plain.

        Temperature 0 is greedy; above it, tokens are drawn from the whole distribution.

        Returns `Watch.answer`.
        """


class Watch:
    """Timing of one run, with the window of `forerun.measure.run`.

    The window opens when the last request has its first token and closes when the last one ends;
    the tokens within it are counted.
    """

    def __init__(self, requests: int) -> None:
        self.waiting = set(range(requests))
        self.begun = self.opened = self.closed = time.perf_counter()
        self.tokens = 0.0
        self.steps = 0

    def step(self, counts: Mapping[int, float], now: float | None = None) -> None:
        """Record a target pass: {request: tokens it produced}."""
        self.closed = time.perf_counter() if now is None else now
        self.steps += len(counts)
        if self.waiting:
            self.waiting -= counts.keys()
            self.opened = self.closed
        else:
            self.tokens += sum(counts.values())

    def answer(self, outputs: Prompts | None, steps: bool = True) -> dict[str, Any]:
        """Return the answer to a run: times in seconds, and target passes summed over requests.

        `outputs` is None if the engine does not return token ids.
        """
        return {
            "outputs": outputs,
            "decode_tokens": self.tokens,
            "decode_seconds": self.closed - self.opened,
            "prefill_seconds": self.opened - self.begun,
            "steps": self.steps if steps else None,
        }


def work(load: Callable[[dict[str, Any]], Engine]) -> None:
    """Load an engine, then answer until stdin ends."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that cleanup runs
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    try:
        engine = load(json.loads(sys.argv[1]))
    except ImportError:
        raise  # ends the process, as a failing import at the top of a script does
    except Exception as error:
        return say({"error": _in_a_line(error)})
    names = ("version", "plain", "speculative", "depths", "samples")
    say({"ready": {name: getattr(engine, name) for name in names}})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            say(engine.run(**request))
        except Exception as error:
            return say({"error": _in_a_line(error)})
    return None


def converted(folder: str, directory: str, name: str) -> Path:
    """Return the path of a converted checkpoint, which changes with the checkpoint."""
    source = Path(directory).resolve()
    files = [
        (path.name, path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(source.glob("*.safetensors"))
    ]
    mark = hashlib.sha256(repr((str(source), files)).encode()).hexdigest()[:12]
    return Path(folder) / f"{source.name}-{mark}-{name}"


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield an empty directory that becomes `path` at the end, and is deleted after an error."""
    work = path.with_name(f".{path.name}")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        yield work
        work.replace(path)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _in_a_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
