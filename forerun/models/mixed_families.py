"""Families with experts, recurrent layers or parallel residual streams; the table of all families.

They are built on the dense families of `families`; its docstring says how to add one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from forerun.errors import shown
from forerun.models.families import (
    DENSE,
    AltUp,
    Experts,
    Json,
    LatentAttention,
    QueryGrowth,
    RecurrentLayers,
    ernie,
    exaone4,
    gemma3,
    granite,
    hunyuan,
    is_integer,
    is_positive,
    kv_sources,
    layer_types,
    llama,
    query_growth,
    qwen2,
    qwen3,
    rotating_layers,
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


def _gated_qwen_experts(c: Json) -> Experts:
    """Return experts beside a shared one with a gate, if the model has one."""
    shared = c.get("shared_expert_intermediate_size") or 0
    return _qwen_experts(c, shared=shared, shared_gate=shared > 0)


def _qwen2_moe(c: Json) -> Json:
    experts = _gated_qwen_experts(c)
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
    """Granite 4: Mamba-2 or attention, and a dense MLP beside the experts, if there are any."""
    types = c.get("layer_types") or c.get("layers_block_type") or []
    shared = c.get("shared_intermediate_size", 1024)
    fields = granite({**c, "intermediate_size": shared})
    if c.get("position_embedding_type") != "rope":
        fields |= dict(ropes=(), rope_of=(None,) * fields["layers"])
    experts = _all_sparse(c, shared=shared) if c.get("num_local_experts") else None
    fields |= dict(layout="granite_moe", experts=experts)
    is_mamba = tuple(t in ("linear_attention", "mamba") for t in types)
    if not any(is_mamba):
        return fields
    _check_mamba(c)
    heads = c["mamba_n_heads"]
    size = c.get("mamba_d_head", "auto")
    size = c["mamba_expand"] * c["hidden_size"] // heads if size == "auto" else size
    return fields | dict(
        attends=tuple(not mamba for mamba in is_mamba),
        recurrent=_mamba(
            is_mamba,
            heads=heads,
            size=size,
            groups=c["mamba_n_groups"],
            states=c["mamba_d_state"],
            taps=c["mamba_d_conv"],
            bias=c.get("mamba_conv_bias", True),
        ),
    )


def _deepseek_experts(c: Json, layers: tuple[bool, ...], shared: int, **others: Any) -> Experts:
    """Return experts that are chosen as in DeepSeek V3; `shared` is the size of the shared one."""
    return Experts(
        count=c["n_routed_experts"],
        used=c["num_experts_per_tok"],
        intermediate=c["moe_intermediate_size"],
        layers=layers,
        shared=shared,
        scores="sigmoid",
        normalised=c.get("norm_topk_prob", True),
        epsilon=1e-20,
        scale=c.get("routed_scaling_factor", 1.0),
        choice_bias=True,
        groups=c.get("n_group") or 1,
        used_groups=c.get("topk_group") or 1,
        **others,
    )


def _glm4_moe(c: Json) -> Json:
    fields = llama({"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5} | c)
    dense, layers = c.get("first_k_dense_replace", 1), range(fields["layers"])
    shared = c.get("n_shared_experts", 1) * c["moe_intermediate_size"]
    experts = _deepseek_experts(c, tuple(i >= dense for i in layers), shared)
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


def _exaone_moe(c: Json) -> Json:
    """Attention is that of EXAONE 4, with norms before each branch."""
    for name in ("swiglu_limits", "sliding_windows"):
        if any(c.get(name) or ()):
            raise ValueError(f"{name} {shown(c[name])}, which is not supported")
    fields = exaone4(c) | dict(layout="exaone_moe", pre_norm=True, sandwich=False)
    layers, dense = range(fields["layers"]), c.get("first_k_dense_replace", 1)
    kinds = c.get("mlp_layer_types")
    is_sparse = [i >= dense for i in layers] if kinds is None else [k == "sparse" for k in kinds]
    inner = c["moe_intermediate_size"]
    shared = c.get("num_shared_experts", 1) * inner
    named = c | {"n_routed_experts": c["num_experts"]}
    return fields | dict(experts=_deepseek_experts(named, tuple(is_sparse), shared))


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


def _llama4(c: Json) -> Json:
    """Most layers rotate and attend within chunks of the text; the others see all of it, and their
    queries grow. Weights of experts are factors on their inputs."""
    fields = llama({"rms_norm_eps": 1e-5, "rope_theta": 5e5, "head_dim": 128} | c)
    layers, inner = fields["layers"], c["intermediate_size"]
    step, rotates = c.get("interleave_moe_layer_step", 1), rotating_layers(c, layers)[:layers]
    chunk = c.get("attention_chunk_size", 8192)
    types = c.get("layer_types") or [
        "chunked_attention" if own and chunk is not None else "full_attention" for own in rotates
    ]
    sparse = c.get("moe_layers")
    if sparse is None:
        sparse = range(step - 1, layers, step)
    growth = None
    if c.get("attn_temperature_tuning", True):
        beta, length = c.get("attn_scale", 0.1), c.get("floor_scale", 8192)
        growth = QueryGrowth(beta, length, offset=1, unrotated_only=True)
    return fields | dict(
        layout="llama4",
        rotates_pairs=True,
        rope_of=tuple(0 if own else None for own in rotates),
        chunks=tuple(chunk if kind == "chunked_attention" else None for kind in types),
        qk_norm="plain_after_rope" if c.get("use_qk_norm", True) else "",
        query_growth=growth,
        intermediate=c["intermediate_size_mlp"],
        mlp_bias=False,
        experts=Experts(
            count=c["num_local_experts"],
            used=c.get("num_experts_per_tok", 1),
            intermediate=inner,
            layers=tuple(i in sparse for i in range(layers)),
            shared=inner,
            scores="logit_sigmoids",
            normalised=False,
            weighs_inputs=True,
        ),
    )


# ---------------------------------------------------------------- latent attention


def _latent_fields(c: Json) -> Json:
    """Return the fields of DeepSeek V2's attention, and experts in all but the first layers."""
    if c.get("attention_bias"):
        raise ValueError("attention_bias: true, which is not supported with latent attention")
    rotary, plain, rank = c["qk_rope_head_dim"], c["qk_nope_head_dim"], c["kv_lora_rank"]
    fields = llama(c | {"head_dim": rotary, "num_key_value_heads": 1})
    rope = fields["ropes"][0].parameters
    scale = (plain + rotary) ** -0.5
    if rope["rope_type"] != "default" and rope.get("mscale_all_dim"):
        if not is_positive(rope["factor"]):
            raise ValueError(f"the factor of its rope parameters, {shown(rope['factor'])}")
        scale *= (0.1 * rope["mscale_all_dim"] * math.log(rope["factor"]) + 1) ** 2
    layers, kinds = fields["layers"], c.get("mlp_layer_types")
    dense = c.get("first_k_dense_replace", 0 if kinds is None else 1)
    sparse = [k == "sparse" for k in kinds] if kinds else [i >= dense for i in range(layers)]
    shared = (c.get("n_shared_experts") or 0) * c["moe_intermediate_size"]
    return fields | dict(
        layout="deepseek",
        head_dim=rotary + rank,
        attention_scale=scale,
        rotates_pairs=c.get("rope_interleave", True),
        latent=LatentAttention(
            query_rank=c.get("q_lora_rank") or 0,
            rank=rank,
            plain=plain,
            rotary=rotary,
            value=c["v_head_dim"],
        ),
        experts=_deepseek_experts(c, tuple(sparse), shared),
    )


