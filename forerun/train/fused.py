"""A loss over a vocabulary without the logits of all positions at once.

The logits of a few thousand positions, and what a loss makes of them on its way and back, are
gigabytes that are written and read once. Here the gradient of a chunk of positions is found as soon
as its loss is, while all of it lies in a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

CHUNK = (
    128  # positions: their logits over some ten thousand tokens fit into a cache of a few megabytes
)

Losses = Callable[[Tensor, slice], Tensor]


def fused_sum(made: Tensor, module: nn.Module, losses: Losses) -> Tensor:
    """The sum of `losses(made[part], part)` [P] over all parts of made [M, H]; it passes gradients
    to `made` and to the parameters of `module` that the losses use."""
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    if not torch.is_grad_enabled() or not (made.requires_grad or weights):
        return torch.stack([losses(made[part], part).sum() for part in _parts(len(made))]).sum()
    total: Tensor = _Fused.apply(losses, made, *weights)  # type: ignore[no-untyped-call]
    return total


def _parts(count: int) -> list[slice]:
    return [slice(at, min(at + CHUNK, count)) for at in range(0, count, CHUNK)] or [slice(0, 0)]


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, losses: Losses, made: Tensor, *weights: Tensor) -> Tensor:
        total, above = torch.zeros((), device=made.device), torch.empty_like(made)
        found: list[Tensor | None] = [None] * len(weights)
        for part in _parts(len(made)):
            with torch.enable_grad():
                chunk = made[part].detach().requires_grad_()
                value = losses(chunk, part).sum()
            own, *others = torch.autograd.grad(value, (chunk, *weights), allow_unused=True)
            above[part] = own
            total += value.detach()
            for i, gradient in enumerate(others):
                if gradient is not None:
                    found[i] = gradient if found[i] is None else found[i].add_(gradient)  # type: ignore[union-attr]
        ctx.save_for_backward(above, *found)
        return total

    @staticmethod
    def backward(ctx: Any, by: Tensor) -> tuple[Tensor | None, ...]:
        above, *found = ctx.saved_tensors
        return (
            None,
            above * by,
            *(None if gradient is None else gradient * by for gradient in found),
        )
