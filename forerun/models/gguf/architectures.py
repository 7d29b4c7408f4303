"""Translate GGUF metadata into the keys of config.json, from which the families are read.

`dense_architectures` has those of dense models; the others and the table of all are here.

Many values are not stored in a file but follow from its architecture or its tensors. To add an
architecture, add an entry to `ARCHITECTURES`: a function that returns the keys of its config.json,
how its rotary embedding is stored, and which of the features in `config.UNSUPPORTED` it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from statistics import NormalDist

import numpy as np

from forerun.errors import shown
from forerun.models.config import MAX_CONTEXT
from forerun.models.families import Json
from forerun.models.gguf.container import GgufFile
from forerun.models.gguf.dense_architectures import (
    DENSE,
    Architecture,
    gemma3,
    llama,
    partial_rope,
    rms_eps,
    two_ropes,
)
from forerun.models.gguf.metadata import Metadata

# values of expert_gating_func; absent and 0 mean the architecture's own
SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 1, 2, 3


def hugging_face(m: Metadata) -> Json:
    """Return the equivalent config.json. Raises LookupError, TypeError, ValueError."""
    layers = m.integer("block_count") - int(m.get("nextn_predict_layers", 0))
    if not 0 < layers <= len(m.gguf.tensors):
        raise ValueError(
            f"{m.prefix}block_count ({layers} layers of {len(m.gguf.tensors)} tensors)"
        )
    hidden = m.integer("embedding_length")
    heads = m.integer("attention.head_count")
    context = m.integer("context_length")
    if context > MAX_CONTEXT:
        raise ValueError(f"{m.prefix}context_length ({context})")
    head_dim = hidden // heads
    if m.get("attention.key_length"):
        head_dim = m.integer("attention.key_length")
    architecture = ARCHITECTURES[m.gguf.architecture]
    if not architecture.latent and m.get("attention.value_length", head_dim) != head_dim:
        raise ValueError(f"{m.prefix}attention.value_length, which differs from the keys'")
    embedding = m.gguf.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise LookupError("the tensor token_embd.weight")
    if architecture.by_layer:
        kv_heads = m.by_layer("attention.head_count_kv", layers, heads)[0]
        inner = m.by_layer("feed_forward_length", layers)[0]
    elif architecture.recurrent:
        kv_heads, inner = m.kv_heads(layers, heads), m.inner_size(layers)
    else:
        kv_heads = m.integer("attention.head_count_kv", "attention.head_count")
        inner = m.inner_size(layers)
    common = dict(
        vocab_size=embedding.shape[0],
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=inner,
        max_position_embeddings=context,
        bos_token_id=m.gguf.metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=m.gguf.metadata.get("tokenizer.ggml.eos_token_id"),
    )
    return common | architecture.read(m, common)


# ---------------------------------------------------------------- mixtures of experts


def _gemma4(m: Metadata, c: Json) -> Json:
    """Gemma 4: the key of the head size means global layers, whose values may be their keys."""
    layers = c["num_hidden_layers"]
    types = m.layer_types(layers, 6)
    is_global = [t == "full_attention" for t in types]
    kv_heads = m.by_layer("attention.head_count_kv", layers, c["num_attention_heads"])
    local = [heads for heads, g in zip(kv_heads, is_global, strict=False) if not g]
    wide = [heads for heads, g in zip(kv_heads, is_global, strict=False) if g]
    if len(set(local)) > 1 or len(set(wide)) > 1 or not local or not wide:
        raise ValueError(f"{m.prefix}attention.head_count_kv, whose heads are of no two kinds")
    shared = m.count("attention.shared_kv_layers", 0)
    sizes = m.by_layer("feed_forward_length", layers)
    is_wide = any(size != sizes[0] for size in sizes)
    if is_wide and sizes != [sizes[0] * (1 + (i >= layers - shared)) for i in range(layers)]:
        raise ValueError(f"{m.prefix}feed_forward_length, which differs between layers")
    own = [i for i in range(layers) if is_global[i] and m.has(f"blk.{i}.attn_k.weight")]
    fields = dict(
        model_type="gemma4_text",
        rms_norm_eps=rms_eps(m),
        layer_types=types,
        sliding_window=m.get("attention.sliding_window", 512),
        head_dim=m.integer("attention.key_length_swa"),
        global_head_dim=m.integer("attention.key_length"),
        num_key_value_heads=local[0],
        num_global_key_value_heads=wide[0],
        attention_k_eq_v=any(not m.has(f"blk.{i}.attn_v.weight") for i in own),
        num_kv_shared_layers=shared,
        use_double_wide_mlp=is_wide,
        hidden_size_per_layer_input=m.count("embedding_length_per_layer_input", 0),
        final_logit_softcapping=m.number("final_logit_softcapping", 30.0),
        rope_parameters=two_ropes(m.proportional_rope(), m.number("rope.freq_base_swa", 1e4)),
    )
    if not fields["attention_k_eq_v"] and wide[0] != local[0]:
        raise ValueError(f"{m.prefix}attention.head_count_kv, which differs between layers")
    if not m.get("expert_count"):
        return fields
    experts = m.experts(SOFTMAX, used="top_k_experts", size="moe_intermediate_size")
    return fields | experts | dict(enable_moe_block=True)


def _granite(m: Metadata, c: Json) -> Json:
    """Granite 3 and 4: dense, with experts, with a dense MLP beside them, and with Mamba-2."""
    fields = llama(m, c, "granite") | dict(
        attention_multiplier=m.number("attention.scale", 0.0) or c["head_dim"] ** -0.5,
        embedding_multiplier=m.number("embedding_scale", 1.0),
        residual_multiplier=m.number("residual_scale", 1.0),
        logits_scaling=m.number("logit_scale", 1.0),
    )
    rotates = m.flag("rope.scaling.finetuned", True)  # llama.cpp's switch for rope
    is_mamba = m.layers_with("ssm_", c["num_hidden_layers"])
    is_plain = rotates and not any(is_mamba)
    if not m.get("expert_count"):
        if is_plain:
            return fields
        experts = dict(num_local_experts=0, shared_intermediate_size=c["intermediate_size"])
    else:
        experts = m.experts(SOFTMAX, SOFTMAX_OF_CHOSEN, count="num_local_experts")
        shared = m.get("expert_shared_feed_forward_length")
        if not shared and is_plain:
            return fields | experts | dict(model_type="granitemoe")
        experts |= dict(shared_intermediate_size=shared or 0)
    return (
        fields
        | experts
        | dict(
            model_type="granitemoehybrid",
            layer_types=["linear_attention" if mamba else "full_attention" for mamba in is_mamba],
            position_embedding_type="rope" if rotates else None,
        )
        | (_mamba(m) if any(is_mamba) else {})
    )


def _mixtral(m: Metadata, c: Json) -> Json:
    """Llama and Mistral, or Mixtral, which shares their architecture."""
    if not m.get("expert_count"):
        return llama(m, c)
    experts = m.experts(SOFTMAX, SOFTMAX_OF_CHOSEN, count="num_local_experts")
    return llama(m, c, "mixtral") | experts


def _qwen_experts(m: Metadata, c: Json, normalised: bool) -> Json:
    """Return the keys of experts as Qwen has them; `normalised` is what norm_topk_prob is if the
    file does not say."""
    shared = m.get("expert_shared_feed_forward_length") or c["intermediate_size"]
    fields = m.experts(SOFTMAX, size="moe_intermediate_size", normalised=None)
    return fields | dict(
        shared_expert_intermediate_size=shared,
        norm_topk_prob=m.flag("expert_weights_norm", normalised),
    )


def _qwen_moe(m: Metadata, c: Json, family: str) -> Json:
    return llama(m, c, family) | _qwen_experts(m, c, family == "qwen3_moe")


def _olmoe(m: Metadata, c: Json) -> Json:
    fields = llama(m, c, "olmoe") | m.experts(SOFTMAX, normalised=None)
    return fields | dict(norm_topk_prob=m.flag("expert_weights_norm", False))


def _gpt_oss(m: Metadata, c: Json) -> Json:
    fields = llama(m, c, "gpt_oss") | m.experts(SOFTMAX_OF_CHOSEN, count="num_local_experts")
    return fields | dict(
        rope_parameters=fields["rope_parameters"] | {"truncate": False},
        sliding_window=m.get("attention.sliding_window", 128),
        layer_types=m.layer_types(c["num_hidden_layers"], 2),
    )


def _grouped_experts(
    m: Metadata, gating: int, normalised: bool | None, norm_topk_prob: bool = False
) -> Json:
    """Return the keys of experts as DeepSeek has them.

    gating, normalised: as in `Metadata.experts`. norm_topk_prob: if the file does not say."""
    fields = m.experts(
        gating,
        count="n_routed_experts",
        size="moe_intermediate_size",
        normalised=normalised,
        scaled=True,
    )
    return fields | dict(
        n_shared_experts=m.count("expert_shared_count", 0),
        first_k_dense_replace=m.count("leading_dense_block_count", 0),
        routed_scaling_factor=m.number("expert_weights_scale", 0.0) or 1.0,
        norm_topk_prob=m.flag("expert_weights_norm", norm_topk_prob),
        n_group=m.count("expert_group_count", 1) or 1,
        topk_group=m.count("expert_group_used_count", 1) or 1,
    )


def _glm4_moe(m: Metadata, c: Json) -> Json:
    fields = partial_rope(m, c, "glm4_moe") | _grouped_experts(m, SIGMOID, None)
    return fields | dict(use_qk_norm=m.has("blk.0.attn_q_norm.weight"))


def _ernie_moe(m: Metadata, c: Json) -> Json:
    experts = m.experts(
        SOFTMAX, count="moe_num_experts", used="moe_k", size="moe_intermediate_size"
    )
    fields = llama(m, c, "ernie4_5_moe") | experts
    return fields | dict(
        moe_num_shared_experts=m.count("expert_shared_count", 0),
        moe_layer_start_index=m.count("leading_dense_block_count", 0),
        moe_layer_interval=m.count("interleave_moe_layer_step", 1),
    )


def _exaone_moe(m: Metadata, c: Json) -> Json:
    """K-EXAONE; the layers with windows rotate."""
    window = m.integer("attention.sliding_window")
    if not window:
        raise ValueError(f"{m.prefix}attention.sliding_window (0), which is not supported")
    experts = _grouped_experts(m, SIGMOID, None)
    names = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
    return (
        llama(m, c, "exaone_moe")
        | {names.get(key, key): value for key, value in experts.items()}
        | dict(sliding_window=window, layer_types=m.layer_types(c["num_hidden_layers"], 4))
    )


def _hunyuan_moe(m: Metadata, c: Json) -> Json:
    return llama(m, c, "hunyuan_v1_moe") | m.experts(SOFTMAX, used="moe_topk")


def _minimax_m2(m: Metadata, c: Json) -> Json:
    experts = m.experts(SIGMOID, count="num_local_experts")
    return partial_rope(m, c, "minimax_m2") | experts


def _llama4(m: Metadata, c: Json) -> Json:
    """Llama 4. Files of llama.cpp's converter do not say the length of chunks and how queries grow,
    which are the same in all published models, nor that Maverick, which has 128 experts, does not
    normalise queries and keys."""
    if m.get("attention.sliding_window") == 0:
        raise ValueError(f"{m.prefix}attention.sliding_window (0), which is not supported")
    experts = m.experts(SIGMOID, count="num_local_experts", normalised=False)
    step, layers = m.integer("interleave_moe_layer_step"), c["num_hidden_layers"]
    if not 0 < step <= layers:
        raise ValueError(f"{m.prefix}interleave_moe_layer_step ({step})")
    growth = m.number("attention.temperature_scale", 0.1)
    fields = llama(m, c, "llama4_text") | experts
    return fields | dict(
        intermediate_size_mlp=c["intermediate_size"],
        interleave_moe_layer_step=step,
        attention_chunk_size=m.count("attention.chunk_size", 8192),
        use_qk_norm=experts["num_local_experts"] != 128,
        attn_temperature_tuning=growth != 0,
        attn_scale=growth,
        floor_scale=m.count("attention.temperature_length", 8192),
    )


# ---------------------------------------------------------------- latent attention


def _deepseek2(m: Metadata, c: Json) -> Json:
    """DeepSeek V2 and V3, and GLM-4.7-Flash, which has the experts of V3.

    Older files have no keys with `_mla`: their key length is that of a head and not that of what is
    cached. Files of V2, and those of GLM-4.7-Flash, do not say how experts are scored; V3 alone has
    a bias for the choice."""
    is_v3 = m.get("expert_gating_func") == SIGMOID
    if not m.get("expert_gating_func"):
        is_v3 = any(".exp_probs_b." in name for name in m.gguf.tensors)
    gating, normalised = (SIGMOID, None) if is_v3 else (SOFTMAX, False)
    fields = _latent_attention(m) | _grouped_experts(m, gating, normalised)
    return fields | dict(
        model_type="deepseek_v3" if is_v3 else "deepseek_v2",
        topk_method="group_limited_greedy" if fields["n_group"] != 1 else "greedy",
    )


def _mistral4(m: Metadata, c: Json) -> Json:
    """Mistral 4. Files of llama.cpp's converter do not say how queries grow, which is the same in
    all published models."""
    fields = _latent_attention(m) | _grouped_experts(m, SOFTMAX, None)
    rope, key = fields["rope_parameters"], "original_max_position_embeddings"
    length = rope.get(key) or c["max_position_embeddings"]
    if m.count("attention.temperature_length", length) != length:
        raise ValueError(f"{m.prefix}attention.temperature_length, which is not {shown(length)}")
    growth = m.number("attention.temperature_scale", 0.1)
    rope = rope | {"llama_4_scaling_beta": growth, key: length}
    return fields | dict(model_type="mistral4", rope_parameters=rope)


def _latent_attention(m: Metadata) -> Json:
    rotary = m.integer("rope.dimension_count")
    head = m.integer("attention.key_length_mla", "attention.key_length")
    if head <= rotary:
        raise ValueError(f"{m.prefix}rope.dimension_count ({rotary} of {head} channels)")
    return dict(
        rms_norm_eps=rms_eps(m),
        rope_parameters=m.latent_rope(rotary),
        q_lora_rank=m.count("attention.q_lora_rank", 0) or None,
        kv_lora_rank=m.integer("attention.kv_lora_rank"),
        qk_rope_head_dim=rotary,
        qk_nope_head_dim=head - rotary,
        v_head_dim=m.integer("attention.value_length_mla", "attention.value_length"),
    )


# ---------------------------------------------------------------- parallel residual streams


def _gemma3n(m: Metadata, c: Json) -> Json:
    """Gemma 3n. The file has the cutoffs of gates in standard deviations; transformers has the
    shares of gates that they close."""
    layers = c["num_hidden_layers"]
    cutoffs = np.ravel(np.asarray(m.gguf.metadata[f"{m.prefix}activation_sparsity_scale"]))
    if len(cutoffs) != layers or cutoffs.dtype.kind != "f" or np.isnan(cutoffs).any():
        raise ValueError(f"{m.prefix}activation_sparsity_scale, of {len(cutoffs)} layers")
    shares = [np.float32(NormalDist().cdf(float(cutoff))) for cutoff in cutoffs]
    return gemma3(m, c) | dict(
        model_type="gemma3n_text",
        intermediate_size=m.by_layer("feed_forward_length", layers),
        layer_types=m.layer_types(layers, 5),
        sliding_window=m.count("attention.sliding_window", 512),
        final_logit_softcapping=m.number("final_logit_softcapping", 30.0),
        num_kv_shared_layers=m.count("attention.shared_kv_layers", max(layers - 20, 0)),
        activation_sparsity_pattern=[float(str(share)) for share in shares],
        altup_num_inputs=m.count("altup.num_inputs", 4),
        altup_active_idx=m.count("altup.active_idx", 0),
        laurel_rank=m.gguf.tensors["blk.0.laurel_l.weight"].shape[0],
        hidden_size_per_layer_input=m.count("embedding_length_per_layer_input", 256),
        vocab_size_per_layer_input=m.gguf.tensors["per_layer_token_embd.weight"].shape[0],
    )


# ---------------------------------------------------------------- recurrent layers


def _mamba(m: Metadata) -> Json:
    """Return the keys of Mamba-2 layers, which most families call alike."""
    heads = m.integer("ssm.time_step_rank")
    return dict(
        mamba_n_heads=heads,
        mamba_d_head=m.integer("ssm.inner_size") // heads,
        mamba_n_groups=m.integer("ssm.group_count"),
        mamba_d_state=m.integer("ssm.state_size"),
        mamba_d_conv=m.integer("ssm.conv_kernel"),
        mamba_conv_bias=any(name.endswith("ssm_conv1d.bias") for name in m.gguf.tensors),
    )


def _falcon_h1(m: Metadata, c: Json) -> Json:
    """Falcon-H1: the factors are a part of the weights, and gates precede norms."""
    return (
        llama(m, c, "falcon_h1")
        | _mamba(m)
        | dict(
            mamba_d_ssm=m.integer("ssm.inner_size"),
            mamba_rms_norm=m.has("blk.0.ssm_norm.weight"),
            mamba_norm_before_gate=False,
        )
    )


def _nemotron_h(m: Metadata, c: Json) -> Json:
    layers = c["num_hidden_layers"]
    mixers = ["mlp"] * layers
    for mixer, tensor in {
        "linear_attention": "ssm_",
        "full_attention": "attn_output.",
        "moe": "ffn_gate_inp.",
    }.items():
        for i, has in enumerate(m.layers_with(tensor, layers)):
            mixers[i] = mixer if has else mixers[i]
    dense = [i for i, mixer in enumerate(mixers) if mixer == "mlp"]
    up = m.gguf.tensors[f"blk.{dense[0]}.ffn_up.weight"].shape if dense else ()
    keys = _mamba(m)
    eps = m.get("attention.layer_norm_rms_epsilon") or m.get("attention.layer_norm_epsilon", 1e-5)
    fields = dict(
        model_type="nemotron_h",
        layers_block_type=mixers,
        intermediate_size=up[0] if dense else c["intermediate_size"],
        layer_norm_epsilon=float(str(np.float32(eps))),
        mamba_num_heads=keys["mamba_n_heads"],
        mamba_head_dim=keys["mamba_d_head"],
        n_groups=keys["mamba_n_groups"],
        ssm_state_size=keys["mamba_d_state"],
        conv_kernel=keys["mamba_d_conv"],
        use_conv_bias=keys["mamba_conv_bias"],
    )
    if "moe" not in mixers:
        return fields
    fields |= _grouped_experts(m, SIGMOID, None, norm_topk_prob=True)
    return fields | dict(
        moe_shared_expert_intermediate_size=m.integer("expert_shared_feed_forward_length"),
        moe_latent_size=m.get("moe_latent_size"),
    )


def _qwen_delta(m: Metadata, c: Json, family: str) -> Json:
    """Qwen3-Next and Qwen3.5: gated delta rule in most layers."""
    heads = m.integer("ssm.time_step_rank")
    is_delta = m.layers_with("ssm_", c["num_hidden_layers"])
    fields = partial_rope(m, c, family) | dict(
        layer_types=["linear_attention" if delta else "full_attention" for delta in is_delta],
        linear_num_value_heads=heads,
        linear_value_head_dim=m.integer("ssm.inner_size") // heads,
        linear_num_key_heads=m.integer("ssm.group_count"),
        linear_key_head_dim=m.integer("ssm.state_size"),
        linear_conv_kernel_dim=m.integer("ssm.conv_kernel"),
    )
    if family == "qwen3_5_text":
        return fields
    return fields | _qwen_experts(m, c, True) | dict(mlp_only_layers=[])


def _lfm2(m: Metadata, c: Json, family: str) -> Json:
    is_conv = m.layers_with("shortconv.", c["num_hidden_layers"])
    fields = llama(m, c, family) | dict(
        layer_types=["conv" if conv else "full_attention" for conv in is_conv],
        norm_eps=m.number("attention.layer_norm_rms_epsilon", 1e-5),
        conv_L_cache=m.integer("shortconv.l_cache"),
        block_auto_adjust_ff_dim=False,
    )
    if family == "lfm2":
        return fields
    fields |= m.experts(SIGMOID, size="moe_intermediate_size")
    return fields | dict(
        num_dense_layers=m.count("leading_dense_block_count", 0),
        use_expert_bias=any(".exp_probs_b." in name for name in m.gguf.tensors),
    )


_EXPERTS = ("expert_count",)
_LATENT = ("attention.q_lora_rank", "attention.kv_lora_rank")
_MULTIPLIERS = ("logit_scale", "residual_scale", "embedding_scale")
_GRANITE = Architecture(_granite, True, (*_EXPERTS, *_MULTIPLIERS, "ssm.state_size"))


def _hybrid(
    read: Callable[..., Json], family: str | None = None, tiled: bool = False
) -> Architecture:
    """Return the translation of an architecture with recurrent layers."""
    read = read if family is None else partial(read, family=family)
    return Architecture(read, features=_EXPERTS, recurrent=True, tiled=tiled)


ARCHITECTURES: Mapping[str, Architecture] = DENSE | {
    "llama": Architecture(_mixtral, True, _EXPERTS),
    "llama4": Architecture(_llama4, True, (*_EXPERTS, "attention.temperature_scale")),
    "qwen2moe": Architecture(partial(_qwen_moe, family="qwen2_moe"), features=_EXPERTS),
    "qwen3moe": Architecture(partial(_qwen_moe, family="qwen3_moe"), features=_EXPERTS),
    "gemma4": Architecture(_gemma4, features=_EXPERTS, by_layer=True),
    "gemma3n": Architecture(_gemma3n, by_layer=True),
    "gpt-oss": Architecture(_gpt_oss, features=_EXPERTS),
    "olmoe": Architecture(_olmoe, features=_EXPERTS),
    "granite": _GRANITE,
    "granitemoe": _GRANITE,
    "granitehybrid": replace(_GRANITE, recurrent=True),
    "deepseek2": Architecture(_deepseek2, True, (*_EXPERTS, *_LATENT), latent=True),
    "mistral4": Architecture(
        _mistral4, True, (*_EXPERTS, *_LATENT, "attention.temperature_scale"), latent=True
    ),
    "glm4moe": Architecture(_glm4_moe, features=_EXPERTS),
    "exaone-moe": Architecture(_exaone_moe, features=_EXPERTS),
    "ernie4_5-moe": Architecture(_ernie_moe, True, _EXPERTS),
    "hunyuan-moe": Architecture(_hunyuan_moe, features=_EXPERTS),
    "minimax-m2": Architecture(_minimax_m2, features=_EXPERTS),
    "falcon-h1": _hybrid(_falcon_h1),
    "lfm2": _hybrid(_lfm2, "lfm2"),
    "lfm2moe": _hybrid(_lfm2, "lfm2_moe"),
    "nemotron_h": _hybrid(_nemotron_h),
    "nemotron_h_moe": _hybrid(_nemotron_h),
    "qwen35": _hybrid(_qwen_delta, "qwen3_5_text", tiled=True),
    "qwen35moe": _hybrid(_qwen_delta, "qwen3_5_moe_text", tiled=True),
    "qwen3next": _hybrid(_qwen_delta, "qwen3_next"),
}


def rotates_pairs(gguf: GgufFile) -> bool:
    """Return True if the rows of queries and keys are stored so that neighbours rotate."""
    sections = gguf.metadata.get(f"{gguf.architecture}.rope.dimension_sections", 0)
    if gguf.architecture == "glm4" and np.any(sections):  # converted for a multimodal rotation
        return False
    return ARCHITECTURES[gguf.architecture].rotates_pairs
