#!/usr/bin/env python3
"""Fixed depths and `auto` beside plain decoding under a steady load: who ends is followed by
another.

    python scripts/load_table.py --loads chat:1:0.8,edit:8:0,random:4:0.8 --seconds 30 --rounds 1
    # it changes python scripts/load_table.py --model pair/target --prompts pair/prompts.json
    --drafts model:pair/draft \\
        --loads all:1:0,all:16:0.8 --fixed model@1,model@3

A load is KIND:REQUESTS:TEMPERATURE: a category of tasks, all of them, or random tokens. All ways to
decode play it in turn, each in an engine whose policy goes through all loads and rounds as that of
a server would; without --learn it has learned nothing before. Counted is from where
the first requests have all begun to speak. `recovers` is when a way first says nine tenths as much
within a second as it does in the mean of the second half; what is copied differs from text to text,
so that fixed ones take a while too. """

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

from forerun import LLM, SamplingParams
from forerun.bench.decode.sweep import batches
from forerun.draft.registry import with_references
from forerun.engine.acceptance import DraftOption
from forerun.engine.depth import BatchState, DepthPolicy
from forerun.engine.engine import Engine
from forerun.engine.request import OFF
from forerun.measure.run import Arm, Work
from forerun.measure.workloads import Task, builtin, read_tasks

ALL, RANDOM, NEVER = "all", "random", "never"
SHIFT = 7  # tasks by which a round begins later than the one before


class Never(DepthPolicy):
    """Drafts nothing, at what all of it costs that surrounds drafts."""

    def choose(self, wishes: Sequence[DraftOption], place: BatchState) -> list[int]:
        return [0] * len(wishes)

    def tried(self, rivals: Sequence[DraftOption], speed: float, place: BatchState) -> int | None:
        return None


class Load(NamedTuple):
    """One kind of load."""

    kind: str
    requests: int
    temperature: float


class Played(NamedTuple):
    """What came of it: (seconds since all spoke, tokens) of each step."""

    said: list[tuple[float, int]]
    seconds: float

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return sum(n for _, n in self.said) / self.seconds

    @property
    def recovered(self) -> float:
        """Seconds until a second says nine tenths of what one says in the second half."""
        times, total = (
            [t for t, _ in self.said],
            list(itertools.accumulate((n for _, n in self.said), initial=0)),
        )
        within = lambda a, b: total[bisect_left(times, b)] - total[bisect_left(times, a)]  # noqa: E731
        usual, at = 2 * within(self.seconds / 2, self.seconds) / self.seconds, 0.0
        while at + 1 < self.seconds and within(at, at + 1) < 0.9 * usual:
            at += 0.1
        return at


def works(llm: LLM, tasks: Sequence[Task], kind: str, tokens: int, first: int) -> Iterator[Work]:
    """Prompts of a kind, without end."""
    chance, vocab = random.Random(first), llm.decoder.config.vocab
    if kind == RANDOM:
        return (Work([chance.randrange(vocab) for _ in range(64)]) for _ in itertools.count())
    chosen = [task for task in tasks if kind in (ALL, task.category)]
    return itertools.islice(
        itertools.cycle(batch[0] for batch in batches(llm, chosen, 1, tokens)), first, None
    )


