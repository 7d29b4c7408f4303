"""Accepted length by arithmetic: how many tokens a target pass emits, from the chance of each
drafted token.

What is drafted from q and verified by the ratio test stands at a token x that the text says with
the chance a(x) = min(1, q(x) / p(x)), independently of all others once the text is known (Leviathan
et al. 2211.17192). So along a text that the target said, the rounds of the engine are a renewal
process, and its expected number of passes is a
sum over where rounds may begin: r(i) = sum over rounds that end just before i. `accepted_length` is
tokens over passes, which is what the engine counts. It is not the mean over all tokens of the
length of a draft begun there, 1 + sum over k of the product of (1 - TV): rounds begin where one has
just failed, which is where tokens are hard to guess, and that mean (`from_any`) is larger for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Stretch:
    """Where in a row of chances the engine drafts: roots from `first` on; token `end` is the last
    of the text.

    `limit` is the last token there might have been: no draft is longer than what may be said.
    """

    first: int
    end: int
    limit: int


def chances_of(p: Tensor, q: Tensor) -> Tensor:
    """min(1, q / p) of the tokens a text says, from log-probabilities; 0 where q forbids them."""
    return torch.where(q == -torch.inf, 0.0, (q - p).clamp(max=0).exp())


def expected_passes(chances: np.ndarray, stretch: Stretch) -> float:
    """Target passes until the text has ended, the one that ended the prompt left out.

    Args:
        chances: [N, K], at [i, k] that the (k + 1)th token drafted behind token i stands if those
            before it did.
        stretch: roots are tokens `first` to `end` - 1.
    """
    depth = chances.shape[1]
    begins = np.zeros(stretch.end + depth + 2)
    begins[stretch.first] = 1.0
    for i in range(stretch.first, stretch.end):
        reach = begins[i]
        allowed = min(depth, max(stretch.limit - i - 1, 0))
        for k in range(allowed):
            stands = (
                chances[i, k] if i + k + 1 <= stretch.end else 1.0
            )  # what comes after the end changes nothing
            begins[i + k + 1] += reach * (1 - stands)
            reach *= stands
        begins[i + allowed + 1] += reach
    return float(begins[stretch.first : stretch.end].sum())


def accepted_length(chances: Tensor, stretches: Sequence[Stretch]) -> float:
    """Tokens a target pass over all texts. chances [B, N, K]; a text without a root counts for
    nothing; 1 of none."""
    rows = chances.double().cpu().numpy()
    tokens = sum(stretch.end - stretch.first for stretch in stretches)
    passes = sum(
        expected_passes(row, stretch) for row, stretch in zip(rows, stretches, strict=True)
    )
    return tokens / passes if passes else 1.0


def from_any(overlap: Tensor, mask: Tensor) -> float:
    """1 + sum over k of prod over j <= k of (1 - TV), the mean over all roots whose whole draft
    lies in the mask.

    overlap [B, N, K] is 1 - TV of the (k + 1)th drafted token behind each root, mask [B, N] the
    positions that count."""
    depth = overlap.shape[-1]
    if mask.shape[1] < depth:
        return 1.0
    whole = mask.unfold(1, depth, 1).all(-1)
    lengths = 1 + overlap[:, : whole.shape[1]].double().cumprod(-1).sum(-1)
    return float(lengths[whole].mean()) if whole.any() else 1.0


def unfolded(values: Tensor, depth: int) -> Tensor:
    """For a drafter whose law depends on the text alone: value k behind i is that of i + k. [B, N]
    -> [B, N, K]

    Past the end stand zeros.
    """
    return torch.nn.functional.pad(values, (0, depth - 1)).unfold(1, depth, 1)
