"""Recurrent layers in recorded passes: the numbers of `cache.recurrent.Recurrence`, computed by
operations of fixed shapes over all segments at once.

Whatever differs from pass to pass is an input at a fixed address: slots, the halves with pending
records, parents, and which inputs the convolution of each token reads. The state stays in the same
memory, so recorded and unrecorded passes continue from each other.

A recording goes through its tokens in order. It has a fixed number of steps, so a pass over single
tokens has a recording of its own; products and attention around it are the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.cache.attention import Segment
from forerun.cache.recurrent import LANES, RecurrentStates
from forerun.kernels import reference as kernels
from forerun.models.families import RecurrentLayers
from forerun.models.parameters import RecurrentWeights

if TYPE_CHECKING:
    from forerun.runtime.padded_pass import PassShape

MOST_PENDING = 32  # that a recording applies; more of them are applied before it
POINT_BYTES = 512 << 20  # of the states of all nodes of a tree, in one layer


class Steps(NamedTuple):
    """Sizes of the loops of a recording.

    Attributes:
        most: the largest number of pending tokens, and of tokens of a segment.
        is_tree: a token may follow any earlier one, not only the one before it.
    """

    most: int
    is_tree: bool


def has_kernel(states: RecurrentStates) -> bool:
    """Return True if `kernels/triton` has kernels for the layers: short convolutions run on
    torch."""
    return states.layers.kind != "conv"


def steps_of(
    segments: Sequence[Segment],
    shape: PassShape,
    states: RecurrentStates,
    uses_kernel: bool = False,
) -> Steps | None:
    """Return the steps of a recording of these segments, None if the pass runs unrecorded.

    `uses_kernel`: that of `kernels/triton` computes them, whose loops are as long as they have to
    be in each pass.

    Unrecorded are nodes behind those of earlier passes, as recurrent draft models have them: their
    states have to be computed from records first. So are trees whose states need too much memory.
    Known tokens are recorded like any others, and are pending behind the pass."""
    if any(segment.offset for segment in segments):
        return None
    most = MOST_PENDING if uses_kernel else max(len(segment.tokens) for segment in segments)
    pending = max(states.pending[segment.slot] for segment in segments)
    steps = Steps(
        1 << (max(most, min(pending, MOST_PENDING)) - 1).bit_length(),
        any(s.parents != list(range(-1, len(s.tokens) - 1)) for s in segments),
    )
    points = 4 * states.layout.state * shape.segments * min(steps.most, shape.tokens)
    return None if steps.is_tree and points > POINT_BYTES else steps


@dataclass(frozen=True, slots=True)
class RecurrentInputs:
    """Inputs of a pass over R segments of N tokens, int64, views of one tensor. The inputs of a
    convolution with W + 1 taps are numbered: those of the segment's tokens from 0, the W before the
    first pending token from N, those of pending tokens behind them.

    Attributes:
        source: [R], each segment; of padding the first one, whose numbers it repeats.
        slots, old_halves, new_halves: [R], see `RecurrentStates`.
        counts: [R], tokens; 0 of padding.
        pending: [R], pending tokens.
        parents: [R, N], nodes from 1; 0 is the state behind the pending tokens.
        windows: [R, N, W], what the convolution of a token reads before its own, the oldest first.
        histories: [R, W], what it would read behind the pending tokens.
    """

    source: Tensor
    slots: Tensor
    old_halves: Tensor
    new_halves: Tensor
    counts: Tensor
    pending: Tensor
    parents: Tensor
    windows: Tensor
    histories: Tensor


def _shapes(shape: PassShape, window: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of each of `RecurrentInputs`, for convolutions over `window` earlier
    inputs."""
    single = ("source", "slots", "old_halves", "new_halves", "counts", "pending")
    return {
        **dict.fromkeys(single, (shape.segments,)),
        "parents": (shape.segments, shape.tokens),
        "windows": (shape.segments, shape.tokens, window),
        "histories": (shape.segments, window),
    }


