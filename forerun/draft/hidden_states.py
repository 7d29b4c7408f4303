"""What proposers that read the target's hidden states (its features) have in common: a KV cache of
their own, behind.

What a head keeps of a committed token depends on the target's features alone, never on a draft. So
it is computed once, when a draft is next asked for; until then features wait, and many of them wait
fused, which makes them narrower. Pages of the cache are shared between requests that begin alike,
as the target shares its own.

The features of a cached prefix are not shown. Mostly what a head made of them is in its own cache
too. Where it is not, positions are counted from the first features a slot has: rotary embeddings
only see distances."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from forerun.cache.attention import Segment
from forerun.cache.kv import KVCache
from forerun.draft.proposer import DraftRequest, Proposer, Reference, TargetView
from forerun.draft.tree import Tree
from forerun.models.config import ModelConfig
from forerun.models.rope import rope_tables
from forerun.types import Draft, States

CHUNK = 512  # so many features that wait are fused, and some heads read no more in a pass


@dataclass(slots=True)
class Waiting:
    """What a slot was shown and its cache lacks.

    Attributes:
        begin: position of the first row of the cache. seen: the next position to be shown.
        fused: parts [n, Hd], in order.
        shown: what comes behind them as it came, [n, H] of every boundary. unfused: how many tokens
            that is.
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


