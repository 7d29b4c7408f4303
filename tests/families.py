"""Tiny random models of further families, built by transformers from a few fields.

All parameters and buffers are randomised before they are saved: initially biases are 0 and norms 1,
so that terms of a model would not be tested."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers as hf

VOCAB = 64  # of all tiny models
# transformers registers Mistral 4 only as a multimodal model
hf.AutoModelForCausalLM.register(hf.Mistral4Config, hf.Mistral4ForCausalLM, exist_ok=True)

BASE: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
PADDED = dict(BASE, pad_token_id=0)
YARN = dict(
    rope_type="yarn", rope_theta=10000.0, factor=8.0, original_max_position_embeddings=16,
    beta_fast=32.0, beta_slow=1.0,
)  # fmt: skip
LLAMA3 = dict(
    rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=16,
)  # fmt: skip
EXPERTS = dict(moe_intermediate_size=16, num_experts=8, num_experts_per_tok=2)
ROUTED = dict(moe_intermediate_size=16, n_routed_experts=8, num_experts_per_tok=2)
LOCAL = dict(num_local_experts=8, num_experts_per_tok=2)
MULTIPLIERS = dict(
    embedding_multiplier=12.0, residual_multiplier=0.22, attention_multiplier=0.125, logits_scaling=8.0
)  # fmt: skip

LATENT = dict(
    q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=8, qk_rope_head_dim=32, v_head_dim=32,
    num_key_value_heads=4,
)  # fmt: skip
PARTIAL = dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.25)
MROPE = dict(PARTIAL, mrope_section=[1, 1, 0], mrope_interleaved=True)
DELTA = dict(
    head_dim=16, linear_conv_kernel_dim=4, linear_key_head_dim=8, linear_value_head_dim=8,
    linear_num_key_heads=2, linear_num_value_heads=4,
)  # fmt: skip
MIXED = dict(layer_types=["linear_attention", "full_attention"] * 2)
CONVOLUTIONS = dict(layer_types=["conv", "full_attention"] * 2)
GEMMA4 = dict(
    BASE, head_dim=8, global_head_dim=16, sliding_window=8,
    layer_types=["sliding_attention", "full_attention"] * 2, final_logit_softcapping=30.0,
    hidden_size_per_layer_input=0, vocab_size_per_layer_input=VOCAB,
)  # fmt: skip
GEMMA3N = dict(
    BASE, head_dim=8, sliding_window=8, layer_types=["sliding_attention", "full_attention"] * 2, final_logit_softcapping=30.0,
    intermediate_size=[48, 40, 48, 56], hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB - 9,
    num_kv_shared_layers=2, laurel_rank=8, activation_sparsity_pattern=[0.7, 0.0, 0.3, 0.0],
)  # fmt: skip
SHARED_VALUES = dict(attention_k_eq_v=True, num_global_key_value_heads=1)

# transformers applies the lower bound of the time steps of Nemotron-H to several tokens, but not to
# one
NEMOTRON = dict(
    PADDED, time_step_min=1e-12, num_hidden_layers=None, layers_block_type=["linear_attention", "moe", "full_attention", "mlp"],
    head_dim=8, ssm_state_size=8, mamba_num_heads=8, mamba_head_dim=8, n_groups=2, chunk_size=8, expand=2,
    **ROUTED | dict(moe_intermediate_size=32), moe_shared_expert_intermediate_size=24,
)  # fmt: skip
FALCON = dict(
    PADDED, num_hidden_layers=3, mamba_d_ssm=64, mamba_n_heads=8, mamba_n_groups=2, mamba_d_head=8, mamba_d_state=8,
    mamba_d_conv=4, mamba_chunk_size=8, mamba_rms_norm=False, mlp_multipliers=[0.8, 1.3],
    embedding_multiplier=2.0, lm_head_multiplier=0.7, key_multiplier=0.6, attention_in_multiplier=1.2,
    attention_out_multiplier=0.9, ssm_in_multiplier=1.25, ssm_out_multiplier=0.8, ssm_multipliers=[0.7, 1.1, 0.9, 1.2, 0.5],
)  # fmt: skip
NOT_RANDOMISED = (
    "inv_freq", "embed_scale", "A_log", "mup_vector", "act_fn.eps", "slope_rate", "query_decay", "key_decay", "diagonal_decay",
    "per_layer_projection_scale", "per_layer_input_scale", "router_input_scale",
)  # fmt: skip

# name -> (model_type, fields)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "arcee": ("arcee", PADDED),
    "cohere": ("cohere", PADDED),
    "cohere2": ("cohere2", dict(PADDED, sliding_window=8, head_dim=8)),
    "ernie4_5": ("ernie4_5", dict(PADDED, head_dim=8)),
    "exaone4": ("exaone4", dict(PADDED, head_dim=8, sliding_window=8, sliding_window_pattern=4)),
    "glm4": ("glm4", dict(PADDED, head_dim=8)),
    "granite": ("granite", dict(PADDED, **MULTIPLIERS)),
    "granite4-dense": (
        "granitemoehybrid",
        dict(
            PADDED, **MULTIPLIERS, num_local_experts=0, shared_intermediate_size=24,
            layer_types=["full_attention"] * 4, position_embedding_type="rope", mamba_n_heads=8, mamba_d_head=8,
        ),
    ),
    "hunyuan": ("hunyuan_v1_dense", dict(PADDED, head_dim=8)),
    "ministral3": (
        "ministral3",
        dict(
            PADDED, head_dim=8,
            rope_parameters=dict(YARN, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1),
        ),
    ),
    "nemotron": ("nemotron", PADDED),
    "olmo2": ("olmo2", PADDED),
    "olmo3": ("olmo3", dict(PADDED, sliding_window=8)),
    "phi": ("phi", PADDED),
    "seed_oss": ("seed_oss", dict(PADDED, head_dim=8)),
    "stablelm": ("stablelm", dict(PADDED, use_qkv_bias=True)),
    "starcoder2": ("starcoder2", dict(PADDED, sliding_window=8)),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        dict(PADDED, moe_num_experts=8, moe_k=2, moe_intermediate_size=16, moe_num_shared_experts=1),
    ),
    "glm4_moe": (
        "glm4_moe",
        dict(PADDED, **ROUTED, head_dim=8, first_k_dense_replace=1, use_qk_norm=True, n_group=2, topk_group=1),
    ),
    "gpt_oss": (
        "gpt_oss",
        dict(PADDED, **LOCAL, head_dim=8, sliding_window=8, rope_parameters=dict(YARN, truncate=False)),
    ),
    "gemma4": ("gemma4_text", GEMMA4 | SHARED_VALUES),
    "gemma4-small": (
        "gemma4_text",
        GEMMA4 | dict(hidden_size_per_layer_input=8, num_kv_shared_layers=2, use_double_wide_mlp=True),
    ),
    "gemma4-moe": (
        "gemma4_text",
        GEMMA4 | SHARED_VALUES
        | dict(enable_moe_block=True, num_experts=8, top_k_experts=2, moe_intermediate_size=16),
    ),
    "granite4-hybrid": (
        "granitemoehybrid",
        dict(
            PADDED, **LOCAL, **MULTIPLIERS, shared_intermediate_size=24, mamba_n_heads=8, mamba_n_groups=2,
            mamba_d_head=8, mamba_d_state=8, mamba_d_conv=4, mamba_expand=2, mamba_chunk_size=8, **MIXED,
        ),
    ),
    "granite4-hybrid-dense": (
        "granitemoehybrid",
        dict(
            PADDED, **MULTIPLIERS, num_local_experts=0, shared_intermediate_size=24, mamba_n_heads=8, mamba_n_groups=1,
            mamba_d_head=8, mamba_d_state=16, mamba_d_conv=4, mamba_expand=2, mamba_chunk_size=8, **MIXED,
        ),
    ),
    "falcon_h1": ("falcon_h1", FALCON),
    "falcon_h1-norm": ("falcon_h1", dict(FALCON, mamba_rms_norm=True, mamba_norm_before_gate=True)),
    "falcon_h1-gated-norm": ("falcon_h1", dict(FALCON, mamba_rms_norm=True, mamba_norm_before_gate=False)),
    "lfm2": ("lfm2", dict(PADDED, **CONVOLUTIONS, block_auto_adjust_ff_dim=False)),
    "lfm2_moe": ("lfm2_moe", dict(PADDED, **CONVOLUTIONS, **EXPERTS, num_dense_layers=1)),
    "nemotron_h": ("nemotron_h", dict(NEMOTRON, n_group=2, topk_group=1, routed_scaling_factor=2.5)),
    "nemotron_h-dense": (
        "nemotron_h", dict(NEMOTRON, layers_block_type=["linear_attention", "mlp", "full_attention", "mlp"]),
    ),
    "nemotron_h-latent": (
        "nemotron_h",
        dict(
            NEMOTRON, moe_latent_size=64,
            layers_block_type=["linear_attention", "moe", "linear_attention", "full_attention", "moe"],
        ),
    ),
    "qwen3_5": ("qwen3_5_text", dict(PADDED, **DELTA, **MIXED, rope_parameters=MROPE)),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        dict(PADDED, **DELTA, **MIXED, **EXPERTS, shared_expert_intermediate_size=16, rope_parameters=MROPE),
    ),
    "qwen3_next": (
        "qwen3_next",
        dict(PADDED, **DELTA, **MIXED, **EXPERTS, shared_expert_intermediate_size=16, rope_parameters=PARTIAL),
    ),
    "deepseek_v2": (
        "deepseek_v2",
        dict(
            PADDED, **ROUTED, first_k_dense_replace=1, n_shared_experts=1, n_group=2, topk_group=1,
            topk_method="group_limited_greedy",
        ) | LATENT,
    ),
    "deepseek_v3": (
        "deepseek_v3",
        dict(PADDED, **ROUTED, first_k_dense_replace=1, n_group=2, topk_group=1, rope_parameters=dict(
            YARN, mscale=1.0, mscale_all_dim=1.0)) | LATENT,
    ),
    "glm4_moe_lite": ("glm4_moe_lite", dict(PADDED, **ROUTED) | LATENT | dict(q_lora_rank=None)),
    "granitemoe": ("granitemoe", dict(PADDED, **LOCAL, **MULTIPLIERS)),
    "granite4": (
        "granitemoehybrid",
        dict(
            PADDED, **LOCAL, **MULTIPLIERS, shared_intermediate_size=32,
            layer_types=["full_attention"] * 4, position_embedding_type="rope", mamba_n_heads=8, mamba_d_head=8,
        ),
    ),
    "hunyuan_moe": ("hunyuan_v1_moe", dict(PADDED, head_dim=8, num_experts=8, moe_topk=2)),
    "minimax_m2": (
        "minimax_m2",
        dict(
            PADDED, **LOCAL, head_dim=16,
            rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5),
        ),
    ),
    "mixtral": ("mixtral", dict(PADDED, **LOCAL)),
    "olmoe": ("olmoe", dict(PADDED, num_experts=8, num_experts_per_tok=2)),
    "qwen2_moe": (
        "qwen2_moe", dict(PADDED, **EXPERTS, shared_expert_intermediate_size=32, decoder_sparse_step=2),
    ),
    "qwen3_moe": ("qwen3_moe", dict(PADDED, **EXPERTS, head_dim=16, norm_topk_prob=True, mlp_only_layers=[1])),
    "llama4": (
        "llama4_text",
        dict(
            PADDED, head_dim=8, intermediate_size_mlp=64, num_local_experts=4, num_experts_per_tok=1,
            interleave_moe_layer_step=2, attention_chunk_size=8, floor_scale=8, rope_parameters=LLAMA3,
        ),
    ),
    "llama4-two": (  # experts a token, in all layers
        "llama4_text",
        dict(
            PADDED, head_dim=8, intermediate_size_mlp=64, num_local_experts=4, num_experts_per_tok=2,
            attention_chunk_size=70, use_qk_norm=False, attn_temperature_tuning=False,
        ),
    ),
    "apertus": ("apertus", dict(PADDED, head_dim=8, rope_parameters=LLAMA3)),
    "gemma3n": ("gemma3n_text", GEMMA3N),
    "gemma3n-own-keys": (
        "gemma3n_text",
        GEMMA3N | dict(num_kv_shared_layers=0, altup_num_inputs=3, altup_correct_scale=False, vocab_size_per_layer_input=VOCAB),
    ),
    "minimax_text": (
        "minimax",
        dict(
            PADDED, **LOCAL, head_dim=16, block_size=8, full_attn_alpha_factor=1.7, full_attn_beta_factor=0.8,
            linear_attn_alpha_factor=2.1, linear_attn_beta_factor=1.2, mlp_alpha_factor=3.0, mlp_beta_factor=0.7,
        ),
    ),
    "exaone_moe": (
        "exaone_moe",
        dict(
            PADDED, head_dim=8, sliding_window=8, sliding_window_pattern=4, moe_intermediate_size=16, num_experts=8,
            num_experts_per_tok=2, n_group=2, topk_group=1,
        ),
    ),
    "mistral4": (
        "mistral4",
        dict(PADDED, **ROUTED, n_shared_experts=2, n_group=2, topk_group=1, first_k_dense_replace=1, rope_parameters=dict(
            YARN, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1)) | LATENT,
    ),
}  # fmt: skip


# prefixes of the names of models with recurrent layers
RECURRENT = (
    "falcon_h1",
    "granite4-hybrid",
    "lfm2",
    "minimax_text",
    "nemotron_h",
    "qwen3_5",
    "qwen3_next",
)


def make(name: str, gain: float = 1.0, seed: int = 0, **changes: Any) -> Any:
    """Return the transformers model of that name, float32; `gain` scales its weights."""
    model_type, fields = MODELS[name]
    # Mistral 4's configuration modifies the given rope parameters
    config = hf.AutoConfig.for_model(model_type, **copy.deepcopy(fields | changes))
    torch.manual_seed(seed)
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for key, value in [*model.named_parameters(), *model.named_buffers()]:
            if not value.is_floating_point() or key.endswith(NOT_RANDOMISED):
                continue
            if value.ndim > 1:
                value.normal_(0.0, 0.3 * gain)
            else:
                value.add_(torch.randn_like(value) * (0.1 if "norm" in key else 0.3))
    return model
