"""Modules that say part of their target's tokens: a head of fewer rows, and the map of tokens that says which."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from forerun.models.shortlist import ids_of, maps_of


class Listed(nn.Module):
    """A module that may say some of its target's tokens alone.

    `d2t` [Vd] int64 is there where it does: its token i is the target's token i + d2t[i]; `t2d` [V] bool marks those
    tokens.
    """

    d2t: Tensor | None
    t2d: Tensor | None

    def list_tokens(self, count: int, vocab: int) -> None:
        """It says `count` of a target's `vocab` tokens: the first ones, until `say_only` tells which."""
        reduced = count < vocab
        self.register_buffer("d2t", torch.zeros(count, dtype=torch.int64) if reduced else None)
        self.register_buffer("t2d", torch.arange(vocab) < count if reduced else None)

    def say_only(self, ids: Tensor) -> None:
        """Which of the target's tokens it says, ascending: as many as it has rows for."""
        assert self.d2t is not None and self.t2d is not None
        d2t, t2d = maps_of(ids, len(self.t2d))
        self.d2t.copy_(d2t)
        self.t2d.copy_(t2d)

    def tokens(self) -> Tensor | None:
        """The target's token ids it says, in the order of its logits, [Vd] int64; None: all of them."""
        return None if self.d2t is None else self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)


def check_map(tensors: dict[str, Tensor], size: int, vocab: int) -> None:
    """See that d2t of a checkpoint is offsets of `size` ascending ids of `vocab`, and make t2d what follows from it.
    Raises LoadError."""
    tensors.pop("t2d", None)
    stored = tensors.pop("d2t", None)
    if size < vocab:
        tensors["d2t"], tensors["t2d"] = maps_of(ids_of(stored, size, vocab), vocab)
