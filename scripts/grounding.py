#!/usr/bin/env python3
"""What finding the passages that fit a prompt is worth to a text that quotes its documents, without
a model.

    forerun index DIRECTORY --out INDEX               # of Python sources
    python scripts/grounding.py INDEX DIRECTORY

Functions of the sources are the answers, some of their tokens replaced at random, and a prompt has
the first five lines
of each: tokens a pass at depth 6, from the whole index alone and with the passages that fit.
"""

from __future__ import annotations

import argparse
import ast
import random
from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

from forerun.draft.corpus import Index
from forerun.draft.retrieval import _Shelf, ground
from forerun.load import load_tokenizer
from forerun.models.hub import find_model
from forerun.models.tokenizer import Tokenizer

DEPTH, FUNCTIONS, LONGEST, LINES = 6, 40, 160, 5
Texts = Sequence[tuple[list[int], list[int]]]  # of each function its prompt and its tokens


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("index", type=Path)
    parser.add_argument("sources", type=Path)
    asked = parser.parse_args()
    tokenizer = load_tokenizer(find_model(None))
    assert tokenizer is not None
    segments = Index(asked.index).segments
    texts, shelf = functions(asked.sources, tokenizer), _Shelf(segments)
    for rate in (0.0, 0.05, 0.15):
        answers = replaced(texts, rate, len(segments[0].starts) - 1)
        without, found = (play(answers, shelf, with_passages) for with_passages in (False, True))
        print(
            f"{rate:.0%} of the tokens replaced: {without:.2f} tokens a pass, with passages {found:.2f}"
        )


def functions(sources: Path, tokenizer: Tokenizer) -> Texts:
    """Some functions of 12 to 40 lines."""
    found = []
    for path in sorted(sources.rglob("*.py")):
        with suppress(SyntaxError, UnicodeDecodeError, ValueError):
            text = path.read_text(encoding="utf-8")
            nodes = [
                node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)
            ]
            lines = text.splitlines()
            found += [
                lines[n.lineno - 1 : n.end_lineno]
                for n in nodes
                if 12 <= (n.end_lineno or 0) - n.lineno <= 40
            ]
    random.Random(1).shuffle(found)

    def prompt(lines: list[str]) -> list[int]:
        asked = "Write this function with small changes:\n\n" + "\n".join(lines[:LINES])
        return tokenizer.chat([{"role": "user", "content": asked}])

    return [
        (prompt(lines), tokenizer.encode("\n".join(lines))[:LONGEST]) for lines in found[:FUNCTIONS]
    ]


def replaced(texts: Texts, rate: float, vocab: int) -> Texts:
    """The same with a share of the answers' tokens drawn at random."""
    chance = random.Random(5)
    return [
        (prompt, [token if chance.random() > rate else chance.randrange(vocab) for token in answer])
        for prompt, answer in texts
    ]


def play(texts: Texts, shelf: _Shelf, with_passages: bool) -> float:
    """Tokens a pass over all answers, drafted as `Retrieval` does."""
    said = passes = 0
    for prompt, answer in texts:
        near, at = ground(shelf.segments, prompt) if with_passages else None, 0
        while at < len(answer):
            end = [*prompt, *answer[:at]][-16:]
            match, tokens = shelf.retrieve(end, DEPTH)
            closer = near.retrieve(end, DEPTH) if near else (0, [])
            if closer[0] >= match:
                tokens = closer[1]
            pairs = zip(tokens, answer[at:], strict=False)
            at += 1 + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            passes += 1
        said += len(answer)
    return said / passes


if __name__ == "__main__":
    main()
