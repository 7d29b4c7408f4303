"""Measure how often an asynchronous drafter anticipates the verdict, and what that saves.

    python -m benchmarks.async_drafting --draft self:int4 --dtype bfloat16     # the default model
    python -m benchmarks.async_drafting --model pair/target --draft model:pair/draft \\
        --prompts pair/prompts.json

First every outcome is drafted for before the forward pass, so that nothing depends on time: the
share of verdicts that was anticipated, with the target's sampling noise known to the drafter and
without. Then beside the pass, on half of the threads, in turn with the same drafts made after it:
tokens per second, and the drafting time of a step that is left.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.command import chosen_tasks, parser, run
from forerun import LLM, SamplingParams
from forerun.draft.compose import OverlapProposer
from forerun.draft.proposer import DraftRequest
from forerun.types import Draft

MAX_PROMPTS = 4


def draft_before(
    ahead: OverlapProposer, rows: Sequence[DraftRequest], drafts: Sequence[Draft]
) -> None:
    """Draft ahead and wait for it, so that it does not run beside the forward pass."""
    OverlapProposer.begin_overlap(ahead, rows, drafts)
    ahead.finish()


def generate(
    llm: LLM, prompts: Sequence[object], draft: str, params: SamplingParams, depth: int
) -> tuple[float, float]:
    """Return tokens per second, and milliseconds of drafting per step."""
    start = time.perf_counter()
    stats = [llm.generate(p, params, draft=draft, depth=depth)[0].stats for p in prompts]  # type: ignore[arg-type]
    seconds = time.perf_counter() - start
    drafting = sum(s.draft_seconds for s in stats) / sum(s.steps for s in stats)
    return sum(s.completion_tokens for s in stats) / seconds, 1e3 * drafting


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    options = parser(__doc__)
    options.add_argument("--model", help="as in forerun; without it, the default model")
    options.add_argument("--draft", default="self:int4")
    options.add_argument("--dtype", default="auto")
    options.add_argument("--prompts", type=Path, help="a file of tasks; by default built-in chats")
    options.add_argument("--depth", type=int, default=4)
    options.add_argument("--tokens", type=int, default=96)
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--only-hits", action="store_true", help="skip the timing")
    given = options.parse_args(arguments)
    llm = LLM(given.model, draft=f"ahead({given.draft})", dtype=given.dtype, kv_tokens=8192)
    ahead = llm.engine.proposers[llm.draft]
    assert isinstance(ahead, OverlapProposer)
    prompts = [task.prompt for task in chosen_tasks(given.prompts, "chat")][:MAX_PROMPTS]
    for temperature in (0.0, 0.8):
        params = SamplingParams.pure(
            max_tokens=given.tokens, temperature=temperature, seed=5, ignore_eos=True
        )
        shares = {}
        for coupled in (True, False):
            ahead.coupled = coupled
            ahead.verdicts = ahead.hits = 0
            ahead.begin_overlap = draft_before.__get__(ahead)  # type: ignore[method-assign]
            generate(llm, prompts, llm.draft, params, given.depth)
            del ahead.begin_overlap
            shares[coupled] = ahead.hits / ahead.verdicts
        print(
            f"temperature {temperature:g}: {shares[True]:.1%} anticipated,"
            f" {shares[False]:.1%} without the noise"
        )
        if given.only_hits:
            continue
        ahead.coupled = True
        ahead.verdicts = ahead.hits = 0
        rounds = [
            [generate(llm, prompts, d, params, given.depth) for d in (ahead.model.name, llm.draft)]
            for _ in range(given.repeats)
        ]
        (after, drafting), (beside, left) = (
            [statistics.median(values) for values in zip(*side, strict=True)]
            for side in zip(*rounds, strict=True)
        )
        print(
            f"  {after:.1f} tokens/s drafting after the verdict ({drafting:.2f} ms per step),"
            f" {beside:.1f} asynchronously ({left:.2f} ms left,"
            f" {ahead.hits / ahead.verdicts:.1%} anticipated in time)"
        )


if __name__ == "__main__":
    run(main)
