"""Layers over the slots of blocks: an ordinary one, and DFlash2's, with convolutions around its parts."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forerun.draft.block_shapes import ConvShape
from forerun.draft.layers import DecoderLayer
from forerun.kernels import reference as kernels
from forerun.models.config import ModelConfig
from forerun.models.decoder import Attend


class BlockLayer(DecoderLayer):
    """A decoder layer over slots. Context has no residual stream: it enters as keys and values alone."""

    def remember(self, context: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The keys and values of context, which is normed already. [.., Hd] -> [.., Hkv, D] each"""
        own = self.self_attn
        heads = (*context.shape[:-1], -1, own.head_dim)
        keys = kernels.rotate(own.k_norm(own.k_proj(context).view(heads)), *rotation)
        return keys, own.v_proj(context).view(heads)


class Convolved(nn.Module):
    """Two short convolutions along a block, before a part of a layer and behind it.

    A channel of a slot becomes a sum over the last few slots, itself included, with weights of its own; to these the
    slot adds what a product makes of it, the same for a group of channels. Before a block there is nothing.
    """

    def __init__(self, shape: ConvShape, hidden: int, block: int) -> None:
        super().__init__()
        self.taps, self.block, self.groups = shape.taps, block, hidden // shape.group
        self.base_kernel = nn.Parameter(torch.zeros(2, shape.taps, hidden))
        self.kernel_projection = nn.Linear(hidden, 2 * shape.taps * self.groups, bias=False)

    def around(self, part: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """What a part makes of slots [.., Hd], whole blocks one behind the other, between both. -> [.., Hd]"""
        own = self.kernel_projection(x).view(-1, self.block, 2, self.taps, self.groups, 1)
        return self._along(part(self._along(x, own, 0)), own, 1)

    def _along(self, x: Tensor, own: Tensor, which: int) -> Tensor:
        groups = x.reshape(-1, self.block, self.groups, x.shape[-1] // self.groups)
        out = torch.zeros_like(groups)
        for tap, base in enumerate(self.base_kernel[which].view(self.taps, *groups.shape[2:])):
            before = F.pad(groups, (0, 0, 0, 0, tap, 0))[:, : self.block]  # each slot's, so many slots before
            out = out + (base + own[:, :, which, tap]) * before
        return out.view(x.shape)


class ConvolvedLayer(BlockLayer):
    """DFlash2's. Tensors are called as in the speculators format."""

    def __init__(self, c: ModelConfig, layer: int, shape: ConvShape, block: int) -> None:
        super().__init__(c, layer)
        self.attention_conv = Convolved(shape, c.hidden, block)
        self.mlp_conv = Convolved(shape, c.hidden, block)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        normed = self.input_layernorm(x)
        x = x + self.attention_conv.around(lambda inner: self.self_attn(inner, rotation, attend), normed)
        return x + self.mlp_conv.around(self.mlp, self.post_attention_layernorm(x))
