#!/usr/bin/env python3
"""Compositions of the drafts of one engine, in turn on the same prompts, beside plain decoding:
they share models and moments, where `forerun bench sweep` loads each by itself.

    python scripts/compare_drafts.py --model trio/target --prompts trio/prompts.json --draft
    model:trio/middle \\
      --draft model:trio/draft --drafts model 'model#2>model' --depth 4
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from forerun import LLM, SamplingParams
from forerun.measure.workloads import builtin, read_tasks


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model")
    parser.add_argument(
        "--draft", action="append", required=True, help="what the engine has; may be repeated"
    )
    parser.add_argument(
        "--drafts", nargs="+", required=True, help="what to compare, by the engine's names"
    )
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--categories", default="chat")
    parser.add_argument("--depth", default="auto")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--tasks", type=int, default=2, help="of each category")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    llm = LLM(
        args.model,
        draft=args.draft,
        dtype=args.dtype,
        quantization=args.quantization,
        kv_tokens=8192,
    )
    tasks = read_tasks(args.prompts) if args.prompts else builtin()
    for category in dict.fromkeys(task.category for task in tasks):
        if args.prompts or category in args.categories.split(","):
            prompts = [task.prompt for task in tasks if task.category == category][: args.tasks]
            compare(llm, category, prompts, args)


def compare(llm: LLM, category: str, prompts: list[object], args: argparse.Namespace) -> None:
    params = SamplingParams.pure(
        max_tokens=args.tokens, temperature=args.temperature, seed=1, ignore_eos=True
    )
    speeds: dict[str, list[float]] = {draft: [] for draft in ("off", *args.drafts)}
    lengths, drafting = dict.fromkeys(speeds, 0.0), dict.fromkeys(speeds, 0.0)
    texts = {}
    for number in range(args.repeats + 1):
        for draft in speeds:
            llm.forget()
            start = time.perf_counter()
            done = [llm.generate(p, params, draft=draft, depth=args.depth)[0] for p in prompts]  # type: ignore[arg-type]
            seconds = time.perf_counter() - start
            texts.setdefault(draft, [c.token_ids for c in done])
            if number:  # the first round warms up
                speeds[draft].append(sum(len(c.token_ids) for c in done) / seconds)
            steps = sum(c.stats.steps for c in done)
            lengths[draft] = sum(len(c.token_ids) for c in done) / steps
            drafting[draft] = 1e3 * sum(c.stats.draft_seconds for c in done) / steps
    for draft, found in speeds.items():
        ratios = [own / plain for own, plain in zip(found, speeds["off"], strict=True)]
        print(
            f"{category}, {draft}: {statistics.median(found):.1f} tokens/s, {statistics.median(ratios):.2f} times plain"
            f" ({min(ratios):.2f} to {max(ratios):.2f}), {lengths[draft]:.2f} tokens a pass, {drafting[draft]:.2f} ms"
            f" of drafting{'' if texts[draft] == texts['off'] else ', ANOTHER TEXT'}",
            flush=True,
        )


if __name__ == "__main__":
    main()
