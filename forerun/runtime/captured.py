"""Passes of a decoder on torch that are recorded once and replayed: CUDA graphs.

On a GPU the host needs longer to launch the operations of a small pass than the device to run
them. A graph of the whole pass is launched at once. Its tensors have fixed shapes and addresses:
segments are padded to R segments of N tokens over K keys, all inputs lie in one block of memory,
and the host copies that block to the device before each replay.

Plain decoding of a few requests runs the graph of passes with drafts: products and attention are
then the same kernels over the same shapes, whatever is drafted.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from forerun.cache.attention import Segment, visible_masks
from forerun.cache.kv import KVCache
from forerun.devices import upload
from forerun.kernels import reference as kernels
from forerun.kernels import triton as triton_kernels
from forerun.kernels.draw import draw_on_device
from forerun.models.config import VisibleKeys
from forerun.models.decoder import Decoder
from forerun.models.sharding import ShardedDecoder
from forerun.runtime.program import ChainStart, visible_paths
from forerun.types import Forward

if TYPE_CHECKING:
    from forerun.kernels.triton.attention import Walk
    from forerun.runtime.kernel_decoder import KernelDecoder

log = logging.getLogger("forerun.runtime")
log.addHandler(logging.NullHandler())  # applications that want to read it configure that

DRAFT_TOKENS = 16  # tokens of a segment that passes over few segments have room for
FEW_SEGMENTS = 4
MAX_TOKENS = 512  # padded tokens of a recorded pass; larger ones are bound by the device
MIN_KEYS = 256
MAX_PATH = 80  # uncommitted tokens that a token of a tree may see
WARM_UP = 2  # passes before one is recorded: kernels are loaded and memory is found by then

T = TypeVar("T")


class Graphs(Protocol):
    """Records the operations of a function on a device.

    Attributes:
        own_attention: use the attention of `kernels/triton` where it can compute a model's.
        own_layers: compute whole passes with `kernels/triton`, where it can.
    """

    own_attention: bool
    own_layers: bool

    def record(self, run: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """Run a function once; return its result and what computes it again, in place, from the
        tensors that the function read."""


class CudaGraphs:
    """Records CUDA graphs, which share one pool of memory."""

    def __init__(self, own_attention: bool = False, own_layers: bool = False) -> None:
        """`own_attention` and `own_layers` as in `Graphs`; they have not run on a GPU yet, so they
        are not the default."""
        self.own_attention = own_attention
        self.own_layers = own_layers
        self._pool: Any = None

    def record(self, run: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """Warm up on a stream of its own, then capture."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = run()
        self._pool = self._pool or graph.pool()
        graph.replay()  # capturing computes nothing
        return result, graph.replay


def cuda_graphs(kernels: str, device: torch.device) -> CudaGraphs | None:
    """Return what records passes on a device with the option `kernels`, None if nothing does.

    Where Triton's kernels are asked for and cannot be used, the log says why, once."""
    if kernels == "triton" and _has_own_kernels(device):
        return CudaGraphs(own_attention=True, own_layers=True)
    return CudaGraphs() if device.type == "cuda" and kernels != "torch" else None


@functools.cache
def _has_own_kernels(device: torch.device) -> bool:
    """Return True if Triton's kernels can be used on a device; log why not, once."""
    reason = triton_kernels.problem(device)
    if reason is not None:
        log.warning("the kernels of Triton are not used: %s", reason)
    return reason is None


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


