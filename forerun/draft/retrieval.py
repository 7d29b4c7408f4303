"""Retrieval: copies continuations of the end of the text from indexed documents (REST, 2311.08252).

Two searches are made. The longest match of the text's end in all documents is continued as most of
its occurrences are. The passages that fit the request best are looked up when it starts, and are
preferred where they match as long.
"""

from __future__ import annotations

import ctypes
from array import array
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log

import numpy as np

from forerun.draft.corpus import BREAK, PASSAGE, SORTED, Index, IndexSegment
from forerun.draft.proposer import DraftRequest, PerSlotProposer, Texts, Tokens
from forerun.kernels import native
from forerun.kernels.native import CTexts, address
from forerun.types import RETRIEVAL, SALT, Draft

MIN_MATCH = 3  # tokens of a match in all documents
MAX_VOTES = 64  # occurrences that vote on what follows
MIN_PASSAGE_MATCH = 2  # tokens of a match in the passages of a request
NUM_RECENT = 256  # tokens of a request by which passages are looked up
NUM_QUERIED = 16  # of these, the rarest
MAX_FOUND = 5_000  # occurrences of all queried tokens, which bounds the time of a look-up
NUM_PASSAGES = 8  # passages per request
PASSAGE_LENGTH = 2 * PASSAGE  # tokens taken of each: answers continue behind a passage


class Passages:
    """Texts that an answer may quote, the most fitting one first."""

    def __init__(self, texts: Sequence[np.ndarray]) -> None:
        gap = np.full(SORTED, BREAK, np.uint32)  # no match crosses it
        self._tokens = np.concatenate([gap, *(part for text in texts for part in (text, gap))])

    def retrieve(self, text: Sequence[int], limit: int) -> tuple[int, list[int]]:
        """Return the length and continuation of the first longest match of the end of a text."""
        ends = np.flatnonzero(self._tokens[:-1] == text[-1])
        ends = ends[self._tokens[ends + 1] != BREAK]
        length = 0
        while len(ends):
            first = int(ends[0]) + 1
            length += 1
            if length == min(len(text), SORTED):
                break
            ends = ends[self._tokens[ends - length] == text[-length - 1]]
        if length < MIN_PASSAGE_MATCH:
            return 0, []
        tokens = self._tokens[first : first + limit].tolist()
        return length, tokens[: tokens.index(BREAK)] if BREAK in tokens else tokens


def find_passages(segments: Sequence[IndexSegment], tokens: Sequence[int]) -> Passages | None:
    """Return the passages that fit the end of a request best, if there are any."""
    ranked = rank_passages(segments, tokens)
    return Passages([_text(segments[i], start) for i, start in ranked]) if ranked else None


def rank_passages(segments: Sequence[IndexSegment], tokens: Sequence[int]) -> list[tuple[int, int]]:
    """Return (segment, start) of the best passages, best first.

    A shared token counts by how few passages have it, as in BM25; term frequencies are not stored
    and passages have equal length.
    """
    tables = [(i, segment.passages) for i, segment in enumerate(segments) if segment.passages]
    total = sum(table.count for _, table in tables)
    scores = defaultdict[tuple[int, int], float](float)
    for token in _rarest_tokens(segments, tokens):
        found = [(i, start) for i, table in tables for start in table.find(token, MAX_FOUND)]
        weight = log(1 + max(total - len(found) + 0.5, 0) / (len(found) + 0.5))
        for passage in found:
            scores[passage] += weight
    return sorted(scores, key=lambda passage: (-scores[passage], passage))[:NUM_PASSAGES]


def _rarest_tokens(segments: Sequence[IndexSegment], tokens: Sequence[int]) -> list[int]:
    all_starts = [segment.starts for segment in segments if segment.passages]
    vocab = min(map(len, all_starts), default=1) - 1
    recent = np.unique(
        np.array([token for token in tokens[-NUM_RECENT:] if token < vocab], np.int64)
    )
    counts: np.ndarray = np.zeros(len(recent), np.int64)
    for starts in all_starts:
        counts += starts[recent + 1] - starts[recent]
    order = np.argsort(counts, kind="stable")
    order = order[counts[order] > 0][:NUM_QUERIED]
    return [int(token) for token in recent[order[np.cumsum(counts[order]) <= MAX_FOUND]]]


def _text(segment: IndexSegment, start: int) -> np.ndarray:
    """Return a passage and what follows it in its document; empty where a damaged table names no
    valid start."""
    if start < 0:
        return np.array([], np.uint32)
    text = np.array(segment.tokens[start : start + PASSAGE_LENGTH])
    invalid = np.flatnonzero(text >= len(segment.starts) - 1)  # a break, or no token at all
    return text[: invalid[0]] if len(invalid) else text


