"""A drafter to the Hub, with a card that says what the Hub can be searched for: whose drafter it
is, and for what.

What is uploaded is put together in a directory of its own: the drafter's stays as it is.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.catalogue import far
from forerun.catalogue.facts import CARD, Facts, card_of, facts_at
from forerun.catalogue.here import trained
from forerun.catalogue.layout import refusal
from forerun.catalogue.memory import Measurement
from forerun.draft.registry import Json, inner
from forerun.errors import ConfigError, LoadError, one_line
from forerun.models.files import read_text
from forerun.models.hub import DEFAULT, DEFAULT_REPOSITORY

FILES = (
    "*.safetensors", "model.safetensors.index.json", "config.json", "generation_config.json", "training.json",
    "tokenizer*.json", "tokenizer.model", "vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja",
)  # fmt: skip
LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]{0,60}")
DOMAIN = re.compile(r"[\w][\w .+-]{0,60}")


@dataclass(frozen=True, slots=True)
class Parcel:
    """What is to be uploaded.

    Attributes:
        directory, repository: from where, to where.
        files: names and bytes, those of the card and the configuration not counted.
        texts: what is written for the Hub: its name to its text.
        metadata: of the card.
        notes: what somebody should know before it is uploaded.
    """

    directory: Path
    repository: str
    files: dict[str, int]
    texts: dict[str, str]
    metadata: Json
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        names = sorted({*self.files, *self.texts})
        return {
            "repository": self.repository,
            "files": names,
            "metadata": self.metadata,
            "notes": list(self.notes),
        }


def pack(
    directory: Path, repository: str, target: str | None, license_: str | None, domains: Sequence[str]
) -> Parcel:  # fmt: skip
    """See that a directory holds a drafter, and put together what the Hub is to get. Nothing is
    uploaded.

    Args:
        target: its Hub id; without it the one that the drafter names.
        license_: as the Hub writes it, mit or apache-2.0, say; without it the one on its card.
        domains: kinds of text, besides those on its card.

    Raises:
        ConfigError: something is missing, or makes no sense.
        LoadError: the directory cannot be read.
    """
    if not far.REPOSITORY.fullmatch(repository) or ".." in repository:
        raise ConfigError(f"{one_line(repository)} is no Hub id: give ORG/NAME")
    if not (directory / "config.json").is_file():
        raise ConfigError(
            f"{directory} holds no drafter: it has no config.json; give what forerun train has written"
        )
    facts = facts_at(directory, str(directory))
    if reason := refusal(facts):
        raise ConfigError(f"{directory} holds no drafter that forerun can draft with: {reason}")
    files = {
        path.name: path.stat().st_size
        for glob in FILES
        for path in directory.glob(glob)
        if path.is_file()
    }
    if not any(name.endswith(".safetensors") for name in files):
        raise ConfigError(f"{directory} holds no *.safetensors, and nothing else is uploaded")
    base = _base(facts, target)
    metadata = _metadata(facts, base, _license(facts, license_), domains)
    texts = {CARD: _card(facts, metadata), **_config(facts, base)}
    return Parcel(
        directory, repository, files, texts, metadata, tuple(_notes(directory, files, texts))
    )


def push(parcel: Parcel, private: bool = True) -> str:
    """Upload a parcel, to a new repository or as a new commit to one that is there; its address.
    Raises LoadError."""
    from huggingface_hub import HfApi

    with tempfile.TemporaryDirectory(prefix="forerun-push-") as folder:
        for name in parcel.files:
            Path(folder, name).symlink_to((parcel.directory / name).resolve())
        for name, text in parcel.texts.items():
            Path(folder, name).unlink(missing_ok=True)
            Path(folder, name).write_text(text, encoding="utf-8")
        with far.asking(f"{parcel.repository} cannot be uploaded"):
            api = HfApi()
            made = api.create_repo(parcel.repository, private=private, exist_ok=True)
            api.upload_folder(
                repo_id=parcel.repository,
                folder_path=folder,
                commit_message=f"Drafter for {parcel.metadata['base_model']}",
            )
    return str(made)


def _base(facts: Facts, target: str | None) -> str:
    """The Hub id of the target."""
    named = target or facts.made_for
    named = DEFAULT_REPOSITORY if named == DEFAULT else named
    if not far.REPOSITORY.fullmatch(named) or (target is None and Path(named).exists()):
        said = (
            f"it was made for {named}, which is no Hub id"
            if named
            else "it does not say for which target it is"
        )
        raise ConfigError(f"{facts.name}: {said}; give --for ORG/MODEL")
    return named


def _license(facts: Facts, given: str | None) -> str:
    said = given or facts.card.get("license")
    if not isinstance(said, str) or not LICENSE.fullmatch(said.lower()):
        raise ConfigError(
            "the Hub wants a licence: give --license, such as apache-2.0; that of the target may bind you"
        )
    return said.lower()


def _metadata(facts: Facts, base: str, license_: str, domains: Sequence[str]) -> Json:
    """What stands above the card: what was there stays, where it is not known better."""
    for domain in domains:
        if not DOMAIN.fullmatch(domain):
            raise ConfigError(
                f"{one_line(domain)!r} is no kind of text: give a word, such as code or law"
            )
    kind, for_texts = (
        facts.kind,
        list(dict.fromkeys([*facts.domains, *(d.lower() for d in domains)])),
    )
    old = facts.card.get("tags")
    tags = [tag for tag in old if isinstance(tag, str)] if isinstance(old, list) else []
    tags += ["speculative-decoding", "draft-model", "forerun", kind.family]
    tags += ["speculators"] if kind.dialect == "speculators" else []
    tags += [f"domain:{domain}" for domain in for_texts]
    measured = [_figure(m) for m in trained(facts)]
    kept = {name: value for name, value in facts.card.items() if isinstance(name, str)}
    made: Json = {
        "base_model": base,
        "base_model_relation": "adapter",
        "library_name": "forerun",
        "license": license_,
    }
    made |= {"pipeline_tag": "text-generation", "tags": list(dict.fromkeys(tags))}
    made |= {"domains": for_texts} if for_texts else {}
    return kept | made | {"forerun": {"draft": kind.draft, "measured": measured}}


def _figure(m: Measurement) -> Json:
    said: Json = {
        "text": m.category,
        "accepted_length": round(m.accepted_length, 3),
        "depth": m.depth,
    }
    said |= {"temperature": m.temperature}
    return said | ({"times_plain": round(m.times_plain, 3)} if m.times_plain else {})


def _card(facts: Facts, metadata: Json) -> str:
    import yaml

    text = f"# Drafter for {metadata['base_model']}\n"
    if facts.path and (facts.path / CARD).is_file():
        text = card_of(read_text(facts.path / CARD, far.MOST_JSON))[1].lstrip("\n")
    return f"---\n{yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)}---\n\n{text}"


def _config(facts: Facts, base: str) -> dict[str, str]:
    """The configuration with the Hub id of its verifier, where it has one by another name: others
    look it up there."""
    own = inner(facts.raw, "speculators_config")
    if not isinstance(own.get("verifier"), dict) or own["verifier"].get("name_or_path") == base:
        return {}
    raw = facts.raw | {
        "speculators_config": own | {"verifier": own["verifier"] | {"name_or_path": base}}
    }
    return {"config.json": json.dumps(raw, indent=2) + "\n"}


def _notes(directory: Path, files: dict[str, int], texts: dict[str, str]) -> list[str]:
    """Names of directories of this machine that everybody could read."""
    read = dict(texts)
    if "training.json" in files:
        with suppress(LoadError):
            read["training.json"] = read_text(directory / "training.json")
    home = str(Path.home())
    return [
        f"{name} names {home}: whoever may read the repository sees it"
        for name in read
        if home in read[name]
    ]
