"""Downloads follow the checks, fetch only needed files, and are found offline afterwards."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from forerun.catalog import transfer
from forerun.catalog.facts import facts_at, facts_of
from forerun.catalog.transfer import download, examine, files_to_download, target_of
from forerun.draft.kinds import kind_of
from forerun.errors import LoadError
from forerun.models.hub import find_model
from tests.catalog.hub import FakeHub, eagle_config, eagle_shapes, target_config

NAME = "org/Big-8B-eagle3"


def add_repositories(hub: FakeHub) -> None:
    hub.add("org/Big-8B", target_config(), tokenizer__json=b"{}")
    others = {"README.md": b"# Head", "evil.py": b"1", "pytorch_model.bin": b"2"}
    hub.add(NAME, eagle_config(), eagle_shapes(), **others)


def test_only_needed_files_are_downloaded_and_found_offline(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    add_repositories(hub)
    facts = facts_of(NAME)
    target, note = target_of(facts, None)
    assert target is not None and target.name == "org/Big-8B" and not note
    assert all(check.ok for check in examine(facts, target))
    place = download(facts)
    assert {path.name for path in place.iterdir()} == {
        "config.json",
        "model.safetensors",
        "README.md",
    }
    assert kind_of(place) == "eagle3"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert find_model(NAME) == place and facts_of(NAME).path == place


def test_pickled_weights_are_downloaded_if_there_are_no_others(hub: FakeHub) -> None:
    pickled = {"pytorch_model.bin": b"22", "training_args.bin": b"1"}
    hub.add(NAME, {"architectures": ["LlamaForCausalLMEagle3"]}, **pickled)
    facts = facts_of(NAME)
    assert files_to_download(facts.repository).keys() == {"config.json", "pytorch_model.bin"}
    assert facts.bytes == 2
    assert facts_at(download(facts), NAME).kind.draft == "eagle3"


def test_files_outside_the_repository_folder_are_not_written(hub: FakeHub, home: Path) -> None:
    add_repositories(hub)
    hub.files[NAME]["../../../../escaped.json"] = b"{}"
    hub.files[NAME]["sub/escaped.json"] = b"{}"
    download(facts_of(NAME))
    assert not list(home.rglob("escaped.json"))


def test_a_full_disk_is_reported_before_the_download(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_repositories(hub)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    facts = facts_of(NAME)
    with pytest.raises(LoadError, match="make room, or set HF_HUB_CACHE"):
        download(facts)
    assert not any("tree" in path for path in hub.requested)


def test_targets_that_are_unnamed_or_missing(hub: FakeHub) -> None:
    add_repositories(hub)
    hub.add("a/alone", eagle_config(None))
    hub.add("a/far", eagle_config("org/Gone"))
    reason = "it names no target: give --for TARGET to check it against one"
    assert target_of(facts_of("a/alone"), None) == (None, reason)
    target, note = target_of(facts_of("a/far"), None)
    assert target is None and "not checked against org/Gone" in note
    with pytest.raises(LoadError, match="no such repository"):
        target_of(facts_of("a/alone"), "org/Gone")


def test_tokens_are_compared_if_both_models_are_local(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests import tiny

    target, other = facts_of(str(tiny.repetitive())), facts_of(str(tiny.repetitive()))
    found = {check.name: check for check in examine(other, target)}
    assert found["vocabulary"].ok and found["size"].ok is False
    tokens = transfer._compare_tokens(other.path, target.path, transfer.sizes_of(target).vocab_size)
    assert tokens.ok and "every token" in tokens.text
