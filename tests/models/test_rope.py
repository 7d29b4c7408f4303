"""Scaled rotary embeddings are those of transformers over the parameters that models have, and do
not need it."""

import random
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from forerun.models.rope import SCALINGS

HEADS = 4


def parameters(kind: str, chance: random.Random, dim: int) -> dict[str, Any]:
    """Some that a published model could have."""
    common = {
        "rope_type": kind,
        "rope_theta": chance.choice([1e4, 5e5, 1e6]),
        "factor": chance.choice([2.0, 4.0, 32.0]),
    }
    common["original_max_position_embeddings"] = chance.choice([64, 4096, 8192])
    if kind == "llama3":
        return common | {"low_freq_factor": 1.0, "high_freq_factor": chance.choice([2.0, 4.0])}
    attention = {"attention_factor": 1.5} if chance.random() < 0.3 else {}
    if kind == "longrope":
        factors = {
            name: [chance.uniform(1, 40) for _ in range(dim // 2)]
            for name in ("short_factor", "long_factor")
        }
        return common | factors | attention
    optional = {
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
        "mscale": 0.7,
        "mscale_all_dim": 1.2,
    }
    return (
        common
        | attention
        | {name: value for name, value in optional.items() if chance.random() < 0.5}
    )


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", SCALINGS)
def test_frequencies_and_the_factor_are_those_of_transformers(kind: str, seed: int) -> None:
    chance = random.Random(f"{kind} {seed}")
    dim, context = chance.choice([32, 64, 128]), chance.choice([64, 5000, 100_000])
    given, raw = parameters(kind, chance, dim), {"max_position_embeddings": 131072}
    config = LlamaConfig(
        hidden_size=HEADS * dim,
        num_attention_heads=HEADS,
        head_dim=dim,
        rope_parameters=dict(given),
        **raw,
    )
    expected, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=context)
    found, mine = SCALINGS[kind](given, raw, dim, context)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert mine == pytest.approx(factor, rel=1e-12)
