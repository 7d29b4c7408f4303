"""The checks before a download agree with loading: they accept and refuse the same heads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun.catalog.facts import facts_at
from forerun.catalog.fit import checks, fits, sizes_of
from forerun.draft.block.formats import MarkovShape
from forerun.draft.block.module import load_block, save_block
from forerun.draft.eagle.module import load_eagle1_head, load_head, save_head
from forerun.draft.eagle.mtp import load_module, save_module
from forerun.draft.medusa import load_heads, load_mlp, save_heads
from forerun.draft.proposer import TargetView, view_of
from forerun.errors import LoadError
from tests import tiny
from tests.draft import published
from tests.draft.heads import PLAIN, WINDOWS

Save, Load = Callable[[Path], None], Callable[[Path, TargetView], object]


def eagle(path: Path, **changes: Any) -> None:
    settings = {"draft_vocab": 40, "layer": {"rms_norm_eps": 1e-5}} | changes
    save_head(tiny.eagle(tiny.eagle_config("llama", **settings)), path, "some/target")


def block(path: Path, **changes: Any) -> None:
    save_block(tiny.block(tiny.block_config("llama", **changes)), path, "some/target")


def zlab(path: Path) -> None:
    published.block(published.ZLAB, **PLAIN, sample_from_anchor=False)[1].write(path)


def mtp(path: Path) -> None:
    save_module(tiny.mtp("llama"), path, "some/target", torch.float32)


def medusa(path: Path) -> None:
    path.mkdir()
    save_heads(tiny.medusa("llama"), path, torch.float32)


KINDS: dict[str, tuple[Save, Load]] = {
    "eagle3": (eagle, load_head),
    "eagle3 with its own embedding": (
        lambda path: eagle(
            path,
            own_embedding=True,
            layer={"model_type": "qwen3", "hidden_size": 24, "head_dim": 8},
        ),
        load_head,
    ),
    "eagle3 joined": (lambda path: eagle(path, join=True, fc_norm=True, draft_vocab=64), load_head),
    "eagle with a head of its own": (
        lambda path: published.eagle1_of_vllm(own_head=True)[1].write(path),
        load_eagle1_head,
    ),
    "block": (block, load_block),
    "block with its own embedding": (lambda path: block(path, own_embedding=True), load_block),
    "block with a gated head": (
        lambda path: block(path, markov=MarkovShape(5, "gated")),
        load_block,
    ),
    "block of z-lab": (zlab, load_block),
    "block with a window": (lambda path: block(path, layer=WINDOWS), load_block),
    "mtp": (mtp, lambda path, target: load_module(path, target).attach(target)),
    "mlp": (
        lambda path: published.ibm().write(path),
        lambda path, target: load_mlp(path).attach(target),
    ),
    "medusa of the original authors": (
        lambda path: published.medusa().write(path),
        lambda path, target: load_heads(path).attach(target),
    ),
    "medusa": (medusa, lambda path, target: load_heads(path).attach(target)),
}
CHANGES: list[dict[str, Any]] = [
    {},
    {"draft_vocab_size": 39},
    {"eagle_aux_hidden_state_layer_ids": [0, 1], "aux_hidden_state_layer_ids": [0, 1, 2, 3, 4]},
    {"eagle_aux_hidden_state_layer_ids": [0, 1, 99], "aux_hidden_state_layer_ids": [0, 99]},
    {"eagle_aux_hidden_state_layer_ids": [1, 1, 2], "aux_hidden_state_layer_ids": [1, 1]},
    {"num_nextn_predict_layers": 2},
    {"block_size": 0},
    {"block_size": True},
    {"num_heads": 5},
    {"hidden_size": 99},
    {"n_predict": 65, "num_heads": 65},
    {"n_predict": 0, "num_heads": 4},
    {"emb_dim": 99},
    {"input_hidden_dim": 99},
    {"method": "gru", "architectures": ["Other"]},
    {"tie_weights": "no"},
    {"markov_head_type": "lstm"},
    {"markov_rank": "5"},
    {"markov_rank": 6},
    {"method": "sum_lstm"},
    {"dflash_config": {"sample_from_anchor": "no"}},
    {"dflash_config": {"projector_type": "domino"}},
    {"dflash_config": {"causal": True}},
    {"model": {"truncated_vocab_size": 40}},
    {"model": {"vocab_size": 65}},
    {"model": {"num_hidden_layers": 2}},
    {"block_size": 5},
    {"dflash_config": {"selector_rank": 4}},
    {"dflash_config": {"output_multiplier": 2.0}},
    {"dflash_config": {"mask_token_id": 99}},
    {"mask_token_id": 999},
    {"hidden_size": 99, "vocab_size": 999},
    {"transformer_layer_config": {"vocab_size": 999}},
    {"transformer_layer_config": {"num_hidden_layers": 3}},
    {"transformer_layer_config": {"model_type": "gemma2"}},
    {"transformer_layer_config": {"attention_bias": True}},
    {"transformer_layer_config": {"layer_types": ["chunked_attention"]}},
    {"transformer_layer_config": {"layer_types": ["sliding_attention"] * 2}},
    {"transformer_layer_config": {"sliding_window": "5"}},
    {"transformer_layer_config": {"use_sliding_window": False}},
]


@pytest.mark.parametrize("kind", KINDS)
def test_the_checks_accept_exactly_the_heads_that_load(kind: str, tmp_path: Path) -> None:
    save, load = KINDS[kind]
    save(tmp_path / "head")
    path, target = tmp_path / "head/config.json", tiny.family("llama")
    saved = path.read_text()
    sizes = sizes_of(facts_at(target, "target"))
    view = view_of(tiny.decoder(target))
    seen = set()
    for change in CHANGES:
        raw = json.loads(saved)
        for name, value in change.items():
            if name in raw:
                raw[name] = raw[name] | value if isinstance(value, dict) else value
        if (content := json.dumps(raw)) in seen:  # the kind has none of these fields
            continue
        seen.add(content)
        path.write_text(content)
        found = checks(facts_at(tmp_path / "head", "head"), sizes)
        try:
            load(tmp_path / "head", view)
            loads = True
        except LoadError:
            loads = False
        assert fits(found) == loads, (change, [check.text for check in found])