def _deepseek_v2(c: Json) -> Json:
    """Experts are chosen by softmax; groups, where they count, by their best one."""
    fields = _latent_fields(c)
    is_grouped = c.get("topk_method", "greedy") == "group_limited_greedy"
    groups = (c.get("n_group") or 1, c.get("topk_group") or 1) if is_grouped else (1, 1)
    experts = replace(
        fields["experts"],
        scores="softmax",
        normalised=False,
        choice_bias=False,
        groups=groups[0],
        used_groups=groups[1],
        best=1,
    )
    return fields | dict(experts=experts, rotates_pairs=True)


def _mistral4(c: Json) -> Json:
    """Experts are chosen by softmax without a bias; queries grow with their position."""
    # the share of a whole head, of which only some channels can rotate
    rope = {k: v for k, v in c["rope_parameters"].items() if k != "partial_rotary_factor"}
    fields = _latent_fields({"n_shared_experts": 1} | c | {"rope_parameters": rope})
    return fields | dict(
        layout="mistral4",
        experts=replace(fields["experts"], scores="softmax", choice_bias=False),
        query_growth=query_growth(rope),
    )


# ---------------------------------------------------------------- parallel residual streams


def _gemma3n(c: Json) -> Json:
    """Parallel residual streams, a low-rank branch beside attention, sparse gates in the first
    layers, and what Gemma 4's small models have."""
    defaults: Json = {"head_dim": 256, "num_key_value_heads": 2, "sliding_window": 512}
    c = defaults | c
    layers, inner = c["num_hidden_layers"], c["intermediate_size"]
    sizes = inner if isinstance(inner, list) else [inner] * layers
    if len(sizes) != layers or not all(map(is_integer, sizes)):
        raise ValueError(f"intermediate_size {shown(inner)}, not one or {shown(layers)} numbers")
    types = c.get("layer_types") or layer_types(layers, 5)
    fields = gemma3(
        c
        | {"intermediate_size": max(sizes), "layer_types": types}
        | {"query_pre_attn_scalar": 1.0, "attn_logit_softcapping": None}
    )
    if c.get("altup_active_idx"):
        active = c["altup_active_idx"]
        raise ValueError(f"altup_active_idx {shown(active)}: layers may only read the first stream")
    sparsity = c.get("activation_sparsity_pattern")
    if sparsity is None:
        sparse = 10 if layers > 10 else 0
        sparsity = [0.95] * sparse + [0.0] * (layers - sparse)
    if not isinstance(sparsity, list) or len(sparsity) != layers:
        raise ValueError(
            f"activation_sparsity_pattern {shown(sparsity)}, not a number for each of the"
            f" {shown(layers)} layers"
        )
    scaled = c.get("altup_correct_scale", True)
    if not isinstance(scaled, bool):
        raise ValueError(f"altup_correct_scale {shown(scaled)}, which is not true or false")
    return fields | dict(
        layout="gemma3n",
        norm="rms",
        value_norm=True,
        logit_softcap=c.get("final_logit_softcapping", 30.0),
        kv_layers=tuple(kv_sources(types, c.get("num_kv_shared_layers", 15))),
        mlp_sizes=tuple(sizes),
        mlp_sparsity=tuple(sparsity),
        layer_input=c.get("hidden_size_per_layer_input", 256),
        layer_input_vocab=c.get("vocab_size_per_layer_input", 262144),
        altup=AltUp(streams=c.get("altup_num_inputs", 4), scaled=scaled),
        laurel_rank=c.get("laurel_rank", 64),
    )


