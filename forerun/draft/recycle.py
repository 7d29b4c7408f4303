"""Token recycling: the target's earlier predictions, drafted as a tree of the likeliest nodes
(2408.08696)."""

from __future__ import annotations

import ctypes
import heapq
import math
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor

from forerun import rng
from forerun.draft.proposer import DraftRequest, PerSlotProposer, Texts, Tokens
from forerun.errors import LoadError
from forerun.kernels import native
from forerun.kernels.native import CGrowth, CSuccessors, address
from forerun.kernels.successors import NONE, NUM_SUCCESSORS, WAYS
from forerun.models.files import check_pointer
from forerun.types import NUM_CONFIDENCE_BINS, RECYCLE, Draft

ENTRIES = 1 << 16  # of a table that learns: 4.7 MB
MAX_TENANTS = 8  # tables that are kept at once
TABLE = "successors.safetensors"  # file name in the directory of a trained table


class SuccessorTable:
    """A set-associative table of the likeliest next tokens after one or two tokens.

    Attributes:
        keys: uint64 [entries], see `pair_key`; 0 if there is no entry.
        tokens: int32 [entries, NUM_SUCCESSORS], the likeliest first; -1 behind the last.
        logs: float32 [entries, NUM_SUCCESSORS], natural logarithms of their probabilities; -inf
            behind the last.
    """

    def __init__(self, entries: int = ENTRIES) -> None:
        """`entries` is a power of two, at least `WAYS`."""
        self.keys: np.ndarray = np.zeros(entries, np.uint64)
        # Entries without a key are never read.
        self.tokens: np.ndarray = np.empty((entries, NUM_SUCCESSORS), np.int32)
        self.logs: np.ndarray = np.empty((entries, NUM_SUCCESSORS), np.float32)

    def __len__(self) -> int:
        return int(np.count_nonzero(self.keys))

    @cached_property
    def struct(self) -> CSuccessors:
        """The table as the native code sees it."""
        return CSuccessors(
            self.keys.ctypes.data, self.tokens.ctypes.data, self.logs.ctypes.data, len(self.keys)
        )

    def learn(self, before: Sequence[int], tokens: Sequence[int], logits: Tensor) -> None:
        """Store the target's predictions; rows that are not finite are left out.

        Args:
            before: N tokens before `tokens`, -1 where there is none.
            tokens: N tokens.
            logits: [N, V], the target's after each of `tokens`.
        """
        lib = native.library()
        if lib is None:
            self.learn_twin(before, tokens, logits)
            return
        if logits.dtype != torch.float32 or logits.device.type != "cpu":
            self._learn_likeliest(before, tokens, logits)
            return
        logits = logits.contiguous()
        first, last = array("i", before), array("i", tokens)
        lib.forerun_learn(
            self.struct, address(first), address(last), logits.data_ptr(), *logits.shape
        )

    def learn_twin(self, before: Sequence[int], tokens: Sequence[int], logits: Tensor) -> None:
        """Reference implementation of `learn` in plain Python."""
        best, ranked = logits.log_softmax(-1).topk(min(NUM_SUCCESSORS, logits.shape[1]))
        for i, logs in enumerate(best.tolist()):
            if not math.isfinite(logs[0]):
                continue
            pairs = zip(ranked[i].tolist(), logs, strict=True)
            successors = [(token, log) for token, log in pairs if log > -math.inf]
            successors += [(NONE, -math.inf)] * (NUM_SUCCESSORS - len(successors))
            self._store(pair_key(before[i], tokens[i]), successors)
            self._store(pair_key(NONE, tokens[i]), successors)

    def _learn_likeliest(
        self, before: Sequence[int], tokens: Sequence[int], logits: Tensor
    ) -> None:
        """Find the likeliest tokens where the logits are: a GPU is waited for once."""
        best = logits.log_softmax(-1).topk(min(NUM_SUCCESSORS, logits.shape[1]))
        found = torch.stack((best.values.double(), best.indices.double())).cpu().numpy()
        more = (0, 0), (0, NUM_SUCCESSORS - found.shape[2])
        logs = np.pad(found[0], more, constant_values=-np.inf).astype(np.float32)
        successors = np.pad(found[1], more).astype(np.int32)
        successors[logs == -np.inf] = NONE
        keys = np.array(
            [
                (pair_key(first, last), pair_key(NONE, last))
                for first, last in zip(before, tokens, strict=True)
            ],
            np.uint64,
        )
        rows = np.flatnonzero(np.isfinite(logs[:, 0])).repeat(2)
        self._fill(keys[rows[::2]].ravel(), successors[rows], logs[rows])

    def find(self, key: int) -> list[tuple[int, float]]:
        """Return the successors of a key as (token, log-probability), likeliest first."""
        first = self._set_of(key)
        keys = self.keys[first : first + WAYS].tolist()
        if key not in keys:
            return []
        entry = first + keys.index(key)
        pairs = zip(self.tokens[entry].tolist(), self.logs[entry].tolist(), strict=True)
        return [(token, log) for token, log in pairs if token >= 0]

    def _store(self, key: int, successors: Sequence[tuple[int, float]]) -> None:
        """Put an entry first in its set; the last one is dropped if the set is full."""
        first = self._set_of(key)
        keys = self.keys[first : first + WAYS - 1].tolist()
        entry = first + (keys.index(key) if key in keys else WAYS - 1)
        for column in (self.keys, self.tokens, self.logs):
            column[first + 1 : entry + 1] = column[first:entry].copy()
        self.keys[first] = key
        self.tokens[first], self.logs[first] = zip(*successors, strict=True)

    def _set_of(self, key: int) -> int:
        return (rng.mix(key) & (len(self.keys) - 1)) // WAYS * WAYS

    def save(self, path: Path, vocab: int) -> None:
        """Write the entries to a file, for a target of `vocab` tokens."""
        # The last of a set first: loading stores them in the same order again.
        held = np.flatnonzero(self.keys)[::-1]
        tensors = {
            "keys": self.keys[held],
            "tokens": self.tokens[held],
            "logs": self.logs[held].astype(np.float16),
        }
        save_file(tensors, path, {"format": "forerun-successors", "vocab": str(vocab)})

    @classmethod
    def load(cls, path: Path, vocab: int) -> SuccessorTable:
        """Load a file written by `save`, or its directory, into a table twice as large.

        A few entries that fall into full sets are lost.

        Raises:
            LoadError: it is another file, or made for another target.
        """
        path = path / TABLE if path.is_dir() else path
        try:
            check_pointer(path)
            with safe_open(path, "np") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise LoadError(f"{path} cannot be read as a table of successors: {error}") from None
        if metadata.get("format") != "forerun-successors" or not _is_sound(tensors):
            raise LoadError(
                f"{path} is no table of successors: make one with forerun train --recipe table"
            )
        if metadata.get("vocab") != str(vocab) or tensors["tokens"].max() >= vocab:
            raise LoadError(
                f"{path} is a table for {metadata.get('vocab')} tokens, but the target has {vocab}"
            )
        keys, tokens = tensors["keys"], tensors["tokens"]
        table = cls(max(WAYS, 1 << (2 * len(keys) - 1).bit_length()))
        table._fill(keys, tokens, tensors["logs"].astype(np.float32))
        return table

    def _fill(self, keys: np.ndarray, tokens: np.ndarray, logs: np.ndarray) -> None:
        lib = native.library()
        if lib is None:
            for key, successors, values in zip(
                keys.tolist(), tokens.tolist(), logs.tolist(), strict=True
            ):
                self._store(key, list(zip(successors, values, strict=True)))
            return
        columns = [np.ascontiguousarray(column) for column in (keys, tokens, logs)]
        lib.forerun_fill(self.struct, *(column.ctypes.data for column in columns), len(keys))


