"""Retrieval: what followed the end of the text in documents that were indexed before (REST, arXiv
2311.08252)."""

from __future__ import annotations

import ctypes
from array import array
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log

import numpy as np

from forerun.draft.corpus import BREAK, PASSAGE, SORTED, Index, Segment
from forerun.draft.proposer import DraftRequest, PerSlotProposer, Reference
from forerun.kernels import native
from forerun.kernels.native import CTexts, address
from forerun.types import RETRIEVAL, SALT, Draft

RECENT = 256  # tokens of a request that say what it is about
WORDS = 16  # of these, at most, the rarest,
FOUND = 5_000  # which occur so often in all, at most: the time of a question
FITTING = 8  # passages that are taken
LENGTH = 2 * PASSAGE  # tokens of each: an answer goes on where its passage ends
SHORTEST_PASSAGE_MATCH = 2  # tokens of a match


class Ground:
    """Some texts that an answer may quote, the most fitting one first."""

    def __init__(self, texts: Sequence[np.ndarray]) -> None:
        gap = np.full(SORTED, BREAK, np.uint32)  # nothing matches across it
        self._tokens = np.concatenate([gap, *(part for text in texts for part in (text, gap))])

    def retrieve(self, text: Sequence[int], most: int) -> tuple[int, list[int]]:
        """(tokens that match, what goes on there) for the end of a text: at the first place of the
        longest match."""
        ends = np.flatnonzero(self._tokens[:-1] == text[-1])
        ends = ends[self._tokens[ends + 1] != BREAK]
        length = 0
        while len(ends):
            first, length = int(ends[0]) + 1, length + 1
            if length == min(len(text), SORTED):
                break
            ends = ends[self._tokens[ends - length] == text[-length - 1]]
        if length < SHORTEST_PASSAGE_MATCH:
            return 0, []
        tokens = self._tokens[first : first + most].tolist()
        return length, tokens[: tokens.index(BREAK)] if BREAK in tokens else tokens


def ground(segments: Sequence[Segment], tokens: Sequence[int]) -> Ground | None:
    """The texts that fit the end of a request best; None where there are none."""
    fitting = fit(segments, tokens)
    return Ground([_text(segments[of], place) for of, place in fitting]) if fitting else None


def fit(segments: Sequence[Segment], tokens: Sequence[int]) -> list[tuple[int, int]]:
    """The passages that share most with the end of a request, best first: (segment, place). A token
    that they share counts by how few passages have it, as in BM25; how often one has it is not
    known, and they are equally long."""
    tables = [
        (number, segment.passages) for number, segment in enumerate(segments) if segment.passages
    ]
    scores, count = (
        defaultdict[tuple[int, int], float](float),
        sum(table.count for _, table in tables),
    )
    for token in _rarest(segments, tokens):
        holding = [
            (number, place) for number, table in tables for place in table.holding(token, FOUND)
        ]
        worth = log(1 + max(count - len(holding) + 0.5, 0) / (len(holding) + 0.5))
        for passage in holding:
            scores[passage] += worth
    return sorted(scores, key=lambda passage: (-scores[passage], passage))[:FITTING]


def _rarest(segments: Sequence[Segment], tokens: Sequence[int]) -> list[int]:
    """The tokens of a request that are worth asking for."""
    grounded = [segment.starts for segment in segments if segment.passages]
    known = min(map(len, grounded), default=1) - 1
    recent = np.unique(np.array([token for token in tokens[-RECENT:] if token < known], np.int64))
    counts = sum(
        (starts[recent + 1] - starts[recent] for starts in grounded),
        np.zeros(len(recent), np.int64),
    )
    order = np.argsort(counts, kind="stable")
    order = order[counts[order] > 0][:WORDS]
    return [int(token) for token in recent[order[np.cumsum(counts[order]) <= FOUND]]]


def _text(segment: Segment, place: int) -> np.ndarray:
    """A passage and what follows it in its document; empty where a damaged table names a place that
    is none."""
    text = (
        np.array(segment.tokens[place : place + LENGTH]) if place >= 0 else np.array([], np.uint32)
    )
    wrong = np.flatnonzero(text >= len(segment.starts) - 1)  # a break, or a token that is none
    return text[: wrong[0]] if len(wrong) else text


SHORTEST = 3  # tokens of a match
JUDGES = 64  # occurrences, at most, that say what follows


@dataclass(slots=True)
class _Slot:
    """A request's tenant, and the passages that fit it."""

    tenant: str
    near: Ground | None


