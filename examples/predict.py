"""Editing a file with its old version as the prediction: how many tokens a pass of the target
gives.

The default model writes a file. Some lines of it are then changed and the result is the prediction
when the same file
is written again: to the engine, an old version of a file that it is to write anew with a few lines
edited.

    python examples/predict.py [--changed 5] [--depth auto]
"""

import argparse
import random
import statistics

from forerun import LLM, SamplingParams

PROMPT = "import argparse\n\n\ndef main():\n    parser = argparse.ArgumentParser()\n"


def edited(text: str, changed: int, seed: int) -> str:
    """The text with some of its lines replaced."""
    lines, rng = text.splitlines(keepends=True), random.Random(seed)
    for i in rng.sample(range(len(lines)), min(changed, len(lines))):
        lines[i] = f"    total = compute({rng.randrange(100)})\n"
    return "".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--changed", type=int, default=5, help="lines that differ")
    parser.add_argument("--depth", default="auto")
    parser.add_argument("--tokens", type=int, default=1000, help="of the file")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    llm = LLM(kv_tokens=2 * (options.tokens + 64))
    lengths, ratios = [], []
    for seed in range(options.repeats):
        bias = dict.fromkeys(llm.decoder.config.end_ids, -100.0)
        params = SamplingParams(
            temperature=0.7, seed=seed, max_tokens=options.tokens, logit_bias=bias
        )
        plain = llm.generate(PROMPT, params, draft="off")[0]
        llm.forget()
        prediction = edited(plain.text, options.changed, seed)
        again = llm.generate(PROMPT, params, depth=options.depth, prediction=prediction)[0]
        assert again.token_ids == plain.token_ids
        lengths.append(again.stats.accepted_length)
        ratios.append(plain.stats.seconds / again.stats.seconds)
        lines = len(plain.text.splitlines())
        print(
            f"{lines} lines, {options.changed} changed: accepted length {lengths[-1]:.2f}, {ratios[-1]:.2f} times plain"
        )
    print(
        f"median: accepted length {statistics.median(lengths):.2f}, {statistics.median(ratios):.2f} times plain"
    )


if __name__ == "__main__":
    main()
