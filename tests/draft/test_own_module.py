"""Multi-token modules in the checkpoints of their own targets: what they compute, how they are
found, and errors for those that cannot be used."""

from __future__ import annotations

import functools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun import LLM, LoadError, SamplingParams
from forerun.catalog.facts import facts_at
from forerun.catalog.search import _with_measurements, find_local
from forerun.catalog.survey import survey
from forerun.devices import as_tensor
from forerun.draft import kinds
from forerun.draft.eagle.mtp_formats import OWN_LAYOUTS, has_own_module, refuse_own_module
from forerun.draft.eagle.own_module import load_any_module, load_own_module
from forerun.draft.eagle.proposer import EagleProposer
from forerun.draft.kinds import automatic
from forerun.draft.proposer import TargetView, view_of
from forerun.kernels import native
from forerun.models.config import load_config
from forerun.models.gguf.blocks import FORMS
from forerun.models.gguf.container import open_gguf
from forerun.models.local import LocalModel
from forerun.runtime.native import NativeDecoder
from tests import tiny
from tests.draft.heads import ROOM
from tests.draft.helpers import make_request, needs_native, pure_params, refused
from tests.draft.test_stored_module import trained
from tests.draft.twins import (
    ERNIE_PARTS,
    EXAONE_PARTS,
    FirstLayerTwin,
    MimoTwin,
    QwenMtpTwin,
    TransformersMtpTwin,
    features_of,
    nextn_twin,
)
from tests.gguf_files import finish, written_with_module

QWEN = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
NEXTN = ("glm4_moe", "deepseek_v3", "glm4_moe_lite")
# families whose module is built like their first layer, or has no experts, as that layer
FIRST = ("exaone4", "ernie4_5_moe", "exaone_moe")
FAMILIES = (*QWEN, *NEXTN, *FIRST)
families = pytest.mark.parametrize("family", FAMILIES)
# GGUF files in float32, for comparisons of logits, and in the types that published files have
GGUFS = (
    "qwen3_5/F32", "qwen3_5_moe/F32", "qwen3_next/F32", "glm4_moe/F32", "deepseek_v3/F32", "glm4_moe_lite/F32",
    "exaone_moe/F32",
)  # fmt: skip
QUANTIZED_GGUFS = (
    "qwen3_5/q4_1", "qwen3_5_moe/Q8_0", "glm4_moe/experts", "deepseek_v3/Q4_0", "exaone_moe/Q8_0",
)  # fmt: skip
TOKENS = [5, 6, 7, 9, 11, 3, 40, 17, 8, 33, 12, 21]  # longer than the windows of tiny models
PROMPTS = [[5, 6, 7], [9, 8] * 4, [3, 1, 4, 1, 5]]


def generate_as_plain(
    llm: LLM, params: SamplingParams, *options: dict[str, Any], texts: Any = None
) -> list[Any]:
    """Compare the texts under each of some options with plain decoding; return the last outputs."""
    texts = texts or [c.token_ids for c in llm.generate(PROMPTS, params, draft="off")]
    for each in options:
        found = llm.generate(PROMPTS, params, **each)
        assert [c.token_ids for c in found] == texts
    assert all(c.stats.by_source["mtp"].drafted > 20 for c in found)
    return found


def append_module(directory: Path, center: float = 1.0) -> None:
    """Append a random multi-token module to a model, with published names; its vectors are about
    `center`."""
    stored, config = load_file(directory / "model.safetensors"), load_config(directory)
    layout, hidden = OWN_LAYOUTS[config.family], config.hidden
    at = layout.at(config.layers)
    attending = {int(n.split(".")[2]) for n in stored if ".self_attn." in n}
    source = 0 if layout.like_first or layout.dense else max(attending)
    torch.manual_seed(5)

    def noise(like: Tensor) -> Tensor:
        random = torch.randn(like.shape)
        return center + 0.1 * random if like.ndim == 1 else 0.4 * random

    for name in [name for name in stored if name.startswith(f"model.layers.{source}.")]:
        copied = name.replace(f"model.layers.{source}.", at + layout.layer)
        stored[copied] = noise(stored[name])
    for part, name in layout.outside.items():
        shape = (hidden, 2 * hidden) if part == "join" else (hidden,)
        stored[f"{at}{name}.weight"] = noise(torch.empty(shape))
    if config.family in NEXTN:
        stored[f"{at}embed_tokens.weight"] = stored["model.embed_tokens.weight"].clone()
        stored[f"{at}shared_head.head.weight"] = stored["lm_head.weight"].clone()
    save_file(stored, directory / "model.safetensors", {"format": "pt"})


