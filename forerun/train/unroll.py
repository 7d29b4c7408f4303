"""A head on pairs along texts as it would draft from each of their tokens at once: EAGLE-3's training-time test.

Step 0 reads all pairs of a text, each with the target's own state. Step s stands for the (s + 1)th token drafted behind
each root: its pairs have the text's tokens and, for states, what step s - 1 made of the same row. As while drafting, a
row sees the pairs of step 0 up to its own, and of later steps its own alone (Li et al. 2503.01840, section 3.2).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from forerun.draft.pair_head import PairHead
from forerun.models.rope import rope_tables
from forerun.train.capture import Batch


def unroll(head: PairHead, batch: Batch, steps: int) -> Iterator[Tensor]:
    """What each step makes of each row. Row t of step s says token t + 2 + s. [B, N - 1 - s, Hd] for s below `steps`

    Ends early where no row is left. N positions are read, of N + 1 tokens.
    """
    features = torch.cat([batch.states[boundary] for boundary in head.boundaries], -1)
    rows = features.shape[1] - 1  # the last state has no token beside it whose follower is known
    layer = head.layer
    tables = rope_tables(layer, layer.ropes[0], rows + steps, torch.float32)
    cosine, sine = (table.to(features.device) for table in tables)
    state, attend = head.fuse(features[:, :rows]), _Attend(layer.attention_scale, layer.windows[0])
    for step in range(min(steps, rows)):
        count = rows - step
        embedded = head.embed(batch.tokens[:, step + 1 : step + 1 + count])
        rotation = cosine[step : step + count], sine[step : step + count]
        made = head(embedded, state[:, :count], rotation, attend)
        yield made
        state = head.state(made)


class _Attend:
    """Attention of one step after the other; it keeps the keys and values of all that came before."""

    def __init__(self, scale: float, window: int | None) -> None:
        self.scale, self.window = scale, window
        self._kept: list[tuple[Tensor, Tensor]] = []

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, R, heads, D], k and v [B, R, Hkv, D] of this step's rows -> [B, R, heads, D]"""
        groups, rows, step = q.shape[2] // k.shape[2], q.shape[1], len(self._kept)
        self._kept.append((k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)))
        keys, values = self._kept[0][0][:, :rows], self._kept[0][1][:, :rows]
        scores = torch.einsum("brhd,bkhd->bhrk", q, keys)
        seen = self._seen(rows, step, q.device)
        own = [(q * key[:, :rows]).sum(-1).transpose(1, 2) for key, _ in self._kept[1:]]
        reached = [self.window is None or step - s < self.window for s in range(1, step + 1)]
        own = [score if near else torch.full_like(score, -torch.inf) for score, near in zip(own, reached, strict=True)]
        scores = torch.cat((scores.masked_fill(~seen, -torch.inf), *(score[..., None] for score in own)), -1)
        weights = (scores.float() * self.scale).softmax(-1).to(v.dtype)
        out = torch.einsum("bhrk,bkhd->brhd", weights[..., :rows], values)
        for s, (_, value) in enumerate(self._kept[1:]):
            out = out + weights[..., rows + s].transpose(1, 2)[..., None] * value[:, :rows]
        return out

    def _seen(self, rows: int, step: int, device: torch.device) -> Tensor:
        """Which pairs of step 0 each row sees: up to its own, and within the window of where it stands. [R, R] bool"""
        seen = torch.ones(rows, rows, dtype=torch.bool, device=device).tril()
        if self.window is not None:
            at = torch.arange(rows, device=device)
            seen &= at[:, None] + step - at < self.window
        return seen
