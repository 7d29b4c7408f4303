"""Passes of a decoder on torch that are recorded once and replayed: CUDA graphs.

On a GPU the host needs longer to launch the operations of a small pass than the device to run
them. A graph of the whole pass is launched at once. Its tensors have fixed shapes and addresses
(`padded_pass`), and the host copies the inputs to the device before each replay.

Plain decoding of a few requests runs the graph of passes with drafts: products and attention are
then the same kernels over the same shapes, whatever is drafted.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from forerun.cache.attention import Segment
from forerun.cache.kv import KVCache
from forerun.devices import upload
from forerun.errors import StateError, first_line
from forerun.kernels import experts
from forerun.kernels import triton as triton_kernels
from forerun.kernels.draw import draw_on_device
from forerun.models.decoder import Decoder
from forerun.runtime.padded_pass import PaddedPass, PassShape, shape_of
from forerun.runtime.program import ChainStart
from forerun.runtime.recorded_recurrence import RecordedRecurrence, Steps, has_kernel, steps_of
from forerun.types import Forward

if TYPE_CHECKING:
    from forerun.runtime.kernel_decoder import KernelDecoder

log = logging.getLogger("forerun.runtime")
log.addHandler(logging.NullHandler())  # applications that want to read it configure that

WARM_UP = 2  # passes before one is recorded: kernels are loaded and memory is found by then

T = TypeVar("T")


class CudaGraphs:
    """Records CUDA graphs, which share one pool of memory.

    Attributes:
        own_attention: use the attention of `kernels/triton` where it can compute a model's.
        own_layers: compute whole passes with `kernels/triton`, where it can.
    """

    def __init__(self, own_attention: bool = False, own_layers: bool = False) -> None:
        self.own_attention = own_attention
        self.own_layers = own_layers
        self._pool: Any = None

    def record(self, run: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """Warm up on a stream of its own, then capture.

        Returns the function's result and what computes it again, in place, from the tensors that
        the function read."""
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


class CapturedPasses:
    """The recorded passes of one decoder over one cache.

    A shape is recorded when it is first needed.

    Attributes:
        failed: recording failed once, and everything runs unrecorded since; the log says why.
        own_attention, own_layers: as in `CudaGraphs`; false once a pass with Triton's kernels
            failed.
    """

    def __init__(self, decoder: Decoder, cache: KVCache, graphs: CudaGraphs) -> None:
        self.decoder, self.cache, self.graphs = decoder, cache, graphs
        self._passes: dict[tuple[PassShape, tuple[int, ...], Steps | None], CapturedPass] = {}
        self.failed = False
        self.own_attention, self.own_layers = graphs.own_attention, graphs.own_layers
        if self.own_layers:
            cache.compact = _compact

    @functools.cached_property
    def _kernel_decoder(self) -> KernelDecoder | None:
        """The decoder computed by Triton's kernels; None if they cannot compute it."""
        from forerun.runtime.kernel_decoder import KernelDecoder

        if KernelDecoder.supports(self.decoder):
            return KernelDecoder(self.decoder)
        log.warning("Triton's kernels do not compute the layers of this model: torch does")
        return None

    def takes(self, shape: PassShape) -> bool:
        """Return True if passes of this shape are recorded: all experts for many tokens would take
        longer than the chosen ones, which the host has to know."""
        is_small = shape.rows <= experts.MAX_DENSE_TOKENS
        return is_small or self._own_experts or all(map(experts.can_group, self._expert_mlps))

    @functools.cached_property
    def _expert_mlps(self) -> list[experts.ExpertMlps]:
        """The experts of the layers that have some."""
        mixtures = [layer.experts for layer in self.decoder.weights.layers]
        return [self.decoder.expert_mlps(own) for own in mixtures if own is not None]

    @property
    def _own_experts(self) -> bool:
        """True if Triton's kernels compute the experts."""
        if not self.own_layers:
            return False
        from forerun.kernels.triton.experts import fits

        return all(map(fits, self._expert_mlps))

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
        if self.cache.recurrent is not None:  # see `steps_of`
            return None
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

    def new_pass(
        self, shape: PassShape, layers: tuple[int, ...] = (), steps: Steps | None = None
    ) -> CapturedPass:
        """Return a pass of this shape, with so many steps of recurrent layers, that is not recorded
        yet."""
        own_layers = self._kernel_decoder if self.own_layers else None
        walks = self.own_attention and can_walk(self.decoder)
        compute: experts.ComputeExperts = experts.on_device
        if self._own_experts:
            from forerun.kernels.triton.experts import compute_experts as compute
        recurrence, states = None, self.cache.recurrent
        if states is not None and steps is not None:
            uses_kernel = self.own_attention and has_kernel(states)
            recurrence = RecordedRecurrence(states, shape, steps, uses_kernel)
        return CapturedPass(
            self.decoder, self.cache, shape, layers, walks, own_layers, compute, recurrence
        )

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
        if shape is None or not self.takes(shape):
            return None
        steps = None
        if self.cache.recurrent is not None:
            uses_kernel = self.own_attention and has_kernel(self.cache.recurrent)
            steps = steps_of(segments, shape, self.cache.recurrent, uses_kernel)
            if steps is None:
                return None
        layers = tuple(sorted(set(aux_hidden_layers)))
        recorded = self._passes.get((shape, layers, steps))
        if recorded is not None:
            return recorded.run(segments, tokens)
        try:
            recorded = self.new_pass(shape, layers, steps)
            recorded.record(self.graphs, segments, tokens)
        except StateError:  # of the caller
            raise
        except Exception as error:  # of the driver, of a compiler, of memory: nothing may crash
            reason = first_line(error)
            if self.own_attention or self.own_layers:
                log.warning("the kernels of Triton are not used: %s", reason)
                self.own_attention = self.own_layers = False
                self.cache.compact = None
                return self.forward(segments, aux_hidden_layers, tokens)
            self.failed = True
            log.warning("passes are not recorded as CUDA graphs: %s", reason)
            return None
        self._passes[shape, layers, steps] = recorded
        found = recorded.result(segments)
        found.is_cold = True
        return found


