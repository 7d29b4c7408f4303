"""Recycling: what the target has thought of earlier texts, drafted as a tree of its likeliest nodes
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
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor

from forerun import rng
from forerun.draft.proposer import DraftRequest, PerSlotProposer, Reference
from forerun.errors import LoadError
from forerun.kernels import native
from forerun.kernels.native import CGrowth, CSuccessors, address
from forerun.models.files import check_pointer
from forerun.types import RECYCLE, NUM_CONFIDENCE_BINS, Draft

NEXT = 8  # successors that are kept of a law
WAYS = 4  # entries of a set, the one that was kept last first
ENTRIES = 1 << 16  # of a table that learns: 4.7 MB
TABLE = "successors.safetensors"  # in a directory that was made for one
NONE = -1  # in place of a token that there is not


@dataclass(frozen=True, slots=True)
class Growth:
    """What a tree grows behind, and how far.

    Attributes:
        before, root: the last two tokens; `before` is -1 where there is only one.
        levels, most: how deep it may be, and how many nodes there may be, the root apart.
        is_chain: one node a level.
        temperature, keys: what the target draws with, and its noise behind each level; no keys
            where chances are to be those of the laws.
        stands: as in `DraftRequest`.
    """

    before: int
    root: int
    levels: int
    most: int
    is_chain: bool = False
    temperature: float = 0.0
    keys: Sequence[int] = ()
    stands: array[float] | None = None


class Branches(NamedTuple):
    """Nodes, the likeliest first: their tokens, their parents (0 is the root), the sixteenths into
    which their own chances fall, and the chances that they stand, with all before them."""

    tokens: list[int]
    parents: list[int]
    sure: list[int]
    chances: list[float]


class Successors:
    """One table. `keys` uint64 [entries], 0 where there is none; `tokens` int32 and `logs` float32
    [entries, NEXT]: the successors and the natural logarithms of their chances, -1 and -inf behind
    the last."""

    def __init__(self, entries: int = ENTRIES) -> None:
        """`entries` is a power of two, at least `WAYS`."""
        self.keys: np.ndarray = np.zeros(entries, np.uint64)
        self.tokens: np.ndarray = np.empty(
            (entries, NEXT), np.int32
        )  # of entries without a key nothing is read
        self.logs: np.ndarray = np.empty((entries, NEXT), np.float32)

    def __len__(self) -> int:
        """How many laws it holds."""
        return int(np.count_nonzero(self.keys))

    @cached_property
    def struct(self) -> CSuccessors:
        """As the native code sees it, for as long as the arrays are the same."""
        return CSuccessors(
            self.keys.ctypes.data, self.tokens.ctypes.data, self.logs.ctypes.data, len(self.keys)
        )

    def learn(self, before: Sequence[int], tokens: Sequence[int], logits: Tensor) -> None:
        """Keep what the target said behind each of these pairs: [N, V] logits, N last tokens, N
        before them (-1: none). Rows that are not finite are left out."""
        lib = native.library()
        if lib is None or logits.dtype != torch.float32 or logits.device.type != "cpu":
            self.learn_twin(before, tokens, logits)
        else:
            logits, first, last = logits.contiguous(), array("i", before), array("i", tokens)
            lib.forerun_learn(
                self.struct, address(first), address(last), logits.data_ptr(), *logits.shape
            )

    def learn_twin(self, before: Sequence[int], tokens: Sequence[int], logits: Tensor) -> None:
        """`learn` in plain Python."""
        best, ranked = logits.log_softmax(-1).topk(min(NEXT, logits.shape[1]))
        for a, b, logs, following in zip(
            before, tokens, best.tolist(), ranked.tolist(), strict=True
        ):
            if not math.isfinite(logs[0]):
                continue
            likely = [
                (token, log) for token, log in zip(following, logs, strict=True) if log > -math.inf
            ]
            likely += [(NONE, -math.inf)] * (NEXT - len(likely))
            for key in (pair_of(a, b), pair_of(NONE, b)):
                self._keep(key, likely)

    def _keep(self, key: int, likely: Sequence[tuple[int, float]]) -> None:
        first = self._set_of(key)
        here = self.keys[first : first + WAYS - 1].tolist()
        at = first + (here.index(key) if key in here else WAYS - 1)
        for kept in (self.keys, self.tokens, self.logs):
            kept[first + 1 : at + 1] = kept[first:at].copy()
        self.keys[first] = key
        self.tokens[first], self.logs[first] = zip(*likely, strict=True)

    def _set_of(self, key: int) -> int:
        return (rng.mix(key) & (len(self.keys) - 1)) // WAYS * WAYS

    def find(self, key: int) -> list[tuple[int, float]]:
        """The successors of a pair, likeliest first: (token, natural logarithm of its chance)."""
        first = self._set_of(key)
        here = self.keys[first : first + WAYS].tolist()
        if key not in here:
            return []
        at = first + here.index(key)
        return [
            (t, log)
            for t, log in zip(self.tokens[at].tolist(), self.logs[at].tolist(), strict=True)
            if t >= 0
        ]

    def save(self, path: Path, vocab: int) -> None:
        """Write what it holds, for a target of `vocab` tokens."""
        held = np.flatnonzero(self.keys)[
            ::-1
        ]  # the last of a set first, so that the order is the same again
        tensors = {
            "keys": self.keys[held],
            "tokens": self.tokens[held],
            "logs": self.logs[held].astype(np.float16),
        }
        save_file(tensors, path, {"format": "forerun-successors", "vocab": str(vocab)})

    @classmethod
    def load(cls, path: Path, vocab: int) -> Successors:
        """Read what `save` has written, a file or its directory, into a table twice as large: a few
        laws that fall into full sets are lost. Raises LoadError for another file, or another
        target's."""
        path = path / TABLE if path.is_dir() else path
        try:
            check_pointer(path)
            with safe_open(path, "np") as file:
                about, found = (
                    file.metadata() or {},
                    dict(zip(file.keys(), map(file.get_tensor, file.keys()), strict=True)),
                )
        except (OSError, SafetensorError) as error:
            raise LoadError(f"{path} cannot be read as a table of successors: {error}") from None
        if about.get("format") != "forerun-successors" or not _is_sound(found):
            raise LoadError(
                f"{path} is no table of successors: make one with forerun train --recipe table"
            )
        if about.get("vocab") != str(vocab) or found["tokens"].max() >= vocab:
            raise LoadError(
                f"{path} is a table for {about.get('vocab')} tokens, but the target has {vocab}"
            )
        table = cls(max(WAYS, 1 << (2 * len(found["keys"]) - 1).bit_length()))
        table._fill(found["keys"], found["tokens"], found["logs"].astype(np.float32))
        return table

    def _fill(self, keys: np.ndarray, tokens: np.ndarray, logs: np.ndarray) -> None:
        """Keep these entries, one after the other."""
        lib = native.library()
        if lib is not None:
            whole = [np.ascontiguousarray(each) for each in (keys, tokens, logs)]
            lib.forerun_fill(self.struct, *(each.ctypes.data for each in whole), len(keys))
            return
        for key, next_tokens, chances in zip(
            keys.tolist(), tokens.tolist(), logs.tolist(), strict=True
        ):
            self._keep(key, list(zip(next_tokens, chances, strict=True)))


