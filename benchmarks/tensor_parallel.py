"""Compare a model split over several processes with the same in one.

    python -m benchmarks.tensor_parallel --of 3    # the default model has three key-value heads
    python -m benchmarks.tensor_parallel --model pair/target --prompts pair/prompts.json --of 2 \\
        --draft model:pair/draft
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.command import chosen_tasks, parser, run
from forerun import LLM, Completion, SamplingParams
from forerun.measure.medians import first_difference


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    options = parser(__doc__)
    options.add_argument("--model", help="as in forerun; without it, the default model")
    options.add_argument("--prompts", type=Path, help="a file of tasks")
    options.add_argument("--of", type=int, default=3, help="number of processes")
    options.add_argument("--draft", default="suffix")
    options.add_argument("--dtype", default="float32")
    options.add_argument("--tokens", type=int, default=64)
    options.add_argument("--tasks", type=int, default=6)
    given = options.parse_args(arguments)
    tasks = chosen_tasks(given.prompts, "all")[: given.tasks]
    fields = {"draft": given.draft, "dtype": given.dtype, "kernels": "torch", "kv_tokens": 8192}
    one = LLM(given.model, **fields)
    several = LLM(given.model, tensor_parallel=given.of, **fields)
    print(
        f"weights of a pass: {one.decoder.weight_bytes / 1e6:.0f} MB in one process,"
        f" {several.decoder.weight_bytes / 1e6:.0f} MB in the first of {given.of}"
    )
    share = several.engine.target.cache.row_bytes / one.engine.target.cache.row_bytes
    print(f"keys and values of a token in the first: {share:.2f} of all")
    for temperature in (0.0, 0.8):
        params = SamplingParams.pure(
            max_tokens=given.tokens, temperature=temperature, seed=1, ignore_eos=True, logprobs=2
        )
        for task in tasks:
            expected, *others = (
                llm.generate(task.prompt, params, draft=draft)[0]
                for llm, draft in ((one, "off"), (several, "off"), (several, None))
            )
            compared = " and ".join(compare(expected, other) for other in others)
            times = [1e3 * c.stats.seconds / c.stats.steps for c in (expected, *others)]
            print(
                f"{task.category}, {temperature:g}: plain {compared} with drafts; ms per step:"
                f" {', '.join(f'{ms:.1f}' for ms in times)}",
                flush=True,
            )


def compare(expected: Completion, other: Completion) -> str:
    """Describe the first difference of two outputs, with the gap of the two likeliest tokens."""
    at = first_difference(expected.token_ids, other.token_ids)
    if at is None:
        return "the same"
    first, second = sorted((expected.logprobs or [])[at].top.values(), reverse=True)[:2]
    return f"another token at {at} (log-probabilities {first - second:.1e} apart)"


if __name__ == "__main__":
    run(main)
