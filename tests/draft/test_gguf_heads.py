"""Draft heads in llama.cpp's GGUF files are the heads that they were converted from, and files that
cannot be used are refused in one line."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from forerun import LLM, ConfigError, LoadError, SamplingParams
from forerun.catalog.facts import facts_of
from forerun.catalog.fit import checks, fits, refusal, sizes_of
from forerun.catalog.search import find_local
from forerun.catalog.survey import survey
from forerun.devices import as_tensor
from forerun.draft.block.module import load_block
from forerun.draft.eagle.module import load_eagle1_head, load_head, save_head
from forerun.draft.gguf_heads import head_config
from forerun.draft.kinds import kind_of
from forerun.draft.proposer import DraftRequest
from forerun.draft.registry import MEDUSA_LOADERS
from forerun.models.gguf.config import load_gguf_config, skim
from forerun.models.gguf.container import open_gguf
from forerun.models.local import LocalModel
from forerun.verify import Noise
from tests import tiny
from tests.draft import gguf_heads
from tests.draft.heads import FILL_IN, KINDS, PLAIN, REDUCED, SHAPES, WINDOWS
from tests.draft.helpers import refused
from tests.draft.test_formats import assert_same
from tests.draft.twins import target
from tests.gguf_files import llama3_divisors, written

# shapes that llama.cpp's files can describe
EAGLE3 = {
    **{
        name: SHAPES["eagle3"][name]
        for name in (
            "plain", "norm before residual", "reduced vocabulary", "one state", "own embedding, narrower",
            "narrower, some tokens", "the target's head", "fewer tokens than the target",
        )
    },
    "norm before fc": {"norm_before_fc": True},
    "another rope": {"layer": {"rope_theta": 500.0, "head_dim": 16}},
}  # fmt: skip
WINDOWS_NON_CAUSAL = {**PLAIN, **FILL_IN, "layer": WINDOWS}
BLOCK = {
    "dspark": SHAPES["block"]["dspark"],
    "dspark, filling in": FILL_IN,
    "dspark, some tokens": REDUCED,
    "dflash": {**PLAIN, **FILL_IN},
    "own embedding and head, narrower": SHAPES["block"]["own embedding and head, narrower"],
    "windows": WINDOWS_NON_CAUSAL,
}
CASES = [("eagle3", name) for name in EAGLE3] + [("block", name) for name in BLOCK]


def head_of(kind: str, shape: str) -> Any:
    return KINDS[kind].make("llama", **{"eagle3": EAGLE3, "block": BLOCK}[kind][shape])


@pytest.mark.parametrize(("kind", "shape"), CASES)
def test_a_file_holds_the_head_that_it_was_made_of(kind: str, shape: str, tmp_path: Path) -> None:
    """Tensors, configuration and drafts are those of the checkpoint beside it, to the bit."""
    head = head_of(kind, shape)
    path = gguf_heads.write(tmp_path / "head.gguf", head)
    KINDS[kind].save(head, tmp_path / "head")
    assert kind_of(path) == kind
    loaded = KINDS[kind].load(path, target())
    for twin in (head, KINDS[kind].load(tmp_path / "head", target())):
        if shape == "fewer tokens than the target":  # too few of the random tokens are drafted
            assert all(torch.equal(a, b) for a, b in zip(*map(values, (loaded, twin)), strict=True))
        else:
            assert_same(kind, loaded, twin)


def values(head: Any) -> list[torch.Tensor]:
    return list(head.state_dict().values())


@pytest.mark.parametrize("kind", ["eagle3", "block"])
@pytest.mark.parametrize("stored", ["Q8_0", "F16"])
def test_quantized_tensors_are_dequantized(kind: str, stored: str, tmp_path: Path) -> None:
    head = head_of(kind, "plain" if kind == "eagle3" else "dspark")
    path = gguf_heads.write(tmp_path / "head.gguf", head, stored)
    loaded, type_id = KINDS[kind].load(path, target()), GGMLQuantizationType[stored]
    for name, weight in head.state_dict().items():
        expected = weight.float()
        if weight.ndim == 2 and (stored == "F16" or weight.shape[1] % 32 == 0):
            rounded = dequantize(quantize(expected.numpy(), type_id), type_id)
            expected = torch.from_numpy(rounded)
        assert torch.allclose(loaded.state_dict()[name], expected, atol=1e-6), name


def test_rope_divisors_give_the_logits_of_the_checkpoint(tmp_path: Path) -> None:
    """Llama 3's scaling is a tensor of divisors in these files."""
    rope = {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    }  # fmt: skip
    head = KINDS["eagle3"].make("llama", layer={"rope_parameters": rope, "head_dim": 16})
    divisors = llama3_divisors(rope, 16)
    assert divisors.max() == 8 and divisors.min() == 1
    path = gguf_heads.write(tmp_path / "head.gguf", head, tensors={"rope_freqs.weight": divisors})
    save_head(head, tmp_path / "head")
    found = []
    for place in (path, tmp_path / "head"):
        view = target()
        drafter = KINDS["eagle3"].proposer(load_head(place, view), view)
        generator = torch.Generator().manual_seed(3)
        states = torch.randn(view.layers + 1, 30, view.hidden, generator=generator)
        drafter.open(0, range(31))
        drafter.observe(0, 0, {b: states[b] for b in drafter.aux_hidden_layers})
        drafts = drafter.propose([DraftRequest(0, range(31), SamplingParams(), Noise(1, 6), 5)])
        found.append((drafter.head.logits(as_tensor(drafter._last[0])[None]), drafts[0].tokens))
    assert torch.allclose(found[0][0], found[1][0], atol=1e-4)
    assert found[0][1] == found[1][1]


