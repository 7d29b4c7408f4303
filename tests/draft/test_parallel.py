"""P-EAGLE: every layout is read, and no mask stays behind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun import SamplingParams
from forerun.draft.eagle.module import Eagle3Head, load_head
from forerun.draft.eagle.proposer import ParallelEagleProposer
from forerun.draft.proposer import DraftRequest, TargetView
from forerun.draft.registry import kind_of
from forerun.kernels import native
from forerun.verify import Noise
from tests import tiny
from tests.draft.heads import FIELDS, ROOM, save_tensors
from tests.draft.twins import target


def drafted(
    head: Eagle3Head, view: TargetView, tokens: tuple[int, ...], depths: tuple[int, ...]
) -> list[list[int]]:
    """Drafts one after the other, of a text that gets a token longer each time."""
    drafter, result = ParallelEagleProposer("eagle3", head, view, **ROOM), []
    drafter.open(0, tokens)
    generator = torch.Generator().manual_seed(3)
    states = {
        b: torch.randn(len(tokens), view.hidden, generator=generator)
        for b in drafter.aux_hidden_layers
    }
    shown = 0
    for more, depth in enumerate(depths):
        text = tokens[: len(tokens) - len(depths) + 1 + more]
        drafter.observe(0, shown, {b: s[shown : len(text) - 1] for b, s in states.items()})
        shown = len(text) - 1
        row = DraftRequest(0, text, SamplingParams(temperature=0.8), Noise(1, shown), depth)
        first, again = (drafter.propose([row])[0].tokens for _ in range(2))
        assert first == again, "proposing changes nothing"
        result.append(first)
    return result


def test_a_deeper_draft_begins_like_a_shallower_one() -> None:
    """And what the masks left does not show in the next round."""
    head, tokens = tiny.parallel("llama"), (5, 6, 7, 8, 9, 10, 11, 12)
    shallow, deep = (drafted(head, target(), tokens, depths) for depths in ((1, 1, 2), (7, 5, 6)))
    assert [len(d) for d in deep] == [8, 6, 7]
    assert [d[: len(s)] for d, s in zip(deep, shallow, strict=True)] == shallow


@pytest.mark.parametrize("form", ["float32", "int8"])
def test_on_the_native_kernels(form: str) -> None:
    """The same drafts in float32; in int8 they may differ, and the text cannot."""
    if native.library() is None:
        pytest.skip("the native kernels were not compiled")
    native.start(2)
    head, tokens = tiny.parallel("llama", draft_vocab=40), (5, 6, 7, 8, 9, 10, 11, 12)
    plain, fast = (
        drafted(head, view, tokens, (4, 1, 3)) for view in (target(), replace(target(), form=form))
    )
    assert plain == fast if form == "float32" else [len(d) for d in plain] == [len(d) for d in fast]


# ---------------------------------------------------------------- on disk


IDS = {"eagle_aux_hidden_state_layer_ids": [2, 0, 3]}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "speculators": (
        {"speculators_model_type": "peagle", "architectures": ["PEagleSpeculator"], "mask_token_id": 3,
         "transformer_layer_config": FIELDS | {"num_hidden_layers": 2}, "draft_vocab_size": 40, **IDS}, {}, "",
    ),
    "speculators, with norms": (
        {"speculators_model_type": "peagle", "mask_token_id": 3, "norm_before_residual": True, "fc_norm": True,
         "transformer_layer_config": FIELDS | {"num_hidden_layers": 2}, **IDS},
        {"norm_before_residual": True, "fc_norm": True}, "",
    ),
    "vLLM": (
        FIELDS | {"architectures": ["PeagleLlamaForCausalLM"], "num_hidden_layers": 2, "pard_token": 3,
                  "parallel_drafting": True, "eagle_config": IDS}, {}, "midlayer.",
    ),
    "SpecForge": (
        FIELDS | {"architectures": ["PEagleDraftModel"], "num_hidden_layers": 2, "mask_token_id": 3, **IDS}, {}, "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_published_head_is_read_as_it_is(layout: str, tmp_path: Path) -> None:
    raw, changes, rename = LAYOUTS[layout]
    head = tiny.parallel("llama", draft_vocab=40, **changes)
    directory = save_tensors(head, tmp_path / "head", raw, rename)
    loaded = load_head(directory, target())
    assert kind_of(directory) == "eagle3"
    assert {n: t.tolist() for n, t in loaded.state_dict().items()} == {
        n: t.tolist() for n, t in head.state_dict().items()
    }
    unlike = {"layer"}
    for name in type(head.config).__dataclass_fields__.keys() - unlike:
        assert getattr(loaded.config, name) == getattr(head.config, name), name
    assert loaded.layer.layers == 2
