"""Token recycling on a GPU: the tables are in its memory, learn there, and draft trees in rounds of
which the host is late (see `runtime.device_rounds`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun import rng
from forerun.devices import upload
from forerun.draft.proposer import DraftRequest
from forerun.draft.recycle import (
    ENTRIES,
    Branches,
    SuccessorTable,
    TableProposer,
    last_but_one,
)
from forerun.kernels import successors as twin
from forerun.kernels.successors import WAYS, Predictions, TableTensors, TreeRoots, Trees
from forerun.rng import Lane
from forerun.runtime.captured import CapturedPasses
from forerun.runtime.device_rounds import Draw, Nodes, RoundRequest, RoundState, Verified
from forerun.runtime.padded_pass import PassShape
from forerun.types import NUM_CONFIDENCE_BINS, Draft

CENTERS = [(i + 0.5) / NUM_CONFIDENCE_BINS for i in range(NUM_CONFIDENCE_BINS)]  # change nothing


class DeviceTable:
    """A table of successors in the memory of a device, with the verbs of `SuccessorTable`.

    Attributes:
        held: its tensors.
        own_kernels: Triton's kernels learn and grow; otherwise torch does.
    """

    def __init__(self, device: torch.device, own_kernels: bool, entries: int = ENTRIES) -> None:
        self.held = TableTensors.empty(entries, device)
        self.own_kernels = own_kernels

    @classmethod
    def of(cls, table: SuccessorTable, device: torch.device, own_kernels: bool) -> DeviceTable:
        copy = cls(device, own_kernels, len(table.keys))
        arrays = table.keys.view("int64"), table.tokens, table.logs
        tensors = copy.held.keys, copy.held.tokens, copy.held.logs
        for tensor, array in zip(tensors, arrays, strict=True):
            tensor[:-WAYS].copy_(torch.from_numpy(array))
        return copy

    def learn(self, before: Sequence[int], tokens: Sequence[int], logits: Tensor) -> None:
        """Store the target's predictions, as `SuccessorTable.learn`."""
        pairs = upload([*before, *tokens], torch.int64, logits.device).view(2, -1)
        self.store(pairs[0], pairs[1], torch.ones_like(pairs[0], dtype=torch.bool), logits)

    def store(self, before: Tensor, last: Tensor, is_valid: Tensor, logits: Tensor) -> None:
        """Store predictions by operations of the device alone; see `Predictions`."""
        seen = Predictions.of(before, last, is_valid, logits)
        if not self.own_kernels:
            twin.learn(self.held, seen)
            return
        from forerun.kernels.triton import successors as kernels

        kernels.learn(self.held, seen)


def grow(tables: Sequence[DeviceTable], roots: TreeRoots, nodes: int, is_chain: bool) -> Trees:
    """Grow trees from tables by operations of the device alone; see `kernels.successors.grow`."""
    held = [table.held for table in tables]
    if not tables[0].own_kernels:
        return twin.grow(held, roots, nodes, is_chain)
    from forerun.kernels.triton import successors as kernels

    return kernels.grow(held, roots, nodes, is_chain)


class DeviceRecycle(TableProposer[DeviceTable]):
    """Token recycling with tables in the memory of the target's device."""

    def __init__(
        self,
        device: torch.device,
        own_kernels: bool,
        trained: SuccessorTable | None = None,
        width: int = 2,
    ) -> None:
        """`own_kernels` as in `DeviceTable`, the others as in `Recycle`."""
        super().__init__(width)
        self.device, self.own_kernels = device, own_kernels
        self.trained = None if trained is None else DeviceTable.of(trained, device, own_kernels)
        self._drafters: dict[tuple[str, bool], RecycleDrafter] = {}

    def new_table(self) -> DeviceTable:
        return DeviceTable(self.device, self.own_kernels)

    def tables_of(self, tenant: str) -> list[DeviceTable]:
        return [self.tables[tenant], *([self.trained] if self.trained else [])]

    @torch.inference_mode()
    def learn(self, slot: int, tokens: Sequence[int], draft: Draft, logits: Tensor) -> None:
        super().learn(slot, tokens, draft, logits)

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Grow the drafts of each tenant's requests at once."""
        drafts: dict[int, Draft] = {}
        for tenant in {self.slots[request.slot] for request in requests}:
            own = [request for request in requests if self.slots[request.slot] == tenant]
            for is_chain in (False, True):
                group = [r for r in own if self.is_chain(r) == is_chain]
                if group:
                    grown = self._grow(self.tables_of(tenant), group, is_chain)
                    drafts |= zip([request.slot for request in group], grown, strict=True)
        return [drafts[request.slot] for request in requests]

    def _grow(
        self, tables: Sequence[DeviceTable], requests: Sequence[DraftRequest], is_chain: bool
    ) -> list[Draft]:
        roots = _roots_of(requests, self.width, self.device)
        nodes = max(request.depth * self.width for request in requests)
        grown = grow(tables, roots, nodes, is_chain)
        numbers = torch.stack(grown[:3]).double()
        tokens, parents, bins, probs = torch.cat((numbers, grown.probs[None])).tolist()
        drafts = []
        for i, request in enumerate(requests):
            # the nodes of a tree end where a parent is negative
            count = next((n for n, parent in enumerate(parents[i]) if parent < 0), nodes)
            branches = Branches(
                tokens=list(map(int, tokens[i][:count])),
                parents=list(map(int, parents[i][:count])),
                confidence_bins=list(map(int, bins[i][:count])),
                path_probs=probs[i][:count],
            )
            drafts.append(self.draft_of(request, branches))
        return drafts

    def begin_rounds(
        self, requests: Sequence[DraftRequest], num_tokens: int
    ) -> RecycleDrafter | None:
        """Prepare rounds on the device; None where requests draft in different ways."""
        is_chain = self.is_chain(requests[0])
        for request in requests:
            if not request.coupled or self.is_chain(request) != is_chain:
                return None
        drafter = self.drafter([request.slot for request in requests], is_chain)
        if drafter is not None:
            drafter.rates = {request.slot: _rates(request) for request in requests}
        return drafter

    def drafter(self, slots: Sequence[int], is_chain: bool = True) -> RecycleDrafter | None:
        """Return what learns in rounds of open slots, and drafts for those that are asked; None if
        the slots are of several tenants."""
        tenant, *others = {self.slots[slot] for slot in slots}
        if others:
            return None
        tables, found = self.tables_of(tenant), self._drafters.get((tenant, is_chain))
        if found is None or found.tables[0] is not tables[0]:
            found = self._drafters[tenant, is_chain] = RecycleDrafter(self, tables, is_chain)
        return found

    def reset(self) -> None:
        super().reset()
        self._drafters.clear()


