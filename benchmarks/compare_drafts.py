"""Compare compositions of the drafts of one engine, in turn, beside plain decoding.

    python -m benchmarks.compare_drafts --model trio/target --prompts trio/prompts.json \\
        --draft model:trio/middle --draft model:trio/draft --drafts model 'model#2>model' --depth 4

They share models and are measured in the same rounds, where `forerun bench sweep` loads each draft
with weights by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.command import add_engine_options, chosen_tasks, load, parser, run
from forerun import SamplingParams
from forerun.bench.decode import batches
from forerun.cli.progress import progress
from forerun.config import parse_depth
from forerun.measure.energy import Meter
from forerun.measure.rounds import Rounds, Setting
from forerun.measure.run import PLAIN, Arm
from forerun.measure.tables import print_columns, times_and_interval


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    options = parser(__doc__)
    add_engine_options(options)
    options.add_argument("--draft", action="append", required=True, help="what the engine has")
    options.add_argument("--drafts", nargs="+", required=True, help="what to compare")
    options.add_argument("--prompts", type=Path, help="a file of tasks")
    options.add_argument("--categories", default="chat", help="of built-in tasks")
    options.add_argument("--depth", default="auto")
    options.add_argument("--temperature", type=float, default=0.0)
    options.add_argument("--tokens", type=int, default=96)
    options.add_argument("--tasks", type=int, default=2, help="of each category")
    options.add_argument("--repeats", type=int, default=5, help="number of rounds")
    given = options.parse_args(arguments)
    llm = load(given, draft=given.draft, kv_tokens=8192)
    params = SamplingParams.pure(max_tokens=given.tokens, seed=1, ignore_eos=True)
    depth = parse_depth(given.depth)
    arms = [Arm(draft, depth, proposer=draft) for draft in given.drafts]
    tasks = chosen_tasks(given.prompts, given.categories)
    rows = []
    for category in dict.fromkeys(task.category for task in tasks):
        own = [task for task in tasks if task.category == category][: given.tasks]
        setting = Setting(category, given.temperature, 1)
        rounds = Rounds(llm, setting, [PLAIN, *arms], params, given.repeats, Meter())
        with progress(given.json, measuring=True) as tell:
            rounds.play(batches(llm, own, 1, given.tokens), tell)
        for arm in rounds.runs:
            r = rounds.result("none", arm, None)
            rows.append(
                {
                    "category": category,
                    "draft": r.draft,
                    "tokens/s": f"{r.tokens_per_second:.1f}",
                    "times plain (95 %)": times_and_interval(r.times_plain, r.interval),
                    "accepted length": f"{r.accepted_length:.2f}",
                    "draft ms": f"{r.draft_ms:.2f}",
                    "text": "same" if r.same else f"DIFFERENT from token {r.first_difference}",
                }
            )
    print_columns(rows, optional=("category",))


if __name__ == "__main__":
    run(main)
