"""The search on a Hub: what is found and why, in which order, and what is not; failures of some or
all questions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forerun.catalogue.found import NAME, _likeness, search
from forerun.errors import LoadError
from tests.catalogue.hub import FakeHub, eagle_config, eagle_shapes, target_config

TARGET = "org/Big-8B"


def stocked(hub: FakeHub) -> None:
    hub.add(TARGET, target_config())
    hub.add(
        "them/Big-8B-speculator.eagle3",
        eagle_config(),
        eagle_shapes(),
        {"domains": ["Code"]},
        ["speculators"],
    )
    hub.add(
        "us/big-8b-eagle3",
        {"architectures": ["LlamaForCausalLMEagle3"]},
        card={"base_model": TARGET},
    )
    hub.add(
        "z/Big-8B-DFlash-b16",
        {"architectures": ["DFlashDraftModel"], "dflash_config": {"projector_type": "domino"}},
    )
    hub.add(
        "odd/fast-draft", eagle_config(), card={"base_model": TARGET}, tags=["eagle3", "domain:law"]
    )
    hub.add(
        "other/Big-8B-eagle3-chat",
        eagle_config("org/Other-8B"),
        card={"base_model": TARGET},
        tags=["eagle3"],
    )
    hub.add("quant/Big-8B-GGUF", target_config(), card={"base_model": TARGET})
    hub.add("merge/Big-8B-mtp-merge", target_config(), card={"base_model": TARGET})


def test_what_is_found_and_why(hub: FakeHub) -> None:
    stocked(hub)
    found, notes = search(TARGET)
    assert not notes
    assert [one.at.name for one in found] == [
        "odd/fast-draft", "them/Big-8B-speculator.eagle3", "us/big-8b-eagle3", "z/Big-8B-DFlash-b16",
    ]  # fmt: skip
    linked, verifier, named, block = found
    assert verifier.reasons[0] == "its configuration names the target as its verifier"
    assert verifier.draft == "eagle3:them/Big-8B-speculator.eagle3" and verifier.domains == (
        "code",
    )
    assert linked.reasons[
        1
    ] == "its card says that its base model is the target" and linked.domains == ("law",)
    assert (
        named.reasons[1] == "its name says eagle3 and the target"
        and named.draft == "eagle3:us/big-8b-eagle3"
    )
    assert block.draft == "" and "descendant of DFlash" in block.as_dict()["reason"]
    assert "model.safetensors" not in hub.sent, "only configurations are read"


def test_by_name_alone_and_by_domain(hub: FakeHub) -> None:
    stocked(hub)
    assert "z/Big-8B-DFlash-b16" in [one.at.name for one in search("Big-8B")[0]]
    assert [one.at.name for one in search(TARGET, "code")[0]] == ["them/Big-8B-speculator.eagle3"]
    assert [one.at.name for one in search(TARGET, "law")[0]] == ["odd/fast-draft"]
    assert search("org/Unheard-Of") == ([], [])


@pytest.mark.parametrize(
    ("name", "target", "worth"),
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
def test_what_a_name_is_worth(name: str, target: str, worth: int) -> None:
    assert _likeness(name, target) == worth


def test_without_a_network(hub: FakeHub, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    hub.status = 503
    with pytest.raises(LoadError, match=r"search needs the network, .*503"):
        search(TARGET)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(LoadError, match=r"search needs the network, .*cannot be reached"):
        search(TARGET)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(LoadError, match=r"search needs the network, .*HF_HUB_OFFLINE is set"):
        search(TARGET)


HOSTILE = [
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


@pytest.mark.parametrize("listing", HOSTILE, ids=lambda listing: json.dumps(listing)[:40])
def test_answers_of_any_type(hub: FakeHub, listing: object) -> None:
    """One odd entry spoils its own answer at most, and is told in one line."""
    stocked(hub)
    hub.files["a/b-Big-8B-eagle3"] = {"config.json": b"{}"}
    hub.listings["a/b-Big-8B-eagle3"] = listing
    hub.tags["a/b-Big-8B-eagle3"], hub.cards["a/b-Big-8B-eagle3"] = [], {}
    found, notes = search(TARGET)
    assert "z/Big-8B-DFlash-b16" in [one.at.name for one in found]
    assert all("\n" not in note and len(note) < 400 for note in notes)
    json.dumps([one.as_dict() for one in found])
    assert not any(".." in one.at.name for one in found)