# ---------------------------------------------------------------- recurrent layers


def _mamba(
    layers: tuple[bool, ...],
    *,
    heads: int,
    size: int,
    groups: int,
    states: int,
    taps: int,
    bias: bool,
    **others: Any,
) -> RecurrentLayers:
    """Return Mamba-2 layers (2405.21060) whose output is gated, then normalised by group."""
    fields: Json = dict(
        kind="mamba",
        layers=layers,
        taps=taps,
        channels=heads * size + 2 * groups * states,
        key_heads=groups,
        key_size=states,
        value_heads=heads,
        value_size=size,
        conv_bias=bias,
        gate_first=True,
        norm_groups=groups,
    )
    return RecurrentLayers(**fields | others)


def _check_mamba(c: Json) -> None:
    """Raise ValueError for features of Mamba-2 layers that are not supported."""
    for name in ("mamba_proj_bias", "use_bias", "projectors_bias"):
        if c.get(name):
            raise ValueError(f"{name}: true, which is not supported")
    activation = c.get("mamba_hidden_act", c.get("hidden_act", "silu"))
    if activation not in ("silu", "swish"):
        raise ValueError(f"activation {shown(activation)} of Mamba layers, which is not supported")
    low, high = c.get("time_step_limit") or (0.0, math.inf)
    if low > 0 or high not in (math.inf, "Infinity", {"__float__": "Infinity"}):
        raise ValueError("time_step_limit, which is not supported")


