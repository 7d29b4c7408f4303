"""A forward pass of transformers' modules over a paged KV cache: cache, attention and masks.

Three things are put in place of transformers' own:

- The cache (`PassCache`) stores what a layer hands to `update` in rows of a `TransformersCache` and
  returns the rows of all requests of the pass, one request after the other. A layer may store
  tensors of its own shapes, such as latent vectors.
- The attention function (`_attend`, registered with transformers) attends with each request's
  queries to that request's rows only.
- The masks (`_make_mask`, registered likewise) are computed from the mask function that the module
  itself asks for, at logical positions, and restricted to the committed tokens and the ancestors
  of a draft node. So a sliding or chunked window is what the module says it is.

This module imports transformers, which takes seconds: import it only for such a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import AttentionMaskInterface

from forerun.cache.attention import Attention, Segment
from forerun.cache.kv import CACHE_MEMORY, KVCache
from forerun.cache.pages import Pages
from forerun.devices import zeros
from forerun.kernels import reference as kernels

NAME = "forerun"  # of the attention function in transformers

Shape = tuple[int, int]  # heads and channels of what a layer stores of a token
Shapes = dict[int, tuple[Shape, Shape]]  # by layer index, of keys and values
Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class UnsupportedModuleError(Exception):
    """A module that does something which this backend cannot do; the message says what."""


# ---------------------------------------------------------------- cache


class TransformersCache(KVCache):
    """Paged keys and values of layers that store tensors of their own shapes.

    Attributes:
        data: [rows, width], a row is what one token stores, layer after layer.
        stored: by layer index, views of `data`: keys [rows, Hk, Dk] and values [rows, Hv, Dv].
    """

    def __init__(
        self,
        shapes: Shapes,
        *,
        tokens: int,
        page: int,
        slots: int,
        context: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate room for `tokens` tokens; `shapes` are those of `TransformersDecoder`."""
        self.pages = Pages(-(-tokens // page), page, slots, context)
        self.native = False
        self.recurrent = None
        size = self.pages.count * page, row_width(shapes)
        self.data = zeros(size, dtype, device, *CACHE_MEMORY)
        self.stored: dict[int, tuple[Tensor, Tensor]] = {}
        start = 0
        for layer, pair in shapes.items():
            views = []
            for heads, channels in pair:
                part = self.data[:, start : start + heads * channels]
                views.append(part.view(-1, heads, channels))
                start += heads * channels
            self.stored[layer] = (views[0], views[1])
        self._groups = [(self.data[None],)]  # which `move` copies rows of
        self.length = [0] * slots
        self.moves = self.compact = None

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.data.shape[1] * self.data.itemsize


def row_width(shapes: Shapes) -> int:
    """Return the number of elements that one token stores."""
    return sum(heads * channels for pair in shapes.values() for heads, channels in pair)


class PassCache(Cache):
    """The cache of one forward pass as a module sees it.

    Attributes:
        past: the number of tokens that it claims to hold. No module may depend on it, since
            requests of one pass have different lengths.
    """

    def __init__(self, num_layers: int, current: ModulePass | None, past: int = 0) -> None:
        layer: Any = DynamicLayer
        super().__init__(layers=[layer() for _ in range(num_layers)])
        self.current = current
        self.past = past

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        assert self.current is not None
        return self.current.store(layer_idx, key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.past

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.past

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        assert self.current is not None
        return self.current.num_keys, 0

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedModuleError("its layers keep more than keys and values")

    update_conv_state = update_recurrent_state = update_indexer = _refuse
    get_conv_state = get_recurrent_state = _refuse


class ShapeRecorder(PassCache):
    """An empty cache that records the shapes and dtypes of what each layer stores."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(num_layers, None)
        self.shapes: Shapes = {}
        self.dtypes: set[torch.dtype] = set()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        for stored in (key_states, value_states):
            if stored.ndim != 4 or stored.shape[0] != 1:
                raise UnsupportedModuleError(f"layer {layer_idx} stores {list(stored.shape)}")
        if layer_idx in self.shapes:
            raise UnsupportedModuleError(f"layer {layer_idx} stores keys twice in a forward pass")
        key_shape = (key_states.shape[1], key_states.shape[3])
        self.shapes[layer_idx] = key_shape, (value_states.shape[1], value_states.shape[3])
        self.dtypes |= {key_states.dtype, value_states.dtype}
        return key_states, value_states

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0


# ---------------------------------------------------------------- one forward pass


@dataclass(slots=True)
class _Rows:
    """Requests that are attended in one call; R requests, N queries, K keys.

    Attributes:
        queries: a slice of the pass's tokens, or their indices [R, N].
        filled: int64 [F], places among the R * N of queries that are no padding; None if all are
            filled.
        seen: bool [R, N, K], the committed tokens and ancestors of each query; None for all.
        query_positions: int64 [R, N].
        key_positions: int64 [R, K].
    """

    queries: slice | Tensor
    filled: Tensor | None
    seen: Tensor | None
    query_positions: Tensor
    key_positions: Tensor


class ModulePass:
    """One forward pass: which rows its tokens are stored in, and which keys each token sees.

    Attributes:
        num_tokens: the number of its tokens.
        num_keys: the number of keys of all requests, in the order of `rows`.
        updated, attended: layers that stored keys, and calls of the attention function.
    """

    def __init__(self, attention: Attention) -> None:
        cache = attention.cache
        assert isinstance(cache, TransformersCache)
        self.cache = cache
        self.targets = attention.rows
        self.num_tokens = attention.positions.numel()
        self.updated: set[int] = set()
        self.attended = 0
        self._masks: dict[int, tuple[Tensor, list[Tensor | None]]] = {}
        lengths = [len(segment.tokens) for segment in attention.segments]
        starts = np.cumsum([0, *lengths[:-1]])
        by_start = dict(zip(starts.tolist(), attention.segments, strict=True))
        self.rows = [self._rows_of(attention, group, by_start) for group in attention.groups]
        sources = [group.keys for group in attention.groups]
        self.sources = sources[0] if len(sources) == 1 else _joined(sources, cache.data.device)
        self.num_keys = sum(rows.key_positions.numel() for rows in self.rows)

    def store(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store what a layer's tokens contribute, [1, H, T, D]; returns the rows of all requests,
        [1, H, num_keys, D]."""
        if layer not in self.cache.stored:
            raise UnsupportedModuleError(f"layer {layer} stores keys in some forward passes only")
        self.updated.add(layer)
        stored_keys, stored_values = self.cache.stored[layer]
        return self._exchange(stored_keys, keys), self._exchange(stored_values, values)

    def _exchange(self, stored: Tensor, new: Tensor) -> Tensor:
        stored[self.targets] = new[0].transpose(0, 1).to(stored.dtype)
        rows = stored[self.sources]
        if rows.ndim == 4:  # indices [R, K]
            rows = rows.flatten(0, 1)
        return rows.transpose(0, 1)[None].to(new.dtype)

    def make_mask(self, function: Mask) -> Tensor:
        """Compute the masks of a mask function of transformers, (batch, head, query, key) -> bool,
        and return a tensor [1, 1, T, num_keys] without memory that stands for them."""
        masks = []
        for rows in self.rows:
            query, key = rows.query_positions[:, None, :, None], rows.key_positions[:, None, None]
            nought = torch.zeros_like(query[:, :, :1])
            allowed = function(nought, nought, query, key)[:, 0]
            shape = (*rows.query_positions.shape, rows.key_positions.shape[1])
            mask = allowed.broadcast_to(shape)
            mask = mask if rows.seen is None else mask & rows.seen
            skips = mask.device.type == "cpu" and bool(mask.all())
            masks.append(None if skips else mask)
        token = torch.ones(1, dtype=torch.bool, device=self.cache.data.device)
        token = token.expand(1, 1, self.num_tokens, self.num_keys)
        self._masks[id(token)] = token, masks  # holding the tensor keeps its id from being reused
        return token

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attend with query [1, Hq, T, D] to key and value [1, H, num_keys, ..]: [1, T, Hq, Dv]."""
        if key.shape[2] != self.num_keys or value.shape[2] != self.num_keys:
            raise UnsupportedModuleError("a layer attends to keys that are not those of its cache")
        if mask is None:
            masks = [rows.seen for rows in self.rows]
        elif id(mask) in self._masks:
            masks = self._masks[id(mask)][1]
        else:
            raise UnsupportedModuleError("it changes its attention masks")
        self.attended += 1
        queries, start = query[0].transpose(0, 1), 0
        out = value.new_empty((*queries.shape[:2], value.shape[3]))
        for rows, allowed in zip(self.rows, masks, strict=True):
            shape, count = rows.key_positions.shape, rows.key_positions.numel()
            q = queries[rows.queries]
            q = q if q.ndim == 4 else q[None]
            k, v = (
                states[0, :, start : start + count]
                .reshape(-1, *shape, states.shape[3])
                .permute(1, 2, 0, 3)
                for states in (key, value)
            )
            start += count
            attended = kernels.attention(q, k, v, allowed, scale, softcap, sinks)
            if rows.filled is not None:
                assert isinstance(rows.queries, Tensor)
                indices = rows.queries.flatten()[rows.filled]
                out[indices] = attended.flatten(0, 1)[rows.filled]
            else:
                out[rows.queries] = attended if isinstance(rows.queries, Tensor) else attended[0]
        return out[None]

    def _rows_of(self, attention: Attention, group: Any, by_start: dict[int, Segment]) -> _Rows:
        positions = attention.positions[group.queries]
        if isinstance(group.queries, slice):
            firsts, positions = [group.queries.start], positions[None]
        else:
            firsts = group.queries[:, 0].tolist()
        segments = [by_start[first] for first in firsts]
        keys = [_key_positions(segment, self.cache) for segment in segments]
        table = np.zeros((len(keys), max(map(len, keys))), dtype=np.int64)
        for line, own in zip(table, keys, strict=True):
            line[: len(own)] = own
        (seen,) = group.masks.values()
        return _Rows(
            queries=group.queries,
            filled=group.filled,
            seen=seen,
            query_positions=positions,
            key_positions=torch.from_numpy(table).to(positions.device),
        )


def _key_positions(segment: Segment, cache: KVCache) -> np.ndarray:
    """Return the logical positions of a slot's committed and uncommitted tokens, int64 [K]."""
    length = cache.length[segment.slot]
    depths = np.asarray(segment.depths, dtype=np.int64)
    return np.concatenate([np.arange(length, dtype=np.int64), length + depths])


def _joined(sources: Sequence[slice | Tensor], device: torch.device) -> Tensor:
    """Return rows of several groups as one list of indices."""
    parts = [
        torch.arange(source.start, source.stop, device=device)
        if isinstance(source, slice)
        else source.flatten()
        for source in sources
    ]
    return torch.cat(parts)


CURRENT: ContextVar[ModulePass] = ContextVar("forerun_module_pass")


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of transformers' modules: [1, H, T, D] -> [1, T, Hq, Dv].

    `sliding_window` among the other arguments is for functions that make masks themselves."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = CURRENT.get().attend(query, key, value, attention_mask, scale, softcap or None, s_aux)
    return out, None


def _make_mask(*args: Any, mask_function: Mask, **kwargs: Any) -> Tensor:
    """The mask function of transformers' modules."""
    return CURRENT.get().make_mask(mask_function)


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _make_mask)