def configure(directory: Path, **fields: Any) -> None:
    """Change fields of config.json."""
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(raw | fields))


def mimo(directory: Path, **changes: Any) -> Path:
    """A tiny MiMo: a Qwen2 with a multi-token layer, which joins states and embeddings in that
    order."""
    sizes = {"tie_word_embeddings": False, "use_sliding_window": False}
    tiny.hf_model("qwen2", **sizes).save_pretrained(directory)
    named = {"model_type": "mimo", "architectures": ["MiMoForCausalLM"]}
    configure(directory, **named, num_nextn_predict_layers=1)
    append_module(directory)
    configure(directory, **changes)
    return directory


@functools.cache
def model(family: str = "qwen3_5") -> Path:
    """A directory with a module in its checkpoint, or a GGUF file with one."""
    if "/" in family:
        return written_with_module(*family.split("/")).path
    directory = tiny.new_directory(f"{family}-mtp-") / "model"
    shutil.copytree(tiny.family(family), directory)
    if family in NEXTN:
        configure(directory, num_nextn_predict_layers=1)
    append_module(directory, center=0.0 if family in QWEN else 1.0)
    return directory


@functools.cache
def decoder(family: str = "qwen3_5") -> NativeDecoder:
    return tiny.native_decoder(model(family), form="float32")


def twin_of(family: str) -> QwenMtpTwin | TransformersMtpTwin | FirstLayerTwin:
    """Return the reference implementation of a model's module."""
    if "/" in family:
        written = written_with_module(*family.split("/"))
        return TransformersMtpTwin(written.model, written.module)
    if family in NEXTN:
        return nextn_twin(model(family), decoder(family).config)
    if family == "exaone4":
        return FirstLayerTwin(model(family), "mtp.layers.0.", EXAONE_PARTS)
    if family == "exaone_moe":
        return FirstLayerTwin(model(family), "mtp.layers.0.", EXAONE_PARTS, windowed=False)
    if family == "ernie4_5_moe":
        return FirstLayerTwin(model(family), "model.mtp_block.0.", ERNIE_PARTS)
    return QwenMtpTwin(model(family), decoder(family).config)


def open_proposer(
    path: Path, view: TargetView, states: dict[int, Tensor], tokens: list[int] = TOKENS
) -> EagleProposer:
    """Make a proposer with the module of a file, and pass it the target's states of a text."""
    drafter = EagleProposer("mtp", load_own_module(path, view), view, **ROOM)
    drafter.open(0, tokens)
    drafter.observe(0, 0, states)
    return drafter


def last_states(tokens: list[int], target: Any) -> dict[int, Tensor]:
    """Return the target's states of all tokens but the last."""
    return features_of(target, tokens[:-1], (target.config.layers,))


@needs_native
@pytest.mark.parametrize("family", [*FAMILIES, *GGUFS])
@pytest.mark.parametrize("form", [None, "float32"])
def test_a_module_computes_the_published_formula(form: str | None, family: str) -> None:
    """Hidden states and logits are compared, in torch and on the native kernels."""
    target = decoder(family)
    states = last_states(TOKENS, target)
    drafter = open_proposer(model(family), replace(view_of(target), form=form), states)
    (draft,) = drafter.propose([make_request(TOKENS, depth=1, branching=False)])
    twin = twin_of(family)
    expected = twin.outputs(TOKENS[1:], states[target.config.layers])[-1]
    output = as_tensor(drafter._last[0])[None]
    assert torch.allclose(drafter.head.next_state(output)[0].double(), expected, atol=1e-4)
    logits = twin.lm_head(expected)
    assert torch.allclose(drafter.head.logits(output)[0].double(), logits, atol=1e-4)
    assert draft.tokens[1] == int(logits.argmax())


