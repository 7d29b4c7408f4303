"""Prompt lookup as llama.cpp's example `lookup` does it with its n-gram cache of the context
(common/ngram-cache.cpp).

What followed each 1 to 4 tokens of the text is counted. A draft goes on with what mostly followed
its last 4 tokens, or its last 3 and so on, as long as that was seen often enough and mostly means
mostly. The example can have two more caches, of other texts, in files; without these files it does
what is done here."""

from __future__ import annotations

from collections.abc import Sequence

SIZES = (4, 3, 2, 1)
SEEN = {1: 2, 2: 2, 3: 1, 4: 1}  # how often n tokens must have been seen: draft_min_sample_size_lax
SHARE = {
    1: 66,
    2: 50,
    3: 50,
    4: 50,
}  # percent of what followed that is one token: draft_min_percent_lax
LEAST = 2  # tokens of a text with a draft


class NgramCache:
    """The counts of one text that grows."""

    def __init__(self) -> None:
        self.counts: dict[tuple[int, ...], dict[int, int]] = {}
        self.length = 0

    def read(self, text: Sequence[int]) -> None:
        """Count what is new in the text, which begins with what was read before."""
        for at in range(self.length, len(text)):
            for size in SIZES:
                if size <= at:
                    followers = self.counts.setdefault(tuple(text[at - size : at]), {})
                    followers[text[at]] = followers.get(text[at], 0) + 1
        self.length = len(text)

    def draft(self, text: Sequence[int], most: int) -> list[int]:
        """How the text goes on, at most so far; nothing where the counts do not say."""
        guess: list[int] = []
        tail = list(text[-max(SIZES) :])
        while len(guess) < most and len(text) >= LEAST:
            token = self._next(tail)
            if token is None:
                break
            guess.append(token)
            tail = [*tail, token][-max(SIZES) :]
        return guess

    def _next(self, tail: Sequence[int]) -> int | None:
        for size in SIZES:
            followers = self.counts.get(tuple(tail[-size:])) if size <= len(tail) else None
            if followers:
                token, total = max(followers, key=followers.__getitem__), sum(followers.values())
                if total >= SEEN[size] and 100 * followers[token] >= SHARE[size] * total:
                    return token
        return None