def _compact(cache: KVCache, rows: Sequence[int], path: Sequence[int]) -> None:
    """Move the rows of an accepted path by the kernel of `kernels/triton`, or by torch if it
    fails."""
    from forerun.kernels.triton.compact import compact

    numbers = upload([*rows, *path, len(path)], torch.int64, cache.data.device)
    own, nodes, count = torch.split(numbers, [len(rows), len(path), 1])
    try:
        for stored in cache.tensors:
            compact(stored, own[None], nodes[None], count)
    except Exception as error:  # of a compiler, before anything is moved
        log.warning("accepted rows are moved by torch: %s", first_line(error))
        cache.compact = None
        cache.move([rows[i] for i in path], rows[: len(path)])


def can_walk(decoder: Decoder) -> bool:
    """Return True if the attention of `kernels/triton` computes that of a decoder."""
    return decoder.dtype != torch.float64


def _next_token(start: ChainStart, level: int) -> Segment:
    """Return the segment of a chain's next token, which the host does not know yet."""
    offset = start.offset + level
    return Segment(start.slot, [0], list(range(-1, offset)), [0], offset=offset)


class CapturedPass(PaddedPass):
    """One pass of a decoder of fixed shape, which can be recorded."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        shape: PassShape,
        layers: tuple[int, ...],
        walks: bool,
        own_layers: KernelDecoder | None,
        compute_experts: experts.ComputeExperts = experts.on_device,
        recurrence: RecordedRecurrence | None = None,
    ) -> None:
        """`walks` and `recurrence` as in `PaddedPass`; `own_layers` need the former.
        `compute_experts` is for layers on torch."""
        walks = walks or own_layers is not None
        super().__init__(decoder.config, cache, shape, walks, decoder.device, recurrence)
        self.decoder, self.layers, self.own_layers = decoder, layers, own_layers
        self._compute_experts = compute_experts

    def record(
        self, graphs: CudaGraphs, segments: Sequence[Segment], tokens: Tensor | None
    ) -> None:
        """Record the pass, with these segments."""
        if self.recurrence is not None:
            self.recurrence.prepare(segments, self.cache.length, at_once=True)
        self.fill(segments, tokens)
        self._output, self._replay = graphs.record(self.compute)
        if self.recurrence is not None:
            self.recurrence.settle(segments)

    def run(self, segments: Sequence[Segment], tokens: Tensor | None) -> Forward:
        """Run the pass over other segments of the same shape."""
        if self.recurrence is not None:
            self.recurrence.prepare(segments, self.cache.length)
        self.fill(segments, tokens)
        self._replay()
        if self.recurrence is not None:
            self.recurrence.settle(segments)
        return self.result(segments)

    def result(self, segments: Sequence[Segment]) -> Forward:
        """Return what the last pass computed for its segments."""
        num_wanted = sum(len(segment.want) for segment in segments)
        features = self._output.features
        if features:
            index = upload(self.padded_indices(segments), torch.int64, self.decoder.device)
            features = {layer: found[index] for layer, found in features.items()}
        return Forward(self._output.logits[:num_wanted], features)

    @torch.inference_mode()
    def compute(self) -> Forward:
        """Run the decoder over the inputs; logits [T, V], those of the wanted tokens first."""
        i = self.inputs
        if self.own_layers is not None:
            walk, wanted = self.rows_seen(), i.wanted
            return self.own_layers.forward(
                i.ids, i.positions, i.rows, walk, self.cache, wanted, self.layers
            )
        inputs = i.ids, i.positions, self.attend, i.wanted, self.layers, self.recurrence
        is_padding = (i.rows == self.cache.spare_row)[:, None]

        def compute(
            x: Tensor, choice: Tensor, factors: Tensor | None, mlps: experts.ExpertMlps
        ) -> Tensor:
            choice = experts.without_padding(choice, is_padding)
            return self._compute_experts(x, choice, factors, mlps)

        return self.decoder.forward(*inputs, experts=compute)
