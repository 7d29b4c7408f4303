"""Scaled rotary embeddings are those of transformers for the parameters of published models."""

import random
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from forerun.models.rope import SCALINGS

HEADS = 4


def parameters(kind: str, rng: random.Random, dim: int) -> dict[str, Any]:
    """Return random parameters that a published model could have."""
    common = {
        "rope_type": kind,
        "rope_theta": rng.choice([1e4, 5e5, 1e6]),
        "factor": rng.choice([2.0, 4.0, 32.0]),
    }
    common["original_max_position_embeddings"] = rng.choice([64, 4096, 8192])
    if kind == "llama3":
        return common | {"low_freq_factor": 1.0, "high_freq_factor": rng.choice([2.0, 4.0])}
    attention = {"attention_factor": 1.5} if rng.random() < 0.3 else {}
    if kind == "longrope":
        factors = {
            name: [rng.uniform(1, 40) for _ in range(dim // 2)]
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
        common | attention | {name: value for name, value in optional.items() if rng.random() < 0.5}
    )


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", SCALINGS)
def test_frequencies_and_the_factor_are_those_of_transformers(kind: str, seed: int) -> None:
    rng = random.Random(f"{kind} {seed}")
    dim, context = rng.choice([32, 64, 128]), rng.choice([64, 5000, 100_000])
    drawn, raw = parameters(kind, rng, dim), {"max_position_embeddings": 131072}
    config = LlamaConfig(
        hidden_size=HEADS * dim,
        num_attention_heads=HEADS,
        head_dim=dim,
        rope_parameters=dict(drawn),
        **raw,
    )
    expected, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=context)
    found, found_factor = SCALINGS[kind](drawn, raw, dim, context)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert found_factor == pytest.approx(factor, rel=1e-12)
