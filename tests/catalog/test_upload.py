"""Uploads contain the drafter and a card by which it is found, nothing else; bad input is
refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forerun.catalog.facts import card_of, facts_of
from forerun.catalog.search import search_hub
from forerun.catalog.transfer import prepare, upload
from forerun.errors import ConfigError, LoadError
from tests.catalog.hub import FakeHub, directory, eagle_config

TO = "me/Big-8B-eagle3"


def drafter(path: Path, card: str = "# Mine\n\nWords.\n", **changed: Any) -> Path:
    entry = {"task": "held-out", "temperature": 0.0, "depth": 4, "accepted_length": 2.5}
    training = {"target": "org/Big-8B", "measured": [entry | {"passes": 9}]}
    files = {".env": "secret", "notes.txt": "secret", "training.json": json.dumps(training)}
    return directory(path, eagle_config(**changed), card=card, **files)


def test_an_uploaded_drafter_is_found_by_the_search(hub: FakeHub, home: Path) -> None:
    before = drafter(home / "mine")
    prepared = prepare(before, TO, None, "Apache-2.0", ["Code", "code"])
    assert prepared.metadata["base_model"] == "org/Big-8B" and prepared.notes == ()
    assert upload(prepared).endswith(TO)
    assert hub.is_private() and hub.created[0]["name"] == "Big-8B-eagle3"
    sent = hub.uploaded[TO]
    assert set(sent) == {"README.md", "config.json", "model.safetensors", "training.json"}
    metadata, text = card_of(sent["README.md"].decode())
    assert text.strip() == "# Mine\n\nWords."
    assert metadata["license"] == "apache-2.0" and metadata["domains"] == ["code"]
    tags = {"speculative-decoding", "draft-model", "forerun", "eagle3", "speculators"}
    assert tags | {"domain:code"} <= set(metadata["tags"])
    assert metadata["library_name"] == "forerun" and metadata["base_model_relation"] == "adapter"
    figure = {"text": "held-out", "accepted_length": 2.5, "depth": "4", "temperature": 0.0}
    assert metadata["forerun"] == {"draft": "eagle3", "measured": [figure]}
    assert (before / "README.md").read_text() == "# Mine\n\nWords.\n", (
        "the directory stays as it is"
    )
    hub.add(TO, eagle_config(), card=metadata, tags=metadata["tags"])
    (found,), _ = search_hub("org/Big-8B", "code")
    assert found.repository.name == TO and found.score == 200


def test_a_public_upload_keeps_the_fields_of_its_card(hub: FakeHub, home: Path) -> None:
    card = "---\nlicense: mit\nlanguage: [en]\ntags: [mine]\ndomains: law\nbase_model: x/y\n---\n# Mine\n"
    prepared = prepare(drafter(home / "mine", card), TO, "them/Big-8B", None, ["code"])
    upload(prepared, private=False)
    metadata, text = card_of(hub.uploaded[TO]["README.md"].decode())
    assert (metadata["license"], metadata["language"]) == ("mit", ["en"])
    assert metadata["domains"] == ["law", "code"] and metadata["tags"][0] == "mine"
    assert metadata["base_model"] == "them/Big-8B" and text.strip() == "# Mine"
    config = json.loads(hub.uploaded[TO]["config.json"])
    assert config["speculators_config"]["verifier"]["name_or_path"] == "them/Big-8B"
    assert not hub.is_private()


def test_notes_name_files_that_contain_the_home_directory(home: Path) -> None:
    mine = drafter(home / "mine", f"# Made of {home}/texts\n")
    notes = prepare(mine, TO, None, "mit", []).notes
    assert [note.split()[0] for note in notes] == ["README.md"]


def test_invalid_uploads_are_refused(home: Path) -> None:
    mine = drafter(home / "mine")
    for args, text in (
        ((mine, "no-id", None, "mit", []), "is no Hub id"),
        ((mine, "a/../b", None, "mit", []), "is no Hub id"),
        ((mine, TO, None, None, []), "give --license"),
        ((mine, TO, None, "my own!", []), "give --license"),
        ((mine, TO, "not-an-id", "mit", []), "give --for"),
        ((mine, TO, None, "mit", ["a\nb"]), "no kind of text"),
        ((home, TO, None, "mit", []), "no config.json"),
        ((drafter(home / "a", verifier=None), TO, None, "mit", []), "it names no target"),
        ((drafter(home / "b", verifier="/srv/model"), TO, None, "mit", []), "made for /srv/model"),
        (
            (drafter(home / "c", speculators_model_type="xpress"), TO, None, "mit", []),
            "no drafter that forerun",
        ),
    ):
        with pytest.raises(ConfigError, match=text):
            prepare(*args)
    (mine / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        prepare(mine, TO, None, "mit", [])


def test_a_refusal_of_the_hub_is_an_error(hub: FakeHub, home: Path) -> None:
    prepared = prepare(drafter(home / "mine"), TO, None, "mit", [])
    hub.status = 403
    with pytest.raises(LoadError, match=r"cannot be uploaded: .*403"):
        upload(prepared)


def test_the_bundled_drafter_can_be_prepared_for_upload() -> None:
    from forerun.draft.kinds import BUNDLED

    (bundled,) = BUNDLED.iterdir()
    prepared = prepare(bundled, "me/x", None, "apache-2.0", [])
    assert prepared.metadata["base_model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert "config.json" in prepared.texts
    assert facts_of(str(bundled)).made_for == "SmolLM2-135M-Instruct"
