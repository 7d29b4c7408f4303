"""What a file holds of its target's own embedding and head: it is borrowed then, and not kept twice."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.draft.view import TargetView

EXACT = 2.0**-8  # rows that differ by less than this share do so by how 16 bits round
ROWS, PROBES = 4096, 8  # rows compared at a time; vectors that tell two heads apart


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


def _alike(apart: Tensor, rows: Tensor) -> bool:
    """Whether no row is further apart than a share of its size."""
    return bool((apart.norm(dim=1) <= EXACT * rows.norm(dim=1)).all())
