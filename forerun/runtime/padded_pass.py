"""Passes of fixed shape: inputs at fixed addresses, and attention over padded segments.

Segments are padded to R segments of N tokens over K keys. All inputs lie in one block of memory.
The host stages them and copies that block at once (`fill`), or the device places tokens
itself (`place`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from forerun.cache.attention import Segment, visible_masks
from forerun.cache.kv import KVCache
from forerun.kernels import reference as kernels
from forerun.models.config import ModelConfig, VisibleKeys
from forerun.runtime.program import visible_paths

if TYPE_CHECKING:
    from forerun.kernels.triton.attention import Walk
    from forerun.runtime.recorded_recurrence import RecordedRecurrence

DRAFT_TOKENS = 16  # tokens of a segment that passes over few segments have room for
FEW_SEGMENTS = 4
MAX_TOKENS = 512  # padded tokens of a recorded pass; larger ones are bound by the device
MIN_KEYS = 256
MAX_PATH = 80  # uncommitted tokens that a token of a tree may see


class PassShape(NamedTuple):
    """Padded shape of a pass: segments, tokens of each, keys that each sees at most."""

    segments: int
    tokens: int
    keys: int

    @property
    def rows(self) -> int:
        """Tokens of the pass, padding included."""
        return self.segments * self.tokens


def shape_of(segments: Sequence[Segment], cache: KVCache) -> PassShape | None:
    """Return the smallest recorded shape that takes these segments; None if they are too many."""
    most = max(len(segment.tokens) for segment in segments)
    keys = max(cache.length[segment.slot] + len(segment.parents) for segment in segments)
    return padded_shape(len(segments), most, keys)


def padded_shape(segments: int, tokens: int, keys: int) -> PassShape | None:
    """Return the smallest recorded shape of at least so many; None if they are too many."""
    count, room = _power_of_two(segments), _power_of_two(tokens)
    if count <= FEW_SEGMENTS:
        room = max(room, DRAFT_TOKENS)
    shape = PassShape(count, room, max(_power_of_two(keys), MIN_KEYS))
    return shape if shape.rows <= MAX_TOKENS and tokens <= 2 * DRAFT_TOKENS else None


def _power_of_two(number: int) -> int:
    """Return the smallest power of two that is not less."""
    return 1 << (number - 1).bit_length()


class TreeShape(NamedTuple):
    """The shape of R trees of n nodes each, the root first.

    Attributes:
        depths: int64 [R, n], 0 of roots; places without a node count as children of the root.
        is_above: bool [R, n, n], whether a node sees another one: itself, and those it follows.
        above: int64 [R, n, D + 1], by depth the node above each, 0 behind its own depth.
    """

    depths: Tensor
    is_above: Tensor
    above: Tensor

    @classmethod
    def of(cls, parents: Tensor, depth: int) -> TreeShape:
        """Return the shape of trees of at most `depth` levels by operations of the device alone.

        parents: int64 [R, n - 1], the numbers of the parents of all nodes but the root, which come
            before them; -1 where there is no node.
        """
        count = parents.shape[1] + 1
        numbers = torch.arange(count, device=parents.device)
        all_parents = torch.nn.functional.pad(parents.clamp(min=0), (1, 0))
        is_above = (all_parents[..., None] == numbers) | (numbers[:, None] == numbers)
        reach = 1
        while reach < depth:  # as far again as before
            is_above = (is_above.float() @ is_above.float()) > 0
            reach *= 2
        depths = is_above.sum(2) - 1
        levels = torch.arange(depth + 1, device=parents.device)
        is_at = is_above[..., None] & (depths[:, None, :, None] == levels)
        above = (is_at * numbers[:, None]).sum(2)
        return cls(depths, is_above, above)


@dataclass
class _Inputs:
    """The inputs of a pass, views of one block of memory.

    Attributes:
        ids, positions: int64 [T], of padding 0.
        rows: int64 [T], the cache row of each token; padding writes to the spare row.
        wanted: int64 [T], the tokens whose logits come first, in order.
        table: int64 [R, K], the cache rows of each segment's keys.
        masks: uint8 [kinds of layers, R, N, K], 1 where a token sees a key.
        last, direct, extra_at, extra: as in `kernels.triton.attention.Walk`, which needs no masks;
            int64 here.
        recurrence: int64, those of `recorded_recurrence.RecurrentInputs`.
    """

    block: Tensor
    ids: Tensor
    positions: Tensor
    rows: Tensor
    wanted: Tensor
    table: Tensor
    masks: Tensor
    last: Tensor
    direct: Tensor
    extra_at: Tensor
    extra: Tensor
    recurrence: Tensor

    @classmethod
    def allocate(
        cls, shape: PassShape, kinds: int, walks: bool, recurrence: int, device: torch.device
    ) -> _Inputs:
        """Return inputs of zeros, with masks of `kinds` of layers or those of a walk, and so many
        of recurrent layers; on the CPU in memory that a GPU can read, where there is one."""
        kinds, walking = (0, shape.rows) if walks else (kinds, 0)
        counts = [shape.rows] * 4 + [walking] * 3
        counts += [walking * MAX_PATH, shape.segments * shape.keys, recurrence]
        num_masks = kinds * shape.rows * shape.keys
        size = 8 * sum(counts) + num_masks
        pinned = device.type == "cpu" and torch.cuda.is_available()
        block = torch.zeros(size, dtype=torch.uint8, device=device, pin_memory=pinned)
        numbers = block[: 8 * sum(counts)].view(torch.int64)
        ids, positions, rows, wanted, last, direct, extra_at, extra, table, states = torch.split(
            numbers, counts
        )
        return cls(
            block,
            ids,
            positions,
            rows,
            wanted,
            table.view(shape.segments, shape.keys),
            block[8 * sum(counts) :].view(kinds, *shape),
            last,
            direct,
            extra_at,
            extra,
            states,
        )


class _Stage:
    """Inputs in main memory, on their way to the device.

    Attributes:
        arrays: the inputs by name.
        copied: an event behind the last copy; None on a CPU.
    """

    def __init__(self, inputs: _Inputs) -> None:
        self.inputs = inputs
        names = [field.name for field in fields(inputs) if field.name != "block"]
        self.arrays = {name: getattr(inputs, name).numpy() for name in names}
        self.copied: Any = None


class PaddedPass:
    """The inputs of a pass of one shape over a cache, and its attention.

    Attributes:
        walks: each token reads its own cache rows, by the attention of `kernels/triton`.
        kinds: the kinds of layers, which see different keys.
        recurrence: the recurrent layers, of a model that has some.
    """

    def __init__(
        self,
        config: ModelConfig,
        cache: KVCache,
        shape: PassShape,
        walks: bool,
        device: torch.device,
        recurrence: RecordedRecurrence | None = None,
    ) -> None:
        """`config` is that of the layers whose keys the cache holds."""
        self.config, self.cache, self.shape, self.device = config, cache, shape, device
        self.kinds = sorted(set(map(config.visible_keys, range(config.layers))), key=str)
        self.walks = walks
        self.recurrence = recurrence
        self.inputs = self._allocate(device)
        if recurrence is not None:
            recurrence.bind(self.inputs.recurrence)
        self._stages: list[_Stage] = []
        self._masks: dict[VisibleKeys, Tensor] = {}
        if not walks:
            self._masks = dict(zip(self.kinds, self.inputs.masks.view(torch.bool), strict=True))

    def begin_chains(self, table: Tensor, wanted: Tensor) -> None:
        """Set the inputs that stay the same while `place` sets the others.

        table: int64 [R, K], the cache rows of each segment's positions; those that `place` will
            need.
        wanted: int64 [M], the tokens whose logits come first.
        """
        i = self.inputs
        i.block.zero_()
        i.rows.fill_(self.cache.spare_row)
        i.table.copy_(table)
        i.wanted[: len(wanted)] = wanted
        if self.walks:
            i.last.fill_(-1)
        else:
            i.masks[..., 0] = 1  # padding sees the first key, so that it is no NaN

    def place(self, tokens: Tensor, first: Tensor, tree: TreeShape | None = None) -> None:
        """Set the inputs to tokens of each segment by operations of the device alone.

        tokens: int64 [R, n], the same n each time: a chain, or the nodes of `tree`.
        first: int64 [R], the position of each first token, behind committed ones.
        """
        i, count = self.inputs, tokens.shape[1]
        indices = first[:, None] + torch.arange(count, device=first.device)
        positions = indices if tree is None else first[:, None] + tree.depths
        rows = i.table.gather(1, indices)
        for padded, values in (
            (i.ids, tokens),
            (i.positions, positions),
            (i.rows, rows),
            *(((i.last, positions),) if self.walks else ()),
        ):
            padded.view(self.shape.segments, self.shape.tokens)[:, :count] = values
        if self.walks:
            self._place_walk(rows, first, positions, tree)
        keys, queries = torch.arange(self.shape.keys, device=first.device), positions[..., None]
        is_seen = keys <= queries
        if tree is not None and self._masks:
            own = (keys - first[:, None]).clamp(-1, count)  # the node that a key belongs to
            node = own.clamp(0, count - 1)
            is_above = tree.is_above.gather(2, node[:, None].expand(-1, count, -1))
            is_seen = (own < 0)[:, None] | (is_above & (own < count)[:, None])
            keys = torch.where(own < 0, keys, first[:, None] + tree.depths.gather(1, node))[:, None]
        for kind, mask in self._masks.items():
            seen = is_seen
            if kind.window is not None:
                seen = seen & ((queries - keys < kind.window) | (keys < kind.sinks))
            if kind.chunk is not None:
                seen = seen & (queries - keys <= queries % kind.chunk)
            mask[:, :count] = seen

    def _place_walk(
        self, rows: Tensor, first: Tensor, positions: Tensor, tree: TreeShape | None
    ) -> None:
        """Set which rows each token sees; rows, positions: int64 [R, n]."""
        i, (segments, count) = self.inputs, rows.shape
        grid = (segments, self.shape.tokens)
        if tree is None:
            i.direct.view(grid)[:, :count] = positions + 1
            return
        # The root is read from the table, nodes above from the rows of this pass.
        levels = tree.above.shape[2] - 1
        i.direct.view(grid)[:, :count] = first[:, None] + 1
        begins = torch.arange(self.shape.rows, device=rows.device) * levels
        i.extra_at.copy_(begins)
        path = tree.above[:, :, 1:].reshape(segments, -1)
        extra = i.extra[: self.shape.rows * levels].view(*grid, levels)
        extra[:, :count] = rows.gather(1, path).view(segments, count, levels)

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """Store keys and values, and attend; a `decoder.Attend`."""
        config, shape = self.config, self.shape
        source = config.kv_layer(layer)
        keys, values = self.cache.keys[source], self.cache.values[source]
        if k is not None and v is not None:
            keys.index_copy_(0, self.inputs.rows, k.to(keys.dtype))
            values.index_copy_(0, self.inputs.rows, v.to(values.dtype))
        if self.walks:
            return self._walk(q, keys, values, config.visible_keys(layer), sink_logits)
        table = self.inputs.table.view(-1)
        seen_keys = keys.index_select(0, table).view(*self.inputs.table.shape, *keys.shape[1:])
        seen = values.index_select(0, table).view(*self.inputs.table.shape, *values.shape[1:])
        out = kernels.attention(
            q.view(shape.segments, shape.tokens, *q.shape[1:]),
            seen_keys,
            seen,
            self._masks[config.visible_keys(layer)],
            config.attention_scale,
            config.attention_softcap,
            sink_logits,
        )
        return out.reshape(shape.rows, *out.shape[2:])

    def _walk(
        self, q: Tensor, keys: Tensor, values: Tensor, kind: VisibleKeys, sink_logits: Tensor | None
    ) -> Tensor:
        """Attend by the kernel in which each token reads its own rows."""
        from forerun.kernels.triton.attention import attend

        config = self.config
        scale, softcap = config.attention_scale, config.attention_softcap
        return attend(
            q,
            keys,
            values,
            self.rows_seen(),
            scale,
            softcap,
            kind.window,
            sinks=kind.sinks,
            chunk=kind.chunk,
            sink_logits=sink_logits,
        )

    def rows_seen(self) -> Walk:
        """Return the rows that each token sees."""
        from forerun.kernels.triton.attention import Walk

        i = self.inputs
        last, direct, extra_at = (each.to(torch.int32) for each in (i.last, i.direct, i.extra_at))
        return Walk(last, direct, i.table, i.extra, extra_at)

    def fill(self, segments: Sequence[Segment], tokens: Tensor | None) -> None:
        """Stage the inputs of these segments, and copy them to the device at once; `tokens` as in
        `CapturedPasses.forward`."""
        staged = self._free_stage()
        arrays, cache, shape = staged.arrays, self.cache, self.shape
        arrays["ids"][:] = arrays["positions"][:] = arrays["wanted"][:] = 0
        arrays["rows"][:] = arrays["table"][:] = cache.spare_row
        depths = [np.asarray(segment.depths) for segment in segments]
        wanted: list[int] = []
        for r, (segment, depth) in enumerate(zip(segments, depths, strict=True)):
            length, own = cache.length[segment.slot], cache.pages.rows[segment.slot]
            first, total = r * shape.tokens, length + len(segment.parents)
            span = slice(first, first + len(segment.tokens))
            arrays["ids"][span] = segment.tokens
            arrays["positions"][span] = length + depth[segment.offset :]
            arrays["rows"][span] = own[length + segment.offset : total]
            arrays["table"][r, :total] = own[:total]
            wanted += [first + i for i in segment.want]
        arrays["wanted"][: len(wanted)] = wanted
        if self.walks:
            self._fill_walk(segments, arrays)
        else:
            masks = visible_masks(segments, depths, cache, self.config, shape)
            for staged_mask, (_, mask) in zip(arrays["masks"], masks, strict=True):
                staged_mask[:] = mask
        if self.recurrence is not None:
            self.recurrence.fill(arrays["recurrence"], segments)
        self.inputs.block.copy_(staged.inputs.block, non_blocking=True)
        if tokens is not None:
            self.inputs.ids.view(shape.segments, shape.tokens)[: len(tokens), 0] = tokens
        if self.inputs.block.is_cuda:
            staged.copied.record()

    def _fill_walk(self, segments: Sequence[Segment], arrays: Mapping[str, np.ndarray]) -> None:
        """Stage which rows each token sees."""
        arrays["last"][:] = -1
        extra: list[int] = []
        firsts = range(0, self.shape.rows, self.shape.tokens)
        for first, segment in zip(firsts, segments, strict=False):
            length, own = self.cache.length[segment.slot], self.cache.pages.rows[segment.slot]
            span = slice(first, first + len(segment.tokens))
            arrays["last"][span] = arrays["positions"][span]
            paths = visible_paths(segment.parents)[segment.offset :]
            for token, (straight, path) in enumerate(paths, start=first):
                arrays["direct"][token] = length + straight
                arrays["extra_at"][token] = len(extra)
                extra += own[[length + i for i in path]].tolist() if path else []
        arrays["extra"][: len(extra)] = extra

    def _allocate(self, device: torch.device) -> _Inputs:
        size = 0 if self.recurrence is None else self.recurrence.size
        return _Inputs.allocate(self.shape, len(self.kinds), self.walks, size, device)

    def _free_stage(self) -> _Stage:
        """Return memory from which nothing is being copied any more: the device may be some passes
        behind."""
        for stage in self._stages:
            if stage.copied is None or stage.copied.query():
                return stage
        stage = _Stage(self._allocate(torch.device("cpu")))
        if self.inputs.block.is_cuda:
            stage.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._stages.append(stage)
        return stage

    def padded_indices(self, segments: Sequence[Segment]) -> list[int]:
        """Return the indices of the segments' tokens among the padded ones."""
        firsts = range(0, self.shape.rows, self.shape.tokens)
        spans = zip(firsts, segments, strict=False)
        return [first + i for first, s in spans for i in range(len(s.tokens))]