class SegmentSearch:
    """The segments that a tenant's requests draft from."""

    def __init__(self, segments: Sequence[IndexSegment]) -> None:
        self.segments = segments
        self._structs = (CTexts * len(segments))(*(segment.struct for segment in segments))

    def retrieve(self, text: Sequence[int], limit: int) -> tuple[int, list[int]]:
        """Return the length of the longest match of the end of a text, and the tokens that most of
        its occurrences continue with."""
        lib = native.library()
        if lib is None:
            return retrieve_twin(self.segments, text, limit)
        end = array("I", text)
        found = array("i", bytes(4 * limit))
        count = ctypes.c_int32()
        query = address(end), len(end), MIN_MATCH, limit
        outputs = address(found), ctypes.byref(count)
        match: int = lib.forerun_retrieve(self._structs, len(self.segments), *query, *outputs)
        return match, found[: _num_supported(match, count.value)].tolist()


def retrieve_twin(
    segments: Sequence[IndexSegment], text: Sequence[int], limit: int
) -> tuple[int, list[int]]:
    """Reference of `SegmentSearch.retrieve` that examines every place, for short texts."""
    best, found = 0, list[int]()
    for segment in segments:
        ids = segment.tokens.tolist()
        for length in range(min(len(text), SORTED), max(best, MIN_MATCH - 1), -1):
            pattern = list(text[-length:])
            ends = [int(at) + length for at in segment.suffixes if ids[at : at + length] == pattern]
            if not ends:
                continue
            votes = min(len(ends), MAX_VOTES)
            tokens = _majority(ids, [ends[len(ends) * i // votes] for i in range(votes)], limit)
            if tokens:
                best, found = length, tokens
            break
    return best, found[: _num_supported(best, len(found))]


def _num_supported(match: int, count: int) -> int:
    """Return how many of `count` tokens a match supports; one of SORTED tokens may be longer."""
    return count if match == SORTED else min(count, match)


def _majority(ids: Sequence[int], positions: Sequence[int], limit: int) -> list[int]:
    """Return the most frequent continuation, token by token; the first place wins ties."""
    tokens: list[int] = []
    for n in range(limit):
        following = [(p, ids[p + n]) for p in positions if p + n < len(ids) and ids[p + n] != BREAK]
        if not following:
            break
        (best, _), *_ = Counter(token for _, token in following).most_common()
        tokens.append(best)
        positions = [p for p, token in following if token == best]
    return tokens


@dataclass(slots=True)
class _RetrievalState:
    """A request's tenant, and the passages that fit it."""

    tenant: str
    passages: Passages | None


class Retrieval(PerSlotProposer[_RetrievalState]):
    """Proposes continuations from indexes, no longer than the match that supports them."""

    name = RETRIEVAL
    copies_text = True

    def __init__(self, indices: Mapping[str, Index] | None = None) -> None:
        """`indices` by name; they serve all clients."""
        super().__init__()
        # Each with the client it serves; "" serves all.
        self.indices: dict[str, tuple[Index, str]] = {
            name: (index, "") for name, index in (indices or {}).items()
        }
        self._searches: dict[str, SegmentSearch] = {}

    def add(self, name: str, index: Index, client: str = "") -> None:
        """Draft from this index too, from the next step on, instead of one of the same name."""
        self.indices[name] = (index, client)
        self._invalidate()

    def remove(self, name: str) -> None:
        del self.indices[name]
        self._invalidate()

    def _invalidate(self) -> None:
        """Drop passages that may come from an index that no longer exists."""
        self._searches.clear()
        for state in self.slots.values():
            state.passages = None

    def open(self, slot: int, tokens: Tokens, references: Texts = (), tenant: str = "") -> None:
        passages = find_passages(self._search_of(tenant).segments, tokens)
        self.slots[slot] = _RetrievalState(tenant, passages)

    def draft(self, request: DraftRequest, state: _RetrievalState) -> Draft:
        end = request.tokens[-SORTED:]
        match, tokens = self._search_of(state.tenant).retrieve(end, request.depth)
        if state.passages:
            passage_match, passage_tokens = state.passages.retrieve(end, request.depth)
            if passage_match >= match:
                match, tokens = passage_match, passage_tokens
        return Draft.chain(request.tokens[-1], tokens, self.name, match)

    def _search_of(self, tenant: str) -> SegmentSearch:
        """Return the search of a tenant; a client's requests may belong to many tenants."""
        client = tenant.partition(SALT)[0]
        # Bounds the number of searches by the number of clients with an index.
        if client not in {owner for _, owner in self.indices.values()}:
            client = ""
        if client not in self._searches:
            visible = [index for index, owner in self.indices.values() if owner in ("", client)]
            segments = [segment for index in visible for segment in index.segments]
            self._searches[client] = SegmentSearch(segments)
        return self._searches[client]
