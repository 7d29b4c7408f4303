"""Inputs of the cases: the same numbers in Triton's interpreter and on a GPU."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

DEVICE = torch.device(os.environ.get("FORERUN_KERNEL_DEVICE", "cpu"))
# of cases about bits: tensor cores multiply bfloat16, of which the interpreter knows nothing
FLOATS = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16


def random(seed: int, *shape: int) -> Tensor:
    """Normally distributed numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def tensor(numbers: Sequence[object], dtype: torch.dtype | None = None) -> Tensor:
    return torch.tensor(numbers, dtype=dtype, device=DEVICE)
