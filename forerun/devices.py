"""Work beside the host: arrays that move to a device without waiting for it, queues of a GPU, and
arrays between torch and numpy without a copy."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forerun.errors import CapacityError
from forerun.types import States


def upload(
    values: Sequence[int] | Sequence[float], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return numbers as a tensor [n] on a device.

    `torch.tensor(values, device=..)` waits until the device has done all its work; a copy that need
    not block only joins the queue.
    """
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)


def zeros(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, what: str, advice: str
) -> Tensor:
    """Return zeros; on the CPU in memory that the system provides page by page when it is written
    to, since most of it never is.

    Raises CapacityError if there is none, which names what it is for and how to take less."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    try:
        memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    except OSError as error:
        raise CapacityError(f"there is no memory for {what} ({error}): {advice}") from None
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class SideStream:
    """A GPU queue for a thread that works beside another; does nothing on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def fork(self) -> None:
        """Let the queue begin behind all that was launched so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def use(self) -> AbstractContextManager[object]:
        """Launch work of this thread in the queue."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def join(self) -> None:
        """Let what is launched from now on begin behind the queue."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)


def as_tensor(states: States) -> Tensor:
    """Return states as a torch tensor that shares their memory."""
    return states if isinstance(states, Tensor) else torch.from_numpy(states)


def as_array(states: States) -> np.ndarray:
    """Return states in main memory as a numpy array that shares their memory."""
    return states.numpy() if isinstance(states, Tensor) else states
