"""Shortlists: the part of a vocabulary that a drafter scores (FR-Spec, Zhao et al., 2502.14856).

The head of a small model is most of its work where the vocabulary is large, and texts hardly use
most of it. A drafter that scores some tokens alone never says another: q = 0 there, so whatever is
verified stays exact, and what is lost is the acceptance of the rest.

On disk a shortlist is what published heads have beside theirs: `d2t` int64 [Vd], the drafter's
token i being the vocabulary's i + d2t[i], and `t2d` bool [V], which marks those tokens. Vd tokens
of V, ascending."""

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
    """Some tokens, `ids` [Vd] int64, ascending, of a vocabulary of `vocab`."""

    ids: Tensor
    vocab: int

    def for_model(self, where: Path, sizes: tuple[int, int]) -> Tensor:
        """The tokens that a model scores, int64, ascending. sizes: of its own vocabulary, for which
        the list may have been made, and of its target's. `where` is what messages call it. Raises
        LoadError."""
        own = sizes[0]
        if self.vocab not in sizes:
            raise LoadError(
                f"{where} was made for a vocabulary of {self.vocab} tokens, but the draft model has {own}: {MAKE}"
            )
        ids = self.ids[self.ids < own]
        if not len(ids):
            raise LoadError(f"{where} has none of the {own} tokens of the draft model: {MAKE}")
        return ids

    def save(self, path: Path) -> None:
        """Write it whole or not at all. Raises ForerunError."""
        d2t, t2d = maps_of(self.ids, self.vocab)
        try:
            with atomic_file(path) as work:
                save_file({"d2t": d2t, "t2d": t2d}, work)
                work.chmod(0o644)  # it comes readable by its owner only
        except (OSError, SafetensorError) as error:  # the latter is its own word for a full disk
            why = getattr(error, "strerror", None) or one_line(str(error))
            raise ForerunError(
                f"{path} cannot be written: {why}; make room, or give another place"
            ) from None


def read_shortlist(path: Path) -> Shortlist:
    """The shortlist in a file. Raises LoadError."""
    if not path.is_file():  # a pipe would be waited for
        raise LoadError(f"there is no shortlist {path}: {MAKE}")
    try:
        held = load_file(path)
        if held.keys() != {"d2t", "t2d"}:
            raise LoadError("it has not d2t and t2d alone")
        t2d = held["t2d"]
        if t2d.ndim != 1 or t2d.dtype != torch.bool:
            raise LoadError(
                f"t2d is {t2d.dtype} of shape {list(t2d.shape)}, not one true or false for each token"
            )
        ids = ids_of(held["d2t"], int(t2d.sum()), len(t2d))
        if not torch.equal(maps_of(ids, len(t2d))[1], t2d):
            raise LoadError("t2d marks other tokens than d2t names")
        return Shortlist(ids, len(t2d))
    except (LoadError, SafetensorError, OSError, ValueError) as error:
        raise LoadError(f"{path} is no shortlist ({one_line(str(error))}): {MAKE}") from None


def shortlist_beside(model: Path) -> Path | None:
    """The shortlist that lies beside the config.json of a model, if there is one."""
    path = model / SHORTLIST
    return path if path.is_file() else None


def ids_of(d2t: Tensor | None, size: int, vocab: int) -> Tensor:
    """The tokens that offsets name, int64 [size]. Raises LoadError unless they are so many of
    `vocab`, ascending."""
    if (
        d2t is None
        or d2t.shape != (size,)
        or not size
        or d2t.is_floating_point()
        or d2t.dtype == torch.bool
    ):
        raise LoadError(
            f"it says {size} of {vocab} tokens, but there is no d2t of {size} whole numbers"
        )
    offsets = d2t.long()
    if offsets[0] < 0 or (offsets.diff() < 0).any() or offsets[-1] > vocab - size:
        raise LoadError(f"d2t does not name {size} different tokens of {vocab} in ascending order")
    return offsets + torch.arange(size)


def maps_of(ids: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
    """(d2t, t2d) of ascending tokens of a vocabulary."""
    marked = torch.zeros(vocab, dtype=torch.bool, device=ids.device).index_fill_(0, ids, True)
    return ids - torch.arange(len(ids), device=ids.device), marked


def spread(logits: Tensor, ids: Tensor | None, vocab: int) -> Tensor:
    """Logits of the tokens `ids` [Vd], None for all, over a whole vocabulary; -inf for all others.
    [.., Vd] -> [.., vocab]"""
    if ids is None:
        return logits
    full = logits.new_full((*logits.shape[:-1], vocab), -torch.inf)
    return full.index_copy(-1, ids, logits)
