"""Tables of rotary embeddings: cos and sin of every position, a function of the position alone.

Being a function of the position is what makes a chunk, a tree and a one-token pass agree. Two published scalings
depend on the length of the text instead, and are pinned down here: `dynamic` uses, for position t, the base that a
text of t + 1 tokens would have (what one-token steps in transformers do); `longrope` uses its long factors for all
texts when the engine's context exceeds the length the model was first trained on, and its short ones otherwise.
The others are in `rope_scalings`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from forerun.errors import LoadError, one_line, shown
from forerun.models.config import ModelConfig
from forerun.models.families import Rope
from forerun.models.rope_scalings import SCALINGS, inverse_frequencies


def rope_tables(config: ModelConfig, rope: Rope, context: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of positions 0..context-1. -> [context, 1, dim / 2] each, in `dtype`. Raises LoadError."""
    positions = torch.arange(context, dtype=torch.float64)
    try:
        inverse, factor = _frequencies(config, rope, context, positions)
        angles = positions[:, None] * inverse.double()
        if angles.shape[-1] != rope.dim // 2:
            raise ValueError(f"{angles.shape[-1]} frequencies for {rope.dim} channels")
        if not (angles.isfinite().all() and math.isfinite(factor)):
            raise ValueError("they give angles that are no numbers")
    except Exception as error:  # of parameters that are missing, or of another kind
        text = one_line((str(error) or repr(error)).splitlines()[0])
        raise LoadError(
            f"the {one_line(rope.parameters['rope_type'])} rope parameters of this model cannot be used: {text}"
        ) from None
    cos, sin = ((f(angles) * factor).to(dtype)[:, None] for f in (torch.cos, torch.sin))
    return cos, sin


def _frequencies(config: ModelConfig, rope: Rope, context: int, positions: Tensor) -> tuple[Tensor, float]:
    """Inverse frequencies, [dim / 2] or [context, dim / 2], and a factor on cos and sin."""
    kind, theta = rope.parameters["rope_type"], rope.parameters["rope_theta"]
    if kind == "default":
        return inverse_frequencies(theta, rope.dim), 1.0
    if kind == "linear":
        return inverse_frequencies(theta, rope.dim) / rope.parameters["factor"], 1.0
    if kind == "divided":  # as GGUF files have it: what a scaling makes of each frequency
        divisors = torch.tensor(rope.parameters["divisors"], dtype=torch.float32)
        return inverse_frequencies(theta, rope.dim) / divisors, 1.0
    if kind == "dynamic":
        return _dynamic(config, rope, positions), 1.0
    if kind not in SCALINGS:
        raise LoadError(
            f"rope_type {shown(kind)} is not supported; known: default, linear, dynamic, {', '.join(SCALINGS)}"
        )
    return SCALINGS[kind](rope.parameters, config.raw, rope.dim, context)


def _dynamic(config: ModelConfig, rope: Rope, positions: Tensor) -> Tensor:
    """NTK-aware base that grows with the length of the text. [context, dim / 2]"""
    length = (positions + 1).clamp(min=config.context)
    growth = rope.parameters["factor"] * length / config.context - (rope.parameters["factor"] - 1)
    theta = rope.parameters["rope_theta"] * growth ** (rope.dim / (rope.dim - 2))
    frequencies: Tensor = theta[:, None] ** (torch.arange(0, rope.dim, 2, dtype=torch.float64) / rope.dim)
    return 1.0 / frequencies
