"""Number formats of kernels: what products multiply on a card, and in Triton's interpreter."""

from __future__ import annotations

import os

import torch
import triton.language as tl

_DOTS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def dot_type(dtype: torch.dtype) -> tl.dtype:
    """Return the format in which tensors of `dtype` are multiplied: the same, but float32 in the
    interpreter, whose products of bfloat16 multiply the raw bits."""
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return tl.float32 if is_interpreted else _DOTS[dtype]
