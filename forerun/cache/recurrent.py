"""Recurrent states of slots, with the verbs of the KV cache.

A slot's state stands behind its committed tokens but for the last few, which are pending: of each
there is a record, the small inputs of its change, and the next forward pass applies them first,
while it sweeps over the state anyway (`kernels/native/recurrent.h`). Commit keeps the records of
the accepted path, so it moves a few numbers and no state. A pass over known tokens applies them at
once.

A prefix can only be reused where its state was kept. States are copied at page borders every
`INTERVAL` tokens, and the least recently used copies go when their memory is full."""

from __future__ import annotations

import mmap
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from forerun.errors import CapacityError, StateError
from forerun.kernels.native import CRecurrent, address
from forerun.models.config import ModelConfig

if TYPE_CHECKING:
    from forerun.cache.attention import Segment

LANES = 16  # columns of a state that lie side by side, see kernels/native/recurrent.h
MAX_NODES = 96  # tokens of a slot in a pass that are not known to stay, those pending included
INTERVAL = 256  # tokens between copies of a state
COPY_BYTES = 512 << 20  # of all copies
MIN_COPIES = 4


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Layout of a slot's memory, in floats: the states of all layers, then two halves.

    A half has, for each layer, the last inputs of the convolution before its first record, and
    MAX_NODES records. A copy is the states and those inputs.

    Attributes:
        state_at, half_at, history_at: by layer, where its part begins: among the states, in a half,
            and among the inputs in a copy.
        records: by layer, (where its records begin in a half, floats of a record).
        states, half, histories: sizes of the three parts.
    """

    state_at: dict[int, int]
    half_at: dict[int, int]
    history_at: dict[int, int]
    records: dict[int, tuple[int, int]]
    states: int
    half: int
    histories: int

    @classmethod
    def of(cls, config: ModelConfig) -> StateLayout:
        """Lay out the recurrent layers of a model, which must have some."""
        r = config.recurrent
        assert r is not None
        blocks = -(-r.value_size // LANES)
        state = r.value_heads * blocks * r.key_size * LANES
        record = r.channels + r.key_heads * r.key_size + r.value_heads * (r.value_size + 2)
        history = (r.taps - 1) * r.channels
        layers = [i for i in range(config.layers) if r.layers[i]]
        each = history + MAX_NODES * record
        return cls(
            state_at={layer: state * n for n, layer in enumerate(layers)},
            half_at={layer: each * n for n, layer in enumerate(layers)},
            history_at={layer: history * n for n, layer in enumerate(layers)},
            records={layer: (each * n + history, record) for n, layer in enumerate(layers)},
            states=state * len(layers),
            half=each * len(layers),
            histories=history * len(layers),
        )

    @property
    def slot(self) -> int:
        """Floats of a slot."""
        return self.states + 2 * self.half

    @property
    def copy(self) -> int:
        """Floats of a copy of a state."""
        return self.states + self.histories


class RecurrentStates:
    """The recurrent states of all slots of a model.

    Attributes:
        pending: by slot, the number of committed tokens that its state does not have yet.
    """

    def __init__(self, config: ModelConfig, slots: int, page: int) -> None:
        """Reserve memory, which the system provides when it is written to. Raises CapacityError."""
        self.layout = StateLayout.of(config)
        self.page = page
        self.interval = page * max(1, INTERVAL // page)
        size = self.layout.slot
        try:
            memory = mmap.mmap(-1, 4 * max(size, 1) * slots)
        except OSError as error:
            raise CapacityError(
                f"there is no memory for the recurrent states of {slots} requests ({error}):"
                " set a lower max_rows"
            ) from None
        self.data = np.frombuffer(memory, np.float32).reshape(slots, size)
        self.pending = [0] * slots
        self._half = [0] * slots  # the half with the pending records and those of the last pass
        self._known = [0] * slots  # tokens that the last pass applied, to be committed
        copies = COPY_BYTES // (4 * max(self.layout.copy, 1))
        self.most_copies = max(copies, MIN_COPIES)
        self._copies: OrderedDict[bytes, np.ndarray] = OrderedDict()  # by digest of a prefix
        self._unnamed: list[dict[int, np.ndarray]] = [{} for _ in range(slots)]  # by length
        self._free: list[np.ndarray] = []

    @property
    def slot_bytes(self) -> int:
        """Bytes of the state of a slot, without the records of drafts."""
        return 4 * self.layout.copy

    @property
    def node_bytes(self) -> int:
        """Bytes that each node of a draft takes until the next pass."""
        return 4 * sum(size for _, size in self.layout.records.values())

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

    def _start(self, slot: int, copy: np.ndarray | None) -> None:
        layout, data = self.layout, self.data[slot]
        self.pending[slot] = self._half[slot] = self._known[slot] = 0
        data[: layout.states] = 0 if copy is None else copy[: layout.states]
        for layer, at in layout.half_at.items():
            start = layout.states + at
            size = layout.records[layer][0] - at
            first = layout.states + layout.history_at[layer]
            data[start : start + size] = 0 if copy is None else copy[first : first + size]

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
        """Forget copies of the slot's state that have no name."""
        self._free += self._unnamed[slot].values()
        self._unnamed[slot].clear()

    def rewind(self, slot: int, count: int) -> bool:
        """Take back the last `count` committed tokens; returns False if the state has them."""
        if count > self.pending[slot]:
            return False
        self.pending[slot] -= count
        return True

    def _take_copy(self) -> np.ndarray:
        if self._free:
            return self._free.pop()
        unnamed = sum(map(len, self._unnamed))
        if self._copies and len(self._copies) + unnamed >= self.most_copies:
            return self._copies.popitem(last=False)[1]
        return np.empty(self.layout.copy, np.float32)

    # Forward passes

    def plan(self, segments: Sequence[Segment], lengths: Sequence[int]) -> _Pass:
        """Prepare a forward pass over segments, at most one a slot.

        lengths: by slot, its committed tokens. Raises StateError for a segment that cannot be
        processed: tokens that the state has already were not committed, or too many nodes."""
        runs = _Pass(self)
        for segment in segments:
            slot = segment.slot
            if self._known[slot]:
                raise StateError("tokens that a recurrent state has were not committed")
            known = self._known_tokens(segment)
            length = lengths[slot] - self.pending[slot]  # that the state has
            marks = []
            for applied in range(1, self.pending[slot] + known + 1):
                if (length + applied) % self.interval == 0:
                    copy = self._unnamed[slot].get(length + applied)
                    if copy is None:
                        copy = self._unnamed[slot][length + applied] = self._take_copy()
                    marks.append((applied, copy))
            if segment.offset and self.pending[slot]:
                self._carry_over(slot, segment.offset)
            runs.add(segment, known, marks)
        return runs

    def _carry_over(self, slot: int, count: int) -> None:
        """Copy the records of nodes that stand behind pending tokens to the half of the next pass,
        as parents of its nodes."""
        pending, layout = self.pending[slot], self.layout
        halves = self.data[slot, layout.states :].reshape(2, layout.half)
        old, new = halves[self._half[slot]], halves[self._half[slot] ^ 1]
        for at, size in layout.records.values():
            first = at + pending * size
            new[at : at + count * size] = old[first : first + count * size]

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
        if kept != list(range(len(kept))):
            base = self.layout.states + self._half[slot] * self.layout.half
            for at, size in self.layout.records.values():
                start = base + at
                rows = self.data[slot, start : start + MAX_NODES * size].reshape(MAX_NODES, size)
                rows[: len(kept)] = rows[kept]
        self.pending[slot] += len(kept)
        self._known[slot] = 0

    def settle(self, slot: int, known: int) -> None:
        """Note that a pass has applied a slot's pending and `known` tokens."""
        if self.pending[slot] + known:
            self._half[slot] ^= 1
        self.pending[slot], self._known[slot] = 0, known

    def half_of(self, slot: int, following: bool) -> int:
        """Return the address of a slot's half: that of pending records, or the one that a pass
        writes if it applies something."""
        half = self._half[slot] ^ int(following)
        return self.address_of(slot) + 4 * (self.layout.states + half * self.layout.half)

    def address_of(self, slot: int) -> int:
        """Return the address of a slot's states."""
        return int(self.data.ctypes.data + slot * self.data.strides[0])


