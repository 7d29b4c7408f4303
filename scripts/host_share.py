#!/usr/bin/env python3
"""What Python takes of a step: all of a step's time that is no native call, with a draft and
without.

    python scripts/host_share.py --requests 32        # of the default model, --draft auto

Requests run at once at temperature 0.8, with the draft and without in turn: medians over the steps
in which all of them are at work.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from forerun import LLM, SamplingParams
from forerun.engine.engine import Engine
from forerun.kernels import native

ROUNDS = 3


class Timed:
    """The native library, its calls timed."""

    def __init__(self, library: Any) -> None:
        self.library, self.seconds = library, 0.0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self.library, name)

        def timed(*given: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*given)
            finally:
                self.seconds += time.perf_counter() - start

        setattr(self, name, timed)
        return timed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--tokens", type=int, default=96)
    asked = parser.parse_args()
    llm = LLM(draft=asked.draft, max_rows=asked.requests, kv_tokens=512 * asked.requests)
    library = Timed(native.loaded())
    native._load = lambda: (library, "")  # type: ignore[assignment,misc]  # there is no other way in between
    for number in range(ROUNDS):
        for draft in ("off", llm.draft):
            steps = run(llm, library, draft, number, asked.requests, asked.tokens)
            host, whole = (1e3 * statistics.median(side) for side in zip(*steps, strict=True))
            print(f"{draft}: Python takes {host:.2f} ms of a step of {whole:.1f} ms", flush=True)


def run(
    llm: LLM, library: Timed, draft: str, seed: int, requests: int, tokens: int
) -> list[tuple[float, float]]:
    """Seconds of Python, and of all, of each step with all requests at work."""
    found: list[tuple[float, float]] = []
    step = Engine.step

    def timed(engine: Engine) -> Any:
        native_before, start = library.seconds, time.perf_counter()
        events = step(engine)
        whole = time.perf_counter() - start
        if len(engine.scheduler.running) == requests:
            found.append((whole - (library.seconds - native_before), whole))
        return events

    prompts = [
        [{"role": "user", "content": f"Tell me a story about animal number {i}."}]
        for i in range(requests)
    ]
    params = SamplingParams.pure(max_tokens=tokens, temperature=0.8, seed=seed, ignore_eos=True)
    Engine.step = timed  # type: ignore[method-assign]
    try:
        llm.generate(prompts, params, draft=draft)
    finally:
        Engine.step = step  # type: ignore[method-assign]
    return found


if __name__ == "__main__":
    main()