def _is_sound(found: dict[str, np.ndarray]) -> bool:
    """Whether these are the tensors of a table."""
    if set(found) != {"keys", "tokens", "logs"}:
        return False
    entries = len(found["keys"])
    types = [(found[name].dtype.name, found[name].shape) for name in ("keys", "tokens", "logs")]
    wanted = [("uint64", (entries,)), ("int32", (entries, NEXT)), ("float16", (entries, NEXT))]
    return types == wanted and entries > 0 and found["tokens"].min() >= NONE


def pair_of(before: int, token: int) -> int:
    """The key of two tokens; of one alone with `NONE` before it."""
    return (before + 2) << 32 | token


def branch(tables: Sequence[Successors], growth: Growth) -> Branches:
    """The likeliest nodes behind a text. What the first table knows goes before what others do, and
    what is known of two tokens before what is known of one."""
    lib = native.library()
    if lib is None:
        return branch_twin(tables, growth)
    keys, count = array("Q", growth.keys), growth.most
    given = CGrowth(
        growth.before, growth.root, growth.levels, count, growth.is_chain, growth.temperature,
        address(keys) if growth.keys else None, address(growth.stands) if growth.stands else None,
    )  # fmt: skip
    tokens, parents = array("i", bytes(4 * count)), array("i", bytes(4 * count))
    sure, chances = array("b", bytes(count)), array("d", bytes(8 * count))
    structs = (CSuccessors * len(tables))(*(table.struct for table in tables))
    places = address(tokens), address(parents), sure.buffer_info()[0], address(chances)
    found = lib.forerun_branch(structs, len(tables), ctypes.byref(given), *places)
    return Branches(
        tokens[:found].tolist(),
        parents[:found].tolist(),
        sure[:found].tolist(),
        chances[:found].tolist(),
    )


