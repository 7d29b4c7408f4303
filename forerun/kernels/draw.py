"""The draw: one token a row, argmax of scores plus Gumbel noise, natively where that is possible."""

import numpy as np
import torch
from torch import Tensor

from forerun import rng
from forerun.kernels import native


def gumbel_argmax(scores: Tensor, keys: list[int]) -> Tensor:
    """One draw from softmax(scores) for each row. [M, V], M stream keys -> int64 [M]

    Every row needs a finite score; ties go to the lowest id. float32 on the CPU is drawn by the native kernel, anything
    else by its twin `rng.gumbel_argmax`.
    """
    lib = native.library()
    if lib is None or scores.dtype != torch.float32 or scores.device.type != "cpu":
        return rng.gumbel_argmax(scores, keys)
    scores, streams = scores.contiguous(), np.array(keys, dtype=np.uint64)
    drawn = torch.empty(len(scores), dtype=torch.int64)
    lib.forerun_draw(scores.data_ptr(), streams.ctypes.data, len(scores), scores.shape[1], drawn.data_ptr())
    return drawn
