"""Grounding: the passages of an index that fit what a request asks about, where its answer is copied from sooner.

A match of three tokens is the least that a whole index can be trusted with; within the few passages that a question is
about, shorter ones are right often enough.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import log

import numpy as np

from forerun.draft.corpus import BREAK, PASSAGE, SORTED, Segment

RECENT = 256  # tokens of a request that say what it is about
WORDS = 16  # of these, at most, the rarest,
FOUND = 5_000  # which occur so often in all, at most: the time of a question
FITTING = 8  # passages that are taken
LENGTH = 2 * PASSAGE  # tokens of each: an answer goes on where its passage ends
SHORTEST = 2  # tokens of a match


class Ground:
    """Some texts that an answer may quote, the most fitting one first."""

    def __init__(self, texts: Sequence[np.ndarray]) -> None:
        gap = np.full(SORTED, BREAK, np.uint32)  # nothing matches across it
        self._tokens = np.concatenate([gap, *(part for text in texts for part in (text, gap))])

    def retrieve(self, text: Sequence[int], most: int) -> tuple[int, list[int]]:
        """(tokens that match, what goes on there) for the end of a text: at the first place of the longest match."""
        ends = np.flatnonzero(self._tokens[:-1] == text[-1])
        ends = ends[self._tokens[ends + 1] != BREAK]
        length = 0
        while len(ends):
            first, length = int(ends[0]) + 1, length + 1
            if length == min(len(text), SORTED):
                break
            ends = ends[self._tokens[ends - length] == text[-length - 1]]
        if length < SHORTEST:
            return 0, []
        tokens = self._tokens[first : first + most].tolist()
        return length, tokens[: tokens.index(BREAK)] if BREAK in tokens else tokens


def ground(segments: Sequence[Segment], tokens: Sequence[int]) -> Ground | None:
    """The texts that fit the end of a request best; None where there are none."""
    fitting = fit(segments, tokens)
    return Ground([_text(segments[of], place) for of, place in fitting]) if fitting else None


def fit(segments: Sequence[Segment], tokens: Sequence[int]) -> list[tuple[int, int]]:
    """The passages that share most with the end of a request, best first: (segment, place). A token that they share
    counts by how few passages have it, as in BM25; how often one has it is not known, and they are equally long."""
    tables = [(number, segment.passages) for number, segment in enumerate(segments) if segment.passages]
    scores, count = defaultdict[tuple[int, int], float](float), sum(table.count for _, table in tables)
    for token in _rarest(segments, tokens):
        holding = [(number, place) for number, table in tables for place in table.holding(token, FOUND)]
        worth = log(1 + max(count - len(holding) + 0.5, 0) / (len(holding) + 0.5))
        for passage in holding:
            scores[passage] += worth
    return sorted(scores, key=lambda passage: (-scores[passage], passage))[:FITTING]


def _rarest(segments: Sequence[Segment], tokens: Sequence[int]) -> list[int]:
    """The tokens of a request that are worth asking for."""
    grounded = [segment.starts for segment in segments if segment.passages]
    known = min(map(len, grounded), default=1) - 1
    recent = np.unique(np.array([token for token in tokens[-RECENT:] if token < known], np.int64))
    counts = sum((starts[recent + 1] - starts[recent] for starts in grounded), np.zeros(len(recent), np.int64))
    order = np.argsort(counts, kind="stable")
    order = order[counts[order] > 0][:WORDS]
    return [int(token) for token in recent[order[np.cumsum(counts[order]) <= FOUND]]]


def _text(segment: Segment, place: int) -> np.ndarray:
    """A passage and what follows it in its document; empty where a damaged table names a place that is none."""
    text = np.array(segment.tokens[place : place + LENGTH]) if place >= 0 else np.array([], np.uint32)
    wrong = np.flatnonzero(text >= len(segment.starts) - 1)  # a break, or a token that is none
    return text[: wrong[0]] if len(wrong) else text
