"""A head on pairs along texts as it would draft from each of their tokens at once: EAGLE-3's
training-time test.

Step 0 reads all pairs of a text, each with the target's own state. Step s stands for the (s + 1)th
token drafted behind
each root: its pairs have the text's tokens and, for states, what step s - 1 made of the same row.
As while drafting, a row sees the pairs of step 0 up to its own, and of later steps its own alone
(Li et al. 2503.01840, section 3.2)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from forerun.draft.eagle.module import EagleModule
from forerun.models.rope import rope_tables
from forerun.train.capture import Batch


def unroll(
    head: EagleModule, batch: Batch, steps: int, thin: int = 1
) -> Iterator[tuple[Tensor, Tensor]]:
    """What each step makes of which rows: (rows [R], made [B, R, Hd]) for steps 0 to `steps` - 1.

    Row t of step s says token t + 2 + s. Step 0 has all rows, each later one every `thin`th of
    those before it (whose next token is known), from the first or a later one by chance: what is
    far ahead is learnt from fewer of them. Ends early where no row is left.
    """
    features = torch.cat([batch.states[boundary] for boundary in head.aux_hidden_layers], -1)
    count = features.shape[1] - 1  # the last state has no token beside it whose follower is known
    layer, device = head.layer, features.device
    tables = rope_tables(layer, layer.ropes[0], count + steps, torch.float32)
    cosine, sine = (table.to(device) for table in tables)
    rows = torch.arange(count, device=device)
    state, attend = head.fuse(features[:, :count]), _Attend(layer.attention_scale, layer.windows[0])
    for step in range(min(steps, count)):
        if step:
            first = int(torch.randint(thin, ())) if thin > 1 else 0
            left = (rows < count - step).nonzero()[:, 0]
            left = left[min(first, len(left) - 1) :: thin]
            rows, state = rows[left], state[:, left]
            attend.narrow(left)
        at = rows + step
        made = head(
            head.embed(batch.tokens[:, at + 1]), state, (cosine[at], sine[at]), attend.on(rows)
        )
        yield rows, made
        state = head.next_state(made)


class _Attend:
    """Attention of one step after the other; it keeps the keys and values of all that came
    before."""

    def __init__(self, scale: float, window: int | None) -> None:
        self.scale, self.window = scale, window
        self._first: tuple[Tensor, Tensor] | None = None  # of step 0, all rows
        self._own: list[tuple[Tensor, Tensor]] = []  # of each later step, the rows that are left
        self._rows = torch.arange(0)

    def on(self, rows: Tensor) -> _Attend:
        """The next step has these rows."""
        self._rows = rows
        return self

    def narrow(self, left: Tensor) -> None:
        """Of the rows so far these are left."""
        self._own = [(key[:, left], value[:, left]) for key, value in self._own]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, R, heads, D], k and v [B, R, Hkv, D] of this step's rows -> [B, R, heads, D]"""
        groups = q.shape[2] // k.shape[2]
        mine = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
        if self._first is None:
            self._first = mine
        else:
            self._own.append(mine)
        keys, values = self._first
        step, count = len(self._own), keys.shape[1]
        scores = torch.einsum("brhd,bkhd->bhrk", q, keys).masked_fill(
            ~self._seen(step, count), -torch.inf
        )
        own = [(q * key).sum(-1).transpose(1, 2) for key, _ in self._own]
        reached = [self.window is None or step - s < self.window for s in range(1, step + 1)]
        own = [
            score if near else torch.full_like(score, -torch.inf)
            for score, near in zip(own, reached, strict=True)
        ]
        scores = torch.cat((scores, *(score[..., None] for score in own)), -1)
        weights = (scores.float() * self.scale).softmax(-1).to(v.dtype)
        out = torch.einsum("bhrk,bkhd->brhd", weights[..., :count], values)
        for s, (_, value) in enumerate(self._own):
            out = out + weights[..., count + s].transpose(1, 2)[..., None] * value
        return out

    def _seen(self, step: int, count: int) -> Tensor:
        """Which pairs of step 0 each row sees: up to its own, and within the window of where it
        stands. [R, K] bool"""
        at = torch.arange(count, device=self._rows.device)
        seen = at <= self._rows[:, None]
        if self.window is not None:
            seen &= self._rows[:, None] + step - at < self.window
        return seen
