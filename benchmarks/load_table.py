"""Compare fixed depths and `auto` with plain decoding under a steady load.

    python -m benchmarks.load_table --loads chat:1:0.8,edit:8:0,random:4:0.8 --seconds 30 --rounds 1
    python -m benchmarks.load_table --model pair/target --prompts pair/prompts.json \\
        --drafts model:pair/draft --loads all:1:0,all:16:0.8 --fixed model@1,model@3

A load is KIND:REQUESTS:TEMPERATURE: a category of tasks, all of them, or random tokens. Every arm
plays it in turn, each in an engine whose depth policy sees all loads and rounds as a server's
would; without --learn it starts untrained. Tokens count from when the first requests have all
produced a token. `recovers` is when an arm first produces, within a second, nine tenths of its mean
over the second half.
"""

from __future__ import annotations

import itertools
import random
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks.command import chosen_tasks, parser, run
from forerun import LLM, SamplingParams
from forerun.bench.decode import batches
from forerun.draft.registry import with_references
from forerun.engine.acceptance import DraftOption
from forerun.engine.depth import BatchState, DepthPolicy
from forerun.engine.engine import Engine
from forerun.engine.request import OFF
from forerun.measure.run import PLAIN, Arm, Work
from forerun.measure.tables import print_json
from forerun.measure.workloads import Task

ALL, RANDOM, NEVER = "all", "random", "never"
RANDOM_TOKENS = 64  # of a random prompt
SHIFT = 7  # tasks by which each round starts later than the one before


class Never(DepthPolicy):
    """Policy that never drafts, with the overhead of deciding."""

    def choose(self, options: Sequence[DraftOption], batch: BatchState) -> list[int]:
        return [0] * len(options)

    def pick_rival_probe(
        self, rivals: Sequence[DraftOption], speed: float, batch: BatchState
    ) -> int | None:
        return None


@dataclass(frozen=True)
class Load:
    """One kind of load."""

    kind: str
    requests: int
    temperature: float

    def __str__(self) -> str:
        return f"{self.kind}, {self.requests} at once, {self.temperature:g}"


@dataclass(frozen=True)
class Played:
    """Result of one load: (seconds, tokens) of each step, and the total seconds."""

    steps: list[tuple[float, int]]
    seconds: float

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return sum(count for _, count in self.steps) / self.seconds

    @property
    def recovered(self) -> float:
        """Seconds until one second produces nine tenths of the second half's rate."""
        times = [seconds for seconds, _ in self.steps]
        total = list(itertools.accumulate((count for _, count in self.steps), initial=0))

        def tokens_between(start: float, end: float) -> int:
            return total[bisect_left(times, end)] - total[bisect_left(times, start)]

        usual = 2 * tokens_between(self.seconds / 2, self.seconds) / self.seconds
        at = 0.0
        while at + 1 < self.seconds and tokens_between(at, at + 1) < 0.9 * usual:
            at += 0.1
        return at


def works(llm: LLM, tasks: Sequence[Task], kind: str, tokens: int, first: int) -> Iterator[Work]:
    """Yield prompts of a kind without end, starting with number `first`."""
    if kind == RANDOM:
        rng = random.Random(first)
        vocab = llm.decoder.config.vocab
        while True:
            yield Work([rng.randrange(vocab) for _ in range(RANDOM_TOKENS)])
    chosen = [task for task in tasks if kind in (ALL, task.category)]
    prompts = [batch[0] for batch in batches(llm, chosen, 1, tokens)]
    yield from itertools.islice(itertools.cycle(prompts), first, None)


def play(
    engine: Engine,
    arm: Arm,
    load: Load,
    coming: Iterator[Work],
    params: SamplingParams,
    seconds: float,
) -> Played:
    """Keep a load going for a time; requests that are left then are dropped."""
    engine.reset()  # empty caches
    silent: set[int] = set()
    running: set[int] = set()
    steps: list[tuple[float, int]] = []
    seeds = itertools.count(params.seed or 0)
    began = 0.0
    while not began or time.perf_counter() - began < seconds:
        while len(running) < load.requests:
            work = next(coming)
            own = replace(params, seed=next(seeds))
            if not began:  # stagger the first ends, as after a while
                share = params.length_limit * (len(running) + 1) // load.requests
                own = replace(own, max_tokens=max(share, 1))
            has_references = work.references and arm.draft != OFF
            request = engine.add(
                work.prompt,
                own,
                draft=with_references(arm.draft) if has_references else arm.draft,
                depth="auto" if arm.depth == NEVER else arm.depth,
                references=work.references,
            )
            running.add(request.id)
            if not began:
                silent.add(request.id)
        events = engine.step_or_raise()
        if began:
            count = sum(len(event.token_ids) for event in events)
            steps.append((time.perf_counter() - began, count))
        silent -= {event.request_id for event in events if event.token_ids}
        running -= {event.request_id for event in events if event.finish_reason}
        if not silent and not began:
            began = time.perf_counter()
    engine.reset()
    return Played(steps, seconds)


