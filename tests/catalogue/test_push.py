"""What goes to the Hub: the drafter, a card by which it is found, nothing else; and what is refused
before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forerun.catalogue.facts import card_of, facts_of
from forerun.catalogue.found import search
from forerun.catalogue.push import pack, push
from forerun.errors import ConfigError, LoadError
from tests.catalogue.hub import FakeHub, eagle_config, eagle_shapes, safetensors

TO = "me/Big-8B-eagle3"


def drafter(directory: Path, card: str = "# Mine\n\nWords.\n", **changed: object) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(eagle_config(**changed)))
    (directory / "model.safetensors").write_bytes(safetensors(eagle_shapes()))
    (directory / "README.md").write_text(card)
    entry = {
        "task": "held-out",
        "temperature": 0.0,
        "depth": 4,
        "accepted_length": 2.5,
        "passes": 9,
    }
    (directory / "training.json").write_text(
        json.dumps({"target": "org/Big-8B", "measured": [entry]})
    )
    (directory / ".env").write_text("secret")
    (directory / "notes.txt").write_text("secret")
    return directory


def test_it_is_uploaded_and_found(hub: FakeHub, home: Path) -> None:
    before = drafter(home / "mine")
    parcel = pack(before, TO, None, "Apache-2.0", ["Code", "code"])
    assert parcel.metadata["base_model"] == "org/Big-8B" and parcel.notes == ()
    assert push(parcel).endswith(TO)
    assert hub.is_private() and hub.made[0]["name"] == "Big-8B-eagle3"
    sent = hub.uploaded[TO]
    assert set(sent) == {"README.md", "config.json", "model.safetensors", "training.json"}
    metadata, text = card_of(sent["README.md"].decode())
    assert (
        text.strip() == "# Mine\n\nWords."
        and metadata["license"] == "apache-2.0"
        and metadata["domains"] == ["code"]
    )
    assert {
        "speculative-decoding",
        "draft-model",
        "forerun",
        "eagle3",
        "speculators",
        "domain:code",
    } <= set(metadata["tags"])
    assert metadata["library_name"] == "forerun" and metadata["base_model_relation"] == "adapter"
    figure = {"text": "held-out", "accepted_length": 2.5, "depth": "4", "temperature": 0.0}
    assert metadata["forerun"] == {"draft": "eagle3", "measured": [figure]}
    assert (before / "README.md").read_text() == "# Mine\n\nWords.\n", (
        "the directory stays as it is"
    )
    hub.add(TO, eagle_config(), card=metadata, tags=metadata["tags"])
    (found,), _ = search("org/Big-8B", "code")
    assert found.at.name == TO and found.score == 200


def test_public_and_what_a_card_had(hub: FakeHub, home: Path) -> None:
    card = "---\nlicense: mit\nlanguage: [en]\ntags: [mine]\ndomains: law\nbase_model: x/y\n---\n# Mine\n"
    parcel = pack(drafter(home / "mine", card), TO, "them/Big-8B", None, ["code"])
    push(parcel, private=False)
    metadata, text = card_of(hub.uploaded[TO]["README.md"].decode())
    assert (metadata["license"], metadata["language"], metadata["domains"]) == (
        "mit",
        ["en"],
        ["law", "code"],
    )
    assert (
        metadata["tags"][0] == "mine"
        and metadata["base_model"] == "them/Big-8B"
        and text.strip() == "# Mine"
    )
    config = json.loads(hub.uploaded[TO]["config.json"])
    assert config["speculators_config"]["verifier"]["name_or_path"] == "them/Big-8B"
    assert not hub.is_private()


def test_what_others_would_read_is_told(home: Path) -> None:
    directory = drafter(home / "mine", f"# Made of {home}/texts\n")
    assert [note.split()[0] for note in pack(directory, TO, None, "mit", []).notes] == ["README.md"]


def test_refusals(home: Path) -> None:
    directory = drafter(home / "mine")
    for given, text in (
        ((directory, "no-id", None, "mit", []), "is no Hub id"),
        ((directory, "a/../b", None, "mit", []), "is no Hub id"),
        ((directory, TO, None, None, []), "give --license"),
        ((directory, TO, None, "my own!", []), "give --license"),
        ((directory, TO, "not-an-id", "mit", []), "give --for"),
        ((directory, TO, None, "mit", ["a\nb"]), "no kind of text"),
        ((home, TO, None, "mit", []), "no config.json"),
        (
            (drafter(home / "a", verifier=None), TO, None, "mit", []),
            "does not say for which target",
        ),
        ((drafter(home / "b", verifier="/srv/model"), TO, None, "mit", []), "made for /srv/model"),
        (
            (drafter(home / "c", speculators_model_type="xpress"), TO, None, "mit", []),
            "no drafter that forerun",
        ),
    ):
        with pytest.raises(ConfigError, match=text):
            pack(*given)
    (directory / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        pack(directory, TO, None, "mit", [])


def test_a_hub_that_refuses(hub: FakeHub, home: Path) -> None:
    parcel = pack(drafter(home / "mine"), TO, None, "mit", [])
    hub.status = 403
    with pytest.raises(LoadError, match=r"cannot be uploaded: .*403"):
        push(parcel)


def test_the_bundled_one_could_be_pushed() -> None:
    from forerun.draft.registry import BUNDLED

    (directory,) = BUNDLED.iterdir()
    parcel = pack(directory, "me/x", None, "apache-2.0", [])
    assert (
        parcel.metadata["base_model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
        and "config.json" in parcel.texts
    )
    assert facts_of(str(directory)).made_for == "SmolLM2-135M-Instruct"