def play(
    engine: Engine,
    arm: Arm,
    load: Load,
    coming: Iterator[Work],
    params: SamplingParams,
    seconds: float,
) -> Played:
    """A load for so many seconds; requests that are left then are dropped."""
    engine.reset()  # nothing of the way before is in the caches
    silent, running, said = set[int](), set[int](), list[tuple[float, int]]()
    count, begun = itertools.count(params.seed or 0), 0.0
    while not begun or time.perf_counter() - begun < seconds:
        while len(running) < load.requests:
            work = next(coming)
            draft = (
                with_references(arm.draft) if work.references and arm.draft != OFF else arm.draft
            )
            mine = replace(params, seed=next(count))
            if not begun:  # they end one by one, as they would after a while
                mine = replace(
                    mine, max_tokens=max(params.max_tokens * (len(running) + 1) // load.requests, 1)
                )
            depth = "auto" if arm.depth == NEVER else arm.depth
            request = engine.add(
                work.prompt, mine, draft=draft, depth=depth, references=work.references
            )
            running.add(request.id)
            if not begun:
                silent.add(request.id)
        events = engine.step_or_raise()
        if begun:
            said.append(
                (time.perf_counter() - begun, sum(len(event.token_ids) for event in events))
            )
        silent -= {event.request_id for event in events if event.token_ids}
        running -= {event.request_id for event in events if event.finish_reason}
        if not silent and not begun:
            begun = time.perf_counter()
    engine.reset()
    return Played(said, seconds)


def loads_of(text: str) -> list[Load]:
    """KIND:REQUESTS:TEMPERATURE,..."""
    parts = (load.split(":") for load in text.split(","))
    return [Load(kind, int(requests), float(temperature)) for kind, requests, temperature in parts]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="as in forerun; none is the default model")
    parser.add_argument("--dtype", default="auto", help="as in forerun")
    parser.add_argument("--drafts", default="auto", help="as --draft in forerun")
    parser.add_argument("--prompts", type=Path, help="a file of tasks; none are forerun's own")
    parser.add_argument(
        "--loads", type=loads_of, default="chat:1:0.8", help="KIND:REQUESTS:TEMPERATURE,..."
    )
    parser.add_argument(
        "--fixed", default="suffix@4", help="DRAFT@DEPTH,... beside auto; a depth, auto or never"
    )
    parser.add_argument("--tokens", type=int, default=96, help="of a request")
    parser.add_argument("--seconds", type=float, default=8.0, help="of a load")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--learn", type=int, default=0, help="rounds before that, in which auto learns"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    llm = LLM(
        options.model,
        draft=options.drafts,
        dtype=options.dtype,
        max_rows=max(x.requests for x in options.loads),
    )
    tasks = read_tasks(options.prompts) if options.prompts else builtin()
    fixed = [
        Arm(draft, depth if depth in ("auto", NEVER) else int(depth))
        for draft, depth in (x.rsplit("@", 1) for x in options.fixed.split(","))
    ]
    arms = [Arm(OFF, 0), *fixed, Arm(llm.draft, "auto")]
    engines = {
        arm: Engine(
            llm.engine.target,
            llm.engine.proposers,
            policy=Never() if arm.depth == NEVER else DepthPolicy(),
        )
        for arm in arms
    }
    found: dict[tuple[Arm, Load], list[Played]] = {
        (arm, load): [] for arm in arms for load in options.loads
    }
    for i, load in itertools.product(range(options.learn + options.rounds), options.loads):
        for j in range(len(arms)):
            arm, coming = (
                arms[(i + j) % len(arms)],
                works(llm, tasks, load.kind, options.tokens, SHIFT * i),
            )
            params = SamplingParams(
                temperature=load.temperature,
                max_tokens=options.tokens,
                ignore_eos=True,
                seed=1000 * i,
            )
            played = play(engines[arm], arm, load, coming, params, options.seconds)
            if i >= options.learn:
                found[arm, load].append(played)
    if options.json:
        rows = [
            [a.draft, a.depth, load, [p.speed for p in played]]
            for (a, load), played in found.items()
        ]
        print(json.dumps(rows))
        return
    print(
        "| load | plain, tokens/s | "
        + " | ".join(f"{a.draft}, {a.depth}" for a in arms[1:])
        + " | recovers, s |"
    )
    print("|---" * (len(arms) + 2) + "|")
    for load in options.loads:
        plain = [played.speed for played in found[arms[0], load]]
        cells = []
        for arm in arms[1:]:
            ratios = [a.speed / b for a, b in zip(found[arm, load], plain, strict=True)]
            spread = f" ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else ""
            cells.append(f"{median(ratios):.2f}{spread}")
        recovered = ", ".join(
            f"{max(played.recovered for played in found[arm, load]):.1f}" for arm in arms[1:]
        )
        name = f"{load.kind}, {load.requests} at once, {load.temperature:g}"
        print(f"| {name} | {median(plain):.0f} | " + " | ".join(cells) + f" | {recovered} |")
    whole = {arm: sum(p.speed for load in options.loads for p in found[arm, load]) for arm in arms}
    print(
        "| all, tokens | 1 | "
        + " | ".join(f"{whole[arm] / whole[arms[0]]:.3f}" for arm in arms[1:])
        + " | |"
    )


if __name__ == "__main__":
    main()
