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


@dataclass(frozen=True, slots=True)
class Records:
    """The changes of tokens in a layer; any number of axes stands before those of the shapes.

    Attributes:
        inputs: [C] of the convolution; [0] without one.
        k: keys [key heads, key size].
        change: [n, value size] of n value heads.
        decay, factor: [n].
    """

    inputs: Tensor
    k: Tensor
    change: Tensor
    decay: Tensor
    factor: Tensor


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """The inputs of tokens in a layer that do not depend on the state: q and k
    [key heads, key size], v [n, value size], decay and factor [n], behind any further axes."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    factor: Tensor


class TokenMath:
    """The operations of recurrent layers that do not depend on the state, over any axes."""

    def __init__(self, layers: RecurrentLayers, device: torch.device) -> None:
        self.layers = r = layers
        heads = torch.arange(r.value_heads, device=device)
        share = max(r.value_heads // r.key_heads, 1)
        self.key_of = heads % r.key_heads if r.tiled else heads // share

    def read(self, convolved: Tensor, decays: Tensor, w: RecurrentWeights) -> TokenInputs:
        """Split convolved channels [.., C], and compute decays and factors of `decays`, as given to
        a `decoder.Recur`."""
        r, heads = self.layers, self.layers.value_heads
        assert w.decay_rate is not None
        channels = F.silu(convolved)
        keys, values = r.key_heads * r.key_size, r.value_heads * r.value_size
        if r.kind == "mamba":
            v, k, q = torch.split(channels, [values, keys, keys], dim=-1)
        else:
            q, k, v = torch.split(channels, [keys, keys, values], dim=-1)
        q, k = (each.view(*each.shape[:-1], r.key_heads, r.key_size) for each in (q, k))
        v = v.view(*v.shape[:-1], heads, r.value_size)
        step = torch.ones_like(w.decay_rate).expand(*v.shape[:-1])
        if w.decay_bias is not None:
            step = F.softplus(decays[..., :heads] + w.decay_bias)
        decay, factor = torch.exp(w.decay_rate * step), step
        if r.kind == "delta":
            q, k = kernels.unit(q) * r.key_size**-0.5, kernels.unit(k)
            factor = torch.sigmoid(decays[..., heads:])
        return TokenInputs(q, k, v, decay, factor)

    def key(self, k: Tensor, factor: Tensor) -> Tensor:
        """Return the key of each value head, [.., n, key size], which Mamba-2 scales."""
        key = k[..., self.key_of, :]
        return key if self.layers.kind == "delta" else key * factor[..., None]

    def record(self, inputs: Tensor, token: TokenInputs, change: Tensor) -> Tensor:
        """Return records [.., floats] of tokens with inputs [.., C] of the convolution."""
        kept = inputs[..., : _kept_inputs(self.layers)]
        parts = kept, token.k.flatten(-2), change.flatten(-2), token.decay, token.factor
        return torch.cat(parts, dim=-1)

    def input_record(self, inputs: Tensor) -> Tensor:
        """Return records of tokens of a short convolution, which have nothing else."""
        return F.pad(inputs, (0, self.layers.key_heads * self.layers.key_size))

    def split(self, records: Tensor) -> Records:
        """Split records [.., floats]."""
        r, n = self.layers, self.layers.value_heads
        sizes = [_kept_inputs(r), r.key_heads * r.key_size, n * r.value_size, n, n]
        inputs, k, change, decay, factor = torch.split(records, sizes, dim=-1)
        k = k.view(*k.shape[:-1], r.key_heads, r.key_size)
        return Records(inputs, k, change.view(*change.shape[:-1], n, r.value_size), decay, factor)


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
        assert config.recurrent is not None
        self.layers = config.recurrent
        self.math = TokenMath(config.recurrent, device)
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
            self.use(slot)
            known = self._known_tokens(segment)
            length = lengths[slot] - self.pending[slot]  # that the state has
            marks = self._marks(slot, length, length + self.pending[slot] + known)
            if segment.offset and self.pending[slot]:
                self._carry_over(slot, segment.offset)
            plan.add(SlotRun(segment, known, self.pending[slot], marks))
        return plan

    def use(self, slot: int) -> None:
        """Note that a pass uses a slot's state. Raises StateError if tokens that the state has
        already were not committed."""
        if self._known[slot]:
            raise StateError("tokens that a recurrent state has were not committed")
        self._blank[slot] = False

    def must_copy(self, slot: int, length: int) -> bool:
        """Return True if a pass over a slot with `length` committed tokens applies pending ones up
        to a border or beyond it, and so makes a copy."""
        return length // self.interval > (length - self.pending[slot]) // self.interval

    @torch.inference_mode()
    def apply_pending(self, slot: int, length: int) -> None:
        """Apply the pending tokens of a slot with `length` committed ones to its state, and make
        the copies that are due: what a pass does first, here for all layers at once.

        The bits are those of a pass, since each number is multiplied and added by itself."""
        r, layout, count = self.layers, self.layout, self.pending[slot]
        if not count:
            return
        length -= count
        marks = dict(self._marks(slot, length, length + count))
        half = self._half[slot]
        records = self.math.split(self.records[slot, half, :, :count])
        rows = self.histories[slot, half].view(len(layout.layers), r.taps - 1, r.channels)
        if r.taps > 1:
            rows = torch.cat((rows, records.inputs), dim=1)
        memory = self.data[slot, : layout.states]
        blocks = -(-r.value_size // LANES)
        states = memory.view(len(layout.layers), r.value_heads, blocks, r.key_size, LANES)
        decay = records.decay[..., None]
        key = self.math.key(records.k, records.factor)[..., None, :]
        padded = F.pad(records.change, (0, -r.value_size % LANES))
        change = padded.view(*padded.shape[:-1], blocks, LANES)
        for i in range(count):
            if r.value_heads:
                decayed = kernels.decay_state(states, decay[:, i])
                states.copy_(kernels.change_state(decayed, key[:, i], change[:, i]))
            if i + 1 in marks:
                marks[i + 1][: layout.states] = memory
                marks[i + 1][layout.states :] = rows[:, i + 1 : i + r.taps].flatten()
        self.histories[slot, half ^ 1] = rows[:, count:].flatten(1)
        self.settle(slot, 0)

    def _marks(self, slot: int, length: int, end: int) -> list[tuple[int, Tensor]]:
        """Return the copies (`SlotRun.marks`) of a pass that applies tokens `length` to `end`."""
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
        if count - known > MAX_NODES:  # a long text that was not marked as known is read in order
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
        start = states.data.data_ptr() + 4 * slot * states.layout.slot
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
        self.math = plan.states.math
        self.number = {layer: n for n, layer in enumerate(self.states.layout.layers)}

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
        r = self.shape
        rows, convolved = torch.cat((at.window, inputs[None])), inputs
        if w.conv_weight is not None:
            convolved = kernels.convolve(rows, w.conv_weight, w.conv_bias)
        if r.kind == "conv":
            return _Point(at.state, rows[1:]), convolved, self.math.input_record(inputs)
        token = self.math.read(convolved, decays, w)
        key, change = self.math.key(token.k, token.factor), token.v
        decayed = kernels.decay_state(at.state, token.decay)
        if r.kind == "delta":
            change = kernels.delta_change(decayed, key, token.v, token.factor)
        state = kernels.change_state(decayed, key, change)
        output = kernels.read_state(state, token.q[self.math.key_of])
        if w.skip is not None:
            output = output + w.skip[:, None] * token.v
        record = self.math.record(inputs, token, change)
        return _Point(state, rows[1:]), output.flatten(), record

    def _replay(self, at: _Point, record: Tensor) -> _Point:
        """Apply the change that a token made, from its record."""
        r, own = self.shape, self.math.split(record)
        window = torch.cat((at.window[1:], own.inputs[None])) if r.taps > 1 else at.window
        if r.kind == "conv":
            return _Point(at.state, window)
        decayed = kernels.decay_state(at.state, own.decay)
        key = self.math.key(own.k, own.factor)
        return _Point(kernels.change_state(decayed, key, own.change), window)

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
