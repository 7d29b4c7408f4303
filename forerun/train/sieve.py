"""What of a model's own writing is worth learning from: texts that say something, do not loop, and
are new."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from forerun.models.tokenizer import BROKEN

# a script without spaces is counted by its characters
WORD = re.compile(
    r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+"
)


@dataclass(frozen=True, slots=True)
class Limits:
    """What is left out: a question of fewer `words`; one of whose 5-grams more than the share
    `seen` stood in others; a text of whose 4-grams more than the share `repeated` are repetitions,
    or that deflate makes `ratio` times smaller."""

    words: int = 3
    seen: float = 0.5
    repeated: float = 0.4
    ratio: float = 5.0


USUAL = Limits()


class Sieve:
    """Says what is wrong with a text, and remembers beginnings."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._seen: set[tuple[str, ...]] = set()

    def fault(self, text: str) -> str:
        """Why nothing is learnt from it; "" where something is."""
        if not text.strip():
            return "empty"
        if BROKEN in text:
            return "broken"
        fours, raw = _grams(_words(text), 4), text.encode()
        if 1 - len(set(fours)) / len(fours) > self.limits.repeated:
            return "looping"
        return "looping" if len(raw) > self.limits.ratio * len(zlib.compress(raw, 9)) else ""

    def fault_of_beginning(self, text: str) -> str:
        """The same of a question or the beginning of a text, which is remembered if nothing is
        wrong with it."""
        words = _words(text)
        if len(words) < self.limits.words:
            return "short"
        if fault := self.fault(text):
            return fault
        fives = _grams(words, 5)
        if sum(gram in self._seen for gram in fives) > self.limits.seen * len(fives):
            return "repeated"
        self._seen.update(fives)
        return ""


def _words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def _grams(words: Sequence[str], n: int) -> list[tuple[str, ...]]:
    """All runs of n words; the whole text where it has no more."""
    return [tuple(words[at : at + n]) for at in range(max(len(words) - n + 1, 1))]
