"""SentencePiece vocabularies as merges: scores say which neighbours are joined, merges say it to a BPE tokenizer.

SentencePiece's BPE (Kudo and Richardson 2018) joins, again and again, the two neighbours whose joined text is the token
with the best score, the leftmost of equals. Merges of all pairs of tokens that make a token, best score first, join the
same: how a token comes about depends on nothing outside of it, since whatever joins across its border would undo it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

_BASE, _INVERSE = 0x9E3779B97F4A7C15, pow(0x9E3779B97F4A7C15, -1, 1 << 64)  # odd: it can be divided by
_BITS = 21  # of the number of a slot


def merges_by_score(tokens: list[str], scores: Array, joins: Array) -> list[tuple[str, str]]:
    """The merges of a vocabulary, best score first, of equals the lowest id.

    Args:
        tokens: texts, all different.
        scores: float [V].
        joins: bool [V], whether a token may come about by joining two.
    """
    token, left, right = _pairs(tokens, joins)
    order = np.lexsort((token, -scores[token]))
    text = tokens.__getitem__
    return list(zip(map(text, left[order].tolist()), map(text, right[order].tolist()), strict=True))


def _pairs(tokens: list[str], joins: Array) -> tuple[Array, Array, Array]:
    """Ids of all tokens that are two tokens one after the other, and of these two. Texts are compared by 64-bit hashes:
    polynomials modulo 2^64, so that those of a text's two parts come from two of its prefixes."""
    lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
    ends = np.cumsum(lengths)
    starts = ends - lengths
    characters = np.frombuffer("".join(tokens).encode("utf-32-le"), np.uint32).astype(np.uint64)
    owner = np.repeat(np.arange(len(tokens)), lengths)
    place = np.arange(len(characters)) - starts[owner]
    longest = int(lengths.max(initial=0)) + 1
    sums = np.zeros(len(characters) + 1, np.uint64)
    np.cumsum(_mixed(characters) * _powers(_BASE, longest)[place], out=sums[1:])
    table = _Table(sums[ends] - sums[starts], joins | (lengths == 1))

    at = np.flatnonzero((place > 0) & joins[owner])
    left = table.find(sums[at] - sums[starts[owner[at]]])
    at, left = at[left >= 0], left[left >= 0]
    right = table.find((sums[ends[owner[at]]] - sums[at]) * _powers(_INVERSE, longest)[place[at]])
    kept = right >= 0
    return owner[at[kept]], left[kept], right[kept]


def _mixed(values: Array) -> Array:
    values = (values + np.uint64(1)) * np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(29)
    return values * np.uint64(0x94D049BB133111EB)


def _powers(base: int, count: int) -> Array:
    powers = np.full(count, base, np.uint64)
    powers[0] = 1
    return np.cumprod(powers, dtype=np.uint64)


class _Table:
    """From hashes to ids: arrays of slots, each for those that found their slot taken in the one before."""

    def __init__(self, hashes: Array, within: Array) -> None:
        self.hashes, self.rounds = hashes, list[tuple[int, Array]]()
        left = np.flatnonzero(within)
        for shift in range(64 - _BITS, -1, -7):
            if not len(left):
                break
            slots, at = np.full(1 << _BITS, -1, np.int32), _slot(hashes[left], shift)
            slots[at] = left
            self.rounds.append((shift, slots))
            left = left[slots[at] != left]

    def find(self, hashes: Array) -> Array:
        """Ids; -1 for what is not there."""
        found = np.full(len(hashes), -1, np.int32)
        for shift, slots in self.rounds:
            at = slots[_slot(hashes, shift)]
            hit = (at >= 0) & (self.hashes[at] == hashes)
            found[hit] = at[hit]
        return found


def _slot(hashes: Array, shift: int) -> Array:
    return (hashes >> np.uint64(shift)) & np.uint64((1 << _BITS) - 1)
