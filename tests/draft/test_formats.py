"""Every published format gives back the head that it was written from; everything else is refused in
one line.

The numbers of hidden states, and which slot of a block predicts which token, mean different things
in different formats. A head that is read the wrong way still drafts, so the meaning of each format
is listed here."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from forerun import LLM, LoadError, SamplingParams
from forerun.draft import head_files
from forerun.draft.block.formats import MarkovShape
from forerun.draft.block.module import load_block, save_block
from forerun.draft.eagle.module import load_eagle1_head, load_head, save_head
from forerun.draft.eagle.mtp import save_module
from forerun.draft.head_config import read_config
from forerun.draft.head_files import read_layer, tensor_names
from forerun.draft.kinds import kind_of
from forerun.draft.proposer import DraftRequest
from forerun.draft.registry import MEDUSA_LOADERS
from forerun.models.files import LARGEST
from forerun.verify import Noise
from tests import tiny
from tests.draft import published
from tests.draft.heads import CASES, KINDS, NO_CONFIDENCE, PLAIN, SHAPES, head_of
from tests.draft.helpers import refused
from tests.draft.published import (
    DEEPSPEC,
    DFLASH,
    DSPARK,
    MARKOV,
    PEAGLE_SPECFORGE,
    PEAGLE_SPECULATORS,
    PEAGLE_VLLM,
    QWEN3,
    SLIDING,
    SPECFORGE,
    SPECFORGE_OWN,
    ZLAB,
    ZLAB_OWN,
    Published,
)
from tests.draft.twins import target

Case = tuple[str, Any, Published]  # the kind, the expected head, and its checkpoint


def drafts(kind: str, head: Any) -> list[int]:
    """Draft with a head from random states."""
    view = target()
    drafter = KINDS[kind].proposer(head, view, width=3)
    generator = torch.Generator().manual_seed(3)
    states = {b: torch.randn(6, view.hidden, generator=generator) for b in range(view.layers + 1)}
    drafter.open(0, range(7))
    drafter.observe(0, 0, {b: states[b] for b in drafter.aux_hidden_layers})
    request = DraftRequest(0, range(7), SamplingParams(), Noise(1, 6), 5)
    return drafter.propose([request])[0].tokens


def assert_same(kind: str, loaded: Any, head: Any) -> None:
    mine, theirs = loaded.state_dict(), head.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    layers = [getattr(h, "layer", None) or h.config.layer for h in (loaded, head)]
    assert replace(layers[0], raw={}) == replace(layers[1], raw={})
    if hasattr(head, "config"):
        plain = [dataclasses.replace(h.config, layer=layers[1]) for h in (loaded, head)]
        assert plain[0] == plain[1]
    found = drafts(kind, loaded)
    assert found == drafts(kind, head) and len(found) > 3


# ---------------------------------------------------------------- formats that must load


def eagle3(raw: dict[str, Any] | None = None, **changes: Any) -> Case:
    return ("eagle3", *published.eagle3(raw, **changes))


def with_tensors(case: Case, change: Callable[[dict[str, torch.Tensor]], Any]) -> Case:
    """Apply `change` to the tensors of a case, in place."""
    change(case[2].tensors)
    return case


def renamed(case: Case, prefix: str = "model.", file: str = "model.safetensors") -> Case:
    kind, head, made = case
    tensors = {prefix + name: tensor for name, tensor in made.tensors.items()}
    tensors[f"{prefix}midlayer.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    return kind, head, replace(made, tensors=tensors, file=file)


def in_bfloat16() -> Case:
    kind, head, made = eagle3()
    head.bfloat16().float()
    for name, tensor in made.tensors.items():
        made.tensors[name] = tensor.bfloat16() if tensor.is_floating_point() else tensor
    return kind, head, made


def with_token_ids() -> Case:
    """Make d2t the ids themselves, in any order."""
    kind, head, made = eagle3()
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    made.tensors |= {"d2t": head.tokens()[order], "lm_head.weight": head.lm_head.weight[order]}
    del made.tensors["t2d"]
    return kind, head, made


def with_defaults() -> Case:
    kind, head, _ = eagle3(aux_hidden_layers=(2, 1, 0), norm_before_residual=True)
    layer = {"model_type": "llama", "num_attention_heads": 4}
    layer |= {"max_position_embeddings": 128, "rms_norm_eps": 1e-5}
    raw = {"speculators_model_type": "eagle3", "transformer_layer_config": layer}
    return kind, head, published.of_head("eagle3", head, raw)


def eagle1(raw: dict[str, Any] | None = None, **changes: Any) -> Case:
    return ("eagle", *published.eagle1(raw, **changes))


def peagle(raw: dict[str, Any], layer: str = "", **changes: Any) -> Case:
    head = tiny.parallel("llama", draft_vocab=40, **changes)
    return "p-eagle", head, published.of_head("eagle3", head, raw, layer=layer)


def block(raw: dict[str, Any], **changes: Any) -> Case:
    return ("block", *published.block(raw, **changes))


def with_targets_weights() -> Case:
    """Add copies of the target's embedding and lm head, which older files hold, to a case."""
    kind, head, made = block(DSPARK, **FILL_IN)
    weights = tiny.decoder(tiny.family("llama")).weights
    made.tensors |= {"embed_tokens.weight": weights.embed, "lm_head.weight": weights.head.weight}
    return kind, head, made


