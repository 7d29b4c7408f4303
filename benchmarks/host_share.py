"""Measure the share of a step that is spent in Python rather than in native kernels.

    python -m benchmarks.host_share --requests 32      # the default model with --draft auto

Requests run together at temperature 0.8, without and with the draft in turn. One request alone runs
several rounds in a step: `--single` measures with one round a step in turn. Means are over the steps
in which all of them are running.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.command import parser, run
from forerun import LLM, SamplingParams
from forerun.kernels import native

ROUNDS = 3


class TimedLibrary:
    """The native library with the time of its calls added up in `seconds`."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._library, name)

        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self.seconds += time.perf_counter() - start

        setattr(self, name, timed)
        return timed


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    options = parser(__doc__)
    options.add_argument("--requests", type=int, default=1)
    options.add_argument("--draft", default="auto")
    options.add_argument("--tokens", type=int, default=96)
    options.add_argument("--single", action="store_true")
    given = options.parse_args(arguments)
    requests = given.requests
    llm = LLM(draft=given.draft, max_rows=requests, kv_tokens=512 * requests)
    library = TimedLibrary(native.loaded())
    native._load = lambda: (library, "")  # type: ignore[assignment]  # the only way to time calls
    seconds = llm.engine.multi_step.seconds
    ways = [(0.0, "one round a step, "), (seconds, "")] if given.single else [(seconds, "")]
    for seed in range(ROUNDS):
        for (length, way), draft in itertools.product(ways, ("off", llm.draft)):
            llm.engine.multi_step.seconds = length
            llm.forget()
            steps = timed_steps(llm, library, draft, seed, requests, given.tokens)
            host, total, rounds = (sum(column) for column in zip(*steps, strict=True))
            print(
                f"{way}{draft}: Python takes {1e3 * host / rounds:.2f} ms of a round of"
                f" {1e3 * total / rounds:.1f} ms, {host / total:.1%}",
                flush=True,
            )


def timed_steps(
    llm: LLM, library: TimedLibrary, draft: str, seed: int, requests: int, tokens: int
) -> list[tuple[float, float, int]]:
    """Return (Python seconds, total seconds, rounds) of each step with all requests running."""
    engine = llm.engine
    added = []
    for i in range(requests):
        message = {"role": "user", "content": f"Tell me a story about animal number {i}."}
        params = SamplingParams.pure(
            max_tokens=tokens, temperature=0.8, seed=seed + i, ignore_eos=True
        )
        added.append(engine.add(llm.tokens([message]), params, draft=draft))
    steps: list[tuple[float, float, int]] = []
    while engine.busy:
        rounds = added[0].stats.steps
        native_before = library.seconds
        start = time.perf_counter()
        engine.step_or_raise()
        total = time.perf_counter() - start
        if len(engine.scheduler.running) == requests:
            rounds = added[0].stats.steps - rounds
            steps.append((total - (library.seconds - native_before), total, rounds))
    return [step for step in steps if step[2]]


if __name__ == "__main__":
    run(main)
