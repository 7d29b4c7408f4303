"""The arrays of native passes: which tokens, where they are stored, what each of them sees.

They are of the standard library: to make one of numpy's and ask where it lies takes five times as long, and several
times more behind a pass over the weights, which leaves no code in the caches.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest

from forerun.cache.attention import Segment
from forerun.cache.kv import KVCache
from forerun.kernels import native
from forerun.kernels.native import CBatch, address
from forerun.types import BESIDE


class Pass:
    """One pass over segments."""

    def __init__(self, segments: Sequence[Segment], cache: KVCache, causal: bool = True) -> None:
        """`causal`: a token sees its ancestors, otherwise all that is not committed of its slot."""
        table = cache.pages.rows
        ids: list[int] = []
        positions: list[int] = []
        lines: list[int] = []
        direct: list[int] = []
        extra: list[int] = []
        extra_at: list[int] = [0]
        want: list[int] = []
        store: list[int] = []
        for s in segments:
            at = cache.length[s.slot]
            want += [len(ids) + i for i in s.want]
            ids += s.tokens
            lines += [cache.pages.lines[s.slot]] * len(s.tokens)
            store += table[s.slot, at + s.offset : at + len(s.parents)].tolist()
            for straight, path in _sights(s.parents)[s.offset :]:
                positions.append(at + straight + len(path) - 1)
                direct.append(at + (straight if causal else len(s.parents)))
                extra += [int(table[s.slot, at + i]) for i in path] if causal else []
                extra_at.append(len(extra))
        self.tokens, self.wanted = len(ids), len(want)
        self.ids, self.positions, self.store = array("q", ids), array("q", positions), array("q", store)
        self.lines, self.direct = array("Q", lines), array("i", direct)
        self.extra, self.extra_at, self.want = array("q", extra), array("i", extra_at), array("q", want)

    def fill(self, pointers: int, scratch: int, cache: KVCache) -> CBatch:
        """The C structure; it points into this object and the cache."""
        keys, values, stride, dtype = cache.layout
        return CBatch(
            tokens=self.tokens, wanted=self.wanted, ids=address(self.ids), positions=address(self.positions),
            store=address(self.store), rows=address(self.lines), direct=address(self.direct),
            extra_at=address(self.extra_at), extra=address(self.extra), want=address(self.want), buffers=pointers,
            scratch=scratch, keys=keys, values=values, layer_stride=stride, kv_format=native.FORMATS[dtype],
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Link:
    """Where a chain of drafted tokens begins in one slot.

    Attributes:
        token: the one to read first, `offset` rows behind what is committed; those between have been read.
        temperature: 0 says the likeliest token.
        keys: streams of noise, one for each token that is to be said.
        floor: the chance that all that was said stands, below which no more is; 0 never stops.
    """

    slot: int
    token: int
    offset: int
    temperature: float
    keys: Sequence[int]
    floor: float = 0.0


@dataclass(frozen=True, slots=True)
class Said:
    """What was said behind one link, or a start.

    Attributes:
        tokens: one behind the other.
        sure: how sure the drafter was of each, in sixteenths; empty where that was not asked.
        beside: in place of each, the tokens it thought likeliest next to it: (token, sixteenth).
    """

    tokens: list[int]
    sure: list[int] = field(default_factory=list)
    beside: list[list[tuple[int, int]]] = field(default_factory=list)


class Draws:
    """What is to be said behind links, level by level, and what was; the longest links come first.

    Attributes:
        links: as they stand here. order: their numbers as they were given.
        active [levels]: how many of them say something in a level.
    """

    def __init__(self, links: Sequence[Link]) -> None:
        counts = [len(link.keys) for link in links]
        self.order = sorted(range(len(links)), key=lambda i: -counts[i])
        self.links = links = [links[i] for i in self.order]
        self._most = [counts[i] for i in self.order]
        self.levels, self.rows = max(counts), len(links)
        self.active = array("i", [sum(n > level for n in counts) for level in range(self.levels)])
        self.temperature = array("f", [link.temperature for link in links])
        self.keys = array("Q", _by_level([link.keys for link in links]))
        self.tokens = array("q", [*(link.token for link in links), *[0] * (self.levels * len(links))])
        self.floors, self.counts = array("f", [link.floor for link in links]), array("i", self._most)
        self._weighed = False

    def weigh(self) -> None:
        """Make room for what the drafter thinks of what it says."""
        count, self._weighed = len(self.tokens), True
        self.sure, self.beside_sure = array("b", bytes(count)), array("b", bytes(BESIDE * count))
        self.beside = array("q", bytes(8 * BESIDE * count))

    def said(self, begun: bool = False) -> list[Said]:
        """What was said behind each link, in the order in which they were given; `begun`: its token was said too."""
        found = [Said([])] * self.rows
        for column, i in enumerate(self.order):
            first, last = 0 if begun else 1, min(self._most[column], self.counts[column])
            places = range(column, len(self.tokens), self.rows)[first : last + 1]
            tokens = self.tokens[places.start : places.stop : self.rows].tolist()
            if self._weighed:
                weights = [self.sure[at] for at in places], [self._beside(at) for at in places]
                found[i] = Said(tokens, *weights)
            else:
                found[i] = Said(tokens)
        return found

    def _beside(self, at: int) -> list[tuple[int, int]]:
        own = slice(BESIDE * at, BESIDE * (at + 1))
        return [pair for pair in zip(self.beside[own], self.beside_sure[own], strict=True) if pair[0] >= 0]


class Steps(Pass):
    """Passes one behind the other, of one token for each link that has not ended."""

    def __init__(self, draws: Draws, cache: KVCache) -> None:
        links, self.tokens, self.wanted = draws.links, draws.rows, draws.rows
        starts = [cache.length[link.slot] + link.offset for link in links]
        positions = [start + level for level in range(draws.levels) for start in starts]
        self.positions, self.direct = array("q", positions), array("i", [at + 1 for at in positions])
        lines = [cache.pages.rows[x.slot, at : at + draws.levels].tolist() for x, at in zip(links, starts, strict=True)]
        self.store = array("q", _by_level(lines))
        self.lines = array("Q", [cache.pages.lines[link.slot] for link in links])
        self.want, self.extra = array("q", range(len(links))), array("q")
        self.extra_at, self.ids = array("i", [0] * (len(links) + 1)), array("q", [link.token for link in links])


def _by_level(lines: Sequence[Sequence[int]]) -> list[int]:
    """The first number of every line, then the second, with zeros where a line has ended: no link goes on there."""
    return list(chain.from_iterable(zip_longest(*lines, fillvalue=0)))


def _sights(parents: Sequence[int]) -> list[tuple[int, list[int]]]:
    """For each uncommitted token, the path it sees, itself last: how many of the first tokens in a row, and which
    further ones."""
    sights: list[tuple[int, list[int]]] = []
    for i, parent in enumerate(parents):
        straight, path = sights[parent] if parent >= 0 else (0, [])
        sights.append((straight + 1, path) if not path and straight == i else (straight, [*path, i]))
    return sights
