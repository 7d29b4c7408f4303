"""Shell completion of --model and --draft. Must not import torch: the shell waits for it."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

from forerun.draft_spec import LOADED, OWN, SIMPLE

DRAFTS = (
    *SIMPLE,
    *(OWN, "suffix+recycle", "suffix&recycle", "retrieval:", "self:int4"),
    *(f"{kind}:" for kind in LOADED),
)


def model_names(incomplete: str) -> list[str]:
    """Return the names of local models that start with `incomplete`."""
    from forerun.models.local import local_model_names

    return [name for name in local_model_names() if name.startswith(incomplete)]


def draft_names(incomplete: str) -> list[str]:
    """Return the drafts that start with `incomplete`; `model:` is completed with local models."""
    if not incomplete.startswith("model:"):
        return [name for name in DRAFTS if name.startswith(incomplete)]
    return [f"model:{name}" for name in model_names(incomplete.removeprefix("model:"))]


@contextmanager
def words_of_bash() -> Iterator[None]:
    """Make completion of names with colons work in bash, which splits words at colons.

    While a command is completed, the split words in COMP_WORDS are joined again, and the part up to
    the last colon is removed from each candidate, since bash keeps it on the command line.
    """
    if os.environ.get("_FORERUN_COMPLETE") != "complete_bash":
        yield
        return
    words, at = _joined(
        os.environ.get("COMP_WORDS", "").split("\n"), int(os.environ.get("COMP_CWORD", "0"))
    )
    os.environ["COMP_WORDS"], os.environ["COMP_CWORD"] = "\n".join(words), str(at)
    cut = words[at].rfind(":") + 1 if at < len(words) else 0
    offered = io.StringIO()
    try:
        with redirect_stdout(offered):
            yield
    finally:
        print("\n".join(line[cut:] for line in offered.getvalue().splitlines()))


def _joined(words: list[str], at: int) -> tuple[list[str], int]:
    """Join words that were split at colons.

    Returns the joined words and the index of the one that contains the word at index `at`.
    """
    joined: list[str] = []
    index = len(words)
    for i, word in enumerate(words):
        if len(joined) > 1 and ":" in (word, words[i - 1]):
            joined[-1] += word
        else:
            joined.append(word)
        if i == at:
            index = len(joined) - 1
    return joined, min(index, len(joined))
