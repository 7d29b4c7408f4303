"""Parity with transformers for every family and rope scaling, for any split of a text into forward
passes, on torch and on the native kernels.

Covers prompts, chunks and single tokens; draft trees in fragmented pages, beside other requests
and after commits; equal bits for any batch; checkpoints and configurations of families."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from forerun.cache.attention import MAX_BATCHED
from forerun.errors import LoadError
from forerun.kernels import native
from forerun.models.config import load_config, make_config
from forerun.runtime.native import NativeDecoder
from tests import families
from tests.models.test_parity import (
    KERNELS,
    SIMPLE,
    Case,
    Session,
    assert_near,
    check_bits_of_single_tokens,
    decoder,
    directory,
    grown_tree,
    load,
    logits_of,
    path_to,
    reordered_path,
    simple_cases,
    text_of,
)

compiled = pytest.mark.skipif(native.library() is None, reason="not compiled")
names = pytest.mark.parametrize("name", families.MODELS)
cases = pytest.mark.parametrize("case", [*SIMPLE, *map(Case, families.MODELS)], ids=str)


@cases
def test_parity_of_prompts_chunks_and_single_tokens(case: Case) -> None:
    """Two texts are read side by side in different chunks, and one of them at once. Windows have 7
    to 9 tokens, ropes are scaled from 16 on; chunks are shorter and longer than MAX_BATCHED."""
    texts = [text_of(case.prefix + 16, 1), text_of(case.prefix + 13, 2)]
    expected = logits_of(case.name, texts)
    for kernels in KERNELS:
        session = Session(decoder(case.name, kernels, case.context))
        found: list[list[Tensor]] = [[], []]
        for sizes in (case.prefix - 1, 5), (1, case.prefix - 5), (1, 1), (1, 1), (9, 1), (5, 10):
            segments = []
            for slot, size in enumerate(sizes):
                at = len(session.texts[slot])
                segments.append(session.segment(slot, texts[slot][at : at + size]))
            for slot, rows in enumerate(session.forward(*segments)):
                session.commit(slot, segments[slot].tokens, range(len(segments[slot].tokens)))
                found[slot].append(rows)
        for each, rows in zip(found, expected, strict=True):
            assert_near(torch.cat(each), rows)
        assert_near(session.read(2, texts[0]), expected[0])


def check_trees(case: Case, kernels: Sequence[str]) -> None:
    """Check two trees in a row in each of two slots, the first beside a chunk in a third slot;
    after a commit the logits must be those of plain text."""
    prompts = [text_of(case.prefix - slot, 12 + slot) for slot in (0, 1)]
    chunk, start = text_of(case.prefix - 2, 5), case.prefix - 4 - MAX_BATCHED
    trees = [[grown_tree(8, 20), grown_tree(6, 21)], [grown_tree(6, 22), grown_tree(9, 23)]]
    texts, wanted = [*prompts], [chunk]
    for turn in trees:
        for slot, (tokens, parents) in enumerate(turn):
            paths = [path_to(parents, node) for node in range(len(tokens))]
            wanted += [[*texts[slot], *(tokens[i] for i in path)] for path in paths]
            texts[slot] = [*texts[slot], *(tokens[i] for i in reordered_path(parents))]
    wanted += [[*text, 7] for text in texts]
    expected = logits_of(case.name, wanted)
    for each in kernels:
        session = Session(decoder(case.name, each, case.context))
        for slot, text in enumerate((*prompts, chunk[:start])):
            session.read(slot, text)
        remaining = iter([rows[-1] for rows in expected[1:]])
        for number, turn in enumerate(trees):
            segments = [session.segment(slot, *tree) for slot, tree in enumerate(turn)]
            segments += [session.segment(2, chunk[start:])] if number == 0 else []
            found = session.forward(*segments)
            if number == 0:
                assert_near(found[2], expected[0][start:])
            for slot, (tokens, parents) in enumerate(turn):
                assert_near(found[slot], torch.stack([next(remaining) for _ in tokens]))
                session.commit(slot, tokens, reordered_path(parents))
        assert session.texts[:2] == texts
        for slot in (0, 1):
            assert_near(session.read(slot, [7])[0], next(remaining))


@pytest.mark.one_in(2)
@cases
def test_parity_of_trees_and_commits(case: Case) -> None:
    check_trees(case, KERNELS)


@pytest.mark.cuda
@simple_cases
def test_parity_on_cuda(case: Case) -> None:
    """Only the order of summation differs from the CPU's."""
    check_trees(case, ["cuda"])


