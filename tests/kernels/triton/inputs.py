"""Inputs of the cases, which are the same in Triton's interpreter and on a GPU."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

DEVICE = torch.device(os.environ.get("FORERUN_KERNEL_DEVICE", "cpu"))
# dtype of cases about bits: tensor cores multiply bfloat16, which the interpreter does not support
FLOATS = torch.float32 if DEVICE.type == "cpu" else torch.bfloat16


def random(seed: int, *shape: int) -> Tensor:
    """Return normally distributed numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def tensor(numbers: Sequence[object], dtype: torch.dtype | None = None) -> Tensor:
    return torch.tensor(numbers, dtype=dtype, device=DEVICE)