NEMOTRON_MIXERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
# their names in newer versions of transformers
NEWER_MIXERS = {"linear_attention": "mamba", "full_attention": "attention"}


def _nemotron_h(c: Json) -> Json:
    """Nemotron-H: each layer is one mixer, Mamba-2, attention, an MLP or a mixture of experts."""
    _check_mamba(c)
    given = c.get("layers_block_type") or c.get("layer_types")
    if given is None:
        given = [NEMOTRON_MIXERS[letter] for letter in c["hybrid_override_pattern"]]
    mixers = [NEWER_MIXERS.get(mixer, mixer) for mixer in given]
    unknown = set(mixers) - set(NEMOTRON_MIXERS.values())
    if unknown:
        raise ValueError(f"layers_block_type {shown(min(unknown))}")
    fields = llama(
        {"head_dim": c.get("attention_head_dim") or 128}
        | c
        | {
            "num_hidden_layers": len(mixers),
            "rms_norm_eps": c.get("layer_norm_epsilon", 1e-5),
            "hidden_act": c.get("mlp_hidden_act", "relu2"),
        }
    )
    is_sparse = tuple(mixer == "moe" for mixer in mixers)
    experts = None
    if any(is_sparse):
        shared, latent = c["moe_shared_expert_intermediate_size"], c.get("moe_latent_size") or 0
        experts = _deepseek_experts(c, is_sparse, shared, latent=latent)
    recurrent = None
    if "mamba" in mixers:
        recurrent = _mamba(
            tuple(mixer == "mamba" for mixer in mixers),
            heads=c["mamba_num_heads"],
            size=c["mamba_head_dim"],
            groups=c["n_groups"],
            states=c["ssm_state_size"],
            taps=c.get("conv_kernel", 4),
            bias=c.get("use_conv_bias", True),
        )
    return fields | dict(
        layout="nemotron_h",
        gated=False,
        ropes=(),
        rope_of=(None,) * len(mixers),
        attends=tuple(mixer == "attention" for mixer in mixers),
        mlp_sizes=tuple(fields["intermediate"] if mixer == "mlp" else 0 for mixer in mixers),
        experts=experts,
        recurrent=recurrent,
    )


