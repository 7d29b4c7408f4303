"""Families with mixtures of experts, and the table of all families.

They are built on the dense families of `families`; its docstring says how to add one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forerun.models.families import (
    DENSE,
    Experts,
    Json,
    ernie,
    granite,
    hunyuan,
    llama,
    qwen2,
    qwen3,
    windows_of,
)


def _sparse_layers(c: Json) -> tuple[bool, ...]:
    """Return for each layer of a Qwen model whether it has experts."""
    dense, step = c.get("mlp_only_layers") or [], c.get("decoder_sparse_step", 1)
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(c["num_hidden_layers"]))


def _qwen_experts(c: Json, **others: Any) -> Experts:
    return Experts(
        count=_num_experts(c),
        used=c["num_experts_per_tok"],
        intermediate=c["moe_intermediate_size"],
        layers=_sparse_layers(c),
        normalised=c.get("norm_topk_prob", False),
        **others,
    )


def _qwen2_moe(c: Json) -> Json:
    shared = c.get("shared_expert_intermediate_size") or 0
    experts = _qwen_experts(c, shared=shared, shared_gate=shared > 0)
    return qwen2(c) | dict(layout="qwen_moe", experts=experts, qkv_bias=c.get("qkv_bias", True))


def _qwen3_moe(c: Json) -> Json:
    return qwen3(c) | dict(layout="qwen_moe", experts=_qwen_experts(c))


def _num_experts(c: Json) -> int:
    """Return the number of experts, which versions of transformers name differently."""
    count: int = c["num_local_experts"] if "num_local_experts" in c else c["num_experts"]
    return count


def _all_sparse(c: Json, **others: Any) -> Experts:
    """Return experts of the size `intermediate_size` in all layers, chosen by their logits."""
    fields: Json = dict(
        count=_num_experts(c),
        used=c["num_experts_per_tok"],
        intermediate=c["intermediate_size"],
        layers=(True,) * c["num_hidden_layers"],
        scores="logits",
    )
    return Experts(**fields | others)


def _mixtral(c: Json) -> Json:
    fields = llama({"rms_norm_eps": 1e-5} | c)
    windows = (c.get("sliding_window"),) * fields["layers"]
    return fields | dict(layout="mixtral", experts=_all_sparse(c), windows=windows)


def _olmoe(c: Json) -> Json:
    if c.get("clip_qkv"):
        raise ValueError("clip_qkv, which is not supported")
    normalised = c.get("norm_topk_prob", False)
    experts = _all_sparse(c, scores="softmax", normalised=normalised)
    fields = llama({"rms_norm_eps": 1e-5} | c)
    return fields | dict(layout="qwen_moe", qk_norm="row", experts=experts)


def _gpt_oss(c: Json) -> Json:
    if c.get("swiglu_limit", 7.0) != 7.0 or c.get("swiglu_alpha", 1.702) != 1.702:
        raise ValueError("swiglu_limit or swiglu_alpha, whose other values are not supported")
    fields = llama({"rms_norm_eps": 1e-5, "attention_bias": True} | c)
    types = c.get("layer_types") or [
        "full_attention" if i % 2 else "sliding_attention" for i in range(fields["layers"])
    ]
    return fields | dict(
        layout="gpt_oss",
        activation="clamped_swiglu",
        attention_sinks=True,
        windows=windows_of(types, c.get("sliding_window") or 128),
        experts=_all_sparse(c, bias=True, router_bias=True),
    )


def _granite_moe(c: Json) -> Json:
    return granite(c) | dict(layout="granite_moe", experts=_all_sparse(c))


def _granite_hybrid(c: Json) -> Json:
    """Granite 4: without recurrent layers it is a Granite with a dense MLP beside the experts."""
    types = c.get("layer_types") or c.get("layers_block_type") or []
    if any(t in ("linear_attention", "mamba") for t in types):
        raise ValueError("recurrent layers (layer_types), which are not supported")
    shared = c.get("shared_intermediate_size", 1024)
    fields = granite({**c, "intermediate_size": shared})
    if c.get("position_embedding_type") != "rope":
        fields |= dict(ropes=(), rope_of=(None,) * fields["layers"])
    experts = _all_sparse(c, shared=shared) if c.get("num_local_experts") else None
    return fields | dict(layout="granite_moe", experts=experts)


def _glm4_moe(c: Json) -> Json:
    fields = llama({"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5} | c)
    dense, layers = c.get("first_k_dense_replace", 1), fields["layers"]
    inner = c["moe_intermediate_size"]
    experts = Experts(
        count=c["n_routed_experts"],
        used=c["num_experts_per_tok"],
        intermediate=inner,
        layers=tuple(i >= dense for i in range(layers)),
        shared=c.get("n_shared_experts", 1) * inner,
        scores="sigmoid",
        normalised=c.get("norm_topk_prob", True),
        epsilon=1e-20,
        scale=c.get("routed_scaling_factor", 1.0),
        choice_bias=True,
        groups=c.get("n_group") or 1,
        used_groups=c.get("topk_group") or 1,
    )
    qk_norm = "head" if c.get("use_qk_norm") else ""
    return fields | dict(layout="glm4_moe", qk_norm=qk_norm, out_bias=False, experts=experts)


def _ernie_moe(c: Json) -> Json:
    fields = ernie(c)
    layers, inner = fields["layers"], c["moe_intermediate_size"]
    first, step = c.get("moe_layer_start_index", 1), c.get("moe_layer_interval", 1)
    last = c.get("moe_layer_end_index", -1)
    last = layers - 1 if last == -1 else last
    experts = Experts(
        count=c["moe_num_experts"],
        used=c["moe_k"],
        intermediate=inner,
        layers=tuple((i + 1) % step == 0 and first <= i <= last for i in range(layers)),
        shared=(c.get("moe_num_shared_experts") or 0) * inner,
        epsilon=c.get("moe_norm_min", 1e-12),
        choice_bias=True,
    )
    return fields | dict(layout="ernie_moe", experts=experts)


def _hunyuan_moe(c: Json) -> Json:
    fields = hunyuan(c)
    used = c["moe_topk"]
    used = used[0] if isinstance(used, list) and len(set(used)) == 1 else used
    experts = _all_sparse(
        {**c, "num_experts_per_tok": used},
        scores="softmax",
        shared=c["intermediate_size"],
    )
    return fields | dict(layout="hunyuan_moe", experts=experts)


def _minimax_m2(c: Json) -> Json:
    rotary = c.get("rotary_dim")
    share = {"partial_rotary_factor": rotary / c["head_dim"]} if rotary else {}
    experts = _all_sparse(c, scores="sigmoid", choice_bias=True)
    return llama(c | share) | dict(layout="minimax", qk_norm="row", experts=experts)


FAMILIES: dict[str, Callable[[Json], Json]] = DENSE | {
    "ernie4_5_moe": _ernie_moe,
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
    "granitemoe": _granite_moe,
    "granitemoehybrid": _granite_hybrid,
    "hunyuan_v1_moe": _hunyuan_moe,
    "minimax_m2": _minimax_m2,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
}
