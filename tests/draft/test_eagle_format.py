"""EAGLE-3 heads on disk: every published layout gives back the head it was written from, anything
else one clear line.

The numbers of hidden states mean different things in different layouts, and a head that reads the
wrong ones still
drafts: so what each layout's numbers become is said here one by one.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from forerun import LLM, LoadError, SamplingParams
from forerun.draft import head_files as stored
from forerun.draft.eagle.module import Eagle3Head, load_head, save_head
from forerun.draft.eagle.proposer import EagleProposer
from forerun.draft.proposer import DraftRequest, TargetView, view_of
from forerun.verify import Noise
from tests import tiny

LAYER = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=64, max_position_embeddings=128, rms_norm_eps=1e-5,
)  # fmt: skip
PLAIN = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "draft_vocab_size": 40,
    **LAYER,
}


def target() -> TargetView:
    return view_of(tiny.decoder(tiny.family("llama")))


def head_of(**changes: Any) -> Eagle3Head:
    settings = {"draft_vocab": 40, "layer": {"rms_norm_eps": 1e-5}} | changes
    return tiny.eagle(tiny.eagle_config("llama", **settings))


def tensors_of(head: Eagle3Head, plain: bool = False) -> dict[str, torch.Tensor]:
    """As they are stored; `plain` calls the layer midlayer."""
    named = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    return {
        name.replace("layers.0.", "midlayer.") if plain else name: t for name, t in named.items()
    }


def write(
    directory: Path, raw: dict, tensors: dict[str, torch.Tensor], name: str = "model.safetensors"
) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw))
    save_file(tensors, directory / name) if name.endswith("safetensors") else torch.save(
        tensors, directory / name
    )
    return directory


def drafts(head: Eagle3Head) -> list[int]:
    """What it drafts of some states that nobody ever had."""
    view = target()
    drafter = EagleProposer("eagle3", head, view, tokens=64, page=4, slots=1, width=3)
    generator = torch.Generator().manual_seed(3)
    features = {b: torch.randn(6, view.hidden, generator=generator) for b in range(view.layers + 1)}
    drafter.open(0, range(7))
    drafter.observe(0, 0, {b: features[b] for b in drafter.aux_hidden_layers})
    return drafter.propose([DraftRequest(0, range(7), SamplingParams(), Noise(1, 6), 5)])[0].tokens


def same(loaded: Eagle3Head, head: Eagle3Head) -> None:
    mine, theirs = loaded.state_dict(), head.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    unlike = {"layer"}
    for name in type(head.config).__dataclass_fields__.keys() - unlike:
        assert getattr(loaded.config, name) == getattr(head.config, name), name
    assert replace(loaded.config.layer, raw={}) == replace(head.config.layer, raw={})
    assert len(drafts(head)) == 16 and drafts(loaded) == drafts(head)


# ---------------------------------------------------------------- speculators


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"draft_vocab": 64, "norm_before_residual": True},
        {"norm_before_fc": True, "norm_output": True, "own_embedding": True},
        {"join": True, "norm_output": True, "draft_vocab": 64},
        {"fc_norm": True, "layer": {"hidden_act": "gelu", "rope_theta": 500.0}},
        {"own_embedding": True, "layer": {"model_type": "qwen3", "hidden_size": 24, "head_dim": 8}},
        {"layer": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}},
        {
            "layer": {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            }
        },
    ],
)
def test_a_head_comes_back_as_it_was_saved(changes: dict, tmp_path) -> None:
    head = head_of(**changes)
    save_head(head, tmp_path / "head", "some/target")
    same(load_head(tmp_path / "head", target()), head)
    assert sorted(os.listdir(tmp_path / "head")) == ["config.json", "model.safetensors"]


def test_in_int8_a_head_takes_a_quarter_and_is_what_int8_kernels_make_of_it(tmp_path) -> None:
    """Matrices within half a step of a row's largest number; saved again they are the same to the
    bit."""
    head = head_of(join=True, fc_norm=True, norm_output=True, draft_vocab=64)
    for place, module in (("float", head), ("int8", head)):
        save_head(
            module,
            tmp_path / place,
            "some/target",
            torch.int8 if place == "int8" else torch.float32,
        )
    loaded = load_head(tmp_path / "int8", target())
    for name, value in loaded.state_dict().items():
        held = head.state_dict()[name]
        step = held.abs().amax(-1, keepdim=True) / 127 if held.ndim == 2 else held.abs().max() / 100
        assert (
            torch.all((value - held).abs() <= 0.51 * step)
            if held.is_floating_point()
            else torch.equal(value, held)
        )
    sizes = [(tmp_path / place / "model.safetensors").stat().st_size for place in ("float", "int8")]
    assert sizes[1] < 0.4 * sizes[0]
    save_head(loaded, tmp_path / "again", "some/target", torch.int8)
    same(load_head(tmp_path / "again", target()), loaded)
    said = json.loads((tmp_path / "int8" / "config.json").read_text())["quantization_config"]
    assert (said["format"], said["config_groups"]["group_0"]["weights"]["num_bits"]) == (
        "int-quantized",
        8,
    )


def test_a_sliding_window_comes_back(tmp_path) -> None:
    head = head_of()
    windowed = Eagle3Head(
        replace(head.config, layer=replace(head.config.layer, windows=(4,)))
    ).requires_grad_(False)
    windowed.load_state_dict(head.state_dict())
    save_head(windowed, tmp_path / "head")
    same(load_head(tmp_path / "head", target()), windowed)


def test_what_a_speculators_config_leaves_out(tmp_path) -> None:
    """Sizes are in the tensors, the rest is what transformers and vLLM take for it."""
    layer = {
        "model_type": "llama",
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
    }
    head = head_of(aux_hidden_layers=(2, 1, 0), norm_before_residual=True)
    raw = {"speculators_model_type": "eagle3", "transformer_layer_config": layer}
    same(load_head(write(tmp_path / "head", raw, tensors_of(head)), target()), head)


def test_a_save_that_fails_leaves_what_was_there(tmp_path, monkeypatch) -> None:
    head, place = head_of(), tmp_path / "head"
    save_head(head, place)

    def full(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stored, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        save_head(head_of(norm_output=True), place)
    assert sorted(os.listdir(place)) == ["config.json", "model.safetensors"]
    same(load_head(place, target()), head)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        save_head(head, tmp_path / "file" / "head")


# ---------------------------------------------------------------- the other layouts


@pytest.mark.parametrize(
    ("raw", "aux_hidden_layers"),
    [
        ({}, (2, 1, 0)),  # SafeAILab: 2, N // 2 and N - 3 of N = 3
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 0, 2]}},
            (2, 1, 3),
        ),  # SpecForge: outputs of layers
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 0, 3]}},
            (2, 0, 3),
        ),  # NVIDIA: boundaries
        ({"eagle_aux_hidden_state_layer_ids": [1, 0, 3]}, (1, 0, 3)),  # at the top: boundaries
        (
            {"architectures": ["Qwen3Eagle3Model"], "target_layer_ids": [1, -1, 2]},
            (2, 0, 3),
        ),  # DeepSpec
    ],
)
def test_which_hidden_states_each_layout_means(
    raw: dict, aux_hidden_layers: tuple[int, ...], tmp_path
) -> None:
    head = head_of(aux_hidden_layers=aux_hidden_layers)
    same(
        load_head(write(tmp_path / "head", PLAIN | raw, tensors_of(head, plain=True)), target()),
        head,
    )


def test_a_speculators_head_means_boundaries_as_they_are(tmp_path) -> None:
    head = head_of(aux_hidden_layers=(1, 0, 3))
    save_head(head, tmp_path / "head")
    assert load_head(tmp_path / "head", target()).config.aux_hidden_layers == (1, 0, 3)


@pytest.mark.parametrize("name", ["model.safetensors", "eagle.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_names_and_files(name: str, prefix: str, tmp_path) -> None:
    head = head_of(aux_hidden_layers=(2, 1, 0))
    tensors = {f"{prefix}{n}": t for n, t in tensors_of(head, plain=True).items()}
    tensors[f"{prefix}midlayer.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    same(load_head(write(tmp_path / "head", PLAIN, tensors, name), target()), head)


def test_half_precision_is_read_as_float32(tmp_path) -> None:
    head = head_of(aux_hidden_layers=(2, 1, 0)).bfloat16().float()
    tensors = {
        n: t.bfloat16() if t.is_floating_point() else t
        for n, t in tensors_of(head, plain=True).items()
    }
    same(load_head(write(tmp_path / "head", PLAIN, tensors), target()), head)


def test_defaults_of_the_layouts_differ(tmp_path) -> None:
    """The residual stream starts unnormed unless it is said; norm_output is about another thing
    here."""
    head = head_of(aux_hidden_layers=(2, 1, 0))
    raw = PLAIN | {"norm_output": True}
    loaded = load_head(write(tmp_path / "a", raw, tensors_of(head, plain=True)), target())
    assert (loaded.config.norm_before_residual, loaded.config.norm_output) == (False, False)
    raw = PLAIN | {"eagle_config": {"norm_before_residual": True, "norm_before_fc": True}}
    normed = head_of(aux_hidden_layers=(2, 1, 0), norm_before_residual=True, norm_before_fc=True)
    same(load_head(write(tmp_path / "b", raw, tensors_of(normed, plain=True)), target()), normed)


def test_the_rotary_embedding_is_never_the_target_s(tmp_path) -> None:
    head = head_of(aux_hidden_layers=(2, 1, 0))
    loaded = load_head(write(tmp_path / "head", PLAIN, tensors_of(head, plain=True)), target())
    assert loaded.config.layer.ropes[0].parameters["rope_theta"] == 10000.0


# ---------------------------------------------------------------- which tokens it says


def test_a_map_of_ids_becomes_offsets(tmp_path) -> None:
    """Some store the ids themselves, in any order: the head is the same with its rows in another
    order."""
    head = head_of(aux_hidden_layers=(2, 1, 0))
    tensors, order = (
        tensors_of(head, plain=True),
        torch.randperm(40, generator=torch.Generator().manual_seed(1)),
    )
    tensors["d2t"], tensors["lm_head.weight"] = head.tokens()[order], head.lm_head.weight[order]
    del tensors["t2d"]
    same(load_head(write(tmp_path / "head", PLAIN, tensors), target()), head)


def test_a_map_of_the_whole_vocabulary_is_none(tmp_path) -> None:
    head = head_of(aux_hidden_layers=(2, 1, 0), draft_vocab=64)
    extra = {"d2t": torch.zeros(64, dtype=torch.int64), "t2d": torch.ones(64, dtype=torch.bool)}
    raw = PLAIN | {"draft_vocab_size": 64}
    same(
        load_head(write(tmp_path / "head", raw, tensors_of(head, plain=True) | extra), target()),
        head,
    )


def test_a_map_of_zeros_is_told(tmp_path, capsys) -> None:
    head = head_of(aux_hidden_layers=(2, 1, 0))
    head.set_token_ids(torch.arange(40))
    same(load_head(write(tmp_path / "head", PLAIN, tensors_of(head, plain=True)), target()), head)
    assert "only says the tokens below 40" in capsys.readouterr().err


# ---------------------------------------------------------------- what is refused


def drop(name: str):
    return lambda raw, tensors: tensors.pop(name)


def put(name: str, value: torch.Tensor):
    return lambda raw, tensors: tensors.update({name: value})


def say(**fields: Any):
    return lambda raw, tensors: raw.update(fields)


EYE = torch.eye(32)
BROKEN = {
    "a tensor is missing": (drop("midlayer.mlp.up_proj.weight"), "no layers.0.mlp.up_proj.weight"),
    "no fc": (drop("fc.weight"), "no fc.weight"),
    "no head": (drop("lm_head.weight"), "no lm_head.weight"),
    "an empty head": (put("lm_head.weight", torch.zeros(0, 32)), "no lm_head.weight"),
    "a scalar": (put("fc.weight", torch.tensor(1.0)), "no fc.weight"),
    "a tensor too many": (put("midlayer.mlp.bias", torch.zeros(3)), "has layers.0.mlp.bias"),
    "a second layer": (put("layers.1.mlp.up_proj.weight", EYE), "has layers.1"),
    "a wrong shape": (
        put("midlayer.self_attn.o_proj.weight", torch.zeros(32, 31)),
        "config.json asks for",
    ),
    "a wrong dtype": (put("norm.weight", torch.ones(32, dtype=torch.int32)), "torch.int32"),
    "no scales": (
        put("lm_head.weight", torch.ones(40, 32, dtype=torch.int8)),
        "no lm_head.weight_scale with a number",
    ),
    "int8 in a vector": (
        put("norm.weight", torch.ones(32, dtype=torch.int8)),
        "no norm.weight_scale",
    ),
    "scales of nothing": (
        put("lm_head.weight_scale", torch.ones(40, 1)),
        "has lm_head.weight_scale",
    ),
    "not finite": (put("norm.weight", torch.full((32,), float("nan"))), "not finite"),
    "fc of other states": (
        put("fc.weight", torch.zeros(32, 64)),
        "reads 64 numbers, but the hidden states .* have 96",
    ),
    "no map": (drop("d2t"), "no d2t"),
    "a map too short": (put("d2t", torch.zeros(3, dtype=torch.int64)), "40 whole numbers"),
    "a map of floats": (put("d2t", torch.zeros(40)), "40 whole numbers"),
    "a map out of range": (put("d2t", torch.full((40,), 99)), "different tokens of 64"),
    "a map below zero": (put("d2t", torch.full((40,), -9)), "different tokens of 64"),
    "a map with repeats": (put("d2t", torch.arange(40).flip(0) // 2), "different tokens of 64"),
    "other vocabulary size": (say(draft_vocab_size=32), "lm_head.weight has 40 rows"),
    "more than the target's": (say(vocab_size=65), "65 tokens"),
    "less than it says": (say(vocab_size=39), "more than the 39"),
    "two layers": (say(num_hidden_layers=2), "drafters of 1 layer"),
    "another family": (say(model_type="deepseek_v2"), "family 'deepseek_v2'"),
    "a family that is none": (say(model_type=[1]), "family"),
    "biases": (say(attention_bias=True), "biases"),
    "heads that do not divide": (say(num_attention_heads=3), "config.json"),
    "a size that is none": (say(hidden_size="many"), "config.json"),
    "half a size": (say(head_dim=7), "cannot rotate"),
    "a rope that is none": (say(rope_scaling="long"), "config.json"),
    "a window that is none": (
        say(layer_types=["sliding_attention"], sliding_window=0),
        "sliding window",
    ),
    "ids that are none": (
        say(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, "a"]}),
        "layer numbers",
    ),
    "no ids": (say(target_layer_ids=[]), "layer numbers"),
    "ids beyond": (say(target_layer_ids=[1, 2, 3]), "from 0 to 3"),
    "ids twice": (say(target_layer_ids=[1, 2, 1]), "different numbers"),
    "two ids": (say(target_layer_ids=[1, 2]), "reads 96 numbers"),
    "an eagle_config that is none": (say(eagle_config=[1]), "eagle_config"),
    "a flag that is none": (say(norm_before_residual="yes"), "not true or false"),
    "a norm that is missing": (say(norm_before_fc=True), "no input_norm.weight"),
    "no last norm": (say(norm_output=False), "norm_output"),
    "two kinds of layer": (say(join=True, norm_before_residual=True), "both true"),
    "parallel without a state": (say(mask_token_id=3), "no mask_hidden"),
    "parallel without a mask": (say(parallel_drafting=True), "no mask token"),
    "a mask that is none": (say(pard_token="x"), "not a token"),
    "a mask beyond": (say(pard_token=64), "one of its 64 tokens"),
    "parallel, layers that are none": (say(pard_token=3, num_hidden_layers="x"), "whole number"),
    "parallel, layers it lacks": (say(pard_token=3, num_hidden_layers=2), "no layers.1"),
    "a state without a mask": (put("mask_hidden", torch.zeros(1, 1, 96)), "mask_hidden, which no"),
    "a state of another size": (
        lambda raw, tensors: (
            raw.update(pard_token=3),
            tensors.update(mask_hidden=torch.zeros(1, 1, 95)),
        ),
        r"1, 95\]",
    ),
    "another speculator": (say(speculators_model_type="dflash"), "'dflash' speculator"),
    "no layer in it": (say(speculators_model_type="eagle3"), "transformer_layer_config"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_heads(case: str, tmp_path) -> None:
    change, says = BROKEN[case]
    raw, tensors = dict(PLAIN), tensors_of(head_of(aux_hidden_layers=(2, 1, 0)), plain=True)
    change(raw, tensors)
    with pytest.raises(LoadError, match=says) as error:
        load_head(write(tmp_path / "head", raw, tensors), target())
    assert str(error.value).startswith(str(tmp_path / "head")) and "\n" not in str(error.value)


FILES = {
    "no config": (lambda d: (d / "config.json").unlink(), "no config.json"),
    "config of garbage": (lambda d: (d / "config.json").write_bytes(b"\xff{"), "cannot be read"),
    "config of a list": (lambda d: (d / "config.json").write_text("[]"), "an object"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "neither"),
    "weights of garbage": (
        lambda d: (d / "model.safetensors").write_bytes(b"x" * 300),
        "cannot be read",
    ),
    "cut off": (lambda d: os.truncate(d / "model.safetensors", 5000), "cannot be read"),
}


@pytest.mark.parametrize("case", FILES)
def test_broken_files(case: str, tmp_path) -> None:
    change, says = FILES[case]
    change(
        write(
            tmp_path / "head", PLAIN, tensors_of(head_of(aux_hidden_layers=(2, 1, 0)), plain=True)
        )
    )
    with pytest.raises(LoadError, match=says) as error:
        load_head(tmp_path / "head", target())
    assert "\n" not in str(error.value)


class Evil:
    """Would make a file, were it unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self):
        return os.mkdir, (str(self.place),)


