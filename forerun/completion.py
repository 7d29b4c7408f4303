"""What the shell offers for --model and --draft. No torch here: a shell waits for it."""

from __future__ import annotations

import os

DRAFTS = ("auto", "off", "ngram", "suffix", "model:", "medusa:", "eagle3:", "mtp:", "block:")


def model_names(incomplete: str) -> list[str]:
    """The models that are here and begin so."""
    from forerun.models.places import names

    return _offered(names(), incomplete)


def draft_names(incomplete: str) -> list[str]:
    """The drafts that begin so, `model:` with each model that is here."""
    if not incomplete.startswith("model:"):
        return _offered([*DRAFTS], incomplete)
    return _offered([f"model:{name}" for name in model_names("")], incomplete)


def _offered(names: list[str], incomplete: str) -> list[str]:
    """Those that begin so; for bash without what stands before the last colon, which it takes for a word of its own."""
    cut = incomplete.rfind(":") + 1 if _is_bash() else 0
    return [name[cut:] for name in names if name.startswith(incomplete)]


def _is_bash() -> bool:
    return os.environ.get("_FORERUN_COMPLETE") == "complete_bash"


def join_words() -> None:
    """Make one word of those that bash cut at colons, in the environment that describes a command to complete."""
    if not _is_bash():
        return
    words, at = os.environ.get("COMP_WORDS", "").split("\n"), int(os.environ.get("COMP_CWORD", "0"))
    joined: list[str] = []
    place = len(words)
    for i, word in enumerate(words):
        if len(joined) > 1 and ":" in (word, words[i - 1]):
            joined[-1] += word
        else:
            joined.append(word)
        if i == at:
            place = len(joined) - 1
    os.environ["COMP_WORDS"], os.environ["COMP_CWORD"] = "\n".join(joined), str(min(place, len(joined)))
