"""What changes the weights: Muon for inner matrices, AdamW for all else.

Muon makes each matrix of momentum orthogonal before it is applied (Jordan et al. 2024). Its steps
are scaled by the size that AdamW's have, so that both take one learning rate (Liu et al.
2502.16982). torch's own always works in bfloat16, which processors that only emulate it do many
times slower; this one takes the dtype to use."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.775, 2.0315)  # of the quintic iteration, by Jordan
ITERATIONS = 5
LIKE_ADAMW = 0.2  # root mean square of AdamW's steps, over its learning rate
# how much larger Muon's are for drafters: their runs are short, and their matrices often random at
# first
FARTHER = 3.0
BETAS = (0.9, 0.95)  # of AdamW
OUTER = (
    "embed",
    "head",
    "wte",
    "wpe",
    "markov",
)  # in names of what maps tokens to states or back: not for Muon


class Muon(torch.optim.Optimizer):
    """For weights with two axes. One group; `dtype` is what the iteration computes in, `size` the
    root mean square of its steps over the learning rate."""

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float,
        weight_decay: float,
        dtype: torch.dtype,
        size: float = LIKE_ADAMW,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.dtype, self.size = dtype, size

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Apply the gradients."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state: dict[str, Any] = self.state[weight]
                momentum = state.setdefault("momentum", torch.zeros_like(weight))
                momentum.lerp_(weight.grad, 1 - MOMENTUM)
                ahead = weight.grad.lerp(momentum, MOMENTUM)
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                size = self.size * max(weight.shape) ** 0.5
                weight.sub_(
                    orthogonal(ahead, self.dtype).to(weight.dtype), alpha=group["lr"] * size
                )


def orthogonal(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Nearly U V^T of the singular value decomposition U S V^T of x, by a Newton-Schulz iteration.
    [m, n] -> [m, n]"""
    a, b, c = COEFFICIENTS
    wide = x.shape[0] <= x.shape[1]
    y: Tensor = (x if wide else x.T).to(dtype)
    y = y / (y.norm() + 1e-7)
    for _ in range(ITERATIONS):
        square = y @ y.T
        y = a * y + (b * square + c * square @ square) @ y
    return y if wide else y.T


def make_optimizers(
    module: nn.Module, kind: str, learning_rate: float, weight_decay: float, dtype: torch.dtype
) -> list[torch.optim.Optimizer]:
    """AdamW alone, or Muon for the inner matrices beside it (`kind` muon), which computes in
    `dtype` and steps `FARTHER`."""
    named = [(name, weight) for name, weight in module.named_parameters() if weight.requires_grad]
    inner = {
        n
        for n, w in named
        if kind == "muon" and w.ndim == 2 and not any(outer in n for outer in OUTER)
    }
    matrices, rest = [w for n, w in named if n in inner], [w for n, w in named if n not in inner]
    made: list[torch.optim.Optimizer] = []
    if matrices:
        made.append(Muon(matrices, learning_rate, weight_decay, dtype, FARTHER * LIKE_ADAMW))
    if rest:
        made.append(
            torch.optim.AdamW(
                rest, lr=learning_rate, betas=BETAS, weight_decay=weight_decay, fused=True
            )
        )
    return made