@pytest.mark.parametrize("held", ["code", "a list", "garbage"])
def test_a_pickle_is_only_tensors(held: str, tmp_path) -> None:
    directory = write(tmp_path / "head", PLAIN, {}, "pytorch_model.bin")
    if held == "garbage":
        (directory / "pytorch_model.bin").write_bytes(b"x" * 300)
    else:
        torch.save(
            [1] if held == "a list" else {"fc.weight": Evil(tmp_path / "evil")},
            directory / "pytorch_model.bin",
        )
    with pytest.raises(LoadError, match="cannot be read") as error:
        load_head(directory, target())
    assert not (tmp_path / "evil").exists() and "\n" not in str(error.value)


def test_a_model_is_no_head(tmp_path) -> None:
    """The most likely mistake: eagle3: with the directory of a language model, or of the target
    itself."""
    with pytest.raises(LoadError, match=r"no fc\.weight"):
        LLM(tiny.family("llama"), draft=f"eagle3:{tiny.drafter('llama')}", kv_tokens=512)
    with pytest.raises(LoadError, match="no directory"):
        LLM(tiny.family("llama"), draft=f"eagle3:{tmp_path / 'nowhere'}", kv_tokens=512)


def test_heads_are_read_whole_from_shards(tmp_path) -> None:
    head = head_of(aux_hidden_layers=(2, 1, 0))
    tensors = list(tensors_of(head, plain=True).items())
    write(tmp_path / "head", PLAIN, dict(tensors[:5]), "model-00001-of-00002.safetensors")
    write(tmp_path / "head", PLAIN, dict(tensors[5:]), "model-00002-of-00002.safetensors")
    same(load_head(tmp_path / "head", target()), head)