@pytest.mark.one_in(5)  # each family and each form, in turn
@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8", "int4"])
@names
def test_a_chunk_gives_the_bits_of_single_tokens(name: str, form: str) -> None:
    """Speculation is exact because the bits of a row do not depend on the rest of the batch."""
    native.start(2)
    model = NativeDecoder(load_config(directory(name)), directory(name), form, 256)
    check_bits_of_single_tokens(model, text_of(24, 4), text_of(6, 5), 9, (0, 4, 8))


def test_the_text_model_of_a_multimodal_checkpoint_loads(tmp_path: Path) -> None:
    """Its configuration is nested, its tensors have a prefix, and vision tensors are ignored."""
    from safetensors.torch import load_file, save_file

    source = directory("qwen3_moe")
    raw = json.loads((source / "config.json").read_text())
    outer = {"model_type": "some_vl", "text_config": raw, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    tensors = load_file(source / "model.safetensors")
    renamed = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in tensors.items()
    }
    renamed["model.visual.patch_embed.weight"] = torch.zeros(3)
    save_file(renamed, tmp_path / "model.safetensors")
    text = text_of(20)
    found = Session(load(tmp_path, "torch")).read(0, text)
    assert torch.equal(found, Session(decoder("qwen3_moe", "torch")).read(0, text))


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("qwen3_moe", "num_local_experts", 0),
        ("qwen3_moe", "num_local_experts", 10**9),
        ("qwen3_moe", "num_experts_per_tok", 9),
        ("qwen3_moe", "num_experts_per_tok", "2"),
        ("qwen3_moe", "moe_intermediate_size", -16),
        ("qwen3_moe", "mlp_only_layers", 3),
        ("glm4_moe", "n_group", 3),
        ("glm4_moe", "topk_group", 4),
        ("glm4_moe", "routed_scaling_factor", float("nan")),
        ("exaone_moe", "mlp_layer_types", ["dense", "sparse"]),
        ("exaone_moe", "num_experts", None),
        ("granite", "residual_multiplier", 0),
        ("granite", "logits_scaling", "8"),
        ("gpt_oss", "swiglu_limit", 5.0),
        ("apertus", "hidden_act", "silu"),
        ("llama4", "attention_chunk_size", 0),
        ("llama4", "floor_scale", 0),
        ("llama4", "attn_scale", -0.1),
        ("llama4", "moe_layers", 1),
        ("llama4", "no_rope_layers", [1, 1]),
        ("mistral4", "rope_parameters", None),
        ("mistral4", "rope_parameters", {"rope_type": "yarn", "llama_4_scaling_beta": 0.1}),
        ("ministral3", "rope_parameters", {"llama_4_scaling_beta": 0.1}),
        ("falcon_h1", "attention_in_multiplier", 0.0),
        ("falcon_h1", "hidden_act", "gelu"),
        ("falcon_h1", "mamba_n_heads", 7),
        ("falcon_h1", "mlp_multipliers", [1.0]),
        ("falcon_h1", "ssm_multipliers", [1.0, 1.0, float("nan"), 1.0, 1.0]),
        ("falcon_h1", "ssm_out_multiplier", "1"),
        ("nemotron_h", "layers_block_type", ["linear_attention", "rwkv"]),
        ("nemotron_h", "layers_block_type", ["linear_attention", "mlp"]),
        ("nemotron_h", "moe_latent_size", -64),
        ("nemotron_h", "time_step_limit", [0.1, 1.0]),
        ("nemotron_h", "use_bias", True),
        ("minimax_text", "hidden_act", "gelu"),
        ("minimax_text", "layer_types", ["linear_attention"] * 4),
        ("minimax_text", "layer_types", ["linear_attention", "full_attention"]),
        ("minimax_text", "layer_types", ["linear_attention", "conv"] * 2),
        ("minimax_text", "linear_attn_alpha_factor", 0),
        ("minimax_text", "linear_attn_beta_factor", float("nan")),
        ("minimax_text", "mlp_alpha_factor", "3"),
        ("minimax_text", "mlp_beta_factor", -1.0),
        ("minimax_text", "rotary_dim", 7),
        *[("gemma3n", "altup_num_inputs", value) for value in (1, 17, "4")],
        ("gemma3n", "altup_active_idx", 1),
        ("gemma3n", "altup_correct_scale", "yes"),
        ("gemma3n", "laurel_rank", 0),
        ("gemma3n", "hidden_size_per_layer_input", None),
        ("gemma3n", "vocab_size_per_layer_input", -1),
        *[("gemma3n", "num_kv_shared_layers", value) for value in (3, 4, 9, -1, "2")],
        *[
            ("gemma3n", "activation_sparsity_pattern", value)
            for value in (0.9, [0.9], [2, 0, 0, 0])
        ],
        *[
            ("gemma3n", "activation_sparsity_pattern", [bad, 0.0, 0.0, 0.0])
            for bad in ("0.9", None)
        ],
        *[("gemma3n", "intermediate_size", value) for value in ([48], [48, 48, 48, "48"], [])],
    ],
)
def test_a_broken_configuration_is_refused_in_one_line(
    name: str, field: str, value: object
) -> None:
    raw = json.loads((directory(name) / "config.json").read_text())
    assert field in raw or field in ("num_local_experts", "rotary_dim")
    with pytest.raises(LoadError) as caught:
        make_config(raw | {field: value}, Path("config.json"))
    assert "\n" not in str(caught.value)


