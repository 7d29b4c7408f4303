"""What the workers have in common: the conversation with `forerun bench peers`, and the clock.

A worker is started with its options as one JSON object, loads, and says one line: {"ready": {...}}
or {"error": "..."}. Then it answers each line {"depth": k, "prompts": [[ids]], "tokens": n} with
one line, until there are no more. Whatever a library prints goes to stderr. Between lines a worker
sleeps in a read."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

Prompts = list[list[int]]
MANY = 1 << 20  # requests at once: no bound of its own


class Engine(Protocol):
    """Another engine, loaded.

    `version` is as its package says. `plain` and `speculative` are the most requests at once that
    it decodes in either way, 0 where it cannot. `depths` says whether it drafts as deep as it is
    asked to."""

    version: str
    plain: int
    speculative: int
    depths: bool

    def run(self, depth: int, prompts: Prompts, tokens: int) -> dict[str, Any]:
        """Continue all prompts at once, greedily, by exactly `tokens` tokens; depth 0 is plain
        decoding.

        Returns `Watch.answer`.
        """


class Watch:
    """Times one run by the rule of `forerun.measure.run`.

    The window opens when the last request has its first token and closes when the last has ended;
    the tokens that come within it are counted.
    """

    def __init__(self, requests: int) -> None:
        self.waiting = set(range(requests))
        self.begun = self.opened = self.closed = time.perf_counter()
        self.tokens, self.steps = 0.0, 0

    def step(self, counts: Mapping[int, float], now: float | None = None) -> None:
        """Note what one pass of the target gave: the number of tokens of each request that got
        any."""
        self.closed = time.perf_counter() if now is None else now
        self.steps += len(counts)
        if self.waiting:
            self.waiting -= counts.keys()
            self.opened = self.closed
        else:
            self.tokens += sum(counts.values())

    def answer(self, outputs: Prompts | None, steps: bool = True) -> dict[str, Any]:
        """The answer to a run: times in seconds, and steps, which are passes of the target a
        request (None: unknown).

        `outputs` is None where the engine does not tell which tokens it made.
        """
        return {
            "outputs": outputs,
            "decode_tokens": self.tokens,
            "decode_seconds": self.closed - self.opened,
            "prefill_seconds": self.opened - self.begun,
            "steps": self.steps if steps else None,
        }


def work(load: Callable[[dict[str, Any]], Engine]) -> None:
    """Be a worker: load, then answer until stdin ends."""
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(1)
    )  # tidies up on the way, as a bare end would not
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    try:
        engine = load(json.loads(sys.argv[1]))
    except ImportError:
        raise  # ends the process, as it does where a script imports at its top
    except Exception as error:
        return say({"error": _in_a_line(error)})
    names = ("version", "plain", "speculative", "depths")
    say({"ready": {name: getattr(engine, name) for name in names}})
    for line in sys.stdin:
        order = json.loads(line)
        try:
            say(engine.run(order["depth"], order["prompts"], order["tokens"]))
        except Exception as error:
            return say({"error": _in_a_line(error)})
    return None


def converted(folder: str, directory: str, name: str) -> Path:
    """Where to put what is made of a checkpoint: another place for another checkpoint, or one that
    has changed."""
    source = Path(directory).resolve()
    files = [
        (path.name, path.stat().st_size, path.stat().st_mtime_ns)
        for path in sorted(source.glob("*.safetensors"))
    ]
    mark = hashlib.sha256(repr((str(source), files)).encode()).hexdigest()[:12]
    return Path(folder) / f"{source.name}-{mark}-{name}"


def _in_a_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
