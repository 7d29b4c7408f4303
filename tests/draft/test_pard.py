"""PARD: the logits at each mask are those of transformers, and no mask stays in the cache."""

from __future__ import annotations

import functools
import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from forerun import LLM, LoadError
from forerun.draft import draft_model
from forerun.draft.draft_model import Pard
from forerun.draft.kinds import kind_of
from forerun.draft.tree import Tree
from forerun.runtime.torch_runner import Runner
from forerun.types import Proposal
from tests import tiny
from tests.draft.helpers import WARM, drafts_of, make_request, pure_params, refused

MASK = 3
ROOM = {"tokens": 1024, "page": 4, "slots": 4}


@functools.cache
def model_of(family: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny.drafter(family), dtype=torch.float64).eval()


@torch.no_grad()
def levels(family: str, tokens: Sequence[int], depth: int) -> Tensor:
    """Return logits after the text and after each mask, computed from scratch. [depth, V]"""
    logits: Tensor = model_of(family)(torch.tensor([[*tokens, *[MASK] * (depth - 1)]])).logits
    return logits[0, -depth:]


def proposer(family: str = "llama", width: int = 1) -> Pard:
    return Pard(Runner(tiny.decoder(tiny.drafter(family)), **ROOM), MASK, tiny.VOCAB, width)


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
@pytest.mark.parametrize("width", [1, 3])
def test_every_level_has_the_logits_of_transformers(
    family: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests differ in depth and in the committed tokens; some lag by more than a pass."""
    seen: list[tuple[list[int], Tensor]] = []
    grow_all = draft_model.grow_all

    def recording(trees: list[Tree], logits: Sequence[Tensor], *rest: Any) -> None:
        for tree, own in zip(trees, logits, strict=True):
            seen.append((list(tree.request.tokens), own.clone()))
        grow_all(trees, logits, *rest)

    monkeypatch.setattr(draft_model, "CHUNK", 6)
    monkeypatch.setattr(draft_model, "grow_all", recording)
    drafter, generator = proposer(family, width), random.Random(3)
    texts = [generator.choices(range(tiny.VOCAB), k=n) for n in (3, 9, 17)]
    for slot, text in enumerate(texts):
        drafter.open(slot, text)
    for count in (0, 1, 2, 4, 13, 1):
        requests = [make_request(text, WARM, 1 + 2 * slot, slot) for slot, text in enumerate(texts)]
        for text, draft in zip(texts, drafter.propose(requests), strict=True):
            text += [*draft.tokens[1:2], *generator.choices(range(tiny.VOCAB), k=count)][:count]
    assert [len(logits) for _, logits in seen] == [1, 3, 5] * 6
    for text, logits in seen:
        # transformers rotates in float32
        assert torch.allclose(logits, levels(family, text, len(logits)), rtol=1e-4, atol=1e-4)


def test_q_is_the_distribution_of_the_level() -> None:
    drafter, text = proposer(), random.Random(2).choices(range(tiny.VOCAB), k=9)
    (draft,) = drafts_of(drafter, [make_request(text, WARM, coupled=False, branching=False)])
    assert len(draft) == 5
    assert set(draft.proposals[1:]) == {Proposal.SAMPLED}
    assert draft.probs is not None
    expected = (levels("llama", text, 4) / 0.8).softmax(-1)
    assert torch.allclose(torch.from_numpy(draft.probs[:4]), expected, atol=1e-4)


def publish(directory: Path, **fields: Any) -> Path:
    """Write a model whose config.json has further fields."""
    shutil.copytree(tiny.drafter("llama"), directory)
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(raw | fields))
    return directory


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("width", [1, 2])
def test_a_pard_model_changes_no_text(kernels: str, width: int, tmp_path: Path) -> None:
    directory = publish(tmp_path / "draft", spd_type="pard", pard_token=MASK)
    assert kind_of(directory) == "model"
    llm = LLM(
        tiny.family("llama"),
        draft=f"model:{directory}",
        kv_tokens=512,
        kernels=kernels,
        width=width,
    )
    assert isinstance(llm.engine.proposers["model"], Pard)
    for temperature in (0.0, 0.8):
        params = pure_params(30, temperature)
        output = llm.generate([5, 6, 7, 8], params, depth=3)[0]
        assert output.token_ids == llm.generate([5, 6, 7, 8], params, draft="off")[0].token_ids
        assert output.stats.by_source["model"].drafted > 20


BROKEN = {
    "no mask": ({"spd_type": "pard"}, "pard_token in config.json is None"),
    "a mask beyond": ({"pard_token": tiny.VOCAB}, "not one of its 64 tokens"),
    "a mask below": ({"spd_type": "pard", "pard_token": -1}, "not one of its 64 tokens"),
    "a mask that is no token": ({"pard_token": True}, "pard_token in config.json is True"),
    "another kind": ({"spd_type": "pard2", "pard_token": MASK}, "'pard2'"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_configurations_are_refused_in_one_line(case: str, tmp_path: Path) -> None:
    fields, message = BROKEN[case]
    directory = publish(tmp_path / "draft", **fields)
    with refused(LoadError, message) as error:
        LLM(tiny.family("llama"), draft=f"model:{directory}", kv_tokens=512)
    assert str(error.value).startswith(str(directory))
