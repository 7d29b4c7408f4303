"""Moving arrays: to a device without waiting for it, and between torch and numpy without a copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from forerun.types import States


def upload(
    values: Sequence[int] | Sequence[float], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return numbers as a tensor [n] on a device.

    `torch.tensor(values, device=..)` waits until the device has done all its work; a copy that need
    not block only joins the queue.
    """
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)


def as_tensor(states: States) -> Tensor:
    """Return states as a torch tensor that shares their memory."""
    return states if isinstance(states, Tensor) else torch.from_numpy(states)


def as_array(states: States) -> np.ndarray:
    """Return states in main memory as a numpy array that shares their memory."""
    return states.numpy() if isinstance(states, Tensor) else states