def test_files_of_early_conversions_are_read(tmp_path: Path) -> None:
    """They have `extract_layers`, the norm of the state as `hidden_norm`, and flags as strings."""
    head = head_of("eagle3", "norm before residual")
    stored = gguf_heads.stored_tensors("eagle3", head)
    path = gguf_heads.write(
        tmp_path / "head.gguf",
        head,
        changes={"eagle3.target_layers": ..., "eagle3.extract_layers": [2, 0, 3]},
        tensors={
            "blk.0.attn_norm_2.weight": ...,
            "blk.0.hidden_norm.weight": stored["blk.0.attn_norm_2.weight"],
        },
    )
    assert_same("eagle3", load_head(path, target()), head)
    head = head_of("block", "dspark, filling in")
    path = gguf_heads.write(
        tmp_path / "block.gguf",
        head,
        changes={
            "dflash.sample_from_anchor": "false",
            "dflash.attention.causal": "false",
            "tokenizer.ggml.mask_token_id": ...,
            "dflash.mask_token_id": 0,
        },
    )
    assert_same("block", load_block(path, target()), head)


def test_a_confidence_head_may_lack_its_bias_and_an_axis(tmp_path: Path) -> None:
    head = head_of("block", "dspark")
    with torch.no_grad():
        head.confidence_head.proj.bias.zero_()
    weight = head.confidence_head.proj.weight.float().numpy().reshape(-1)
    path = gguf_heads.write(
        tmp_path / "head.gguf", head, tensors={"conf_proj.weight": weight, "conf_proj.bias": ...}
    )
    assert_same("block", load_block(path, target()), head)


