"""Text to measure with that is on every machine: the running Python's standard library. And files of prompts."""

from __future__ import annotations

import itertools
import json
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from forerun.errors import RequestError

SKIPPED = 500  # tokens at the start of a file: licences and imports are alike everywhere
FIRST, STRIDE = 3, 7  # which files prompts are cut from, so that neighbours are not about one thing
WHAT_IS_IN_A_FILE = (
    "a prompts file is text (one prompt), JSON lines (a string, token ids, or an object with prompt, text or turns"
    " on each), or JSON with a list of prompts"
)


def library_texts(characters: int = 6_000_000) -> list[str]:
    """The top-level modules of the standard library in order of name, until there are so many characters."""
    texts: list[str] = []
    total = 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        texts.append(path.read_text(encoding="utf-8", errors="ignore"))
        total += len(texts[-1])
        if total > characters:
            break
    return texts


def excerpts(encode: Callable[[str], list[int]], count: int, tokens: int) -> list[list[int]]:
    """`count` prompts of `tokens` tokens each, from different files where there are enough that are long enough."""
    texts = library_texts()
    found: list[list[int]] = []
    for at in itertools.count(SKIPPED, max(SKIPPED, tokens)):  # further on in the files once all are used
        before = len(found)
        for i in _strided(len(texts)):
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


def _strided(count: int) -> list[int]:
    """Every index below `count` once, in strides."""
    return [i for offset in range(STRIDE) for i in range((FIRST + offset) % STRIDE, count, STRIDE)]


def read_prompts(path: Path, encode: Callable[[str], list[int]]) -> list[list[int]]:
    """Prompts as token ids. Raises RequestError for what is no file of prompts.

    Text is one prompt; `.jsonl` has one a line; `.json` a list of them, or an object with the list under "prompts"
    (what `forerun bench pair` writes). A prompt is a string, token ids, or an object that has it under "prompt",
    "text" or, first of a list, "turns" (Spec-Bench).
    """
    items: Any
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            items = [json.loads(line) for line in text.splitlines() if line.strip()]
        elif path.suffix == ".json":
            data = json.loads(text)
            items = data.get("prompts") if isinstance(data, dict) else data
        else:
            items = [text]
    except (OSError, ValueError) as error:
        raise RequestError(f"the prompts in {path} cannot be read: {error}") from None
    if not isinstance(items, list) or not items:
        raise RequestError(f"there are no prompts in {path}: {WHAT_IS_IN_A_FILE}")
    return [_prompt(item, path, encode) for item in items]


def _prompt(item: Any, path: Path, encode: Callable[[str], list[int]]) -> list[int]:
    """One prompt of a file as token ids."""
    if isinstance(item, dict):
        item = next((item[key] for key in ("prompt", "text", "turns") if key in item), None)
    if isinstance(item, list) and item and isinstance(item[0], str):
        item = item[0]
    if isinstance(item, str) and item:
        return encode(item)
    if isinstance(item, list) and item and all(isinstance(i, int) and not isinstance(i, bool) for i in item):
        return list(item)
    raise RequestError(f"{path} holds {str(item)[:40]!r}, which is no prompt: {WHAT_IS_IN_A_FILE}")


def groups(prompts: Sequence[list[int]], size: int) -> list[list[list[int]]]:
    """Prompts in groups of `size` that run at once; the rest that fills no group is left out. RequestError if none."""
    if size > len(prompts):
        raise RequestError(f"there are {len(prompts)} prompts, but {size} are to run at once: give a file with more")
    return [list(prompts[i : i + size]) for i in range(0, len(prompts) - size + 1, size)]
