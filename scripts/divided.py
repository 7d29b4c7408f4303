#!/usr/bin/env python3
"""A model in several processes beside the same in one: the texts, what each part holds, and what a
pass takes.

python scripts/divided.py --of 3                   # the default model, which has three key-value
heads python scripts/divided.py --model pair/target --prompts pair/prompts.json --of 2 --draft
model:pair/draft"""

from __future__ import annotations

import argparse
from pathlib import Path

from forerun import LLM, Completion, SamplingParams
from forerun.measure.workloads import builtin, read_tasks


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--of", type=int, default=3, help="processes")
    parser.add_argument("--draft", default="suffix")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--tasks", type=int, default=6)
    asked = parser.parse_args()
    tasks = (read_tasks(asked.prompts) if asked.prompts else builtin())[: asked.tasks]
    options = dict(draft=asked.draft, dtype=asked.dtype, kernels="torch", kv_tokens=8192)
    one, several = (
        LLM(asked.model, **options),
        LLM(asked.model, tensor_parallel=asked.of, **options),
    )
    whole, part = one.decoder.weight_bytes, several.decoder.weight_bytes
    print(
        f"weights of a pass: {whole / 1e6:.0f} MB in one process, {part / 1e6:.0f} MB in the first of {asked.of}"
    )
    row = several.engine.target.cache.row_bytes / one.engine.target.cache.row_bytes
    print(f"keys and values of a token in the first: {row:.2f} of all")
    for temperature in (0.0, 0.8):
        params = SamplingParams.pure(
            max_tokens=asked.tokens, temperature=temperature, seed=1, ignore_eos=True, logprobs=2
        )
        for task in tasks:
            expected, *others = (
                llm.generate(task.prompt, params, draft=draft)[0]
                for llm, draft in ((one, "off"), (several, "off"), (several, None))
            )
            says = " and ".join(compared(expected, other) for other in others)
            took = [f"{1e3 * c.stats.seconds / c.stats.steps:.1f}" for c in (expected, *others)]
            print(
                f"{task.category}, {temperature:g}: plain {says} with drafts; ms a step: {', '.join(took)}",
                flush=True,
            )


def compared(expected: Completion, other: Completion) -> str:
    """Whether the texts are the same, else where they part and how near the two tokens were."""
    pairs = zip(expected.token_ids, other.token_ids, strict=True)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if at is None:
        return "the same"
    first, second = sorted((expected.logprobs or [])[at].top.values(), reverse=True)[:2]
    return f"another token at {at} (the two likeliest are {first - second:.1e} apart)"


if __name__ == "__main__":
    main()
