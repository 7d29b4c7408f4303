"""Write a model's answers to built-in tasks as a corpus for `forerun index`.

python -m benchmarks.past_answers --categories chat,mathematics --dtype bfloat16 > answers.jsonl
forerun index answers.jsonl --out INDEX
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from benchmarks.command import add_engine_options, chosen_tasks, load, parser, run
from forerun import SamplingParams


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    options = parser(__doc__)
    add_engine_options(options)
    options.add_argument("--categories", default="chat,mathematics,free,summary")
    options.add_argument("--tokens", type=int, default=160, help="tokens of an answer")
    given = options.parse_args(arguments)
    llm = load(given)
    for task in chosen_tasks(None, given.categories):
        for temperature in (0.0, 0.8):
            params = SamplingParams.pure(
                max_tokens=given.tokens, temperature=temperature, seed=1, ignore_eos=True
            )
            print(json.dumps({"text": llm.generate(task.prompt, params)[0].text}), flush=True)


if __name__ == "__main__":
    run(main)