def test_per_layer_limits_and_windows_of_k_exaone_are_refused() -> None:
    """Later models have them, and transformers ignores them."""
    raw = json.loads((directory("exaone_moe") / "config.json").read_text())
    make_config(raw | {"swiglu_limits": [0.0] * 4, "sliding_windows": None}, Path("config.json"))
    for name, value in (("swiglu_limits", [0.0, 0.0, 0.0, 7.0]), ("sliding_windows", [8, 8, 8, 0])):
        with pytest.raises(LoadError, match=f"{name} .*, which is not supported"):
            make_config(raw | {name: value}, Path("config.json"))


def test_rotary_dim_of_published_minimax_configurations() -> None:
    """Absent fields have the defaults of transformers."""
    raw = json.loads((directory("minimax_text") / "config.json").read_text())
    given = make_config(dict(raw), Path("config.json"))
    assert [rope.dim for rope in given.ropes] == [16]
    partial = make_config(raw | {"rotary_dim": 8}, Path("config.json"))
    assert [rope.dim for rope in partial.ropes] == [8]
    for name in ("layer_types", "head_dim"):
        del raw[name]
    short = make_config(raw, Path("config.json"))
    assert short.attends == given.attends and short.head_dim == 8
    assert short.recurrent is not None and short.recurrent.key_size == 8


@pytest.mark.parametrize("kernels", ["torch", pytest.param("native", marks=compiled)])
def test_decays_of_lightning_attention_are_those_that_transformers_stores(kernels: str) -> None:
    """Short texts do not show an error in heads that decay slowly."""
    from safetensors.torch import load_file

    stored = load_file(directory("minimax_text") / "model.safetensors")
    for i in (1, 3):
        rate = decoder("minimax_text", kernels).weights.layers[i].recurrent.decay_rate
        slopes = stored[f"model.layers.{i}.self_attn.slope_rate"].flatten()
        assert torch.allclose(rate, -slopes, rtol=1e-5, atol=0.0)


