"""Bases of proposers that read the target's hidden states, with a KV cache or without one.

`HiddenStateProposer` has a cache. What its head computes from a committed token depends on the
target's hidden states alone, never on a draft. It is computed once, when a draft is next requested;
until then the states are pending, and many of them are fused early because that makes them
narrower. Cache pages are shared between requests with a common prefix, as the target shares its
own.

The target does not show the hidden states of a cached prefix. Usually the head's own cache holds
what was computed from them. Otherwise positions are counted from the first states that the slot
received: rotary embeddings depend on distances only.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from forerun.cache.attention import Segment
from forerun.cache.kv import KVCache
from forerun.devices import as_array, as_tensor, upload
from forerun.draft.proposer import DraftRequest, Proposer, TargetView, Texts, Tokens
from forerun.draft.tree import Tree, grow
from forerun.models.config import ModelConfig
from forerun.models.rope import rope_tables
from forerun.runtime.device_rounds import DeviceDrafter
from forerun.runtime.program import DraftedChain, RoundStart
from forerun.runtime.rounds import HeadRounds
from forerun.types import Draft, States

CHUNK = 512  # pending tokens from which on hidden states are fused


@dataclass(slots=True)
class PendingStates:
    """Hidden states that a slot received and its cache lacks.

    Attributes:
        begin: the position of the cache's first row.
        end: the position after the last state received, -1 before any.
        fused: fused parts [n, Hd], in order.
        raw: parts after them as received: [n, H] of every hidden-state layer.
        num_raw: the number of tokens in `raw`.
    """

    begin: int = 0
    end: int = -1
    fused: list[Tensor] = field(default_factory=list)
    raw: list[list[States]] = field(default_factory=list)
    num_raw: int = 0

    def __len__(self) -> int:
        return sum(map(len, self.fused)) + self.num_raw

    @property
    def num_parts(self) -> int:
        """The number of parts that `take` returns."""
        return len(self.fused) + bool(self.raw)


class NativeRounds:
    """Base of a head's native programs.

    Attributes:
        drafts: whole rounds are available, not only forward passes.
        fuses: rounds can start from the target's hidden states before they are fused.
        features: the buffers of these states.
    """

    drafts = False
    fuses = False
    features: range


class HiddenStateProposer(Proposer):
    """Keeps pending hidden states and the cache for its subclasses.

    Attributes:
        cache: keys and values of `layer`, the config of the head's layers.
        pending: by slot.
        dtype: of fused states and of the cache.
        rotation: cos and sin of all positions, [context, 1, D / 2].
        native: the layers as native programs, if available.
        max_depth: the number of tokens that the head can draft, None for any.
        lead: the number of later tokens on which a cached row depends.
        num_fed: 1 if the root is among the tokens that are read, 0 if they end before it.
    """

    cache: KVCache
    pending: dict[int, PendingStates]
    native: NativeRounds | None = None
    lead = 0
    num_fed = 0
    max_depth: int | None = None

    def __init__(
        self,
        target: TargetView,
        layer: ModelConfig,
        dtype: torch.dtype,
        context: int,
        *,
        tokens: int,
        page: int,
        slots: int,
    ) -> None:
        """Reserve a cache of `tokens` rows in pages of `page`, for `slots` requests of at most
        `context` tokens each. Subclasses call `reset` to allocate it."""
        self.target, self.layer, self.dtype = target, layer, dtype
        self._room = {"tokens": tokens, "page": page, "slots": slots, "context": context}
        cosine = sine = torch.zeros(context, 1, 0)  # of a layer that does not rotate
        if layer.ropes:
            cosine, sine = rope_tables(layer, layer.ropes[0], context, dtype)
        self.rotation = cosine.to(target.device), sine.to(target.device)

    # ------------------------------------------------------------ for subclasses

    def fuse(self, states: Tensor) -> Tensor:
        """Fuse hidden states [n, layers x H] into the inputs of the head, [n, Hd]."""
        raise NotImplementedError

    def write_cache(self, segments: Sequence[Segment], fused: Tensor) -> None:
        """Compute the cache rows of fused states [T, Hd] of these segments."""
        raise NotImplementedError

    def grow_trees(self, trees: Sequence[Tree]) -> None:
        """Grow each tree as deep as its request allows; there is at least one."""
        raise NotImplementedError

    def scratch_rows(self, row: DraftRequest) -> int:
        """Return the number of cache rows that a draft needs after the committed ones."""
        return 0

    def run_round(
        self, starts: Sequence[RoundStart], raw: bool, acceptance: array[float] | None
    ) -> list[DraftedChain]:
        """Read what the starts hold, and draft after it in one native call; with `raw` they hold
        hidden states that are not fused yet."""
        raise NotImplementedError

    # ------------------------------------------------------------ Proposer

    def propose(self, rows: Sequence[DraftRequest]) -> list[Draft]:
        trees = [Tree(row, fed=self.num_fed) for row in rows]
        active = [tree for tree in trees if self.can_draft(tree.request)]
        if active and not self.draft_natively(active):
            with torch.inference_mode():
                self.grow_trees(active)
        return [tree.finish(self.target.vocab) for tree in trees]

    def can_draft(self, row: DraftRequest) -> bool:
        """Return True if all states before the root were received and the cache has room; reserves
        the room."""
        pending = self.pending.get(row.slot)
        if pending is None or pending.end != len(row.tokens) - 1:
            return False
        rows = self.cache.length[row.slot] + len(pending) + self.scratch_rows(row)
        return self.cache.pages.grow(row.slot, rows)

    def reset(self) -> None:
        self.pending = {}
        self.cache = KVCache(
            self.layer,
            **self._room,
            dtype=self.dtype,
            device=self.target.device,
            ahead=self.lead,
            native=self.native is not None,
        )

    def kv(self) -> KVCache:
        return self.cache

    def make_room(self, tokens: int) -> None:
        self._room["tokens"] = tokens
        self.reset()

    def open(self, slot: int, tokens: Tokens, references: Texts = (), tenant: str = "") -> None:
        self.pending[slot] = PendingStates()
        self.cache.open(slot, tokens, tenant)

    def close(self, slot: int, finished: Sequence[int] | None = None) -> None:
        self.pending.pop(slot, None)
        self.cache.close(slot)

    def observe(self, slot: int, start: int, features: Mapping[int, States]) -> None:
        pending = self.pending[slot]
        if pending.end < 0 and self.cache.length[slot] < start:
            # the states between the cached rows and `start` are gone: begin anew
            self.cache.close(slot)
            pending.begin = start
        states = [features[layer] for layer in self.aux_hidden_layers]
        pending.end = start + len(states[0])
        new = pending.end - self.next_position(slot) - len(pending)
        if new > 0:
            known = len(states[0]) - new
            pending.raw.append([part[known:] for part in states] if known else states)
            pending.num_raw += new
        if pending.num_raw >= CHUNK:
            self._fuse_pending(pending)

    # ------------------------------------------------------------ whole rounds in one native call

    def draft_natively(self, trees: Sequence[Tree]) -> bool:
        """Read pending states and draft chains in one call; False, with nothing done, for trees
        and sampled nodes, or without native rounds."""
        native = self.native
        if (
            native is None
            or not self.reports_confidence
            or not all(tree.is_plain for tree in trees)
        ):
            return False
        self._read_all_but_last([tree.request for tree in trees])
        raw = native.fuses and not any(self.pending[tree.request.slot].fused for tree in trees)
        starts = [self._start(native, tree, raw) for tree in trees]
        # an estimate that differs between temperatures only; requests without one have no floor
        acceptance = trees[0].request.confidence_rates
        found = self.run_round(starts, raw, acceptance)
        for tree, start, own in zip(trees, starts, found, strict=True):
            if start.segment.tokens:
                self.commit(tree.request.slot, tree.request.tokens, len(start.segment.tokens))
            tree.add_drafted(own, self.name, self.extra_nodes)
        return True

    def _read_all_but_last(self, rows: Sequence[DraftRequest]) -> None:
        """Read all parts but the last of requests with several: a long prompt takes several
        passes."""
        rows = [row for row in rows if self.pending[row.slot].num_parts > 1]
        if not rows:
            return
        parts = [self.take(row.slot) for row in rows]
        with torch.inference_mode():
            self.read(rows, [part[:-1] for part in parts])
        for row, part in zip(rows, parts, strict=True):
            self.pending[row.slot].fused = part[-1:]

    def _start(self, native: NativeRounds, tree: Tree, raw: bool) -> RoundStart:
        """Take one request's pending states; with `raw` the program fuses them."""
        row = tree.request
        if raw:
            states, pending = self.look_raw(row.slot), self.pending[row.slot]
            pending.raw, pending.num_raw = [], 0
            if len(states) > len(native.features):
                states = [np.concatenate(states, -1)]
        else:
            states = [part.numpy() for part in self.take(row.slot)]
        count = len(states[0]) if states else 0
        segment, link = self.segment(row, count), tree.link(count)
        if self.num_fed:
            segment.want = [count - 1]  # the root's logits give the first token
        link = replace(link, keys=link.keys[: self.max_depth])
        return RoundStart(segment, states, row.noise.target(0), link)

    # ------------------------------------------------------------ several rounds in one native call

    def begin_rounds(
        self, requests: Sequence[DraftRequest], num_tokens: int
    ) -> HeadRounds | DeviceDrafter | None:
        """Prepare rounds, in one native call or on a device, that append at most `num_tokens`
        tokens to each request, and reserve their room; None where only `propose` can draft."""
        return None

    def end_rounds(
        self,
        slot: int,
        tokens: Sequence[int],
        num_read: int,
        states: Sequence[States] = (),
        fused: Sequence[Tensor] = (),
    ) -> None:
        """Commit the first `num_read` cache rows that rounds wrote; `tokens` is the text now.

        The tokens behind these rows have the target's hidden states `states`, [n, H] by layer, or
        the fused ones, [n, Hd].
        """
        pending = self.pending[slot]
        pending.fused = list(fused)
        pending.raw = [list(states)] if states else []
        pending.num_raw = len(states[0]) if states else 0
        self.commit(slot, tokens, num_read)
        pending.end = self.next_position(slot) + len(pending)

    # ------------------------------------------------------------ reading pending states

    def rotation_at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin of positions [T], [T, 1, D / 2] each."""
        cosine, sine = self.rotation
        return cosine[positions], sine[positions]

    def next_position(self, slot: int) -> int:
        """Return the position of the first token whose states are not in the cache."""
        return self.pending[slot].begin + self.cache.length[slot]

    def look_raw(self, slot: int) -> list[np.ndarray]:
        """Return all pending states as received, [n, H] of every layer; [] if there are none.

        Only allowed where none of them is fused.
        """
        parts = [[as_array(states) for states in layers] for layers in self.pending[slot].raw]
        if len(parts) == 1:
            return parts[0]
        return [np.concatenate(layers) for layers in zip(*parts, strict=True)]

    def take(self, slot: int) -> list[Tensor]:
        """Take all pending states, fused, in parts [n, Hd]."""
        pending = self.pending[slot]
        self._fuse_pending(pending)
        parts, pending.fused = pending.fused, []
        return parts

    def catch_up(self, rows: Sequence[DraftRequest]) -> None:
        self.read(rows, [self.take(row.slot) for row in rows])

    def read(self, rows: Sequence[DraftRequest], parts: Sequence[list[Tensor]]) -> None:
        """Read the parts [n, Hd] of each request, one part of each in a forward pass, and commit
        them to the cache."""
        for number in range(max(map(len, parts), default=0)):
            reading = [
                (row, own[number])
                for row, own in zip(rows, parts, strict=True)
                if number < len(own)
            ]
            segments = [self.segment(row, len(part)) for row, part in reading]
            self.write_cache(segments, torch.cat([part for _, part in reading]))
            for row, part in reading:
                self.commit(row.slot, row.tokens, len(part))

    def segment(self, row: DraftRequest, count: int) -> Segment:
        """Return the segment of the next `count` states: each stands with the token after it."""
        first = self.next_position(row.slot) + 1
        tokens = list(row.tokens[first : first + count])
        return Segment.chain(row.slot, tokens)

    def commit(self, slot: int, tokens: Sequence[int], count: int) -> None:
        """Commit `count` rows that were written to the cache, and share its full pages; `tokens`
        is the text."""
        self.cache.commit(slot, range(count))
        if self.pending[slot].begin == 0:  # other texts have other positions
            self.cache.pages.seal(slot, tokens, self.cache.length[slot])

    @torch.inference_mode()
    def _fuse_pending(self, pending: PendingStates) -> None:
        if pending.raw:
            columns = [
                torch.cat([as_tensor(states) for states in parts])
                for parts in zip(*pending.raw, strict=True)
            ]
            pending.fused.append(self.fuse(torch.cat(columns, dim=-1).to(self.dtype)))
            pending.raw.clear()
            pending.num_raw = 0


class LastStateProposer(Proposer):
    """Base of proposers that draft from the target's state of the token before the root.

    What is carried from a node to its children is all the state that they have. Drafts are chains,
    or trees of `width` nodes a level.

    Attributes:
        dtype: of the states that enter the heads.
        max_depth: the number of tokens that the heads can draft, None for any.
    """

    max_depth: int | None = None

    def __init__(self, name: str, target: TargetView, width: int, dtype: torch.dtype) -> None:
        """`name` is the source in statistics."""
        self.name, self.target, self.width, self.dtype = name, target, width, dtype
        self.aux_hidden_layers = (target.layers,)
        self._last: dict[int, tuple[int, States]] = {}  # by slot: position and state

    # ------------------------------------------------------------ for subclasses

    def grow_trees(self, trees: Sequence[Tree], states: Tensor) -> None:
        """Grow each tree as deep as its request allows, from the target's normed states [n, H] of
        the tokens before the roots; there is at least one."""
        raise NotImplementedError

    def step(
        self, level: int, trees: Sequence[Tree], carried: Tensor, tokens: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute one level behind nodes.

        Args:
            level: the depth of the nodes, 0 for roots.
            trees: the tree of each node.
            carried: what each node got from its parent, [F, C].
            tokens: the nodes' tokens, int64 [F].

        Returns:
            logits over the target's vocabulary [F, V], and what is carried on, [F, C].
        """
        raise NotImplementedError

    # ------------------------------------------------------------ Proposer

    def open(self, slot: int, tokens: Tokens, references: Texts = (), tenant: str = "") -> None:
        self._last.pop(slot, None)

    def close(self, slot: int, finished: Sequence[int] | None = None) -> None:
        self._last.pop(slot, None)

    def reset(self) -> None:
        self._last.clear()

    def observe(self, slot: int, start: int, features: Mapping[int, States]) -> None:
        states = features[self.target.layers]
        self._last[slot] = start + len(states) - 1, states[-1]

    @torch.inference_mode()
    def propose(self, rows: Sequence[DraftRequest]) -> list[Draft]:
        trees = [Tree(row, fed=0) for row in rows]
        active = [tree for tree in trees if self.can_draft(tree.request)]
        if active:
            states = torch.stack([as_tensor(self._last[tree.request.slot][1]) for tree in active])
            self.grow_trees(active, self.target.normalise(states).to(self.dtype))
        return [tree.finish(self.target.vocab) for tree in trees]

    def can_draft(self, row: DraftRequest) -> bool:
        """Return True if the last state received is that of the token before the root."""
        return row.slot in self._last and self._last[row.slot][0] == len(row.tokens) - 2

    def draft_by_levels(self, trees: Sequence[Tree], carried: Tensor) -> None:
        """Grow the trees one level at a time; `carried` [n, C] belongs to their roots."""
        growing, level = list(trees), 0
        while growing and level != self.max_depth:
            # one row for each frontier node, tree by tree
            nodes = [(tree, node) for tree in growing for node in tree.frontier]
            tokens = [tree.draft.tokens[node] for tree, node in nodes]
            ids = upload(tokens, torch.int64, carried.device)
            logits, carried = self.step(level, [tree for tree, _ in nodes], carried, ids)
            grow(growing, logits, self.width, self.name)
            level += 1
            growing = [tree for tree in growing if tree.request.depth > level and tree.frontier]
            index = {(id(tree), node): i for i, (tree, node) in enumerate(nodes)}
            parents = [
                index[id(tree), tree.draft.parents[node]]
                for tree in growing
                for node in tree.frontier
            ]
            carried = carried[parents]