# ---------------------------------------------------------------- with the engine


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("kind", "shape"), [("eagle3", "reduced vocabulary"), ("block", "dspark")])
def test_text_and_drafts_are_those_of_the_checkpoint(
    kind: str, shape: str, temperature: float, tmp_path: Path
) -> None:
    """Given as its own kind or as model:, a file changes no text and has the same acceptance."""
    head = head_of(kind, shape)
    path = gguf_heads.write(tmp_path / "head.gguf", head)
    KINDS[kind].save(head, tmp_path / "head")
    params = SamplingParams.pure(max_tokens=30, temperature=temperature, seed=5, ignore_eos=True)
    prompts = [[5, 6, 7], [9, 8] * 4]
    found = []
    for draft in (f"{kind}:{tmp_path / 'head'}", f"{kind}:{path}", f"model:{path}"):
        llm = LLM(tiny.family("llama"), draft=draft, kv_tokens=1024)
        texts = llm.generate(prompts, params, draft="off")
        drafted = llm.generate(prompts, params, depth=3)
        assert [c.token_ids for c in drafted] == [c.token_ids for c in texts]
        counts = [c.stats.by_source[llm.draft] for c in drafted]
        assert all(count.drafted > 20 for count in counts)
        found.append([(count.drafted, count.accepted) for count in counts])
    assert found[0] == found[1] == found[2]


def test_a_head_cannot_be_used_where_only_draft_models_can(tmp_path: Path) -> None:
    """Otherwise model: takes a head's file too."""
    path = gguf_heads.write(tmp_path / "head.gguf", head_of("eagle3", "plain"))
    for draft in (f"suffix>model:{path}", f"ahead(model:{path})"):
        with pytest.raises(ConfigError, match="draft model"):
            LLM(tiny.family("llama"), draft=draft, kv_tokens=512)
    llm = LLM(tiny.family("llama"), draft=f"suffix+model:{path}", kv_tokens=512)
    assert llm.draft == "suffix+model"


# ---------------------------------------------------------------- lists of drafters


@pytest.mark.parametrize("kind", ["eagle3", "block"])
def test_a_file_is_listed_as_a_drafter_and_not_as_a_model(kind: str, tmp_path: Path) -> None:
    head = head_of(kind, "plain" if kind == "eagle3" else "dspark")
    path = gguf_heads.write(tmp_path / f"{kind}-dspark.gguf", head)
    facts = facts_of(str(path))
    family = "eagle3" if kind == "eagle3" else "dspark"
    assert facts.kind.name == f"{family} (gguf)" and facts.kind.draft == kind
    assert refusal(facts) == ""
    own = sizes_of(facts_of(str(tiny.family("llama"))))
    assert fits(checks(facts, own))
    assert not fits(checks(facts, replace(own, hidden_size=64)))
    found, notes = find_local(str(tiny.family("llama")), [tmp_path])
    listed = [one.draft for one in found if one.facts.path == path]
    assert listed == [f"{kind}:{path}"] and not notes
    (row,) = survey([LocalModel("x", path, "here")])
    assert not row.runs and "a drafter for one, which --draft takes" in row.reason
    with refused(LoadError, "which --draft takes, not a model"):
        load_gguf_config(path)


# ---------------------------------------------------------------- what is refused

