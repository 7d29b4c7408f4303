"""Measure what retrieving the passages that fit a prompt is worth, without a model.

    forerun index DIRECTORY --out INDEX               # of Python sources
    python -m benchmarks.passage_retrieval INDEX DIRECTORY

Functions of the sources are the answers, with some tokens replaced at random, and a prompt has the
first lines of each: tokens per forward pass at depth 6, from the whole index alone and with the
passages that fit the prompt.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

from benchmarks.command import parser, run
from forerun.draft.corpus import Index
from forerun.draft.retrieval import SegmentSearch, find_passages
from forerun.load import load_tokenizer
from forerun.models.hub import find_model
from forerun.models.tokenizer import Tokenizer

DEPTH, MAX_FUNCTIONS, MAX_TOKENS, PROMPT_LINES, SUFFIX = 6, 40, 160, 5, 16
SHORTEST, LONGEST = 12, 40  # lines of a function
Texts = Sequence[tuple[list[int], list[int]]]  # (prompt, tokens) of each function


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    options = parser(__doc__)
    options.add_argument("index", type=Path)
    options.add_argument("sources", type=Path)
    given = options.parse_args(arguments)
    tokenizer = load_tokenizer(find_model(None))
    assert tokenizer is not None
    segments = Index(given.index).segments
    texts = functions(given.sources, tokenizer)
    shelf = SegmentSearch(segments)
    for rate in (0.0, 0.05, 0.15):
        answers = replaced(texts, rate, len(segments[0].starts) - 1)
        without = tokens_per_pass(answers, shelf, with_passages=False)
        found = tokens_per_pass(answers, shelf, with_passages=True)
        print(
            f"{rate:.0%} of the tokens replaced: {without:.2f} tokens per pass,"
            f" with passages {found:.2f}"
        )


def functions(sources: Path, tokenizer: Tokenizer) -> Texts:
    """Return some functions of the sources."""
    found = []
    for path in sorted(sources.rglob("*.py")):
        with suppress(SyntaxError, UnicodeDecodeError, ValueError):
            text = path.read_text(encoding="utf-8")
            lines = text.splitlines()
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef):
                    own = lines[node.lineno - 1 : node.end_lineno]
                    found += [own] if SHORTEST < len(own) <= LONGEST + 1 else []
    random.Random(1).shuffle(found)

    def prompt(lines: list[str]) -> list[int]:
        start = "\n".join(lines[:PROMPT_LINES])
        question = f"Write this function with small changes:\n\n{start}"
        return tokenizer.chat([{"role": "user", "content": question}])

    return [
        (prompt(lines), tokenizer.encode("\n".join(lines))[:MAX_TOKENS])
        for lines in found[:MAX_FUNCTIONS]
    ]


def replaced(texts: Texts, rate: float, vocab: int) -> Texts:
    """Return the texts with a share of the answers' tokens drawn at random."""
    rng = random.Random(5)
    return [
        (prompt, [token if rng.random() > rate else rng.randrange(vocab) for token in answer])
        for prompt, answer in texts
    ]


def tokens_per_pass(texts: Texts, shelf: SegmentSearch, with_passages: bool) -> float:
    """Return tokens per pass over all answers, drafted as `Retrieval` does."""
    tokens = 0
    passes = 0
    for prompt, answer in texts:
        passages = find_passages(shelf.segments, prompt) if with_passages else None
        at = 0
        while at < len(answer):
            suffix = [*prompt, *answer[:at]][-SUFFIX:]
            match, draft = shelf.retrieve(suffix, DEPTH)
            closer = passages.retrieve(suffix, DEPTH) if passages else (0, [])
            if closer[0] >= match:
                draft = closer[1]
            pairs = zip(draft, answer[at:], strict=False)
            at += 1 + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            passes += 1
        tokens += len(answer)
    return tokens / passes


if __name__ == "__main__":
    run(main)