class HiddenStateProposer(Proposer):
    """Keeps count of features, and the cache, for its subclasses.

    Attributes:
        cache: keys and values of `layer`, the head's layers.
        waiting: by slot.
        dtype: what features are fused in, and the cache is kept in.
        rotation: cos and sin of all positions, [context, 1, D / 2].
        native: what computes the layers on the native kernels, if that is there.
        lead: what is kept of a token depends on so many behind it.
        fed: what is read has the root in it (1), or ends before it (0).
    """

    cache: KVCache
    waiting: dict[int, Waiting]
    native: object | None = None
    lead = fed = 0

    def __init__(
        self, target: TargetView, layer: ModelConfig, dtype: torch.dtype, context: int, *,
        tokens: int, page: int, slots: int,
    ) -> None:  # fmt: skip
        """Room for what is kept of `tokens` tokens in pages of `page`, for `slots` requests at a
        time, each of at most `context`. There is a cache after a `reset`."""
        self.target, self.layer, self.dtype = target, layer, dtype
        self._room = {"tokens": tokens, "page": page, "slots": slots, "context": context}
        cosine, sine = rope_tables(layer, layer.ropes[0], context, dtype)
        self.rotation = cosine.to(target.device), sine.to(target.device)

    @torch.inference_mode()
    def propose(self, rows: Sequence[DraftRequest]) -> list[Draft]:
        trees = [Tree(row, fed=self.fed) for row in rows]
        active = [tree for tree in trees if self.can_draft(tree.request)]
        if active:
            self.draft(active)
        return [tree.finish(self.target.vocab) for tree in trees]

    def can_draft(self, row: DraftRequest) -> bool:
        """Without the features of all tokens before the root, or without room, a request goes on
        without a draft."""
        waiting = self.waiting.get(row.slot)
        if waiting is None or waiting.seen != len(row.tokens) - 1:
            return False
        return self.cache.pages.grow(
            row.slot, self.cache.length[row.slot] + len(waiting) + self.scratch(row)
        )

    def scratch(self, row: DraftRequest) -> int:
        """Rows that a draft takes behind what is read."""
        return 0

    def draft(self, trees: Sequence[Tree]) -> None:
        """Grow these trees, each as deep as its row allows; there is one at least."""
        raise NotImplementedError

    def fuse(self, shown: Tensor) -> Tensor:
        """Features [n, boundaries x H] as the head reads them, [n, Hd]."""
        raise NotImplementedError

    def rotate(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of positions [T]. -> [T, 1, D / 2] each"""
        cosine, sine = self.rotation
        return cosine[positions], sine[positions]

    def reset(self) -> None:
        self.waiting = {}
        self.cache = KVCache(
            self.layer, **self._room, dtype=self.dtype, device=self.target.device, ahead=self.lead,
            native=self.native is not None,
        )  # fmt: skip

    def kv(self) -> KVCache:
        return self.cache

    def make_room(self, tokens: int) -> None:
        self._room["tokens"] = tokens
        self.reset()

    def open(
        self,
        slot: int,
        tokens: Sequence[int],
        references: Sequence[Reference] = (),
        tenant: str = "",
    ) -> None:
        self.waiting[slot] = Waiting()
        self.cache.open(slot, tokens, tenant)

    def close(self, slot: int, finished: Sequence[int] | None = None) -> None:
        self.waiting.pop(slot, None)
        self.cache.close(slot)

    def observe(self, slot: int, start: int, features: Mapping[int, States]) -> None:
        waiting = self.waiting[slot]
        if waiting.seen < 0 and self.cache.length[slot] < start:
            self.cache.close(
                slot
            )  # what lies between was shown to others, and is not here any more
            waiting.begin = start
        shown = [features[boundary] for boundary in self.aux_hidden_layers]
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

    def take_raw(self, slot: int) -> list[np.ndarray]:
        """All that waits as it was shown, [n, H] of every boundary, if anything does; it waits no
        more. None of it may be fused."""
        waiting = self.waiting[slot]
        shown, waiting.shown, waiting.unfused = waiting.shown, [], 0
        found = [[*map(as_array, parts)] for parts in shown]
        return (
            found[0]
            if len(found) == 1
            else [np.concatenate(parts) for parts in zip(*found, strict=True)]
        )

    def take(self, slot: int) -> list[Tensor]:
        """All that waits, fused, in parts [n, Hd]; it waits no more."""
        waiting = self.waiting[slot]
        self._fuse(waiting)
        parts, waiting.fused = waiting.fused, []
        return parts

    def catch_up(self, rows: Sequence[DraftRequest]) -> None:
        """Read all that waits."""
        self.read(rows, [self.take(row.slot) for row in rows])

    def read(self, rows: Sequence[DraftRequest], parts: Sequence[list[Tensor]]) -> None:
        """Read these features, [n, Hd] each, a part of each row in a pass; all are final."""
        for number in range(max(map(len, parts), default=0)):
            lagging = [
                (row, taken[number])
                for row, taken in zip(rows, parts, strict=True)
                if number < len(taken)
            ]
            segments = [self.behind(row, len(part)) for row, part in lagging]
            self.keep(segments, torch.cat([part for _, part in lagging]))
            for row, part in lagging:
                self.commit(row, len(part))

    def behind(self, row: DraftRequest, count: int) -> Segment:
        """The tokens behind the next `count` features, in the rows that are kept of these."""
        first = self.next_position(row.slot) + 1
        return Segment(
            row.slot, list(row.tokens[first : first + count]), list(range(-1, count - 1)), []
        )

    def keep(self, segments: Sequence[Segment], fused: Tensor) -> None:
        """Write to the cache what is kept of features [T, Hd], in the segments' rows."""
        raise NotImplementedError

    def commit(self, row: DraftRequest, count: int) -> None:
        """Keep `count` rows that were written to the cache, and share its full pages."""
        self.cache.commit(row.slot, range(count))
        if self.waiting[row.slot].begin == 0:  # others have other positions
            self.cache.pages.seal(row.slot, row.tokens, self.cache.length[row.slot])

    @torch.inference_mode()
    def _fuse(self, waiting: Waiting) -> None:
        if waiting.shown:
            columns = [
                torch.cat([*map(as_tensor, parts)]) for parts in zip(*waiting.shown, strict=True)
            ]
            waiting.fused.append(self.fuse(torch.cat(columns, dim=-1).to(self.dtype)))
            waiting.shown.clear()
            waiting.unfused = 0


class LayerProposer(HiddenStateProposer):
    """Goes on from what its layer made of the last token that it read."""

    lead = 1  # each state is read with the token behind it, and the last one is always to be read

    def reset(self) -> None:
        super().reset()
        self._last: dict[
            int, Tensor
        ] = {}  # by slot: what was made of the last token that was read, [Hd]

    def close(self, slot: int, finished: Sequence[int] | None = None) -> None:
        super().close(slot, finished)
        self._last.pop(slot, None)

    def keep(self, segments: Sequence[Segment], fused: Tensor) -> None:
        for segment, made in zip(segments, self.run(segments, fused), strict=True):
            self._last[segment.slot] = made[-1].clone()  # a view would keep the whole pass

    def run(self, segments: Sequence[Segment], states: Tensor) -> Sequence[Tensor]:
        """Pass the segments' tokens with states [T, Hd]; what is made of each segment's. [n, Hd]"""
        raise NotImplementedError


def as_tensor(states: States) -> Tensor:
    """States as torch has them; they share memory."""
    return states if isinstance(states, Tensor) else torch.from_numpy(states)


def as_array(states: States) -> np.ndarray:
    """States in main memory as numpy has them; they share memory."""
    return states.numpy() if isinstance(states, Tensor) else states