class _Pass:
    """The runs of one forward pass, as the C code reads them."""

    def __init__(self, states: RecurrentStates) -> None:
        self.states = states
        self.slots: list[tuple[int, int]] = []  # (slot, known tokens)
        names = ("first", "count", "known", "offset", "pending", "parents_at", "parents", "marks")
        self.ints = {name: array("i") for name in names}
        self.marks_at = array("i", [0])
        self.pointers = {name: array("Q") for name in ("state", "old_half", "new_half", "mark_to")}
        self._tokens = 0

    def add(self, segment: Segment, known: int, marks: Sequence[tuple[int, np.ndarray]]) -> None:
        """Add a segment; marks: copy the state to an array behind so many applied tokens."""
        states, slot = self.states, segment.slot
        values = {
            "first": self._tokens,
            "count": len(segment.tokens),
            "known": known,
            "offset": segment.offset,
            "pending": states.pending[slot],
            "parents_at": len(self.ints["parents"]),
        }
        for name, value in values.items():
            self.ints[name].append(value)
        self.ints["parents"].extend(segment.parents)
        applies = states.pending[slot] + known > 0
        self.pointers["state"].append(states.address_of(slot))
        self.pointers["old_half"].append(states.half_of(slot, following=False))
        self.pointers["new_half"].append(states.half_of(slot, following=applies))
        for applied, copy in marks:
            self.ints["marks"].append(applied)
            self.pointers["mark_to"].append(copy.ctypes.data)
        self.marks_at.append(len(self.ints["marks"]))
        self.slots.append((slot, known))
        self._tokens += len(segment.tokens)

    def structure(self) -> CRecurrent:
        """Build the C structure, which points into this object."""
        fields = {name: address(values) for name, values in self.ints.items()}
        fields |= {name: address(values) for name, values in self.pointers.items()}
        fields["marks_at"] = address(self.marks_at)
        return CRecurrent(runs=len(self.slots), history_at=self.states.layout.states, **fields)

    def settle(self) -> None:
        """Note that the pass was run."""
        for slot, known in self.slots:
            self.states.settle(slot, known)