def test_absent_fields_of_gemma3n_have_their_defaults() -> None:
    """They are those of transformers; the widest MLP determines the size of buffers."""
    fields = dict(num_hidden_layers=20, num_kv_shared_layers=5)
    raw = hf.AutoConfig.for_model("gemma3n_text", **fields).to_dict()
    given = make_config(dict(raw), Path("config.json"))
    left_out = (
        "altup_active_idx",
        "altup_correct_scale",
        "altup_num_inputs",
        "activation_sparsity_pattern",
        "final_logit_softcapping",
        "head_dim",
        "hidden_size_per_layer_input",
        "laurel_rank",
        "layer_types",
        "num_key_value_heads",
        "rope_parameters",
        "sliding_window",
        "vocab_size_per_layer_input",
    )
    short = {name: value for name, value in raw.items() if name not in left_out}
    found = make_config(short | {"intermediate_size": 16384}, Path("config.json"))
    plain: dict[str, Any] = dict(raw={}, ropes=())
    assert dataclasses.replace(found, **plain) == dataclasses.replace(given, **plain)
    thetas = [[rope.parameters["rope_theta"] for rope in each.ropes] for each in (found, given)]
    assert thetas == [[1e6, 1e4]] * 2
    assert given.kv_layers[15:] == (13, 13, 13, 13, 14)
    assert given.mlp_sparsity[9:11] == (0.95, 0.0)


def test_keys_that_kv_sharing_layers_do_not_use_are_ignored(tmp_path: Path) -> None:
    """Checkpoints of Gemma 3n have them; other unknown tensors are still refused."""
    from safetensors.torch import load_file, save_file

    source = directory("gemma3n")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    for name in ("k_proj", "v_proj", "k_norm"):
        tensors[f"model.layers.3.self_attn.{name}.weight"] = torch.ones(2)
    save_file(tensors, tmp_path / "model.safetensors")
    found = Session(load(tmp_path, "torch")).read(0, text_of(20))
    assert torch.equal(found, Session(decoder("gemma3n", "torch")).read(0, text_of(20)))
    tensors["model.layers.3.self_attn.x_norm.weight"] = torch.ones(2)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(LoadError, match="x_norm"):
        load(tmp_path, "torch")


def test_older_layer_patterns_of_nemotron_h() -> None:
    raw = json.loads((directory("nemotron_h") / "config.json").read_text())
    newer = make_config(dict(raw), Path("config.json"))
    del raw["layers_block_type"]
    older = make_config(raw | {"hybrid_override_pattern": "ME*-"}, Path("config.json"))
    assert dataclasses.replace(older, raw=newer.raw) == newer


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("gpt_oss", "self_attn.sinks"),
        ("gpt_oss", "mlp.experts.gate_up_proj"),
        ("llama4", "feed_forward.experts.gate_up_proj"),
        ("qwen3_moe", "mlp.experts.3.down_proj.weight"),
        ("glm4_moe", "mlp.gate.e_score_correction_bias"),
        ("granitemoe", "block_sparse_moe.input_linear.weight"),
    ],
)
def test_a_tensor_with_a_wrong_shape_is_named(name: str, tensor: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory(name) / "model.safetensors")
    (found, *_) = [each for each in tensors if each.endswith(tensor)]
    tensors[found] = tensors[found][..., :-1].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((directory(name) / "config.json").read_text())
    with pytest.raises(LoadError, match=found.split(".")[-1] if "bias" in found else "tensor"):
        load(tmp_path, "torch")


@pytest.mark.parametrize("kernels", ["torch", pytest.param("native", marks=compiled)])
def test_pass_bytes_count_the_experts_that_tokens_use(kernels: str) -> None:
    model = decoder("qwen3_moe", kernels)
    experts = model.config.experts
    assert experts is not None
    all_experts = model.pass_bytes(10_000)
    assert all_experts == model.weight_bytes
    unused = [all_experts - model.pass_bytes(rows) for rows in (1, 2)]
    assert unused[1] == pytest.approx(unused[0] * (1 - experts.used / experts.count), rel=0.01)
    assert decoder("glm4", kernels).pass_bytes(1) == decoder("glm4", kernels).weight_bytes


@pytest.mark.parametrize(
    "name", ["qwen3_moe", "qwen3_5", "gemma4", "gemma3n", "cohere", "olmo2", "gpt_oss"]
)
def test_tensor_parallelism_is_refused_for_other_families(name: str) -> None:
    from forerun.errors import ConfigError
    from forerun.models.sharding import Shard, shard_config

    with pytest.raises(ConfigError, match="tensor_parallel divides dense models"):
        shard_config(load_config(directory(name)), Shard(0, 2, None))