def _is_sound(tensors: dict[str, np.ndarray]) -> bool:
    if set(tensors) != {"keys", "tokens", "logs"}:
        return False
    entries = len(tensors["keys"])
    wanted = {
        "keys": ("uint64", (entries,)),
        "tokens": ("int32", (entries, NUM_SUCCESSORS)),
        "logs": ("float16", (entries, NUM_SUCCESSORS)),
    }
    if any((tensors[name].dtype.name, tensors[name].shape) != wanted[name] for name in wanted):
        return False
    return entries > 0 and bool(tensors["tokens"].min() >= NONE)


def predecessors(tokens: Sequence[int], draft: Draft) -> list[int]:
    """Return the token before each node of a draft behind `tokens`, NONE if there is none."""
    return [last_but_one(tokens), *(draft.tokens[parent] for parent in draft.parents[1:])]


def last_but_one(tokens: Sequence[int]) -> int:
    """Return the token before the last one, NONE if there is none."""
    return tokens[-2] if len(tokens) > 1 else NONE


def pair_key(before: int, token: int) -> int:
    """Return the key of two tokens, or of one alone with NONE before it."""
    return (before + 2) << 32 | token


@dataclass(frozen=True, slots=True)
class Growth:
    """The beginning and the bounds of a tree.

    Attributes:
        before, root: the last two tokens; `before` is NONE if there is only one.
        max_depth, max_nodes: its bounds, without the root.
        is_chain: one node per level.
        temperature, keys: the target's temperature and the keys of its noise at each level; without
            keys the probabilities are those of the table.
        confidence_rates: as in `DraftRequest`.
    """

    before: int
    root: int
    max_depth: int
    max_nodes: int
    is_chain: bool = False
    temperature: float = 0.0
    keys: Sequence[int] = ()
    confidence_rates: array[float] | None = None


