#!/usr/bin/env python3
"""What a model says to tasks of `forerun bench`, as lines of text for `forerun index`: a corpus of
past answers.

python scripts/past_answers.py --categories chat,mathematics --dtype bfloat16 > answers.jsonl
forerun index answers.jsonl --out INDEX
"""

from __future__ import annotations

import argparse
import json

from forerun import LLM, SamplingParams
from forerun.measure.workloads import builtin


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--categories", default="chat,mathematics,free,summary")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tokens", type=int, default=160)
    args = parser.parse_args()
    llm = LLM(dtype=args.dtype)
    for task in builtin():
        if task.category in args.categories.split(","):
            for temperature in (0.0, 0.8):
                params = SamplingParams.pure(
                    max_tokens=args.tokens, temperature=temperature, seed=1, ignore_eos=True
                )
                print(json.dumps({"text": llm.generate(task.prompt, params)[0].text}), flush=True)


if __name__ == "__main__":
    main()
