"""Recycling: what the target has thought of earlier texts, drafted as a tree of its likeliest nodes (2408.08696)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor

from forerun.draft.base import BySlot, Reference, Row
from forerun.draft.successors import NONE, Growth, Successors, branch
from forerun.types import RECYCLE, Draft

TENANTS = 8  # tables that are kept at once


class Recycle(BySlot[str]):
    """Drafts by tables of successors: the tenant's own, which learns from every law of its requests, and then `made`,
    which was made beforehand and serves all."""

    name = RECYCLE
    weighs = learns = True

    def __init__(self, made: Successors | None = None, width: int = 2) -> None:
        """At most `width` nodes a level deep: the likeliest, so that one level may have more of them than another."""
        super().__init__()
        self.made, self.width = made, width
        self.tables: OrderedDict[str, Successors] = OrderedDict()  # by tenant, that of the latest request last

    def open(self, slot: int, tokens: Sequence[int], references: Sequence[Reference] = (), tenant: str = "") -> None:
        self.slots[slot] = tenant
        self.tables.setdefault(tenant, Successors())
        self.tables.move_to_end(tenant)
        idle = [name for name in self.tables if name not in self.slots.values()]
        for oldest in idle[: max(len(self.tables) - TENANTS, 0)]:
            del self.tables[oldest]

    def learn(self, slot: int, before: Sequence[int], tokens: Sequence[int], logits: Tensor) -> None:
        self.tables[self.slots[slot]].learn(before, tokens, logits)

    def forget(self) -> None:
        for tenant in self.tables:
            self.tables[tenant] = Successors()

    def reset(self) -> None:
        super().reset()
        self.tables.clear()

    def draft(self, row: Row, kept: str) -> Draft:
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
            draft.sure, draft.chances = nodes.sure, nodes.chances
        return draft
