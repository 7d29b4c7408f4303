"""A block drafter along texts, as it would draft from many of their tokens at once.

Each anchor has a block of its own, whose slots see context before the anchor and one another, as they do while
drafting: windows and causal blocks included. Context is never changed by what is drafted, so all blocks of a text share
it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.draft.block_head import BlockHead
from forerun.models.rope import rope_tables
from forerun.train.capture import Batch


def blocks(head: BlockHead, batch: Batch, anchors: Tensor) -> Tensor:
    """What the head makes of the slots that say something behind each anchor.

    Args:
        anchors: [B, A] int64 positions of tokens, from 1 on: behind the very first there is no context.

    Returns:
        [B, A, K, Hd]: slot k says token anchor + 1 + k, before the Markov head.
    """
    c = head.config
    context = head.fuse(torch.cat([batch.states[boundary] for boundary in c.boundaries], -1))
    tables = rope_tables(c.layer, c.layer.ropes[0], context.shape[1] + c.block, torch.float32)
    cosine, sine = (table.to(anchors.device) for table in tables)
    ids = torch.full((*anchors.shape, c.block), c.mask_token, device=anchors.device)
    ids[..., 0] = batch.tokens.gather(1, anchors)
    positions = anchors[..., None] + torch.arange(c.block, device=anchors.device)
    attend = _Attend(head, context, (cosine[: context.shape[1]], sine[: context.shape[1]]), anchors)
    made: Tensor = head(head.embed(ids), (cosine[positions], sine[positions]), attend)
    return made[:, :, c.first :]


class _Attend:
    """Attention of blocks over the context before their anchors and over themselves."""

    def __init__(self, head: BlockHead, context: Tensor, rotation: tuple[Tensor, Tensor], anchors: Tensor) -> None:
        self.head, self.context, self.rotation = head, context, rotation
        # how far each token of context lies before each anchor, [B, 1, 1, A, 1, N]
        distance = anchors[..., None] - torch.arange(context.shape[1], device=anchors.device)
        self.before = distance[:, None, None, :, None]
        self.later = torch.ones(head.config.block, head.config.block, dtype=torch.bool, device=anchors.device).triu(1)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, A, S, heads, D], k and v [B, A, S, Hkv, D] of the blocks -> [B, A, S, heads, D]"""
        keys, values = self.head.remember(layer, self.context, self.rotation)
        q = q.view(*q.shape[:3], k.shape[3], -1, q.shape[4])
        c, window = self.head.config, self.head.config.layer.windows[layer]
        unseen = (self.before < 1) | (self.before > window) if window else self.before < 1
        before = torch.einsum("bashgd,bnhd->bhgasn", q, keys).masked_fill(unseen, -torch.inf)
        own = torch.einsum("bashgd,bathd->bhgast", q, k)
        if c.is_causal(layer):
            own = own.masked_fill(self.later, -torch.inf)
        scores = torch.cat((before, own), -1).float() * c.layer.attention_scale
        weights, count = scores.softmax(-1).to(v.dtype), keys.shape[1]
        out = torch.einsum("bhgasn,bnhd->bashgd", weights[..., :count], values)
        out = out + torch.einsum("bhgast,bathd->bashgd", weights[..., count:], v)
        return out.flatten(3, 4)