VECTOR, MATRIX = np.zeros(3, np.float32), np.zeros((3, 3), np.float32)
NAN = np.full(32, np.nan, np.float32)
IDS = np.arange(40, dtype=np.int64)
BROKEN: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    # metadata
    ("eagle3", {"eagle3.target_layers": ...}, {}, "eagle3.target_layers"),
    ("eagle3", {"eagle3.target_layers": "2"}, {}, "eagle3.target_layers"),
    ("eagle3", {"eagle3.target_layers": 2}, {}, "eagle3.target_layers"),
    ("eagle3", {"eagle3.target_layers": [2, 1]}, {}, "fc.weight reads 96 numbers"),
    ("eagle3", {"eagle3.target_layers": [2, 1, 4]}, {}, "from 0 to 3"),
    ("eagle3", {"eagle3.target_layers": [2, 1, 1]}, {}, "different numbers"),
    ("eagle3", {"eagle3.target_hidden_size": ...}, {}, "eagle3.target_hidden_size"),
    ("eagle3", {"eagle3.embedding_length": ...}, {}, "eagle3.embedding_length"),
    ("eagle3", {"eagle3.embedding_length": "x"}, {}, "eagle3.embedding_length"),
    ("eagle3", {"eagle3.embedding_length": 48}, {}, r"of shape"),
    ("eagle3", {"eagle3.block_count": 2}, {}, "drafters of 1 layer"),
    ("eagle3", {"eagle3.block_count": 1 << 31}, {}, "2147483648 blocks"),
    ("eagle3", {"eagle3.attention.head_count": 0}, {}, "0 heads"),
    ("eagle3", {"eagle3.attention.head_count": 3}, {}, "holds no EAGLE-3 head"),
    ("eagle3", {"eagle3.attention.head_count_kv": 0}, {}, "holds no EAGLE-3 head"),
    ("eagle3", {"eagle3.attention.key_length": 7}, {}, "value_length"),
    ("eagle3", {"eagle3.attention.layer_norm_rms_epsilon": ...}, {}, "layer_norm_rms_epsilon"),
    ("eagle3", {"eagle3.rope.dimension_count": 4}, {}, "rope.dimension_count"),
    ("eagle3", {"eagle3.rope.scaling.type": "odd"}, {}, "rope.scaling.type"),
    ("eagle3", {"eagle3.norm_before_residual": "yes"}, {}, "norm_before_residual"),
    ("eagle3", {"eagle3.norm_before_fc": True}, {}, "no input_norm.weight"),
    ("eagle3", {"eagle3.expert_count": 8}, {}, "a mixture of experts"),
    ("eagle3", {"eagle3.vocab_size": 65}, {}, "65 tokens"),
    ("dspark", {"dflash.block_size": ...}, {}, "dflash.block_size"),
    ("dspark", {"dflash.block_size": 1 << 30}, {}, "block_size"),
    ("dspark", {"tokenizer.ggml.mask_token_id": ...}, {}, "tokenizer.ggml.mask_token_id"),
    ("dspark", {"tokenizer.ggml.mask_token_id": 64}, {}, "mask_token_id"),
    ("dspark", {"tokenizer.ggml.mask_token_id": "m"}, {}, "mask_token_id"),
    ("dspark", {"dflash.attention.causal": True}, {}, "its blocks are causal"),
    ("dspark", {"dflash.sample_from_anchor": 7}, {}, "sample_from_anchor"),
    ("dspark", {"dflash.decoder_arch": "laguna"}, {}, "layers are those of 'laguna'"),
    ("dspark", {"dflash.selector_rank": 5}, {}, "DFlash2"),
    ("dspark", {"dflash.hyper_connection.count": 4}, {}, "hyper-connections"),
    ("dspark", {"dflash.attention.sliding_window": 5}, {}, "sliding_window_pattern"),
    ("dspark", {"dflash.block_count": 3}, {}, "no layers.2"),
    ("dspark", {"dflash.block_count": 1}, {}, "has layers.1"),
    ("dflash", {"tokenizer.ggml.tokens": ["a"] * 65}, {}, "65 tokens"),
    # tensors
    ("eagle3", {}, {"fc.weight": ...}, "no fc.weight"),
    ("eagle3", {}, {"fc.weight": VECTOR}, "no fc.weight"),
    ("eagle3", {}, {"fc.weight": MATRIX}, "reads 3 numbers"),
    ("eagle3 of 40", {}, {"output.weight": ...}, "draft_vocab_size is 40"),
    ("eagle3", {"eagle3.vocab_size": 50}, {"output.weight": ...}, "50 tokens, this one has"),
    ("eagle3", {}, {"blk.0.attn_q.weight": MATRIX}, "self_attn.q_proj.weight is"),
    ("eagle3", {}, {"blk.0.attn_sinks.weight": VECTOR}, "has blk.0.attn_sinks.weight"),
    ("eagle3", {}, {"output_norm.weight": NAN}, "not finite"),
    ("eagle3", {}, {"rope_freqs.weight": -VECTOR}, "rope_freqs.weight"),
    ("dspark", {}, {"blk.1.attn_k_norm.weight": ...}, "no layers.1.self_attn.k_norm"),
    ("dspark", {}, {"markov_w1.weight": MATRIX}, "markov_w2"),
    ("dspark", {}, {"markov_w2.weight": MATRIX}, "markov_w2"),
    ("dspark", {}, {"conf_proj.weight": MATRIX}, "confidence_head"),
    # which tokens are predicted
    ("eagle3 of 40", {}, {"d2t": ...}, "no d2t"),
    ("eagle3 of 40", {}, {"d2t": IDS[:3]}, "d2t names 3 tokens, but lm_head.weight has 40 rows"),
    ("eagle3 of 40", {}, {"d2t": IDS.astype(np.float32)}, "not a list of ids"),
    ("eagle3 of 40", {}, {"d2t": IDS.reshape(2, 20)}, "not a list of ids"),
    ("eagle3 of 40", {}, {"d2t": IDS + 25}, "different tokens of 64"),
    ("eagle3 of 40", {}, {"d2t": IDS - 1}, "different tokens of 64"),
    ("eagle3 of 40", {}, {"d2t": IDS // 2}, "different tokens of 64"),
    ("dspark of 40", {}, {"d2t": ...}, "lm_head"),
    ("dspark of 40", {}, {"d2t": IDS + 25}, "different tokens of 64"),
]  # fmt: skip
BASES = {
    "eagle3": ("eagle3", "plain"),
    "eagle3 of 40": ("eagle3", "reduced vocabulary"),
    "dspark": ("block", "dspark"),
    "dspark of 40": ("block", "dspark, some tokens"),
    "dflash": ("block", "dflash"),
}


@pytest.mark.parametrize(("base", "changes", "tensors", "message"), BROKEN)
def test_a_broken_file_is_refused_in_one_line(
    base: str, changes: dict[str, Any], tensors: dict[str, Any], message: str, tmp_path: Path
) -> None:
    kind, shape = BASES[base]
    path = gguf_heads.write(tmp_path / "head.gguf", head_of(kind, shape), "F32", changes, tensors)
    with refused(LoadError, message) as error:
        KINDS[kind].load(path, target())
    assert str(path) in str(error.value) or "trained for it" in str(error.value)


def test_other_files_are_refused_in_one_line(tmp_path: Path) -> None:
    """They hold a model, a head of another kind or another target, or are cut off."""
    eagle = gguf_heads.write(tmp_path / "eagle.gguf", head_of("eagle3", "plain"))
    block = gguf_heads.write(tmp_path / "block.gguf", head_of("block", "dspark"))
    cut = gguf_heads.write(tmp_path / "cut.gguf", head_of("eagle3", "plain"))
    os.truncate(cut, 5000)
    model = written("llama", "F32").path
    narrow = replace(target(), hidden=48)
    for load, path, view, message in (
        (load_head, block, target(), "'dspark' speculator"),
        (load_block, eagle, target(), "does not describe one"),
        (load_eagle1_head, eagle, target(), "give it as eagle3:"),
        (lambda path, _: MEDUSA_LOADERS["medusa"](path), eagle, target(), "Medusa"),
        (lambda path, _: MEDUSA_LOADERS["mlp"](path), eagle, target(), "MLP speculator"),
        (load_head, model, target(), "architecture 'llama', not one of eagle3 and dflash"),
        (load_head, cut, target(), "download it again"),
        (load_head, eagle, narrow, "trained for it"),
        (load_block, block, narrow, "trained for it"),
    ):
        with refused(LoadError, message):
            load(path, view)
    assert kind_of(cut) == "model", "loading it as a model reports the fault"


def test_a_header_alone_gives_the_configuration(tmp_path: Path) -> None:
    """It lacks only the size of a vocabulary, which the list of tokens shows."""
    path = gguf_heads.write(tmp_path / "head.gguf", head_of("block", "dflash"))
    full, skimmed = head_config(open_gguf(path)), head_config(skim(path))
    assert full["transformer_layer_config"].pop("vocab_size") == 64
    assert full == skimmed
