"""Proposers made of proposers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from forerun.draft.base import Proposer, Reference


class Cascade(Proposer):
    """Asks its parts in order: whoever has a draft for a request first drafts it alone.

    The engine asks the parts itself (`Drafting`), so that it learns what each costs and is worth: a cascade only passes
    on what happens to a request.
    """

    def __init__(self, parts: Sequence[Proposer]) -> None:
        self._parts = tuple(own for part in parts for own in part.parts)
        self.name = "+".join(part.name for part in parts)
        self.width = max(part.width for part in parts)
        self.boundaries = tuple(sorted({b for part in parts for b in part.boundaries}))
        self.learns = any(part.learns for part in parts)

    @property
    def parts(self) -> Sequence[Proposer]:
        return self._parts

    def open(self, slot: int, tokens: Sequence[int], references: Sequence[Reference] = (), tenant: str = "") -> None:
        for part in self.parts:
            part.open(slot, tokens, references, tenant)

    def close(self, slot: int, finished: Sequence[int] | None = None) -> None:
        for part in self.parts:
            part.close(slot, finished)

    def observe(self, slot: int, start: int, features: Mapping[int, Tensor]) -> None:
        for part in self.parts:
            if part.boundaries:
                part.observe(slot, start, {b: features[b] for b in part.boundaries})

    def learn(self, slot: int, before: Sequence[int], tokens: Sequence[int], logits: Tensor) -> None:
        for part in self.parts:
            if part.learns:
                part.learn(slot, before, tokens, logits)

    def forget(self) -> None:
        for part in self.parts:
            part.forget()

    def reset(self) -> None:
        for part in self.parts:
            part.reset()
