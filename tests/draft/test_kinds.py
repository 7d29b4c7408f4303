"""Every row of the table of kinds, from configurations and tensor names as they are published."""

from __future__ import annotations

from typing import Any

import pytest

from forerun.catalog import fit
from forerun.draft import head_files
from forerun.draft.block import module as block_module
from forerun.draft.kinds import TABLE, Look, recognise

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096}
ONE = LLAMA | {"num_hidden_layers": 1}

BLOCK = {"architectures": ["DFlashDraftModel"]}
LAGUNA = {"architectures": ["DFlashLagunaForCausalLM"]}
TTT = {"target_layer_ids": [1], "ttt_length": 7}

ROWS: list[tuple[dict[str, Any], tuple[str, ...], str, str]] = [
    ({"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]}, (), "eagle3 (speculators)", "eagle3"),
    ({"speculators_model_type": "mtp"}, (), "mtp (speculators)", "mtp"),
    ({"speculators_model_type": "dspark"}, (), "dspark (speculators)", "block"),
    ({"speculators_model_type": "dflash", "dflash_config": {}}, (), "dflash (speculators)", "block"),
    ({"speculators_model_type": "dflash2", "architectures": ["A"]}, (), "dflash2 (speculators)", ""),
    ({"speculators_model_type": "peagle", "mask_token_id": 5}, (), "peagle (speculators)", "eagle3"),
    ({"speculators_model_type": "xpress"}, (), "xpress (speculators)", ""),
    ({"model_type": "gemma4_assistant"}, (), "gemma4_assistant", "mtp"),
    ({"model_type": "gemma4_unified_assistant"}, (), "gemma4_assistant", "mtp"),
    ({"model_type": "mlp_speculator", "architectures": ["MLPSpeculatorPreTrainedModel"]}, (), "mlp", "mlp"),
    ({"architectures": ["ArcticLSTMSpeculatorPreTrainedModel"], "input_hidden_dim": 8}, (), "arctic", ""),
    ({"architectures": ["ArcticMLPSpeculatorPreTrainedModel"]}, (), "mlp", "mlp"),
    ({"medusa_num_heads": 4, "base_model_name_or_path": "x"}, (), "medusa (fasterdecoding)", "medusa"),
    ({"model_type": "medusa", "num_heads": 4}, (), "medusa (vllm)", "medusa"),
    ({"hydra_num_heads": 4}, (), "hydra", ""),
    ({"hydra_head_arch": "prefix-mlp"}, (), "hydra", ""),
    ({"architectures": ["Qwen3DSparkModel"], "markov_rank": 64}, (), "dspark (deepspec)", "block"),
    ({"architectures": ["Gemma4DSparkModel"], "markov_rank": 0}, (), "dflash (deepspec)", "block"),
    ({"architectures": ["DSparkDraftModel"]}, (), "dspark (specforge)", "block"),
    (BLOCK | {"dflash_config": {"projector_type": "dspark"}}, (), "dspark (specforge)", "block"),
    ({"architectures": ["DominoDraftModel"]}, (), "unknown", ""),
    (BLOCK | {"dflash_config": {"projector_type": "domino"}}, (), "dflash (z-lab)", "block"),
    (BLOCK | {"dflash_config": {"target_layer_ids": [1]}}, (), "dflash (z-lab)", "block"),
    (LAGUNA | {"dflash_config": {"causal": True}}, (), "dflash (z-lab)", "block"),
    ({"architectures": ["PEagleDraftModel"]}, (), "peagle", "eagle3"),
    ({"architectures": ["LlamaForCausalLMEagle3"], "ptd_token_id": 3}, (), "peagle", "eagle3"),
    (TTT | {"architectures": ["Qwen3Eagle3Model"]}, (), "eagle3 (deepspec)", "eagle3"),
    ({"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 9}, (), "eagle3 (specforge)", "eagle3"),
    ({"architectures": ["Eagle3LlamaForCausalLM"]}, (), "eagle3 (nvidia)", "eagle3"),
    ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, (), "eagle3 (latent attention)", ""),
    (
        {"architectures": ["LlamaForCausalLMEagle3"]}, ("midlayer.self_attn.kv_a_proj_with_mqa.weight",),
        "eagle3 (latent attention)", "",
    ),
    (ONE | {"draft_vocab_size": 32000}, ("midlayer.hidden_norm.weight", "fc.weight"), "eagle3 (safeailab)", "eagle3"),
    ({"architectures": ["EagleLlamaForCausalLM"], "model": {}}, (), "eagle (vllm)", "eagle"),
    ({"model_type": "eagle"}, (), "eagle (vllm)", "eagle"),
    (ONE, ("fc.weight", "layers.0.mlp.up_proj.weight"), "eagle (safeailab)", "eagle"),
    (ONE, ("model.fc.weight", "lm_head.weight", "norm.weight"), "eagle3 (safeailab)", "eagle3"),
    ({}, ("fc.weight",), "eagle (safeailab)", "eagle"),
    (LLAMA | {"spd_type": "pard"}, (), "pard", "model"),
    (LLAMA | {"pard_token": 128256}, (), "pard", "model"),
    (LLAMA | {"num_nextn_predict_layers": 1}, (), "mtp (native)", ""),
    (LLAMA | {"model_type": "mimo", "num_nextn_predict_layers": 1}, (), "mtp (native)", "mtp"),
    (LLAMA | {"text_config": {"mtp_num_hidden_layers": 1}}, (), "mtp (native)", ""),
    (LLAMA, ("model.layers.61.eh_proj.weight",), "mtp (native)", ""),
    (LLAMA, ("mtp.fc.weight",), "mtp (native)", ""),
    (LLAMA | {"dspark_block_size": 8}, (), "dspark (native)", ""),
    (LLAMA | {"num_hidden_layers": 16}, ("model.embed_tokens.weight",), "lm", "model"),
    (LLAMA | {"num_nextn_predict_layers": 0, "num_hidden_layers": 16}, (), "lm", "model"),
    ({}, (), "lm", "model"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("raw", "tensors", "name", "draft"), ROWS, ids=lambda value: str(value)[:50]
)
def test_each_kind(raw: dict[str, Any], tensors: tuple[str, ...], name: str, draft: str) -> None:
    kind = recognise(Look(raw, tensors, tokenizer=True))
    assert (kind.name, kind.draft) == (name, draft)
    assert bool(kind.draft) != bool(kind.why) and kind.title


def test_each_row_of_the_table_has_an_example() -> None:
    looks = [Look(raw, tensors, tokenizer=True) for raw, tensors, _, _ in ROWS]
    taken = {next(i for i, (test, _) in enumerate(TABLE) if test(look)) for look in looks}
    assert taken == set(range(len(TABLE)))


def test_heads_and_models_of_one_layer_without_tensor_names() -> None:
    """Pickled weights list no tensors: a model has a tokenizer, a head has none."""
    assert recognise(Look(ONE)).name == "eagle (safeailab)"
    assert recognise(Look(ONE, tokenizer=True)).name == "lm"


@pytest.mark.parametrize(
    "value", [None, 5, "x" * 5000, [], {}, [[]], {"a": {"b": []}}, True, -1, [None], "\x1b[2J"]
)
def test_fields_may_be_of_any_type(value: Any) -> None:
    keys = {key for raw, *_ in ROWS for key in raw} | {"text_config", "projector_type"}
    for key in keys:
        for base in ({}, LLAMA, {"num_nextn_predict_layers": 1}):
            raw: dict[str, Any] = base | {key: value}
            kind = recognise(Look(raw))
            assert kind.name.isprintable() and len(kind.name) < 300


def test_the_catalog_supports_what_the_loaders_support() -> None:
    assert set(fit.LAYER_FAMILIES) == set(head_files.LAYER_DEFAULTS)
    assert fit.MAX_BLOCK_SIZE == block_module.LARGEST_BLOCK