def _falcon_h1(c: Json) -> Json:
    """Falcon-H1: Mamba-2 and attention side by side in each layer, and factors on everything."""
    _check_mamba(c)
    if c.get("attention_bias"):
        raise ValueError("attention_bias: true, which is not supported")
    fields = llama({"rms_norm_eps": 1e-5} | c)
    heads, groups, states = c["mamba_n_heads"], c["mamba_n_groups"], c["mamba_d_state"]
    inner = c.get("mamba_d_ssm") or c["mamba_expand"] * c["hidden_size"]
    if inner % heads:
        raise ValueError(
            f"mamba_n_heads {shown(heads)}, which cannot share {shown(inner)} channels"
        )
    scale_in = c.get("attention_in_multiplier", 1.0)
    mlp_gate_scale, mlp_out_scale = c.get("mlp_multipliers") or (1.0, 1.0)
    given = c.get("ssm_multipliers") or (1.0,) * 5
    gates, values, keys, queries, decays = (
        c.get("ssm_in_multiplier", 1.0) * factor for factor in given
    )
    norm = c.get("mamba_rms_norm", False)
    recurrent = _mamba(
        (True,) * fields["layers"],
        heads=heads,
        size=inner // heads,
        groups=groups,
        states=states,
        taps=c["mamba_d_conv"],
        bias=c.get("mamba_conv_bias", True),
        norm=norm,
        gate_first=not (norm and c.get("mamba_norm_before_gate", True)),
        channel_scales=(values, keys, queries),
        gate_scale=gates,
        decay_scale=decays,
        out_scale=c.get("ssm_out_multiplier", 1.0),
    )
    return fields | dict(
        layout="falcon_h1",
        # queries and keys are products of the scaled input, and so are values
        attention_scale=fields["attention_scale"] * scale_in**2 * c.get("key_multiplier", 1.0),
        attention_out_scale=scale_in * c.get("attention_out_multiplier", 1.0),
        embed_scale=c.get("embedding_multiplier", 1.0),
        logit_scale=c.get("lm_head_multiplier", 1.0),
        mlp_gate_scale=mlp_gate_scale,
        mlp_out_scale=mlp_out_scale,
        recurrent=recurrent,
    )


def _minimax(c: Json) -> Json:
    """MiniMax-Text-01: lightning attention (2401.04658) in some layers, whose norms replace the
    residual stream, and factors on the stream and on all branches."""
    head_dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    rotary = c.get("rotary_dim")
    share = {"partial_rotary_factor": rotary / head_dim} if rotary else {}
    fields = _mixtral({"rope_theta": 1e6} | c | share)
    if fields["activation"] != "silu":
        raise ValueError(f"activation {shown(c['hidden_act'])}, which is not supported")
    layers, heads = fields["layers"], fields["heads"]
    types = c.get("layer_types") or (["full_attention", "linear_attention"] * layers)[:layers]
    unknown = set(types) - {"full_attention", "linear_attention"}
    if unknown:
        raise ValueError(f"layer_types {shown(min(unknown))}")
    attends = tuple(kind == "full_attention" for kind in types)
    stream = {True: c.get("full_attn_alpha_factor", 1), False: c.get("linear_attn_alpha_factor", 1)}
    mlp_stream = c.get("mlp_alpha_factor", 1)
    return fields | dict(
        layout="minimax_text",
        attends=attends,
        attention_out_scale=c.get("full_attn_beta_factor", 1),
        experts=replace(fields["experts"], scale=c.get("mlp_beta_factor", 1)),
        normed_residual=tuple((stream[full], mlp_stream) for full in attends),
        recurrent=RecurrentLayers(
            kind="lightning",
            layers=tuple(not full for full in attends),
            taps=1,
            channels=3 * heads * head_dim,
            key_heads=heads,
            key_size=head_dim,
            value_heads=heads,
            value_size=head_dim,
            gate="sigmoid",
            norm_groups=1,
            out_scale=c.get("linear_attn_beta_factor", 1),
        ),
    )


def _delta_fields(c: Json) -> Json:
    """Return the fields that Qwen3-Next and the Qwen3.5 models share: gated delta rule (2412.06464)
    in three of four layers, gated attention in the others."""
    fields = qwen3({"partial_rotary_factor": 0.25, "head_dim": 256} | c)
    layers = fields["layers"]
    types = c.get("layer_types") or layer_types(layers, c.get("full_attention_interval") or 4)
    attends = tuple(t == "full_attention" for t in types)
    keys, key_size = c["linear_num_key_heads"], c["linear_key_head_dim"]
    values, value_size = c["linear_num_value_heads"], c["linear_value_head_dim"]
    return fields | dict(
        norm="rms_plus_one",
        output_gate=True,
        windows=(None,) * layers,
        attends=attends,
        recurrent=RecurrentLayers(
            kind="delta",
            layers=tuple(not attention for attention in attends),
            taps=c.get("linear_conv_kernel_dim", 4),
            channels=2 * keys * key_size + values * value_size,
            key_heads=keys,
            key_size=key_size,
            value_heads=values,
            value_size=value_size,
        ),
    )