class RecordedRecurrence:
    """The recurrent layers of a recorded pass; a `decoder.Recur`.

    Attributes:
        has_kernel: `kernels/triton` computes them, not torch.
        size: how many int64 numbers are its inputs.
    """

    def __init__(
        self, states: RecurrentStates, shape: PassShape, steps: Steps, has_kernel: bool = False
    ) -> None:
        self.states, self.shape, self.steps, self.has_kernel = states, shape, steps, has_kernel
        self.layers: RecurrentLayers = states.layers
        self.math = states.math
        self.number = {layer: n for n, layer in enumerate(states.layout.layers)}
        self.window = self.layers.taps - 1
        self._shapes = _shapes(shape, self.window)
        self.size = sum(map(math.prod, self._shapes.values()))

    def bind(self, numbers: Tensor) -> None:
        """Set where the inputs are, int64 [size]."""
        self.inputs = RecurrentInputs(**self._views(numbers))
        self._segment = torch.arange(self.shape.segments, device=numbers.device)[:, None]

    def _views(self, numbers: Any) -> dict[str, Any]:
        """Return the inputs by name, views of an array or a tensor [size]."""
        views, at = {}, 0
        for name, shape in self._shapes.items():
            end = at + math.prod(shape)
            views[name] = numbers[at:end].reshape(shape)
            at = end
        return views

    # The host's part

    def prepare(
        self, segments: Sequence[Segment], lengths: Sequence[int], at_once: bool = False
    ) -> None:
        """Do what a recording cannot: make copies, and apply more pending tokens than it does.

        Args:
            lengths: by slot, its committed tokens.
            at_once: apply all pending tokens. A pass that is being recorded runs several times, and
                must not apply them each time.
        """
        states = self.states
        for segment in segments:
            slot = segment.slot
            states.use(slot)
            is_due = states.must_copy(slot, lengths[slot])
            if at_once or is_due or states.pending[slot] > self.steps.most:
                states.apply_pending(slot, lengths[slot])

    def fill(self, numbers: np.ndarray, segments: Sequence[Segment]) -> None:
        """Stage the inputs of segments, int64 [size] in main memory."""
        numbers[:] = 0
        views, states, tokens = self._views(numbers), self.states, self.shape.tokens
        for r, segment in enumerate(segments):
            slot, count = segment.slot, len(segment.tokens)
            pending = states.pending[slot]
            history = list(range(tokens + pending, tokens + pending + self.window))
            own: dict[str, Any] = {
                "source": r,
                "slots": slot,
                "old_halves": states.half_of(slot, following=False),
                "new_halves": states.half_of(slot, following=pending > 0),
                "counts": count,
                "pending": pending,
                "parents": np.arange(tokens),
                "histories": history,
            }
            for name, value in own.items():
                views[name][r] = value
            views["parents"][r, :count] = np.asarray(segment.parents) + 1
            if self.window:
                views["windows"][r, :count] = self._windows(segment.parents, history)
        for name, view in views.items():
            if name != "counts":
                view[len(segments) :] = view[0]

    def _windows(self, parents: Sequence[int], history: list[int]) -> list[list[int]]:
        """Return what the convolution of each node reads before it."""
        behind: list[list[int]] = []
        found = []
        for node, parent in enumerate(parents):
            window = behind[parent] if parent >= 0 else history
            found.append(window)
            behind.append([*window[1:], node])
        return found

    def settle(self, segments: Sequence[Segment]) -> None:
        """Note that the pass was run."""
        for segment in segments:
            self.states.settle(segment.slot, 0)

    # The device's part, which is recorded

    def __call__(self, layer: int, inputs: Tensor, decays: Tensor, w: RecurrentWeights) -> Tensor:
        """Process the tokens of a pass in one layer, as `Recurrence` does; padding too."""
        if self.has_kernel:
            return self._by_kernel(self.number[layer], inputs, decays, w)
        i, shape, steps, number = self.inputs, self.shape, self.steps, self.number[layer]
        inputs, decays = (
            each.view(shape.segments, shape.tokens, -1)[i.source] for each in (inputs, decays)
        )
        old, new = (i.slots, i.old_halves), (i.slots, i.new_halves)
        records = self.states.records[:, :, number]
        pending = self.math.split(records[:, :, : steps.most][old])
        convolved = self._convolve(number, inputs, pending.inputs, w)
        count = min(steps.most, shape.tokens)
        if self.layers.kind == "conv":
            records[:, :, :count][new] = self.math.input_record(inputs[:, :count])
            return convolved.flatten(0, 1)
        token = self.math.read(convolved, decays, w)
        state = self._read_states(number)
        # a record that is not there multiplies by 1 and adds 0
        is_missing = torch.arange(steps.most, device=inputs.device) >= i.pending[:, None]
        decay = pending.decay.masked_fill(is_missing[..., None], 1.0)
        key = self.math.key(pending.k, pending.factor)
        key = key.masked_fill(is_missing[..., None, None], 0.0)
        change = pending.change.masked_fill(is_missing[..., None, None], 0.0)
        for n in range(steps.most):
            decayed = kernels.decay_state(state, decay[:, n])
            state = kernels.change_state(decayed, key[:, n], change[:, n])
        self._write_states(number, state)
        key, query = self.math.key(token.k, token.factor), token.q[..., self.math.key_of, :]
        changes, outputs = [], []
        if steps.is_tree:
            points = state.new_empty((count + 1, *state.shape))
            points[0] = state
        for n in range(count):
            if steps.is_tree:
                state = points[i.parents[:, n], i.source]
            decayed = kernels.decay_state(state, token.decay[:, n])
            change = token.v[:, n]
            if self.layers.kind == "delta":
                change = kernels.delta_change(decayed, key[:, n], change, token.factor[:, n])
            state = kernels.change_state(decayed, key[:, n], change)
            changes.append(change)
            outputs.append(kernels.read_state(state, query[:, n]))
            if steps.is_tree:
                points[n + 1] = state
        padding = (0, 0, 0, 0, 0, shape.tokens - count)
        output, change = (F.pad(torch.stack(each, 1), padding) for each in (outputs, changes))
        if w.skip is not None:
            output = output + w.skip[:, None] * token.v
        records[:, :, :count][new] = self.math.record(inputs, token, change)[:, :count]
        return output.flatten(0, 1).flatten(1)

    def _by_kernel(
        self, number: int, inputs: Tensor, decays: Tensor, w: RecurrentWeights
    ) -> Tensor:
        """Process the tokens by the kernels of `kernels/triton`."""
        from forerun.kernels.triton.recurrent import Heads, KernelWeights, Memory, Runs, recur

        r, layout, i = self.layers, self.states.layout, self.inputs
        memory = Memory(
            self.states.data,
            state_at=number * layout.state,
            half_at=layout.states + number * layout.layer_half,
            half=layout.half,
            records_at=layout.history,
            record=layout.record,
        )
        heads = Heads(r.kind, r.taps, r.key_heads, r.key_size, r.value_heads, r.value_size, r.tiled)
        assert w.decay_rate is not None
        weights = KernelWeights(w.conv_weight, w.conv_bias, w.decay_bias, w.decay_rate, w.skip)
        runs = Runs(**{name: getattr(i, name) for name in Runs.__slots__})
        return recur(inputs, decays, weights, heads, memory, runs, self.steps.is_tree)

    def _convolve(
        self, number: int, inputs: Tensor, pending: Tensor, w: RecurrentWeights
    ) -> Tensor:
        """Convolve inputs [R, N, C] behind those of pending tokens [R, P, C], and keep those that
        the next pass begins with."""
        if w.conv_weight is None:
            return inputs
        i, shape = self.inputs, self.shape
        histories = self.states.histories[:, :, number]
        before = histories[i.slots, i.old_halves].view(shape.segments, self.window, -1)
        rows = torch.cat((inputs, before, pending), dim=1)
        histories[i.slots, i.new_halves] = rows[self._segment, i.histories].flatten(1)
        seen = rows[self._segment, i.windows.flatten(1)]
        seen = seen.view(shape.segments, shape.tokens, self.window, -1)
        windows = torch.cat((seen, inputs[:, :, None]), dim=2)
        return kernels.convolve(windows, w.conv_weight, w.conv_bias)

    def _of_layer(self, number: int) -> Tensor:
        """Return a view of the states of a layer, [slots, floats]."""
        size = self.states.layout.state
        return self.states.data[:, number * size : (number + 1) * size]

    def _read_states(self, number: int) -> Tensor:
        """Return the states of a layer, [R, n, key size, value size]."""
        r = self.layers
        stored = self._of_layer(number).index_select(0, self.inputs.slots)
        blocks = stored.view(len(stored), r.value_heads, -1, r.key_size, LANES)
        return blocks.transpose(2, 3).flatten(3)[..., : r.value_size]

    def _write_states(self, number: int, states: Tensor) -> None:
        padded = F.pad(states, (0, -states.shape[-1] % LANES))
        blocks = padded.view(*padded.shape[:-1], -1, LANES).transpose(2, 3)
        self._of_layer(number).index_copy_(0, self.inputs.slots, blocks.flatten(1))
