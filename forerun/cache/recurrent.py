"""Recurrent states of slots, with the verbs of the KV cache, and the layers that use them in torch.

A slot's state stands behind its committed tokens but for the last few, which are pending: of each
there is a record, the small inputs of its change, and the next forward pass applies them first,
while it sweeps over the state anyway (`kernels/native/recurrent.h`). Commit keeps the records of
the accepted path, so it moves a few numbers and no state. A pass over known tokens applies them at
once.

A prefix can only be reused where its state was kept. States are copied at page borders every
`INTERVAL` tokens, and the least recently used copies go when their memory is full.

All of it is in the memory of the model's device. The host decides what is moved, without reading
any of it; the native kernels work on the same memory if the device is the CPU."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.devices import zeros
from forerun.errors import StateError
from forerun.kernels import reference as kernels
from forerun.kernels.native import CRecurrent, address
from forerun.models.config import ModelConfig
from forerun.models.families import RecurrentLayers
from forerun.models.parameters import RecurrentWeights

if TYPE_CHECKING:
    from forerun.cache.attention import Segment

LANES = 16  # columns of a state that lie side by side, see kernels/native/recurrent.h
MAX_NODES = 96  # tokens of a slot in a pass that are not known to stay, those pending included
INTERVAL = 256  # tokens between copies of a state
COPY_BYTES = 512 << 20  # of all copies
MIN_COPIES = 4
CPU = torch.device("cpu")


def _kept_inputs(r: RecurrentLayers) -> int:
    """Return the number of a convolution's inputs in a record; none without a convolution."""
    return r.channels if r.taps > 1 else 0


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Layout of a slot's memory, in floats: the states of all layers, then two halves.

    A half has, for each layer, the last inputs of the convolution before its first record, and
    MAX_NODES records. A copy is the states and those inputs.

    Attributes:
        layers: the recurrent layers.
        state, history, record: floats of a layer's state, of its inputs before the first record,
            and of a record.
    """

    layers: tuple[int, ...]
    state: int
    history: int
    record: int

    @classmethod
    def of(cls, config: ModelConfig) -> StateLayout:
        """Lay out the recurrent layers of a model, which must have some."""
        r = config.recurrent
        assert r is not None
        blocks = -(-r.value_size // LANES)
        state = r.value_heads * blocks * r.key_size * LANES
        record = _kept_inputs(r) + r.key_heads * r.key_size + r.value_heads * (r.value_size + 2)
        layers = tuple(i for i in range(config.layers) if r.layers[i])
        return cls(layers, state, (r.taps - 1) * r.channels, record)

    @property
    def state_at(self) -> dict[int, int]:
        """By layer, where its state begins among the states."""
        return {layer: self.state * n for n, layer in enumerate(self.layers)}

    @property
    def half_at(self) -> dict[int, int]:
        """By layer, where its part of a half begins."""
        return {layer: self.layer_half * n for n, layer in enumerate(self.layers)}

    @property
    def history_at(self) -> dict[int, int]:
        """By layer, where its inputs begin among those in a copy."""
        return {layer: self.history * n for n, layer in enumerate(self.layers)}

    @property
    def layer_half(self) -> int:
        """Floats of a layer in a half."""
        return self.history + MAX_NODES * self.record

    @property
    def states(self) -> int:
        """Floats of the states of all layers."""
        return self.state * len(self.layers)

    @property
    def half(self) -> int:
        """Floats of a half."""
        return self.layer_half * len(self.layers)

    @property
    def slot(self) -> int:
        """Floats of a slot."""
        return self.states + 2 * self.half

    @property
    def copy(self) -> int:
        """Floats of a copy of a state."""
        return (self.state + self.history) * len(self.layers)

    @property
    def most_copies(self) -> int:
        """The number of copies that are kept."""
        return max(COPY_BYTES // (4 * max(self.copy, 1)), MIN_COPIES)


class RecurrentStates:
    """The recurrent states of all slots of a model.

    Attributes:
        data: the memory, float32 [slots, floats of a slot].
        histories: inputs of convolutions in both halves, [slots, 2, layers, floats].
        records: the records behind them, [slots, 2, layers, MAX_NODES, floats of a record].
        pending: by slot, the number of committed tokens that its state does not have yet.
    """

    def __init__(
        self, config: ModelConfig, slots: int, page: int, device: torch.device = CPU
    ) -> None:
        """Allocate the memory of all slots on a device. Raises CapacityError."""
        self.layout = layout = StateLayout.of(config)
        self.page = page
        self.interval = page * max(1, INTERVAL // page)
        what = f"the recurrent states of {slots} requests"
        self.data = zeros((slots, layout.slot), torch.float32, device, what, "set a lower max_rows")
        by_layer = (slots, 2, len(layout.layers))
        halves = self.data[:, layout.states :].view(*by_layer, layout.layer_half)
        self.histories = halves[..., : layout.history]
        records = halves[..., layout.history :]
        self.records = records.view(*by_layer, MAX_NODES, layout.record)
        self.pending = [0] * slots
        self._half = [0] * slots  # the half with the pending records and those of the last pass
        self._known = [0] * slots  # tokens that the last pass applied, to be committed
        self._blank = [True] * slots  # False once a pass has used the state
        self.most_copies = layout.most_copies
        self._copies: OrderedDict[bytes, Tensor] = OrderedDict()  # by digest of a prefix
        self._unnamed: list[dict[int, Tensor]] = [{} for _ in range(slots)]  # by length
        self._free: list[Tensor] = []

    @staticmethod
    def needed_bytes(config: ModelConfig, slots: int, device: torch.device) -> int:
        """Return the bytes that the states of a model take on a device.

        In main memory most records are never written, so the system does not provide them, and
        copies are left out; a GPU must have all of it."""
        if config.recurrent is None:
            return 0
        layout = StateLayout.of(config)
        if device.type == "cpu":
            return 4 * layout.copy * slots
        return 4 * (layout.slot * slots + layout.copy * layout.most_copies)

    @property
    def copy_bytes(self) -> int:
        """Bytes that copies may take yet."""
        count = len(self._copies) + len(self._free) + sum(map(len, self._unnamed))
        return 4 * self.layout.copy * (self.most_copies - count)

    # Slots

    def open(self, slot: int, chain: Sequence[bytes]) -> int:
        """Start a slot behind the longest prefix whose state is known; returns its pages.

        chain: digests of the pages that the slot shares."""
        for count in range(len(chain), 0, -1):
            copy = self._copies.get(chain[count - 1])
            if copy is not None:
                self._copies.move_to_end(chain[count - 1])
                self._start(slot, copy)
                return count
        self._start(slot, None)
        return 0

    def _start(self, slot: int, copy: Tensor | None) -> None:
        self.pending[slot] = self._half[slot] = self._known[slot] = 0
        if copy is None and self._blank[slot]:
            return
        self._blank[slot] = copy is None
        state, history = self.data[slot, : self.layout.states], self.histories[slot, 0]
        if copy is None:
            state.zero_()
            history.zero_()
        else:
            state.copy_(copy[: len(state)])
            history.copy_(copy[len(state) :].view(history.shape))

    def name_copies(self, slot: int, chain: Sequence[bytes]) -> None:
        """Keep the copies of a slot's state whose prefixes are sealed by now.

        chain: digests of the slot's sealed pages."""
        for length in sorted(self._unnamed[slot]):
            pages = length // self.page
            if pages > len(chain):
                break
            copy, digest = self._unnamed[slot].pop(length), chain[pages - 1]
            if digest in self._copies:
                self._free.append(copy)
                self._copies.move_to_end(digest)
            else:
                self._copies[digest] = copy

    def close(self, slot: int) -> None:
        """Forget the slot's state, and the copies of it that have no name."""
        self._free += self._unnamed[slot].values()
        self._unnamed[slot].clear()
        self._start(slot, None)

    def rewind(self, slot: int, count: int) -> bool:
        """Take back the last `count` committed tokens; returns False if the state has them."""
        if count > self.pending[slot]:
            return False
        self.pending[slot] -= count
        return True

    def _take_copy(self, slot: int) -> Tensor | None:
        """Return memory for a copy: free, new, or that of the copy that is missed least; None if
        other slots have all."""
        if self._free:
            return self._free.pop()
        own = self._unnamed[slot]
        if len(self._copies) + sum(map(len, self._unnamed)) < self.most_copies:
            return torch.empty(self.layout.copy, dtype=torch.float32, device=self.data.device)
        if self._copies:
            return self._copies.popitem(last=False)[1]
        return own.pop(min(own)) if own else None

    # Forward passes

    def plan(self, segments: Sequence[Segment], lengths: Sequence[int]) -> RecurrentPass:
        """Prepare a forward pass over segments, at most one a slot.

        lengths: by slot, its committed tokens. Raises StateError for a segment that cannot be
        processed: tokens that the state has already were not committed, or too many nodes."""
        plan = RecurrentPass(self)
        for segment in segments:
            slot = segment.slot
            if self._known[slot]:
                raise StateError("tokens that a recurrent state has were not committed")
            known = self._known_tokens(segment)
            self._blank[slot] = False
            length = lengths[slot] - self.pending[slot]  # that the state has
            marks = self._marks(slot, length, length + self.pending[slot] + known)
            if segment.offset and self.pending[slot]:
                self._carry_over(slot, segment.offset)
            plan.add(SlotRun(segment, known, self.pending[slot], marks))
        return plan

    def _marks(self, slot: int, length: int, end: int) -> list[tuple[int, Tensor]]:
        """Return the copies that a pass makes which applies tokens `length` to `end` to a slot's
        state, see `SlotRun`."""
        unnamed = self._unnamed[slot]
        first = (length // self.interval + 1) * self.interval
        for border in range(first, end + 1, self.interval):
            if border not in unnamed and (copy := self._take_copy(slot)) is not None:
                unnamed[border] = copy
        return [(at - length, unnamed[at]) for at in sorted(unnamed) if length < at <= end]

    def _carry_over(self, slot: int, count: int) -> None:
        """Copy the records of nodes that stand behind pending tokens to the half of the next pass,
        as parents of its nodes."""
        half, pending = self._half[slot], self.pending[slot]
        old, new = self.records[slot, half], self.records[slot, half ^ 1]
        new[:, :count] = old[:, pending : pending + count]

    def _known_tokens(self, segment: Segment) -> int:
        """Return how many tokens of a segment the pass applies to the state at once."""
        count = segment.offset + len(segment.tokens)
        known = segment.known
        if count - known > MAX_NODES:  # a long text that nobody called known is read in order
            known = count - MAX_NODES
        if known and (segment.offset or segment.parents[:known] != list(range(-1, known - 1))):
            raise StateError(
                f"a pass through recurrent layers has at most {MAX_NODES} nodes a slot"
            )
        return known

    def commit(self, slot: int, path: Sequence[int]) -> None:
        """Keep the records at offsets `path` past the committed length, in that order."""
        known = self._known[slot]
        if list(path[:known]) != list(range(known)):
            raise StateError("known tokens must be committed")
        kept = [node - known for node in path[known:]]
        at = slot, self._half[slot], slice(None)
        for target, source in enumerate(kept):  # in increasing order: none is read once overwritten
            if target != source:
                self.records[*at, target] = self.records[*at, source]
        self.pending[slot] += len(kept)
        self._known[slot] = 0

    def settle(self, slot: int, known: int) -> None:
        """Note that a pass has applied a slot's pending and `known` tokens."""
        if self.pending[slot] + known:
            self._half[slot] ^= 1
        self.pending[slot], self._known[slot] = 0, known

    def half_of(self, slot: int, following: bool) -> int:
        """Return the half with a slot's pending records, or the one that a pass writes if it
        applies something."""
        return self._half[slot] ^ int(following)

    def address_of(self, slot: int) -> int:
        """Return the address of a slot's memory."""
        return self.data.data_ptr() + 4 * slot * self.layout.slot


@dataclass(frozen=True, slots=True)
class SlotRun:
    """The tokens of one slot in a forward pass.

    Attributes:
        known: how many of the first tokens are applied to the state at once.
        pending: how many committed tokens are applied before them.
        marks: copies to make, as (behind so many applied tokens, to this memory).
    """

    segment: Segment
    known: int
    pending: int
    marks: Sequence[tuple[int, Tensor]]

    @property
    def applies(self) -> bool:
        """True if the state changes."""
        return self.pending + self.known > 0


class RecurrentPass:
    """The runs of one forward pass, also as the C code reads them."""

    def __init__(self, states: RecurrentStates) -> None:
        self.states = states
        self.runs: list[SlotRun] = []
        names = ("first", "count", "known", "offset", "pending", "parents_at", "parents", "marks")
        self.ints = {name: array("i") for name in names}
        self.marks_at = array("i", [0])
        self.pointers = {name: array("Q") for name in ("state", "old_half", "new_half", "mark_to")}
        self._tokens = 0

    def add(self, run: SlotRun) -> None:
        """Add a run."""
        states, segment, slot = self.states, run.segment, run.segment.slot
        values = {
            "first": self._tokens,
            "count": len(segment.tokens),
            "known": run.known,
            "offset": segment.offset,
            "pending": run.pending,
            "parents_at": len(self.ints["parents"]),
        }
        for name, value in values.items():
            self.ints[name].append(value)
        self.ints["parents"].extend(segment.parents)
        start = states.address_of(slot)
        self.pointers["state"].append(start)
        for name, following in (("old_half", False), ("new_half", run.applies)):
            at = states.layout.states + states.half_of(slot, following) * states.layout.half
            self.pointers[name].append(start + 4 * at)
        for applied, copy in run.marks:
            self.ints["marks"].append(applied)
            self.pointers["mark_to"].append(copy.data_ptr())
        self.marks_at.append(len(self.ints["marks"]))
        self.runs.append(run)
        self._tokens += len(segment.tokens)

    def structure(self) -> CRecurrent:
        """Build the C structure, which points into this object."""
        fields = {name: address(values) for name, values in self.ints.items()}
        fields |= {name: address(values) for name, values in self.pointers.items()}
        fields["marks_at"] = address(self.marks_at)
        return CRecurrent(runs=len(self.runs), history_at=self.states.layout.states, **fields)

    def settle(self) -> None:
        """Note that the pass was run."""
        for run in self.runs:
            self.states.settle(run.segment.slot, run.known)


# ---------------------------------------------------------------- the reference in plain torch


@dataclass(frozen=True, slots=True)
class _Point:
    """The state of a layer behind a token.

    Attributes:
        state: [n, key size, value size] of n value heads.
        window: the last inputs of the convolution, [taps - 1, C], the oldest first.
    """

    state: Tensor
    window: Tensor


class Recurrence:
    """The recurrent layers of one forward pass in plain torch; a `decoder.Recur`.

    It is the reference for the native kernels. Tokens are computed one after the other, in float32,
    with the sequential form of the recurrence. The pass reads and writes what it does on the native
    kernels: it applies pending and known tokens to the state, and leaves a record of each further
    node."""

    def __init__(self, plan: RecurrentPass, config: ModelConfig) -> None:
        r = config.recurrent
        assert r is not None
        self.plan, self.states, self.shape = plan, plan.states, r
        self.number = {layer: n for n, layer in enumerate(self.states.layout.layers)}
        heads = torch.arange(r.value_heads, device=self.states.data.device)
        share = max(r.value_heads // r.key_heads, 1)
        self.key_of = heads % r.key_heads if r.tiled else heads // share

    def __call__(self, layer: int, inputs: Tensor, decays: Tensor, w: RecurrentWeights) -> Tensor:
        """Process the tokens of a pass in one layer.

        Args:
            inputs: [T, C] float32, of the convolution.
            decays: what decays depend on, [T, n] float32, behind it beta for the delta rule; [T, 0]
                for a short convolution and for lightning attention.

        Returns:
            the output before its gate and norm, float32 [T, inner].
        """
        outputs: list[Tensor] = []
        for run in self.plan.runs:
            own = slice(len(outputs), len(outputs) + len(run.segment.tokens))
            outputs += self._run(run, layer, inputs[own], decays[own], w)
        return torch.stack(outputs)

    def _run(
        self, run: SlotRun, layer: int, inputs: Tensor, decays: Tensor, w: RecurrentWeights
    ) -> list[Tensor]:
        """Process the tokens of one slot; return the output of each, [inner]."""
        outputs = list[Tensor]()
        history, records = self._half(run, layer, following=False)
        new_history, new_records = self._half(run, layer, following=run.applies)
        memory = self.states.data[run.segment.slot]
        at = _Point(self._read_state(memory, layer), history.clone())
        for i in range(run.pending):
            at = self._replay(at, records[i])
            self._copy(run, layer, i + 1, at)
        for i in range(run.known):
            at, output, _ = self._advance(at, inputs[i], decays[i], w)
            self._copy(run, layer, run.pending + i + 1, at)
            outputs.append(output)
        if run.applies:
            self._write_state(memory, layer, at)
            new_history[:] = at.window
        nodes: list[_Point] = []
        for node, parent in list(enumerate(run.segment.parents))[run.known :]:
            before = nodes[parent - run.known] if parent >= run.known else at
            record, i = new_records[node - run.known], node - run.segment.offset
            if i < 0:  # a node of an earlier pass
                nodes.append(self._replay(before, record))
                continue
            after, output, record[:] = self._advance(before, inputs[i], decays[i], w)
            nodes.append(after)
            outputs.append(output)
        return outputs

    # One token

    def _advance(
        self, at: _Point, inputs: Tensor, decays: Tensor, w: RecurrentWeights
    ) -> tuple[_Point, Tensor, Tensor]:
        """Read a token, of which the convolution's inputs [C] are given.

        Returns the point behind it, its output [inner] and its record."""
        r, heads = self.shape, self.shape.value_heads
        rows, convolved = torch.cat((at.window, inputs[None])), inputs
        if w.conv_weight is not None:
            convolved = kernels.convolve(rows, w.conv_weight, w.conv_bias)
        if r.kind == "conv":
            record = F.pad(inputs, (0, r.key_heads * r.key_size))
            return _Point(at.state, rows[1:]), convolved, record
        assert w.decay_rate is not None
        q, k, v = self._heads(F.silu(convolved))
        step = torch.ones_like(w.decay_rate)
        if w.decay_bias is not None:
            step = F.softplus(decays[:heads] + w.decay_bias)
        decay, factor = torch.exp(w.decay_rate * step), step
        if r.kind == "delta":
            q, k = kernels.unit(q) * r.key_size**-0.5, kernels.unit(k)
            factor = torch.sigmoid(decays[heads:])
        key = self._key(k, factor)
        change = v
        if r.kind == "delta":
            change = kernels.delta_change(at.state, key, v, decay, factor)
        state = kernels.update_state(at.state, key, change, decay)
        output = kernels.read_state(state, q[self.key_of])
        if w.skip is not None:
            output = output + w.skip[:, None] * v
        kept = inputs[: _kept_inputs(r)]
        record = torch.cat((kept, k.flatten(), change.flatten(), decay, factor))
        return _Point(state, rows[1:]), output.flatten(), record

    def _replay(self, at: _Point, record: Tensor) -> _Point:
        """Apply the change that a token made, from its record."""
        r, n = self.shape, self.shape.value_heads
        sizes = [_kept_inputs(r), r.key_heads * r.key_size, n * r.value_size, n, n]
        inputs, k, change, decay, factor = torch.split(record, sizes)
        window = torch.cat((at.window[1:], inputs[None])) if r.taps > 1 else at.window
        if r.kind == "conv":
            return _Point(at.state, window)
        key = self._key(k.view(-1, r.key_size), factor)
        change = change.view(-1, r.value_size)
        return _Point(kernels.update_state(at.state, key, change, decay), window)

    def _heads(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split channels [C] into queries and keys [key heads, key size] and values [n, size]."""
        r = self.shape
        keys, values = r.key_heads * r.key_size, r.value_heads * r.value_size
        if r.kind == "mamba":
            v, k, q = torch.split(convolved, [values, keys, keys])
        else:
            q, k, v = torch.split(convolved, [keys, keys, values])
        return q.view(-1, r.key_size), k.view(-1, r.key_size), v.view(-1, r.value_size)

    def _key(self, k: Tensor, factor: Tensor) -> Tensor:
        """Return the key of each value head, [n, key size], which Mamba-2 scales."""
        key = k[self.key_of]
        return key if self.shape.kind == "delta" else key * factor[:, None]

    # Memory, in the layout of the native kernels

    def _half(self, run: SlotRun, layer: int, following: bool) -> tuple[Tensor, Tensor]:
        """Return the inputs of the convolution before the first record of a half, and its records.

        following: of the half that the pass writes, not of the one with pending records."""
        r, states, slot = self.shape, self.states, run.segment.slot
        at = slot, states.half_of(slot, following), self.number[layer]
        return states.histories[at].view(r.taps - 1, r.channels), states.records[at]

    def _blocks(self, memory: Tensor, layer: int) -> Tensor:
        """Return a view of a state in memory, [n, blocks of columns, key size, LANES]."""
        r, size = self.shape, self.states.layout.state
        at, blocks = self.number[layer] * size, -(-r.value_size // LANES)
        return memory[at : at + size].view(r.value_heads, blocks, r.key_size, LANES)

    def _read_state(self, memory: Tensor, layer: int) -> Tensor:
        blocks = self._blocks(memory, layer)
        return blocks.transpose(1, 2).flatten(2)[..., : self.shape.value_size]

    def _write_state(self, memory: Tensor, layer: int, at: _Point) -> None:
        blocks = self._blocks(memory, layer)
        padded = F.pad(at.state, (0, -at.state.shape[2] % LANES))
        blocks[:] = padded.view(*blocks.transpose(1, 2).shape).transpose(1, 2)

    def _copy(self, run: SlotRun, layer: int, applied: int, at: _Point) -> None:
        """Write the copies of the state that are asked for behind `applied` tokens."""
        layout = self.states.layout
        for count, copy in run.marks:
            if count == applied:
                self._write_state(copy, layer, at)
                first = layout.states + self.number[layer] * layout.history
                copy[first : first + at.window.numel()] = at.window.flatten()
