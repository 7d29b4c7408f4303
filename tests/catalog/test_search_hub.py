"""The search on the Hub: candidates, reasons and order; failures of some or all queries."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forerun.catalog.search import SCORE_NAME as NAME
from forerun.catalog.search import _name_score, search_hub
from forerun.errors import LoadError
from tests.catalog.hub import FakeHub, eagle_config, eagle_shapes, target_config

TARGET = "org/Big-8B"


def add_repositories(hub: FakeHub) -> None:
    hub.add(TARGET, target_config())
    for_target = {"base_model": TARGET}
    plain_eagle = {"architectures": ["LlamaForCausalLMEagle3"]}
    domino = {"architectures": ["DFlashDraftModel"], "dflash_config": {"projector_type": "domino"}}
    verifier = "them/Big-8B-speculator.eagle3"
    hub.add(verifier, eagle_config(), eagle_shapes(), {"domains": ["Code"]}, ["speculators"])
    hub.add("us/big-8b-eagle3", plain_eagle, card=for_target)
    hub.add("z/Big-8B-DFlash-b16", domino)
    hub.add("odd/fast-draft", eagle_config(), card=for_target, tags=["eagle3", "domain:law"])
    other = eagle_config("org/Other-8B")
    hub.add("other/Big-8B-eagle3-chat", other, card=for_target, tags=["eagle3"])
    hub.add("quant/Big-8B-GGUF", target_config(), card=for_target)
    hub.add("merge/Big-8B-mtp-merge", target_config(), card=for_target)


def test_candidates_have_an_order_and_reasons(hub: FakeHub) -> None:
    add_repositories(hub)
    found, notes = search_hub(TARGET)
    assert not notes
    assert [one.repository.name for one in found] == [
        "odd/fast-draft", "them/Big-8B-speculator.eagle3", "us/big-8b-eagle3", "z/Big-8B-DFlash-b16",
    ]  # fmt: skip
    linked, verifier, named, block = found
    assert verifier.reasons[0] == "its configuration names the target as its verifier"
    assert verifier.draft == "eagle3:them/Big-8B-speculator.eagle3"
    assert verifier.domains == ("code",) and linked.domains == ("law",)
    assert linked.reasons[1] == "its card names the target as its base model"
    assert named.reasons[1] == "its name contains eagle3 and the target"
    assert named.draft == "eagle3:us/big-8b-eagle3"
    assert block.draft == "" and "descendant of DFlash" in block.as_dict()["reason"]
    assert "model.safetensors" not in hub.sent, "only configurations are read"


def test_search_by_name_and_by_domain(hub: FakeHub) -> None:
    add_repositories(hub)
    assert "z/Big-8B-DFlash-b16" in [one.repository.name for one in search_hub("Big-8B")[0]]
    assert [one.repository.name for one in search_hub(TARGET, "code")[0]] == [
        "them/Big-8B-speculator.eagle3"
    ]
    assert [one.repository.name for one in search_hub(TARGET, "law")[0]] == ["odd/fast-draft"]
    assert search_hub("org/Unknown") == ([], [])


@pytest.mark.parametrize(
    ("name", "target", "score"),
    [
        ("a/EAGLE3-LLaMA3.1-Instruct-8B", "meta-llama/Llama-3.1-8B-Instruct", NAME),
        ("a/Qwen3-8B-DFlash-b16", "Qwen/Qwen3-8B", NAME),
        ("a/Qwen3-8B-speculator.eagle3", "Qwen3-8B", NAME),
        ("a/Llama-3.1-8B-Instruct-eagle3", "meta-llama/Llama-3.1-8B", NAME // 2),
        ("a/Qwen-8B-eagle3", "Qwen/Qwen3-8B", 0),
        ("a/Qwen3-80B-eagle3", "Qwen/Qwen3-8B", 0),
        ("a/eagle3", "org/", 0),
    ],
)
def test_similarity_of_a_name_and_a_target(name: str, target: str, score: int) -> None:
    assert _name_score(name, target) == score


def test_an_unreachable_hub(hub: FakeHub, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    hub.status = 503
    with pytest.raises(LoadError, match=r"search needs the network, .*503"):
        search_hub(TARGET)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(LoadError, match=r"search needs the network, .*cannot be reached"):
        search_hub(TARGET)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(LoadError, match=r"search needs the network, .*HF_HUB_OFFLINE is set"):
        search_hub(TARGET)


MALFORMED = [
    {"id": "../../etc/passwd"},
    {"id": 5},
    {"id": "a/b-Big-8B-eagle3", "tags": "eagle3", "cardData": [1], "sha": 7, "downloads": "many"},
    {"id": "a/b-Big-8B-eagle3", "siblings": [{"rfilename": "../x", "size": -1}, {"rfilename": 3}]},
    {"id": "a/b-Big-8B-eagle3", "siblings": 5},
    {
        "id": "a/b-Big-8B-eagle3",
        "cardData": {"base_model": {"a": 1}, "domains": [[], 5, "x" * 9000]},
    },
    [],
    "text",
]


@pytest.mark.parametrize("listing", MALFORMED, ids=lambda listing: json.dumps(listing)[:40])
def test_malformed_listings_are_skipped(hub: FakeHub, listing: object) -> None:
    """A malformed entry affects at most its own query, with a note of one line."""
    add_repositories(hub)
    hub.files["a/b-Big-8B-eagle3"] = {"config.json": b"{}"}
    hub.listings["a/b-Big-8B-eagle3"] = listing
    hub.tags["a/b-Big-8B-eagle3"], hub.cards["a/b-Big-8B-eagle3"] = [], {}
    found, notes = search_hub(TARGET)
    assert "z/Big-8B-DFlash-b16" in [one.repository.name for one in found]
    assert all("\n" not in note and len(note) < 400 for note in notes)
    json.dumps([one.as_dict() for one in found])
    assert not any(".." in one.repository.name for one in found)
