"""Published ways to stretch a rotary embedding over longer texts, by the names that config.json has for them.

Each gives the inverse frequencies, float32 [dim / 2], and a factor on cos and sin. Missing or senseless parameters
raise KeyError, TypeError, ValueError or ZeroDivisionError; whoever asks says so in words.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

Json = dict[str, Any]


def inverse_frequencies(theta: float, dim: int) -> Tensor:
    """Of a rotary embedding as it was trained, rounded to float32 as checkpoints have it. [dim / 2]"""
    frequencies: Tensor = theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    return 1.0 / frequencies


def llama3(p: Json, raw: Json, dim: int, _context: int) -> tuple[Tensor, float]:
    """Llama 3.1: long waves are stretched, short ones stay, those between get a share of both."""
    inverse, trained = inverse_frequencies(p["rope_theta"], dim), _trained(p, raw)
    low, high, factor = p["low_freq_factor"], p["high_freq_factor"], p["factor"]
    turns = trained * inverse / (2 * math.pi)  # of each wave over a text of the length trained on
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * inverse / factor + kept * inverse, 1.0


def yarn(p: Json, raw: Json, dim: int, _context: int) -> tuple[Tensor, float]:
    """YaRN (2309.00071): channels that turn often over a text stay, those that turn seldom are stretched."""
    trained, theta = _trained(p, raw), p["rope_theta"]
    factor = p["factor"] if p["factor"] is not None else raw["max_position_embeddings"] / trained

    def channel(turns: float) -> float:
        """Where a wave makes so many turns over the length trained on."""
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = channel(p.get("beta_fast") or 32), channel(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - first) / ((last - first) or 0.001)
    stretched, inverse = ramp.clamp(0, 1), inverse_frequencies(theta, dim)
    return inverse / factor * stretched + inverse * (1 - stretched), _yarn_attention(p, factor)


def _yarn_attention(p: Json, factor: float) -> float:
    """The factor on cos and sin, which sharpens attention over longer texts."""
    if p.get("attention_factor") is not None:
        return float(p["attention_factor"])

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    one, all_ = p.get("mscale"), p.get("mscale_all_dim")
    return scale(one) / scale(all_) if one and all_ else scale(1.0)


def longrope(p: Json, raw: Json, dim: int, context: int) -> tuple[Tensor, float]:
    """LongRoPE (2402.13753): a factor for each channel, one list for texts as long as those trained on, one beyond."""
    trained = _trained(p, raw)
    factors = torch.tensor(p["long_factor" if context > trained else "short_factor"], dtype=torch.float32)
    factor = p.get("factor") or raw["max_position_embeddings"] / trained
    attention = p.get("attention_factor")
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    return inverse_frequencies(p["rope_theta"], dim) / factors, float(attention)


def _trained(p: Json, raw: Json) -> int:
    """Tokens of the texts that the model was first trained on."""
    found = raw.get("original_max_position_embeddings", p.get("original_max_position_embeddings"))
    length = int(raw["max_position_embeddings"] if found is None else found)
    if length < 1:
        raise ValueError(f"original_max_position_embeddings is {length}")
    return length


SCALINGS = {"llama3": llama3, "yarn": yarn, "longrope": longrope}