class CapturedPasses:
    """The recorded passes of one decoder over one cache.

    A shape is recorded when it is first needed.

    Attributes:
        failed: recording failed once, and everything runs unrecorded since; the log says why.
        own_attention, own_layers: as in `Graphs`; false once a pass with Triton's kernels failed.
    """

    def __init__(self, decoder: Decoder, cache: KVCache, graphs: Graphs) -> None:
        self.decoder, self.cache, self.graphs = decoder, cache, graphs
        self._passes: dict[tuple[PassShape, tuple[int, ...]], CapturedPass] = {}
        self.failed = False
        self.own_attention, self.own_layers = graphs.own_attention, graphs.own_layers

    @functools.cached_property
    def _kernel_decoder(self) -> KernelDecoder | None:
        """The decoder computed by Triton's kernels; None if they cannot compute it."""
        from forerun.runtime.kernel_decoder import KernelDecoder

        if KernelDecoder.supports(self.decoder):
            return KernelDecoder(self.decoder)
        log.warning("Triton's kernels do not compute the layers of this model: torch does")
        return None

    @staticmethod
    def supports(decoder: Decoder) -> bool:
        """Return True if a decoder's passes can be recorded: recurrent layers and experts take
        decisions on the host, and parts of a model wait for each other."""
        decides = decoder.config.recurrent is not None or decoder.config.experts is not None
        return not decides and not isinstance(decoder, ShardedDecoder)

    def draft_chains(
        self, starts: Sequence[ChainStart], vocab: int, logits: Tensor
    ) -> list[list[int]] | None:
        """Draft a chain of tokens below `vocab` behind each start; the slots have room.

        A level takes its tokens from the level before on the device: the host waits once, for all
        of them.

        Args:
            starts: where each chain's first token will be read; their own tokens mean nothing.
            logits: [starts, V], from which the first tokens are drawn.

        Returns:
            the chains with their first tokens, or None if the passes are not recorded.
        """
        order = sorted(range(len(starts)), key=lambda i: -len(starts[i].keys))
        ordered = [starts[i] for i in order]
        logits = logits[upload(order, torch.int64, logits.device)]
        drafted: list[Tensor] = []
        for level in range(len(ordered[0].keys)):
            active = [start for start in ordered if len(start.keys) > level]
            if level:
                segments = [_next_token(start, level - 1) for start in active]
                found = self.forward(segments, (), drafted[-1][: len(active)])
                if found is None:
                    return None
                logits = found.logits
            samplings = [start.sampling for start in active]
            keys = [start.keys[level] for start in active]
            tokens = draw_on_device(logits[: len(active), :vocab], samplings, keys)
            drafted.append(torch.nn.functional.pad(tokens, (0, len(starts) - len(active))))
        chains: list[list[int]] = [[] for _ in starts]
        for tokens_of_level in torch.stack(drafted).tolist():
            for i, token in zip(order, tokens_of_level, strict=True):
                if len(chains[i]) < len(starts[i].keys):
                    chains[i].append(token)
        return chains

    def new_pass(self, shape: PassShape, layers: tuple[int, ...] = ()) -> CapturedPass:
        """Return a pass of this shape that is not recorded yet."""
        own_layers = self._kernel_decoder if self.own_layers else None
        walks = self.own_attention and can_walk(self.decoder)
        return CapturedPass(self.decoder, self.cache, shape, layers, walks, own_layers)

    def forward(
        self,
        segments: Sequence[Segment],
        aux_hidden_layers: Sequence[int],
        tokens: Tensor | None = None,
    ) -> Forward | None:
        """Run one pass as `Runner.forward` does; the next one overwrites its logits.

        tokens: int64 [segments] on the device, in place of those of segments with one token each.

        Returns None for passes that are not recorded. `Forward.is_cold` says that this one was
        recorded just now."""
        shape = None if self.failed else shape_of(segments, self.cache)
        if shape is None:
            return None
        layers = tuple(sorted(set(aux_hidden_layers)))
        recorded = self._passes.get((shape, layers))
        if recorded is not None:
            return recorded.run(segments, tokens)
        try:
            recorded = self.new_pass(shape, layers)
            recorded.record(self.graphs, segments, tokens)
        except Exception as error:  # of the driver, of a compiler, of memory: nothing may crash
            reason = str(error).split("\n")[0]
            if self.own_attention or self.own_layers:
                log.warning("the kernels of Triton are not used: %s", reason)
                self.own_attention = self.own_layers = False
                return self.forward(segments, aux_hidden_layers, tokens)
            self.failed = True
            log.warning("passes are not recorded as CUDA graphs: %s", reason)
            return None
        self._passes[shape, layers] = recorded
        found = recorded.result(segments)
        found.is_cold = True
        return found