def test_a_module_of_mimo_equals_the_reference(tmp_path: Path) -> None:
    """It has biases, norms, and the state before the embedding; the target does not use it."""
    path, tokens = mimo(tmp_path / "mimo"), [5, 6, 7, 9, 11, 3]
    target = tiny.decoder(path)
    states = last_states(tokens, target)
    drafter = open_proposer(path, view_of(target), states, tokens)
    (draft,) = drafter.propose([make_request(tokens, depth=1)])
    expected = MimoTwin(path, target.config).logits_of(tokens, states[target.config.layers])
    logits = drafter.head.logits(as_tensor(drafter._last[0])[None])[0]
    assert torch.allclose(logits, expected, rtol=1e-9, atol=1e-9)
    assert draft.tokens[1] == int(expected.argmax())


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_mimo_drafts_with_its_own_module(kernels: str, tmp_path: Path) -> None:
    path = mimo(tmp_path / "mimo")
    llm = LLM(path, draft=f"mtp:{path}", kv_tokens=1024, kernels=kernels)
    generate_as_plain(llm, pure_params(40, seed=5), {"depth": 3})


@needs_native
def test_a_module_of_a_model_that_reads_images(tmp_path: Path) -> None:
    """EXAONE 4.5 contains EXAONE 4 as its text part, with the module beside that part."""
    stored = load_file(model("exaone4") / "model.safetensors")
    named = {name.replace("model.", "model.language_model.", 1): t for name, t in stored.items()}
    named["model.visual.patch_embed.weight"] = torch.zeros(4, 4)
    raw = json.loads((model("exaone4") / "config.json").read_text())
    outer = {"model_type": "exaone4_5", "num_nextn_predict_layers": 1}
    outer["tie_word_embeddings"] = raw["tie_word_embeddings"]
    outer["text_config"] = raw | {"model_type": "exaone4_5_text"}
    save_file(named, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(outer))
    assert has_own_module(tmp_path) and facts_at(tmp_path, "x").kind.draft == "mtp"
    results = []
    for directory in (model("exaone4"), tmp_path):
        llm = LLM(directory, draft="mtp", kv_tokens=1024)
        found = generate_as_plain(llm, pure_params(40, seed=5), {"depth": 3})
        results.append([(c.token_ids, c.stats.by_source["mtp"]) for c in found])
    assert results[0] == results[1]


@needs_native
@pytest.mark.parametrize("family", [*FAMILIES, *GGUFS])
def test_drafts_on_the_native_kernels_are_those_of_torch(family: str) -> None:
    """Drafts are several levels deep, and some follow drafts of which nothing was accepted."""
    drafts = []
    for form in (None, "float32"):
        target = decoder(family)
        view, found = replace(view_of(target), form=form), []
        drafter = open_proposer(model(family), view, last_states(TOKENS[:4], target))
        for count in (4, 6, len(TOKENS)):
            drafter.observe(0, 0, last_states(TOKENS[:count], target))
            request = make_request(TOKENS[:count], depth=5)
            found += [drafter.propose([request])[0].tokens for _ in range(2)]
        drafts.append(found)
    assert drafts[0] == drafts[1] and [len(tokens) for tokens in drafts[0]] == [6] * 6


