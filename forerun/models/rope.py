"""Rotary embedding tables: cos and sin of every position, as a function of the position alone.

Since they depend on nothing else, a prefill chunk, a draft tree and a one-token step see the same
rotation. Two published scalings depend on the length of the text; they are fixed as follows.
`dynamic` uses at position t the base of a text of t + 1 tokens, as one-token steps in transformers
do. `longrope` uses its long factors for every text if the engine's context exceeds the length the
model was pretrained on, and its short factors otherwise."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from forerun.errors import LoadError, first_line, one_line, shown
from forerun.models.config import ModelConfig
from forerun.models.families import Json, Rope


def rope_tables(
    config: ModelConfig, rope: Rope, context: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Compute cos and sin of positions 0..context-1, [context, 1, dim / 2] each, in `dtype`.

    Raises LoadError for parameters that are missing or give no finite angles."""
    positions = torch.arange(context, dtype=torch.float64)
    try:
        inverse, factor = _frequencies(config, rope, context, positions)
        angles = positions[:, None] * inverse.double()
        if angles.shape[-1] != rope.dim // 2:
            raise ValueError(f"{angles.shape[-1]} frequencies for {rope.dim} channels")
        if not (angles.isfinite().all() and math.isfinite(factor)):
            raise ValueError("the angles are not finite")
    except Exception as error:  # parameters may be missing or of any type
        text = one_line(first_line(error))
        kind = one_line(rope.parameters["rope_type"])
        raise LoadError(
            f"the {kind} rope parameters of this model cannot be used: {text}"
        ) from None
    cos, sin = ((f(angles) * factor).to(dtype)[:, None] for f in (torch.cos, torch.sin))
    return cos, sin


def _frequencies(
    config: ModelConfig, rope: Rope, context: int, positions: Tensor
) -> tuple[Tensor, float]:
    """Return inverse frequencies, [dim / 2] or [context, dim / 2], and a factor on cos and sin."""
    kind, theta = rope.parameters["rope_type"], rope.parameters["rope_theta"]
    if kind == "default":
        return _inverse(theta, rope.dim), 1.0
    if kind == "linear":
        return _inverse(theta, rope.dim) / rope.parameters["factor"], 1.0
    if kind == "divided":  # GGUF files store a divisor for each frequency
        divisors = torch.tensor(rope.parameters["divisors"], dtype=torch.float32)
        return _inverse(theta, rope.dim) / divisors, 1.0
    if kind == "proportional":  # the first share of all channels turns, with frequencies of all
        inverse = _inverse(theta, rope.dim)
        turning = int(rope.parameters["partial_rotary_factor"] * rope.dim // 2)
        inverse[turning:] = 0
        return inverse / rope.parameters.get("factor", 1.0), 1.0
    if kind == "dynamic":
        return _dynamic(config, rope, positions), 1.0
    if kind not in SCALINGS:
        known = ", ".join(("default", "linear", "dynamic", "proportional", *SCALINGS))
        raise LoadError(f"rope_type {shown(kind)} is not supported; known: {known}")
    return SCALINGS[kind](rope.parameters, config.raw, rope.dim, context)


def _inverse(theta: float, dim: int) -> Tensor:
    """Return unscaled inverse frequencies [dim / 2], in float32 as in training."""
    frequencies: Tensor = theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    return 1.0 / frequencies


def _dynamic(config: ModelConfig, rope: Rope, positions: Tensor) -> Tensor:
    """Return inverse frequencies of an NTK-aware base that grows with the position.

    -> [context, dim / 2]"""
    length = (positions + 1).clamp(min=config.context)
    growth = rope.parameters["factor"] * length / config.context - (rope.parameters["factor"] - 1)
    theta = rope.parameters["rope_theta"] * growth ** (rope.dim / (rope.dim - 2))
    frequencies: Tensor = theta[:, None] ** (
        torch.arange(0, rope.dim, 2, dtype=torch.float64) / rope.dim
    )
    return 1.0 / frequencies


def _llama3(p: Json, raw: Json, dim: int, _context: int) -> tuple[Tensor, float]:
    """Llama 3.1 divides low frequencies by the factor, keeps high ones and interpolates others."""
    inverse, trained = _inverse(p["rope_theta"], dim), _pretrained_length(p, raw)
    low, high, factor = p["low_freq_factor"], p["high_freq_factor"], p["factor"]
    turns = trained * inverse / (2 * math.pi)  # rotations over the pretraining length
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * inverse / factor + kept * inverse, 1.0


def _yarn(p: Json, raw: Json, dim: int, _context: int) -> tuple[Tensor, float]:
    """YaRN (Peng et al., 2309.00071) keeps high-frequency channels and interpolates low ones."""
    trained, theta = _pretrained_length(p, raw), p["rope_theta"]
    factor = p["factor"] if p["factor"] is not None else raw["max_position_embeddings"] / trained

    def channel(turns: float) -> float:
        """Return the channel that makes `turns` rotations over the pretraining length."""
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = channel(p.get("beta_fast") or 32), channel(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - first) / ((last - first) or 0.001)
    stretched, inverse = ramp.clamp(0, 1), _inverse(theta, dim)
    return inverse / factor * stretched + inverse * (1 - stretched), _yarn_attention(p, factor)


def _yarn_attention(p: Json, factor: float) -> float:
    """Return a factor on cos and sin, which sharpens attention over longer texts."""
    if p.get("attention_factor") is not None:
        return float(p["attention_factor"])

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    one, all_ = p.get("mscale"), p.get("mscale_all_dim")
    return scale(one) / scale(all_) if one and all_ else scale(1.0)


def _longrope(p: Json, raw: Json, dim: int, context: int) -> tuple[Tensor, float]:
    """LongRoPE (Ding et al., 2402.13753) has a divisor per channel, from one of two lists."""
    trained = _pretrained_length(p, raw)
    name = "long_factor" if context > trained else "short_factor"
    factors = torch.tensor(p[name], dtype=torch.float32)
    factor = p.get("factor") or raw["max_position_embeddings"] / trained
    attention = p.get("attention_factor")
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    return _inverse(p["rope_theta"], dim) / factors, float(attention)


def _pretrained_length(p: Json, raw: Json) -> int:
    """Return the context length before rope scaling extended it."""
    found = raw.get("original_max_position_embeddings", p.get("original_max_position_embeddings"))
    length = int(raw["max_position_embeddings"] if found is None else found)
    if length < 1:
        raise ValueError(f"original_max_position_embeddings is {length}")
    return length


SCALINGS = {"llama3": _llama3, "yarn": _yarn, "longrope": _longrope}  # by rope_type