class Retrieval(PerSlotProposer[_Slot]):
    """Proposes what most occurrences of the longest suffix of the text go on with, no further than
    that has matched; of several indices the one with the longest match, but first of all the
    passages that fit the request."""

    name = RETRIEVAL
    copies_text = True

    def __init__(self, indices: Mapping[str, Index] | None = None) -> None:
        """`indices` by name; they serve all."""
        super().__init__()
        # each with the client whose requests it serves; "" serves all
        self.indices: dict[str, tuple[Index, str]] = {
            name: (index, "") for name, index in (indices or {}).items()
        }
        self._shelves: dict[str, _Shelf] = {}

    def add(self, name: str, index: Index, client: str = "") -> None:
        """Draft from this one too, from the next step on; instead of one of the same name."""
        self.indices[name] = (index, client)
        self._forget()

    def remove(self, name: str) -> None:
        """Draft from it no more."""
        del self.indices[name]
        self._forget()

    def _forget(self) -> None:
        """What was found may be of an index that is no longer there."""
        self._shelves.clear()
        for kept in self.slots.values():
            kept.near = None

    def open(
        self,
        slot: int,
        tokens: Sequence[int],
        references: Sequence[Reference] = (),
        tenant: str = "",
    ) -> None:
        self.slots[slot] = _Slot(tenant, ground(self._shelf(tenant).segments, tokens))

    def draft(self, row: DraftRequest, kept: _Slot) -> Draft:
        end = row.tokens[-SORTED:]
        match, tokens = self._shelf(kept.tenant).retrieve(end, row.depth)
        closer = kept.near.retrieve(end, row.depth) if kept.near else (0, [])
        if closer[0] >= match:
            match, tokens = closer
        return Draft.chain(row.tokens[-1], tokens, self.name, match)

    def _shelf(self, tenant: str) -> _Shelf:
        """What this tenant drafts from; within a client's requests there may be many tenants."""
        known = {whose for _, whose in self.indices.values()}
        client = tenant.partition(SALT)[0]
        client = (
            client if client in known else ""
        )  # so that there are no more shelves than clients with indices
        if client not in self._shelves:
            mine = [index for index, whose in self.indices.values() if whose in ("", client)]
            self._shelves[client] = _Shelf(
                [segment for index in mine for segment in index.segments]
            )
        return self._shelves[client]


class _Shelf:
    """The segments that a tenant's requests draft from."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = segments
        self._structs = (CTexts * len(segments))(*(segment.struct for segment in segments))

    def retrieve(self, text: Sequence[int], most: int) -> tuple[int, list[int]]:
        """(tokens that match, what goes on there) for the end of a text."""
        lib = native.library()
        if lib is None:
            return retrieve_twin(self.segments, text, most)
        end, found, count = array("I", text), array("i", bytes(4 * most)), ctypes.c_int32()
        match: int = lib.forerun_retrieve(
            self._structs, len(self.segments), address(end), len(end), SHORTEST, most, address(found),
            ctypes.byref(count),
        )  # fmt: skip
        return match, found[: _reach(match, count.value)].tolist()


def _reach(match: int, count: int) -> int:
    """How many tokens a match speaks for; one that is as long as can be may be longer."""
    return count if match == SORTED else min(count, match)


def retrieve_twin(
    segments: Sequence[Segment], text: Sequence[int], most: int
) -> tuple[int, list[int]]:
    """`_Shelf.retrieve` by looking at every place, for short texts."""
    best, found = 0, list[int]()
    for segment in segments:
        ids = segment.tokens.tolist()
        for length in range(min(len(text), SORTED), max(best, SHORTEST - 1), -1):
            pattern = list(text[-length:])
            ends = [int(at) + length for at in segment.suffixes if ids[at : at + length] == pattern]
            if not ends:
                continue
            judges = min(len(ends), JUDGES)
            tokens = _majority(ids, [ends[len(ends) * i // judges] for i in range(judges)], most)
            if tokens:
                best, found = length, tokens
            break
    return best, found[: _reach(best, len(found))]


def _majority(ids: Sequence[int], places: Sequence[int], most: int) -> list[int]:
    """What most of these places go on with, token by token; the first of those that are as many."""
    tokens: list[int] = []
    for n in range(most):
        following = [(p, ids[p + n]) for p in places if p + n < len(ids) and ids[p + n] != BREAK]
        if not following:
            break
        (best, _), *_ = Counter(token for _, token in following).most_common()
        tokens.append(best)
        places = [p for p, token in following if token == best]
    return tokens
