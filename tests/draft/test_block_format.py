"""Block drafters on disk: what was written comes back, published layouts mean what they say,
anything else is one line.

A head whose slots are read one off still drafts, so what a file that does not say which slot says
what is taken for is tested here.
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
from forerun.draft.block.formats import MarkovShape
from forerun.draft.block.module import BlockHead, load_block, save_block
from forerun.draft.block.proposer import BlockProposer
from forerun.draft.proposer import DraftRequest, TargetView, view_of
from forerun.draft.registry import kind_of
from forerun.verify import Noise
from tests import tiny
from tests.draft.heads import PLAIN
from tests.draft.test_block import head_of

LAYER = dict(
    model_type="qwen3", hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, vocab_size=64, max_position_embeddings=128, rms_norm_eps=1e-6,
)  # fmt: skip
DFLASH = {
    "speculators_model_type": "dflash", "transformer_layer_config": LAYER, "block_size": 4, "mask_token_id": 0,
    "aux_hidden_state_layer_ids": [2, 0, 3],
}  # fmt: skip
MARKOV = {"markov_rank": 5, "enable_confidence_head": True, "confidence_head_with_markov": True}
DSPARK = DFLASH | MARKOV | {"speculators_model_type": "dspark"}


def target() -> TargetView:
    return view_of(tiny.decoder(tiny.family("llama")))


def tensors_of(head: BlockHead) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in head.state_dict().items()}


def write(directory: Path, raw: Any, tensors: dict[str, torch.Tensor]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw))
    save_file(tensors, directory / "model.safetensors")
    return directory


def drafts(head: BlockHead) -> list[int]:
    """What it drafts of some states that nobody ever had."""
    view = target()
    drafter = BlockProposer(head, view, tokens=64, page=4, slots=1, width=3)
    generator = torch.Generator().manual_seed(3)
    features = {b: torch.randn(6, view.hidden, generator=generator) for b in range(view.layers + 1)}
    drafter.open(0, range(7))
    drafter.observe(0, 0, {b: features[b] for b in drafter.aux_hidden_layers})
    return drafter.propose([DraftRequest(0, range(7), SamplingParams(), Noise(1, 6), 9)])[0].tokens


def same(loaded: BlockHead, head: BlockHead) -> None:
    mine, theirs = loaded.state_dict(), head.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    plain = replace(head.config.layer, raw={})
    assert replace(loaded.config, layer=plain) == replace(head.config, layer=plain)
    assert replace(loaded.config.layer, raw={}) == plain
    assert len(drafts(head)) == 1 + 3 * head.config.depth and drafts(loaded) == drafts(head)


TOP = LAYER | {"num_target_layers": 3, "layer_types": ["full_attention"] * 2}
DEEPSPEC = TOP | {
    "architectures": ["Qwen3DSparkModel"], "target_layer_ids": [1, -1, 2], "block_size": 4, "mask_token_id": 0,
    "num_anchors": 512,
}  # fmt: skip
ZLAB = TOP | {
    "architectures": ["DFlashDraftModel"], "block_size": 4, "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "dflash_config": {"target_layer_ids": [1, -1, 2], "mask_token_id": 0},
}  # fmt: skip
SPECFORGE = TOP | {
    "architectures": ["DSparkDraftModel"],
    "dflash_config": {"target_layer_ids": [1, -1, 2], "mask_token_id": 0, "block_size": 4, "projector_type": "dspark"}
    | {"markov_rank": 5, "attention_mode": "gqa"},
}  # fmt: skip
OWN = {"own_embedding": True, "own_head": True}
FILL_IN = {"sample_from_anchor": False}
SLIDING = {
    "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window": 5,
    "use_sliding_window": True,
}
SEEN: dict[str, Any] = {"layer": SLIDING}
DIALECTS: dict[
    str, tuple[dict[str, Any], dict[str, Any]]
] = {  # config.json, and what is meant by it
    "DeepSpec DSpark": (DEEPSPEC | MARKOV, OWN),
    "DeepSpec DFlash, which begins at its anchor too": (DEEPSPEC | {"markov_rank": 0}, PLAIN | OWN),
    "z-lab": (ZLAB, PLAIN | FILL_IN),
    "z-lab, all in one place": (
        ZLAB | {"block_size": None, "dflash_config": ZLAB["dflash_config"] | {"block_size": 4}},
        PLAIN | FILL_IN,
    ),
    "SpecForge": (SPECFORGE, FILL_IN | {"confidence": False, "confidence_with_markov": False}),
    "SpecForge, which says so": (
        SPECFORGE | {"dflash_config": SPECFORGE["dflash_config"] | {"sample_from_anchor": True}},
        {"confidence": False, "confidence_with_markov": False},
    ),
    "speculators, a gated Markov head": (
        DSPARK | {"markov_head_type": "gated"},
        FILL_IN | {"markov": MarkovShape(5, "gated")},
    ),
    "DeepSpec, a recurrent Markov head": (
        DEEPSPEC | MARKOV | {"markov_head_type": "rnn"},
        OWN | {"markov": MarkovShape(5, "rnn")},
    ),
    "z-lab, with a window": (ZLAB | SLIDING, PLAIN | FILL_IN | SEEN),
    "SpecForge, with a window": (
        SPECFORGE | SLIDING,
        FILL_IN
        | SEEN
        | {"confidence": False, "confidence_with_markov": False, "window_causal": True},
    ),
    "SpecForge, with a window that says what it sees": (
        SPECFORGE | SLIDING | {"sliding_window_non_causal": True},
        FILL_IN | SEEN | {"confidence": False, "confidence_with_markov": False},
    ),
    "speculators, with a window": (
        DFLASH | {"transformer_layer_config": LAYER | SLIDING},
        PLAIN | FILL_IN | SEEN | {"window_causal": True},
    ),
    "speculators, with a window that says what it sees": (
        DFLASH | {"transformer_layer_config": LAYER | SLIDING, "sliding_window_non_causal": True},
        PLAIN | FILL_IN | SEEN,
    ),
    "speculators, with the window that Qwen3 has by itself": (
        DFLASH
        | {
            "transformer_layer_config": LAYER
            | {n: v for n, v in SLIDING.items() if n != "sliding_window"}
        },
        PLAIN | FILL_IN | {"layer": SLIDING | {"sliding_window": 4096}, "window_causal": True},
    ),
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_other_dialects_mean_what_they_mean(dialect: str, tmp_path: Path) -> None:
    """Numbers of states, places of fields and above all which slot says which token. It is told by
    its file alone."""
    raw, meant = DIALECTS[dialect]
    head = head_of(**meant)
    path = write(tmp_path / "drafter", raw, tensors_of(head))
    assert kind_of(path) == "block"
    same(load_block(path, target()), head)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_target_layers": 4}, "target of 4 layers, this one has 3"),
        ({"architectures": ["DFlashLagunaForCausalLM"]}, "Laguna"),
        ({"attention_value_scale": 0.5}, "attention_value_scale"),
        ({"dflash_config": ZLAB["dflash_config"] | {"causal": "yes"}}, "causal"),
        ({"dflash_config": ZLAB["dflash_config"] | {"projector_type": "other"}}, "other"),
        ({"dflash_config": ZLAB["dflash_config"] | {"selector_rank": 5}}, "selector_rank"),
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel"),
        (
            {"dflash_config": ZLAB["dflash_config"] | {"projector_type": "domino"}},
            "which forerun does not read",
        ),
        ({"dflash_config": ZLAB["dflash_config"] | {"causal": True}}, "its blocks are causal"),
        (
            {"dflash_config": ZLAB["dflash_config"] | {"output_multiplier": 2.0}},
            "output_multiplier",
        ),
        (
            {"dflash_config": ZLAB["dflash_config"] | {"target_layer_ids": [1, "2"]}},
            "target_layer_ids",
        ),
        (
            {"dflash_config": ZLAB["dflash_config"] | {"target_layer_ids": [1, -1, 3]}},
            "from 0 to 3",
        ),
        ({"dflash_config": []}, "aux_hidden_state_layer_ids"),
        ({"dflash_config": "x"}, "not an object"),
        ({"architectures": ["Gemma4DSparkModel"]}, "Gemma 4"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "another attention"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window"),
        (
            {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 0},
            "sliding_window",
        ),
        (SLIDING | {"layer_types": ["sliding_attention"]}, "1 entries"),
        (SLIDING | {"use_sliding_window": False}, "one of them is wrong"),
        (
            SLIDING | {"architectures": ["Qwen3DSparkModel"], "dflash_config": None},
            "sliding_window_non_causal",
        ),
    ],
)
def test_what_is_not_supported_of_other_dialects(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "drafter", ZLAB | changes, tensors_of(head_of(**PLAIN, **FILL_IN)))
    assert kind_of(path) == "block"
    with pytest.raises(LoadError, match=says) as error:
        load_block(path, target())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        PLAIN,
        {"sample_from_anchor": False, "confidence_with_markov": False},
        {"markov": MarkovShape(6, "gated")},
        {"markov": MarkovShape(3, "rnn"), "draft_vocab": 40, "own_head": True},
        SEEN,
        SEEN | {"window_causal": True},
        {"draft_vocab": 40, "own_head": True, "block": 7, "mask_token": 63},
        {
            "own_embedding": True,
            "own_head": True,
            "layer": {"hidden_size": 24, "head_dim": 8, "rope_theta": 500.0},
        },
        {
            "aux_hidden_layers": (3,),
            "layer": {"model_type": "llama", "num_hidden_layers": 1, "hidden_act": "gelu"},
        },
    ],
)
def test_a_drafter_comes_back_as_it_was_saved(changes: dict[str, Any], tmp_path: Path) -> None:
    head = head_of(**changes)
    save_block(head, tmp_path / "drafter", "some/target")
    same(load_block(tmp_path / "drafter", target()), head)
    assert sorted(os.listdir(tmp_path / "drafter")) == ["config.json", "model.safetensors"]
    assert kind_of(tmp_path / "drafter") == "block"


def test_what_is_the_target_s_is_not_stored(tmp_path: Path) -> None:
    """Neither its embedding nor its head; and what other engines ask of config.json is there."""
    save_block(head_of(), tmp_path / "drafter", "some/target", torch.bfloat16)
    head = load_block(tmp_path / "drafter", target())
    assert not {
        name
        for name in head.state_dict()
        if name.startswith(("embed_tokens", "lm_head", "d2t", "t2d"))
    }
    raw = json.loads((tmp_path / "drafter" / "config.json").read_text())
    assert raw["speculators_model_type"] == "dspark" and raw["architectures"] == [
        "DSparkSpeculator"
    ]
    assert raw["speculators_config"]["verifier"]["name_or_path"] == "some/target"
    assert raw["sample_from_anchor"] is True and raw["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("raw", "from_anchor"),
    [
        (DSPARK, False),
        (DSPARK | {"sample_from_anchor": True}, True),
        (DSPARK | {"query_zero_predicts_next": True}, True),
        (DSPARK | {"query_zero_predicts_next": True, "sample_from_anchor": False}, False),
        (DFLASH, False),
        (DFLASH | {"sample_from_anchor": True}, True),
    ],
)
def test_which_slot_says_what(raw: dict[str, Any], from_anchor: bool, tmp_path: Path) -> None:
    """Files from before there was a flag are all of the older layout."""
    head = head_of(sample_from_anchor=from_anchor, **({} if "markov_rank" in raw else PLAIN))
    same(load_block(write(tmp_path / "drafter", raw, tensors_of(head)), target()), head)


def test_what_a_config_leaves_out(tmp_path: Path) -> None:
    """Sizes are in the tensors."""
    layer = {name: LAYER[name] for name in ("num_hidden_layers", "num_attention_heads", "head_dim")}
    layer |= {"max_position_embeddings": 128}
    raw = {name: value for name, value in DSPARK.items() if name not in MARKOV}
    head = head_of(sample_from_anchor=False)
    place = write(tmp_path / "drafter", raw | {"transformer_layer_config": layer}, tensors_of(head))
    same(load_block(place, target()), head)


def test_older_files_hold_the_target_s_embedding_and_head(tmp_path: Path) -> None:
    """They are borrowed: the drafts are those of the file without them. A row of another makes it
    the drafter's own."""
    head, weights = head_of(sample_from_anchor=False), tiny.decoder(tiny.family("llama")).weights
    copies = {
        "embed_tokens.weight": weights.embed.float(),
        "lm_head.weight": weights.head.weight.float(),
    }
    place = write(tmp_path / "drafter", DSPARK, tensors_of(head) | copies)
    loaded = load_block(place, target())
    assert not loaded.config.own_embedding and not loaded.config.own_head
    assert drafts(loaded) == drafts(head)
    for name, told in (("embed_tokens", "own_embedding"), ("lm_head", "own_head")):
        other = {key: tensor.clone() for key, tensor in copies.items()}
        other[f"{name}.weight"][7] *= 1.02
        loaded = load_block(write(tmp_path / "drafter", DSPARK, tensors_of(head) | other), target())
        assert {"own_embedding": loaded.config.own_embedding, "own_head": loaded.config.own_head} == {
            "own_embedding": False, "own_head": False,
        } | {told: True}  # fmt: skip


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "another kind": ({"speculators_model_type": "eagle3"}, "dspark"),
    "a kind that is not read": ({"speculators_model_type": "xpress"}, "dspark"),
    "causal blocks": ({"causal": True}, "its blocks are causal"),
    "no layers": ({"transformer_layer_config": None}, "describes no layers"),
    "no number of layers": ({"transformer_layer_config": {}}, "num_hidden_layers"),
    "layers that are not there": (
        {"transformer_layer_config": LAYER | {"num_hidden_layers": 3}},
        "no layers.2",
    ),
    "too many layers": (
        {"transformer_layer_config": LAYER | {"num_hidden_layers": 1}},
        "has layers.1",
    ),
    "windows": (
        {
            "transformer_layer_config": LAYER
            | {"layer_types": ["full_attention", "sliding_attention"]}
        },
        "sliding_window in config.json is None",
    ),
    "another family": ({"transformer_layer_config": LAYER | {"model_type": "gemma2"}}, "gemma2"),
    "another width": ({"transformer_layer_config": LAYER | {"hidden_size": 64}}, "states of 64"),
    "other heads": (
        {"transformer_layer_config": LAYER | {"num_attention_heads": 2}},
        "config.json asks for",
    ),
    "no hidden states": ({"aux_hidden_state_layer_ids": None}, "aux_hidden_state_layer_ids"),
    "hidden states by name": (
        {"aux_hidden_state_layer_ids": ["last"]},
        "aux_hidden_state_layer_ids",
    ),
    "fewer hidden states": ({"aux_hidden_state_layer_ids": [1, 2]}, "fc.weight reads 96"),
    "hidden states out of range": ({"aux_hidden_state_layer_ids": [1, 2, 9]}, "from 0 to 3"),
    "no block": ({"block_size": None}, "block_size"),
    "an endless block": ({"block_size": 1 << 40}, "block_size"),
    "a block of the anchor": ({"block_size": 1}, "no slot"),
    "no mask token": ({"mask_token_id": "<mask>"}, "mask_token_id"),
    "a mask token out of range": ({"mask_token_id": 64}, "from 0 to 63"),
    "a flag that is none": ({"sample_from_anchor": "yes"}, "true or false"),
    "a rank that is none": ({"markov_rank": -1}, "markov_rank"),
    "another rank": ({"markov_rank": 6}, "config.json asks for 6"),
    "no Markov head": ({"markov_rank": 0}, "config.json asks for 0"),
    "another Markov head": ({"markov_head_type": "gated"}, "gate_proj"),
    "no Markov head that is known": ({"markov_head_type": "lstm"}, "only vanilla, gated, rnn"),
    "no confidence head": ({"enable_confidence_head": False}, "confidence_head"),
    "fewer tokens": ({"draft_vocab_size": 40}, "no lm_head.weight"),
    "too many tokens": ({"draft_vocab_size": 65}, "from 1 to 64"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_config_that_cannot_be(name: str, tmp_path: Path) -> None:
    changes, says = BROKEN[name]
    refused(write(tmp_path / "drafter", DSPARK | changes, tensors_of(head_of())), says)


def refused(directory: Path, says: str) -> None:
    with pytest.raises(LoadError) as error:
        load_block(directory, target())
    text = str(error.value)
    assert says in text and str(directory) in text and "\n" not in text


@pytest.mark.parametrize(
    "change", ["missing", "extra", "shape", "not finite", "cut off", "no file", "no config"]
)
def test_tensors_that_cannot_be(change: str, tmp_path: Path) -> None:
    tensors, name = tensors_of(head_of()), "layers.1.self_attn.k_norm.weight"
    if change == "missing":
        del tensors[name]
    if change == "extra":
        tensors["layers.1.self_attn.k_proj.bias"] = torch.zeros(32)
    if change == "shape":
        tensors[name] = torch.zeros(8)
    if change == "not finite":
        tensors[name][3] = torch.nan
    directory = write(tmp_path / "drafter", DSPARK, tensors)
    weights = directory / "model.safetensors"
    if change == "cut off":
        weights.write_bytes(weights.read_bytes()[:-50])
    if change == "no file":
        weights.unlink()
    if change == "no config":
        (directory / "config.json").unlink()
    says = {
        "extra": "k_proj.bias",
        "cut off": "download it again",
        "no file": "neither",
        "no config": "no config.json",
    }
    refused(directory, says.get(change, name))


@pytest.mark.parametrize("ids", ["missing", "floats", "negative", "descending", "out of range"])
def test_a_vocabulary_that_cannot_be(ids: str, tmp_path: Path) -> None:
    head = head_of(draft_vocab=40, own_head=True)
    tensors = tensors_of(head)
    offsets = tensors.pop("d2t")
    if ids == "floats":
        tensors["d2t"] = offsets.float()
    if ids == "negative":
        tensors["d2t"] = offsets - offsets[0] - 1
    if ids == "descending":
        tensors["d2t"] = offsets.flip(0)
    if ids == "out of range":
        tensors["d2t"] = offsets + 64
    refused(write(tmp_path / "drafter", DSPARK | {"draft_vocab_size": 40}, tensors), "d2t")


def test_a_drafter_for_another_target(tmp_path: Path) -> None:
    """Said on the way in, whoever asks."""
    save_block(head_of(), tmp_path / "drafter")
    with pytest.raises(LoadError, match="use a drafter that was trained for it") as error:
        LLM(tiny.worded(), draft=f"block:{tmp_path / 'drafter'}", kv_tokens=512)
    assert "\n" not in str(error.value)
