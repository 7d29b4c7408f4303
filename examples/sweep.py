"""Draft by depth over a few prompts: speed beside plain decoding, accepted length, and where the time goes.

    python examples/sweep.py
    python examples/sweep.py --model path/or/hub-id --draft model:path/of/a/smaller/one --temperature 0.8

Plain and speculative runs alternate; each figure is a median over prompts and repeats. What the suffix drafter
remembers of finished requests is dropped before every run.
"""

import argparse
import statistics

from rich.console import Console
from rich.table import Table

from forerun import LLM, Completion, SamplingParams

PROMPTS = [
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "import os\nimport sys\n\ndef walk(path):\n    ",
    'def parse(line):\n    """Parse a line."""\n',
    "class TestFoo(unittest.TestCase):\n\n    def test_one(self):\n",
]


def decoding_speed(completion: Completion) -> float:
    """Tokens a second after the first pass, which reads the prompt."""
    stats = completion.stats
    first = stats.completion_tokens / stats.steps
    return (stats.completion_tokens - first) / (stats.seconds - stats.first_token_seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model directory or Hub id; the bundled model if left out")
    parser.add_argument("--draft", default="model:bundled", help="a draft model to sweep beside ngram and suffix")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=6)
    args = parser.parse_args()

    llm = LLM(args.model, draft=args.draft)
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=1, ignore_eos=True)
    cases = [(draft, depth) for draft in ("ngram", "suffix", "model") for depth in (1, 2, 3, 4, "auto")]
    cases = [case for case in cases if case[0] in llm.engine.proposers]
    rows: dict[tuple[str, int | str], list[tuple[float, ...]]] = {case: [] for case in cases}
    for _ in range(args.repeats):
        for prompt in PROMPTS:
            plain = decoding_speed(llm.generate(prompt, params, draft="off")[0])
            for draft, depth in cases:
                llm.forget()
                (completion,) = llm.generate(prompt, params, draft=draft, depth=depth)
                stats = completion.stats
                times = (1000 * stats.draft_seconds / stats.steps, 1000 * stats.verify_seconds / stats.steps)
                rows[draft, depth].append((decoding_speed(completion) / plain, stats.accepted_length, *times))
    table = Table("draft", "depth", "times plain", "accepted length", "draft ms a step", "verify ms a step")
    for (draft, depth), values in rows.items():
        table.add_row(draft, str(depth), *(f"{statistics.median(column):.2f}" for column in zip(*values, strict=True)))
    Console().print(table)


if __name__ == "__main__":
    main()
