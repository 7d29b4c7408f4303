#!/usr/bin/env python3
"""How often what a verdict leaves was foreseen by who drafts ahead, with the target's noise and
without, and what that hides.

    python scripts/ahead_hits.py --draft self:int4 --dtype bfloat16     # the default model
    python scripts/ahead_hits.py --model pair/target --draft model:pair/draft --prompts
    pair/prompts.json

First every outcome is drafted for before the pass begins, so that nothing depends on time: hits of
all verdicts. Then beside the pass, on half of the threads, in turn with the same drafts made after
it: tokens a second of both, and the drafting of a step that is left.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from forerun import LLM, SamplingParams
from forerun.draft.overlap import Ahead
from forerun.draft.proposer import Row
from forerun.measure.workloads import builtin, read_tasks
from forerun.types import Draft


def before(ahead: Ahead, rows: Sequence[Row], drafts: Sequence[Draft]) -> None:
    """Draft ahead before the pass, not beside it."""
    Ahead.begin_overlap(ahead, rows, drafts)
    ahead.finish()


def run(
    llm: LLM, prompts: Sequence[object], draft: str, params: SamplingParams, depth: int
) -> tuple[float, float]:
    """Tokens a second, and milliseconds of drafting in a step."""
    start = time.perf_counter()
    done = [llm.generate(prompt, params, draft=draft, depth=depth)[0].stats for prompt in prompts]  # type: ignore[arg-type]
    seconds = time.perf_counter() - start
    drafting = sum(stats.draft_seconds for stats in done) / sum(stats.steps for stats in done)
    return sum(stats.completion_tokens for stats in done) / seconds, 1e3 * drafting


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model")
    parser.add_argument("--draft", default="self:int4")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument(
        "--prompts", type=Path, help="a file of tasks; the built-in ones of conversation without"
    )
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only-hits", action="store_true")
    args = parser.parse_args()
    llm = LLM(args.model, draft=f"ahead({args.draft})", dtype=args.dtype, kv_tokens=8192)
    ahead = llm.engine.proposers[llm.draft]
    assert isinstance(ahead, Ahead)
    tasks = (
        read_tasks(args.prompts)
        if args.prompts
        else [task for task in builtin() if task.category == "chat"]
    )
    prompts = [task.prompt for task in tasks][:4]
    for temperature in (0.0, 0.8):
        params = SamplingParams.pure(
            max_tokens=args.tokens, temperature=temperature, seed=5, ignore_eos=True
        )
        shares = {}
        for coupled in (True, False):
            ahead.coupled, ahead.asked, ahead.hits = coupled, 0, 0
            ahead.begin_overlap = before.__get__(ahead)  # type: ignore[method-assign]
            run(llm, prompts, llm.draft, params, args.depth)
            del ahead.begin_overlap
            shares[coupled] = ahead.hits / ahead.asked
        print(
            f"temperature {temperature:g}: {shares[True]:.1%} foreseen, {shares[False]:.1%} without the noise"
        )
        if args.only_hits:
            continue
        ahead.coupled, ahead.asked, ahead.hits = True, 0, 0
        drafts = ahead.model.name, llm.draft
        found = [
            [run(llm, prompts, d, params, args.depth) for d in drafts] for _ in range(args.repeats)
        ]
        (alone, drafting), (beside, left) = (
            [statistics.median(figures) for figures in zip(*side, strict=True)]
            for side in zip(*found, strict=True)
        )
        print(
            f"  {alone:.1f} tokens/s drafting after the verdict ({drafting:.2f} ms a step), {beside:.1f} ahead"
            f" ({left:.2f} ms left, {ahead.hits / ahead.asked:.1%} foreseen in time)"
        )


if __name__ == "__main__":
    main()