def fp8_twins(tmp_path: Path, family: str) -> tuple[Path, Path]:
    """Copies of a model: one in fp8 blocks, as DeepSeek V3 is published, and one in floats with the
    same numbers. The product that joins pairs is not quantized."""
    stored = load_file(model(family) / "model.safetensors")
    packed, plain = dict(stored), dict(stored)
    for name, weight in stored.items():
        if not name.endswith("_proj.weight") or "eh_proj" in name:
            continue
        rows, inputs = (-(-size // 128) for size in weight.shape)
        scale = torch.rand(rows, inputs) * 0.01 + 0.005
        every = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        every = every[: weight.shape[0], : weight.shape[1]]
        packed[name] = (weight / every).to(torch.float8_e4m3fn)
        packed[f"{name}_scale_inv"] = scale
        plain[name] = packed[name].float() * every
    directories = tmp_path / "fp8", tmp_path / "plain"
    for directory, tensors in zip(directories, (packed, plain), strict=True):
        shutil.copytree(model(family), directory)
        save_file(tensors, directory / "model.safetensors")
    method = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    configure(directories[0], quantization_config=method)
    return directories


@needs_native
@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_a_module_in_a_quantized_checkpoint(family: str, tmp_path: Path) -> None:
    """It is found, and computes with the stored numbers."""
    directories, outputs = fp8_twins(tmp_path, family), []
    states = last_states(TOKENS, decoder(family))
    for directory in directories:
        assert has_own_module(directory)
        drafter = open_proposer(directory, replace(view_of(decoder(family)), form=None), states)
        drafter.propose([make_request(TOKENS, depth=1)])
        outputs.append(as_tensor(drafter._last[0]))
    assert torch.allclose(*outputs, atol=1e-5)
    generate_as_plain(
        LLM(directories[0], draft="mtp", kv_tokens=1024), pure_params(40, seed=5), {"depth": 3}
    )


# ---------------------------------------------------------------- finding it


@pytest.mark.one_in(3)
@needs_native
@families
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_module_is_found_without_its_path(
    temperature: float, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` puts it behind suffix matching and `mtp` uses it alone; neither changes the text."""
    monkeypatch.setattr(kinds, "HEAD_PAYS", (native.start(),))
    params = pure_params(40, temperature, seed=5)
    plain = LLM(tiny.family(family), kv_tokens=1024)
    assert plain.draft == "suffix", "a checkpoint without a module"
    texts = [c.token_ids for c in plain.generate(PROMPTS, params, draft="off")]
    for draft, name in (("auto", "suffix+mtp"), ("mtp", "mtp"), ("suffix&mtp", "suffix&mtp")):
        llm = LLM(model(family), draft=draft, kv_tokens=1024)
        assert llm.draft == name
        generate_as_plain(llm, params, {}, {"depth": 3}, {"draft": "mtp", "depth": 3}, texts=texts)
    (found,) = survey([LocalModel("x", model(family), "here")])
    assert found.draft == "suffix+mtp", "forerun models names what serve drafts with"


@needs_native
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("family", QUANTIZED_GGUFS)
def test_a_module_is_found_in_a_gguf_file(
    temperature: float, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its block is no layer of the target, and the text is that of plain decoding."""
    monkeypatch.setattr(kinds, "HEAD_PAYS", (native.start(),))
    llm = LLM(model(family), kv_tokens=1024)
    assert llm.draft == "suffix+mtp" and llm.decoder.config.layers == 4
    generate_as_plain(llm, pure_params(40, temperature, seed=5), {}, {"draft": "mtp", "depth": 3})
    (found,) = survey([LocalModel("x", model(family), "here")])
    assert found.draft == "suffix+mtp", "forerun models names what serve drafts with"


@needs_native
@pytest.mark.parametrize("family", QUANTIZED_GGUFS)
def test_matrices_of_a_gguf_file_stay_as_they_are_stored(family: str) -> None:
    """The native kernels hold the file's own numbers, and torch computes the same from them."""
    view = replace(view_of(decoder(family)), form="int8")
    module = load_own_module(model(family), view)
    (layer,) = module.weights.layers
    stored = open_gguf(model(family)).tensors
    pairs = [(module.weights.join, "nextn.eh_proj"), (layer.out, "attn_output")]
    if layer.experts is not None:
        pairs.append((layer.experts.down, "ffn_down_exps"))
    for matrix, name in pairs:
        assert matrix.form == FORMS[stored[f"blk.4.{name}.weight"].kind]
    states = last_states(TOKENS, decoder(family))
    drafter = open_proposer(model(family), replace(view, form=None), states)
    drafter.propose([make_request(TOKENS, depth=1, branching=False)])
    expected = twin_of(family).outputs(TOKENS[1:], states[view.layers])[-1]
    found = drafter.head.next_state(as_tensor(drafter._last[0])[None])[0].double()
    assert torch.allclose(found, expected, atol=1e-4)


def test_the_list_of_drafters_for_a_target_has_its_own_module() -> None:
    for path in (model(), model("qwen3_5/q4_1")):
        found, _ = find_local(str(path))
        own = [one for one in found if one.origin == "checkpoint"]
        assert [(one.draft, one.reason) for one in own] == [(f"mtp:{path}", "")]
    found, _ = find_local(str(tiny.family("qwen3_5")))
    assert "checkpoint" not in {one.origin for one in found}


def test_a_small_model_with_a_module_is_a_draft_model_for_another_target() -> None:
    """Its module reads its own states only."""
    found = _with_measurements(facts_at(model(), "small"), "directory", "large", ())
    assert (found.draft, found.reason) == ("model:small", "")


def test_blocks_of_a_module_do_not_count_as_layers_of_a_gguf_file() -> None:
    facts = facts_at(model("glm4_moe/F32"), "x")
    assert facts.raw["num_hidden_layers"] == 4 == load_config(model("glm4_moe/F32")).layers


def test_auto_uses_a_module_on_native_kernels_only() -> None:
    assert automatic("auto", model(), "avx512") == "suffix+mtp"
    assert automatic("auto", model(), "") == "suffix", "a head does not pay in torch"
    assert automatic("auto", tiny.family("qwen3_5"), "avx512") == "suffix"


# ---------------------------------------------------------------- trained modules


def with_trained(directory: Path, family: str) -> tuple[Path, Path]:
    """Return a copy of a model with a module of `forerun train --recipe mtp` among its files, and
    the directory of the module."""
    source = model(family) if family in FAMILIES else tiny.family(family)
    shutil.copytree(source, directory / "model")
    module = trained(directory / "module", source, torch.float32)
    shutil.copy(module / "model.safetensors", directory / "model" / "mtp.safetensors")
    return directory / "model", module


@needs_native
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_5"])
def test_a_trained_module_in_a_checkpoint_is_found(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be of any family, and `auto` prefers it to a module that the checkpoint came with; it
    drafts what it drafts from a directory of its own."""
    monkeypatch.setattr(kinds, "HEAD_PAYS", (native.start(),))
    directory, module = with_trained(tmp_path, family)
    llm = LLM(directory, kv_tokens=1024)
    assert llm.draft == "suffix+mtp"
    (found,) = survey([LocalModel("x", directory, "here")])
    assert found.draft == "suffix+mtp"
    apart = LLM(directory, draft=f"mtp:{module}", kv_tokens=1024)
    for temperature in (0.0, 0.8):
        results = [
            generate_as_plain(
                used, pure_params(40, temperature, seed=5), {"draft": "mtp", "depth": 3}
            )
            for used in (llm, apart)
        ]
        counts = [[c.stats.by_source["mtp"] for c in found] for found in results]
        assert counts[0] == counts[1]


@needs_native
def test_a_trained_module_that_is_incomplete_is_refused_in_one_line(tmp_path: Path) -> None:
    directory, _ = with_trained(tmp_path, "llama")
    stored = load_file(directory / "mtp.safetensors")
    save_file(without("o_proj")(stored), directory / "mtp.safetensors")
    with refused(LoadError, r"no mtp_layers\.0\.self_attn\.o_proj"):
        LLM(directory, draft="mtp", kv_tokens=256)
    assert LLM(directory, kv_tokens=256).draft == "suffix"
    stored["mtp_layers.0.input_proj.weight"] = torch.zeros(32, 32)
    save_file(stored, directory / "mtp.safetensors")
    with refused(LoadError, r"input_proj.weight is .*\[32, 32\]"):
        LLM(directory, draft="mtp", kv_tokens=256)


# ---------------------------------------------------------------- refused modules


def changed(tmp_path: Path, raw: dict[str, Any], edit: Any = None) -> Path:
    """A copy of the model with other fields in its config.json, and other tensors."""
    shutil.copytree(model(), directory := tmp_path / "model")
    configure(directory, **raw)
    if edit is not None:
        save_file(edit(load_file(model() / "model.safetensors")), directory / "model.safetensors")
    return directory


def without(part: str) -> Any:
    return lambda stored: {n: t for n, t in stored.items() if part not in n}


def quantized(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add scales beside a weight, as in fp8 checkpoints."""
    return stored | {"mtp.fc.weight_scale_inv": torch.ones(1, 1)}


@needs_native
@pytest.mark.parametrize(
    ("raw", "edit", "message"),
    [
        ({}, without("mtp."), "no multi-token layers"),
        ({}, without("mtp.norm"), "no mtp.norm.weight"),
        ({}, quantized, "mtp.fc.weight_scale_inv, which is not supported"),
        ({"model_type": "cohere"}, None, "family 'cohere' are not read"),
        ({"model_type": None}, None, "family None are not read"),
    ],
)
def test_a_module_that_cannot_be_used_is_refused_in_one_line(
    raw: dict[str, Any], edit: Any, message: str, tmp_path: Path
) -> None:
    """`auto` goes on without it."""
    directory = changed(tmp_path, raw, edit)
    with refused(LoadError, message):
        load_own_module(directory, view_of(decoder()))
    assert not has_own_module(directory)
    assert automatic("auto", directory, "avx512") == "suffix"


@needs_native
def test_auto_goes_on_without_a_module_whose_tensors_are_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The names of the tensors are right, but not their numbers."""
    monkeypatch.setattr(kinds, "HEAD_PAYS", (native.start(),))
    bad = {"mtp.fc.weight": torch.full((32, 64), torch.inf)}
    directory = changed(tmp_path, {}, lambda stored: stored | bad)
    with pytest.raises(LoadError, match="not finite"):
        LLM(directory, draft="mtp", kv_tokens=256)
    assert LLM(directory, kv_tokens=256).draft == "suffix"
    assert "auto goes on without it" in capfd.readouterr().err


def test_mtp_for_a_target_without_a_module_is_refused_in_one_line(tmp_path: Path) -> None:
    with refused(LoadError, "family 'llama' are not read"):
        LLM(tiny.family("llama"), draft="mtp", kv_tokens=256)
    with refused(LoadError, "the file has no multi-token layers"):
        LLM(tiny.family("llama/q4_k_m"), draft="suffix+mtp", kv_tokens=256)
    (tmp_path / "model").mkdir()
    assert not has_own_module(tmp_path / "model") and not has_own_module(tmp_path / "a.gguf")


def gguf_with(tmp_path: Path, changes: dict[str, Any], family: str = "glm4_moe/F32") -> Path:
    """A copy of a GGUF file with other tensors: arrays in place of those there, None for none."""
    stored, path = gguf.GGUFReader(model(family)), tmp_path / "changed.gguf"
    field = stored.get_field("general.architecture")
    assert field is not None
    writer = gguf.GGUFWriter(path, field.contents())
    for name, field in stored.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            sub_type = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type)
    for tensor in stored.tensors:
        data = changes.pop(tensor.name, tensor.data)
        if data is not None:
            writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    for name, data in changes.items():
        writer.add_tensor(name, data)
    finish(writer)
    return path


@needs_native
@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("glm4_moe", {"blk.4.nextn.hnorm.weight": None}, "no blk.4.nextn.hnorm.weight"),
        ("glm4_moe", {"blk.4.nextn.eh_proj.weight": None}, "no blk.4.nextn.eh_proj.weight"),
        ("glm4_moe", {"blk.4.ffn_up_exps.weight": None}, "lacks tensor blk.4.ffn_up_exps.weight"),
        (
            "glm4_moe",
            {"blk.4.nextn.eh_proj.weight": np.zeros((32, 32), np.float32)},
            r"is \[32, 32\]",
        ),
        (
            "glm4_moe",
            {"blk.4.attn_output.bias": np.zeros(32, np.float32)},
            "attn_output.bias, which is not",
        ),
        ("deepseek_v3", {"blk.4.attn_v_b.weight": None}, "lacks tensor blk.4.attn_v_b.weight"),
        (
            "exaone_moe",
            {"blk.4.ffn_gate_inp.weight": np.zeros((8, 32), np.float32)},
            "ffn_gate_inp.weight, which is not",
        ),
    ],
)
def test_a_gguf_module_that_cannot_be_used_is_refused_in_one_line(
    family: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """The target runs without it."""
    path = gguf_with(tmp_path, dict(changes), f"{family}/F32")
    with refused(LoadError, message):
        load_own_module(path, view_of(decoder(f"{family}/F32")))
    assert LLM(path, kv_tokens=256).draft == "suffix"


@needs_native
def test_copies_of_the_target_s_tensors_in_a_gguf_file_are_not_read(tmp_path: Path) -> None:
    copies = {
        f"blk.4.nextn.{name}.weight": np.zeros((64, 32), np.float32)
        for name in ("embed_tokens", "shared_head_head")
    }
    path = gguf_with(tmp_path, copies)
    assert has_own_module(path)
    load_own_module(path, view_of(decoder("glm4_moe/F32")))


@needs_native
def test_a_tensor_of_a_wrong_shape_is_refused_in_one_line(tmp_path: Path) -> None:
    shutil.copytree(model("deepseek_v3"), directory := tmp_path / "model")
    stored = load_file(directory / "model.safetensors")
    stored["model.layers.4.eh_proj.weight"] = torch.zeros(32, 32)
    save_file(stored, directory / "model.safetensors")
    with refused(LoadError, r"eh_proj.weight is \[32, 32\]"):
        load_own_module(directory, view_of(decoder("deepseek_v3")))


@pytest.mark.parametrize(
    ("lost", "changes", "message"),
    [
        ("mtp_layers", {}, "no multi-token layers"),
        ("nothing", {"num_hidden_layers": 2}, "for this model alone"),
        ("mtp_layers.0.mlp", {}, "has no mtp_layers.0.mlp"),
    ],
)
def test_a_missing_module_of_mimo_is_refused_in_one_line(
    lost: str, changes: dict[str, int], message: str, tmp_path: Path
) -> None:
    path = mimo(tmp_path / "mimo", **changes)
    stored = load_file(path / "model.safetensors")
    save_file(without(lost)(stored), path / "model.safetensors")
    with refused(LoadError, message):
        load_any_module(path, view_of(tiny.decoder(mimo(tmp_path / "whole"))))


def test_a_refusal_names_latent_attention() -> None:
    names = [
        "model.layers.61.eh_proj.weight",
        "model.layers.61.self_attn.kv_a_proj_with_mqa.weight",
    ]
    assert "latent attention" in refuse_own_module({"model_type": "deepseek_v2"}, names)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layout_has_every_tensor_of_its_module(family: str) -> None:
    """A missing tensor is refused, and so is one that the module would not read."""
    raw = json.loads((model(family) / "config.json").read_text())
    stored = load_file(model(family) / "model.safetensors")
    layout, layers = OWN_LAYOUTS[raw["model_type"]], raw["num_hidden_layers"]
    at = layout.at(layers)
    own = {name for name in stored if name.startswith(at)}
    copies = {f"{at}embed_tokens.weight", f"{at}shared_head.head.weight"}
    assert refuse_own_module(raw, stored) == ""
    assert refuse_own_module({"model_type": "outer", "text_config": raw}, stored) == ""
    for name in own - copies:
        missing = refuse_own_module(raw, stored.keys() - {name})
        assert f"has no {name.removeprefix('model.')}" in missing
    assert refuse_own_module(raw, stored.keys() - copies) == ""
    extra = refuse_own_module(raw, {*stored, f"{at}{layout.layer}self_attn.o_proj.bias"})
    assert "self_attn.o_proj.bias, which is not supported" in extra


def test_a_module_with_windows_of_k_exaone_is_refused() -> None:
    raw = json.loads((model("exaone_moe") / "config.json").read_text())
    stored = load_file(model("exaone_moe") / "model.safetensors")
    assert refuse_own_module(raw | {"mtp_layer_types": ["full_attention"]}, stored) == ""
    for types in (["sliding_attention"], ["full_attention"] * 2, "full_attention"):
        refused = refuse_own_module(raw | {"mtp_layer_types": types}, stored)
        assert "only one layer of full attention is supported" in refused


@pytest.mark.parametrize("family", ["qwen3_5_moe", "glm4_moe", "deepseek_v3"])
def test_impossible_numbers_of_experts_are_refused(family: str) -> None:
    raw = json.loads((model(family) / "config.json").read_text())
    stored = load_file(model(family) / "model.safetensors").keys()
    key = "num_experts" if family.startswith("qwen") else "n_routed_experts"
    for count in (0, "8", 1 << 40):
        assert "the number of experts" in refuse_own_module(raw | {key: count}, stored)
    lost = refuse_own_module({name: raw[name] for name in raw if name != key}, stored)
    assert "lacks or misstates" in lost
    more = refuse_own_module(raw | {key: raw[key] + raw.get("n_group", 1)}, stored)
    assert f"experts.{raw[key]}.down_proj.weight" in more
