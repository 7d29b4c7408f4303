"""Speculation beside plain decoding: the same tokens, and how much sooner.

    python examples/compare.py
    python examples/compare.py --model path/or/hub-id --draft suffix --prompt "Once upon a time"

Runs both ways in turn a few times (the machine's speed drifts) and compares medians.
"""

import argparse
import statistics

from rich.console import Console
from rich.text import Text

from forerun import LLM, Completion, SamplingParams

PROMPT = """import argparse


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--name',"""


def decoding_speed(completion: Completion) -> float:
    """Tokens a second after the first pass, which reads the prompt."""
    stats = completion.stats
    first = completion.stats.completion_tokens / stats.steps
    return (stats.completion_tokens - first) / (stats.seconds - stats.first_token_seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model directory or Hub id; SmolLM2-135M-Instruct if left out")
    parser.add_argument("--draft", default="auto", help="off, auto, ngram, suffix or model:DIR")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--temperature", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()

    console = Console(highlight=False, soft_wrap=True)
    llm = LLM(args.model, draft=args.draft)
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed)
    stream = llm.stream(args.prompt, params)  # the first run also warms up, and lets the depth policy measure
    console.print(Text(args.prompt, style="dim"), end="")
    for event in stream:
        for piece, source in zip(event.pieces, event.sources, strict=True):
            console.print(Text(piece, style="cyan" if source else ""), end="")
    console.print("\n")

    plain, speculative = [], []
    for _ in range(args.repeats):
        plain += llm.generate(args.prompt, params, draft="off")
        llm.forget()  # or the suffix drafter would know this very text from the run before
        speculative += llm.generate(args.prompt, params)
    slow = statistics.median(map(decoding_speed, plain))
    fast = statistics.median(map(decoding_speed, speculative))
    same = all(c.token_ids == plain[0].token_ids for c in [*plain, *speculative, stream.completion])
    accepted = statistics.median(c.stats.accepted_length for c in speculative)
    console.print(f"draft                {llm.draft} (coloured above: drafted and accepted)")
    console.print(f"accepted length      {accepted:.2f} tokens per pass of the target")
    console.print(f"plain decoding       {slow:.0f} tokens/s")
    console.print(f"with speculation     {fast:.0f} tokens/s, {fast / slow:.2f} times plain")
    console.print(f"token ids            {'the same' if same else 'DIFFERENT'} with speculation and without")
    raise SystemExit(0 if same else 1)


if __name__ == "__main__":
    main()
