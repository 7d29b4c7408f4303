"""What proposers that read the target's hidden states (its features) have in common: a KV cache of their own, behind.

What a head keeps of a committed token depends on the target's features alone, never on a draft. So it is computed once,
when a draft is next asked for; until then features wait, and many of them wait fused, which makes them narrower. Pages
of the cache are shared between requests that begin alike, as the target shares its own.

The features of a cached prefix are not shown. Mostly what a head made of them is in its own cache too. Where it is not,
positions are counted from the first features a slot has: rotary embeddings only see distances.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from forerun.cache.kv import KVCache
from forerun.draft.base import Proposer, Reference, Row
from forerun.types import States

CHUNK = 512  # so many features that wait are fused, and some heads read no more in a pass


@dataclass(slots=True)
class Waiting:
    """What a slot was shown and its cache lacks.

    Attributes:
        begin: position of the first row of the cache. seen: the next position to be shown.
        fused: parts [n, Hd], in order.
        shown: what comes behind them as it came, [n, H] of every boundary. unfused: how many tokens that is.
    """

    begin: int = 0
    seen: int = -1
    fused: list[Tensor] = field(default_factory=list)
    shown: list[list[States]] = field(default_factory=list)
    unfused: int = 0

    def __len__(self) -> int:
        return sum(map(len, self.fused)) + self.unfused

    @property
    def parts(self) -> int:
        """How many parts it is taken in."""
        return len(self.fused) + bool(self.shown)


class FeatureProposer(Proposer):
    """Keeps count of features for its subclasses, which set the attributes before they `reset`.

    Attributes:
        cache: keys and values of the head's layers.
        waiting: by slot.
        dtype: what features are fused in.
    """

    cache: KVCache
    _shape: dict[str, int]  # of it: tokens, tokens of a page, slots
    waiting: dict[int, Waiting]
    dtype: torch.dtype

    def fuse(self, shown: Tensor) -> Tensor:
        """Features [n, boundaries x H] as the head reads them, [n, Hd]."""
        raise NotImplementedError

    def new_cache(self) -> KVCache:
        """An empty one."""
        raise NotImplementedError

    def reset(self) -> None:
        self.waiting, self.cache = {}, self.new_cache()

    def kv(self) -> KVCache:
        return self.cache

    def make_room(self, tokens: int) -> None:
        self._shape["tokens"] = tokens
        self.reset()

    def open(self, slot: int, tokens: Sequence[int], references: Sequence[Reference] = (), tenant: str = "") -> None:
        self.waiting[slot] = Waiting()
        self.cache.open(slot, tokens, tenant)

    def close(self, slot: int, finished: Sequence[int] | None = None) -> None:
        self.waiting.pop(slot, None)
        self.cache.close(slot)

    def observe(self, slot: int, start: int, features: Mapping[int, States]) -> None:
        waiting = self.waiting[slot]
        if waiting.seen < 0 and self.cache.length[slot] < start:
            self.cache.close(slot)  # what lies between was shown to others, and is not here any more
            waiting.begin = start
        shown = [features[boundary] for boundary in self.boundaries]
        waiting.seen = start + len(shown[0])
        new = waiting.seen - self.next_position(slot) - len(waiting)
        if new > 0:
            waiting.shown.append(shown if new == len(shown[0]) else [part[-new:] for part in shown])
            waiting.unfused += new
        if waiting.unfused >= CHUNK:
            self._fuse(waiting)

    def next_position(self, slot: int) -> int:
        """Of the first token whose features are not in the cache."""
        return self.waiting[slot].begin + self.cache.length[slot]

    def is_up_to_date(self, row: Row) -> bool:
        """Whether all tokens before the root have shown their features."""
        waiting = self.waiting.get(row.slot)
        return waiting is not None and waiting.seen == len(row.tokens) - 1

    def take_raw(self, slot: int) -> list[np.ndarray] | None:
        """All that waits as it was shown, [n, H] of every boundary; it waits no more. None, and nothing done, where
        some of it is fused already."""
        waiting = self.waiting[slot]
        if waiting.fused or not waiting.shown:
            return None
        shown, waiting.shown, waiting.unfused = waiting.shown, [], 0
        found = [[*map(as_array, parts)] for parts in shown]
        return found[0] if len(found) == 1 else [np.concatenate(parts) for parts in zip(*found, strict=True)]

    def take(self, slot: int) -> list[Tensor]:
        """All that waits, fused, in parts [n, Hd]; it waits no more."""
        waiting = self.waiting[slot]
        self._fuse(waiting)
        parts, waiting.fused = waiting.fused, []
        return parts

    def commit(self, row: Row, count: int) -> None:
        """Keep `count` rows that were written to the cache, and share its full pages."""
        self.cache.commit(row.slot, range(count))
        if self.waiting[row.slot].begin == 0:  # others have other positions
            self.cache.pages.seal(row.slot, row.tokens, self.cache.length[row.slot])

    @torch.inference_mode()
    def _fuse(self, waiting: Waiting) -> None:
        if waiting.shown:
            columns = [torch.cat([*map(as_tensor, parts)]) for parts in zip(*waiting.shown, strict=True)]
            waiting.fused.append(self.fuse(torch.cat(columns, dim=-1).to(self.dtype)))
            waiting.shown.clear()
            waiting.unfused = 0


def as_tensor(states: States) -> Tensor:
    """States as torch has them; they share memory."""
    return states if isinstance(states, Tensor) else torch.from_numpy(states)


def as_array(states: States) -> np.ndarray:
    """States in main memory as numpy has them; they share memory."""
    return states.numpy() if isinstance(states, Tensor) else states
