"""Metadata of a GGUF file, and what its tensors say of the model."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from forerun.errors import shown
from forerun.models.families import Json
from forerun.models.gguf.container import GgufFile


class Metadata:
    """Metadata of one file, by keys without the architecture's prefix."""

    def __init__(self, gguf: GgufFile) -> None:
        self.gguf, self.prefix = gguf, f"{gguf.architecture}."

    def get(self, key: str, default: Any = None) -> Any:
        return self.gguf.metadata.get(self.prefix + key, default)

    def number(self, key: str, default: float) -> float:
        """Read a float and undo its rounding to 32 bits: 9.999999747378752e-06 was 1e-05."""
        with np.errstate(over="ignore"):
            return float(str(np.float32(self.get(key, default))))

    def integer(self, *keys: str) -> int:
        """Read an integer, or an array that holds the same for each layer, by the first key that
        exists."""
        value = next((self.get(key) for key in keys if self.get(key) is not None), None)
        if value is None:
            raise LookupError(self.prefix + keys[0])
        if isinstance(value, np.ndarray):
            if not len(value) or (value != value[0]).any():
                raise ValueError(f"{self.prefix}{keys[0]}, which differs between layers")
            value = value[0].item()
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{self.prefix}{keys[0]} ({shown(value)})")
        return value

    def count(self, key: str, default: int) -> int:
        """Read an integer as `integer` does; `default` if the file has no such key."""
        return default if self.get(key) is None else self.integer(key)

    def vector(self, name: str) -> list[float]:
        """Read a tensor of one dimension, which holds positive numbers."""
        # torch takes seconds to import, and listing models needs headers only
        from forerun.models.gguf.blocks import FLOATS, floats

        entry = self.gguf.tensors[name]
        if entry.kind not in FLOATS or len(entry.shape) != 1:
            raise ValueError(f"the tensor {name}")
        values = floats(entry.kind, entry.read())[0]
        if not ((values > 0) & values.isfinite()).all():
            raise ValueError(f"the tensor {name}, whose numbers are not all positive")
        return [float(v) for v in values]

    def has(self, name: str) -> bool:
        return name in self.gguf.tensors

    def has_experts(self, layer: int) -> bool:
        return self.has(f"blk.{layer}.ffn_gate_inp.weight")

    def by_layer(self, key: str, layers: int, default: int | None = None) -> list[int]:
        """Read an integer for each layer, from one number or an array."""
        value = self.get(key)
        if value is None and default is not None:
            return [default] * layers
        if not isinstance(value, np.ndarray):
            return [self.integer(key)] * layers
        if len(value) < layers or value.dtype.kind not in "iu":
            raise ValueError(f"{self.prefix}{key}, of {len(value)} layers")
        return [int(v) for v in value[:layers]]

    def inner_size(self, layers: int) -> int:
        """Return the inner size of the dense MLPs, else that of the experts; in an array the
        entries of layers with experts mean nothing, and 0 is a layer without an MLP."""
        sizes = self.get("feed_forward_length")
        if sizes is None:
            return self.expert_size()
        if isinstance(sizes, np.ndarray):
            if len(sizes) < layers:
                raise ValueError(f"{self.prefix}feed_forward_length, of {len(sizes)} layers")
            dense = {int(sizes[i]) for i in range(layers) if not self.has_experts(i)} - {0}
            found = dense or {int(size) for size in sizes[:layers]} - {0}
            if len(found) == 1:
                return found.pop()
        return self.integer("feed_forward_length")

    def kv_heads(self, layers: int, heads: int) -> int:
        """Return the number of key-value heads of the layers with attention; the others have 0."""
        found = set(self.by_layer("attention.head_count_kv", layers, heads)) - {0}
        if len(found) != 1:
            raise ValueError(f"{self.prefix}attention.head_count_kv, which differs between layers")
        return found.pop()

    def layers_with(self, beginning: str, layers: int) -> list[bool]:
        """Return for each layer whether it has a tensor whose name begins so."""
        found = {name.split(".")[1] for name in self.gguf.tensors if f".{beginning}" in name}
        return [str(i) in found for i in range(layers)]

    def expert_size(self) -> int:
        """Return the inner size of an expert, which older files show by their tensors only."""
        if self.get("expert_feed_forward_length"):
            return self.integer("expert_feed_forward_length")
        shapes = (e.shape for n, e in self.gguf.tensors.items() if "ffn_down_exps.weight" in n)
        shape = next(shapes, None)
        if shape is None:
            raise LookupError(f"{self.prefix}feed_forward_length")
        return shape[-1]

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if value not in (False, True):
            raise TypeError(f"{self.prefix}{key} ({shown(value)})")
        return bool(value)

    def experts(
        self,
        *gating: int,
        count: str = "num_experts",
        used: str = "num_experts_per_tok",
        size: str = "intermediate_size",
        normalised: bool | None = True,
        scaled: bool = False,
    ) -> Json:
        """Return the number of experts, of those that a token uses, and their inner size.

        Args:
            gating: the values of expert_gating_func that mean what the family computes.
            count, used, size: the names of the three in config.json.
            normalised: of expert_weights_norm, what the family computes; None if it reads the key.
            scaled: the family reads the factor on the weights and the groups of experts.

        Raises ValueError if the file asks for something else."""
        neutral: dict[str, tuple[Any, ...]] = {"expert_gating_func": (None, 0, *gating)}
        if normalised is not None:
            neutral["expert_weights_norm"] = (None, normalised)
        if not scaled:
            neutral["expert_weights_scale"] = (None, 0.0, 1.0)
            neutral["expert_group_count"] = (None, 0, 1)
        for key, known in neutral.items():
            value = self.get(key)
            if isinstance(value, np.ndarray) or value not in known:
                raise ValueError(f"{self.prefix}{key} ({shown(value)}), which is not supported")
        return {
            count: self.integer("expert_count"),
            used: self.integer("expert_used_count"),
            size: self.expert_size(),
        }

    def rope(self, head_dim: int) -> Json:
        """Return rope_parameters; scalings are in keys, in a tensor of divisors (Llama 3), or in
        two tensors (longrope)."""
        rope: Json = {"rope_type": "default", "rope_theta": self.number("rope.freq_base", 10000.0)}
        rotary = int(self.get("rope.dimension_count") or head_dim)
        if rotary != head_dim:  # the next float up, so that the product is not below `rotary`
            rope["partial_rotary_factor"] = math.nextafter(rotary / head_dim, 2)
        kind = self.get("rope.scaling.type", "linear")
        factor = float(self.get("rope.scaling.factor", self.get("rope.scale_linear", 1.0)))
        attention = self.get("rope.scaling.attn_factor")
        original = {
            "original_max_position_embeddings": self.get("rope.scaling.original_context_length")
        }
        if "rope_freqs.weight" in self.gguf.tensors:
            return rope | {"rope_type": "divided", "divisors": self.vector("rope_freqs.weight")}
        if "rope_factors_long.weight" in self.gguf.tensors:
            for length in ("long", "short"):
                rope[f"{length}_factor"] = self.vector(f"rope_factors_{length}.weight")
            if attention is not None:
                rope["attention_factor"] = float(attention)
            return rope | original | {"rope_type": "longrope"}
        if kind == "yarn":
            scale = self.yarn_attention(factor)
            return (
                rope
                | original
                | {
                    "rope_type": "yarn",
                    "factor": factor,
                    "attention_factor": scale * float(1.0 if attention is None else attention),
                    "beta_fast": float(self.get("rope.scaling.yarn_beta_fast", 32.0)),
                    "beta_slow": float(self.get("rope.scaling.yarn_beta_slow", 1.0)),
                }
            )
        if kind not in ("none", "linear"):
            raise ValueError(f"{self.prefix}rope.scaling.type ({shown(kind)})")
        if kind == "linear" and factor != 1.0:
            return rope | {"rope_type": "linear", "factor": factor}
        return rope

    def latent_rope(self, rotary: int) -> Json:
        """Return the rope of latent attention. The multiplier of YaRN is 0.1 times the
        `mscale_all_dim` of DeepSeek V2, whose `mscale` is the same in all published models."""
        rope = self.rope(rotary)
        if rope["rope_type"] != "yarn":
            return rope
        stored = self.get("rope.scaling.attn_factor")
        rope["attention_factor"] = None if stored is None else float(stored)
        growth = self.number("rope.scaling.yarn_log_multiplier", 0.0)
        if not growth:
            return rope
        weight = float(str(np.float32(growth * 10)))
        return rope | {"mscale": weight, "mscale_all_dim": weight}

    def proportional_rope(self) -> Json:
        """Return the rope of Gemma 4's global layers; divisors of 1e30 are of channels that do not
        turn."""
        rope = {"rope_type": "proportional", "rope_theta": self.number("rope.freq_base", 1e6)}
        divisors = self.vector("rope_freqs.weight") if self.has("rope_freqs.weight") else [1.0]
        turning = sum(divisor == 1.0 for divisor in divisors)
        if any(divisor not in (1.0, float(np.float32(1e30))) for divisor in divisors):
            raise ValueError("the tensor rope_freqs.weight")
        return rope | {"partial_rotary_factor": turning / len(divisors)}

    def yarn_attention(self, factor: float) -> float:
        """Return the factor on attention that comes with YaRN."""
        stored = self.get("rope.scaling.yarn_attn_factor")
        if stored is not None:
            return float(stored)
        growth = 0.1 * math.log(factor) if factor > 1 else 0.0
        multiplier = float(self.get("rope.scaling.yarn_log_multiplier", 0.0))  # mscale_all_dim
        return (1.0 + growth) / (1.0 + multiplier * growth)

    def layer_types(self, layers: int, period: int) -> list[str]:
        """Return layer_types: the file's pattern, or full attention in the last of each period."""
        pattern = self.get("attention.sliding_window_pattern", period)
        if isinstance(pattern, np.ndarray):
            is_sliding = [bool(p) for p in pattern[:layers]]
        else:
            is_sliding = [i % pattern < pattern - 1 for i in range(layers)]
        return ["sliding_attention" if w else "full_attention" for w in is_sliding]