def can_walk(decoder: Decoder) -> bool:
    """Return True if the attention of `kernels/triton` computes that of a decoder."""
    config = decoder.config
    kinds = set(map(config.visible_keys, range(config.layers)))
    is_plain = all(not kind.sinks and kind.chunk is None for kind in kinds)
    has_sinks = any(layer.sink_logits is not None for layer in decoder.weights.layers)
    return is_plain and not has_sinks and decoder.dtype != torch.float64


def _next_token(start: ChainStart, level: int) -> Segment:
    """Return the segment of a chain's next token, which the host does not know yet."""
    offset = start.offset + level
    return Segment(start.slot, [0], list(range(-1, offset)), [0], offset=offset)


@dataclass
class _Inputs:
    """The inputs of a pass, views of one block of memory.

    Attributes:
        ids, positions: int64 [T], of padding 0.
        rows: int64 [T], the cache row of each token; padding writes to one that nobody owns.
        wanted: int64 [T], the tokens whose logits come first, in order.
        table: int64 [R, K], the cache rows of each segment's keys.
        masks: uint8 [kinds of layers, R, N, K], 1 where a token sees a key.
        last, direct, extra_at, extra: as in `kernels.triton.attention.Walk`, which needs no masks;
            int64 here.
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

    @classmethod
    def allocate(cls, shape: PassShape, kinds: int, walks: bool, device: torch.device) -> _Inputs:
        """Return inputs of zeros, with masks of `kinds` of layers or those of a walk; on the CPU in
        memory that a GPU can read, where there is one."""
        kinds, walking = (0, shape.rows) if walks else (kinds, 0)
        counts = [shape.rows] * 4 + [walking] * 3
        counts += [walking * MAX_PATH, shape.segments * shape.keys]
        num_masks = kinds * shape.rows * shape.keys
        size = 8 * sum(counts) + num_masks
        pinned = device.type == "cpu" and torch.cuda.is_available()
        block = torch.zeros(size, dtype=torch.uint8, device=device, pin_memory=pinned)
        numbers = block[: 8 * sum(counts)].view(torch.int64)
        ids, positions, rows, wanted, last, direct, extra_at, extra, table = torch.split(
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


class CapturedPass:
    """One pass of fixed shape, which can be recorded."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        shape: PassShape,
        layers: tuple[int, ...],
        walks: bool,
        own_layers: KernelDecoder | None,
    ) -> None:
        """`walks`: each token reads its own rows, by the attention of `kernels/triton`; so do
        `own_layers`."""
        self.decoder, self.cache, self.shape, self.layers = decoder, cache, shape, layers
        config = decoder.config
        self.kinds = sorted(set(map(config.visible_keys, range(config.layers))), key=str)
        self.own_layers = own_layers
        self.walks = walks or own_layers is not None
        self.inputs = self._allocate(decoder.device)
        self._stages: list[_Stage] = []
        self._masks: dict[VisibleKeys, Tensor] = {}
        if not self.walks:
            self._masks = dict(zip(self.kinds, self.inputs.masks.view(torch.bool), strict=True))

    def begin_chains(self, table: Tensor, wanted: Tensor) -> None:
        """Set the inputs that stay the same while `place_chains` sets the others.

        table: int64 [R, K], the cache rows of each segment's positions; those that `place_chains`
            will need.
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

    def place_chains(self, tokens: Tensor, first: Tensor) -> None:
        """Set the inputs to a chain of tokens for each segment by operations of the device alone.

        tokens: int64 [R, n], the same n each time.
        first: int64 [R], the position of each chain's first token, behind committed ones.
        """
        i, count = self.inputs, tokens.shape[1]
        positions = first[:, None] + torch.arange(count, device=first.device)
        for whole, placed in (
            (i.ids, tokens),
            (i.positions, positions),
            (i.rows, i.table.gather(1, positions)),
            *(((i.last, positions), (i.direct, positions + 1)) if self.walks else ()),
        ):
            whole.view(self.shape.segments, self.shape.tokens)[:, :count] = placed
        keys, queries = torch.arange(self.shape.keys, device=first.device), positions[..., None]
        for kind, mask in self._masks.items():
            seen = keys <= queries
            if kind.window is not None:
                seen = seen & ((queries - keys < kind.window) | (keys < kind.sinks))
            if kind.chunk is not None:
                seen = seen & (queries - keys <= queries % kind.chunk)
            mask[:, :count] = seen

    def record(self, graphs: Graphs, segments: Sequence[Segment], tokens: Tensor | None) -> None:
        """Record the pass, with these segments."""
        self._fill(segments, tokens)
        self._output, self._replay = graphs.record(self.compute)

    def run(self, segments: Sequence[Segment], tokens: Tensor | None) -> Forward:
        """Run the pass over other segments of the same shape."""
        self._fill(segments, tokens)
        self._replay()
        return self.result(segments)

    def result(self, segments: Sequence[Segment]) -> Forward:
        """Return what the last pass computed for its segments."""
        num_wanted = sum(len(segment.want) for segment in segments)
        features = self._output.features
        if features:
            index = upload(self._places(segments), torch.int64, self.decoder.device)
            features = {layer: found[index] for layer, found in features.items()}
        return Forward(self._output.logits[:num_wanted], features)

    @torch.inference_mode()
    def compute(self) -> Forward:
        """Run the decoder over the inputs; logits [T, V], those of the wanted tokens first."""
        i = self.inputs
        if self.own_layers is not None:
            walk, wanted = self._rows_seen(), i.wanted
            return self.own_layers.forward(
                i.ids, i.positions, i.rows, walk, self.cache, wanted, self.layers
            )
        return self.decoder.forward(i.ids, i.positions, self._attend, i.wanted, self.layers)

    def _attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """Store keys and values, and attend; a `decoder.Attend`."""
        config, shape = self.decoder.config, self.shape
        source = config.kv_layer(layer)
        keys, values = self.cache.keys[source], self.cache.values[source]
        if k is not None and v is not None:
            keys.index_copy_(0, self.inputs.rows, k.to(keys.dtype))
            values.index_copy_(0, self.inputs.rows, v.to(values.dtype))
        if self.walks:
            return self._walk(q, keys, values, config.visible_keys(layer).window)
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

    def _walk(self, q: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
        """Attend by the kernel in which each token reads its own rows."""
        from forerun.kernels.triton.attention import attend

        config = self.decoder.config
        scale, softcap = config.attention_scale, config.attention_softcap
        return attend(q, keys, values, self._rows_seen(), scale, softcap, window)

    def _rows_seen(self) -> Walk:
        """Return the rows that each token sees."""
        from forerun.kernels.triton.attention import Walk

        i = self.inputs
        last, direct, extra_at = (each.to(torch.int32) for each in (i.last, i.direct, i.extra_at))
        return Walk(last, direct, i.table, i.extra, extra_at)

    def _fill(self, segments: Sequence[Segment], tokens: Tensor | None) -> None:
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
            masks = visible_masks(segments, depths, cache, self.decoder.config, shape)
            for staged_mask, (_, mask) in zip(arrays["masks"], masks, strict=True):
                staged_mask[:] = mask
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
        return _Inputs.allocate(self.shape, len(self.kinds), self.walks, device)

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

    def _places(self, segments: Sequence[Segment]) -> list[int]:
        """Return the places of the segments' tokens among the padded ones."""
        firsts = range(0, self.shape.rows, self.shape.tokens)
        spans = zip(firsts, segments, strict=False)
        return [first + i for first, s in spans for i in range(len(s.tokens))]
