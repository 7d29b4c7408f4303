"""One small table a family: its config.json in one vocabulary, the fields of `ModelConfig`.

Both spellings are read: the older `rope_theta` + `rope_scaling` and the newer `rope_parameters`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from forerun.errors import nearest, shown

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Rope:
    """One rotary embedding. `parameters` is Hugging Face's rope_parameters; `dim` the channels that rotate."""

    dim: int
    parameters: Json


def is_whole(value: object) -> bool:
    """Whether this is a whole number, and no true or false."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_positive(value: object) -> bool:
    """Whether this is a finite number over 0."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")


def _rope(raw: Json, parameters: Json | None, head_dim: int) -> Rope:
    parameters = dict(parameters or {})
    parameters["rope_type"] = parameters.get("rope_type", parameters.pop("type", "default"))
    parameters.setdefault("rope_theta", raw.get("rope_theta", 10000.0))
    fraction = parameters.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    if not is_positive(fraction):
        raise ValueError(f"partial_rotary_factor {shown(fraction)}")
    parameters["partial_rotary_factor"] = fraction
    return Rope(int(head_dim * fraction), parameters)


def _act(name: str) -> str:
    known = {"silu": "silu", "swish": "silu", "gelu": "gelu"}
    known |= dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu_tanh")
    if name not in known:
        raise ValueError(f"activation {shown(name)}: {nearest(name, known)}")
    return known[name]


def _llama(c: Json) -> Json:
    """Llama 2 and 3, and what most families start from."""
    heads, layers = c["num_attention_heads"], c["num_hidden_layers"]
    head_dim = c.get("head_dim") or c["hidden_size"] // heads
    return dict(
        vocab=c["vocab_size"],
        hidden=c["hidden_size"],
        layers=layers,
        heads=heads,
        kv_heads=c.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        intermediate=c["intermediate_size"],
        context=c["max_position_embeddings"],
        norm_eps=c.get("rms_norm_eps", 1e-6),
        attention_scale=head_dim**-0.5,
        ropes=(_rope(c, c.get("rope_parameters") or c.get("rope_scaling"), head_dim),),
        rope_of=(0,) * layers,
        windows=(None,) * layers,
        activation=_act(c.get("hidden_act", "silu")),
        qkv_bias=c.get("attention_bias", False),
        out_bias=c.get("attention_bias", False),
        mlp_bias=c.get("mlp_bias", False),
        tied=c.get("tie_word_embeddings", False),
    )


def _mistral(c: Json) -> Json:
    fields = _llama(c)
    return fields | dict(windows=(c.get("sliding_window", 4096),) * fields["layers"])


def _layered_windows(c: Json, layers: int) -> tuple[int | None, ...]:
    """Windows of the layers that layer_types calls sliding_attention (Qwen, SmolLM3)."""
    if not c.get("use_sliding_window"):
        return (None,) * layers
    first = c.get("max_window_layers", layers)
    default = ["full_attention" if i < first else "sliding_attention" for i in range(layers)]
    types = c.get("layer_types") or default
    return tuple(c["sliding_window"] if t == "sliding_attention" else None for t in types)


def _qwen2(c: Json) -> Json:
    fields = _llama(c)
    return fields | dict(qkv_bias=True, out_bias=False, windows=_layered_windows(c, fields["layers"]))


def _qwen3(c: Json) -> Json:
    fields = _llama(c)
    return fields | dict(qk_norm=True, windows=_layered_windows(c, fields["layers"]))


def _smollm3(c: Json) -> Json:
    fields = _llama({"rope_theta": 2e6, "tie_word_embeddings": True} | c)
    layers, interval = fields["layers"], c.get("no_rope_layer_interval", 4)
    # 1 means that the layer does rotate, whatever the name says
    rotates = c.get("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(layers)]
    return fields | dict(
        rope_of=tuple(0 if r else None for r in rotates),
        windows=_layered_windows(c, layers),
    )


def _phi3(c: Json) -> Json:
    fields = _llama({"rms_norm_eps": 1e-5} | c)
    rope = fields["ropes"][0]
    if rope.parameters["rope_type"] in ("su", "longrope"):
        original = c.get("original_max_position_embeddings") or rope.parameters.get("original_max_position_embeddings")
        parameters = rope.parameters | {"rope_type": "longrope", "original_max_position_embeddings": original}
        fields["ropes"] = (Rope(rope.dim, parameters),)
    windows = (c.get("sliding_window"),) * fields["layers"]
    return fields | dict(layout="phi3", windows=windows, qkv_bias=False, out_bias=False)


def _gemma2(c: Json) -> Json:
    fields = _llama(c | {"hidden_act": c.get("hidden_activation") or "gelu_pytorch_tanh"})
    default = ["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(fields["layers"])]
    types = c.get("layer_types") or default
    return fields | dict(
        norm="rms_plus_one",
        sandwich=True,
        attention_scale=c["query_pre_attn_scalar"] ** -0.5,
        embed_scale=c["hidden_size"] ** 0.5,
        attention_softcap=c.get("attn_logit_softcapping", 50.0),
        logit_softcap=c.get("final_logit_softcapping", 30.0),
        windows=tuple(c["sliding_window"] if t == "sliding_attention" else None for t in types),
        tied=c.get("tie_word_embeddings", True),
    )


def _gemma3(c: Json) -> Json:
    pattern = c.get("sliding_window_pattern") or c.get("_sliding_window_pattern") or 6
    default = [
        "full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(c["num_hidden_layers"])
    ]
    types = c.get("layer_types") or default
    caps = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    fields = _gemma2(caps | c | {"layer_types": types, "rope_parameters": None, "rope_scaling": None})
    both = c.get("rope_parameters") or {}
    full = both.get("full_attention") or {"rope_theta": c.get("rope_theta", 1e6), **(c.get("rope_scaling") or {})}
    local = both.get("sliding_attention") or {"rope_theta": c.get("rope_local_base_freq", 10000.0)}
    return fields | dict(
        qk_norm=True,
        ropes=(_rope(c, full, fields["head_dim"]), _rope(c, local, fields["head_dim"])),
        rope_of=tuple(1 if t == "sliding_attention" else 0 for t in types),
    )


def _gpt2(c: Json) -> Json:
    hidden, heads, layers = c["n_embd"], c["n_head"], c["n_layer"]
    if c.get("scale_attn_by_inverse_layer_idx"):
        raise ValueError("scale_attn_by_inverse_layer_idx: true, which is not supported")
    return dict(
        vocab=c["vocab_size"],
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        intermediate=c.get("n_inner") or 4 * hidden,
        context=c["n_positions"],
        norm="layer",
        norm_eps=c.get("layer_norm_epsilon", 1e-5),
        attention_scale=(hidden // heads) ** -0.5 if c.get("scale_attn_weights", True) else 1.0,
        ropes=(),
        rope_of=(None,) * layers,
        windows=(None,) * layers,
        layout="gpt2",
        activation=_act(c.get("activation_function", "gelu_new")),
        gated=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        learned_positions=True,
        tied=c.get("tie_word_embeddings", True),
    )


FAMILIES: dict[str, Callable[[Json], Json]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "mimo": _qwen2,
    "qwen3": _qwen3,
    "smollm3": _smollm3,
    "phi3": _phi3,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gpt2": _gpt2,
}
OWN_DRAFTER = {"mimo": "model.mtp_layers."}  # how the tensors begin that draft for a model, in its own checkpoint