def loads_of(text: str) -> list[Load]:
    """Parse KIND:REQUESTS:TEMPERATURE,..."""
    parts = (load.split(":") for load in text.split(","))
    return [Load(kind, int(requests), float(temperature)) for kind, requests, temperature in parts]


def arms_of(text: str) -> list[Arm]:
    """Parse DRAFT@DEPTH,..."""
    pairs = (entry.rsplit("@", 1) for entry in text.split(","))
    return [Arm(d, depth if depth in ("auto", NEVER) else int(depth)) for d, depth in pairs]


def table(found: dict[tuple[Arm, Load], list[Played]]) -> str:
    """Return a Markdown table with ratios to plain decoding, the first arm."""
    arms = list(dict.fromkeys(arm for arm, _ in found))
    loads = list(dict.fromkeys(load for _, load in found))
    heads = [f"{arm.draft}, {arm.depth}" for arm in arms[1:]]
    rows = [["load", "plain, tokens/s", *heads, "recovers, s"], ["---"] * (len(arms) + 2)]
    for load in loads:
        plain = [played.speed for played in found[arms[0], load]]
        cells = []
        for arm in arms[1:]:
            ratios = [a.speed / b for a, b in zip(found[arm, load], plain, strict=True)]
            spread = f" ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else ""
            cells.append(f"{median(ratios):.2f}{spread}")
        slowest = [max(played.recovered for played in found[arm, load]) for arm in arms[1:]]
        recovers = ", ".join(f"{seconds:.1f}" for seconds in slowest)
        rows.append([str(load), f"{median(plain):.0f}", *cells, recovers])
    totals = [sum(p.speed for load in loads for p in found[arm, load]) for arm in arms]
    rows.append(["all, tokens", "1", *(f"{total / totals[0]:.3f}" for total in totals[1:]), ""])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    options = parser(__doc__)
    options.add_argument("--model", help="as in forerun; without it, the default model")
    options.add_argument("--dtype", default="auto", help="as in forerun")
    options.add_argument("--drafts", default="auto", help="as --draft in forerun")
    options.add_argument("--prompts", type=Path, help="a file of tasks instead of built-in ones")
    options.add_argument("--loads", type=loads_of, default="chat:1:0.8")
    options.add_argument("--fixed", default="suffix@4", help="DRAFT@DEPTH,..; a depth, auto, never")
    options.add_argument("--tokens", type=int, default=96, help="of a request")
    options.add_argument("--seconds", type=float, default=8.0, help="of a load")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--learn", type=int, default=0, help="uncounted rounds before")
    given = options.parse_args(arguments)
    most = max(load.requests for load in given.loads)
    llm = LLM(given.model, draft=given.drafts, dtype=given.dtype, max_rows=most)
    tasks = chosen_tasks(given.prompts, "all")
    arms = [PLAIN, *arms_of(given.fixed), Arm(llm.draft, "auto")]
    engines = {}
    for arm in arms:
        policy = Never() if arm.depth == NEVER else DepthPolicy()
        engines[arm] = Engine(llm.engine.target, llm.engine.proposers, policy=policy)
    found: dict[tuple[Arm, Load], list[Played]] = {
        (arm, load): [] for arm in arms for load in given.loads
    }
    for i, load in itertools.product(range(given.learn + given.rounds), given.loads):
        params = SamplingParams(
            temperature=load.temperature, max_tokens=given.tokens, ignore_eos=True, seed=1000 * i
        )
        for j in range(len(arms)):
            arm = arms[(i + j) % len(arms)]
            coming = works(llm, tasks, load.kind, given.tokens, SHIFT * i)
            played = play(engines[arm], arm, load, coming, params, given.seconds)
            if i >= given.learn:
                found[arm, load].append(played)
    if given.json:
        results = [
            {
                "draft": arm.draft,
                "depth": arm.depth,
                "load": str(load),
                "tokens_per_second": [p.speed for p in played],
                "recovered_seconds": [p.recovered for p in played],
            }
            for (arm, load), played in found.items()
        ]
        print_json({"results": results})
    else:
        print(table(found))


if __name__ == "__main__":
    run(main)
