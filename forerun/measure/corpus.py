"""Text to measure with that is on every machine: the running Python's standard library."""

from __future__ import annotations

import itertools
import sysconfig
from collections.abc import Callable
from pathlib import Path

from forerun.errors import RequestError

SKIPPED = 500  # tokens at the start of a file: licences and imports are alike everywhere
FIRST, STRIDE = 3, 7  # which files prompts are cut from, so that neighbours are not about one thing


def library_texts(characters: int = 6_000_000) -> list[str]:
    """The top-level modules of the standard library in order of name, until there are so many
    characters."""
    texts: list[str] = []
    total = 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        texts.append(path.read_text(encoding="utf-8", errors="ignore"))
        total += len(texts[-1])
        if total > characters:
            break
    return texts


def excerpts(encode: Callable[[str], list[int]], count: int, tokens: int) -> list[list[int]]:
    """`count` prompts of `tokens` tokens each, from different files where there are enough that are
    long enough."""
    texts = library_texts()
    order = [
        i for offset in range(STRIDE) for i in range((FIRST + offset) % STRIDE, len(texts), STRIDE)
    ]
    found: list[list[int]] = []
    for at in itertools.count(
        SKIPPED, max(SKIPPED, tokens)
    ):  # further on in the files once all are used
        before = len(found)
        for i in order:
            if len(found) == count:
                return found
            # tokens are a few characters each: a file need not be read to its end
            ids = encode(texts[i][: 16 * (at + tokens)])[at : at + tokens]
            found += [ids] if len(ids) == tokens else []
        if len(found) == before:
            break
    raise RequestError(
        f"the standard library has no {count} passages of {tokens} tokens: ask for fewer or shorter ones"
    )
