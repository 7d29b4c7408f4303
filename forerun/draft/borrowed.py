"""What a head has of its target: the embedding and the head, unless it has its own, and all of its tokens or some."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from forerun.draft.layers import Native
from forerun.draft.stored import Tensors, size_of
from forerun.draft.view import TargetView
from forerun.errors import LoadError
from forerun.models.shortlist import ids_of, maps_of
from forerun.packed import Packed

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
EXACT = 2.0**-8  # rows that differ by less than this share do so by how 16 bits round
ROWS, PROBES = 4096, 8  # rows compared at a time; vectors that tell two heads apart


class Head(nn.Module):
    """Base of modules that may borrow from their target, and may say some of its tokens alone.

    Attributes:
        title: what messages call it.
        target: what it borrows from; there once it is attached.
        embed_tokens, lm_head: its own; None where they are the target's.
        d2t, t2d: there where it says some tokens alone. d2t [Vd] int64: its token i is the target's token i + d2t[i];
            t2d [V] bool marks those tokens.
    """

    title: str
    target: TargetView
    embed_tokens: nn.Embedding | None
    lm_head: nn.Linear | None
    d2t: Tensor | None
    t2d: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens, self.lm_head = None, None

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

    def embed(self, ids: Tensor) -> Tensor:
        """[..] int64 -> [.., Hd]"""
        out: Tensor = self.target.embed(ids) if self.embed_tokens is None else self.embed_tokens(ids)
        return out

    def say(self, made: Tensor) -> Tensor:
        """Logits of the tokens it says, of what is normed. [.., Hd] -> [.., Vd]"""
        out: Tensor = self.target.head(made) if self.lm_head is None else self.lm_head(made)
        return out

    def table(self) -> tuple[Tensor | Packed, float]:
        """The embedding [.., Hd], and what rows are multiplied with."""
        own = self.embed_tokens
        return (self.target.table, self.target.scale) if own is None else (own.weight.detach(), 1.0)

    def packed(self) -> tuple[Packed | None, float]:
        """What says tokens on the native kernels, if that is there, and what bounds its logits, or 0."""
        if self.lm_head is None:
            return self.target.packed, self.target.softcap
        return (self.lm_head.packed if isinstance(self.lm_head, Native) else None), 0.0


def check_sizes(title: str, target: TargetView, hidden: int, vocab: int, fewer: bool = False) -> None:
    """Raise LoadError unless a head for such a target is for this one; `fewer`: it may be for fewer tokens."""
    fits = vocab <= target.vocab if fewer else vocab == target.vocab
    if hidden != target.hidden or not fits:
        raise LoadError(
            f"this {title} is for a target with states of {hidden} and {vocab} tokens, this one has"
            f" {target.hidden} and {target.vocab}: {_use(title)}"
        )


def check_boundaries(title: str, target: TargetView, ids: Sequence[int]) -> None:
    """Raise LoadError unless this target has the hidden states that a head reads."""
    if not ids or len(set(ids)) < len(ids) or not all(0 <= i <= target.layers for i in ids):
        raise LoadError(
            f"this {title} reads the hidden states {list(ids)}, which must be different numbers from 0 to"
            f" {target.layers}, the layers of this target: {_use(title)}"
        )


def check_fused(title: str, target: TargetView, ids: Sequence[int], tensors: Tensors) -> None:
    """Raise LoadError unless fc reads as many states of this target as there are boundaries."""
    width, fused = size_of(tensors, "fc.weight", 1), len(ids) * target.hidden
    if width != fused:
        raise LoadError(
            f"fc.weight reads {width} numbers, but the hidden states {list(ids)} of this target have {fused}:"
            f" {_use(title)}"
        )


def _use(title: str) -> str:
    return f"use a {title.split()[-1]} that was trained for it"


def check_map(tensors: Tensors, size: int, vocab: int) -> None:
    """See that d2t of a checkpoint is offsets of `size` ascending ids of `vocab`, and make t2d what follows from it.
    Raises LoadError."""
    tensors.pop("t2d", None)
    stored = tensors.pop("d2t", None)
    if size < vocab:
        tensors["d2t"], tensors["t2d"] = maps_of(ids_of(stored, size, vocab), vocab)


def is_embedding(table: Tensor, target: TargetView) -> bool:
    """Whether an embedding [V, H], as it is used, is the target's: every row, but for rounding."""
    if table.shape != (target.vocab, target.hidden):
        return False
    for start in range(0, target.vocab, ROWS):
        ids = torch.arange(start, min(start + ROWS, target.vocab))
        own, theirs = table[ids], target.embed(ids.to(target.device)).cpu()
        if not _alike(own - theirs, own):
            return False
    return True


def is_head(weight: Tensor, target: TargetView) -> bool:
    """Whether a head [V, H] is the target's: every row, but for rounding. One whose logits the target bounds is not, as
    the target's own would be used otherwise."""
    if weight.shape != (target.vocab, target.hidden) or target.softcap:
        return False
    signs = torch.randint(0, 2, (PROBES, target.hidden), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    theirs = target.head(signs.to(target.device)).float().cpu().T
    return _alike((weight @ signs.T - theirs) / PROBES**0.5, weight)


IsTheirs = Callable[[Tensor, TargetView], bool]


def borrow(tensors: Tensors, target: TargetView, is_its_embedding: IsTheirs = is_embedding) -> None:
    """Take the target's own embedding and head out of a checkpoint: they are not kept twice."""
    for name, same in ((EMBEDDING, is_its_embedding), (HEAD, is_head)):
        if name in tensors and same(tensors[name], target):
            del tensors[name]


def _alike(apart: Tensor, rows: Tensor) -> bool:
    """Whether no row is further apart than a share of its size."""
    return bool((apart.norm(dim=1) <= EXACT * rows.norm(dim=1)).all())