class Branches(NamedTuple):
    """Nodes of a grown tree, the likeliest first; parents count the root as 0. The other fields are
    as in `Draft`."""

    tokens: list[int]
    parents: list[int]
    confidence_bins: list[int]
    path_probs: list[float]


def grow_tree(tables: Sequence[SuccessorTable], growth: Growth) -> Branches:
    """Grow the likeliest nodes behind a text.

    Successors of two tokens are preferred to those of one, and those of earlier tables to later
    ones.
    """
    lib = native.library()
    if lib is None:
        return grow_tree_twin(tables, growth)
    keys = array("Q", growth.keys)
    rates = growth.confidence_rates
    count = growth.max_nodes
    limits = CGrowth(
        growth.before,
        growth.root,
        growth.max_depth,
        count,
        growth.is_chain,
        growth.temperature,
        address(keys) if growth.keys else None,
        address(rates) if rates else None,
    )
    tokens, parents = array("i", bytes(4 * count)), array("i", bytes(4 * count))
    bins, probs = array("b", bytes(count)), array("d", bytes(8 * count))
    structs = (CSuccessors * len(tables))(*(table.struct for table in tables))
    outputs = address(tokens), address(parents), bins.buffer_info()[0], address(probs)
    found = lib.forerun_branch(structs, len(tables), ctypes.byref(limits), *outputs)
    return Branches(
        tokens[:found].tolist(),
        parents[:found].tolist(),
        bins[:found].tolist(),
        probs[:found].tolist(),
    )


def grow_tree_twin(tables: Sequence[SuccessorTable], growth: Growth) -> Branches:
    """Reference implementation of `grow_tree` in plain Python."""
    nodes = Branches([growth.root], [NONE], [0], [1.0])
    depths = [0]
    candidates: list[tuple[float, int, int, int, int]] = []
    order = 0  # breaks ties
    while True:
        node = len(depths) - 1
        if growth.is_chain:
            candidates.clear()
        before = growth.before if node == 0 else nodes.tokens[nodes.parents[node]]
        for token, prob in _successors(tables, before, nodes.tokens[node], depths[node], growth):
            confidence = min(int(prob * NUM_CONFIDENCE_BINS), NUM_CONFIDENCE_BINS - 1)
            if growth.confidence_rates is not None:
                center = (confidence + 0.5) / NUM_CONFIDENCE_BINS
                prob *= growth.confidence_rates[confidence] / center
            path_prob = nodes.path_probs[node] * min(prob, 1.0)
            heapq.heappush(candidates, (-path_prob, order, node, token, confidence))
            order += 1
        if node == growth.max_nodes or not candidates:
            return Branches(
                nodes.tokens[1:], nodes.parents[1:], nodes.confidence_bins[1:], nodes.path_probs[1:]
            )
        negative, _, parent, token, confidence = heapq.heappop(candidates)
        nodes.tokens.append(token)
        nodes.parents.append(parent)
        nodes.confidence_bins.append(confidence)
        nodes.path_probs.append(-negative)
        depths.append(depths[parent] + 1)