def _qwen3_5(c: Json) -> Json:
    return _delta_fields(c) | dict(layout="qwen3_5")


def _qwen3_5_moe(c: Json) -> Json:
    inner = c["moe_intermediate_size"] * c["num_experts_per_tok"]
    c = {"norm_topk_prob": True, "intermediate_size": inner} | c
    return _delta_fields(c) | dict(layout="qwen3_5", experts=_gated_qwen_experts(c))


def _qwen3_next(c: Json) -> Json:
    c = {"norm_topk_prob": True} | c
    return _delta_fields(c) | dict(layout="qwen3_next", experts=_gated_qwen_experts(c))


def _lfm2(c: Json) -> Json:
    """Gated short convolutions in most layers, attention in the others."""
    inner = c.get("intermediate_size") or c.get("block_ff_dim") or 0
    if c.get("block_auto_adjust_ff_dim", True):
        inner = int(2 * inner / 3)
        inner = int(c.get("block_ffn_dim_multiplier", 1.0) * inner)
        step = c.get("block_multiple_of", 256)
        inner = step * -(-inner // step)
    epsilon = {"rms_norm_eps": c.get("norm_eps", 1e-5), "intermediate_size": inner}
    fields = llama(c | epsilon)
    layers, full = fields["layers"], c.get("full_attn_idxs")
    types = c.get("layer_types") or [
        "full_attention" if full is None or i in full else "conv" for i in range(layers)
    ]
    attends = tuple(t == "full_attention" for t in types)
    return fields | dict(
        layout="lfm2",
        qk_norm="head",
        attends=attends,
        tied=c.get("tie_word_embeddings", c.get("tie_embedding", True)),
        recurrent=RecurrentLayers(
            kind="conv",
            layers=tuple(not attention for attention in attends),
            taps=c.get("conv_L_cache", 3),
            channels=c["hidden_size"],
            conv_bias=c.get("conv_bias", False),
            norm=False,
        ),
    )


def _lfm2_moe(c: Json) -> Json:
    fields = _lfm2(c | {"block_auto_adjust_ff_dim": False})
    dense = c.get("num_dense_layers", 2)
    experts = Experts(
        count=_num_experts(c),
        used=c["num_experts_per_tok"],
        intermediate=c["moe_intermediate_size"],
        layers=tuple(i >= dense for i in range(fields["layers"])),
        scores="sigmoid",
        normalised=c.get("norm_topk_prob", True),
        epsilon=1e-6,
        scale=c.get("routed_scaling_factor", 1.0),
        choice_bias=c.get("use_expert_bias", True),
    )
    return fields | dict(experts=experts)


FAMILIES: dict[str, Callable[[Json], Json]] = DENSE | {
    "ernie4_5_moe": _ernie_moe,
    "exaone_moe": _exaone_moe,
    "falcon_h1": _falcon_h1,
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
    "granitemoe": _granite_moe,
    "granitemoehybrid": _granite_hybrid,
    "hunyuan_v1_moe": _hunyuan_moe,
    "minimax": _minimax,
    "minimax_m2": _minimax_m2,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "gemma3n_text": _gemma3n,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _latent_fields,
    "glm4_moe_lite": _latent_fields,
    "mistral4": _mistral4,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2_moe,
    "llama4_text": _llama4,
    "nemotron_h": _nemotron_h,
    "qwen3_5_moe_text": _qwen3_5_moe,
    "qwen3_5_text": _qwen3_5,
    "qwen3_next": _qwen3_next,
}