def branch_twin(tables: Sequence[Successors], growth: Growth) -> Branches:
    """`branch` in plain Python."""
    nodes, depths = Branches([growth.root], [NONE], [0], [1.0]), [0]
    candidates: list[tuple[float, int, int, int, int]] = []
    order = 0
    while True:
        node = len(depths) - 1
        if growth.is_chain:
            candidates.clear()
        before = growth.before if node == 0 else nodes.tokens[nodes.parents[node]]
        for token, chance in _successors(tables, before, nodes.tokens[node], depths[node], growth):
            sixteenth = min(int(chance * NUM_CONFIDENCE_BINS), NUM_CONFIDENCE_BINS - 1)
            worth = (
                chance
                if growth.stands is None
                else chance * growth.stands[sixteenth] / ((sixteenth + 0.5) / NUM_CONFIDENCE_BINS)
            )
            heapq.heappush(
                candidates,
                (-nodes.path_probs[node] * min(worth, 1.0), order, node, token, sixteenth),
            )
            order += 1
        if node == growth.most or not candidates:
            return Branches(
                nodes.tokens[1:], nodes.parents[1:], nodes.confidence_bins[1:], nodes.path_probs[1:]
            )
        chance, _, parent, token, sixteenth = heapq.heappop(candidates)
        nodes.tokens.append(token)
        nodes.parents.append(parent)
        nodes.confidence_bins.append(sixteenth)
        nodes.path_probs.append(-chance)
        depths.append(depths[parent] + 1)


def _successors(
    tables: Sequence[Successors], before: int, token: int, depth: int, growth: Growth
) -> list[tuple[int, float]]:
    """What may come next and the chance of it: as the law says, or where there is noise that of
    being drawn with it."""
    if depth == growth.levels:
        return []
    keys = pair_of(before, token), pair_of(NONE, token)
    laws = (table.find(key) for key in keys for table in tables)
    law = next(filter(None, laws), [])
    if not growth.keys or growth.temperature <= 0:
        return [(next_token, math.exp(log)) for next_token, log in law if log > -math.inf]
    noise = [rng.gumbel_scalar(growth.keys[depth], next_token) for next_token, _ in law]
    scores = [log / growth.temperature + own for (_, log), own in zip(law, noise, strict=True)]
    most = max(scores, default=0.0)
    weights = [math.exp(score - most) for score in scores]
    total = sum(weights)
    return [
        (next_token, w / total) for (next_token, _), w in zip(law, weights, strict=True) if w > 0
    ]


TENANTS = 8  # tables that are kept at once


class Recycle(PerSlotProposer[str]):
    """Drafts by tables of successors: the tenant's own, which learns from every law of its
    requests, and then `made`, which was made beforehand and serves all."""

    name = RECYCLE
    weighs = learns = True

    def __init__(self, made: Successors | None = None, width: int = 2) -> None:
        """At most `width` nodes a level deep: the likeliest, so that one level may have more of
        them than another."""
        super().__init__()
        self.made, self.width = made, width
        self.tables: OrderedDict[str, Successors] = (
            OrderedDict()
        )  # by tenant, that of the latest request last

    def open(
        self,
        slot: int,
        tokens: Sequence[int],
        references: Sequence[Reference] = (),
        tenant: str = "",
    ) -> None:
        self.slots[slot] = tenant
        self.tables.setdefault(tenant, Successors())
        self.tables.move_to_end(tenant)
        idle = [name for name in self.tables if name not in self.slots.values()]
        for oldest in idle[: max(len(self.tables) - TENANTS, 0)]:
            del self.tables[oldest]

    def learn(
        self, slot: int, before: Sequence[int], tokens: Sequence[int], logits: Tensor
    ) -> None:
        self.tables[self.slots[slot]].learn(before, tokens, logits)

    def forget(self) -> None:
        for tenant in self.tables:
            self.tables[tenant] = Successors()

    def reset(self) -> None:
        super().reset()
        self.tables.clear()

    def draft(self, row: DraftRequest, kept: str) -> Draft:
        own, made = self.tables[kept], self.made
        growth = Growth(
            before=row.tokens[-2] if len(row.tokens) > 1 else NONE,
            root=row.tokens[-1],
            levels=row.depth,
            most=row.depth * self.width,
            is_chain=not row.branching or self.width == 1,
            temperature=row.params.heat,
            keys=[row.noise.target(depth) for depth in range(row.depth)] if row.coupled else (),
            stands=row.stands,
        )
        nodes = branch([own, made] if made else [own], growth)
        draft = Draft.root(growth.root)
        for token, parent in zip(nodes.tokens, nodes.parents, strict=True):
            draft.add(token, parent, self.name)
        if row.stands is not None:
            draft.confidence_bins, draft.path_probs = nodes.confidence_bins, nodes.path_probs
        return draft