def _successors(
    tables: Sequence[SuccessorTable], before: int, token: int, depth: int, growth: Growth
) -> list[tuple[int, float]]:
    """Return possible next tokens and their probabilities: with noise, those of being drawn."""
    if depth == growth.max_depth:
        return []
    keys = pair_key(before, token), pair_key(NONE, token)
    lookups = (table.find(key) for key in keys for table in tables)
    found = next(filter(None, lookups), [])
    if not growth.keys or growth.temperature <= 0:
        return [(successor, math.exp(log)) for successor, log in found if log > -math.inf]
    scores = [
        log / growth.temperature + rng.gumbel_scalar(growth.keys[depth], successor)
        for successor, log in found
    ]
    highest = max(scores, default=0.0)
    weights = [math.exp(score - highest) for score in scores]
    total = sum(weights)
    return [
        (successor, weight / total)
        for (successor, _), weight in zip(found, weights, strict=True)
        if weight > 0
    ]


class LearningTable(Protocol):
    """A table of successors of one tenant."""

    def learn(self, before: Sequence[int], tokens: Sequence[int], logits: Tensor) -> None:
        """Store the target's predictions, as `SuccessorTable.learn`."""


Table = TypeVar("Table", bound=LearningTable)


class TableProposer(PerSlotProposer[str], Generic[Table]):
    """Base of drafters from the table of the request's tenant, which learns from all its forward
    passes, and then from a trained table that serves all tenants.

    Attributes:
        width: a draft has at most so many nodes per level on average: one level may have more.
        tables: by tenant, the least recently used first.
    """

    name = RECYCLE
    reports_confidence = True
    wants_logits = True

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.tables: OrderedDict[str, Table] = OrderedDict()

    def new_table(self) -> Table:
        """Return an empty table."""
        raise NotImplementedError

    def open(self, slot: int, tokens: Tokens, references: Texts = (), tenant: str = "") -> None:
        self.slots[slot] = tenant
        if tenant not in self.tables:
            self.tables[tenant] = self.new_table()
        self.tables.move_to_end(tenant)
        idle = [name for name in self.tables if name not in self.slots.values()]
        for oldest in idle[: max(len(self.tables) - MAX_TENANTS, 0)]:
            del self.tables[oldest]

    def learn(self, slot: int, tokens: Sequence[int], draft: Draft, logits: Tensor) -> None:
        table = self.tables[self.slots[slot]]
        table.learn(predecessors(tokens, draft), draft.tokens, logits)

    def is_chain(self, request: DraftRequest) -> bool:
        """Return True if a request's draft has one node per level."""
        return not request.branching or self.width == 1

    def draft_of(self, request: DraftRequest, nodes: Branches) -> Draft:
        draft = Draft.root(request.tokens[-1])
        for token, parent in zip(nodes.tokens, nodes.parents, strict=True):
            draft.add(token, parent, self.name)
        if request.confidence_rates is not None:
            draft.confidence_bins = nodes.confidence_bins
            draft.path_probs = nodes.path_probs
        return draft

    def forget(self) -> None:
        for tenant in self.tables:
            self.tables[tenant] = self.new_table()

    def reset(self) -> None:
        super().reset()
        self.tables.clear()


class Recycle(TableProposer[SuccessorTable]):
    """Token recycling with tables in main memory."""

    def __init__(self, trained: SuccessorTable | None = None, width: int = 2) -> None:
        super().__init__(width)
        self.trained = trained

    def new_table(self) -> SuccessorTable:
        return SuccessorTable()

    def draft(self, request: DraftRequest, state: str) -> Draft:
        tables = [self.tables[state]]
        if self.trained is not None:
            tables.append(self.trained)
        keys = [request.noise.target(depth) for depth in range(request.depth)]
        growth = Growth(
            before=last_but_one(request.tokens),
            root=request.tokens[-1],
            max_depth=request.depth,
            max_nodes=request.depth * self.width,
            is_chain=self.is_chain(request),
            temperature=request.params.sampling_temperature,
            keys=keys if request.coupled else (),
            confidence_rates=request.confidence_rates,
        )
        return self.draft_of(request, grow_tree(tables, growth))
