"""What the shell offers for --model and --draft. No torch here: a shell waits for it."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

from forerun.draft_spec import LOADED

DRAFTS = (
    *(
        "auto",
        "off",
        "ngram",
        "suffix",
        "recycle",
        "suffix+recycle",
        "suffix&recycle",
        "retrieval:",
        "self:int4",
    ),
    *(f"{kind}:" for kind in LOADED),
)


def model_names(incomplete: str) -> list[str]:
    """The models that are here and begin so."""
    from forerun.models.local import local_model_names

    return [name for name in local_model_names() if name.startswith(incomplete)]


def draft_names(incomplete: str) -> list[str]:
    """The drafts that begin so, `model:` with each model that is here."""
    if not incomplete.startswith("model:"):
        return [name for name in DRAFTS if name.startswith(incomplete)]
    return [f"model:{name}" for name in model_names(incomplete.removeprefix("model:"))]


@contextmanager
def words_of_bash() -> Iterator[None]:
    """Let names with colons be completed in bash, which takes a colon for a word between two
    others.

    While a command is completed these are made one word again in the environment that describes it,
    and what is offered loses the part before the last colon, which stays in the line as it is.
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
    """Words with those on both sides of a colon made one, and which of them the word `at` became a
    part of."""
    joined: list[str] = []
    place = len(words)
    for i, word in enumerate(words):
        if len(joined) > 1 and ":" in (word, words[i - 1]):
            joined[-1] += word
        else:
            joined.append(word)
        if i == at:
            place = len(joined) - 1
    return joined, min(place, len(joined))