def without_sizes() -> Case:
    layer = {name: QWEN3[name] for name in ("num_hidden_layers", "num_attention_heads", "head_dim")}
    raw = {name: value for name, value in DSPARK.items() if name not in MARKOV}
    layer |= {"max_position_embeddings": 128}
    return block(raw | {"transformer_layer_config": layer}, **FILL_IN)


IDS = "eagle_aux_hidden_state_layer_ids"
FILL_IN = {"sample_from_anchor": False}
OWN = {"own_embedding": True, "own_head": True}
SEEN: dict[str, Any] = {"layer": SLIDING}
DFLASH_SLIDING = DFLASH | {"transformer_layer_config": QWEN3 | SLIDING}
NO_WINDOW = {name: value for name, value in SLIDING.items() if name != "sliding_window"}
FORMATS: dict[str, Callable[[], Case]] = {
    "EAGLE-3: SafeAILab's, 2, N // 2 and N - 3 of 3 layers": eagle3,
    "EAGLE-3: other names": lambda: renamed(eagle3()),
    "EAGLE-3: another file": lambda: renamed(eagle3(), "", "eagle.safetensors"),
    "EAGLE-3: pickled": lambda: renamed(eagle3(), file="pytorch_model.bin"),
    "EAGLE-3: bfloat16": in_bfloat16,
    "EAGLE-3: SpecForge's, outputs of layers": lambda: eagle3(
        {"eagle_config": {IDS: [1, 0, 2]}}, aux_hidden_layers=(2, 1, 3)),
    "EAGLE-3: NVIDIA's, as in forerun": lambda: eagle3(
        {"eagle_config": {IDS: [2, 0, 3]}}, aux_hidden_layers=(2, 0, 3)),
    "EAGLE-3: at the top, as in forerun": lambda: eagle3({IDS: [1, 0, 3]}, aux_hidden_layers=(1, 0, 3)),
    "EAGLE-3: DeepSpec's, outputs of layers": lambda: eagle3(
        {"architectures": ["Qwen3Eagle3Model"], "target_layer_ids": [1, -1, 2]}, aux_hidden_layers=(2, 0, 3)),
    "EAGLE-3: norm_output of a flat config is another thing": lambda: eagle3({"norm_output": True}),
    "EAGLE-3: flags in eagle_config": lambda: eagle3(
        {"eagle_config": {"norm_before_residual": True, "norm_before_fc": True}},
        norm_before_residual=True, norm_before_fc=True),
    "EAGLE-3: ids instead of offsets": with_token_ids,
    "EAGLE-3: a map of the whole vocabulary": lambda: with_tensors(
        eagle3({"draft_vocab_size": 64}, draft_vocab=64),
        lambda t: t.update(d2t=torch.zeros(64, dtype=torch.int64), t2d=torch.ones(64, dtype=torch.bool))),
    "EAGLE-3: speculators, fields left out": with_defaults,
    "P-EAGLE: speculators": lambda: peagle(PEAGLE_SPECULATORS | {"draft_vocab_size": 40}),
    "P-EAGLE: speculators, with norms": lambda: peagle(
        PEAGLE_SPECULATORS | {"norm_before_residual": True, "fc_norm": True},
        norm_before_residual=True, fc_norm=True),
    "P-EAGLE: vLLM": lambda: peagle(PEAGLE_VLLM, "midlayer."),
    "P-EAGLE: SpecForge": lambda: peagle(PEAGLE_SPECFORGE),
    "EAGLE: their authors'": eagle1,
    "EAGLE: pickled": lambda: (*eagle1()[:2], replace(eagle1()[2], file="pytorch_model.bin")),
    "EAGLE: without a bias": lambda: eagle1({"bias": False}, bias=False),
    "EAGLE: for Qwen2": lambda: eagle1({"qkv_bias": True, "model_type": "qwen2"}, qkv_bias=True),
    "EAGLE: an embedding of its own": lambda: eagle1(own=True),
    "EAGLE: an lm head of its own": lambda: eagle1(own_head=True),
    "EAGLE: vLLM's": lambda: ("eagle", *published.eagle1_of_vllm()),
    "EAGLE: vLLM's, an lm head of its own": lambda: ("eagle", *published.eagle1_of_vllm(own_head=True)),
    "block: DeepSpec's DSpark": lambda: block(DEEPSPEC | MARKOV, **OWN),
    "block: DeepSpec's DFlash, from the anchor too": lambda: block(
        DEEPSPEC | {"markov_rank": 0}, **PLAIN, **OWN),
    "block: z-lab": lambda: block(ZLAB, **PLAIN, **FILL_IN),
    "block: z-lab, all in one place": lambda: block(
        ZLAB | {"block_size": None, "dflash_config": ZLAB_OWN | {"block_size": 4}}, **PLAIN, **FILL_IN),
    "block: SpecForge": lambda: block(SPECFORGE, **FILL_IN, **NO_CONFIDENCE),
    "block: SpecForge, from the anchor": lambda: block(
        SPECFORGE | {"dflash_config": SPECFORGE_OWN | {"sample_from_anchor": True}}, **NO_CONFIDENCE),
    "block: speculators, a gated Markov head": lambda: block(
        DSPARK | {"markov_head_type": "gated"}, **FILL_IN, markov=MarkovShape(5, "gated")),
    "block: DeepSpec, a recurrent Markov head": lambda: block(
        DEEPSPEC | MARKOV | {"markov_head_type": "rnn"}, **OWN, markov=MarkovShape(5, "rnn")),
    "block: z-lab, a window": lambda: block(ZLAB | SLIDING, **PLAIN, **FILL_IN, **SEEN),
    "block: SpecForge, a causal window": lambda: block(
        SPECFORGE | SLIDING, **FILL_IN, **SEEN, **NO_CONFIDENCE, window_causal=True),
    "block: SpecForge, a window over the whole block": lambda: block(
        SPECFORGE | SLIDING | {"sliding_window_non_causal": True}, **FILL_IN, **SEEN, **NO_CONFIDENCE),
    "block: speculators, a causal window": lambda: block(
        DFLASH_SLIDING, **PLAIN, **FILL_IN, **SEEN, window_causal=True),
    "block: speculators, a window over the whole block": lambda: block(
        DFLASH_SLIDING | {"sliding_window_non_causal": True}, **PLAIN, **FILL_IN, **SEEN),
    "block: speculators, Qwen3's default window": lambda: block(
        DFLASH | {"transformer_layer_config": QWEN3 | NO_WINDOW}, **PLAIN, **FILL_IN,
        layer=SLIDING | {"sliding_window": 4096}, window_causal=True),
    "block: DSpark without a flag fills in": lambda: block(DSPARK, **FILL_IN),
    "block: DFlash without a flag fills in": lambda: block(DFLASH, **PLAIN, **FILL_IN),
    "block: DSpark from the anchor": lambda: block(DSPARK | {"sample_from_anchor": True}),
    "block: DFlash from the anchor": lambda: block(DFLASH | {"sample_from_anchor": True}, **PLAIN),
    "block: the flag's other name": lambda: block(DSPARK | {"query_zero_predicts_next": True}),
    "block: both names": lambda: block(
        DSPARK | {"query_zero_predicts_next": True, "sample_from_anchor": False}, **FILL_IN),
    "block: sizes left out": without_sizes,
    "block: the target's embedding and lm head": with_targets_weights,
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_a_published_format_is_read_as_its_head(name: str, tmp_path: Path) -> None:
    kind, head, made = FORMATS[name]()
    directory = made.write(tmp_path / "head")
    assert kind_of(directory) == made.draft and tensor_names(directory)
    assert_same(kind, KINDS[kind].load(directory, target()), head)


@pytest.mark.parametrize(("kind", "shape"), [case for case in CASES if case[0] in MEDUSA_LOADERS])
def test_medusa_style_files_are_recognised(kind: str, shape: str, tmp_path: Path) -> None:
    """What they compute is compared with the papers' formulas in test_heads.py."""
    directory = SHAPES[kind][shape]["made"]().write(tmp_path / "heads")
    assert kind_of(directory) == kind and tensor_names(directory)


def test_shards_are_read_together(tmp_path: Path) -> None:
    kind, head, made = eagle3()
    directory, tensors = made.write(tmp_path / "head"), list(made.tensors.items())
    (directory / "model.safetensors").unlink()
    for number, part in enumerate((tensors[:5], tensors[5:])):
        save_file(dict(part), directory / f"model-0000{number}-of-00002.safetensors")
    assert_same(kind, load_head(directory, target()), head)


def test_a_map_of_zeros_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kind, head, _ = eagle3()
    head.set_token_ids(torch.arange(40))
    made = published.of_head("eagle3", head, published.SAFEAILAB, layer="midlayer.")
    assert_same(kind, load_head(made.write(tmp_path / "head"), target()), head)
    assert "predicts only the tokens below 40" in capsys.readouterr().err


def test_copies_of_the_target_s_weights_are_not_loaded(tmp_path: Path) -> None:
    """Copies may be rounded; one row that differs makes an embedding or lm head the head's own."""
    theirs = tiny.decoder(tiny.family("llama")).weights
    _, made = published.eagle1()
    for weight, is_copy in ((1.0, True), (1.02, False)):
        made.tensors["lm_head.weight"] = theirs.head.weight.float().bfloat16() * weight
        head = load_eagle1_head(made.write(tmp_path / "eagle"), target())
        assert (head.lm_head is None) == is_copy
    copies = {"embed_tokens.weight": theirs.embed, "lm_head.weight": theirs.head.weight}
    for name, own in (("embed_tokens", "own_embedding"), ("lm_head", "own_head")):
        made = block(DSPARK, **FILL_IN)[2]
        made.tensors |= {key: tensor.clone() for key, tensor in copies.items()}
        made.tensors[f"{name}.weight"][7] *= 1.02
        config = load_block(made.write(tmp_path / "block"), target()).config
        assert [field for field in OWN if getattr(config, field)] == [own]


# ---------------------------------------------------------------- saving


EAGLE3 = {"draft_vocab": 40, "layer": {"rms_norm_eps": 1e-5}}
SCALED = {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}
YARN = {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}
SAVED: list[tuple[str, dict[str, Any]]] = [
    *((kind, SHAPES[kind][shape]) for kind, shape in CASES if kind in ("eagle3", "mtp", "block")),
    ("eagle3", {"fc_norm": True, "layer": {"hidden_act": "gelu", "rope_theta": 500.0}}),
    ("eagle3", {"layer": SCALED}), ("eagle3", {"layer": YARN}),
    ("eagle3", {"own_embedding": True, "layer": {"model_type": "qwen3", "hidden_size": 24, "head_dim": 8}}),
    ("block", {"sample_from_anchor": False, "confidence_with_markov": False}),
    ("block", {"draft_vocab": 40, "own_head": True, "block": 7, "mask_token": 63}),
    ("block", {"layer": {"model_type": "llama", "num_hidden_layers": 1, "hidden_act": "gelu"}}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "shape"), SAVED, ids=lambda value: str(value)[:60])
def test_a_head_comes_back_as_it_was_saved(
    kind: str, shape: dict[str, Any], tmp_path: Path
) -> None:
    if shape.get("block") == 1:
        shape = shape | {"block": 2}  # a chain of one token tells nothing
    head = KINDS[kind].make("llama", **shape)
    KINDS[kind].save(head, tmp_path / "head")
    assert kind_of(tmp_path / "head") == KINDS[kind].draft
    assert_same(kind, KINDS[kind].load(tmp_path / "head", target()), head)
    assert sorted(os.listdir(tmp_path / "head")) == ["config.json", "model.safetensors"]


def test_int8_heads_are_small_and_are_saved_again_to_the_bit(tmp_path: Path) -> None:
    head = head_of("eagle3", "joined pairs")
    for dtype in (torch.float32, torch.int8):
        save_head(head, tmp_path / str(dtype), "some/target", dtype)
    int8 = tmp_path / "torch.int8"
    loaded = load_head(int8, target())
    for name, value in loaded.state_dict().items():
        stored = head.state_dict()[name].float()
        largest = stored.abs().amax(-1, keepdim=True) if stored.ndim == 2 else stored.abs().max()
        assert torch.all(
            (value.float() - stored).abs() <= 0.51 * largest / (127 if stored.ndim == 2 else 100)
        )
    sizes = [(p / "model.safetensors").stat().st_size for p in (int8, tmp_path / "torch.float32")]
    assert sizes[0] < 0.4 * sizes[1]
    save_head(loaded, tmp_path / "again", "some/target", torch.int8)
    assert_same("eagle3", load_head(tmp_path / "again", target()), loaded)
    described = json.loads((int8 / "config.json").read_text())["quantization_config"]
    assert described["format"] == "int-quantized"
    assert described["config_groups"]["group_0"]["weights"]["num_bits"] == 8


def test_a_saved_drafter_has_the_fields_that_other_engines_read(tmp_path: Path) -> None:
    """It holds no tensor of the target."""
    save_block(head_of("block"), tmp_path / "drafter", "some/target", torch.bfloat16)
    names = load_block(tmp_path / "drafter", target()).state_dict()
    assert not [n for n in names if n.startswith(("embed_tokens", "lm_head", "d2t", "t2d"))]
    raw = json.loads((tmp_path / "drafter" / "config.json").read_text())
    assert raw["speculators_model_type"] == "dspark"
    assert raw["architectures"] == ["DSparkSpeculator"]
    assert raw["speculators_config"]["verifier"]["name_or_path"] == "some/target"
    assert raw["sample_from_anchor"] is True and raw["dtype"] == "bfloat16"


def test_a_save_that_fails_keeps_the_old_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, place = head_of("eagle3"), tmp_path / "head"
    save_head(head, place)

    def full(tensors: object, path: Path, metadata: object) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(head_files, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        save_head(head_of("eagle3", "norm of the output"), place)
    assert sorted(os.listdir(place)) == ["config.json", "model.safetensors"]
    assert_same("eagle3", load_head(place, target()), head)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        save_head(head, tmp_path / "file" / "head")


# ---------------------------------------------------------------- what is refused


def mtp(**changes: Any) -> Published:
    """A saved module; its file is read back."""
    directory = tiny.new_directory("mtp-")
    save_module(tiny.mtp("llama", **changes), directory, None, torch.float32)
    tensors = tiny.mtp("llama", **changes).state_dict()
    return Published("mtp", json.loads((directory / "config.json").read_text()), dict(tensors))


def fields(**changes: Any) -> Callable[[Published], None]:
    return lambda made: made.raw.update(changes)


def layer(**fields: Any) -> Callable[[Published], None]:
    """Change transformer_layer_config."""
    return lambda made: made.raw.update(
        transformer_layer_config=made.raw["transformer_layer_config"] | fields
    )


def zlab(**fields: Any) -> Callable[[Published], None]:
    """Change dflash_config."""
    return lambda made: made.raw.update(dflash_config=ZLAB_OWN | fields)


def drop(name: str) -> Callable[[Published], Any]:
    return lambda made: made.tensors.pop(name)


def put(name: str, value: torch.Tensor) -> Callable[[Published], None]:
    return lambda made: made.tensors.update({name: value})


def both(*changes: Callable[[Published], Any]) -> Callable[[Published], Any]:
    return lambda made: [change(made) for change in changes]


BASES: dict[str, tuple[str, Callable[[], Published]]] = {
    "eagle3": ("eagle3", lambda: published.eagle3()[1]),
    "eagle": ("eagle", lambda: published.eagle1()[1]),
    "mtp": ("mtp", mtp),
    "mtp of 40 tokens": ("mtp", lambda: mtp(draft_vocab=40)),
    "dspark": ("block", lambda: published.block(DSPARK)[1]),
    "dspark of 40 tokens": ("block", lambda: published.block(
        DSPARK | {"draft_vocab_size": 40}, draft_vocab=40, own_head=True)[1]),
    "z-lab": ("block", lambda: published.block(ZLAB, **PLAIN, **FILL_IN)[1]),
    "IBM": ("mlp", published.ibm),
    "Medusa": ("medusa", published.medusa),
    "vLLM's Medusa": ("medusa", published.medusa_of_vllm),
    "vLLM's Medusa of 40 tokens": ("medusa", lambda: published.medusa_of_vllm(draft_vocab=40)),
    "vLLM's Medusa, shared": ("medusa", lambda: published.medusa_of_vllm(shared=True)),
}  # fmt: skip
ZEROS, NAN = torch.zeros(3, 3), torch.full((32,), torch.nan)
BROKEN: list[tuple[str, Callable[[Published], Any], str]] = [
    # tensors
    ("eagle3", drop("midlayer.mlp.up_proj.weight"), "no layers.0.mlp.up_proj.weight"),
    ("eagle3", drop("fc.weight"), "no fc.weight"),
    ("eagle3", drop("lm_head.weight"), "no lm_head.weight"),
    ("eagle3", put("lm_head.weight", torch.zeros(0, 32)), "no lm_head.weight"),
    ("eagle3", put("fc.weight", torch.tensor(1.0)), "no fc.weight"),
    ("eagle3", put("midlayer.mlp.bias", torch.zeros(3)), "has layers.0.mlp.bias"),
    ("eagle3", put("layers.1.mlp.up_proj.weight", torch.eye(32)), "has layers.1"),
    ("eagle3", put("midlayer.self_attn.o_proj.weight", ZEROS), "its configuration asks for"),
    ("eagle3", put("norm.weight", torch.ones(32, dtype=torch.int32)), "torch.int32"),
    ("eagle3", put("norm.weight", NAN), "not finite"),
    ("eagle3", put("lm_head.weight", torch.ones(40, 32, dtype=torch.int8)), "no lm_head.weight_scale with a number"),
    ("eagle3", put("norm.weight", torch.ones(32, dtype=torch.int8)), "no norm.weight_scale"),
    ("eagle3", put("lm_head.weight_scale", torch.ones(40, 1)), "has lm_head.weight_scale"),
    ("eagle3", put("fc.weight", torch.zeros(32, 64)), "reads 64 numbers, but the hidden states .* have 96"),
    ("eagle", drop("layers.0.mlp.up_proj.weight"), "up_proj"),
    ("eagle", drop("fc.weight"), "no fc.weight"),
    ("eagle", put("layers.0.input_layernorm.weight", torch.ones(32)), "has layers.0.input_layernorm"),
    ("eagle", put("fc.weight", torch.zeros(32, 96)), "reads 96 numbers"),
    ("eagle", put("embed_tokens.weight", torch.zeros(65, 32)), r"\[65, 32\]"),
    ("eagle", put("norm.weight", torch.ones(32)), "eagle3:"),
    ("eagle", put("lm_head.weight", torch.zeros(65, 32)), r"\[65, 32\]"),
    ("mtp", drop("mtp_layers.0.input_proj.weight"), "input_proj"),
    ("mtp", put("mtp_layers.0.input_proj.weight", ZEROS), r"\[3, 3\]"),
    ("dspark", drop("layers.1.self_attn.k_norm.weight"), "no layers.1.self_attn.k_norm"),
    ("dspark", put("layers.1.self_attn.k_proj.bias", NAN), "has layers.1.self_attn.k_proj.bias"),
    ("IBM", drop("speculator.emb.2.weight"), "no emb.2.weight"),
    ("IBM", put("speculator.proj.0.weight", ZEROS), r"\[3, 3\]"),
    ("IBM", put("speculator.ln.0.bias", torch.full((24,), torch.inf)), "not finite"),
    ("Medusa", drop("1.1.weight"), "no lm_heads.1.weight"),
    ("Medusa", put("1.1.weight", ZEROS), r"\[3, 3\]"),
    ("vLLM's Medusa, shared", drop("lm_heads.0.weight"), "no lm_heads.0.weight"),
    # which tokens are predicted
    ("eagle3", drop("d2t"), "no d2t"),
    ("eagle3", put("d2t", torch.zeros(3, dtype=torch.int64)), "40 whole numbers"),
    ("eagle3", put("d2t", torch.zeros(40)), "40 whole numbers"),
    ("eagle3", put("d2t", torch.full((40,), 99)), "different tokens of 64"),
    ("eagle3", put("d2t", torch.full((40,), -9)), "different tokens of 64"),
    ("eagle3", put("d2t", torch.arange(40).flip(0) // 2), "different tokens of 64"),
    ("eagle3", fields(draft_vocab_size=32), "lm_head.weight has 40 rows"),
    ("eagle3", fields(vocab_size=39), "more than the 39"),
    ("eagle", fields(truncated_vocab_size=40), "40 tokens only"),
    ("mtp of 40 tokens", fields(draft_vocab_size=41), "41, but lm_head.weight has 40 rows"),
    ("mtp of 40 tokens", drop("d2t"), "no d2t"),
    ("mtp of 40 tokens", put("d2t", torch.arange(40).flip(0)), "ascending"),
    ("mtp of 40 tokens", put("d2t", torch.full((40,), 25)), "ascending"),
    ("mtp of 40 tokens", both(fields(draft_vocab_size=65), put("lm_head.weight", torch.zeros(65, 32))), "65 tokens, more"),
    ("dspark of 40 tokens", drop("d2t"), "no d2t"),
    ("dspark of 40 tokens", put("d2t", torch.zeros(40)), "no d2t of 40 integers"),
    ("dspark of 40 tokens", put("d2t", torch.full((40,), -1)), "ascending"),
    ("dspark", fields(draft_vocab_size=40), "no lm_head.weight"),
    ("dspark", fields(draft_vocab_size=65), "from 1 to 64"),
    ("vLLM's Medusa of 40 tokens", drop("token_map"), "no token_map of 40"),
    ("vLLM's Medusa of 40 tokens", put("token_map", torch.arange(40) + 40), "40 different tokens of 64"),
    # layers
    ("eagle3", fields(num_hidden_layers=2), "drafters of 1 layer"),
    ("eagle3", fields(model_type="deepseek_v2"), "family 'deepseek_v2'"),
    ("eagle3", fields(model_type=[1]), "family"),
    ("eagle3", fields(attention_bias=True), "biases"),
    ("eagle3", fields(num_attention_heads=3), "config.json"),
    ("eagle3", fields(hidden_size="many"), "config.json"),
    ("eagle3", fields(head_dim=7), "cannot rotate"),
    ("eagle3", fields(rope_scaling="long"), "config.json"),
    ("eagle3", fields(layer_types=["sliding_attention"], sliding_window=0), "sliding window"),
    ("eagle3", fields(join=True, norm_before_residual=True), "both true"),
    ("eagle", fields(num_hidden_layers=2), "2 layers"),
    ("eagle", fields(model=[1]), "not an object"),
    ("mtp", fields(num_nextn_predict_layers=3), "3 layers"),
    ("mtp", fields(speculators_model_type="eagle3"), "does not describe"),
    ("mtp", fields(transformer_layer_config=None), "does not describe"),
    ("dspark", fields(transformer_layer_config=None), "describes no layers"),
    ("dspark", fields(transformer_layer_config={}), "num_hidden_layers"),
    ("dspark", layer(num_hidden_layers=3), "no layers.2"),
    ("dspark", layer(num_hidden_layers=1), "has layers.1"),
    ("dspark", layer(layer_types=SLIDING["layer_types"]), "sliding_window in config.json is None"),
    ("dspark", layer(model_type="gemma2"), "gemma2"),
    ("dspark", layer(num_attention_heads=2), "its configuration asks for"),
    ("z-lab", fields(layer_types=["full_attention", "chunked_attention"]), "another attention"),
    ("z-lab", fields(layer_types=SLIDING["layer_types"], sliding_window=0), "sliding_window"),
    ("z-lab", fields(**SLIDING | {"layer_types": ["sliding_attention"]}), "1 entries"),
    ("z-lab", fields(**SLIDING | {"use_sliding_window": False}), "one of them is wrong"),
    ("z-lab", fields(**SLIDING, architectures=["Qwen3DSparkModel"], dflash_config=None), "sliding_window_non_causal"),
    # hidden states
    ("eagle3", fields(eagle_config={IDS: [1, "a"]}), "layer numbers"),
    ("eagle3", fields(target_layer_ids=[]), "layer numbers"),
    ("eagle3", fields(target_layer_ids=[1, 2, 3]), "from 0 to 3"),
    ("eagle3", fields(target_layer_ids=[1, 2, 1]), "different numbers"),
    ("eagle3", fields(target_layer_ids=[1, 2]), "reads 96 numbers"),
    ("eagle3", fields(eagle_config=[1]), "eagle_config"),
    ("dspark", fields(aux_hidden_state_layer_ids=None), "aux_hidden_state_layer_ids"),
    ("dspark", fields(aux_hidden_state_layer_ids=["last"]), "aux_hidden_state_layer_ids"),
    ("dspark", fields(aux_hidden_state_layer_ids=[1, 2]), "fc.weight reads 96"),
    ("dspark", fields(aux_hidden_state_layer_ids=[1, 2, 9]), "from 0 to 3"),
    ("z-lab", fields(num_target_layers=4), "target of 4 layers, this one has 3"),
    ("z-lab", zlab(target_layer_ids=[1, "2"]), "target_layer_ids"),
    ("z-lab", zlab(target_layer_ids=[1, -1, 3]), "from 0 to 3"),
    ("z-lab", fields(dflash_config=[]), "aux_hidden_state_layer_ids"),
    ("z-lab", fields(dflash_config="x"), "not an object"),
    # flags, sizes, kinds
    ("eagle3", fields(vocab_size=65), "65 tokens"),
    ("eagle3", fields(norm_before_residual="yes"), "not true or false"),
    ("eagle3", fields(norm_before_fc=True), "no input_norm.weight"),
    ("eagle3", fields(norm_output=False), "norm_output"),
    ("eagle3", fields(speculators_model_type="dflash"), "'dflash' speculator"),
    ("eagle3", fields(speculators_model_type="eagle3"), "transformer_layer_config"),
    ("eagle3", fields(mask_token_id=3), "no mask_hidden"),
    ("eagle3", fields(parallel_drafting=True), "no mask token"),
    ("eagle3", fields(pard_token="x"), "not a token"),
    ("eagle3", both(fields(pard_token=64), put("mask_hidden", torch.zeros(96))), "one of its 64 tokens"),
    ("eagle3", fields(pard_token=3, num_hidden_layers="x"), "whole number"),
    ("eagle3", fields(pard_token=3, num_hidden_layers=2), "no layers.1"),
    ("eagle3", put("mask_hidden", torch.zeros(1, 1, 96)), "mask_hidden, which no"),
    ("eagle3", both(fields(pard_token=3), put("mask_hidden", torch.zeros(1, 1, 95))), r"1, 95\]"),
    ("eagle", fields(bias=False), "fc.bias"),
    ("eagle", fields(qkv_bias=True), "k_proj.bias"),
    ("eagle", fields(bias="yes"), "true or false"),
    ("eagle", both(fields(vocab_size=65), drop("embed_tokens.weight")), "trained for it"),
    ("dspark", fields(speculators_model_type="eagle3"), "dspark"),
    ("dspark", fields(causal=True), "its blocks are causal"),
    ("dspark", fields(block_size=None), "block_size"),
    ("dspark", fields(block_size=1 << 40), "block_size"),
    ("dspark", fields(block_size=1), "no slot"),
    ("dspark", fields(mask_token_id="<mask>"), "mask_token_id"),
    ("dspark", fields(mask_token_id=64), "from 0 to 63"),
    ("dspark", fields(sample_from_anchor="yes"), "true or false"),
    ("dspark", fields(markov_rank=-1), "markov_rank"),
    ("dspark", fields(markov_rank=6), "config.json asks for 6"),
    ("dspark", fields(markov_rank=0), "config.json asks for 0"),
    ("dspark", fields(markov_head_type="gated"), "gate_proj"),
    ("dspark", fields(markov_head_type="lstm"), "only vanilla, gated, rnn"),
    ("dspark", fields(enable_confidence_head=False), "confidence_head"),
    ("z-lab", fields(architectures=["DFlashLagunaForCausalLM"]), "Laguna"),
    ("z-lab", fields(architectures=["Gemma4DSparkModel"]), "Gemma 4"),
    ("z-lab", fields(architectures=["DFlash2DraftModel"]), "DFlash2DraftModel"),
    ("z-lab", fields(attention_value_scale=0.5), "attention_value_scale"),
    ("z-lab", zlab(causal="yes"), "causal"),
    ("z-lab", zlab(projector_type="domino"), "which forerun does not read"),
    ("z-lab", zlab(selector_rank=5), "selector_rank"),
    ("z-lab", zlab(output_multiplier=2.0), "output_multiplier"),
    ("IBM", fields(n_predict=2), "which no MLP speculator"),
    ("IBM", fields(n_predict=65), "from 1 to 64"),
    ("IBM", fields(n_predict=True), "n_predict in config.json is True"),
    ("IBM", fields(architectures=["GPT"]), "its architecture is"),
    ("IBM", fields(tie_weights="yes"), "true or false"),
    ("vLLM's Medusa", fields(num_heads=9), "has no blocks.3"),
    ("vLLM's Medusa", fields(logit_scale="1"), "logit_scale"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("base", "change", "message"), BROKEN, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_broken_checkpoint_is_refused_in_one_line(
    base: str, change: Callable[[Published], Any], message: str, tmp_path: Path
) -> None:
    kind, make = BASES[base]
    made = make()
    made = replace(made, raw=dict(made.raw), tensors=dict(made.tensors))
    change(made)
    directory = made.write(tmp_path / "head")
    with refused(LoadError, message) as error:
        KINDS[kind].load(directory, target())
    # one without a directory is about the target
    assert str(directory) in str(error.value) or "trained for it" in str(error.value)


CONFIG, WEIGHTS = "config.json", "model.safetensors"
FILES: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "no config": (CONFIG, Path.unlink, "it has no config.json"),
    "a pipe": (CONFIG, lambda path: (path.unlink(), os.mkfifo(path)), "is not a regular file"),
    "a directory": (CONFIG, lambda path: (path.unlink(), path.mkdir()), "is not a regular file"),
    "nested too deep": (CONFIG, lambda path: path.write_text("[" * 200_000), "nested too deep"),
    "no JSON": (CONFIG, lambda path: path.write_text("{"), "cannot be read"),
    "no text": (CONFIG, lambda path: path.write_bytes(b"\xff\xfe"), "cannot be read"),
    "no object": (CONFIG, lambda path: path.write_text("[]"), "does not hold a JSON object"),
    "endless": (CONFIG, lambda path: path.write_bytes(b" " * (LARGEST + 1)), "is larger than 64 MB"),
    "no weights": (WEIGHTS, Path.unlink, "neither"),
    "garbage": (WEIGHTS, lambda path: path.write_bytes(b"x" * 300), "cannot be read"),
    "cut off": (WEIGHTS, lambda path: os.truncate(path, 5000), "download it again"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FILES)
def test_a_broken_file_is_refused_in_one_line(fault: str, tmp_path: Path) -> None:
    file, damage, message = FILES[fault]
    directory = published.eagle3()[1].write(tmp_path / "head")
    damage(directory / file)
    with pytest.raises(LoadError, match=message) as error:
        load_head(directory, target())
    assert str(directory) in str(error.value) and "\n" not in str(error.value)
    if file == CONFIG:
        with pytest.raises(LoadError):
            read_config(directory, "head")
        assert kind_of(directory) == "model", "loading it as a model reports the fault"


class Malicious:
    """Makes a directory when it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.place),)


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
@pytest.mark.parametrize("content", ["code", "a list", "garbage"])
def test_pickles_may_only_hold_tensors(content: str, kind: str, tmp_path: Path) -> None:
    made = published.eagle3()[1] if kind == "eagle3" else published.medusa()
    made = replace(made, file="pytorch_model.bin" if kind == "eagle3" else made.file)
    directory = made.write(tmp_path / "head")
    evil = {"0.1.weight": Malicious(tmp_path / "evil")}
    torch.save([1] if content == "a list" else evil, directory / made.file)
    if content == "garbage":
        (directory / made.file).write_bytes(b"x" * 300)
    assert content == "a list" or not tensor_names(directory)
    with pytest.raises(LoadError, match="cannot be read") as error:
        KINDS[kind].load(directory, target())
    assert not (tmp_path / "evil").exists() and "\n" not in str(error.value)


@pytest.mark.parametrize("bias", ["attention_bias", "mlp_bias"])
def test_layers_with_biases_are_refused(bias: str) -> None:
    """Their tensors would not be read; each kind of bias alone is refused."""
    raw = {"model_type": "llama", "num_attention_heads": 2, "num_key_value_heads": 2}
    tensors = {
        "layers.0.post_attention_layernorm.weight": torch.ones(8),
        "layers.0.mlp.gate_proj.weight": torch.ones(16, 8),
    }
    assert read_layer(raw, tensors, 32).hidden == 8
    with pytest.raises(LoadError, match="its layer has biases"):
        read_layer(raw | {bias: True}, tensors, 32)


def test_paths_of_other_models_are_refused_in_one_line(tmp_path: Path) -> None:
    """They lead to a language model, to nothing, or to a drafter for another target."""
    save_block(head_of("block"), tmp_path / "block")
    for model, draft, message in (
        (tiny.family("llama"), f"eagle3:{tiny.drafter('llama')}", r"no fc\.weight"),
        (tiny.family("llama"), f"eagle3:{tmp_path / 'nowhere'}", "no directory"),
        (
            tiny.with_tokenizer(),
            f"block:{tmp_path / 'block'}",
            "use a drafter that was trained for it",
        ),
    ):
        with refused(LoadError, message):
            LLM(model, draft=draft, kv_tokens=512)
