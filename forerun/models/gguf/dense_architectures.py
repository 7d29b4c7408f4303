"""Translate GGUF metadata of dense models into the keys of config.json.

`architectures` has those with experts, recurrent layers and the like, and the table of all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from forerun.models.families import Json
from forerun.models.gguf.metadata import Metadata

XIELU = ("alpha_p", "alpha_n", "beta", "eps")  # parameters of the activation of Apertus


@dataclass(frozen=True, slots=True)
class Architecture:
    """Translation of the models of one general.architecture.

    Attributes:
        read: returns the keys of config.json beyond those that all have.
        rotates_pairs: queries and keys are stored so that neighbouring channels rotate.
        features: keys of `config.UNSUPPORTED` that `read` takes into account.
        by_layer: `read` takes into account that heads and MLPs differ between layers.
        recurrent: layers may be recurrent; those have no key-value heads.
        tiled: value heads of recurrent layers are stored in another order: head h uses key head
            h mod key heads.
        latent: keys and values are products of a latent vector; `read` takes their sizes into
            account.
    """

    read: Callable[[Metadata, Json], Json]
    rotates_pairs: bool = False
    features: tuple[str, ...] = ()
    by_layer: bool = False
    recurrent: bool = False
    tiled: bool = False
    latent: bool = False


def rms_eps(m: Metadata) -> float:
    return m.number("attention.layer_norm_rms_epsilon", 1e-6)


def llama(m: Metadata, c: Json, family: str = "llama") -> Json:
    return dict(model_type=family, rms_norm_eps=rms_eps(m), rope_parameters=m.rope(c["head_dim"]))


def partial_rope(m: Metadata, c: Json, family: str) -> Json:
    """Return the keys of a family that rotates a share of each head."""
    fields = llama(m, c, family)
    share = fields["rope_parameters"].get("partial_rotary_factor", 1.0)
    return fields | dict(partial_rotary_factor=share)


def two_ropes(full: Json, local_theta: float) -> Json:
    """Return rope_parameters of a family whose layers with windows rotate by another base."""
    local = {"rope_type": "default", "rope_theta": local_theta}
    return {"full_attention": full, "sliding_attention": local}


def _layer_norm(m: Metadata, c: Json, family: str, key: str = "layer_norm_eps") -> Json:
    """Return the keys of a family with layer norms; `key` is its name of their epsilon."""
    eps = m.number("attention.layer_norm_epsilon", 1e-5)
    return partial_rope(m, c, family) | {key: eps}


def _apertus(m: Metadata, c: Json) -> Json:
    """The keys of the activation have no architecture in their names; a single number is that of
    all layers."""
    layers, xielu = c["num_hidden_layers"], {}
    for name in XIELU:
        values = np.ravel(np.asarray(m.gguf.metadata[f"xielu.{name}"], np.float64))
        if len(values) not in (1, layers) or not np.isfinite(values).all():
            raise ValueError(f"xielu.{name}, of {len(values)} layers")
        xielu[name] = np.broadcast_to(values, layers).tolist()
    return llama(m, c, "apertus") | dict(hidden_act="xielu", xielu=xielu)


def _smollm3(m: Metadata, c: Json) -> Json:
    return llama(m, c, "smollm3") | dict(no_rope_layer_interval=4)


def _phi3(m: Metadata, c: Json) -> Json:
    fields = llama(m, c, "phi3")
    rope = fields["rope_parameters"]
    fields |= dict(
        sliding_window=m.get("attention.sliding_window") or None,
        pad_token_id=None,
        partial_rotary_factor=rope.get("partial_rotary_factor", 1.0),
    )
    key = "original_max_position_embeddings"
    return fields | ({key: rope[key]} if rope.get(key) else {})


def _gemma(m: Metadata, c: Json, layers_of_27b: int) -> Json:
    """Keys that Gemma 2 and 3 share; the 27B model scales attention differently."""
    is_27b = c["num_hidden_layers"] == layers_of_27b
    wide = c["hidden_size"] / c["num_attention_heads"]
    return dict(
        rms_norm_eps=rms_eps(m),
        query_pre_attn_scalar=wide if is_27b else c["head_dim"],
        sliding_window=m.get("attention.sliding_window", 4096),
    )


def _gemma2(m: Metadata, c: Json) -> Json:
    return _gemma(m, c, layers_of_27b=46) | dict(
        model_type="gemma2",
        rope_parameters=m.rope(c["head_dim"]),
        attn_logit_softcapping=m.number("attn_logit_softcapping", 50.0),
        final_logit_softcapping=m.number("final_logit_softcapping", 30.0),
        layer_types=m.layer_types(c["num_hidden_layers"], 2),
    )


def gemma3(m: Metadata, c: Json) -> Json:
    full = m.rope(c["head_dim"])
    full["rope_theta"] = m.number("rope.global.freq_base", m.number("rope.freq_base", 1e6))
    local = m.number("rope.local.freq_base", m.number("rope.freq_base_swa", 10000.0))
    return _gemma(m, c, layers_of_27b=62) | dict(
        model_type="gemma3_text",
        layer_types=m.layer_types(c["num_hidden_layers"], 6),
        rope_parameters=two_ropes(full, local),
    )


def _gpt2(m: Metadata, c: Json) -> Json:
    return dict(
        model_type="gpt2",
        n_embd=c["hidden_size"],
        n_head=c["num_attention_heads"],
        n_layer=c["num_hidden_layers"],
        n_positions=c["max_position_embeddings"],
        n_inner=c["intermediate_size"],
        layer_norm_epsilon=m.number("attention.layer_norm_epsilon", 1e-5),
    )


def _mistral3(m: Metadata, c: Json) -> Json:
    """Mistral Small 3, or Ministral 3, whose queries grow with their position."""
    growth = m.number("attention.temperature_scale", 0.0)
    if not growth:
        return llama(m, c)
    fields = llama(m, c, "ministral3")
    key = "original_max_position_embeddings"
    rope = fields["rope_parameters"]
    length = rope.get(key) or c["max_position_embeddings"]
    return fields | dict(rope_parameters=rope | {"llama_4_scaling_beta": growth, key: length})


def _olmo2(m: Metadata, c: Json) -> Json:
    """OLMo 2, or OLMo 3, which has windows and scales the rope of its other layers only."""
    window = m.get("attention.sliding_window")
    if not window:
        return llama(m, c, "olmo2")
    full = m.rope(c["head_dim"])
    local = m.number("rope.freq_base_swa", full["rope_theta"])
    return llama(m, c, "olmo3") | dict(
        sliding_window=window,
        layer_types=m.layer_types(c["num_hidden_layers"], 4),
        rope_parameters=two_ropes(full, local),
    )


def _exaone4(m: Metadata, c: Json) -> Json:
    window = m.get("attention.sliding_window") or None
    types = m.layer_types(c["num_hidden_layers"], 4) if window else None
    return llama(m, c, "exaone4") | dict(sliding_window=window, layer_types=types)


def _cohere(m: Metadata, c: Json, family: str) -> Json:
    fields = _layer_norm(m, c, family) | dict(
        logit_scale=m.number("logit_scale", 1.0),
        use_qk_norm=m.has("blk.0.attn_q_norm.weight"),
    )
    if family == "cohere":
        return fields
    return fields | dict(
        sliding_window=m.get("attention.sliding_window", 4096),
        layer_types=m.layer_types(c["num_hidden_layers"], 4),
    )


def _starcoder2(m: Metadata, c: Json) -> Json:
    window = m.get("attention.sliding_window", 4096)  # of all published models
    return _layer_norm(m, c, "starcoder2", "norm_epsilon") | dict(sliding_window=window or None)


def _stablelm(m: Metadata, c: Json) -> Json:
    return _layer_norm(m, c, "stablelm") | dict(
        qk_layernorm=m.has("blk.0.attn_q_norm.weight"),
        use_parallel_residual=not m.has("blk.0.ffn_norm.weight"),
    )


DENSE: dict[str, Architecture] = {
    "mistral3": Architecture(_mistral3, True, ("attention.temperature_scale",)),
    "qwen2": Architecture(partial(llama, family="qwen2")),
    "qwen3": Architecture(partial(llama, family="qwen3")),
    "smollm3": Architecture(_smollm3, True),
    "phi2": Architecture(partial(_layer_norm, family="phi")),
    "phi3": Architecture(_phi3),
    "gemma2": Architecture(_gemma2),
    "gemma3": Architecture(gemma3),
    "gpt2": Architecture(_gpt2),
    "olmo2": Architecture(_olmo2),
    "glm4": Architecture(partial(partial_rope, family="glm4"), True),
    "ernie4_5": Architecture(partial(llama, family="ernie4_5"), True),
    "hunyuan-dense": Architecture(partial(llama, family="hunyuan_v1_dense")),
    "exaone4": Architecture(_exaone4),
    "command-r": Architecture(partial(_cohere, family="cohere"), True, ("logit_scale",)),
    "cohere2": Architecture(partial(_cohere, family="cohere2"), True, ("logit_scale",)),
    "starcoder2": Architecture(_starcoder2),
    "stablelm": Architecture(_stablelm),
    "nemotron": Architecture(partial(_layer_norm, family="nemotron", key="norm_eps")),
    "apertus": Architecture(_apertus),
    "arcee": Architecture(partial(llama, family="arcee"), True),
    "seed_oss": Architecture(partial(llama, family="seed_oss")),
}
