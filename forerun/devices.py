"""Copies from the host to a device that the host does not wait for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(
    values: Sequence[int] | Sequence[float], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return numbers as a tensor [n] on a device.

    `torch.tensor(values, device=..)` waits until the device has done all its work; a copy that need
    not block only joins the queue.
    """
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)
