"""Shortlists: the part of a vocabulary that a drafter scores (FR-Spec, Zhao et al., 2502.14856).

The output head dominates the cost of a small model with a large vocabulary, and texts use little of
that vocabulary. A drafter with a shortlist never proposes other tokens: their q is 0, so
verification stays exact and only the acceptance of those tokens is lost.

On disk a shortlist has the form published heads use: `d2t` int64 [Vd], where drafter token i is
token i + d2t[i] of the vocabulary, and `t2d` bool [V], which marks those tokens. Tokens ascend."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun.errors import ForerunError, LoadError, one_line
from forerun.models.files import SHORTLIST
from forerun.utils import atomic_file

MAKE = "forerun train --recipe shortlist makes one"


@dataclass(frozen=True, slots=True)
class Shortlist:
    """Ascending token ids [Vd] int64 out of a vocabulary of `vocab` tokens."""

    ids: Tensor
    vocab: int

    def for_model(self, where: Path, sizes: tuple[int, int]) -> Tensor:
        """Return the tokens a draft model scores, ascending int64.

        Args:
            where: the name of this list in messages.
            sizes: vocabulary sizes of the draft model and of its target; the list must have been
                made for one of them.

        Raises:
            LoadError: it was made for another vocabulary, or names none of the model's tokens.
        """
        own = sizes[0]
        if self.vocab not in sizes:
            raise LoadError(
                f"{where} was made for a vocabulary of {self.vocab} tokens, but the draft model "
                f"has {own}: {MAKE}"
            )
        ids = self.ids[self.ids < own]
        if not len(ids):
            raise LoadError(f"{where} has none of the {own} tokens of the draft model: {MAKE}")
        return ids

    def save(self, path: Path) -> None:
        """Write the list atomically. Raises ForerunError."""
        d2t, t2d = maps_of(self.ids, self.vocab)
        try:
            with atomic_file(path) as work:
                save_file({"d2t": d2t, "t2d": t2d}, work)
                work.chmod(0o644)  # save_file makes it readable by its owner only
        except (OSError, SafetensorError) as error:  # the latter is raised for a full disk
            why = getattr(error, "strerror", None) or one_line(str(error))
            raise ForerunError(
                f"{path} cannot be written: {why}; make room, or give another path"
            ) from None


def read_shortlist(path: Path) -> Shortlist:
    """Read a shortlist. Raises LoadError."""
    if not path.is_file():  # opening a pipe would block
        raise LoadError(f"there is no shortlist {path}: {MAKE}")
    try:
        held = load_file(path)
        if held.keys() != {"d2t", "t2d"}:
            raise LoadError("it does not hold exactly d2t and t2d")
        t2d = held["t2d"]
        if t2d.ndim != 1 or t2d.dtype != torch.bool:
            raise LoadError(
                f"t2d is {t2d.dtype} of shape {list(t2d.shape)}, not one bool per token"
            )
        ids = ids_of(held["d2t"], int(t2d.sum()), len(t2d))
        if not torch.equal(maps_of(ids, len(t2d))[1], t2d):
            raise LoadError("t2d marks other tokens than d2t names")
        return Shortlist(ids, len(t2d))
    except (LoadError, SafetensorError, OSError, ValueError) as error:
        raise LoadError(f"{path} is no shortlist ({one_line(str(error))}): {MAKE}") from None


def shortlist_beside(model: Path) -> Path | None:
    """Return the shortlist in the directory of a model, if there is one."""
    path = model / SHORTLIST
    return path if path.is_file() else None


def ids_of(d2t: Tensor | None, size: int, vocab: int) -> Tensor:
    """Return the token ids [size] int64 that offsets name.

    Raises LoadError unless they are `size` ascending tokens of `vocab`."""
    is_list = d2t is not None and d2t.shape == (size,) and size > 0
    if d2t is None or not is_list or d2t.is_floating_point() or d2t.dtype == torch.bool:
        raise LoadError(f"it marks {size} of {vocab} tokens, but has no d2t of {size} integers")
    offsets = d2t.long()
    if offsets[0] < 0 or (offsets.diff() < 0).any() or offsets[-1] > vocab - size:
        raise LoadError(f"d2t does not name {size} different tokens of {vocab} in ascending order")
    return offsets + torch.arange(size)


def maps_of(ids: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """Return (d2t, t2d) of ascending token ids."""
    marked = torch.zeros(vocab, dtype=torch.bool, device=ids.device).index_fill_(0, ids, True)
    return ids - torch.arange(len(ids), device=ids.device), marked


def spread(logits: Tensor, ids: Tensor | None, vocab: int) -> Tensor:
    """Scatter logits of the tokens `ids` [Vd] over the vocabulary; the others get -inf.

    ids: None returns the logits as they are. [.., Vd] -> [.., vocab]"""
    if ids is None:
        return logits
    full = logits.new_full((*logits.shape[:-1], vocab), -torch.inf)
    return full.index_copy(-1, ids, logits)
