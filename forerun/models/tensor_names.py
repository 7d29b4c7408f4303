"""Names of tensors in Hugging Face checkpoints: of each part of the decoder, by naming scheme.

A scheme is a `layout` of `ModelConfig`. A part that is stacked from several tensors has a list of
names; `{i}` is the layer and `{e}` an expert."""

from __future__ import annotations

Names = dict[str, str | list[str]]

LLAMA_NAMES: Names = {
    "embed": "embed_tokens",
    "norm": "norm",
    "layer": "layers.{i}.",
    "attention_norm": "input_layernorm",
    "qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "up": ["mlp.gate_proj", "mlp.up_proj"],
    "down": "mlp.down_proj",
    "head": "lm_head",
}
EXPERT_NAMES: Names = {
    "router": "mlp.gate",
    "expert_up": ["mlp.experts.{e}.gate_proj", "mlp.experts.{e}.up_proj"],
    "expert_down": "mlp.experts.{e}.down_proj",
}
W_EXPERT_NAMES: Names = {
    "router": "block_sparse_moe.gate",
    "expert_up": ["block_sparse_moe.experts.{e}.w1", "block_sparse_moe.experts.{e}.w3"],
    "expert_down": "block_sparse_moe.experts.{e}.w2",
}
SANDWICH_NAMES: Names = {
    "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}
DELTA_NAMES: Names = {
    "recurrent_out": "linear_attn.out_proj",
    "convolution": "linear_attn.conv1d",
    "decay_rate": "linear_attn.A_log",
    "decay_bias": "linear_attn.dt_bias",
    "recurrent_norm": "linear_attn.norm",
}
NEMOTRON_NAMES: Names = {
    "embed": "embeddings",
    "norm": "norm_f",
    "layer": "layers.{i}.",
    "attention_norm": "norm",
    "qkv": ["mixer.q_proj", "mixer.k_proj", "mixer.v_proj"],
    "out": "mixer.o_proj",
    "mlp_norm": "norm",
    "up": "mixer.up_proj",
    "down": "mixer.down_proj",
    "head": "lm_head",
    "router": "mixer.gate",
    "choice_bias": "mixer.gate.e_score_correction_bias",
    "expert_up": ["mixer.experts.{e}.up_proj"],
    "expert_down": "mixer.experts.{e}.down_proj",
    "latent_in": "mixer.fc1_latent_proj",
    "latent_out": "mixer.fc2_latent_proj",
    "shared_up": "mixer.shared_experts.up_proj",
    "shared_down": "mixer.shared_experts.down_proj",
}


def _mamba_names(module: str) -> Names:
    """Return the names of a Mamba-2 layer."""
    return {
        "recurrent_input": f"{module}.in_proj",
        "recurrent_out": f"{module}.out_proj",
        "convolution": f"{module}.conv1d",
        "decay_rate": f"{module}.A_log",
        "decay_bias": f"{module}.dt_bias",
        "skip": f"{module}.D",
        "recurrent_norm": f"{module}.norm",
    }


def _expert_names(shared: str, **others: str) -> Names:
    """Return the names of experts with a dense MLP beside them, which is called `shared`."""
    return (
        LLAMA_NAMES
        | EXPERT_NAMES
        | {
            "shared_up": [f"mlp.{shared}.gate_proj", f"mlp.{shared}.up_proj"],
            "shared_down": f"mlp.{shared}.down_proj",
        }
        | others
    )


NAMES: dict[str, Names] = {
    "llama": LLAMA_NAMES,
    "phi3": LLAMA_NAMES | {"qkv": "self_attn.qkv_proj", "up": "mlp.gate_up_proj"},
    "gemma": LLAMA_NAMES | SANDWICH_NAMES,
    "olmo2": LLAMA_NAMES | SANDWICH_NAMES,
    "glm4": LLAMA_NAMES
    | {
        "attention_out_norm": "post_self_attn_layernorm",
        "mlp_out_norm": "post_mlp_layernorm",
        "up": "mlp.gate_up_proj",
    },
    "gemma4": LLAMA_NAMES
    | SANDWICH_NAMES
    | {
        "router": "router.proj",
        "router_scale": "router.scale",
        "expert_scale": "router.per_expert_scale",
        "expert_up": "experts.gate_up_proj",
        "expert_down": "experts.down_proj",
        "expert_norm": "pre_feedforward_layernorm_2",
        "expert_out_norm": "post_feedforward_layernorm_2",
        "shared_out_norm": "post_feedforward_layernorm_1",
        "shared_up": ["mlp.gate_proj", "mlp.up_proj"],
        "shared_down": "mlp.down_proj",
        "layer_scale": "layer_scalar",
        "layer_gate": "per_layer_input_gate",
        "layer_projection": "per_layer_projection",
        "layer_input_norm": "post_per_layer_input_norm",
        "layer_embed": "embed_tokens_per_layer",
        "layer_projections": "per_layer_model_projection",
        "layer_inputs_norm": "per_layer_projection_norm",
    },
    "nemotron": LLAMA_NAMES | {"up": "mlp.up_proj"},
    "apertus": LLAMA_NAMES
    | {
        "attention_norm": "attention_layernorm",
        "mlp_norm": "feedforward_layernorm",
        "up": "mlp.up_proj",
        "xielu": "mlp.act_fn",
    },
    "starcoder2": LLAMA_NAMES | {"up": "mlp.c_fc", "down": "mlp.c_proj"},
    "phi": LLAMA_NAMES
    | {"norm": "final_layernorm", "out": "self_attn.dense", "up": "mlp.fc1", "down": "mlp.fc2"},
    "hunyuan": LLAMA_NAMES
    | {"q_norm": "self_attn.query_layernorm", "k_norm": "self_attn.key_layernorm"},
    "qwen_moe": _expert_names("shared_expert", shared_gate="mlp.shared_expert_gate"),
    "mixtral": LLAMA_NAMES | W_EXPERT_NAMES,
    "minimax": LLAMA_NAMES
    | W_EXPERT_NAMES
    | {"choice_bias": "block_sparse_moe.e_score_correction_bias"},
    "minimax_text": LLAMA_NAMES
    | W_EXPERT_NAMES
    | {
        "recurrent_input": ["self_attn.qkv_proj", "self_attn.output_gate"],
        "recurrent_out": "self_attn.out_proj",
        "recurrent_norm": "self_attn.norm",
    },
    "glm4_moe": _expert_names("shared_experts", choice_bias="mlp.gate.e_score_correction_bias"),
    "exaone_moe": _expert_names("shared_experts", choice_bias="mlp.e_score_correction_bias"),
    "deepseek": _expert_names("shared_experts", choice_bias="mlp.gate.e_score_correction_bias")
    | {
        "query": "self_attn.q_proj",
        "query_down": "self_attn.q_a_proj",
        "query_norm": "self_attn.q_a_layernorm",
        "query_up": "self_attn.q_b_proj",
        "latent_down": "self_attn.kv_a_proj_with_mqa",
        "latent_norm": "self_attn.kv_a_layernorm",
        "latent_up": "self_attn.kv_b_proj",
    },
    "ernie_moe": _expert_names(
        "shared_experts", choice_bias="mlp.moe_statics.e_score_correction_bias"
    ),
    "granite_moe": LLAMA_NAMES
    | {
        "router": "block_sparse_moe.router.layer",
        "expert_up": "block_sparse_moe.input_linear.weight",
        "expert_down": "block_sparse_moe.output_linear.weight",
        "up": "shared_mlp.input_linear",
        "down": "shared_mlp.output_linear",
        "shared_up": "shared_mlp.input_linear",
        "shared_down": "shared_mlp.output_linear",
    }
    | _mamba_names("mamba"),
    "qwen3_5": _expert_names("shared_expert", shared_gate="mlp.shared_expert_gate")
    | DELTA_NAMES
    | {
        "recurrent_input": ["linear_attn.in_proj_qkv", "linear_attn.in_proj_z"],
        "recurrent_decay": ["linear_attn.in_proj_a", "linear_attn.in_proj_b"],
    },
    "qwen3_next": _expert_names("shared_expert", shared_gate="mlp.shared_expert_gate")
    | DELTA_NAMES
    | {
        "recurrent_input": "linear_attn.in_proj_qkvz",
        "recurrent_decay": "linear_attn.in_proj_ba",
    },
    "lfm2": LLAMA_NAMES
    | {
        "norm": "embedding_norm",
        "attention_norm": "operator_norm",
        "mlp_norm": "ffn_norm",
        "q_norm": "self_attn.q_layernorm",
        "k_norm": "self_attn.k_layernorm",
        "out": "self_attn.out_proj",
        "up": ["feed_forward.w1", "feed_forward.w3"],
        "down": "feed_forward.w2",
        "router": "feed_forward.gate",
        "choice_bias": "feed_forward.expert_bias",
        "expert_up": ["feed_forward.experts.{e}.w1", "feed_forward.experts.{e}.w3"],
        "expert_down": "feed_forward.experts.{e}.w2",
        "recurrent_input": "conv.in_proj",
        "recurrent_out": "conv.out_proj",
        "convolution": "conv.conv",
    },
    "nemotron_h": NEMOTRON_NAMES | _mamba_names("mixer"),
    "falcon_h1": LLAMA_NAMES
    | _mamba_names("mamba")
    | {
        "norm": "final_layernorm",
        "mlp_norm": "pre_ff_layernorm",
        "up": ["feed_forward.gate_proj", "feed_forward.up_proj"],
        "down": "feed_forward.down_proj",
    },
    "gpt_oss": LLAMA_NAMES
    | {
        "router": "mlp.router",
        "expert_up": "mlp.experts.gate_up_proj",
        "expert_down": "mlp.experts.down_proj",
        "sink_logits": "self_attn.sinks",
    },
    "gpt2": {
        "embed": "wte",
        "positions": "wpe",
        "norm": "ln_f",
        "layer": "h.{i}.",
        "attention_norm": "ln_1",
        "qkv": "attn.c_attn",
        "out": "attn.c_proj",
        "mlp_norm": "ln_2",
        "up": "mlp.c_fc",
        "down": "mlp.c_proj",
        "head": "lm_head",
    },
}
NAMES["gemma3n"] = NAMES["gemma4"] | {
    "value_norm": "self_attn.v_norm",
    "sparse_up": ["mlp.gate_proj", "mlp.up_proj"],
    "altup_norm": "altup.router_norm",
    "altup_router": "altup.modality_router",
    "altup_predict": "altup.prediction_coefs",
    "altup_correct": "altup.correction_coefs",
    "altup_scale": "altup.correct_output_scale",
    "laurel_left": "laurel.linear_left",
    "laurel_right": "laurel.linear_right",
    "laurel_norm": "laurel.post_laurel_norm",
    "stream_opening": "altup_projections",
    "stream_joining": "altup_unembed_projections",
}
NAMES["parallel"] = LLAMA_NAMES
NAMES["llama4"] = LLAMA_NAMES | {
    "up": ["feed_forward.gate_proj", "feed_forward.up_proj"],
    "down": "feed_forward.down_proj",
    "router": "feed_forward.router",
    "expert_up": "feed_forward.experts.gate_up_proj",
    "expert_down": "feed_forward.experts.down_proj",
    "shared_up": ["feed_forward.shared_expert.gate_proj", "feed_forward.shared_expert.up_proj"],
    "shared_down": "feed_forward.shared_expert.down_proj",
}
NAMES["mistral4"] = NAMES["deepseek"] | {
    "expert_up": "mlp.experts.gate_up_proj",
    "expert_down": "mlp.experts.down_proj",
}
NAMES["hunyuan_moe"] = _expert_names("shared_mlp", router="mlp.gate.wg") | NAMES["hunyuan"]
# matrices of experts are stored as [E, in, out]; those of gpt-oss have gates in even columns
TRANSPOSED_EXPERTS = ("gpt_oss", "llama4")
INTERLEAVED_EXPERTS = ("gpt_oss",)
PREFIXES = (
    "model.",
    "transformer.",
    "",
    "backbone.",
    "model.language_model.",
    "language_model.model.",
)
# prefixes of what a multimodal checkpoint has beside its language model
OTHER_MODALITIES = tuple(
    outer + name
    for outer in ("", "model.")
    for name in (
        "visual.",
        "vision_tower.",
        "vision_model.",
        "multi_modal_projector.",
        "audio_tower.",
        "embed_vision.",
        "embed_audio.",
        "patch_merger.",
        "mtp.",
    )
)
# buffers that older versions of transformers saved, and what MiniMax's decays give in blocks
IGNORED = (
    "rotary_emb.inv_freq",
    ".attn.bias",
    ".attn.masked_bias",
    ".self_attn.slope_rate",
    ".self_attn.query_decay",
    ".self_attn.key_decay",
    ".self_attn.diagonal_decay",
)