class RecycleDrafter:
    """Makes `RecycleDrafts` of one tenant's tables.

    Attributes:
        rates: by slot, the rates of requests that draft, see `TreeRoots`.
    """

    aux_hidden_layers: tuple[int, ...] = ()

    def __init__(
        self, proposer: DeviceRecycle, tables: Sequence[DeviceTable], is_chain: bool
    ) -> None:
        self.proposer, self.tables, self.is_chain = proposer, tables, is_chain
        self.width = 1 if is_chain else proposer.width
        self.rates: dict[int, list[float]] = {}

    def drafts(self, target: CapturedPasses, shape: PassShape, depth: int) -> RecycleDrafts:
        return RecycleDrafts(self, shape)


class RecycleDrafts:
    """Trees of the likeliest successors; each round teaches the table.

    Attributes:
        temperature, rates: of the requests, as in `TreeRoots`.
        learns: bool [R, 1], for requests whose predictions are stored.
    """

    def __init__(self, drafter: RecycleDrafter, shape: PassShape) -> None:
        self.drafter, device = drafter, drafter.proposer.device
        self.temperature = torch.zeros(shape.segments, dtype=torch.float64, device=device)
        size = (shape.segments, NUM_CONFIDENCE_BINS)
        self.rates = torch.ones(size, dtype=torch.float64, device=device)
        self.learns = torch.zeros((shape.segments, 1), dtype=torch.bool, device=device)

    def begin(self, requests: Sequence[RoundRequest]) -> None:
        device, count = self.learns.device, len(requests)
        temperatures = [request.sampling.temperature for request in requests]
        self.temperature[:count] = upload(temperatures, torch.float64, device)
        rates = [self.drafter.rates.get(request.slot, CENTERS) for request in requests]
        flat = [rate for own in rates for rate in own]
        self.rates[:count] = upload(flat, torch.float64, device).view(count, -1)
        self.learns.fill_(False)
        learns = [request.slot in self.drafter.proposer.slots for request in requests]
        self.learns[:count, 0] = upload(learns, torch.bool, device)

    def draft(self, state: RoundState, nodes: Nodes, draw: Draw) -> None:
        drafter = self.drafter
        roots = TreeRoots(
            before=state.before,
            root=state.last,
            noise=state.noise,
            position=state.position,
            temperature=self.temperature,
            max_depth=state.depth,
            max_nodes=state.depth * drafter.width,
            rates=self.rates,
        )
        grown = grow(drafter.tables, roots, nodes.tokens.shape[1], drafter.is_chain)
        for tensor, values in zip(nodes, grown, strict=False):
            tensor.copy_(values)

    def keep(self, state: RoundState, nodes: Nodes, verified: Verified) -> None:
        parents = nodes.parents.clamp(min=0)
        before = torch.cat((state.before[:, None], verified.tokens.gather(1, parents)), 1)
        is_node = torch.nn.functional.pad(nodes.parents >= 0, (1, 0), value=True)
        is_seen = is_node & self.learns
        last = verified.tokens.reshape(-1)
        self.drafter.tables[0].store(before.view(-1), last, is_seen.reshape(-1), verified.logits)

    def end(self, number: int, slot: int, tokens: Sequence[int], root: int, accepted: int) -> None:
        """Commit nothing: the table has learned everything."""


def _rates(request: DraftRequest) -> list[float]:
    rates = request.confidence_rates
    return CENTERS if rates is None else list(rates[:NUM_CONFIDENCE_BINS])


def _roots_of(requests: Sequence[DraftRequest], width: int, device: torch.device) -> TreeRoots:
    numbers: list[int] = []
    for request in requests:
        noise = rng.signed(rng.stream(request.noise.seed, Lane.TARGET))
        sizes = request.depth, request.depth * width
        before, root = last_but_one(request.tokens), request.tokens[-1]
        numbers += [before, root, noise, request.noise.root, *sizes]
    columns = upload(numbers, torch.int64, device).view(len(requests), -1).T.contiguous()
    before_root, root, noises, position, max_depth, max_nodes = columns
    heats = [r.params.sampling_temperature if r.coupled else 0.0 for r in requests]
    temperature = upload(heats, torch.float64, device)
    flat = [rate for request in requests for rate in _rates(request)]
    rates = upload(flat, torch.float64, device).view(len(requests), -1)
    return TreeRoots(before_root, root, noises, position, temperature, max_depth, max_nodes, rates)
